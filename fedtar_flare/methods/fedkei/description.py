"""FedKEI's classifier as a job describes it to a site, before any weight is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from fedtar_flare.core.globs import matches
from fedtar_flare.learning.config import LoRAConfig
from fedtar_flare.models.adapters.lora import shared_parameters
from fedtar_flare.models.classifier import ClassifierConfig, bare_classifier, build_classifier
from fedtar_flare.models.outline import EMBEDDING
from fedtar_flare.site.admission import Reach


@dataclass(frozen=True)
class AdaptedClassifier:
    """A classifier and its adapter (see :class:`~fedtar_flare.runtime.requirements.AdaptedModel`)."""

    config: ClassifierConfig
    lora: LoRAConfig

    @property
    def names(self) -> tuple[str, ...]:
        return (self.config.encoder_name,) if self.config.encoder_name else ()

    @property
    def weights(self) -> str | None:
        return "small" if self.config.encoder == "small" else self.config.encoder_weights

    @property
    def _untrained(self) -> ClassifierConfig:
        return self.config.replace(encoder_weights="random" if self.config.encoder == "timm" else None)

    def sizes(self) -> dict[str, int]:
        if any(not Path(name).expanduser().is_dir() for name in self.names):
            return {}  # on a hub: nothing is fetched to describe a job
        classifier = build_classifier(self._untrained)
        exchanged = sum(value.numel() for value in shared_parameters(classifier).values())
        return {"parameters": sum(p.numel() for p in classifier.parameters()) - exchanged, "exchanged": exchanged}

    def reach(self, models: Mapping[str, Path | None] | None) -> Reach:
        if models is None and self.names:
            return Reach({}, {}, frozenset(), 0)
        classifier = bare_classifier(self._untrained, models or {})
        modules = dict(classifier.named_modules())
        barred = frozenset(name for name in modules if EMBEDDING.fullmatch(name))
        linear = {name for name, module in modules.items() if isinstance(module, nn.Linear)}
        targets = [name for name in sorted(linear | barred) if matches(name, self.config.adapted_layers)]
        values = self.config.rank * sum(sum(modules[name].weight.shape) for name in targets if name in linear)
        parameters = sum(parameter.numel() for parameter in classifier.parameters()) + values
        return Reach({"model.targets": targets}, {}, barred, parameters)
