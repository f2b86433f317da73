"""``fedtar generate`` from what runs leave: of other parts than LoRA, and with the visit before."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from command import failing, fedtar_here, passing
from kits import make_kit, whole, write_radiographs
from PIL import Image
from safetensors.torch import load_file, save, save_file
from tables import cases

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import write_text
from fedtar_flare.data.cells import Timeline, patient_digest
from fedtar_flare.learning import pretraining
from fedtar_flare.methods.fedtar.recipe import FedTARRecipe
from fedtar_flare.models.adapters import peft_file
from fedtar_flare.models.build import build_model
from fedtar_flare.models.weights import PATIENTS as PATIENTS_OF
from fedtar_flare.models.weights import training_patients
from fedtar_flare.reporting.examples import EXAMPLES_FILE, read_examples
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.runtime.simulation import run_in_process
from fedtar_flare.site.cohort import load_cohort
from fedtar_flare.site.context import state_of
from fedtar_flare.site.site_file import load_site_config
from fedtar_flare.synthetic.cohort import synthetic_cohort

TINY = {"preset": "tiny", "num_rounds": 1, "time_steps": 2, "server": {"evaluate_every": 1}}
TINY |= {"model": {"max_length": 16, "num_beams": 1}, "training": {"local_steps": 4, "batch_size": 4, "lr": 0.05}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The adapters of runs by ``data.prior``, and a sample with a visit before."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDTAR_HOME", str(folder / "home"))
        adapters = {}
        for prior in ("report+image", "generated"):
            reads = {"diagnosis": {"labeler": "synthetic", "shared": True, "certain": 0.0}} if "image" in prior else {}
            recipe = FedTARRecipe(**TINY, **reads, data={"synthetic_patients": 5, "prior": prior})
            adapters[prior] = run_in_process(recipe, 1, folder / prior) / "adapter"
    at_random(adapters["report+image"] / peft_file.EXTRA_WEIGHTS)
    place, timeline = folder / "home" / "synthetic", Timeline(2, prior="image")
    cohort = synthetic_cohort("site-1", folder=place, patients=5, timeline=timeline, seed=0)
    sample = next(s for s in cohort.samples("train", 2) if s.prior)
    return adapters, sample


def at_random(file):
    """Give the head of a run random weights, which read something."""
    generator = torch.Generator().manual_seed(1)
    state = {n: 2 * torch.randn(v.shape, generator=generator) if "head" in n else v for n, v in load_file(file).items()}
    assert any("head" in name for name in state)
    save_file(state, file)


def drafted(adapter, study, *options):
    code, out, err = fedtar_here("generate", study, "--adapter", adapter, "--format", "json", *options)
    return (json.loads(out) if code == 0 else None), err


CONFIG, INFO = peft_file.ADAPTER_CONFIG, peft_file.ADAPTER_INFO
OTHER = [
    (CONFIG, lambda config: {"lora_alpha": -config["lora_alpha"]}),
    (INFO, lambda info: {"model": info["model"] | {"image_statistics": "clip"}}),
    (INFO, lambda _: {"transforms": [{"name": "NormalizeIntensity"}]}),
]
DAMAGED = [{"priors": "a"}, {"adapter": 1}, {"round": None}, {"model": {"preset": 3}}, {"model": {}}, {"prior": []}]
CHANGED = [*((*of, "other settings") for of in OTHER), *((INFO, lambda _, of=of: of, "") for of in DAMAGED)]


@pytest.mark.parametrize(("file", "change", "words"), CHANGED)
def test_an_adapter_is_refused_in_one_line_whose_files_are_damaged_or_say_other_settings(
    runs, tmp_path, file, change, words
):
    folder = shutil.copytree(runs[0]["generated"], tmp_path / "changed")
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | change(content)))
    draft, err = drafted(folder, runs[1].visit.image)
    assert draft is None and words in err and len(err.splitlines()) == 1, err


def test_a_picture_is_no_study_for_an_adapter_that_was_trained_on_ct(runs, tmp_path):
    Image.fromarray(np.zeros((64, 64), np.uint8)).save(tmp_path / "film.png")
    for modality in ("radiograph", "photograph"):
        draft, err = drafted(runs[0]["generated"], tmp_path / "film.png", "--modality", modality)
        assert draft is None and f"trained on ct images, not on {modality} images" in err


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
    assert peft_file.read_adapter_info(adapter)["prior"] == "report+image"
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


@pytest.mark.parametrize(("prior", "options", "words"), cases(__file__, "generate.yaml"))
def test_generate_refuses_what_cannot_be_right(runs, tmp_path, prior, options, words):
    adapters, sample = runs
    own = sample.prior.image
    other = next(of for of in own.parents[2].glob(f"*/*/{own.name}") if of.parents[1] != own.parents[1])
    names = {"IMAGE": own, "OTHER": other, "REPORT": write_text(tmp_path / "before.txt", "Clear.")}
    draft, err = drafted(adapters[prior], sample.visit.image, *(names.get(word, word) for word in options.split()))
    assert draft is None and words in err and "Traceback" not in err


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("prefix", "vera", "none")]


@pytest.mark.parametrize("kind", ["prompt", *SLOW])
def test_the_text_is_that_of_the_run(tmp_path, own_home, kind):
    own = {"lora": {"exchange": ["pooling.*", "projection.*"]}} if kind == "none" else {}
    recipe = MethodRecipe("fedpeft", **TINY, data={"synthetic_patients": 10}, peft={"kind": kind}, **own)
    adapter = run_in_process(recipe, 1, tmp_path / "run") / "adapter"
    (examples,) = (own_home / "state").rglob(EXAMPLES_FILE)
    place, timeline = own_home / "synthetic", Timeline(2)
    cohort = synthetic_cohort("site-1", folder=place, patients=10, timeline=timeline, seed=0)
    drafts = []
    for sample in cohort.samples("test")[:2]:
        draft = passing("generate", sample.visit.image, "--adapter", adapter, "--format", "json")
        drafts.append(json.loads(draft)["text"])
        assert json.loads(draft)["findings"] is None, "the method reads none"
    assert all(drafts) and drafts == [example.draft for example in read_examples(examples).examples[:2]]


def test_extras_whose_adapter_is_lost_are_no_adapter(tmp_path):
    """Else a draft would be written with half of what was trained."""
    state = {"base_model.model.h.0.mlp.lora_A.weight": torch.zeros(2, 3), "projection.weight": torch.zeros(2)}
    peft_file.write_adapter(tmp_path, state, {"peft_type": "LORA"}, {"model": {}, "fingerprint": "f"})
    assert peft_file.read_adapter_info(tmp_path)["fingerprint"] == "f"
    (tmp_path / peft_file.ADAPTER_WEIGHTS).unlink()
    with pytest.raises(ConfigError, match="is no adapter folder"):
        peft_file.read_adapter_info(tmp_path)


SEED = 7
PATIENTS = 40


class Reached(Exception):
    """Training would begin."""


@pytest.fixture
def learned(monkeypatch):
    """Patients of the samples that are handed to the training, which is left out."""
    patients = set()

    def pretrain(model, tokenizer, images, *args, **kwargs):
        patients.update(sample.visit.patient_id for sample in images._samples)
        raise Reached

    monkeypatch.setattr(pretraining, "pretrain", pretrain)
    return patients


@pytest.fixture
def out(tmp_path):
    """The folder of two simulated sites, laid out as ``fedtar data partition`` does."""
    (tmp_path / "sites").mkdir()
    for site in ("north", "south"):
        write_radiographs(tmp_path / site, PATIENTS, name=f"{site}-")
        text = f"source: manifest\npath: ../{site}/manifest.csv\noptions: {{modality: radiograph}}\n"
        (tmp_path / "sites" / f"{site}.yaml").write_text(text)
    return tmp_path


@pytest.fixture
def kit(tmp_path):
    """The startup kit of a real site."""
    folder = make_kit(tmp_path / "kit", "source: manifest\npath: manifest.csv\noptions: {modality: radiograph}\n")
    write_radiographs(folder / "local", PATIENTS)
    return folder


def splits(name, *, workspace=None, seed=SEED):
    """The site's patients by split, as a task of a job opens them."""
    config = load_site_config(name, workspace=workspace, simulator=workspace is None)
    cohort = load_cohort(config, name, timeline=Timeline(3), seed=seed, workspace=workspace)
    return {split: {s.visit.patient_id for s in cohort.samples(split)} for split in ("train", "validation", "test")}


