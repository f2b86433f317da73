"""Positions against what else the headers say of order, distance, side and shape."""

from __future__ import annotations

import numpy as np
import pytest
from broken import rle
from make_dicom import ORIGIN, SPACING, chest, put, trunk, write_series
from pydicom.dataset import Dataset
from refused import refused

from fedtar_flare.imaging.readers.ct import read_ct


def at(i, step=SPACING[0]):
    return [ORIGIN[0], ORIGIN[1], ORIGIN[2] + i * step]


def numbered(swap=(), locations=True, numbers=True, sign=1, every=1):
    """Slices with InstanceNumber and SliceLocation; the positions of two are swapped."""

    def edit(ds, i):
        if i % every:
            return Dataset()
        if numbers:
            ds.InstanceNumber = 100 - i if sign < 0 else i + 1
        if locations:
            ds.SliceLocation = f"{sign * i * SPACING[0] + 7:.3f}"
        if i in swap:
            ds.ImagePositionPatient = at(swap[1] if i == swap[0] else swap[0])
        return None

    return edit


def reasons(volume):
    return [note.reason for note in volume.warnings]


def name_of(folder, i):
    """File names of :func:`write_series` say nothing of the order."""
    names = np.random.default_rng(3).permutation(len(list(folder.iterdir())))
    return f"{names[i]:03d}.dcm"


@pytest.mark.parametrize("swap", [(3, 4), (0, 1), (2, 9), (11, 10)])
@pytest.mark.parametrize("sign", [1, -1])
def test_two_swapped_slices_are_named(tmp_path, swap, sign):
    write_series(tmp_path / "both", edit=numbered(swap, sign=sign))
    with refused("contradicting-order", "SliceLocation") as error:
        read_ct(tmp_path / "both")
    assert all(name_of(tmp_path / "both", i) in str(error.value) for i in swap)
    assert "both" not in error.value.public
    write_series(tmp_path / "number", edit=numbered(swap, locations=False, sign=sign))
    (note,) = read_ct(tmp_path / "number").warnings
    assert note.reason == "instance-order" and all(name_of(tmp_path / "number", i) in note.text for i in swap)


def test_positions_in_any_other_order_than_the_locations(tmp_path):
    order = np.random.default_rng(1).permutation(12)
    write_series(tmp_path, edit=lambda ds, i: (numbered()(ds, i), put(ImagePositionPatient=at(int(order[i])))(ds))[0])
    with refused("contradicting-order"):
        read_ct(tmp_path)


def overlapping(ds, i):
    """Reconstructed every 1 mm, 2.5 mm thick, numbered from the head."""
    put(ImagePositionPatient=at(i, 1), InstanceNumber=200 - i, SliceLocation=-i, SpacingBetweenSlices=1)(ds)


LEGAL = {
    "ascending": numbered(),
    "descending": numbered(sign=-1),
    "overlapping": overlapping,
    "1 mm every 10 mm, as of old for the lungs, and said so": lambda ds, i: put(
        ImagePositionPatient=at(i, 10), SliceThickness=1, SpacingBetweenSlices=10, InstanceNumber=i + 1
    )(ds),
    "numbered in turn with another series": lambda ds, i: put(InstanceNumber=2 * i + 1)(ds),
    "rounded": lambda ds, i: put(SliceLocation=round(i * SPACING[0]))(ds),
    "useless": put(SliceLocation=0, InstanceNumber=1),
    "shuffled": lambda ds, i: put(InstanceNumber=int(np.random.default_rng(0).permutation(12)[i]))(ds),
    "the lower half acquired last": lambda ds, i: put(InstanceNumber=(i + 6) % 12)(ds),
    "empty": lambda ds, i: (ds.add_new(0x00200013, "IS", ""), ds.add_new(0x00201041, "DS", ""))[0],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LEGAL)
def test_what_is_legal_is_not_noted(tmp_path, name):
    hu = write_series(tmp_path, edit=LEGAL[name])
    volume = read_ct(tmp_path)
    assert np.array_equal(volume.hu, hu) and reasons(volume) == []


def test_every_other_slice_missing(tmp_path):
    write_series(tmp_path / "numbered", chest(24), edit=numbered(every=2))
    with refused("missing-slices", "steps of 2: 1 of 2 slices missing"):
        read_ct(tmp_path / "numbered")
    write_series(tmp_path / "bare", chest(24), edit=numbered(every=2, numbers=False, locations=False))
    volume = read_ct(tmp_path / "bare")
    assert reasons(volume) == ["slice-gaps"] and "5.0 mm" in volume.warnings[0].text


@pytest.mark.parametrize("compress", [lambda ds: None, rle])
def test_rows_and_columns_swapped(tmp_path, compress):
    """As many pixels, but every row goes on in the next."""
    hu = np.ascontiguousarray(trunk()[:, :, 8:56])
    write_series(tmp_path / "swapped", hu, edit=lambda ds, i: (compress(ds), put(Rows=48, Columns=64)(ds))[1])
    with refused("wrong-pixel-count", "48 columns, not of 48 and 64"):
        read_ct(tmp_path / "swapped")
    for name, right in (("tall", hu), ("wide", np.ascontiguousarray(hu.transpose(0, 2, 1)))):
        write_series(tmp_path / name, right)
        assert np.array_equal(read_ct(tmp_path / name).hu, right)


def test_the_legal_and_the_damaged_in_one(tmp_path):
    """An overlapping reconstruction numbered downwards, two of whose slices are swapped."""

    def edit(ds, i):
        overlapping(ds, i)
        if i in (4, 5):
            ds.ImagePositionPatient = at(9 - i, 1)

    write_series(tmp_path, edit=edit)
    with refused("contradicting-order"):
        read_ct(tmp_path)
    write_series(tmp_path, edit=lambda ds, i: (edit(ds, i), put(SliceLocation=None)(ds))[0])
    assert reasons(read_ct(tmp_path)) == ["instance-order"]
