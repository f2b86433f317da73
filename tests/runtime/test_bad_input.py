"""A site with bad data: what can be used is used, the rest counted, and the server reads a reason without identity."""

import csv
from itertools import product

import numpy as np
import pytest
from PIL import Image

from fedtar_flare.testing import Hospital

MARK = "Mustermann-4711"
HEAD = ("patient_id", "study_datetime", "image", "report", "age", "sex")


@pytest.fixture(autouse=True)
def _home(tmp_path_factory, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDTAR_HOME", str(tmp_path_factory.getbasetemp() / "bad-input-home"))
    (tmp_path / "sites").mkdir()
    monkeypatch.setenv("FEDTAR_SITES", str(tmp_path / "sites"))


def hospital(tmp_path, patients, change=lambda rows: rows):
    """A site with one radiograph per patient and visit; ``change`` spoils the table's rows."""
    rows = []
    (tmp_path / "radiographs").mkdir()
    for p, v in product(range(patients), range(2)):
        name = f"radiographs/{MARK}-{p}-{v}.png"
        pixels = np.random.default_rng(10 * p + v).integers(0, 255, (80, 80)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
        rows.append([f"{MARK}-{p}", f"2020-0{v + 1}-01", name, f"Patient {p} without effusion.", "60", "FM"[p % 2]])
    with (tmp_path / "manifest.csv").open("w", newline="") as file:
        csv.writer(file).writerows([HEAD, *change(rows)])
    (tmp_path / "sites" / "site-1.yaml").write_text(
        f"source: manifest\npath: ../manifest.csv\nstate_dir: {tmp_path / 'state'}\n"
    )
    return Hospital(tmp_path, model={"slices": 1})


def spoil(column, value, where):
    index = HEAD.index(column)

    def change(rows):
        return [[*row[:index], value, *row[index + 1 :]] if number in where else row for number, row in enumerate(rows)]

    return change


@pytest.mark.parametrize(
    ("change", "reason", "count"),
    [
        (spoil("image", "radiographs/gone.png", [0]), "no-image", 1),
        (spoil("image", "manifest.csv", [0, 3]), None, 2),
        (spoil("report", "  ", [1]), "empty-report", 1),
        (lambda rows: [*rows, rows[0]], "duplicate-visit", 1),
        (spoil("sex", "unknown", range(24)), None, 0),
    ],
)
def test_a_bad_study_is_left_out_and_counted_and_the_site_goes_on(tmp_path, change, reason, count):
    site = hospital(tmp_path, 12, change)
    reply, _ = site.handshake()
    assert reply.status == "ok", reply.reason
    left_out = reply.payload["skipped_studies"]
    assert sum(left_out.values()) == count and (reason is None or left_out == {reason: count})
    assert sum(map(sum, reply.payload["counts"].values())) == 24 + (reason == "duplicate-visit") - count
    assert MARK not in str(reply)


@pytest.mark.parametrize(
    "change",
    [spoil("image", "radiographs/gone.png", range(12)), lambda rows: []],
    ids=["no image", "no row"],
)
def test_a_site_that_cannot_train_says_why_in_one_line_without_identity(tmp_path, change):
    reply, _ = hospital(tmp_path, 6, change).handshake()
    assert reply.status == "error" and "no-patient" in reply.reason
    assert "\n" not in reply.reason and MARK not in reply.reason and str(tmp_path) not in reply.reason
