"""Reports beside the adapter as the site last trained it; all that travels stays what it is without that."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hospital_site import T, state_of

from fedtar_flare.core.settings import matches
from fedtar_flare.protocol.contract import HEAD_NAMES
from fedtar_flare.protocol.messages import version
from fedtar_flare.testing import Hospital

LOCAL = {"local_adapter": True}
SMALL = {"model": {"max_length": 8, "num_beams": 1}}
HEAD = {"labeler": "synthetic", "shared": True}


def rounds(place, run_id, patient, last_alpha=0.25, number=1, fresh=True, **settings):
    """Rounds whose last step enters with ``last_alpha``; of each the answer, w_T, w_{T-1}, update, state and scores."""
    site = Hospital(place, patient=patient, fresh=fresh, **SMALL, **settings)
    state, closed = state_of(place, run_id), []
    w = site.handshake(run_id)[1]
    for r in range(1, number + 1):
        for t in range(1, T + 1):
            before = w
            alpha = last_alpha if t == T else 0.5
            reply, update = site.train(w, r, t, run_id, alpha=alpha)
            assert reply.status == "ok", reply.reason
            w = {n: w[n] + alpha * update[n] for n in w}
        reply, _ = site.close(w, r, evaluate=True, run_id=run_id)
        private, started = (state.read(version(r, t))[0] for t in (T, T - 1))
        lines = (state.folder / f"report-scores-{r:04d}.jsonl").read_text().splitlines()
        scores = {(row["personal"], row["visit_id"]): row for row in map(json.loads, lines)}
        about = {"closed": reply, "w": w, "before": before, "update": update}
        closed.append(SimpleNamespace(**about, private=private, started=started, scores=scores))
    return closed


@pytest.fixture(scope="module")
def local(place):
    return rounds(place, "local", LOCAL, number=2, diagnosis=HEAD)


@pytest.fixture(scope="module")
def averaged(place):
    return rounds(place, "averaged", {}, number=2, diagnosis=HEAD)


@pytest.mark.slow
def test_reports_are_those_of_a_server_that_adds_the_site_s_own_step_whole(place):
    """w_{T-1} + Delta_k is what one site is given where alpha is 1."""
    losses = {}
    for run, patient, alpha in (("own", LOCAL, 0.25), ("mean", {}, 0.25), ("whole", {}, 1.0)):
        (end,) = rounds(place, run, patient, alpha, diagnosis={"labeler": "synthetic"})
        assert set(end.update) == set(end.w) and not any("diagnosis" in name for name in end.w)
        losses[run] = torch.tensor([row["token_loss"] for (on, _), row in sorted(end.scores.items()) if on])
    torch.testing.assert_close(losses["own"], losses["whole"], rtol=0, atol=1e-6)
    assert (losses["own"] - losses["mean"]).abs().max() > 1e-5


def test_what_travels_and_the_shared_adapter_alone_are_to_the_bit_as_without_it(local, averaged):
    for a, b in zip(local, averaged, strict=True):
        assert all(torch.equal(a.update[n], b.update[n]) and torch.equal(a.w[n], b.w[n]) for n in a.w)
        assert {**a.closed.numbers, "seconds": 0.0} == {**b.closed.numbers, "seconds": 0.0}
        assert a.closed.payload["t_numbers"] == b.closed.payload["t_numbers"]
        assert a.closed.payload["scores_generic"] == b.closed.payload["scores_generic"]
        assert all(row == b.scores[key] for key, row in a.scores.items() if not key[0])
        factors = {n.removeprefix("local/"): value for n, value in a.private.items() if n.startswith("local/")}
        assert set(factors) == {n for n in a.w if not matches(n, [HEAD_NAMES])} != set(a.w), "the head is the server's"
        for name, value in factors.items():
            torch.testing.assert_close(value, a.before[name] + a.update[name], rtol=0, atol=1e-6)
        assert set(a.private) - set(b.private) == {f"local/{n}" for n in factors}
        assert all(torch.equal(a.private[n], value) for n, value in b.private.items())


OWN_HEAD = {"labeler": "synthetic"}


@pytest.mark.slow
def test_what_stays_moves_by_the_alpha_of_its_step_where_the_job_says_so(place):
    """At the last step from the same start: alpha of it against all of it, in numpy; the update is the same."""
    under = {"temporal": {"personal": "alpha"}, "diagnosis": OWN_HEAD}
    (whole,), (part,), (none,) = (
        rounds(place, f"alpha-{alpha:.0%}".rstrip("%"), LOCAL, alpha, **under) for alpha in (1.0, 0.25, 0.0)
    )
    assert all(torch.equal(whole.update[n], part.update[n]) for n in whole.update)
    moved = [n for n in whole.private if n.startswith(("patient/", "diagnosis/"))]
    assert {n.split("/")[0] for n in moved} == {"patient", "diagnosis"}
    for name in moved:
        start, end = whole.started[name].double().numpy(), whole.private[name].double().numpy()
        assert (whole.started[name] == part.started[name]).all() and (none.private[name] == none.started[name]).all()
        np.testing.assert_allclose(part.private[name].double().numpy(), start + 0.25 * (end - start), atol=1e-7)
    assert any((whole.private[n] != whole.started[n]).any() for n in moved)
    for alpha, run in ((1.0, whole), (0.25, part), (0.0, none)):
        for name, value in run.before.items():
            expected = value.double().numpy() + alpha * run.update[name].double().numpy()
            np.testing.assert_allclose(run.private[f"local/{name}"].double().numpy(), expected, atol=1e-6)
    (plain,) = rounds(place, "alpha-off", LOCAL, 0.25, diagnosis=OWN_HEAD)
    assert any((plain.private[n] != part.private[n]).any() for n in moved), "off, nothing is scaled"
