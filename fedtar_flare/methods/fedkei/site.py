"""FedKEI at a site: the task's images, one pass for PROBE, tuning for ADAPT, and every module kept for its disease."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from fedtar_flare.errors import ConfigError, ExchangeError
from fedtar_flare.imaging.transform_list import RANDOM
from fedtar_flare.learning.config import DataConfig, LoRAConfig
from fedtar_flare.methods.fedkei.asked import adapted_model, frozen_values, head_values, request
from fedtar_flare.methods.fedkei.config import STEPS, classifier_of
from fedtar_flare.methods.fedkei.contract import ADAPT, PROBE
from fedtar_flare.methods.fedkei.objectives import IMPORTANCE, split_curvature
from fedtar_flare.methods.fedkei.plans import plan
from fedtar_flare.methods.fedkei.site_data import SiteTaskData, require_fitting
from fedtar_flare.methods.fedkei.site_page import module_name, write_modules_page
from fedtar_flare.methods.fedkei.tuning import LearnerSettings
from fedtar_flare.progress import Progress
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.protocol.messages import Reply, TaskHeader, abstain, ok, version
from fedtar_flare.protocol.tasks import HANDSHAKE
from fedtar_flare.runtime.requirements import AdaptedModel
from fedtar_flare.runtime.site_executor import SiteExecutor, no_state, seed_of
from fedtar_flare.runtime.site_strategy import Handler, SiteStrategy, require_start
from fedtar_flare.settings import Settings, build
from fedtar_flare.site.admission import JobRequest
from fedtar_flare.site.place import Site
from fedtar_flare.site.state import SiteState, task_scores
from fedtar_flare.tensor_file import checksum

if TYPE_CHECKING:
    from fedtar_flare.data.cohort import Cohort
    from fedtar_flare.methods.fedkei.answers import Adapted
    from fedtar_flare.methods.fedkei.learner import TaskLearner

MOST_EPOCHS = 99
"""Of tuning: what a list in a reply may hold, with epoch 0."""


class FedKEISite(SiteStrategy):
    """FedKEI, its rivals and controls at one site.

    Each task's module stays here as ``module-<t>``, for the disease that it was learnt on, with alpha; the scores of
    single test images stay as ``scores-<t>``. ``preset`` is one of ``config.CLASSIFIERS``; ``training`` has the
    settings of :class:`LearnerSettings`.
    """

    shared_groups = ("model", "training", "data")
    reads_reports = False
    columns = ("labels",)

    def __init__(self, executor: SiteExecutor):
        super().__init__(executor)
        self.plan = plan(self.settings.fedkei.plan)
        self._site: Site
        self.learner: TaskLearner | None = None
        self._learner_key: tuple[str, str] | None = None

    def build_shared(self, preset: str, given: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Settings]:
        model = classifier_of(preset, dict(given["model"] or {}), self.executor.seed)
        return {
            "model": model,
            "lora": LoRAConfig(rank=model.rank, alpha=float(model.rank)),
            "training": build(LearnerSettings, given["training"], "training"),
            "data": build(DataConfig, given["data"], "data"),
        }

    def check(self) -> None:
        """Refuse more epochs than a reply can tell of, and a previous visit."""
        if self.settings.training.epochs > MOST_EPOCHS:
            raise ConfigError(f"training: epochs is {self.settings.training.epochs}: it must be at most {MOST_EPOCHS}")
        if self.settings.data.prior != "none":
            raise ConfigError("data: prior is for reports; fedkei classifies single images")
        if changing := [spec["name"] for spec in self.settings.data.transforms if spec["name"] in RANDOM]:
            raise ConfigError(f"data: transforms: {changing[0]} is random, and fedkei trains on images as prepared")

    # ------------------------------------------------------------------ what the base asks
    def load_libraries(self) -> None:
        """The learner's."""
        from fedtar_flare.methods.fedkei import learner  # noqa: F401

    def adapted_model(self, time_steps: int) -> AdaptedModel:
        return adapted_model(self.settings.model)

    def asks(self, rounds: int, time_steps: int) -> JobRequest:
        return request(self.settings.model, self.settings.training, rounds, time_steps)

    def extra_values(self) -> int:
        return head_values(self.settings.model)

    def model_values(self) -> int | None:
        return frozen_values(self.settings.model)

    def work(self) -> str:
        training = self.settings.training
        return f"a probe of two passes and {training.epochs} epochs of batches of {training.batch_size} images a task"

    def handlers(self) -> Mapping[str, Handler]:
        return {HANDSHAKE: self._handshake, PROBE: self._probe, ADAPT: self._adapt}

    # ------------------------------------------------------------------ the three tasks
    def _handshake(
        self, header: TaskHeader, weights: Tensors, site: Site, state: SiteState, cohort: Cohort
    ) -> tuple[Reply, Tensors | None]:
        require_fitting(cohort, self.settings.model)
        asked_for_start = header.initial_site == site.name
        if asked_for_start:
            require_start(header, weights, state)
        if header.member and state.latest(header.after) is None:
            raise no_state(state, header.after)
        if header.rounds > len(self.settings.fedkei.tasks) or header.time_steps != STEPS:
            raise ExchangeError(f"the run has {header.rounds} tasks; the job lists {len(self.settings.fedkei.tasks)}")
        learner = self.learner_of(header, site)
        start = learner.start
        if weights and checksum(weights) != checksum(start):
            raise ExchangeError("the common start that came down is not the one that the job's seed gives here")
        if state.latest(header.after) is None:
            state.save(version(0, 0), start, {"task": 0})
        reply = self.agreement(header, site, state, cohort, start)
        reply.payload["model"] = learner.describe() | {"adapter_config": learner.adapter_config()}
        if transforms := self.settings.data.transforms:
            reply.payload["model"]["transforms"] = list(transforms)
        return reply, start if asked_for_start else None

    def _probe(
        self, header: TaskHeader, weights: Tensors, site: Site, state: SiteState, cohort: Cohort
    ) -> tuple[Reply, Tensors | None]:
        """The gradient in the centres that came down, once a task: of centres of a server's choice it tells more."""
        data = self._data(header, site, cohort)
        if refused := self._refused(PROBE, header, weights, state, data):
            return refused, None
        learner = self.learner_of(header, site)
        found = learner.probe(weights, data.examples(), header.round, direct=self.plan.probe == "direct")
        site.stop_if_aborted()
        return ok(header, {"samples": float(data.samples)}), found.gradients

    def _adapt(
        self, header: TaskHeader, weights: Tensors, site: Site, state: SiteState, cohort: Cohort
    ) -> tuple[Reply, Tensors | None]:
        """Tune a module from the mixture that came down, keep it, and send its difference from the common start."""
        data = self._data(header, site, cohort)
        if refused := self._refused(ADAPT, header, weights, state, data):
            return refused, None
        learner = self.learner_of(header, site)
        epochs = self.settings.training.epochs
        progress = Progress(f"task {header.round}: epoch", epochs, self.executor.logger.info)

        def tell(epoch: int, auc: float | None) -> None:
            if epoch:
                progress(epoch)

        start, examples = learner.start, data.examples()
        weights, curvature = split_curvature(weights)
        informed = any(not torch.equal(value[0], start[name]) or len(value) > 1 for name, value in weights.items())
        alpha = self.plan.alpha if informed else "fixed"
        local = self.plan.local
        found = learner.adapt(
            weights, examples, header.round, alpha=alpha, local=local, curvature=curvature, on_epoch=tell
        )
        rand: Adapted | None = None
        if self.settings.fedkei.rand_baseline:
            plain = {name: value[None] for name, value in start.items()}
            same = not informed and self.plan.local == plan("rand").local
            rand = found if same else learner.adapt(plain, examples, header.round, alpha="fixed")
        site.stop_if_aborted()
        self._keep(header, site, state, data, found, rand, start)
        sent = {f"{IMPORTANCE}{name}": value for name, value in found.importance.items()}
        return self._reply(header, site, data, found, rand), found.difference | sent

    # ------------------------------------------------------------------ pieces
    def _data(self, header: TaskHeader, site: Site, cohort: Cohort) -> SiteTaskData:
        stream = self.settings.fedkei.stream(site.name, self.executor.seed)
        if header.round > len(stream):
            raise ExchangeError(f"task {header.round} was asked for; the job lists {len(stream)}")
        return SiteTaskData.of(cohort, stream, header.round, self.executor.min_cell)

    def _refused(
        self, task: str, header: TaskHeader, weights: Tensors, state: SiteState, data: SiteTaskData
    ) -> Reply | None:
        """An abstention where the site has too little of the task, or was asked it before with other centres.

        Raises :class:`ExchangeError` for centres that do not fit the run's exchange.
        """
        schema = state.schema()
        agreed = {} if schema is None else dict(schema.shapes)
        centres, curvature = split_curvature(weights)
        one = [] if curvature is None else [curvature.importance, curvature.pull]
        for stacked in (centres, *({name: value[None] for name, value in part.items()} for part in one)):
            for name in sorted(agreed.keys() | stacked.keys()):
                if name not in stacked or name not in agreed or tuple(stacked[name].shape[1:]) != agreed[name]:
                    raise ExchangeError(f"what came down does not fit the run's exchange at tensor '{name}'")
        if data.shortage:
            return abstain(header, data.shortage)
        if not state.may_answer(f"{task} {header.round}", checksum(weights)):
            return abstain(header, f"task {header.round} was answered already, from other centres")
        return None

    def _keep(
        self,
        header: TaskHeader,
        site: Site,
        state: SiteState,
        data: SiteTaskData,
        found: Adapted,
        rand: Adapted | None,
        start: Tensors,
    ) -> None:
        """The module for its disease, and what of it stays at the site."""
        stream = self.settings.fedkei.stream(site.name, self.executor.seed)
        module = {name: start[name] + difference for name, difference in found.difference.items()}
        about = {
            "task": stream.task(header.round).name,
            "alpha": {kind: list(values) for kind, values in found.alpha.items()},
            "fell_back": found.fell_back,
            "auc": list(found.curve),
            "rand_auc": None if rand is None else list(rand.curve),
        }
        state.write(module_name(header.round), module, about)
        scores = {"scores": found.scores} | ({} if rand is None else {"rand_scores": rand.scores})
        test = data.splits["test"]
        patients = [sample.visit.patient_id for sample in test.samples]
        about = {"task": about["task"], "labels": list(test.labels), "patients": patients}
        state.write(task_scores(header.round), scores, about)
        state.save(version(header.round, STEPS), module, {"task": header.round}, keep=header.keep)
        self.executor.logger.info(
            f"this site's modules and mixtures, for its eyes: {write_modules_page(state, site.name)}"
        )

    def _reply(self, header: TaskHeader, site: Site, data: SiteTaskData, found: Adapted, rand: Adapted | None) -> Reply:
        numbers = {
            "samples": float(data.samples),
            "train_loss": fmean(found.losses),
            "first_loss": found.losses[0],
            "last_loss": found.losses[-1],
            "skipped_updates": float(found.skipped_updates),
        }
        stream = self.settings.fedkei.stream(site.name, self.executor.seed)
        scores: dict[str, Any] = {
            "n": data.scored,
            "fell_back": int(found.fell_back),
            "seconds": found.seconds,
            "at_epoch": list(found.at_epoch),
        }
        losses = {name: getattr(found, name) for name in ("mixture_loss", "start_loss", "final_loss")}
        scores |= {name: loss for name, loss in losses.items() if loss is not None}
        if data.scored:
            scores |= {"auc": list(found.curve), "membership": found.membership}
        if rand is not None and data.scored:
            scores |= {"rand_auc": list(rand.curve), "rand_at_epoch": list(rand.at_epoch)}
        counts = {"task": stream.places[header.round - 1] + 1, **data.counts()}
        return ok(header, numbers, {"counts": counts, "scores": scores})

    def learner_of(self, header: TaskHeader, site: Site) -> TaskLearner:
        """The site's learner, built once per process and run."""
        from fedtar_flare.learning.device import choose_device
        from fedtar_flare.methods.fedkei.learner import TaskLearner

        self._site = site  # the checkpoint of a learner that serves several tasks
        if self.learner is None or self._learner_key != (header.run_id, site.name):
            device, autocast = choose_device(self.executor.site_config.device, self.executor.site_config.precision)
            self.learner = TaskLearner(
                self.settings.model,
                self.settings.training,
                seed=seed_of(self.executor.seed, site.name, 0, 0, "batches"),
                device=device,
                autocast=autocast,
                checkpoint=lambda: self._site.stop_if_aborted(),
                places=self.executor.site_config.policy.models,
            )
            self._learner_key = (header.run_id, site.name)
        return self.learner
