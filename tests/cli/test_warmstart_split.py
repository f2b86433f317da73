"""``fedtar warmstart`` learns from no patient whom a site validates or tests on, however the site is named."""

from pathlib import Path

import pytest
import torch
from command import failing, passing
from kits import make_kit, whole, write_noise
from safetensors.torch import save

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.cells import Timeline, patient_digest, split_of
from fedtar_flare.data.sources.manifest import write_rows
from fedtar_flare.learning import clinical_start
from fedtar_flare.models.adapters.peft_file import (
    ADAPTER_CONFIG,
    ADAPTER_INFO,
    ADAPTER_WEIGHTS,
    read_adapter_config,
    read_adapter_info,
)
from fedtar_flare.models.weights import PATIENTS as PATIENTS_OF
from fedtar_flare.models.weights import training_patients
from fedtar_flare.site.cohort import derived_key, load_cohort
from fedtar_flare.site.context import state_of
from fedtar_flare.site.site_file import load_site_config

SEED = 7
PATIENTS = 40
MOVED = next(  # a patient of two sites, who trains at one and is tested at the other
    name
    for name in map(str, range(1000))
    if (split_of(name, derived_key("north")), split_of(name, derived_key("south"))) == ("train", "test")
)


class Reached(Exception):
    """Training would begin."""


@pytest.fixture
def learned(monkeypatch):
    """Patients of the samples that are handed to the training, which is left out."""
    patients = set()

    def pretrain(model, tokenizer, images, *args, **kwargs):
        patients.update(sample.visit.patient_id for sample in images._samples)
        raise Reached

    monkeypatch.setattr(clinical_start, "pretrain", pretrain)
    return patients


def write_table(folder, names):
    """A manifest with a study of each of these patients."""
    folder.mkdir(parents=True, exist_ok=True)
    shared = {"study_datetime": "2020-01-01", "report": "No effusion.", "age": 50, "sex": "F"}
    images = {name: write_noise(folder / f"{name}.png", i) for i, name in enumerate(names)}
    rows = [{"patient_id": name, "image": image, **shared} for name, image in images.items()]
    write_rows(folder / "manifest.csv", rows)
    return folder / "manifest.csv"


@pytest.fixture
def out(tmp_path):
    """The folder of two simulated sites, laid out as ``fedtar data partition`` does; one patient came to both."""
    (tmp_path / "sites").mkdir()
    for site in ("north", "south"):
        write_table(tmp_path / site, [f"{site}-{i}" for i in range(PATIENTS)] + [MOVED])
        text = f"source: manifest\npath: ../{site}/manifest.csv\noptions: {{modality: radiograph}}\n"
        (tmp_path / "sites" / f"{site}.yaml").write_text(text)
    return tmp_path


@pytest.fixture
def kit(tmp_path):
    """The startup kit of a real site."""
    folder = make_kit(tmp_path / "kit", "source: manifest\npath: manifest.csv\noptions: {modality: radiograph}\n")
    write_table(folder / "local", [str(i) for i in range(PATIENTS)])
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


def test_a_simulated_site(out, learned, monkeypatch):
    monkeypatch.setenv("FEDTAR_SITES", str(out / "sites"))
    of_site = splits("north")
    assert of_site == splits("north", seed=0) and all(of_site.values())  # whatever the seed of a run
    learns(out, "--site-file", out / "sites/north.yaml", "--job-seed", SEED, "--seed", 1)
    assert learned == of_site["train"] and not list(out.rglob("fedtar.key"))


def test_several_simulated_sites(out, learned, monkeypatch):
    monkeypatch.setenv("FEDTAR_SITES", str(out / "sites"))
    of_sites = [splits(name) for name in ("north", "south")]
    tables = ("--site-file", out / "sites/north.yaml", "--site-file", out / "sites/south.yaml")
    learns(out, *tables, "--job-seed", SEED)
    assert not learned & {name for site in of_sites for name in site["validation"] | site["test"]}
    assert learned == (of_sites[0]["train"] | of_sites[1]["train"]) - {MOVED}


