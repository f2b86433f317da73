"""Files that are written whole or not at all; of others the regular alone are read, and nothing is unpickled."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from fedtar_flare.core.errors import ConfigError, FedTARError

if TYPE_CHECKING:
    import torch

PRIVATE, SHARED = 0o600, 0o666
"""Permissions of a new file, less the umask: for its owner alone, or as the user's other files."""
MAX_DEPTH = 50
"""Deepest nesting of a YAML text."""
MOST_BYTES = 256 << 20
"""Most bytes of a file that is read whole."""
MOST_TEXT = 10_000_000
"""Most bytes of a report or a file of settings, and most characters of a row of a table."""


class StateError(FedTARError):
    """A file of saved state is missing or cannot be read."""

    default_public = "the site's state of this run is missing or unreadable"


def private_folder(folder: Path, mode: int = 0o700) -> Path:
    """Make a folder, and those above it that are missing, for their owner alone; one that is there stays as it is."""
    if not folder.is_dir():
        private_folder(folder.parent, mode)
        folder.mkdir(mode, exist_ok=True)
    return folder


def is_file_or_folder(path: Path) -> bool:
    """Tell whether a path leads to a regular file or a folder; no path is too long, too circular or too odd to ask."""
    with suppress(OSError):
        return path.is_file() or path.is_dir()
    return False


def located(folder: Path, name: str) -> Path:
    """The path that a file in ``folder`` names, relative to it; ``~name`` stays as it is where nobody has the name."""
    path = Path(name)
    with suppress(RuntimeError):
        path = path.expanduser()
    return folder / path


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read; OSError for any other: a pipe keeps its reader waiting, a device may never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except ValueError as error:
        raise OSError(errno.EINVAL, f"no name that a file can have: {error}", str(path)) from error
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "no regular file but a pipe or a device: put a copy there", str(path))


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Read a whole file (:func:`open_regular`); OSError for one that is too large."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EINVAL, f"it has {size:,} bytes, more than {most:,}: split it", str(path))
        return file.read(size)


