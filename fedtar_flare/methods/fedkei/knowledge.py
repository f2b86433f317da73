"""What a run has learnt, as one file for a hospital outside: the final clusters' centres and the common start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedtar_flare.errors import ConfigError
from fedtar_flare.methods.fedkei.mixing import Layout
from fedtar_flare.methods.fedkei.mixture import Mixture
from fedtar_flare.models.classifier import ClassifierConfig
from fedtar_flare.settings import build
from fedtar_flare.tensor_file import StateError, checksum, read_tensors, write_tensors
from fedtar_flare.version import __version__

KNOWLEDGE_FILE = "knowledge.safetensors"
FORMAT = 2
_START, _CENTRE = "start.", "centre."


@dataclass(frozen=True)
class Knowledge:
    """Centres C (K, *shape) by tensor name, which a hospital outside learns its own mixture of; w0; and what they are.

    Args:
        classifier: the model that they belong to; ``fingerprint`` of its frozen encoder and w0.
        tasks: names of the diseases that the pool's modules were learnt on.
        modules: how many there were.
        transforms: ``data.transforms`` of the run, which prepare a hospital's images alike.
    """

    start: dict[str, Tensor]
    centres: dict[str, Tensor]
    classifier: ClassifierConfig
    fingerprint: str
    run_id: str
    tasks: tuple[str, ...]
    modules: int
    transforms: tuple[dict[str, Any], ...] = ()


def write_knowledge(
    folder: Path,
    mixture: Mixture,
    described: Mapping[str, Mapping[str, Any]],
    run_id: str,
    tasks: Sequence[str],
) -> Path | None:
    """Write ``knowledge.safetensors`` of the clusters so far; None where there is none (an empty pool).

    ``tasks``: names of the diseases that the modules were learnt on.

    It names diseases, no hospital. A plan that clusters nothing (Rand) leaves none.
    """
    if mixture.parts is None:
        return None
    model = next(iter(described.values()), {})
    info = {
        "format": FORMAT,
        "fedtar_flare": __version__,
        "run_id": run_id,
        "model": model.get("config", {}),
        "fingerprint": model.get("fingerprint", ""),
        "transforms": model.get("transforms", []),
        "tasks": list(tasks),
        "modules": len(next(iter(mixture.parts.values())).modules),
    }
    tensors = {f"{_START}{name}": value for name, value in mixture.pool.start.items()}
    tensors |= {f"{_CENTRE}{name}": value.contiguous() for name, value in mixture.centres().items()}
    path = folder / KNOWLEDGE_FILE
    write_tensors(path, tensors, info | {"checksum": checksum(tensors)})
    return path


def read_knowledge(path: Path) -> Knowledge:
    """Read what :func:`write_knowledge` wrote.

    Raises:
        ConfigError: it is missing, damaged, of another format, or its tensors do not fit together.
    """
    try:
        tensors, info = read_tensors(path)
    except StateError as error:
        raise ConfigError(f"{path}: no knowledge of a run of fedkei ({error})") from error
    if info.get("format") != FORMAT or info.get("checksum") != checksum(tensors):
        raise ConfigError(f"{path}: no whole knowledge file of format {FORMAT}")
    start = {name.removeprefix(_START): value for name, value in tensors.items() if name.startswith(_START)}
    centres = {name.removeprefix(_CENTRE): value for name, value in tensors.items() if name.startswith(_CENTRE)}
    Layout.of(start).columns(centres)
    return Knowledge(
        start=start,
        centres=centres,
        classifier=build(ClassifierConfig, info["model"], f"{path}: model"),
        fingerprint=str(info["fingerprint"]),
        run_id=str(info["run_id"]),
        tasks=tuple(info["tasks"]),
        modules=int(info["modules"]),
        transforms=tuple(info.get("transforms", ())),
    )
