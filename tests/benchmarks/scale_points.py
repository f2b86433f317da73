"""What :mod:`tests.benchmarks.scale` measures at a point: the tasks of one hospital, or FedTAR's controller alone.

Each function that measures runs in a process of its own, after the same work at its smallest size, so that imports and
first calls do not count.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image

from fedtar_flare.data.sources.manifest import write_rows
from fedtar_flare.learning.config import DataConfig
from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.demographics import fit_mixture
from fedtar_flare.methods.fedtar.learner import PatientLearner
from fedtar_flare.models.config import preset
from fedtar_flare.models.sources import load_libraries
from fedtar_flare.protocol.messages import OK, TaskHeader, version
from fedtar_flare.protocol.tasks import CLOSE_ROUND
from fedtar_flare.site.cohort import prepare_site
from fedtar_flare.site.site_file import SITES_VARIABLE, load_site_config
from tests.benchmarks.compare_exchange import on_the_wire
from tests.benchmarks.harness import peak_bytes
from tests.federation import LocalFederation
from tests.hospital_site import HospitalSite
from tests.trivial_site import TrivialSite
from tools.corpus import text_corpus

Found = dict[str, float]
SITE, BATCH = "site-1", 8
PIXELS, PICTURES, TEXTS = 64, 16, 400
"""Side of the made-up radiographs, and how many different pictures and reports there are."""


@dataclass(frozen=True)
class Hospital:
    """What is measured; T is ``visits``, and each task makes ``updates`` of :data:`BATCH` reports.

    With ``warm``, :data:`SMALLEST` is done first and not counted.
    """

    patients: int
    visits: int = 2
    rank: int = 4
    preset: str = "tiny"
    updates: int = 12
    scored: bool = True
    warm: bool = True


SMALLEST = Hospital(40, visits=1, updates=2)


def apart(work: Callable[..., Found], *arguments: Any) -> Found:
    """``work(*arguments)`` in a process of its own, a copy of this one, which has the imports and has computed nothing.

    Raises BrokenProcessPool where it ended without an answer (too little memory).
    """
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(work, *arguments).result()


def hospital(settings: Mapping[str, Any], folder: Path, quick: bool) -> Found:
    load_libraries()
    size = Hospital(**settings | ({"updates": 2, "warm": False} if quick else {}))
    return apart(opening, size, folder) | apart(round_of, size, folder)


# ---------------------------------------------------------------------- a hospital
@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """The folders of one hospital in this process's environment."""
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    with patch.dict(os.environ, {SITES_VARIABLE: str(folder / "sites"), "FEDTAR_HOME": str(folder / "home")}):
        yield


def write_cohort(folder: Path, size: Hospital) -> None:
    """A manifest with small radiographs of noise and reports of the warm start's words, and the site's file."""
    for name in ("images", "sites", "state", "workspace", "home"):
        (folder / name).mkdir(parents=True)
    draw = np.random.default_rng(0)
    pictures = []
    for _ in range(PICTURES):
        pictures.append(io.BytesIO())
        Image.fromarray(draw.integers(256, size=(PIXELS, PIXELS), dtype=np.uint8)).save(pictures[-1], format="PNG")
    texts = text_corpus(min(TEXTS, size.patients * size.visits), 0)
    ages = draw.normal(60, 15, size.patients).clip(18, 95)
    rows = []
    for number, (patient, visit) in enumerate(itertools.product(range(size.patients), range(size.visits))):
        image = folder / "images" / f"{number:06d}.png"
        image.write_bytes(pictures[number % PICTURES].getvalue())
        rows.append(
            {
                "patient_id": f"patient-{patient:05d}",
                "study_datetime": (datetime(2020, 1, 1) + timedelta(days=90 * visit)).date().isoformat(),
                "image": f"images/{image.name}",
                "report": texts[number % len(texts)],
                "age": f"{ages[patient] + visit / 4:.2f}",
                "sex": "FM"[patient % 2],
            }
        )
    write_rows(folder / "manifest.csv", rows)
    (folder / "sites" / f"{SITE}.yaml").write_text(
        f"source: manifest\npath: {folder / 'manifest.csv'}\noptions: {{modality: radiograph}}\ndevice: cpu\n"
        f"cache_dir: {folder / 'cache'}\nstate_dir: {folder / 'state'}\n"
    )


@dataclass
class Meter:
    """Processor seconds and peak memory of one phase after the other."""

    found: Found = field(default_factory=dict)

    def phase(self, name: str, run: Callable[[], Any]) -> Any:
        """What ``run`` gives; ``<name>.seconds`` and ``<name>.bytes`` are kept."""
        kept: list[Any] = []

        def clocked() -> None:
            begun = _processor_seconds()
            kept.append(run())
            self.found[f"{name}.seconds"] = _processor_seconds() - begun

        self.found[f"{name}.bytes"] = peak_bytes(clocked)
        return kept.pop()


