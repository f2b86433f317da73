"""Positions against what else the headers say of order, distance, side and shape."""

from __future__ import annotations

import numpy as np
import pytest
from make_dicom import ORIGIN, SPACING, chest, put, trunk, write_series
from pydicom.dataset import Dataset
from pydicom.uid import RLELossless
from refused import refused

from fedtar_flare.imaging.readers.ct import read_ct


def at(i):
    return [ORIGIN[0], ORIGIN[1], ORIGIN[2] + i * SPACING[0]]


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

    def edit(ds, i):
        numbered()(ds, i)
        ds.ImagePositionPatient = at(int(order[i]))

    write_series(tmp_path, edit=edit)
    with refused("contradicting-order"):
        read_ct(tmp_path)


def overlapping(ds, i):
    """Reconstructed every 1 mm, 2.5 mm thick, numbered from the head."""
    ds.ImagePositionPatient, ds.InstanceNumber = [ORIGIN[0], ORIGIN[1], ORIGIN[2] + i], 200 - i
    ds.SliceLocation, ds.SpacingBetweenSlices = -i, 1


def incremental(ds, i):
    """1 mm every 10 mm, as of old for the lungs, and said so."""
    ds.ImagePositionPatient = [ORIGIN[0], ORIGIN[1], ORIGIN[2] + 10 * i]
    ds.SliceThickness, ds.SpacingBetweenSlices, ds.InstanceNumber = 1, 10, i + 1


def two_reconstructions(ds, i):
    """Numbered in turn with another series."""
    ds.InstanceNumber = 2 * i + 1


def rounded(ds, i):
    ds.SliceLocation = round(i * SPACING[0])


def useless(ds, i):
    ds.SliceLocation, ds.InstanceNumber = 0, 1


def shuffled(ds, i):
    ds.InstanceNumber = int(np.random.default_rng(0).permutation(12)[i])


def two_passes(ds, i):
    """The lower half was acquired last."""
    ds.InstanceNumber = (i + 6) % 12


def no_numbers(ds, i):
    ds.add_new(0x00200013, "IS", "")
    ds.add_new(0x00201041, "DS", "")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "edit",
    [
        numbered(),
        numbered(sign=-1),
        overlapping,
        incremental,
        two_reconstructions,
        rounded,
        useless,
        shuffled,
        two_passes,
        no_numbers,
    ],
)
def test_what_is_legal_is_not_noted(tmp_path, edit):
    hu = write_series(tmp_path, edit=edit)
    volume = read_ct(tmp_path)
    assert np.array_equal(volume.hu, hu) and reasons(volume) == []


def test_every_other_slice_missing(tmp_path):
    write_series(tmp_path / "numbered", chest(24), edit=numbered(every=2))
    with refused("missing-slices", "steps of 2: 1 of 2 slices missing"):
        read_ct(tmp_path / "numbered")
    write_series(tmp_path / "bare", chest(24), edit=numbered(every=2, numbers=False, locations=False))
    volume = read_ct(tmp_path / "bare")
    assert reasons(volume) == ["slice-gaps"] and "5.0 mm" in volume.warnings[0].text


def seen_from_the_head(ds, i):
    ds.ImageOrientationPatient = [-1, 0, 0, 0, 1, 0]


def test_mirrored_slices(tmp_path):
    write_series(tmp_path, edit=seen_from_the_head)
    with refused("mirrored", "seen from the head"):
        read_ct(tmp_path)


def swapped(ds, i):
    ds.Rows, ds.Columns = ds.Columns, ds.Rows


@pytest.mark.parametrize("compress", [False, True])
def test_rows_and_columns_swapped(tmp_path, compress):
    """As many pixels, but every row goes on in the next."""

    def edit(ds, i):
        if compress:
            ds.compress(RLELossless, generate_instance_uid=False)
        swapped(ds, i)

    hu = np.ascontiguousarray(trunk()[:, :, 8:56])
    write_series(tmp_path / "swapped", hu, edit=edit)
    with refused("wrong-pixel-count", "48 columns, not of 48 and 64"):
        read_ct(tmp_path / "swapped")
    for name, right in (("tall", hu), ("wide", np.ascontiguousarray(hu.transpose(0, 2, 1)))):
        write_series(tmp_path / name, right)
        assert np.array_equal(read_ct(tmp_path / name).hu, right)


def test_a_mirrored_slice_among_others(tmp_path):
    write_series(tmp_path, edit=lambda ds, i: seen_from_the_head(ds, i) if i == 5 else None)
    with refused("mixed-orientation"):
        read_ct(tmp_path)


def test_the_legal_and_the_damaged_in_one(tmp_path):
    """An overlapping reconstruction numbered downwards, two of whose slices are swapped."""

    def edit(ds, i):
        overlapping(ds, i)
        if i in (4, 5):
            ds.ImagePositionPatient = [ORIGIN[0], ORIGIN[1], ORIGIN[2] + 9 - i]

    write_series(tmp_path, edit=edit)
    with refused("contradicting-order"):
        read_ct(tmp_path)
    write_series(tmp_path, edit=lambda ds, i: (edit(ds, i), put(SliceLocation=None)(ds))[0])
    assert reasons(read_ct(tmp_path)) == ["instance-order"]
