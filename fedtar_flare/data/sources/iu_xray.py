"""IU X-Ray (OpenI, Indiana University): chest radiographs with reports in sections, one undated visit per patient.

Two layouts; tables win over XML. Tables: ``indiana_reports.csv`` and ``indiana_projections.csv``, images in
``images_normalized`` (in ``images`` or beside the tables); the first ``Frontal`` projection by file name counts.
OpenI's XML files with ``parentImage`` ids and ``<id>.png``: they do not give the view, so the first image named counts.
With ``views: all`` each image is a visit with the report, laterals too.

Without dates nothing here is longitudinal. The option ``undated: single`` is required: it states that every patient has
one visit, and all get the date 2000-01-01. Age and sex are unknown too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from fedtar_flare.core.errors import ConfigError, DataError, collecting
from fedtar_flare.data.cohort import Visit
from fedtar_flare.data.report_text import with_headings
from fedtar_flare.data.sources.fields import DAY_ZERO
from fedtar_flare.data.sources.reading import Reading
from fedtar_flare.data.sources.tables import image_folder, rows_of

logger = logging.getLogger(__name__)
OPTIONS = ("undated", "images", "views")
REPORTS, PROJECTIONS = "indiana_reports.csv", "indiana_projections.csv"
SECTIONS = ("comparison", "indication", "findings", "impression")
SECTION = "AbstractText"
Study = tuple[str, str, list[str]]
"""Id, report with headings, file names of images in order of preference."""


def read_iu_xray(path: Path, options: Mapping[str, Any] | None = None) -> Reading:
    """Read IU X-Ray from a folder with the two tables, or with XML files at any depth.

    Raises :class:`ConfigError` for neither layout, no folder of radiographs, ``undated`` not set, or an unknown option.
    """
    options = options or {}
    reading = Reading.of(path, options, "iu_xray", OPTIONS, ("findings", "impression"))
    if options.get("undated") != "single":
        raise ConfigError(
            "source 'iu_xray' has no dates: visits of a patient cannot be put in order. Write 'undated: single' under "
            f"'options' to take every patient as one visit of unknown date (it is {options.get('undated')!r})"
        )
    if (path / REPORTS).is_file():
        usual = ("images/images_normalized", "images_normalized", "images")
        studies = _from_tables(path, reading.views == "all")
    else:
        files = sorted(path.rglob("*.xml"))
        if not files:
            raise ConfigError(f"{path}: neither {REPORTS} nor XML files of OpenI")
        usual = ("NLMCXR_png", "images", ".")
        logger.warning("%s: OpenI's XML does not tell frontal from lateral; the first image of a report counts", path)
        studies = _from_xml(files, reading)
    folders = [path / name for name in usual]
    folder = image_folder(path, options, folders, "source 'iu_xray': no folder of radiographs")
    seen: set[str] = set()
    for uid, report, images in studies:
        with collecting(reading.problems):
            if uid in seen:
                raise DataError(f"report {uid} is there twice; without dates only one counts", reason="duplicate-visit")
            seen.add(uid)
            each = [[name] for name in images] if reading.views == "all" else [images]
            for names in each or [[]]:
                if not names:
                    raise DataError(f"report {uid}: no frontal radiograph", reason="not-frontal-radiograph")
                image = next((folder / name for name in names if (folder / name).is_file()), folder / names[0])
                visit = Visit(uid, uid, DAY_ZERO, image, report, "radiograph")
                reading.add(visit if len(each) == 1 else replace(visit, visit_id=f"{uid}-{visit.image.stem}"), None)
    return reading


def _from_tables(path: Path, all_views: bool) -> Iterator[Study]:
    frontal: dict[str, list[str]] = {}
    for row in rows_of(path / PROJECTIONS, ("uid", "filename", "projection")):
        if all_views or row["projection"].lower() == "frontal":
            frontal.setdefault(row["uid"], []).append(row["filename"])
    for row in rows_of(path / REPORTS, ("uid", "findings", "impression"), ("comparison", "indication")):
        report = with_headings([(section, row[section]) for section in SECTIONS])
        yield row["uid"], report, sorted(frontal.get(row["uid"], []))


def _from_xml(files: list[Path], reading: Reading) -> Iterator[Study]:
    for file in files:
        try:
            tree = ElementTree.parse(file)
        except (OSError, ElementTree.ParseError) as error:
            reading.problems.append(DataError(f"{file}: not readable as XML ({error})", reason="unreadable"))
            continue
        parts = _sections(tree)
        report = with_headings([(section, parts.get(section, "")) for section in SECTIONS])
        images = [f"{image.get('id')}.png" for image in tree.iter("parentImage") if image.get("id")]
        yield file.stem, report, images


def _sections(tree: ElementTree.ElementTree[Any]) -> dict[str, str]:
    """Label to text. A nested heading has only the text directly in it; a repeated text appears once."""
    parts: dict[str, list[str]] = {}
    for element in tree.iter(SECTION):
        text = " ".join("".join(_direct_text(element)).split())
        texts_of = parts.setdefault((element.get("Label") or "").lower(), [])
        if text and not any(text in other for other in texts_of):
            texts_of.append(text)
    return {label: " ".join(texts) for label, texts in parts.items()}


def _direct_text(element: ElementTree.Element) -> Iterator[str]:
    """The text of an element without its nested sections."""
    yield element.text or ""
    for child in element:
        if child.tag != SECTION:
            yield from _direct_text(child)
        yield child.tail or ""
