"""Make a synthetic cohort: draw and write every visit's images and report, and collect index and truth."""

from collections.abc import Mapping
from dataclasses import asdict
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
)
from fedtar_flare.synthetic.dicom_writer import write_ct_series
from fedtar_flare.synthetic.phantom import draw_anatomy, render, site_scanner
from fedtar_flare.synthetic.reading import planted_changes
from fedtar_flare.synthetic.reports import STYLES, style_of, write_report
from fedtar_flare.synthetic.vocabulary import kind_of


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
    shares = {step: wording_share(options, step, len(steps)) for step in steps}
    index: list[dict[str, Any]] = []
    truth: list[dict[str, Any]] = []
    for number in range(options.patients or settings["patients"]):
        patient = plan_patient(site, style, number, timeline=timeline, seed=seed, options=options)
        anatomy = draw_anatomy(stream("anatomy", seed, site, number))
        who = {"patient_id": patient.patient_id, "sex": patient.sex}
        entries, planted = [], []
        for visit in patient.visits:
            share = shares[visit.time_step] if options.change_group == "everyone" or patient.sex == "F" else 0.0
            report = report_of(patient, visit, share, style)
            scanner = scanners[visit.time_step]
            folder = Path("patients", patient.patient_id, visit.visit_id)
            age = visit.age if patient.age_recorded else None
            (root / folder).mkdir(parents=True)
            (root / folder / "report.txt").write_text(report + "\n")
            sizes = {name: state.size for name, state in visit.findings.items()}
            hu = render(anatomy, sizes, scanner, stream("image", seed, site, patient.patient_id, visit.visit_id))
            header = {**who, "study_datetime": visit.acquired, "age": age, "kernel": scanner.kernel, "seed": seed}
            write_ct_series(root / folder / "ct", hu, scanner.spacing_mm, **header)
            key = {"visit_id": visit.visit_id, "acquired": visit.acquired.isoformat()}
            findings, labels = list(visit.findings), sorted(set(map(kind_of, visit.findings)))
            entry = {"image": (folder / "ct").as_posix(), "age": age, "findings": findings, "labels": labels}
            changes = sorted(planted_changes(visit))
            entries.append({**key, **entry, "changes": changes, "report": report})
            states = {name: asdict(state) for name, state in visit.findings.items()}
            seen = {"time_step": visit.time_step, "age": visit.age, "wording": share, "findings": states}
            planted.append({**key, **seen, "resolved": list(visit.resolved)})
        index.append({**who, "visits": entries})
        group = "older" if patient.visits[0].age >= OLDER_FROM else "younger"
        truth.append({**who, "age_group": group, "age_recorded": patient.age_recorded, "visits": planted})
    effects = {
        "reporting_style": style,
        "change": options.change,
        "change_step": changed_from,
        "change_group": options.change_group if changed_from else None,
        "wording_shares": shares,
        "older_from": OLDER_FROM,
    }
    described = {**settings, "effects": effects, "scanners": {step: asdict(scanners[step]) for step in steps}}
    return {"patients": index}, {**described, "patients": truth}


def report_of(patient: PlannedPatient, visit: PlannedVisit, share: float, style: int) -> str:
    """The report of a planned visit in the first wording of a style, or in its second with a ``share`` of 1."""
    later = visit.visit_id != patient.visits[0].visit_id
    # by the first visit's age, so that a patient stays in one group
    older = patient.visits[0].age >= OLDER_FROM
    wording = STYLES[style - 1][int(share)]
    return write_report(wording, visit.findings, resolved=visit.resolved, follow_up=later, older=older)
