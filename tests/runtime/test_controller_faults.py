"""What a site that lies, fails or comes late does to a run: it is recorded, and the others go on."""

import errno
import os
from dataclasses import replace

import pytest
import torch
from federation import NAMES, LocalFederation, QuadraticSite, pair

from fedtar_flare.protocol.tasks import CLOSE_ROUND, HANDSHAKE, TRAIN
from fedtar_flare.record.events import End, Joined, Start, Step, Validation
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.runtime.aggregation import SpilledUpdates


class Spoilt(QuadraticSite):
    """Changes its answer to one task."""

    def __init__(self, name, spoil, task, samples=2):
        super().__init__(name, [pair(4), pair(5)], samples=samples, validation=pair(10))
        self.spoil, self.task = spoil, task

    def __call__(self, task, header, weights):
        reply, tensors = super().__call__(task, header, weights)
        return self.spoil(header, reply, tensors) if task == self.task else (reply, tensors)


def federation(folder, *others, **settings):
    sites = [QuadraticSite("site-a", [pair(1), pair(2)], samples=3, validation=pair(9)), *others]
    settings = {"num_rounds": 2, "time_steps": 2, "step_time_limit": 1} | settings
    return LocalFederation(folder, {site.name: site for site in sites}, **settings)


def run(controller):
    controller.run()
    return read_events(controller.results_folder)


def payload(**changes):
    return lambda header, reply, tensors: (replace(reply, payload={**reply.payload, **changes}), tensors)


def numbers(**changes):
    return lambda header, reply, tensors: (replace(reply, numbers={**reply.numbers, **changes}), tensors)


