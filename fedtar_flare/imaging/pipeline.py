"""Prepared images of a site's studies: looked up in the cache, or made by the ``Compose`` of :mod:`.transforms`.

Training calls :func:`prepare_visits` once per task, then :func:`images_of` for each batch. MONAI and the limits are
imported only where an image has to be made.

Pictures of several patients are found by small versions. Copies of a radiograph or CT (compressed again, resized, in
another window) correlate above :data:`SAME`; images of two people did not. ``docs/reference/image-readers.md`` has the
figures, and says why it is no perceptual hash.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedtar_flare.core.errors import DataError
from fedtar_flare.core.text import EVERY_SECONDS, Progress
from fedtar_flare.data.cells import linked
from fedtar_flare.data.cohort import Cohort, Modality, Sample, Visit
from fedtar_flare.data.sources.reading import log_left_out
from fedtar_flare.imaging import cache
from fedtar_flare.imaging.cache import Prepared
from fedtar_flare.imaging.transform_list import Spec, deterministic

if TYPE_CHECKING:
    from fedtar_flare.imaging.limits import Limits
    from fedtar_flare.imaging.transforms import InputSize

logger = logging.getLogger(__name__)
SIDE = 32  # rows and columns of a small version
SLICES = 3  # slices of a CT that are compared, evenly spaced
SAME = 0.98  # rank correlation from which two small versions show the same picture
BLOCK = 256  # images compared with all others at once
NOT_REMEMBERED = (
    "no-image", "no-permission", "unsupported-transfer-syntax", "too-large", "too-slow", "transform-failed"
)  # fmt: skip
"""Refusals that a mounted disk, a permission, an installed library or a higher limit cures; the files stay the same."""


class Size(NamedTuple):
    """Size of a model's input, for use without a model's settings: pixels of a side, slices of a CT volume."""

    image_size: int
    slices: int
    lateral: bool = False  # of a radiograph, the lateral view too


def prepare(visit: Visit, size: InputSize, cache_dir: Path, transforms: Sequence[Spec] = ()) -> Prepared:
    """Prepare one visit's image, or look it up; several processes may do so at once."""
    entry = entry_of(visit, size, cache_dir, transforms)
    if (prepared := cache.load(entry)) is not None:
        return prepared
    if (refusal := cache.load_refusal(entry)) is not None:
        raise refusal
    return _compute(visit.image, _lateral(visit, size), visit.modality, size, transforms, entry)


@dataclass(frozen=True)
class Preparation:
    """The outcome of :func:`prepare_visits`; patients who share a picture are found by the entries ``compared``."""

    entries: dict[Visit, Path]  # the cache entry of every visit whose files exist
    errors: dict[Visit, DataError]  # why visits cannot be used
    computed: int  # images prepared just now; the others were cached
    compared: dict[Visit, Path]
    refused_by_job: frozenset[str] = frozenset()  # patients with an image that the job's transforms alone cannot take

    def cohort(self, cohort: Cohort, without: Mapping[Visit, str] | None = None) -> Cohort:
        """Give a cohort its cache entries, and put patients who share a picture into one split."""
        reasons, usable = dict(without or {}), []
        for visit, error in self.errors.items():
            reasons[visit] = error.reason
        for visit, entry in self.compared.items():
            if visit not in reasons:
                usable.append((visit.patient_id, entry))
        return cohort.leaving_out(reasons.get, prepared=self.entries, linked=linked_patients(tuple(usable)))


