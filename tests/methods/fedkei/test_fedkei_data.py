"""FedKEI on real pictures, handwritten digits, and with the encoder of volumes."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from fedtar_flare.curation.unpack import unpack
from fedtar_flare.data.sources.manifest import write_rows
from fedtar_flare.data.sources.tables import rows_of
from fedtar_flare.methods.fedkei.events import EVENTS, Learnt, Mixed
from fedtar_flare.record.events import SHARED, Start
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.runtime.checkpoint import CheckpointFolder
from fedtar_flare.runtime.in_process import run_in_process
from fedtar_flare.runtime.recipe import MethodRecipe


def packed_digits(file: Path) -> Path:
    """scikit-learn's digits 0 to 3, real handwriting of 8 x 8 pixels, as a packed file of 32 x 32 colour pictures."""
    from sklearn.datasets import load_digits

    digits = load_digits(n_class=4)
    bright = np.kron(digits.images / 16, np.ones((4, 4)))
    ink = np.stack([255 * bright, 200 * bright, 120 * bright], axis=-1).astype(np.uint8)
    np.savez(file, train_images=ink, train_labels=digits.target[:, None].astype(np.uint8))
    return file


@pytest.mark.slow
def test_digits_are_learnt(tmp_path, monkeypatch):
    """A site learns to tell each new digit from those before it, in colour, through the manifest and the cache."""
    unpacked = unpack(packed_digits(tmp_path / "digits.npz"), tmp_path / "digits", most=320)
    assert unpacked.colour and unpacked.pictures == 320
    rows = list(rows_of(unpacked.manifest, ("patient_id", "study_datetime", "image", "labels")))
    patients = sorted({row["patient_id"] for row in rows})
    (tmp_path / "sites").mkdir()
    for i, site in enumerate(("site-1", "site-2")):  # which get the patients in turn
        mine = [row for row in rows if patients.index(row["patient_id"]) % 2 == i]
        manifest = tmp_path / f"{site}.csv"
        write_rows(manifest, [row | {"image": str(unpacked.manifest.parent / row["image"])} for row in mine])
        content = {"source": "manifest", "path": str(manifest), "options": {"modality": "photograph"}}
        (tmp_path / "sites" / f"{site}.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setenv("FEDTAR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FEDTAR_SITES", str(tmp_path / "sites"))
    torch.set_num_threads(1)
    settings = {
        "preset": "small",
        "model": {"slices": 1, "image_size": 32},
        "training": {"epochs": 3},
        "fedkei": {"tasks": ["digit-1=class-1", "digit-2=class-2"], "base": ["class-0"], "rand_baseline": False},
    }
    results = run_in_process(MethodRecipe("fedkei", **settings), 2, tmp_path / "run")
    learnt = of_kind(read_events(results, (*SHARED, *EVENTS)), Learnt)
    outcomes = [outcome for event in learnt for outcome in event.sites.values()]
    assert len(outcomes) == 4 and all(outcome.n >= 5 for outcome in outcomes)
    assert all(outcome.auc[-1] > 0.8 and 0 <= outcome.membership <= 1 for outcome in outcomes), outcomes


SETTINGS = {
    "preset": "tiny",
    "model": {"encoder": "swin_unetr", "encoder_config": {"feature_size": 12, "window_size": 4}, "slices": 32,
              "image_size": 32},
    "training": {"epochs": 1, "batch_size": 4},
    "data": {"synthetic_patients": 12},
    "fedkei": {"tasks": ["effusion", "nodule"], "base": ["none", "cardiomegaly", "emphysema", "lymphadenopathy"]},
}  # fmt: skip


@pytest.mark.slow
def test_volumes_are_learnt_and_a_site_with_pictures_is_absent(home, tmp_path, monkeypatch):
    rng, rows = np.random.default_rng(0), []
    for n in range(4):
        Image.fromarray(rng.integers(0, 256, (64, 64), dtype=np.uint8)).save(tmp_path / f"{n}.png")
        rows.append({"patient_id": f"p{n}", "study_datetime": "2020-01-01", "image": f"{n}.png", "labels": ""})
    write_rows(tmp_path / "manifest.csv", rows)
    sites = tmp_path / "sites"
    sites.mkdir()
    for name in ("site-1", "site-2"):
        (sites / f"{name}.yaml").write_text("source: synthetic\n")
    pictures = f"source: manifest\npath: {tmp_path / 'manifest.csv'}\noptions: {{modality: radiograph}}\n"
    (sites / "site-3.yaml").write_text(pictures)
    monkeypatch.setenv("FEDTAR_HOME", str(home))
    monkeypatch.setenv("FEDTAR_SITES", str(sites))
    results = run_in_process(MethodRecipe("fedkei", **SETTINGS), 3, tmp_path / "run")
    events = read_events(results, (*SHARED, *EVENTS))
    assert "takes CT volumes, and this site has pictures" in of_kind(events, Start)[0].absent["site-3"]
    assert [sorted(event.sites) for event in of_kind(events, Learnt)] == [["site-1", "site-2"]] * 2
    assert [event.modules for event in of_kind(events, Mixed)] == [0, 2]
    assert CheckpointFolder(results / "checkpoint").last()[0].weights["head.weight"].shape == (2, 192)
