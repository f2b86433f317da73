"""The findings that were read of a visit, in words: side, degree, change since the visit before, and certainty."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedtar_flare.core.text import columns
from fedtar_flare.learning.comparison import CHANGES, RESOLVED, UNKNOWN, ComparisonBranch
from fedtar_flare.learning.labels import LEVELS, Labeler
from fedtar_flare.metrics.grades import statements
from fedtar_flare.models.report_generator import Encoded


class ReadFinding(NamedTuple):
    """A finding that is there, or that is gone; None stands for what is not known.

    ``slices`` are those that its query attends to most, at this visit and at the one before.
    """

    finding: str
    side: str | None
    degree: str | None
    change: str | None
    certainty: Mapping[str, float | None]
    slices: tuple[int, int | None] = (0, None)

    @property
    def parts(self) -> list[tuple[str, str, float | None]]:
        """Side, degree and change as far as known: name, word, and certainty."""
        words = (("side", self.side), ("degree", self.degree), ("change", self.change))
        return [(name, word, self.certainty.get(name)) for name, word in words if word is not None]

    def to_dict(self) -> dict[str, Any]:
        """The finding as JSON primitives."""
        return {name: value for name, value in self._asdict().items() if name != "slices"}


ReadFindings = tuple[ReadFinding, ...] | None
"""What was read of a visit; None without a branch that compares visits."""


def read_findings(branch: ComparisonBranch, seen: Encoded, text: str) -> tuple[ReadFinding, ...]:
    """Read the findings of one visit; the side that a finding's name lacks is that which the draft ``text`` states."""
    reader, row = branch.reader, {name: value[0].tolist() for name, value in branch.read(seen)._asdict().items()}
    now, before = (slices[0].tolist() for slices in branch.key_slices(seen))
    findings = []
    for i, name in enumerate(reader.findings):
        level, change = int(row["levels"][i]), int(row["changes"][i])
        if (level or change == RESOLVED) and name != reader.no_finding:
            known = {"presence": ("presence", True), "degree": ("degree", level), "change": ("certainty", change)}
            certainty = {part: round(row[column][i], 2) if of else None for part, (column, of) in known.items()}
            words = (LEVELS[level] if level else None, CHANGES[change] if change else None)
            slices = (now[i], before[i] if before[i] != UNKNOWN else None)
            findings.append(ReadFinding(*_name_and_side(name, text, reader, not level), *words, certainty, slices))
    return tuple(findings)


def _name_and_side(name: str, text: str, reader: Labeler, gone: bool) -> tuple[str, str | None]:
    """A finding's name without its side, and the side that its name or the text gives: where it is, or was."""
    words = name.replace("_", " ").split()
    if words[-1] in ("right", "left"):
        return " ".join(words[:-1]), words[-1]
    stated = statements(text, reader.rules) if reader.rules is not None else ()
    sides = {side for known in stated if (known.finding, known.resolved) == (name, gone) for side in known.side}
    return " ".join(words), "both" if len(sides) == 2 else next(iter(sides), None)


def findings_table(findings: Sequence[ReadFinding]) -> str:
    """A plain table with a certainty behind each part."""
    rows = [["finding", "side", "degree", "change"]]
    for read in findings:
        cells = {name: word + ("" if p is None else f" {p:.2f}") for name, word, p in read.parts}
        finding = f"{read.finding} {read.certainty['presence']:.2f}"
        rows.append([finding, *(cells.get(name, "-") for name in rows[0][1:])])
    return "\n".join(columns(rows))
