"""Slices that contradict each other, copies, and series side by side: what is read, noted or refused."""

import os

import broken as mk
import numpy as np
import pytest
from broken import Right, check_ct
from make_dicom import ORIGIN, another_series, chest, drop, name_of, only, put, then, trunk, write_series
from refused import refused

from fedtar_flare.imaging.readers.ct import read_ct
from fedtar_flare.imaging.readers.dicom_files import is_companion
from fedtar_flare.imaging.readers.dicom_series import softness

pytestmark = pytest.mark.filterwarnings("ignore")
ANYHOW = np.random.default_rng(1).permutation(12)


def words(*wanted):
    """A pattern of words in any order."""
    return "(?s)" + "".join(f"(?=.*{word})" for word in wanted)


def at(i, step=2.5, **others):
    """The position of slice i, and other attributes."""
    return put(ImagePositionPatient=[ORIGIN[0], ORIGIN[1], ORIGIN[2] + i * step], **others)


def swapped(i, j):
    return [{i: j, j: i}.get(k, k) for k in range(12)]


def numbered(order=range(12), sign=1, step=2.5, **others):
    """Numbers and locations as they should be, and positions in another order."""

    def edit(ds, i):
        number, location = (i + 1, i * step + 7) if sign > 0 else (100 - i, 7 - i * step)
        at(int(order[i]), step, InstanceNumber=number, SliceLocation=f"{location:.3f}")(ds)
        put(**others)(ds)

    return edit


ORDER = {
    "positions in any other order than the locations": ("contradicting-order", mk.series(numbered(ANYHOW))),
    "every other slice missing": (
        "missing-slices", mk.series(lambda ds, i: at(i, 5, InstanceNumber=2 * i + 1, SliceLocation=i * 5)(ds)),
        "steps of 2: 1 of 2 slices missing",
    ),
    "the same, without numbers": (Right(("slice-gaps",), 5), mk.series(lambda ds, i: at(i, 5)(ds)), "5.0 mm"),
    "numbered": (Right(), mk.series(numbered())),
    "numbered from the head": (Right(), mk.series(numbered(sign=-1))),
    "reconstructed every 1 mm, 2.5 thick": (Right((), 1), mk.series(numbered(sign=-1, step=1, SpacingBetweenSlices=1))),
    "the same, two swapped": ("contradicting-order", mk.series(numbered(swapped(4, 5), -1, 1, SpacingBetweenSlices=1))),
    "the same, two swapped, without locations": (
        Right(("instance-order",), 1),
        mk.series(numbered(swapped(4, 5), -1, 1, SpacingBetweenSlices=1, SliceLocation=None), chest()[swapped(4, 5)]),
    ),
    "1 mm every 10 mm, as of old for the lungs": (
        Right((), 10),
        mk.series(lambda ds, i: at(i, 10, SliceThickness=1, SpacingBetweenSlices=10, InstanceNumber=i + 1)(ds)),
    ),
    "numbered in turn with another series": (Right(), mk.series(lambda ds, i: put(InstanceNumber=2 * i + 1)(ds))),
    "rounded locations": (Right(), mk.series(lambda ds, i: put(SliceLocation=round(i * 2.5))(ds))),
    "useless numbers": (Right(), mk.series(put(SliceLocation=0, InstanceNumber=1))),
    "shuffled numbers": (Right(), mk.series(lambda ds, i: put(InstanceNumber=int(ANYHOW[i]))(ds))),
    "the lower half acquired last": (Right(), mk.series(lambda ds, i: put(InstanceNumber=(i + 6) % 12)(ds))),
    "empty numbers": (Right(), mk.series(put(InstanceNumber="", SliceLocation=""))),
    "rounded positions": (Right((), 0.625), mk.series(lambda ds, i: at(1, round(i * 0.625, 1))(ds))),
    "a tilt and uneven gaps": (
        "uneven-spacing", mk.series(lambda ds, i: put(ImagePositionPatient=[i / 2, 0, i * 2.5 + (i > 5) * 1.2])(ds)),
    ),
    "rows and columns swapped in RLE": (
        "wrong-pixel-count", mk.series(then(mk.rle, put(Rows=48, Columns=64)), trunk()[:, :, 8:56]), "48 columns",
    ),
    **{
        f"slices {i} and {j} swapped, numbered by {sign}{how}": case
        for i, j in ((3, 4), (0, 1), (2, 9), (11, 10))
        for sign in (1, -1)
        for how, case in {
            "": (
                "contradicting-order", mk.series(numbered(swapped(i, j), sign)),
                words("SliceLocation", name_of(i), name_of(j)),
            ),
            ", without locations": (
                Right(("instance-order",)),
                mk.series(numbered(swapped(i, j), sign, SliceLocation=None), chest()[swapped(i, j)]),
                words(name_of(i), name_of(j)),
            ),
        }.items()
    },
}  # fmt: skip


