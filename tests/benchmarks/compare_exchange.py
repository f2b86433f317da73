"""What travels, the server's mean of it, and an exchange in FLARE's simulator beside FLARE's own."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fedtar_flare.methods.fedtar.recipe import FedTARRecipe
from fedtar_flare.models.adapters.lora import add_lora, shared_state
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import preset
from fedtar_flare.models.outline import outline
from fedtar_flare.record.events import Step
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.runtime.aggregation import SpilledUpdates
from tests.benchmarks.harness import Absent, comparison, peak_bytes
from tests.command import run_simulator
from tests.trivial_site import TrivialSite

PUBLISHED = {
    "encoder_name": None,
    "encoder_config": {"embed_dim": (64, 192, 384), "depth": (1, 4, 16), "num_heads": (1, 3, 6), "mlp_ratio": 4.0},
    "decoder_name": None,
    "decoder_config": {"n_embd": 768, "n_layer": 6, "n_head": 12, "n_positions": 1024},
    "tokenizer": "small",
}
"""Sizes of cvt-21 and DistilGPT2, so that nothing is fetched."""
PUBLISHED_WORDS = 50_257
"""Of DistilGPT2, whose tokenizer is on the hub; the shape is built here with the shipped one's."""
RANK, SITES, VALUES = 4, 2, 77_568
TESTS = Path(__file__).resolve().parent.parent


# ---------------------------------------------------------------------- bytes
def on_the_wire(tensors: dict[str, Tensor], metrics: dict[str, float]) -> int:
    """Bytes of FLARE's serialised message with these parameters."""
    from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
    from nvflare.app_common.utils.fl_model_utils import FLModelUtils
    from nvflare.app_opt.pt.decomposers import TensorDecomposer
    from nvflare.fuel.utils import fobs

    fobs.register(TensorDecomposer)
    model = FLModel(params_type=ParamsType.DIFF, params=tensors, metrics=metrics)
    return len(fobs.dumps(FLModelUtils.to_shareable(model)))


