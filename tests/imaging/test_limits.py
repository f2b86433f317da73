"""The site's limits: refused is what states, or takes, more than they allow (see :mod:`test_broken_inputs`)."""

from __future__ import annotations

from datetime import datetime

import pytest
from broken import nifti_header, packed, picture, zeros
from make_dicom import chest, write_series
from refused import refused

from fedtar_flare.data.cohort import Visit
from fedtar_flare.errors import DataError
from fedtar_flare.imaging import limits
from fedtar_flare.imaging.limits import Limits, applied
from fedtar_flare.imaging.pipeline import Size, prepare_visits
from fedtar_flare.imaging.readers.ct import read_ct
from fedtar_flare.imaging.readers.pictures import read_radiograph


def test_the_sites_limits_hold(tmp_path):
    study, archive = packed()(tmp_path).with_suffix(""), tmp_path / "s.zip"
    path = picture("f.png")(tmp_path)
    for limit, value, image in (
        ("voxels", 12 * 24 * 20 - 1, study),
        ("pixels", 24 * 20 - 1, study),
        ("file_bytes", 900, study),
        ("archive_bytes", 12 * 900, archive),
        ("archive_members", 11, archive),
    ):
        with applied(Limits(**{limit: value})), refused("too-large", limit):
            read_ct(image)
    with applied(Limits(pixels=2399)), refused("too-large", "pixels"):
        read_radiograph(path)
    with applied(Limits(voxels=12 * 24 * 20, pixels=24 * 20, archive_members=12)):
        assert read_ct(archive).hu.shape == read_ct(study).hu.shape == (12, 24, 20)
    with applied(Limits(pixels=2400)):
        assert read_radiograph(path).shape == (40, 60)


def test_a_limit_ends_with_its_block(monkeypatch):
    clock = iter((0.0, 1.0, 3.0))
    monkeypatch.setattr(limits.time, "monotonic", lambda: next(clock))
    with applied(Limits(seconds_per_study=2)):
        limits.check_time("a study")
        with refused("too-slow", "a study: not read within 2 s"):
            limits.check_time("a study")
    assert limits.current() == Limits()


@pytest.mark.filterwarnings("ignore")
def test_one_hostile_study_among_good_ones(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    images = [nifti_header((32767, 32767, 300))(tmp_path / "a"), zeros(2 << 20)(tmp_path / "b"), tmp_path / "good"]
    write_series(images[2], chest(size=(64, 64)))
    visits = [Visit("P", f"v{n}", datetime(2020, 1, n + 1), image, "Clear.", "ct") for n, image in enumerate(images)]
    config = Size(16, 4)
    done = prepare_visits(visits, config, tmp_path / "cache", workers=1)
    assert [done.errors[visit].reason for visit in visits[:2]] == ["too-large", "no-pixel-data"]
    assert len(done.errors) == 2
    tight = prepare_visits(visits, config, tmp_path / "cache2", workers=1, limits=Limits(voxels=10))
    assert tight.errors[visits[2]].reason == "too-large"
    again = prepare_visits(visits, config, tmp_path / "cache2", workers=1)  # the limit was raised
    assert visits[2] not in again.errors and isinstance(again.errors[visits[0]], DataError)
