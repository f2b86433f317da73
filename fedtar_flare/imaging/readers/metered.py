"""A file that is read only so often: a damaged header of millions of empty elements would be read for minutes."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from pydicom.tag import BaseTag

from fedtar_flare.errors import DataError
from fedtar_flare.imaging.limits import ELEMENT_READS, LONG_ELEMENT, check_ratio, check_size, check_time

SMALL = 1 << 20
"""Bytes of a file that cannot hold too many elements, as most slices."""
CHUNK = 1 << 16
StopWhen = Callable[[BaseTag, str | None, int], bool]


class Metered:
    """A binary file whose reader may ask for it at most :data:`ELEMENT_READS` times.

    ``longest`` bounds the bytes of one read. Raises :class:`DataError` ``unreadable`` beyond either.
    """

    def __init__(self, file: BinaryIO, name: str, longest: int = LONG_ELEMENT):
        self.name, self._longest, self._left = name, longest, ELEMENT_READS
        self._read = file.read
        self.seek, self.tell, self.close = file.seek, file.tell, file.close

    def read(self, size: int = -1) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise DataError(f"{self.name}: more than {ELEMENT_READS // 2:,} elements", reason="unreadable")
        if size > self._longest:
            raise DataError(f"{self.name}: an element of {size:,} bytes in its header", reason="unreadable")
        return self._read(size)


def metered(file: BinaryIO, name: str, size: int, longest: int = LONG_ELEMENT) -> BinaryIO:
    """The file itself if it is small, else :class:`Metered`."""
    return file if size <= SMALL else cast(BinaryIO, cast(Any, Metered(file, name, longest)))


def counted(stop_when: StopWhen, name: str) -> StopWhen:
    """The same test of where to stop, asked for each element at most as often as a header may hold some."""
    left = ELEMENT_READS // 2

    def asked(tag: BaseTag, vr: str | None, length: int) -> bool:
        nonlocal left
        left -= 1
        if left < 0:
            raise DataError(f"{name}: more than {ELEMENT_READS // 2:,} elements", reason="unreadable")
        return stop_when(tag, vr, length)

    return asked


def check_deflated(file: BinaryIO, name: str) -> None:
    """Refuse a deflated dataset, from here to the end of the file, that unpacks to more than the limits allow.

    It is unpacked and dropped bit by bit. Raises :class:`DataError` ``too-large``.
    """
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    packed = unpacked = 0
    start = file.tell()
    while chunk := file.read(CHUNK):
        packed += len(chunk)
        while chunk:
            unpacked += len(unpacker.decompress(chunk, 16 * CHUNK))
            chunk = unpacker.unconsumed_tail
            check_size(name, "file_bytes", unpacked)
            check_ratio(name, unpacked, packed + SMALL // 8)
        check_time(name)
    file.seek(start, io.SEEK_SET)
