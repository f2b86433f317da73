"""What a site's generated reports say, scored over all visits that are shown: classes, change, repetition, findings."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from fedtar_flare.data.cohort import Sample, told
from fedtar_flare.learning.labels import labeler_of
from fedtar_flare.metrics.alarms import identical_share
from fedtar_flare.metrics.clinical import finding_counts
from fedtar_flare.metrics.temporal import VisitReport, claimants, finding_change_f1, finding_changes
from fedtar_flare.metrics.text_scores import labeler_for, text_scores


def content_scores(samples: Sequence[Sample], texts: Sequence[str], min_cell: int = 1) -> dict[str, float | None]:
    """The scores of :func:`~fedtar_flare.metrics.text_scores.text_scores`.

    ``contradictions`` is None where the reports of fewer than ``min_cell`` patients make a claim that could be one,
    ``finding_change_micro_f1`` where those of fewer name a change, in the reference or in the generated text.

    ``finding_change_f1`` and ``finding_change_micro_f1`` are against what was planted where all samples have it, else
    against what the references say.
    """
    rows = [
        VisitReport(s.visit.patient_id, s.visit.acquired.timestamp(), s.visit.report, text)
        for s, text in zip(samples, texts, strict=True)
    ]
    modality = samples[0].visit.modality
    labeler = labeler_for(modality)
    scores = text_scores(rows, modality)
    if len(claimants(rows, labeler)) < min_cell:
        scores["contradictions"] = None
    planted = [s.visit.changes for s in samples if s.visit.changes is not None]
    if len(planted) == len(samples):
        said = [labeler_of([s.visit for s in samples]).changes(text) for text in texts]
        found = finding_change_f1(planted, said)
        scores["finding_change_f1"] = found["finding_change_f1_example"]
        scores["finding_change_micro_f1"] = found["finding_change_f1"]
        concerned = {s.visit.patient_id for s, *both in zip(samples, planted, said, strict=True) if any(both)}
    else:
        concerned = {
            row.patient
            for row in rows
            if any(finding_changes(text, labeler) for text in (row.reference, row.generated))
        }
    if len(concerned) < min_cell:
        scores["finding_change_micro_f1"] = None
    return scores


def reference_scores(samples: Sequence[Sample]) -> dict[str, float | None]:
    """``identical_share`` of the references: what an alarm about the generated reports is compared with."""
    return {"identical_share": identical_share([sample.visit.report for sample in samples])}


def finding_recalls(
    samples: Sequence[Sample], texts: Sequence[str], min_cell: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Per finding ``n``, the reports that have it, and ``recall``, the share of those that name it.

    They are under ``known`` and ``new`` (to the warm start) where the truth is known; elsewhere under ``stated``:
    classes that the rule-based labeler finds in the references. A finding of fewer than ``min_cell`` distinct patients
    is left out; n is told down to a multiple of ``min_cell``.
    """
    patients = [sample.visit.patient_id for sample in samples]
    reader = labeler_of([sample.visit for sample in samples])
    stated = [reader.stated(text) for text in texts]
    if reader.known:
        truth = [sample.visit.findings or frozenset() for sample in samples]
        known = reader.known
        return {
            "known": _recalls([t & known for t in truth], stated, patients, min_cell),
            "new": _recalls([t - known for t in truth], stated, patients, min_cell),
        }
    truth = [reader.stated(sample.visit.report) for sample in samples]
    return {"stated": _recalls(truth, stated, patients, min_cell)}


def _recalls(
    truth: Sequence[AbstractSet[str]], stated: Sequence[AbstractSet[str]], patients: Sequence[str], min_cell: int
) -> dict[str, dict[str, float]]:
    having: dict[str, set[str]] = {}
    for patient, findings in zip(patients, truth, strict=True):
        for name in findings:
            having.setdefault(name, set()).add(patient)
    return {
        name.replace(" ", "_"): {"n": told(there, min_cell), "recall": named / there}
        for name, (there, named) in finding_counts(truth, stated).items()
        if len(having[name]) >= min_cell
    }
