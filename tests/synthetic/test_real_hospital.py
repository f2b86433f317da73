"""A hospital with images and reports of its own trains, scores and keeps its rows without the phantom world."""

import os
import subprocess
import sys

import pytest
from kits import write_noise
from tables import write_table

PROGRAM = """
import sys
from pathlib import Path
from fedtar_flare.testing import Hospital
site = Hospital(Path(sys.argv[1]), model={"slices": 1, "max_length": 8, "num_beams": 1}, fresh=False)
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
    rows = []
    for number in range(24):
        image, later = write_noise(tmp_path / f"{number}.png", number), number % 2
        text = "The effusion has increased." if later else "Small left effusion."
        when = {"patient_id": f"p{number // 2}", "study_datetime": f"2020-0{1 + later}-01"}
        rows.append(when | {"image": image.name, "report": text})
    write_table(tmp_path / "manifest.csv", rows)
    (tmp_path / "site-1.yaml").write_text(f"source: manifest\npath: manifest.csv\nstate_dir: {tmp_path / 'state'}\n")
    paths = os.pathsep.join([str(repository), str(repository / "tests")])
    environment = {**os.environ, "FEDTAR_HOME": str(tmp_path / "home"), "FEDTAR_SITES": str(tmp_path)}
    environment |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    scores, phantoms = done.stdout.splitlines()
    assert "chexpert_rules_f1" in scores and phantoms == "[]"
