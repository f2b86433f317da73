"""FedMRG at a site: all visits together, a specialised adapter that stays, and a diagnosis branch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.settings import RunSettings
from fedtar_flare.data.cells import keyed_unit
from fedtar_flare.data.cohort import Cohort, Sample
from fedtar_flare.learning.diagnosis import extend, require_positions
from fedtar_flare.learning.labels import labeler, require_labeler
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.methods.fedavg import PooledSite
from fedtar_flare.methods.fedmrg.bank import FEATURES, rows_of_round
from fedtar_flare.methods.fedmrg.contract import BRANCH
from fedtar_flare.methods.fedmrg.dual_adapter import decoder_targets
from fedtar_flare.methods.fedmrg.learner import FedMRGLearner
from fedtar_flare.models.report_generator import ReportGenerator
from fedtar_flare.runtime.requirements import AdaptedModel
from fedtar_flare.runtime.task import PRODUCTION_MIN_CELL, Task
from fedtar_flare.site.admission import JobRequest
from fedtar_flare.site.context import guard_is_only_filter
from fedtar_flare.site.site_file import SiteConfig

WHOLE = ("encoder.*", "projection.*", "pooling.*", "!encoder.backbone.conv1.*", "!encoder.*embed*")
"""Parameters of the base model that travel whole with ``backbone: whole``.

The layers that take the pixels are frozen: their change would reveal single images, and no hospital shares it.
"""

ABOUT = "about"
"""Name, in the site's state, of the settings that it takes to use the state without the job."""


class FedMRGSite(PooledSite):
    """FedMRG at one site; what it trains and exchanges besides the adapter is added to ``lora.exchange``."""

    @staticmethod
    def resolve(given: RunSettings, source: str) -> RunSettings:
        """With the layers to adapt and the parameters to exchange whole that follow from ``fedmrg``."""
        config, targets = given.fedmrg, given.model.lora_targets
        if config.backbone != "lora":
            targets = decoder_targets(targets)
        more = list(WHOLE) if config.backbone == "whole" else []
        if given.model.pooling == "none" and more:
            more.remove("pooling.*")
        more += BRANCH.names if labeler(config.labeler).findings else ()
        lora = given.lora.replace(exchange=(*given.lora.exchange, *more))
        return given.replace(model=given.model.replace(lora_targets=targets), lora=lora)

    def check(self) -> None:
        """Refuse models and training that FedMRG does not support, and prompts for which the decoder has no room."""
        config, model = self.settings.fedmrg, self.settings.model
        if model.family == "vlm":
            raise ConfigError("model.family: FedMRG aligns features of an image encoder, which a 'vlm' has not")
        if self.settings.training.gradient_checkpointing:
            # the second half repeats the pass: where memory runs out in it, the first half's update would stay
            raise ConfigError("training.gradient_checkpointing: not with FedMRG; training.micro_batch saves memory too")
        if model.decoder_name is None and config.prompts == "paper":
            findings = len(labeler(config.labeler).findings)
            require_positions(findings, model.max_length, model.decoder_config["n_positions"])

    def extend(self, model: ReportGenerator) -> None:
        extend(model, self.settings.fedmrg.extension(self.settings.model.slices, self.seed))

    def adapted_model(self, time_steps: int) -> AdaptedModel:
        """With the specialised adapter, which is as large as the generic adapter."""
        return replace(super().adapted_model(time_steps), personal_parameters=lambda shared: shared)

    def job_request(self, rounds: int, time_steps: int) -> JobRequest:
        """With the encoder's rate."""
        request = super().job_request(rounds, time_steps)
        rates = {**request.learning_rate, "fedmrg.lr_encoder": self.settings.fedmrg.lr_encoder}
        return replace(request, learning_rate=rates)

    def shared_learner(self, source: str) -> tuple[type[ReportLearner], dict[str, Any]]:
        return self.learner_class, {"fedmrg": self.settings.fedmrg}  # untrained, the specialised adapter does nothing

    def at_handshake(self, task: Task) -> None:
        """Refuse to read a real hospital's reports by the synthetic cohort's rules."""
        require_labeler(self.settings.fedmrg.labeler, "fedmrg.labeler", task.config.source)
        task.state.write(ABOUT, {}, {"mix": self.settings.fedmrg.mix, "time_steps": task.header.time_steps})

    def before_training(self, task: Task, learner: ReportLearner) -> dict[str, torch.Tensor]:
        """The site's rows for the bank."""
        trained, header = cast(FedMRGLearner, learner), task.header
        if not self._contrasts:
            return {}
        chosen: list[list[Sample]] = []
        if self._shares_features(task):
            seed = task.seed("bank", learner.cohort, of_run=True)
            group = self._patients_a_row(task.config, task.min_cell)
            samples = self._in_bank_order(learner.cohort, task.config)
            chosen = rows_of_round(samples, header.round, self.settings.fedmrg.bank_rows, group, seed)
        rows = trained.share_rows(chosen, header.round, task.min_cell)
        return {} if rows is None else {FEATURES: rows}

    @property
    def _contrasts(self) -> bool:
        """Whether the rows are used: there is a bank, the contrast has a weight, and the encoder is trained."""
        config = self.settings.fedmrg
        return bool(config.bank_rows and config.contrast_weight) and config.backbone != "frozen"

    def _shares_features(self, task: Task) -> bool:
        """Whether rows may leave: as the site file says, by default of no patients, never past a privacy filter."""
        return task.config.shares_features and guard_is_only_filter(task.site.workspace)

    def _patients_a_row(self, config: SiteConfig, min_cell: int) -> int:
        """Patients behind a row: at a real site a multiple of the smallest cell and at least 5, which stay together."""
        least = 1 if config.without_patients else max(min_cell, PRODUCTION_MIN_CELL)
        return least * -(-self.settings.fedmrg.bank_group // least)

    @staticmethod
    def _in_bank_order(cohort: Cohort, config: SiteConfig) -> list[Sample]:
        """Training samples by patient, at a real site in an order of its own for these visits, whatever the job."""
        samples = cohort.samples("train")
        if config.without_patients:
            return samples
        digest = cohort.digest()
        return sorted(samples, key=lambda s: keyed_unit(f"bank:{digest}/{s.visit.patient_id}", cohort.key))
