import pytest

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.record.events import End, Evaluation, SiteScores, SiteUpdate, SiteValidation, Start, Step, Validation
from fedtar_flare.record.log import RunRecord, read_events


def test_events_are_lines_of_strict_json_without_nan(tmp_path):
    record = RunRecord(tmp_path)
    record.write(Validation(round=1, loss=float("nan"), sites={"a": SiteValidation(validation_loss=float("inf"), n=2)}))
    record.write(End(status="completed"))
    text = record.path.read_text()
    assert "NaN" not in text and "Infinity" not in text
    validation, end = read_events(tmp_path)
    assert validation.loss is None and validation.sites["a"].validation_loss is None and validation.sites["a"].n == 2
    assert end.status == "completed"


def test_what_is_written_is_what_is_read(tmp_path):
    events = [
        Start(method="m", run_id="r", time_steps=2, rounds=1, sites=["a"], counts={"a": {"train": [1, 2]}}),
        Step(round=1, step=1, sites={"a": SiteUpdate(samples=3, train_loss=0.5)}, abstained={"b": "no visit"}),
        Evaluation(round=1, sites={"a": SiteScores(steps={1: {"n": 2, "cider": 0.1}}, all={"n": 2})}),
        End(status="failed", reason="a reason"),
    ]
    record = RunRecord(tmp_path)
    for event in events:
        record.write(event)
    assert read_events(tmp_path) == events


def test_unknown_events_and_fields_are_passed_over_and_a_wrong_type_names_its_line(tmp_path):
    record = RunRecord(tmp_path)
    record.path.write_text('{"event": "later"}\n{"event": "end", "status": "completed", "colour": "blue"}\n')
    assert [event.kind for event in read_events(tmp_path)] == ["end"]
    record.path.write_text('{"event": "step", "round": "first", "step": 1}\n{"event": "end", "status": "completed"}\n')
    with pytest.raises(FedTARError, match="line 1, event 'step': round"):
        read_events(tmp_path)


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
