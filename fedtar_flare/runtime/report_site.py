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
from fedtar_flare.protocol.messages import Reply, TaskHeader, abstain, ok, version
from fedtar_flare.protocol.tasks import CLOSE_ROUND, HANDSHAKE, TRAIN
from fedtar_flare.runtime.requirements import (
    AdaptedModel,
    image_change_of,
    request_of,
    require_memory,
    require_whole_periods,
)
from fedtar_flare.runtime.site_executor import SiteExecutor, no_state, seed_of
from fedtar_flare.runtime.site_strategy import Handler, SiteStrategy, require_exchange, require_start
from fedtar_flare.site.admission import JobRequest
from fedtar_flare.site.cohort import labeler_of_site
from fedtar_flare.site.context import Site
from fedtar_flare.site.policy import streaming_allowed
from fedtar_flare.site.state import SiteState

if TYPE_CHECKING:
    from fedtar_flare.data.cohort import Cohort, Split
    from fedtar_flare.learning.learner import Validated
    from fedtar_flare.models.report_generator import ReportGenerator


class ReportSite(SiteStrategy):
    """Handshake, training and closing of a round at a site; a method overrides the hooks."""

    def __init__(self, executor: SiteExecutor):
        super().__init__(executor)
        self.learner: ReportLearner | None = None
        self._learner_key: tuple[str, str] | None = None
        if self.given.training.noise_multiplier is not None and not self.learner_class.may_be_private():
            text = f"training.noise_multiplier: method '{executor.method}' makes updates that DP-SGD does not cover"
            raise ConfigError(text, public=text)

    def build_shared(self, preset: str, given: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Settings]:
        kinds: dict[str, type[Settings]] = {"lora": LoRAConfig, "training": TrainingConfig, "data": DataConfig}
        model = model_preset(preset, **(given["model"] or {}))
        groups = {"model": model} | {name: build(kind, given[name], name) for name, kind in kinds.items()}
        if (given["data"] or {}).get("priors", 1) > 1 and model.family != "vlm":
            raise ConfigError("data.priors: more than the last visit is shown to a model.family of 'vlm' alone")
        return groups

    # ------------------------------------------------------------------ what a method may change
    @property
    def learner_class(self) -> type[ReportLearner]:
        """Class of the site's learner."""
        return self.executor.definition.learner or ReportLearner

    def shares_batches(self) -> bool:
        """A learner whose batches can be shared can share all else."""
        return self.learner_class.shares_batches() and self.settings.training.noise_multiplier is None

    def learner_settings(self, header: TaskHeader, state: SiteState) -> dict[str, Any]:
        """Further arguments of :attr:`learner_class`; by default the method's own groups of settings."""
        return {name: self.settings[name] for name in self.executor.definition.settings}

    def extend(self, model: ReportGenerator) -> None:
        """Add to the base model what the learner adds, so that the sizes of an exchange are known without data."""

    def work(self) -> str:
        """How many updates, of how many reports."""
        training = self.settings.training
        share = f"{100 * (training.local_epochs or 0):g} % of its training visits in"
        much = f"{training.local_steps} updates" if training.local_epochs is None else f"{share} updates"
        much = f"as many as fit into {training.seconds:g} s of {much}" if training.seconds else much
        return f"{much} of {training.batch_size} reports a training task"

    def adapted_model(self, time_steps: int) -> AdaptedModel:
        """The report generator; a method adds what it trains for itself."""
        return AdaptedModel(self.settings.model, self.lora_here, self.extend)

    def own_rates(self) -> dict[str, float]:
        """Learning rates of what the method trains for itself, by setting."""
        return {}

    def asks(self, rounds: int, time_steps: int) -> JobRequest:
        """What the method asks of a site, for its bounds."""
        training = self.settings.training
        request = request_of(
            self.adapted_model(time_steps),
            rounds,
            time_steps,
            local_steps={"training.local_steps": training.local_steps} if training.local_epochs is None else {},
            batch_size={"training.batch_size": training.batch_size},
            learning_rate={"training.lr": training.lr} | self.own_rates(),
            decay={"training.lr x weight_decay": training.lr * training.weight_decay},
            clip={"training.max_grad_norm": training.max_grad_norm},
            beams={"model.num_beams": self.settings.model.num_beams},
        )
        return replace(request, noise_multiplier={"training.noise_multiplier": training.noise_multiplier or 0.0})

    def shared_learner(self, source: str) -> tuple[type[ReportLearner], dict[str, Any]]:
        """Class and further arguments of the learner of a hospital outside, whose data has this source."""
        return ReportLearner, {}

    def at_handshake(self, header: TaskHeader, site: Site, state: SiteState, cohort: Cohort) -> None:
        """Fit what the learner needs, once per run, before it is built."""

    def visits_of(self, header: TaskHeader) -> int | Collection[int] | None:
        """The time step that a task trains on, or several; None: the visits of all steps together."""
        return header.step

    def training_cohort(self, header: TaskHeader, site: Site, state: SiteState, cohort: Cohort) -> Cohort:
        """The patients that a training task learns from; the site's own."""
        return cohort

    def before_training(
        self, header: TaskHeader, site: Site, state: SiteState, learner: ReportLearner
    ) -> dict[str, torch.Tensor]:
        """Called with what came down loaded; gives tensors to be sent with the update."""
        return {}

    def on_broadcast(self, header: TaskHeader, state: SiteState, weights: Tensors) -> None:
        """Called with what a ``train`` task sent down, before anything else."""

    def closed_from(self, header: TaskHeader, state: SiteState, weights: Tensors) -> str:
        """Digest of all that a closing reply follows from; a round is closed from one such set, and no other."""
        return checksum(weights)

    def close(
        self, header: TaskHeader, state: SiteState, weights: Tensors, validated: Validated | None
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """Numbers and payload that the method adds to a closing reply."""
        return {}, {}

    def personalise(self, header: TaskHeader, site: Site, state: SiteState, learner: ReportLearner) -> None:
        """Called in a closing task between validation and scoring, to train what this site keeps for itself."""

    # ------------------------------------------------------------------ the three tasks
    def handlers(self) -> Mapping[str, Handler]:
        return {HANDSHAKE: self._handshake, TRAIN: self._train, CLOSE_ROUND: self._close_round}

    def _handshake(
        self, header: TaskHeader, weights: Tensors, site: Site, state: SiteState, cohort: Cohort
    ) -> tuple[Reply, Tensors | None]:
        asked_for_weights = header.initial_site == site.name
        if asked_for_weights:
            require_start(header, weights, state)
        if header.initial_site:
            self.learner = None  # one of this process may be trained although its task failed: build it from the seed
        if header.member and state.latest(header.after) is None:
            raise no_state(state, header.after)
        for name in state.names("broadcast-"):  # of a job that ended in the middle of a round
            state.remove(name)
        begins = cohort if header.arrived is None else cohort.until(header.arrived + 1)
        self.at_handshake(header, site, state, begins)
        learner = self.learner_of(header, site, state, cohort)
        if weights:
            learner.load_shared(weights)
        if state.latest(header.after) is None:
            self.save_private(state, version(0, 0), learner, header)
        self.executor.let_others_begin()
        shared = learner.exchanged(weights)
        reply = self.agreement(header, site, state, cohort, shared)
        config = learner.adapter_config()
        reply.payload.update(adapter_config=config, model=with_fingerprint(learner.describe(), config))
        if header.evaluate and self._may_score(header, shared, state, cohort):
            self._load_private(learner, state, header.after)
            reply.payload.update(self.evaluate(learner, header, site, state))
        return reply, shared if asked_for_weights else None

    def _train(
        self, header: TaskHeader, weights: Tensors, site: Site, state: SiteState, cohort: Cohort
    ) -> tuple[Reply, Tensors | None]:
        cohort = self._arrived(header, self.training_cohort(header, site, state, cohort))
        require_exchange(self.executor.contract, TRAIN, state, weights)
        self.on_broadcast(header, state, weights)
        step, least = self.visits_of(header), self.executor.min_cell
        if not cohort.samples("train", step, least):
            at = "at all" if step is None else f"at step {step}" if isinstance(step, int) else f"up to step {max(step)}"
            few = "no training visit" if least == 1 else f"fewer than {least} patients with a training visit"
            return abstain(header, f"{few} {at}"), None
        settings, visits = self.settings.training, len(cohort.samples("train", step, least))
        fewest = self.executor.site_config.policy.min_local_steps
        updates = settings.updates_of(visits, fewest)
        if updates * settings.batch_size < least:
            return abstain(header, f"the task's updates would be made from fewer than {least} patients"), None
        learner = self.learner_of(header, site, state, cohort)
        self._load_broadcast(TRAIN, learner, weights)
        self._load_private(learner, state, header.after)
        further = self.before_training(header, site, state, learner)
        seed = seed_of(self.executor.chance(cohort), site.name, header.round, header.step, TRAIN)
        if not self.charge(header, site, learner.draw_rate(visits), updates):
            return abstain(header, "the privacy budget of per-patient DP-SGD is spent"), None
        if planted := self.executor.site_config.canaries:
            from fedtar_flare.learning.canaries import canaries

            self.executor.logger.info(f"trained on {planted} made-up patients too (canaries): for a trial, not for use")
            made_up = canaries(cohort, header.run_id, planted, learner.tokenizer, state.folder)
            learner.cohort = cohort.with_samples(made_up)
        result = learner.train(step, seed, self._on_update(header, site, updates), updates, fewest)
        learner.cohort = cohort
        site.stop_if_aborted()
        if result.patients < least:
            return abstain(header, f"the updates were made from fewer than {least} patients"), None
        self.save_private(state, version(header.round, header.step), learner, header)
        counts = cohort.counts(least)["train"]
        steps = range(1, len(counts) + 1) if step is None else [step] if isinstance(step, int) else step
        numbers = {"samples": float(sum(counts[t - 1] for t in steps))}
        if settings.seconds:
            numbers |= {"updates": float(result.updates), "planned_updates": float(updates)}
        if settings.noise_multiplier is None and result.loss_patients >= least:  # no noise covers it
            numbers["train_loss"] = round_loss(result.loss, result.loss_visits, least)
        if settings.noise_multiplier is None and least == 1:  # one visit can spoil an update
            numbers["skipped_updates"] = float(result.skipped_updates)
        payload = dict(result.parts)
        if not self.executor.contract.task(TRAIN).up:
            return ok(header, numbers, payload), None
        wire = WIRE_DTYPES[self.settings.lora.dtype_up]
        return ok(header, numbers, payload), {n: value.to(wire) for n, value in (result.update | further).items()}

    def charge(self, header: TaskHeader, site: Site, rate: float, updates: int) -> bool:
        """Count updates of per-patient DP-SGD, and each patient's probability of being in one, before they are made;
        False where they are beyond the site's budget. Without noise nothing is counted.
        """
        if (noise_multiplier := self.settings.training.noise_multiplier) is None:
            return True
        from fedtar_flare.core.files import locked
        from fedtar_flare.site.accountant import PATIENT_FILE, PatientLedger

        most, file = self.executor.site_config.policy.max_patient_epsilon, site.records / PATIENT_FILE
        charge = noise_multiplier, rate, updates
        with locked(file):
            ledger = PatientLedger(file, scope=header.run_id if site.simulated else None)
            epsilon = ledger.epsilon_with(*charge)
            if most is not None and epsilon > most:
                return False
            ledger.add(header.run_id, *charge)
        self.executor.logger.info(f"per-patient DP-SGD: epsilon {epsilon:.3g} after this task")
        return True

    def _close_round(
        self, header: TaskHeader, weights: Tensors, site: Site, state: SiteState, cohort: Cohort
    ) -> tuple[Reply, Tensors | None]:
        require_exchange(self.executor.contract, CLOSE_ROUND, state, weights)
        if not state.may_answer(f"close {header.round}", self.closed_from(header, state, weights), cohort.digest()):
            return abstain(header, f"round {header.round} was closed already, with other weights or patients"), None
        learner = self.learner_of(header, site, state, self._arrived(header, cohort))
        self._load_broadcast(CLOSE_ROUND, learner, weights)
        self._load_private(learner, state, header.after)
        numbers: dict[str, float] = {}
        validated = learner.validate() if header.score == "test" else None  # a site outside chooses no round
        if validated is not None:
            numbers["reports"] = float(sum(learner.cohort.counts(learner.min_cell)["validation"]))
            numbers["validation_loss"] = round_loss(validated.loss, validated.reports, learner.min_cell)
        more, payload = self.close(header, state, weights, validated)
        self.personalise(header, site, state, learner)
        if header.evaluate and self._may_score(header, weights, state, cohort):
            learner.cohort = cohort
            payload |= self.evaluate(learner, header, site, state)
        return ok(header, numbers | more, payload), None

    # ------------------------------------------------------------------ what the tasks share
    def _arrived(self, header: TaskHeader, cohort: Cohort) -> Cohort:
        """What of the cohort a task learns from."""
        share = self.settings.data.replay_share
        if header.arrived is None and share == 1:
            return cohort
        return cohort.until(header.time_steps if header.arrived is None else header.arrived, share)

    def _may_score(self, header: TaskHeader, weights: Tensors, state: SiteState, cohort: Cohort) -> bool:
        """Whether these are the weights that the scores after a round are of, at its end or when the run is resumed."""
        ahead = state.ahead(header)
        question = f"scores ahead of step {ahead[0]}" if ahead else f"scores after round {int(header.after[:4])}"
        own = not self.executor.contract.task(CLOSE_ROUND).down  # none come down: scores are of what the site keeps
        if state.may_answer(question, "" if own else checksum(weights), cohort.digest()):
            return True
        self.executor.logger.warning(f"{question} were asked for again, of other weights or patients: kept back")
        return False

    def learner_of(self, header: TaskHeader, site: Site, state: SiteState, cohort: Cohort) -> ReportLearner:
        """The site's learner, built once per process and run."""
        if self.learner is None or self._learner_key != (header.run_id, site.name):
            config = self.executor.site_config
            require_memory(self.adapted_model(header.time_steps), self.settings.training, cohort.timeline, config)
            self.learner = self.learner_class(
                model=self.settings.model,
                lora=self.settings.lora,
                training=self.settings.training,
                cohort=cohort,
                seed=self.executor.seed,
                device=config.device,
                precision=config.precision,
                checkpoint=site.stop_if_aborted,
                places=config.policy.models,
                lora_rank=self.lora_here.rank,
                **self.learner_settings(header, state),
            )
            self._learner_key = (header.run_id, site.name)
            state.note_precision(self.learner.precision)
        self.learner.ranks = self.executor.ranks
        self.learner.fresh_noise = not self.executor.site_config.without_patients
        self.learner.min_cell = self.executor.min_cell
        self.learner.cohort = cohort  # a visit added or withdrawn since counts from this task on
        self.learner.checkpoint = site.stop_if_aborted
        self.learner.report_labeler = labeler_of_site(self.executor.site_config)
        require_whole_periods(site, self.settings.data.replay_share)
        self.learner.image_change = image_change_of(site, self.settings.data.image_changes, self.executor.seed)
        self.learner.transforms = self.settings.data.transforms
        self.learner.newest_step = None if header.arrived is None else max(1, header.arrived)
        rounds = header.rounds_per_period or header.rounds
        self.learner.rate = self.settings.training.rate_of((max(1, header.round) - 1) % rounds + 1, rounds)
        return self.learner

    def _on_update(self, header: TaskHeader, site: Site, count: int) -> Callable[[int, float], None]:
        """What runs after each of ``count`` updates: a progress line, and the loss to TensorBoard where allowed."""
        progress = Progress(f"round {header.round}, step {header.step}: update", count, self.executor.logger.info)
        # what streams passes no filter
        private = self.settings.training.noise_multiplier is not None
        allowed = not private and self.executor.site_config.may_share("losses") and streaming_allowed(site.workspace)
        before = ((header.round - 1) * header.time_steps + header.step - 1) * count

        def on_update(number: int, loss: float) -> None:
            progress(number)
            if allowed:
                self.executor.send_scalar(site, "loss of local updates", loss, before + number)

        return on_update

    def evaluate(self, learner: ReportLearner, header: TaskHeader, site: Site, state: SiteState) -> dict[str, Any]:
        """Scores of the patients that the task names. Those of single reports, and all texts, stay.

        Where visits arrive period by period, scores are of the next period's visits of all patients, ahead of time, and
        the site keeps those of test patients' earlier visits. A job that adds periods begins with these alone.
        """
        from fedtar_flare.learning.evaluation import write_report_scores
        from fedtar_flare.reporting.examples import SiteExamples, choose, examples_of, write_examples
        from fedtar_flare.reporting.groups import scores_by_group
        from fedtar_flare.reporting.periods import write_periods

        whose: Split | None = "test" if header.score == "test" else None
        earlier: list[dict[str, Any]] = []
        if ahead := state.ahead(header) if header.arrived is None else None:
            learner.newest_step = ahead[0] - 1
            scored = learner.evaluate(self.executor.min_cell, whose, ahead, generic=False)
        elif header.arrived is None:
            scored = learner.evaluate(self.executor.min_cell, whose)
        else:
            scored = learner.evaluate(self.executor.min_cell, None, header.arrived + 1, generic=False)
            if header.round:  # what is forgotten at last, of what was known in its own time
                steps = range(1, header.arrived + 1) if header.round == header.rounds else header.arrived
                earlier = learner.evaluate(self.executor.min_cell, whose, steps, generic=False).rows
        by_period = ahead or header.arrived is not None
        if self.executor.ranks.rank or (by_period and not scored.samples):
            return {}
        chosen = choose([sample.visit.patient_id for sample in scored.samples])
        synthetic, modality = self.executor.site_config.source == "synthetic", learner.cohort.modality
        shown = examples_of(scored, chosen, learner.prepared([scored.samples[i] for i in chosen]))
        groups = scores_by_group(scored.samples, scored.rows[: len(scored.samples)], self.executor.min_cell)
        examples = SiteExamples(site.name, header.round, synthetic, modality, shown, groups)
        pages = [write_examples(state.folder, examples)]
        if any(group.behind for group in groups):
            self.executor.logger.warning(f"the drafts of a group of patients fall behind all others': {pages[0]}")
        write_report_scores(state.folder, header.round, [*scored.rows, *earlier])
        if by_period:
            pages.append(write_periods(state.folder, learner, scored.rows))
        self.executor.logger.info(f"for this site alone: {', '.join(map(str, pages))}")
        return {"scores": scored.scores} | ({"scores_generic": scored.scores_generic} if scored.scores_generic else {})

    def _load_broadcast(self, task: str, learner: ReportLearner, weights: Tensors) -> None:
        """Load what came down, which must be whole; nothing where the contract sends none."""
        if self.executor.contract.task(task).down:
            learner.load_shared(weights)

    @staticmethod
    def _load_private(learner: ReportLearner, state: SiteState, after: str) -> None:
        """Load the newest private state that is not later than ``after``."""
        newest = state.latest(after)
        if newest is None:
            raise no_state(state, after)
        learner.load_private(state.read(newest)[0])

    @staticmethod
    def save_private(state: SiteState, name: str, learner: ReportLearner, header: TaskHeader) -> None:
        """Save the private state; a non-finite one is never saved, so that the version before stays good."""
        from fedtar_flare.learning.training import require_finite

        private = learner.private()
        require_finite(private)
        state.save(name, private, {"round": header.round, "step": header.step}, keep=header.keep)
