"""The exchange: which tensors travel, agreed in the handshake and then enforced in both directions.

A job that sends torch tensors without their registration at FLARE's serialiser hangs for ever, so every module that
sends or receives any calls :func:`register_tensors` on import.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.protocol.contract import PARAMETERS, Contract, Group, Sends, Task

__all__ = ["Tensors", "euclidean_norm"]

Tensors = Mapping[str, torch.Tensor]
Shapes = Mapping[str, tuple[int, ...]]

MAX_VALUES = 200_000_000
"""Most values that a site takes in one message: 800 MB in float32, more than the paper's whole model."""

MAX_TENSORS = 20_000
"""Most tensors in one message; they are counted before anything is done for each of them."""

UNIT_TOLERANCE = 0.02
"""Largest distance of a unit row's norm from 1."""

_most_bytes = 4 * MAX_VALUES

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,300}")
"""The form of every tensor's name: no sentence, no path."""
_FACTOR = re.compile(r"base_model\.model\..+\.lora_([AB])\.weight")
_SENDS = {"nothing": "no tensors", "initial": "full weights", "difference": "a difference"}


@dataclass(frozen=True)
class ExchangeSchema:
    """Shapes by name of the tensors that travel, in float32, sorted by name."""

    shapes: Shapes

    def __post_init__(self) -> None:
        if not self.shapes:
            raise ExchangeError("the exchange is empty: no tensor would travel; check the LoRA targets of the model")
        if self.parameters > MAX_VALUES:
            raise ExchangeError(f"the exchange has more than {MAX_VALUES} values")

    @classmethod
    def of(cls, state: Tensors) -> "ExchangeSchema":
        """Describe a state dictionary."""
        return cls({name: tuple(state[name].shape) for name in sorted(state)})

    @property
    def parameters(self) -> int:
        """Number of values that travel one way."""
        return sum(map(math.prod, self.shapes.values()))

    def to_dict(self) -> dict[str, Any]:
        """Convert to primitives, for the handshake."""
        return {name: list(shape) for name, shape in self.shapes.items()}

    @classmethod
    def from_dict(cls, data: Any) -> "ExchangeSchema":
        """Read what :meth:`to_dict` wrote on another machine, which must hold no more than names and sizes."""
        if not isinstance(data, Mapping):
            raise ExchangeError("the exchange schema is not a dictionary of shapes by tensor name")
        check_tensor_names(data)
        for shape in data.values():
            short = isinstance(shape, list | tuple) and len(shape) <= 8
            if not short or not all(type(size) is int and 0 <= size <= 2**31 for size in shape):
                raise ExchangeError("the exchange schema is malformed: a shape is not a short list of whole numbers")
        return cls({name: tuple(data[name]) for name in sorted(data)})

    def check(self, state: Tensors) -> None:
        """Refuse weights that are not exactly this exchange, finite and in float32."""
        for name in sorted(set(state) - set(self.shapes)):
            raise ExchangeError(f"tensor '{name}' is not part of the agreed exchange")
        for name in sorted(set(self.shapes) - set(state)):
            raise ExchangeError(f"tensor '{name}' of the agreed exchange is missing")
        for name, shape in self.shapes.items():
            check_tensor(name, state[name], shape)


# ---------------------------------------------------------------------- checks; they name a tensor, never its values
def check_tensor(name: str, value: Any, shape: tuple[int, ...] | None = None) -> None:
    """Refuse all but a finite dense float32 tensor of this shape (None: any)."""
    if not isinstance(value, torch.Tensor):
        raise ExchangeError(f"tensor '{name}' is a {type(value).__name__}, not a torch tensor")
    if value.layout != torch.strided or value.is_meta:
        raise ExchangeError(f"tensor '{name}' is not dense")
    if value.dtype != torch.float32:
        raise ExchangeError(f"tensor '{name}' has dtype {value.dtype}; allowed: float32")
    if shape is not None and tuple(value.shape) != tuple(shape):
        raise ExchangeError(f"tensor '{name}' has shape {tuple(value.shape)}; agreed: {tuple(shape)}")
    if not torch.isfinite(value).all():
        raise ExchangeError(f"tensor '{name}' has values that are not finite (NaN or infinity)")


def check_unit_rows(name: str, rows: torch.Tensor) -> None:
    """Refuse rows (M, C) whose norm is not 1, within :data:`UNIT_TOLERANCE`."""
    if not ((rows.double().norm(dim=1) - 1).abs() < UNIT_TOLERANCE).all():
        raise ExchangeError(f"tensor '{name}' has rows whose norm is not 1")


def check_tensor_names(names: Collection[Any]) -> None:
    """Refuse too many tensors, and a name that could be a sentence or a path, which the error does not repeat."""
    if len(names) > MAX_TENSORS:
        raise ExchangeError(f"{len(names)} tensors in one message; the limit is {MAX_TENSORS}")
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ExchangeError("a tensor's name is not letters, digits, '.', '_' and '-' only")


def check_inbound(tensors: Any) -> None:
    """Refuse what no server of this package sends: all but None and few finite dense float32 tensors by name."""
    if tensors is None:
        return
    if not isinstance(tensors, Mapping):
        raise ExchangeError(f"the server sent a {type(tensors).__name__} where tensors by name are expected")
    check_tensor_names(tensors)
    values = sum(value.numel() for value in tensors.values() if torch.is_tensor(value))
    if values > MAX_VALUES:
        raise ExchangeError(f"the server sent {values} values in one message; the limit is {MAX_VALUES}")
    for name in sorted(tensors):
        check_tensor(name, tensors[name])


