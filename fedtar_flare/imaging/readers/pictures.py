"""Photographs (PNG, JPEG, BMP, TIFF) in colour; radiographs (these, or DICOM CR and DX) in grey, and their view."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image, ImageOps
from pydicom.pixels import apply_modality_lut, apply_voi_lut
from pydicom.tag import Tag

from fedtar_flare.core.errors import DataError, decoding
from fedtar_flare.core.files import open_regular
from fedtar_flare.data.sources.fields import PICTURES
from fedtar_flare.imaging.limits import check_size
from fedtar_flare.imaging.readers.decoders import PIXEL_TAGS, decoded, layout_of
from fedtar_flare.imaging.readers.dicom_files import Source, read_header
from fedtar_flare.imaging.readers.dicom_slices import CAPTURES, padding_of
from fedtar_flare.imaging.readers.dicom_tags import decimal, first, integer, text, words

MIN_SIDE = 16  # fewest rows or columns of a picture
PHOTOMETRIC = 262  # TIFF's tag, 0 where white is zero: Pillow inverts 8 bits, and leaves deeper values as they are
DEEP = ("I;16", "I;16B", "I;16L", "I", "F")  # modes of one channel and more than 8 bits


def read_photograph(path: Path | str) -> np.ndarray:
    """Read a photograph."""
    path = Path(path)
    check_there(path)
    if path.suffix.lower() not in PICTURES:
        raise DataError(f"{path}: a photograph is one of {', '.join(PICTURES)}", reason="not-a-photograph")
    with opened_picture(path, "not-a-photograph") as picture:
        if picture.mode in DEEP:
            raise DataError(f"{path}: one channel of more than 8 bits ({picture.mode})", reason="not-a-photograph")
        pixels = np.array(picture.convert("RGB"))
    check_content(path, pixels, "photograph")
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


@contextmanager
def opened_picture(path: Path, refusal: str) -> Iterator[Image.Image]:
    """The picture of a file, turned as its camera says; ``refusal``: the reason of refusing several, or black and
    white.
    """
    check_size(str(path), "file_bytes", path.stat().st_size)
    with decoding(f"{path}: not readable as a picture"), open_regular(path) as file, Image.open(file) as image:
        if image.format == "PNG":  # only this checks its checksums
            image.verify()
    with decoding(f"{path}: not readable as a picture"), open_regular(path) as file, Image.open(file) as image:
        check_size(str(path), "pixels", image.width * image.height)
        if getattr(image, "n_frames", 1) > 1 or image.mode == "1":
            what = "a bitmap without greys" if image.mode == "1" else "several pictures in one file"
            raise DataError(f"{path}: {what}", reason=refusal)
        upright = ImageOps.exif_transpose(image)
        upright.info["white_is_zero"] = getattr(image, "tag_v2", {}).get(PHOTOMETRIC) == 0
        if upright.mode in ("RGBA", "LA", "PA", "P"):
            upright = upright.convert("RGBA").convert("RGB")  # keeps the colours below a transparent layer
        yield upright


def check_there(path: Path) -> None:
    """Refuse (:class:`DataError` ``no-image``) what is no file."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file", reason="no-image")


def check_content(path: Path, pixels: np.ndarray, what: str) -> None:
    """Refuse (:class:`DataError` ``blank``, ``too-small``) pixels (height, width, ...) that show nothing."""
    if pixels.min() == pixels.max():
        raise DataError(f"{path}: every pixel has the same value", reason="blank")
    height, width = pixels.shape[:2]
    if min(height, width) < MIN_SIDE:
        raise DataError(f"{path}: {width} x {height} pixels are no {what}", reason="too-small")


SHAPES = {"MONOCHROME1": "INVERSE", "MONOCHROME2": "IDENTITY"}
"""PresentationLUTShape as DICOM demands it (PS3.3, C.8.11.3.1.2), by photometric interpretation."""
IN_WINDOW = 0.05
"""Share of the middle of a film that a window must show; a lower one is of other pixels, such as 127/255 of 12 bits."""
KEYWORDS = """
    Modality ImageType PresentationLUTShape ModalityLUTSequence RescaleIntercept RescaleSlope RescaleType VOILUTSequence
    VOILUTFunction WindowCenter WindowWidth PixelPaddingValue PixelPaddingRangeLimit"""


