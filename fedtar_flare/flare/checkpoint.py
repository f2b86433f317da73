"""The server's checkpoints: weights, the method's own state and the place in the run, in one file each.

A checkpoint is written to a temporary file and renamed. It carries a checksum of its tensors, which is checked when it
is read. ``last()`` takes the newest whole checkpoint, so a truncated file costs one round, never the run.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedtar_flare.errors import ConfigError, FedTARError
from fedtar_flare.files import replacing
from fedtar_flare.tensor_file import StateError, checksum, read_tensors, write_tensors

_FILE = re.compile(r"^round-(\d{4})\.safetensors$")
FORMAT = 2
"""Of the file. 2: the method's tensors are named ``method.``; format 1 had FedTAR's under ``psi.``."""
BEST = "best.safetensors"
SIMULATED_JOB = "simulate_job"
"""FLARE's id of every job in the simulator."""
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


class RunCheckpoints:
    """Where the checkpoints of a job are written, and those of the job that it resumes.

    They go to the results, and to the server's kit by the job's id, where they stay: FLARE takes the run folder away
    when a job ends, and a server that was killed leaves no results to download. The simulator has no kit.

    Args:
        results: folder of the job's results.
        run_dir: FLARE's run folder.
        job: FLARE's id of the job.
        resume_from: id of a job that ran at this server, or a checkpoint folder; empty: nothing is resumed.
        keep: how many of the newest stay.
    """

    def __init__(self, results: Path, run_dir: Path, job: str | None, resume_from: str, keep: int):
        self._kept = run_dir.parent / KEPT
        self._resume_from = resume_from
        places = [results / "checkpoint"]
        if job and job != SIMULATED_JOB:
            places.append(self._kept / job)
        self._own = [CheckpointFolder(place, keep) for place in places]

    def save(self, checkpoint: Checkpoint, *, best: bool) -> None:
        """Write a checkpoint to every place."""
        for folder in self._own:
            folder.save(checkpoint, best=best)

    def resumed(self, settings: Mapping[str, Any], may_differ: Collection[str]) -> tuple[Checkpoint, list[str]]:
        """The checkpoint to go on from, and a line for each damaged one that was passed over.

        Raises:
            FedTARError: there is none, or it was made with other settings than these (``may_differ`` apart).
        """
        checkpoint, problems = self._source().last()
        before = checkpoint.info["settings"]
        differing = [
            f"{name}: {before.get(name)!r} then, {value!r} now"
            for name, value in settings.items()
            if before.get(name) != value and name not in may_differ
        ]
        if differing:
            raise FedTARError(f"{self._resume_from} was made with other settings: " + "; ".join(differing))
        return checkpoint, problems

    def carry_over(self, round_: int) -> Checkpoint | None:
        """Make the resumed job's checkpoint and its best one this job's own; returns the best."""
        for folder in self._own:
            self._source().carry_to(folder, round_)
        best = self._own[0].folder / BEST
        return load(best) if best.is_file() else None

    def _source(self) -> CheckpointFolder:
        if not re.fullmatch(r"[0-9A-Za-z-]+", self._resume_from):
            return CheckpointFolder(self._resume_from)
        folder = self._kept / self._resume_from
        if not folder.is_dir():
            raise FedTARError(
                f"no checkpoint of job {self._resume_from} at this server: it ended before its first round did"
            )
        return CheckpointFolder(folder)


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
