"""What the controller refuses, records and goes on from: bad answers, absent sites, settings that cannot be."""

import pytest
import torch
from federation import Spoilt, T, federation, pair, run, sites

from fedtar_flare.protocol.contract import CLOSE_ROUND, HANDSHAKE, TRAIN
from fedtar_flare.protocol.messages import ERROR, Reply
from fedtar_flare.testing import FunctionFederation, QuadraticSite
from fedtar_flare.testing import last_checkpoint as last
from fedtar_flare.testing.federation import NAMES


def broken(spoil, task=TRAIN):
    """A site that does one thing wrong, in round 2 at step 1 or at the end."""

    def late(order, *answer):
        return spoil(order, *answer) if (order.round, order.step) in ((2, 1), (2, T)) else answer

    return Spoilt("site-b", late, task, [pair(4), None, pair(5)], samples=5)


@pytest.mark.parametrize("task", [TRAIN, CLOSE_ROUND])
def test_a_site_that_raises_or_reports_an_error_is_recorded_and_left_out(tmp_path, task):
    def raises(order, reply, tensors):
        raise RuntimeError("patient 17 is unreadable")

    for number, spoil in enumerate((raises, lambda o, r, t: (Reply(ERROR, o.round, o.step, "no disk"), None))):
        controller = federation(tmp_path / str(number), sites(**{"site-b": broken(spoil, task=task)}))
        events = run(controller)
        left_out = {e.round: e.left_out for e in events["outer"]}, {(e.round, e.step): e.absent for e in events["step"]}
        assert "site-b" in (left_out[1][2, 1] if task == TRAIN else left_out[0][2])
        assert events["end"][0].status == "completed"
        assert "patient 17" not in controller.record.path.read_text()


def test_an_answer_after_its_account_is_closed_changes_nothing(tmp_path):
    controller = federation(tmp_path, num_rounds=1)
    answers, original = [], controller.send_model

    def send(callback, **kwargs):
        original(callback=lambda model: answers.append((callback, model)) or callback(model), **kwargs)

    controller.send_model = send
    run(controller)
    (callback, model), before = answers[0], controller.record.path.read_text().splitlines()
    assert callback(model) is False
    *same, late = controller.record.path.read_text().splitlines()
    assert same == before and '"late"' in late


def test_a_member_of_a_resumed_run_is_told_that_it_must_have_its_state(tmp_path):
    members = []

    def noted(header, *answer):
        members.append(header.member)
        return answer

    noting = {name: Spoilt(name, noted, HANDSHAKE, [pair(4)] * T) for name in ("site-b", "site-c")}
    first = federation(tmp_path / "first", {"site-a": sites()["site-a"], "site-b": noting["site-b"]}, num_rounds=1)
    run(first)
    start = str(first.results_folder / "checkpoint")
    (event,) = run(federation(tmp_path / "second", sites(**noting), num_rounds=2, resume_from=start))["start"]
    assert event.sites == ["site-a", "site-b", "site-c"]
    assert members == [False, False, True]  # site-b; then site-c, new, before site-b


def test_a_disconnected_site_is_not_asked_and_comes_back(tmp_path):
    controller = federation(tmp_path)
    original = controller.send_model

    def send(**kwargs):
        original(**kwargs)
        changes = {(1, 1): {"site-b"}, (2, 1): set()}
        controller.disconnected = changes.get(controller.sent[-1][2:], controller.disconnected)

    controller.send_model = send
    events = run(controller)
    asked = {(r, t) for task, site, r, t in controller.sent if site == "site-b" and task == TRAIN}
    assert (1, 1) in asked and (1, 2) not in asked and (2, 1) not in asked and (2, 2) in asked
    left_out = {e.round: e.left_out for e in events["outer"]}
    assert "every step" in left_out[2]["site-b"] and "site-b" not in left_out[3]


def test_fewer_than_min_sites_stops_the_job_with_the_reason_and_abstaining_counts(tmp_path):
    events = run(federation(tmp_path / "abstains", min_sites=3))
    assert events["end"][0].status == "completed" and events["step"][1].abstained["site-b"] == "no visit"
    bad = broken(lambda o, r, t: (Reply(ERROR, o.round, o.step, "no disk"), None))
    controller = federation(tmp_path, sites(**{"site-b": bad}), min_sites=3)
    end = run(controller)["end"][0]
    assert end.status == "failed" and "no disk" in end.reason and controller.panics and last(controller).round == 1


