"""What stays at a site between tasks: versions of its private state on disk, keyed by run and site.

In the simulator every task is a new process, so the disk is the only memory. A version is one ``safetensors`` file with
its own JSON inside, renamed into place: a killed process leaves the old version or the new one, never half of one.
"""

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from fedtar_flare.core.errors import DISK_FULL, ConfigError, DataError, ExchangeError
from fedtar_flare.core.files import PRIVATE, locked, read_json, write_json
from fedtar_flare.core.tensor_file import StateError, read_tensors, write_tensors
from fedtar_flare.data.timeline import extends
from fedtar_flare.protocol.exchange import ExchangeSchema
from fedtar_flare.protocol.messages import RUN_ID, TaskHeader, version
from fedtar_flare.site.context import SITE_NAME

ANSWERED = "tasks.json"
"""Which tasks the site has answered in the run, and how often."""
_TIMES = "how often"
RUN = "run.json"
"""What the first handshake fixed for the run, and what may be asked only once."""

TASK_SCORES = "scores-"
"""How the files begin that hold scores of single images."""

MAX_RUNS = 500
"""Runs whose state one site keeps."""
SPARE_TASKS = 10
"""How many more tasks of a kind than twice its rounds times its time steps a run may ask for: it may be resumed."""
RESERVE = 20_000_000
"""Bytes that a state leaves free on its disk."""

KEEP_ROUNDS = 3
"""Rounds before the running one that keep their last version: a run may be resumed from the checkpoint before the last.
"""

_VERSION = re.compile(r"\d{4}-\d{2}")
logger = logging.getLogger(__name__)


def task_scores(step: int) -> str:
    """Name of what holds the scores (E + 1, n) of a task's test images at e = 0..E, with their patients and labels."""
    return f"{TASK_SCORES}{step:04d}"


