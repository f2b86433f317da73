import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorded_runs import NORTH, SOUTH, edit, write_run

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.methods.fedtar.events import Outer, Residual
from fedtar_flare.record.events import Evaluation, Late, SiteScores, Start
from fedtar_flare.record.log import RunRecord
from fedtar_flare.reporting.page import page
from fedtar_flare.reporting.run import read_run


def test_cells_under_min_cell_and_the_cider_of_one_report_are_blank(tmp_path):
    run = read_run(write_run(tmp_path, min_cell=5))
    assert run.shown.sites[SOUTH].steps[3] == {"n": 3}
    one = SiteScores(steps={1: {"n": 1, "bleu_4": 0.5, "cider": 0.0, "token_loss": None}}, all={"n": 9, "cider": 1.0})
    RunRecord(tmp_path).write(Evaluation(round=4, sites={NORTH: one}, generic={NORTH: one}))
    final = read_run(tmp_path).shown
    assert final.sites[NORTH].steps[1] == final.generic[NORTH].steps[1] == {"n": 1}
    edit(tmp_path, "start", min_cell=1)
    final = read_run(tmp_path).shown
    for sites in (final.sites, final.generic):
        assert sites[NORTH].steps[1] == {"n": 1, "bleu_4": 0.5} and sites[NORTH].all == {"n": 9, "cider": 1.0}


def test_a_resumed_record_goes_on_and_a_repeated_event_counts_once(tmp_path):
    write_run(tmp_path, rounds=2, until="rounds")
    before = read_run(tmp_path).validations[1].loss
    write_run(tmp_path, rounds=4, first_round=2)
    run = read_run(tmp_path)
    every = [(r, t) for r in range(1, 5) for t in range(1, 4)]
    assert [(s.round, s.step) for s in run.steps] == [(s.round, s.step) for s in run.events(Residual)] == every
    assert [o.round for o in run.events(Outer)] == [1, 2, 3, 4] and run.validations[1].loss != before
    assert (run.start.first_round, run.start.rounds, run.status) == (1, 4, "completed")
    RunRecord(tmp_path).write(Late(site=NORTH, task="train"))
    assert read_run(tmp_path).status == "completed", "a late answer does not reopen a run, a start does"
    write_run(tmp_path, rounds=5, first_round=5, until="start")
    assert read_run(tmp_path).status == "unfinished"


def test_of_an_unknown_method_the_shared_events_are_read_and_shown(tmp_path):
    edit(write_run(tmp_path), "start", method="fedfuture")
    run = read_run(tmp_path)
    assert run.title == "fedfuture" and run.method_events == () and len(run.steps) == 9
    assert 'id="scores"' in page(run) and "alpha after" not in page(run)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=5)
@given(
    st.dictionaries(st.text(min_size=1).map(lambda name: f"x-{name}"), st.none() | st.integers() | st.text()),
    st.text(min_size=1).map(lambda name: f"x-{name}"),
)
def test_unknown_events_and_unknown_fields_are_passed_over(tmp_path, more, kind):
    folder = tmp_path / "run"
    (folder / "rounds.jsonl").unlink(missing_ok=True)
    write_run(folder, rounds=1)
    before = page(read_run(folder))
    path = folder / "rounds.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [json.dumps({"event": kind} | more)]
    for event in events:
        sites = {site: values | more for site, values in event["sites"].items()} if event["event"] == "step" else None
        lines += [json.dumps(event | more | ({"sites": sites} if sites else {})), json.dumps({"event": kind} | more)]
    path.write_text("\n".join(lines[:-1]) + "\n")
    assert page(read_run(folder)) == before


START = Start(method="fedtar", run_id="r", time_steps=3, rounds=3).model_dump() | {"event": "start"}
BROKEN = {
    b"": "",
    b'{"event": "greeting"}\n': "",
    b'{"epoch": 1}\n': "line 1",
    b"3\n4\n": "line 1",
    b'{"event": "step", "round": 1, "step": 1}\n': "'start'",
    b'{"event": "start"}\n': "line 1, event 'start': method",
    json.dumps(START | {"time_steps": 2.5}).encode(): "line 1, event 'start': time_steps",
    json.dumps(START | {"counts": {"a": 4}}).encode(): r"event 'start': counts\.a",
    b"\xff\xfe\x00": "",
}


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_record_is_refused_and_the_error_names_the_line_and_the_field(tmp_path, content):
    (tmp_path / "rounds.jsonl").write_bytes(content)
    with pytest.raises(FedTARError, match=BROKEN[content] or None):
        read_run(tmp_path)
