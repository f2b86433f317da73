"""The papers' tables: the commands in each suite's header, word for word, on made-up data in the real layout."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import real_layouts
from command import fedtar_here
from made_up_results import parsed

from fedtar_flare.learning import clinical_start
from fedtar_flare.learning.pretraining import pretrain
from fedtar_flare.methods.fedkei.config import CLASSIFIERS
from fedtar_flare.models.config import PRESETS
from fedtar_flare.presets import papers
from fedtar_flare.suite import file, run
from fedtar_flare.suite.file import read_suite, shipped

SUITES = [name for name in shipped() if name.startswith(("fedtar_table", "fedmrg_table", "fedkei_"))]
LEAST = {
    "num_rounds": 1, "time_steps": 2, "training.local_steps": 1, "training.batch_size": 2, "training.micro_batch": 0,
    "training.epochs": 1, "model.image_size": 32, "model.slices": 2, "model.max_length": 24, "model.num_beams": 1,
}  # fmt: skip


def commands(suite):
    """What stands in the file's header after ``#`` and three spaces."""
    return re.findall(r"^#   (.+)$", shipped()[suite].read_text().split("\nname:")[0], flags=re.M)


@pytest.fixture
def least(tmp_path, monkeypatch):
    """Presets of the same names with tiny models in folders, and one update; suites of one seed."""
    folders = real_layouts.tiny_models(tmp_path)
    monkeypatch.setattr(clinical_start, "pretrain", lambda *a, **k: pretrain(*a[:5], a[5].replace(steps=1), **k))
    monkeypatch.setattr(run, "cores", lambda: 1)
    monkeypatch.setattr(file, "read_suite", lambda name: read_suite(name).replace(seeds=(0,)))
    names = {"paper": ("cvt", "gpt2"), "paper-ct": ("cvt", "gpt2"), "fedmrg-paper": ("test_resnet", "llama")}
    names["r2gen"] = ("test_resnet", "")
    for preset, paper in papers().items():
        encoder, decoder = names.get(preset, ("test_vit", ""))
        own = LEAST | {"model.encoder_name": folders.get(encoder, encoder), "model.decoder_name": folders.get(decoder)}
        for name in {*own} & {*paper.settings}:
            one = name in ("model.slices", "time_steps") and paper.settings[name] == 1
            monkeypatch.setitem(paper.settings, name, 1 if one else own[name])
        for presets in (PRESETS, CLASSIFIERS):
            if preset in presets:
                monkeypatch.setitem(presets, preset, paper.group("model"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDTAR_HOME", str(tmp_path / "home"))
    return tmp_path


def collections(place: Path, suite: str) -> None:
    if suite in ("fedtar_table1", "fedtar_table2", "fedtar_table4"):
        real_layouts.ct_rate(place / "ct-rate", 30)
    elif suite == "fedkei_derm":
        real_layouts.isic_2019(place / "isic2019", 120)
    elif suite == "fedkei_cxr":
        real_layouts.nih_and_vindr(place, 49)
        real_layouts.chexpert_plus(place / "chexpert-plus", 42)
    elif suite == "fedkei_oct":
        real_layouts.oct_2017(place / "OCT2017", 60)
    else:
        real_layouts.mimic(place, 80)
        if suite.startswith("fedmrg"):
            real_layouts.iu_xray(place / "iu-xray", 6)
            real_layouts.chexpert_plus(place / "chexpert-plus", 24)


def typed(line: str, suite: str) -> str:
    """One command; of fedtar's the words are handed on, and what is compared is the first three arms."""
    environment, words = {}, shlex.split(line)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        name, _, environment[name] = words.pop(0).partition("=")
    if words[0] != "fedtar":
        subprocess.run(["bash", "-c", line], check=True)
        return ""
    if "compare" in words and "--only" not in words:
        words += [word for arm in [*read_suite(suite).arms][:3] for word in ("--only", arm)]
    code, out, err = fedtar_here(*words[1:], **environment)
    assert code == 0, f"{line}\n{out[-2000:]}\n{err[-3000:]}"
    return out


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_the_commands_of_a_header_give_the_table(suite, least):
    collections(least, suite)
    printed = {line: typed(line, suite) for line in commands(suite)}
    compared = [line for line in printed if " compare " in line]
    short = ["too-few-words" in said for line, said in printed.items() if "partition" in line]
    assert short == [suite == "fedmrg_table3"] * len(short)
    assert compared and all(line.split()[3] == suite for line in compared)
    for line in compared:
        said, folder = printed[line], least / line.split(" -o ")[1]
        assert re.search(r"\d+ runs to be made", said) and ("reports to be written" in said) is ("kei" not in suite)
        text, _ = parsed(folder / "comparison.html")
        arms = re.findall(r"--only (\S+)", line) or [*read_suite(suite).arms][:3]
        labels = [read_suite(suite).arms[arm]["label"] for arm in arms]
        assert all(label in text for label in labels) and ("hospitals outside" in text) is bool(
            read_suite(suite).outside
        )
