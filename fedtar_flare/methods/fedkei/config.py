"""Settings of FedKEI: the tasks, the plan, how starts are mixed, and how a site learns."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.settings import Settings, suggestion
from fedtar_flare.methods.fedkei.tasks import NO_LABEL, Order, TaskStream
from fedtar_flare.metrics.labeler import RuleLabels, report_labels
from fedtar_flare.presets import papers


@dataclass(frozen=True)
class Plan:
    """FedKEI, a rival or a control: how a start ``theta = M beta alpha`` is mixed, and what a site minimises.

    Where the pool has no module for a plan, the start is the common one (K = 1, alpha fixed at 1).

    - ``members``: modules that are mixed: ``none``; ``last``: each site's latest; ``all``. ``groups``: into which
      clusters: ``one``, ``each`` on its own, by ``site``, ``kmeans``.
    - ``weights``: beta0: the ``mean`` of a cluster; by ``similarity`` to the site's own latest module (FedAMP); or
      moved towards sites of large generalisation ``gaps`` (FedGA).
    - ``alpha``: what a site does with the centres: ``fixed``: 1/K; ``learnt``: Eq. 6.
    - ``probe``: the outer step: ``none``, ``bilevel`` (through alpha's inner steps), ``direct`` (Variant C).
    - ``objective``: what a site minimises: ``plain``: the cross-entropy; ``proximal``: plus mu / 2 times the squared
      distance to the start (FedProx); ``frozen_a``: LoRA's A stays (FFA-LoRA); ``maml``: after a step on the
      first half of a batch, the second half's loss (first order, as in Per-FedAvg); ``distil``: plus the distillation
      of the start (FLwF); ``fisher``: plus the distance to all sites' latest modules, weighted by their Fisher
      information (FedCurv).
    """

    name: str
    members: Literal["none", "last", "all"] = "none"
    groups: Literal["one", "each", "site", "kmeans"] = "one"
    weights: Literal["mean", "similarity", "gaps"] = "mean"
    alpha: Literal["fixed", "learnt"] = "fixed"
    probe: Literal["none", "bilevel", "direct"] = "none"
    objective: Literal["plain", "proximal", "frozen_a", "maml", "distil", "fisher"] = "plain"


PLANS: dict[str, Plan] = {
    plan.name: plan
    for plan in (
        Plan("rand"),
        Plan("fedavg", "last"),
        Plan("fedprox", "last", objective="proximal"),
        Plan("ffa_lora", "last", objective="frozen_a"),
        Plan("fedamp", "last", weights="similarity"),
        Plan("apple", "last", "each", alpha="learnt"),
        Plan("fedga", "last", weights="gaps"),
        Plan("per_fedavg", "last", objective="maml"),
        Plan("fedcurv", "last", objective="fisher"),
        Plan("flwf", "last", objective="distil"),
        Plan("variant_a", "all", "site", alpha="learnt"),
        Plan("variant_b", "all", "kmeans", alpha="learnt"),
        Plan("variant_c", "all", "kmeans", alpha="learnt", probe="direct"),
        Plan("fedkei", "all", "kmeans", alpha="learnt", probe="bilevel"),
        Plan("pool_mean", "all"),
    )
}

STEPS = 2
"""Steps of a task (a round of the run): PROBE and ADAPT."""
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "small": {},
    "tiny": {"encoder": "tiny", "image_size": 32, "slices": 4},
    "fedkei-paper": papers()["fedkei-paper"].group("model"),
}
"""Presets of the classifier: the shipped encoder slice by slice, a random one (tests), the paper's ViT."""
TASKS = ("effusion", "nodule", "consolidation")
BASE = (NO_LABEL, "cardiomegaly", "emphysema", "lymphadenopathy")
"""Tasks of the synthetic cohort, and their negatives: few of its images show nothing."""


class LearnerSettings(Settings):
    """How a site tunes a module."""

    epochs: int = Field(5, ge=1, le=99, description="E of tuning")  # a list in a reply has at most 100 values
    batch_size: int = Field(16, ge=1, le=1024, description="of tuning and of the inner loop")
    lr: float = Field(0.05, gt=0, description="of SGD, tuning")
    momentum: float = Field(0.9, ge=0, lt=1, description="of SGD, tuning")
    eta_in: float = Field(0.05, gt=0, description="step size of alpha (Eq. 6)")
    mu: float = Field(0.01, ge=0, description="weight of FedProx' proximal term")


class FedKEIConfig(Settings):
    """The tasks in sequence, the plan, and how the server mixes starts; site and server hold the same."""

    plan: str = Field("fedkei", description=f"one of {', '.join(PLANS)}")
    tasks: tuple[str, ...] = Field(
        TASKS, description="diseases in sequence, each 'name', or 'name=label|label' where several labels count as it"
    )
    base: tuple[str, ...] | None = Field(
        None, description="labels of the negatives from the start; 'none': without a label, the default for own tasks"
    )
    order: Order = Field("synchronous", description="of a site's tasks: as listed, or reversed or shuffled by its seed")
    labeler: RuleLabels | Literal["none"] = Field(
        "none", description="rules that read labels from reports where a source has none; 'none': leave images out"
    )
    rand_baseline: bool = Field(False, description="each site also tunes from the common start, at twice the work")
    clusters: int = Field(3, ge=1, description="K of adapters and of heads; fewer if fewer modules are distinct")
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
        return self.base or (BASE if self.tasks == TASKS else (NO_LABEL,))

    def stream(self, site: str, seed: int) -> TaskStream:
        """The tasks in the order of one site."""
        rules = None if self.labeler == "none" else report_labels(self.labeler)
        return TaskStream(self.tasks, self.negatives, self.order, site, seed, rules)
