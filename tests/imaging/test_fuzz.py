"""Mutated copies of images against the untouched ones: equal, refused, or different with a note; never a traceback.

``FEDTAR_FUZZ=10000 pytest tests/imaging/test_fuzz.py -m slow -s`` makes ten thousand and prints the counts;
``FEDTAR_FUZZ_SEED`` gives others.
"""

from __future__ import annotations

import os
import resource
import shutil
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from make_dicom import ORIGIN, SPACING, encode, enhanced_dataset, trunk, write_radiograph, write_series
from mutations import PIXELS, Files, Mutation, mutated, raw
from PIL import Image
from pydicom import uid
from pydicom.datadict import keyword_for_tag

from fedtar_flare.core.errors import DataError
from fedtar_flare.imaging.limits import Limits, applied
from fedtar_flare.imaging.readers.ct import read_ct
from fedtar_flare.imaging.readers.pictures import read_radiograph

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
COUNT = int(os.environ.get("FEDTAR_FUZZ", "1000"))
SEED = int(os.environ.get("FEDTAR_FUZZ_SEED", "20260"))
SECONDS = 10.0
"""Within which every broken study is answered."""
MEMORY_KB = 1 << 20
"""By which the process may grow."""


@dataclass
class Base:
    """An image whose copies are mutated."""

    files: Files
    read: Callable[[Path], Any]
    share: int  # of the copies, in a hundred
    mutate: Callable[[Files, np.random.Generator], tuple[Files, Mutation]] = mutated
    single: bool = False  # the path to read is the one file, not its folder
    checked: bool = False  # a checksum covers every value


def ct(path: Path) -> tuple[np.ndarray, np.ndarray, set[str]]:
    volume = read_ct(path)
    return volume.hu, volume.affine, {note.reason for note in volume.warnings}


def radiograph(path: Path) -> tuple[np.ndarray, np.ndarray, set[str]]:
    return read_radiograph(path), np.eye(4), set()


def body() -> np.ndarray:
    noise = np.random.default_rng(0).integers(-20, 20, (9, 36, 32), dtype=np.int16)
    return np.ascontiguousarray(trunk(size=36)[6:15, :, 2:34]) + noise


def series(folder: Path, syntax: str) -> Files:
    def edit(ds, i):
        ds.InstanceNumber, ds.SliceLocation = i + 1, ORIGIN[2] + i * SPACING[0]
        encode(ds, syntax)

    write_series(folder, body(), edit=edit)
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def picture(kind: str) -> bytes:
    grey = (np.add.outer(np.arange(64), np.arange(80)) * 1.7).astype(np.uint8)
    held = BytesIO()
    Image.fromarray(grey).save(held, kind)
    return held.getvalue()


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory) -> dict[str, Base]:
    folder = tmp_path_factory.mktemp("bases")
    shares = {"ExplicitVRLittleEndian": 20, "ImplicitVRLittleEndian": 10, "ExplicitVRBigEndian": 3}
    shares |= {"DeflatedExplicitVRLittleEndian": 3, "RLELossless": 8, "JPEGLSLossless": 8, "JPEGLosslessSV1": 8}
    shares |= {"JPEG2000Lossless": 8}
    bases = {name: Base(series(folder / name, getattr(uid, name)), ct, share) for name, share in shares.items()}
    enhanced_dataset(body(), range(9)).save_as(folder / "e.dcm", enforce_file_format=True)
    bases["enhanced"] = Base({"e.dcm": (folder / "e.dcm").read_bytes()}, ct, 4)
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in bases["ExplicitVRLittleEndian"].files.items():
            archive.writestr(name, content)
    bases["zip"] = Base({"s.zip": packed.getvalue()}, ct, 6, raw, single=True, checked=True)
    affine = np.diag([-SPACING[2], -SPACING[1], SPACING[0], 1.0])
    for name in ("v.nii", "v.nii.gz"):
        nibabel.save(nibabel.Nifti1Image(body().transpose(2, 1, 0), affine), folder / name)
        content = (folder / name).read_bytes()
        bases[f"NIfTI {name}"] = Base({name: content}, ct, 3, raw, single=True, checked=name.endswith("gz"))
    grey = (np.add.outer(np.arange(64), np.arange(80)) * 25).astype(np.uint16)
    write_radiograph(folder / "f.dcm", grey)
    bases["radiograph DX"] = Base({"f.dcm": (folder / "f.dcm").read_bytes()}, radiograph, 10, single=True)
    for kind in ("PNG", "JPEG"):
        name = f"f.{kind.lower()}"
        bases[f"radiograph {kind}"] = Base({name: picture(kind)}, radiograph, 3, raw, True, checked=kind == "PNG")
    return bases


