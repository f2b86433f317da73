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

__all__ = [
    "ExchangeSchema", "MASTER_DTYPE", "Tensors", "WIRE_DTYPES", "check_inbound", "check_tensor", "check_unit_rows",
    "check_update_size", "euclidean_norm", "expect_at_most", "register_tensors",
]  # fmt: skip

Tensors = Mapping[str, torch.Tensor]

WIRE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Number formats an update may travel in; the server's master copy is always float32."""
MASTER_DTYPE = {"float32": torch.float32}
"""Number format of whole weights, in both directions."""

MAX_VALUES = 200_000_000
"""Most values that a site takes in one message: 800 MB in float32, more than the paper's whole model."""

MAX_TENSORS = 20_000
"""Most tensors in one message; they are counted before anything is done for each of them."""

UNIT_TOLERANCE = 0.02
"""Largest distance of a unit row's norm from 1: bfloat16 rounds to three digits."""

_most_bytes = 4 * MAX_VALUES

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,300}")
"""The form of every tensor's name: no sentence, no path."""


@dataclass(frozen=True)
class ExchangeSchema:
    """Names and shapes of the tensors that travel, and the number format of updates.

    Attributes
    ----------
    shapes : pairs of name and shape, sorted by name
    dtype_up : a name of :data:`WIRE_DTYPES`
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    dtype_up: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype_up not in WIRE_DTYPES:
            raise ExchangeError(f"the number format of updates is not one of {', '.join(WIRE_DTYPES)}")
        if not self.shapes:
            raise ExchangeError("the exchange is empty: no tensor would travel; check the LoRA targets of the model")
        if self.parameters > MAX_VALUES:
            raise ExchangeError(f"the exchange has more than {MAX_VALUES} values")

    @classmethod
    def of(cls, state: Tensors, dtype_up: str = "float32") -> "ExchangeSchema":
        """Describe a state dictionary.

        Parameters
        ----------
        state : mapping of str to Tensor
        dtype_up : str

        Returns
        -------
        ExchangeSchema
        """
        return cls(tuple(sorted((name, tuple(value.shape)) for name, value in state.items())), dtype_up)

    @property
    def parameters(self) -> int:
        """Number of values that travel one way."""
        count = 0
        for _, shape in self.shapes:
            count += math.prod(shape)
        return count

    def to_dict(self) -> dict[str, Any]:
        """Convert to primitives, for the handshake.

        Returns
        -------
        dict of ``shapes`` by name and ``dtype_up``
        """
        return {"shapes": {name: list(shape) for name, shape in self.shapes}, "dtype_up": self.dtype_up}

    @classmethod
    def from_dict(cls, data: Any) -> "ExchangeSchema":
        """Read what :meth:`to_dict` wrote on another machine.

        Parameters
        ----------
        data : anything

        Returns
        -------
        ExchangeSchema

        Raises
        ------
        ExchangeError
            It is malformed, or holds more than names, sizes and number format.
        """
        if not isinstance(data, Mapping) or set(data) != {"shapes", "dtype_up"}:
            raise ExchangeError("the exchange schema is not a dictionary of 'shapes' and 'dtype_up' alone")
        shapes, dtype_up = data["shapes"], data["dtype_up"]
        if not isinstance(shapes, Mapping) or not isinstance(dtype_up, str):
            raise ExchangeError("the exchange schema is malformed: no shapes by tensor name, or no number format")
        check_tensor_names(shapes)
        pairs = []
        for name, shape in shapes.items():
            short = isinstance(shape, list | tuple) and len(shape) <= 8
            for size in shape if short else (None,):
                if type(size) is not int or not 0 <= size <= 2**31:
                    raise ExchangeError(
                        "the exchange schema is malformed: a shape is not a short list of whole numbers"
                    )
            pairs.append((name, tuple(shape)))
        return cls(tuple(sorted(pairs)), dtype_up)

    def check(self, state: Tensors) -> None:
        """Refuse weights that are not exactly this exchange, finite and in float32.

        Parameters
        ----------
        state : mapping of str to Tensor

        Raises
        ------
        ExchangeError
            It names the tensor.
        """
        shapes = dict(self.shapes)
        for name in sorted(set(state) - set(shapes)):
            raise ExchangeError(f"tensor '{name}' is not part of the agreed exchange")
        for name in sorted(set(shapes) - set(state)):
            raise ExchangeError(f"tensor '{name}' of the agreed exchange is missing")
        for name, shape in self.shapes:
            check_tensor(name, state[name], shape, MASTER_DTYPE)


def check_tensor(name: str, value: Any, shape: tuple[int, ...] | None, dtypes: Mapping[str, torch.dtype]) -> None:
    """Refuse all but a finite dense tensor.

    Parameters
    ----------
    name : str, for the error
    value : anything
    shape : tuple of int, or None for any
    dtypes : mapping, number formats that are allowed, by name

    Raises
    ------
    ExchangeError
        It names the tensor, never its values.
    """
    if not isinstance(value, torch.Tensor):
        raise ExchangeError(f"tensor '{name}' is a {type(value).__name__}, not a torch tensor")
    if value.layout != torch.strided:
        raise ExchangeError(f"tensor '{name}' is not dense")
    if value.dtype not in dtypes.values():
        raise ExchangeError(f"tensor '{name}' has dtype {value.dtype}; allowed: {', '.join(dtypes)}")
    if shape is not None and tuple(value.shape) != tuple(shape):
        raise ExchangeError(f"tensor '{name}' has shape {tuple(value.shape)}; agreed: {tuple(shape)}")
    if not torch.isfinite(value).all():
        raise ExchangeError(f"tensor '{name}' has values that are not finite (NaN or infinity)")


def check_unit_rows(name: str, rows: torch.Tensor) -> None:
    """Refuse rows whose norm is not 1, within :data:`UNIT_TOLERANCE`.

    Parameters
    ----------
    name : str, for the error
    rows : Tensor (M, C)

    Raises
    ------
    ExchangeError
        It names the tensor.
    """
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
    """Refuse content that no server of this package sends; names and shapes are the method's to check.

    Parameters
    ----------
    tensors : anything; None and {} pass

    Raises
    ------
    ExchangeError
        It is no dictionary of finite dense float32 tensors, or too large.
    """
    if tensors is None:
        return
    if not isinstance(tensors, Mapping):
        raise ExchangeError(f"the server sent a {type(tensors).__name__} where tensors by name are expected")
    check_tensor_names(tensors)
    values = 0
    for value in tensors.values():
        values += value.numel() if torch.is_tensor(value) else 0
    if values > MAX_VALUES:
        raise ExchangeError(f"the server sent {values} values in one message; the limit is {MAX_VALUES}")
    for name in sorted(tensors):
        check_tensor(name, tensors[name], None, MASTER_DTYPE)


def check_update_size(update: Tensors, reference: Tensors, limit: float) -> None:
    """Refuse an update that is too large beside the weights it is added to.

    Parameters
    ----------
    update, reference : mapping of str to Tensor, the update and the weights
    limit : float, largest ratio of their Euclidean norms

    Raises
    ------
    ExchangeError
        The ratio is above ``limit``.
    """
    norm, base = euclidean_norm(update), euclidean_norm(reference)
    if norm > limit * base:
        raise ExchangeError(
            f"the update's norm is {norm / max(base, 1e-30):.3g} times that of the weights (limit {limit:g})"
        )


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


# ---------------------------------------------------------------------- fetching
def register_tensors() -> None:
    """Let FLARE send ``torch.Tensor`` as it is (float32 and bfloat16, no numpy in between), within the limits."""
    from nvflare.app_opt.pt.decomposers import TensorDecomposer
    from nvflare.fuel.utils import fobs

    decomposer = TensorDecomposer()
    decomposer._download = _bounded_download
    fobs.register(decomposer)


def expect_at_most(values: int) -> None:
    """Fetch no larger messages from now on, in this process.

    Parameters
    ----------
    values : int, most float32 values of one message
    """
    global _most_bytes
    _most_bytes = 4 * values


class _DownloadLimit:
    """Adds up what is fetched of one message; :class:`ExchangeError` beyond the limits.

    FLARE holds one chunk in memory before it can be counted, and has no limit for its size, the sender's choice.
    """

    def __init__(self) -> None:
        self.tensors = self.bytes = 0

    def __call__(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Count the tensors of one chunk and return them."""
        self.tensors += len(tensors)
        self.bytes += sum(tensor.nbytes for tensor in tensors.values())
        if self.tensors > MAX_TENSORS or self.bytes > _most_bytes:
            raise ExchangeError(f"a message of more than {MAX_TENSORS} tensors or {_most_bytes} bytes is not fetched")
        return dict(tensors)


def _bounded_download(*, use_disk: bool, root_dir: str | None = None, **settings: Any) -> tuple[str, Any]:
    """In place of FLARE's own; tensors are never fetched to disk, which this package does not ask for."""
    from nvflare.app_opt.pt.tensor_downloader import download_tensors

    return download_tensors(**settings, tensors_received_cb=_DownloadLimit())
