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
    """``A`` or ``B`` where the tensor is a factor of the default adapter, else empty."""
    match = _FACTOR.fullmatch(name)
    return match[1] if match else ""


def pairs(tensors: Tensors) -> list[tuple[str, str]]:
    """Names of A (r, in) and B (out, r) of every layer, sorted."""
    of = [(a, a.removesuffix("A.weight") + "B.weight") for a in sorted(tensors) if factor(a) == "A"]
    fits = (tensors[a].shape[:1] == tensors[b].shape[1:] if b in tensors else False for a, b in of)
    return [pair for pair, whole in zip(of, fits, strict=True) if whole]


def lowered(tensors: Tensors, rank: int) -> dict[str, torch.Tensor]:
    """The first ``rank`` rows of each A and columns of each B, as views; other tensors as they are."""
    cut = {"A": lambda value: value[:rank], "B": lambda value: value[:, :rank], "": lambda value: value}
    return {name: cut[factor(name)](value) for name, value in tensors.items()}


def sent_shapes(shapes: Shapes, rank: int, frozen_a: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of what a site of this rank (0: the job's) sends, given those that came down."""
    found = {name: shape for name, shape in shapes.items() if not (frozen_a and factor(name) == "A")}
    for name, shape in found.items() if rank else ():
        if len(shape) != 2:
            continue
        low = {"A": (rank, *shape[1:]), "B": (*shape[:1], rank)}.get(factor(name), shape)
        found[name] = tuple(map(min, low, shape))
    return found


def shapes_as_sent(shapes: Shapes, tensors: object) -> dict[str, tuple[int, ...]]:
    """The same of a site whose rank follows from what it is about to send, which may be malformed."""
    there = tensors if isinstance(tensors, Mapping) else {}
    of = {str(name): tuple(getattr(value, "shape", ())) for name, value in there.items() if factor(str(name))}
    low = {name: shape for name, shape in of.items() if shape != shapes.get(name)}
    ranks = [size for name, shape in low.items() for size in (shape[:1] if factor(name) == "A" else shape[1:2])]
    kinds = {*map(factor, of)}
    return sent_shapes(shapes, min(ranks, default=0), frozen_a="B" in kinds and "A" not in kinds)


def padded(update: Tensors, w: Tensors) -> dict[str, torch.Tensor]:
    """A site's difference in the shapes of ``w``: what the site lacks of A and B is zero there, a difference of -w.

    A tensor that is not sent, A where it is frozen, has not changed.
    """
    found = {name: -whole if name in update else torch.zeros_like(whole) for name, whole in w.items()}
    for name, part in update.items():
        found[name][tuple(map(slice, part.shape))] = part
    return found
