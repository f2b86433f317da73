import itertools
import re

import pytest

from fedtar_flare.data.timeline import Timeline
from fedtar_flare.synthetic.build import report_of
from fedtar_flare.synthetic.course import CohortOptions, plan_patient
from fedtar_flare.synthetic.reading import changes_in, planted_changes
from fedtar_flare.synthetic.reports import BONES, State, write_report
from fedtar_flare.synthetic.styles import GENERIC, STYLES, style_of, wording_of
from fedtar_flare.synthetic.vocabulary import KINDS

OPTIONS = CohortOptions()


def planned_reports(style, share, n=80):
    """Reports of planned patients at site-<style>, all in one wording."""
    site = f"site-{style}"
    for number in range(n):
        patient = plan_patient(site, style, number, timeline=Timeline(3), seed=5, options=OPTIONS)
        for visit in patient.visits:
            yield report_of(patient, visit, share, style, OPTIONS)


def grams(texts, n=3):
    found = set()
    for text in texts:
        words = re.findall(r"\w+", text.lower())
        found |= set(zip(*(words[i:] for i in range(n)), strict=False))
    return found


@pytest.fixture(scope="module")
def styles():
    """Name of a style to its reports."""
    styles = {(h, r): list(planned_reports(h, r)) for h in range(1, 7) for r in (0.0, 1.0)}
    styles["generic"] = [write_report(GENERIC, {"nodule_left": State(1)}), write_report(GENERIC, {})]
    return styles


def test_reports_have_the_length_and_vocabulary_of_short_radiology_reports(styles):
    lengths = [len(text.split()) for texts in styles.values() for text in texts]
    assert min(lengths) >= 20 and max(lengths) <= 70
    assert 25 <= sum(lengths) / len(lengths) <= 45
    words = {word for texts in styles.values() for text in texts for word in re.findall(r"\w+", text.lower())}
    assert len(words) < 450


def test_styles_differ_strongly_in_wording(styles):
    phrases = {name: grams(texts) for name, texts in styles.items()}
    for (one, a), (two, b) in itertools.combinations(phrases.items(), 2):
        assert len(a & b) / min(len(a), len(b)) < 0.2, (one, two)


def test_age_group_changes_one_sentence():
    for wording in itertools.chain(*STYLES):
        young, old = (write_report(wording, {}, older=older).split(". ") for older in (False, True))
        assert len(young) == len(old)
        assert sum(a.rstrip(".") != b.rstrip(".") for a, b in zip(young, old, strict=True)) == 1
    assert write_report(GENERIC, {}, older=True) == write_report(GENERIC, {}, older=False)


def test_a_site_s_style_follows_from_its_name():
    numbered = {"site-1": 1, "site-6": 6, "site-7": 1, "hospital12": 6, "s0": 6, "7": 1}
    assert {site: style_of(site) for site in numbered} == numbered
    assert {style_of(f"hospital {chr(97 + i)}") for i in range(26)} == set(range(1, 7))


def test_every_style_has_words_for_every_kind():
    for wording in (GENERIC, *itertools.chain(*STYLES)):
        assert sorted(kind for kinds, _ in wording.sections for kind in kinds) == sorted([*KINDS, BONES])
        assert set(wording.sentences) == set(wording.sizes) == set(KINDS)
        assert all(len(words.split("|")) == 3 for words in [*wording.sizes.values(), wording.changes])


@pytest.mark.parametrize("second", [0.0, 1.0])
@pytest.mark.parametrize("style", range(2, 7))
def test_a_share_of_the_kinds_is_in_the_style_s_words(style, second):
    own, common = wording_of(style, second), wording_of(1, second)
    assert wording_of(style, second, 1.0) is own and wording_of(style, second, 0.0) == common
    for share in (0.3, 0.5, 0.8):
        mixed = wording_of(style, second, share)
        of_own = [k for k in KINDS if (mixed.sentences[k], mixed.sizes[k]) == (own.sentences[k], own.sizes[k])]
        assert len(of_own) == int(len(KINDS) * share)
        assert all(mixed.sentences[kind] == common.sentences[kind] for kind in KINDS if kind not in of_own)
        assert mixed.sections == (own if share >= 0.5 else common).sections


@pytest.mark.parametrize("style", range(len(STYLES) + 1))
def test_planted_changes_can_be_read_back_from_the_reports_of_every_style(style):
    seen = set()
    for number in range(40):
        patient = plan_patient("site-1", 1, number, timeline=Timeline(4), seed=5, options=OPTIONS)
        assert not planted_changes(patient.visits[0])
        for visit in patient.visits:
            texts = [report_of(patient, visit, share, style, OPTIONS) for share in (0.0, 0.3, 0.6, 1.0) if style]
            texts = texts or [write_report(GENERIC, visit.findings, resolved=visit.resolved, follow_up=True)]
            planted = planted_changes(visit)
            assert all(changes_in(text) == planted for text in texts), (planted, texts)
            seen |= {change.direction for change in planted}
    assert seen == {"new", "increased", "decreased", "resolved"}


def test_texts_without_change():
    for text in ("", "Follow-up.", "EMPHYSEMA: none.", "There is no new emphysema", "Emphysema."):
        assert changes_in(text) == frozenset()
