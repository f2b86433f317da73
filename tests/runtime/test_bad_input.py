"""A site with bad data: what can be used is used, the rest counted, and the server reads a reason without identity."""

from itertools import product

import pytest
from hospital_site import write_site_files
from kits import write_noise
from tables import write_table

from fedtar_flare.testing import Hospital

MARK = "Mustermann-4711"


def hospital(tmp_path, monkeypatch, patients, change):
    """A site with a radiograph of each patient and visit; ``change`` spoils the rows of its table."""
    write_site_files(tmp_path, tmp_path / "home", monkeypatch)
    rows = []
    (tmp_path / "radiographs").mkdir()
    for p, v in product(range(patients), range(2)):
        image = f"radiographs/{MARK}-{p}-{v}.png"
        write_noise(tmp_path / image, 10 * p + v)
        row = {"patient_id": f"{MARK}-{p}", "study_datetime": f"2020-0{v + 1}-01", "image": image}
        rows.append(row | {"report": f"Patient {p} without effusion.", "age": "60", "sex": "FM"[p % 2]})
    write_table(tmp_path / "manifest.csv", change(rows), list(rows[0]))
    site_file = f"source: manifest\npath: ../manifest.csv\nstate_dir: {tmp_path / 'state'}\n"
    (tmp_path / "sites" / "site-1.yaml").write_text(site_file)
    return Hospital(tmp_path, model={"slices": 1})


def spoil(column, value, where):
    return lambda rows: [row | ({column: value} if number in where else {}) for number, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("change", "left_out", "visits"),
    [
        (spoil("image", "radiographs/gone.png", [0]), {"no-image": 1}, 23),
        (spoil("image", "manifest.csv", [0, 3]), {"?": 2}, 22),
        (spoil("report", "  ", [1]), {"empty-report": 1}, 23),
        (lambda rows: [*rows, rows[0]], {"duplicate-visit": 1}, 24),
        (spoil("sex", "unknown", range(24)), {}, 24),
        (spoil("image", "radiographs/gone.png", range(24)), None, 0),
        (lambda rows: [], None, 0),
    ],
)
def test_a_bad_study_is_left_out_and_counted_and_no_identity_leaves(tmp_path, monkeypatch, change, left_out, visits):
    reply, _ = hospital(tmp_path, monkeypatch, 12, change).handshake()
    assert MARK not in str(reply) and str(tmp_path) not in str(reply)
    if left_out is None:
        assert reply.status == "error" and "no-patient" in reply.reason and "\n" not in reply.reason
        return
    assert reply.status == "ok", reply.reason
    assert sum(reply.payload["skipped_studies"].values()) == sum(left_out.values())
    assert "?" in left_out or reply.payload["skipped_studies"] == left_out
    assert sum(map(sum, reply.payload["counts"].values())) == visits
