"""What a FedKEI job asks of a site, in the terms of the site's bounds."""

from __future__ import annotations

from typing import Any

from fedtar_flare.learning.config import LoRAConfig
from fedtar_flare.methods.fedkei.tuning import LearnerSettings
from fedtar_flare.models.adapters.lora import shared_parameters
from fedtar_flare.models.classifier import CLASSES, ClassifierConfig, build_classifier
from fedtar_flare.models.config import ModelConfig, preset
from fedtar_flare.runtime.requirements import AdaptedModel, request_of
from fedtar_flare.site.admission import JobRequest


def adapted_model(classifier: ClassifierConfig) -> AdaptedModel:
    """The classifier as the report generator with its encoder (see :func:`generator_of`)."""
    sizes, own = classifier.sizes, 0
    if classifier.encoder == "vit":
        own = 16 * sizes["depth"] * sizes["embed_dim"] ** 2
    elif classifier.encoder == "swin_unetr":
        own = 3600 * sizes["feature_size"] ** 2 + 250_000
    lora = LoRAConfig(rank=classifier.rank, alpha=float(classifier.rank))
    return AdaptedModel(generator_of(classifier), lora, own_parameters=lambda values: own)


def request(classifier: ClassifierConfig, training: LearnerSettings, rounds: int, time_steps: int) -> JobRequest:
    """What a job asks of a site, for its bounds; an epoch counts as one update, the least that it is made of."""
    return request_of(
        adapted_model(classifier),
        rounds,
        time_steps,
        local_steps={"training.epochs": training.epochs},
        batch_size={"training.batch_size": training.batch_size},
        learning_rate={"training.lr": training.lr, "training.eta_in": training.eta_in},
        clip={},
        beams={},
    )


def generator_of(classifier: ClassifierConfig) -> ModelConfig:
    """The report generator with the classifier's encoder: its outline tells which layers an adapter reaches.

    Its other parts count too, where a bound is on the number of parameters. A ``vit`` or ``swin_unetr`` has the tiny
    encoder in its place.
    """
    common: dict[str, Any] = {
        "image_size": classifier.image_size,
        "slices": classifier.slices,
        "lora_targets": classifier.adapted_layers(),
    }
    if classifier.encoder_weights is not None:
        common["weights"] = classifier.encoder_weights
    if classifier.encoder != "timm":
        return preset("small" if classifier.encoder == "small" else "tiny", **common)
    return ModelConfig(
        preset="classifier",
        encoder="timm",
        encoder_name=classifier.encoder_name,
        image_statistics=classifier.image_statistics,
        **common,
    )


def frozen_values(classifier: ClassifierConfig) -> int | None:
    """Parameters of the frozen encoder; None for a named one, which is not made to describe a job."""
    if classifier.encoder == "timm":
        return None
    made = build_classifier(classifier.replace(encoder_weights=None))
    shared = sum(value.numel() for value in shared_parameters(made).values())
    return sum(value.numel() for value in made.parameters()) - shared


def head_values(classifier: ClassifierConfig) -> int:
    """Values of the head; 0 for a named encoder, whose width only the encoder tells.

    Of an encoder that the generator's outline has not, those of the adapter too.
    """
    if classifier.encoder == "timm":
        return 0
    if classifier.encoder in ("vit", "swin_unetr"):
        made = build_classifier(classifier.replace(encoder_weights=None))
        return sum(value.numel() for value in shared_parameters(made).values())
    return CLASSES * (generator_of(classifier).encoder_config["embed_dim"][-1] + 1)
