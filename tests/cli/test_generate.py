"""``fedtar generate`` from what runs leave: of other parts than LoRA, and with the visit before."""

import json
import shutil

import pytest
import torch
from command import fedtar_here as here
from command import passing
from safetensors.torch import load_file, save_file

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import write_text
from fedtar_flare.data.cells import Timeline
from fedtar_flare.methods.fedtar.recipe import FedTARRecipe
from fedtar_flare.models.adapters.peft_file import (
    ADAPTER_CONFIG,
    ADAPTER_INFO,
    ADAPTER_WEIGHTS,
    EXTRA_WEIGHTS,
    read_adapter_config,
    read_adapter_info,
    write_adapter,
)
from fedtar_flare.models.build import build_model
from fedtar_flare.models.config import ModelConfig
from fedtar_flare.models.weights import fingerprint, with_fingerprint
from fedtar_flare.reporting.examples import EXAMPLES_FILE, read_examples
from fedtar_flare.runtime.in_process import run_in_process
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.synthetic.cohort import synthetic_cohort

TINY = {"preset": "tiny", "num_rounds": 1, "time_steps": 2, "server": {"evaluate_every": 1}}
TINY |= {"model": {"max_length": 16, "num_beams": 1}, "training": {"local_steps": 4, "batch_size": 4, "lr": 0.05}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The adapters of runs by ``data.prior``, and a sample with a visit before; ``none`` of one without it."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDTAR_HOME", str(folder / "home"))
        adapters = {}
        for prior in ("report+image", "generated"):
            reads = {"diagnosis": {"labeler": "synthetic", "shared": True, "certain": 0.0}} if "image" in prior else {}
            recipe = FedTARRecipe(**TINY, **reads, data={"synthetic_patients": 5, "prior": prior})
            adapters[prior] = run_in_process(recipe, 1, folder / prior) / "adapter"
    at_random(adapters["report+image"] / EXTRA_WEIGHTS)
    without = adapters["none"] = folder / "without"
    shutil.copytree(adapters["generated"], without)
    info = {k: v for k, v in read_adapter_info(without).items() if k != "prior"}
    described = {**info, "config": info["model"], "fingerprint": fingerprint(build_model(ModelConfig(**info["model"])))}
    info |= {"fingerprint": with_fingerprint(described, read_adapter_config(without))["fingerprint"]}
    (without / ADAPTER_INFO).write_text(json.dumps(info))
    cohort = synthetic_cohort(
        "site-1", folder=folder / "home" / "synthetic", patients=5, timeline=Timeline(2, prior="image"), seed=0
    )
    sample = next(s for s in cohort.samples("train", 2) if s.prior)
    return adapters, sample


def at_random(file):
    """Give the head of a run random weights, which read something."""
    generator = torch.Generator().manual_seed(1)
    state = {n: 2 * torch.randn(v.shape, generator=generator) if "head" in n else v for n, v in load_file(file).items()}
    assert any("head" in name for name in state)
    save_file(state, file)


def drafted(adapter, study, *options):
    code, out, err = here("generate", study, "--adapter", adapter, "--format", "json", *options)
    return (json.loads(out) if code == 0 else None), err


@pytest.mark.parametrize(
    ("file", "change"),
    [
        (ADAPTER_CONFIG, lambda c: c | {"lora_alpha": -c["lora_alpha"]}),
        (ADAPTER_INFO, lambda c: c | {"model": c["model"] | {"image_statistics": "clip"}}),
        (ADAPTER_INFO, lambda c: c | {"transforms": [{"name": "NormalizeIntensity"}]}),
    ],
)
def test_an_adapter_whose_files_say_other_settings_than_the_run_s_is_refused(runs, tmp_path, file, change):
    folder = shutil.copytree(runs[0]["generated"], tmp_path / "changed")
    (folder / file).write_text(json.dumps(change(json.loads((folder / file).read_text()))))
    draft, err = drafted(folder, runs[1].visit.image)
    assert draft is None and "other settings" in err


def test_nothing_is_fetched_to_draft_unless_it_is_asked_for(runs, tmp_path, monkeypatch):
    from huggingface_hub import constants

    from fedtar_flare.learning import site_model

    states: list[bool] = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(site_model, "build_model", lambda c: states.append(constants.HF_HUB_OFFLINE) or build_model(c))
    for options in ((), ("--online",)):
        assert drafted(runs[0]["generated"], runs[1].visit.image, *options)[0] is not None
    assert states == [True, False] and not constants.HF_HUB_OFFLINE


