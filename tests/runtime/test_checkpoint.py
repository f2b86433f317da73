import pytest
import torch

from fedtar_flare.errors import FedTARError
from fedtar_flare.runtime.checkpoint import Checkpoint, CheckpointFolder, load
from fedtar_flare.tensor_file import StateError


def checkpoint(r):
    return Checkpoint(
        r, {"a": torch.full((3,), float(r))}, {"t": torch.tensor(r, dtype=torch.float64)}, {"run_id": "x"}
    )


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=2)
    for r in range(1, 5):
        folder.save(checkpoint(r), best=r == 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "best.safetensors",
        "round-0003.safetensors",
        "round-0004.safetensors",
    ]
    last, problems = folder.last()
    assert last.round == 4 and last.info == {"run_id": "x"} and not problems
    assert last.method["t"].dtype == torch.float64 and last.weights["a"].tolist() == [4.0] * 3
    assert load(tmp_path / "best.safetensors").round == 2


def test_a_truncated_or_altered_file_costs_one_round_only(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=3)
    for r in (1, 2, 3):
        folder.save(checkpoint(r))
    newest, middle = tmp_path / "round-0003.safetensors", tmp_path / "round-0002.safetensors"
    newest.write_bytes(newest.read_bytes()[:-5])
    data = bytearray(middle.read_bytes())
    data[-1] ^= 1
    middle.write_bytes(data)
    last, problems = folder.last()
    assert last.round == 1 and len(problems) == 2
    with pytest.raises(StateError, match="checksum"):
        load(middle)


def test_none_whole_says_which_and_why(tmp_path):
    (tmp_path / "round-0001.safetensors").write_bytes(b"half")
    with pytest.raises(FedTARError, match="round-0001"):
        CheckpointFolder(tmp_path).last()
    with pytest.raises(FedTARError, match="no whole checkpoint"):
        CheckpointFolder(tmp_path / "nothing").last()
