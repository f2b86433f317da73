"""The controller of FedTAR by itself, measured: sites that answer at once, whose own time does not count."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.result import peak_bytes
from tests.federation import LocalFederation
from tests.trivial_site import TrivialSite


class _Clocked(LocalFederation):
    """Notes when it asks, and what the sites have taken of the processor until then."""

    def __init__(self, folder: Path, number: int, steps: int):
        names = [f"site-{i:03d}" for i in range(number)]
        sites = {name: self._timed(TrivialSite(name)) for name in names}
        super().__init__(folder, sites, num_rounds=1, time_steps=steps, step_time_limit=0)
        self.at_sites = 0.0
        self.asked: list[tuple[str, float, float]] = []

    def _timed(self, site: TrivialSite) -> Callable[..., Any]:
        def answer(*task: Any) -> Any:
            start = time.process_time()
            try:
                return site(*task)
            finally:
                self.at_sites += time.process_time() - start

        return answer

    def ask(self, task: str, *arguments: Any, **settings: Any) -> Any:
        self.asked.append((task, time.process_time(), self.at_sites))
        return super().ask(task, *arguments, **settings)

    def seconds(self) -> float:
        """Of a step (all replies, mean, residual step, record), the median."""
        pairs = zip(self.asked, self.asked[1:], strict=False)
        steps = [(b[1] - a[1]) - (b[2] - a[2]) for a, b in pairs if a[0] == "train"]
        return statistics.median(steps)


def controller(sites: int, steps: int, folder: Path) -> dict[str, float]:
    """Processor seconds of a step at the server, and the peak of its memory beyond what it had before the run."""
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    _Clocked(folder / "warm", 2, 1).run()
    measured = _Clocked(folder / "run", sites, steps)
    found = {"run.bytes": peak_bytes(measured.run)}
    if measured.panics:
        raise RuntimeError(f"the run failed: {measured.panics[0]}")
    found["step.seconds"] = measured.seconds()
    found["site.seconds"] = found["step.seconds"] / sites
    return found
