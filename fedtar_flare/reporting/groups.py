"""Scores of a site's drafts by group of patients, for its own page: which group do they serve worse than all others?"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from fedtar_flare.data.cohort import Sample
from fedtar_flare.imaging.readers.dicom_files import headers
from fedtar_flare.imaging.readers.dicom_tags import first
from fedtar_flare.metrics.agreement import label_counts
from fedtar_flare.metrics.labeler import classes_of, rules_for
from fedtar_flare.metrics.significance import against_others, holm, label_score, mean_score

AGES = ((0, 40, "under 40"), (40, 60, "40 to 59"), (60, 80, "60 to 79"), (80, 131, "80 and older"))


@dataclass(frozen=True, slots=True)
class GroupScore:
    """A group's score, by its name in the registry, and that of all other patients, with p corrected after Holm."""

    kind: str
    group: str
    patients: int
    score: str
    value: float
    others: float
    p: float

    @property
    def behind(self) -> bool:
        """Whether the group's score is significantly lower."""
        return self.value < self.others and self.p < 0.05


def sex_of(sample: Sample) -> str:
    """Name a patient's sex."""
    return {"F": "women", "M": "men"}.get(sample.sex or "", "unknown")


def age_of(sample: Sample) -> str:
    """Name the band of a patient's age at the visit."""
    age = -1 if sample.visit.age is None else sample.visit.age
    return next((name for low, high, name in AGES if low <= age < high), "unknown")


def scanner_of(sample: Sample) -> str:
    """The manufacturer by the visit's first DICOM file."""
    with suppress(Exception):  # pydicom may raise anything on broken bytes, which should fail no round
        return first(next(headers(sample.visit.image)), "Manufacturer").upper() or "unknown"
    return "unknown"


def scores_by_group(samples: Sequence[Sample], rows: Sequence[Mapping[str, Any]], least: int) -> tuple[GroupScore, ...]:
    """Score groups of patients by sex, age and scanner at the first of their visits."""
    if not samples:
        return ()
    patients, rules = [row["patient_id"] for row in rows], rules_for(samples[0].visit.modality)
    blank = ("b" * len(classes_of(rules)),) * 2  # of a report in another language
    counts = label_counts(classes_of(rules), [row["labels"].get(rules, blank) for row in rows])
    scores = {"rouge_l": mean_score(patients, [row["rouge_l"] for row in rows])}
    scores[f"{rules.replace('-', '_')}_f1"] = label_score(patients, counts, "micro", "f1")
    firsts = {sample.visit.patient_id: sample for sample in reversed(samples)}
    groups = []
    for kind, name_of in {"sex": sex_of, "age": age_of, "scanner": scanner_of}.items():
        group_of = {patient: name_of(sample) for patient, sample in firsts.items()}
        for group, (score, sums) in product(sorted(set(group_of.values())), scores.items()):
            members = np.array([group_of[patient] == group for patient in sums.patients])
            if min(members.sum(), (~members).sum()) >= least:
                value, others = (float(sums.score(sums.sums[who].sum(0)[None])[0]) for who in (members, ~members))
                p = against_others(sums, members)
                groups.append(GroupScore(kind, group, int(members.sum()), score, value, others, p))
    corrected = holm({i: group.p for i, group in enumerate(groups) if np.isfinite(group.p)})
    return tuple(replace(groups[i], p=value) for i, value in corrected.items())
