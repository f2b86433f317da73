"""What travels, and the server's mean of it beside FLARE's."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtar_flare.models.build import build_tokenizer
from fedtar_flare.models.config import preset
from fedtar_flare.models.outline import outline
from fedtar_flare.runtime.aggregation import SpilledUpdates
from tests.benchmarks.harness import comparison, peak_bytes

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
RANK, VALUES = 4, 77_568


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
