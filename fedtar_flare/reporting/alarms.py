"""Two sections of the page: signs that drafts do not come from the image, and precision and recall of each finding."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.record.events import Evaluation, Scores, SiteScores
from fedtar_flare.reporting.format import NOTHING, number, share
from fedtar_flare.reporting.render import render
from fedtar_flare.reporting.run import Run
from fedtar_flare.reporting.scores import start_name
from fedtar_flare.reporting.section import Section

IDENTICAL_EXCESS = 0.25  # of identical drafts over identical references: normal studies do read alike
MISMATCHED = 0.4  # drafts that do not depend on the patient fit half of others' references better (0.5)
LENGTH_RATIO = (0.6, 1.5)  # below, drafts are cut short or leave things out; above, they repeat themselves
FINDINGS_LOSS = 0.02  # more missed or invented findings than by rounding and chance in a small test set
CONTRADICTIONS_EXCESS = 0.1  # of contradicted claims over those of the references, which leave things out too
_MEANING = {
    "identical_share": "reports repeat each other word for word",
    "mismatched_share": "reports fit other patients nearly as well as their own",
    "length_ratio": "reports are much shorter or longer than the references",
    "finding_recall": "findings that the warm start reported are missed now",
    "invented_findings": "findings are named that are not there, more often than by the warm start",
    "contradictions": "claims of change do not follow from the patient's report before",
}
_KINDS = {
    "known": "known to the warm start",
    "new": "new to the warm start",
    "stated": "stated in the reference, by rules",
}
Sites = Mapping[str, SiteScores]


@dataclass(frozen=True)
class Alarm:
    """A value against the lowest and highest value that raise nothing."""

    name: str
    value: float
    limits: tuple[float, float]

    @property
    def raised(self) -> bool:
        return not self.limits[0] <= self.value <= self.limits[1]

    def shown(self, value: float) -> str:
        return number(value, 2) if self.name == "length_ratio" else f"{share(value)} %"

    @property
    def bounds(self) -> str:
        """The limits in words."""
        below, above = f"below {self.shown(self.limits[0])}", f"above {self.shown(self.limits[1])}"
        if self.name == "finding_recall":
            return below
        return f"{below}, {above}" if self.limits[0] else above


def alarms(now: SiteScores | None, start: SiteScores | None) -> dict[str, Alarm]:
    """The alarms about one site's test reports by name, raised or not; without its numbers an alarm is left out."""
    if now is None:
        return {}

    def above(natural: float | None, excess: float) -> tuple[float, float] | None:
        return None if natural is None else (0.0, min(1.0, natural + excess))

    def invented(scores: SiteScores | None) -> float | None:
        precision = _of_known(scores, "precision", "named")
        return None if precision is None else 1 - precision

    recall, references = _of_known(start, "recall", "n"), now.references
    limits = {
        "identical_share": above(references.get("identical_share"), IDENTICAL_EXCESS),
        "mismatched_share": (0.0, MISMATCHED),
        "length_ratio": LENGTH_RATIO,
        "finding_recall": None if recall is None else (max(0.0, recall - FINDINGS_LOSS), 1.0),
        "invented_findings": above(invented(start), FINDINGS_LOSS),
        "contradictions": above(references.get("contradictions"), CONTRADICTIONS_EXCESS),
    }
    values = {**now.all, "finding_recall": _of_known(now, "recall", "n"), "invented_findings": invented(now)}
    return {
        name: Alarm(name, value, limit)
        for name, limit in limits.items()
        if limit and (value := values.get(name)) is not None
    }


def _of_known(scores: SiteScores | None, share: str, count: str) -> float | None:
    """Mean over the findings that the warm start knows (all classes where that is unknown); None without any."""
    kinds = scores.findings if scores else {}
    findings = [finding for kind in ("known", "stated") for finding in kinds.get(kind, {}).values()]
    reports = sum(finding.get(count) or 0 for finding in findings)
    return sum((f.get(count) or 0) * (f.get(share) or 0) for f in findings) / reports if reports else None


def alarm_section(run: Run) -> Section | None:
    """A table by site and sign, with the patient adapter and without; None before an evaluation."""
    last = run.shown or run.warm_start
    if last is None:
        return None
    pairs = _pairs(run.warm_start if run.shown else None, last)
    signs: list[dict[str, Any]] = []
    for site in sorted(last.sites):
        of_parts = [alarms(after.get(site), before.get(site)) for before, after in pairs.values()]
        for name in {**of_parts[0], **of_parts[-1]}:
            raised = [part.get(name) for part in of_parts]
            shown = [(alarm.shown(alarm.value), alarm.raised) if alarm else (NOTHING, False) for alarm in raised]
            bounds = " / ".join(dict.fromkeys(alarm.bounds for alarm in raised if alarm))
            label = SCORES[name].label if name in SCORES else name.replace("_", " ")
            sign = {"site": site, "label": label, "parts": shown, "limits": bounds, "meaning": _MEANING[name]}
            signs.append(sign)
    if not signs:
        return None
    flags = [flag for sign in signs for _, flag in sign["parts"]]
    count = f"{sum(flags)} of {len(flags)} raised"
    lead = f"Signs that reports do not come from the image, over all test reports of round {last.round}: {count}. The "
    lead += "limits are set by hand."
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
    until = f" to round {run.shown.round}" if run.shown else ""
    lead = (
        "Recall: the share of the n test reports with a finding that name it. Precision: the share of the n reports "
        f"that name a finding that are right. Both are × 100, from the {start_name(run)}{until}; n is that of the "
        f"later one; of fewer than 20 reports it has its 95 % interval (Wilson). Blank where such reports are of {few}."
    )
    return Section("findings", "Precision and recall of each finding", lead, render("findings.html", tables=tables))


def _pairs(start: Evaluation | None, last: Evaluation) -> dict[str, tuple[Sites, Sites]]:
    """By part of the model (unnamed where there is one only), the sites' scores before training and after."""
    personal = (start.sites if start else {}, last.sites)
    if not last.generic:
        return {"": personal}
    generic = (start.generic if start else {}, last.generic)
    return {"with the patient adapter": personal, "shared adapter alone": generic}


def _rows(before: Sites, after: Sites) -> list[dict[str, Any]]:
    """By finding the recall and precision of each site: number of reports, and share before and after."""
    rows = []
    for kind, title in _KINDS.items():
        for name in sorted({name for scores in after.values() for name in scores.findings.get(kind, {})}):
            sites = []
            for site in sorted(after):
                both = (before.get(site, SiteScores()), after[site])
                old, now = (scores.findings.get(kind, {}).get(name, {}) for scores in both)
                sites.append([_share(old, now, "n", "recall"), _share(old, now, "named", "precision")])
            rows.append({"kind": title, "name": name.replace("_", " "), "sites": sites})
    return rows


def _share(before: Scores, now: Scores, count: str, part: str) -> tuple[str, str, str]:
    """Number of reports, and the share before and now (of few reports with its interval); empty if unknown now."""
    if now.get(part) is None:
        return "", "", ""
    return number(now.get(count), 0), share(before.get(part)), share(now[part], now.get(count) or 0)
