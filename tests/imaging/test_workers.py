"""Worker processes: order, refusals, deaths and faults."""

import math
import os
import signal
import time
from pathlib import Path

import pytest

from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.curation.archive_files import Headers, read_headers
from fedtar_flare.imaging import workers
from fedtar_flare.imaging.workers import _in_processes, each, worker_count


def square(number):
    print("a library prints", number)
    if number == 3:
        raise DataError("three", reason="is-three")
    return {"square": number * number, "process": os.getpid()}


def die(number, folder):
    mark = Path(folder) / str(number)
    if number == 2 or (number == 1 and not mark.exists()):
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def hungry(number):
    try:
        raise MemoryError
    except MemoryError as error:
        raise RuntimeError("as MONAI wraps it") from error


def mixed(number):
    return int("a fault of the code") if number == 1 else mixed(number) if number == 2 else number


def hang(number):
    while number == 1:
        signal.pause()
    return number


NOTHING = Headers([], [], [], [])
"""What the headers of no file say."""


def outcomes(task, items, count=2, seconds=math.inf):
    return dict(_in_processes(task, items, count, seconds))


def test_every_item_has_its_outcome_whatever_is_printed():
    found = outcomes(square, [{"number": n} for n in range(8)])
    assert [found[n]["square"] for n in range(8) if n != 3] == [0, 1, 4, 16, 25, 36, 49]
    assert isinstance(found[3], DataError) and found[3].reason == "is-three" and str(found[3]) == "three"
    assert os.getpid() not in {found[n]["process"] for n in range(8) if n != 3}


def test_a_process_that_dies_is_replaced_and_an_item_that_kills_two_is_refused(tmp_path):
    found = outcomes(die, [{"number": n, "folder": str(tmp_path)} for n in range(6)])
    assert [found[n] for n in (0, 1, 3, 4, 5)] == [0, 1, 3, 4, 5]
    assert found[2].reason == "worker-died" and "-9" in str(found[2])


@pytest.mark.parametrize("processes", [False, True])
def test_a_fault_of_the_code_is_told_and_the_others_go_on(capfd, caplog, processes):
    items = [{"number": n} for n in range(5)]
    found = outcomes(mixed, items) if processes else dict(each(mixed, items, 1))
    assert [found[n] for n in (0, 3, 4)] == [0, 3, 4]
    assert found[1].reason == found[2].reason == "internal-error"
    assert "ValueError" in str(found[1]) and "RecursionError" in str(found[2])
    assert "Traceback" in (capfd.readouterr().err if processes else caplog.text)


def test_an_item_that_takes_too_long_is_refused_and_its_process_replaced():
    found = outcomes(hang, [{"number": n} for n in (1, 2, 3)], 1, 1.0)
    assert found[0].reason == "too-slow" and (found[1], found[2]) == (2, 3)


def test_where_no_process_can_be_started_this_one_does_all(monkeypatch):
    def none_left(task):
        raise OSError("Resource temporarily unavailable")

    monkeypatch.setattr(workers, "_process", none_left)
    assert outcomes(hang, [{"number": n} for n in (2, 3, 4)]) == {0: 2, 1: 3, 2: 4}


def test_too_little_memory_is_a_refusal():
    (found,) = outcomes(hungry, [{"number": 1}]).values()
    assert found.reason == "out-of-memory"


def test_what_is_given_up_leaves_no_process_behind():
    going = _in_processes(square, [{"number": n} for n in range(50)], 2)
    _, first = next(going)
    going.close()
    with pytest.raises(ProcessLookupError):
        for _ in range(200):
            os.kill(first["process"], 0)
            time.sleep(0.05)


def test_short_work_starts_no_process(monkeypatch):
    monkeypatch.setattr(workers, "_process", lambda *_: pytest.fail("a process was started"))
    assert list(each(read_headers, [{"paths": []}] * 3, 4)) == [(i, NOTHING) for i in range(3)]
    assert list(each(read_headers, [], 4)) == []


def test_long_work_goes_on_in_processes_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "SERIAL_SECONDS", -1.0)
    monkeypatch.setattr(workers, "WORTH_SECONDS", -1.0)
    items = [{"paths": [str(tmp_path / f"{n}.zip")]} for n in range(4)]
    found = dict(each(read_headers, items, 2))
    assert sorted(found) == [0, 1, 2, 3]
    assert all(f"{n}.zip" in str(found[n].problems[0]) for n in range(4))


def test_number_of_workers(monkeypatch):
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda _: range(16))
    for memory, count in ((128 << 30, 16), (24 << 30, 6), (1 << 30, 1)):
        monkeypatch.setattr(workers, "machine_memory", lambda memory=memory: memory)
        assert worker_count() == count and worker_count(7) == 7
    with pytest.raises(ConfigError, match="workers"):
        worker_count(0)
