"""FedTAR at a site: ``PatientAdaptiveExecutor``, three tasks, one of which is one visit step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

import numpy as np
import torch

from fedtar_flare.data.splits import key_check
from fedtar_flare.errors import ConfigError, DataError
from fedtar_flare.fedtar.config import DataConfig, LoRAConfig, PatientConfig, TrainingConfig, build, digest
from fedtar_flare.flare.executor import MethodExecutor, Site, Tensors, abstain, ok
from fedtar_flare.flare.scalars import has_privacy_filter, send_scalar
from fedtar_flare.progress import Progress
from fedtar_flare.protocol.exchange import WIRE_DTYPES, ExchangeSchema, check_tensor
from fedtar_flare.protocol.messages import CLOSE_ROUND, HANDSHAKE, TASKS, TRAIN, Order, Reply, version
from fedtar_flare.site.state import SiteState
from fedtar_flare.version import __version__

PRODUCTION_MIN_CELL = 5
"""Fewest visits at a step to train on it and to report scores, at a real site whose site file says nothing."""


class PatientAdaptiveExecutor(MethodExecutor):
    """Trains the patient-adaptive report generator of one site.

    Tasks:
        ``handshake``: read the site's data, fit the demographic mixture, answer schema, versions and counts, and the
        scores of the start. ``train``: one visit step, answers the difference of the shared part.
        ``close_round``: validation loss, the T numbers of the hypergradient, and scores when due.

    Everything a task needs of the one before is on disk (:class:`SiteState`), because a task may run in a new process.

    Args:
        preset: model preset (see :mod:`fedtar_flare.models.config`).
        model: settings that override the preset's.
        lora: settings of :class:`LoRAConfig`.
        patient: settings of :class:`PatientConfig`.
        training: settings of :class:`TrainingConfig`.
        data: settings of :class:`DataConfig`.
        seed: all randomness derives from it, the site's name, the round, the step and the task.
        torch_threads: threads of one task; equal threads give equal bits.

    Raises:
        ConfigError: when built with a setting that is unknown or not allowed.
    """

    def __init__(
        self,
        preset: str = "small",
        model: dict[str, Any] | None = None,
        lora: dict[str, Any] | None = None,
        patient: dict[str, Any] | None = None,
        training: dict[str, Any] | None = None,
        data: dict[str, Any] | None = None,
        seed: int = 0,
        torch_threads: int = 1,
    ):
        super().__init__()
        if torch_threads < 1:
            raise ConfigError(f"torch_threads must be at least 1, not {torch_threads}")
        self.preset, self.model = preset, model
        self.lora, self.patient, self.training, self.data = lora, patient, training, data
        self.seed, self.torch_threads = seed, torch_threads
        from fedtar_flare.models.config import preset as model_preset

        self.model_config = model_preset(preset, **(model or {}))
        self.lora_config = build(LoRAConfig, lora, "lora")
        self.patient_config = build(PatientConfig, patient, "patient")
        self.training_config = build(TrainingConfig, training, "training")
        self.data_config = build(DataConfig, data, "data")
        self._learner: Any = None
        self._learner_key: tuple[str, str] | None = None

    def perform(self, task: str, order: Order, weights: Tensors, site: Site) -> tuple[Reply, Tensors | None]:
        """Route a task (see :class:`MethodExecutor`)."""
        torch.set_num_threads(self.torch_threads)
        if task == HANDSHAKE:
            return self._handshake(order, weights, site)
        if task == TRAIN:
            return self._train(order, weights, site)
        if task == CLOSE_ROUND:
            return self._close_round(order, weights, site)
        raise ConfigError(f"task '{task}' is unknown; this executor does {', '.join(TASKS)}")

    # ------------------------------------------------------------------ the three tasks
    def _handshake(self, order: Order, weights: Tensors, site: Site) -> tuple[Reply, Tensors | None]:
        from fedtar_flare.fedtar.profiles import fit_mixture, training_median_age

        state, cohort = self._open(order, site)
        if self.patient_config.enabled and not state.has("mixture"):
            mixture = fit_mixture(cohort, self.patient_config, seed_of(self.seed, site.name, 0, 0, "mixture"))
            if mixture.note:
                self.logger.warning(f"site {site.name}: {mixture.note}")
            arrays = {name: torch.from_numpy(np.atleast_1d(value)) for name, value in mixture.state().items()}
            state.write("mixture", arrays, self._personal_settings(cohort, order, training_median_age(cohort)))
        learner = self._learner_of(order, site, state, cohort)
        if weights:
            self._load_shared(learner, weights)
        if state.latest(order.after) is None:
            state.save(version(0, 0), learner.private(), {"round": 0, "step": 0})
        shared = learner.shared()
        payload: dict[str, Any] = {
            "schema": ExchangeSchema.of(shared, self.lora_config.dtype_up).to_dict(),
            "versions": {"fedtar_flare": __version__},
            "settings": self._settings(),
            "counts": cohort.counts(),
            "min_cell": self._min_cell(site),
            "skipped_studies": dict(cohort.rejected),
            "adapter_config": learner.adapter_config(),
            "model": learner.describe(),
        }
        if order.evaluate:
            self._load_private(learner, state, order.after)
            payload["scores"] = self._evaluate(learner, order, site, state)
        return ok(order, payload=payload), shared if order.initial_site == site.name else None

    def _train(self, order: Order, weights: Tensors, site: Site) -> tuple[Reply, Tensors | None]:
        state, cohort = self._open(order, site)
        self._keep_broadcast(state, order.round, order.step - 1, weights)
        visits = len(cohort.samples("train", order.step))
        if visits < self._min_cell(site):
            return abstain(order, f"{visits} training visit(s) at step {order.step}" if not visits else "too few"), None
        learner = self._learner_of(order, site, state, cohort)
        self._load_shared(learner, weights)
        self._load_private(learner, state, order.after)
        seed = seed_of(self.seed, site.name, order.round, order.step, TRAIN)
        result = learner.train(order.step, seed, self._on_update(order, site))
        site.stop_if_aborted()
        state.save(version(order.round, order.step), learner.private(), {"round": order.round, "step": order.step})
        numbers = {
            "samples": result.samples,
            "train_loss": result.loss,
            "first_loss": result.first_loss,
            "last_loss": result.last_loss,
        }
        wire = WIRE_DTYPES[self.lora_config.dtype_up]
        return ok(order, numbers), {name: value.to(wire) for name, value in result.update.items()}

    def _close_round(self, order: Order, weights: Tensors, site: Site) -> tuple[Reply, Tensors | None]:
        from fedtar_flare.fedtar.policy import t_numbers

        state, cohort = self._open(order, site)
        learner = self._learner_of(order, site, state, cohort)
        self._load_shared(learner, weights)
        self._load_private(learner, state, order.after)
        numbers: dict[str, float] = {}
        payload: dict[str, Any] = {}
        broadcasts = [self._broadcast(state, order.round, t) for t in range(order.time_steps)] + [dict(weights)]
        validated = learner.validate()
        if validated is not None:
            numbers |= {"validation_loss": validated.loss, "reports": validated.reports}
            received = [w for w in broadcasts if w is not None]
            whole = len(received) == order.time_steps + 1  # else it did not get every step of this round
            payload["t_numbers"] = t_numbers(validated.gradient, received) if whole else None
        if order.evaluate:
            payload["scores"] = self._evaluate(learner, order, site, state)
        return ok(order, numbers, payload), None

    # ------------------------------------------------------------------ what the tasks share
    def _on_update(self, order: Order, site: Site) -> Callable[[int, float], None]:
        """After each local update: a progress line now and then, and the loss to TensorBoard where that is allowed."""
        count = self.training_config.local_steps
        progress = Progress(f"round {order.round}, step {order.step}: update", count, self.logger.info)
        allowed = self._config.stream_losses
        if allowed is None:
            allowed = site.simulated or self._config.source == "synthetic"
        if allowed and has_privacy_filter(site.workspace):
            allowed = False  # what streams passes no filter
        before = ((order.round - 1) * order.time_steps + order.step - 1) * count

        def on_update(number: int, loss: float) -> None:
            progress(number)
            if allowed:
                with site.engine.new_context() as context:
                    send_scalar(self, context, "loss of local updates", loss, before + number)

        return on_update

    def _evaluate(self, learner: Any, order: Order, site: Site, state: SiteState) -> dict[str, Any]:
        """Scores of the test patients; a page of generated beside reference reports stays in the site's state."""

        def keep(samples: Any, texts: Any) -> None:
            from fedtar_flare.reporting.examples import SiteExamples, choose, write_examples

            steps, visits = [sample.time_step for sample in samples], [sample.visit for sample in samples]
            chosen = choose(steps, texts, [v.report for v in visits], [v.findings for v in visits])
            synthetic = self._config.source == "synthetic"
            page = write_examples(state.folder, SiteExamples(site.name, order.round, synthetic, chosen))
            self.logger.info(f"generated beside reference reports, for this site's eyes: {page}")

        scores: dict[str, Any] = learner.evaluate(self._min_cell(site), on_texts=keep)
        return scores

    def _personal_settings(self, cohort: Any, order: Order, median_age: float | None) -> dict[str, Any]:
        """What it takes to use this site's state later, without the job: see :mod:`fedtar_flare.fedtar.drafting`."""
        return {
            "median_age": median_age,
            "patient": asdict(self.patient_config),
            "rank": self.lora_config.rank,
            "time_steps": order.time_steps,
            "seed": self.seed,
            "site": cohort.site,
            "key": key_check(cohort.key),
        }

    def _open(self, order: Order, site: Site) -> tuple[SiteState, Any]:
        """The site's state of this run and its patients (read anew in every process; light)."""
        from fedtar_flare.data.timeline import Timeline
        from fedtar_flare.imaging.pipeline import InputConfig, prepare_cohort
        from fedtar_flare.site.site_file import cache_folder, load_cohort, load_site_config

        self._config = load_site_config(site.name, workspace=site.workspace, simulator=site.simulated)
        cohort = load_cohort(
            self._config,
            site.name,
            timeline=Timeline(
                order.time_steps,
                self.data_config.alignment,
                tuple(datetime.fromisoformat(text) for text in self.data_config.periods),
                self.data_config.prior,
            ),
            seed=self.seed,
            synthetic_patients=self.data_config.synthetic_patients,
            workspace=site.workspace,
        )
        images = InputConfig(image_size=self.model_config.image_size, slices=self.model_config.slices)
        # a study that cannot be read is left out and counted
        cohort = prepare_cohort(cohort, images, cache_folder(self._config) / "prepared")
        return SiteState(site.state_root(self._config.state_dir), order.run_id, site.name), cohort

    def _learner_of(self, order: Order, site: Site, state: SiteState, cohort: Any) -> Any:
        """The site's learner, built once per process and run."""
        from fedtar_flare.fedtar.learner import SiteLearner
        from fedtar_flare.learning.device import choose_device

        if self._learner_key != (order.run_id, site.name):
            mixture, median_age = None, None
            if self.patient_config.enabled:
                from fedtar_flare.fedtar.demographics import DemographicMixture

                arrays, info = state.read("mixture")
                median_age = info["median_age"]
                mixture = DemographicMixture.from_state({name: value.numpy() for name, value in arrays.items()})
            device, autocast = choose_device(self._config.device, self._config.precision)
            self._learner = SiteLearner(
                model=self.model_config,
                lora=self.lora_config,
                patient=self.patient_config,
                training=self.training_config,
                cohort=cohort,
                mixture=mixture,
                median_age=median_age,
                time_steps=order.time_steps,
                seed=self.seed,
                device=device,
                autocast=autocast,
                checkpoint=site.stop_if_aborted,
            )
            self._learner_key = (order.run_id, site.name)
        self._learner.cohort = cohort  # a visit added or withdrawn since counts from this task on
        self._learner.checkpoint = site.stop_if_aborted
        return self._learner

    @staticmethod
    def _load_shared(learner: Any, weights: Tensors) -> None:
        """Load what the server sent, checked first: the other side is not trusted either."""
        for name in sorted(weights):
            check_tensor(name, weights[name], None, {"float32": torch.float32})
        learner.load_shared(weights)

    def _load_private(self, learner: Any, state: SiteState, after: str) -> None:
        """Load the newest private state that is not later than the version the task names."""
        newest = state.latest(after)
        if newest is None:
            raise DataError(
                f"{state.folder} has no state of this run at or before version {after}; it was deleted, or the run "
                "began on another machine. Submit the job anew, or restore the folder",
                reason="no-site-state",
            )
        tensors, _ = state.read(newest)
        learner.load_private(tensors)

    def _settings(self) -> str:
        """Digest of the settings that must be the same at every site."""
        parts = (self.model_config, self.lora_config, self.patient_config, self.training_config, self.data_config)
        return f"{digest(*parts)}-{self.seed}"

    def _min_cell(self, site: Site) -> int:
        """The job's, the site's or (outside of the simulator) 5, whichever is largest."""
        configured = self._config.min_cell
        if configured is None:
            configured = 1 if site.simulated or self._config.source == "synthetic" else PRODUCTION_MIN_CELL
        return max(configured, self.data_config.min_cell)

    @staticmethod
    def _keep_broadcast(state: SiteState, round_: int, step: int, weights: Tensors) -> None:
        """Keep w_{t-1} for the T numbers; what is left of other rounds goes (not earlier: a task may be repeated)."""
        for path in state.folder.glob("broadcast-*.safetensors"):
            if not path.stem.startswith(f"broadcast-{round_:04d}-"):
                path.unlink(missing_ok=True)
        state.write(_broadcast_name(round_, step), weights, {})

    @staticmethod
    def _broadcast(state: SiteState, round_: int, step: int) -> Mapping[str, torch.Tensor] | None:
        name = _broadcast_name(round_, step)
        return state.read(name)[0] if state.has(name) else None


def seed_of(seed: int, site: str, round_: int, step: int, task: str) -> int:
    """Seed of one task: the same in every process and whatever ran before.

    >>> seed_of(0, "site-1", 1, 2, "train") == seed_of(0, "site-1", 1, 2, "train")
    True
    """
    text = f"{seed}/{site}/{round_}/{step}/{task}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _broadcast_name(round_: int, step: int) -> str:
    return f"broadcast-{round_:04d}-{step:02d}"
