"""A federation in one process: the method's own controller and executors, without FLARE's processes and network.

Every message still passes FLARE's ``FLModelUtils`` and the site's outbound guard.
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.runtime.controller import FederatedController
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.runtime.simulation import run_status, site_names
from fedtar_flare.runtime.site_executor import SiteExecutor
from fedtar_flare.site.guard import OutboundGuard

LocalSite = Callable[[str, Shareable], "Shareable | None"]
"""A site as a function of a task's name and message; None when it never answers."""


class InThisProcess(FederatedController):
    """The controller, its messages delivered in this process; ``joins`` has the rounds in which late sites connect."""

    def __init__(
        self, folder: Path, sites: Mapping[str, LocalSite], joins: Mapping[str, int] | None = None, **settings: Any
    ):
        super().__init__(**settings)
        self.folder, self.local_sites, self.joins = folder, sites, dict(joins or {})
        self.fl_ctx, self.abort_signal = FLContext(), Signal()
        self.engine = SimpleNamespace(get_clients=self._connected)
        self.panics: list[str] = []
        self.disconnected: set[str] = set()
        self.silent_until = 0.0

    def _connected(self) -> list[Client]:
        return [Client(name, name) for name in self.local_sites if self.joins.get(name, 1) <= self.round]

    def get_run_dir(self) -> str:
        return str(self.folder)

    def scalar(self, tag: str, value: float | None, step: int) -> None:
        """TensorBoard's points go through FLARE's engine, which is not here."""

    def panic(self, reason: str) -> None:
        self.panics.append(reason)

    def get_client_disconnect_time(self, client_name: str) -> float | None:
        return 1.0 if client_name in self.disconnected else None

    def get_num_standing_tasks(self) -> int:
        return int(time.monotonic() < self.silent_until)

    def cancel_all_tasks(self, *args: Any, **kwargs: Any) -> None:
        self.silent_until = 0.0

    def deliver(self, site: str, task: str, message: Shareable) -> Shareable | None:
        return self.local_sites[site](task, message)

    def send_model(
        self,
        task_name: str,
        data: FLModel,
        targets: Sequence[str],
        min_responses: int,
        timeout: int,
        callback: Callable[[FLModel], None],
    ) -> None:
        """Give the task to one site after the other and hand back what each answers."""
        silent = False
        for site in sorted(targets):
            try:
                answer = self.deliver(site, task_name, FLModelUtils.to_shareable(data))
            except Exception as error:
                self.exception(f"task '{task_name}' raised at {site}: {error}")
                answer = make_reply(ReturnCode.EXECUTION_EXCEPTION)
            if answer is None:
                silent = True
            elif answer.get_return_code() not in (None, ReturnCode.OK):
                self._accept_train_result(site, answer, self.fl_ctx)
            else:
                model = FLModelUtils.from_shareable(answer)
                model.meta["client_name"] = site
                callback(model)
        self.silent_until = time.monotonic() + timeout if silent else 0.0


class _Engine:
    """What an executor uses of FLARE's engine."""

    def __init__(self, workspace: Path, app: Path | None):
        about = {"get_root_dir": partial(str, workspace), "get_app_dir": lambda job: str(app)}
        self.get_workspace = partial(SimpleNamespace, **about)


def site_context(
    workspace: Path,
    task: str,
    message: Shareable,
    *,
    name: str = "site-1",
    simulated: bool = True,
    job: str = "job-1",
    app: Path | None = None,
) -> FLContext:
    """Make FLARE's context of a task, as a site's executor and filters get it; ``app``: where the job's app lies."""
    context = FLContext()
    context.set_prop(ReservedKey.ENGINE, _Engine(workspace, app), private=True, sticky=False)
    context.set_prop(ReservedKey.IDENTITY_NAME, name, private=False, sticky=False)
    context.set_prop(ReservedKey.RUN_NUM, job, private=False, sticky=False)
    props = {FLContextKey.SIMULATE_MODE: simulated, FLContextKey.TASK_NAME: task, FLContextKey.TASK_ID: "task-1"}
    for key, value in (props | {FLContextKey.TASK_DATA: message}).items():
        context.set_prop(key, value, private=True, sticky=False)
    return context


class ExecutorSite:
    """A site that runs its tasks in an executor of its own, behind its outbound guard; ``workspace`` is FLARE's."""

    def __init__(self, name: str, executor: SiteExecutor, workspace: Path, **others: Any):
        self.name, self.executor, self.workspace, self.others = name, executor, workspace, others
        self.signal = Signal()
        workspace.mkdir(parents=True, exist_ok=True)

    def __call__(self, task: str, message: Shareable) -> Shareable:
        context = site_context(self.workspace, task, message, name=self.name, **self.others)
        answer = self.executor.execute(task, message, context, self.signal)
        if answer.get_return_code() not in (None, ReturnCode.OK):
            return answer
        # the guard of a site that lets pass what the method exchanges whole of the base model
        names = list(self.executor.strategy.settings.lora.exchange)
        return OutboundGuard([self.executor.contract.method], extra_names=names).process(answer, context)


def run_in_process(recipe: MethodRecipe, sites: int | Sequence[str], folder: Path) -> Path:
    """Run a recipe in this process, its sites one after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    local_sites = {}
    for name in site_names(sites):
        local_sites[name] = ExecutorSite(name, copy.deepcopy(recipe.executor), folder / "sites" / name)
    controller = InThisProcess(folder, local_sites, **recipe.controller_arguments)
    controller.run()
    if (status := run_status(controller.results_folder)) != "completed":
        raise FedTARError(f"the run in {folder} did not complete ({status})")
    return controller.results_folder