def prepare_visits(
    visits: Sequence[Visit],
    size: InputSize,
    cache_dir: Path,
    transforms: Sequence[Spec] = (),
    *,
    limits: Limits | None = None,
    workers: int | None = None,
    sites: int = 1,
    say: Callable[[str], object] = logger.info,
    every: float = EVERY_SECONDS,
) -> Preparation:
    """Prepare every visit that is not in the cache, by ``workers`` (default: those that fit, shared by ``sites``)."""
    entries: dict[Visit, Path] = {}
    errors: dict[Visit, DataError] = {}
    missing: list[Visit] = []
    for visit in visits:
        try:
            entries[visit] = entry_of(visit, size, cache_dir, transforms)
            if cache.load(entries[visit]) is None:
                if (refusal := cache.load_refusal(entries[visit])) is not None:
                    raise refusal
                missing.append(visit)
        except DataError as error:
            errors[visit] = error
    computed, added = 0, deterministic(transforms)
    if missing:
        from fedtar_flare.imaging.limits import Limits
        from fedtar_flare.imaging.workers import each, worker_count

        limits = limits or Limits()
        if added:
            from fedtar_flare.imaging.transforms import preparation

            preparation(missing[0].modality, size, added)  # refused once, not for each study
        common = {"size": Size(size.image_size, size.slices), "transforms": added, "limits": limits}
        items = []
        for v in missing:
            study = {"image": v.image, "lateral": _lateral(v, size), "modality": v.modality, "entry": entries[v]}
            items.append(study | common)
        progress, count = Progress("preparing images: study", len(items), say, every), worker_count(workers, sites)
        for done, (i, outcome) in enumerate(each(prepare_task, items, count, limits.seconds_per_study), start=1):
            if not isinstance(outcome, DataError):
                computed += 1
            elif outcome.reason in cache.NOT_WRITTEN:
                raise outcome
            else:
                errors[missing[i]] = outcome
            progress(done)
    if errors:
        log_left_out([errors[visit] for visit in visits if visit in errors])
    compared, by_job = entries, frozenset[str]()
    coarse = size.image_size < SIDE or (size.slices < SLICES and any(visit.modality == "ct" for visit in visits))
    if added or coarse or getattr(size, "lateral", False):  # a job's choices must not decide whose pictures are alike
        fine = Size(max(SIDE, size.image_size), max(SLICES, size.slices))
        options: dict[str, Any] = {"limits": limits, "workers": workers, "sites": sites, "say": say, "every": every}
        plain = prepare_visits(visits, fine, cache_dir, **options)
        compared, by_job = plain.entries, frozenset(v.patient_id for v in errors.keys() - plain.errors.keys())
    return Preparation(entries, errors, computed, compared, by_job)


def prepare_cohort(cohort: Cohort, size: InputSize, cache_dir: Path, transforms: Sequence[Spec] = ()) -> Cohort:
    """Prepare every visit of a cohort."""
    return prepare_visits(cohort.visits, size, cache_dir, transforms).cohort(cohort)


def images_of(samples: Sequence[Sample]) -> list[Prepared]:
    """Load the images of a prepared cohort's samples; source files are never read."""
    images = []
    for sample in samples:
        image = cache.load(sample.prepared) if sample.prepared is not None else None
        if image is None:
            where = f"patient {sample.visit.patient_id}, visit {sample.visit.visit_id}"
            gone = f"{sample.prepared} is gone or damaged; run the task again" if sample.prepared else "not prepared"
            raise DataError(f"{where}: the prepared image: {gone}", reason="not-prepared")
        images.append(image)
    return images


def entry_of(visit: Visit, size: InputSize, cache_dir: Path, transforms: Sequence[Spec] = ()) -> Path:
    """The cache entry of a visit, existing or not; raises :class:`DataError` ``no-image`` when its files are gone."""
    settings: dict[str, Any] = {"modality": visit.modality, "image_size": size.image_size}
    if visit.modality == "ct":
        settings["slices"] = size.slices
    if visit.lateral and (lateral := _lateral(visit, size)):
        settings["lateral"] = cache.file_identity(lateral)
    if added := deterministic(transforms):
        settings["transforms"] = [dict(spec) for spec in added]
    return cache.entry_path(cache_dir, cache.file_identity(visit.image), settings)


def _lateral(visit: Visit, size: InputSize) -> Path | None:
    """The lateral view of a study, where it has one and the model is shown it (``ModelConfig.lateral``)."""
    return visit.lateral if getattr(size, "lateral", False) else None


