"""A draft's findings against its report, weighted by clinical significance: a score that radiologists agree with.

Rules read the abnormal findings of both texts from ``clinical.yaml``, with side, zone of the lung, degree, change and
size. Normal sentences do not count. ``tools/radpref.py`` measures it on the ratings of RadPref (CRIMSON, 2026).
"""

import math
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

from fedtar_flare.metrics.grades import DEGREES, directions, qualifiers
from fedtar_flare.metrics.labeler import Mention, Observation, RuleLabeler
from fedtar_flare.metrics.sentences import Match, Phrasebook, listed, phrases, readable, sentences

_CLASSES = ("benign", "other", "actionable", "urgent")
_MILLIMETRES = {"mm": 1.0, "millimeter": 1.0, "millimeters": 1.0, "cm": 10.0, "centimeter": 10.0, "centimeters": 10.0}
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Weights:
    """What counts how much: chosen, as weights that are fitted to half of RadPref do no better on the other half."""

    classes: tuple[float, float, float, float] = (0.15, 0.4, 1.0, 1.5)  # benign to urgent
    agreement: float = 0.5  # what two reports agree in without any finding
    invented: float = 0.8  # of a finding that the report has not; one that the draft has not counts 1
    related: float = 0.5  # credit of another finding of the family
    doubted: float = 0.7  # of a finding that is doubted
    side: float = 0.5  # credit that a wrong part of a finding takes
    place: float = 0.3
    degree: float = 0.3
    change: float = 0.15
    size: float = 0.5


WEIGHTS = Weights()


@dataclass(frozen=True, slots=True)
class ClinicalFinding:
    """An abnormal finding of a text, with its parts as far as they are stated; ``size`` in mm."""

    name: str
    certain: bool
    side: frozenset[str]
    place: frozenset[str]
    degree: frozenset[int]
    change: frozenset[str]
    size: float


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("clinical.yaml").read_text(encoding="utf-8"))
    for finding in table["findings"].values():
        finding["family"] = frozenset(finding["family"].split())
    table["surgery"] = frozenset(listed(table["surgery"]))
    return table


@cache
def _labeler() -> RuleLabeler:
    table = _table()
    filled = {name: of["present"].format_map(table["words"]) for name, of in table["findings"].items()}
    return RuleLabeler([*(Observation(name, text) for name, text in filled.items()), Observation("", table["ignore"])])


@cache
def _book(part: str) -> Phrasebook[Any]:
    if part == "place":
        return Phrasebook((p, place) for place, listing in _table()["places"].items() for p in listed(listing))
    if part == "degree":
        return Phrasebook([*((p, None) for p in phrases("degrees")["none"]), *DEGREES.items()])
    return Phrasebook((p, side) for side, of in phrases("sides").items() for p in of)


@lru_cache(maxsize=4096)
def abnormal(text: str) -> dict[str, ClinicalFinding]:
    """Read the abnormal findings of a text by name."""
    by_name: dict[str, ClinicalFinding] = {}
    for words in sentences(text):
        mentions = [m for m in _apart(_labeler().mentions(words)) if m.name]
        if any(mention.label in ("positive", "uncertain") for mention in mentions):
            for finding in _of_sentence(words, mentions):
                by_name[finding.name] = _joined(by_name.get(finding.name, finding), finding)
    return by_name


def _apart(mentions: Sequence[Mention]) -> list[Mention]:
    """Mentions that do not overlap, the longest first: "pericardial effusion" is no effusion."""
    apart: list[Mention] = []
    for mention in sorted(mentions, key=lambda m: m.start - m.end):
        if all(mention.end <= other.start or other.end <= mention.start for other in apart):
            apart.append(mention)
    return sorted(apart)


