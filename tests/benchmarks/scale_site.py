"""One hospital of a made-up cohort, measured: opening it, the mixture, and the tasks of a round.

Each function that measures runs in a process of its own, after the same work at its smallest size, so that imports and
first calls do not count.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fedtar_flare.learning.config import DataConfig
from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.learner import PatientLearner
from fedtar_flare.methods.fedtar.profiles import fit_mixture
from fedtar_flare.models.config import preset
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.protocol.messages import OK, TaskHeader, version
from fedtar_flare.protocol.tasks import CLOSE_ROUND
from fedtar_flare.site.cohort import prepare_site
from fedtar_flare.site.site_file import load_site_config
from tests.benchmarks.compare_server import on_the_wire
from tests.benchmarks.result import memory, peak_bytes, settled_bytes
from tests.benchmarks.scale_cohort import MODELS, SITE, SMALLEST, Hospital, alone
from tests.hospital_site import HospitalSite


def _timed(seconds: list[float]) -> Callable[..., float | None]:
    """A local update that keeps its processor seconds."""
    update = PatientLearner.local_update

    def local_update(*args: Any, **kwargs: Any) -> float | None:
        start = time.process_time()
        try:
            return update(*args, **kwargs)
        finally:
            seconds.append(time.process_time() - start)

    return local_update


class _Site(HospitalSite):
    """A site whose executor lives as long as the job, as between hospitals, in a run of one round."""

    def __init__(self, workspace: Path, size: Hospital):
        super().__init__(workspace, SITE, fresh=False, **size.executor())
        self.time_steps = size.visits

    def header(self, run_id: str, r: int, t: int, **more: Any) -> TaskHeader:
        return TaskHeader(self.method, run_id, r, t, 1, self.time_steps, **more)

    def close(self, w: Tensors, r: int, evaluate: bool = False, run_id: str = "run") -> Any:
        after = version(r, self.time_steps)
        return self.run(CLOSE_ROUND, self.header(run_id, r, self.time_steps, after=after, evaluate=evaluate), w)

    def answered(self, does: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        """What a task answered; raises where it did not do it."""
        reply, tensors = does(*arguments, **settings)
        if getattr(reply, "status", None) != OK:
            raise RuntimeError(f"a task was not done: {getattr(reply, 'reason', reply)}")
        return reply, tensors


@dataclass
class Meter:
    """Processor seconds and peak memory of one phase after the other, and of the process over all of them."""

    found: dict[str, float] = field(default_factory=dict)
    start: int = field(default_factory=settled_bytes)
    highest: int = 0

    def phase(self, name: str, run: Callable[[], Any]) -> Any:
        """What ``run`` gives; ``<name>.seconds`` and ``<name>.bytes`` are kept."""
        kept: list[Any] = []

        def clocked() -> None:
            begun = _processor_seconds()
            kept.append(run())
            self.found[f"{name}.seconds"] = _processor_seconds() - begun

        self.found[f"{name}.bytes"] = peak_bytes(clocked)
        self.highest = max(self.highest, memory("VmHWM"))
        self.found["whole.bytes"] = float(max(self.highest - self.start, 1))
        return kept.pop()


def _processor_seconds() -> float:
    """Of this process, and of those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


# ---------------------------------------------------------------------- what is measured
def opening(size: Hospital, folder: Path) -> dict[str, float]:
    """Makes the cohort, which is not counted, and opens it: each image is read and prepared for the first time."""
    if size.warm:
        with alone(folder / "warm", SMALLEST, make=True):
            _opened(SMALLEST)
    with alone(folder, size, make=True):
        meter = Meter()
        meter.phase("first opening", lambda: _opened(size))
    return meter.found


def round_of(size: Hospital, folder: Path) -> dict[str, float]:
    """Opens a cohort of :func:`opening` again, fits the mixture, and does the tasks of one round."""
    if size.warm:
        with alone(folder / "warm", SMALLEST):
            _measured(SMALLEST, folder / "warm", Meter())
    with alone(folder, size):
        meter = Meter()
        _measured(size, folder, meter)
    return meter.found


def _measured(size: Hospital, folder: Path, meter: Meter) -> None:
    _patients(size, meter)
    site = _Site(folder / "workspace", size)
    reply, weights = meter.phase("handshake", lambda: site.answered(site.handshake))
    meter.found["parameters"] = float(reply.payload["model"]["parameters"])
    tasks = []
    for t in range(1, size.visits + 1):
        updates: list[float] = []
        with patch.object(PatientLearner, "local_update", _timed(updates)):
            reply, update = meter.phase("task", lambda t=t, w=weights: site.answered(site.train, w, 1, t))
        tasks.append({name: meter.found[f"task.{name}"] for name in ("seconds", "bytes")})
        weights = {name: weights[name] + update[name] for name in weights}
    meter.found["tasks.seconds"] = sum(task["seconds"] for task in tasks)
    meter.found["task.seconds"] = statistics.median(task["seconds"] for task in tasks)
    meter.found["task.bytes"] = max(task["bytes"] for task in tasks)
    meter.found["update.seconds"] = statistics.median(updates)
    meter.found["exchange.bytes"] = float(on_the_wire(update, reply.numbers))
    meter.phase("closing", lambda: site.answered(site.close, weights, 1))
    meter.found["round.seconds"] = meter.found["tasks.seconds"] + meter.found["closing.seconds"]
    if size.scored:
        meter.phase("scored closing", lambda: site.answered(site.close, weights, 1, evaluate=True))
    versions = sorted((folder / "state").rglob(f"{version(1, size.visits)}.safetensors"))
    meter.found["private.bytes"] = float(versions[-1].stat().st_size)
    files = [file for file in (folder / "state").rglob("*") if file.is_file()]
    meter.found["state.bytes"] = float(sum(file.stat().st_size for file in files))


def _patients(size: Hospital, meter: Meter) -> None:
    cohort = meter.phase("opening", lambda: _opened(size))
    meter.phase("mixture", lambda: fit_mixture(cohort, PatientConfig(), seed=0))


def _opened(size: Hospital) -> Any:
    """The site's patients, as a task opens them."""
    config = load_site_config(SITE, workspace=None, simulator=True)
    name, model = MODELS[size.model]
    cohort, _ = prepare_site(
        config, SITE, model=preset(name, **model), data=DataConfig(), time_steps=size.visits, seed=0, workers=1
    )
    return cohort