@pytest.fixture(scope="module")
def real(shared_data) -> dict[str, Base]:
    (folder,) = (shared_data / "lung_pet_ct_dx").glob("A0001*")
    files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())[20:29]}
    bases = {"real series": Base(files, ct, 5)}
    images = sorted((shared_data / "covid_chestxray" / "images").iterdir(), key=lambda file: file.stat().st_size)
    for file in [next(f for f in images if f.suffix == s and f.stat().st_size > 40_000) for s in (".jpg", ".png")]:
        content = {file.name: file.read_bytes()}
        bases[f"real radiograph {file.suffix}"] = Base(content, radiograph, 1, raw, True, file.suffix == ".png")
    return bases


OF_ALL = ("PixelSpacing", "RescaleIntercept", "RescaleSlope", "ImagePositionPatient", "ImageOrientationPatient")
OF_ALL += ("SliceThickness", "PixelRepresentation")
"""Fields that decide alone about what they mean: wrong alike in all files, nothing contradicts them."""


def explained(base: Base, mutation: Mutation, hu: np.ndarray, right: np.ndarray) -> str:
    """Why nobody could see a difference; empty when somebody could."""
    if mutation.kind == "gone" and any(np.array_equal(hu, rest) for rest in (right[1:], right[:-1])):
        return "no file where the stack ends"
    if base.checked:
        return ""
    if base.mutate is raw:
        return "one file without checksums"
    if mutation.tag == PIXELS and mutation.kind in ("pixel stream", "any bit"):
        return "values without a checksum"
    alike, keyword = mutation.all or len(base.files) == 1, keyword_for_tag(mutation.tag)
    return f"{keyword} in all files" if alike and keyword in OF_ALL else ""


def same(one: tuple[np.ndarray, np.ndarray, set[str]], other: tuple[np.ndarray, np.ndarray, set[str]]) -> bool:
    """Equal values, every voxel within half of its size of where it lay."""
    if not np.array_equal(one[0], other[0]):
        return False
    ends = np.array([[0, 0, 0, 1], [*np.array(one[0].shape[::-1][:3]) - 1, 1]] if one[0].ndim == 3 else [[0, 0, 0, 1]])
    apart = np.abs((one[1] - other[1]) @ ends.T)[:3].max(axis=1)
    return bool((apart <= np.abs(np.linalg.norm(one[1][:3, :3], axis=0)) / 2).all())


def write(folder: Path, files: Files, names: Iterable[str]) -> None:
    """Bring these names into the state that ``files`` have them in."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
        if name in files:
            (folder / name).write_bytes(files[name])


def fuzz(bases: dict[str, Base], folder: Path) -> tuple[Counter[str], Counter[str], list[str]]:
    """Outcomes, explanations of silent differences, and what must not be."""
    counts, why, wrong = Counter[str](), Counter[str](), list[str]()
    for number, (name, base) in enumerate(bases.items()):
        place = folder / "study"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        write(place, base.files, base.files)
        path = place / next(iter(base.files)) if base.single else place
        right = base.read(path)
        for i in range(max(1, COUNT * base.share // 100)):
            files, mutation = base.mutate(base.files, np.random.default_rng([SEED, number, i]))
            changed = [file for file in {*files, *base.files} if files.get(file) != base.files.get(file)]
            write(place, files, changed)
            case, start = f"{name} {i}: {mutation.kind}, {mutation.text}", time.process_time()
            try:
                with applied(Limits()):
                    got = base.read(path)
            except DataError as error:
                counts["refused"] += 1
                if str(folder) in error.public:
                    wrong.append(f"{case}: its public text names a path")
            except Exception as error:
                counts["traceback"] += 1
                wrong.append(f"{case}: {type(error).__name__}: {error}")
            else:
                if same(got, right):
                    counts["equal"] += 1
                elif got[2] - right[2]:
                    counts["different, with a note"] += 1
                elif reason := explained(base, mutation, got[0], right[0]):
                    counts["different, explained"] += 1
                    why[reason] += 1
                else:
                    counts["different, silent"] += 1
                    wrong.append(f"{case}: silent, of shape {got[0].shape}")
            if time.process_time() - start > SECONDS:
                wrong.append(f"{case}: {time.process_time() - start:.0f} s")
            write(place, base.files, changed)
    return counts, why, wrong


@pytest.mark.parametrize("kind", ["synthetic", pytest.param("real", marks=pytest.mark.shared_data)])
def test_no_mutated_copy_is_silently_wrong(kind, request, tmp_path):
    bases = request.getfixturevalue(kind)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts, why, wrong = fuzz(bases, tmp_path)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"\n{kind}: {counts.total()} copies: {dict(counts.most_common())}; explained: {dict(why.most_common())}")
    assert not wrong, "\n".join([f"{len(wrong)} of {counts.total()}:", *wrong[:60]])
    assert grown < MEMORY_KB
