"""A manifest of labelled images, from what public collections come with: tables of labels, or names of folders."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.sources.fields import DAY_ZERO, PICTURES, labels_of, labels_text
from fedtar_flare.data.sources.manifest import write_rows
from fedtar_flare.data.sources.tables import Row, rows_of

FIELDS = ("image", "patient_id", "study_datetime", "order", "age", "sex", "split", "institution")
"""Meanings of a column, and with ``labels`` of a group in a name."""
SUFFIXES = (*PICTURES, ".dcm", ".dicom")
SPLIT_WORDS = {"val": "validation", "valid": "validation", "validate": "validation"}
FLAGS = {"1": "1", "1.0": "1", "-1": "-1", "-1.0": "-1", "0": "0", "0.0": "0", "": "0"}


def tabulate(
    folder: Path,
    out: Path,
    *,
    tables: Sequence[Path] = (),
    columns: Mapping[str, str] | None = None,
    labels: Sequence[str] = (),
    name: str | None = None,
) -> dict[str, Any]:
    """Write a manifest of the images below a folder, with labels from tables or from the images' own paths.

    Say how many images, patients and labels it has, and how many images and rows' images there were besides.
    """
    columns = dict(columns or {})
    if unknown := sorted(set(columns) - set(FIELDS)):
        raise ConfigError(f"'{unknown[0]}' is not one of {', '.join(FIELDS)}")
    if bool(tables) == bool(name):
        raise ConfigError("labels come either from tables, or from the names of files: give one of the two")
    if out.exists():
        raise ConfigError(f"{out} is there already; name another file, or delete it first")
    files = [file for file in sorted(folder.rglob("*")) if file.suffix.lower() in SUFFIXES]
    if name:
        images, without_image = _from_names(folder, files, name), 0
    else:
        images, without_image = _from_tables(files, tables, columns, labels)
    if not images:
        raise ConfigError(f"{folder}: none of {len(files)} images has labels")
    rows = []
    for file, fields in images.items():
        order = fields.pop("order", "").removesuffix(".0")
        if not order.isdecimal() and order:
            raise ConfigError(f"{file.name}: order '{order}' is no number")
        split = fields.get("split", "").lower()
        defaults = {"patient_id": file.stem, "study_datetime": str(DAY_ZERO.date() + timedelta(days=int(order or 0)))}
        stated = {field: value for field, value in fields.items() if value or field not in defaults}
        image = os.path.relpath(file.absolute(), out.parent.absolute())
        rows.append(defaults | stated | {"image": image, "split": SPLIT_WORDS.get(split, split)})
    write_rows(out, rows)
    counts = Counter(label for fields in images.values() for label in labels_of(fields["labels"])[0])
    numbers = {"images": len(rows), "patients": len({row["patient_id"] for row in rows})}
    left = {"without_row": len(files) - len(rows), "without_image": without_image}
    return {"manifest": out, **numbers, "labels": dict(sorted(counts.items())), **left}


def _from_names(folder: Path, files: Iterable[Path], name: str) -> dict[Path, Row]:
    try:
        pattern = re.compile(name)
    except re.error as error:
        raise ConfigError(f"name '{name}' is no regular expression ({error})") from error
    groups = set(pattern.groupindex)
    if "labels" not in groups or (unknown := groups - {"labels", *FIELDS[1:]}):
        wrong = f"'{sorted(unknown)[0]}' is none" if "labels" in groups else "it has no (?P<labels>...)"
        raise ConfigError(f"name '{name}': its groups are of labels, {', '.join(FIELDS[1:])}; {wrong}")
    matches = {file: pattern.search(file.relative_to(folder).as_posix()) for file in files}
    return {file: {k: v or "" for k, v in match.groupdict().items()} for file, match in matches.items() if match}


def _from_tables(
    files: Sequence[Path], tables: Sequence[Path], columns: dict[str, str], labels: Sequence[str]
) -> tuple[dict[Path, Row], int]:
    """The fields of each image that has labels, and the number of rows' images that are missing."""
    if "image" not in columns or not labels:
        raise ConfigError("tables need a column of images (image=COLUMN) and at least one of labels")
    by_name: dict[str, list[Row]] = {}
    heads: set[str] = set()
    for table in tables:
        for row in rows_of(table, (columns["image"],), others=True):
            heads |= set(row)
            by_name.setdefault(_stem(Path(row[columns["image"]])), []).append(row)
    if missing := sorted({*columns.values(), *labels} - heads - {"*"}):
        raise ConfigError(f"{', '.join(map(str, tables))}: no column '{missing[0]}' (there is: {', '.join(heads)})")
    stems = Counter(map(_stem, files))
    if twice := sorted(stem for stem in by_name if stems[stem] > 1):
        raise ConfigError(f"{stems[twice[0]]} images are called '{twice[0]}': it is unclear which one a row means")
    if list(labels) == ["*"]:
        rows = [row for several in by_name.values() for row in several]
        free = sorted(heads - set(columns.values()) - {""})
        labels = [head for head in free if {row.get(head, "") for row in rows} <= set(FLAGS)]
    images = {}
    for file in files:
        of_image = by_name.get(_stem(file), [])
        if readings := [row for row in of_image if labels[0] in row]:
            stated = {field: next((row[c] for row in of_image if row.get(c)), "") for field, c in columns.items()}
            votes = [_labels(row, labels) for row in readings]
            counts = Counter(label for certain, _ in votes for label in certain)
            certain = frozenset(label for label, n in counts.items() if 2 * n > len(votes))
            uncertain = frozenset(counts).union(*(doubtful for _, doubtful in votes)) - certain
            images[file] = stated | {"labels": labels_text(certain, uncertain)}
    return images, len(set(by_name) - set(stems))


def _stem(file: Path) -> str:
    return file.stem if file.suffix.lower() in SUFFIXES else file.name


def _labels(row: Row, labels: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
    """The certain and the uncertain labels of one row."""
    if len(labels) == 1 and row[labels[0]] not in FLAGS:
        return labels_of(row[labels[0]])
    flags = {}
    for label in labels:
        if (flag := row.get(label, "")) not in FLAGS:
            raise ConfigError(f"column '{label}' holds '{flag}', which is none of 0, 1 and -1")
        flags[label.replace(";", ",").replace("|", ",")] = FLAGS[flag]
    certain, uncertain = (frozenset(label for label, flag in flags.items() if flag == wanted) for wanted in ("1", "-1"))
    return certain, uncertain
