"""FedAvg, and at the end each site fine-tunes the shared adapter for itself.

The plainest personalisation, which any personal part must beat: after the last round of FedAvg a site goes on from the
shared adapter w_T for some local updates on its own visits, and keeps the outcome. Validation is of the shared adapter
alone, so that the best round is chosen as in FedAvg; the last scores are with the site's own adapter and without it.
These updates come on top of the R * T exchanges; by default they are as many as one exchange has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field

from fedtar_flare.baselines.fedavg import CONTRACT as FEDAVG
from fedtar_flare.baselines.fedavg import FedAvgController, PooledExecutor
from fedtar_flare.flare.recipe import MethodRecipe
from fedtar_flare.flare.study_executor import seed_of
from fedtar_flare.protocol.messages import TaskHeader, version
from fedtar_flare.settings import Settings, build
from fedtar_flare.site.place import Site
from fedtar_flare.site.state import SiteState

if TYPE_CHECKING:
    from fedtar_flare.learning.learner import ReportLearner

CONTRACT = replace(
    FEDAVG,
    method="fedavg_finetune",
    title="FedAvg on pooled visits, fine-tuned at each site",
    server_classes=("fedtar_flare.baselines.fedavg_finetune.FineTuneController",),
    site_classes=("fedtar_flare.baselines.fedavg_finetune.FineTuneExecutor",),
    stays="patients, images, reports, the fine-tuned adapter",
)


class FineTuneConfig(Settings):
    """The fine-tuning at the end of a run."""

    updates: int | None = Field(None, ge=1, description="local updates; default: training.local_steps")


class FineTuneController(FedAvgController):
    """FedAvg with fine-tuning at the server: what FedAvg does."""

    contract = CONTRACT


class FineTuneExecutor(PooledExecutor):
    """Fine-tunes within the last closing task; takes ``finetune`` beside the arguments of :class:`ReportExecutor`."""

    contract = CONTRACT

    def __init__(self, *args: Any, finetune: dict[str, Any] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.finetune = finetune
        self.finetune_config = build(FineTuneConfig, finetune, "finetune")

    def method_settings(self) -> tuple[Any, ...]:
        return (self.finetune_config,)

    def learner_class(self) -> type[ReportLearner]:
        from fedtar_flare.baselines.learners import FineTuneLearner

        return FineTuneLearner

    def personalise(self, header: TaskHeader, site: Site, state: SiteState, learner: ReportLearner) -> None:
        """After the last round, where the site has enough training visits."""
        from fedtar_flare.baselines.learners import FineTuneLearner

        assert isinstance(learner, FineTuneLearner)
        if header.round < header.rounds or not learner.cohort.samples("train", least=learner.min_cell):
            return
        seed = seed_of(self.seed, site.name, header.round, header.step, "finetune")
        learner.fine_tune(seed, self.finetune_config.updates)
        self._save_private(state, version(header.round, header.step), learner, header)


class FineTuneRecipe(MethodRecipe):
    """The job of FedAvg with fine-tuning; beside the arguments of :class:`MethodRecipe` it takes ``finetune``."""

    contract = CONTRACT
    controller_class = FineTuneController
    executor_class = FineTuneExecutor
    own_groups = ("finetune",)
