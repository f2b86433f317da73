"""Attempts of a dishonest server, against a site's executor and its guard: what was tried, what must happen."""

import errno
import os
import shutil
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from hospital_site import T, write_site_files

from fedtar_flare.protocol.contract import CLOSE_ROUND, HANDSHAKE, TRAIN
from fedtar_flare.protocol.messages import HEADER, TaskHeader, version
from fedtar_flare.site import state as site_state
from fedtar_flare.site.state import SiteState
from fedtar_flare.testing import Hospital

TRAINING = {"local_steps": 1, "batch_size": 2}
RUN = "run"


class Trained:
    """A site after one honest round, whose run every attempt gets a copy of."""

    def __init__(self, folder):
        self.folder, self.site = folder, Hospital(folder, fresh=False, training=TRAINING)
        _, w = self.site.handshake(RUN)
        self.w = [w]
        for t in range(1, T + 1):
            _, update = self.site.train(self.w[-1], 1, t, RUN)
            self.w.append({name: self.w[-1][name] + 0.5 * update[name] for name in update})
        self.copies = 0

    def another(self):
        """Run id of a copy of the run, as it is on the disk now."""
        self.copies += 1
        run = f"copy-{self.copies}"
        shutil.copytree(self.folder / "state" / RUN, self.folder / "state" / run)
        return run

    def state(self, run):
        return SiteState(self.folder / "state", run, "site-1")

    def header(self, run, r, t, **more):
        return TaskHeader(**({**self.fields(run, r, t), **more}))

    def fields(self, run, r, t):
        header = asdict(TaskHeader("fedtar", "x", r, t, 9, T, version(r, max(0, t - 1))))
        return header | {"run_id": run}


@pytest.fixture(scope="module")
def trained(home, tmp_path_factory):
    patch, folder = pytest.MonkeyPatch(), tmp_path_factory.mktemp("hospital")
    torch.manual_seed(0)
    write_site_files(folder, home, patch)
    yield Trained(folder)
    patch.undo()