def read_text(path: Path, most: int = MOST_TEXT) -> str:
    """Read a text in UTF-8, with or without a byte order mark, as :func:`read_bytes` does, with plain line breaks."""
    return re.sub("\r\n?", "\n", read_bytes(path, most).decode("utf-8-sig"))


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of each file in a folder, by name."""
    paths = sorted(path for path in folder.iterdir() if not path.is_dir())
    return {path.name: hashlib.sha256(read_bytes(path, most=1 << 40)).hexdigest() for path in paths}


def is_pointer(path: Path) -> bool:
    """Tell whether a file is only the pointer of git-lfs to a file."""
    with suppress(OSError), open_regular(path) as file:
        return b"git-lfs" in file.read(200)
    return False


def read_lines(path: Path, what: str) -> list[str]:
    """Read the lines of a text, as :func:`read_text` does; ConfigError where that fails."""
    try:
        return read_text(path, MOST_BYTES).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {what} cannot be read ({error})", public=f"{what} cannot be read") from error


@contextmanager
def replacing(path: Path, mode: int = PRIVATE) -> Iterator[Path]:
    """Write a file under another name, which replaces ``path`` when the block ends without an exception."""
    private_folder(path.parent, 0o777 if mode & 0o077 else 0o700)
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
    """Write a file, whole or not at all (:func:`replacing`)."""
    with replacing(path, mode) as temporary:
        temporary.write_bytes(content)
    return path


def write_text(path: Path, text: str, mode: int = SHARED) -> Path:
    """Write a text in UTF-8, as :func:`write_bytes` does."""
    return write_bytes(path, text.encode(), mode)


def write_json(path: Path, data: Any, mode: int = SHARED) -> Path:
    """Write JSON, made valid by :func:`clean`, as :func:`write_bytes` does."""
    return write_bytes(path, (json.dumps(clean(data), indent=2, allow_nan=False) + "\n").encode(), mode)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Let one process at a time change a file, by a lock file beside it; not to be nested."""
    import fcntl

    lock = private_folder(file.parent) / f".{file.name}.lock"
    with os.fdopen(os.open(lock, os.O_CREAT | os.O_WRONLY, PRIVATE), "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        content = json.loads(read_text(path, MOST_BYTES), object_pairs_hook=unique)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return content


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """Read a YAML mapping from a file."""
    return yaml_mapping(yaml_text(path), str(path), what)


def yaml_text(path: Path) -> str:
    """Read the text of a YAML file."""
    try:
        return read_text(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable as YAML ({error})") from error


def yaml_mapping(text: str, where: str, what: str) -> dict[str, Any]:
    """Parse a YAML text that must be a mapping."""
    if not isinstance(content := parse_yaml(text, where), dict):
        raise ConfigError(f"{where}: must hold {what}")
    return content


def parse_yaml(text: str, where: str) -> Any:
    """Parse a YAML text, more strictly than PyYAML.

    PyYAML takes the last of two equal keys, and a text of deep nesting ends its process. Aliases (``*name``) are
    refused: a few lines of aliases of aliases stand for more values than any memory holds. 1e-3 is a number.
    """
    import yaml

    loader: Any = type("Loader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {})  # libyaml's is far faster
    exponent = re.compile(r"[-+]?(\.\d+|\d+\.?\d*)[eE][-+]?\d+$", re.ASCII)  # PyYAML asks for a point and a sign
    loader.add_implicit_resolver("tag:yaml.org,2002:float", exponent, [*"-+.0123456789"])
    try:
        _check_events(yaml.parse(text, Loader=loader))
        return loader(text).get_single_data()
    except Exception as error:  # of a malformed date, number or tag PyYAML raises anything
        raise ConfigError(f"{where}: not readable as YAML ({error})") from error


def _check_events(events: Iterable[Any]) -> None:
    """Raise ValueError for a key that is in a mapping twice, for an alias, and for deep nesting."""
    from yaml import AliasEvent, CollectionEndEvent, CollectionStartEvent, MappingStartEvent, NodeEvent, ScalarEvent

    open_: list[list[Any]] = []  # for each open collection: its keys (None for a list), and whether a key comes next
    for event in events:
        line = event.start_mark.line + 1
        if isinstance(event, AliasEvent):
            raise ValueError(f"line {line}: write out what '*{event.anchor}' stands for")
        if isinstance(event, CollectionEndEvent):
            open_.pop()
        elif isinstance(event, NodeEvent):
            keys, is_key = open_[-1] if open_ else (None, False)
            if keys is not None:
                open_[-1][1] = not is_key
                if is_key and isinstance(event, ScalarEvent):
                    if event.value in keys:
                        raise ValueError(f"line {line}: '{event.value}' occurs twice")
                    keys.add(event.value)
            if isinstance(event, CollectionStartEvent):
                open_.append([set() if isinstance(event, MappingStartEvent) else None, True])
                if len(open_) > MAX_DEPTH:
                    raise ValueError(f"line {line}: nested more than {MAX_DEPTH} deep")


def json_lines(path: Path, what: str) -> Iterator[tuple[int, Any]]:
    """Read a file with a JSON value a line, and the lines' numbers, without a last line that a kill cut off."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise FedTARError(f"{path} is not text: it is not {what} of fedtar_flare") from error
    for number, line in enumerate(lines, 1):
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise FedTARError(f"{path}, line {number}: not JSON ({error.msg})") from error


def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make a mapping of JSON pairs; raises ValueError for a key that occurs twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"'{next(name for name in names if names.count(name) > 1)}' occurs twice")
    return content


def clean(value: Any) -> Any:
    """Make a value valid JSON."""
    if isinstance(value, Mapping):
        return dict(zip(map(str, value), map(clean, value.values()), strict=True))
    if isinstance(value, list | tuple):
        return list(map(clean, value))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], info: Mapping[str, Any]) -> None:
    """Write tensors and a header to a ``safetensors`` file, whole or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    data = {name: value.detach().to("cpu").contiguous().clone() for name, value in tensors.items()}
    with replacing(path) as temporary:
        try:
            save_file(data, temporary, metadata={"info": json.dumps(info, sort_keys=True)})
        except SafetensorError as error:  # it wraps the system's errors in words of its own
            if "os error 28" in str(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
            raise


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read what :func:`write_tensors` wrote."""
    from safetensors import SafetensorError, safe_open

    try:
        open_regular(path).close()
        with safe_open(str(path), framework="pt") as file:
            info = json.loads((file.metadata() or {})["info"])
            names = list(file.keys())
            return dict(zip(names, map(file.get_tensor, names), strict=True)), info
    except FileNotFoundError as error:
        raise StateError(f"{path}: not found") from error
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise StateError(f"{path}: damaged or not written by this package ({error})") from error


def without_prefix(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Select tensors by the beginning of their names."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hash names, types, shapes and values of tensors."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data if value.numel() else b"")
    return digest.hexdigest()


def coarse_checksums(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hash tensors so that rounding errors almost surely do not matter (:func:`coarsely_equal`).

    Processors of two kinds draw normal numbers that differ by them, so the values are rounded on three grids.
    """
    import torch

    hashes = []
    for shift in (0, 1, 2):
        digest = hashlib.sha256()
        for name in sorted(tensors):
            value = tensors[name].detach().cpu().double()
            largest = float(value.abs().max()) if value.numel() else 0.0
            top = 2.0 ** math.ceil(math.log2(largest)) if largest else 1.0
            digest.update(f"{name} {tuple(value.shape)} {top}\n".encode())
            digest.update((value * (8 / top) + shift / 3).floor().to(torch.int8).contiguous().numpy().tobytes())
        hashes.append(digest.hexdigest()[:16])
    return "-".join(hashes)


def coarsely_equal(first: str, second: str) -> bool:
    """Tell whether two states are equal up to rounding errors."""
    return any(a == b for a, b in zip(first.split("-"), second.split("-"), strict=False))
