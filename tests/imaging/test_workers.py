"""Worker processes: order, refusals, deaths and faults."""

import math
import os
import signal
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.curation.archive_files import read_headers
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


def numbers(drawn):
    return [{"number": n} for n in drawn]


def outcomes(task, items, count=2, seconds=math.inf):
    return dict(_in_processes(task, items, count, seconds))


def test_every_item_has_its_outcome_whatever_is_printed():
    done = outcomes(square, numbers(range(8)))
    refusal = done.pop(3)
    assert {n: outcome["square"] for n, outcome in done.items()} == {n: n * n for n in (0, 1, 2, 4, 5, 6, 7)}
    assert isinstance(refusal, DataError) and (refusal.reason, str(refusal)) == ("is-three", "three")
    assert os.getpid() not in {outcome["process"] for outcome in done.values()}


def test_a_process_that_dies_is_replaced_and_an_item_that_kills_two_is_refused(tmp_path):
    done = outcomes(die, [{"number": n, "folder": str(tmp_path)} for n in range(6)])
    refusal = done.pop(2)
    assert done == {n: n for n in (0, 1, 3, 4, 5)} and refusal.reason == "worker-died" and "-9" in str(refusal)


@pytest.mark.parametrize("processes", [False, True])
def test_a_fault_of_the_code_is_told_and_the_others_go_on(capfd, caplog, processes):
    items = numbers(range(5))
    done = outcomes(mixed, items) if processes else dict(each(mixed, items, 1))
    assert [done[n] for n in (0, 3, 4)] == [0, 3, 4]
    assert done[1].reason == done[2].reason == "internal-error"
    assert "ValueError" in str(done[1]) and "RecursionError" in str(done[2])
    assert "Traceback" in (capfd.readouterr().err if processes else caplog.text)


def test_an_item_that_takes_too_long_is_refused_and_its_process_replaced():
    done = outcomes(hang, numbers((1, 2, 3)), 1, 1.0)
    assert done[0].reason == "too-slow" and (done[1], done[2]) == (2, 3)


def test_where_no_process_can_be_started_this_one_does_all(monkeypatch):
    monkeypatch.setattr(workers, "_process", Mock(side_effect=OSError("Resource temporarily unavailable")))
    assert outcomes(hang, numbers((2, 3, 4))) == {0: 2, 1: 3, 2: 4}


def test_too_little_memory_is_a_refusal():
    assert outcomes(hungry, numbers([1]))[0].reason == "out-of-memory"


def test_what_is_given_up_leaves_no_process_behind():
    going = _in_processes(square, numbers(range(50)), 2)
    _, first = next(going)
    going.close()
    with pytest.raises(ProcessLookupError):
        for _ in range(200):
            os.kill(first["process"], 0)
            time.sleep(0.05)


def test_long_work_goes_on_in_processes_where_it_was(tmp_path, monkeypatch):
    for name in ("SERIAL_SECONDS", "WORTH_SECONDS"):
        monkeypatch.setattr(workers, name, -1.0)
    done = dict(each(read_headers, [{"paths": [str(tmp_path / f"{n}.zip")]} for n in range(4)], 2))
    assert sorted(done) == [0, 1, 2, 3] and all(f"{n}.zip" in str(done[n].problems[0]) for n in range(4))


def test_number_of_workers(monkeypatch):
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda _: range(16))
    for memory, count in ((128 << 30, 16), (24 << 30, 6), (1 << 30, 1)):
        monkeypatch.setattr(workers, "machine_memory", lambda memory=memory: memory)
        assert worker_count() == count and worker_count(7) == 7
    with pytest.raises(ConfigError, match="workers"):
        worker_count(0)
