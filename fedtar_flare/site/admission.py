"""Whether a job may come: what it asks is held against the site's bounds before any of the site's data is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedtar_flare.errors import FedTARError
from fedtar_flare.learning.config import LoRAConfig, TrainingConfig
from fedtar_flare.models.config import ModelConfig
from fedtar_flare.models.sources import stay_offline
from fedtar_flare.protocol.fields import MAX_TEXT
from fedtar_flare.site.bounds import Bounds

if TYPE_CHECKING:
    from fedtar_flare.models.outline import Outline
    from fedtar_flare.models.report_generator import ReportGenerator

_TEXT = 48
"""Most characters of a single name in a reason."""
_MORE = "; and {} more"


class Declined(FedTARError):
    """The site does not do what a job asks; all of the message may leave, as it holds nothing but the job's own values
    and the site's bounds.
    """

    def __init__(self, message: str):
        super().__init__(message, public=message)


@dataclass(frozen=True)
class Asked:
    """What a job asks of a site.

    Args:
        extend: adds to a model what the method gives it.
        own_learning_rate: of what a method trains beside the shared adapter; 0: nothing.
        own_parameters: how many those are, at most, given the number of values of the shared adapter.
        candidates: beams of a report among which a method chooses.
        transforms: names of those that the job adds to the preparation of images.
    """

    model: ModelConfig
    lora: LoRAConfig
    training: TrainingConfig
    threads: int
    rounds: int
    time_steps: int
    extend: Callable[[ReportGenerator], None] = lambda model: None
    own_learning_rate: float = 0.0
    own_parameters: Callable[[int], int] = lambda values: 0
    candidates: int = 1
    transforms: tuple[str, ...] = ()


def admit(asked: Asked, bounds: Bounds) -> None:
    """Decline a job that is beyond the site's bounds (:class:`Declined`), naming all of them.

    From here on nothing is fetched from a hub, unless the site allows it. Raises ConfigError if a model that the site
    allows cannot be read.
    """
    if not bounds.hub:
        stay_offline()
    if found := breaches(asked, bounds):
        raise declined(found)


def breaches(asked: Asked, bounds: Bounds) -> list[str]:
    """Every bound that a job is beyond, as 'what is asked (what is allowed)'; empty where the job may come."""
    from fedtar_flare.models.outline import UNKNOWN, outline

    model, lora, training = asked.model, asked.lora, asked.training
    clips = training.max_grad_norm > 0
    found = [
        *_least("training.local_steps", training.local_steps, bounds.min_local_steps),
        *_least("training.batch_size", training.batch_size, bounds.min_batch_size),
        *_least("reports of an update", training.local_steps * training.batch_size, bounds.min_patients, " patients"),
        *(_least("training.max_grad_norm", training.max_grad_norm, bounds.min_clip_norm) if clips else ()),
        *_least("lora.alpha / rank", lora.alpha / lora.rank, bounds.min_lora_scale),
        *_most("training.lr", training.lr, bounds.max_learning_rate),
        *_most("learning rate of the method's own part", asked.own_learning_rate, bounds.max_learning_rate),
        *_most("training.lr x weight_decay", training.lr * training.weight_decay, bounds.max_decay),
        *_most("training.focus", training.focus, bounds.max_focus),
        *_most("rounds", asked.rounds, bounds.max_rounds),
        *_most("time steps", asked.time_steps, bounds.max_time_steps),
        *_most("lora.rank", lora.rank, bounds.max_rank),
        *_most("training.batch_size", training.batch_size, bounds.max_batch_size),
        *_most("pixels of a study", model.slices * model.image_size**2, bounds.max_pixels),
        *_most("model.max_length", model.max_length, bounds.max_tokens),
        *_most("model.decoder_positions", model.decoder_positions, bounds.max_tokens),
        *_most("model.slices x queries", model.slices * model.queries, bounds.max_tokens),
        *_most("model.num_beams", model.num_beams, bounds.max_beams),
        *_most("diagnosis.candidates", asked.candidates, bounds.max_beams),
        *_most("torch_threads", asked.threads, bounds.max_threads),
        *(
            f"data.transforms {name} (not among this site's transforms)"
            for name in asked.transforms
            if name not in bounds.transforms
        ),
    ]
    if foreign := unknown_models(model, bounds):
        return [*foreign, *_layers(model, lora, bounds, UNKNOWN), *found]
    made_of = outline(model.located(bounds.models), asked.extend)
    values = made_of.lora_values(model.lora_targets, lora.rank)
    parameters = made_of.parameters + values + asked.own_parameters(values)
    return [*_layers(model, lora, bounds, made_of), *found, *_most("parameters", parameters, bounds.max_parameters)]


def unknown_models(model: ModelConfig, bounds: Bounds) -> list[str]:
    """Models that a job names and the site does not, as reasons."""
    return [
        f"model.{setting} {_short(name)} (not among this site's models)"
        for setting, name in model.named().items()
        if not bounds.any_model and name not in bounds.models
    ]


def declined(found: Sequence[str]) -> Declined:
    """The answer to a job that is beyond these bounds: as many of them as a reply's reason holds."""
    text, left = f"declined by the site's policy: {found[0]}", len(found) - 1
    for reason in found[1:]:
        room = MAX_TEXT - (len(_MORE.format(left)) if left > 1 else 0)
        if len(text) + len(reason) + 2 > room:
            break
        text, left = f"{text}; {reason}", left - 1
    return Declined(text + (_MORE.format(left) if left else ""))


def _layers(model: ModelConfig, lora: LoRAConfig, bounds: Bounds, made_of: Outline) -> Iterator[str]:
    """Layers that an adapter may not reach, and parameters that may not travel whole."""
    targets = made_of.targeted(model.lora_targets)
    for setting, names in (("model.lora_targets", targets), ("lora.exchange", made_of.exchanged(lora.exchange))):
        if barred := [name for name in names if name in made_of.barred]:
            yield f"{setting} reaches {_several(barred)} (never the output layer or an embedding)"
    if outside := [name for name in targets if not re.fullmatch(bounds.lora_targets, name)]:
        yield f"model.lora_targets reaches {_several(outside)} (only {_short(bounds.lora_targets)})"


def _least(what: str, value: float, least: float, unit: str = "") -> Iterator[str]:
    if not value >= least:
        yield f"{what} {_number(value)} (at least {_number(least)}{unit})"


def _most(what: str, value: float, most: float | None) -> Iterator[str]:
    if most is not None and not value <= most:
        yield f"{what} {_number(value)} (at most {_number(most)})"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) and abs(value) < 10**15 else f"{value:.6g}"


def _several(names: Sequence[str]) -> str:
    return f"{names[0][:_TEXT]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"


def _short(text: str) -> str:
    return repr(text[:_TEXT] + "..." * (len(text) > _TEXT))
