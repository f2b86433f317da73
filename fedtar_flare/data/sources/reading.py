"""What every source shares: from single studies to patients, counting what is left out and why.

Dates moved by a de-identifier (1900, 2180) are dates like any other; a study without a date is left out, never ordered
by its identifier. A study whose image is missing is left out too, but keeps its place among the patient's visits.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import ConfigError, DataError, within
from fedtar_flare.core.settings import check_names, suggestion
from fedtar_flare.data.cohort import Patient, Sex, Visit, order_in_time
from fedtar_flare.data.report_text import CLEANINGS, check_sections, clean_report, select_sections
from fedtar_flare.data.splits import Split

logger = logging.getLogger(__name__)
_LOGGED: set[int] = set()
COMMON_OPTIONS = ("same_day", "sections", "cleaning", "min_visits", "min_words")
CHOICES = {"same_day": ("keep", "merge"), "cleaning": CLEANINGS, "views": ("frontal", "all")}
"""Options of a few words, the default first."""


@dataclass
class Reading:
    """Studies of one source as they come in, and what is done with each (``docs/reference/site-file.md``)."""

    where: str  # name of the source for messages
    same_day: str = "keep"
    sections: tuple[str, ...] = ()  # of a report; empty: all of it
    cleaning: str = "none"
    views: str = "frontal"  # which of a study's radiographs are visits: the preferred frontal one, or "all"
    min_visits: int = 1  # of a patient
    min_words: int = 1  # of a report, its sections chosen
    problems: list[DataError] = field(default_factory=list)  # one for each study left out
    institutions: dict[str, str] = field(default_factory=dict)  # patient to the first one stated, where known
    stated: dict[str, set[Split]] = field(default_factory=lambda: defaultdict(set))  # by patient, splits of the source
    _visits: dict[str, list[Visit]] = field(default_factory=lambda: defaultdict(list))
    _unreadable: dict[str, list[Visit]] = field(default_factory=lambda: defaultdict(list))
    _sexes: dict[str, set[Sex]] = field(default_factory=lambda: defaultdict(set))
    _patients: list[Patient] | None = None

    @classmethod
    def of(
        cls, path: Path, options: Mapping[str, Any], source: str, own: Sequence[str], sections: tuple[str, ...] = ()
    ) -> Reading:
        """An empty reading of a source that has options of its ``own``, and default ``sections``.

        Raises :class:`ConfigError` for an unknown option, with the nearest known one, or a value that is not allowed.
        """
        where = f"source '{source}'"
        check_names(options, sorted([*own, *COMMON_OPTIONS]), where, "option")
        chosen = {name: options.get(name, allowed[0]) for name, allowed in CHOICES.items()}
        for name, value in chosen.items():
            if value not in CHOICES[name]:
                hint = suggestion(str(value), CHOICES[name])
                raise ConfigError(f"{where}: {name} '{value}' is not one of {', '.join(CHOICES[name])}{hint}")
        least = {name: options.get(name, 1) for name in ("min_visits", "min_words")}
        for name, value in least.items():
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{where}: {name} must be a whole number from 1, not {value!r}")
        wanted = check_sections(options["sections"], where) if "sections" in options else sections
        return cls(str(path), sections=wanted, **chosen, **least)

    def add(self, visit: Visit, sex: Sex | None, institution: str = "", where: str = "") -> None:
        """Take a study in; one whose image is missing counts as a problem and keeps its place in time.

        ``where`` says in messages where the source names the image. Raises :class:`DataError` ``no-section``,
        ``empty-report`` when cleaning leaves no word, or ``too-few-words``.
        """
        study = f"{self.where}: patient {visit.patient_id}, study {visit.visit_id}"
        if visit.report or visit.labels is None:
            with within(study):
                report = clean_report(select_sections(visit.report, self.sections), self.cleaning).strip()
                if (words := sum(any(map(str.isalnum, word)) for word in report.split())) < self.min_words:
                    text = f"the report has {words} word(s), fewer than min_words" if words else "the report is empty"
                    raise DataError(text, reason="too-few-words" if words else "empty-report")
                visit = replace(visit, report=report)
        if not visit.image.exists():
            self.problems.append(DataError(f"{where or study}: {visit.image} is not there", reason="no-image"))
            self._unreadable[visit.patient_id].append(visit)
            return
        if institution:
            self.institutions.setdefault(visit.patient_id, institution)
        self._visits[visit.patient_id].append(visit)
        self._sexes[visit.patient_id].update({sex} if sex else ())

    def patients(self) -> list[Patient]:
        """Patients with their visits in order of date, without duplicates and contradictions.

        The same study twice (same moment and image) counts once. Studies of different sex under one id belong to
        different people, so none of them is used, and neither is a patient of several splits. The first call ends the
        reading and logs the problems. Raises :class:`DataError` ``no-patient`` with the reasons when nothing is left.
        """
        if self._patients is None:
            found = (self._patient(patient_id, visits) for patient_id, visits in self._visits.items())
            self._patients = [patient for patient in found if patient is not None]
            log_left_out(self.problems)
        if not self._patients:
            reasons = counts_text(self.rejected()) or "it holds no study"
            raise DataError(f"{self.where}: no study can be used ({reasons})", reason="no-patient")
        return self._patients

    def _patient(self, patient_id: str, visits: list[Visit]) -> Patient | None:
        if len(self._sexes[patient_id]) > 1:
            text = f"{self.where}: patient {patient_id} is F in one row and M in another; two people under one id?"
            self.problems += [DataError(text, reason="conflicting-sex") for _ in visits]
            return None
        if len(self.stated.get(patient_id, ())) > 1:
            text = (
                f"{self.where}: patient {patient_id} is in several splits: {', '.join(sorted(self.stated[patient_id]))}"
            )
            self.problems += [DataError(text, reason="conflicting-split") for _ in visits]
            return None
        kept = _once(visits)
        text = f"{self.where}: patient {patient_id}: the same study twice"
        self.problems += [DataError(text, reason="duplicate-visit") for _ in range(len(visits) - len(kept))]
        gone = _once(self._unreadable.get(patient_id, []))
        if self.same_day == "merge":
            kept = merged_days(kept, self.cleaning)
            days = {visit.acquired.date() for visit in kept}
            gone = [v for v in merged_days(gone, self.cleaning) if v.acquired.date() not in days]
        if len(kept) < self.min_visits:
            text = f"{self.where}: patient {patient_id} has {len(kept)} visit(s), fewer than min_visits"
            self.problems += [DataError(text, reason="too-few-visits") for _ in kept]
            return None
        return Patient(patient_id, next(iter(self._sexes[patient_id]), None), tuple(kept), tuple(gone))

    @property
    def splits(self) -> dict[str, Split]:
        """By patient, the split that the source states, where it does."""
        return {patient_id: next(iter(stated)) for patient_id, stated in self.stated.items()}

    def rejected(self) -> dict[str, int]:
        """Reason to number of studies left out."""
        return by_reason(self.problems)


def _once(visits: Sequence[Visit]) -> list[Visit]:
    """The visits in order, one per moment and image."""
    once: dict[tuple[object, Path], Visit] = {}
    for visit in sorted(visits, key=order_in_time):
        once.setdefault((visit.acquired, visit.image), visit)
    return list(once.values())


def merged_days(visits: Sequence[Visit], cleaning: str = "none") -> list[Visit]:
    """One visit per calendar day from a patient's visits in order: the first study's image and moment, the first known
    age, every report of the day once (cleaned ones in one line), and all labels; what one study is sure of is sure.
    """
    merged = []
    for _, day in groupby(visits, key=lambda visit: visit.acquired.date()):
        studies = list(day)
        reports = dict.fromkeys(study.report for study in studies if study.report)
        known = [study.findings for study in studies if study.findings is not None]
        labels = [study.labels for study in studies if study.labels is not None]
        sure = frozenset[str]().union(*labels)
        merged.append(
            replace(
                studies[0],
                report=("\n" if cleaning == "none" else " ").join(reports),
                age=next((study.age for study in studies if study.age is not None), None),
                findings=frozenset().union(*known) if known else None,
                labels=sure if labels else None,
                uncertain=frozenset[str]().union(*(study.uncertain for study in studies)) - sure,
            )
        )
    return merged


def log_left_out(problems: Sequence[DataError]) -> None:
    """Warn with the count of each reason, once in a process for the same studies.

    Their files and rows go to the debug level alone: a site's log is read by others than those who may see that.
    """
    key = hash(tuple(sorted(map(str, problems))))
    if key in _LOGGED:
        return
    _LOGGED.add(key)
    for reason, n in by_reason(problems).items():
        logger.warning("%d study(ies) left out: %s ('fedtar data check' names them)", n, reason)
    for problem in problems:
        logger.debug("study left out: %s: %s", problem.reason, problem)


def by_reason(problems: Iterable[DataError]) -> dict[str, int]:
    """Reason to number, by name."""
    return dict(sorted(Counter(problem.reason for problem in problems).items()))


def counts_text(counts: Mapping[str, int]) -> str:
    """Counts in words."""
    return ", ".join(f"{reason}: {n}" for reason, n in counts.items())


def read_text(path: Path, where: str) -> str:
    """A text file in UTF-8 (with or without a byte order mark).

    Raises :class:`DataError` ``no-report`` when it cannot be read, or ``not-utf8``.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{where}: {path} cannot be read ({error.strerror})", reason="no-report") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: {path} is not UTF-8; save it as UTF-8", reason="not-utf8") from error
