"""Files that lie among slices and cannot be read as DICOM. Each may be a lost slice, so none is passed over in silence.

What usually lies beside slices (a licence, a directory, thumbnails, reports) is known by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from fedtar_flare.errors import DataError
from fedtar_flare.imaging.readers.dicom_files import Source

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
NAMED = 5
"""Files that a message names; the others are counted."""


def is_companion(name: str) -> bool:
    """Whether a file of this name is no slice, whatever it holds."""
    path = PurePath(name.lower())
    if path.name.startswith("."):
        return True
    if path.suffix in PACKED:  # a packed slice is a slice
        inner = PurePath(path.stem).suffix
        return inner not in SLICES or (inner == "" and not path.stem.isdigit())
    names, suffixes = COMPANIONS
    return path.suffix[1:] in suffixes or path.name.split(".")[0] in names


def not_dicom(source: Source) -> DataError:
    """The refusal of a file without the marks of DICOM; its text says what it holds instead."""
    with source.open(1024) as file:
        start = file.read(1024)
    what = "empty" if not start else "zeros" if not any(start) else "not DICOM"
    return DataError(f"{source.name}: {what}", reason="unreadable")


def unread_text(unread: Sequence[DataError]) -> str:
    """How many files, and what is wrong with the first few of them."""
    named = "; ".join(map(str, unread[:NAMED])) + ("; ..." if len(unread) > NAMED else "")
    return f"{len(unread)} file(s) beside its slices cannot be read ({named})"