def check_update_size(update: Tensors, reference: Tensors, limit: float) -> None:
    """Refuse an update whose norm is more than ``limit`` times that of the weights that it is added to."""
    norm, base = euclidean_norm(update), euclidean_norm(reference)
    if norm > limit * base:
        ratio = norm / max(base, 1e-30)
        raise ExchangeError(f"the update's norm is {ratio:.3g} times that of the weights (limit {limit:g})")


def euclidean_norm(state: Tensors) -> float:
    """Compute the Euclidean norm over all tensors, summed in float64 in sorted order.

    Parameters
    ----------
    state : mapping of str to Tensor

    Returns
    -------
    float
    """
    return sum(float(state[name].double().square().sum()) for name in sorted(state)) ** 0.5


def check_names(contract: Contract, task: Task, names: Collection[str]) -> None:
    """Refuse a tensor that is in none of the groups that may leave in the task."""
    check_tensor_names(names)
    for name in sorted(names):
        if contract.group_of(task, name) is None:
            hint = " unless the site's guard names it (extra_names)" if PARAMETERS.name in task.up else ""
            raise ExchangeError(f"tensor '{name}' is not allowed to leave in task '{task.name}'{hint}")


def check_tensors(contract: Contract, task_name: str, tensors: Any, agreed: Shapes, *, sends: Sends) -> None:
    """Refuse a message's tensors unless the contract lets them pass, as ``sends`` says, in ``agreed`` shapes."""
    task = contract.task(task_name)
    if not isinstance(tensors, Mapping):
        raise ExchangeError("the tensors of the message are not a dictionary")
    if task.sends == "nothing":
        raise ExchangeError(f"no tensors may leave in task '{task_name}'")
    if sends != task.sends:
        raise ExchangeError(f"only {_SENDS[task.sends]} may leave in task '{task_name}', not {_SENDS[sends]}")
    check_names(contract, task, tensors)
    for name in sorted(tensors):
        check_tensor(name, tensors[name])
        group = contract.group_of(task, name)
        assert group is not None  # by check_names
        _check_shape(group, name, tuple(tensors[name].shape), agreed.get(name))
        if group.unit_rows:
            check_unit_rows(name, tensors[name])
    for name in sorted(set(agreed) - set(tensors)):
        group = contract.group_of(task, name)
        if group is not None and group.form == "averaged":
            raise ExchangeError(f"tensor '{name}' was agreed on but is missing")


def _check_shape(group: Group, tensor: str, shape: tuple[int, ...], agreed: tuple[int, ...] | None) -> None:
    """Refuse a shape that the group's form does not allow; ``agreed``: the shape that came down."""
    if group.form == "collected":
        wide = len(shape) == 2 and (shape[1] <= group.width if group.narrower else shape[1] == group.width)
        if not wide or shape[0] > group.max_rows:
            form = f"at most {group.max_rows} rows of {'at most ' if group.narrower else ''}{group.width}"
            raise ExchangeError(f"tensor '{tensor}' has shape {shape}; allowed: {form}")
        return
    if agreed is None:
        raise ExchangeError(f"tensor '{tensor}' was not agreed on: it did not come down in this task")
    allowed = (agreed, agreed[1:]) if group.form == "pooled" else (agreed,)
    if shape not in allowed:
        raise ExchangeError(f"tensor '{tensor}' has shape {shape}; agreed: {' or '.join(map(str, allowed))}")


# ---------------------------------------------------------------------- LoRA factors of sites of a lower rank
# Of A they have the first rows, of B the first columns. So what comes down is the same for all, and the product B A of
# a lower rank is a part of the whole one. A site sends its own rank; where A is frozen, without A.
def factor(name: str) -> str:
    """Tell which factor of the default adapter a tensor is: A, B or, of any other tensor, ''."""
    match = _FACTOR.fullmatch(name)
    return match[1] if match else ""


def pairs(tensors: Tensors) -> list[tuple[str, str]]:
    """Find the layers that have both factors, as names of A and B."""
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
    """Compute the shapes that a site of this rank sends; 0: the job's own rank."""
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
    """Give a site's difference the weights' shapes: minus them where its A and B end, 0 for what is not sent."""
    whole = {name: -value if name in update else torch.zeros_like(value) for name, value in weights.items()}
    for name, part in update.items():
        whole[name][tuple(map(slice, part.shape))] = part
    return whole


# ---------------------------------------------------------------------- fetching
def register_tensors() -> None:
    """Let FLARE send ``torch.Tensor`` as it is (no numpy in between), within the limits."""
    from nvflare.app_opt.pt.decomposers import TensorDecomposer
    from nvflare.fuel.utils import fobs

    decomposer = TensorDecomposer()
    decomposer._download = _bounded_download
    fobs.register(decomposer)


def expect_at_most(values: int) -> None:
    """Fetch no messages of more float32 values from now on, in this process."""
    global _most_bytes
    _most_bytes = 4 * values


def _bounded_download(*, use_disk: bool, root_dir: str | None = None, **settings: Any) -> tuple[str, Any]:
    """In place of FLARE's own; tensors are never fetched to disk, which this package does not ask for."""
    from nvflare.app_opt.pt.tensor_downloader import download_tensors

    count = size = 0

    def within_limits(chunk: Tensors) -> dict[str, torch.Tensor]:
        nonlocal count, size
        count, size = count + len(chunk), size + sum(tensor.nbytes for tensor in chunk.values())
        if count > MAX_TENSORS or size > _most_bytes:
            raise ExchangeError(f"a message of more than {MAX_TENSORS} tensors or {_most_bytes} bytes is not fetched")
        return dict(chunk)

    return download_tensors(**settings, tensors_received_cb=within_limits)