def wire(quick: bool, folder: Path, dtype: torch.dtype) -> tuple[list[float], list[float]]:
    """An update of the paper's adapter against its whole model in float32, which is counted and not built."""
    config = preset("tiny") if quick else preset("paper", **PUBLISHED)
    found = outline(config)
    whole = found.parameters + (0 if quick else (PUBLISHED_WORDS - build_tokenizer(config).vocab_size) * 768)
    layers = [name for name in found.targeted(config.lora_targets) if name in found.linear]
    # one tensor a layer and side: a pair's sizes add up to what the outline says of it
    update = {
        f"base_model.model.{name}.lora_{side}.weight": torch.zeros(RANK, found.linear[name] // 2, dtype=dtype)
        for name in layers
        for side in "AB"
    }
    return [on_the_wire(update, {"loss": 1.0, "samples": 8.0}) / 1e6], [4 * whole / 1e6]


for dtype, goal, note in (
    ("float32", 100.0, "each way once per (round, step)"),
    ("bfloat16", 180.0, "up; down it is float32"),
):
    what = f"bytes of an update, LoRA of rank {RANK} in {dtype}, cvt-21 and distilgpt2"
    add = comparison(f"wire-{dtype}", "the full model in float32", ("at least", goal), what, note=note, unit="MB")
    add(partial(wire, dtype=getattr(torch, dtype)))


# ---------------------------------------------------------------------- mean
def mean(quick: bool, folder: Path, updates: int, values: int, tensors: int, memory: bool = False) -> tuple[Any, Any]:
    """Two ways of the mean that agree; with ``memory``, the peak of each in MB."""
    from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper

    if quick:
        updates, values, tensors = 2, 1000, 4
    generator = torch.Generator().manual_seed(0)
    # sites share their values where the whole of them would not fit in memory
    distinct = [
        {f"t{i:03d}": torch.randn(values // tensors, generator=generator) for i in range(tensors)}
        for _ in range(min(updates, 2 if values > 10**7 else updates))
    ]
    sent = {f"site-{k:02d}": distinct[k % len(distinct)] for k in range(updates)}

    def ours() -> dict[str, Tensor]:
        with SpilledUpdates(folder / "updates", distinct[0]) as kept:
            for site, update in sent.items():
                kept.add(site, update)
            return kept.mean(dict.fromkeys(sent, 1.0 / updates))

    def theirs() -> dict[str, Tensor]:
        helper = WeightedAggregationHelper()
        for site, update in sent.items():
            helper.add(update, 1.0 / updates, site, 0)
        return helper.get_result()

    expected = theirs()
    for key, value in ours().items():
        torch.testing.assert_close(value.float(), expected[key], rtol=1e-4, atol=1e-5)
    del expected
    return ([peak_bytes(ours) / 1e6], [peak_bytes(theirs) / 1e6]) if memory else (ours, theirs)


for name, updates, values, tensors, more in (
    ("mean-5", 5, VALUES, 128, {"repetitions": 15, "warm": 2}),
    ("mean-50", 50, VALUES, 128, {"repetitions": 15, "warm": 2}),
    ("mean-full", 5, 128_000_000, 300, {"repetitions": 2, "warm": 0}),
    ("mean-full-memory", 5, 128_000_000, 300, {"unit": "MB"}),
):
    memory = "unit" in more
    comparison(
        name,
        "FLARE's WeightedAggregationHelper",
        ("", 0.0) if memory else ("at most", 1.0),
        f"{'memory of the ' * memory}mean of {updates} updates of {values:,} values in {tensors} tensors",
        note="float64, the same bits in any order of arrival; theirs is neither",
        **more,
    )(partial(mean, updates=updates, values=values, tensors=tensors, memory=memory))


# ---------------------------------------------------------------------- exchange
def seconds_of(exchanges: int, quick: bool, folder: Path, shapes: list[Any], own: dict[str, Any]) -> tuple[Any, Any]:
    """Seconds of an exchange on the wall, ours and FLARE's FedAvg recipe in turn, each in a simulator of its own.

    Ours is one round of FedTAR with as many steps. Where ``own`` has no settings of it, its executor answers at once
    and the simulator keeps the sites' processes; else it starts one for each task, and the seconds are by site.
    """
    exchanges, turns = (3, 1) if quick else (exchanges, 2 if own else 3)
    FedTARRecipe(name="exchange", num_rounds=1, time_steps=exchanges, **own).export(str(folder / "ours"))
    job = folder / "ours" / "exchange"
    if not own:
        (job / "app" / "custom").mkdir(exist_ok=True)
        shutil.copy(TESTS / "trivial_site.py", job / "app" / "custom")
        config = job / "app" / "config" / "config_fed_client.json"
        client = json.loads(config.read_text())
        client["executors"][0]["executor"] = {"path": "trivial_site.TrivialExecutor", "args": {"method": "fedtar"}}
        config.write_text(json.dumps(client))
    theirs = flare_job(folder / "theirs", exchanges, "update_script.py" if own else "answering_script.py", shapes)
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(turns):
        steps = of_kind(read_events(simulate(job, folder / "run-ours", 1 if own else SITES)), Step)
        found[0].append(middle([step.seconds for step in steps if len(step.sites) == SITES], exchanges))
        simulate(theirs, folder / "run-theirs", 1 if own else SITES)
        stamps = [float(line) for line in (folder / "run-theirs" / "stamps" / "site-1").read_text().split()]
        found[1].append(middle([0.0, *(b - a for a, b in itertools.pairwise(stamps))], exchanges))
    return tuple([value / (SITES if own else 1) for value in side] for side in found)


def middle(seconds: list[float], exchanges: int) -> float:
    """Median without the first exchange, which waits for the start."""
    if len(seconds) != exchanges:
        raise Absent(f"{len(seconds)} of {exchanges} exchanges were made")
    return median(seconds[1:])


def simulate(job: Path, home: Path, threads: int) -> Path:
    """Run a job; its results. FLARE's script notes in ``stamps/site-1`` when a training task reached it."""
    stamps = home / "stamps"
    shutil.rmtree(stamps, ignore_errors=True)
    stamps.mkdir(parents=True)
    more = {"OMP_NUM_THREADS": "1", "EXCHANGE_STAMPS": str(stamps)}
    arguments = ("-n", str(SITES), "-t", str(threads))
    process, results = run_simulator(job, home / "workspace", *arguments, home=home / "state", **more)
    if process.returncode:
        raise Absent(f"the simulator failed: {process.stdout[-300:]}")
    return results


def flare_job(folder: Path, exchanges: int, script: str, shapes: list[Any]) -> Path:
    """FLARE's FedAvg recipe with as many rounds of such a payload, tensors as tensors."""
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.client.config import ExchangeFormat

    own = folder / "own"
    shutil.copytree(TESTS / "benchmarks" / "exchange_app", own, ignore=shutil.ignore_patterns("__pycache__"))
    (own / "shapes.json").write_text(json.dumps(shapes))
    sys.modules.pop("stamped_model", None)
    with patch.object(sys, "path", [str(own), *sys.path]):
        FedAvgRecipe(
            name="exchange",
            model={"class_path": "stamped_model.Payload", "args": {}},
            min_clients=SITES,
            num_rounds=exchanges,
            train_script=str(own / script),
            server_expected_format=ExchangeFormat.PYTORCH,
        ).export(str(folder))
    for app in (folder / "exchange").glob("app*"):
        shutil.copytree(own, app / "custom", dirs_exist_ok=True)
    return folder / "exchange"


@comparison("exchange", "FLARE's FedAvg recipe", ("at most", 1.0))
def exchange(quick: bool, folder: Path) -> tuple[list[float], list[float]]:
    """One exchange with 2 sites without local work, 77,568 values in 128 tensors, FLARE's simulator."""
    shapes = [list(shape) for shape in TrivialSite("any").shapes.values()]
    return seconds_of(12, quick, folder, shapes, {})


@comparison("one-update", "FLARE's FedAvg recipe with the same model and PEFT's LoRA", ("at most", 1.1))
def one_update(quick: bool, folder: Path) -> tuple[list[float], list[float]]:
    """One task of one update of 8 reports, small preset: from FLARE's start of a process for it to its answer."""
    own = {"training": {"local_steps": 1}, "data": {"synthetic_patients": 12}, "server": {"evaluate_every": 1}}
    config = FedTARRecipe(name="exchange", **own).executor.resolved.model
    state = shared_state(add_lora(build_model(config), targets=config.lora_targets, seed=0))
    return seconds_of(6, quick, folder, [list(state[name].shape) for name in sorted(state)], own)
