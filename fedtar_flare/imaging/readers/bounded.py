"""Zip archives and headers, read no further than the limits allow."""

import io
import struct
from pathlib import Path
from typing import Any, BinaryIO, cast
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

from fedtar_flare.core.errors import DataError, decoding
from fedtar_flare.imaging.limits import ELEMENT_READS, LONG_ELEMENT, check_ratio, check_size, current

DIRECTORY_END = struct.Struct("<4s4H2LH")
DIRECTORY_BYTES = 1 << 10  # most bytes of an archive's directory for each member, on average
SMALL = 1 << 20  # bytes of a file that cannot hold too many elements, as most slices


def open_archive(path: Path) -> ZipFile:
    """Open a zip archive; its directory is read, its members are not."""
    with decoding(f"{path}: not a readable zip archive"):
        _check_directory(path)
        archive = ZipFile(path)
    try:
        if "" in archive.namelist():
            raise DataError(f"{path}: a member without a name, which may be a slice", reason="unreadable")
        check_size(str(path), "archive_members", len(archive.infolist()))
        check_size(str(path), "archive_bytes", sum(info.file_size for info in archive.infolist()))
    except DataError:
        archive.close()
        raise
    return archive


def unpack(archive: ZipFile, info: ZipInfo, name: str, most: int | None = None) -> BinaryIO:
    """Unpack a member, or its first ``most`` bytes; methods other than deflate unpack without a bound."""
    if info.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
        raise DataError(f"{name}: packed by a method other than deflate; pack it anew", reason="unreadable")
    if most is None or most > 1 << 10:
        check_size(name, "file_bytes", info.file_size)
        check_ratio(name, info.file_size, info.compress_size)
    with archive.open(info) as file:
        content = file.read(current().file_bytes + 1 if most is None else most)
    check_size(name, "file_bytes", len(content))
    return io.BytesIO(content)


def _check_directory(path: Path) -> None:
    """Refuse (``too-large``) a directory that is too long to be read."""
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - (1 << 16) - DIRECTORY_END.size))
        end = file.read()
        place = end.rfind(b"PK\5\6")
        if place < 0 or place + DIRECTORY_END.size > len(end):
            return  # no archive; ZipFile will refuse it
        length = DIRECTORY_END.unpack_from(end, place)[5]
        if length == 0xFFFFFFFF and (locator := end.rfind(b"PK\6\7", 0, place)) >= 0:
            file.seek(int.from_bytes(end[locator + 8 : locator + 16], "little"))
            length = int.from_bytes(file.read(56)[40:48], "little")
    if length > current().archive_members * DIRECTORY_BYTES:
        raise DataError(f"{path}: a directory of {length:,} bytes is no archive of images", reason="too-large")


class _Metered:
    """A binary file that may be read :data:`ELEMENT_READS` times: millions of empty elements would take minutes."""

    def __init__(self, file: BinaryIO, name: str):
        self.name, self._left, self._read = name, ELEMENT_READS, file.read
        self.seek, self.tell, self.close = file.seek, file.tell, file.close

    def read(self, size: int = -1) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise DataError(f"{self.name}: more than {ELEMENT_READS // 2:,} elements", reason="unreadable")
        if size > LONG_ELEMENT:
            raise DataError(f"{self.name}: an element of {size:,} bytes in its header", reason="unreadable")
        return self._read(size)


def metered(file: BinaryIO, name: str, size: int) -> BinaryIO:
    """Limit the number and length of reads of a file, unless it is small."""
    return file if size <= SMALL else cast(BinaryIO, cast(Any, _Metered(file, name)))
