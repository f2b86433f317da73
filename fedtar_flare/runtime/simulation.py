"""Runs a recipe in FLARE's simulator, or in this process.

In one process there are the method's own controller and executors, without FLARE's processes and network; every message
still passes FLARE's ``FLModelUtils`` and the site's outbound guard.
"""

import contextlib
import copy
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType, SimpleNamespace
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.recipe.sim_env import SimEnv

from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.core.files import private_folder, write_json
from fedtar_flare.core.settings import check_names
from fedtar_flare.core.text import EVERY_SECONDS, Progress
from fedtar_flare.record.events import End, Start, Step, Validation
from fedtar_flare.record.log import ROUNDS_FILE, of_kind, read_events
from fedtar_flare.runtime.controller import FederatedController
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.runtime.site_executor import SiteExecutor
from fedtar_flare.site.context import CHATTY, SITE_NAME, check_workspace, home
from fedtar_flare.site.guard import OutboundGuard
from fedtar_flare.site.site_file import SITES_VARIABLE, load_site_config, sites_folder

__all__ = ["simulate"]

ALLOW_LIST = {"format_version": 2, "class_allow_list": ["nvflare.", "fedtar_flare."]}
"""The simulator's own policy: on a researcher's machine a job may use these two packages."""

RESERVED = ("server", "local", "startup")
"""Names of folders beside those of the sites in a simulator's workspace."""


def simulate(
    recipe: MethodRecipe,
    sites: int | str | Sequence[str],
    *,
    workspace: Path | str,
    threads: int | None = None,
    say: Callable[[str], object] | None = None,
    every: float = EVERY_SECONDS,
) -> Path:
    """Run a recipe in FLARE's simulator.

    Parameters
    ----------
    recipe : MethodRecipe
    sites : int, str or list of str
        A number of sites (``site-1``, ``site-2``, ...), or their names, in a text separated by commas.
    workspace : Path
        An earlier run of the recipe's name in it is replaced.
    threads : int, optional
        How many sites run at the same time; all by default.
    say : callable, optional
        Takes a line of progress; the console then shows warnings alone, on standard error, and not FLARE's log.
    every : float
        Seconds between two lines of progress, at least.

    Returns
    -------
    Path
        The results folder, ``<workspace>/<name>/server/simulate_job/fedtar``.

    Raises
    ------
    ConfigError
        A site's file, the workspace, the number of threads or a site that the job names does not fit.
    FedTARError
        The run failed, named with the server's log; or another run has the folder.
    """
    names = site_names(sites)
    root = Path(workspace).resolve() / recipe.name
    check_workspace(root)
    for name in names:
        states = load_site_config(name, workspace=None, simulator=True).state_dir or home() / "state"
        TemporaryFile(dir=private_folder(states)).close()  # one that cannot be written fails here, not in FLARE
    if threads is not None and not 1 <= threads <= len(names):
        raise ConfigError(f"threads must be from 1 to the number of sites, {len(names)}, not {threads}")
    config = recipe.controller.config
    if config.min_sites > len(names):
        raise ConfigError(f"min_sites is {config.min_sites}, and there are {len(names)} sites")
    check_names(config.unseen, names, "server.unseen", "site")
    with _alone(root):
        write_json(root / "local" / "resources.json", ALLOW_LIST)
        folder = root / "server" / "simulate_job" / "fedtar"
        if (sites_files := sites_folder()) is not None:
            os.environ[SITES_VARIABLE] = str(sites_files.resolve())  # the sites' processes start in other folders
        console = _console_log(root / "local" / "console_log.json", quiet=say is not None)
        environment = SimEnv(
            clients=names, num_threads=threads or len(names), workspace_root=str(root.parent), log_config=str(console)
        )
        # of a RuntimeError the record says why, better than FLARE
        with _interruptible(folder), _followed(folder, say, every), contextlib.suppress(RuntimeError):
            recipe.execute(environment)  # or exports it, where a job.py was called with FLARE's --export
        if (status := run_status(folder)) != "completed":
            raise FedTARError(f"the run did not complete ({status}); the server's log: {root / 'server' / 'log.txt'}")
        return folder


