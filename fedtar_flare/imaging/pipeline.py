"""Prepared images of a site's studies: looked up in the cache, or made by the ``Compose`` of :mod:`.transforms`.

Training calls :func:`prepare_cohort` once per task, then :func:`images_of` for each batch. MONAI is imported where an
image has to be made, and nowhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedtar_flare.core.errors import DataError
from fedtar_flare.core.progress import EVERY_SECONDS, Progress
from fedtar_flare.data.cohort import Cohort, Modality, Sample, Visit
from fedtar_flare.data.sources.reading import log_left_out
from fedtar_flare.imaging import cache
from fedtar_flare.imaging.cache import Prepared
from fedtar_flare.imaging.duplicates import SIDE, SLICES, linked_patients
from fedtar_flare.imaging.limits import Limits, applied
from fedtar_flare.imaging.transform_list import Spec, deterministic

if TYPE_CHECKING:
    from fedtar_flare.imaging.transforms import InputSize

logger = logging.getLogger(__name__)
SIDES = ("frontal", "lateral")
"""Of the films of a study, in this order."""
NOT_REMEMBERED = (
    "no-image", "no-permission", "unsupported-transfer-syntax", "too-large", "too-slow", "transform-failed"
)  # fmt: skip
"""Refusals that a mounted disk, a permission, an installed library or a higher limit cures; the files stay the same."""


class Size(NamedTuple):
    """Of model input, where no model's settings are at hand."""

    image_size: int
    slices: int


def prepare(visit: Visit, size: InputSize, cache_dir: Path, transforms: Sequence[Spec] = ()) -> Prepared:
    """Model input of a single visit, from the cache or made by :func:`.transforms.preparation` and stored there.

    Several processes may prepare the same visit at once. Raises :class:`DataError` when the study cannot be used.
    """
    entry = entry_of(visit, size, cache_dir, transforms)
    return _look_up(entry) or _compute(films_of(visit, size), visit.modality, size, transforms, entry)


@dataclass(frozen=True)
class Preparation:
    """The outcome of preparing visits."""

    entries: dict[Visit, Path]  # of every visit whose files exist
    errors: dict[Visit, DataError]
    computed: int  # images prepared just now; the others were cached
    compared: dict[Visit, Path]  # entries without the job's own transforms, and not too coarse to tell who is alike

    def cohort(self, cohort: Cohort, without: Mapping[Visit, str] | None = None) -> Cohort:
        """The cohort with its cache entries, patients who share a picture in one split; visits that cannot be read, and
        those for which ``without`` gives a reason, are left out (:meth:`Cohort.leaving_out`).
        """
        reasons = dict(without or {}) | {visit: error.reason for visit, error in self.errors.items()}
        kept = tuple((v.patient_id, entry) for v, entry in self.compared.items() if v not in reasons)
        return cohort.leaving_out(reasons.get, prepared=self.entries, linked=linked_patients(kept))


def prepare_visits(
    visits: Sequence[Visit],
    size: InputSize,
    cache_dir: Path,
    transforms: Sequence[Spec] = (),
    *,
    limits: Limits | None = None,
    workers: int | None = None,
    say: Callable[[str], object] = logger.info,
    every: float = EVERY_SECONDS,
) -> Preparation:
    """Prepare every visit; all are of one modality.

    Earlier results and refusals are only looked up; the rest is computed, in ``workers`` processes when it takes long
    (by default one per processor, where there is memory), on whose number nothing depends. ``say`` takes a line of
    progress every ``every`` seconds. Raises :class:`ConfigError` as :func:`.transforms.preparation` does, and
    :class:`DataError` where the cache cannot be written (``disk-full``, ``not-writable``): a smaller cohort would be
    noticed by nobody.
    """
    from fedtar_flare.imaging.workers import each, worker_count

    count, limits = worker_count(workers), limits or Limits()
    entries: dict[Visit, Path] = {}
    errors: dict[Visit, DataError] = {}
    missing: list[Visit] = []
    for visit in visits:
        try:
            entries[visit] = entry_of(visit, size, cache_dir, transforms)
            if _look_up(entries[visit]) is None:
                missing.append(visit)
        except DataError as error:
            errors[visit] = error
    if missing and transforms:
        from fedtar_flare.imaging.transforms import preparation

        preparation(missing[0].modality, size, transforms)  # refused once, not for each study
    common = {"size": Size(size.image_size, size.slices), "transforms": deterministic(transforms), "limits": limits}
    items = [{"films": films_of(v, size), "modality": v.modality, "entry": entries[v], **common} for v in missing]
    progress = Progress("preparing images: study", len(items), say, every)
    for done, (i, outcome) in enumerate(each(prepare_task, items, count, limits.seconds_per_study), start=1):
        if isinstance(outcome, DataError):
            if outcome.reason in cache.NOT_WRITTEN:
                raise outcome
            errors[missing[i]] = outcome
        progress(done)
    log_left_out([errors[visit] for visit in visits if visit in errors])
    compared, fine = entries, Size(max(SIDE, size.image_size), max(SLICES, size.slices))
    coarse = size.image_size < SIDE or (size.slices < SLICES and any(visit.modality == "ct" for visit in visits))
    coarse = coarse or getattr(size, "lateral", False)
    if deterministic(transforms) or coarse:  # a job's choices must not decide who is alike
        compared = prepare_visits(visits, fine, cache_dir, limits=limits, workers=workers, say=say, every=every).entries
    return Preparation(entries, errors, sum(visit not in errors for visit in missing), compared)