def size(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def raw(fields):
    """A header that this package's own class would not make."""
    return SimpleNamespace(to_meta=lambda: {HEADER: fields})


def one_value_more(w):
    first, *_ = w
    return w | {first: w[first] + torch.eye(w[first].numel())[3].view_as(w[first])}


def closes_a_round_from_other_weights(s, run):
    assert s.site.close(s.w[T], 1, run_id=run)[0].status == "ok"
    return s.site.close({name: value * 1.001 for name, value in s.w[T].items()}, 1, run_id=run)


def trains_without_end(s, run):
    for _ in range(2 * 9 * T + site_state.SPARE_TASKS):
        s.state(run).add_answered(TRAIN, version(1, T))
    return s.site.train(s.w[0], 1, 1, run)


def names_a_run(run_id):
    return lambda s, run: s.site.run(HANDSHAKE, raw(s.fields(run_id, 0, 0) | {"after": version(0, 0)}))


def trains_from(weights):
    """Step 2 of round 1 from what ``weights`` makes of the honest ones."""
    return lambda s, run: s.site.train(weights(s.w[1]), 1, 2, run)


NO_RUN = "run_id is none that a server makes"
FOREIGN = "not part of the agreed exchange"
ATTEMPTS = {  # what is done to (site, run), and the reason that the error gives
    "asks for trained weights": (lambda s, run: s.site.handshake(run), "middle of a run"),
    "asks for the weights that it sends": (
        lambda s, run: s.site.run(HANDSHAKE, s.header("new", 0, 0, after=version(0, 0), initial_site="site-1"), s.w[1]),
        "only those of the seed leave",
    ),
    "asks for initial weights of a resumed run": (
        lambda s, run: s.site.handshake(run, member=True, after=version(1, T)), "middle of a run",
    ),
    "asks in the middle of a round": (
        lambda s, run: s.site.run(HANDSHAKE, s.header(run, 1, 1, initial_site="site-1")),
        "may not be asked for in round 1",
    ),
    "counts in other time steps": (
        lambda s, run: s.site.run(HANDSHAKE, s.header(run, 0, 0, time_steps=1, after=version(0, 0))),
        "time steps are others",
    ),
    "trains in other time steps": (
        lambda s, run: s.site.run(TRAIN, s.header(run, 1, 1, time_steps=3), s.w[0]), "time steps are others",
    ),
    "scores everybody where it scored the test patients": (
        lambda s, run: s.site.run(CLOSE_ROUND, s.header(run, 1, T, after=version(1, T), score="all"), s.w[T]),
        "reports to score",
    ),
    "asks after the run's end": (
        lambda s, run: s.site.run(HANDSHAKE, raw(s.fields(run, 0, 0) | {"after": "0010-01"}), s.w[0]),
        "beyond the run's end",
    ),
    "a round beyond the last": (
        lambda s, run: s.site.run(TRAIN, raw(s.fields(run, 8, 1) | {"rounds": 7}), s.w[0]), "beyond its 7 rounds",
    ),
    "closes a round from other weights": (closes_a_round_from_other_weights, "closed already"),
    "closes a round from an earlier state": (
        lambda s, run: s.site.run(CLOSE_ROUND, s.header(run, 1, T, after=version(0, 0)), s.w[T]), "state after it",
    ),
    "closes a round at an earlier step, where repeats count anew": (
        lambda s, run: s.site.run(CLOSE_ROUND, s.header(run, 1, 0, after=version(1, T)), s.w[T]), "last step",
    ),
    "trains more often than any run": (trains_without_end, "no run needs more"),
    "steps along one value": (lambda s, run: s.site.train(one_value_more(s.w[0]), 1, 2, run), "few values"),
    "closes one value further": (lambda s, run: s.site.close(one_value_more(s.w[T - 1]), 1, run_id=run), "few values"),
    "junk of its own names": (trains_from(lambda w: {f"junk.{i}": torch.zeros(1000) for i in range(50)}), FOREIGN),
    "junk beside the exchange": (trains_from(lambda w: {**w, "junk": torch.zeros(100_000)}), FOREIGN),
    "weights of another shape": (trains_from(lambda w: dict.fromkeys(w, torch.zeros(100, 100))), "shape"),
    "more tensors than any exchange": (
        trains_from(lambda w: {f"t{i}": torch.zeros(1) for i in range(20_001)}), "the limit is 20000",
    ),
    "a task of another run": (lambda s, run: s.site.train(s.w[0], 1, 1, "never-heard-of"), "no-site-state"),
    "another method": (lambda s, run: s.site.run(TRAIN, s.header(run, 1, 1, method="fedavg"), s.w[0]), "of method"),
    "a run named participation.json": (names_a_run("participation.json"), NO_RUN),
    "a run of a long name": (names_a_run("x" * 65), NO_RUN),
}  # fmt: skip


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_an_attempt_gets_a_reason_and_nothing_else_and_leaves_nothing(trained, attempt):
    run = trained.another()
    before = size(trained.folder / "state")
    does, reason = ATTEMPTS[attempt]
    reply, tensors = does(trained, run)
    status = "abstain" if does is closes_a_round_from_other_weights else "error"
    assert (reply.status, tensors or None) == (status, None) and reason in reply.reason
    assert set(reply.numbers) <= {"seconds"} and not reply.payload
    assert str(trained.folder) not in reply.reason
    assert size(trained.folder / "state") < before + 20_000, "what came down was not kept"


def test_after_all_that_the_honest_run_goes_on(trained):
    closing, _ = trained.site.close(trained.w[T], 1, run_id=RUN)
    again, _ = trained.site.close(trained.w[T], 1, run_id=RUN)  # a repeated task gets the same answer
    assert closing.status == again.status == "ok" and closing.payload == again.payload
    assert closing.numbers["validation_loss"] == again.numbers["validation_loss"]
    reply, update = trained.site.train(trained.w[T], 2, 1, RUN)
    assert reply.status == "ok" and update.keys() == trained.w[0].keys()


def test_scores_are_told_of_one_set_of_weights_at_one_place_of_a_run(trained):
    run = trained.another()
    header = trained.header(run, 0, 0, after=version(1, T), evaluate=True, member=True)
    first, _ = trained.site.run(HANDSHAKE, header, trained.w[T])
    same, _ = trained.site.run(HANDSHAKE, header, trained.w[T])
    assert first.payload["scores"] == same.payload["scores"]
    elsewhere = trained.header(run, 0, 0, after=version(1, 77), evaluate=True, member=True)  # the same round
    for asked in (header, elsewhere):
        other, _ = trained.site.run(HANDSHAKE, asked, trained.w[0])
        assert other.status == "ok" and not {"scores", "scores_generic"} & set(other.payload)
    later = trained.header(run, 0, 0, after=version(2, T), evaluate=True, member=True)
    assert "scores" in trained.site.run(HANDSHAKE, later, trained.w[0])[0].payload
    closed, _ = trained.site.close(trained.w[T], 2, evaluate=True, run_id=run)  # of a round, two sets were told
    assert closed.status == "ok" and not {"scores", "scores_generic"} & set(closed.payload)


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["space", "write", "answered"])
def test_a_full_disk_has_a_reason_of_its_own(trained, monkeypatch, where):
    little = SimpleNamespace(disk_usage=lambda folder: SimpleNamespace(free=10_000_000))
    broken = {"space": (site_state, "shutil", little), "write": (site_state, "write_tensors", full)}
    run = trained.another()
    monkeypatch.setattr(*broken.get(where, (SiteState, "add_answered", full)))
    reply, update = trained.site.train(trained.w[0], 1, 1, run)
    assert reply.status == "error" and reply.reason == "the site's disk is full" and update is None


def test_without_room_for_the_audit_no_task_is_begun(trained, monkeypatch):
    from fedtar_flare.site import audit

    monkeypatch.setattr(audit, "try_to_write", full)
    monkeypatch.setattr(trained.site.executor, "perform", None)
    reply, _ = trained.site.train(trained.w[0], 1, 1, trained.another())
    assert reply.status == "error" and "audit" in reply.reason


def test_a_server_cannot_fill_a_site_with_runs(trained, monkeypatch):
    monkeypatch.setattr(site_state, "MAX_RUNS", 1)
    own = SiteState(trained.folder / "state", "one", "hospital")
    own.folder.mkdir(parents=True)
    own.require_capacity()  # a run that is there already goes on
    hospital = Hospital(trained.folder, name="hospital", simulated=False, training=TRAINING)
    assert "for simulations" in hospital.handshake(rounds_per_period=1)[0].reason, "a hospital has its own clock"
    reply, w = hospital.handshake("two")
    assert reply.status == "error" and "purge" in reply.reason and w is None
    assert not (trained.folder / "state" / "two").exists()


def test_a_reply_is_never_an_exception(trained):
    for meta in ({}, {HEADER: None}, {HEADER: []}, {HEADER: {"plugin": 3}}, {HEADER: {"run_id": RUN}}):
        reply, _ = trained.site.run(CLOSE_ROUND, SimpleNamespace(to_meta=lambda meta=meta: meta))
        assert reply.status == "error" and reply.round == -1
