"""FedMRG's diagnosis branch: what it learns from, and how a model gets it (:mod:`fedtar_flare.models.diagnosis`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from fedtar_flare.errors import ConfigError
from fedtar_flare.fedmrg.labels import labeler
from fedtar_flare.models.diagnosis import DiagnosisBranch, load_start
from fedtar_flare.models.report_generator import ReportGenerator


def diagnosis_losses(logits: Tensor, classes: Tensor) -> Tensor:
    """Cross-entropy of each report, mean over its D findings, shape (B,)."""
    return F.cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction="none").view(classes.shape).mean(1)


def extend(generator: ReportGenerator, settings: Mapping[str, Any]) -> None:
    """Give a base model its diagnosis branch; none for the labeler ``none``.

    ``settings`` has ``labeler``, ``slices`` and ``seed``, and may have ``prompt_classes``, ``prompt_place``, ``head``
    and ``head_weights``, as :class:`~fedtar_flare.fedmrg.config.FedMRGConfig` names them. Raises :class:`ConfigError`
    where the decoder has too few positions for prompts and report, or the head's weights do not fit.
    """
    found = labeler(settings["labeler"], settings.get("prompt_classes", "all"))
    if not found.findings:
        return
    place = settings.get("prompt_place", "last")
    if place == "last":
        require_positions(len(found.findings), generator.max_length, generator.decoder.config.max_position_embeddings)
    branch = DiagnosisBranch(
        len(found.findings),
        len(found.classes),
        generator.encoder.width,
        settings["slices"],
        generator.decoder.get_input_embeddings().weight.detach(),
        generator.bos_id,
        settings["seed"],
        settings.get("head", "mean"),
        place,
    )
    if weights := settings.get("head_weights"):
        load_start(branch, weights)
    generator.diagnosis = branch


def require_positions(findings: int, max_length: int, positions: int) -> None:
    """Raise :class:`ConfigError` where prompts and report together are longer than the decoder's positions."""
    if findings + max_length > positions:
        raise ConfigError(
            f"{findings} diagnosis prompts and reports of {max_length} tokens (model.max_length) do not fit in the "
            f"decoder's {positions} positions: set model.max_length to {positions - findings} or less, "
            "fedmrg.prompt_place to memory or begin, or fedmrg.labeler to none"
        )