def site_names(sites: int | str | Sequence[str]) -> list[str]:
    """Name the sites of a simulation: ``site-1``, ``site-2``, ... for a number, or the names, in a text by commas."""
    if isinstance(sites, int) or (isinstance(sites, str) and sites.lstrip("-").isdecimal()):
        names = [f"site-{i}" for i in range(1, int(sites) + 1)]
    else:
        names = [name.strip() for name in (sites.split(",") if isinstance(sites, str) else sites)]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"sites: at least one, and no name twice; got {sites!r}")
    for name in names:
        if not SITE_NAME.fullmatch(name) or name in RESERVED:
            allowed = f"letters, digits, '.', '_', '@' and '-', and none of {', '.join(RESERVED)}"
            raise ConfigError(f"sites: '{name}' cannot name a site: {allowed}")
    return names


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Within the context no other run may replace the folder; forked processes do not inherit this kind of lock."""
    with (private_folder(root.parent, 0o777) / f".{root.name}.lock").open("w") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FedTARError(f"{root}: another run has this folder; wait for its end, or name another (-w)") from error
        yield


@contextlib.contextmanager
def _interruptible(folder: Path) -> Iterator[None]:
    """Within the context Ctrl-C, a kill and a closed terminal end the run as an interruption, and all its processes.

    FLARE ends its processes at Ctrl-C alone, which it catches, and returns.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are handled by that one
        yield
        return
    interrupts: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    if before[signal.SIGHUP] is signal.SIG_IGN:  # under nohup
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, note)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if interrupts:
        events = read_events(folder) if (folder / ROUNDS_FILE).is_file() else []
        rounds = sum(isinstance(event, Validation) for event in events)
        kept = f"its record is kept in {folder}" if rounds else "nothing of it is kept"
        raise KeyboardInterrupt(f" after {rounds} whole rounds; {kept}. The same command begins anew")


@contextlib.contextmanager
def _followed(folder: Path, say: Callable[[str], object] | None, every: float) -> Iterator[None]:
    """Within the context, report to ``say`` how far the run in a results folder is."""
    if say is None:
        yield
        return
    (folder / ROUNDS_FILE).unlink(missing_ok=True)  # an earlier run's, which FLARE would delete a little later
    say("starting the sites; each reads its data first")
    over = threading.Event()

    def follow() -> None:
        progress, last = None, 0
        while not over.wait(1.0):
            with contextlib.suppress(FedTARError, IndexError):  # it has not begun
                events = read_events(folder)
                done = sum(isinstance(event, Step | Validation) for event in events)
                if progress is None:
                    start = of_kind(events, Start)[0]
                    rounds = start.rounds - start.first_round + 1
                    progress = Progress("task", rounds * (start.time_steps + 1), say, every)  # the last closes a round
                elif done > last:
                    progress(last := done)

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield
    finally:
        over.set()
        follower.join()


def _console_log(file: Path, quiet: bool) -> Path:
    """FLARE's concise log without :data:`CHATTY`, or warnings alone; log files stay whole."""
    from nvflare.fuel.utils.log_utils import concise_log_dict

    config = copy.deepcopy(concise_log_dict)
    config["filters"]["ConciseFilter"]["exclude_logger_names"] = [name.rpartition(".")[2] for name in CHATTY]
    if quiet:
        config["handlers"]["consoleHandler"] |= {"level": "WARNING", "stream": "ext://sys.stderr"}
    return write_json(file, config)


def run_status(folder: Path) -> str:
    """Find out how the run in a results folder ended: ``completed``, or what happened instead."""
    try:
        events = read_events(folder)
    except FedTARError:
        return "it did not start"
    if not events or not isinstance(last := events[-1], End):
        return "it stopped in the middle"
    return last.status if last.status == "completed" else f"{last.status}: {last.reason}"


# ---------------------------------------------------------------------- in this process
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
        self, task_name: str, data: FLModel, targets: list[str], timeout: int, callback: Callable[..., Any], **_: Any
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


class _Engine(SimpleNamespace):
    """What an executor uses of FLARE's engine."""


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
    about = {"get_root_dir": partial(str, workspace), "get_app_dir": lambda job: str(app)}
    engine = _Engine(get_workspace=partial(SimpleNamespace, **about))
    context.set_prop(ReservedKey.IDENTITY_NAME, name, private=False, sticky=False)
    context.set_prop(ReservedKey.RUN_NUM, job, private=False, sticky=False)
    props = {FLContextKey.SIMULATE_MODE: simulated, FLContextKey.TASK_NAME: task, FLContextKey.TASK_ID: "task-1"}
    for key, value in (props | {ReservedKey.ENGINE: engine, FLContextKey.TASK_DATA: message}).items():
        context.set_prop(key, value, private=True, sticky=False)
    return context


class ExecutorSite:
    """A site that runs its tasks in an executor of its own, behind its outbound guard; ``workspace`` is FLARE's."""

    def __init__(self, name: str, executor: SiteExecutor, workspace: Path, **others: Any):
        self.name, self.executor, self.workspace, self.others, self.signal = name, executor, workspace, others, Signal()
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
    local_sites = {}
    for name in site_names(sites):
        local_sites[name] = ExecutorSite(name, copy.deepcopy(recipe.executor), folder / "sites" / name)
    controller = InThisProcess(folder, local_sites, **recipe.controller_arguments)
    controller.run()
    if (status := run_status(controller.results_folder)) != "completed":
        raise FedTARError(f"the run in {folder} did not complete ({status})")
    return controller.results_folder
