"""What one site at a fifth of the others' speed costs, by how a run deals with it; prints a table.

``python -m tools.slow_site slow 3 0`` takes a quarter of an hour of a core; with 12 in place of 3 there are 12 rounds
of tasks of 6 updates, not 24; the last number is the seed. Three sites, FedAvg. Nothing is timed: an update counts as
1 second, at the slow site as 5, so that the machine's load changes nothing.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.protocol.tasks import TRAIN
from fedtar_flare.reporting.run import Run, read_run
from fedtar_flare.runtime.controller import FederatedController
from fedtar_flare.runtime.in_process import ExecutorSite, InThisProcess, run_in_process
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.runtime.training import work_of

SITES = ["site-1", "site-2", "site-3"]
SLOW, PACE = SITES[-1], 5
SCORES = ("token_loss", "bleu_4", "finding_f1_known")
UPDATES = 72
WORK_OF = "fedtar_flare.runtime.training.work_of"


class Clock:
    """Seconds that pass with updates alone."""

    def __init__(self) -> None:
        self.now, self.pace = 0.0, 1

    def __call__(self) -> float:
        return self.now

    def updated(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """An update, which takes as long as the site is slow."""

        def local_update(learner: ReportLearner, *given: Any) -> Any:
            self.now += self.pace
            return update(learner, *given)

        return local_update

    def called(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A site's task, at its pace."""

        def at_site(site: ExecutorSite, *given: Any) -> Any:
            self.pace = PACE if site.name == SLOW else 1
            return call(site, *given)

        return at_site


class Late:
    """Brings the slow site's answer as the task of so many rounds later is sent; with ``never`` not at all."""

    def __init__(self, never: bool):
        self.never, self.held = never, dict[int, Any]()
        self.send, self.deliver = InThisProcess.send_model, InThisProcess.deliver

    def sent(self, run: InThisProcess, task_name: str, data: Any, callback: Any, **given: Any) -> None:
        """A task, before which an answer that is due is taken."""
        r = int(data.current_round or 0)
        if task_name == TRAIN and r in self.held:
            self.held[r][0](self.held.pop(r)[1])
        self.send(run, task_name=task_name, data=data, callback=callback, **given)
        if task_name == TRAIN and (due := r + PACE - 1) in self.held:
            self.held[due][0] = callback

    def delivered(self, run: InThisProcess, site: str, task: str, message: Any) -> Any:
        """What a site answers; None from the slow one."""
        if (site, task) != (SLOW, TRAIN) or self.never:
            return None if (site, task) == (SLOW, TRAIN) else self.deliver(run, site, task, message)
        r = FLModelUtils.from_shareable(message).current_round
        model = FLModelUtils.from_shareable(self.deliver(run, site, task, message))
        model.meta["client_name"] = site
        self.held[r + PACE - 1] = [None, model]
        return None

    def changes(self) -> list[Any]:
        """Of the engine."""

        def sent(run: InThisProcess, **given: Any) -> None:
            self.sent(run, **given)

        def delivered(run: InThisProcess, site: str, task: str, message: Any) -> Any:
            return self.delivered(run, site, task, message)

        close = FederatedController.close_round

        def closing(run: FederatedController, w: Any, r: int) -> Any:
            for due in [*self.held] if r == run.config.num_rounds else ():  # all are scored at the end
                self.held[due][0](self.held.pop(due)[1])
            return close(run, w, r)

        engine = [("send_model", sent), ("deliver", delivered), ("close_round", closing)]
        return [patch.object(InThisProcess, name, change) for name, change in engine]


def by_work() -> list[Any]:
    """Weights n_k tau_k of the updates as they are."""
    told: list[float] = []
    shares_of = FederatedController.shares_of

    def recorded(numbers: Mapping[str, float]) -> float:
        told.append(work_of(numbers))
        return 1.0

    def shares(run: FederatedController, counts: Mapping[str, int]) -> dict[str, float]:
        work = dict(zip(SITES, told[-len(SITES) :], strict=True))
        found = {site: share * work[site] for site, share in shares_of(run, counts).items()}
        return {site: share / sum(found.values()) for site, share in found.items()}

    return [patch.object(FederatedController, "shares_of", shares), patch(WORK_OF, recorded)]


def run(folder: Path, rounds: int, seed: int, seconds: float, wait: float, changes: list[Any]) -> Run:
    """One run, with the other changes in force."""
    clock = Clock()
    server = {"evaluate_every": rounds, "wait_seconds": wait, "step_time_limit": 3600 if wait else 1}
    training, data = {"local_steps": UPDATES // rounds, "seconds": seconds}, {"synthetic_patients": 24}
    common: dict[str, Any] = {"num_rounds": rounds, "time_steps": 1, "min_sites": 2, "seed": seed}
    recipe = MethodRecipe("fedavg", server=server, training=training, data=data, **common)
    with ExitStack() as stack:
        for change in (
            patch("fedtar_flare.learning.learner.clock", clock),
            patch.object(ReportLearner, "local_update", clock.updated(ReportLearner.local_update)),
            patch.object(ExecutorSite, "__call__", clock.called(ExecutorSite.__call__)),
            *changes,
        ):
            stack.enter_context(change)
        return read_run(run_in_process(recipe, SITES, folder))


if __name__ == "__main__":
    here, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    task = UPDATES // rounds
    arms: dict[str, tuple[float, float, list[Any]]] = {
        "all wait": (0, 0, []),
        "the slow site is left out": (0, 0, Late(never=True).changes()),
        "training.seconds": (task, 0, []),
        "the same, weights n_k": (task, 0, [patch(WORK_OF, lambda numbers: 1.0)]),
        "the same, weights n_k tau_k": (task, 0, by_work()),
        "server.wait_seconds": (0, 0.01, Late(never=False).changes()),
    }
    for name in sys.argv[4:] or arms:
        found = run(here / name.replace(" ", "-"), rounds, seed, *arms[name])
        last = found.evaluations[-1].sites
        fast = {s: sum(last[site].all.get(s) or 0.0 for site in SITES[:-1]) / 2 for s in SCORES}
        cells = [f"{s} {fast[s]:.3f}, {last[SLOW].all.get(s) or 0.0:.3f}" for s in SCORES if SLOW in last]
        made = [(e.round, e.sites[SLOW].updates, e.sites[SLOW].late) for e in found.steps if SLOW in e.sites]
        print(f"| {name} | {' | '.join(cells)} | {made} |", flush=True)