def read_radiograph(path: Path | str, side: str = "frontal") -> np.ndarray:
    """Read a radiograph, brighter where more is absorbed."""
    path = Path(path)
    check_there(path)
    if path.suffix.lower() not in PICTURES:
        radiograph = _read_dicom(path, side)
    else:
        with opened_picture(path, "not-a-radiograph") as picture:
            if picture.mode in DEEP:
                values = _finite(np.array(picture, np.float32), path)
                radiograph = stretch(-values if picture.info["white_is_zero"] else values)
            else:
                radiograph = np.array(picture.convert("L"))
    check_content(path, radiograph, "radiograph")
    return radiograph


def _read_dicom(path: Path, side: str) -> np.ndarray:
    header = read_header(Source(path), [*PIXEL_TAGS, *map(Tag, f"{KEYWORDS} {VIEW_KEYWORDS}".split())])
    if header is None:
        raise DataError(f"{path}: neither a picture nor DICOM", reason="unreadable")
    dataset: Any = header.dataset
    if (modality := first(dataset, "Modality")) not in ("CR", "DX"):
        raise DataError(f"{path}: modality '{modality}' is not CR or DX", reason="not-a-radiograph")
    if CAPTURES & set(words(dataset, "ImageType")):
        raise DataError(f"{path}: a screenshot of a radiograph", reason="secondary-capture")
    if (view := view_of(dataset, str(path))).side != side:
        raise DataError(f"{path}: a {view.side} view ({', '.join(view.stated_by)})", reason=f"{view.side}-view")
    if not header.has_pixels:
        raise DataError(f"{path}: no pixel data", reason="no-pixel-data")
    if (meaning := first(dataset, "PhotometricInterpretation")) not in SHAPES:
        raise DataError(f"{path}: photometric interpretation '{meaning}' is not grey", reason="not-a-radiograph")
    shape = first(dataset, "PresentationLUTShape") or SHAPES[meaning]
    if shape in SHAPES.values() and shape != SHAPES[meaning]:
        problem = f"{path}: {meaning} and PresentationLUTShape {shape} say the opposite of each other"
        raise DataError(problem, reason="conflicting-polarity")
    if (frames := integer(dataset, "NumberOfFrames", str(path), 1)) > 1:
        raise DataError(f"{path}: {frames} frames are no radiograph", reason="not-a-radiograph")
    layout = layout_of(header)

    def stored_values(masked: bool) -> np.ndarray:
        return next(decoded(header.source, header.syntax, layout, [0], masked=masked))

    stored = stored_values(masked=True)
    plain, padding = layout.signed and not header.syntax.is_encapsulated, padding_of(dataset, str(path), layout)
    unmasked = stored_values(masked=False) if plain or padding else stored
    if plain and not np.array_equal(unmasked, stored):
        problem = f"{path}: its values are not signed as PixelRepresentation says, or longer than BitsStored"
        raise DataError(problem, reason="bad-header")
    seen = np.ones(stored.shape, bool)  # all but padding, which is shown black
    if padding:
        seen = (unmasked < padding[0]) | (unmasked > padding[1])
    with decoding(f"{path}: its window or rescale cannot be applied", "bad-header"):
        values = np.asarray(apply_modality_lut(stored, dataset))
        windowed = "VOILUTSequence" in dataset or _window_fits(dataset, values, seen, str(path))
        for keyword in ("RescaleSlope", "RescaleIntercept"):
            dataset.pop(keyword, None)  # pydicom would scale the window's output by them, and turn it round
        values = _finite(np.asarray(apply_voi_lut(values, dataset) if windowed else values, np.float32), path)
        low, high = float(values[seen].min()), float(values[seen].max())
    grey = _to_bytes(values, low, high) if windowed else stretch(values, seen)
    return np.where(seen, 255 - grey if meaning == "MONOCHROME1" else grey, 0).astype(np.uint8)


