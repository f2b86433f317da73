"""FedKEI on real pictures, findings of chest radiographs and handwritten digits, and with the encoder of volumes."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from fedtar_flare.curation.unpack import unpack
from fedtar_flare.data.sources.covid_chestxray import read_covid_chestxray
from fedtar_flare.data.sources.fields import labels_text
from fedtar_flare.data.sources.manifest import write_rows
from fedtar_flare.data.sources.tables import rows_of
from fedtar_flare.methods.fedkei.events import EVENTS, Learnt, Mixed
from fedtar_flare.record.events import SHARED, Start
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.runtime.checkpoint import CheckpointFolder
from fedtar_flare.runtime.in_process import run_in_process
from fedtar_flare.runtime.recipe import MethodRecipe

OTHER_PNEUMONIA = "Pneumonia|Mycoplasma Bacterial Pneumonia|Streptococcus|Varicella|Klebsiella|E.Coli|Bacterial|Lipoid"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs FedKEI on manifests, given by site; its events."""
    monkeypatch.setenv("FEDTAR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FEDTAR_SITES", str(tmp_path / "sites"))
    torch.set_num_threads(1)

    def run_on(manifests: dict[str, Path], modality: str = "radiograph", **settings):
        (tmp_path / "sites").mkdir()
        for site, manifest in manifests.items():
            content = {"source": "manifest", "path": str(manifest), "options": {"modality": modality}}
            (tmp_path / "sites" / f"{site}.yaml").write_text(yaml.safe_dump(content))
        results = run_in_process(MethodRecipe("fedkei", **settings), list(manifests), tmp_path / "run")
        return read_events(results, (*SHARED, *EVENTS))

    return run_on


def divided(rows, folder, sites=2) -> dict[str, Path]:
    """A manifest for each site, the i-th patient at site i modulo their number."""
    patients = sorted({row["patient_id"] for row in rows})
    found = {}
    for number in range(sites):
        own = [row for row in rows if patients.index(row["patient_id"]) % sites == number]
        found[f"site-{number + 1}"] = folder / f"site-{number + 1}.csv"
        write_rows(found[f"site-{number + 1}"], own)
    return found


@pytest.mark.slow
@pytest.mark.shared_data
def test_findings_of_real_radiographs(shared_data, run, tmp_path):
    """Machinery: real files, patients over time, a disease without enough patients at a site."""
    reading = read_covid_chestxray(shared_data / "covid_chestxray", {"without_notes": True})
    visits = [visit for patient in reading.patients() for visit in patient.visits if visit.labels is not None]
    assert len({visit.patient_id for visit in visits}) == 56 and sum(not visit.labels for visit in visits) == 6
    rows = [
        {"patient_id": visit.patient_id, "study_datetime": f"{visit.acquired:%Y-%m-%d %H:%M:%S}",
         "image": str(visit.image), "labels": labels_text(visit.labels, visit.uncertain)}
        for visit in visits
    ]  # fmt: skip
    events = run(
        divided(rows, tmp_path),
        preset="tiny",
        training={"epochs": 2, "batch_size": 8},
        fedkei={"tasks": ["covid=COVID-19", f"other_pneumonia={OTHER_PNEUMONIA}"]},
    )
    learnt = of_kind(events, Learnt)
    assert learnt[0].sites and sorted(learnt[1].sites) == ["site-1", "site-2"]
    for one in learnt[1].sites.values():
        assert min(one.counts["train"]) >= 1 and np.isfinite(list(one.seconds.values())).all()
    assert of_kind(events, Mixed)[1].modules == len(learnt[0].sites)


def packed_digits(file: Path) -> Path:
    """scikit-learn's digits 0 to 3, real handwriting of 8 x 8 pixels, as a packed file of 32 x 32 colour pictures."""
    from sklearn.datasets import load_digits

    digits = load_digits(n_class=4)
    bright = np.kron(digits.images / 16, np.ones((4, 4)))
    ink = np.stack([255 * bright, 200 * bright, 120 * bright], axis=-1).astype(np.uint8)
    np.savez(file, train_images=ink, train_labels=digits.target[:, None].astype(np.uint8))
    return file


@pytest.mark.slow
def test_digits_are_learnt(run, tmp_path):
    """A site learns to tell each new digit from those before it, in colour, through the manifest and the cache."""
    found = unpack(packed_digits(tmp_path / "digits.npz"), tmp_path / "digits", most=320)
    assert found.colour and found.pictures == 320
    rows = list(rows_of(found.manifest, ("patient_id", "study_datetime", "image", "labels")))
    for row in rows:
        row["image"] = str(found.manifest.parent / row["image"])
    events = run(
        divided(rows, tmp_path),
        "photograph",
        preset="small",
        model={"slices": 1, "image_size": 32},
        training={"epochs": 3},
        fedkei={"tasks": [f"digit-{n}=class-{n}" for n in (1, 2)], "base": ["class-0"], "rand_baseline": False},
    )
    last = {(event.round, site): one for event in of_kind(events, Learnt) for site, one in event.sites.items()}
    assert len(last) == 4 and all(one.n >= 5 for one in last.values())
    assert all(one.auc[-1] > 0.8 for one in last.values()), {key: one.auc for key, one in last.items()}
    assert all(0 <= one.membership <= 1 for one in last.values())


BASE = ["none", "cardiomegaly", "emphysema", "lymphadenopathy"]
SETTINGS = {
    "preset": "tiny",
    "model": {"encoder": "swin_unetr", "encoder_config": {"feature_size": 12, "window_size": 4}, "slices": 32,
              "image_size": 32},
    "training": {"epochs": 1, "batch_size": 4},
    "data": {"synthetic_patients": 12},
    "fedkei": {"tasks": ["effusion", "nodule"], "base": BASE},
}  # fmt: skip


@pytest.mark.slow
def test_volumes_are_learnt_and_a_site_with_pictures_is_absent(home, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDTAR_HOME", str(home))
    (tmp_path / "sites").mkdir()
    phantoms, pictures = (tmp_path / "sites" / f"site-{n}.yaml" for n in (1, 3))
    for site in (phantoms, phantoms.with_stem("site-2")):
        site.write_text("source: synthetic\n")
    pictures.write_text(f"source: manifest\npath: {radiographs(tmp_path)}\noptions: {{modality: radiograph}}\n")
    monkeypatch.setenv("FEDTAR_SITES", str(tmp_path / "sites"))
    results = run_in_process(MethodRecipe("fedkei", **SETTINGS), 3, tmp_path / "run")
    events = read_events(results, (*SHARED, *EVENTS))
    assert "takes CT volumes, and this site has pictures" in of_kind(events, Start)[0].absent["site-3"]
    assert [sorted(one.sites) for one in of_kind(events, Learnt)] == [["site-1", "site-2"]] * 2
    assert [one.modules for one in of_kind(events, Mixed)] == [0, 2]
    assert CheckpointFolder(results / "checkpoint").last()[0].weights["head.weight"].shape == (2, 192)


def radiographs(folder):
    rng = np.random.default_rng(0)
    rows = []
    for n in range(4):
        Image.fromarray(rng.integers(0, 256, (64, 64), dtype=np.uint8)).save(folder / f"{n}.png")
        rows.append({"patient_id": f"p{n}", "study_datetime": "2020-01-01", "image": f"{n}.png", "labels": ""})
    write_rows(folder / "manifest.csv", rows)
    return folder / "manifest.csv"
