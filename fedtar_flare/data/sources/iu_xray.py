"""IU X-Ray (OpenI, Indiana University): chest radiographs with reports in sections, one undated visit per patient.

``indiana_reports.csv`` and ``indiana_projections.csv``, images in ``images_normalized`` (in ``images`` or beside the
tables); the first ``Frontal`` projection by file name counts, or with ``views: all`` each image, as a visit.

Without dates nothing here is longitudinal. The option ``undated: single`` is required: it states that every patient has
one visit, and all get the date 2000-01-01. Age and sex are unknown too.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import ConfigError, DataError, collecting
from fedtar_flare.data.cohort import Visit
from fedtar_flare.data.report_text import with_headings
from fedtar_flare.data.sources.fields import DAY_ZERO
from fedtar_flare.data.sources.reading import Reading
from fedtar_flare.data.sources.tables import image_folder, rows_of

OPTIONS = ("undated", "images", "views")
REPORTS, PROJECTIONS = "indiana_reports.csv", "indiana_projections.csv"
SECTIONS = ("comparison", "indication", "findings", "impression")


def read_iu_xray(path: Path, options: Mapping[str, Any] = {}) -> Reading:
    """Read IU X-Ray from a folder with the two tables."""
    reading = Reading.of(path, options, "iu_xray", OPTIONS, ("findings", "impression"))
    if options.get("undated") != "single":
        text = "write 'undated: single' under 'options' to take every patient as one visit of unknown date"
        raise ConfigError(f"source 'iu_xray' has no dates; {text}")
    usual = [path / name for name in ("images/images_normalized", "images_normalized", "images")]
    radiographs: dict[str, list[str]] = defaultdict(list)
    for row in rows_of(path / PROJECTIONS, ("uid", "filename", "projection")):
        if reading.views == "all" or row["projection"].lower() == "frontal":
            radiographs[row["uid"]].append(row["filename"])
    rows = list(rows_of(path / REPORTS, ("uid", "findings", "impression"), ("comparison", "indication")))
    folder = image_folder(path, options, usual, "source 'iu_xray': no folder of radiographs")
    seen: set[str] = set()
    for row in rows:
        with collecting(reading.problems):
            uid, names = row["uid"], sorted(radiographs[row["uid"]])
            if uid in seen:
                raise DataError(f"report {uid} is there twice; without dates only one counts", reason="duplicate-visit")
            seen.add(uid)
            if not names:
                raise DataError(f"report {uid}: no frontal radiograph", reason="not-frontal-radiograph")
            report = with_headings([(section, row[section]) for section in SECTIONS])
            images = [folder / name for name in names]
            if reading.views == "frontal":
                images = [next(filter(Path.is_file, images), images[0])]
            for image in images:
                reading.add(Visit(uid, uid, DAY_ZERO, image, report, "radiograph"), None)
    return reading
