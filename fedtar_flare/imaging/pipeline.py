"""From a study on disk to model input, and its cached result; the same as MONAI pipelines, for other programs.

Training calls :func:`prepare_cohort` once per task, then :func:`images_of` for each batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from fedtar_flare.data.cohort import Cohort, Modality, Sample, Visit
from fedtar_flare.data.sources.reading import log_left_out
from fedtar_flare.errors import DataError
from fedtar_flare.imaging import cache
from fedtar_flare.imaging.cache import Prepared
from fedtar_flare.imaging.limits import Limits, applied
from fedtar_flare.imaging.planes import HUWindows, as_slice, lung_slices, to_square
from fedtar_flare.imaging.readers.ct import read_ct
from fedtar_flare.imaging.readers.pictures import read_photograph
from fedtar_flare.imaging.readers.radiograph import read_radiograph
from fedtar_flare.progress import EVERY_SECONDS, Progress
from fedtar_flare.settings import Settings

if TYPE_CHECKING:
    from monai.transforms import Compose

logger = logging.getLogger(__name__)
NOT_REMEMBERED = {"no-image", "no-permission", "unsupported-transfer-syntax", "too-large", "too-slow"}
"""Refusals that a mounted disk, a permission, an installed decoder or a higher limit cures; the files stay the same."""


Window = tuple[float, Annotated[float, Field(gt=0)]]


class InputConfig(Settings):
    """What the encoder sees."""

    image_size: int = Field(64, ge=8, description="height and width of a slice or radiograph, pixels")
    slices: int = Field(16, ge=1, description="S, slices of a CT volume; a radiograph has one")
    windows: tuple[Window, Window, Window] = Field(
        ((-600.0, 1500.0), (40.0, 400.0), (400.0, 1800.0)),
        description="(level, width) in HU of the three channels: lung, mediastinum, bone",
    )


def ct_pipeline(config: InputConfig) -> Compose:
    """``{"image": path}`` to ``{"image": uint8 (S, 3, H, W), "position_mm": float32 (S,), ...}`` for CT."""
    from monai.transforms import Compose, LoadImaged

    from fedtar_flare.imaging.readers.monai_readers import CTSeriesReader

    reader: Any = CTSeriesReader(as_tensor=True)
    return Compose([LoadImaged("image", reader, np.int16, ensure_channel_first=True), *ct_steps(config)])


def ct_steps(config: InputConfig) -> list[Callable[[Any], Any]]:
    """The steps of :func:`ct_pipeline` after the reader, for a ``MetaTensor`` in memory."""
    from fedtar_flare.imaging.transforms import HUWindowsd, LungSlicesd, SquareResized

    return [
        LungSlicesd("image", config.slices),
        HUWindowsd("image", config.windows),
        SquareResized("image", config.image_size),
    ]


def radiograph_pipeline(config: InputConfig) -> Compose:
    """The same for radiographs: S = 1, three equal channels, position 0."""
    from fedtar_flare.imaging.readers.monai_readers import RadiographReader

    return _picture_pipeline(RadiographReader(), config)


def photograph_pipeline(config: InputConfig) -> Compose:
    """The same for photographs: S = 1, red, green and blue, position 0."""
    from fedtar_flare.imaging.readers.monai_readers import PhotographReader

    return _picture_pipeline(PhotographReader(), config)


def _picture_pipeline(reader: Any, config: InputConfig) -> Compose:
    from monai.transforms import Compose, LoadImaged

    from fedtar_flare.imaging.transforms import PictureToSliced, SquareResized

    load = LoadImaged("image", reader, np.uint8, ensure_channel_first=True)
    return Compose([load, SquareResized("image", config.image_size), PictureToSliced("image")])


def prepare(visit: Visit, config: InputConfig, cache_dir: Path) -> Prepared:
    """Model input of a single visit, from the cache or computed and stored there.

    MONAI is not imported, nor pydicom on a cache hit. Several processes may prepare the same visit at once. Raises
    :class:`DataError` when the study cannot be used; its ``reason`` says why.
    """
    entry = entry_of(visit, config, cache_dir)
    return _look_up(entry) or _compute(visit.image, visit.modality, config, entry)


@dataclass(frozen=True)
class Preparation:
    """The outcome of preparing visits."""

    entries: dict[Visit, Path]  # of every visit whose files exist
    errors: dict[Visit, DataError]
    computed: int  # images prepared just now; the others were cached

    def cohort(self, cohort: Cohort) -> Cohort:
        """The cohort with its cache entries, without the visits that cannot be read.

        Those are counted by reason and keep their place in time. Raises :class:`DataError` ``no-patient`` when nothing
        is left.
        """
        reasons = {visit: error.reason for visit, error in self.errors.items()}
        return cohort.leaving_out(reasons.get, prepared=self.entries)


def prepare_visits(
    visits: Sequence[Visit],
    config: InputConfig,
    cache_dir: Path,
    *,
    limits: Limits | None = None,
    workers: int | None = None,
    say: Callable[[str], object] = logger.info,
    every: float = EVERY_SECONDS,
) -> Preparation:
    """Prepare every visit; all are of one modality.

    Earlier results and refusals are only looked up. The rest is computed in parallel processes when it takes long; the
    result does not depend on their number. Each worker holds one volume at a time.

    Args:
        limits: beyond which a study is refused; None: the defaults.
        workers: processes; None: one per processor, at most four.
        say: takes the lines of progress (rate and time left).
        every: seconds between those lines.
    """
    from fedtar_flare.imaging.workers import each, worker_count

    count = worker_count(workers)
    entries: dict[Visit, Path] = {}
    errors: dict[Visit, DataError] = {}
    missing: list[Visit] = []
    for visit in visits:
        try:
            entries[visit] = entry_of(visit, config, cache_dir)
            if _look_up(entries[visit]) is None:
                missing.append(visit)
        except DataError as error:
            errors[visit] = error
    limits = limits or Limits()
    common = {"config": config.to_dict(), "limits": limits.to_dict()}
    items = [{"image": str(v.image), "modality": v.modality, "entry": str(entries[v]), **common} for v in missing]
    progress = Progress("preparing images: study", len(items), say, every)
    for done, (i, outcome) in enumerate(each(prepare_task, items, count, limits.seconds_per_study), start=1):
        if isinstance(outcome, DataError):
            errors[missing[i]] = outcome
        progress(done)
    log_left_out([errors[visit] for visit in visits if visit in errors])
    return Preparation(entries, errors, sum(visit not in errors for visit in missing))


def prepare_cohort(cohort: Cohort, config: InputConfig, cache_dir: Path) -> Cohort:
    """The cohort with every visit prepared; raises :class:`DataError` ``no-patient`` when nothing is left."""
    return prepare_visits(cohort.visits, config, cache_dir).cohort(cohort)


def images_of(samples: Sequence[Sample]) -> list[Prepared]:
    """Model input of samples of a prepared cohort, from the cache alone, never from a source file.

    Raises :class:`DataError` ``not-prepared`` when the cohort did not come from :func:`prepare_cohort`, or when an
    entry is gone or damaged; the next task prepares it again.
    """
    images = []
    for sample in samples:
        found = cache.load(sample.prepared) if sample.prepared is not None else None
        if found is None:
            where = f"patient {sample.visit.patient_id}, visit {sample.visit.visit_id}"
            gone = f"{sample.prepared} is gone or damaged; run the task again" if sample.prepared else "not prepared"
            raise DataError(f"{where}: the prepared image: {gone}", reason="not-prepared")
        images.append(found)
    return images


def entry_of(visit: Visit, config: InputConfig, cache_dir: Path) -> Path:
    """The cache entry of a visit, existing or not; raises :class:`DataError` ``no-image`` when its files are gone."""
    settings = {"modality": visit.modality, **config.to_dict()}
    if visit.modality != "ct":
        settings = {"modality": visit.modality, "image_size": config.image_size}
    return cache.entry_path(cache_dir, cache.file_identity(visit.image), settings)


def prepare_task(image: str, modality: Modality, config: dict[str, Any], entry: str, limits: dict[str, Any]) -> bool:
    """Prepare one image into the cache (a worker's task); raises what :func:`prepare` raises."""
    if cache.load(Path(entry)) is None:  # another site may have been first
        with applied(Limits(**limits)):
            _compute(Path(image), modality, InputConfig(**config), Path(entry))
    return True


def _look_up(entry: Path) -> Prepared | None:
    """The cached image, or None; raises a remembered refusal."""
    if (found := cache.load(entry)) is None and (refusal := cache.load_refusal(entry)) is not None:
        raise refusal
    return found


def _compute(image: Path, modality: Modality, config: InputConfig, entry: Path) -> Prepared:
    try:
        picture, position = _run(image, modality, config)
    except DataError as error:
        if error.reason not in NOT_REMEMBERED:
            cache.store_refusal(entry, error)
        raise
    picture, position = np.ascontiguousarray(picture, np.uint8), np.ascontiguousarray(position, np.float32)
    cache.store(entry, picture, position)
    return cache.load(entry) or Prepared(picture, position)  # a full disk or a lost mount must not stop the run


def _run(image: Path, modality: Modality, config: InputConfig) -> tuple[np.ndarray, np.ndarray]:
    """Picture and positions of a study: what the pipeline of its modality gives, without MONAI."""
    if modality != "ct":
        pixels = read_radiograph(image)[None] if modality == "radiograph" else read_photograph(image)
        return as_slice(to_square(pixels, config.image_size)), np.zeros(1, np.float32)
    volume = read_ct(image)
    for note in volume.warnings:
        logger.warning("%s: %s: %s", image, note.reason, note.text)
    hu, position_mm, pixel_mm = lung_slices(volume.hu.transpose(2, 1, 0), volume.affine, config.slices)
    return to_square(_windows(config.windows)(hu), config.image_size, pixel_mm), position_mm


_windows = lru_cache(maxsize=4)(HUWindows)
