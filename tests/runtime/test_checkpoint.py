import pytest
import torch

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.core.files import StateError
from fedtar_flare.runtime.checkpoint import Checkpoint, CheckpointFolder, load


def checkpoint(r):
    method = {"t": torch.tensor(r, dtype=torch.float64)}
    return Checkpoint(r, {"a": torch.full((3,), float(r))}, method, {"run_id": "x"})


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=2)
    for r in range(1, 5):
        folder.save(checkpoint(r), best=r == 2)
    assert {p.stem for p in tmp_path.iterdir()} == {"best", "round-0003", "round-0004"}
    last, problems = folder.last()
    assert last.round == 4 and last.info == {"run_id": "x"} and not problems
    assert last.method["t"].dtype == torch.float64 and last.weights["a"].tolist() == [4.0] * 3
    assert load(tmp_path / "best.safetensors").round == 2
    for file in tmp_path.glob("round-*"):
        file.write_bytes(b"half")
    for place, words in ((tmp_path, "round-0003"), (tmp_path / "nothing", "no whole checkpoint")):
        with pytest.raises(FedTARError, match=words):
            CheckpointFolder(place).last()


def test_that_with_which_a_job_began_stays_so_that_its_rounds_can_be_made_again(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=2, oldest=1)
    for r in range(3, 9):
        folder.save(checkpoint(r))
    assert [*folder.rounds()] == [3, 7, 8]
    assert [folder.last(before=r)[0].round for r in (0, 9, 8, 7, 4)] == [8, 8, 7, 3, 3]
    with pytest.raises(FedTARError, match="no whole checkpoint"):
        folder.last(before=3)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda data: data[:-5], "damaged"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "the checksum is wrong"),
        (lambda data: data.replace(b'format\\": 2', b'format\\": 9'), "format 9; this version reads format 2"),
    ],
)
def test_a_file_that_cannot_be_used_costs_one_round_only_and_says_why(tmp_path, spoil, words):
    folder, newest = CheckpointFolder(tmp_path, keep=3), tmp_path / "round-0002.safetensors"
    folder.save(checkpoint(1))
    folder.save(checkpoint(2))
    newest.write_bytes(spoil(newest.read_bytes()))
    last, problems = folder.last()
    assert last.round == 1 and len(problems) == 1
    with pytest.raises(StateError, match=words):
        load(newest)
