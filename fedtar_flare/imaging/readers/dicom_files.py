"""Files of a DICOM study (folder, file, zip, DICOMDIR), and their headers, which are read without the pixels.

Archives and headers are read no further than the limits allow.

A file among slices that cannot be read may be a lost slice, so none is ignored, except for files that usually lie among
slices (a licence, a directory, thumbnails, reports), which are known by their names.
"""

import io
import os
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, BinaryIO, cast
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

from pydicom import dcmread
from pydicom.dataset import Dataset
from pydicom.filereader import read_dataset, read_partial
from pydicom.tag import BaseTag, Tag
from pydicom.uid import UID, DeflatedExplicitVRLittleEndian, ImplicitVRLittleEndian

from fedtar_flare.core.errors import DataError, decoding
from fedtar_flare.core.files import is_file_or_folder, open_regular
from fedtar_flare.imaging.limits import ELEMENT_READS, LONG_ELEMENT, check_ratio, check_size, check_time, current
from fedtar_flare.imaging.readers.dicom_tags import is_dicom, text

PIXEL_DATA = 0x7FE00010
KEYWORDS = """
    SOPClassUID SOPInstanceUID StudyInstanceUID SeriesInstanceUID PatientID Modality ImageType AcquisitionNumber
    InstanceNumber SliceLocation ConvolutionKernel SliceThickness SpacingBetweenSlices ImagePositionPatient
    ImageOrientationPatient PatientPosition SamplesPerPixel
    PhotometricInterpretation NumberOfFrames Rows Columns PixelSpacing BitsAllocated BitsStored HighBit
    PixelRepresentation
    PixelPaddingValue PixelPaddingRangeLimit RescaleIntercept RescaleSlope RescaleType LossyImageCompression
    SharedFunctionalGroupsSequence PerFrameFunctionalGroupsSequence
"""
TAGS: list[BaseTag | int] = [Tag(keyword) for keyword in KEYWORDS.split()]
UNDEFINED = 0xFFFFFFFF
NAMES = """
    autorun changelog checksums copying desktop dicomdir index licence license lockfile manifest md5sums notes notice
    readme sha1sums sha256sums thumbs version
"""
SUFFIXES = """
    bat bmp cab cfg css csv db dll doc docx exe gif htm html icns ico inf ini jar jpeg jpg js json lnk log mat
    md md5 mha mhd mp4 nii npy npz nrrd ods odt pdf png pptx ps1 py rst rtf sh sha1 sha256 svg sys tif tiff toml
    tsv ttf txt url webp woff xls xlsx xml xsd xsl yaml yml
"""
COMPANIONS = frozenset(NAMES.split()), frozenset(SUFFIXES.split())
PACKED = {".gz", ".bz2", ".xz", ".zip", ".7z", ".rar", ".tar", ".tgz"}
SLICES = {"", ".dcm", ".dicom", ".ima", ".img"}
DIRECTORY_END = struct.Struct("<4s4H2LH")
DIRECTORY_BYTES = 1 << 10  # most bytes of an archive's directory for each member, on average
READ_AS: dict[Any, str] = {(True, True): "", (False, True): ".1", (False, False): ".2"}
"""Ends of transfer syntaxes, for files that state none: by whether pydicom sees implicit VR and little endian."""
SMALL = 1 << 20  # bytes of a file that cannot hold too many elements, as most slices


