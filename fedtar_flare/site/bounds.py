"""The site's bounds on jobs, which :mod:`fedtar_flare.site.admission` compares a job's request with.

The site file has them (``policy: {min_patients: 10}``); a job can change none. Which methods a site takes part in is
not among them: its guard says so (:mod:`fedtar_flare.site.policy`), before a task reaches any executor.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from fedtar_flare.core.settings import Settings, problem_of, suggestion
from fedtar_flare.imaging.transform_list import LISTED, SAFE


class Bounds(Settings):
    """Bounds on a job's request. The defaults are those of a site with patients; null takes an upper bound away."""

    approval: Literal["none", "required"] = Field("none", description="'required': jobs wait for 'fedtar site approve'")
    min_patients: int = Field(
        5,
        ge=1,
        description="fewest different patients of a split at a step to learn from it and to tell anything of it, and "
        "behind an update; with fewer none leaves",
    )
    min_local_steps: int = Field(4, ge=1, description="least training.local_steps, updates in one task")
    min_batch_size: int = Field(4, ge=1, description="least training.batch_size, reports in one update")
    min_gradient_scale: float = Field(
        0.1,
        ge=0,
        description="least training.max_grad_norm (0 there, no clipping, is always allowed) and lora.alpha / lora.rank",
    )
    min_learning_rate: float = Field(
        1e-5,
        ge=0,
        description="least learning rate of anything that is trained: one near 0 asks a model that does not change for "
        "its losses again and again",
    )
    min_noise_multiplier: float = Field(
        0.0, ge=0, description="least training.noise_multiplier; above 0 only jobs with per-patient DP-SGD may come"
    )
    max_patient_epsilon: float | None = Field(
        None,
        gt=0,
        description="of per-patient DP-SGD at delta 1e-5, of all runs together; with it spent no task trains",
    )
    max_learning_rate: float | None = Field(
        0.1,
        gt=0,
        description="greatest learning rate of anything that is trained, also times training.weight_decay: what one "
        "update takes off a weight",
    )
    lora_targets: tuple[str, ...] = Field(
        ("*",),
        description="list of the layers that a job may adapt, by whole names with '*' for any text ('!' before a name "
        "takes it out); never the output layer or an embedding, whatever stands here",
    )
    transforms: tuple[str, ...] = Field(
        SAFE, description="MONAI transforms that a job may add to the preparation of images (data.transforms), by name"
    )
    max_rank: int | None = Field(64, ge=1, description="greatest lora.rank")
    max_parameters: int | None = Field(1_000_000_000, ge=1, description="of the model and all that a method adds")
    max_pixels: int | None = Field(1 << 24, ge=1, description="of a study as the model sees it: all slices")
    max_tokens: int | None = Field(1024, ge=1, description="of a report (max_length) or a study (slices x queries)")
    max_beams: int | None = Field(16, ge=1, description="greatest model.num_beams, and diagnosis.candidates")
    max_rounds: int | None = Field(200, ge=1, description="greatest number of rounds")
    max_time_steps: int | None = Field(20, ge=1, description="greatest number of time steps")
    max_seconds: float | None = Field(43_200.0, gt=0, description="of one task; one that takes longer is stopped")
    max_membership_auc: float | None = Field(
        None,
        ge=0,
        le=1,
        description="of a trained adapter, by 'fedtar site audit-model'; above it the site asks to hold the release",
    )
    models: dict[str, Path | None] = Field(
        {},
        description="what else than the shipped model a job may name as model.encoder_name, decoder_name, tokenizer or "
        "weights, and the file or folder that it is here; without one, what the hub's cache on this machine has",
    )
    models_from: Literal["list", "hub", "anywhere"] = Field(
        "list",
        description="'list': only what 'models' names, and nothing is fetched; 'hub': what it names without a place "
        "may be fetched from the Hugging Face hub; 'anywhere': a job may name any model, path or hub name",
    )

    def looser(self) -> list[str]:
        """List the bounds that allow a job more than the defaults do."""
        looser = []
        for name, field in type(self).model_fields.items():
            value, usual = getattr(self, name), field.default
            more = name.startswith("max_") and usual is not None and (value is None or value > usual)
            less = name.startswith("min_") and value < usual
            further = name == "transforms" and not set(value) <= set(usual)
            if more or less or further or (name == "models_from" and value != usual):
                looser.append(name)
        return sorted(looser)

    def validation_errors(self) -> Iterator[tuple[str, str]]:
        for name in self.transforms:
            if name not in LISTED:
                yield "transforms", f"of {', '.join(LISTED)}: not '{name}'{suggestion(name, LISTED)}"
                break
        if problem := problem_of(self.lora_targets):
            yield "lora_targets", problem


def default_bounds(*, simulated: bool, synthetic: bool) -> dict[str, Any]:
    """Defaults other than those of :class:`Bounds`: no patient needs protection, or the job is the user's own."""
    differs: dict[str, Any] = {}
    if simulated or synthetic:
        differs = dict.fromkeys(("min_patients", "min_local_steps", "min_batch_size"), 1)
        differs |= {"min_gradient_scale": 0.0, "min_learning_rate": 0.0, "max_learning_rate": None}
    if simulated:
        for name in Bounds.model_fields:
            if name.startswith("max_"):
                differs[name] = None
        differs |= {"transforms": tuple(LISTED), "models_from": "anywhere"}
    return differs
