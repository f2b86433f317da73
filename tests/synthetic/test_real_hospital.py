"""A hospital with images and reports of its own trains, scores and keeps its rows without the phantom world."""

import csv
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

PROGRAM = """
import sys
from pathlib import Path
from hospital_site import HospitalSite
site = HospitalSite(Path(sys.argv[1]), model={"slices": 1, "max_length": 8, "num_beams": 1}, fresh=False)
_, weights = site.handshake()
reply, update = site.train(weights, 1, 1)
assert reply.status == "ok" and update, reply
site.train(weights, 1, 2)
reply, _ = site.close(weights, 1, evaluate=True)
print(sorted(reply.payload["scores"]["all"]))
print(sorted(name for name in sys.modules if name.startswith("fedtar_flare.synthetic")))
"""


@pytest.mark.slow  # import-linter sees every import but those that a cohort of phantoms asks for
def test_no_phantom_is_imported(tmp_path, repository):
    images = tmp_path / "images"
    images.mkdir()
    rows = [("patient_id", "study_datetime", "image", "report")]
    for patient in range(12):
        for visit in (1, 2):
            pixels = np.random.default_rng([patient, visit]).integers(0, 255, (80, 80)).astype(np.uint8)
            Image.fromarray(pixels).save(images / f"{patient}-{visit}.png")
            text = "The effusion has increased." if visit == 2 else "Small left effusion."
            rows.append((f"p{patient}", f"2020-0{visit}-01", f"images/{patient}-{visit}.png", text))
    with (tmp_path / "manifest.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    (tmp_path / "site-1.yaml").write_text(f"source: manifest\npath: manifest.csv\nstate_dir: {tmp_path / 'state'}\n")
    paths = os.pathsep.join([str(repository), str(repository / "tests")])
    environment = {**os.environ, "FEDTAR_HOME": str(tmp_path / "home"), "FEDTAR_SITES": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env=environment | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    scores, phantoms = done.stdout.splitlines()
    assert "chexpert_rules_f1" in scores and phantoms == "[]"
