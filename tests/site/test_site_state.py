import json
import multiprocessing
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import StateError, read_tensors, write_tensors
from fedtar_flare.protocol.messages import version
from fedtar_flare.site.state import SiteState


@pytest.fixture
def state(tmp_path):
    return SiteState(tmp_path, "run", "site-1")


def save(state, *places, factor=1):
    for r, t in places:
        state.save(version(r, t), {"x": factor * torch.tensor([r, t])}, {"round": r})


def test_versions_are_found_by_the_task_that_names_them(state, tmp_path):
    assert state.latest(version(9, 9)) is None
    save(state, (0, 0), (1, 1), (1, 3))
    assert state.latest(version(1, 2)) == "0001-01"
    save(state, (2, 1))
    assert state.latest(version(1, 3)) == "0001-03"
    save(state, (1, 1), factor=10)  # going back to it keeps the later ones out of sight
    assert state.read(state.latest(version(1, 2)))[0]["x"].tolist() == [10, 10]
    tensors, info = state.read("0002-01")
    assert tensors["x"].tolist() == [2, 1] and info == {"round": 2}
    for other in (SiteState(tmp_path, "run2", "site-1"), SiteState(tmp_path, "run", "site-2")):
        assert other.versions() == []
    assert state.folder.stat().st_mode & 0o077 == 0
    for run_id, site in (("../up", "s"), ("run", "a/b"), ("", "s"), ("run", "..")):
        with pytest.raises(ConfigError):
            SiteState(tmp_path, run_id, site)
    with pytest.raises(ConfigError):
        state.save("latest", {}, {})


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_old_versions_go_but_every_kept_round_can_be_resumed(state, steps):
    save(state, (0, 0))
    for r in range(1, 6):
        for t in range(1, steps + 1):
            save(state, (r, t))
            assert state.latest(version(r, t - 1)) is not None or (r, t) == (1, 1)
    kept = state.versions()
    assert {version(r, steps) for r in (2, 3, 4, 5)} <= set(kept) and len(kept) <= 5


def test_answered_tasks_outlive_the_process_and_the_last_place_counts(state, tmp_path):
    assert state.answered() == {}
    save(state, (0, 0))
    for task, place in (("handshake", (0, 0)), ("train", (1, 1)), ("train", (1, 2))):
        SiteState(tmp_path, "run", "site-1").add_answered(task, version(*place))
    assert state.answered() == {"handshake": "0000-00", "train": "0001-02"} and state.versions() == ["0000-00"]
    with ThreadPoolExecutor(8) as pool:
        [*pool.map(lambda _: state.add_answered("train", version(1, 2)), range(60))]
    file = state.folder / "tasks.json"
    counts = {"handshake": 1, "handshake 0000-00": 1, "train": 62, "train 0001-01": 1, "train 0001-02": 61}
    assert json.loads(file.read_text())["how often"] == counts, "each of two processes counts"
    assert file.stat().st_mode & 0o077 == 0
    file.write_text("[]")
    with pytest.raises(StateError, match=r"tasks\.json"):
        state.answered()


def test_bits_survive_shared_memory_is_copied_and_damage_is_an_error_that_names_the_file(tmp_path):
    base, path = torch.randn(4, 4), tmp_path / "x.safetensors"
    sent = {"a": base, "b": base, "c": base.t(), "d": base.bfloat16()}
    write_tensors(path, sent, {"n": [1, None]})
    tensors, info = read_tensors(path)
    assert all(torch.equal(tensors[name], value) for name, value in sent.items()) and info == {"n": [1, None]}
    assert tensors["d"].dtype == torch.bfloat16
    path.write_bytes(path.read_bytes()[:-30])
    for file, word in ((path, r"x\.safetensors"), (tmp_path / "y.safetensors", "not found")):
        with pytest.raises(StateError, match=word):
            read_tensors(file)


def test_a_process_killed_while_it_writes_leaves_the_version_before(tmp_path):
    """A child writes the same version again and again and is killed; what is there must be one whole version."""
    code = """
import itertools, sys, torch
from fedtar_flare.site.state import SiteState
for number in itertools.count():
    state = {"x": torch.full((200_000,), float(number))}
    SiteState(sys.argv[1], "run", "site-1").save("0001-01", state, {"number": number})
    print(number, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        try:
            next(line for line in child.stdout if int(line) >= 20)
        finally:
            child.kill()
    tensors, info = SiteState(tmp_path, "run", "site-1").read("0001-01")
    assert info["number"] >= 20 and bool((tensors["x"] == info["number"]).all())


def answer_all(folder, which, barrier, granted):
    state = SiteState(folder, "run", "site-1")
    for question in range(100):
        barrier.wait()
        granted.put(state.may_answer(f"close {question}", which))


def test_of_two_processes_that_are_asked_at_once_one_answers(tmp_path):
    """A round that both close from weights of the server's choice tells a difference."""
    forked = multiprocessing.get_context("fork")
    barrier, granted = forked.Barrier(2), forked.SimpleQueue()
    both = [forked.Process(target=answer_all, args=(tmp_path, which, barrier, granted)) for which in "ab"]
    for process in both:
        process.start()
    assert sum(granted.get() for _ in range(200)) == 100
    for process in both:
        process.join()
