"""A launcher that starts a job process again when a signal, or the cluster, ended it.

FLARE 2.9 fails the whole job, for all sites, when one site's job process dies of a signal (out of memory, an operator's
kill) or Slurm loses it, whatever ``min_clients`` says. Here the site starts it again and the server sends the open task
once more, which names the state version that it starts from, so the numbers stay the same. A site whose process keeps
dying leaves.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from nvflare.apis.app_validation import AppValidationKey
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobHandleSpec, JobLauncherSpec, JobReturnCode
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle
from nvflare.fuel.common.exit_codes import ProcessExitCode
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.provision.health import Pulse
from fedtar_flare.provision.retention import EVERY, look
from fedtar_flare.provision.wire import RequestFilter, guard_cells


class SupervisedHandle(JobHandleSpec):
    """Handle of a job process that ``launch`` starts again when it was lost, if not too often (a crash loop)."""

    def __init__(
        self, launch: Callable[[], JobHandleSpec], max_restarts: int, window: float, say: Callable[[str], object]
    ):
        super().__init__()
        self._launch, self._max_restarts, self._window, self._say = launch, max_restarts, window, say
        self._lock = threading.Lock()
        self._stopped = False
        self._restarts: list[float] = []
        self._handle = launch()

    def terminate(self) -> None:
        """End the process for good (FLARE calls this when the job is aborted or the site shuts down)."""
        with self._lock:
            self._stopped = True
            self._handle.terminate()

    def poll(self) -> int:
        """FLARE's return code; a lost process is UNKNOWN, which does not fail the other sites' job."""
        return JobReturnCode.UNKNOWN if self._lost() else int(self._handle.poll())

    def wait(self) -> None:
        """Return when the process has ended by itself, was terminated, or is in a crash loop."""
        while True:
            self._handle.wait()
            with self._lock:
                if not (how := self._lost()) or self._stopped or self._in_crash_loop():
                    return
                self._restarts.append(time.monotonic())
                often = f"{len(self._restarts)} of at most {self._max_restarts} times in {self._window:g} s"
                self._say(f"the job process {how}: started again ({often})")
                self._handle = self._launch()

    def _in_crash_loop(self) -> bool:
        self._restarts = [at for at in self._restarts if time.monotonic() - at <= self._window]
        if len(self._restarts) < self._max_restarts:
            return False
        often = f"again after {self._max_restarts} restarts in {self._window:g} s"
        cure = "this site leaves the job, which goes on with the others; its log has the cause (out of memory?)"
        self._say(f"the job process {self._lost()} {often}: {cure}")
        return True

    def _lost(self) -> str:
        """How the process was lost; empty while it runs and where it ended by itself."""
        if isinstance(self._handle, ProcessHandle):
            code = self._handle.adapter.poll() or 0  # negative for a signal, as in Python's subprocess
            return f"was ended by signal {-code}" if code < 0 else ""
        return "was lost by its cluster" if self._handle.poll() == ProcessExitCode.INFRASTRUCTURE_ERROR else ""


class SupervisedProcessLauncher(ClientProcessJobLauncher):
    """Replaces FLARE's launcher in a site's resources: its own of processes, or any other, which then is ``launcher``.

    A job that brings code is not started, whoever signed it, unless ``byoc``: the policy alone would let in whoever
    holds the project's root key, from which FLARE takes every role. As the one component of ours in every site's
    process it also restricts the server's requests when that starts, writes down its health, and sees to its retention.
    Jobs of another launcher (``nvflare deploy prepare``) are started again where it tells that they were lost, as that
    of Slurm does.
    """

    def __init__(
        self, max_restarts: int = 3, window: float = 900.0, byoc: bool = False, launcher: JobLauncherSpec | None = None
    ):
        super().__init__()
        if isinstance(max_restarts, bool) or not isinstance(max_restarts, int) or max_restarts < 0:
            raise ConfigError(f"max_restarts must be a number of at least 0, not {max_restarts!r}")
        if not window > 0:
            raise ConfigError(f"window must be positive, not {window}")
        if launcher is not None and not isinstance(launcher, JobLauncherSpec):
            raise ConfigError(f"launcher must be a job launcher, as {{path: ..., args: ...}}, not {launcher!r}")
        self.max_restarts, self.window, self.byoc, self.launcher = max_restarts, window, byoc, launcher
        self._looked, self._pulse = -EVERY, Pulse()
        guard_cells()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            os.umask(0o077)  # logs name files and rows
            processors = ClientRequestProcessors.request_processors
            processors[:] = [p if isinstance(p, RequestFilter) else RequestFilter(p) for p in processors]
            self._pulse.start(fl_ctx)
        if event_type == EventType.BEFORE_CLIENT_HEARTBEAT:
            self._pulse.beat()
        if event_type == EventType.AFTER_CLIENT_HEARTBEAT and time.monotonic() - self._looked >= EVERY:
            self._looked = time.monotonic()
            kit = Path(str(fl_ctx.get_prop(FLContextKey.WORKSPACE_ROOT)))
            threading.Thread(target=look, args=[kit], daemon=True).start()
        if self.launcher is not None and event_type != EventType.BEFORE_JOB_LAUNCH:  # where it would put itself forward
            self.launcher.handle_event(event_type, fl_ctx)
        super().handle_event(event_type, fl_ctx)

    def launch_job(self, job_meta: dict, fl_ctx: FLContext) -> JobHandleSpec:
        if job_meta.get(AppValidationKey.BYOC) and not self.byoc:
            raise FedTARError("the job brings code of its own, which this site does not run")
        start = super().launch_job if self.launcher is None else self.launcher.launch_job
        return SupervisedHandle(lambda: start(job_meta, fl_ctx), self.max_restarts, self.window, self.logger.warning)
