"""The papers' tables: the commands in each suite's header, word for word, on made-up data in the real layout."""

import re
import shlex
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
import real_layouts
from command import passing
from labelers import published
from made_up_results import parsed

from fedtar_flare.learning import pretraining
from fedtar_flare.learning.pretraining import pretrain
from fedtar_flare.methods.fedkei.config import CLASSIFIERS
from fedtar_flare.models.config import PRESETS
from fedtar_flare.presets import papers
from fedtar_flare.suite import file, run
from fedtar_flare.suite.file import read_suite, shipped

SUITES = [name for name in shipped() if name.startswith(("fedtar_table", "fedmrg_", "fedkei_"))]
LEAST = {
    "num_rounds": 1, "time_steps": 2, "training.local_steps": 1, "training.batch_size": 2, "training.micro_batch": 0,
    "training.epochs": 1, "model.image_size": 32, "model.slices": 2, "model.max_length": 24, "model.num_beams": 1,
}  # fmt: skip


def commands(suite):
    """What stands in the file's header after ``#`` and three spaces."""
    return re.findall(r"^#   (.+)$", shipped()[suite].read_text().split("\nname:")[0], flags=re.M)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return real_layouts.tiny_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """By a header's first command: a folder with its collection, and what each command printed there."""
    return defaultdict(lambda: (tmp_path_factory.mktemp("place"), {}))


@pytest.fixture
def least(tiny, monkeypatch):
    """Presets of the same names with tiny models in folders, and one update; suites of one seed and two hospitals."""
    monkeypatch.setattr(pretraining, "pretrain", lambda *a, **k: pretrain(*a[:4], a[4].replace(steps=1), **k))
    monkeypatch.setattr(run, "cpu_count", lambda: 1)
    monkeypatch.setattr(file, "read_suite", smallest)
    names = {"paper": ("cvt", "gpt2"), "paper-ct": ("cvt", "gpt2"), "fedmrg-paper": ("test_resnet", "llama")}
    names["r2gen"] = ("test_resnet", "")
    for preset, paper in papers().items():
        encoder, decoder = names.get(preset, ("test_vit", ""))
        own = LEAST | {"model.encoder_name": tiny.get(encoder, encoder), "model.decoder_name": tiny.get(decoder)}
        for name in {*own} & {*paper.settings}:
            one = name in ("model.slices", "time_steps") and paper.settings[name] == 1
            monkeypatch.setitem(paper.settings, name, 1 if one else own[name])
        for presets in (PRESETS, CLASSIFIERS):
            if preset in presets:
                monkeypatch.setitem(presets, preset, paper.group("model"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def smallest(name):
    """The suite at few hospitals with one seed: its first two arms, and those that no suite after it has.

    Arms with an encoder of their own, which is of full size, are left out.
    """
    suite = read_suite(name)
    after = [read_suite(other) for other in SUITES if other > name and other[:6] == name[:6]]
    known = [arm.get("settings", {}) | {"method": arm["method"]} for other in after for arm in other.arms.values()]
    arms = {}
    for key, arm in suite.arms.items():
        new = arm.get("settings", {}) | {"method": arm["method"]} not in known and "encoder_name" not in str(arm)
        if len(arms) < 2 or new or key in suite.references or f"--only {key} " in "".join(commands(name)):
            arms[key] = arm
    few = {"fedkei_cxr": suite.sites, "fedmrg_figure5": suite.sites[:5]}
    return suite.replace(seeds=(0,), sites=few.get(name, (suite.sites[0], suite.sites[-1])), arms=arms)


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
        published(place / "bert-base-uncased", "chexbert")[0].rename(place / "chexbert.pth")
        if suite.startswith("fedmrg"):
            real_layouts.iu_xray(place / "iu-xray", 6)
            real_layouts.chexpert_plus(place / "chexpert-plus", 24)


def typed(line: str, place: Path, *more: str) -> str:
    """What one command says in a folder; the words of fedtar's own are handed on within this process."""
    environment, words = {"FEDTAR_HOME": str(place / "home")}, shlex.split(line)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        name, _, environment[name] = words.pop(0).partition("=")
    if words[0] != "fedtar":
        subprocess.run(["bash", "-c", line], check=True, cwd=place)
        return ""
    return passing(*words[1:], *more, cwd=place, **environment)


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_the_commands_of_a_header_give_the_table(suite, places, least):
    place, printed = places[commands(suite)[0]]
    if not printed:
        collections(place, suite)
    compared = [line for line in commands(suite) if " compare " in line]
    assert compared and all(line.split()[3] == suite for line in compared)
    for line in commands(suite):
        if line not in printed:  # where suites share a folder, by one of them
            again = line in compared[1:] and "--only" not in line
            printed[line] = typed(line, place, *["--only", suite[:6]] * again)
    short = ["too-few-words" in printed[line] for line in commands(suite) if "partition" in line]
    assert short == [suite == "fedmrg_table3"] * len(short)
    arms, outside = smallest(suite).arms, read_suite(suite).outside
    for line in compared:
        said, (text, _) = printed[line], parsed(place / line.split(" -o ")[1] / "comparison.html")
        assert re.search(r"\d+ runs, \d+ of them done before", said)
        only = re.findall(r"--only (\S+)", line) or (arms if line == compared[0] else [suite[:6]])
        assert ("CheXbert" in text) is any("labeler import" in command for command in commands(suite))
        assert all(f"{number} hospitals" in text for number in re.findall(r" -n (\d+) ", line))
        assert all(arms[arm]["label"] in text for arm in only) and ("hospitals outside" in text) is bool(outside)
