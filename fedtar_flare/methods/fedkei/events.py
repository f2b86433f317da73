"""FedKEI's own events of the record: the mixture of each task, and what each site learnt."""

from typing import Any, ClassVar

from fedtar_flare.record.events import TaskBegun, TaskLearnt, TaskOutcome


class Mixed(TaskBegun):
    """The mixture of a task; ``clusters`` and ``plane`` are :class:`.mixture.Mixture`'s ``report`` and ``plane``."""

    kind: ClassVar[str] = "mixed"
    modules: int = 0
    clusters: list[dict[str, Any]] = []
    plane: dict[str, list[dict[str, Any]]] = {}
    probed: dict[str, int] = {}
    clustering_seconds: float = 0.0
    probe_seconds: float = 0.0
    probe_took: dict[str, float] = {}
    left: list[str] = []

    def waited(self, site: str) -> float:
        """Seconds of clustering at the server and of the site's own work for PROBE."""
        return self.clustering_seconds + self.probe_took.get(site, 0.0)


class SiteTask(TaskOutcome):
    """What one site learnt in a task (``learner.Adapted``); ``rand_...`` are of tuning from the common start."""

    auc: list[float] = []
    rand_auc: list[float] = []
    mixture_loss: float | None = None
    start_loss: float | None = None
    final_loss: float | None = None
    seconds: dict[str, float] = {}
    counts: dict[str, list[int]] = {}

    @property
    def gap(self) -> float | None:
        """Validation loss before tuning minus the loss after it; None where either is unknown."""
        before, after = self.mixture_loss, self.final_loss
        return None if before is None or after is None else before - after


class Learnt(TaskLearnt):
    """What the sites learnt in a task."""

    kind: ClassVar[str] = "learnt"
    sites: dict[str, SiteTask] = {}


EVENTS = (Mixed, Learnt)
