"""FedKEI's own events of the record: the stream of tasks, the mixture of each task, and what each site learnt."""

from __future__ import annotations

from typing import Any, ClassVar

from fedtar_flare.record.events import Event, TaskBegun, TaskLearnt, TaskOutcome


class Stream(Event):
    """The plan and the tasks; ``orders``: site to the names of its tasks, step by step."""

    kind: ClassVar[str] = "task_stream"
    plan: str
    tasks: list[str] = []
    base: list[str] = []
    order: str = "synchronous"
    orders: dict[str, list[str]] = {}
    min_cluster_sites: int = 1


class Mixed(TaskBegun):
    """The mixture of a task.

    Args:
        modules: how many the pool held.
        clusters: as :meth:`.mixture.Mixture.report` gives them; empty for the common start alone.
        probed: site to the images behind its gradient.
        clustering_seconds, probe_seconds: at the server, and until the last answer to PROBE.
        probe_took: site to the seconds of its own work for PROBE.
        left: sites that left; their modules were taken out of the pool.
    """

    kind: ClassVar[str] = "mixed"
    modules: int = 0
    clusters: list[dict[str, Any]] = []
    probed: dict[str, int] = {}
    clustering_seconds: float = 0.0
    probe_seconds: float = 0.0
    probe_took: dict[str, float] = {}
    left: list[str] = []

    def waited(self, site: str) -> float:
        """Seconds of clustering at the server and of the site's own work for PROBE."""
        return self.clustering_seconds + self.probe_took.get(site, 0.0)


class SiteTask(TaskOutcome):
    """What one site learnt in a task; nothing of a split in which a class has too few patients.

    Args:
        auc, rand_auc: on them at epoch 0..E, from the mixture and from the common start.
        mixture_loss, start_loss, final_loss: of both starts and after tuning, on the validation images.
        fell_back: whether the safeguard took the common start.
        seconds: by phase; ``rand_at_epoch``: as ``at_epoch``, from the common start.
        counts: split to negatives and positives.
    """

    auc: list[float] = []
    rand_auc: list[float] = []
    mixture_loss: float | None = None
    start_loss: float | None = None
    final_loss: float | None = None
    fell_back: bool = False
    seconds: dict[str, float] = {}
    rand_at_epoch: list[float] = []
    counts: dict[str, list[int]] = {}

    @property
    def gap(self) -> float | None:
        """By how much tuning lowered the validation loss of what it began from; None without one."""
        began = self.start_loss if self.fell_back else self.mixture_loss
        return None if began is None or self.final_loss is None else began - self.final_loss


class Learnt(TaskLearnt):
    """What the sites learnt in a task."""

    kind: ClassVar[str] = "learnt"
    sites: dict[str, SiteTask] = {}


EVENTS = (Stream, Mixed, Learnt)
