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
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
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
from fedtar_flare.protocol.messages import OK, version
from fedtar_flare.site.cohort import prepare_site
from fedtar_flare.site.site_file import SITES_VARIABLE, load_site_config
from tests.benchmarks.compare_exchange import on_the_wire
from tests.benchmarks.harness import peak_bytes
from tests.federation import LocalFederation
from tests.hospital_site import HospitalSite, T
from tests.trivial_site import TrivialSite
from tools.corpus import text_corpus

Found = dict[str, float]
SITE, BATCH = "site-1", 8
PIXELS, PICTURES, TEXTS = 64, 16, 400
"""Side of the made-up radiographs, and how many different pictures and reports there are."""


@dataclass(frozen=True)
class Hospital:
    """What is measured; each patient has :data:`T` visits, each task makes ``updates`` of :data:`BATCH` reports."""

    patients: int
    rank: int = 4
    preset: str = "tiny"
    updates: int = 12
    scored: bool = True


def apart(work: Callable[..., Found], *arguments: Any) -> Found:
    """``work(*arguments)`` in a process of its own, a copy of this one, which has the imports and has computed nothing.

    Raises BrokenProcessPool where it ended without an answer (too little memory).
    """
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(work, *arguments).result()


def hospital(settings: Mapping[str, Any], folder: Path, quick: bool) -> Found:
    load_libraries()
    size = Hospital(**settings | ({"updates": 2} if quick else {}))
    sizes = {folder: size} if quick else {folder / "warm": Hospital(40, updates=2), folder: size}
    return apart(last_of, opening, sizes) | apart(last_of, round_of, sizes)


# ---------------------------------------------------------------------- a hospital
def last_of(work: Callable[[Hospital, Path], Found], sizes: Mapping[Path, Hospital]) -> Found:
    """What is found at the last of the hospitals, each with folders of its own in this process's environment."""
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    for folder, size in sizes.items():
        with patch.dict(os.environ, {SITES_VARIABLE: str(folder / "sites"), "FEDTAR_HOME": str(folder / "home")}):
            found = work(size, folder)
    return found


def write_cohort(folder: Path, size: Hospital) -> None:
    """A manifest with small radiographs of noise and reports of the warm start's words, and the site's file."""
    for name in ("images", "sites", "state", "workspace", "home"):
        (folder / name).mkdir(parents=True)
    draw = np.random.default_rng(0)
    pictures = []
    for _ in range(PICTURES):
        pictures.append(io.BytesIO())
        Image.fromarray(draw.integers(256, size=(PIXELS, PIXELS), dtype=np.uint8)).save(pictures[-1], format="PNG")
    texts = text_corpus(min(TEXTS, size.patients * T), 0)
    ages = draw.normal(60, 15, size.patients).clip(18, 95)
    rows = []
    for number, (patient, visit) in enumerate(itertools.product(range(size.patients), range(T))):
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


def phase(found: Found, name: str, run: Callable[[], Any]) -> Any:
    """What ``run`` gives; ``<name>.seconds`` (the processor's) and ``<name>.bytes`` (its peak of memory) are kept."""
    kept: list[Any] = []

    def clocked() -> None:
        begun = _processor_seconds()
        kept.append(run())
        found[f"{name}.seconds"] = _processor_seconds() - begun

    found[f"{name}.bytes"] = peak_bytes(clocked)
    return kept.pop()


def _processor_seconds() -> float:
    """Of this process, and of those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _opened(size: Hospital) -> Any:
    """The site's patients, as a task opens them."""
    config = load_site_config(SITE, workspace=None, simulator=True)
    model = preset(size.preset)
    return prepare_site(config, SITE, model=model, data=DataConfig(), time_steps=T, seed=0, workers=1)[0]


def _done(reply: Any, tensors: Any) -> tuple[Any, Any]:
    if getattr(reply, "status", None) != OK:
        raise RuntimeError(f"a task was not done: {getattr(reply, 'reason', reply)}")
    return reply, tensors


def opening(size: Hospital, folder: Path) -> Found:
    """Makes the cohort, which is not counted, and opens it: each image is read and prepared for the first time."""
    found: Found = {}
    write_cohort(folder, size)
    phase(found, "first opening", lambda: _opened(size))
    return found


def round_of(size: Hospital, folder: Path) -> Found:
    """Opens a cohort of :func:`opening` again, fits the mixture, and does the tasks of one round."""
    found: Found = {}
    cohort = phase(found, "opening", lambda: _opened(size))
    phase(found, "mixture", lambda: fit_mixture(cohort, PatientConfig(), seed=0))
    training = {"local_steps": size.updates, "batch_size": BATCH}
    settings = {"preset": size.preset, "lora": {"rank": size.rank}, "training": training, "data": {}}
    site = HospitalSite(folder / "workspace", SITE, fresh=False, **settings)  # as between hospitals
    _, weights = _done(*site.handshake())
    tasks = []
    for t in range(1, T + 1):
        updates: list[float] = []
        with patch.object(PatientLearner, "local_update", _timed(PatientLearner.local_update, updates)):
            reply, update = phase(found, "training task", lambda t=t, w=weights: _done(*site.train(w, 1, t)))
        tasks.append((found["training task.seconds"], found["training task.bytes"]))
        weights = {name: weights[name] + update[name] for name in weights}
    seconds, peaks = zip(*tasks, strict=True)
    found |= {"training task.seconds": median(seconds), "training task.bytes": max(peaks)}
    found["local update.seconds"] = median(updates)
    found["exchange, one way.bytes"] = float(on_the_wire(update, reply.numbers))
    phase(found, "closing", lambda: _done(*site.close(weights, 1)))
    if size.scored:
        phase(found, "closing with scores", lambda: _done(*site.close(weights, 1, evaluate=True)))
    last = max((folder / "state").rglob(f"{version(1, T)}.safetensors"))
    found["private state.bytes"] = float(last.stat().st_size)
    return found


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
    return {"whole run.bytes": peak, "time step.seconds": step}
