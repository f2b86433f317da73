"""Tables of tests: hand-written cases in YAML files, CSV files as hospitals have them, and JSON content by keys."""

import csv
import json
from pathlib import Path

import yaml


def cases(test, name):
    """The cases in a file beside a test."""
    return yaml.safe_load(Path(test).with_name(name).read_text(encoding="utf-8"))


def lines(test, name):
    """The lines of a file beside a test, without comments."""
    text = Path(test).with_name(name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if not line.startswith("#")]


def write_table(path, rows, columns=None):
    """Write dictionaries under a head (by default the keys of the first); a cell of another column is left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns or list(rows[0]), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def edit_json(file, change):
    """Write a JSON file anew after ``change`` has changed its content."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def lay(root, tables, files=()):
    """Write a collection: rows by the name of their table, and empty files."""
    for name, rows in tables.items():
        write_table(root / name, rows)
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def leaves(value, place=()):
    """What JSON-able content holds besides dictionaries and lists, by keys."""
    if not isinstance(value, dict | list | tuple):
        return {place: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {at: leaf for key, item in items for at, leaf in leaves(item, (*place, key)).items()}
