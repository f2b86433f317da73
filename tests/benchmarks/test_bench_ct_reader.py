"""Reading a CT of 512 x 512 x 300 beside SimpleITK, ITK and MONAI on the same files, preparing a hundred of them, and
how much memory preparation takes. Model input and a second epoch: ``python -m tests.benchmarks``.

``pytest tests/benchmarks/test_bench_ct_reader.py -m benchmark -s``
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from fedtar_flare.data.cohort import Visit
from fedtar_flare.imaging.pipeline import Size, prepare_visits
from fedtar_flare.imaging.readers.ct import read_ct
from tests.benchmarks.compare_reading import write_study
from tests.make_dicom import write_series

pytestmark = pytest.mark.benchmark


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("ct") / "study")


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

    def by_itk():
        itk = pytest.importorskip("itk")
        return itk.array_view_from_image(itk.imread(reader_files, itk.SS))

    def monai():
        reader = PydicomReader()
        return reader.get_data(reader.read(str(study)))

    reader_files = list(sitk.ImageSeriesReader().GetGDCMSeriesFileNames(str(study)))
    expected = read_ct(study).hu
    assert np.array_equal(expected, simpleitk()) and np.array_equal(expected, by_itk())
    readers = (
        ("read_ct", lambda: read_ct(study), 5),
        ("SimpleITK", simpleitk, 3),
        ("ITK", by_itk, 3),
        ("MONAI", monai, 2),
    )
    for name, function, n in readers:
        print(f"\n{name:10s} {best_of(n, function):6.2f} s", end="")


def test_a_cohort_of_long_series_by_one_and_by_two_workers(study, tmp_path):
    """A hundred studies of 300 slices; the two caches are the same."""
    config = Size(224, 24)
    visits = []
    for i in range(100):
        folder = tmp_path / "studies" / f"{i}"
        folder.mkdir(parents=True)
        for file in study.iterdir():
            (folder / file.name).hardlink_to(file)
        visits.append(Visit(f"{i}", "v", datetime(2020, 1, 1), folder, "Clear.", "ct"))
    caches = []
    for workers in (1, 2):
        cache = tmp_path / f"cache-{workers}"
        seconds = best_of(
            1, lambda workers=workers, cache=cache: prepare_visits(visits, config, cache, workers=workers)
        )
        print(f"\n{workers} worker(s): {100 / seconds:.1f} studies a second", end="")
        caches.append({file.name: file.read_bytes() for file in cache.rglob("*.npy")})
    assert caches[0] == caches[1] and len(caches[0]) == 100


MEMORY = """
    import sys
    from datetime import datetime
    from pathlib import Path
    from fedtar_flare.imaging.pipeline import Size, prepare
    from fedtar_flare.data.cohort import Cohort, Patient, Visit
    def memory(field):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024
    def run(image):
        visit = Visit("p", "v", datetime(2020, 1, 1), Path(image), "Clear.", "ct")
        prepare(visit, Size(224, 24), Path(sys.argv[3]))
    run(sys.argv[1])  # what is imported and allocated once
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    run(sys.argv[2])
    print(memory("VmHWM") - before)
"""


@pytest.mark.parametrize("kind", ["DICOM", "NIfTI"])
def test_memory_of_preparation(study, tmp_path, kind):
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux' /proc")
    small = tmp_path / "small"
    write_series(small, np.tile(np.linspace(-1000, 50, 24).astype(np.int16)[:, None], (12, 1, 20)))
    image, volume = study, 300 * 512 * 512 * 2
    if kind == "NIfTI":
        import nibabel

        hu = read_ct(study)
        image = tmp_path / "v.nii.gz"
        scaled = nibabel.Nifti1Image(hu.hu.transpose(2, 1, 0), hu.affine)
        scaled.header.set_slope_inter(1, 0.5)
        nibabel.save(scaled, image)
        del hu, scaled
    arguments = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(MEMORY), small, image, tmp_path / "cache"]
    done = subprocess.run([*map(str, arguments)], capture_output=True, text=True, check=True)
    print(f"\nmemory of preparing {kind}: {int(done.stdout) / volume:.2f} volumes of int16", end="")
