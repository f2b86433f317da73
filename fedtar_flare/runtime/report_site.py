"""``ReportSite``: a site that trains a report generator, and does the three shared tasks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.progress import Progress
from fedtar_flare.core.settings import Settings, build
from fedtar_flare.core.tensor_file import checksum
from fedtar_flare.data.minimum_cell import round_loss
from fedtar_flare.learning.config import DataConfig, LoRAConfig, TrainingConfig
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.models.config import preset as model_preset
from fedtar_flare.models.weights import with_fingerprint
from fedtar_flare.protocol.exchange import WIRE_DTYPES, Tensors
from fedtar_flare.protocol.messages import abstain, ok, version
from fedtar_flare.protocol.tasks import CLOSE_ROUND, HANDSHAKE, TRAIN
from fedtar_flare.registry import Method
from fedtar_flare.runtime.requirements import (
    AdaptedModel,
    image_change_of,
    request_of,
    require_memory,
    require_whole_periods,
)
from fedtar_flare.runtime.site_strategy import Handler, SiteStrategy, require_exchange, require_start
from fedtar_flare.runtime.task import Answer, Task, missing_state
from fedtar_flare.site.admission import JobRequest
from fedtar_flare.site.cohort import labeler_of_site
from fedtar_flare.site.policy import streaming_allowed

if TYPE_CHECKING:
    from fedtar_flare.data.cohort import Cohort, Split
    from fedtar_flare.learning.learner import Validated
    from fedtar_flare.models.report_generator import ReportGenerator

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
        Groups of settings by name, each a dictionary.
    seed : int
        The job's seed.

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
        if self.settings.training.noise_multiplier is not None and not self.learner_class.may_be_private():
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
        """A learner whose batches can be shared can share all else."""
        return self.learner_class.shares_batches() and self.settings.training.noise_multiplier is None

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
        training = self.settings.training
        share = f"{100 * (training.local_epochs or 0):g} % of its training visits in"
        much = f"{training.local_steps} updates" if training.local_epochs is None else f"{share} updates"
        much = f"as many as fit into {training.seconds:g} s of {much}" if training.seconds else much
        return f"{much} of {training.batch_size} reports a training task"

    def adapted_model(self, time_steps: int) -> AdaptedModel:
        """The report generator; a method adds what it trains for itself."""
        return AdaptedModel(self.settings.model, self.lora, self.extend)

    def personal_rates(self) -> dict[str, float]:
        """List the learning rates of what the method trains for itself.

        Returns
        -------
        dict of str to float
            By setting.
        """
        return {}

    def job_request(self, rounds: int, time_steps: int) -> JobRequest:
        """What the method asks of a site, for its bounds."""
        training = self.settings.training
        request = request_of(
            self.adapted_model(time_steps),
            rounds,
            time_steps,
            local_steps={"training.local_steps": training.local_steps} if training.local_epochs is None else {},
            batch_size={"training.batch_size": training.batch_size},
            learning_rate={"training.lr": training.lr} | self.personal_rates(),
            decay={"training.lr x weight_decay": training.lr * training.weight_decay},
            clip={"training.max_grad_norm": training.max_grad_norm},
            beams={"model.num_beams": self.settings.model.num_beams},
        )
        return replace(request, noise_multiplier={"training.noise_multiplier": training.noise_multiplier or 0.0})

    def shared_learner(self, source: str) -> tuple[type[ReportLearner], dict[str, Any]]:
        """Choose the learner of a hospital outside the run, which has the shared part alone.

        Parameters
        ----------
        source : str
            Where that hospital's data comes from.

        Returns
        -------
        kind : type of ReportLearner
            Its class.
        arguments : dict
            Further arguments of that class, by name.
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
            A training task.

        Returns
        -------
        int, collection of int or None
            One time step t, or several; None: all steps together.
        """
        return task.header.step

    def training_cohort(self, task: Task) -> Cohort:
        """Choose the patients that a training task learns from.

        Parameters
        ----------
        task : Task
            A training task.

        Returns
        -------
        Cohort
            By default the site's own.
        """
        return task.cohort

    def before_training(self, task: Task, learner: ReportLearner) -> dict[str, torch.Tensor]:
        """Called with the weights loaded, before the first update.

        Parameters
        ----------
        task : Task
            A training task.
        learner : ReportLearner
            The site's learner.

        Returns
        -------
        dict of str to Tensor
            What is sent with the update, by name.
        """
        return {}

    def on_weights(self, task: Task) -> None:
        """Called with the weights of a training task, before anything else.

        Parameters
        ----------
        task : Task
            A training task.
        """

    def closed_from(self, task: Task) -> str:
        """Digest of all that a closing reply follows from; a round is closed from one such set, and no other.

        Parameters
        ----------
        task : Task
            A closing task.

        Returns
        -------
        str
            By default that of the weights.
        """
        return checksum(task.weights)

    def close(self, task: Task, validated: Validated | None) -> tuple[dict[str, float], dict[str, Any]]:
        """Choose what the method adds to a closing reply.

        Parameters
        ----------
        task : Task
            A closing task.
        validated : Validated or None
            Loss and gradient over the validation patients; None where there are none.

        Returns
        -------
        numbers : dict of str to float
            Fields of the contract that are numbers.
        payload : dict
            Its other fields.
        """
        return {}, {}

    def personalise(self, task: Task, learner: ReportLearner) -> None:
        """Called in a closing task between validation and scoring, to train what this site keeps for itself.

        Parameters
        ----------
        task : Task
            A closing task.
        learner : ReportLearner
            The site's learner, with the shared part and the private part loaded.
        """

    # ------------------------------------------------------------------ the three tasks
    def handlers(self) -> Mapping[str, Handler]:
        """Handshake, training and closing of a round."""
        return {HANDSHAKE: self._handshake, TRAIN: self._train, CLOSE_ROUND: self._close_round}

    def _handshake(self, task: Task) -> Answer:
        header, state = task.header, task.state
        # 1. Whether this site may begin, or must have a state.
        gives_start = header.initial_site == task.site.name
        if gives_start:
            require_start(task)
        if header.initial_site:
            self.learner = None  # one of this process may be trained although its task failed: build it from the seed
        if header.member and state.latest(header.after) is None:
            raise missing_state(state, header.after)
        for name in state.names("broadcast-"):  # of a job that ended in the middle of a round
            state.remove(name)
        # 2. The learner, and its private state.
        begins = task.cohort if header.arrived is None else task.cohort.until(header.arrived + 1)
        self.at_handshake(replace(task, cohort=begins))
        learner = self.learner_of(task)
        if task.weights:
            learner.load_shared(task.weights)
        if state.latest(header.after) is None:
            self.save_private(task, learner, version(0, 0))
        if task.on_opened:
            task.on_opened()
        # 3. What the site says of itself.
        shared = learner.exchanged(task.weights)
        reply = self.agreement(task, shared)
        config = learner.adapter_config()
        reply.payload.update(adapter_config=config, model=with_fingerprint(learner.describe(), config))
        if header.evaluate and self._may_score(task, shared):
            self._load_private(task, learner)
            reply.payload.update(self.evaluate(task, learner))
        return reply, shared if gives_start else None

    def _train(self, task: Task) -> Answer:
        header, least, settings = task.header, task.min_cell, self.settings.training
        # 1. The patients, of whom there must be enough.
        cohort = self._arrived(task, self.training_cohort(task))
        require_exchange(task)
        self.on_weights(task)
        steps = self.steps_of(task)
        if not (visits := len(cohort.samples("train", steps, least))):
            at = f"at step {steps}" if isinstance(steps, int) else f"up to step {max(steps)}" if steps else "at all"
            few = "no training visit" if least == 1 else f"fewer than {least} patients with a training visit"
            return abstain(header, f"{few} {at}"), None
        fewest = task.config.policy.min_local_steps
        updates = settings.updates_of(visits, fewest)
        if updates * settings.batch_size < least:
            return abstain(header, f"the task's updates would be made from fewer than {least} patients"), None
        # 2. The learner, as the weights that came down and the site's private state make it.
        learner = self.learner_of(task, cohort)
        if task.contract.task(TRAIN).down:
            learner.load_shared(task.weights)
        self._load_private(task, learner)
        further = self.before_training(task, learner)
        seed = task.seed(TRAIN, cohort)
        private = settings.noise_multiplier is not None
        if private and not self.charge(task, learner.draw_rate(visits), updates):
            return abstain(header, "the privacy budget of per-patient DP-SGD is spent"), None
        # 3. Local updates.
        if planted := task.config.canaries:
            from fedtar_flare.learning.canaries import canaries

            task.logger.info(f"trained on {planted} made-up patients too (canaries): for a trial, not for use")
            made_up = canaries(cohort, header.run_id, planted, learner.tokenizer, task.state.folder)
            learner.cohort = cohort.with_samples(made_up)
        result = learner.train(steps, seed, self._on_update(task, updates), updates, fewest)
        learner.cohort = cohort
        task.site.stop_if_aborted()
        if result.patients < least:
            return abstain(header, f"the updates were made from fewer than {least} patients"), None
        self.save_private(task, learner)
        # 4. What leaves: counts rounded, losses only of enough patients, the update in the wire's number format.
        counts = cohort.counts(least)["train"]
        chosen = range(1, len(counts) + 1) if steps is None else [steps] if isinstance(steps, int) else steps
        numbers = {"samples": 0.0}
        for t in chosen:
            numbers["samples"] += counts[t - 1]
        if settings.seconds:
            numbers |= {"updates": float(result.updates), "planned_updates": float(updates)}
        if not private and result.loss_patients >= least:  # no noise covers it
            numbers["train_loss"] = round_loss(result.loss, result.loss_visits, least)
        if not private and least == 1:  # one visit can spoil an update
            numbers["skipped_updates"] = float(result.skipped_updates)
        reply = ok(header, numbers, dict(result.parts))
        if not task.contract.task(TRAIN).up:
            return reply, None
        wire = WIRE_DTYPES[self.settings.lora.dtype_up]
        return reply, {name: value.to(wire) for name, value in (result.update | further).items()}

    def charge(self, task: Task, rate: float, updates: int) -> bool:
        """Count updates of per-patient DP-SGD before they are made. Without noise nothing is counted.

        Parameters
        ----------
        task : Task
            The task that makes them.
        rate : float
            Each patient's probability of being in one of them.
        updates : int
            How many.

        Returns
        -------
        bool
            False where they are beyond the site's budget.
        """
        if (noise_multiplier := self.settings.training.noise_multiplier) is None:
            return True
        from fedtar_flare.core.files import locked
        from fedtar_flare.site.accountant import PATIENT_FILE, PatientLedger

        most, file = task.config.policy.max_patient_epsilon, task.site.records / PATIENT_FILE
        charge = noise_multiplier, rate, updates
        with locked(file):
            ledger = PatientLedger(file, scope=task.header.run_id if task.site.simulated else None)
            epsilon = ledger.epsilon_with(*charge)
            if most is not None and epsilon > most:
                return False
            ledger.add(task.header.run_id, *charge)
        task.logger.info(f"per-patient DP-SGD: epsilon {epsilon:.3g} after this task")
        return True

    def _close_round(self, task: Task) -> Answer:
        header, state = task.header, task.state
        # 1. A round is closed once, from the weights of the run's exchange.
        require_exchange(task)
        if not state.may_answer(f"close {header.round}", self.closed_from(task), task.cohort.digest()):
            return abstain(header, f"round {header.round} was closed already, with other weights or patients"), None
        learner = self.learner_of(task, self._arrived(task, task.cohort))
        if task.contract.task(CLOSE_ROUND).down:
            learner.load_shared(task.weights)
        self._load_private(task, learner)
        # 2. Validation, and what the method adds.
        numbers: dict[str, float] = {}
        validated = learner.validate() if header.score == "test" else None  # a site outside chooses no round
        if validated is not None:
            numbers["reports"] = float(sum(learner.cohort.counts(learner.min_cell)["validation"]))
            numbers["validation_loss"] = round_loss(validated.loss, validated.reports, learner.min_cell)
        more, payload = self.close(task, validated)
        # 3. Scores, with what the site keeps for itself.
        self.personalise(task, learner)
        if header.evaluate and self._may_score(task, task.weights):
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

    def _may_score(self, task: Task, weights: Tensors) -> bool:
        """Whether these are the weights that the scores after a round are of, at its end or when the run is resumed."""
        ahead = task.state.ahead(task.header)
        question = f"scores ahead of step {ahead[0]}" if ahead else f"scores after round {int(task.header.after[:4])}"
        own = not task.contract.task(CLOSE_ROUND).down  # none come down: scores are of what the site keeps
        if task.state.may_answer(question, "" if own else checksum(weights), task.cohort.digest()):
            return True
        task.logger.warning(f"{question} were asked for again, of other weights or patients: kept back")
        return False

    def learner_of(self, task: Task, cohort: Cohort | None = None) -> ReportLearner:
        """The site's learner, built once per process and run, ready for a task.

        Parameters
        ----------
        task : Task
            The task.
        cohort : Cohort, optional
            The patients that are learnt from, where these are not the task's.

        Returns
        -------
        ReportLearner
            With the task's patients, bounds and learning rate; its weights are those of the task before.
        """
        header, config, site = task.header, task.config, task.site
        cohort, data = cohort or task.cohort, self.settings.data
        if self.learner is None or self._learner_key != (header.run_id, site.name):
            from fedtar_flare.learning.clinical_start import refuse_known_tests

            require_whole_periods(site, data.replay_share)
            require_memory(self.adapted_model(header.time_steps), self.settings.training, cohort.timeline, config)
            refuse_known_tests(task.cohort, self.settings.model.with_local_paths(config.policy.models).weights)
            self.learner = self.learner_class(
                model=self.settings.model,
                lora=self.settings.lora,
                training=self.settings.training,
                cohort=cohort,
                seed=self.seed,
                device=config.device,
                precision=config.precision,
                local_paths=config.policy.models,
                lora_rank=self.lora.rank,
                ranks=task.ranks,
                transforms=data.transforms,
                image_change=image_change_of(site, data.image_changes, self.seed),
                report_labeler=labeler_of_site(config),
                fresh_noise=not config.without_patients,
                **self.learner_settings(task),
            )
            self._learner_key = (header.run_id, site.name)
            task.state.note_precision(self.learner.precision)
        rounds = header.rounds_per_period or header.rounds
        return self.learner.with_task(
            cohort,  # a visit added or withdrawn since the task before counts from this one on
            min_cell=task.min_cell,
            checkpoint=site.stop_if_aborted,
            newest_step=None if header.arrived is None else max(1, header.arrived),
            rate=self.settings.training.rate_of((max(1, header.round) - 1) % rounds + 1, rounds),
        )

    def _on_update(self, task: Task, count: int) -> Callable[[int, float], None]:
        """What runs after each of ``count`` updates: a progress line, and the loss to TensorBoard where allowed."""
        header = task.header
        progress = Progress(f"round {header.round}, step {header.step}: update", count, task.logger.info)
        # what streams passes no filter
        private = self.settings.training.noise_multiplier is not None
        allowed = not private and task.config.may_share("losses") and streaming_allowed(task.site.workspace)
        before = ((header.round - 1) * header.time_steps + header.step - 1) * count

        def on_update(number: int, loss: float) -> None:
            progress(number)
            if allowed:
                task.send_scalar("loss of local updates", loss, before + number)

        return on_update

    def evaluate(self, task: Task, learner: ReportLearner) -> dict[str, Any]:
        """Score the reports of the patients that the task names. Scores of single reports, and all texts, stay.

        Where visits arrive period by period, scores are of the next period's visits of all patients, ahead of time, and
        the site keeps those of test patients' earlier visits. A job that adds periods begins with these alone.

        Parameters
        ----------
        task : Task
            A handshake or a closing task.
        learner : ReportLearner
            The site's learner, with the shared part and the private part loaded.

        Returns
        -------
        dict
            Fields of a reply: ``scores``, and ``scores_generic`` without the personal part; empty where this process
            is not the first.
        """
        from fedtar_flare.learning.evaluation import write_report_scores
        from fedtar_flare.reporting.examples import SiteExamples, examples_of, write_examples
        from fedtar_flare.reporting.groups import scores_by_group
        from fedtar_flare.reporting.periods import write_periods

        header, state, least = task.header, task.state, task.min_cell
        whose: Split | None = "test" if header.score == "test" else None
        earlier: list[dict[str, Any]] = []
        if ahead := state.ahead(header) if header.arrived is None else None:
            learner.newest_step = ahead[0] - 1
            scored = learner.evaluate(least, whose, ahead, generic=False)
        elif header.arrived is None:
            scored = learner.evaluate(least, whose)
        else:
            scored = learner.evaluate(least, None, header.arrived + 1, generic=False)
            if header.round:  # what is forgotten at last, of what was known in its own time
                steps = range(1, header.arrived + 1) if header.round == header.rounds else header.arrived
                earlier = learner.evaluate(least, whose, steps, generic=False).rows
        by_period = ahead or header.arrived is not None
        if task.ranks.rank or (by_period and not scored.samples):
            return {}
        synthetic, modality = task.config.source == "synthetic", learner.cohort.modality
        shown = examples_of(scored, learner.prepared)
        groups = scores_by_group(scored.samples, scored.rows[: len(scored.samples)], least)
        examples = SiteExamples(task.site.name, header.round, synthetic, modality, shown, groups)
        pages = [write_examples(state.folder, examples)]
        if any(group.behind for group in groups):
            task.logger.warning(f"the drafts of a group of patients fall behind all others': {pages[0]}")
        write_report_scores(state.folder, header.round, [*scored.rows, *earlier])
        if by_period:
            pages.append(write_periods(state.folder, learner, scored.rows))
        task.logger.info(f"for this site alone: {', '.join(map(str, pages))}")
        return {"scores": scored.scores} | ({"scores_generic": scored.scores_generic} if scored.scores_generic else {})

    @staticmethod
    def _load_private(task: Task, learner: ReportLearner) -> None:
        """Load the newest private state that is not later than the task's ``after``."""
        newest = task.state.latest(task.header.after)
        if newest is None:
            raise missing_state(task.state, task.header.after)
        learner.load_private(task.state.read(newest)[0])

    @staticmethod
    def save_private(task: Task, learner: ReportLearner, name: str | None = None) -> None:
        """Save the private state; a non-finite one is never saved, so that the version before stays good.

        Parameters
        ----------
        task : Task
            The task.
        learner : ReportLearner
            Whose private state it is.
        name : str, optional
            Of the version; by default that of the task's round and step.
        """
        from fedtar_flare.learning.training import require_finite

        header, private = task.header, learner.private()
        require_finite(private)
        name = name or version(header.round, header.step)
        task.state.save(name, private, {"round": header.round, "step": header.step}, keep=header.keep)
