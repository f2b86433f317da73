"""How much memory and time the images of one study may take, checked before memory is allocated; no job raises it."""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from pydantic import Field

from fedtar_flare.core.errors import DataError
from fedtar_flare.core.settings import Settings

CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")  # bytes that a container may use, or ``max``


class Limits(Settings):
    """The largest study that is read. What is larger is refused as ``too-large``, what takes longer as ``too-slow``."""

    voxels: int = Field(1 << 30, ge=1, description="of a CT volume; 1024 x 1024 x 1024, which take 2 GiB")
    pixels: int = Field(1 << 25, ge=1, description="of a slice or a radiograph; 5792 x 5792")
    file_bytes: int = Field(1 << 30, ge=1, description="of a DICOM file or a picture, also unpacked from an archive")
    archive_bytes: int = Field(4 << 30, ge=1, description="of all members of a zip archive, unpacked")
    archive_members: int = Field(20_000, ge=1, description="files in a zip archive")
    seconds_per_study: float = Field(300.0, gt=0, description="to read and prepare one study")


MUCH = 16 << 20  # unpacked bytes from which the ratio to packed ones is checked
PACKED_AT_MOST = 200  # unpacked bytes per packed byte; images pack to a quarter, empty slices to a hundredth
ELEMENT_READS = 500_000  # reads within one DICOM header; an enhanced CT of 2,000 frames takes about 200,000
LONG_ELEMENT = 64 << 20  # most bytes of an element of a header that is read, and of a whole header within an archive

_IN_FORCE: ContextVar[tuple[Limits, float]] = ContextVar("limits", default=(Limits(), math.inf))


@contextmanager
def applied(limits: Limits) -> Iterator[None]:
    """Apply limits to the study that is read in a block, whose seconds begin."""
    token = _IN_FORCE.set((limits, time.monotonic() + limits.seconds_per_study))
    try:
        yield
    finally:
        _IN_FORCE.reset(token)


def current() -> Limits:
    """Give the limits in force."""
    return _IN_FORCE.get()[0]


def check_size(where: str, limit: str, value: int) -> None:
    """Refuse (``too-large``) a value above the named limit."""
    most = getattr(current(), limit)
    if value > most:
        what = limit.replace("_", " ")
        text = f"{where}: {value:,} {what}, above the limit of {most:,} (site file: 'limits: {{{limit}: ...}}')"
        raise DataError(text, reason="too-large")


def check_ratio(where: str, unpacked: int, packed: int) -> None:
    """Refuse (``too-large``) data that unpacks to far more than any image does."""
    if unpacked > MUCH and unpacked > PACKED_AT_MOST * packed:
        raise DataError(f"{where}: {packed:,} bytes that unpack to {unpacked:,} are no image", reason="too-large")


def check_time(where: str) -> None:
    """Refuse (``too-slow``) a study whose seconds are over."""
    limits, end = _IN_FORCE.get()
    if time.monotonic() > end:
        raise too_slow(where, limits.seconds_per_study)


def too_slow(where: str, seconds: float) -> DataError:
    """Make the refusal of a study that took longer than ``seconds``."""
    text = f"{where}: not read within {seconds:g} s (site file: 'limits: {{seconds_per_study: ...}}')"
    return DataError(text, reason="too-slow")


def machine_memory() -> int:
    """Find out how much memory this process can use."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CONTAINER_LIMIT.read_text().strip() if CONTAINER_LIMIT.is_file() else ""
    return min(machine, int(limit)) if limit.isdigit() else machine
