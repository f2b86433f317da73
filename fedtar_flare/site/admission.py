"""Whether a job may come: what it asks is held against the site's bounds before any of the site's data is read.

What is asked stands in a :class:`JobRequest`, which the job's own method fills in; nothing here knows any method.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.core.globs import matches
from fedtar_flare.models.sources import stay_offline
from fedtar_flare.protocol.fields import MAX_TEXT
from fedtar_flare.site.bounds import Bounds

_TEXT = 48
"""Most characters of a single name in a reason."""

Amounts = Mapping[str, float]
"""How much is asked, by the setting that asks it."""


class Declined(FedTARError):
    """The site does not do what a job asks; the message may leave: it holds the job's values and the site's bounds."""

    def __init__(self, message: str):
        super().__init__(message, public=message)


@dataclass(frozen=True)
class Reach:
    """What a job changes of a model: layers that an adapter reaches, parameters that travel whole, by setting.

    No job may pick the names that are ``barred``, whatever a site allows: the output layer and embeddings.
    ``parameters`` counts the model, its adapters and what the method trains for itself; 0: not known.
    """

    adapted: Mapping[str, Sequence[str]]
    whole: Mapping[str, Sequence[str]]
    barred: AbstractSet[str]
    parameters: int


@dataclass(frozen=True)
class JobRequest:
    """What a job asks of a site. Each amount is held against the bound ``min_`` or ``max_`` of its name.

    Parameters
    ----------
    patients : Amounts
        Most different patients that can be behind an update.
    local_steps, batch_size : Amounts
        Updates in one task, and studies in one update.
    gradient_scale : Amounts
        What gradients are clipped to or multiplied with before the optimiser sees them.
    learning_rate, decay : Amounts
        Rates of all that is trained, and what one update takes off a weight, which has the rates' upper bound.
    rank, pixels, tokens, beams, rounds, time_steps : Amounts
        Of an adapter, of a study, of a report or a study, of a report's search, and of the run.
    models : Mapping[str, str]
        Models, paths or hub names from outside this package, by setting.
    reach : Callable
        What it changes of the model, given where the site has the models that it names (None: nobody may read them).
    transforms : Sequence[str]
        Names of those that the job adds to the preparation of images.
    noise_multiplier : Amounts
        Of per-patient DP-SGD; 0: none.
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
    noise_multiplier: Amounts = field(default_factory=lambda: {"training.noise_multiplier": 0.0})


def admit(request: JobRequest, bounds: Bounds) -> None:
    """Decline a job that is beyond the site's bounds (:class:`Declined`), naming all of them; see :func:`breaches`."""
    if found := breaches(request, bounds):
        raise declined(found)


def breaches(request: JobRequest, bounds: Bounds) -> list[str]:
    """Every bound that a job is beyond, as 'what is asked (what is allowed)'; empty where the job may come.

    From here on nothing is fetched from a hub, unless the site allows it. Raises ConfigError if a model that the site
    allows cannot be read.
    """
    if bounds.models_from == "list":
        stay_offline()
    foreign = [
        f"{setting} {_short(name)} (not among this site's models)"
        for setting, name in request.models.items()
        if bounds.models_from != "anywhere" and name not in bounds.models
    ]
    reach = request.reach(None if foreign else bounds.models)
    amounts = {**vars(request), "parameters": {"parameters": reach.parameters}}
    found = [*foreign, *_layers(reach, bounds)]
    strange = [name for name in request.transforms if name not in bounds.transforms]
    found += [f"data.transforms {name} (not among this site's transforms)" for name in strange]
    for name, bound in bounds:
        side, _, kind = name.partition("_")
        if side not in ("min", "max") or kind in ("seconds", "membership_auc", "patient_epsilon"):
            continue
        for setting, value in (amounts[kind] | (request.decay if name == "max_learning_rate" else {})).items():
            if side == "min" and not value >= bound:
                unit = " patients" if kind == "patients" else ""
                found.append(f"{setting} {_number(value)} (at least {_number(bound)}{unit})")
            if side == "max" and bound is not None and not value <= bound:
                found.append(f"{setting} {_number(value)} (at most {_number(bound)})")
    return found


def declined(found: Sequence[str]) -> Declined:
    """The answer to a job that is beyond these bounds: as many of them as a reply's reason holds."""
    text, left = f"declined by the site's policy: {found[0]}", len(found) - 1
    for reason in found[1:]:
        room = MAX_TEXT - (len(f"; and {left} more") if left > 1 else 0)
        if len(text) + len(reason) + 2 > room:
            break
        text, left = f"{text}; {reason}", left - 1
    return Declined(text + (f"; and {left} more" if left else ""))


def _layers(reach: Reach, bounds: Bounds) -> Iterator[str]:
    """Layers that an adapter may not reach, and parameters that may not travel whole."""
    for setting, names in (*reach.adapted.items(), *reach.whole.items()):
        if barred := [name for name in names if name in reach.barred]:
            yield f"{setting} reaches {_several(barred)} (never the output layer or an embedding)"
    for setting, names in reach.adapted.items():
        if outside := [name for name in names if not matches(name, bounds.lora_targets)]:
            yield f"{setting} reaches {_several(outside)} (only {_short(', '.join(bounds.lora_targets))})"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) and abs(value) < 10**15 else f"{value:.6g}"


def _several(names: Sequence[str]) -> str:
    return f"{names[0][:_TEXT]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"


def _short(text: str) -> str:
    return repr(text[:_TEXT] + "..." * (len(text) > _TEXT))
