"""A hospital outside of a run: it learns a disease of its own from the run's knowledge, beside the common start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from fedtar_flare.data.task_stream import NOTHING, TaskStream
from fedtar_flare.errors import ConfigError, DataError
from fedtar_flare.learning.config import DataConfig
from fedtar_flare.learning.device import choose_device
from fedtar_flare.methods.fedkei.answers import Adapted
from fedtar_flare.methods.fedkei.config import STEPS
from fedtar_flare.methods.fedkei.knowledge import Knowledge
from fedtar_flare.methods.fedkei.learner import TaskLearner
from fedtar_flare.methods.fedkei.site_data import SiteTaskData, require_fitting
from fedtar_flare.methods.fedkei.tuning import LearnerSettings
from fedtar_flare.metrics.report_labels import RuleLabels, report_labels
from fedtar_flare.runtime.site_executor import seed_of
from fedtar_flare.site.cohort import prepare_site
from fedtar_flare.site.site_file import SiteConfig


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
    training: LearnerSettings | None = None,
    patients: int = 48,
    seed: int = 0,
    on_epoch: Callable[[int, float | None], None] = lambda epoch, auc: None,
) -> Outside:
    """Learn the last of ``tasks`` at a site, once from the knowledge and once from the common start. Nothing is sent.

    Args:
        tasks, base: as a job's; the images of the tasks before the last are negatives.
        labeler: rules that read labels from reports where the source gives none.
        patients: of a synthetic site.

    Raises:
        ConfigError: the model that can be built here is not the one that the knowledge is of.
        DataError: ``too-few-images`` of the disease, or of those without it; ``no-volume`` where the images are
            pictures and the encoder takes volumes.
    """
    training = training or LearnerSettings()
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
    data = SiteTaskData.of(cohort, stream, len(stream), 1)
    if data.shortage:
        raise DataError(f"{site}: {data.shortage} ({stream.task(len(stream)).name})", reason="too-few-images")
    device, autocast = choose_device(config.device, config.precision)
    learner = TaskLearner(
        knowledge.classifier,
        training,
        seed=seed_of(seed, site, 0, 0, "batches"),
        device=device,
        autocast=autocast,
        places=config.policy.models,
    )
    if learner.fingerprint != knowledge.fingerprint:
        raise ConfigError(
            "the classifier that is built here is not the one that this knowledge is of: another encoder, or another "
            "version of fedtar_flare"
        )
    examples, step = data.examples(), len(stream)
    informed = learner.adapt(knowledge.centres, examples, step, alpha="learnt", on_epoch=on_epoch)
    start = {name: value[None] for name, value in knowledge.start.items()}
    rand = learner.adapt(start, examples, step, alpha="fixed")
    module = {name: knowledge.start[name] + value for name, value in informed.difference.items()}
    return Outside(stream.task(step).name, data.counts(), informed, rand, module)
