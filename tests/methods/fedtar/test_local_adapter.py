"""Reports beside the adapter as the site last trained it; all that travels stays what it is without that."""

from __future__ import annotations

import json
import re

import pytest
import torch
from hospital_site import HospitalSite, T, executor_of, write_site_files

from fedtar_flare.errors import ConfigError
from fedtar_flare.methods.fedtar.recipe import FedTARRecipe
from fedtar_flare.protocol.contract import HEAD_NAMES
from fedtar_flare.protocol.messages import version
from fedtar_flare.site.state import SiteState

KEPT = {"local_adapter": True}
HEAD = {"labeler": "synthetic", "shared": True}


@pytest.fixture(autouse=True)
def _environment(home, tmp_path, monkeypatch):
    write_site_files(tmp_path, home, monkeypatch)


def a_round(tmp_path, run_id, patient, last_alpha, r=1, w=None, fresh=True, diagnosis=HEAD):
    """The handshake and one round, whose last step enters with ``last_alpha``: answers, w_T, w_{T-1} and the update."""
    site = HospitalSite(tmp_path, patient=patient, diagnosis=diagnosis, fresh=fresh)
    if w is None:
        _, w = site.handshake(run_id)
    for t in range(1, T + 1):
        before = w
        told, update = site.train(w, r, t, run_id)
        assert told.status == "ok", told.reason
        w = {n: w[n] + (last_alpha if t == T else 0.5) * update[n] for n in w}
    closed, _ = site.close(w, r, evaluate=True, run_id=run_id)
    assert closed.status == "ok", closed.reason
    return closed, w, before, update


def rows(tmp_path, run_id, personal=True):
    """Scores of single reports after the round, as the site keeps them."""
    file = SiteState(tmp_path / "state", run_id, "site-1").folder / "report-scores-0001.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return {row["visit_id"]: row for row in found if row["personal"] is personal}


def test_reports_are_those_of_a_server_that_adds_the_site_s_own_step_whole(tmp_path):
    """w_{T-1} + Delta_k is what one site is given where alpha is 1; there the option changes nothing."""
    losses = {}
    for run, patient, alpha in (("kept", KEPT, 0.25), ("averaged", {}, 0.25), ("whole", {}, 1.0), ("both", KEPT, 1.0)):
        a_round(tmp_path, run, patient, alpha, diagnosis=None)
        losses[run] = torch.tensor([row["token_loss"] for _, row in sorted(rows(tmp_path, run).items())])
    for run in ("kept", "both"):
        torch.testing.assert_close(losses[run], losses["whole"], rtol=0, atol=1e-6)
    assert (losses["kept"] - losses["averaged"]).abs().max() > 1e-5


def test_what_travels_and_the_shared_adapter_alone_are_to_the_bit_as_without_it(tmp_path):
    (a, w, before, update), (b, x, _, other) = (
        a_round(tmp_path, run, patient, 0.25) for run, patient in (("kept", KEPT), ("averaged", {}))
    )
    assert all(torch.equal(update[n], other[n]) and torch.equal(w[n], x[n]) for n in w)
    assert {**a.numbers, "seconds": 0.0} == {**b.numbers, "seconds": 0.0}
    assert a.payload["t_numbers"] == b.payload["t_numbers"]
    assert a.payload["scores_generic"] == b.payload["scores_generic"]
    assert rows(tmp_path, "kept", personal=False) == rows(tmp_path, "averaged", personal=False)
    state = SiteState(tmp_path / "state", "kept", "site-1").read(version(1, T))[0]
    local = {n.removeprefix("local/"): value for n, value in state.items() if n.startswith("local/")}
    assert set(local) == {n for n in w if not re.fullmatch(HEAD_NAMES, n)} != set(w), "the head is the server's"
    for name, value in local.items():
        torch.testing.assert_close(value, before[name] + update[name], rtol=0, atol=1e-6)
    plain = SiteState(tmp_path / "state", "averaged", "site-1").read(version(1, T))[0]
    assert set(state) - set(plain) == {f"local/{n}" for n in local}
    assert all(torch.equal(state[n], plain[n]) for n in plain)


def test_a_second_round_goes_on_from_the_server_s_adapter_in_one_process_as_in_many(tmp_path):
    ends = []
    for run, patient, fresh in (("kept", KEPT, True), ("one", KEPT, False), ("averaged", {}, True)):
        _, w, *_ = a_round(tmp_path, run, patient, 0.25, fresh=fresh)
        ends.append(a_round(tmp_path, run, patient, 0.25, r=2, w=w, fresh=fresh))
    (a, x, *_), (b, y, *_), (_, z, *_) = ends
    assert a.payload["scores"] == b.payload["scores"]
    assert all(torch.equal(x[n], y[n]) and torch.equal(x[n], z[n]) for n in x)


def test_without_the_patient_part_there_is_no_other_adapter(tmp_path):
    plain, kept = (
        a_round(tmp_path, run, {"enabled": False} | own, 0.25)[0] for run, own in (("off", {}), ("on", KEPT))
    )
    assert plain.payload.get("scores") == kept.payload.get("scores")


def test_it_is_refused_where_nothing_is_shared_and_is_the_small_preset_s_alone():
    with pytest.raises(ConfigError, match=r"patient\.local_adapter: with method 'local_patient' there is no other"):
        executor_of("local_patient", preset="tiny", patient=KEPT)
    presets = {name: FedTARRecipe(preset=name).executor.resolved.patient for name in ("small", "paper")}
    assert presets["small"].local_adapter and not presets["paper"].local_adapter
    assert executor_of("fedtar", preset="tiny").resolved.patient.local_adapter is False
