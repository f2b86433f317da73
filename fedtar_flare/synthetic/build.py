"""Make a synthetic cohort: draw and write every visit's images and report, and collect index and truth."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fedtar_flare.data.cells import Timeline
from fedtar_flare.synthetic.course import (
    OLDER_FROM,
    CohortOptions,
    PlannedPatient,
    PlannedVisit,
    change_step,
    plan_patient,
    stream,
    wording_share,
    worth_changes,
)
from fedtar_flare.synthetic.dicom_writer import write_ct_series
from fedtar_flare.synthetic.phantom import draw_anatomy, render, site_scanner
from fedtar_flare.synthetic.reading import planted_changes
from fedtar_flare.synthetic.reports import State, style_of, wording_of, write_report
from fedtar_flare.synthetic.vocabulary import kind_of

MORE_NOISE = 8
"""Factor of the noise of an image, with ``change: noisy``."""


def build_cohort(
    root: Path, settings: Mapping[str, Any], timeline: Timeline, options: CohortOptions
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write all visits under an empty folder; index and truth, which has ``settings`` too, ready for JSON."""
    site, seed = settings["site"], settings["seed"]
    style = style_of(site)
    steps = range(1, timeline.time_steps + 1)
    changed_from = change_step(options, timeline.time_steps)
    renewed = changed_from if options.change == "scanner" and changed_from else len(steps) + 1
    scanners = {step: site_scanner(style + (step >= renewed)) for step in steps}
    spoilt = [step for step in steps if worth_changes(options, step, len(steps))]
    for step in spoilt if options.change == "noisy" else ():
        scanners[step] = replace(scanners[step], noise_hu=MORE_NOISE * scanners[step].noise_hu)
    shares = {step: wording_share(options, step, len(steps)) for step in steps}
    index: list[dict[str, Any]] = []
    truth: list[dict[str, Any]] = []
    numbers = range(options.patients or settings["patients"])
    plans = [plan_patient(site, style, number, timeline=timeline, seed=seed, options=options) for number in numbers]
    reported = reported_visits(plans, spoilt, options, seed)
    for number, patient in enumerate(plans):
        anatomy = draw_anatomy(stream("anatomy", seed, site, number))
        who = {"patient_id": patient.patient_id, "sex": patient.sex}
        entries, planted = [], []
        for visit in patient.visits:
            share = shares[visit.time_step] if options.change_group == "everyone" or patient.sex == "F" else 0.0
            about = reported.get(visit.visit_id, (patient, visit))
            report = report_of(*about, share, style, options)
            scanner = scanners[visit.time_step]
            folder = Path("patients", patient.patient_id, visit.visit_id)
            age = visit.age if patient.age_recorded else None
            (root / folder).mkdir(parents=True)
            (root / folder / "report.txt").write_text(report + "\n")
            if readable := visit.time_step not in options.missed_steps:
                sizes = {name: state.size for name, state in visit.findings.items()}
                hu = render(anatomy, sizes, scanner, stream("image", seed, site, patient.patient_id, visit.visit_id))
                header = {**who, "study_datetime": visit.acquired, "age": age, "kernel": scanner.kernel, "seed": seed}
                write_ct_series(root / folder / "ct", hu, scanner.spacing_mm, **header)
            key = {"visit_id": visit.visit_id, "acquired": visit.acquired.isoformat()}
            findings, labels = list(visit.findings), sorted(set(map(kind_of, about[1].findings)))
            entry = {"image": (folder / "ct").as_posix(), "age": age, "findings": findings, "labels": labels}
            changes = sorted(planted_changes(visit))
            entries.append({**key, **entry, "changes": changes, "report": report, "readable": readable})
            states = {name: asdict(state) for name, state in visit.findings.items()}
            seen = {"time_step": visit.time_step, "age": visit.age, "wording": share, "findings": states}
            planted.append({**key, **seen, "resolved": list(visit.resolved), "reported": about[1].visit_id})
        index.append({**who, "visits": entries})
        group = "older" if patient.visits[0].age >= OLDER_FROM else "younger"
        truth.append({**who, "age_group": group, "age_recorded": patient.age_recorded, "visits": planted})
    effects = {
        "reporting_style": style,
        "change": options.change,
        "change_step": changed_from,
        "change_group": options.change_group if changed_from else None,
        "spoilt_steps": spoilt,
        "wording_shares": shares,
        "older_from": OLDER_FROM,
    }
    described = {**settings, "effects": effects, "scanners": {step: asdict(scanners[step]) for step in steps}}
    return {"patients": index}, {**described, "patients": truth}


def reported_visits(
    plans: Sequence[PlannedPatient], steps: Sequence[int], options: CohortOptions, seed: int
) -> dict[str, tuple[PlannedPatient, PlannedVisit]]:
    """What the report of a visit is about, by visit, where that is another visit or not all of its own.

    Reports of test patients, and with ``checked_validation`` those of validation patients, are about their own visits.
    """
    change, right = options.change, {"test", "validation"} if options.checked_validation else {"test"}
    visits = [(p, v) for p in plans for v in p.visits if p.split not in right and v.time_step in steps]
    reported = {}
    for patient, visit in visits:
        cell = patient.split, visit.time_step
        others = [(p, v) for p, v in visits if p is not patient and (p.split, v.time_step) == cell]
        if change == "coarse":
            findings = {name: State(2) for name, state in visit.findings.items() if state.size > 1}
            reported[visit.visit_id] = patient, replace(visit, findings=findings, resolved=())
        elif change == "misfiled" and others:
            chosen = stream("misfiled", seed, patient.patient_id, visit.visit_id).integers(len(others))
            reported[visit.visit_id] = others[chosen]
    return reported


def report_of(patient: PlannedPatient, visit: PlannedVisit, share: float, style: int, options: CohortOptions) -> str:
    """The report of a planned visit, with a share of the kinds of finding in the second wording."""
    later = visit.visit_id != patient.visits[0].visit_id
    # by the first visit's age, so that a patient stays in one group
    older = patient.visits[0].age >= OLDER_FROM
    wording = wording_of(style, share, options.own_words)
    return write_report(wording, visit.findings, resolved=visit.resolved, follow_up=later, older=older)