@dataclass(frozen=True, slots=True)
class Source:
    """One file on disk, or one member of a zip archive."""

    path: Path
    archive: ZipFile | None = None
    member: str = ""
    lost_from: str | None = None  # the series of a file that a DICOMDIR names and that does not exist

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"{self.path}:{self.member}" if self.archive else str(self.path)

    @property
    def folder(self) -> tuple[Path, str]:
        """Its folder, on disk or in an archive."""
        return (self.path, self.member.rpartition("/")[0]) if self.archive else (self.path.parent, "")

    def open(self, most: int | None = None) -> BinaryIO:
        """Open for reading from the start; of a zip member, only ``most`` bytes are unpacked."""
        if self.lost_from is not None:
            raise DataError(f"{self.name}: named by the DICOMDIR, but missing", reason="missing-files")
        with decoding(f"{self.name}: cannot be read"):
            if self.archive is None:
                try:
                    return open_regular(self.path)
                except PermissionError as error:
                    raise DataError(f"{self.name}: no permission to read it", reason="no-permission") from error
            info = self.archive.getinfo(self.member)
            if info.compress_type not in (ZIP_STORED, ZIP_DEFLATED):  # others unpack without a bound
                raise DataError(f"{self.name}: packed by a method other than deflate", reason="unreadable")
            if most is None or most > 1 << 10:
                check_size(self.name, "file_bytes", info.file_size)
                check_ratio(self.name, info.file_size, info.compress_size)
            with self.archive.open(info) as file:
                content = file.read(current().file_bytes + 1 if most is None else most)
            check_size(self.name, "file_bytes", len(content))
            return io.BytesIO(content)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one DICOM file."""

    source: Source
    dataset: Dataset  # the wanted tags
    syntax: UID
    has_pixels: bool
    offset: int | None  # of the pixel data in the file; None for a deflated file
    size: int  # bytes of the file
    length: int | None  # bytes of the pixel data as stated; None where they are absent, or compressed
    vr: str | None  # of the pixel data; None where they are absent, or the syntax states none (implicit VR)


def open_archive(path: Path, file: BinaryIO) -> ZipFile:
    """Open a zip archive; its directory is read, its members are not."""
    with decoding(f"{path}: not a readable zip archive"):
        _check_directory(path, file)
        archive = ZipFile(file)
    try:
        if "" in archive.namelist():
            raise DataError(f"{path}: a member without a name, which may be a slice", reason="unreadable")
        check_size(str(path), "archive_members", len(archive.infolist()))
        check_size(str(path), "archive_bytes", sum(info.file_size for info in archive.infolist()))
    except DataError:
        archive.close()
        raise
    return archive


def _check_directory(path: Path, file: BinaryIO) -> None:
    """Refuse (``too-large``) a directory that is too long to be read."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - (1 << 16) - DIRECTORY_END.size))
    end = file.read()
    at = end.rfind(b"PK\5\6")
    if at < 0 or at + DIRECTORY_END.size > len(end):
        return  # no archive; ZipFile will refuse it
    length = DIRECTORY_END.unpack_from(end, at)[5]
    if length == 0xFFFFFFFF and (locator := end.rfind(b"PK\6\7", 0, at)) >= 0:
        file.seek(int.from_bytes(end[locator + 8 : locator + 16], "little"))
        length = int.from_bytes(file.read(56)[40:48], "little")
    if length > current().archive_members * DIRECTORY_BYTES:
        raise DataError(f"{path}: a directory of {length:,} bytes is no archive of images", reason="too-large")


@contextmanager
def sources(path: Path) -> Iterator[list[Source]]:
    """List the files of a study; an archive stays open in the block."""
    with ExitStack() as stack:
        if not is_file_or_folder(path):
            raise DataError(f"{path}: there is no such file or folder", reason="no-image")
        if path.is_dir():
            files = files_below(path)
            listed = [Source(file) for file in files] + _lost(path / "DICOMDIR", files)
        elif path.suffix.lower() == ".zip":
            with decoding(f"{path}: cannot be read"):
                file = stack.enter_context(open_regular(path))
            archive = stack.enter_context(open_archive(path, file))
            listed = [Source(path, archive, info.filename) for info in archive.infolist() if not info.is_dir()]
        elif path.name.upper().startswith("DICOMDIR"):
            listed = [Source(file, lost_from=None if exists else uid) for file, uid, exists in _entries(path)]
        else:
            listed = [Source(path)]
        images = [s for s in listed if not Path(s.member or s.path).name.upper().startswith("DICOMDIR")]
        yield sorted(images, key=lambda s: s.name)


