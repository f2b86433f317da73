"""FedKEI at a site: one pass over the task's images for PROBE, tuning for ADAPT; each module stays for its disease."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn

from fedtar_flare.core.errors import ConfigError, DataError, ExchangeError
from fedtar_flare.core.files import checksum
from fedtar_flare.core.settings import Settings, build, matches, suggestion
from fedtar_flare.core.text import Progress
from fedtar_flare.data.minimum_cell import round_loss, round_share
from fedtar_flare.imaging.transform_list import RANDOM
from fedtar_flare.learning.config import DataConfig, LoRAConfig
from fedtar_flare.methods.fedkei.config import CLASSIFIERS, PLANS, STEPS, LearnerSettings
from fedtar_flare.methods.fedkei.contract import ADAPT, IMPORTANCE, PROBE, PULL
from fedtar_flare.methods.fedkei.learner import TaskLearner
from fedtar_flare.methods.fedkei.tasks import Adapted, LocalTask, without_some
from fedtar_flare.models.adapters.lora import shared_parameters
from fedtar_flare.models.classifier import ClassifierConfig, bare_classifier, build_classifier
from fedtar_flare.models.outline import EMBEDDING
from fedtar_flare.models.weights import with_fingerprint
from fedtar_flare.protocol.contract import HANDSHAKE
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.protocol.messages import Reply, abstain, ok, version
from fedtar_flare.registry import Method
from fedtar_flare.runtime.task import Answer, Handler, SiteStrategy, Task, gives_start
from fedtar_flare.site.admission import JobRequest, Reach
from fedtar_flare.site.site_file import SiteConfig
from fedtar_flare.site.state import task_scores


@dataclass(frozen=True)
class AdaptedClassifier:
    """A classifier and its adapter as a job describes them, before any weight is read (as :class:`.AdaptedModel`)."""

    config: ClassifierConfig
    lora: LoRAConfig

    @property
    def names(self) -> tuple[str, ...]:
        return (self.config.encoder_name,) if self.config.encoder_name else ()

    @property
    def weights(self) -> str | None:
        return "small" if self.config.encoder == "small" else self.config.encoder_weights

    @property
    def _untrained(self) -> ClassifierConfig:
        return self.config.replace(encoder_weights="random" if self.config.encoder == "timm" else None)

    def sizes(self) -> dict[str, int]:
        if any(not Path(name).expanduser().is_dir() for name in self.names):
            return {}  # on a hub: nothing is fetched to describe a job
        classifier = build_classifier(self._untrained)
        exchanged = sum(value.numel() for value in shared_parameters(classifier).values())
        return {"parameters": sum(p.numel() for p in classifier.parameters()) - exchanged, "exchanged": exchanged}

    def reach(self, models: Mapping[str, Path | None] | None) -> Reach:
        if models is None and self.names:
            return Reach({}, {}, frozenset(), 0)
        classifier = bare_classifier(self._untrained, models or {})
        modules = dict(classifier.named_modules())
        barred = frozenset(name for name in modules if EMBEDDING.fullmatch(name))
        linear = {name for name, module in modules.items() if isinstance(module, nn.Linear)}
        targets = [name for name in sorted(linear | barred) if matches(name, self.config.adapted_layers)]
        values = self.config.rank * sum(sum(modules[name].weight.shape) for name in targets if name in linear)
        parameters = sum(parameter.numel() for parameter in classifier.parameters()) + values
        return Reach({"model.targets": targets}, {}, barred, parameters)


class FedKEISite(SiteStrategy):
    """FedKEI, its rivals and controls at one site."""

    shared_groups = ("model", "training", "data")
    reads_reports = False
    divides_visits = False
    columns = ("labels",)

    def __init__(self, method: Method, preset: str, groups: Mapping[str, Any] | None = None, seed: int = 0):
        super().__init__(method, preset, groups, seed)
        self.plan = PLANS[self.settings.fedkei.plan]
        self.learner: TaskLearner | None = None
        self._learner_key: tuple[str, str] | None = None

    def build_shared(self, preset: str, groups: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Settings]:
        if preset not in CLASSIFIERS:
            known = f"(known: {', '.join(CLASSIFIERS)}){suggestion(preset, CLASSIFIERS)}"
            raise ConfigError(f"preset '{preset}' is unknown to fedkei {known}")
        # the common start is by the job's seed
        model = build(ClassifierConfig, {"seed": self.seed, **CLASSIFIERS[preset], **(groups["model"] or {})}, "model")
        return {
            "model": model,
            "lora": LoRAConfig(rank=model.rank, alpha=float(model.rank)),
            "training": build(LearnerSettings, groups["training"], "training"),
            "data": build(DataConfig, groups["data"], "data"),
        }

    def check(self) -> None:
        """Refuse a previous visit, and changes of images."""
        if self.settings.data.prior != "none" or self.settings.data.image_changes:
            raise ConfigError("data: prior and image_changes are for reports; fedkei classifies images as prepared")
        if changing := [spec["name"] for spec in self.settings.data.transforms if spec["name"] in RANDOM]:
            raise ConfigError(f"data: transforms: {changing[0]} is random, and fedkei trains on images as prepared")

    def cell_layout(self, config: SiteConfig, time_steps: int) -> dict[str, str]:
        """With what decides which images a task has, and their labels."""
        fedkei = self.settings.fedkei
        seed = self.seed if fedkei.order == "shuffled" else 0
        tasks = json.dumps([fedkei.tasks, fedkei.negatives, fedkei.order, seed, fedkei.labeler])
        return super().cell_layout(config, time_steps) | {"tasks": tasks}

    # ------------------------------------------------------------------ what the job asks of a site
    def adapted_model(self, time_steps: int) -> AdaptedClassifier:
        return AdaptedClassifier(self.settings.model, self.settings.lora)

    def job_request(self, rounds: int, time_steps: int) -> JobRequest:
        """What the method asks of a site; an epoch counts as one update, the least that it is made of."""
        model, training = self.settings.model, self.settings.training
        names = {"model.encoder_name": model.encoder_name, "model.encoder_weights": model.encoder_weights}
        return JobRequest(
            patients={"reports of an update": training.epochs * training.batch_size},
            local_steps={"training.epochs": training.epochs},
            batch_size={"training.batch_size": training.batch_size},
            gradient_scale={"alpha / rank": 1.0},
            learning_rate={"training.lr": training.lr, "training.eta_in": training.eta_in},
            decay={},
            rank={"model.rank": model.rank},
            pixels={"pixels of a study": model.slices * model.image_size**2},
            tokens={},
            beams={},
            rounds={"rounds": rounds},
            time_steps={"time steps": time_steps},
            models={setting: name for setting, name in names.items() if name not in (None, "random")},
            reach=self.adapted_model(time_steps).reach,
        )

    def work(self) -> str:
        training = self.settings.training
        return f"a probe of two passes and {training.epochs} epochs of batches of {training.batch_size} images a task"

    def handlers(self) -> Mapping[str, Handler]:
        return {HANDSHAKE: self._handshake, PROBE: self._probe, ADAPT: self._adapt}

    # ------------------------------------------------------------------ the three tasks
    def _handshake(self, task: Task) -> Answer:
        header, weights, state = task.header, task.weights, task.state
        if self.settings.model.whole_volumes and task.cohort.modality != "ct":
            public = "the job's encoder 'swin_unetr' takes CT volumes, and this site has pictures"
            raise DataError(f"{public} ({task.cohort.modality}s): take another", reason="no-volume", public=public)
        gives = gives_start(task)
        if header.rounds > len(self.settings.fedkei.tasks) or header.time_steps != STEPS:
            raise ExchangeError(f"the run has {header.rounds} tasks; the job lists {len(self.settings.fedkei.tasks)}")
        learner = self._learner(task)
        start = learner.start
        if weights and checksum(weights) != checksum(start):
            raise ExchangeError("the common start that came down is not the one that the job's seed gives here")
        if state.latest(header.after) is None:
            state.save(version(0, 0), start, {"task": 0})
        reply = self.agreement(task, start)
        transforms = list(self.settings.data.transforms)
        model = learner.describe() | ({"transforms": transforms} if transforms else {})
        reply.payload["model"] = with_fingerprint(model, {})
        return reply, start if gives else None

    def _probe(self, task: Task) -> Answer:
        """The gradient in the centres, once a task: answers to further centres would reveal more of the images."""
        data = self._data(task)
        if refused := self._refused(task, data):
            return refused, None
        direct = self.plan.probe == "direct"
        gradients = self._learner(task).probe(task.weights, data, task.header.round, direct=direct)
        task.site.stop_if_aborted()
        return ok(task.header, {"samples": float(data.samples)}), gradients

    def _adapt(self, task: Task) -> Answer:
        """Tune a module from the mixture, store it, and send its difference from the common start."""
        weights, number, data = task.weights, task.header.round, self._data(task)
        if refused := self._refused(task, data):
            return refused, None
        learner = self._learner(task)
        progress = Progress(f"task {number}: epoch", self.settings.training.epochs, task.logger.info)
        adapted = learner.adapt(weights, data, number, self.plan, lambda epoch: progress(epoch) if epoch else None)
        rand: Adapted | None = None
        if self.settings.fedkei.rand_baseline:
            start = {name: value[None] for name, value in learner.start.items()}
            same = self.plan.objective == "plain" and learner.is_start(weights)
            rand = adapted if same else learner.adapt(start, data, number, PLANS["rand"])
        task.site.stop_if_aborted()
        self._store(task, data, adapted, rand, learner.start)
        importance = {f"{IMPORTANCE}{name}": value for name, value in adapted.importance.items()}
        return ok(task.header, *_outcome(data, adapted, rand)), adapted.difference | importance

    # ------------------------------------------------------------------ parts of the tasks
    def _data(self, task: Task) -> LocalTask:
        number, stream = task.header.round, self.settings.fedkei.stream(task.site.name, self.seed)
        if number > len(stream):
            raise ExchangeError(f"task {number} was asked for; the job lists {len(stream)}")
        cohort = task.cohort if task.config.without_patients else without_some(task.cohort)
        return LocalTask.of(cohort, stream, number, task.min_cell)

    @staticmethod
    def _refused(task: Task, data: LocalTask) -> Reply | None:
        """An abstention where the site has too few images of the task, or has answered it from other centres."""
        header, weights, schema = task.header, task.weights, task.state.schema()
        agreed = {} if schema is None else schema.shapes
        curved = any(name.startswith((IMPORTANCE, PULL)) for name in weights)
        shapes = {f"{p}{n}": shape for p in ("", IMPORTANCE, PULL) if curved or not p for n, shape in agreed.items()}
        for name in sorted(shapes.keys() | weights.keys()):
            if name not in weights or name not in shapes or tuple(weights[name].shape[1:]) != shapes[name]:
                raise ExchangeError(f"what came down does not fit the run's exchange at tensor '{name}'")
        if data.shortage:
            return abstain(header, data.shortage)
        if not task.state.may_answer(f"{task.name} {header.round}", checksum(weights), task.cohort.digest()):
            return abstain(header, f"task {header.round} was answered already, from other centres or images")
        return None

    def _store(self, task: Task, data: LocalTask, adapted: Adapted, rand: Adapted | None, start: Tensors) -> None:
        """Write the module with alpha, and its scores, into the site's state."""
        header, state = task.header, task.state
        module = {name: start[name] + difference for name, difference in adapted.difference.items()}
        learnt = {"alpha": adapted.alpha, "auc": adapted.curve, "rand_auc": None if rand is None else rand.curve}
        state.write(f"module-{header.round:04d}", module, {"task": data.name, **learnt})
        scores = {"scores": adapted.scores} | ({} if rand is None else {"rand_scores": rand.scores})
        whose = {"labels": data.test.labels.tolist(), "patients": data.test.patients}
        state.write(task_scores(header.round), scores, {"task": data.name, **whose})
        state.save(version(header.round, STEPS), module, {"task": header.round}, keep=header.keep)

    def _learner(self, task: Task) -> TaskLearner:
        """The site's learner, built once per process and run."""
        key = (task.header.run_id, task.site.name)
        if self.learner is None or self._learner_key != key:
            self.learner = TaskLearner(
                self.settings.model,
                self.settings.training,
                seed=task.seed("batches", of_run=True),
                device=task.config.device,
                precision=task.config.precision,
                local_paths=task.config.policy.models,
            )
            self._learner_key = key
        self.learner.min_cell, self.learner.checkpoint = task.min_cell, task.site.stop_if_aborted
        return self.learner


