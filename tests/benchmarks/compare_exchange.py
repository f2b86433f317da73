"""One exchange in FLARE's simulator, compared with FLARE's FedAvg recipe: without local work, and of one update.

Without local work, sites keep their processes. With one update, the simulator starts a process for each task, as it
does unless told otherwise: what a site's process costs until its first update, and to send it.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.result import Absent, Result

TESTS = Path(__file__).resolve().parent.parent
OWN = Path(__file__).resolve().parent / "exchange_app"
SITES = 2


def _ours(folder: Path, exchanges: int) -> Path:
    """One round of FedTAR with as many steps, and an executor that answers at once."""
    from fedtar_flare.methods.fedtar.recipe import FedTARRecipe

    FedTARRecipe(name="exchange", num_rounds=1, time_steps=exchanges).export(str(folder))
    app = folder / "exchange" / "app"
    (app / "custom").mkdir(exist_ok=True)
    config = app / "config" / "config_fed_client.json"
    client = json.loads(config.read_text())
    client["executors"][0]["executor"] = {"path": "stamped_site.StampedExecutor", "args": {"method": "fedtar"}}
    config.write_text(json.dumps(client))
    for file in (TESTS / "trivial_site.py", OWN / "stamped_site.py"):
        shutil.copy(file, app / "custom")
    return folder / "exchange"


def _theirs(folder: Path, exchanges: int, script: str, shapes: list[list[int]]) -> Path:
    """FLARE's FedAvg recipe with as many rounds of such a payload, tensors as tensors."""
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.client.config import ExchangeFormat

    own = folder / "own"
    shutil.copytree(OWN, own)
    (own / "shapes.json").write_text(json.dumps(shapes))
    sys.path.insert(0, str(own))
    sys.modules.pop("stamped_model", None)
    try:
        recipe = FedAvgRecipe(
            name="exchange",
            model={"class_path": "stamped_model.Payload", "args": {}},
            min_clients=SITES,
            num_rounds=exchanges,
            train_script=str(own / script),
            server_expected_format=ExchangeFormat.PYTORCH,
        )
        recipe.export(str(folder))
    finally:
        sys.path.remove(str(own))
    for app in (folder / "exchange").glob("app*"):
        (app / "custom").mkdir(exist_ok=True)
        for file in own.iterdir():
            if file.is_file():
                shutil.copy(file, app / "custom")
    return folder / "exchange"


def _seconds(job: Path, home: Path, exchanges: int, threads: int = SITES) -> float:
    """Median seconds from one training task to the next at the first site."""
    from tests.simulator import run_simulator

    stamps = home / "stamps"
    shutil.rmtree(stamps, ignore_errors=True)
    stamps.mkdir(parents=True)
    process, _ = run_simulator(
        job,
        home / "workspace",
        *("-n", str(SITES), "-t", str(threads)),
        home=home / "state",
        OMP_NUM_THREADS="1",
        EXCHANGE_STAMPS=str(stamps),
    )
    if process.returncode:
        raise Absent(f"the simulator failed: {process.stdout[-300:]}")
    return _between(stamps / "site-1", exchanges)


def _between(stamps: Path, exchanges: int) -> float:
    """Median seconds from one line of a file of clock times to the next."""
    times = [float(line) for line in stamps.read_text().split()] if stamps.exists() else []
    if len(times) != exchanges:
        raise Absent(f"{len(times)} of {exchanges} exchanges were made")
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def exchange(quick: bool) -> Result:
    """Both jobs in turn, each in a simulator of its own; by the clock on the wall, since most of it is waiting."""
    from tests.trivial_site import TrivialSite

    exchanges, repetitions = (3, 1) if quick else (12, 3)
    shapes = [list(shape) for shape in TrivialSite("any").shapes.values()]
    found: dict[str, list[float]] = {"ours": [], "theirs": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = {
            "ours": _ours(folder / "ours", exchanges),
            "theirs": _theirs(folder / "theirs", exchanges, "stamped_script.py", shapes),
        }
        for _ in range(repetitions):
            for way, job in jobs.items():
                found[way].append(_seconds(job, folder / f"run-{way}", exchanges))
    what = f"one exchange with {SITES} sites without local work, 77,568 values in 128 tensors, FLARE's simulator"
    ours, theirs = (tuple(found[way]) for way in ("ours", "theirs"))
    return Result("exchange", what, "FLARE's FedAvg recipe", "s", ours, theirs, ("at most", 1.0))


def one_update(quick: bool) -> Result:
    """As :func:`exchange`, with one update of the small preset and a process for each task; seconds by site."""
    from fedtar_flare.methods.fedtar.recipe import FedTARRecipe
    from fedtar_flare.models.adapters.lora import add_lora, shared_state
    from fedtar_flare.models.build import build_model
    from fedtar_flare.record.events import Step
    from fedtar_flare.record.log import of_kind, read_events
    from tests.simulator import run_simulator

    exchanges, repetitions = (3, 1) if quick else (6, 2)
    found: dict[str, list[float]] = {"ours": [], "theirs": []}
    recipe = FedTARRecipe(
        name="exchange",
        num_rounds=1,
        time_steps=exchanges,
        training={"local_steps": 1},
        data={"synthetic_patients": 12},
        server={"evaluate_every": 1},
    )
    config = recipe.executor.model_config
    state = shared_state(add_lora(build_model(config), targets=config.lora_targets, seed=0))
    shapes = [list(state[name].shape) for name in sorted(state)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe.export(str(folder / "ours"))
        theirs = _theirs(folder / "theirs", exchanges, "update_script.py", shapes)
        for _ in range(repetitions):
            process, results = run_simulator(
                folder / "ours" / "exchange",
                folder / "run-ours",
                *("-n", str(SITES), "-t", "1"),
                home=folder / "state",
                OMP_NUM_THREADS="1",
            )
            steps = of_kind(read_events(results), Step) if process.returncode == 0 else []
            if len(steps) != exchanges or any(len(step.sites) != SITES for step in steps):
                raise Absent(f"{len(steps)} of {exchanges} exchanges were made: {process.stdout[-300:]}")
            found["ours"].append(statistics.median(step.seconds for step in steps[1:]) / SITES)
            found["theirs"].append(_seconds(theirs, folder / "run-theirs", exchanges, threads=1) / SITES)
    return Result(
        "one-update",
        "one task of one update of 8 reports, small preset: from FLARE's start of a process for it to its answer",
        "FLARE's FedAvg recipe with the same model and PEFT's LoRA",
        "s",
        tuple(found["ours"]),
        tuple(found["theirs"]),
        ("at most", 1.1),
    )


COMPARISONS = {"exchange": exchange, "one-update": one_update}