def prepare_task(
    image: Path,
    lateral: Path | None,
    modality: Modality,
    size: InputSize,
    transforms: Sequence[Spec],
    entry: Path,
    limits: Limits,
) -> None:
    """Prepare one image into the cache, in a worker; raises as :func:`prepare`."""
    from fedtar_flare.imaging.limits import applied

    if cache.load(entry) is None:  # another site may have been first
        with applied(limits):
            _compute(image, lateral, modality, size, transforms, entry)


def _compute(
    image: Path, lateral: Path | None, modality: Modality, size: InputSize, transforms: Sequence[Spec], entry: Path
) -> Prepared:
    """Read and transform a study, and store the result or the refusal."""
    from fedtar_flare.imaging.transforms import preparation

    compose = preparation(modality, size, transforms)
    views = {"frontal": image} if lateral is None else {"frontal": image, "lateral": lateral}
    made: list[Any] = []
    try:
        for view, file in views.items():
            try:
                made.append(compose({"image": str(file), "view": view}))
            except RuntimeError as error:  # the Compose wraps errors of its transforms
                cause: BaseException = error
                while not isinstance(cause, DataError | MemoryError) and cause.__cause__ is not None:
                    cause = cause.__cause__
                if deterministic(transforms) and not isinstance(cause, DataError | MemoryError):
                    text = f"{file}: one of data.transforms cannot be applied: {cause}"
                    raise DataError(text, reason="transform-failed") from error
                raise cause  # noqa: B904 - the error itself
    except DataError as error:
        if error.reason not in NOT_REMEMBERED:
            cache.store_refusal(entry, error)
        raise
    pixels, position_mm = (np.concatenate([item[key] for item in made]) for key in ("image", "position_mm"))
    cache.store(entry, pixels, position_mm)
    return cache.load(entry) or Prepared(pixels, position_mm)  # a mount may be lost meanwhile


def miniature(planes: Sequence[np.ndarray]) -> np.ndarray:
    """Rank the grey values of an image's slices (uint8 (H, W)), which windows and gamma curves hardly change."""
    from PIL import Image, ImageOps

    chosen = np.unique(np.linspace(0, len(planes) - 1, SLICES + 2)[1:-1].round().astype(int))
    fine = (8 * SIDE, 8 * SIDE)  # first: at the coarse size the black margins of a copy could differ by a row
    small = [ImageOps.pad(Image.fromarray(planes[i]), fine, Image.Resampling.BOX).reduce(8) for i in chosen]
    values = np.asarray(small).ravel()
    counts = np.bincount(values, minlength=256)
    ranks = (np.cumsum(counts) - counts / 2)[values] - len(values) / 2
    return (ranks / max(float(np.linalg.norm(ranks)), 1e-6)).astype(np.float32)


def shared_pictures(miniatures: Sequence[np.ndarray], patients: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Find pictures that different patients share."""
    if not miniatures:
        return
    stacked, patient = np.stack(miniatures), np.unique(patients, return_inverse=True)[1]
    for start in range(0, len(stacked), BLOCK):
        rows = slice(start, start + BLOCK)
        alike = (stacked[rows] @ stacked[start:].T > SAME) & (patient[rows, None] != patient[None, start:])
        yield from ((start + int(i), start + int(j)) for i, j in np.argwhere(np.triu(alike, 1)))


@lru_cache(maxsize=8)
def linked_patients(prepared: tuple[tuple[str, Path], ...]) -> list[set[str]]:
    """Groups of patients who share a picture, of the cache entries of their images; found once in a process."""
    patients, miniatures = [], []
    for patient, entry in prepared:
        file = cache.computed_path(entry, "miniature")
        if (small := cache.load_computed(file)) is None and (image := cache.load(entry)) is not None:
            cache.store_computed(file, small := miniature(list(image.image[:, 0])))
        if small is not None:
            patients.append(patient)
            miniatures.append(small)
    pairs = shared_pictures(miniatures, patients)
    if groups := linked((patients[i], patients[j]) for i, j in pairs):
        text = "%d patients share a picture, and so a split ('fedtar data check' names them)"
        logger.warning(text, sum(map(len, groups)))
    return groups
