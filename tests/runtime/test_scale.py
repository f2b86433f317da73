"""Many sites: the server's memory does not grow with them, and the order of their replies does not matter."""

import math
import zlib

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fedtar_flare.protocol.contract import HANDSHAKE, TRAIN
from fedtar_flare.protocol.messages import ok
from fedtar_flare.record.events import Step
from fedtar_flare.record.log import read_events
from fedtar_flare.runtime import aggregation
from fedtar_flare.testing import FunctionFederation, QuadraticSite

FEW, MANY = 8, 63
SHAPES = {
    f"base_model.model.{i}.lora_{x}.weight": size for i in range(4) for x, size in (("A", (4, 1616)), ("B", (3232, 4)))
}
UPDATE = 4 * sum(map(math.prod, SHAPES.values()))
"""Bytes of one update: as many as LoRA of rank 4 has in the small model."""


@pytest.fixture(autouse=True)
def two_updates_fit_in_memory(monkeypatch):
    """What is small waits in memory: these updates stand for large ones."""
    monkeypatch.setattr(aggregation, "IN_MEMORY", 2 * UPDATE)


class TrivialSite(QuadraticSite):
    """Answers at once, the same each time: updates that cost next to nothing to make."""

    def __init__(self, name):
        super().__init__(name, [], samples=1 + sum(name.encode()) % 7)

    def start(self):
        return self.tensors("start")

    def tensors(self, key):
        """Random numbers that depend on the key alone."""
        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        return {name: 0.01 * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}

    def __call__(self, task, header, weights):
        if task == HANDSHAKE:
            return super().__call__(task, header, weights)
        if task == TRAIN:
            update = self.tensors(f"{self.name} {header.round} {header.step}")
            return ok(header, {"samples": self.samples, "train_loss": 1.0}), update
        numbers = {"validation_loss": 1.0, "reports": 1}
        return ok(header, numbers, {"t_numbers": [0.1 * t for t in range(1, header.time_steps + 1)]}), None


def federation(folder, number, kind=FunctionFederation, **settings):
    sites = {name: TrivialSite(name) for name in (f"site-{i:03d}" for i in range(number))}
    return kind(folder, sites, **({"num_rounds": 1, "time_steps": 2, "step_time_limit": 60} | settings))


def peak_of_tensors(controller):
    """Largest number of bytes of tensors that live at the same time during a run, as torch's allocator reports them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        controller.run()
    assert not controller.panics
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def test_the_servers_memory_does_not_grow_with_the_sites(tmp_path):
    few = peak_of_tensors(federation(tmp_path / "few", FEW))
    many = peak_of_tensors(federation(tmp_path / "many", MANY))
    assert few > 2 * UPDATE  # the weights and one update at the least: the measure sees them
    assert many <= 1.2 * few
    steps = [event for event in read_events(tmp_path / "many" / "fedtar") if isinstance(event, Step)]
    assert [len(step.sites) for step in steps] == [MANY, MANY]
    assert not (tmp_path / "many" / "fedtar" / "updates").exists()  # nor does the disk keep them
