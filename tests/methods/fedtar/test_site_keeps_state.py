"""What a site keeps between tasks: state that is lost, spoiled, stale or pruned, and what never leaves it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from hospital_site import HospitalSite, T, a_round, state_of, write_site_files

from fedtar_flare.protocol.messages import version
from fedtar_flare.protocol.tasks import HANDSHAKE
from fedtar_flare.runtime.report_site import ReportSite


@pytest.fixture(autouse=True)
def _environment(home, tmp_path, monkeypatch):
    write_site_files(tmp_path, home, monkeypatch)


def test_a_member_whose_state_is_lost_says_so_and_never_starts_anew(tmp_path):
    site = HospitalSite(tmp_path)
    _, w = site.handshake()
    a_round(site, w)
    state = state_of(tmp_path)
    resumed = {"member": True, "initial_site": "", "after": version(1, T)}
    assert site.handshake(**resumed)[0].status == "ok"
    shutil.rmtree(state.folder)
    for again in range(2):  # the first failure leaves nothing that the second would take for a state
        reply, weights = site.handshake(**resumed)
        assert reply.status == "error" and "no-site-state" in reply.reason and weights is None, again
        assert state.versions() == [] and str(tmp_path) not in reply.reason
    assert site.handshake(initial_site="", after=version(1, T))[0].status == "ok"  # one that joins begins anew
    assert state.versions() == [version(0, 0)]


def finite(state):
    return all(torch.isfinite(v).all() for name in state.versions() for v in state.read(name)[0].values())


def test_a_broadcast_too_large_to_learn_from_does_not_spoil_the_private_part(tmp_path):
    site = HospitalSite(tmp_path)
    _, w = site.handshake()
    site.train(w, 1, 1)
    state = state_of(tmp_path)
    good = state.read(version(1, 1))[0]
    reply, update = site.train({name: torch.full_like(value, 3e37) for name, value in w.items()}, 1, 2)
    assert reply.status == "error" and "non-finite" in reply.reason and update is None
    assert state.versions() == [version(0, 0), version(1, 1)] and finite(state)
    assert all(torch.equal(value, good[name]) for name, value in state.read(version(1, 1))[0].items())
    reply, update = site.train(w, 1, 2)
    assert reply.status == "ok", reply.reason
    clean = HospitalSite(tmp_path)
    clean.handshake("clean")
    clean.train(w, 1, 1, "clean")
    expected = clean.train(w, 1, 2, "clean")[1]
    assert all(torch.equal(update[name], expected[name]) for name in w), "as if it had never come"


def test_broadcasts_of_a_job_that_ended_in_mid_round_never_enter_the_t_numbers(tmp_path):
    site = HospitalSite(tmp_path)
    _, w = site.handshake()
    a_round(site, w)  # the job ends before it closes round 1
    site.handshake(member=True, initial_site="")
    moved = {name: value + 0.1 for name, value in w.items()}
    assert site.train(moved, 1, 2)[0].status == "ok"  # the resumed job's step 1 never reached this site
    reply, _ = site.close(moved, 1)
    assert reply.payload["t_numbers"] is None and reply.numbers["reports"] > 0


def test_the_best_round_s_private_part_outlives_pruning(tmp_path):
    site = HospitalSite(tmp_path, fresh=False, training={"local_steps": 1, "batch_size": 2})
    _, w = site.handshake()
    for r in range(1, 7):
        best = version(1, T) if r > 1 else ""
        for t in range(1, T + 1):
            assert site.train(w, r, t, keep=best)[0].status == "ok"
    versions = state_of(tmp_path).versions()
    assert version(1, T) in versions and version(2, T) not in versions and version(6, T) in versions


def test_scores_of_each_report_stay_in_the_site_s_state_for_its_owner_alone(tmp_path):
    site = HospitalSite(tmp_path)
    _, w = site.handshake(evaluate=True)
    w, _ = a_round(site, w)
    reply, tensors = site.close(w, 1, evaluate=True)
    folder = state_of(tmp_path).folder
    assert sorted(path.name for path in folder.glob("report-scores-*")) == [
        "report-scores-0000.jsonl",
        "report-scores-0001.jsonl",
    ]
    reports = reply.payload["scores"]["all"]["n"]
    for r in (0, 1):
        path = folder / f"report-scores-{r:04d}.jsonl"
        assert path.stat().st_mode & 0o777 == 0o600
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["personal"] for row in rows] == [True] * reports + [False] * reports
        assert all(row["patient_id"] not in str(reply) and row["visit_id"] not in str(reply) for row in rows)
    assert not tensors and set(reply.payload) == {"t_numbers", "scores", "scores_generic"}
    for name, personal in (("scores", True), ("scores_generic", False)):
        losses = [row["token_loss"] for row in rows if row["personal"] is personal]
        assert reply.payload[name]["all"]["token_loss"] == pytest.approx(sum(losses) / len(losses))


def test_a_task_out_of_its_place_is_refused_and_trained_weights_never_leave_in_a_handshake(tmp_path):
    site = HospitalSite(tmp_path)
    _, w = site.handshake()
    refused = site.run(HANDSHAKE, site.header("run", 1, 0, after=version(0, 0)))
    assert refused[0].status == "error" and refused[1] is None, "a handshake belongs to round 0"
    assert site.train(w, 1, 1)[0].status == "ok"
    reply, weights = site.handshake()
    assert reply.status == "error" and weights is None, "initial weights are asked for after training"
    assert site.handshake(initial_site="")[0].status == "ok"


def test_a_handshake_gives_weights_of_the_seed_or_none_even_in_a_process_that_has_trained(tmp_path, monkeypatch):
    site = HospitalSite(tmp_path, fresh=False)
    _, w = site.handshake()
    again, same = site.handshake()  # before any other task: the server had lost the first answer
    assert again.status == "ok" and all(torch.equal(same[name], w[name]) for name in w)
    with monkeypatch.context() as patched:  # trained, and then its task failed: nothing of it is on disk

        def fails(*_):
            raise OSError("no space left")

        patched.setattr(ReportSite, "save_private", staticmethod(fails))
        assert site.train(w, 1, 1)[0].status == "error"
    _, weights = site.handshake()
    assert weights is None or all(torch.equal(weights[name], w[name]) for name in w)
    pushed = {name: value + 1 for name, value in w.items()}
    asked = {"after": version(0, 0), "initial_site": site.name}
    reply, weights = site.run(HANDSHAKE, site.header("run", 0, 0, **asked), pushed)
    assert reply.status == "error" and weights is None, "weights do not come down where they are asked for"
    for later in ({"after": version(1, T)}, {"member": True}):
        reply, weights = site.handshake(**later)
        assert reply.status == "error" and "middle of a run" in reply.reason and weights is None, later
    site.close(w, 1)
    reply, weights = site.handshake()
    assert reply.status == "error" and weights is None, "a round was closed"
