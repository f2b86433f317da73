"""What stays at a site between tasks: versions of its private state on disk, keyed by run and site.

In the simulator every task is a new process, so the disk is the only memory. A version is one ``safetensors`` file with
its own JSON inside, renamed into place: a killed process leaves the old version or the new one, never half of one.
"""

import hashlib
import logging
import re
import shutil
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from fedtar_flare.core.errors import DISK_FULL, ConfigError, DataError, ExchangeError
from fedtar_flare.core.files import PRIVATE, StateError, locked, read_json, read_tensors, write_json, write_tensors
from fedtar_flare.data.cells import extends
from fedtar_flare.protocol.exchange import ExchangeSchema
from fedtar_flare.protocol.messages import RUN_ID, TaskHeader, version
from fedtar_flare.site.context import SITE_NAME

ANSWERED, _TIMES = "tasks.json", "how often"
"""Which tasks the site has answered in the run, and how often."""
FIRST_ROUNDS = "first-rounds.json"
"""In which round each patient came into the run; a digest stands for the id."""
RUN = "run.json"
"""What the first handshake fixed for the run, and what may be asked only once."""
TASK_SCORES = "scores-"
MAX_RUNS = 500  # whose state one site stores
SPARE_TASKS = 10
"""Tasks of a kind beyond twice its rounds times its time steps that a run may ask for: it may be resumed."""
MOST_REPEATS = 5  # of a task at one place of a run, whose visits come in the same order each time
RESERVE = 20_000_000  # bytes that a state leaves free on its disk
KEEP_ROUNDS = 3  # before the running one: a run may resume from the checkpoint before the last

_VERSION = re.compile(r"\d{4}-\d{2}")
logger = logging.getLogger(__name__)


def task_scores(step: int) -> str:
    """Name the file of a task's scores of its test images, (E + 1, n) at e = 0..E, with their patients and labels."""
    return f"{TASK_SCORES}{step:04d}"


