"""LoRA factors of sites whose rank is below the job's: of A they have the first rows, of B the first columns.

So what comes down is the same for all, and the product B A of a lower rank is a part of the whole one. A site sends its
own rank; where A is frozen, without A.
"""

import re
from collections.abc import Mapping

import torch

from fedtar_flare.protocol.exchange import Tensors

_FACTOR = re.compile(r"base_model\.model\..+\.lora_([AB])\.weight")

Shapes = Mapping[str, tuple[int, ...]]


def factor(name: str) -> str:
    """Tell which factor of the default adapter a tensor is."""
    match = _FACTOR.fullmatch(name)
    return match[1] if match else ""


def pairs(tensors: Tensors) -> list[tuple[str, str]]:
    """Find the layers that have both factors."""
    layers = []
    for a in sorted(tensors):
        b = a.removesuffix("A.weight") + "B.weight"
        if factor(a) == "A" and b in tensors and tensors[a].shape[:1] == tensors[b].shape[1:]:
            layers.append((a, b))
    return layers


def lowered(tensors: Tensors, rank: int) -> dict[str, torch.Tensor]:
    """Cut factors to a lower rank."""
    cut = {"A": lambda value: value[:rank], "B": lambda value: value[:, :rank], "": lambda value: value}
    return {name: cut[factor(name)](value) for name, value in tensors.items()}


def sent_shapes(shapes: Shapes, rank: int, frozen_a: bool) -> dict[str, tuple[int, ...]]:
    """Compute the shapes that a site sends."""
    sent = {}
    for name, shape in shapes.items():
        kind = factor(name)
        if frozen_a and kind == "A":
            continue
        if rank and kind and len(shape) == 2:
            shape = (min(rank, shape[0]), shape[1]) if kind == "A" else (shape[0], min(rank, shape[1]))
        sent[name] = shape
    return sent


def shapes_as_sent(shapes: Shapes, tensors: object) -> dict[str, tuple[int, ...]]:
    """Compute the shapes that a site may send, whose rank follows from what it is about to send."""
    ranks, kinds = list[int](), set[str]()
    for name, value in tensors.items() if isinstance(tensors, Mapping) else ():
        kind, shape = factor(str(name)), tuple(getattr(value, "shape", ()))
        kinds.add(kind)
        if kind and shape != shapes.get(str(name)):
            ranks += shape[:1] if kind == "A" else shape[1:2]
    return sent_shapes(shapes, min(ranks, default=0), frozen_a="B" in kinds and "A" not in kinds)


def padded(update: Tensors, weights: Tensors) -> dict[str, torch.Tensor]:
    """Give a site's difference the shapes of the weights.

    The parts of A and B that the site lacks are zero there, so their difference is minus the weights. A tensor that is
    not sent, A where it is frozen, has not changed.
    """
    whole = {name: -value if name in update else torch.zeros_like(value) for name, value in weights.items()}
    for name, part in update.items():
        whole[name][tuple(map(slice, part.shape))] = part
    return whole
