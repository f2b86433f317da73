"""The baselines' controllers: against FedAvg written down once more, and what they record, save and go on from."""

import json
from dataclasses import replace

import pytest
import torch
from federation import NAMES, QuadraticSite, federation_of, pair

from fedtar_flare.protocol.tasks import HANDSHAKE, TRAIN
from fedtar_flare.record.events import End, Start, Step
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.runtime.checkpoint import CheckpointFolder

T = 2


FedAvg, FedProx, Local = map(federation_of, ("fedavg", "fedprox", "local"))


class Boastful(QuadraticSite):
    """Says that it trained on far more visits than it announced: 5 a step."""

    def __call__(self, task, header, weights):
        reply, tensors = super().__call__(task, header, weights)
        return (replace(reply, numbers=reply.numbers | {"samples": 10**9}) if task == TRAIN else reply), tensors


class HasItsOwnWeights(QuadraticSite):
    """Trains without weights from the server, and tells in which tasks some came down; its update is sent unasked."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.came_down = set()

    def __call__(self, task, header, weights):
        self.came_down |= {task} if weights else set()
        return super().__call__(task, header, weights or self.start())


class KeepsItsWeights(HasItsOwnWeights):
    """Answers training as local-only does: numbers alone."""

    def __call__(self, task, header, weights):
        reply, tensors = super().__call__(task, header, weights)
        return reply, None if task == TRAIN else tensors


def sites(kind=QuadraticSite, boastful=Boastful):
    return {
        "site-a": kind("site-a", [pair(1), pair(1)], samples=3, validation=pair(9)),
        "site-b": boastful("site-b", [pair(4), pair(4)], samples=5, validation=pair(10)),
        "site-c": kind("site-c", [None, pair(6)], samples=2),
    }


def run(kind, folder, local, **settings):
    controller = kind(folder, local, **({"num_rounds": 3, "time_steps": T} | settings))
    controller.run()
    checkpoint = CheckpointFolder(controller.results_folder / "checkpoint").last()[0]
    return controller, checkpoint, read_events(controller.results_folder)


def reference(local, weighting, rounds=3):
    """McMahan et al., Algorithm 1, in float64: every exchange replaces w by the weighted mean of the sites' weights."""
    w = [v.double() for v in local["site-a"].start().values()]
    for t in list(range(T)) * rounds:
        # T samples a step as announced, since the visits of all steps are pooled; a site may claim no more
        size = {
            name: {"samples": min(s.samples if name != "site-b" else 10**9, s.samples * T), "uniform": 1}[weighting]
            for name, s in local.items()
            if s.targets[t] is not None
        }
        w = [
            sum(n * (v - local[name].lr * (v - local[name].targets[t][i].double())) for name, n in size.items())
            / sum(size.values())
            for i, v in enumerate(w)
        ]
    return w


@pytest.mark.parametrize("kind", [FedAvg, FedProx])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a_run_equals_an_independent_reference(tmp_path, kind, weighting):
    controller, checkpoint, events = run(kind, tmp_path, sites(), weighting=weighting)
    for name, expected in zip(NAMES, reference(sites(), weighting), strict=True):
        torch.testing.assert_close(checkpoint.weights[name].double(), expected, rtol=1e-6, atol=1e-6)
    assert [(step.round, step.step) for step in of_kind(events, Step)] == [(r, t) for r in (1, 2, 3) for t in (1, 2)]
    assert of_kind(events, Step)[0].abstained == {"site-c": "no visit"}
    assert of_kind(events, Start)[0].method == kind.method_name and of_kind(events, End)[0].status == "completed"
    assert not controller.panics and controller.progress()["numbers"] == {}


def test_nobody_with_a_visit_leaves_the_weights_as_they_are(tmp_path):
    local = {name: QuadraticSite(name, [None, None]) for name in "ab"}
    _, checkpoint, events = run(FedAvg, tmp_path, local)
    assert all(torch.equal(checkpoint.weights[name], value) for name, value in local["a"].start().items())
    assert all(step.skipped for step in of_kind(events, Step))


@pytest.mark.parametrize("kind", [FedAvg, Local])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, kind):
    def local():
        return sites(KeepsItsWeights, KeepsItsWeights) if kind is Local else sites()

    _, whole, _ = run(kind, tmp_path / "whole", local())
    first, _, _ = run(kind, tmp_path / "first", local(), num_rounds=1)
    checkpoint = str(first.results_folder / "checkpoint")
    second, resumed, events = run(kind, tmp_path / "second", (resuming := local()), resume_from=checkpoint)
    assert kind is not Local or all(site.came_down == {HANDSHAKE} for site in resuming.values())
    assert not second.panics and [step.round for step in of_kind(events, Step)] == [2, 2, 3, 3]
    assert resumed.info["run_id"] == first.run_id
    assert all(torch.equal(whole.weights[name], resumed.weights[name]) for name in NAMES)
    assert (second.results_folder / "adapter").is_dir() is (kind is not Local)


def test_a_run_of_one_method_is_not_resumed_by_another(tmp_path):
    first, _, _ = run(FedAvg, tmp_path / "first", sites(), num_rounds=1)
    second = FedProx(tmp_path / "second", sites(), time_steps=T, resume_from=str(first.results_folder / "checkpoint"))
    second.run()
    assert "method: 'fedavg' then, 'fedprox' now" in second.panics[0]


def test_local_training_leaves_the_server_with_the_common_start_and_no_adapter(tmp_path):
    local = sites(KeepsItsWeights, KeepsItsWeights)
    controller, checkpoint, events = run(Local, tmp_path, local)
    assert not controller.panics and not any(site.came_down for site in local.values())
    assert all(torch.equal(checkpoint.weights[name], value) for name, value in local["site-a"].start().items())
    for step in of_kind(events, Step):
        assert step.sites and step.update_norm is None and not step.skipped
        assert step.bytes_up == step.bytes_down == 0
    folder = controller.results_folder
    assert not (folder / "adapter").exists() and (folder / "report.html").is_file()
    assert json.loads((folder / "metrics.json").read_text())["method"] == "local"


def test_an_update_that_local_training_did_not_ask_for_is_refused_by_the_server(tmp_path):
    events = run(Local, tmp_path, sites(KeepsItsWeights, HasItsOwnWeights))[2]
    for step in of_kind(events, Step):
        assert "site-b" in step.refused and "tensors" in step.refused["site-b"] and "site-a" not in step.refused
