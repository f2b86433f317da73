"""What the job of a method with LoRA adapters asks of a site, told from its settings without any weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedtar_flare.learning.config import LoRAConfig
from fedtar_flare.models.config import ModelConfig
from fedtar_flare.site.admission import Amounts, JobRequest, Reach

if TYPE_CHECKING:
    from fedtar_flare.models.report_generator import ReportGenerator


@dataclass(frozen=True)
class AdaptedModel:
    """A job's model and its adapter.

    Parameters
    ----------
    config : ModelConfig
    lora : LoRAConfig
    extend : Callable
        Adds to a model what the method gives it.
    own_parameters : Callable[[int], int]
        How many parameters the method trains for itself, at most, given the number of values of the shared adapter.
    """

    config: ModelConfig
    lora: LoRAConfig
    extend: Callable[[ReportGenerator], None] = lambda model: None
    own_parameters: Callable[[int], int] = lambda values: 0

    def reach(self, models: Mapping[str, Path | None] | None) -> Reach:
        """What the job changes of the model, given where the site has the models that it names (see JobRequest)."""
        from fedtar_flare.models.outline import UNKNOWN, outline

        config = self.config
        made_of = UNKNOWN if models is None else outline(config.located(models), self.extend)
        values = made_of.lora_values(config.lora_targets, self.lora.rank)
        return Reach(
            adapted={"model.lora_targets": made_of.targeted(config.lora_targets)},
            whole={"lora.exchange": made_of.exchanged(self.lora.exchange)},
            barred=made_of.barred,
            parameters=0 if models is None else made_of.parameters + values + self.own_parameters(values),
        )


def request_of(
    model: AdaptedModel,
    rounds: int,
    time_steps: int,
    *,
    local_steps: Amounts,
    batch_size: Amounts,
    learning_rate: Amounts,
    clip: Amounts,
    beams: Amounts,
) -> JobRequest:
    """The request of a job of R ``rounds`` and T ``time_steps``; amounts by setting, a ``clip`` of 0 is none."""
    config, lora = model.config, model.lora
    clips = {name: norm for name, norm in clip.items() if norm > 0}
    return JobRequest(
        patients={"reports of an update": max(local_steps.values()) * max(batch_size.values())},
        local_steps=local_steps,
        batch_size=batch_size,
        gradient_scale=clips | {"lora.alpha / rank": lora.alpha / lora.rank},
        learning_rate=learning_rate,
        rank={"lora.rank": lora.rank},
        pixels={"pixels of a study": config.slices * config.image_size**2},
        tokens={
            "model.max_length": config.max_length,
            "model.decoder_positions": config.decoder_positions,
            "model.slices x queries": config.slices * config.queries,
        },
        beams=beams,
        rounds={"rounds": rounds},
        time_steps={"time steps": time_steps},
        models={f"model.{setting}": name for setting, name in config.named().items()},
        reach=model.reach,
    )
