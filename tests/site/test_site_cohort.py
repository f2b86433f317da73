"""A site's cohort from its manifest, in either form."""

import csv

import numpy as np
import pytest
from PIL import Image

from fedtar_flare.data.timeline import Timeline
from fedtar_flare.imaging.pipeline import Size, prepare_cohort
from fedtar_flare.site.cohort import load_cohort
from fedtar_flare.site.site_file import SiteConfig

ROW = {"patient_id": "ok", "study_datetime": "2020-01-01", "image": "a.png", "report": "Clear.", "age": "50"}


@pytest.fixture(params=["csv", "parquet"])
def cohort(request, tmp_path):
    """Loads the cohort of rows beside one good image and one that is none."""
    Image.fromarray(np.arange(6400, dtype=np.uint8).reshape(80, 80)).save(tmp_path / "a.png")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nno picture at all")
    path = tmp_path / f"m.{request.param}"

    def load(*rows, time_steps=1):
        if request.param == "parquet":
            arrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
            parquet.write_table(arrow.Table.from_pylist(rows), path)
        else:
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(ROW))
                writer.writeheader()
                writer.writerows(rows)
        config = SiteConfig(source="manifest", path=path, simulated=True)
        return load_cohort(config, "s", timeline=Timeline(time_steps))

    return load


def test_an_image_that_is_no_image_leaves_the_others(cohort, tmp_path):
    loaded = cohort(ROW, {**ROW, "patient_id": "bad", "image": "broken.png"})
    made = prepare_cohort(loaded, Size(32, 16), tmp_path / "cache")
    assert [p.patient_id for p in made.patients] == ["ok"] and made.rejected == {"unreadable": 1}


def test_one_patient_in_all_is_a_cohort(cohort):
    loaded = cohort(ROW, time_steps=2)
    assert len(loaded.patients) == 1 and sum(map(sum, loaded.counts().values())) == 1