MALFORMED = {
    "counts that are text": (HANDSHAKE, payload(counts="many")),
    "counts without training": (HANDSHAKE, payload(counts={})),
    "no counts": (
        HANDSHAKE,
        lambda h, r, t: (replace(r, payload={k: v for k, v in r.payload.items() if k != "counts"}), t),
    ),
    "a schema that is a list": (HANDSHAKE, payload(schema=[1, 2])),
    "a schema of texts": (HANDSHAKE, payload(schema={"shapes": {"x": "wide"}, "dtype_up": "float32"})),
    "settings that are a number": (HANDSHAKE, payload(settings=3)),
    "a model that is text": (HANDSHAKE, payload(model="large")),
    "a text of 300,000 characters": (HANDSHAKE, payload(model={"note": "x" * 300_000})),
    "scores that are text": (HANDSHAKE, payload(scores={"all": {"bleu_4": "good"}})),
    "a field of its own": (HANDSHAKE, payload(reports=["no finding"])),
    "a text for a number": (TRAIN, numbers(samples="3")),
    "a list for a number": (TRAIN, numbers(train_loss=[1.0])),
    "NaN": (TRAIN, numbers(train_loss=float("nan"))),
    "scores of another form": (CLOSE_ROUND, payload(scores=[1, 2, 3])),
    "T numbers that overflow": (CLOSE_ROUND, payload(t_numbers=[1.7e308, 1.7e308])),
    "a loss that overflows": (TRAIN, numbers(first_loss=1e300)),
    "junk beside the scores": (CLOSE_ROUND, payload(scores={"steps": {"one": {"n": "many"}}, "all": {}})),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_reply_costs_its_site_and_nobody_else(tmp_path, case):
    task, spoil = MALFORMED[case]
    controller = federation(tmp_path, Spoilt("site-b", spoil, task))
    events = run(controller)
    assert of_kind(events, End)[0].status == "completed", of_kind(events, End)[0].reason
    accounts = {
        HANDSHAKE: [e.absent for e in of_kind(events, Start)],
        TRAIN: [e.refused | e.absent for e in of_kind(events, Step)],
    }
    for account in accounts.get(task, [e.left_out for e in of_kind(events, Validation)]):
        assert "site-b" in account and "no answer within" not in account["site-b"]
    assert (controller.results_folder / "report.html").is_file()


def test_a_full_disk_at_the_server_is_its_own_fault_and_ends_the_job(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SpilledUpdates, "add", full)
    end = of_kind(run(federation(tmp_path)), End)[0]
    assert end.status == "failed" and "No space left" in end.reason


def test_nobody_but_the_asked_site_chooses_the_start(tmp_path):
    pushed = {name: torch.full((3, 2), 7.0) for name in NAMES}
    controller = federation(tmp_path, Spoilt("site-b", lambda h, r, t: (r, pushed), HANDSHAKE), initial_site="site-a")
    start = of_kind(run(controller), Start)[0]
    assert start.sites == ["site-a"] and "nobody had asked" in start.absent["site-b"]


def test_a_site_weighs_no_more_than_the_visits_it_announced(tmp_path):
    honest = federation(
        tmp_path / "honest", QuadraticSite("site-b", [pair(4), pair(5)], samples=2, validation=pair(10))
    )
    run(honest)
    lying = federation(tmp_path / "lying", Spoilt("site-b", numbers(samples=10**9), TRAIN))
    run(lying)
    for name in NAMES:
        assert torch.equal(weights(honest)[name], weights(lying)[name])


def weights(controller):
    from fedtar_flare.runtime.checkpoint import CheckpointFolder

    return CheckpointFolder(controller.results_folder / "checkpoint").last()[0].weights


def test_an_answer_after_its_account_is_closed_changes_nothing(tmp_path):
    controller = federation(tmp_path, QuadraticSite("site-b", [pair(4), pair(5)], validation=pair(10)))
    kept = []
    original = controller.send_model

    def send(task_name, data, callback, **kwargs):
        original(task_name=task_name, data=data, callback=lambda m: kept.append((callback, m)) or callback(m), **kwargs)

    controller.send_model = send
    run(controller)
    callback, model = kept[0]
    before = len(controller.record.path.read_text().splitlines())
    assert callback(model) is False
    lines = controller.record.path.read_text().splitlines()
    assert len(lines) == before + 1 and '"late"' in lines[-1]


def test_a_site_that_comes_late_joins_at_the_next_round(tmp_path):
    late = QuadraticSite("site-b", [pair(4), pair(5)], samples=2, validation=pair(10))
    controller = federation(tmp_path, num_rounds=3)
    original = controller.strategy.one_round

    def one_round(w, r):
        controller.local_sites["site-b"] = late  # it connects while round 1 runs
        return original(w, r)

    controller.strategy.one_round = one_round
    events = run(controller)
    assert [(e.round, e.sites) for e in of_kind(events, Joined)] == [(2, ["site-b"])]
    assert [sorted(e.sites) for e in of_kind(events, Step)] == [["site-a"]] * 2 + [["site-a", "site-b"]] * 4


def test_a_member_of_a_resumed_run_is_told_that_it_must_have_its_state(tmp_path):
    headers = []

    def noted(header, reply, tensors):
        headers.append(header)
        return reply, tensors

    first = federation(tmp_path / "first", Spoilt("site-b", noted, HANDSHAKE), num_rounds=1)
    run(first)
    local = Spoilt("site-c", noted, HANDSHAKE)
    second = federation(
        tmp_path / "second",
        Spoilt("site-b", noted, HANDSHAKE),
        local,
        resume_from=str(first.results_folder / "checkpoint"),
    )
    start = of_kind(run(second), Start)[0]
    assert start.sites == ["site-a", "site-b", "site-c"]
    assert [header.member for header in headers] == [False, False, True]  # site-b; then site-c, new, before site-b


def test_replies_of_another_method_are_refused(tmp_path):
    controller = federation(tmp_path, Spoilt("site-b", lambda h, r, t: (replace(r, method="other"), t), TRAIN))
    steps = of_kind(run(controller), Step)
    assert all("method 'other'" in step.refused["site-b"] for step in steps)
