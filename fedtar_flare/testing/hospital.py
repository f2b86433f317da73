"""A made-up hospital: one site's executor behind its outbound guard, which does single tasks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.core.files import write_json
from fedtar_flare.protocol.contract import CLOSE_ROUND, HANDSHAKE, TRAIN
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.protocol.messages import Reply, TaskHeader, version
from fedtar_flare.registry import method as installed
from fedtar_flare.runtime.simulation import ExecutorSite
from fedtar_flare.runtime.site_executor import SiteExecutor
from fedtar_flare.runtime.task import Task
from fedtar_flare.site.approval import SERVER_CONFIG

__all__ = ["Hospital"]

TINY: Mapping[str, Any] = {
    "preset": "tiny",
    "training": {"local_steps": 2, "batch_size": 4},
    "data": {"synthetic_patients": 16},
}
"""A job of seconds."""
ROUNDS, TIME_STEPS = 9, 2
"""R and T of a :class:`Hospital`'s job."""


def executor_of(
    method: str, preset: str = "small", seed: int = 0, torch_threads: int = 1, **groups: Any
) -> SiteExecutor:
    """Make the executor of a method's job from groups of settings, which are checked as in a recipe."""
    kind = installed(method).executor or SiteExecutor
    executor: SiteExecutor = kind(method, preset, groups, seed, torch_threads)
    _ = executor.strategy
    return executor


def task_of(executor: SiteExecutor, source: str = "synthetic", **parts: Any) -> Task:
    """Make a task of which a hook under test needs only some parts; the other fields of :class:`Task` are None."""
    names = ("name", "header", "weights", "site", "config", "state", "cohort", "min_cell")
    fields: dict[str, Any] = dict.fromkeys(names)
    fields |= {"settings": executor.strategy.settings.at(source), "contract": executor.contract}
    return Task(**fields | {"job_seed": executor.seed} | parts)


def task_message(header: TaskHeader, weights: Tensors | None = None) -> Shareable:
    """Make FLARE's message of a task."""
    content: dict[str, Any] = {"params": weights, "params_type": ParamsType.FULL} if weights else {"metrics": {}}
    return FLModelUtils.to_shareable(FLModel(**content, meta=header.to_meta()))


def write_workflow(app: Path, **arguments: Any) -> None:
    """Write the server's part of a job's app, from which a site knows the job's numbers of rounds and time steps."""
    write_json(app / SERVER_CONFIG, {"workflows": [{"id": "controller", "args": arguments}]})


class Hospital:
    """A site that does tasks one by one, in one executor or in a new one each time, as FLARE's simulator does.

    Parameters
    ----------
    workspace : Path
        The kit, or the simulator's workspace.
    name : str, default "site-1"
    fresh : bool, default True
        Whether each task runs in a new executor.
    simulated : bool, default True
    method : str, default "fedtar"
    app : Path, optional
        Where FLARE has put the job's app; a real site without one gets its server's part.
    **settings
        Preset, seed and groups of settings, over those of a tiny job.
    """

    job = "job-1"

    def __init__(
        self,
        workspace: Path,
        name: str = "site-1",
        fresh: bool = True,
        simulated: bool = True,
        method: str = "fedtar",
        app: Path | None = None,
        **settings: Any,
    ):
        self.workspace, self.name, self.fresh, self.simulated, self.app = workspace, name, fresh, simulated, app
        self.method, self.settings = method, {**TINY, **settings}
        self.executor = executor_of(method, **self.settings)
        self.signal = Signal()
        if not simulated and app is None:
            self.app = workspace / self.job / "app"
            write_workflow(self.app, num_rounds=ROUNDS, time_steps=TIME_STEPS)

    def run(self, task: str, header: TaskHeader, weights: Tensors | None = None) -> tuple[Any, Tensors | None]:
        """Do a task through ``execute`` and the outbound guard.

        Parameters
        ----------
        task : str
        header : TaskHeader
        weights : dict of str to Tensor, optional

        Returns
        -------
        tuple of (Reply or str, dict of str to Tensor or None)
            What leaves, or FLARE's return code where the task gave no answer; the tensors that go up with it.
        """
        if self.fresh:
            self.executor = executor_of(self.method, **self.settings)
        others: dict[str, Any] = {"simulated": self.simulated, "job": self.job, "app": self.app}
        site = ExecutorSite(self.name, self.executor, self.workspace, **others)
        site.signal = self.signal
        answer = site(task, task_message(header, weights))
        if answer.get_return_code() not in (None, ReturnCode.OK):
            return answer.get_return_code(), None
        model = FLModelUtils.from_shareable(answer)
        return Reply.from_meta(model.meta), model.params

    def header(self, run_id: str, r: int, t: int, **more: Any) -> TaskHeader:
        """Make the header of a task of a run of 9 rounds and 2 time steps.

        Parameters
        ----------
        run_id : str
        r, t : int
        **more
            Further fields of :class:`TaskHeader`.

        Returns
        -------
        TaskHeader
        """
        return TaskHeader(self.method, run_id, r, t, ROUNDS, TIME_STEPS, **more)

    def handshake(self, run_id: str = "run", **more: Any) -> tuple[Any, Tensors | None]:
        """Do the handshake, in which the hospital gives the run's initial weights.

        Parameters
        ----------
        run_id : str
        **more
            Further fields of :class:`TaskHeader`.

        Returns
        -------
        tuple
            As :meth:`run`.
        """
        more = {"after": version(0, 0), "initial_site": self.name, **more}
        return self.run(HANDSHAKE, self.header(run_id, 0, 0, **more))

    def train(self, w: Tensors, r: int, t: int, run_id: str = "run", **more: Any) -> tuple[Any, Tensors | None]:
        """Train from the weights w at step t of round r.

        Parameters
        ----------
        w : dict of str to Tensor
        r, t : int
        run_id : str
        **more
            Further fields of :class:`TaskHeader`.

        Returns
        -------
        tuple
            As :meth:`run`.
        """
        return self.run(TRAIN, self.header(run_id, r, t, after=version(r, t - 1), **more), w)

    def close(self, w: Tensors, r: int, evaluate: bool = False, run_id: str = "run") -> tuple[Any, Tensors | None]:
        """Close round r at the weights w, with scores where ``evaluate`` says so.

        Parameters
        ----------
        w : dict of str to Tensor
        r : int
        evaluate : bool
        run_id : str

        Returns
        -------
        tuple
            As :meth:`run`.
        """
        header = self.header(run_id, r, TIME_STEPS, after=version(r, TIME_STEPS), evaluate=evaluate)
        return self.run(CLOSE_ROUND, header, w)
