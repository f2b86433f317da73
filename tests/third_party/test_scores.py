"""What a score and a labeler of another package can do, and what a hospital decides."""

from dataclasses import replace
from types import SimpleNamespace

import devices
import pytest
from hospital_site import write_site_files
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.metrics.registry import OWN, SCORES, _compute_foreign, scores_of
from fedtar_flare.metrics.reports import Reports
from fedtar_flare.metrics.score import Score
from fedtar_flare.runtime.results import check_scores
from fedtar_flare.site.site_file import read_site_file
from fedtar_flare.testing import Hospital

TEXTS = [("Port in place.", "Port in place."), ("No tube.", "A tube."), ("Pacemaker.", "Clear."), ("Clear.", "Clear.")]


def reports(min_cell=1, patients="aabc"):
    nothing = [frozenset()] * 4
    sides = zip(*TEXTS, strict=True)
    return Reports(patients, range(4), *sides, "chexpert-rules", [1.0] * 4, *[nothing] * 4, min_cell=min_cell)


@pytest.fixture
def announced(announce):
    announce(devices.LABELER, "labeler")
    return [announce(score, "score").name for score in (devices.OVERLAP, devices.DEVICES)]


def test_only_what_the_site_has_admitted_is_computed_and_none_takes_an_own_scores_place(announced, announce):
    own = scores_of(reports())
    announce(Score("bleu_4", "mine", lambda _: 1.0), "score")
    announce(replace(devices.LABELER, name="no_score"), "score")
    assert not own.keys() & {*announced} and {*announced} == {*SCORES} - {*OWN} and SCORES["bleu_4"] is OWN["bleu_4"]
    announce(Score("broken", "broken", lambda _: 1 / 0), "score")
    scores = scores_of(reports(), admitted=[*announced, "broken"])
    assert {name: scores[name] for name in own} == own and scores["broken"] is None
    # words in common: 3 of 3, 1 of 2, none and all; devices: 2 named, of 3 there, 2 of them rightly
    assert scores["word_overlap"] == (1 + 0.5 + 0 + 1) / 4 and scores["devices_f1"] == pytest.approx(4 / 5)
    assert scores_of(reports(min_cell=2), admitted=announced)["devices_f1"] is None, "each device is of one patient"


VALUES = st.floats(allow_nan=True, allow_infinity=True)


@settings(max_examples=40)
@given(value=VALUES, least=st.integers(1, 4), patients=st.sets(st.sampled_from("abcxyz")))
def test_whatever_it_gives_only_a_rounded_share_of_enough_patients_leaves(value, least, patients):
    score = replace(devices.OVERLAP, function=lambda _: value, concerned=lambda _: patients, most=2.0)
    score = replace(score, rounding=lambda value, n, least: value)
    left = _compute_foreign(score, reports(least), None)
    true = patients & {*"abc"}
    if left is None:
        assert len(true) < least or not 0 <= value <= 2
    else:
        assert 0 <= left <= 2 and len(true) >= least
        n = len(true) - len(true) % least
        assert least == 1 or left * n / 2 == pytest.approx(round(left * n / 2))


@pytest.mark.parametrize("named", ["word_overlay", "no_score"])
def test_a_site_file_names_those_that_are_installed(announced, announce, tmp_path, named):
    file = tmp_path / "fedtar.yaml"
    file.write_text(f"source: synthetic\nscores: [{named}]\n")
    announce(replace(devices.LABELER, name="no_score"), "score")
    with pytest.raises(ConfigError, match=f"score '{named}'"):
        read_site_file(file)
    file.write_text("source: synthetic\nscores: [word_overlap]\n")
    assert read_site_file(file).scores == ("word_overlap",)


def test_the_server_takes_it_within_its_bounds_and_names_one_that_is_not_installed_there(announced):
    def checked(**own):
        check_scores(reply := SimpleNamespace(payload={"scores": {"all": {"n": 4, **own}}}), 1)
        return reply.payload["scores"].all

    assert checked(word_overlap=0.5)["word_overlap"] == 0.5
    for own, words in (({"word_overlap": 1.5}, "0 to 1"), ({"x": 0}, "'x'")):
        with pytest.raises(ExchangeError, match=words):
            checked(**own)


@pytest.mark.slow
def test_a_hospital_sends_the_scores_that_it_lists(announced, tmp_path, home, monkeypatch):
    write_site_files(tmp_path, home, monkeypatch)
    with (tmp_path / "sites/site-1.yaml").open("a") as file:
        file.write("scores: [word_overlap]\n")
    site = Hospital(tmp_path, method="fedavg", fresh=False, model={"max_length": 8, "num_beams": 1})
    reply, _ = site.handshake(evaluate=True)
    assert reply.payload["scores"]["all"].keys() - OWN.keys() == {"n", "word_overlap"}