def prepare_cohort(cohort: Cohort, size: InputSize, cache_dir: Path, transforms: Sequence[Spec] = ()) -> Cohort:
    """The cohort with every visit prepared; raises :class:`DataError` ``no-patient`` when nothing is left."""
    return prepare_visits(cohort.visits, size, cache_dir, transforms).cohort(cohort)


def images_of(samples: Sequence[Sample]) -> list[Prepared]:
    """Model input of samples of a prepared cohort, from the cache alone, never from a source file.

    Raises :class:`DataError` ``not-prepared`` without :func:`prepare_cohort`, or when an entry is gone or damaged.
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


def entry_of(visit: Visit, size: InputSize, cache_dir: Path, transforms: Sequence[Spec] = ()) -> Path:
    """The cache entry of a visit, existing or not; raises :class:`DataError` ``no-image`` when its files are gone."""
    settings: dict[str, Any] = {"modality": visit.modality, "image_size": size.image_size}
    if visit.modality == "ct":
        settings["slices"] = size.slices
    if lateral := films_of(visit, size)[1:]:
        settings["lateral"] = cache.file_identity(*lateral)
    if added := deterministic(transforms):
        settings["transforms"] = [dict(spec) for spec in added]
    return cache.entry_path(cache_dir, cache.file_identity(visit.image), settings)


def films_of(visit: Visit, size: InputSize) -> list[Path]:
    """What is read of a visit: its image, and the lateral view where a model is shown it (``ModelConfig.lateral``)."""
    return [visit.image, *([visit.lateral] if visit.lateral and getattr(size, "lateral", False) else [])]


def prepare_task(
    films: list[Path], modality: Modality, size: InputSize, transforms: Sequence[Spec], entry: Path, limits: Limits
) -> None:
    """Prepare one image into the cache (a worker's task); raises what :func:`prepare` raises."""
    if cache.load(entry) is None:  # another site may have been first
        with applied(limits):
            _compute(films, modality, size, transforms, entry)


def _look_up(entry: Path) -> Prepared | None:
    """The cached image, or None; raises a remembered refusal."""
    if (found := cache.load(entry)) is None and (refusal := cache.load_refusal(entry)) is not None:
        raise refusal
    return found


def _compute(
    films: list[Path], modality: Modality, size: InputSize, transforms: Sequence[Spec], entry: Path
) -> Prepared:
    try:
        made = [_run(film, modality, size, transforms, view) for film, view in zip(films, SIDES, strict=False)]
        picture, position_mm = map(np.concatenate, zip(*made, strict=True))
    except DataError as error:
        if error.reason not in NOT_REMEMBERED:
            cache.store_refusal(entry, error)
        raise
    cache.store(entry, picture, position_mm)
    return cache.load(entry) or Prepared(picture, position_mm)  # a mount may be lost meanwhile


def _run(
    image: Path, modality: Modality, size: InputSize, transforms: Sequence[Spec], view: str
) -> tuple[np.ndarray, np.ndarray]:
    """Picture and positions of a study, by the ``Compose``; an error is the one that it wraps."""
    from fedtar_flare.imaging.transforms import preparation

    compose = preparation(modality, size, transforms)
    try:
        made: Any = compose({"image": str(image), "view": view})
    except RuntimeError as error:
        cause: BaseException = error
        while not isinstance(cause, DataError | MemoryError) and cause.__cause__ is not None:
            cause = cause.__cause__
        if deterministic(transforms) and not isinstance(cause, DataError | MemoryError):
            text = f"{image}: one of data.transforms cannot be applied: {cause}"
            raise DataError(text, reason="transform-failed") from error
        raise cause  # noqa: B904 - the error itself
    return made["image"], made["position_mm"]