def _of_sentence(words: Sequence[str], mentions: Sequence[Mention]) -> list[ClinicalFinding]:
    of_part: dict[str, list[list[Match[Any]]]] = {"size": qualifiers(words, mentions, _sizes(words))}
    for part in ("side", "place", "degree"):
        matches = [match for match in _book(part).cover(words) if match.tag not in (None, "none")]
        of_part[part] = qualifiers(words, mentions, matches)
    changes = directions(words, mentions, _labeler())
    findings = []
    for i, mention in enumerate(mentions):
        if mention.label in ("positive", "uncertain") and changes[i] != "resolved":
            tags = {part: frozenset(match.tag for match in of[i]) for part, of in of_part.items()}
            findings.append(
                ClinicalFinding(
                    mention.name,
                    certain=mention.label == "positive",
                    side=frozenset(["left", "right"]) if "both" in tags["side"] else tags["side"],
                    place=tags["place"],
                    degree=tags["degree"],
                    change=frozenset([changes[i] or ""]) - {""},
                    size=max(tags["size"], default=0.0),
                )
            )
    return findings


def _sizes(words: Sequence[str]) -> list[Match[float]]:
    """Lengths in mm, each at its number."""
    sizes = []
    for i in range(1, len(words)):
        if words[i] in _MILLIMETRES and _NUMBER.fullmatch(words[i - 1]):
            sizes.append(Match(i - 1, i + 1, float(words[i - 1]) * _MILLIMETRES[words[i]]))
    return sizes


def _joined(a: ClinicalFinding, b: ClinicalFinding) -> ClinicalFinding:
    """All that two places of a text say of one finding."""
    parts = a.side | b.side, a.place | b.place, a.degree | b.degree, a.change | b.change
    return ClinicalFinding(a.name, a.certain or b.certain, *parts, max(a.size, b.size))


def clinical_score(
    reference: str,
    draft: str,
    age: float | None = None,
    indication: str = "",
    weights: Weights = WEIGHTS,
    counted: AbstractSet[str] | None = None,
) -> float | None:
    """Score a draft from 0 to 1; texts without an abnormal finding agree. None where the rules cannot read the report.

    Age, in years, and indication change how much a finding matters. Only findings that are ``counted`` count, if given.
    """
    if not readable(reference):
        return None
    true, drafted = abnormal(reference), abnormal(draft)
    if counted is not None:
        true, drafted = ({name: of[name] for name in of if name in counted} for of in (true, drafted))
    surgical = any(not _table()["surgery"].isdisjoint(words) for words in sentences(indication))

    def weigh(finding: ClinicalFinding) -> float:
        entry = _table()["findings"][finding.name]
        level = _CLASSES.index(entry["significance"])
        if age is not None and entry.get("aged"):
            level += (age < 40) - (age >= 65)
        level += bool(entry.get("child") and age is not None and age < 18) - bool(entry.get("surgery") and surgical)
        return weights.classes[min(max(level, 0), 3)] * (1.0 if finding.certain else weights.doubted)

    right = weights.agreement
    wrong = 0.0
    for finding in true.values():
        credit = _credit(finding, drafted, weights)
        right += weigh(finding) * credit
        wrong += weigh(finding) * (1 - credit)
    for finding in drafted.values():
        if finding.name not in true:
            wrong += weights.invented * weigh(finding) * (1 - _credit(finding, true, weights))
    return right / (right + wrong)


def _credit(finding: ClinicalFinding, others: Mapping[str, ClinicalFinding], weights: Weights) -> float:
    """What of a finding another text has: all, without the parts that differ, or a related finding."""
    if finding.name in others:
        return _parts(finding, others[finding.name], weights)
    family = _table()["findings"][finding.name]["family"]
    credit = 0.0
    for other in others.values():
        if family & _table()["findings"][other.name]["family"]:
            credit = max(credit, weights.related * _parts(finding, other, weights))
    return credit


def _parts(true: ClinicalFinding, other: ClinicalFinding, weights: Weights) -> float:
    credit = 1.0
    for part in ("side", "place", "change"):
        credit *= 1 - getattr(weights, part) * _differs(getattr(true, part), getattr(other, part))
    if true.degree:
        apart = min((abs(a - b) for a in true.degree for b in other.degree), default=1) / 2
        credit *= 1 - weights.degree * apart
    if true.size and other.size:
        credit *= 1 - weights.size * min(1.0, abs(math.log2(true.size / other.size)))
    return credit


def _differs(true: AbstractSet[str], other: AbstractSet[str]) -> float:
    """Share of a part that differs: half where the other text does not say it, none where the report does not."""
    if not true:
        return 0.0
    return 1 - len(true & other) / len(true | other) if other else 0.5
