"""A CT as DICOM files to model input, and its second epoch, beside MONAI's transforms and PersistentDataset."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from fedtar_flare.data.cohort import Visit
from fedtar_flare.imaging.pipeline import Size, prepare
from tests.benchmarks.result import Absent, Result, alternated
from tests.make_dicom import write_series

CONFIG = Size(224, 24)


def write_study(folder: Path, slices: int = 300, size: int = 512) -> Path:
    """A round body with two lungs and noise, uncompressed."""
    y, x = np.mgrid[:size, :size] / (size - 1) * 2 - 1
    plane = np.where((x / 0.9) ** 2 + (y / 0.7) ** 2 < 1, 40, -1000)
    lungs = np.where(((abs(x) - 0.4) / 0.3) ** 2 + (y / 0.45) ** 2 < 1, -850, plane)
    noise = np.random.default_rng(0).integers(-20, 20, (slices, size, size), dtype=np.int16)
    inside = range(int(0.13 * slices), int(0.87 * slices))
    hu = np.stack([lungs if z in inside else plane for z in range(slices)]).astype(np.int16) + noise

    def number(ds: Any, i: int) -> None:
        ds.InstanceNumber = i + 1

    write_series(folder, hu, edit=number, spacing=(1.0, 0.7, 0.7))
    return folder


def monai_chain() -> Any:
    """To one orientation, spacing and range; the slices are then still to be chosen."""
    try:
        from monai.transforms import Compose, LoadImaged, Orientationd, ScaleIntensityRanged, Spacingd
    except ImportError:
        raise Absent("MONAI is not installed") from None
    return Compose(
        [
            LoadImaged("image", ensure_channel_first=True, reader="PydicomReader"),
            Orientationd("image", "RAS", labels=None),
            Spacingd("image", (0.75, 0.75, 1.5)),
            ScaleIntensityRanged("image", -1000, 1000, -1, 1, clip=True),
        ]
    )


@contextmanager
def _study(quick: bool) -> Iterator[tuple[Path, Path, str]]:
    """The study's folder, one for results, and its size in words."""
    slices, size = (12, 64) if quick else (300, 512)
    with tempfile.TemporaryDirectory() as folder:
        yield write_study(Path(folder) / "study", slices, size), Path(folder) / "out", f"{size} x {size} x {slices}"


def model_input(quick: bool) -> Result:
    from fedtar_flare.imaging.transforms import preparation

    chain, ours = monai_chain(), preparation("ct", CONFIG)
    with _study(quick) as (study, _, size):
        seconds = alternated(
            {"ours": lambda: ours({"image": str(study)}), "theirs": lambda: chain({"image": str(study)})},
            2 if quick else 3,
        )
    return Result("model-input", f"DICOM folder of {size} to model input", "MONAI's chain with Spacingd", "s",
                  seconds["ours"], seconds["theirs"], ("at least", 20.0))  # fmt: skip


def second_epoch(quick: bool) -> Result:
    from monai.data import PersistentDataset

    chain = monai_chain()
    with _study(quick) as (study, out, size):
        visit = Visit("p", "v", datetime(2020, 1, 1), study, "Clear.", "ct")
        kept = PersistentDataset([{"image": str(study)}], chain, cache_dir=out / "monai")
        prepare(visit, CONFIG, out / "ours")
        kept[0]
        seconds = alternated(
            {"ours": lambda: np.array(prepare(visit, CONFIG, out / "ours").image), "theirs": lambda: kept[0]},
            2 if quick else 5,
        )
    return Result("second-epoch", f"the same of {size}, again", "MONAI's PersistentDataset", "s", seconds["ours"],
                  seconds["theirs"], ("at least", 1.0), "ours has chosen its slices")  # fmt: skip


COMPARISONS = {"model-input": model_input, "second-epoch": second_epoch}
