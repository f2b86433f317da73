"""A made-up hospital: one site's executor behind its outbound guard, which does single tasks."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE, AnalyticsData
from nvflare.apis.dxo import from_shareable
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.core.files import write_json
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.protocol.messages import Reply, TaskHeader, version
from fedtar_flare.protocol.tasks import CLOSE_ROUND, HANDSHAKE, TRAIN
from fedtar_flare.registry import method as installed
from fedtar_flare.runtime.site_executor import SiteExecutor
from fedtar_flare.runtime.task import Task
from fedtar_flare.site.approval import SERVER_CONFIG
from fedtar_flare.site.guard import OutboundGuard

__all__ = ["Hospital", "executor_of", "flare_context", "task_of", "write_workflow"]

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
    """Make the executor of a method's job.

    Parameters
    ----------
    method : str
        Name of an installed method.
    preset : str
        Of the model.
    seed, torch_threads : int
        As :class:`SiteExecutor` takes them.
    **groups
        Groups of settings by name.

    Returns
    -------
    SiteExecutor
        Whose settings have been checked, as in a recipe.
    """
    kind = installed(method).executor or SiteExecutor
    executor: SiteExecutor = kind(method, preset, groups, seed, torch_threads)
    _ = executor.strategy
    return executor


def task_of(executor: SiteExecutor, source: str = "synthetic", **parts: Any) -> Task:
    """Make a task of which a hook under test needs only some parts.

    Parameters
    ----------
    executor : SiteExecutor
        Whose method, settings and seed it has.
    source : str
        Where the site's data comes from.
    **parts
        Fields of :class:`Task`; the others are None.

    Returns
    -------
    Task
        The task.
    """
    names = ("name", "header", "weights", "site", "config", "state", "cohort", "min_cell")
    fields: dict[str, Any] = dict.fromkeys(names)
    fields |= {"settings": executor.strategy.settings.at(source), "contract": executor.contract}
    return Task(**fields | {"job_seed": executor.seed} | parts)


class _Engine:
    """What an executor asks of FLARE's engine; ``streamed`` has the scalars that it sends."""

    def __init__(self, workspace: Any):
        self.get_workspace = lambda: workspace
        self.streamed: list[AnalyticsData] = []

    def new_context(self) -> FLContext:
        context = FLContext()
        context.get_engine = lambda: self
        return context

    def fire_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == ANALYTIC_EVENT_TYPE:
            self.streamed.append(AnalyticsData.from_dxo(from_shareable(fl_ctx.get_prop(FLContextKey.EVENT_DATA))))


def flare_context(
    workspace: Path,
    task: str,
    header: TaskHeader,
    weights: Tensors | None = None,
    *,
    name: str = "site-1",
    simulated: bool = True,
    job: str = "job-1",
    app: Path | None = None,
) -> FLContext:
    """Make FLARE's context of a task, as a site's executor and filters get it.

    Parameters
    ----------
    workspace : Path
        The kit, or the simulator's workspace.
    task : str
        Its name.
    header : TaskHeader
        What the server says of it.
    weights : dict of str to Tensor, optional
        What came down.
    name : str
        The site's name.
    simulated : bool
        Whether it is a simulation.
    job : str
        The job's id.
    app : Path, optional
        Where FLARE has put the job's app.

    Returns
    -------
    FLContext
        Its ``TASK_DATA`` is the message; its engine's ``streamed`` has the scalars that the executor sends.
    """
    context = FLContext()
    content: dict[str, Any] = {"params": weights, "params_type": ParamsType.FULL} if weights else {"metrics": {}}
    message = FLModelUtils.to_shareable(FLModel(**content, meta=header.to_meta()))
    context.set_prop(ReservedKey.IDENTITY_NAME, name, private=False, sticky=False)
    context.set_prop(ReservedKey.RUN_NUM, job, private=False, sticky=False)
    for key, value in (
        (FLContextKey.SIMULATE_MODE, simulated),
        (FLContextKey.TASK_NAME, task),
        (FLContextKey.TASK_ID, "task-1"),
        (FLContextKey.TASK_DATA, message),
    ):
        context.set_prop(key, value, private=True, sticky=False)
    engine = _Engine(SimpleNamespace(get_root_dir=lambda: str(workspace), get_app_dir=lambda job: str(app)))
    context.get_engine = lambda: engine
    return context


