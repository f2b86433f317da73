"""Two sections of the page: signs that drafts do not come from the image, and precision and recall of each finding."""

from collections.abc import Mapping
from typing import NamedTuple

from fedtar_flare.metrics.alarms import Alarm, alarms
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.record.events import Evaluation, Scores, SiteScores
from fedtar_flare.reporting.format import NOTHING, number, share
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
    """An alarm about a site: its value, and whether it is raised, for each part of the model."""

    site: str
    label: str
    values: list[tuple[str, bool]]
    limits: str
    meaning: str


class FindingRow(NamedTuple):
    """A finding with recall and precision by site: number of reports, and share before and after."""

    kind: str
    name: str
    sites: list[list[tuple[str, str, str]]]


def alarm_section(run: Run) -> Section | None:
    """A table by site and sign, with the patient adapter and without; None before an evaluation."""
    last = run.shown or run.warm_start
    if last is None:
        return None
    pairs = _pairs(run.warm_start if run.shown else None, last)
    signs: list[Sign] = []
    for site in sorted(last.sites):
        found = [{a.name: a for a in _alarms(after.get(site), before.get(site))} for before, after in pairs.values()]
        signs += [_sign(site, [alarms.get(name) for alarms in found]) for name in {**found[0], **found[-1]}]
    if not signs:
        return None
    flags = [flag for sign in signs for _, flag in sign.values]
    count = f"{sum(flags)} of {len(flags)} raised"
    lead = f"Signs that reports do not come from the image, over all test reports of round {last.round}: {count}. The "
    lead += "limits are chosen, not measured."
    content = render("alarms.html", signs=signs, parts=list(pairs))
    return Section("alarms", "Alarms", lead, content, (("alarms", count),))


def finding_section(run: Run) -> Section | None:
    """Precision and recall of each finding, from the warm start to the round shown; None where none is known."""
    last = run.shown or run.warm_start
    if last is None:
        return None
    pairs = _pairs(run.warm_start, last)
    tables = [(part, sorted(after), rows) for part, (b, after) in pairs.items() if (rows := _rows(b, after))]
    if not tables:
        return None
    few = f"fewer than {run.start.min_cell} patients" if run.start.min_cell > 1 else "no patient"
    lead = (
        "Recall: the share of the n test reports with a finding that name it. Precision: the share of the n reports "
        "that name a finding that are right. Both are × 100, from the "
        f"{start_name(run)}{f' to round {run.shown.round}' if run.shown else ''}; n is that of the later one; of fewer "
        "than 20 reports it has its 95 % interval (Wilson). "
        f"Blank where such reports are of {few}."
    )
    return Section("findings", "Precision and recall of each finding", lead, render("findings.html", tables=tables))


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
    if now is None:
        return []
    recall, precision = _known(start, "recall", "n"), _known(start, "precision", "named")
    recall_now, precision_now = _known(now, "recall", "n"), _known(now, "precision", "named")
    invented, invented_now = (None if one is None else 1 - one for one in (precision, precision_now))
    return alarms(now.all, now.references, recall=(recall, recall_now), invented=(invented, invented_now))


def _known(scores: SiteScores | None, share: str, count: str) -> float | None:
    """Mean over the findings that the warm start knows (all classes where that is unknown); None without any."""
    kinds = scores.findings if scores else {}
    counted = [(one.get(count) or 0, one) for kind in ("known", "stated") for one in kinds.get(kind, {}).values()]
    reports = sum(n for n, _ in counted)
    return sum(n * (one.get(share) or 0) for n, one in counted) / reports if reports else None


def _sign(site: str, found: list[Alarm | None]) -> Sign:
    first = next(one for one in found if one is not None)
    return Sign(
        site=site,
        label=SCORES[first.name].label if first.name in SCORES else first.name.replace("_", " "),
        values=[(_shown(one, one.value), one.raised) if one else (NOTHING, False) for one in found],
        limits=" / ".join(dict.fromkeys(_limits(one) for one in found if one)),
        meaning=first.meaning,
    )


def _shown(alarm: Alarm, value: float) -> str:
    return number(value, 2) if alarm.name == "length_ratio" else f"{_percent(value)} %"


def _limits(alarm: Alarm) -> str:
    below, above = (
        f"{word} {_shown(alarm, limit)}" for word, limit in zip(("below", "above"), alarm.limits, strict=True)
    )
    if alarm.name == "finding_recall":
        return below
    return f"{below}, {above}" if alarm.limits[0] else above


def _rows(before: Sites, after: Sites) -> list[FindingRow]:
    rows = []
    for kind, title in _KINDS.items():
        for name in sorted({name for scores in after.values() for name in scores.findings.get(kind, {})}):
            sites = []
            for site in sorted(after):
                both = (before.get(site, SiteScores()), after[site])
                old, now = (scores.findings.get(kind, {}).get(name, {}) for scores in both)
                sites.append([_share(old, now, "n", "recall"), _share(old, now, "named", "precision")])
            rows.append(FindingRow(title, name.replace("_", " "), sites))
    return rows


def _share(before: Scores, now: Scores, count: str, part: str) -> tuple[str, str, str]:
    """Number of reports, and the share before and now (of few reports with its interval); empty if unknown now."""
    if now.get(part) is None:
        return "", "", ""
    return number(now.get(count), 0), _percent(before.get(part)), share(now[part], now.get(count) or 0)


def _percent(value: float | None) -> str:
    return number(None if value is None else 100 * value, 0)