@pytest.mark.parametrize("first", ["site", "warmstart"])
def test_a_real_site_has_one_key_whoever_comes_first(first, kit, tmp_path, learned):
    of_site = splits("clinic", workspace=kit) if first == "site" else {}
    learns(tmp_path, "--site-file", kit / "local/fedtar.yaml")
    assert learned == (of_site or splits("clinic", workspace=kit))["train"]
    assert [path.parent for path in tmp_path.rglob("fedtar.key")] == [state_of(kit)]


def test_a_key_by_its_name_and_in_the_state_folder_counts(kit, tmp_path, learned):
    of_site = splits("clinic", workspace=kit)
    copy = write_table(tmp_path / "copy", [str(i) for i in range(PATIENTS)])
    learns(tmp_path, "--manifest", copy, "--key", state_of(kit) / "fedtar.key")
    assert learned == of_site["train"] and learned.clear() is None
    table = write_table(tmp_path / "own", [str(i) for i in range(PATIENTS)])
    file, state = table.with_name("site.yaml"), tmp_path / "own" / "state"
    file.write_text("source: manifest\npath: manifest.csv\nstate_dir: state\n")
    assert "--key" in warmstart(failing, tmp_path, "--site-file", file) and not state.exists()
    (kit / "local" / "fedtar.yaml").write_text(whole(f"source: manifest\npath: {table}\nstate_dir: {state}\n"))
    of_site = splits("clinic", workspace=kit)
    learns(tmp_path, "--site-file", file)
    assert learned == of_site["train"]


def test_a_run_refuses_weights_that_know_its_test_patients(kit, tmp_path, monkeypatch):
    monkeypatch.setattr(clinical_start, "pretrain", lambda *args, **kwargs: None)
    monkeypatch.setattr(clinical_start, "_scores", lambda *args: {})
    warmstart(passing, tmp_path, "--site-file", kit / "local/fedtar.yaml")
    config = load_site_config("clinic", workspace=kit, simulator=False)
    weights = str(tmp_path / "start" / "model.safetensors")
    cohort = load_cohort(config, "clinic", timeline=Timeline(3), workspace=kit)
    clinical_start.refuse_known_tests(cohort, weights)
    learnt = splits("clinic", workspace=kit)["train"]
    assert training_patients(Path(weights)) == {patient_digest(name, cohort.key) for name in learnt}
    cohort.splits |= {patient.patient_id: "test" for patient in cohort.patients}  # as by a split of the source's own
    with pytest.raises(ConfigError, match=r"was trained on \d+ of the 40 patients that this site tests on"):
        clinical_start.refuse_known_tests(cohort.leaving_out(lambda visit: None), weights)


def test_no_key_no_start(out, kit, tmp_path, learned):
    north, lone = out / "sites/north.yaml", write_table(tmp_path / "lone/data", "abc")
    phantoms = tmp_path / "phantoms.yaml"
    phantoms.write_text("source: synthetic\n")
    for arguments, word in (
        (("--manifest", out / "north/manifest.csv"), "--job-seed"),
        (("--site-file", north), "--job-seed"),
        (("--site-file", phantoms), "--job-seed"),
        (("--manifest", lone, "--job-seed", 0), "--site-file"),
        (("--site-file", kit / "local/fedtar.yaml", "--job-seed", 0), "simulated"),
        (("--site-file", north, "--no-site"), "--no-site"),
        (("--manifest", lone, "--manifest", lone, "--key", tmp_path / "key"), "--key"),
    ):
        assert word in warmstart(failing, tmp_path, *arguments), arguments
    assert not learned and not list(tmp_path.rglob("fedtar.key"))


def test_a_collection_of_no_site(tmp_path, learned):
    table = write_table(tmp_path / "public", [str(i) for i in range(PATIENTS)])
    learns(tmp_path, "--manifest", table, "--no-site")
    assert 0.5 * PATIENTS < len(learned) < 0.9 * PATIENTS


@pytest.mark.parametrize("text", ["5", "null", "[" * 100_000])
def test_a_file_of_a_liar_ends_in_no_traceback(tmp_path, text):
    (tmp_path / ADAPTER_WEIGHTS).write_bytes(save({"a": torch.zeros(1)}, {PATIENTS_OF: text}))
    assert training_patients(tmp_path / ADAPTER_WEIGHTS) == frozenset()
    for name, read in ((ADAPTER_INFO, read_adapter_info), (ADAPTER_CONFIG, read_adapter_config)):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match="damaged"):
            read(tmp_path)
