"""Base of every executor that trains a report generator at a site: opens the site, does the three shared tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedtar_flare.errors import ConfigError, DataError, ExchangeError
from fedtar_flare.flare.executor import MethodExecutor, Tensors, abstain, ok
from fedtar_flare.flare.run_rules import require_exchange, require_start, timeline_of, told_of
from fedtar_flare.flare.scalars import send_scalar
from fedtar_flare.learning.config import DataConfig, LoRAConfig, TrainingConfig
from fedtar_flare.models.config import preset as model_preset
from fedtar_flare.progress import Progress
from fedtar_flare.protocol.exchange import WIRE_DTYPES, ExchangeSchema
from fedtar_flare.protocol.messages import Reply, TaskHeader, version
from fedtar_flare.protocol.tasks import CLOSE_ROUND, HANDSHAKE, TRAIN
from fedtar_flare.settings import build, digest
from fedtar_flare.site.admission import Asked, admit
from fedtar_flare.site.approval import require_approval
from fedtar_flare.site.audit import require_writable
from fedtar_flare.site.place import Site
from fedtar_flare.site.policy import streaming_allowed
from fedtar_flare.site.state import SiteState
from fedtar_flare.tensor_file import checksum
from fedtar_flare.version import __version__

if TYPE_CHECKING:
    from fedtar_flare.data.cohort import Cohort
    from fedtar_flare.learning.learner import ReportLearner, Validated
    from fedtar_flare.models.report_generator import ReportGenerator
    from fedtar_flare.site.site_file import SiteConfig

PRODUCTION_MIN_CELL = 5
"""Fewest distinct patients of a split at a step, at a real site whose file sets no ``min_cell``."""


class ReportExecutor(MethodExecutor):
    """Handshake, training and closing of a round at a site; a method overrides the hooks.

    What one task needs of another is on disk (:class:`SiteState`), because each may run in a new process.

    Args:
        model: settings that override those of the model preset (see :mod:`fedtar_flare.models.config`).
        lora, training, data: settings of :class:`LoRAConfig`, :class:`TrainingConfig` and :class:`DataConfig`.
        seed: all randomness derives from it, the site's name, the round, the step and the task.
        torch_threads: threads of one task; equal threads give equal bits.

    Raises:
        ConfigError: a setting is unknown or not allowed.
    """

    def __init__(
        self,
        preset: str = "small",
        model: dict[str, Any] | None = None,
        lora: dict[str, Any] | None = None,
        training: dict[str, Any] | None = None,
        data: dict[str, Any] | None = None,
        seed: int = 0,
        torch_threads: int = 1,
    ):
        super().__init__()
        if isinstance(torch_threads, bool) or not isinstance(torch_threads, int) or torch_threads < 1:
            raise ConfigError(f"torch_threads must be a whole number of at least 1, not {torch_threads!r}")
        self.preset, self.model = preset, model
        self.lora, self.training, self.data = lora, training, data
        self.seed, self.torch_threads = seed, torch_threads
        self.model_config = model_preset(preset, **(model or {}))
        self.lora_config = build(LoRAConfig, lora, "lora")
        self.training_config = build(TrainingConfig, training, "training")
        self.data_config = build(DataConfig, data, "data")
        self._learner: ReportLearner | None = None
        self._learner_key: tuple[str, str] | None = None

    # ------------------------------------------------------------------ what a method may change
    def learner_class(self) -> type[ReportLearner]:
        """Class of the site's learner."""
        from fedtar_flare.learning.learner import ReportLearner

        return ReportLearner

    def learner_settings(self, header: TaskHeader, state: SiteState) -> dict[str, Any]:
        """Further arguments of :meth:`learner_class`."""
        return {}

    def method_settings(self) -> tuple[Any, ...]:
        """Settings beside the shared ones that must be the same at every site."""
        return ()

    def extend(self, model: ReportGenerator) -> None:
        """Add to the base model what the learner adds, so that the sizes of an exchange can be told without data."""

    def shared_learner(self) -> tuple[type[ReportLearner], dict[str, Any]]:
        """Class, and further arguments, of the learner of a hospital outside, which has the shared part alone."""
        from fedtar_flare.learning.learner import ReportLearner

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
        """Called with what came down loaded; gives tensors to be sent beside the update."""
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
    def perform(self, task: str, header: TaskHeader, weights: Tensors, site: Site) -> tuple[Reply, Tensors | None]:
        """Route a task (see :class:`MethodExecutor`)."""
        does = {HANDSHAKE: self._handshake, TRAIN: self._train, CLOSE_ROUND: self._close_round}
        if task not in does:
            raise ConfigError(f"task '{task}' is unknown; this executor does {', '.join(does)}")
        if weights and not self.contract.task(task).down:
            raise ExchangeError(f"the server sent tensors in task '{task}', in which none come down")
        torch.set_num_threads(self.torch_threads)
        state, cohort = self._open(task, header, site)
        answer = does[task](header, weights, site, state, cohort)
        state.add_answered(task, version(header.round, header.step))
        return answer

    def _handshake(
        self, header: TaskHeader, weights: Tensors, site: Site, state: SiteState, cohort: Cohort
    ) -> tuple[Reply, Tensors | None]:
        asked_for_weights = header.initial_site == site.name
        if asked_for_weights:
            require_start(header, weights, state)
            self._learner = None  # one of this process may be trained although its task failed: build it from the seed
        if header.member and state.latest(header.after) is None:
            raise _no_state(state, header.after)
        for name in state.names("broadcast-"):  # of a job that ended in the middle of a round
            state.remove(name)
        self.at_handshake(header, site, state, cohort)
        learner = self._learner_of(header, site, state, cohort)
        if weights:
            learner.load_shared(weights)
        if state.latest(header.after) is None:
            self._save_private(state, version(0, 0), learner, header)
        shared = learner.shared()
        schema = ExchangeSchema.of(shared, self.lora_config.dtype_up)
        state.fix_run(header.time_steps, timeline_of(self.data_config, header), schema)
        least = self._min_cell(site)
        payload: dict[str, Any] = {
            "schema": schema.to_dict(),
            "versions": {"fedtar_flare": __version__},
            "settings": self._settings(),
            "counts": cohort.counts(least),
            "skipped_studies": cohort.left_out(least),
            "adapter_config": learner.adapter_config(),
            "model": learner.describe(),
        }
        if header.evaluate and not state.once(f"scores after {header.after}", checksum(shared)):
            self.logger.warning(f"scores after {header.after} were asked for again, of other weights: not told")
        elif header.evaluate:
            self._load_private(learner, state, header.after)
            payload |= self._evaluate(learner, header, site, state)
        return ok(header, {"min_cell": float(least)}, payload), shared if asked_for_weights else None

    def _train(
        self, header: TaskHeader, weights: Tensors, site: Site, state: SiteState, cohort: Cohort
    ) -> tuple[Reply, Tensors | None]:
        cohort = self.training_cohort(header, site, state, cohort)
        require_exchange(self.contract, TRAIN, state, weights)
        self.on_broadcast(header, state, weights)
        step, least = self.visits_of(header), self._min_cell(site)
        if not cohort.samples("train", step, least):
            where = "at all" if step is None else f"at step {step}"
            few = "no training visit" if least == 1 else f"fewer than {least} patients with a training visit"
            return abstain(header, f"{few} {where}"), None
        settings = self.training_config
        if settings.local_steps * settings.batch_size < least:
            return abstain(header, f"the task's updates would be made from fewer than {least} patients"), None
        learner = self._learner_of(header, site, state, cohort)
        self._load_broadcast(TRAIN, learner, weights)
        self._load_private(learner, state, header.after)
        beside = self.before_training(header, site, state, learner)
        seed = seed_of(self.seed, site.name, header.round, header.step, TRAIN)
        result = learner.train(step, seed, self._on_update(header, site))
        site.stop_if_aborted()
        if result.patients < least:
            return abstain(header, f"the updates were made from fewer than {least} patients"), None
        self._save_private(state, version(header.round, header.step), learner, header)
        numbers = told_of(result, cohort.counts(least)["train"], step, least)
        payload = dict(result.parts)
        if not self.contract.task(TRAIN).up:
            return ok(header, numbers, payload), None
        wire = WIRE_DTYPES[self.lora_config.dtype_up]
        return ok(header, numbers, payload), {n: value.to(wire) for n, value in (result.update | beside).items()}

    def _close_round(
        self, header: TaskHeader, weights: Tensors, site: Site, state: SiteState, cohort: Cohort
    ) -> tuple[Reply, Tensors | None]:
        require_exchange(self.contract, CLOSE_ROUND, state, weights)
        if not state.once(f"close {header.round}", self.closed_from(header, state, weights)):
            return abstain(header, f"round {header.round} was closed already, with other weights"), None
        learner = self._learner_of(header, site, state, cohort)
        self._load_broadcast(CLOSE_ROUND, learner, weights)
        self._load_private(learner, state, header.after)
        numbers: dict[str, float] = {}
        validated = learner.validate() if header.score == "test" else None  # a site outside chooses no round
        if validated is not None:
            reports = sum(cohort.counts(learner.min_cell)["validation"])
            numbers |= {"validation_loss": validated.loss, "reports": float(reports)}
        more, payload = self.close(header, state, weights, validated)
        self.personalise(header, site, state, learner)
        if header.evaluate:
            payload |= self._evaluate(learner, header, site, state)
        return ok(header, numbers | more, payload), None

    # ------------------------------------------------------------------ what the tasks share
    def _open(self, task: str, header: TaskHeader, site: Site) -> tuple[SiteState, Cohort]:
        """The site's state of this run and its patients; no data is read for a job or a task that may not come."""
        from fedtar_flare.site.site_file import load_site_config

        self._config = load_site_config(site.name, workspace=site.workspace, simulator=site.simulated)
        self._admit(header, site)
        state = SiteState(site.state_root(self._config.state_dir), header.run_id, site.name)
        if not site.simulated:
            state.require_place()
        if task != HANDSHAKE and not state.versions():
            raise _no_state(state, header.after)
        self.contract.check_place(task, header.round, state.answered())
        state.check_run(header.time_steps, timeline_of(self.data_config, header))
        return state, self._patients(self._config, site.name, header, site.workspace)

    def asked(self, rounds: int, time_steps: int) -> Asked:
        """What the job asks of a site, for its bounds; a method adds what it trains beside the shared adapter."""
        return Asked(
            model=self.model_config,
            lora=self.lora_config,
            training=self.training_config,
            threads=self.torch_threads,
            rounds=rounds,
            time_steps=time_steps,
            extend=self.extend,
        )

    def _admit(self, header: TaskHeader, site: Site) -> None:
        """Raise Declined for a job that is beyond the site's bounds, or not approved where it must be."""
        bounds = self._config.policy
        site.limit(bounds.max_seconds)
        admit(self.asked(header.rounds, header.time_steps), bounds)
        if bounds.approval == "required":
            require_approval(site.records, site.app, type(self), self._is_made_by)

    def _is_made_by(self, arguments: Mapping[str, Any]) -> bool:
        """Whether an executor of these arguments does what this one does."""
        return type(self)(**arguments)._settings() == self._settings()

    def _patients(self, config: SiteConfig, name: str, header: TaskHeader, workspace: Path | None = None) -> Cohort:
        """A site's patients, prepared for the model."""
        from fedtar_flare.site.cohort import prepare_site

        cohort, _ = prepare_site(
            config,
            name,
            model=self.model_config,
            data=self.data_config,
            time_steps=header.time_steps,
            seed=self.seed,
            workspace=workspace,
        )
        return cohort

    def _learner_of(self, header: TaskHeader, site: Site, state: SiteState, cohort: Cohort) -> ReportLearner:
        """The site's learner, built once per process and run."""
        from fedtar_flare.learning.device import choose_device

        if self._learner is None or self._learner_key != (header.run_id, site.name):
            device, autocast = choose_device(self._config.device, self._config.precision)
            self._learner = self.learner_class()(
                model=self.model_config,
                lora=self.lora_config,
                training=self.training_config,
                cohort=cohort,
                seed=self.seed,
                device=device,
                autocast=autocast,
                checkpoint=site.stop_if_aborted,
                places=self._config.policy.models,
                **self.learner_settings(header, state),
            )
            self._learner_key = (header.run_id, site.name)
        self._learner.min_cell = self._min_cell(site)
        self._learner.cohort = cohort  # a visit added or withdrawn since counts from this task on
        self._learner.checkpoint = site.stop_if_aborted
        self._learner.rate = self.training_config.rate_of(max(1, header.round), header.rounds)
        return self._learner

    def _on_update(self, header: TaskHeader, site: Site) -> Callable[[int, float], None]:
        """What runs after each local update: a progress line, and the loss to TensorBoard where allowed."""
        count = self.training_config.local_steps
        progress = Progress(f"round {header.round}, step {header.step}: update", count, self.logger.info)
        allowed = self._config.stream_losses
        if allowed is None:
            allowed = site.simulated or self._config.source == "synthetic"
        if allowed and not streaming_allowed(site.workspace):
            allowed = False  # what streams passes no filter
        before = ((header.round - 1) * header.time_steps + header.step - 1) * count

        def on_update(number: int, loss: float) -> None:
            progress(number)
            if allowed:
                with site.engine.new_context() as context:
                    require_writable(site, context)  # the listener that sends it may come before the audit's
                    send_scalar(self, context, "loss of local updates", loss, before + number)

        return on_update

    def _evaluate(self, learner: ReportLearner, header: TaskHeader, site: Site, state: SiteState) -> dict[str, Any]:
        """Scores of the patients that the task names. Those of single reports, and texts beside references, stay."""
        from fedtar_flare.learning.evaluation import write_report_scores
        from fedtar_flare.reporting.examples import SiteExamples, choose, write_examples

        scored = learner.evaluate(self._min_cell(site), "test" if header.score == "test" else None)
        steps, visits = [s.time_step for s in scored.samples], [s.visit for s in scored.samples]
        chosen = choose(steps, scored.texts, [v.report for v in visits], [v.findings for v in visits])
        synthetic = self._config.source == "synthetic"
        page = write_examples(state.folder, SiteExamples(site.name, header.round, synthetic, chosen))
        write_report_scores(state.folder, header.round, scored.rows)
        self.logger.info(f"generated beside reference reports, for this site's eyes: {page}")
        payload = {"scores": scored.scores}
        return payload | ({"scores_generic": scored.scores_generic} if scored.scores_generic else {})

    def _load_broadcast(self, task: str, learner: ReportLearner, weights: Tensors) -> None:
        """Load what came down, which must be whole; nothing where the contract sends none."""
        if self.contract.task(task).down:
            learner.load_shared(weights)

    @staticmethod
    def _load_private(learner: ReportLearner, state: SiteState, after: str) -> None:
        """Load the newest private state that is not later than ``after``."""
        newest = state.latest(after)
        if newest is None:
            raise _no_state(state, after)
        learner.load_private(state.read(newest)[0])

    @staticmethod
    def _save_private(state: SiteState, name: str, learner: ReportLearner, header: TaskHeader) -> None:
        """Save the private state; a non-finite one is never saved, so that the version before stays good."""
        from fedtar_flare.learning.training import require_finite

        private = learner.private()
        require_finite(private)
        state.save(name, private, {"round": header.round, "step": header.step}, keep=header.keep)

    def _settings(self) -> str:
        """Digest of the settings that must be the same at every site."""
        shared = (self.model_config, self.lora_config, self.training_config, self.data_config)
        return f"{digest(*shared, *self.method_settings())}-{self.seed}"

    def _min_cell(self, site: Site) -> int:
        """The largest of the job's, the site's and its policy's; a real site without one of its own has 5."""
        configured = self._config.min_cell
        if configured is None:
            configured = 1 if site.simulated or self._config.source == "synthetic" else PRODUCTION_MIN_CELL
        return max(configured, self.data_config.min_cell, self._config.policy.min_patients)


def seed_of(seed: int, site: str, round_: int, step: int, task: str) -> int:
    """Seed of one task: the same in every process, independent of what ran before.

    >>> seed_of(0, "site-1", 1, 2, "train") == seed_of(0, "site-1", 1, 2, "train")
    True
    """
    text = f"{seed}/{site}/{round_}/{step}/{task}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _no_state(state: SiteState, after: str) -> DataError:
    return DataError(
        f"{state.folder} has no state of this run at or before version {after}; it was deleted, or the run began on "
        "another machine. Restore the folder from a backup, or submit the job anew",
        reason="no-site-state",
    )