class SiteState:
    """Versions of one site's state in one run: ``<root>/<run_id>/<site>/<round>-<step>.safetensors``.

    ``root`` lies outside of FLARE's run folder; the server makes ``run_id`` and its checkpoints carry it.
    """

    def __init__(self, root: Path | str, run_id: str, site: str):
        for what, name, form in (("run_id", run_id, RUN_ID), ("site", site, SITE_NAME)):
            if not form.fullmatch(name):
                raise ConfigError(f"{what} '{name}' cannot name a folder: it must be of the form {form.pattern}")
        self.root = Path(root)
        self.folder = self.root / run_id / site

    def save(self, version: str, tensors: Mapping[str, torch.Tensor], info: Mapping[str, Any], keep: str = "") -> None:
        """Write the version ``<round>-<step>`` atomically and prune old ones, but not ``keep`` (the best round's)."""
        if not _VERSION.fullmatch(version):
            raise ConfigError(f"state version '{version}' is not of the form 0001-02")
        self.write(version, tensors, info)
        self._prune(version, keep)

    def latest(self, not_after: str) -> str | None:
        """The newest version that is not later than ``not_after``; None when there is none."""
        return max((v for v in self.versions() if v <= not_after), default=None)

    def versions(self) -> list[str]:
        """All versions on disk, oldest first."""
        return [name for name in self.names("") if _VERSION.fullmatch(name)]

    def write(self, name: str, tensors: Mapping[str, torch.Tensor], info: Mapping[str, Any]) -> None:
        """Write ``<name>.safetensors`` atomically, with ``info`` (JSON) inside."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._require_room(sum(value.numel() * value.element_size() for value in tensors.values()))
        os.chmod(self.folder, 0o700)  # noqa: PTH101 - private to the account that runs the site
        write_tensors(self.folder / f"{name}.safetensors", tensors, info)

    def read(self, name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Read what :meth:`write` or :meth:`save` wrote. Raises StateError if it is missing or damaged."""
        return read_tensors(self.folder / f"{name}.safetensors")

    def has(self, name: str) -> bool:
        return (self.folder / f"{name}.safetensors").is_file()

    def names(self, prefix: str) -> list[str]:
        """Names of the files that begin with ``prefix``, sorted."""
        return sorted(path.stem for path in self.folder.glob(f"{prefix}*.safetensors"))

    def remove(self, name: str) -> None:
        (self.folder / f"{name}.safetensors").unlink(missing_ok=True)

    def answered(self) -> dict[str, str]:
        """Tasks that the site has answered in this run, each with the version that names its last round and step."""
        return {task: last for task, last in self._record(ANSWERED).items() if task != _TIMES}

    def add_answered(self, task: str, version: str) -> None:
        """Record that the site has answered a task of this round and step, and how often one of its kind."""
        with locked(self.folder / ANSWERED):
            record = self._record(ANSWERED)
            times = record.get(_TIMES, {})
            times[task] = times.get(task, 0) + 1
            write_json(self.folder / ANSWERED, record | {task: version, _TIMES: times}, PRIVATE)

    def check_quota(self, task: str, header: TaskHeader) -> None:
        """Refuse (:class:`ExchangeError`) a task that the run has asked for too often: each answer tells something."""
        most = 2 * header.rounds * header.time_steps + SPARE_TASKS
        if self._record(ANSWERED).get(_TIMES, {}).get(task, 0) >= most:
            raise ExchangeError(f"task '{task}' was answered {most} times in this run, and no run needs more")

    # ------------------------------------------------------------------ what holds for the whole run
    def fix_run(self, header: TaskHeader, timeline: str, schema: ExchangeSchema, about: Mapping[str, Any]) -> None:
        """Fix the time steps, whose reports are scored and what is exchanged, at the first handshake;
        :class:`ExchangeError` where they change.

        ``about`` is what :meth:`about_run` gives besides: ``data`` (settings) and ``seed``; for an audit also
        ``canaries`` and ``job`` (method, preset, settings, rounds).

        Numbers of the same patients in other cells would tell those of the cells that are left blank.
        """
        with self._alone():
            self.check_run(header, timeline)
            if self.schema() not in (None, schema):
                raise ExchangeError("the tensors that travel are others than at the run's first handshake")
            fixed: dict[str, Any] = {"time_steps": header.time_steps, "timeline": timeline, "score": header.score}
            if (before := self._record(RUN).get("time_steps", header.time_steps)) < header.time_steps:
                fixed["begun"] = [int(header.after[:4]), before + 1]
            self._write_run({**fixed, "schema": schema.to_dict(), **about})

    def check_run(self, header: TaskHeader, timeline: str) -> None:
        """Refuse (:class:`ExchangeError`) other time steps, or reports to score, than those that the run began with.

        A handshake may add periods.
        """
        run = self._record(RUN)
        steps, bounds = run.get("time_steps", header.time_steps), run.get("timeline", timeline)
        grown = header.round == 0 and steps + len(extends(bounds, timeline)) == header.time_steps > steps
        if not grown and (steps, bounds) != (header.time_steps, timeline):
            raise ExchangeError("the time steps are others than at the run's first handshake")
        if run.get("score", header.score) != header.score:
            raise ExchangeError("the reports to score are of others than at the run's first handshake")

    def ahead(self, header: TaskHeader) -> range:
        """In the handshake of a job that adds periods: those of which nothing was learnt yet; else empty."""
        after, first = self._record(RUN).get("begun", (-1, 0))
        return range(first, header.time_steps + 1 if header.round == 0 and after == int(header.after[:4]) else first)

    def about_run(self) -> dict[str, Any]:
        """``time_steps``, ``data`` and ``seed`` of the run; ConfigError where the site has no such run."""
        about = self._record(RUN)
        if missing := {"time_steps", "data", "seed"} - set(about):
            raise ConfigError(
                f"{self.folder} does not say the run's {', '.join(sorted(missing))}: this site took no part in run "
                f"{self.folder.parent.name}, its state was purged, or an earlier release wrote it"
            )
        return about

    def note_precision(self, precision: str) -> None:
        """Record the precision that the site computes in, for drafts."""
        with self._alone():
            self._write_run({"precision": precision})

    @property
    def precision(self) -> str:
        """The precision that the site computed in last; ``auto`` where an earlier release wrote the state."""
        return str(self._record(RUN).get("precision", "auto"))

    def schema(self) -> ExchangeSchema | None:
        """What is exchanged in the run; None before its handshake."""
        schema = self._record(RUN).get("schema")
        return None if schema is None else ExchangeSchema.from_dict(schema)

    def may_answer(self, question: str, *given: str) -> bool:
        """Whether a question may be answered: it is asked for the first time, or again of the same ``given``: digests
        of the weights and of the patients.

        A server that asks again from weights of its choice reads a gradient off the differences, and one that asks
        again after a withdrawal what the patient had added. Of two processes one is the first.
        """
        digest = hashlib.sha256("/".join(given).encode()).hexdigest()
        with self._alone():
            asked: dict[str, str] = self._record(RUN).get("asked", {})
            if question not in asked:
                self._write_run({"asked": asked | {question: digest}})
            return asked.get(question, digest) == digest

    def _alone(self) -> AbstractContextManager[None]:
        """Keeps other processes from the run's record between reading and writing it."""
        return locked(self.folder / RUN)

    def _record(self, name: str) -> dict[str, Any]:
        """A file of JSON, empty where it is missing. Raises StateError if it is damaged."""
        if not (file := self.folder / name).is_file():
            return {}
        try:
            return read_json(file)
        except ConfigError as error:
            raise StateError(str(error)) from error

    def _write_run(self, changes: Mapping[str, Any]) -> None:
        write_json(self.folder / RUN, self._record(RUN) | dict(changes), PRIVATE)

    def require_capacity(self) -> None:
        """Refuse (:class:`DataError`) a new run at a site that keeps as many as it may: a server can name any."""
        if self.folder.exists() or not self.root.is_dir():
            return
        kept = sum((folder / self.folder.name).is_dir() for folder in self.root.iterdir())
        if kept >= MAX_RUNS:
            raise DataError(
                f"{self.root} holds the state of {kept} runs: delete old ones with 'fedtar site purge'",
                reason="too-many-runs",
                public=f"the site keeps the state of {kept} runs already; its staff must purge old ones",
            )

    def _require_room(self, size: int) -> None:
        """Leave room for the audit: a state that fills the disk would end every message of the site."""
        free = shutil.disk_usage(self.folder).free
        if free < size + RESERVE:
            raise DataError(
                f"{self.folder}: {free / 1e6:.0f} MB are free; {(size + RESERVE) / 1e6:.0f} MB are needed (state, and "
                f"{RESERVE / 1e6:.0f} MB for the audit). Free the disk ('fedtar site purge --cache')",
                reason="disk-full",
                public=DISK_FULL,
            )

    def _prune(self, current: str, keep: str) -> None:
        """Keep the running round's last two versions and the last one of each of the rounds before."""
        versions = [v for v in self.versions() if v <= current]
        rounds = sorted({v[:4] for v in versions})
        kept = set(versions[-2:])
        kept |= {max(v for v in versions if v[:4] == r) for r in rounds[-1 - KEEP_ROUNDS :]}
        kept |= {max((v for v in versions if v <= keep), default="")} if keep else set()
        for v in set(versions) - kept:
            self.remove(v)


