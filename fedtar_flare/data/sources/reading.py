"""What every source shares: from single studies to patients, counting what is left out and why."""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedtar_flare.data.types import Patient, Sex, Visit
from fedtar_flare.errors import ConfigError, DataError

logger = logging.getLogger(__name__)


@dataclass
class Reading:
    """Studies of one source as they come in.

    Args:
        where: name of the source for messages.
        problems: one error for each study that was left out.
    """

    where: str
    problems: list[DataError] = field(default_factory=list)
    _visits: dict[str, list[Visit]] = field(default_factory=dict)
    _sexes: dict[str, set[Sex]] = field(default_factory=dict)

    def add(self, visit: Visit, sex: Sex | None) -> None:
        """Take a study in."""
        self._visits.setdefault(visit.patient_id, []).append(visit)
        self._sexes.setdefault(visit.patient_id, set()).update({sex} if sex else ())

    def leave_out(self, error: DataError) -> None:
        """Count a study that cannot be used."""
        self.problems.append(error)

    def patients(self) -> list[Patient]:
        """Patients with their visits in order of date; doubles and contradictions are left out.

        A study that is there twice (same moment, same image) counts once. Studies under one id with different sex
        belong to different people, so that none of them can be used.

        Raises:
            DataError: ``no-patient`` when nothing is left, with the reasons.
        """
        patients = []
        for patient_id, visits in self._visits.items():
            if len(self._sexes[patient_id]) > 1:
                text = f"{self.where}: patient {patient_id} is F in one row and M in another; two people under one id?"
                self.problems += [DataError(text, reason="conflicting-sex") for _ in visits]
                continue
            once = {(visit.acquired, visit.image): visit for visit in reversed(visits)}  # the first one counts
            for _ in range(len(visits) - len(once)):
                text = f"{self.where}: patient {patient_id}: the same study twice"
                self.problems.append(DataError(text, reason="duplicate-visit"))
            sex = next(iter(self._sexes[patient_id]), None)
            patients.append(Patient(patient_id, sex, tuple(reversed(once.values()))))
        self._log()
        if not patients:
            reasons = ", ".join(f"{reason}: {n}" for reason, n in self.rejected().items()) or "it holds no study"
            raise DataError(f"{self.where}: no study can be used ({reasons})", reason="no-patient")
        return patients

    def rejected(self) -> dict[str, int]:
        """Reason to number of studies that were left out."""
        return dict(sorted(Counter(problem.reason for problem in self.problems).items()))

    def _log(self) -> None:
        log_left_out(self.problems)


def log_left_out(problems: Sequence[DataError]) -> None:
    """One line for each reason with its count and an example; every study on the debug level."""
    examples = {problem.reason: problem for problem in reversed(problems)}
    for reason, n in sorted(Counter(problem.reason for problem in problems).items()):
        logger.warning("%d study(ies) left out: %s, such as: %s", n, reason, examples[reason])
    for problem in problems:
        logger.debug("study left out: %s: %s", problem.reason, problem)


def check_options(options: Mapping[str, Any], known: Collection[str], source: str) -> None:
    """Refuse options that the source does not have.

    Raises:
        ConfigError: names the option and the nearest known one.
    """
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(str(option), list(known), n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ConfigError(
                f"source '{source}': unknown option '{option}'{hint} (known: {', '.join(sorted(known)) or 'none'})"
            )


def read_text(path: Path, where: str) -> str:
    """A text file in UTF-8 (with or without a byte order mark).

    Raises:
        DataError: ``no-report`` when it is not there, ``not-utf8``.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{where}: {path} cannot be read ({error.strerror})", reason="no-report") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: {path} is not UTF-8; save it as UTF-8", reason="not-utf8") from error
