"""Worker processes: order, refusals, deaths and faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fedtar_flare.curation.archive_files import READ_HEADERS
from fedtar_flare.curation.check import CHECK
from fedtar_flare.errors import ConfigError, DataError
from fedtar_flare.imaging import workers
from fedtar_flare.imaging.pipeline import PREPARE
from fedtar_flare.imaging.workers import each, worker_count

TASKS_FILE = """
import os, signal, sys
from pathlib import Path
from fedtar_flare.errors import DataError
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
def fail(number):
    raise KeyError("a fault of the code")
def hungry(number):
    try:
        raise MemoryError
    except MemoryError as error:
        raise RuntimeError("as MONAI wraps it") from error
def mixed(number):
    if number == 1:
        return int("a fault of the code")
    if number == 2:
        return mixed(number)
    return number
def hang(number):
    while number == 1:
        signal.pause()
    return number
"""
NOTHING: dict[str, list[str]] = {"files": [], "problems": [], "broken": [], "strays": []}
"""The answer about the headers of no file."""


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A worker program with tasks of its own."""
    (tmp_path / "worker_tasks.py").write_text(TASKS_FILE)
    (tmp_path / "run_worker.py").write_text(
        "from fedtar_flare.imaging import workers\nworkers.PACKAGE = 'worker_tasks'\nworkers.main()\n"
    )
    monkeypatch.setattr(workers, "COMMAND", ["-W", "ignore", str(tmp_path / "run_worker.py")])
    return tmp_path


def outcomes(name, items, count=2):
    return dict(workers._in_processes(f"worker_tasks:{name}", items, count))


def test_every_item_has_its_outcome_whatever_is_printed(tasks):
    found = outcomes("square", [{"number": n} for n in range(8)])
    assert [found[n]["square"] for n in range(8) if n != 3] == [0, 1, 4, 16, 25, 36, 49]
    assert isinstance(found[3], DataError) and found[3].reason == "is-three" and str(found[3]) == "three"
    assert os.getpid() not in {found[n]["process"] for n in range(8) if n != 3}


def test_a_process_that_dies_is_replaced_and_an_item_that_kills_two_is_refused(tasks):
    found = outcomes("die", [{"number": n, "folder": str(tasks)} for n in range(6)])
    assert [found[n] for n in (0, 1, 3, 4, 5)] == [0, 1, 3, 4, 5]
    assert found[2].reason == "worker-died" and "-9" in str(found[2])


@pytest.mark.parametrize("processes", [False, True])
def test_a_fault_of_the_code_is_told_and_the_others_go_on(tasks, monkeypatch, capfd, caplog, processes):
    monkeypatch.syspath_prepend(tasks)
    monkeypatch.setattr(workers, "PACKAGE", "worker_tasks")
    items = [{"number": n} for n in range(5)]
    found = outcomes("mixed", items) if processes else dict(each("worker_tasks:mixed", items, 1))
    assert [found[n] for n in (0, 3, 4)] == [0, 3, 4]
    assert found[1].reason == found[2].reason == "internal-error"
    assert "ValueError" in str(found[1]) and "RecursionError" in str(found[2])
    assert "Traceback" in (capfd.readouterr().err if processes else caplog.text)


def test_an_item_that_takes_too_long_is_refused_and_its_process_replaced(tasks):
    going = workers._in_processes("worker_tasks:hang", [{"number": n} for n in (1, 2, 3)], 1, 1.0)
    found = dict(going)
    assert found[0].reason == "too-slow" and (found[1], found[2]) == (2, 3)


def test_too_little_memory_is_a_refusal(tasks):
    (found,) = outcomes("hungry", [{"number": 1}]).values()
    assert found.reason == "out-of-memory"


def test_what_is_given_up_leaves_no_process_behind(tasks):
    going = workers._in_processes("worker_tasks:square", [{"number": n} for n in range(50)], 2)
    _, first = next(going)
    going.close()
    with pytest.raises(ProcessLookupError):
        os.kill(first["process"], 0)


def test_short_work_starts_no_process(monkeypatch):
    monkeypatch.setattr(workers, "_Worker", lambda *_: pytest.fail("a process was started"))
    assert list(each(READ_HEADERS, [{"paths": []}] * 3, 4)) == [
        (i, {"files": [], "problems": [], "broken": [], "strays": []}) for i in range(3)
    ]
    assert list(each(READ_HEADERS, [], 4)) == []


def test_long_work_goes_on_in_processes_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "ALONE_SECONDS", -1.0)
    monkeypatch.setattr(workers, "WORTH_SECONDS", -1.0)
    items = [{"paths": [str(tmp_path / f"{n}.zip")]} for n in range(4)]
    found = dict(each(READ_HEADERS, items, 2))
    assert sorted(found) == [0, 1, 2, 3]
    assert all(f"{n}.zip" in found[n]["problems"][0][0] for n in range(4))


def test_the_worker_as_a_program():
    request = {"task": READ_HEADERS, "arguments": {"paths": []}}
    done = subprocess.run(
        [sys.executable, "-m", "fedtar_flare.imaging.workers"],
        input=f"{json.dumps(request)}\n" * 2,
        capture_output=True,
        text=True,
        check=True,
    )
    ready, *answers = done.stdout.splitlines(keepends=True)
    assert ready == workers.READY
    assert [json.loads(line) for line in answers] == [
        {"result": {"files": [], "problems": [], "broken": [], "strays": []}}
    ] * 2


@pytest.mark.parametrize("name", [READ_HEADERS, CHECK, PREPARE])
def test_every_task_is_there(name):
    assert callable(workers.task(name))


@pytest.mark.parametrize("name", ["os:system", "fedtar_flare.errors", "fedtar_flare_more.x:y", "fedtar_flare.x:a.b"])
def test_tasks_are_functions_of_this_package(name):
    with pytest.raises(ConfigError, match="module:function"):
        workers.task(name)


def test_number_of_workers():
    assert 1 <= worker_count() <= 4 and worker_count(7) == 7
    with pytest.raises(ConfigError, match="workers"):
        worker_count(0)
