"""Drafts or reports of any system, read by study from CSV, JSON or JSON lines files."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import read_lines, unique
from fedtar_flare.data.sources.tables import rows_of

IDS = ("study_id", "id")
TEXTS = {"draft": ("prediction", "model_prediction", "draft", "report"), "report": ("report", "reference")}


class Text(NamedTuple):
    """A text of a study; without a patient's id each study is a patient."""

    text: str
    patient: str


def read_texts(file: Path, kind: str) -> dict[str, Text]:
    """Read the drafts or reports (``kind``) of a CSV, JSON or JSON lines file by study."""
    texts: dict[str, Text] = {}
    for number, entry in enumerate(_entries(file, kind), start=1):
        study = next((entry[name] for name in IDS if name in entry), None)
        text = next((entry[name] for name in TEXTS[kind] if name in entry), None)
        if not isinstance(text, str) or not isinstance(study, str | int) or not str(study).strip():
            needed = f"a study ({' or '.join(IDS)}) and a text ({' or '.join(TEXTS[kind])})"
            raise ConfigError(f"{file}: {kind} {number} must have {needed}; there is: {', '.join(entry) or 'nothing'}")
        if (name := str(study)) in texts:
            raise ConfigError(f"{file}: study '{name}' is there twice: keep one {kind} of it")
        if re.search("[\ud800-\udfff]", f"{name}{text}"):
            raise ConfigError(f"{file}: {kind} {number} has half of a character (\\ud800 to \\udfff): write it again")
        if kind == "report" and not text.strip():
            raise ConfigError(f"{file}: the report of study '{name}' is empty: leave the study out")
        texts[name] = Text(text, str(entry.get("patient_id") or name))
    if not texts:
        raise ConfigError(f"{file} holds no {kind}")
    return texts


def _entries(file: Path, kind: str) -> Iterator[Mapping[str, Any]]:
    """Rows of a table, or objects of a JSON file."""
    if file.suffix.lower() == ".csv":
        yield from rows_of(file, [], others=True)
        return
    lines = read_lines(file, f"the file of {kind}s")
    try:
        if file.suffix.lower() == ".jsonl":
            content: Any = [json.loads(line, object_pairs_hook=unique) for line in lines if line.strip()]
        else:
            content = json.loads("\n".join(lines), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON ({error})") from error
    if isinstance(content, dict):
        content = [{"study_id": i} | (of if isinstance(of, dict) else {kind: of}) for i, of in content.items()]
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise ConfigError(f"{file}: must hold objects, one for each study")
    yield from content
