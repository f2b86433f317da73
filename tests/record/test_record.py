import json

import pytest

from fedtar_flare.errors import FedTARError
from fedtar_flare.record.log import RunRecord, read_events, write_json


def test_events_are_lines_of_strict_json_without_nan(tmp_path):
    record = RunRecord(tmp_path)
    record.write("step", round=1, values=(1.0, float("nan")), nested={"1": {"loss": float("inf")}})
    record.write("end", status="completed")
    text = record.path.read_text()
    assert "NaN" not in text and "Infinity" not in text
    events = read_events(tmp_path)
    assert [e["event"] for e in events] == ["step", "end"]
    assert events[0]["values"] == [1.0, None] and events[0]["nested"]["1"]["loss"] is None


def test_a_last_line_cut_off_is_left_out_and_a_broken_middle_is_an_error(tmp_path):
    record = RunRecord(tmp_path)
    record.write("step", round=1)
    with record.path.open("a") as file:
        file.write('{"event": "st')
    assert len(read_events(tmp_path)) == 1
    record.path.write_text('{"event"\n{"event": "end"}\n')
    with pytest.raises(FedTARError, match="line 1"):
        read_events(tmp_path)
    with pytest.raises(FedTARError, match="not a run folder"):
        read_events(tmp_path / "elsewhere")


def test_json_is_replaced_whole(tmp_path):
    write_json(tmp_path / "m.json", {"a": float("nan")})
    assert json.loads((tmp_path / "m.json").read_text()) == {"a": None}
    assert [p.name for p in tmp_path.iterdir()] == ["m.json"]
