"""The server's checkpoints: weights, the method's own state and the place in the run, in one file each.

A checkpoint is written beside and renamed, carries a checksum of its tensors, and is read only when that is right.
``last()`` takes the newest one that is whole, so a truncated file costs one round, never the run.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedtar_flare.errors import ConfigError, FedTARError
from fedtar_flare.files import replacing
from fedtar_flare.tensor_file import StateError, checksum, read_tensors, write_tensors

_FILE = re.compile(r"^round-(\d{4})\.safetensors$")
FORMAT = 1
BEST = "best.safetensors"
KEPT = "fedtar_checkpoints"
"""Folder of the server's kit where checkpoints stay after a job, by the job's id."""


@dataclass(frozen=True)
class Checkpoint:
    """State of the server after round ``round``.

    Args:
        round: the last round that is whole (0 = the initial weights).
        weights: the shared weights w, float32.
        method: further tensors of the method at the server, by name.
        info: run_id, settings that must not change, schema, best loss, seeds (JSON-able).
    """

    round: int
    weights: Mapping[str, torch.Tensor]
    method: Mapping[str, torch.Tensor]
    info: Mapping[str, Any]


class CheckpointFolder:
    """Checkpoints of one run.

    Args:
        folder: where they lie; made when missing.
        keep: how many of the newest stay (``best.safetensors`` is beside them and not counted).
    """

    def __init__(self, folder: Path | str, keep: int = 3):
        if keep < 1:
            raise ConfigError(f"keep must be at least 1, not {keep}")
        self.folder = Path(folder)
        self.keep = keep

    def save(self, checkpoint: Checkpoint, *, best: bool = False) -> Path:
        """Write a checkpoint (and ``best.safetensors`` when it is the best so far), then drop the oldest."""
        path = self.folder / f"round-{checkpoint.round:04d}.safetensors"
        _write(path, checkpoint)
        if best:
            _write(self.folder / BEST, checkpoint)
        for _, old in self._files()[: -self.keep]:
            old.unlink()
        return path

    def last(self) -> tuple[Checkpoint, list[str]]:
        """The newest whole checkpoint, and one line for each damaged one that was passed over.

        Raises:
            FedTARError: when none is whole.
        """
        problems: list[str] = []
        for _, path in reversed(self._files()):
            try:
                return load(path), problems
            except StateError as error:
                problems.append(str(error))
        raise FedTARError("\n".join([f"{self.folder}: no whole checkpoint to start from", *problems]))

    def carry_to(self, other: CheckpointFolder, round_: int) -> None:
        """Copy the checkpoint of one round and the best one, so that a resumed run starts with them as its own."""
        for name in (f"round-{round_:04d}.safetensors", BEST):
            source, target = self.folder / name, other.folder / name
            if source.is_file() and source.resolve() != target.resolve():
                with replacing(target) as temporary:
                    shutil.copyfile(source, temporary)

    def _files(self) -> list[tuple[int, Path]]:
        if not self.folder.is_dir():
            return []
        matches = ((_FILE.match(path.name), path) for path in self.folder.iterdir())
        return sorted((int(match.group(1)), path) for match, path in matches if match)


def load(path: Path) -> Checkpoint:
    """Read one checkpoint file.

    Raises:
        StateError: when it is missing, damaged, of another format, or its checksum is wrong.
    """
    tensors, info = read_tensors(path)
    if info.get("format") != FORMAT:
        raise StateError(f"{path}: checkpoint format {info.get('format')!r}; this version reads format {FORMAT}")
    if info.get("checksum") != checksum(tensors):
        raise StateError(f"{path}: the checksum is wrong; the file was damaged after it was written")
    weights = {name[2:]: value for name, value in tensors.items() if name.startswith("w.")}
    method = {name[7:]: value for name, value in tensors.items() if name.startswith("method.")}
    return Checkpoint(int(info["round"]), weights, method, info["info"])


def _write(path: Path, checkpoint: Checkpoint) -> None:
    tensors = {f"w.{name}": value for name, value in checkpoint.weights.items()}
    tensors |= {f"method.{name}": value for name, value in checkpoint.method.items()}
    head = {
        "format": FORMAT,
        "round": checkpoint.round,
        "info": dict(checkpoint.info),
        "checksum": checksum(tensors),
    }
    write_tensors(path, tensors, head)