def state_of_run(folder: Path, run_id: str, part: str) -> SiteState:
    """The state in a folder ``<run id>/<site>``; :class:`ConfigError` where it is of another run.

    ``part`` says what the site keeps, for messages.
    """
    if folder.parent.name != run_id:
        raise ConfigError(
            f"{folder} is the state of run {folder.parent.name}, the adapter is of run {run_id}; the {part} "
            "fits only the run that it was trained in"
        )
    return SiteState(folder.parent.parent, folder.parent.name, folder.name)


def trained_version(state: SiteState, round_: int, time_steps: int, part: str) -> str:
    """The version that was the site's last trained one at the end of a round; ConfigError where it is unknown.

    It is of an earlier round where the site did not train in this one, and its state shows that it was there later: the
    run then scored the site with this version too.
    """
    found = state.latest(version(round_, time_steps))
    if found is None or found == version(0, 0):
        raise ConfigError(
            f"{state.folder} has no {part} of round {round_}, the adapter's (versions there: "
            f"{', '.join(state.versions()) or 'none'}). Those of early rounds are deleted while a run goes on, and "
            "one of another round does not fit. Draft with the shared adapter alone (without --state)"
        )
    trained, last = (int(name[:4]) for name in (found, max([found, *state.answered().values()])))
    if last < round_:
        raise ConfigError(
            f"{state.folder} has the {part} of round {trained} and ends with round {last}; the adapter is of "
            f"round {round_}. Either this is an older copy of the state, or the site left the run; the two do not fit. "
            f"Name the state as it was after round {round_}, or draft with the shared adapter alone (without --state)"
        )
    if trained != round_:
        logger.warning("the site did not train in round %d; its %s is of round %d", round_, part, trained)
    return found


class ReadOnlyState(SiteState):
    """The same state for a process that shares a task with the one that keeps it: read, never written."""

    def write(self, name: str, tensors: Mapping[str, torch.Tensor], info: Mapping[str, Any]) -> None:
        """Nothing: the other process writes it."""

    def remove(self, name: str) -> None:
        """Nothing: the other process removes it."""

    def add_answered(self, task: str, version: str) -> None:
        """Nothing: the other process answers."""

    def _alone(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _write_run(self, changes: Mapping[str, Any]) -> None:
        pass
