"""What a run has learnt, as one file, and a hospital outside that learns a disease of its own from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.core.settings import build
from fedtar_flare.core.tensor_file import StateError, checksum, read_tensors, without_prefix, write_tensors
from fedtar_flare.data.task_stream import NOTHING, TaskStream
from fedtar_flare.learning.config import DataConfig
from fedtar_flare.methods.fedkei.config import STEPS, LearnerSettings
from fedtar_flare.methods.fedkei.mixing import Layout
from fedtar_flare.methods.fedkei.mixture import Mixture
from fedtar_flare.methods.fedkei.task_data import SiteTask, require_fitting
from fedtar_flare.metrics.report_labels import RuleLabels, report_labels
from fedtar_flare.models.classifier import ClassifierConfig
from fedtar_flare.models.sources import fetching_only_if
from fedtar_flare.models.weights import sealed
from fedtar_flare.runtime.site_executor import seed_of
from fedtar_flare.site.cohort import prepare_site
from fedtar_flare.site.site_file import SiteConfig
from fedtar_flare.version import __version__

if TYPE_CHECKING:
    from fedtar_flare.methods.fedkei.learner import Adapted

KNOWLEDGE_FILE = "knowledge.safetensors"
FORMAT = 2
_START, _CENTRE = "start.", "centre."


@dataclass(frozen=True)
class Knowledge:
    """Centres C (K, *shape) by tensor name, which a hospital outside learns its own mixture of; w0; and what they are.

    ``fingerprint`` is of the classifier's frozen encoder and w0, ``tasks`` are the diseases of the pool's modules,
    ``transforms`` the run's ``data.transforms``, which prepare a hospital's images alike.
    """

    start: dict[str, Tensor]
    centres: dict[str, Tensor]
    classifier: ClassifierConfig
    fingerprint: str
    run_id: str
    tasks: tuple[str, ...]
    modules: int
    transforms: tuple[dict[str, Any], ...] = ()


def write_knowledge(
    folder: Path, mixture: Mixture, described: Mapping[str, Mapping[str, Any]], run_id: str, tasks: Sequence[str]
) -> None:
    """Write ``knowledge.safetensors`` of the clusters so far, which names diseases (``tasks``) and no hospital.

    Nothing is written where the pool is empty, or the plan clusters nothing (Rand).
    """
    if mixture.parts is None:
        return
    model = next(iter(described.values()), {})
    info = {
        "format": FORMAT,
        "fedtar_flare": __version__,
        "run_id": run_id,
        "model": model.get("config", {}),
        "fingerprint": model.get("fingerprint", ""),
        "transforms": model.get("transforms", []),
        "tasks": list(tasks),
        "modules": len(next(iter(mixture.parts.values())).modules),
    }
    tensors = {f"{_START}{name}": value for name, value in mixture.pool.start.items()}
    tensors |= {f"{_CENTRE}{name}": value.contiguous() for name, value in mixture.centres().items()}
    write_tensors(folder / KNOWLEDGE_FILE, tensors, info | {"checksum": checksum(tensors)})


def read_knowledge(path: Path) -> Knowledge:
    """What :func:`write_knowledge` wrote; ConfigError where it is missing, damaged or of another format."""
    try:
        tensors, info = read_tensors(path)
    except StateError as error:
        raise ConfigError(f"{path}: no knowledge of a run of fedkei ({error})") from error
    if info.get("format") != FORMAT or info.get("checksum") != checksum(tensors):
        raise ConfigError(f"{path}: no whole knowledge file of format {FORMAT}")
    start, centres = without_prefix(tensors, _START), without_prefix(tensors, _CENTRE)
    Layout.of(start).columns(centres)
    classifier = build(ClassifierConfig, info["model"], f"{path}: model")
    tasks, transforms = tuple(info["tasks"]), tuple(info["transforms"])
    return Knowledge(
        start, centres, classifier, info["fingerprint"], info["run_id"], tasks, info["modules"], transforms
    )


@dataclass(frozen=True)
class Outside:
    """What the knowledge gave (``informed``) and what the common start would have given (``rand``), and the module."""

    task: str
    counts: dict[str, list[int]]
    informed: Adapted
    rand: Adapted
    module: dict[str, Tensor]


def adapt_outside(
    knowledge: Knowledge,
    config: SiteConfig,
    site: str,
    *,
    tasks: Sequence[str],
    base: Sequence[str] = (NOTHING,),
    labeler: RuleLabels | None = None,
    training: LearnerSettings,
    patients: int = 48,
    seed: int = 0,
) -> Outside:
    """Learn the last of ``tasks`` at a site, once from the knowledge and once from the common start. Nothing is sent.

    ``tasks`` and ``base`` are as a job's: the images of the tasks before the last are negatives. ``labeler`` names
    rules that read labels from reports where the source gives none; ``patients`` are of a synthetic site. Raises
    ConfigError where the model that can be built here is not the knowledge's; DataError ``too-few-images`` of the
    disease, or of those without it, or ``no-volume`` where the images are pictures and the encoder takes volumes.
    """
    from fedtar_flare.methods.fedkei.learner import TaskLearner

    stream = TaskStream(tasks, base, from_report=report_labels(labeler) if labeler else None)
    cohort, _ = prepare_site(
        config,
        site,
        model=knowledge.classifier,
        data=DataConfig(synthetic_patients=patients, transforms=knowledge.transforms),
        time_steps=STEPS,
        seed=seed,
        reports=False,
    )
    require_fitting(cohort, knowledge.classifier)
    step = len(stream)
    data = SiteTask.of(cohort, stream, step, 1)
    if data.shortage:
        raise DataError(f"{site}: {data.shortage} ({data.name})", reason="too-few-images")
    with fetching_only_if(asked=False):
        learner = TaskLearner(
            knowledge.classifier,
            training,
            seed=seed_of(seed, site, 0, 0, "batches"),
            device=config.device,
            precision=config.precision,
            places=config.policy.models,
        )
    model = learner.describe() | {"transforms": list(knowledge.transforms)}
    if sealed(model, {})["fingerprint"] != knowledge.fingerprint:
        raise ConfigError(
            "the classifier that is built here is not the one that this knowledge is of: another encoder, other "
            "settings, or another version of fedtar_flare"
        )
    examples, start = data.examples(), {name: value[None] for name, value in knowledge.start.items()}
    informed, rand = (learner.adapt(one, examples, step) for one in (knowledge.centres, start))
    module = {name: knowledge.start[name] + value for name, value in informed.difference.items()}
    return Outside(data.name, data.counts(), informed, rand, module)
