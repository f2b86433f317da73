"""The README's first command, as it stands there."""

import json

import pytest
from command import run_simulator

from fedtar_flare.methods.fedtar.events import EVENTS, Alphas, Outer
from fedtar_flare.record.events import SHARED, Validation
from fedtar_flare.record.log import of_kind, read_events


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_shipped_job_learns(tmp_path, tmp_path_factory, repository):
    """The README's first command: the loss falls, scores rise at every site, alpha moves within its bounds."""
    job = repository / "jobs" / "fedtar"
    process, results = run_simulator(job, tmp_path / "ws", home=tmp_path_factory.mktemp("home"), timeout=1500)
    assert process.returncode == 0, process.stdout[-4000:]
    events = read_events(results, (*SHARED, *EVENTS))
    losses = [event.loss for event in of_kind(events, Validation)]
    assert losses[-1] < 0.9 * losses[0]
    metrics = json.loads((results / "metrics.json").read_text())
    for site, before in metrics["warm_start"].items():
        after = metrics["final"][site]
        assert after["all"]["bleu_4"] > before["all"]["bleu_4"] and after["all"]["cider"] > before["all"]["cider"]
    outer = of_kind(events, Outer)
    start, end = of_kind(events, Alphas)[0].alpha, outer[-1].alpha_after
    assert max(abs(a - b) for a, b in zip(start, end, strict=True)) >= 0.005  # of three outer steps
    for event in outer:
        assert all(0 < alpha < 1 for alpha in event.alpha_after)
