"""Signs that reports do not come from the image, and the recall of each finding; two sections of the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fedtar_flare.metrics.alarms import Alarm, alarms
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.record.events import Evaluation, SiteScores
from fedtar_flare.reporting.format import NOTHING, number
from fedtar_flare.reporting.render import render
from fedtar_flare.reporting.run import Run
from fedtar_flare.reporting.scores import start_name
from fedtar_flare.reporting.section import Section

Sites = Mapping[str, SiteScores]
_KINDS = {
    "known": "known to the warm start",
    "new": "new to the warm start",
    "stated": "stated in the reference, by rules",
}


class Sign(NamedTuple):
    """An alarm of one site; each value with whether it is raised, the second of the shared adapter alone."""

    site: str
    label: str
    values: list[tuple[str, bool]]
    limits: str
    meaning: str


class Recall(NamedTuple):
    """One finding: for each site, number of reports and recall before and after; None where it is not known."""

    kind: str
    name: str
    sites: list[tuple[str, str, str] | None]


def alarm_section(run: Run) -> Section | None:
    """A row for each site and sign, with the patient adapter and without; None before an evaluation."""
    last = run.final or run.warm_start
    if last is None:
        return None
    pairs = _pairs(run.warm_start if run.final else None, last)
    signs: list[Sign] = []
    for site in sorted(last.sites):
        found = [
            {one.name: one for one in _alarms(after.get(site), before.get(site))} for before, after in pairs.values()
        ]
        signs += [_sign(site, [of_part.get(name) for of_part in found]) for name in found[0]]
    if not signs:
        return None
    raised = sum(flag for sign in signs for _, flag in sign.values)
    lead = (
        f"Signs that reports do not come from the image, over all test reports of round {last.round}: "
        f"{raised} of {sum(len(sign.values) for sign in signs)} raised. The limits are chosen, not measured."
    )
    return Section("alarms", "Alarms", lead, render("alarms.html", signs=signs, parts=list(pairs)))


def finding_section(run: Run) -> Section | None:
    """Recall of each finding from the warm start to the last evaluation; None where none is known."""
    last = run.final or run.warm_start
    if last is None:
        return None
    pairs = _pairs(run.warm_start, last)
    tables = [(part, sorted(after), rows) for part, (b, after) in pairs.items() if (rows := _recalls(b, after))]
    if not tables:
        return None
    few = f"fewer than {run.start.min_cell} such reports" if run.start.min_cell > 1 else "no such report"
    lead = (
        f"Share of the test reports with a finding that name it, × 100, from the {start_name(run)}"
        f"{f' to round {run.final.round}' if run.final else ''}; n is the number of reports that have it. "
        f"Blank where a site has {few}."
    )
    return Section("findings", "Recall of each finding", lead, render("findings.html", tables=tables))


def _pairs(start: Evaluation | None, last: Evaluation) -> dict[str, tuple[Sites, Sites]]:
    """By part of the model (unnamed where there is one only), the sites' scores before training and after."""
    personal = (start.sites if start else {}, last.sites)
    if not last.generic:
        return {"": personal}
    return {
        "with the patient adapter": personal,
        "shared adapter alone": (start.generic if start else {}, last.generic),
    }


def _alarms(now: SiteScores | None, start: SiteScores | None) -> list[Alarm]:
    recalls = [_known_recall(scores) if scores else None for scores in (start, now)]
    return alarms(now.all, now.references, recall=(recalls[0], recalls[1])) if now else []


def _known_recall(scores: SiteScores) -> float | None:
    """Recall of the findings that the warm start knows (of all classes where nobody knows which); None without any."""
    counted = [one for kind in ("known", "stated") for one in scores.findings.get(kind, {}).values()]
    there = sum(one["n"] or 0 for one in counted)
    return sum((one["n"] or 0) * (one.get("recall") or 0) for one in counted) / there if there else None


def _sign(site: str, found: list[Alarm | None]) -> Sign:
    first = next(one for one in found if one is not None)
    return Sign(
        site=site,
        label=SCORES[first.name].label if first.name in SCORES else "finding recall",
        values=[(_shown(one, one.value), one.raised) if one else (NOTHING, False) for one in found],
        limits=" / ".join(dict.fromkeys(_limits(one) for one in found if one)),
        meaning=first.meaning,
    )


def _shown(alarm: Alarm, value: float) -> str:
    return number(value, 2) if alarm.name == "length_ratio" else f"{_percent(value)} %"


def _limits(alarm: Alarm) -> str:
    low, high = (_shown(alarm, limit) for limit in alarm.limits)
    if alarm.name == "finding_recall":
        return f"below {low}"
    return f"above {high}" if not alarm.limits[0] else f"below {low}, above {high}"


def _recalls(before: Sites, after: Sites) -> list[Recall]:
    rows = []
    for kind, title in _KINDS.items():
        names = sorted({name for scores in after.values() for name in scores.findings.get(kind, {})})
        for name in names:
            cells: list[tuple[str, str, str] | None] = []
            for site in sorted(after):
                now = after[site].findings.get(kind, {}).get(name)
                start = before[site].findings.get(kind, {}).get(name, {}) if site in before else {}
                recall = now and (number(now.get("n"), 0), _percent(start.get("recall")), _percent(now.get("recall")))
                cells.append(recall or None)
            rows.append(Recall(title, name.replace("_", " "), cells))
    return rows


def _percent(value: float | None) -> str:
    return number(None if value is None else 100 * value, 0)