def warmstart(run, tmp_path, *arguments):
    options = ("--preset", "tiny", "--set", "model.slices=1", "--torch-threads", 1, "-o", tmp_path / "start")
    return run("warmstart", *arguments, *options, FEDTAR_HOME=str(tmp_path / "home"))


def learns(tmp_path, *arguments):
    with pytest.raises(Reached):
        warmstart(passing, tmp_path, *arguments)


def test_simulated_sites(out, learned, monkeypatch):
    monkeypatch.setenv("FEDTAR_SITES", str(out / "sites"))
    of_sites = [splits(name) for name in ("north", "south")]
    assert of_sites[0] == splits("north", seed=0) and all(of_sites[0].values())  # whatever the seed of a run
    learns(out, "--site-file", out / "sites/north.yaml", "--job-seed", SEED, "--seed", 1)
    assert learned == of_sites[0]["train"] and not list(out.rglob("fedtar.key"))


@pytest.mark.parametrize("first", ["site", "warmstart"])
def test_a_real_site_has_one_key_whoever_comes_first(first, kit, tmp_path, learned):
    of_site = splits("clinic", workspace=kit) if first == "site" else {}
    learns(tmp_path, "--site-file", kit / "local/fedtar.yaml")
    assert learned == (of_site or splits("clinic", workspace=kit))["train"]
    assert [path.parent for path in tmp_path.rglob("fedtar.key")] == [state_of(kit)]


