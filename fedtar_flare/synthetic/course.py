"""Patients of a synthetic site and the course of their disease, a pure function of (seed, site, options).

Planted effects: wording, scanner, prevalence, or what single steps are worth (:class:`CohortOptions`); from 65 years on
the sentence on the bones is another one, which no image shows; emphysema and cardiomegaly are commoner from 65 on,
lymphadenopathy in women; new findings, which the warm start has never seen, are in some percent of the visits of most
sites each and almost none at the others, so that others' data shows a site what it lacks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

import numpy as np
from pydantic import Field

from fedtar_flare.core.settings import Settings
from fedtar_flare.data.cells import Split, Timeline, split_of, synthetic_key
from fedtar_flare.synthetic.reports import Change, State
from fedtar_flare.synthetic.vocabulary import (
    FINDINGS,
    KIND,
    KNOWN_FINDINGS,
    KNOWN_KINDS,
    NEW_FINDINGS,
    NEW_KINDS,
    kind_of,
)

OLDER_FROM = 65.0  # age from which a patient belongs to the older group
MOST_FINDINGS, MOST_NEW = 4, 1  # findings of a visit at most, known and new
OPEN_BIN_DAYS = 180  # days that the first and the last calendar bin cover, which are open to one side
FIRST_DAY = datetime(2019, 1, 1)
REVERTED_AFTER = 2  # time steps for which a change lasts that is reverted
WORTH = ("noisy", "misfiled", "coarse")  # changes of what a time step is worth
GAP_DAYS = (3.0, 270.0)  # shortest and longest time between visits, drawn log-uniformly

_CYCLE: Sequence[Split] = ("train", "validation", "test", "train", "train", "train", "test", "train", "train", "train")


class CohortOptions(Settings):
    """Content of the synthetic cohort; the defaults are the simulator's."""

    patients: int = Field(0, ge=0, description="patients of this site; 0: as many as the job asks for")
    change: Literal[
        "early", "late", "none", "gradual", "template", "reverted", "scanner", "epidemic", "misfiled", "noisy", "coarse"
    ] = Field(
        "late",
        description="what changes with time. early, late: wording and consolidations, at step 2 or at three quarters "
        "of T; template, gradual, reverted: the wording alone, at once, by degrees, or for two steps; scanner: that of "
        "another site; epidemic: cavities, rare before, are common; noisy: images have eight times the noise; and but "
        "for test patients, misfiled: reports are other patients'; coarse: they leave out small findings, call all "
        "others moderate, and tell no change",
    )
    change_step: int = Field(0, ge=0, description="first time step of the change; 0: as for early and late")
    change_steps: tuple[int, ...] = Field(
        (), description="time steps of noisy, misfiled or coarse; empty: all from change_step on"
    )
    checked_validation: bool = Field(
        False, description="misfiled and coarse leave validation patients' reports right too, as if staff had checked"
    )
    missed_steps: tuple[int, ...] = Field((), description="time steps at which no image of this site can be read")
    change_group: Literal["women", "everyone"] = Field("women", description="whose wording changes")
    full_course: float = Field(
        0.75, ge=0, le=1, description="share of patients with a visit at every time step; the others have fewer"
    )
    untidy: float = Field(
        0.0, ge=0, le=1, description="share of patients with two visits on one day, and share without a recorded age"
    )
    own_words: float = Field(
        1.0,
        ge=0,
        le=1,
        description="strength of the reporting style: share of the kinds of finding in the site's own words, the "
        "others in those of style 1; under 0.5 the order of the report is that of style 1 too",
    )

    def validation_errors(self) -> Iterator[tuple[str, str]]:
        if self.change_steps and self.change not in WORTH:
            yield "change_steps", f"empty, but for a change of {', '.join(WORTH)}"


@dataclass(frozen=True, slots=True)
class PlannedVisit:
    """One visit; ``age`` is known here even where it is not recorded, ``resolved`` are findings that are gone."""

    visit_id: str
    acquired: datetime
    time_step: int
    age: float
    findings: Mapping[str, State]
    resolved: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlannedPatient:
    """One patient, with visits by date."""

    patient_id: str
    sex: Literal["F", "M"]
    split: Split
    age_recorded: bool
    visits: tuple[PlannedVisit, ...]


