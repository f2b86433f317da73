"""Make a synthetic cohort: draw and write every visit's images and report, and collect index and truth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from fedtar_flare.synthetic.course import (
    CHANGE_FACTOR,
    OLDER_FACTOR,
    OLDER_FROM,
    SEX_FACTOR,
    CohortOptions,
    PlannedPatient,
    PlannedVisit,
    change_step,
    plan_patient,
    stream,
)
from fedtar_flare.synthetic.dicom_writer import write_ct_series
from fedtar_flare.synthetic.phantom import Anatomy, draw_anatomy, render
from fedtar_flare.synthetic.reports import write_report
from fedtar_flare.synthetic.scanner import Scanner, site_scanner
from fedtar_flare.synthetic.styles import Regime, house_of, wording_of


def build_cohort(
    root: Path, settings: Mapping[str, Any], options: CohortOptions
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write all visits under a folder.

    Args:
        root: an empty folder; paths in the index are relative to it.
        settings: site, patients, time_steps, seed, alignment, periods (ISO; None when aligned by visit).
        options: what the cohort contains.

    Returns:
        (index, truth), ready for JSON.
    """
    site, seed, time_steps = settings["site"], settings["seed"], settings["time_steps"]
    bounds = settings["periods"]
    periods = None if bounds is None else [datetime.fromisoformat(bound) for bound in bounds]
    house = options.house or house_of(site)
    scanner = site_scanner(house if options.scanner_differences else 1)
    changed_from = change_step(options, time_steps)
    index: list[dict[str, Any]] = []
    truth: list[dict[str, Any]] = []
    for number in range(site_patients(settings["patients"], house, options)):
        patient = plan_patient(site, house, number, time_steps=time_steps, seed=seed, options=options, periods=periods)
        anatomy = draw_anatomy(stream("anatomy", seed, site, number))
        listed, known = [], []
        for visit in patient.visits:
            regime = regime_of(patient, visit, changed_from, options)
            report = report_of(patient, visit, regime, house, options)
            folder = Path("patients", patient.patient_id, visit.visit_id)
            _write_images(root / folder / "ct", patient, visit, anatomy, scanner, site, seed)
            (root / folder / "report.txt").write_text(report + "\n")
            shared = {"visit_id": visit.visit_id, "acquired": visit.acquired.isoformat()}
            listed.append(
                {
                    **shared,
                    "image": (folder / "ct").as_posix(),
                    "age": visit.age if patient.age_recorded else None,
                    "findings": list(visit.findings),
                    "report": report,
                }
            )
            known.append(
                {
                    **shared,
                    "time_step": visit.time_step,
                    "age": visit.age,
                    "wording": regime,
                    "findings": {name: asdict(state) for name, state in visit.findings.items()},
                    "resolved": list(visit.resolved),
                }
            )
        who = {"patient_id": patient.patient_id, "sex": patient.sex}
        index.append({**who, "visits": listed})
        group = "older" if patient.visits[0].age >= OLDER_FROM else "younger"
        truth.append({**who, "age_group": group, "age_recorded": patient.age_recorded, "visits": known})
    effects = {
        "house": house,
        "change_step": changed_from,
        "change_group": options.change_group if changed_from else None,
        "older_from": OLDER_FROM,
        "wording_by_age": options.wording_effect,
        "prevalence_factors": {
            "older": OLDER_FACTOR if options.prevalence_effect else {},
            "sex": SEX_FACTOR if options.prevalence_effect else {},
            "from_change_step": CHANGE_FACTOR if changed_from else {},
        },
    }
    return {"patients": index}, {**settings, "effects": effects, "scanner": asdict(scanner), "patients": truth}


def site_patients(asked: int, house: int, options: CohortOptions) -> int:
    """Number of patients of a site: what was asked for, less for the smaller houses; at least one."""
    return max(1, round(asked * options.size_ratio ** (-((house - 1) % 3) / 2)))


def regime_of(patient: PlannedPatient, visit: PlannedVisit, changed_from: int | None, options: CohortOptions) -> Regime:
    """Wording of a visit: the second one from the planted step on, for the group that it concerns."""
    concerned = options.change_group == "everyone" or patient.sex == "F"
    return "after" if concerned and changed_from is not None and visit.time_step >= changed_from else "before"


def report_of(patient: PlannedPatient, visit: PlannedVisit, regime: Regime, house: int, options: CohortOptions) -> str:
    """The report of a planned visit."""
    return write_report(
        wording_of(house, regime),
        visit.findings,
        resolved=visit.resolved,
        follow_up=visit is not patient.visits[0],
        # by the first visit's age, so that a patient stays in one group
        older=options.wording_effect and patient.visits[0].age >= OLDER_FROM,
    )


def _write_images(
    folder: Path,
    patient: PlannedPatient,
    visit: PlannedVisit,
    anatomy: Anatomy,
    scanner: Scanner,
    site: str,
    seed: int,
) -> None:
    sizes = {name: state.size for name, state in visit.findings.items()}
    hu = render(anatomy, sizes, scanner, stream("image", seed, site, patient.patient_id, visit.visit_id))
    write_ct_series(
        folder,
        hu,
        scanner.spacing_mm,
        patient_id=patient.patient_id,
        study_datetime=visit.acquired,
        age=visit.age if patient.age_recorded else None,
        sex=patient.sex,
        series_description="Synthetic phantom, chest",
        manufacturer="fedtar_flare",
        model_name="Synthetic CT",
        kernel=scanner.kernel,
        seed=seed,
    )
