"""What travels and what the server does with it: bytes of an exchange, and the mean of the sites' updates."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fedtar_flare.models.config import preset
from fedtar_flare.runtime.aggregation import SpilledUpdates
from tests.benchmarks.result import Asked, Result, alternated, peak_bytes

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
RANK = 4


def _sizes(quick: bool) -> tuple[dict[str, tuple[int, ...]], int]:
    """Shapes of the adapter of the paper's model, and how many values the whole model has."""
    from fedtar_flare.models.build import build_tokenizer
    from fedtar_flare.models.outline import outline

    config = preset("tiny") if quick else preset("paper", **PUBLISHED)
    found = outline(config)
    extra = 0 if quick else (PUBLISHED_WORDS - build_tokenizer(config).vocab_size) * 768
    layers = [name for name in found.targeted(config.lora_targets) if name in found.linear]
    # one tensor a layer and side: a pair's sizes add up to what the outline says of it
    half = {name: (RANK, found.linear[name] // 2) for name in layers}
    shapes = {f"base_model.model.{n}.lora_{side}.weight": half[n] for n in layers for side in "AB"}
    return shapes, found.parameters + extra


def on_the_wire(tensors: dict[str, Tensor], metrics: dict[str, float]) -> int:
    """Bytes of FLARE's serialised message with these parameters."""
    from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
    from nvflare.app_common.utils.fl_model_utils import FLModelUtils
    from nvflare.app_opt.pt.decomposers import TensorDecomposer
    from nvflare.fuel.utils import fobs

    fobs.register(TensorDecomposer)
    model = FLModel(params_type=ParamsType.DIFF, params=tensors, metrics=metrics)
    return len(fobs.dumps(FLModelUtils.to_shareable(model)))


def wire(dtype: torch.dtype, asked: Asked, note: str) -> Callable[[bool], Result]:
    """An update of the adapter against the whole model in float32, which is counted and not built."""

    def run(quick: bool) -> Result:
        shapes, whole = _sizes(quick)
        update = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
        sent = on_the_wire(update, {"loss": 1.0, "samples": 8.0})
        name = str(dtype).removeprefix("torch.")
        return Result(
            f"wire-{name}",
            f"bytes of an update, LoRA of rank {RANK} in {name}, cvt-21 and distilgpt2",
            "the full model in float32",
            "MB",
            (sent / 1e6,),
            (4 * whole / 1e6,),
            asked,
            note,
        )

    return run


def _mean_of(updates: int, values: int, tensors: int, memory: bool, quick: bool, name: str) -> Result:
    from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper

    if quick:
        updates, values, tensors = 2, 1000, 4
    generator = torch.Generator().manual_seed(0)
    # sites share their values where the whole of them would not fit in memory
    distinct = [
        {f"t{i:03d}": torch.randn(values // tensors, generator=generator) for i in range(tensors)}
        for _ in range(min(updates, 2 if values > 10**7 else updates))
    ]
    weights = {f"site-{k:02d}": 1.0 / updates for k in range(updates)}

    def ours() -> dict[str, Tensor]:
        with SpilledUpdates(home / "updates", distinct[0]) as kept:
            for k, site in enumerate(weights):
                kept.add(site, distinct[k % len(distinct)])
            return kept.mean(weights)

    def theirs() -> dict[str, Tensor]:
        helper = WeightedAggregationHelper()
        for k, (site, weight) in enumerate(weights.items()):
            helper.add(distinct[k % len(distinct)], weight, site, 0)
        return helper.get_result()

    ways = {"ours": ours, "theirs": theirs}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        expected = theirs()
        for key, value in ours().items():
            torch.testing.assert_close(value.float(), expected[key], rtol=1e-4, atol=1e-5)
        del expected
        if memory:
            found = {way: (peak_bytes(run) / 1e6,) for way, run in ways.items()}
        else:
            found = alternated(ways, 2 if quick or values > 10**7 else 15, warm=0 if values > 10**7 else 2)
    what = "memory of the mean" if memory else "mean"
    return Result(
        name,
        f"{what} of {updates} updates of {values:,} values in {tensors} tensors",
        "FLARE's WeightedAggregationHelper",
        "MB" if memory else "s",
        found["ours"],
        found["theirs"],
        ("", 0.0) if memory else ("at most", 1.0),
        "float64, the same bits in any order of arrival; theirs is neither",
    )


def mean(name: str, updates: int, values: int, tensors: int, memory: bool = False) -> Callable[[bool], Result]:
    return lambda quick: _mean_of(updates, values, tensors, memory, quick, name)


COMPARISONS = {
    "wire-float32": wire(torch.float32, ("at least", 100.0), "each way once per (round, step)"),
    "wire-bfloat16": wire(torch.bfloat16, ("at least", 180.0), "up; down it is float32"),
    "mean-5": mean("mean-5", 5, 77_568, 128),
    "mean-50": mean("mean-50", 50, 77_568, 128),
    "mean-full": mean("mean-full", 5, 128_000_000, 300),
    "mean-full-memory": mean("mean-full-memory", 5, 128_000_000, 300, memory=True),
}
