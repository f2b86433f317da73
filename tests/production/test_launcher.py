"""The supervised launcher on real processes that are really killed."""

import os
import sys
import threading
from types import SimpleNamespace

from nvflare.apis.job_launcher_spec import JobReturnCode
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle
from nvflare.utils.process_utils import spawn_process

from fedtar_flare.provision import launcher
from fedtar_flare.provision.launcher import SupervisedHandle


class Runs:
    """A handle over a small program, waited for in a thread as FLARE does."""

    def __init__(self, program, max_restarts=3, window=1000.0):
        self.pids, self.said = [], []

        def launch():
            adapter = spawn_process([sys.executable, "-c", program], dict(os.environ))
            self.pids.append(adapter.pid)
            return ProcessHandle(process_adapter=adapter)

        self.handle = SupervisedHandle(launch, max_restarts, window, self.said.append)
        self.thread = threading.Thread(target=self.handle.wait)
        self.thread.start()

    def ended(self):
        self.thread.join()
        return self.handle.poll()


def test_a_process_that_ends_by_itself_or_is_ended_is_not_started_again_and_a_crash_loop_stops():
    for code, expected in ((0, JobReturnCode.SUCCESS), (1, JobReturnCode.EXECUTION_ERROR)):
        runs = Runs(f"raise SystemExit({code})")
        assert runs.ended() == expected and len(runs.pids) == 1 and not runs.said
    runs = Runs("import time; time.sleep(600)")
    runs.handle.terminate()
    assert runs.ended() == JobReturnCode.UNKNOWN and len(runs.pids) == 1 and not runs.said
    runs = Runs("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", max_restarts=2)
    assert runs.ended() == JobReturnCode.UNKNOWN, "which fails nobody else's job"
    assert len(runs.pids) == 3 and "leaves the job" in runs.said[-1] and "signal 11" in runs.said[-1]


def test_deaths_that_lie_far_apart_are_no_crash_loop(monkeypatch):
    times = iter([*map(float, range(0, 600, 100)), *[600.0] * 99])
    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=lambda: next(times)))
    runs = Runs("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", max_restarts=1, window=50.0)
    runs.ended()
    assert len(runs.pids) > 3