def stream(*parts: object) -> np.random.Generator:
    """A generator that depends on the parts alone: the same in every process, independent for different parts."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return np.random.default_rng(np.frombuffer(digest, dtype=np.uint32))


def change_step(options: CohortOptions, time_steps: int) -> int | None:
    """First time step of the planted change: by default 2 when early, else at three quarters of T; None without one."""
    if options.change == "none" or time_steps < 2:
        return None
    return options.change_step or (2 if options.change == "early" else max(2, -(-3 * time_steps // 4)))


def wording_share(options: CohortOptions, step: int, time_steps: int) -> float:
    """Share, 0 to 1, of the kinds of finding that are in the site's second wording at a time step."""
    begins = change_step(options, time_steps)
    if begins is None or step < begins or options.change in ("scanner", "epidemic", *WORTH):
        return 0.0
    if options.change == "gradual":
        return (step - begins + 1) / max(1, time_steps - begins + 1)
    return float(options.change != "reverted" or step < begins + REVERTED_AFTER)


def worth_changes(options: CohortOptions, step: int, time_steps: int) -> bool:
    """Whether a time step is one whose images or reports are worth less than others'."""
    begins = change_step(options, time_steps)
    at = step in options.change_steps or (not options.change_steps and begins is not None and step >= begins)
    return options.change in WORTH and at


def factors_at(options: CohortOptions, step: int, time_steps: int) -> dict[str, float]:
    """Factors by which the planted change multiplies the frequency of kinds at a time step."""
    begins = change_step(options, time_steps)
    after = begins is not None and step >= begins
    if options.change == "epidemic":
        return {kind: entry["epidemic"][after] for kind, entry in KIND.items() if "epidemic" in entry}
    if after and options.change in ("early", "late"):
        return {kind: entry["changed"] for kind, entry in KIND.items() if "changed" in entry}
    return {}


def plan_patient(
    site: str, style: int, number: int, *, timeline: Timeline, seed: int, options: CohortOptions
) -> PlannedPatient:
    """Plan the patient of a number (0, 1, ...) at a site, whose identifier falls into the split planned for the number:
    7 : 1 : 2 within any ten, one of each within the first three.
    """
    time_steps = timeline.time_steps
    rng = stream("patient", seed, site, number)
    key = synthetic_key(seed, site)
    patient_id = f"{site}-{int(rng.integers(16**8)):08x}"
    split = _CYCLE[number % len(_CYCLE)]
    while split_of(patient_id, key) != split:
        patient_id = f"{site}-{int(rng.integers(16**8)):08x}"
    sex: Literal["F", "M"] = "F" if rng.random() < 0.5 else "M"
    age = float(np.clip(rng.normal(64, 14), 20, 92))
    age_recorded = bool(rng.random() >= options.untidy)
    count = time_steps if rng.random() < options.full_course else int(rng.integers(1, max(2, time_steps)))
    moments = _moments(rng, count, timeline, options)
    steps = [timeline.step_of(i, moment) for i, moment in enumerate(moments)]
    factors = _factors(style, age, sex, options)
    rare = stream("new findings", seed, site, number)
    visits: list[PlannedVisit] = []
    before: dict[str, int] = {}
    for i, (moment, step) in enumerate(zip(moments, steps, strict=True)):
        more = factors_at(options, step, time_steps)
        sizes = _next_sizes(rng, KNOWN_FINDINGS, MOST_FINDINGS, before, factors, more, first=i == 0)
        sizes |= _next_sizes(rare, NEW_FINDINGS, MOST_NEW, before, factors, more, first=i == 0)
        states = {}
        for name, size in sizes.items():
            change: Change = "first" if i == 0 else "new"
            if name in before:
                change = "larger" if size > before[name] else "smaller" if size < before[name] else "stable"
            states[name] = State(size, change)
        visits.append(
            PlannedVisit(
                visit_id=f"{int(rng.integers(16**10)):010x}",  # says nothing about the order
                acquired=moment,
                time_step=step,
                age=round(age + (moment - moments[0]).days / 365.25, 2),
                findings=states,
                resolved=tuple(name for name in FINDINGS if name in before and name not in sizes),
            )
        )
        before = sizes
    return PlannedPatient(patient_id, sex, split, age_recorded, tuple(visits))