def test_generate_takes_the_visit_before_and_accepts_its_absence(runs, tmp_path):
    adapters, sample = runs
    (tmp_path / "before.txt").write_text(sample.prior.report + "\n")
    image, report = ["--prior-image", sample.prior.image], ["--prior-report", tmp_path / "before.txt"]
    adapter, study = adapters["report+image"], sample.visit.image
    assert read_adapter_info(adapter)["prior"] == "report+image"
    alone = drafted(adapter, study)[0]
    assert alone["prior"] == [] and {read["change"] for read in alone["findings"]} == {None}
    assert drafted(adapters["generated"], study)[0]["findings"] is None, "no head, no findings"
    both, err = drafted(adapter, study, *image, *report)
    assert both is not None and both["prior"] == ["image", "report"], err
    assert both["findings"] and all(read["change"] and read["certainty"]["change"] for read in both["findings"])
    told = drafted(adapter, study, *image, *report, "--prior-days", sample.days_since_prior)[0]
    assert told["text"] == both["text"], "the days are those of the headers"
    assert drafted(adapter, study, *report, "--prior-days", 30)[0]["prior"] == ["report"]
    assert drafted(adapters["generated"], study, *report, "--prior-days", 30)[0]["prior"] == ["report"]


@pytest.mark.parametrize(
    ("prior", "options", "words"),
    [
        ("none", "--prior-image IMAGE", "data.prior=none, so its model cannot read the image"),
        ("none", "--prior-report REPORT --prior-days 3", "cannot read the report"),
        ("generated", "--prior-image IMAGE", "draft without --prior-image"),
        ("report+image", "--prior-report REPORT", "needs the days"),
        ("report+image", "--prior-report REPORT --prior-days 0", "must be above 0"),
        ("report+image", "--prior-days 3", "goes with --prior-image"),
        ("report+image", "--prior-image gone", "is not there"),
        ("report+image", "--prior-image OTHER", "are of two patients"),
        ("report+image", "--prior-report gone", "cannot be read"),
    ],
)
def test_generate_refuses_what_cannot_be_right(runs, tmp_path, prior, options, words):
    adapters, sample = runs
    own = sample.prior.image
    other = next(of for of in own.parents[2].glob(f"*/*/{own.name}") if of.parents[1] != own.parents[1])
    names = {"IMAGE": own, "OTHER": other, "REPORT": write_text(tmp_path / "before.txt", "Clear.")}
    draft, err = drafted(adapters[prior], sample.visit.image, *(names.get(word, word) for word in options.split()))
    assert draft is None and words in err and "Traceback" not in err


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("prefix", "adalora", "vera", "loha", "none")]


@pytest.mark.parametrize("kind", ["prompt", *SLOW])
def test_the_text_is_that_of_the_run(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("FEDTAR_HOME", str(tmp_path / "home"))
    own = {"lora": {"exchange": ["pooling.*", "projection.*"]}} if kind == "none" else {}
    recipe = MethodRecipe("fedpeft", **TINY, data={"synthetic_patients": 10}, peft={"kind": kind}, **own)
    adapter = run_in_process(recipe, 1, tmp_path / "run") / "adapter"
    (examples,) = (tmp_path / "home" / "state").rglob(EXAMPLES_FILE)
    folder = tmp_path / "home" / "synthetic"
    cohort = synthetic_cohort("site-1", folder=folder, patients=10, timeline=Timeline(2), seed=0)
    drafts = []
    for sample in cohort.samples("test")[:2]:
        draft = passing("generate", sample.visit.image, "--adapter", adapter, "--format", "json")
        drafts.append(json.loads(draft)["text"])
        assert json.loads(draft)["findings"] is None, "the method reads none"
    assert all(drafts) and drafts == [example.draft for example in read_examples(examples).examples[:2]]


def test_extras_whose_adapter_is_lost_are_no_adapter(tmp_path):
    """Else a draft would be written with half of what was trained."""
    state = {"base_model.model.h.0.mlp.lora_A.weight": torch.zeros(2, 3), "projection.weight": torch.zeros(2)}
    write_adapter(tmp_path, state, {"peft_type": "LORA"}, {"model": {}, "fingerprint": "f"})
    assert read_adapter_info(tmp_path)["fingerprint"] == "f"
    (tmp_path / ADAPTER_WEIGHTS).unlink()
    with pytest.raises(ConfigError, match="is no adapter folder"):
        read_adapter_info(tmp_path)
