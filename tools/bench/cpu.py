"""This package ("ours") and a rival ("theirs") on the CPU, in turn, in one process; each repetition gives a ratio.

Seconds are the processor's for this process, so that other processes count little. Means are first checked to be equal.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.patient_lora import PatientLoRA
from fedtar_flare.models.adapters.lora import add_lora
from fedtar_flare.runtime.aggregation import SpilledUpdates

Cases = tuple[Callable[[], Any], Callable[[], Any]]
Measured = Mapping[str, list[float]]
"""``ours`` and ``theirs`` by repetition; the two of a repetition were measured one after the other."""
WIDTH, LENGTH, RANK, LAYERS, COMPONENTS, STEPS = 768, 128, 4, 2, 16, 4
VALUES = 77_568


@dataclass(frozen=True)
class Comparison:
    """A row of the table."""

    what: str
    rival: str
    goal: float
    """Largest ours / theirs; where it is negative, smallest theirs / ours."""
    make: Callable[[bool, Path], Cases]
    """Gives ours and theirs, from whether sizes are tiny, and an empty folder."""
    repetitions: int = 5

    def measure(self, quick: bool) -> Measured:
        """Time both in turn; at tiny sizes where ``quick``."""
        with tempfile.TemporaryDirectory() as folder:
            cases = dict(zip(("ours", "theirs"), self.make(quick, Path(folder)), strict=True))
            return alternated(cases, 2 if quick else self.repetitions)

    def row(self, measured: Measured) -> str:
        """The line: goal, median ratio with the smallest and the largest, and the seconds of both."""
        ours, theirs = measured["ours"], measured["theirs"]
        ratios = [b / a if self.goal < 0 else a / b for a, b in zip(ours, theirs, strict=True)]
        missed = median(ratios) < -self.goal if self.goal < 0 else median(ratios) > self.goal
        cells = (
            self.what,
            self.rival,
            f"at {'least' if self.goal < 0 else 'most'} {abs(self.goal):g}x",
            f"{median(ratios):.3g}x ({min(ratios):.3g} to {max(ratios):.3g}){' **missed**' * missed}",
            f"{median(ours):.3g} s",
            f"{median(theirs):.3g} s",
        )
        return f"| {' | '.join(cells)} |"


HEAD = "| what | against | asked | measured (smallest to largest) | ours | theirs |\n|---|---|---|---|---:|---:|"


def alternated(
    cases: Mapping[str, Callable[[], Any]], repetitions: int, clock: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """Seconds of each case by repetition, the cases in turn, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(1 + repetitions):
        for name, run in cases.items():
            gc.collect()
            start = clock()
            run()
            seconds[name].append(clock() - start)
    return {name: values[1:] for name, values in seconds.items()}


def noise(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Normal numbers, alike for equal seeds."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def training_step(quick: bool, folder: Path, samples: int, rival: str) -> Cases:
    """Forward and backward pass of ``samples`` sequences through :data:`LAYERS` linear layers."""
    width, length = (32, 8) if quick else (WIDTH, LENGTH)
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS)])
    model = add_lora(layers, targets=["?*"], rank=RANK, seed=0)
    patient = PatientLoRA(model, PatientConfig(components=COMPONENTS), rank=RANK, time_steps=STEPS, seed=0)
    x, q = noise((samples, length, width), 1), torch.softmax(noise((samples, COMPONENTS), 2), 1)
    step = torch.arange(samples) % STEPS + 1

    def run(parts: list[slice], personal: bool = True) -> None:
        """Pass the parts of the batch, with the patient adapter or with the shared one only."""
        for part in parts:
            with patient.adapt(q[part], step[part]) if personal else nullcontext():
                (model(x[part]).square().mean() / len(parts)).backward()
        for module in (model, patient):
            module.zero_grad(set_to_none=True)

    whole, loop = [slice(None)], [slice(i, i + 1) for i in range(samples)]
    theirs = partial(run, whole, personal=False) if rival == "shared" else partial(run, loop)
    return partial(run, whole), theirs


def mean(quick: bool, folder: Path, updates: int) -> Cases:
    """Mean of adapters by the server, float64 and the same bits in any order of arrival; theirs is neither."""
    from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper

    values, tensors = (1000, 4) if quick else (VALUES, 128)
    sent = {
        f"site-{k:02d}": {f"t{i:03d}": noise((values // tensors,), 1000 * k + i) for i in range(tensors)}
        for k in range(updates)
    }

    def ours() -> dict[str, Tensor]:
        with SpilledUpdates(folder / "updates", sent["site-00"]) as updates_:
            for site, update in sent.items():
                updates_.add(site, update)
            return updates_.mean(dict.fromkeys(sent, 1.0 / updates))

    def theirs() -> dict[str, Tensor]:
        helper = WeightedAggregationHelper()
        for site, update in sent.items():
            helper.add(update, 1.0 / updates, site, 0)
        return helper.get_result()

    expected = theirs()
    for key, value in ours().items():
        torch.testing.assert_close(value.float(), expected[key], rtol=1e-4, atol=1e-5)
    return ours, theirs


def comparisons() -> dict[str, Comparison]:
    """All comparisons by name."""
    rows = {}
    for n in (8, 32):
        what = f"training step with per-patient LoRA, e={WIDTH}, r={RANK}, L={LENGTH}, N={n}"
        for rival, title, goal in (("shared", "PEFT's shared LoRA alone", 1.0), ("loop", "sample by sample", -1.4)):
            rows[f"step-{rival}-{n}"] = Comparison(what, title, goal, partial(training_step, samples=n, rival=rival))
    for n in (5, 50):
        what, make = f"mean of {n} updates of {VALUES:,} values in 128 tensors", partial(mean, updates=n)
        rows[f"mean-{n}"] = Comparison(what, "FLARE's WeightedAggregationHelper", 1.0, make, repetitions=15)
    return rows