def _window_fits(dataset: Any, values: np.ndarray, seen: np.ndarray, name: str) -> bool:
    centre, width = (decimal(dataset, keyword, name) for keyword in ("WindowCenter", "WindowWidth"))
    if centre is None or width is None:
        return False
    height, breadth = values.shape
    at = np.s_[height // 4 : -(-3 * height // 4), breadth // 4 : -(-3 * breadth // 4)]
    middle = values[at][seen[at]]
    return width <= 0 or not middle.size or float(np.mean(np.abs(middle - centre) < width / 2)) >= IN_WINDOW


def _finite(values: np.ndarray, path: Path) -> np.ndarray:
    if not np.isfinite(values).all():
        raise DataError(f"{path}: values that are no number", reason="not-finite")
    return values


def stretch(values: np.ndarray, within: np.ndarray | None = None) -> np.ndarray:
    """Map the 0.1 to 99.9 percentiles to 0..255, uint8, or the 1 to 99 percentiles where those lie far within,
    as with letters burnt into a corner; of the pixels ``within`` alone, where it is given.
    """
    step = 4 if values.size > 1_000_000 else 1
    seen = values[::step, ::step] if within is None else values[::step, ::step][within[::step, ::step]]
    seen = seen if seen.size or within is None else values[within]
    low, darkest, brightest, high = np.percentile(seen, (0.1, 1, 99, 99.9))
    span = brightest - darkest
    low, high = darkest if darkest - low > span / 2 else low, brightest if high - brightest > span / 2 else high
    if high <= low:
        low, high = float(values.min()), float(values.max())
    return _to_bytes(values, float(low), float(high))


def _to_bytes(values: np.ndarray, low: float, high: float) -> np.ndarray:
    scaled = values - low
    scaled *= 255.0 / max(high - low, 1e-6)
    np.clip(scaled, 0, 255, out=scaled)
    return np.rint(scaled, out=scaled).astype(np.uint8)


Side = Literal["frontal", "lateral"]
DESCRIPTIONS = ("SeriesDescription", "ProtocolName", "AcquisitionDeviceProcessingDescription", "StudyDescription")
VIEW_KEYWORDS = " ".join(("ViewPosition", "ViewCodeSequence", "PatientOrientation", *DESCRIPTIONS))
POSITIONS: dict[str, Side] = {
    **dict.fromkeys(("PA", "AP"), "frontal"),
    **dict.fromkeys(("LL", "RL", "L", "R", "LLD", "RLD", "LLO", "RLO"), "lateral"),
}
"""Codes of ViewPosition that :data:`WORDS` does not match; oblique and decubitus films count as lateral ones."""
WORDS: dict[Side, str] = {
    "lateral": r"\b(?:[LR] ?LAT|LAT|lateral[eis]*|profil\w*|seitlich|sagittal|oblique?|[LR][AP]O|decubitus)\b",
    "frontal": r"\b(?:P\.? ?A|A\.? ?P|postero-?anterior|antero-?posterior|(?<!para)frontal[eis]*|face)\b",
}


class View(NamedTuple):
    """The view of a radiograph, and the keywords of the attributes that state it."""

    side: Side
    stated_by: tuple[str, ...]


def view_of(dataset: Any, name: str) -> View:
    """Decide the view of a CR or DX image: by ViewPosition, ViewCodeSequence (PS3.16, CID 4010) and PatientOrientation,
    and only where none states one by the descriptions; one that names both views is about several films.
    """
    with decoding(f"{name}: the attributes of its view cannot be read", "bad-header"):
        stated = dict(_coded(dataset))
        for keyword in DESCRIPTIONS:
            if not stated and (side := _in_words(text(dataset, keyword).replace("_", " "))):
                stated = {keyword: side}
    if not stated:
        problem = "neither ViewPosition, ViewCodeSequence, PatientOrientation nor a description states its view"
        raise DataError(f"{name}: {problem}; have the export corrected", reason="unknown-view")
    if len(set(stated.values())) > 1:
        views = ", ".join(f"{side} by {keyword}" for keyword, side in stated.items())
        raise DataError(f"{name}: {views}", reason="conflicting-view")
    return View(next(iter(stated.values())), tuple(stated))


def _coded(dataset: Any) -> Iterator[tuple[str, Side]]:
    position = first(dataset, "ViewPosition").upper()
    if side := POSITIONS.get(position) or _in_words(position):
        yield "ViewPosition", side
    meanings = " ".join(str(code.get("CodeMeaning", "")) for code in dataset.get("ViewCodeSequence") or ())
    oblique = re.search(WORDS["lateral"], meanings, re.IGNORECASE)  # antero-posterior oblique
    if side := "lateral" if oblique else _in_words(meanings):
        yield "ViewCodeSequence", side
    main = [part[:1] for part in words(dataset, "PatientOrientation")]
    if len(main) == 2 and set(main) & set("AP"):
        yield "PatientOrientation", "lateral"
    elif len(main) == 2 and set(main) & set("LR") and set(main) & set("FH"):
        yield "PatientOrientation", "frontal"


def _in_words(description: str) -> Side | None:
    named = [side for side, pattern in WORDS.items() if re.search(pattern, description, re.IGNORECASE)]
    return named[0] if len(named) == 1 else None
