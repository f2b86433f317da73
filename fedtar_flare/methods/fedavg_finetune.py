"""FedAvg, and at the end each site fine-tunes the shared adapter for itself.

The plainest personalisation, which any personal part must beat: after the last round a site continues from the shared
adapter w_T with one exchange's updates on its own visits, and stores the result. Only the shared adapter is validated,
so that the best round is chosen as in FedAvg; the last scores are with the site's own adapter and without it.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.cohort import Sample, shown_visits
from fedtar_flare.learning.config import LoRAConfig
from fedtar_flare.learning.drafting import SavedLearner
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.learning.training import Trained, Validated
from fedtar_flare.methods.fedavg import METHOD as FEDAVG
from fedtar_flare.methods.fedavg import PooledSite
from fedtar_flare.models.adapters.lora import swapped_weights
from fedtar_flare.protocol.exchange import pairs
from fedtar_flare.runtime.site_learner import charge
from fedtar_flare.runtime.task import Task
from fedtar_flare.site.state import state_of_run


class FineTuneLearner(ReportLearner):
    """Holds a fine-tuned adapter, which replaces the shared one when reports are scored or written."""

    tuned: Mapping[str, torch.Tensor] | None = None
    """The fine-tuned adapter by tensor name; None before the end of the run, in training and in validation."""

    @property
    def has_personal_part(self) -> bool:
        return self.tuned is not None

    def context(self, samples: Sequence[Sample], personal: bool) -> AbstractContextManager[Any]:
        return swapped_weights(self.model, self.tuned) if personal and self.tuned is not None else nullcontext()

    def train(self, *args: Any, **kwargs: Any) -> Trained:
        self.tuned = None
        return super().train(*args, **kwargs)

    def validate(self) -> Validated | None:
        self.tuned = None
        return super().validate()

    def private(self) -> dict[str, torch.Tensor]:
        return dict(self.tuned or {})

    def load_private(self, state: Mapping[str, torch.Tensor]) -> None:
        self.tuned = state or None


class FineTuneSite(PooledSite):
    """Fine-tunes within the last closing task."""

    def personalise(self, task: Task, learner: ReportLearner) -> None:
        """Train on the visits of all steps after the last round, where there are enough; restore the shared adapter."""
        assert isinstance(learner, FineTuneLearner)
        visits = len(learner.cohort.samples("train", least=learner.min_cell))
        if task.header.round < task.header.rounds or not visits:
            return
        updates = self.settings.training.updates_of(shown_visits(learner.cohort, None, learner.min_cell))
        if not charge(task, learner.training.draw_rate(visits), updates):
            task.logger.warning("not fine-tuned: the privacy budget of per-patient DP-SGD is spent")
            return
        start, learner.rate = learner.shared(), 1.0  # training.schedule is of the rounds, and has come near 0
        learner.train(None, task.seed("finetune", learner.cohort), updates=updates)
        learner.tuned = learner.shared()
        learner.load_shared(start)
        task.save_private(learner)


def saved_learner(folder: Path, key: bytes | None, run_id: str, round_: int) -> SavedLearner:
    """The adapter that the site fine-tuned after the last round; neither key nor the best round's adapter is needed."""
    state = state_of_run(folder, run_id, "fine-tuned adapter")
    versions = state.versions()
    weights = state.read(versions[-1])[0] if versions else {}
    if not weights:
        why = "the run did not end, or the site had too few training visits"
        raise ConfigError(f"{folder} holds no fine-tuned adapter ({why}): draft without --state")
    settings = {"lora": LoRAConfig(rank=len(weights[pairs(weights)[0][0]]))}
    return SavedLearner(FineTuneLearner, settings, weights, precision=state.precision)


METHOD = FEDAVG.derive(
    "fedavg_finetune",
    "FedAvg on pooled visits, fine-tuned at each site",
    contract={"stays": "patients, images, reports, the fine-tuned adapter"},
    site=FineTuneSite,
    learner=FineTuneLearner,
    saved_learner=saved_learner,
    paper="",
)
