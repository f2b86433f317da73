"""FedTAR at one site: a report learner with the patient-adaptive part and its own optimiser."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import without_prefix
from fedtar_flare.core.settings import matches
from fedtar_flare.data.cohort import Sample, Visit
from fedtar_flare.imaging.batch import ImageBatch, sample_seed
from fedtar_flare.learning.config import TrainingConfig
from fedtar_flare.learning.diagnosis import extend
from fedtar_flare.learning.evaluation import Evaluated
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.learning.site_diagnosis import DiagnosisConfig, Read, SiteDiagnosis, load_head
from fedtar_flare.learning.site_model import EVALUATION_BATCH
from fedtar_flare.learning.training import Trained, adamw, load_optimizer_state, optimizer_state, parts
from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.demographics import DemographicMixture
from fedtar_flare.methods.fedtar.patient_lora import PatientLoRA
from fedtar_flare.models.adapters.lora import swapped_weights
from fedtar_flare.models.report_generator import ReportGenerator
from fedtar_flare.protocol.contract import HEAD_NAMES

_PREFIX = "patient/"
_LOCAL = "local/"
_TEMPERATURE = "calibration/temperature"


class PatientLearner(ReportLearner):
    """Algorithm 1 of FedTAR at a site: local updates of the shared and of the patient part together.

    With ``patient.local_adapter`` reports are written with :attr:`local` (`Yu et al., 2020
    <https://arxiv.org/abs/2002.04758>`_); what travels and is validated is the server's. With ``diagnosis``, findings
    are prompts; their head is the site's, unless it is shared: then it is trained with the shared adapter.
    """

    knows_patients = True
    local: Mapping[str, Tensor] | None = None
    """w_{t-1} + Delta_k of the site's last task, trained with the patient part; without a shared head."""
    alpha = 1.0
    """How much of a task's training enters :attr:`local`, the patient part and the site's own head."""
    _acts: Tensor | None = None

    def __init__(
        self,
        *,
        patient: PatientConfig,
        training: TrainingConfig,
        mixture: DemographicMixture | None,
        diagnosis: DiagnosisConfig | None = None,
        validates_findings: bool = False,
        seed: int,
        **others: Any,
    ):
        if patient.enabled and mixture is None:
            raise ConfigError("the patient part is on and needs the site's demographic mixture; none was given")
        self._diagnosis, self._seed = diagnosis or DiagnosisConfig(), seed
        self._validates_findings = validates_findings
        super().__init__(training=training, seed=seed, **others)
        self._mixture = mixture
        self.patient: PatientLoRA | None = None
        self.findings = SiteDiagnosis(self._diagnosis, self.generator) if self._diagnosis.on else None
        self._site_head = None if self._diagnosis.shared else self.findings
        groups = []
        self._personal: dict[str, nn.Parameter] = {}  # what is trained besides the adapter
        if patient.enabled:
            steps = self.cohort.time_steps
            self.patient = PatientLoRA(self.model, patient, rank=self.lora_rank, time_steps=steps, seed=seed)
            self.patient.shares = self.shares
            self._personal |= dict(self.patient.named_parameters())
            groups.append({"params": list(self._personal.values()), "lr": patient.lr})
        if self._site_head is not None:
            head = self._site_head.parameters
            self._personal |= head
            groups.append({"params": list(head.values()), "lr": self._diagnosis.rate})
        if groups:
            self.personal_optimizer = adamw(groups, weight_decay=training.weight_decay)
        self._stores_local = patient.enabled and patient.local_adapter

    def extend(self, generator: ReportGenerator) -> None:
        extend(generator, self._extension)

    @property
    def _extension(self) -> dict[str, Any]:
        return self._diagnosis.extension(self._config, self._seed)

    @property
    def has_personal_part(self) -> bool:
        return self.patient is not None or self._site_head is not None

    @property
    def personal_part_acts(self) -> bool:
        head = self._site_head is not None and self._site_head.learnt
        return head or (self.patient is not None and self.patient.acts)

    def training_losses(self, samples: Sequence[Sample], images: ImageBatch, seed: str) -> Tensor:
        """With the reports' findings as prompts, and the head's loss."""
        with self._dropout(samples, seed):
            if self.findings is None:
                return super().training_losses(samples, images, seed)
            return self._losses_with_head(self.findings, samples, images, self.findings.prompts(samples))

    def _validation_losses(self, samples: Sequence[Sample], images: ImageBatch) -> Tensor:
        if self.findings is None or not self._validates_findings:
            return super()._validation_losses(samples, images)
        return self._losses_with_head(self.findings, samples, images)

    def _losses_with_head(
        self, findings: SiteDiagnosis, samples: Sequence[Sample], images: ImageBatch, prompts: Tensor | None = None
    ) -> Tensor:
        """Losses (B,) of reports; the head's loss adds its gradient, not its value."""
        with self._reading_once():
            losses = self.report_losses(samples, images, prompts=prompts)
            head = findings.losses(samples, self.encoded(samples, images))
        return losses + head - head.detach()

    @contextmanager
    def _dropout(self, samples: Sequence[Sample], seed: str) -> Iterator[None]:
        """Draw for each visit whether its patient's adapter acts in this update (``patient.dropout``)."""
        if self.patient is not None and (share := self.patient.config.dropout):
            ids = [(sample.visit.patient_id, sample.visit.visit_id) for sample in samples]
            draws = [np.random.default_rng(sample_seed(0, "patient", seed, *visit)).random() for visit in ids]
            self._acts = torch.tensor(draws) >= share
        try:
            yield
        finally:
            self._acts = None

    @contextmanager
    def context(self, samples: Sequence[Sample], personal: bool) -> Iterator[None]:
        """The patients' adapters at their visits, and the site's own head; else the first head."""
        with ExitStack() as stack:
            if personal and self.patient is not None and self._mixture is not None:
                newest = self.newest_step or self.cohort.time_steps  # later ones have no e_t yet
                steps = torch.tensor(list(map(attrgetter("time_step"), samples))).clamp(max=newest)
                q = self._mixture.memberships(samples, self.cohort.key)
                stack.enter_context(self.patient.adapt(q, steps, self._acts))
                if self.writes and self.local is not None:
                    stack.enter_context(swapped_weights(self.model, self.local, self.adapter))
            if not personal and self._site_head is not None:
                stack.enter_context(self._site_head.with_initial_head())
            yield

    def phi(self, samples: Sequence[Sample]) -> np.ndarray:
        """phi (N, d), float32, of patients at their visits' ages and time step 1."""
        assert self.patient is not None and self._mixture is not None
        weight = self.patient.projection.weight
        with torch.no_grad():
            q = self._mixture.memberships(samples, self.cohort.key).to(weight)
            phi = self.patient.embed(q, torch.ones(len(samples), dtype=torch.long, device=weight.device))
        return phi.float().cpu().numpy()

    def shared_optimizer(self, parameters: Sequence[nn.Parameter], epochs: float) -> torch.optim.Optimizer:
        """With a head that is shared at its own rate."""
        if self.findings is None or not self._diagnosis.shared:
            return super().shared_optimizer(parameters, epochs)
        head = set(self.findings.parameters.values())
        groups = [
            {"params": [p for p in parameters if p not in head], "lr": self.rate * self.training.lr},
            {"params": [p for p in parameters if p in head], "lr": self.rate * self._diagnosis.rate_of(epochs)},
        ]
        return adamw(groups, weight_decay=self.training.weight_decay)

    def train(self, steps: int | Collection[int] | None, *args: Any, **kwargs: Any) -> Trained:
        """Where the head is exchanged, its rows of rare findings are 0 in the update."""
        before = [p.detach().clone() for p in self._personal.values()] if self.alpha < 1 else []
        trained = super().train(steps, *args, **kwargs)
        with torch.no_grad():
            for start, parameter in zip(before, self._personal.values(), strict=False):
                parameter.copy_(start.lerp(parameter, self.alpha))
        if self._stores_local:
            end = {name: value for name, value in self.shared().items() if not matches(name, [HEAD_NAMES])}
            rest = 1 - self.alpha
            self.local = {name: value - rest * trained.update.get(name, 0) for name, value in end.items()}
        if self.findings is None or self.training.noise_multiplier is not None:  # noise covers what zeros would say
            return trained
        samples = self.cohort.samples("train", steps, self.min_cell)
        return replace(trained, update=self.findings.mask_rare_findings(trained.update, samples, self.min_cell))

    def evaluate(self, min_cell: int, *args: Any, **kwargs: Any) -> Evaluated:
        """What is told of changes is calibrated on the validation patients first; its certainty is scored too."""
        timeline, findings = self.cohort.timeline, self.findings
        if findings is None or not timeline.prior_kinds:
            return super().evaluate(min_cell, *args, **kwargs)
        findings.calibrate(self._read_off(self.cohort.samples("validation", least=self.min_cell)))
        scored = super().evaluate(min_cell, *args, **kwargs)
        counted = [s for s in scored.samples if scored.scores["steps"][str(s.time_step)]["n"]]  # in cells large enough
        read = self._read_off(counted, scored.drafts if timeline.prior_generated else None)
        return replace(scored, scores=scored.scores | {"certainty": findings.count_by_certainty(read, min_cell)})

    @torch.no_grad()
    def _read_off(self, samples: Sequence[Sample], texts: Mapping[Visit, str] | None = None) -> Iterator[Read]:
        """What findings are read off when reports are written, part by part; ``texts`` replace the reports before."""
        for part in parts(samples, EVALUATION_BATCH):
            images = self.images(part, prior=False)
            images.prior = self.prior(part, texts=texts)
            with self._writing(), self._autocasting(), self.context(part, personal=True):
                seen = self.encoded(part, images)
            yield part, seen

    def personal_parameters(self) -> Sequence[nn.Parameter]:
        return tuple(self._personal.values())

    def private(self) -> dict[str, Tensor]:
        if self.personal_optimizer is None:
            return {}
        state: dict[str, Tensor] = {} if self.patient is None else self.patient.state_dict(prefix=_PREFIX)
        state |= {f"{_LOCAL}{name}": value for name, value in (self.local or {}).items()}
        if self._site_head is not None:
            state |= self._site_head.state()
        if self.findings is not None:
            state[_TEMPERATURE] = torch.tensor(self.generator.diagnosis.temperature)
        return state | optimizer_state(self.personal_optimizer, self._personal)

    def load_private(self, state: Mapping[str, Tensor]) -> None:
        if self.personal_optimizer is None:
            return
        self.load_for_writing(state)
        load_optimizer_state(self.personal_optimizer, self._personal, self._with_new_steps(state))

    def load_for_writing(self, state: Mapping[str, Tensor]) -> None:
        if self.patient is not None:
            self.patient.load_state_dict(without_prefix(self._with_new_steps(state), _PREFIX))
        self.local = without_prefix(state, _LOCAL) or None
        if self.generator.diagnosis is not None:
            load_head(self.generator, state)
            self.generator.diagnosis.temperature = float(state.get(_TEMPERATURE, 1.0))

    def _with_new_steps(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state with an untrained e_t, 0, for each time step that was added to the run since."""
        state, steps = dict(state), self.cohort.time_steps
        for name, value in state.items():
            if name.endswith("time_embedding") and value.dim() and len(value) < steps:
                state[name] = nn.functional.pad(value, (0, 0, 0, steps - len(value)))
        return state

    def describe(self) -> dict[str, Any]:
        return super().describe() | ({} if self.findings is None else {"extension": self._extension})
