import json

import pytest
from recorded_runs import EAST, NORTH, RUN_ID, SITES, SOUTH, WEST, write_run

from fedtar_flare.errors import FedTARError
from fedtar_flare.record.log import RunRecord
from fedtar_flare.reporting.run import Exchange, read_run


def append(folder, **event):
    with (folder / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")


def test_a_whole_run_is_read_typed(tmp_path):
    run = read_run(write_run(tmp_path))
    assert (run.run_id, run.status, run.seconds) == (RUN_ID, "completed", 252.4)
    assert (run.time_steps, run.rounds, run.sites) == (3, 3, tuple(SITES))
    assert run.not_joined == {WEST: "no answer within 60 s"}
    assert run.exchange == Exchange(96, 71_680, 286_720, 1_985_408, 7_941_632)
    assert run.counts[NORTH]["train"][0] == run.steps[0].sites[NORTH].samples
    assert len(run.steps) == 9 and len(run.outers) == 3 and [e.round for e in run.evaluations] == [0, 1, 2, 3]
    assert [r for r, _ in run.alphas()] == [0, 1, 2, 3] and sum(run.alphas()[-1][1]) == pytest.approx(1)
    assert run.warm_start.round == 0 and run.final.round == 3 and run.best_round == 3


def test_every_asked_site_is_accounted_for_once_per_step(tmp_path):
    run = read_run(write_run(tmp_path, time_steps=4, rounds=2))
    for step in run.steps:
        account = [*step.sites, *step.abstained, *step.absent, *step.refused]
        assert sorted(account) == SITES
        assert step.skipped == (not step.sites)
        assert SOUTH in step.abstained if step.step == 4 else SOUTH not in step.abstained
    assert EAST in run.steps[1].absent and EAST in run.steps[4].refused


def test_a_record_that_names_those_who_abstained_is_taken_at_its_word(tmp_path):
    write_run(tmp_path, until="warm-start")
    RunRecord(tmp_path).write("step", round=1, step=1, sites={}, abstained={NORTH: "too few"}, absent={EAST: "late"})
    (step,) = read_run(tmp_path).steps
    assert (step.abstained, step.absent) == ({NORTH: "too few"}, {EAST: "late"})


def test_cells_under_min_cell_and_the_cider_of_one_report_are_blank(tmp_path):
    run = read_run(write_run(tmp_path, min_cell=5))
    assert run.min_cell == 5
    small = run.final.sites[SOUTH].steps[3]
    assert small.n == 3 and not small.scores
    one = {"n": 1, "bleu_4": 0.5, "cider": 0.0, "token_loss": None}
    RunRecord(tmp_path).write(
        "evaluation", round=4, sites={NORTH: {"steps": {"1": one}, "all": {"n": 9, "cider": 1.0}}}
    )
    assert not read_run(tmp_path).final.sites[NORTH].steps[1].scores
    text = (tmp_path / "rounds.jsonl").read_text().replace('"min_cell": 5', '"min_cell": 1')
    (tmp_path / "rounds.jsonl").write_text(text)
    cell = read_run(tmp_path).final.sites[NORTH].steps[1]
    assert cell.scores == {"bleu_4": 0.5} and read_run(tmp_path).final.sites[NORTH].all.scores == {"cider": 1.0}


@pytest.mark.parametrize(("until", "steps"), [("start", 0), ("warm-start", 0), ("step", 7), ("rounds", 9)])
def test_an_unfinished_run_with_its_last_line_cut_off(tmp_path, until, steps):
    write_run(tmp_path, until=until)
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"event": "step", "round": 3, "st')
    run = read_run(tmp_path)
    assert (run.status, run.seconds, len(run.steps)) == ("unfinished", None, steps)
    assert (run.warm_start is None) == (until == "start")
    assert run.final is None or run.final.round >= 1


def test_a_run_that_failed_in_the_handshake_has_an_end_alone(tmp_path):
    RunRecord(tmp_path).write("end", time="", seconds=1.5, status="failed", reason="the sites do not agree")
    run = read_run(tmp_path)
    assert (run.status, run.reason, run.sites, run.time_steps) == ("failed", "the sites do not agree", (), 0)


def test_a_resumed_record_goes_on_and_a_repeated_event_counts_once(tmp_path):
    write_run(tmp_path, rounds=2, until="rounds")
    write_run(tmp_path, rounds=4, first_round=2)
    run = read_run(tmp_path)
    assert [(s.round, s.step) for s in run.steps] == [(r, t) for r in range(1, 5) for t in range(1, 4)]
    assert (run.first_round, run.rounds, run.status) == (1, 4, "completed")


def test_the_run_folder_around_it_will_do(tmp_path):
    write_run(tmp_path / "fedtar", until="start")
    assert read_run(tmp_path).folder == tmp_path / "fedtar"


def test_what_is_not_a_record_of_ours_is_said_so(tmp_path):
    path = tmp_path / "rounds.jsonl"
    with pytest.raises(FedTARError, match=r"no rounds\.jsonl"):
        read_run(tmp_path)
    for content, message in (
        (b"", "no event of a run"),
        (b'{"event": "greeting"}\n', "no event of a run"),
        (b'{"epoch": 1}\n', "line 1: not an event"),
        (b"3\n4\n", "line 1: not an event"),
        (b'{"event": "step", "round": 1, "step": 1}\n', "no event 'start'"),
        (b'{"event": "start"}\n', "'time_steps' is missing"),
        (b'{"event": "start", "time_steps": 3, "rounds": 3, "alpha": "0.3"}\n', "'alpha' is not a list"),
        (b'{"event": "start", "time_steps": 3, "rounds": 3, "alpha": ["1"]}\n', "'alpha' holds"),
        (b'{"event": "start", "time_steps": 2.5, "rounds": 3}\n', "'time_steps' is 2.5"),
        (b'{"event": "start", "time_steps": 3, "rounds": 3, "counts": {"a": 4}}\n', "'a'.*named values"),
        (b"\xff\xfe\x00", "not text"),
    ):
        path.write_bytes(content)
        with pytest.raises(FedTARError, match=message):
            read_run(tmp_path)


def test_a_wrong_field_is_named_with_its_line(tmp_path):
    write_run(tmp_path, until="warm-start")
    append(tmp_path, event="outer", round=1, validation_loss="low")
    with pytest.raises(FedTARError, match=r"line 3, event 'outer': 'validation_loss' is 'low', not a number"):
        read_run(tmp_path)


def test_numbers_that_are_not_finite_are_not_known(tmp_path):
    write_run(tmp_path, until="warm-start")
    append(tmp_path, event="step", round=1, step=1, residual_norm=float("nan"), update_norm=float("inf"))
    append(tmp_path, event="outer", round=1, alpha_after=[0.5, None, 0.5], psi_grad_norm=None)
    run = read_run(tmp_path)
    assert run.steps[0].residual_norm is None and run.steps[0].update_norm is None
    assert run.outers[0].alpha_after == () and len(run.alphas()) == 1
