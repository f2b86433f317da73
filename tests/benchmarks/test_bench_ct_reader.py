"""Reading a CT of 512 x 512 x 300, and turning it into model input, beside SimpleITK, ITK and MONAI on the same files;
what a second epoch costs, and how much memory preparation takes.

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
from fedtar_flare.imaging.pipeline import InputConfig, ct_pipeline, prepare, prepare_visits
from fedtar_flare.imaging.readers.ct import read_ct

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
    folders = iter(range(100))
    taken = {}
    for name, function, n in (
        ("ct_pipeline", lambda: ours({"image": str(study)}), 5),
        ("first epoch", lambda: prepare(visit, config, tmp_path / str(next(folders))), 5),
        ("second epoch", lambda: np.array(prepare(visit, config, tmp_path).image), 5),
        ("MONAI chain with Spacingd", lambda: chain({"image": str(study)}), 1),
    ):
        taken[name] = best_of(n, function)
        print(f"\n{name:26s} {taken[name]:7.3f} s", end="")
    ours_s, first, second, monai_s = taken.values()
    print(f"\nMONAI / ours {monai_s / ours_s:.1f}, first epoch / second epoch {first / second:.0f}", end="")


def test_a_cohort_of_long_series_by_one_and_by_two_workers(study, tmp_path):
    """A hundred studies of 300 slices; the two caches are the same."""
    config = InputConfig(image_size=224, slices=24)
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
    from fedtar_flare.imaging.pipeline import InputConfig, prepare
    from fedtar_flare.data.cohort import Cohort, Patient, Visit
    def memory(field):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024
    def run(image):
        visit = Visit("p", "v", datetime(2020, 1, 1), Path(image), "Clear.", "ct")
        prepare(visit, InputConfig(image_size=224, slices=24), Path(sys.argv[3]))
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
