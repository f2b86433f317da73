"""Check everything that a site would train on: open every image, and give a reason for every rejected study."""

from __future__ import annotations

import time
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedtar_flare.core.errors import ConfigError, DataError, collecting
from fedtar_flare.core.text import Progress
from fedtar_flare.data.cohort import Patient, Visit
from fedtar_flare.data.report_text import find_identifiers
from fedtar_flare.data.sources.reading import Reading
from fedtar_flare.imaging.limits import Limits, applied
from fedtar_flare.reporting.render import png_address

if TYPE_CHECKING:
    from fedtar_flare.imaging.readers.volume import CTVolume, Note

THUMBNAIL_SIZE = 160
THUMBNAIL_SLICES = 3
EXAMPLES = 3  # rejected studies that are listed for each reason
ONE_ID = "If they are one person, give all rows one patient_id"
SHARED_HELP = (
    f"{ONE_ID}; if a picture was filed under the wrong patient, remove that row. Until then they are in one split of "
    "every run"
)


class Thumbnail(NamedTuple):
    """A study in small: PNG pictures as data addresses, from feet to head, or the one radiograph."""

    visit_id: str
    day: str
    pictures: tuple[str, ...]


@dataclass
class Check:
    """What :func:`check` found at the site ``source``."""

    source: str
    modality: str = ""  # of the usable visits; empty when nothing can be used
    patients: list[Patient] = field(default_factory=list)  # with their usable visits only
    rejected: dict[str, list[str]] = field(default_factory=dict)  # a text for each unusable study, by reason
    excluded: int = 0  # visits of patients on the site's exclusion list; their images are not opened
    notes: dict[str, list[str]] = field(default_factory=dict)  # by reason, about usable images and patients' ids
    shapes: list[tuple[int, ...]] = field(default_factory=list)  # (slices, rows, columns); a picture has one slice
    spacings: list[tuple[float, ...]] = field(default_factory=list)  # mm between slices, rows and columns of each CT
    identifiers: dict[str, list[str]] = field(default_factory=dict)  # ids of visits, by kind of likely identifier
    shared: list[tuple[Visit, Visit]] = field(default_factory=list)  # of different patients with the same picture
    thumbnails: list[Thumbnail] = field(default_factory=list)
    seconds: float = 0.0  # that reading the images took
    images: int = 0  # that were opened

    @property
    def visits(self) -> list[Visit]:
        """All usable visits."""
        return [visit for patient in self.patients for visit in patient.visits]

    @property
    def visits_per_patient(self) -> list[int]:
        """Number of usable visits of each patient."""
        return [len(patient.visits) for patient in self.patients]

    @property
    def gaps(self) -> list[float]:
        """Days from each visit to the next of the same patient."""
        pairs = [pair for patient in self.patients for pair in pairwise(patient.visits)]
        return [(after.acquired - before.acquired).total_seconds() / 86400 for before, after in pairs]

    @property
    def sexes(self) -> dict[str, int]:
        """Patients by sex."""
        counts = Counter(patient.sex or "unknown" for patient in self.patients)
        return {sex: counts[sex] for sex in ("F", "M", "unknown")}

    @property
    def ages(self) -> list[float]:
        """Years at each visit, where known."""
        return [visit.age for visit in self.visits if visit.age is not None]

    @property
    def words(self) -> list[int]:
        """Length of each report in words."""
        return [len(visit.report.split()) for visit in self.visits]

    @property
    def rejections(self) -> dict[str, int]:
        """Number of rejected studies by reason, the commonest first."""
        order = sorted(self.rejected, key=lambda reason: (-len(self.rejected[reason]), reason))
        return {reason: len(self.rejected[reason]) for reason in order}

    @property
    def shared_texts(self) -> list[str]:
        """A text for each two patients who share pictures, with their number and the first of them."""
        by_patients: dict[tuple[str, str], list[str]] = {}
        for pair in self.shared:
            visits = " and ".join(f"{visit.visit_id} ({visit.acquired:%Y-%m-%d})" for visit in pair)
            by_patients.setdefault((pair[0].patient_id, pair[1].patient_id), []).append(visits)
        return [f"{a} and {b}: {len(texts)} picture(s), {texts[0]}" for (a, b), texts in by_patients.items()]

    def summary(self) -> dict[str, Any]:
        """Summarise in numbers; only the examples (rejected studies, shared pictures) hold an identity."""
        return {
            "source": self.source,
            "modality": self.modality or None,
            "patients": len(self.patients),
            "visits": len(self.visits),
            "visits_per_patient": {str(n): k for n, k in sorted(Counter(self.visits_per_patient).items())},
            "gap_days": spread(self.gaps),
            "sex": self.sexes,
            "age": spread(self.ages) | {"unknown": len(self.visits) - len(self.ages)},
            "report_words": spread(self.words),
            "slices": spread([shape[0] for shape in self.shapes]) if self.modality == "ct" else None,
            "slice_spacing_mm": spread([spacing[0] for spacing in self.spacings]) if self.modality == "ct" else None,
            "rejected": self.rejections,
            "examples": {reason: texts[:EXAMPLES] for reason, texts in self.rejected.items()},
            "excluded": self.excluded,
            "notes": {reason: len(texts) for reason, texts in sorted(self.notes.items())},
            "shared_pictures": {
                "pairs": len(self.shared),
                "patients": len({visit.patient_id for pair in self.shared for visit in pair}),
                "examples": self.shared_texts,  # all: each needs a decision
            },
            "likely_identifiers": {kind: len(visits) for kind, visits in sorted(self.identifiers.items())},
            "images_opened": self.images,
            "seconds": round(self.seconds, 2),
        }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Number of values, extremes and quartiles; the number alone where it is 0."""
    if not values:
        return {"n": 0}
    names = ("min", "lower_quartile", "median", "upper_quartile", "max")
    points = np.percentile(np.asarray(values, float), (0, 25, 50, 75, 100))
    return {"n": len(values), **{name: round(float(point), 3) for name, point in zip(names, points, strict=True)}}


def check(target: Path, *, workers: int = 1, thumbnails: int = 24, say: Any = None, every: float = 15.0) -> Check:
    """Read all that a site would train on: every row, and every image."""
    from fedtar_flare.imaging.pipeline import shared_pictures
    from fedtar_flare.imaging.workers import each
    from fedtar_flare.site.cohort import ids_of

    reading, excluded, limits = read_target(target)
    result = Check(str(target))
    try:
        patients = reading.patients()
    except DataError:  # nothing is left: the problems say why
        patients = []
    for problem in reading.problems:
        result.rejected.setdefault(problem.reason, []).append(str(problem))
    result.excluded = sum(len(patient.visits) for patient in patients if excluded & ids_of(patient.patient_id))
    patients = [patient for patient in patients if not excluded & ids_of(patient.patient_id)]
    visits = sorted((v for p in patients for v in p.visits), key=lambda v: (v.acquired, v.visit_id))
    shown = {round(i) for i in np.linspace(0, len(visits) - 1, max(0, min(thumbnails, len(visits))))}
    items = []
    for i, v in enumerate(visits):
        paths = {"image": str(v.image), "lateral": str(v.lateral or "")}
        items.append({**paths, "modality": v.modality, "thumbnail": i in shown, "limits": limits})
    progress = Progress("image", len(items), say or (lambda line: None), every)
    start, outcomes = time.monotonic(), dict[int, Any]()
    for i, outcome in each(check_task, items, workers, limits.seconds_per_study):
        outcomes[i] = outcome
        progress(len(outcomes))
    result.seconds, result.images = time.monotonic() - start, len(items)
    opened: dict[int, np.ndarray] = {}  # miniatures by the identity of the visit
    for i, visit in enumerate(visits):
        outcome, day = outcomes[i], f"{visit.acquired:%Y-%m-%d}"
        if isinstance(outcome, DataError):
            result.rejected.setdefault(outcome.reason, []).append(f"{visit.visit_id} ({day}): {outcome}")
            continue
        opened[id(visit)] = outcome.small
        result.shapes.append(outcome.shape)
        result.spacings += [outcome.spacing_mm] if outcome.spacing_mm else []
        for reason, text in outcome.notes:
            result.notes.setdefault(reason, []).append(f"{visit.visit_id} ({day}): {text}")
        if outcome.pictures:
            result.thumbnails.append(Thumbnail(visit.visit_id, day, tuple(outcome.pictures)))
    for patient in patients:
        usable_visits = tuple(visit for visit in patient.visits if id(visit) in opened)
        if usable_visits:
            result.patients.append(Patient(patient.patient_id, patient.sex, usable_visits))
    kinds = Counter(visit.modality for visit in result.visits)
    result.modality = kinds.most_common(1)[0][0] if kinds else ""
    forms: dict[str, list[str]] = defaultdict(list)
    for patient in result.patients:
        plain_id = unicodedata.normalize("NFKC", patient.patient_id.casefold()).removesuffix(".0")
        forms["".join(filter(str.isalnum, plain_id)).lstrip("0")].append(patient.patient_id)
    for ids in (ids for ids in forms.values() if len(ids) > 1):
        text = f"{' and '.join(ids)}: alike but for zeros, case or signs. {ONE_ID}"
        result.notes.setdefault("similar-ids", []).append(text)
    usable = result.visits
    pairs = shared_pictures([opened[id(visit)] for visit in usable], [visit.patient_id for visit in usable])
    result.shared = [(usable[i], usable[j]) for i, j in pairs]
    for visit in usable:
        for name in sorted({name for name, _ in find_identifiers(visit.report)}):
            result.identifiers.setdefault(name, []).append(visit.visit_id)
    return result


def read_target(target: Path) -> tuple[Reading, frozenset[str], Limits]:
    """Studies of a manifest or site file, patients that the site excludes, and its limits; ConfigError for others."""
    from fedtar_flare.data.sources import read_source
    from fedtar_flare.data.sources.manifest import read_manifest
    from fedtar_flare.site.cohort import excluded_patients
    from fedtar_flare.site.site_file import read_site_file

    if target.suffix.lower() in (".yaml", ".yml"):
        config = read_site_file(target, for_jobs=False)
        if config.source == "synthetic":
            raise ConfigError(f"{target}: a synthetic site has no data to check")
        assert config.path is not None  # a SiteConfig of these sources has one
        return read_source(config.source, config.path, config.options), excluded_patients(config), config.limits
    if target.is_dir() and not (target / "manifest.csv").is_file():
        raise ConfigError(f"{target} holds no manifest.csv: make one by 'fedtar data index {target} -o manifest.csv'")
    return read_manifest(target), frozenset(), Limits()


def included(target: Path) -> tuple[list[Patient], Limits]:
    """Patients of a manifest or site file whom the site does not exclude, and the limits of their images."""
    from fedtar_flare.site.cohort import ids_of

    reading, excluded, limits = read_target(target)
    return [patient for patient in reading.patients() if not excluded & ids_of(patient.patient_id)], limits


class Opened(NamedTuple):
    """Properties of an image that was read."""

    shape: tuple[int, ...]
    spacing_mm: tuple[float, ...]  # of a CT
    notes: Sequence[Note]
    pictures: Sequence[str]  # as data addresses
    small: np.ndarray  # its miniature


def check_task(image: str, modality: str, thumbnail: bool, limits: Limits, lateral: str) -> Opened:
    """Open one image through its reader, within these limits (a worker's task); raises what the reader raises.

    A lateral view that cannot be read is a note; ``lateral`` is empty where there is none.
    """
    from fedtar_flare.imaging.pipeline import miniature
    from fedtar_flare.imaging.readers.ct import read_ct
    from fedtar_flare.imaging.readers.pictures import read_photograph, read_radiograph
    from fedtar_flare.imaging.readers.volume import Note

    with applied(limits):
        if modality == "ct":
            volume = read_ct(image)
            slices = _slices(volume)
            pictures = [png_address(plane, THUMBNAIL_SIZE) for plane in slices] if thumbnail else []
            return Opened(volume.hu.shape, volume.spacing_mm, volume.warnings, pictures, miniature(slices))
        pixels = read_radiograph(image) if modality == "radiograph" else read_photograph(image).transpose(1, 2, 0)
        plane = pixels if pixels.ndim == 2 else pixels[..., 0]
        pictures = [png_address(pixels, THUMBNAIL_SIZE)] if thumbnail else []
        problems: list[DataError] = []
        with collecting(problems):
            if lateral:
                read_radiograph(lateral, "lateral")
        notes = [Note("bad-lateral", f"{p.reason}: {p}; 'model.lateral' leaves the study out") for p in problems]
        return Opened((1, *plane.shape), (), notes, pictures, miniature([plane]))


def _slices(volume: CTVolume) -> list[np.ndarray]:
    """Slices as in the model input: over the lungs, in the lung window."""
    import torch
    from monai.data import MetaTensor
    from monai.transforms import Compose

    from fedtar_flare.imaging.pipeline import Size
    from fedtar_flare.imaging.transforms import preparation

    hu = MetaTensor(torch.from_numpy(volume.hu).permute(2, 1, 0), affine=torch.from_numpy(volume.affine))
    after_reading = Compose(preparation("ct", Size(THUMBNAIL_SIZE, THUMBNAIL_SLICES)).transforms[1:])
    prepared: Mapping[str, Any] = after_reading({"image": hu})
    return [np.asarray(picture) for picture in prepared["image"][:, 0]]
