"""FedKEI with the encoder of whole volumes: from the phantoms to a hospital outside that learns from the run."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from fedtar_flare.cli.main import main
from fedtar_flare.data.sources.manifest import write_rows
from fedtar_flare.methods.fedkei.events import EVENTS, Learnt, Mixed
from fedtar_flare.methods.fedkei.outside import KNOWLEDGE_FILE, read_knowledge
from fedtar_flare.record.events import SHARED, Start
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.suite.engine import run_in_process

BASE = ["none", "cardiomegaly", "emphysema", "lymphadenopathy"]
SETTINGS = {
    "preset": "tiny",
    "model": {
        "encoder": "swin_unetr",
        "encoder_config": {"feature_size": 12, "window_size": 4},
        "slices": 32,
        "image_size": 32,
    },
    "training": {"epochs": 1, "batch_size": 4},
    "data": {"synthetic_patients": 12},
    "fedkei": {"tasks": ["effusion", "nodule"], "base": BASE},
}


@pytest.mark.slow
def test_volumes_are_learnt_and_what_the_run_left_starts_another_hospital(home, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDTAR_HOME", str(home))
    (tmp_path / "sites").mkdir()
    phantoms, pictures = (tmp_path / "sites" / f"site-{n}.yaml" for n in (1, 3))
    for site in (phantoms, phantoms.with_stem("site-2")):
        site.write_text("source: synthetic\n")
    pictures.write_text(f"source: manifest\npath: {radiographs(tmp_path)}\noptions: {{modality: radiograph}}\n")
    monkeypatch.setenv("FEDTAR_SITES", str(tmp_path / "sites"))
    torch.set_num_threads(1)
    results = run_in_process(MethodRecipe("fedkei", **SETTINGS), 3, tmp_path / "run")
    events = read_events(results, (*SHARED, *EVENTS))
    assert "takes CT volumes, and this site has pictures" in of_kind(events, Start)[0].absent["site-3"]
    assert [sorted(one.sites) for one in of_kind(events, Learnt)] == [["site-1", "site-2"]] * 2
    assert [one.modules for one in of_kind(events, Mixed)] == [0, 2]
    knowledge = read_knowledge(results / KNOWLEDGE_FILE)
    assert knowledge.classifier.whole_volumes and knowledge.start["head.weight"].shape == (2, 192)

    arguments = [str(results / KNOWLEDGE_FILE), "--patients", "12", "--set", "training.epochs=1"]
    arguments += ["-o", str(tmp_path / "out"), "--task", "consolidation", *(f"--base={label}" for label in BASE)]
    assert main(["adapt", *arguments, "--site-file", str(phantoms)]) == 0
    result = json.loads((tmp_path / "out" / "adaptation.json").read_text())
    assert len(result["auc"]) == len(result["rand_auc"]) == 2 and result["knowledge"]["modules"] == 4

    capsys.readouterr()
    assert main(["adapt", *arguments, "--site-file", str(pictures)]) == 1
    assert "takes CT volumes" in capsys.readouterr().err


def radiographs(folder):
    rng = np.random.default_rng(0)
    rows = []
    for n in range(4):
        Image.fromarray(rng.integers(0, 256, (64, 64), dtype=np.uint8)).save(folder / f"{n}.png")
        rows.append({"patient_id": f"p{n}", "study_datetime": "2020-01-01", "image": f"{n}.png", "labels": ""})
    write_rows(folder / "manifest.csv", rows)
    return folder / "manifest.csv"
