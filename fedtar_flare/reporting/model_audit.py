"""An audit of an adapter (:mod:`fedtar_flare.site.model_audit`) as text, and the vote in which a part of it leaves."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from fedtar_flare.core.files import read_json
from fedtar_flare.core.settings import Settings, build
from fedtar_flare.core.text import columns, plain

VOTE = "vote-{site}.json"  # a site's, in the folder of the run
STEP = 0.05  # to a multiple of which every share of an audit that leaves is rounded
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


class Project(Settings):
    """Who votes on a release, and what holds it: names and group ``release`` of a project file."""

    name: str
    sites: tuple[str, ...] = Field(min_length=1)
    max_membership_auc: float = Field(0.6, ge=0.5, le=1, description="held where a 95 % interval lies above it")
    max_words: int = Field(8, ge=0, description="longest phrase of one training patient in drafts, less that by chance")
    max_exposure: float = Field(0.5, ge=0, le=1, description="mean of the canaries, as a share of 8 bits")
    max_epsilon: float | None = Field(None, gt=0, description="of per-patient DP-SGD; none: no account is asked for")

    @property
    def gates(self) -> str:
        """The gates as text."""
        return ", ".join(f"{name} {value}" for name, value in self.to_dict().items() if name.startswith("max_"))


class Vote(Settings):
    """A site's dossier on an adapter, and what its staff decides; ``reasons`` hold the release whatever that is."""

    site: str = Field(max_length=128, description="name of the site")
    run_id: str = Field(max_length=64, description="run that was audited")
    round: int = Field(ge=0, description="round of the adapter")
    held: bool = Field(description="whether the site's own policy asks to hold the release")
    parts: dict[str, dict[str, Annotated[float, Field(ge=0, le=1)] | None]] = Field(
        description="measures by model, rounded; None where a measure does not apply"
    )
    adapter: dict[str, str] = Field(description="SHA-256 of its files, by name")
    project: Project = Field(strict=False, description="by which the site votes")
    yes: bool
    reasons: tuple[str, ...] = Field(description="gates that the audit is beyond, and the like")
    data: dict[str, str | int] = Field(description="source, time steps, patients in whole cells")
    epsilon: dict[str, float] = Field(description="at delta 1e-5 of all runs, rounded up, by what has noise")
    approval: str = Field(description="digest of the job that the site approved for this run; empty: none")
    version: str
    time: str

    def validation_errors(self) -> Iterator[tuple[str, str]]:
        if not set(self.parts) <= set(PARTS) or any(not set(part) <= set(MEASURES) for part in self.parts.values()):
            yield "parts", f"those of {', '.join(PARTS)}, each with {', '.join(MEASURES)}"

    def rows(self) -> Iterator[tuple[str, ...]]:
        """List the table's rows as text."""
        for part, values in self.parts.items():
            yield plain(self.site), part, *_cells(values)


def rounded(parts: Mapping[str, Any], counts: Mapping[str, Mapping[str, int]], least: int) -> dict[str, Any]:
    """Round the parts of an audit that leave the site, and leave out measures of groups of too few patients."""
    few = {kind: any(group[kind] < max(1, least) for group in counts.values()) for kind in ("all", "rare")}
    shown = [name for name in MEASURES if not few["all"] and not (name == "rare_auc" and few["rare"])]
    out: dict[str, Any] = {}
    for part, of in parts.items():
        values = {name: _measure(of, name) for name in shown}
        out[part] = {n: None if v is None else round(round(v / STEP) * STEP, 2) for n, v in values.items()}
    return out


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


def read_votes(folder: Path, run_id: str) -> list[Vote]:
    """The votes on a run in its folder, by file name, not verified; a malformed one is a ConfigError."""
    files = sorted(folder.glob(VOTE.format(site="*")))
    votes = [build(Vote, read_json(file).get("content"), str(file)) for file in files]
    return [vote for vote in votes if vote.run_id == run_id]


def _measure(part: Mapping[str, Any], name: str) -> float | None:
    """One of :data:`MEASURES` in a part of an audit."""
    kind, _, group = name.partition("_")
    return part.get(group, {}).get(kind) if kind in ("own", "other") else part.get(name)


def _cells(values: Mapping[str, float | None], names: Collection[str] = MEASURES) -> Iterator[str]:
    for name in names:
        yield "-" if (value := values.get(name)) is None else f"{value:.2f}"