def _outcome(data: LocalTask, adapted: Adapted, rand: Adapted | None) -> tuple[dict[str, float], dict[str, Any]]:
    """Numbers and fields of the answer to ADAPT, rounded as they may be reported."""
    least, counts = data.least, data.counts()
    numbers = {"samples": float(data.samples), "train_loss": round_loss(fmean(adapted.losses), data.samples, least)}
    if least == 1:  # one image can spoil an update
        numbers["skipped_updates"] = float(adapted.skipped_updates)
    scores: dict[str, Any] = {"n": data.scored, "seconds": adapted.seconds}
    scores["at_epoch"] = adapted.at_epoch
    for name in ("mixture_loss", "start_loss", "final_loss"):
        if (loss := getattr(adapted, name)) is not None:
            scores[name] = round_loss(loss, len(data.validation.labels), least)

    def rounded(auc: float | None) -> float | None:
        """One image more or less moves an AUC by up to one of its smaller class."""
        return auc and round_share(auc, min(counts["test"]), least)

    if data.scored:
        scores |= {"auc": [*map(rounded, adapted.curve)], "membership": rounded(adapted.membership)}
        scores |= {} if rand is None else {"rand_auc": [*map(rounded, rand.curve)]}
    return numbers, {"counts": {"task": data.number, **counts}, "scores": scores}
