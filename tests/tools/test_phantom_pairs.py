"""Phantoms and texts of the warm start: what they show and say, and that they are no site's."""

import re
from functools import cache
from itertools import chain, product

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedtar_flare.data.cells import Timeline
from fedtar_flare.learning.comparison import CHANGES, NONE, UNCHANGED, UNKNOWN, stated_changes
from fedtar_flare.learning.labels import labeler
from fedtar_flare.synthetic.build import report_of
from fedtar_flare.synthetic.course import CohortOptions, plan_patient, stream
from fedtar_flare.synthetic.reading import findings_in
from fedtar_flare.synthetic.vocabulary import FINDINGS, KNOWN_FINDINGS, NEW_FINDINGS
from tools.corpus import corpus_report, text_corpus
from tools.phantom_pairs import phantom_patients

READER = labeler("synthetic")
WAYS = {"new": "new", "larger": "increased", "smaller": "decreased", "stable": "unchanged"}


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
    """Sentences of more words than a finding and its grade."""
    return {sentence.strip().lower() for text in texts for sentence in text.split(".") if len(words(sentence)) > 3}


def phantoms(n, seed, names=KNOWN_FINDINGS):
    return list(chain(*phantom_patients(n, seed, names)))


def test_patients_are_repeatable_and_their_reports_state_what_is_shown_and_what_became_of_it():
    again, more, others = ([phantom[1:] for phantom in phantoms(*drawn)] for drawn in ((2, 1), (3, 1), (2, 2)))
    assert again == more[:4] != others
    first = phantoms(8, 1)
    for before, now in zip(first[::2], first[1::2], strict=True):
        sizes = [[phantom.states[f].size if f in phantom.states else 0 for f in FINDINGS] for phantom in (before, now)]
        for phantom, levels in zip((before, now), sizes, strict=True):
            assert phantom.hu.dtype == np.int16 and phantom.hu.ndim == len(phantom.spacing_mm) == 3
            for text in phantom.reports + (phantom.compared or ()):
                assert READER.levels(text) == tuple(levels) and phantom.findings <= set(KNOWN_FINDINGS)
            for text in phantom.reports:
                assert stated_changes(text, levels, None, READER) == [UNKNOWN] * len(FINDINGS)
        ways = {f: WAYS[state.change] for f, state in now.states.items()}
        ways |= dict.fromkeys(before.findings - now.findings, "resolved")
        expected = [CHANGES.index(ways.get(f, "none")) for f in FINDINGS]
        assert before.compared is None and stated_changes("", sizes[1], sizes[0], READER) == expected
        for text in now.compared:
            words = stated_changes(text, sizes[1], None, READER)
            assert words == [UNKNOWN if change in (NONE, UNCHANGED) else change for change in expected], text
    np.testing.assert_array_equal(first[3].hu, phantoms(2, 1)[3].hu)


def test_texts_show_every_finding_and_word_and_share_no_sentence_with_a_site():
    pairs, corpus, site = phantoms(30, 0), text_corpus(2000, seed=0), site_reports()
    assert set().union(*(pair.findings for pair in pairs)) == set(KNOWN_FINDINGS)
    assert corpus == text_corpus(2000, seed=0) and corpus[:50] != text_corpus(50, seed=1)
    known = set(words(". ".join(corpus)))
    assert {word for text in (*site, *(pair.reports[0] for pair in pairs)) for word in words(text)} <= known
    assert not (sentences(pair.reports[0] for pair in pairs) | sentences(corpus)) & sentences(site)


def test_new_findings_are_in_texts_without_images_alone():
    read = [findings_in(text) for text in text_corpus(300, seed=0)]
    assert set().union(*read) >= set(NEW_FINDINGS)
    nouns = re.compile(r"pneumothorax|(?<!pleural )cavit|fibro|pericardial|pleural air|around the heart")
    texts = [text for pair in phantoms(15, 0) for text in pair.reports + (pair.compared or ())]
    assert not any(nouns.search(text.lower()) for text in texts)
    assert {*phantoms(1, 0, NEW_FINDINGS[:1])[0].findings} == {NEW_FINDINGS[0]}


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_reads_the_truth_back_in_the_corpus(seed):
    report, findings = corpus_report(stream("test", seed))
    assume("borderline" not in report.lower())  # a size in the corpus, a doubt to the rules
    assert findings_in(report) == findings
