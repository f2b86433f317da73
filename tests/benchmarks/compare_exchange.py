"""One exchange beside FLARE's FedAvg recipe: without local work, in the simulator and over mTLS, and of one update.

Without local work, sites keep their processes. With one update, the simulator starts a process for each task, as it
does unless told otherwise: what a site's process costs until its first update, and to send it.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

from tests.benchmarks.result import Absent, Result

TESTS = Path(__file__).resolve().parent.parent
OWN = Path(__file__).resolve().parent / "exchange_app"
SITES = 2


def _ours(folder: Path, exchanges: int, production: bool = False) -> Path:
    """One round of FedTAR with as many steps, and an executor that answers at once."""
    from fedtar_flare.fedtar.recipe import FedTARRecipe

    FedTARRecipe(name="exchange", num_rounds=1, time_steps=exchanges).export(str(folder), byoc=not production)
    app = folder / "exchange" / "app"
    (app / "custom").mkdir(exist_ok=True)
    config = app / "config" / "config_fed_client.json"
    client = json.loads(config.read_text())
    client["executors"][0]["executor"] = {"path": "stamped_site.StampedExecutor", "args": {}}
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


def _result(name: str, what: str, found: dict[str, list[float]]) -> Result:
    """Seconds of one exchange, which is to take no longer than theirs."""
    ours, theirs = tuple(found["ours"]), tuple(found["theirs"])
    return Result(name, what, "FLARE's FedAvg recipe", "s", ours, theirs, ("at most", 1.0))


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
    return _result(
        "exchange",
        f"one exchange with {SITES} sites without local work, 77,568 values in 128 tensors, FLARE's simulator",
        found,
    )


def exchange_mtls(quick: bool) -> Result:
    """As :func:`exchange`, submitted to a federation of FLARE's own kits: server and sites on localhost, over mTLS.

    Both jobs are as their recipe exports them for production, and bring the code that stands for local work.
    """
    import yaml

    from tests.federation_process import SITES as NAMES
    from tests.federation_process import running
    from tests.trivial_site import TrivialSite

    exchanges, repetitions = (3, 1) if quick else (12, 3)
    shapes = [list(shape) for shape in TrivialSite("any").shapes.values()]
    found: dict[str, list[float]] = {"ours": [], "theirs": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = {
            "ours": _ours(folder / "ours", exchanges, production=True),
            "theirs": _theirs(folder / "theirs", exchanges, "stamped_script.py", shapes),
        }
        project = yaml.safe_load((TESTS.parent / "provisioning" / "project-localhost.yml").read_text())
        project["builders"] = [b for b in project["builders"] if not b["path"].startswith("fedtar_flare")]
        (folder / "project.yml").write_text(yaml.safe_dump(project, sort_keys=False))
        stamps, sites = folder / "stamps", dict.fromkeys(NAMES, "source: synthetic\n")
        with (
            patch.dict(os.environ, {"EXCHANGE_STAMPS": str(stamps)}),
            running(folder / "project.yml", folder / "federation", sites) as hospitals,
        ):
            for _ in range(repetitions):
                for way, job in jobs.items():
                    shutil.rmtree(stamps, ignore_errors=True)
                    stamps.mkdir()
                    status = hospitals.finished(identity := hospitals.submit(job))
                    if not status.startswith("FINISHED:COMPLETED"):
                        raise Absent(f"{way}: {status}: {hospitals.tail(identity)[-2000:]}")
                    found[way].append(_between(stamps / NAMES[0], exchanges))
    return _result(
        "exchange-mtls",
        f"the same, {SITES} sites and a server of FLARE's own kits on localhost, by mTLS, as exported for production",
        found,
    )


def one_update(quick: bool) -> Result:
    """As :func:`exchange`, with one update of the small preset and a process for each task; seconds by site."""
    from fedtar_flare.fedtar.recipe import FedTARRecipe
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


COMPARISONS = {"exchange": exchange, "exchange-mtls": exchange_mtls, "one-update": one_update}
