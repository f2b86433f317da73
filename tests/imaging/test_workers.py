"""Worker processes: order, refusals, deaths and faults."""

import os
import signal
import time
from pathlib import Path
from unittest.mock import Mock

import psutil

from fedtar_flare.core.errors import DataError
from fedtar_flare.imaging import workers
from fedtar_flare.imaging.workers import _in_processes, each


def endless():
    return endless()


def odd(kind, folder=""):
    """An item that ends as its kind says, and in which process where it does."""
    print("a library prints", kind)
    if kind == "refused":
        raise DataError("three", reason="is-three")
    if kind == "hungry":
        try:
            raise MemoryError
        except MemoryError as error:
            raise RuntimeError("as MONAI wraps it") from error
    if kind in ("faulty", "endless"):
        return endless() if kind == "endless" else int("a fault of the code")
    if kind == "kills" or (kind == "kills once" and not (Path(folder) / "mark").exists()):
        (Path(folder) / kind.replace("kills once", "mark")).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while kind == "hangs":
        signal.pause()
    return kind, os.getpid()


REFUSED = {"hangs": ("too-slow", ""), "kills": ("worker-died", "-9"), "refused": ("is-three", "three")}
FAULTS = {"faulty": ("internal-error", "ValueError"), "endless": ("internal-error", "RecursionError")}
FAULTS |= {"hungry": ("out-of-memory", "")}


def told(done, expected):
    return all(done[kind].reason == reason and words in str(done[kind]) for kind, (reason, words) in expected.items())


def test_every_item_has_its_outcome_and_what_becomes_of_one_stops_no_other(tmp_path, capfd):
    """A process that dies is replaced and its item tried once more; one that hangs is replaced."""
    kinds = [*REFUSED, *FAULTS, "kills once", "fine"]
    items = [{"kind": kind, "folder": str(tmp_path)} for kind in kinds]
    done = {kinds[n]: outcome for n, outcome in _in_processes(odd, items, 2, 5.0)}
    assert told(done, REFUSED | FAULTS) and "Traceback" in capfd.readouterr().err
    assert all(done[kind][0] == kind and done[kind][1] != os.getpid() for kind in ("kills once", "fine"))


def test_a_fault_of_the_code_is_told_in_this_process_too(caplog):
    kinds = [*FAULTS, "fine"]
    done = {kinds[n]: outcome for n, outcome in each(odd, [{"kind": kind} for kind in kinds], 1)}
    assert told(done, FAULTS) and done["fine"] == ("fine", os.getpid()) and "Traceback" in caplog.text


def test_where_no_process_can_be_started_this_one_does_all(monkeypatch):
    monkeypatch.setattr(workers, "_process", Mock(side_effect=OSError("Resource temporarily unavailable")))
    done = dict(_in_processes(odd, [{"kind": kind} for kind in "abc"], 2))
    assert done == {n: (kind, os.getpid()) for n, kind in enumerate("abc")}


def test_long_work_goes_on_in_processes_where_it_was_and_given_up_leaves_none_behind(monkeypatch):
    for name in ("SERIAL_SECONDS", "WORTH_SECONDS"):
        monkeypatch.setattr(workers, name, -1.0)
    going = each(odd, [{"kind": "fine"}] * 50, 2)
    assert next(going) == (0, ("fine", os.getpid()))
    index, (_, other) = next(going)
    assert index > 0 and other != os.getpid()
    going.close()
    while psutil.pid_exists(other):
        time.sleep(0.05)
