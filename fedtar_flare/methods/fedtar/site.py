"""A site that trains with the patient-adaptive part, and FedTAR's, which trains one visit step at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import checksum
from fedtar_flare.core.settings import RunSettings
from fedtar_flare.data.cells import key_check
from fedtar_flare.learning.diagnosis import extend
from fedtar_flare.learning.labels import require_labeler
from fedtar_flare.learning.learner import ReportLearner, Validated
from fedtar_flare.methods.fedtar.config import EMBEDDING_DIM
from fedtar_flare.methods.fedtar.demographics import DemographicMixture, fit_mixture
from fedtar_flare.methods.fedtar.learner import PatientLearner
from fedtar_flare.methods.fedtar.release import MOST_SHARE, released_t_numbers, require_spread
from fedtar_flare.methods.fedtar.section import MOST_POINTS, write_phi_page
from fedtar_flare.models.report_generator import ReportGenerator
from fedtar_flare.protocol.contract import HEAD_NAMES
from fedtar_flare.reporting.plots import FEWEST
from fedtar_flare.runtime.report_site import ReportSite
from fedtar_flare.runtime.requirements import AdaptedModel
from fedtar_flare.runtime.task import Task
from fedtar_flare.runtime.training import aligned
from fedtar_flare.site.admission import JobRequest
from fedtar_flare.site.state import SiteState


class PatientSite(ReportSite):
    """Trains a report generator with the patient-adaptive part, whose mixture it fits at the handshake."""

    state_of_run = ("mixture",)

    @staticmethod
    def resolve(settings: RunSettings, source: str) -> RunSettings:
        """With ``diagnosis`` and ``data.prior`` decided for this source, and the head exchanged where it is shared."""
        diagnosis, lora, data = settings.diagnosis.of(source), settings.lora, settings.data
        if data.prior == "auto":
            data = data.replace(prior="report+image" if diagnosis.on else "none")
        if diagnosis.shared:
            lora = lora.replace(exchange=(*lora.exchange, HEAD_NAMES))
        return settings.replace(diagnosis=diagnosis, lora=lora, data=data)

    def check(self) -> None:
        """Refuse settings that need an exchange where the method shares nothing."""
        method = self.method
        if self.settings.given.diagnosis.shared and not method.contract.shares:
            raise ConfigError(f"diagnosis.shared: with method '{method.name}' nothing is shared")
        if self.settings.patient.local_adapter and not method.contract.shares:
            raise ConfigError(f"patient.local_adapter: with method '{method.name}' there is no other adapter")

    def extend(self, model: ReportGenerator) -> None:
        extend(model, self.settings.diagnosis.extension(self.settings.model, self.seed))

    def adapted_model(self, time_steps: int) -> AdaptedModel:
        """With the parameters of hypernetworks (d + 1 for each shared value), projection and e_t."""
        model, patient = super().adapted_model(time_steps), self.settings.patient
        if not patient.enabled:
            return model
        width, rest = EMBEDDING_DIM, patient.q_length + 1 + time_steps
        return replace(model, personal_parameters=lambda shared: (width + 1) * shared + width * rest)

    def job_request(self, rounds: int, time_steps: int) -> JobRequest:
        """With the rates of the patient part and of the diagnosis, and the beams of its second search."""
        request, patient = super().job_request(rounds, time_steps), self.settings.patient
        diagnosis = self.settings.diagnosis
        rates = {"patient.lr": patient.lr} if patient.enabled else {}
        beams: dict[str, float] = {}
        if diagnosis.on:
            rates["diagnosis.lr"], beams["diagnosis.candidates"] = diagnosis.rate, diagnosis.candidates
        rates, beams = {**request.learning_rate, **rates}, {**request.beams, **beams}
        return replace(request, learning_rate=rates, beams=beams)

    def learner_settings(self, task: Task) -> dict[str, Any]:
        mixture = read_mixture(task.state)[0] if self.settings.patient.enabled else None
        return {"patient": self.settings.patient, "mixture": mixture, "diagnosis": self.settings.diagnosis}

    def shared_learner(self, source: str) -> tuple[type[ReportLearner], dict[str, Any]]:
        """The shared adapter without the patient part, with the head that all sites began with, or that they share."""
        settings = self.settings.at(source)
        shared = {"lora": settings.lora, "diagnosis": settings.diagnosis}
        return PatientLearner, shared | {"patient": settings.patient.replace(enabled=False), "mixture": None}

    def at_handshake(self, task: Task) -> None:
        """Fit the demographic mixture on the training patients."""
        header, state, cohort = task.header, task.state, task.cohort
        require_labeler(self.settings.diagnosis.labeler, "diagnosis.labeler", task.config.source)
        if self.settings.diagnosis.shared and not self.settings.diagnosis.on:
            text = "diagnosis.shared: there is no head to share, since diagnosis.labeler is none for this site's data"
            raise ConfigError(text, public=text)
        if not self.settings.patient.enabled:
            return
        if state.has("mixture"):
            arrays, about = state.read("mixture")
            if about["rank"] != self.lora.rank:
                text = f"the site file's lora_rank was another at the run's first handshake: {about['rank']}"
                raise ConfigError(text, public=text)
            if about["time_steps"] < header.time_steps:
                state.write("mixture", arrays, about | {"time_steps": header.time_steps})
            return
        mixture = fit_mixture(cohort, self.settings.patient, task.seed("mixture", of_run=True))
        about = {  # it takes these to use the site's state later, without the job
            "median_age": mixture.median_age,
            "patient": self.settings.patient.to_dict(),
            "rank": self.lora.rank,
            "time_steps": header.time_steps,
            "seed": self.seed,
            "site": cohort.site,
            "key": key_check(cohort.key),
        }
        state.write("mixture", mixture.state(), about)

    def evaluate(self, task: Task, learner: ReportLearner) -> dict[str, Any]:
        """After the last round also write the site's own page of its patients' phi."""
        payload, header = super().evaluate(task, learner), task.header
        last = bool(payload) and header.round == header.rounds and not self.settings.patient.constant_q
        if not last or not isinstance(learner, PatientLearner) or learner.patient is None:
            return payload
        first = {s.visit.patient_id: s for s in reversed(learner.cohort.samples("train"))}
        samples = [*first.values()][:: -(-len(first) // MOST_POINTS) or 1]
        if len(samples) >= FEWEST:
            page = write_phi_page(task.state.folder, task.site.name, header.round, samples, learner.phi(samples))
            task.logger.info(f"t-SNE of phi, for this site alone: {page}")
        return payload


def read_mixture(state: SiteState) -> tuple[DemographicMixture, dict[str, Any]]:
    """The mixture that :meth:`PatientSite.at_handshake` wrote, and the JSON beside it."""
    tensors, about = state.read("mixture")
    return DemographicMixture.from_state(tensors, about["patient"]["profile"], about["median_age"]), about


class FedTARSite(PatientSite):
    """FedTAR at one site (Algorithm 1): trains at one time step at a time; T numbers close a round (Eq. 8)."""

    def steps_of(self, task: Task) -> int | Collection[int] | None:
        """Step t; with replay, every step that the run has come to."""
        header, replay = task.header, self.settings.temporal.replay
        if replay == "none" or (replay == "tested" and not header.replay):
            return header.step
        return range(1, (header.time_steps if header.round > 1 else header.step) + 1)

    def learner_settings(self, task: Task) -> dict[str, Any]:
        return super().learner_settings(task) | {"validates_findings": self.settings.temporal.validation == "findings"}

    def at_handshake(self, task: Task) -> None:
        """Refuse to validate findings whose head stays at the site: alpha does not act on it."""
        super().at_handshake(task)
        if self.settings.temporal.validation == "findings" and not self.settings.diagnosis.shared:
            text = "temporal.validation 'findings' needs a head that is exchanged: set diagnosis.shared"
            raise ConfigError(text, public=text)

    def before_training(self, task: Task, learner: ReportLearner) -> dict[str, torch.Tensor]:
        """What stays at the site moves by alpha_t, where ``temporal.personal`` says so."""
        if isinstance(learner, PatientLearner) and self.settings.temporal.personal == "alpha":
            learner.alpha = task.header.alpha
        return super().before_training(task, learner)

    def on_weights(self, task: Task) -> None:
        """Store w_{t-1} for the T numbers, and remove those of other rounds (not earlier: a task may be repeated)."""
        header, state, weights = task.header, task.state, task.weights
        before = _broadcast(header.round, header.step - 2)
        if state.has(before):
            require_spread(state.read(before)[0], weights)
        for name in state.names("broadcast-"):
            if not name.startswith(f"broadcast-{header.round:04d}-"):
                state.remove(name)
        state.write(_broadcast(header.round, header.step - 1), weights, {})

    def close(self, task: Task, validated: Validated | None) -> tuple[dict[str, float], dict[str, Any]]:
        """The T numbers ``<g, w_t - w_{t-1}>``, rounded for release.

        None where this site did not receive every step of the round, trained at no step, or reached the limit of a run.
        """
        if validated is None:
            return {}, {}
        header, received = task.header, self._received(task)
        values = sum(value.numel() for value in validated.gradient.values())
        complete = len(received) == (header.arrived or header.time_steps)
        trained = any(name.startswith(f"{header.round:04d}-") for name in task.state.versions())
        if not complete or not trained or header.round * header.time_steps > MOST_SHARE * values:
            return {}, {"t_numbers": None}
        weights = [*received, dict(task.weights)]
        gradient, path = aligned(self.settings.lora.mean, self.lora.rank, validated.gradient, weights)
        return {}, {"t_numbers": released_t_numbers(gradient, path)}

    def closed_from(self, task: Task) -> str:
        """Checksums of the round's broadcasts, from which the T numbers follow; they must differ in many values."""
        received = self._received(task)
        if len(received) == (task.header.arrived or task.header.time_steps):
            require_spread(received[-1], task.weights)
        return " ".join(map(checksum, [*received, task.weights]))

    @staticmethod
    def _received(task: Task) -> list[Mapping[str, torch.Tensor]]:
        """w_0..w_{T-1} of the round, as far as they were received."""
        names = [_broadcast(task.header.round, t) for t in range(task.header.time_steps)]
        return [task.state.read(name)[0] for name in names if task.state.has(name)]


def _broadcast(round_: int, step: int) -> str:
    return f"broadcast-{round_:04d}-{step:02d}"