def _processor_seconds() -> float:
    """Of this process, and of those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def opening(size: Hospital, folder: Path) -> Found:
    """Makes the cohort, which is not counted, and opens it: each image is read and prepared for the first time."""
    for one, place in ((SMALLEST, folder / "warm"), (size, folder))[not size.warm :]:
        with alone(place):
            write_cohort(place, one)
            meter = Meter()
            meter.phase("first opening", lambda one=one: _opened(one))
    return meter.found


def round_of(size: Hospital, folder: Path) -> Found:
    """Opens a cohort of :func:`opening` again, fits the mixture, and does the tasks of one round."""
    for one, place in ((SMALLEST, folder / "warm"), (size, folder))[not size.warm :]:
        with alone(place):
            meter = Meter()
            _measured(one, place, meter)
    return meter.found


def _opened(size: Hospital) -> Any:
    """The site's patients, as a task opens them."""
    config = load_site_config(SITE, workspace=None, simulator=True)
    cohort, _ = prepare_site(
        config, SITE, model=preset(size.preset), data=DataConfig(), time_steps=size.visits, seed=0, workers=1
    )
    return cohort


class _Site(HospitalSite):
    """A site whose executor lives as long as the job, as between hospitals, in a run of one round."""

    def __init__(self, workspace: Path, size: Hospital):
        training = {"local_steps": size.updates, "batch_size": BATCH}
        lora = {"rank": size.rank}
        super().__init__(workspace, SITE, fresh=False, preset=size.preset, lora=lora, training=training, data={})
        self.time_steps = size.visits

    def header(self, run_id: str, r: int, t: int, **more: Any) -> TaskHeader:
        return TaskHeader(self.method, run_id, r, t, 1, self.time_steps, **more)

    def close(self, w: Any, r: int, evaluate: bool = False, run_id: str = "run") -> Any:
        after = version(r, self.time_steps)
        return self.run(CLOSE_ROUND, self.header(run_id, r, self.time_steps, after=after, evaluate=evaluate), w)

    def run(self, *task: Any) -> Any:
        reply, tensors = super().run(*task)
        if getattr(reply, "status", None) != OK:
            raise RuntimeError(f"a task was not done: {getattr(reply, 'reason', reply)}")
        return reply, tensors


def _measured(size: Hospital, folder: Path, meter: Meter) -> None:
    cohort = meter.phase("opening", lambda: _opened(size))
    meter.phase("mixture", lambda: fit_mixture(cohort, PatientConfig(), seed=0))
    site = _Site(folder / "workspace", size)
    _, weights = site.handshake()
    found = meter.found
    tasks = []
    for t in range(1, size.visits + 1):
        updates: list[float] = []
        with patch.object(PatientLearner, "local_update", _timed(PatientLearner.local_update, updates)):
            reply, update = meter.phase("task", lambda t=t, w=weights: site.train(w, 1, t))
        tasks.append((found["task.seconds"], found["task.bytes"]))
        weights = {name: weights[name] + update[name] for name in weights}
    seconds, peaks = zip(*tasks, strict=True)
    found |= {"task.seconds": median(seconds), "task.bytes": max(peaks), "update.seconds": median(updates)}
    found["exchange.bytes"] = float(on_the_wire(update, reply.numbers))
    meter.phase("closing", lambda: site.close(weights, 1))
    if size.scored:
        meter.phase("scored closing", lambda: site.close(weights, 1, evaluate=True))
    last = max((folder / "state").rglob(f"{version(1, size.visits)}.safetensors"))
    found["private.bytes"] = float(last.stat().st_size)


def _timed(run: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """The function, whose processor seconds are kept."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return run(*args, **kwargs)
        finally:
            seconds.append(time.process_time() - start)

    return timed


# ---------------------------------------------------------------------- the server
class _Clocked(LocalFederation):
    """Notes when it asks, and what the sites, which answer at once, have taken of the processor until then."""

    def __init__(self, folder: Path, number: int, steps: int):
        self.at_sites: list[float] = []
        names = [f"site-{i:03d}" for i in range(number)]
        sites = {name: _timed(TrivialSite(name), self.at_sites) for name in names}
        super().__init__(folder, sites, num_rounds=1, time_steps=steps, step_time_limit=0)
        self.asked: list[tuple[str, float]] = []

    def ask(self, task: str, *arguments: Any, **settings: Any) -> Any:
        self.asked.append((task, time.process_time() - sum(self.at_sites)))
        return super().ask(task, *arguments, **settings)


def controller(sites: int, steps: int, folder: Path) -> Found:
    """Processor seconds of a step (all replies, mean, residual step, record), and the run's peak of memory."""
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    _Clocked(folder / "warm", 2, 1).run()
    measured = _Clocked(folder / "run", sites, steps)
    peak = peak_bytes(measured.run)
    if measured.panics:
        raise RuntimeError(f"the run failed: {measured.panics[0]}")
    step = median(b[1] - a[1] for a, b in itertools.pairwise(measured.asked) if a[0] == "train")
    return {"run.bytes": peak, "step.seconds": step, "site.seconds": step / sites}
