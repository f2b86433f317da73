"""Site files of made-up hospitals, and a round at one of them."""

import csv
from itertools import pairwise

import numpy as np
from PIL import Image

from fedtar_flare.site.state import SiteState
from fedtar_flare.testing.hospital import TIME_STEPS as T
from fedtar_flare.testing.hospital import TINY as SETTINGS

__all__ = ["SETTINGS", "T", "a_round", "loss_differences", "state_of", "write_manifest_site", "write_site_files"]


def write_site_files(folder, home, monkeypatch):
    """Site files of synthetic sites whose state lies below ``folder``; ``home`` has their image cache."""
    monkeypatch.setenv("FEDTAR_HOME", str(home))
    (folder / "state").mkdir()
    sites = folder / "sites"
    sites.mkdir()
    for name in ("site-1", "hospital"):
        (sites / f"{name}.yaml").write_text(f"source: synthetic\nstate_dir: {folder / 'state'}\n")
    monkeypatch.setenv("FEDTAR_SITES", str(sites))


def write_manifest_site(folder, home, monkeypatch, reports, policy="{}"):
    """A real hospital, site-1, of patients with a radiograph of noise each."""
    rows, rng = [("patient_id", "study_datetime", "image", "report", "age", "sex")], np.random.default_rng(0)
    for n, report in enumerate(reports):
        Image.fromarray(rng.integers(0, 255, (32, 32)).astype(np.uint8)).save(folder / f"{n}.png")
        rows.append((f"p{n}", "2020-01-01", f"{n}.png", report, str(30 + n), "FM"[n % 2]))
    with (folder / "manifest.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    text = f"source: manifest\npath: manifest.csv\nstate_dir: {folder}\ndevice: cpu\npolicy: {policy}\n...\n"
    (folder / "site-1.yaml").write_text(text)
    (folder / "fedtar.key").write_text("ab" * 32)
    monkeypatch.setenv("FEDTAR_HOME", str(home))
    monkeypatch.setenv("FEDTAR_SITES", str(folder))


def a_round(site, w, r=1, run_id="run"):
    """One round at one site with alpha 0.5; returns w_T and the updates."""
    updates = []
    for t in range(1, T + 1):
        reply, update = site.train(w, r, t, run_id)
        assert reply.status == "ok", reply.reason
        updates.append(update)
        w = {name: w[name] + 0.5 * update[name] for name in w}
    return w, updates


def loss_differences(learner, ws):
    """The T numbers to first order: by how much the validation loss differs along each of the steps w_0..w_T."""
    numbers = []
    for before, after in pairwise(ws):
        losses = []
        for sign in (1, -1):
            learner.load_shared({n: value + sign * 0.05 * (after[n] - before[n]) for n, value in ws[-1].items()})
            losses.append(learner.validate().loss)
        numbers.append((losses[0] - losses[1]) / 0.1)
    return numbers


def state_of(tmp_path, run_id="run"):
    return SiteState(tmp_path / "state", run_id, "site-1")
