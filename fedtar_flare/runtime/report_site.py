"""``ReportSite``: a site that trains a report generator, and does the three shared tasks."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.core.files import checksum
from fedtar_flare.core.settings import Settings, build
from fedtar_flare.core.text import Progress
from fedtar_flare.data.cohort import Cohort, shown_visits
from fedtar_flare.data.minimum_cell import round_loss
from fedtar_flare.learning.config import DataConfig, LoRAConfig, TrainingConfig
from fedtar_flare.learning.learner import ReportLearner, Validated
from fedtar_flare.models.adapters.lora import require_modest
from fedtar_flare.models.config import preset as model_preset
from fedtar_flare.models.report_generator import ReportGenerator
from fedtar_flare.models.weights import with_fingerprint
from fedtar_flare.protocol.contract import CLOSE_ROUND, HANDSHAKE, TRAIN
from fedtar_flare.protocol.messages import abstain, ok, version
from fedtar_flare.registry import Method
from fedtar_flare.runtime.requirements import AdaptedModel, report_request
from fedtar_flare.runtime.site_learner import (
    build_learner,
    charge,
    may_be_private,
    may_score,
    score_drafts,
    with_canaries,
)
from fedtar_flare.runtime.task import Answer, Handler, SiteStrategy, Task, gives_start, require_exchange
from fedtar_flare.site.admission import JobRequest

__all__ = ["ReportSite"]


class ReportSite(SiteStrategy):
    """Handshake, training and closing of a round at a site; a method overrides the hooks.

    Parameters
    ----------
    method : Method
        What the strategy belongs to.
    preset : str
        Of the model.
    groups : dict, optional
        The job's settings by group, each a dictionary.
    seed : int

    Raises
    ------
    ConfigError
        A setting is unknown or not allowed, or asks for DP-SGD that does not cover the method's updates.
    """

    learner: ReportLearner | None = None
    """The site's learner, once a task has built it."""
    _learner_key: tuple[str, str] | None = None

    def __init__(self, method: Method, preset: str, groups: Mapping[str, Any] | None = None, seed: int = 0):
        super().__init__(method, preset, groups, seed)
        if self.settings.training.noise_multiplier is not None and not may_be_private(self.learner_class):
            text = f"training.noise_multiplier: method '{method.name}' makes updates that DP-SGD does not cover"
            raise ConfigError(text, public=text)

    def build_shared(self, preset: str, groups: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Settings]:
        """The model of the preset, the adapter, training and data."""
        kinds: dict[str, type[Settings]] = {"lora": LoRAConfig, "training": TrainingConfig, "data": DataConfig}
        model = model_preset(preset, **(groups["model"] or {}))
        built = {"model": model} | {name: build(kind, groups[name], name) for name, kind in kinds.items()}
        if (groups["data"] or {}).get("priors", 1) > 1 and model.family != "vlm":
            raise ConfigError("data.priors: more than the last visit is shown to a model.family of 'vlm' alone")
        return built

    # ------------------------------------------------------------------ what a method may change
    @property
    def learner_class(self) -> type[ReportLearner]:
        """Class of the site's learner."""
        return self.method.learner or ReportLearner

    def shares_batches(self) -> bool:
        """Batches can be shared, and so all else, where the learner sums them as every learner does, or says so."""
        kind = self.learner_class
        sums_alike = kind.shares_batches or kind._accumulate is ReportLearner._accumulate
        return sums_alike and self.settings.training.noise_multiplier is None

    def learner_settings(self, task: Task) -> dict[str, Any]:
        """Choose further arguments of :attr:`learner_class`.

        Parameters
        ----------
        task : Task
            The first task of the run in this process.

        Returns
        -------
        dict
            By default the method's own groups of settings, by name.
        """
        return {name: self.settings[name] for name in self.method.settings}

    def extend(self, model: ReportGenerator) -> None:
        """Add to the base model what the learner adds, so that the sizes of an exchange are known without data.

        Parameters
        ----------
        model : ReportGenerator
            Without its adapter; changed in place.
        """

    def work(self) -> str:
        """How many updates, of how many reports."""
        return f"{self.settings.training.work()} a training task"

    def adapted_model(self, time_steps: int) -> AdaptedModel:
        """The report generator; a method adds what it trains for itself."""
        return AdaptedModel(self.settings.model, self.lora, self.extend)

    def job_request(self, rounds: int, time_steps: int) -> JobRequest:
        """What the method asks of a site, for its bounds."""
        return report_request(self.adapted_model(time_steps), self.settings.training, rounds, time_steps)

    def shared_learner(self, source: str) -> tuple[type[ReportLearner], dict[str, Any]]:
        """Choose the learner of a hospital outside the run, which has the shared part alone.

        Parameters
        ----------
        source : str
            Where that hospital's data comes from.

        Returns
        -------
        tuple of (type of ReportLearner, dict)
            Its class, and further arguments of it by name.
        """
        return ReportLearner, {}

    def at_handshake(self, task: Task) -> None:
        """Fit what the learner needs, once per run, before it is built.

        Parameters
        ----------
        task : Task
            The handshake, whose cohort has the visits that the run begins with.
        """

    def steps_of(self, task: Task) -> int | Collection[int] | None:
        """Choose the time steps whose visits a task trains on.

        Parameters
        ----------
        task : Task

        Returns
        -------
        int, collection of int or None
            One time step t, or several; None: all steps together.
        """
        return task.header.step

    def training_cohort(self, task: Task) -> Cohort:
        """Choose the patients that a training task learns from, by default the site's.

        Parameters
        ----------
        task : Task

        Returns
        -------
        Cohort
        """
        return task.cohort

    def before_training(self, task: Task, learner: ReportLearner) -> dict[str, torch.Tensor]:
        """Act with the weights loaded, before the first update.

        Parameters
        ----------
        task : Task
        learner : ReportLearner

        Returns
        -------
        dict of str to Tensor
            What is sent with the update, by name.
        """
        return {}

    def on_weights(self, task: Task) -> None:
        """Act on the weights of a training task, before anything else.

        Parameters
        ----------
        task : Task
        """

    def closed_from(self, task: Task) -> str:
        """Digest all that a closing reply follows from; a round is closed from one such set, and no other.

        Parameters
        ----------
        task : Task

        Returns
        -------
        str
            By default the checksum of the weights.
        """
        return checksum(task.weights)

    def close(self, task: Task, validated: Validated | None) -> tuple[dict[str, float], dict[str, Any]]:
        """Choose what the method adds to a closing reply.

        Parameters
        ----------
        task : Task
        validated : Validated or None
            Loss and gradient over the validation patients; None where there are none.

        Returns
        -------
        tuple of (dict of str to float, dict)
            Fields of the contract that are numbers, and its other fields.
        """
        return {}, {}

    def personalise(self, task: Task, learner: ReportLearner) -> None:
        """Train what this site keeps for itself, in a closing task between validation and scoring.

        Parameters
        ----------
        task : Task
        learner : ReportLearner
            With the shared part and the private part loaded.
        """

    # ------------------------------------------------------------------ the three tasks
    def handlers(self) -> Mapping[str, Handler]:
        """Handshake, training and closing of a round."""
        return {HANDSHAKE: self._handshake, TRAIN: self._train, CLOSE_ROUND: self._close_round}

    def _handshake(self, task: Task) -> Answer:
        header, state = task.header, task.state
        # 1. Whether this site may begin, or must have a state.
        gives = gives_start(task)
        if header.initial_site:
            self.learner = None  # one of this process may be trained although its task failed: build it from the seed
        for name in state.names("broadcast-"):  # of a job that ended in the middle of a round
            state.remove(name)
        # 2. The learner, and its private state.
        begins = task.cohort if header.arrived is None else task.cohort.until(header.arrived + 1)
        self.at_handshake(replace(task, cohort=begins))
        learner = self._learner_of(task)
        if state.latest(header.after) is None:
            task.save_private(learner, version(0, 0))
        if task.on_opened:
            task.on_opened()
        # 3. What the site says of itself.
        shared = learner.exchanged(task.weights)
        reply = self.agreement(task, shared)
        config = learner.adapter_config()
        reply.payload.update(adapter_config=config, model=with_fingerprint(learner.describe(), config))
        if header.evaluate:
            task.load_private(learner)
            if may_score(task, learner, shared):
                reply.payload.update(self.evaluate(task, learner))
        return reply, shared if gives else None

    def _train(self, task: Task) -> Answer:
        header, least, settings = task.header, task.min_cell, self.settings.training
        # 1. The patients, of whom there must be enough.
        if header.after != version(header.round, header.step - 1):
            raise ExchangeError(f"state version {header.after} is not the one before the task's")
        cohort = self._arrived(task, self.training_cohort(task))
        require_exchange(task)
        self.on_weights(task)
        steps = self.steps_of(task)
        if not (visits := len(cohort.samples("train", steps, least))):
            at = f"at step {steps}" if isinstance(steps, int) else f"up to step {max(steps)}" if steps else "at all"
            few = "no training visit" if least == 1 else f"fewer than {least} patients with a training visit"
            return abstain(header, f"{few} {at}"), None
        fewest = task.config.policy.min_local_steps
        shown = shown_visits(cohort, steps, least)
        updates = settings.updates_of(shown, fewest)  # weight decay tells how many were made
        if updates * settings.batch_size < least:
            return abstain(header, f"the task's updates would be made from fewer than {least} patients"), None
        # 2. The learner, as the weights that came down and the site's private state make it.
        learner = self._learner_of(task, cohort)
        task.load_private(learner)
        further = self.before_training(task, learner)
        seed = task.seed(TRAIN, cohort)
        private = settings.noise_multiplier is not None
        if private and not charge(task, settings.draw_rate(visits), updates):
            return abstain(header, "the privacy budget of per-patient DP-SGD is spent"), None
        # 3. Local updates.
        if task.config.canaries:
            learner.cohort = with_canaries(task, cohort, learner)
        progress = Progress(f"round {header.round}, step {header.step}: update", updates, task.logger.info)
        result = learner.train(steps, seed, progress, updates, fewest)
        learner.cohort = cohort
        task.site.stop_if_aborted()
        if result.patients < least:
            return abstain(header, f"the updates were made from fewer than {least} patients"), None
        task.save_private(learner)
        # 4. What leaves: counts rounded, losses only of enough patients, the update.
        numbers = {"samples": float(shown)}
        if settings.seconds:
            numbers |= {"updates": float(result.updates), "planned_updates": float(updates)}
        if not private and result.loss_patients >= least:  # no noise covers it
            numbers["train_loss"] = round_loss(result.loss, result.loss_visits, least)
        if not private and least == 1:  # one visit can spoil an update
            numbers["skipped_updates"] = float(result.skipped_updates)
        reply = ok(header, numbers, dict(result.parts))
        return reply, result.update | further if task.contract.task(TRAIN).up else None

    def _close_round(self, task: Task) -> Answer:
        header, state = task.header, task.state
        # 1. A round is closed once, at its end: from the weights of the run's exchange, with one private part.
        if (version(header.round, header.step), header.after) != (end := version(header.round, header.time_steps), end):
            raise ExchangeError(f"a round is closed at its last step, and from the state after it, which is {end}")
        require_exchange(task)
        closed_from = self.closed_from(task)
        learner = self._learner_of(task, self._arrived(task, task.cohort))
        task.load_private(learner)
        validated = learner.validate() if header.score == "test" else None  # a site outside chooses no round
        closed_from = f"{closed_from}/{checksum(learner.private())}"  # which tasks that are asked again can change
        if not state.may_answer(f"close {header.round}", closed_from, task.cohort.digest()):
            text = f"round {header.round} was closed already, with other weights, patients or tasks before it"
            return abstain(header, text), None
        # 2. Validation, and what the method adds.
        numbers: dict[str, float] = {}
        if validated is not None:
            numbers["reports"] = float(sum(learner.cohort.counts(learner.min_cell)["validation"]))
            numbers["validation_loss"] = round_loss(validated.loss, validated.reports, learner.min_cell)
        more, payload = self.close(task, validated)
        # 3. Scores, with what the site keeps for itself.
        self.personalise(task, learner)
        if header.evaluate and may_score(task, learner, task.weights):
            learner.cohort = task.cohort
            payload |= self.evaluate(task, learner)
        return ok(header, numbers | more, payload), None

    # ------------------------------------------------------------------ what the tasks share
    def _arrived(self, task: Task, cohort: Cohort) -> Cohort:
        """The part of a cohort that a task learns from: where visits arrive period by period, those so far."""
        share, arrived = self.settings.data.replay_share, task.header.arrived
        if arrived is None and share == 1:
            return cohort
        return cohort.until(task.header.time_steps if arrived is None else arrived, share)

    def _learner_of(self, task: Task, cohort: Cohort | None = None) -> ReportLearner:
        """The site's learner, built once per process and run, with a task's patients (or ``cohort``) and its weights.

        ExchangeError for an adapter beyond the site's bound, which trains on nothing.
        """
        header, site, cohort = task.header, task.site, cohort or task.cohort
        if self.learner is None or self._learner_key != (header.run_id, site.name):
            adapted = self.adapted_model(header.time_steps)
            self.learner = build_learner(self.learner_class, task, cohort, adapted, **self.learner_settings(task))
            self._learner_key = (header.run_id, site.name)
            task.state.note(precision=self.learner.precision)
        rounds = header.rounds_per_period or header.rounds
        learner = self.learner
        learner.min_cell, learner.checkpoint = task.min_cell, site.stop_if_aborted
        learner.cohort = cohort  # a visit added or withdrawn since the task before counts from this one on
        learner.newest_step = None if header.arrived is None else max(1, header.arrived)
        learner.rate = self.settings.training.rate_of((max(1, header.round) - 1) % rounds + 1, rounds)
        if task.weights or (task.name != HANDSHAKE and task.contract.task(task.name).down):
            learner.load_shared(task.weights)
            most = task.config.policy.max_adapter_norm
            if most is not None and learner.equal_layers:
                require_modest(learner.model, learner.adapter, most)
        return learner

    def evaluate(self, task: Task, learner: ReportLearner) -> dict[str, Any]:
        """Score the drafts for the patients that the task names.

        Parameters
        ----------
        task : Task
            A handshake or a closing task.
        learner : ReportLearner
            With the shared part and the private part loaded.

        Returns
        -------
        dict
            ``scores``, and ``scores_generic`` without the personal part; empty where this process is not the first.
        """
        return score_drafts(task, learner)
