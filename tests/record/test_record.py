import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import cases

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.record.events import End, SiteValidation, Step, Validation
from fedtar_flare.record.log import RunRecord, best_round, read_events


def test_events_are_lines_of_strict_json_without_nan(tmp_path):
    record = RunRecord(tmp_path)
    record.write(Validation(round=1, loss=float("nan"), sites={"a": SiteValidation(validation_loss=float("inf"), n=2)}))
    record.write(End(status="completed"))
    text = record.path.read_text()
    assert "NaN" not in text and "Infinity" not in text
    validation, end = read_events(tmp_path)
    assert validation.loss is None and validation.sites["a"].validation_loss is None and validation.sites["a"].n == 2
    assert end.status == "completed"


def test_a_last_line_cut_off_is_left_out_and_a_broken_middle_is_an_error(tmp_path):
    record = RunRecord(tmp_path)
    record.write(Step(round=1, step=1))
    with record.path.open("a") as file:
        file.write('{"event": "st')
    assert len(read_events(tmp_path)) == 1
    record.path.write_text('{"event"\n{"event": "end"}\n')
    with pytest.raises(FedTARError, match="line 1"):
        read_events(tmp_path)
    with pytest.raises(FedTARError, match="not a run folder"):
        read_events(tmp_path / "elsewhere")


def rounds(*losses):
    """Rounds 1, 2, ... of site to loss, or to (loss, reports)."""
    pairs = [{s: v if isinstance(v, list) else (v, 10) for s, v in one.items()} for one in losses]
    return [
        Validation(round=r, sites={site: SiteValidation(validation_loss=loss, n=n) for site, (loss, n) in one.items()})
        for r, one in enumerate(pairs, 1)
    ]


@pytest.mark.parametrize(("losses", "best"), cases(__file__, "best_rounds.yaml"))
def test_the_best_round_compares_like_with_like(losses, best):
    assert best_round(rounds(*losses)) == best
    assert best_round([*rounds({"a": 0.5}, {"a": 0.7}), *rounds({"a": 0.9})]) == 2, "the later one of a repeated round"


LOSSES = st.dictionaries(st.sampled_from("abcd"), st.floats(0.01, 10), max_size=4)


@given(st.lists(LOSSES, min_size=1, max_size=8), st.integers(0, 2**32))
def test_a_further_round_becomes_the_best_or_changes_nothing(losses, seed):
    validations = rounds(*losses)
    for r in range(1, len(validations) + 1):
        assert best_round(validations[:r]) in (best_round(validations[: r - 1]), r)
    shuffled = random.Random(seed).sample(validations, len(validations))
    assert best_round(shuffled) == best_round(validations)
