"""The server's checkpoints, one file each, whole or not at all: a damaged file costs one round, never the run."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.core.files import PRIVATE, StateError, checksum, read_json, read_tensors, write_json, write_tensors
from fedtar_flare.protocol.exchange import Tensors

FORMAT = 2
BEST = "best.safetensors"
SIMULATED_JOB = "simulate_job"
"""FLARE's id of every job in the simulator."""
JOBS = "fedtar_checkpoints"
"""Folder of the server's kit where checkpoints stay after a job, by the job's id."""
INITIAL = "fedtar_initial"
"""Folder of the server's kit where its operator puts checkpoint files that jobs may start from, by name."""
_SUBMITTER = "submitter.json"
_MAY_GROW = ("num_rounds", "time_steps")
_JOB_ID = re.compile(r"[0-9A-Za-z-]{1,100}")
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,99}")


@dataclass(frozen=True)
class Checkpoint:
    """State of the server after a whole round."""

    round: int
    """Round after which it was made."""
    weights: Tensors
    """The shared weights w, float32."""
    method: Tensors
    """Further tensors of the method at the server."""
    info: Mapping[str, Any]
    """JSON-able: run_id, settings that must not change, schema, members and progress."""


class CheckpointFolder:
    """Checkpoints of one job: the ``keep`` newest stay, besides ``best.safetensors`` and the ``oldest`` so many."""

    def __init__(self, folder: Path | str, keep: int = 3, oldest: int = 0):
        self.folder, self.keep, self.oldest = Path(folder), keep, oldest

    def save(self, checkpoint: Checkpoint, *, best: bool = False) -> None:
        """Write a checkpoint, also as the best one where it is, then drop the oldest."""
        _write(self.folder / f"round-{checkpoint.round:04d}.safetensors", checkpoint)
        if best:
            _write(self.folder / BEST, checkpoint)
        for old in [*self.rounds().values()][self.oldest : -self.keep]:
            old.unlink()

    def last(self, before: int = 0) -> tuple[Checkpoint, list[str]]:
        """Read the newest whole checkpoint (``before`` a round), and a line for each damaged one, or FedTARError."""
        problems: list[str] = []
        for r, path in reversed(self.rounds().items()):
            if before and r >= before:
                continue
            try:
                return load(path), problems
            except StateError as error:
                problems.append(str(error))
        raise FedTARError("\n".join([f"{self.folder}: no whole checkpoint to start from", *problems]))

    def rounds(self) -> dict[int, Path]:
        """Checkpoint files by round, in order, damaged ones too."""
        files = sorted(self.folder.glob("round-[0-9][0-9][0-9][0-9].safetensors"))
        return {int(path.stem[-4:]): path for path in files}


class RunCheckpoints:
    """Where a job writes its checkpoints, and those of the job that it resumes.

    They go to the results, and to the server's kit by the job's id, where they outlast FLARE's run folder and a crash.

    A job finds only checkpoints of jobs of its own submitter, and names no paths: whoever may submit must not read the
    server's files or another submitter's weights, nor learn which there are. In the simulator, which stores nothing by
    id, ``resume_from`` and the name of initial weights are paths.
    """

    def __init__(self, run: Any):
        run_dir, job, keep = Path(run.get_run_dir()), run.fl_ctx.get_job_id(), run.config.keep_checkpoints
        self._kit, self._resume_from = run_dir.parent, run.config.resume_from
        meta = run_dir / "meta.json"  # which the server has written; there is none in the simulator
        self._submitter = str(read_json(meta).get("submitter_name") or "") if meta.is_file() else ""
        self._simulated = not job or job == SIMULATED_JOB
        oldest = bool(self._resume_from)  # that from which this job begins: its rounds can be made again
        self._folders = [CheckpointFolder(run.results_folder / "checkpoint", keep, oldest)]
        if not self._simulated:
            self._folders.append(CheckpointFolder(self._kit / JOBS / job, keep, oldest))

    def initial(self, name: str) -> Tensors:
        """Weights of a checkpoint file that the server's operator offers under this name; FedTARError without one."""
        if self._simulated:
            return load(Path(name)).weights
        file = self._kit / INITIAL / f"{name}.safetensors"
        if not _NAME.fullmatch(name) or not file.is_file():
            text = f"this server has no initial weights of the name '{name:.100}': its operator puts them into its kit"
            raise FedTARError(f"{text} as {INITIAL}/NAME.safetensors")
        return load(file).weights

    def save(self, checkpoint: Checkpoint, *, best: bool) -> None:
        """Write a checkpoint to the results and to the kit."""
        for folder in self._folders[1:]:  # the submitter's name comes first: nobody else may resume from them
            if not (file := folder.folder / _SUBMITTER).is_file():
                write_json(file, {"submitter": self._submitter}, PRIVATE)
        for folder in self._folders:
            folder.save(checkpoint, best=best)

    def resumed(self, settings: Mapping[str, Any], before: int) -> tuple[Checkpoint, list[str]]:
        """The checkpoint to resume, and a line for each damaged one; FedTARError if there is none of such settings."""
        checkpoint, problems = self._source().last(before)
        earlier = checkpoint.info["settings"]
        differing = [
            f"{name}: {earlier.get(name)!r} then, {value!r} now"
            for name, value in settings.items()
            if earlier.get(name) != value and not (name in _MAY_GROW and value > earlier[name])
        ]
        if differing:
            raise FedTARError(f"{self._resume_from} was made with other settings: " + "; ".join(differing))
        return checkpoint, problems

    def best(self, resumed: Checkpoint, best: int | None) -> Checkpoint:
        """The best checkpoint of the job that is resumed, whose best round is given; StateError if it is damaged."""
        return resumed if best in (None, resumed.round) else load(self._source().folder / BEST)

    def carry_over(self, resumed: Checkpoint, best: Checkpoint) -> None:
        """Copy the resumed job's checkpoint and its best one to this job."""
        self.save(resumed, best=best is resumed)
        for folder in self._folders if best is not resumed else ():
            _write(folder.folder / BEST, best)

    def _source(self) -> CheckpointFolder:
        if self._simulated:
            return CheckpointFolder(self._resume_from)
        folder = self._kit / JOBS / self._resume_from
        same_submitter = False
        if _JOB_ID.fullmatch(self._resume_from):
            with suppress(ConfigError):  # of an unknown job, or damaged
                same_submitter = read_json(folder / _SUBMITTER).get("submitter") == self._submitter
        if not same_submitter:
            text = "it ended before its first round did, was somebody else's, or never was"  # the same for all three
            raise FedTARError(f"this server has no checkpoint of job {self._resume_from:.100} to resume: {text}")
        return CheckpointFolder(folder)


def load(path: Path) -> Checkpoint:
    """Read one checkpoint file; :class:`StateError` where it is missing, damaged or of another format."""
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
    head = {"format": FORMAT, "round": checkpoint.round, "info": dict(checkpoint.info)}
    write_tensors(path, tensors, head | {"checksum": checksum(tensors)})
