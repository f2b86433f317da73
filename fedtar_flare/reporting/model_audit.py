"""An audit of an adapter (:mod:`fedtar_flare.site.model_audit`) as text, and the summary that may leave the site."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from fedtar_flare.core.files import read_json
from fedtar_flare.core.settings import Settings, build
from fedtar_flare.core.text import columns, plain

SUMMARY = "model-audit-{site}.json"  # a site's, in the folder of the run
STEP = 0.05  # to a multiple of which every share of a summary is rounded
PARTS = ("warm start", "shared adapter", "with patient adapter", "as it writes at the site")
MEASURES = {
    "membership_auc": "membership AUC",
    "loss_auc": "by loss alone",
    "rare_auc": "the same, rare findings",
    "shadow_auc": "by shadow runs of this site alone",
    "shadow_found": "found at 10 % false alarms",
    "exposure": "exposure of canaries",
    "own_training": "own phrases, training",
    "own_held_out": "held-out",
    "other_training": "others' phrases, training",
    "other_held_out": "held-out",
}


class AuditSummary(Settings):
    """The part of an audit that a site's staff may hand to the study lead."""

    site: str = Field(max_length=128, description="name of the site")
    run_id: str = Field(max_length=64, description="run that was audited")
    round: int = Field(ge=0, description="round of the adapter")
    held: bool = Field(description="whether the site asks the lead to hold the adapter's release")
    parts: dict[str, dict[str, Annotated[float, Field(ge=0, le=1)] | None]] = Field(
        description="measures by model, rounded; None where a measure does not apply"
    )

    def validation_errors(self) -> Iterator[tuple[str, str]]:
        if not set(self.parts) <= set(PARTS) or any(not set(part) <= set(MEASURES) for part in self.parts.values()):
            yield "parts", f"those of {', '.join(PARTS)}, each with {', '.join(MEASURES)}"

    def rows(self) -> Iterator[tuple[str, ...]]:
        """List the table's rows as text."""
        for part, values in self.parts.items():
            yield plain(self.site), part, *_cells(values)


def rounded(parts: Mapping[str, Any], counts: Mapping[str, Mapping[str, int]], least: int) -> dict[str, Any]:
    """Round the parts of an audit for its summary, and leave out measures of groups of too few patients."""
    few = {kind: any(group[kind] < max(1, least) for group in counts.values()) for kind in ("all", "rare")}
    shown = [name for name in MEASURES if not few["all"] and not (name == "rare_auc" and few["rare"])]

    def to_step(value: float | None) -> float | None:
        return None if value is None else round(round(value / STEP) * STEP, 2)

    return {part: {name: to_step(_measure(values, name)) for name in shown} for part, values in parts.items()}


def table(audit: Mapping[str, Any]) -> list[str]:
    """Write out a whole audit, for the site."""
    values = {part: {name: _measure(of, name) for name in MEASURES} for part, of in audit["parts"].items()}
    shown = [name for name in MEASURES if any(of_part[name] is not None for of_part in values.values())]
    rows = [("", *(MEASURES[name] for name in shown))]
    rows += [(part, *_cells(of_part, shown)) for part, of_part in values.items()]
    lines = columns(rows)
    for part, of in audit["parts"].items():
        words = [str(of[group]["longest_other"]) for group in ("training", "held_out") if group in of]
        more = f"; longest phrase of another patient (training, held-out): {', '.join(words)} words" if words else ""
        if interval := of.get("shadow_interval"):
            more += f"; 95 % interval of those found at 10 % false alarms: {interval[0]:.2f} to {interval[1]:.2f}"
        if bits := of.get("exposures"):
            more += f"; bits of each canary's exposure: {', '.join(f'{value:.1f}' for value in bits)}"
        if "written" in of:
            more += f", {of['written'] or 'none'} written in drafts"
        lines.append(f"{part}: 95 % interval of the AUC +- {1.96 * of['standard_error']:.2f}{more}")
    return lines + ["ABOVE the site's policy.max_membership_auc: ask to hold the release"] * audit["held"]


def read_summaries(folder: Path, run_id: str) -> list[AuditSummary]:
    """The summaries of a run in its folder, by file name; a malformed one is a ConfigError."""
    files = sorted(folder.glob(SUMMARY.format(site="*")))
    summaries = [build(AuditSummary, read_json(file), str(file)) for file in files]
    return [summary for summary in summaries if summary.run_id == run_id]


def _measure(part: Mapping[str, Any], name: str) -> float | None:
    """One of :data:`MEASURES` in a part of an audit."""
    kind, _, group = name.partition("_")
    value: float | None = part.get(group, {}).get(kind) if kind in ("own", "other") else part.get(name)
    return value


def _cells(values: Mapping[str, float | None], names: Collection[str] = MEASURES) -> Iterator[str]:
    for name in names:
        yield "-" if (value := values.get(name)) is None else f"{value:.2f}"
