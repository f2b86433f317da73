"""Build the report generator and the tokenizer that a :class:`ModelConfig` describes."""

import re
from collections.abc import Collection

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.models.config import RANDOM, ModelConfig, asset
from fedtar_flare.models.decoder import decoder_tokenizer
from fedtar_flare.models.report_generator import ReportGenerator
from fedtar_flare.models.sources import load_libraries
from fedtar_flare.models.tokenizer import ReportTokenizer
from fedtar_flare.models.vlm import VisionLanguageGenerator, vlm_tokenizer
from fedtar_flare.models.weights import load_weights


def build_tokenizer(config: ModelConfig) -> ReportTokenizer:
    """Build the tokenizer of a model; ConfigError where its file is missing or a named decoder's cannot be fetched."""
    if config.family == "vlm":
        return vlm_tokenizer(config)
    if config.tokenizer == "decoder":
        assert config.decoder_name is not None
        return decoder_tokenizer(config.decoder_name, config.max_length)
    return ReportTokenizer.load(asset(config.tokenizer, "tokenizer.json", "tokenizer"), config.max_length)


def make_model(config: ModelConfig, load_pretrained: bool) -> ReportGenerator:
    """Make a model without a checkpoint of the whole; ``load_pretrained`` loads the weights of its named parts."""
    kind = VisionLanguageGenerator if config.family == "vlm" else ReportGenerator
    return kind(config, build_tokenizer(config), load_pretrained=load_pretrained)


def build_model(config: ModelConfig) -> ReportGenerator:
    """Build the report generator; weights that are not loaded follow from ``config.seed`` alone."""
    load_libraries()
    weights = None if config.weights in (None, RANDOM) else asset(config.weights, "model.safetensors", "weights")
    model = make_model(config, load_pretrained=config.weights is None)
    if weights is not None:
        load_weights(model, weights)
        model.untrained = ()
    return model.eval()


def require_trained(model: ReportGenerator, config: ModelConfig, exchanged: Collection[str]) -> None:
    """Refuse to adapt a frozen model with random parts, unless the run trains them whole."""
    random = [name for name in model.untrained if name not in exchanged]
    if not random or config.weights == RANDOM:
        return
    parts = sorted({re.sub(r"\.\d+\.", ".*.", name).rsplit(".", 1)[0] for name in random})
    text = f"{len(random)} parameters of preset '{config.preset}' would stay random: {', '.join(parts[:6])}"
    raise ConfigError(f"{text}; give a warm-started checkpoint of the whole model (model.weights), or exchange them")
