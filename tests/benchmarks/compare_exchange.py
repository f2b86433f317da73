"""One exchange with all sites, without local work, in FLARE's simulator: ours beside FLARE's own FedAvg recipe."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.result import Absent, Result

TESTS = Path(__file__).resolve().parent.parent
OWN = Path(__file__).resolve().parent / "exchange_app"
SITES = 2


def _ours(folder: Path, exchanges: int) -> Path:
    """One round of FedTAR with as many steps, and an executor that answers at once."""
    from fedtar_flare.fedtar.recipe import FedTARRecipe

    FedTARRecipe(name="exchange", num_rounds=1, time_steps=exchanges).export(str(folder))
    app = folder / "exchange" / "app"
    config = app / "config" / "config_fed_client.json"
    client = json.loads(config.read_text())
    client["executors"][0]["executor"] = {"path": "stamped_site.StampedExecutor", "args": {}}
    config.write_text(json.dumps(client))
    for file in (TESTS / "trivial_site.py", OWN / "stamped_site.py"):
        shutil.copy(file, app / "custom")
    return folder / "exchange"


def _theirs(folder: Path, exchanges: int) -> Path:
    """FLARE's FedAvg recipe with as many rounds of the same payload, tensors as tensors."""
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.client.config import ExchangeFormat

    sys.path[:0] = [str(TESTS), str(OWN)]
    try:
        recipe = FedAvgRecipe(
            name="exchange",
            model={"class_path": "stamped_model.Payload", "args": {}},
            min_clients=SITES,
            num_rounds=exchanges,
            train_script=str(OWN / "stamped_script.py"),
            server_expected_format=ExchangeFormat.PYTORCH,
        )
        recipe.export(str(folder))
    finally:
        del sys.path[:2]
    for app in (folder / "exchange").glob("app*"):
        (app / "custom").mkdir(exist_ok=True)
        for file in (TESTS / "trivial_site.py", *OWN.glob("*.py")):
            shutil.copy(file, app / "custom")
    return folder / "exchange"


def _seconds(job: Path, home: Path, exchanges: int) -> float:
    """Median seconds from one training task to the next at the first site."""
    from tests.simulator import run_simulator

    stamps = home / "stamps"
    shutil.rmtree(stamps, ignore_errors=True)
    stamps.mkdir(parents=True)
    process, _ = run_simulator(
        job,
        home / "workspace",
        *("-n", str(SITES), "-t", str(SITES)),
        home=home / "state",
        OMP_NUM_THREADS="1",
        EXCHANGE_STAMPS=str(stamps),
    )
    times = [float(line) for line in (stamps / "site-1").read_text().split()] if (stamps / "site-1").exists() else []
    if process.returncode or len(times) != exchanges:
        raise Absent(f"{len(times)} of {exchanges} exchanges were made: {process.stdout[-300:]}")
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def exchange(quick: bool) -> Result:
    """Both jobs in turn, each in a simulator of its own; by the clock on the wall, since most of it is waiting."""
    if os.name != "posix":
        raise Absent("the simulator's processes are ended as a session, which needs POSIX")
    exchanges, repetitions = (3, 1) if quick else (12, 3)
    found: dict[str, list[float]] = {"ours": [], "theirs": []}
    makers: dict[str, Callable[[Path, int], Path]] = {"ours": _ours, "theirs": _theirs}
    with tempfile.TemporaryDirectory() as folder:
        jobs = {way: make(Path(folder) / way, exchanges) for way, make in makers.items()}
        for _ in range(repetitions):
            for way, job in jobs.items():
                found[way].append(_seconds(job, Path(folder) / f"run-{way}", exchanges))
    return Result(
        "exchange",
        f"one exchange with {SITES} sites without local work, 77,568 values in 128 tensors, FLARE's simulator",
        "FLARE's FedAvg recipe",
        "s",
        tuple(found["ours"]),
        tuple(found["theirs"]),
        ("at most", 1.0),
    )


COMPARISONS = {"exchange": exchange}
