"""Where a site computes, and in which precision, as its site file says."""

import pytest
import torch

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.learning.device import SMALL_MODEL, choose_device, device_of_each


@pytest.fixture
def gpus(monkeypatch):
    """A machine with so many GPUs."""

    def pretend(count, bfloat16=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bfloat16)

    return pretend


def test_the_file_says_where_and_how(gpus):
    gpus(0)
    assert choose_device() == ("cpu", False) and choose_device("cpu", "bfloat16") == ("cpu", True)
    gpus(2)
    assert choose_device() == ("cuda", True) and choose_device("cuda:1", "float32") == ("cuda:1", False)
    assert choose_device("cpu") == ("cpu", False)
    gpus(1, bfloat16=False)
    assert choose_device() == ("cuda", False)
    with pytest.raises(ConfigError, match="this machine shows 1 GPU"):
        choose_device("cuda:1")


def test_a_small_model_leaves_the_gpu_alone_and_says_so_once(gpus, monkeypatch, caplog):
    gpus(1)
    caplog.set_level("INFO")
    assert choose_device(parameters=SMALL_MODEL) == ("cuda", True)
    for _ in range(2):
        assert choose_device(parameters=1_900_000) == ("cpu", False)
    assert [record.message for record in caplog.records] == [
        "device: auto takes the CPU: below 4 million parameters a GPU is no faster, and this model has 1.9; "
        "device: cuda takes the GPU all the same"
    ]
    assert choose_device("cuda", parameters=1) == ("cuda", True), "whoever asks for it gets it"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert choose_device(parameters=1) == ("cuda", True), "as its process group, one GPU each"


def test_each_process_has_a_gpu_or_none_has(gpus):
    gpus(0)
    assert device_of_each("auto", 2) == "cpu"
    gpus(2)
    assert [device_of_each(device, 2) for device in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
    assert device_of_each("cpu", 3) == "cpu"
    with pytest.raises(ConfigError, match=r"processes: 3 .* shows 2 GPU\(s\)") as error:
        device_of_each("auto", 3)
    assert error.value.public == "the site file asks for more processes than the site has GPUs"
