"""From single studies to patients, for every source; studies left out are counted by reason.

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
from fedtar_flare.core.files import is_file_or_folder, read_text
from fedtar_flare.core.settings import check_names, suggestion
from fedtar_flare.core.text import UNFIT_IN_ID
from fedtar_flare.data.cells import Split
from fedtar_flare.data.cohort import Patient, Sex, Visit, order_in_time
from fedtar_flare.data.report_text import CLEANINGS, check_sections, clean_report, select_sections
from fedtar_flare.data.sources.fields import markup, stated

logger = logging.getLogger(__name__)
_LOGGED: set[int] = set()
UNFIT_ID = "a control character in the id of a patient or study; export the row again, or correct it"
COMMON_OPTIONS = ("same_day", "sections", "cleaning", "min_visits", "min_words")
CHOICES = {"same_day": ("keep", "merge"), "cleaning": CLEANINGS, "views": ("frontal", "all")}  # the default first


@dataclass
class Reading:
    """Studies of one source as they come in, and the options that apply to each (``docs/reference/site-file.md``)."""

    where: str  # the source's name in messages
    same_day: str = "keep"  # ``merge``: the studies of a calendar day become one visit
    sections: tuple[str, ...] = ()  # of a report; empty: all of it
    cleaning: str = "none"
    views: str = "frontal"  # radiographs of a study that are visits: the preferred frontal one, or ``all``
    min_visits: int = 1
    min_words: int = 1  # of the report's sections
    problems: list[DataError] = field(default_factory=list)  # one for each study left out
    institutions: dict[str, str] = field(default_factory=dict)  # by patient id, the first that is stated
    stated: dict[str, set[Split]] = field(default_factory=lambda: defaultdict(set))  # splits by patient id
    _visits: dict[str, list[Visit]] = field(default_factory=lambda: defaultdict(list))
    _unreadable: dict[str, list[Visit]] = field(default_factory=lambda: defaultdict(list))
    _sexes: dict[str, set[Sex]] = field(default_factory=lambda: defaultdict(set))
    _patients: list[Patient] | None = None

    @classmethod
    def of(
        cls, path: Path, options: Mapping[str, Any], source: str, further: Sequence[str], sections: tuple[str, ...] = ()
    ) -> Reading:
        """Begin to read a source."""
        where = f"source '{source}'"
        check_names(options, sorted([*further, *COMMON_OPTIONS]), where, "option")
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
        """Add a study, of a row of a table (``where``); one whose image is missing is a problem and keeps its place."""
        if self.views == "all":
            visit = replace(visit, visit_id=f"{visit.visit_id}-{visit.image.stem}")
        if UNFIT_IN_ID.search(f"{visit.patient_id}{visit.visit_id}"):
            place = f"{where}, column 'patient_id'" if where else self.where
            raise DataError(f"{place}: {UNFIT_ID}", reason="bad-id")
        study = f"{self.where}: patient {visit.patient_id}, study {visit.visit_id}"
        visit = replace(visit, report=stated(visit.report))
        if reason := markup(visit.report):
            raise DataError(f"{study}: the report is no plain text", reason=reason)
        if visit.report or visit.labels is None:
            with within(study):
                report = clean_report(select_sections(visit.report, self.sections), self.cleaning).strip()
                if (words := sum(any(map(str.isalnum, word)) for word in report.split())) < self.min_words:
                    text = f"the report has {words} word(s), fewer than min_words" if words else "the report is empty"
                    raise DataError(text, reason="too-few-words" if words else "empty-report")
                visit = replace(visit, report=report)
        if not is_file_or_folder(visit.image):
            place = f"{where}, column 'image'" if where else study
            text = f"{place}: {visit.image} is not there, or is no file and no folder"
            self.problems.append(DataError(text, reason="no-image"))
            self._unreadable[visit.patient_id].append(visit)
            return
        self._visits[visit.patient_id].append(visit)
        if institution:
            self.institutions.setdefault(visit.patient_id, institution)
        if sex:
            self._sexes[visit.patient_id].add(sex)

    def patients(self) -> list[Patient]:
        """End the reading: patients with visits in order of date, and no study (moment and image) twice.

        Studies of different sex under one id belong to different people, so none of them is used, and neither is a
        patient of several splits, nor a study with several reports. The first call logs the problems.
        """
        if self._patients is None:
            self._patients = list(filter(None, map(self._patient, self._visits)))
            log_left_out(self.problems)
        if not self._patients:
            counts = [f"{reason}: {n}" for reason, n in self.rejected().items()]
            reasons = ", ".join(counts) or "it holds no study"
            raise DataError(f"{self.where}: no study can be used ({reasons})", reason="no-patient")
        return self._patients

    def _patient(self, patient_id: str) -> Patient | None:
        visits, splits = self._visits[patient_id], self.stated.get(patient_id, ())

        def reject(number: int, text: str, reason: str) -> None:
            self.problems += [DataError(f"{self.where}: patient {patient_id} {text}", reason=reason)] * number

        if len(self._sexes[patient_id]) > 1:
            reject(len(visits), "is F in one row and M in another; two people under one id?", "conflicting-sex")
            return None
        if len(splits) > 1:
            reject(len(visits), f"is in several splits: {', '.join(sorted(splits))}", "conflicting-split")
            return None
        texts: dict[tuple[object, Path], set[str]] = defaultdict(set)
        for visit in visits:
            texts[visit.acquired, visit.image].add(visit.report)
        certain = [visit for visit in visits if len(texts[visit.acquired, visit.image]) == 1]
        reject(len(visits) - len(certain), "has a study with several reports", "several-reports")
        usable = _distinct(certain)
        reject(len(certain) - len(usable), "has the same study twice", "duplicate-visit")
        unreadable = _distinct(self._unreadable.get(patient_id, []))
        if self.same_day == "merge":
            usable = merged_days(usable, self.cleaning)
            days = {visit.acquired.date() for visit in usable}
            unreadable = [v for v in merged_days(unreadable, self.cleaning) if v.acquired.date() not in days]
        if len(usable) < self.min_visits:
            reject(len(usable), f"has {len(usable)} visit(s), fewer than min_visits", "too-few-visits")
            return None
        return Patient(patient_id, next(iter(self._sexes[patient_id]), None), tuple(usable), tuple(unreadable))

    @property
    def splits(self) -> dict[str, Split]:
        """Patient id to the split that the source states, where it does."""
        return {patient_id: next(iter(stated)) for patient_id, stated in self.stated.items()}

    def rejected(self) -> dict[str, int]:
        """Count the studies left out."""
        return by_reason(self.problems)


def _distinct(visits: Sequence[Visit]) -> list[Visit]:
    """The visits in order, the first of each moment and image."""
    distinct: dict[tuple[object, Path], Visit] = {}
    for visit in sorted(visits, key=order_in_time):
        distinct.setdefault((visit.acquired, visit.image), visit)
    return list(distinct.values())


def merged_days(visits: Sequence[Visit], cleaning: str = "none") -> list[Visit]:
    """One visit per calendar day: the first study's image and moment, the first known age, every report once (cleaned
    ones in one line), and all labels, certain where one study's are.
    """
    merged = []
    for _, day in groupby(visits, key=lambda visit: visit.acquired.date()):
        studies = list(day)
        reports = dict.fromkeys(study.report for study in studies if study.report)
        findings = [study.findings for study in studies if study.findings is not None]
        labels = [study.labels for study in studies if study.labels is not None]
        certain = frozenset[str]().union(*labels)
        merged.append(
            replace(
                studies[0],
                report=("\n" if cleaning == "none" else " ").join(reports),
                age=next((study.age for study in studies if study.age is not None), None),
                findings=frozenset().union(*findings) if findings else None,
                labels=certain if labels else None,
                uncertain=frozenset[str]().union(*(study.uncertain for study in studies)) - certain,
            )
        )
    return merged


def log_left_out(problems: Sequence[DataError]) -> None:
    """Warn of the number of each reason, once for the same studies; a site's log names studies at debug level alone."""
    key = hash(tuple(sorted(map(str, problems))))
    if key in _LOGGED:
        return
    _LOGGED.add(key)
    for reason, n in by_reason(problems).items():
        logger.warning("%d study(ies) left out: %s ('fedtar data check' names them)", n, reason)
    for problem in problems:
        logger.debug("study left out: %s: %s", problem.reason, problem)


def by_reason(problems: Iterable[DataError]) -> dict[str, int]:
    """Count errors by reason."""
    return dict(sorted(Counter(problem.reason for problem in problems).items()))


def left_out_lines(problems: Sequence[DataError]) -> list[str]:
    """A line for each reason: how many there are, and the first of them."""
    first = {problem.reason: problem for problem in reversed(problems)}
    return [f"  left out, {reason}: {n}, such as: {first[reason]}" for reason, n in by_reason(problems).items()]


def read_report(path: Path, where: str) -> str:
    """A text file in UTF-8, with or without a byte order mark; DataError ``no-report`` or ``not-utf8``."""
    try:
        return read_text(path)
    except OSError as error:
        raise DataError(f"{where}: {path} cannot be read ({error.strerror})", reason="no-report") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: {path} is not UTF-8; save it as UTF-8", reason="not-utf8") from error
