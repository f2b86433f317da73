"""``docs/tutorial/first-run.md`` as a newcomer walks it, from the README's first command to a draft."""

import json

import pytest
from command import walk

from fedtar_flare.methods.fedtar.events import EVENTS, Alphas, Outer
from fedtar_flare.record.events import SHARED, Validation
from fedtar_flare.record.log import of_kind, read_events


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_first_run_learns_and_drafts(tmp_path, repository):
    """The loss falls, scores rise at every site, alpha moves within its bounds; each hospital drafts in its own way."""
    (tmp_path / "home").mkdir()
    page, folder = repository / "docs" / "tutorial" / "first-run.md", tmp_path / "empty"
    *_, shared, own = walk(page, folder, HOME=str(tmp_path / "home"), FEDTAR_HOME="").values()
    assert "shared adapter alone" in shared and "the site's own adapters" in own
    results = folder / "simulator_workspace" / "server" / "simulate_job" / "fedtar"
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
