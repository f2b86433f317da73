"""FedKEI on real pictures and radiographs, handwritten digits, and with the encoder of volumes."""

import numpy as np
import pytest
import torch
import yaml

from fedtar_flare.curation.unpack import unpack
from fedtar_flare.data.sources.manifest import write_rows
from fedtar_flare.data.sources.tables import rows_of
from fedtar_flare.methods.fedkei.events import EVENTS, Learnt
from fedtar_flare.record.events import SHARED
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.runtime.in_process import run_in_process
from fedtar_flare.runtime.recipe import MethodRecipe

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path, home, monkeypatch):
    """Runs FedKEI at sites of these site files; gives the folder of results and the events."""

    def run_at(*sites, **settings):
        (tmp_path / "sites").mkdir()
        for i, content in enumerate(sites, start=1):
            (tmp_path / "sites" / f"site-{i}.yaml").write_text(yaml.safe_dump(content))
        monkeypatch.setenv("FEDTAR_HOME", str(home))
        monkeypatch.setenv("FEDTAR_SITES", str(tmp_path / "sites"))
        torch.set_num_threads(1)
        results = run_in_process(MethodRecipe("fedkei", **settings), len(sites), tmp_path / "run")
        return results, read_events(results, (*SHARED, *EVENTS))

    return run_at


def manifest(path, modality):
    return {"source": "manifest", "path": str(path), "options": {"modality": modality}}


def test_digits_are_learnt(run, tmp_path):
    """Real handwriting in colour: each site, with every second writer, tells each new digit from those before it."""
    from sklearn.datasets import load_digits

    digits = load_digits(n_class=4)
    bright = np.kron(digits.images / 16, np.ones((4, 4)))
    ink = np.stack([255 * bright, 200 * bright, 120 * bright], axis=-1).astype(np.uint8)
    np.savez(tmp_path / "digits.npz", train_images=ink, train_labels=digits.target[:, None].astype(np.uint8))
    unpacked = unpack(tmp_path / "digits.npz", tmp_path / "digits", most=320)
    assert unpacked.colour and unpacked.pictures == 320
    rows = list(rows_of(unpacked.manifest, ("patient_id", "study_datetime", "image", "labels")))
    rows = [row | {"image": str(unpacked.manifest.parent / row["image"])} for row in rows]
    patients = sorted({row["patient_id"] for row in rows})
    for i in (0, 1):
        write_rows(tmp_path / f"{i}.csv", [row for row in rows if patients.index(row["patient_id"]) % 2 == i])
    _, events = run(
        *(manifest(tmp_path / f"{i}.csv", "photograph") for i in (0, 1)),
        model={"slices": 1, "image_size": 32},
        training={"epochs": 3},
        fedkei={"tasks": ["digit-1=class-1", "digit-2=class-2"], "base": ["class-0"], "rand_baseline": False},
    )
    outcomes = [outcome for event in of_kind(events, Learnt) for outcome in event.sites.values()]
    assert len(outcomes) == 4 and all(outcome.n >= 5 for outcome in outcomes)
    assert all(outcome.auc[-1] > 0.8 and 0 <= outcome.membership <= 1 for outcome in outcomes), outcomes
