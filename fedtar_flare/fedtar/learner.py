"""FedTAR at one site: a report learner with the patient-adaptive part, its optimiser and the demographic mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fedtar_flare.data.cohort import Sample
from fedtar_flare.errors import ConfigError
from fedtar_flare.fedtar.config import PatientConfig
from fedtar_flare.fedtar.demographics import DemographicMixture
from fedtar_flare.fedtar.patient_lora import PatientLoRA, PatientLoRAConfig
from fedtar_flare.fedtar.profiles import memberships
from fedtar_flare.imaging.augment import sample_seed
from fedtar_flare.imaging.batch import ImageBatch
from fedtar_flare.learning.config import LoRAConfig, TrainingConfig
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.learning.training import load_optimizer_state, optimizer_state

_PREFIX = "patient/"


class PatientLearner(ReportLearner):
    """Algorithm 1 of FedTAR: local updates of the shared and of the patient part together.

    Args:
        mixture: fitted at this site; None when the patient part is off, else ConfigError.
        median_age: of the training patients when it was fitted.
        seed: of the shared and patient parts' initial values, the same at every site.
        lora, training, others: of :class:`ReportLearner`.
    """

    def __init__(
        self,
        *,
        lora: LoRAConfig,
        patient: PatientConfig,
        training: TrainingConfig,
        mixture: DemographicMixture | None,
        median_age: float | None = None,
        seed: int,
        **others: Any,
    ):
        if patient.enabled and mixture is None:
            raise ConfigError("the patient part is on and needs the site's demographic mixture; none was given")
        super().__init__(lora=lora, training=training, seed=seed, **others)
        self._mixture = mixture
        self._median_age = median_age
        self._profile_fields = patient.profile
        self.patient: PatientLoRA | None = None
        if patient.enabled:
            self.patient = patient_part(self.model, patient, lora.rank, self.cohort.time_steps, seed)
            self.personal_optimizer = torch.optim.AdamW(
                self.patient.parameters(), lr=patient.lr, weight_decay=training.weight_decay
            )

        self._dropout = patient.dropout
        self._share: Tensor | None = None

    @property
    def has_personal_part(self) -> bool:
        return self.patient is not None

    @property
    def personal_part_acts(self) -> bool:
        return self.patient is not None and self.patient.acts

    def training_losses(self, samples: Sequence[Sample], images: ImageBatch, seed: str) -> Tensor:
        """Some reports, drawn by the visit and ``seed``, are read without the patient part."""
        if self.patient is None or not self._dropout:
            return super().training_losses(samples, images, seed)
        drawn = [sample_seed(0, f"dropout/{seed}", s.visit.patient_id, s.visit.visit_id) / 2**32 for s in samples]
        self._share = (torch.tensor(drawn) >= self._dropout).float()
        try:
            return super().training_losses(samples, images, seed)
        finally:
            self._share = None

    def context(self, samples: Sequence[Sample], personal: bool) -> AbstractContextManager[Any]:
        """The patients' adapters at their visits."""
        if self.patient is None or self._mixture is None or not personal:
            return nullcontext()
        q = memberships(samples, self._mixture, self.cohort.key, self._median_age, self._profile_fields)
        return self.patient.adapt(q, torch.tensor([sample.time_step for sample in samples]), self._share)

    def personal_parameters(self) -> Sequence[nn.Parameter]:
        return () if self.patient is None else tuple(self.patient.parameters())

    def private(self) -> dict[str, Tensor]:
        """The patient part and its optimiser."""
        if self.patient is None or self.personal_optimizer is None:
            return {}
        state = {f"{_PREFIX}{name}": value for name, value in self.patient.state_dict().items()}
        return state | optimizer_state(self.personal_optimizer, dict(self.patient.named_parameters()))

    def load_private(self, state: Mapping[str, Tensor]) -> None:
        if self.patient is None or self.personal_optimizer is None:
            return
        load_patient_part(self.patient, state)
        load_optimizer_state(self.personal_optimizer, dict(self.patient.named_parameters()), state)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"patient_parameters": sum(p.numel() for p in self.personal_parameters())}


def patient_part(model: Any, patient: PatientConfig, rank: int, time_steps: int, seed: int) -> PatientLoRA:
    """An untrained patient part of a PEFT model, on its device."""
    config = PatientLoRAConfig(
        rank=rank,
        scale=patient.scale,
        components=patient.components,
        embedding_dim=patient.embedding_dim,
        time_conditioned=patient.time_conditioned,
        common=patient.common,
        spread=patient.spread,
        targets=patient.targets,
        constant_q=patient.constant_q,
        hypernetwork_bias=patient.hypernetwork_bias,
        time_steps=time_steps,
        seed=seed,
    )
    return PatientLoRA(model, config)


def load_patient_part(part: PatientLoRA, state: Mapping[str, Tensor]) -> None:
    """Load the patient part of what :meth:`PatientLearner.private` gave, without its optimiser's state."""
    part.load_state_dict({k.removeprefix(_PREFIX): v for k, v in state.items() if k.startswith(_PREFIX)})
