"""Phantoms and texts of the warm start: what they show and say, and that they are no site's."""

import re
from functools import cache
from itertools import product

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedtar_flare.data.cells import Timeline
from fedtar_flare.synthetic.build import report_of
from fedtar_flare.synthetic.course import CohortOptions, plan_patient, stream
from fedtar_flare.synthetic.reading import findings_in
from fedtar_flare.synthetic.vocabulary import KNOWN_FINDINGS, NEW_FINDINGS
from tools.corpus import corpus_report, text_corpus
from tools.phantom_pairs import generic_pairs


@cache
def site_reports():
    options, reports = CohortOptions(), []
    for style, number in product(range(1, 7), range(60)):
        patient = plan_patient(f"site-{style}", style, number, timeline=Timeline(4), seed=0, options=options)
        reports += [
            report_of(patient, visit, share, style, options) for visit in patient.visits for share in (0.0, 1.0)
        ]
    return reports


def words(text):
    return re.findall(r"\w+", text.lower())


def sentences(texts):
    return {sentence.strip().lower() for text in texts for sentence in text.split(".") if sentence.strip()}


def test_pairs_are_repeatable_and_show_what_they_say():
    for first, again in zip(generic_pairs(3, 1), generic_pairs(4, 1), strict=False):
        np.testing.assert_array_equal(first[0], again[0])
        assert first[1:] == again[1:]
        hu, spacing, report, styled, findings = first
        assert hu.dtype == np.int16 and hu.ndim == 3 and len(spacing) == 3
        assert findings_in(report) == findings_in(styled) == findings <= set(KNOWN_FINDINGS)
    assert next(generic_pairs(1, 2))[2:] != next(generic_pairs(1, 1))[2:]


def test_texts_show_every_finding_and_word_and_share_no_sentence_with_a_site():
    pairs, corpus, site = list(generic_pairs(60, 0)), text_corpus(2000, seed=0), site_reports()
    assert set().union(*(pair.findings for pair in pairs)) == set(KNOWN_FINDINGS)
    assert not any(re.search(r"\b(prior|previous|new|increased|resolved)\b", pair.report) for pair in pairs)
    assert corpus == text_corpus(2000, seed=0) and corpus[:50] != text_corpus(50, seed=1)
    known = set(words(". ".join(corpus)))
    assert {word for text in (*site, *(pair.report for pair in pairs)) for word in words(text)} <= known
    assert not (sentences(pair.report for pair in pairs) | sentences(corpus)) & sentences(site)


def test_new_findings_are_in_texts_without_images_alone():
    read = [findings_in(text) for text in text_corpus(300, seed=0)]
    assert set().union(*read) >= set(NEW_FINDINGS)
    nouns = re.compile(r"pneumothorax|(?<!pleural )cavit|fibro|pericardial|pleural air|around the heart")
    pairs = list(generic_pairs(30, 0))
    assert not any(nouns.search(text.lower()) for pair in pairs for text in (pair.report, pair.styled))
    (shown,) = (pair.findings for pair in generic_pairs(1, 0, NEW_FINDINGS[:1]) if pair.findings)
    assert shown == {NEW_FINDINGS[0]}


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_reads_the_truth_back_in_the_corpus(seed):
    report, findings = corpus_report(stream("test", seed))
    assume("borderline" not in report.lower())  # a size in the corpus, a doubt to the rules
    assert findings_in(report) == findings
