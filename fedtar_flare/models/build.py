"""Build what a :class:`ModelConfig` describes: the report generator and its tokenizer."""

from __future__ import annotations

import re
from collections.abc import Collection

from fedtar_flare.errors import ConfigError
from fedtar_flare.models.config import ModelConfig, asset
from fedtar_flare.models.decoder import decoder_tokenizer
from fedtar_flare.models.report_generator import ReportGenerator, assemble
from fedtar_flare.models.tokenizer import ReportTokenizer
from fedtar_flare.models.weights import load_weights


def build_tokenizer(config: ModelConfig) -> ReportTokenizer:
    """The tokenizer of a model.

    Raises:
        ConfigError: its file is not there, or a named decoder's cannot be fetched (with both ways out).
    """
    if config.tokenizer == "decoder":
        assert config.decoder_name is not None
        return decoder_tokenizer(config.decoder_name, config.max_length)
    return ReportTokenizer.load(asset(config.tokenizer, "tokenizer.json", "tokenizer"), config.max_length)


def build_model(config: ModelConfig) -> ReportGenerator:
    """The report generator, on the CPU, float32, in eval mode; the same bits for the same configuration.

    Weights that are not loaded are a function of ``config.seed``; the global random state is neither read nor
    changed. :attr:`ReportGenerator.untrained` names the parameters that were left at such random values.

    Raises:
        ConfigError: a weights file is missing or does not fit (the tensor is named), a named model cannot be fetched
            (with both ways out), sizes that only the loaded parts reveal do not go together.
    """
    tokenizer = build_tokenizer(config)
    weights = asset(config.weights, "model.safetensors", "weights") if config.weights else None
    model = assemble(config, tokenizer, load_pretrained=weights is None)
    if weights is not None:
        load_weights(model, weights)
        model.untrained = ()
    return model.eval()


def require_trained(model: ReportGenerator, config: ModelConfig, exchanged: Collection[str]) -> None:
    """Refuse to adapt a frozen model parts of which are random and would stay so.

    Args:
        model: as built.
        config: its configuration; ``random_backbone=True`` switches the check off.
        exchanged: names of the model's parameters that the run trains and exchanges whole.

    Raises:
        ConfigError: says which parts and the ways out.
    """
    left = [name for name in model.untrained if name not in exchanged]
    if not left or config.random_backbone:
        return
    parts = sorted({re.sub(r"\.\d+\.", ".*.", name).rsplit(".", 1)[0] for name in left})
    raise ConfigError(
        f"{len(left)} parameters of model preset '{config.preset}' have no pre-trained weights and would stay random "
        f"while LoRA trains around them: {', '.join(parts[:6])}{', ...' if len(parts) > 6 else ''}. Either give a "
        "warm-started checkpoint of the whole model (weights=<file>, made by fedtar warmstart), or name these "
        "parameters in the run's exchange (larger messages)"
    )