def test_a_key_by_its_name_and_in_the_state_folder_counts(kit, tmp_path, learned):
    of_site = splits("clinic", workspace=kit)
    write_radiographs(tmp_path / "copy", PATIENTS)
    (copy := tmp_path / "copy" / "site.yaml").write_text(whole("source: manifest\npath: manifest.csv\n"))
    learns(tmp_path, "--site-file", copy, "--key", state_of(kit) / "fedtar.key")
    assert learned == of_site["train"] and learned.clear() is None
    table = write_radiographs(tmp_path / "own", PATIENTS)
    file, state = table.with_name("site.yaml"), tmp_path / "own" / "state"
    file.write_text("source: manifest\npath: manifest.csv\nstate_dir: state\n")
    assert "--key" in warmstart(failing, tmp_path, "--site-file", file) and not state.exists()
    (kit / "local" / "fedtar.yaml").write_text(whole(f"source: manifest\npath: {table}\nstate_dir: {state}\n"))
    of_site = splits("clinic", workspace=kit)
    learns(tmp_path, "--site-file", file)
    assert learned == of_site["train"]


def test_a_run_refuses_weights_that_know_its_test_patients(kit, tmp_path, monkeypatch):
    monkeypatch.setattr(pretraining, "pretrain", lambda *args, **kwargs: None)
    monkeypatch.setattr(pretraining, "_scores", lambda *args: {})
    warmstart(passing, tmp_path, "--site-file", kit / "local/fedtar.yaml")
    config = load_site_config("clinic", workspace=kit, simulator=False)
    weights = str(tmp_path / "start" / "model.safetensors")
    cohort = load_cohort(config, "clinic", timeline=Timeline(3), workspace=kit)
    pretraining.refuse_known_tests(cohort, weights)
    learnt = splits("clinic", workspace=kit)["train"]
    assert training_patients(Path(weights)) == {patient_digest(name, cohort.key) for name in learnt}
    cohort.splits |= {patient.patient_id: "test" for patient in cohort.patients}  # as by a split of the source's own
    with pytest.raises(ConfigError, match=r"was trained on \d+ of the 40 patients that this site tests on"):
        pretraining.refuse_known_tests(cohort.leaving_out(lambda visit: None), weights)


def test_no_key_no_start(out, kit, tmp_path, learned):
    phantoms = tmp_path / "phantoms.yaml"
    phantoms.write_text("source: synthetic\n")
    for file in (out / "sites/north.yaml", phantoms):
        assert "--job-seed" in warmstart(failing, tmp_path, "--site-file", file)
    real = ("--site-file", kit / "local/fedtar.yaml", "--job-seed", 0)
    assert "simulated" in warmstart(failing, tmp_path, *real)
    assert not learned and not list(tmp_path.rglob("fedtar.key"))


@pytest.mark.parametrize("text", ["5", "null", "[" * 100_000])
def test_a_file_of_a_liar_ends_in_no_traceback(tmp_path, text):
    (tmp_path / peft_file.ADAPTER_WEIGHTS).write_bytes(save({"a": torch.zeros(1)}, {PATIENTS_OF: text}))
    assert training_patients(tmp_path / peft_file.ADAPTER_WEIGHTS) == frozenset()
    readers = (peft_file.read_adapter_info, peft_file.read_adapter_config)
    for name, read in zip((peft_file.ADAPTER_INFO, peft_file.ADAPTER_CONFIG), readers, strict=True):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match="damaged"):
            read(tmp_path)
