"""Pixel values of DICOM files: checks of their headers, and one decoder for each compressed transfer syntax.

No second decoder is tried: it might read something from a damaged stream that the first one refuses. A warning is
a refusal as well, since no sound stream causes one.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import imagecodecs
import numpy as np
from pydicom import uid
from pydicom.dataset import Dataset
from pydicom.encaps import get_frame
from pydicom.filereader import read_partial
from pydicom.pixels import iter_pixels
from pydicom.tag import BaseTag, Tag

from fedtar_flare.core.errors import DataError, decoding
from fedtar_flare.imaging.limits import check_size
from fedtar_flare.imaging.readers.dicom_files import PIXEL_DATA, Header, Source
from fedtar_flare.imaging.readers.dicom_tags import integer, positive

KEYWORDS = """
    SamplesPerPixel PhotometricInterpretation PlanarConfiguration NumberOfFrames Rows Columns BitsAllocated BitsStored
    HighBit PixelRepresentation ExtendedOffsetTable ExtendedOffsetTableLengths PixelData
"""
PIXEL_TAGS: list[BaseTag | int] = [Tag(keyword) for keyword in KEYWORDS.split()]  # what a decoder needs
JPEG = (uid.JPEGBaseline8Bit, uid.JPEGExtended12Bit, uid.JPEGLossless, uid.JPEGLosslessSV1)
JPEG_LS = (uid.JPEGLSLossless, uid.JPEGLSNearLossless)
JPEG_2000 = (uid.JPEG2000Lossless, uid.JPEG2000, uid.HTJ2KLossless, uid.HTJ2KLosslessRPCL, uid.HTJ2K)
CODECS: dict[str, Callable[[bytes], np.ndarray]] = {
    **dict.fromkeys(JPEG, imagecodecs.jpeg8_decode),
    **dict.fromkeys(JPEG_LS, imagecodecs.jpegls_decode),
    **dict.fromkeys(JPEG_2000, imagecodecs.jpeg2k_decode),
}
END = b"\xff\xd9"
ENDING = 32  # bytes at a stream's end, filling included, among which its last marker lies
BY_CHANCE = "The number of bytes of compressed pixel data matches"  # pydicom's warning where lengths happen to agree

logging.getLogger("pydicom.pixels.decoders.base").setLevel(logging.CRITICAL)  # it logs the traceback of each refusal


class Layout(NamedTuple):
    """How the pixel values of a file's frames are stored."""

    rows: int
    columns: int
    bits_allocated: int
    bits_stored: int
    signed: bool


