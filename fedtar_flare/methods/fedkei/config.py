"""Settings of FedKEI: the tasks, the plan, how starts are mixed, and how a site learns."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.settings import Settings, build, suggestion
from fedtar_flare.methods.fedkei.plans import PLANS
from fedtar_flare.methods.fedkei.task_stream import NOTHING, Order, TaskStream
from fedtar_flare.metrics.labeler import RuleLabels, report_labels
from fedtar_flare.models.classifier import ClassifierConfig
from fedtar_flare.presets import papers

STEPS = 2
"""Steps of a task (a round of the run): PROBE and ADAPT."""

CLASSIFIERS: dict[str, dict[str, Any]] = {
    "small": {},
    "tiny": {"encoder": "tiny", "image_size": 32, "slices": 4},
    "fedkei-paper": papers()["fedkei-paper"].group("model"),
}
"""Presets of the classifier: the shipped encoder slice by slice, a random one (tests), the paper's ViT."""

TASKS = ("effusion", "nodule", "consolidation")
BASE = (NOTHING, "cardiomegaly", "emphysema", "lymphadenopathy")
"""Tasks of the synthetic cohort, and their negatives: few of its images show nothing."""


class LearnerSettings(Settings):
    """How a site tunes a module."""

    epochs: int = Field(5, ge=1, description="E of tuning")
    batch_size: int = Field(16, ge=1, le=1024, description="of tuning and of the inner loop")
    lr: float = Field(0.05, gt=0, description="of SGD, tuning")
    momentum: float = Field(0.9, ge=0, lt=1, description="of SGD, tuning")
    eta_in: float = Field(0.05, gt=0, description="step size of alpha (Eq. 6)")
    mu: float = Field(0.01, ge=0, description="weight of FedProx' proximal term")
    safeguard: Literal["off", "validation"] = Field(
        "off", description="'validation': start from the common start where the mixture's validation loss is worse"
    )


class FedKEIConfig(Settings):
    """The tasks in sequence, the plan, and how the server mixes starts; site and server hold the same."""

    plan: str = Field("fedkei", description=f"one of {', '.join(PLANS)}")
    tasks: tuple[str, ...] = Field(
        TASKS, description="diseases in sequence, each 'name', or 'name=label|label' where several labels count as it"
    )
    base: tuple[str, ...] | None = Field(
        None,
        description="labels of the images that are negatives from the start; 'none': those without a label, which is "
        "the default unless the tasks are the default ones, of the synthetic cohort",
    )
    order: Order = Field(
        "synchronous", description="of the tasks at a site: as listed, 'reversed', or 'shuffled' by seed and site"
    )
    labeler: RuleLabels | Literal["none"] = Field(
        "none",
        description="rules that read labels from the reports of images whose source gives none: 'chexpert-rules' "
        "(radiographs) or 'ctrate-rules' (CT); 'none': such images are left out",
    )
    rand_baseline: bool = Field(
        False, description="each site also tunes from the common start, for comparison: twice the work"
    )
    clusters: int = Field(
        3, ge=1, description="K of adapters and of heads; fewer where the pool has fewer distinct modules"
    )
    eta_out: float = Field(0.05, ge=0, description="step size of the outer step (Eq. 8); 0: none, as in Variant B")
    min_cluster_sites: int = Field(
        1, ge=1, description="sites that a cluster must stem from, smaller ones merge; production: at least 2"
    )

    def validation_errors(self) -> Iterator[tuple[str, str]]:
        if self.plan not in PLANS:
            yield "plan", f"one of {', '.join(PLANS)}{suggestion(self.plan, PLANS)}"
        try:
            TaskStream(self.tasks, self.negatives)
        except ConfigError as error:
            yield "tasks", f"a list of diseases ({error})"

    @property
    def negatives(self) -> tuple[str, ...]:
        """Labels of the images that are negatives from the start: ``base``, or its default."""
        return self.base or (BASE if self.tasks == TASKS else (NOTHING,))

    def stream(self, site: str, seed: int) -> TaskStream:
        """The tasks in the order of one site."""
        rules = None if self.labeler == "none" else report_labels(self.labeler)
        return TaskStream(self.tasks, self.negatives, self.order, site, seed, rules)


def classifier_of(preset: str, settings: dict[str, Any] | None, seed: int) -> ClassifierConfig:
    """The named preset with some settings replaced and the job's seed, which gives the common start."""
    if preset not in CLASSIFIERS:
        raise ConfigError(
            f"preset '{preset}' is unknown to fedkei: it must be one of {', '.join(CLASSIFIERS)}"
            f"{suggestion(preset, CLASSIFIERS)}"
        )
    return build(ClassifierConfig, {"seed": seed, **CLASSIFIERS[preset], **(settings or {})}, "model")