def files_below(folder: Path) -> list[Path]:
    """List files below a folder."""
    paths = (Path(top) / name for top, _, names in os.walk(folder) for name in names)
    return [file for file in paths if file.is_file() or (file.is_symlink() and not file.exists())]


def _entries(directory: Path) -> list[tuple[Path, str, bool]]:
    """The files that a DICOMDIR names, the series of each, and whether it exists in the directory's own folder."""
    if not directory.is_file():
        return []
    with decoding(f"{directory}: not a readable DICOMDIR"):
        with open_regular(directory) as file:
            records = dcmread(metered(file, str(directory), directory.stat().st_size)).DirectoryRecordSequence
        by_offset = {record.seq_item_tell: record for record in records}
        series: dict[int | None, str] = {}  # the SeriesInstanceUID above each image record
        for record in records:
            if record.get("DirectoryRecordType") == "SERIES":
                offset = record.get("OffsetOfReferencedLowerLevelDirectoryEntity")
                while offset in by_offset and offset not in series:
                    series[offset] = text(record, "SeriesInstanceUID")
                    offset = by_offset[offset].get("OffsetOfTheNextDirectoryRecord")
        folder, entries = directory.parent.resolve(), []
        for record in records:
            if "ReferencedFileID" in record:
                name = record.ReferencedFileID
                target = directory.parent.joinpath(*([name] if isinstance(name, str) else name))
                exists = target.is_file() and target.resolve().is_relative_to(folder)
                entries.append((target, series.get(record.seq_item_tell, ""), exists))
    return entries


def _lost(directory: Path, files: Sequence[Path]) -> list[Source]:
    """The missing files of series that a DICOMDIR names, unless all files of a series were renamed or left behind."""
    named: list[tuple[Path, str, bool]] = []
    with suppress(DataError):  # a broken DICOMDIR does not matter: the folder has the files
        named = _entries(directory)
    known = {str(file).lower() for file in files}
    gone = [(file, uid) for file, uid, exists in named if not exists and str(file).lower() not in known]
    present = {uid for file, uid, _ in named if (file, uid) not in gone}
    return [Source(file, lost_from=uid) for file, uid in gone if uid in present or len(files) == 1]


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


def headers(image: Path) -> Iterator[Dataset]:
    """Read the headers of a study's DICOM files, without pixels."""
    with sources(image) as files:
        for source in files:
            with suppress(DataError):  # missing, broken or no DICOM: reading the study itself says so
                if (header := read_header(source, ())) is not None:
                    yield header.dataset


