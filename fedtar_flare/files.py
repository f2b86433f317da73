"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedtar_flare.errors import ConfigError

PRIVATE, SHARED = 0o600, 0o666
"""Permissions of a new file, less the umask: for its owner alone, or as the user's other files."""


@contextmanager
def replacing(path: Path, mode: int = PRIVATE) -> Iterator[Path]:
    """Yield an empty file beside ``path``; when the block ends well it is flushed to disk and replaces ``path``.

    Missing folders are created. After an exception nothing is left behind and an earlier file stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, content: bytes, mode: int = SHARED) -> Path:
    """Write a file (see :func:`replacing`); returns its path."""
    with replacing(path, mode) as temporary:
        temporary.write_bytes(content)
    return path


def write_text(path: Path, text: str, mode: int = SHARED) -> Path:
    """Write a text in UTF-8 (see :func:`replacing`); returns its path."""
    return write_bytes(path, text.encode(), mode)


def write_json(path: Path, data: Any, mode: int = SHARED) -> Path:
    """Write JSON (see :func:`replacing` and :func:`clean`); returns its path."""
    return write_text(path, json.dumps(clean(data), indent=2, allow_nan=False) + "\n", mode)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; :class:`ConfigError` when the file is missing or holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return content


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """Read a YAML mapping that must hold ``what``; :class:`ConfigError` when the file is missing or holds none."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        if yaml.__with_libyaml__:  # which takes an eighth of the time
            content = yaml.load(text, Loader=yaml.CSafeLoader)
        else:
            content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not readable as YAML ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold {what}")
    return content


def clean(value: Any) -> Any:
    """Make a value fit for JSON: non-finite numbers become None, tuples lists and mapping keys text."""
    if isinstance(value, Mapping):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