def write_workflow(app: Path, **arguments: Any) -> None:
    """Write the server's part of a job's app, by which a site knows how many rounds and time steps the job has.

    Parameters
    ----------
    app : Path
        The app's folder.
    **arguments
        Of the controller.
    """
    write_json(app / SERVER_CONFIG, {"workflows": [{"id": "controller", "args": arguments}]})


class Hospital:
    """A site that does tasks one by one, in one executor or in a new one each time, as FLARE's simulator does.

    Parameters
    ----------
    workspace : Path
        The kit, or the simulator's workspace.
    name : str
        The site's name.
    fresh : bool
        Whether each task runs in a new executor.
    simulated : bool
        Whether it is a simulation.
    method : str
        Name of an installed method.
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
        self.streamed: list[AnalyticsData] = []
        if not simulated and app is None:
            self.app = workspace / self.job / "app"
            write_workflow(self.app, num_rounds=ROUNDS, time_steps=TIME_STEPS)

    def run(self, task: str, header: TaskHeader, weights: Tensors | None = None) -> tuple[Any, Tensors | None]:
        """Do a task through ``execute`` and the outbound guard.

        Parameters
        ----------
        task : str
            Its name.
        header : TaskHeader
            What the server says of it.
        weights : dict of str to Tensor, optional
            What comes down.

        Returns
        -------
        reply : Reply or str
            What leaves; FLARE's return code where the task gave no answer.
        tensors : dict of str to Tensor or None
            What goes up with it.
        """
        if self.fresh:
            self.executor = executor_of(self.method, **self.settings)
        about: dict[str, Any] = {"simulated": self.simulated, "name": self.name, "job": self.job, "app": self.app}
        context = flare_context(self.workspace, task, header, weights, **about)
        self.streamed = context.get_engine().streamed
        answer = self.executor.execute(task, context.get_prop(FLContextKey.TASK_DATA), context, self.signal)
        if answer.get_return_code() not in (None, ReturnCode.OK):
            return answer.get_return_code(), None
        # the guard of a site that lets pass what the method exchanges whole of the base model
        guard = OutboundGuard([self.method], extra_names=list(self.executor.strategy.settings.lora.exchange))
        model = FLModelUtils.from_shareable(guard.process(answer, context))
        return Reply.from_meta(model.meta), model.params

    def header(self, run_id: str, r: int, t: int, **more: Any) -> TaskHeader:
        """Make the header of a task.

        Parameters
        ----------
        run_id : str
            Of the run.
        r, t : int
            Round and time step.
        **more
            Further fields of :class:`TaskHeader`.

        Returns
        -------
        TaskHeader
            Of a run of 9 rounds and 2 time steps.
        """
        return TaskHeader(self.method, run_id, r, t, ROUNDS, TIME_STEPS, **more)

    def handshake(self, run_id: str = "run", **more: Any) -> tuple[Any, Tensors | None]:
        """Do the handshake, in which the hospital gives the run's initial weights.

        Parameters
        ----------
        run_id : str
            Of the run.
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
            What comes down.
        r, t : int
            Round and time step.
        run_id : str
            Of the run.
        **more
            Further fields of :class:`TaskHeader`.

        Returns
        -------
        tuple
            As :meth:`run`.
        """
        return self.run(TRAIN, self.header(run_id, r, t, after=version(r, t - 1), **more), w)

    def close(self, w: Tensors, r: int, evaluate: bool = False, run_id: str = "run") -> tuple[Any, Tensors | None]:
        """Close round r at the weights w.

        Parameters
        ----------
        w : dict of str to Tensor
            What comes down.
        r : int
            The round.
        evaluate : bool
            Whether the hospital scores its test patients.
        run_id : str
            Of the run.

        Returns
        -------
        tuple
            As :meth:`run`.
        """
        header = self.header(run_id, r, TIME_STEPS, after=version(r, TIME_STEPS), evaluate=evaluate)
        return self.run(CLOSE_ROUND, header, w)
