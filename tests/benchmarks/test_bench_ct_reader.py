"""Reading a CT of 512 x 512 x 300, and turning it into model input, beside SimpleITK and MONAI on the same files.

``pytest tests/benchmarks/test_bench_ct_reader.py -m benchmark -s``
"""

from __future__ import annotations

import sys
import time
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from fedtar_flare.data.pipeline import InputConfig, ct_pipeline, prepare
from fedtar_flare.data.readers.ct import read_ct
from fedtar_flare.data.types import Visit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "data"))
from make_dicom import write_series

pytestmark = pytest.mark.benchmark


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ct") / "study"
    y, x = np.mgrid[:512, :512] / 511 * 2 - 1
    plane = np.where((x / 0.9) ** 2 + (y / 0.7) ** 2 < 1, 40, -1000)
    lungs = np.where(((abs(x) - 0.4) / 0.3) ** 2 + (y / 0.45) ** 2 < 1, -850, plane)
    noise = np.random.default_rng(0).integers(-20, 20, (300, 512, 512), dtype=np.int16)
    hu = np.stack([lungs if 40 <= z < 260 else plane for z in range(300)]).astype(np.int16) + noise

    def number(ds, i):
        ds.InstanceNumber = i + 1

    write_series(folder, hu, edit=number, spacing=(1.0, 0.7, 0.7))
    return folder


def best_of(n, function):
    times = []
    for _ in range(n):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def test_reading(study):
    sitk = pytest.importorskip("SimpleITK")
    from monai.data import PydicomReader

    def simpleitk():
        reader = sitk.ImageSeriesReader()
        reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(study)))
        return sitk.GetArrayFromImage(reader.Execute())

    def monai():
        reader = PydicomReader()
        return reader.get_data(reader.read(str(study)))

    assert np.array_equal(read_ct(study).hu, simpleitk())
    for name, function, n in (("read_ct", lambda: read_ct(study), 5), ("SimpleITK", simpleitk, 3), ("MONAI", monai, 2)):
        print(f"\n{name:10s} {best_of(n, function):6.2f} s", end="")


def test_model_input(study, tmp_path):
    from monai.transforms import Compose, LoadImaged, Orientationd, ScaleIntensityRanged, Spacingd

    config = InputConfig(image_size=224, slices=24)
    ours = ct_pipeline(config)
    chain = Compose(
        [
            LoadImaged("image", ensure_channel_first=True, reader="PydicomReader"),
            Orientationd("image", "RAS", labels=None),
            Spacingd("image", (0.75, 0.75, 1.5)),
            ScaleIntensityRanged("image", -1000, 1000, -1, 1, clip=True),
        ]
    )
    visit = Visit("p", "v", datetime(2020, 1, 1), study, "Clear.", "ct")
    prepare(visit, config, tmp_path)
    for name, function, n in (
        ("ct_pipeline", lambda: ours({"image": str(study)}), 5),
        ("from the cache", lambda: np.array(prepare(visit, config, tmp_path).image), 5),
        ("MONAI chain with Spacingd", lambda: chain({"image": str(study)}), 1),
    ):
        print(f"\n{name:26s} {best_of(n, function):7.3f} s", end="")