class SiteState:
    """Versions of one site's state in one run: ``<root>/<run_id>/<site>/<round>-<step>.safetensors``."""

    def __init__(self, root: Path | str, run_id: str, site: str):
        for kind, name, form in (("run_id", run_id, RUN_ID), ("site", site, SITE_NAME)):
            if not form.fullmatch(name):
                raise ConfigError(f"{kind} '{name}' cannot name a folder: it must be of the form {form.pattern}")
        self.root = Path(root)
        self.folder = self.root / run_id / site
        self._read_run: dict[str, Any] | None = None

    # ------------------------------------------------------------------ versions and other files
    def save(self, version: str, tensors: Mapping[str, torch.Tensor], info: Mapping[str, Any], keep: str = "") -> None:
        """Write a version, then prune: two of this round stay, and the last of the :data:`KEEP_ROUNDS` before.

        So does the one to ``keep``, and the one with which the newest job began, whose rounds can then be made again.
        """
        if not _VERSION.fullmatch(version):
            raise ConfigError(f"state version '{version}' is not of the form 0001-02")
        self.write(version, tensors, info)
        last_of_round, older = dict[str, str](), []
        for name in self.versions():
            if name <= version:
                older.append(name)
                last_of_round[name[:4]] = name
        rounds = list(last_of_round)[-1 - KEEP_ROUNDS :]
        stay = {self.latest(keep), self.latest(self._run.get("job_after", ""))}
        for name in set(older[:-2]) - stay:
            if name[:4] not in rounds or name != last_of_round[name[:4]]:
                self.remove(name)

    def latest(self, not_after: str) -> str | None:
        """Find the newest version."""
        versions = self.versions()
        count = bisect_right(versions, not_after)
        return versions[count - 1] if count else None

    def versions(self) -> list[str]:
        """List all versions on disk."""
        return list(filter(_VERSION.fullmatch, self.names("")))

    def write(self, name: str, tensors: Mapping[str, torch.Tensor], info: Mapping[str, Any]) -> None:
        """Write ``<name>.safetensors`` atomically."""
        disk = next(folder for folder in (self.folder, *self.folder.absolute().parents) if folder.is_dir())
        size, free = sum(map(attrgetter("nbytes"), tensors.values())) + RESERVE, shutil.disk_usage(disk).free
        if free < size:
            text = f"{self.folder}: {free / 1e6:.0f} MB are free; {size / 1e6:.0f} MB are needed, the audit's included"
            text += ". Free the disk ('fedtar site purge --cache')"
            raise DataError(text, reason="disk-full", public=DISK_FULL)
        write_tensors(self.folder / f"{name}.safetensors", tensors, info)

    def read(self, name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Read what :meth:`write` or :meth:`save` wrote."""
        return read_tensors(self.folder / f"{name}.safetensors")

    def has(self, name: str) -> bool:
        """Tell whether a file is there."""
        return (self.folder / f"{name}.safetensors").is_file()

    def names(self, prefix: str) -> list[str]:
        """List files by the beginning of their names."""
        return sorted(map(attrgetter("stem"), self.folder.glob(f"{prefix}*.safetensors")))

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""
        (self.folder / f"{name}.safetensors").unlink(missing_ok=True)

    # ------------------------------------------------------------------ who came when
    def note_patients(self, patients: Collection[str], round_: int) -> None:
        """Record a round as the first one of all these patients who are not recorded yet."""
        with locked(self.folder / FIRST_ROUNDS):
            rounds = self._record(FIRST_ROUNDS)
            if (more := dict.fromkeys(map(self._digest, patients), round_) | rounds) != rounds:
                write_json(self.folder / FIRST_ROUNDS, more, PRIVATE)

    def first_round(self, patient: str, least: int) -> int | None:
        """Say before which round the run never saw a patient; None: it never did. This number leaves the site: it is an
        earlier one where fewer than ``least`` patients came in the patient's own.
        """
        rounds = self._record(FIRST_ROUNDS)
        if (own := rounds.get(self._digest(patient))) is None:
            return None
        sizes = Counter(rounds.values())
        return max((r for r, size in sizes.items() if r <= own and size >= least), default=1)

    def _digest(self, patient: str) -> str:
        return hashlib.sha256(f"{self.folder.name}/{patient}".encode()).hexdigest()[:32]

    def take_over(self, origin: str, parts: Collection[str]) -> bool:
        """Begin with the state that another run had at a version (``RUN/0002-03``), where this run has none yet.

        Of its other files come those in ``parts`` that are there. False where it is gone: that round's, or the last.
        """
        run_id, _, at = origin.partition("/")
        source = SiteState(self.root, run_id, self.folder.name)
        newest, last = source.latest(at) or "", source.latest("9")
        if self.versions() or (newest[:4] != at[:4] and newest != last):
            return bool(self.versions())
        rounds = {who: r for who, r in source._record(FIRST_ROUNDS).items() if r <= int(at[:4])}
        write_json(self.folder / FIRST_ROUNDS, rounds, PRIVATE)
        for name in (*filter(source.has, parts), newest):  # the version last: with it the state is whole
            self.write(name, *source.read(name))
        return True

    # ------------------------------------------------------------------ tasks of the run
    def answered(self) -> dict[str, str]:
        """List the tasks that the site has answered in this run."""
        record = self._record(ANSWERED)
        record.pop(_TIMES, None)
        return record

    def add_answered(self, task: str, version: str) -> None:
        """Record an answer, and how often the task was answered."""
        with locked(self.folder / ANSWERED):
            record = self._record(ANSWERED)
            times = record.get(_TIMES, {})
            for asked in (task, f"{task} {version}"):
                times[asked] = times.get(asked, 0) + 1
            write_json(self.folder / ANSWERED, record | {task: version, _TIMES: times}, PRIVATE)

    @contextmanager
    def answering(self, task: str, header: TaskHeader) -> Iterator[None]:
        """Let a run's tasks be answered one at a time, in whatever job, and none too often: each tells something."""
        with locked(self.folder / "task"):
            most, times = 2 * header.rounds * header.time_steps + SPARE_TASKS, self._record(ANSWERED).get(_TIMES, {})
            if times.get(task, 0) >= most:
                raise ExchangeError(f"task '{task}' was answered {most} times in this run, and no run needs more")
            place = version(header.round, header.step)
            if header.round and times.get(f"{task} {place}", 0) >= MOST_REPEATS:
                raise ExchangeError(f"task '{task}' was answered {MOST_REPEATS} times at {place}: no run needs more")
            yield

    # ------------------------------------------------------------------ what holds for the whole run
    def fix_run(self, header: TaskHeader, timeline: str, schema: ExchangeSchema, about: Mapping[str, Any]) -> None:
        """Fix time steps, scored reports and exchange at the first handshake; other cells would tell the blank ones."""
        with self._exclusive():
            self.check_run(header, timeline)
            if self.schema() not in (None, schema):
                raise ExchangeError("the tensors that travel are others than at the run's first handshake")
            fixed: dict[str, Any] = {"time_steps": header.time_steps, "timeline": timeline, "score": header.score}
            fixed["ended"] = False
            if header.after != version(0, 0):
                fixed["job_after"] = header.after
            if (before := self._run.get("time_steps", header.time_steps)) < header.time_steps:
                fixed["begun"] = [int(header.after[:4]), before + 1]
            sites = sorted({*self._run.get("sites", ()), *about.get("sites", ())})
            self._write_run({**fixed, "schema": schema.to_dict(), **about, "sites": sites})

    def check_run(self, header: TaskHeader, timeline: str) -> None:
        """Refuse other time steps, or reports to score, than the run's first ones; a handshake may add periods."""
        run = self._run
        steps, bounds = run.get("time_steps", header.time_steps), run.get("timeline", timeline)
        grown = header.round == 0 and steps + len(extends(bounds, timeline)) == header.time_steps > steps
        if not grown and (steps, bounds) != (header.time_steps, timeline):
            raise ExchangeError("the time steps are others than at the run's first handshake")
        if run.get("score", header.score) != header.score:
            raise ExchangeError("the reports to score are of others than at the run's first handshake")

    def ahead(self, header: TaskHeader) -> range:
        """Find periods of which nothing was learnt yet, in the handshake of a job that adds some."""
        after, first = self._run.get("begun", (-1, 0))
        return range(first, header.time_steps + 1 if header.round == 0 and after == int(header.after[:4]) else first)

    def about_run(self) -> dict[str, Any]:
        """Read what :meth:`fix_run` recorded."""
        about = self._run
        if missing := {"time_steps", "data", "seed"} - set(about):
            text = f"{self.folder} does not say the run's {', '.join(sorted(missing))}: this site took no part in it"
            raise ConfigError(f"{text}, or its state was purged")
        return about

    def note(self, **facts: Any) -> None:
        """Record the ``precision`` that the site computes in, or that the run's last task is answered (``ended``)."""
        with self._exclusive():
            self._write_run(facts)

    @property
    def precision(self) -> str:
        """The precision that the site computed in last; ``auto`` before the first time."""
        return str(self._run.get("precision", "auto"))

    def spare(self) -> list[Path]:
        """List what of a run that ended well only a resume from an earlier round needs; the newest version stays, and
        the one with which the newest job began, whose rounds may have to be made again.
        """
        if not self._run.get("ended"):
            return []
        stay = {self.latest("9"), self.latest(self._run.get("job_after", ""))}
        names = [*self.names("broadcast-"), *(name for name in self.versions() if name not in stay)]
        return [self.folder / f"{name}.safetensors" for name in names]

    def schema(self) -> ExchangeSchema | None:
        """Read the run's exchange."""
        schema = self._run.get("schema")
        return None if schema is None else ExchangeSchema.from_dict(schema)

    def may_answer(self, question: str, *digests: str) -> bool:
        """Decide whether to answer: a question is answered for one set of weights and patients only.

        A server that asks again from weights of its choice reads a gradient off the differences, and one that asks
        again after a withdrawal what the patient had added. Of two processes one is the first.
        """
        digest = hashlib.sha256("/".join(digests).encode()).hexdigest()
        with self._exclusive():
            answered: dict[str, str] = self._run.get("asked", {})
            if question not in answered:
                self._write_run({"asked": answered | {question: digest}})
            return answered.get(question, digest) == digest

    def require_capacity(self) -> None:
        """Refuse a new run at a site that stores :data:`MAX_RUNS` of them, because a server can name any."""
        if self.folder.exists() or not self.root.is_dir():
            return
        runs = sum((folder / self.folder.name).is_dir() for folder in self.root.iterdir())
        if runs >= MAX_RUNS:
            public = f"the site keeps the state of {runs} runs already; its staff must purge old ones"
            raise DataError(f"{self.root}: {public} ('fedtar site purge')", reason="too-many-runs", public=public)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Lock the run's record for other processes, and read anew what they wrote before."""
        with locked(self.folder / RUN):
            self._read_run = None
            yield

    def _record(self, name: str) -> dict[str, Any]:
        """A file of JSON, empty where it is missing. Raises StateError if it is damaged."""
        if not (file := self.folder / name).is_file():
            return {}
        try:
            return read_json(file)
        except ConfigError as error:
            raise StateError(str(error)) from error

    @property
    def _run(self) -> dict[str, Any]:
        """The run's record, read once; again after :meth:`_exclusive`, as another process may have written it."""
        if self._read_run is None:
            self._read_run = self._record(RUN)
        return self._read_run

    def _write_run(self, changes: Mapping[str, Any]) -> None:
        self._read_run = self._run | dict(changes)
        write_json(self.folder / RUN, self._read_run, PRIVATE)


class ReadOnlyState(SiteState):
    """The same state for a process that shares a task with the one that owns it, and alone writes it."""

    def write(self, name: str, tensors: Mapping[str, torch.Tensor], info: Mapping[str, Any]) -> None:
        pass

    def remove(self, name: str) -> None:
        pass

    def add_answered(self, task: str, version: str) -> None:
        pass

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        self._read_run = None
        yield

    def _write_run(self, changes: Mapping[str, Any]) -> None:
        pass


def state_of_run(folder: Path, run_id: str, part: str) -> SiteState:
    """Open a state in a folder ``<run id>/<site>``."""
    folder = folder.resolve()
    if folder.parent.name != run_id:
        place = f"name the site's folder in {run_id}, <state folder>/{run_id}/<site>"
        raise ConfigError(f"{folder} has no {part} of run {run_id}, which the adapter is of: {place}")
    return SiteState(folder.parent.parent, folder.parent.name, folder.name)


def trained_version(state: SiteState, round_: int, time_steps: int, part: str) -> str:
    """Find the site's last trained version at a round's end, of an earlier one if it was there untrained."""
    newest, cure = state.latest(version(round_, time_steps)), "draft with the shared adapter alone (without --state)"
    if newest is None or newest == version(0, 0):
        there = ", ".join(state.versions()) or "none"
        raise ConfigError(f"{state.folder} has no {part} of round {round_} (versions there: {there}): {cure}")
    trained, last = (int(name[:4]) for name in (newest, max([newest, *state.answered().values()])))
    if last < round_:
        text = f"{state.folder} has the {part} of round {trained} and ends with round {last}; the adapter is of round"
        raise ConfigError(f"{text} {round_}. Name the state as it was after round {round_}, or {cure}")
    if trained != round_:
        logger.warning("the site did not train in round %d; its %s is of round %d", round_, part, trained)
    return newest