def layout_of(header: Header, frames: int = 1) -> Layout:
    """Read the layout of the pixels from a header that contradicts neither itself nor the file."""
    dataset, name, syntax = header.dataset, header.source.name, header.syntax
    rows, columns = positive(dataset, "Rows", name), positive(dataset, "Columns", name)
    check_size(name, "pixels", rows * columns)
    known = syntax.is_transfer_syntax and not syntax.is_private
    if not known or (syntax.is_encapsulated and syntax not in CODECS and syntax != uid.RLELossless):
        text = f"{name}: no decoder for transfer syntax {syntax} ({syntax.name}); export it uncompressed"
        raise DataError(text, reason="unsupported-transfer-syntax")
    allocated = positive(dataset, "BitsAllocated", name)
    stored = integer(dataset, "BitsStored", name, allocated)
    highest = integer(dataset, "HighBit", name, stored - 1)
    if not 1 <= stored <= allocated or highest != stored - 1:
        text = f"{name}: {stored} bits stored in {allocated} allocated, the highest bit {highest}"
        raise DataError(text, reason="bad-header")
    _check_length(header, (rows * columns * frames * allocated + 7) // 8)
    return Layout(rows, columns, allocated, stored, integer(dataset, "PixelRepresentation", name, 0) == 1)


def _check_length(header: Header, expected: int) -> None:
    """Refuse pixel data of a wrong VR, which would move its beginning, or of another length than ``expected``."""
    name = header.source.name
    if header.vr not in (None, "OB", "OW"):  # none is stated in implicit VR
        raise DataError(f"{name}: pixel data of VR '{header.vr}', not OB or OW", reason="bad-header")
    if header.syntax.is_encapsulated and header.length is None:
        return
    if header.syntax.is_encapsulated:
        text = f"compressed pixel data must not state a length, and states {header.length} bytes"
        raise DataError(f"{name}: {text}", reason="wrong-pixel-count")
    if header.offset is not None and header.offset + 8 + expected > header.size:  # 8 bytes of header, or 12
        raise DataError(f"{name}: the file ends within its pixels; copy it again", reason="truncated")
    if header.length not in (expected, expected + expected % 2):  # an odd number is padded by one byte
        held = "compressed values" if header.length is None else f"{header.length} bytes"
        text = f"its pixel data holds {held}, not the {expected} bytes of the size it states"
        raise DataError(f"{name}: {text}", reason="wrong-pixel-count")


def decoded(
    source: Source, syntax: uid.UID, layout: Layout, frames: Sequence[int], *, masked: bool
) -> Iterator[np.ndarray]:
    """Decode the stored values (rows, columns) of each of these frames; ``masked``: without bits above BitsStored."""
    name, size = source.name, (layout.rows, layout.columns)
    with decoding(f"{name}: the pixels cannot be read", "undecodable"), source.open() as file:
        dataset = read_partial(
            file, stop_when=lambda tag, *_: int(tag) > PIXEL_DATA, specific_tags=PIXEL_TAGS, force=True
        )
    dataset.file_meta.add_new("TransferSyntaxUID", "UI", syntax)  # some files state none, or as a number
    native = not syntax.is_encapsulated
    frame_bytes = layout.rows * layout.columns * layout.bits_allocated // 8
    if "PixelData" not in dataset or (native and len(dataset.PixelData) < (max(frames) + 1) * frame_bytes):
        raise DataError(f"{name}: the file ends within its pixels; copy it again", reason="truncated")
    options: dict[str, Any] = {"decoding_plugin": "pydicom"} if syntax.is_encapsulated else {}
    by_pydicom = iter_pixels(dataset, raw=True, indices=list(frames), correct_unused_bits=masked, **options)
    for frame in frames:
        with decoding(f"{name}: the pixels cannot be decoded from {syntax.name}", "undecodable"):
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                warnings.filterwarnings("ignore", message=BY_CHANCE)
                values = _decompressed(dataset, syntax, layout, frame) if syntax in CODECS else next(by_pydicom)
            if values.shape != size:
                raise ValueError(f"{values.shape} values, not the announced size")
        unused = 8 * values.itemsize - layout.bits_stored
        yield (values << unused) >> unused if masked and syntax in CODECS and unused > 0 else values


def _decompressed(dataset: Dataset, syntax: uid.UID, layout: Layout, frame: int) -> np.ndarray:
    """Decode a frame, once its stream has the stated size and an end; a decoder would invent the rest."""
    offsets = None
    if "ExtendedOffsetTable" in dataset:
        offsets = (dataset.ExtendedOffsetTable, dataset.ExtendedOffsetTableLengths)
    count = int(dataset.get("NumberOfFrames") or 1)
    stream = get_frame(dataset.PixelData, frame, extended_offsets=offsets, number_of_frames=count)
    if (stated := stream_size(stream)) != (layout.rows, layout.columns):
        raise ValueError(f"a stream of {stated} pixels, not {layout.rows, layout.columns}")
    if END not in stream[-ENDING:]:
        raise ValueError("the stream ends too early")
    values = CODECS[syntax](stream)
    return values.view(f"{'i' if layout.signed else 'u'}{values.itemsize}")


def stream_size(stream: bytes) -> tuple[int, int] | None:
    """(rows, columns) as a JPEG, JPEG-LS or JPEG 2000 stream states them, if it does."""
    start = stream.find(b"\xff\x4f\xff\x51", 0, 1 << 12)  # SOC and SIZ
    if start >= 0 and len(stream) >= start + 24:
        right, bottom, left, top = (int.from_bytes(stream[start + 8 + 4 * i :][:4], "big") for i in range(4))
        return bottom - top, right - left
    at = 2
    while at + 9 <= len(stream) and stream[at] == 0xFF:
        marker = stream[at + 1]
        if marker == 0xFF:  # filling
            at += 1
        elif marker == 0xF7 or (0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)):  # start of frame
            rows, columns = stream[at + 5 : at + 7], stream[at + 7 : at + 9]
            return int.from_bytes(rows, "big"), int.from_bytes(columns, "big")
        else:
            at += 2 + int.from_bytes(stream[at + 2 : at + 4], "big")
    return None