def _moments(rng: np.random.Generator, count: int, timeline: Timeline, options: CohortOptions) -> list[datetime]:
    """Dates and times of the visits, rising and different."""
    minute = timedelta(minutes=1)
    clock = [minute * int(rng.integers(7 * 60, 13 * 60)) for _ in range(count)]
    if timeline.alignment == "period":
        bins = sorted(rng.choice(timeline.time_steps, size=count, replace=False).tolist())
        inner = [(bound - FIRST_DAY).days for bound in timeline.periods] or [OPEN_BIN_DAYS]
        bounds = [inner[0] - OPEN_BIN_DAYS, *inner, inner[-1] + OPEN_BIN_DAYS]
        days = [bounds[b] + int(rng.integers(0, max(1, bounds[b + 1] - bounds[b]))) for b in bins]
    else:
        low, high = np.log(GAP_DAYS)
        gaps = [max(1, round(float(np.exp(rng.uniform(low, high))))) for _ in range(count - 1)]
        days = np.cumsum([int(rng.integers(0, 2 * 365)), *gaps]).tolist()
    moments = sorted(FIRST_DAY + timedelta(days=day) + time for day, time in zip(days, clock, strict=True))
    if count > 1 and rng.random() < options.untidy:
        second = int(rng.integers(1, count))
        moments[second] = moments[second - 1] + minute * int(rng.integers(90, 480))
    return moments


def _factors(style: int, age: float, sex: str, options: CohortOptions) -> dict[str, float]:
    """Frequency of each kind in this patient, relative to the average."""
    site = stream("case mix", style).uniform(0.7, 1.4, len(KNOWN_KINDS))
    factors = dict(zip(KNOWN_KINDS, site.tolist(), strict=True))
    rare = [kind for kind in almost_never(style) if options.change != "epidemic" or "epidemic" not in KIND[kind]]
    factors |= {kind: 1 / 12 if kind in rare else 1.0 for kind in NEW_KINDS}
    for group in ("older",) * (age >= OLDER_FROM) + (sex,):
        for kind, entry in KIND.items():
            factors[kind] *= entry.get(group, 1.0)
    return factors


def almost_never(style: int) -> tuple[str, ...]:
    """New kinds that the sites with a reporting style hardly ever see: a twelfth as often as the others."""
    return tuple(kind for kind in NEW_KINDS if style in KIND[kind]["almost_never"])


def _next_sizes(
    rng: np.random.Generator,
    names: Sequence[str],
    most: int,
    before: Mapping[str, int],
    factors: Mapping[str, float],
    more: Mapping[str, float],
    *,
    first: bool,
) -> dict[str, int]:
    """Sizes of at most ``most`` of ``names``; chances times ``factors`` of the patient and ``more`` of the time."""
    sizes: dict[str, int] = {}
    chance, draw = rng.random(len(names)), rng.random(len(names))
    appearing: list[str] = []
    for i, name in enumerate(names):
        kind = KIND[kind_of(name)]
        at_first, appears, shrinks, grows = kind["course"]
        if name in before:
            move = -kind.get("shrinks_by", 1) if chance[i] < shrinks else int(chance[i] >= 1 - grows)
            size = min(before[name] + move, 3)
            if size > 0:
                sizes[name] = size
            continue
        likely = (at_first if first else appears) * factors[kind_of(name)]
        if chance[i] < likely * more.get(kind_of(name), 1.0):
            appearing.append(name)
    room = most - len(sizes)
    for name in rng.permutation(appearing)[:room] if appearing else ():
        u = draw[names.index(str(name))]
        sizes[str(name)] = 1 if u < 0.4 else 2 if u < 0.75 else 3
    return {name: sizes[name] for name in names if name in sizes}
