"""Zip archives of images: looked at before anything is unpacked, and unpacked no further than the limits allow."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import BinaryIO
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

from fedtar_flare.errors import DataError, decoding
from fedtar_flare.imaging.limits import check_ratio, check_size, current

DIRECTORY_END = struct.Struct("<4s4H2LH")
DIRECTORY_BYTES = 1 << 10
"""Most bytes of an archive's directory for each member, on average."""


def open_archive(path: Path) -> ZipFile:
    """Open a zip archive; its directory is read, its members are not.

    Raises :class:`DataError` ``unreadable`` for none, ``too-large`` for more members, or bytes in all of them, than the
    limits allow.
    """
    with decoding(f"{path}: not a readable zip archive"):
        _check_directory(path)
        archive = ZipFile(path)
    try:
        check_size(str(path), "archive_members", len(archive.infolist()))
        check_size(str(path), "archive_bytes", sum(info.file_size for info in archive.infolist()))
    except DataError:
        archive.close()
        raise
    return archive


def unpack(archive: ZipFile, info: ZipInfo, name: str, most: int | None = None) -> BinaryIO:
    """The bytes of a member, or the first ``most`` of them.

    Raises :class:`DataError` ``too-large`` for more than the limits allow, ``unreadable`` for a damaged member or one
    packed by another method than deflate: others unpack without a bound.
    """
    if info.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
        raise DataError(f"{name}: packed by a method other than deflate; pack it anew", reason="unreadable")
    if most is None or most > 1 << 10:
        check_size(name, "file_bytes", info.file_size)
        check_ratio(name, info.file_size, info.compress_size)
    with archive.open(info) as file:
        if most is not None:
            return io.BytesIO(file.read(most))
        content = file.read(current().file_bytes + 1)
    check_size(name, "file_bytes", len(content))
    return io.BytesIO(content)


def _check_directory(path: Path) -> None:
    """Refuse a directory that is too long to be read; one beyond 4 GiB (zip64) is never read."""
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - (1 << 16) - DIRECTORY_END.size))
        end = file.read()
        place = end.rfind(b"PK\5\6")
        if place < 0 or place + DIRECTORY_END.size > len(end):
            return  # no archive, as ZipFile will say
        length = DIRECTORY_END.unpack_from(end, place)[5]
        if length == 0xFFFFFFFF and (locator := end.rfind(b"PK\6\7", 0, place)) >= 0:
            file.seek(int.from_bytes(end[locator + 8 : locator + 16], "little"))
            length = int.from_bytes(file.read(56)[40:48], "little")
    if length > current().archive_members * DIRECTORY_BYTES:
        raise DataError(f"{path}: a directory of {length:,} bytes is of no archive of images", reason="too-large")
