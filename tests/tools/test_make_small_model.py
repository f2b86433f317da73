"""The command that makes the shipped model again, and the model that is shipped."""

import re
from functools import cache
from itertools import chain, product

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedtar_flare.data.cells import Timeline
from fedtar_flare.learning import diagnosis
from fedtar_flare.learning.comparison import CHANGES, NONE, UNCHANGED, UNKNOWN, stated_changes
from fedtar_flare.learning.labels import labeler
from fedtar_flare.learning.pretraining import write_reports
from fedtar_flare.methods.fedmrg.config import PROMPTS
from fedtar_flare.metrics.agreement import finding_f1
from fedtar_flare.metrics.language import report_statistics
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import ASSETS, preset
from fedtar_flare.synthetic.build import report_of
from fedtar_flare.synthetic.course import CohortOptions, plan_patient, stream
from fedtar_flare.synthetic.reading import findings_in
from fedtar_flare.synthetic.reports import GENERIC, STYLES, State, write_report
from fedtar_flare.synthetic.vocabulary import FINDINGS, KNOWN_FINDINGS, KNOWN_KINDS, NEW_FINDINGS, NEW_KINDS
from tools.corpus import corpus_report, text_corpus
from tools.make_small_model import HELD_OUT_SEED_STEP, main, phantoms, scores_of_sight
from tools.phantom_pairs import phantom_patients

SMALL = preset("small")


@pytest.fixture(scope="module")
def small():
    return build_model(SMALL)


def test_the_command_writes_a_model_and_heads_that_fit_it(tmp_path, capsys, monkeypatch):
    steps = [f"--{part}=2" for part in ("patients", "held-out", "sight", "writer", "presence")]
    start, out = ASSETS / "small", tmp_path / "out"
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "tokenizer.json").write_bytes((start / "tokenizer.json").read_bytes())
    arguments = ["--preset", "tiny", "--start", str(tmp_path / "start"), "--out", str(out), "--threads", "1"]
    assert main([*arguments, *steps]) == 0 and "changes F1" in capsys.readouterr().out
    config = preset("tiny", weights=str(out / "model.safetensors"), tokenizer=str(out / "tokenizer.json"))
    monkeypatch.setattr(diagnosis, "head_file", lambda name: str(out / "diagnosis.safetensors"))
    known = torch.tensor([name in KNOWN_FINDINGS for name in FINDINGS])
    for prompts in (PROMPTS["memory"], {"prompt_classes": "levels", "prompt_place": "memory"}):
        model = build_model(config)
        assert model.untrained == ()
        settings = {"labeler": "synthetic", "slices": 4, "seed": 0, "head_weights": "small", **prompts}
        diagnosis.extend(model, {"candidates": 1, "complete": False, "certain": 0.5, **settings})
        weight = model.diagnosis.head.weight.flatten(1)
        assert weight[known].any(1).all() and not weight[~known].any(), "nobody taught the new findings"


def test_the_small_model_sees_findings_degrees_and_changes_in_new_phantoms(small):
    held_out = phantoms(12, HELD_OUT_SEED_STEP + 7, SMALL, lambda line: None)
    texts, sight = write_reports(small, build_tokenizer(SMALL), held_out.images), build_model(SMALL)
    settings = {"labeler": "synthetic", "prompt_classes": "levels", "prompt_place": "memory", "head_weights": "small"}
    diagnosis.extend(sight, {"candidates": 1, "complete": False, "certain": 0.0, "seed": 0, **settings})
    clinical = finding_f1(list(map(frozenset, held_out.states)), [findings_in(text) for text in texts])
    assert report_statistics([reports[0] for reports in held_out.reports], texts).scores()["bleu_4"] > 0.7
    scores = scores_of_sight(sight, sight.diagnosis, held_out)
    assert clinical["finding_f1"] > 0.8 and scores["degrees right"] > 0.7 and scores["changes F1"] > 0.6, scores


def test_the_small_model_has_seen_no_new_finding_and_its_card_says_so(small):
    data = phantoms(5, HELD_OUT_SEED_STEP + 8, SMALL, lambda line: None, NEW_FINDINGS)
    texts = write_reports(small, build_tokenizer(SMALL), data.images)
    assert sum(bool(findings_in(text) & set(NEW_FINDINGS)) for text in texts) <= 1, texts
    card = " ".join((ASSETS / "small" / "README.md").read_text().split())
    knows, _, unseen = card.partition("It has seen no image of")
    assert all(kind in knows for kind in KNOWN_KINDS)
    assert all(kind.replace("_", " ") in unseen for kind in NEW_KINDS)


def test_no_report_of_a_site_is_longer_than_the_model_writes():
    tokenizer = build_tokenizer(preset("small", max_length=192))
    for new, wording in product(NEW_FINDINGS, (GENERIC, *chain(*STYLES))):
        worst = {name: State(2, "larger") for name in (*KNOWN_FINDINGS[2:6], new)}
        text = write_report(wording, worst, resolved=KNOWN_FINDINGS[:1], follow_up=True, older=True)
        assert len(tokenizer.encode(text)) <= SMALL.max_length, text


READER = labeler("synthetic")
WAYS = {"new": "new", "larger": "increased", "smaller": "decreased", "stable": "unchanged"}


@cache
def site_reports():
    options, reports = CohortOptions(), []
    for style, number in product(range(1, 7), range(60)):
        patient = plan_patient(f"site-{style}", style, number, timeline=Timeline(4), seed=0, options=options)
        reports += [report_of(patient, visit, share, style, options) for visit in patient.visits for share in (0, 1)]
    return reports


def words(text):
    return re.findall(r"\w+", text.lower())


def sentences(texts):
    """Sentences of more words than a finding and its grade."""
    return {sentence.strip().lower() for text in texts for sentence in text.split(".") if len(words(sentence)) > 3}


def phantom_pairs(n, seed, names=KNOWN_FINDINGS):
    return list(chain(*phantom_patients(n, seed, names)))


def test_patients_are_repeatable_and_their_reports_state_what_is_shown_and_what_became_of_it():
    again, more, others = ([phantom[1:] for phantom in phantom_pairs(*drawn)] for drawn in ((2, 1), (3, 1), (2, 2)))
    assert again == more[:4] != others
    first = phantom_pairs(8, 1)
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
    np.testing.assert_array_equal(first[3].hu, phantom_pairs(2, 1)[3].hu)


def test_texts_show_every_finding_and_word_and_share_no_sentence_with_a_site():
    pairs, corpus, site = phantom_pairs(30, 0), text_corpus(2000, seed=0), site_reports()
    assert set().union(*(pair.findings for pair in pairs)) == set(KNOWN_FINDINGS)
    assert corpus == text_corpus(2000, seed=0) and corpus[:50] != text_corpus(50, seed=1)
    known = set(words(". ".join(corpus)))
    assert {word for text in (*site, *(pair.reports[0] for pair in pairs)) for word in words(text)} <= known
    assert not (sentences(pair.reports[0] for pair in pairs) | sentences(corpus)) & sentences(site)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_reads_the_truth_back_in_the_corpus(seed):
    report, findings = corpus_report(stream("test", seed))
    assume("borderline" not in report.lower())  # a size in the corpus, a doubt to the rules
    assert findings_in(report) == findings