def _check_deflated(file: BinaryIO, name: str) -> None:
    """Refuse (``too-large``) a deflated dataset, from here to the file's end, that unpacks beyond the limits."""
    unpacker, start = zlib.decompressobj(-zlib.MAX_WBITS), file.tell()
    packed = unpacked = 0
    while chunk := file.read(1 << 16):
        packed += len(chunk)
        while chunk:
            unpacked += len(unpacker.decompress(chunk, 1 << 20))
            chunk = unpacker.unconsumed_tail
            check_size(name, "file_bytes", unpacked)
            check_ratio(name, unpacked, packed + SMALL // 8)
        check_time(name)
    file.seek(start)


def read_header(source: Source, tags: Sequence[BaseTag | int] = TAGS) -> Header | None:
    """Read the header of a DICOM file."""
    name, syntax = source.name, UID("")
    check_time(name)
    pixels: list[tuple[str | None, int]] = []
    elements = 0

    def at_pixels(tag: BaseTag, vr: str | None, length: int) -> bool:
        nonlocal elements
        elements += 1
        if elements > ELEMENT_READS // 2:  # reads of a deflated file are not counted
            raise DataError(f"{name}: more than {ELEMENT_READS // 2:,} elements", reason="unreadable")
        if (number := int(tag)) == PIXEL_DATA:  # comparing BaseTags would take half the time of a header
            pixels.append((vr, length))
        return number >= PIXEL_DATA

    with source.open(132) as file:  # no more of a zip member is unpacked
        start = file.read(132)
    if not is_dicom(start):
        return None
    with source.open(LONG_ELEMENT) as file:
        size = held = file.seek(0, io.SEEK_END)
        if source.archive is not None:
            size = source.archive.getinfo(source.member).file_size
        check_size(name, "file_bytes", size)
        try:
            checked = metered(file, name, size)
            if start[128:] == b"DICM" or start[:2] == b"\x02\x00":
                checked.seek(132 if start[128:] == b"DICM" else 0)
                meta = read_dataset(checked, False, True, stop_when=lambda tag, vr, length: int(tag) >> 16 != 2)
                syntax = UID(text(meta, "TransferSyntaxUID"))
                if syntax == DeflatedExplicitVRLittleEndian:
                    _check_deflated(checked, name)
            checked.seek(0)
            dataset = read_partial(checked, stop_when=at_pixels, specific_tags=list(tags), force=True)
            offset = file.tell()
            if not pixels and held < size:
                text_ = f"{name}: no pixels within its first {held:,} bytes; unpack the archive"
                raise DataError(text_, reason="too-large")
            items = map(dataset.get_item, dataset.keys())  # iterating the dataset itself would decode every element
            values = ((getattr(item, "value", None), getattr(item, "length", 0)) for item in items)
            short = (isinstance(value, bytes) and len(value) < length < UNDEFINED for value, length in values)
            cut = not pixels and (offset > size or any(short))
            stated = str(getattr(dataset.file_meta, "TransferSyntaxUID", "") or "")
        except (DataError, MemoryError):
            raise
        except Exception as error:  # pydicom raises whatever the broken bytes lead to
            if syntax and (syntax.is_private or not syntax.is_transfer_syntax):  # the usual cause
                unknown = f"{name}: transfer syntax {syntax} is not known"
                raise DataError(unknown, reason="unsupported-transfer-syntax") from error
            broken = f"{name}: not readable as DICOM ({type(error).__name__}: {error})"
            raise DataError(broken, reason="unreadable") from error
    if start[128:] != b"DICM" and "SOPClassUID" not in dataset:
        return None
    if cut:
        raise DataError(f"{name}: the file ends within its header; copy it again", reason="truncated")
    syntax = UID(stated or ImplicitVRLittleEndian + READ_AS[dataset.original_encoding])
    vr, length = pixels[0] if pixels else (None, UNDEFINED)
    at = None if syntax == DeflatedExplicitVRLittleEndian else offset
    return Header(source, dataset, syntax, bool(pixels), at, size, None if length == UNDEFINED else length, vr)


def is_companion(name: str) -> bool:
    """Tell by its name whether a file is no slice."""
    path = PurePath(name.lower())
    if path.name.startswith("."):
        return True
    if path.suffix in PACKED:  # a packed slice is a slice
        inner = PurePath(path.stem).suffix
        return inner not in SLICES or (inner == "" and not path.stem.isdigit())
    names, suffixes = COMPANIONS
    return path.suffix[1:] in suffixes or path.name.split(".")[0] in names


def compressed(paths: Iterable[Path]) -> list[DataError]:
    """Make an error for each folder with compressed slices, which are not read."""
    folders = Counter(path.parent for path in paths if path.suffix.lower() in PACKED and not is_companion(path.name))
    text = "compressed file(s), which are not read: unpack them ('gunzip' those that end in .gz)"
    return [DataError(f"{folder}: {n} {text}", reason="no-dicom") for folder, n in sorted(folders.items())]


def not_dicom(source: Source) -> DataError:
    """Make the refusal of a file without the marks of DICOM; its text says what the file holds."""
    with source.open(1024) as file:
        start = file.read(1024)
    what = "empty" if not start else "zeros" if not any(start) else "not DICOM"
    return DataError(f"{source.name}: {what}", reason="unreadable")
