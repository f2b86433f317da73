"""A study to draft a report for: what is known of it, given or read from its DICOM header."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import ConfigError, DataError, decoding
from fedtar_flare.data.cohort import Modality, Sex, Visit
from fedtar_flare.data.sources.fields import PICTURES, age_of, date_of, sex_of
from fedtar_flare.imaging.readers.dicom_files import headers
from fedtar_flare.imaging.readers.dicom_tags import first, text_of
from fedtar_flare.learning.inputs import IMAGE, REPORT

UNKNOWN = "-"


@dataclass(frozen=True)
class Study:
    """The study to draft a report for; what is known of the patient serves the patient adapter.

    Attributes
    ----------
    image, modality : DICOM folder, file or zip, NIfTI, PNG or JPEG; ``ct``, ``radiograph`` or ``photograph``
    patient_id, sex : as the site knows the patient
    age : years at this study
    time_step : number of this visit among the patient's, from 1
    prior_image, prior_report : of the previous visit, for an adapter that was trained with it
    prior_days : days between the two visits, above 0; needed with either
    lateral, prior_lateral : lateral views of radiographs, for a model with ``ModelConfig.lateral``
    before : the previous visit, with the visit before it
    """

    image: Path
    modality: Modality
    patient_id: str | None = None
    age: float | None = None
    sex: Sex | None = None
    time_step: int | None = None
    prior_image: Path | None = None
    prior_report: str | None = None
    prior_days: float | None = None
    lateral: Path | None = None
    prior_lateral: Path | None = None
    before: "Study | None" = None

    @property
    def prior(self) -> tuple[str, ...]:
        """What is given of the previous visit: ``image``, ``report``."""
        return (IMAGE,) * (self.prior_image is not None) + (REPORT,) * (self.prior_report is not None)


def visit_of(study: Study) -> Visit:
    """The study as a visit whose report is yet to be written."""
    patient, day, about = study.patient_id or UNKNOWN, datetime(1900, 1, 1), study.modality
    return Visit(patient, UNKNOWN, day, study.image, "(to be written)", about, age=study.age, lateral=study.lateral)


def study_of(image: Path, modality: Modality | None = None, **patient: Any) -> Study:
    """Describe a study on disk; fields that are not given are taken from DICOM headers."""
    given = {name: value for name, value in patient.items() if value is not None}
    before: Path | None = given.get("prior_image")
    for path in (image, before):
        if path is not None and not path.exists():
            raise ConfigError(f"{path}: there is no such file or folder")
    header = next(headers(image), None)
    if header is not None:
        with decoding(f"{image}: its header cannot be read"):
            stated: dict[str, Any] = {
                "patient_id": text_of(header, "PatientID"),
                "sex": sex_of(first(header, "PatientSex")),
                "age": _if_readable(age_of, first(header, "PatientAge")),
            }
        given = {**{name: value for name, value in stated.items() if value}, **given}
        modality = modality or ("radiograph" if first(header, "Modality") in ("CR", "DX") else "ct")
    if modality is None:
        modality = "radiograph" if image.suffix.lower() in PICTURES else "ct"
    earlier = None if before is None else next(headers(before), None)
    both = [study for study in (earlier, header) if study is not None]
    with decoding(f"{image} or {before}: PatientID cannot be read"):
        patients = {text_of(study, "PatientID") for study in both} - {""}
    if len(patients) > 1:
        text = f"{before} and {image} are of two patients, by their PatientID: show the patient's own previous study"
        raise DataError(text, reason="mixed-patients")
    if before is not None and "prior_days" not in given:
        timed = all(first(study, "StudyTime") for study in both)  # a time of one alone says nothing
        dates = [_if_readable(date_of, first(study, "StudyDate") + first(study, "StudyTime") * timed) for study in both]
        if len(dates) == 2 and None not in dates:
            given["prior_days"] = (dates[1] - dates[0]).total_seconds() / 86_400
    return Study(image, modality, **given)


def _if_readable(read: Callable[[str], Any], text: str) -> Any:
    """A header's value as ``read`` parses it; None where it refuses it."""
    try:
        return read(text)
    except DataError:
        return None