@pytest.mark.parametrize("at", [(HANDSHAKE, 0, 0), (TRAIN, 1, 1), (TRAIN, 2, 2), (CLOSE_ROUND, 2, T)])
def test_an_abort_stops_at_once_and_saves_nothing_of_the_running_round(tmp_path, at):
    controller = federation(tmp_path)
    inner = controller.local_sites["site-b"]

    def aborting(task, order, weights):
        if (task, order.round, order.step) == at:
            controller.abort_signal.trigger(True)
        return inner(task, order, weights)

    controller.local_sites["site-b"] = aborting
    events = run(controller)
    assert events["end"][0].status == "aborted" and not controller.panics
    whole = [p.name for p in (controller.results_folder / "checkpoint").glob("round-*")]
    assert whole == ([] if at[1] < 2 else ["round-0001.safetensors"])
    assert not list(controller.results_folder.rglob("*.part")) and not (controller.results_folder / "updates").exists()
    assert all(sent[2:] <= at[1:] for sent in controller.sent)


def other(name):
    """A site of an earlier release, with another model."""

    def spoil(order, reply, tensors):
        reply.payload["versions"] = {"fedtar_flare": "0.0.1"}
        reply.payload["schema"][NAMES[0]] = [9, 9]
        return reply, tensors

    return Spoilt(name, spoil, HANDSHAKE, [None] * 3)


def test_a_site_that_differs_is_left_out_when_enough_others_agree_and_else_stops_the_job_with_a_table(tmp_path):
    events = run(federation(tmp_path / "enough", sites(**{"site-c": other("site-c")}), num_rounds=1))
    start = events["start"][0]
    assert start.sites == ["site-a", "site-b"] and events["end"][0].status == "completed"
    assert "fedtar_flare" in start.absent["site-c"] and NAMES[0] in start.absent["site-c"]
    end = run(federation(tmp_path, sites(**{"site-b": other("site-b")}), min_sites=3))["end"][0]
    assert end.status == "failed"
    assert all(word in end.reason for word in ("site-a", "site-b", "0.0.1", NAMES[0], "[9, 9]"))


def test_the_start_comes_from_the_first_site_or_the_next_that_can_or_a_checkpoint(tmp_path):
    first = federation(tmp_path / "a", num_rounds=1)
    run(first)
    assert not first.panics
    unread = {"site-a": lambda task, order, weights: (Reply(ERROR, -1, -1, "the server's fedtar_flare is 99.0"), None)}
    events = run(other := federation(tmp_path / "b", sites(**unread), num_rounds=1))
    assert events["start"][0].sites == ["site-b", "site-c"] and events["end"][0].status == "completed"
    assert events["start"][0].absent == {"site-a": "the server's fedtar_flare is 99.0"}
    assert other.exchange.progress()["sites"]["site-a"] == "absent: the server's fedtar_flare is 99.0"
    path = first.results_folder / "checkpoint" / "round-0001.safetensors"
    second = federation(tmp_path / "d", num_rounds=1, initial_checkpoint=str(path))
    run(second)
    assert not any(task == HANDSHAKE and r for task, _, r, _ in second.sent)
    assert not torch.equal(last(first).weights[NAMES[0]], last(second).weights[NAMES[0]])


HEAD = "diagnosis.head.weight"


def test_each_row_of_a_shared_head_is_the_mean_of_the_sites_that_say_something_in_it(tmp_path, monkeypatch):
    start = QuadraticSite("any", []).start() | {HEAD: torch.zeros(3, 2)}
    monkeypatch.setattr(QuadraticSite, "start", lambda self: start)

    def saying(name, rows, samples):
        """A site whose update of the head says something in these rows alone."""
        head = samples * torch.tensor(rows).float()[:, None].expand(3, 2)
        return Spoilt(name, lambda order, reply, tensors: (reply, tensors | {HEAD: head}), TRAIN, [pair(1)], samples)

    sites = {"a": saying("a", [1, 1, 0], 1), "b": saying("b", [0, 1, 0], 3)}
    controller = FunctionFederation(tmp_path, sites, num_rounds=1, time_steps=1, step_time_limit=5)
    controller.run()
    moved = sites["a"].received[1, 1][HEAD][:, 0]  # alpha of the one step is 1
    torch.testing.assert_close(moved, torch.tensor([1.0, (1 * 1 + 3 * 3) / 4, 0.0]))