def another_pixel(ds, i):
    ds.PixelData = ds.PixelData[:-2] + b"\x11\x01"


COPIES = {
    "of another pixel": another_pixel,
    "of another pixel, in RLE": then(another_pixel, mk.rle),
    "of another rescale": put(RescaleIntercept=-1000),
    "of another spacing": put(PixelSpacing=[0.8, 0.71]),
    "turned": put(ImageOrientationPatient=[0, 1, 0, -1, 0, 0]),
}
WORSE = {
    "coronal": lambda ds, i: put(
        ImageOrientationPatient=[1, 0, 0, 0, 0, -1], ImagePositionPatient=[ORIGIN[0], ORIGIN[1] + i * 2.5, ORIGIN[2]]
    )(ds),
    "projected": put(ImageType=["DERIVED", "SECONDARY", "AXIAL", "MIP"]),
    "sharp": put(ConvolutionKernel="B70f"),
    "derived": put(ImageType=["DERIVED", "PRIMARY", "AXIAL", "40 keV"]),
    "iodine": put(ImageType=["DERIVED", "PRIMARY", "AXIAL"], RescaleType="MGML"),
    "shorter": drop(*range(10)),
    "thicker": put(SliceThickness=5),
}
LOCALIZER = put(ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"])
DOSE_REPORT = put(Modality="SR", SOPClassUID="1.2.840.10008.5.1.4.1.1.88.67", PixelData=None, Rows=None)
DOSE_REPORTS = then(another_series(9), DOSE_REPORT)
OTHERS = then(
    only(0, then(another_series(6), LOCALIZER)),
    only(1, then(another_series(7), put(SOPClassUID="1.2.840.10008.5.1.4.1.1.7"))),
    only(2, then(another_series(8), DOSE_REPORT)),
    drop(*range(3, 12)),
)


SECOND = then(another_series(4), put(AcquisitionNumber=2), drop(11))
"""Another acquisition of the same study, whose last slice is left out."""


def scouts(ds, i):
    """A frontal and a lateral one; some scanners do not call them so."""
    ds.ImageOrientationPatient = [1, 0, 0, 0, 0, -1] if i else [0, 1, 0, 0, 0, -1]


SERIES = {
    **{
        f"a copy {how}": (
            "conflicting-copies",
            mk.beside(then(change, drop(*range(5), *range(6, 12))), chest(), prefix="copy-"),
            f"{name_of(5)} and .*copy-{name_of(5)}",
        )
        for how, change in COPIES.items()
    },
    "copies": (Right(("copies",)), mk.beside(lambda ds, i: None, chest())),
    "copies in RLE": (Right(("copies",)), mk.beside(mk.rle, chest())),
    "one UID for all": (Right(), mk.series(put(SOPInstanceUID="1.2.3.4.1"))),
    **{
        f"two acquisitions {shift * 2.5:.2f} mm apart": (
            Right(("several-acquisitions",)), mk.beside(then(SECOND, lambda ds, i, shift=shift: at(i + shift)(ds))),
        )
        for shift in (0, 0.5, 0.008)
    },
    "phases .02 mm apart that nothing tells apart": (
        "duplicate-slices", mk.beside(then(another_series(4), lambda ds, i: at(i + 0.008)(ds))),
    ),
    "a map of iodine alone": ("not-hounsfield", mk.series(put(RescaleType="MGML"))),
    "objects without image": (Right(("localizer", "no-pixel-data", "secondary-capture")), mk.beside(OTHERS)),
    **{
        f"a {worse} series of UID {uid}": (
            Right(("several-series",)), mk.beside(then(another_series(uid), change)), f"1.2.3.{uid}",
        )
        for worse, change in WORSE.items()
        for uid in (3, 5)
    },
    **{
        f"a longer {worse} series": (
            Right(("several-series",)), mk.beside(then(another_series(5), WORSE[worse]), chest(20)),
        )
        for worse in ("sharp", "projected", "coronal", "derived", "iodine")
    },
    "the better series is damaged": (
        Right(("several-series", "series-refused")),
        mk.beside(then(another_series(5), only(11, put(ImagePositionPatient=None))), chest(14)),
        "no-position",
    ),
    "no series can be read, and the best is named": (
        "missing-slices",
        mk.beside(then(another_series(5), put(ImageOrientationPatient=[1, 0, 0, 1, 0, 0])), first=drop(5)),
    ),
    "two patients": ("mixed-patients", mk.beside(then(another_series(5), put(PatientID="Q")))),
    "two series under one UID": ("duplicate-slices", mk.beside(another_series(4))),
    **{
        f"scouts{named}": (
            "localizer", mk.series(lambda ds, i, name=name: (then(scouts, name) if i < 2 else DOSE_REPORTS)(ds, i)),
        )
        for named, name in {"": lambda ds, i: None, ", named": LOCALIZER}.items()
    },
}  # fmt: skip
DAMAGE = {
    "of no length": ("unreadable", lambda content: b""),
    "with its first KiB zeroed": ("unreadable", lambda content: bytes(1024) + content[1024:]),
    "all zeros": ("unreadable", lambda content: bytes(len(content))),
    "a page of an error": ("unreadable", lambda content: b"<html>503 Service Unavailable</html>"),
    "cut in its header": ("truncated", lambda content: content[:420]),
    "cut before its series is named": ("no-pixel-data", lambda content: content[: content.index(b"\x08\0\x60\0")]),
    "cut between two elements": ("no-pixel-data", lambda content: content[: content.index(b"\x28\0\x10\0")]),
}
"""What cannot be read as DICOM may be a lost slice, so it is named and the series refused."""
STRAY = {
    **{
        f"slice {i} {kind}": (reason, mk.rewritten(change, i), name_of(i))
        for kind, (reason, change) in DAMAGE.items()
        for i in (0, 5, 11)
    },
    "half a stack without content": ("unreadable", mk.rewritten(lambda content: b"", *range(6, 12)), "6 file"),
    "a member without content": ("unreadable", mk.packed({"z.dcm": b""}), r"z\.dcm"),
    "an empty member elsewhere": (Right(("unreadable",)), mk.packed({"b/LIES": b""}, "a/")),
}  # fmt: skip
CASES = ORDER | SERIES | STRAY


@pytest.mark.parametrize("name", CASES)
def test_a_series(tmp_path, name):
    check_ct(tmp_path, *CASES[name])


KERNELS = (
    "B20f B31f B40s Br40d I30f Bf37 FC03 FC08 FC13 A B C STANDARD SOFT standard",
    "UNKNOWN Q",
    "B50f B70f Bl57 Br64d I70f FC30 FC51 FC86 L D YA LUNG BONE BONEPLUS EDGE CHEST DETAIL",
)


def test_soft_unknown_and_sharp_kernels():
    assert [{*map(softness, kernels.split())} for kernels in KERNELS] == [{0}, {1}, {2}]
    assert softness("BODY FILTER") == 0 and softness("") == 1


def test_a_slice_that_may_not_be_read(tmp_path, monkeypatch):
    write_series(tmp_path)
    locked, opened = tmp_path / name_of(11), os.open

    def open_(path, *args, **options):
        if path == locked:
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", open_)
    with refused("no-permission", name_of(11)):
        read_ct(tmp_path)


def test_stray_files_of_another_folder_are_another_matter(tmp_path):
    """What lies beside another series, or beside none, is said and refuses nothing."""
    hu = write_series(tmp_path / "soft")
    write_series(tmp_path / "sharp", edit=then(another_series(5), WORSE["sharp"]))
    (tmp_path / "more").mkdir()
    for name, content in (("sharp/x.dcm", b""), ("more/y.dcm", bytes(300))):
        (tmp_path / name).write_bytes(content)
    volume = read_ct(tmp_path)
    assert np.array_equal(volume.hu, hu)
    assert [note.reason for note in volume.warnings] == ["several-series", "unreadable"]
    assert "y.dcm: zeros" in volume.warnings[1].text
    (tmp_path / "sharp" / "x.dcm").rename(tmp_path / "soft" / "x.dcm")  # the other series is whole then
    assert "series-refused" in [note.reason for note in read_ct(tmp_path).warnings]


COMPANIONS = "DICOMDIR LICENSE README .DS_Store ._001.dcm Thumbs.db a.txt b.XML c.json report.pdf key.jpg CT.nii.gz"
SUSPECTS = "001 IM000001 1.2.840.113619.2.55.3 001.dcm 001.IMA 001.dcm.gz 001.dcm.part I10 003.dcm.tmp"


def test_what_usually_lies_beside_slices_is_no_slice(tmp_path):
    assert [name for name in COMPANIONS.split() if not is_companion(name)] == []
    assert [name for name in SUSPECTS.split() if is_companion(name)] == []
    hu = write_series(tmp_path)
    for name in COMPANIONS.split():
        (tmp_path / name).write_bytes(b"something" * 20)
    volume = read_ct(tmp_path)
    assert np.array_equal(volume.hu, hu) and volume.warnings == ()
