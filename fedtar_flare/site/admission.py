"""Admission of jobs: a request is compared with the site's bounds before any of the site's data is read.

A job's own method fills in the :class:`JobRequest`; nothing here knows any method.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.core.settings import matches
from fedtar_flare.models.sources import stay_offline
from fedtar_flare.protocol.messages import MAX_TEXT
from fedtar_flare.site.site_file import Bounds

NO_REQUEST = ("seconds", "membership_auc", "patient_epsilon", "adapter_norm", "answers")
"""Kinds of bounds on what comes later, not on what a job's settings say."""
_TEXT = 48  # most characters of a single name in a reason
Amounts = Mapping[str, float]  # by the setting that requests them


class Declined(FedTARError):
    """The site declines a job. The message may leave: it holds the job's values and the site's bounds."""

    def __init__(self, message: str):
        super().__init__(message, public=message)


@dataclass(frozen=True)
class Reach:
    """The parts of a model that a job changes: names of layers that an adapter reaches (``adapted``) and of
    parameters that travel whole, by setting; ``barred`` ones (the output layer, embeddings), which no job may pick
    whatever a site allows; and the number of values of the model, its adapters and what the method trains besides
    (0: not known).
    """

    adapted: Mapping[str, Sequence[str]]
    whole: Mapping[str, Sequence[str]]
    barred: AbstractSet[str]
    parameters: int


@dataclass(frozen=True)
class JobRequest:
    """A job's request to a site. Each amount is compared with the bound ``min_`` or ``max_`` of its name.

    ``patients`` is the most different patients that can be behind an update; ``gradient_scale`` what gradients are
    clipped to or multiplied with; ``decay`` the share that one update takes off a weight, which has the rates' bound.
    ``models`` come from outside this package; ``reach`` gives what the job changes of the model, from the files of the
    models that it names (None: not to be read); a ``noise_multiplier`` of 0 is no per-patient DP-SGD.
    """

    patients: Amounts
    local_steps: Amounts
    batch_size: Amounts
    gradient_scale: Amounts
    learning_rate: Amounts
    decay: Amounts
    rank: Amounts
    pixels: Amounts
    tokens: Amounts
    beams: Amounts
    rounds: Amounts
    time_steps: Amounts
    models: Mapping[str, str]
    reach: Callable[[Mapping[str, Path | None] | None], Reach]
    transforms: Sequence[str] = ()
    noise_multiplier: Amounts = field(default_factory=partial(dict, {"training.noise_multiplier": 0.0}))


def admit(request: JobRequest, bounds: Bounds) -> None:
    """Decline a job that is beyond the site's bounds, naming as many of them as a reply's reason has room for."""
    if not (reasons := breaches(request, bounds)):
        return
    text, left = f"declined by the site's policy: {reasons[0]}", len(reasons) - 1
    for reason in reasons[1:]:
        room = MAX_TEXT - (len(f"; and {left} more") if left > 1 else 0)
        if len(text) + len(reason) + 2 > room:
            break
        text, left = f"{text}; {reason}", left - 1
    raise Declined(text + (f"; and {left} more" if left else ""))


def breaches(request: JobRequest, bounds: Bounds) -> list[str]:
    """List every bound that a job is beyond; from here on nothing is fetched from a hub, unless the site allows it."""
    if bounds.models_from == "list":
        stay_offline()
    reasons = []
    for setting, name in request.models.items():
        if bounds.models_from != "anywhere" and name not in bounds.models:
            reasons.append(f"{setting} {_short(name)} (not among this site's models)")
    reach = request.reach(None if reasons else bounds.models)
    for setting, names in (*reach.adapted.items(), *reach.whole.items()):
        if barred := [name for name in names if name in reach.barred]:
            reasons.append(f"{setting} reaches {_several(barred)} (never the output layer or an embedding)")
    for setting, names in reach.adapted.items():
        if outside := [name for name in names if not matches(name, bounds.lora_targets)]:
            reasons.append(f"{setting} reaches {_several(outside)} (only {_short(', '.join(bounds.lora_targets))})")
    for name in request.transforms:
        if name not in bounds.transforms:
            reasons.append(f"data.transforms {name} (not among this site's transforms)")
    amounts = {**vars(request), "parameters": {"parameters": reach.parameters}}
    for name, bound in bounds:
        side, _, kind = name.partition("_")
        if side not in ("min", "max") or kind in NO_REQUEST:
            continue
        for setting, value in (amounts[kind] | (request.decay if name == "max_learning_rate" else {})).items():
            if side == "min" and not value >= bound:
                unit = " patients" if kind == "patients" else ""
                reasons.append(f"{setting} {_number(value)} (at least {_number(bound)}{unit})")
            if side == "max" and bound is not None and not value <= bound:
                reasons.append(f"{setting} {_number(value)} (at most {_number(bound)})")
    return reasons


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) and abs(value) < 10**15 else f"{value:.6g}"


def _several(names: Sequence[str]) -> str:
    return f"{names[0][:_TEXT]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"


def _short(text: str) -> str:
    return repr(text[:_TEXT] + "..." * (len(text) > _TEXT))
