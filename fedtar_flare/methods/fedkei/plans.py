"""Plans: FedKEI, its rivals and controls. They differ in how the server mixes a start and in what a site minimises.

Every start is ``theta = M beta alpha`` over some modules of the pool (:func:`.mixture.mixture_of`). Where the pool has
no module for a plan, it is the common start (K = 1, alpha fixed at 1).
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Plan:
    """How starts are mixed and what a site minimises.

    - ``members``: modules that are mixed: ``none``; ``last``: each site's latest; ``all``; ``own``: the site's latest,
      for that site alone. ``groups``: into which clusters: ``one``, ``each`` on its own, by ``site``, ``kmeans``.
    - ``weights``: beta0: the ``mean`` of a cluster; by ``similarity`` to the site's own latest module (FedAMP); or
      moved towards sites of large generalisation ``gaps`` (FedGA).
    - ``alpha``: what a site does with the centres: ``fixed``: 1/K; ``learnt``: Eq. 6; ``best``: the one of the lowest
      training loss.
    - ``probe``: the outer step: ``none``, ``bilevel`` (through alpha's inner steps), ``direct`` (Variant C).
    - ``objective``: what a site minimises: ``plain``: the cross-entropy; ``proximal``: plus mu / 2 times the squared
      distance to the start (FedProx); ``frozen_a``: LoRA's A stays (FFA-LoRA); ``head_only``: the adapter stays;
      ``maml``: an update takes the gradient of the second half of its batch after one plain step, of the same size, on
      the first (first-order MAML, as in Per-FedAvg); ``distil``: plus the distillation of the start (FLwF); ``fisher``:
      plus the distance to all sites' latest modules, weighted by their Fisher information (FedCurv).
    - ``extra_epochs`` of tuning, beyond the settings'.
    """

    name: str
    members: Literal["none", "last", "all", "own"] = "none"
    groups: Literal["one", "each", "site", "kmeans"] = "one"
    weights: Literal["mean", "similarity", "gaps"] = "mean"
    alpha: Literal["fixed", "learnt", "best"] = "fixed"
    probe: Literal["none", "bilevel", "direct"] = "none"
    objective: Literal["plain", "proximal", "frozen_a", "head_only", "maml", "distil", "fisher"] = "plain"
    extra_epochs: int = 0

    def tunes_as(self, other: "Plan") -> bool:
        """Whether both plans tune equal starts to equal modules."""
        return (self.objective, self.extra_epochs) == (other.objective, other.extra_epochs)

    def trains(self, name: str) -> bool:
        """Whether a tensor of the module is tuned, by its name on the wire."""
        if self.objective == "frozen_a":
            return ".lora_A." not in name
        return self.objective != "head_only" or name.startswith("head.")


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
        Plan("own_last", "own"),
        Plan("pool_mean", "all"),
        Plan("best_cluster", "all", "kmeans", alpha="best"),
        Plan("head_only", objective="head_only"),
        Plan("rand_3", extra_epochs=3),
    )
}
