"""One site's executor by itself: its tasks through ``execute`` and the outbound guard, as in the plain simulator."""

from flare_context import context, write_workflow
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.signal import Signal
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.methods.fedtar.executor import PatientAdaptiveExecutor
from fedtar_flare.protocol.messages import Reply, TaskHeader, version
from fedtar_flare.protocol.tasks import CLOSE_ROUND, HANDSHAKE, TRAIN
from fedtar_flare.runtime.site_executor import SiteExecutor
from fedtar_flare.runtime.task import Task
from fedtar_flare.site.guard import OutboundGuard
from fedtar_flare.site.state import SiteState

T = 2
SETTINGS = {"preset": "tiny", "training": {"local_steps": 2, "batch_size": 4}, "data": {"synthetic_patients": 16}}


def executor_of(method, preset="small", seed=0, torch_threads=1, **settings):
    """The executor of a method's job, with its groups of settings by name."""
    kind = PatientAdaptiveExecutor if method == "fedtar" else SiteExecutor
    executor = kind(method, preset, settings, seed, torch_threads)
    assert executor.strategy, "wrong settings are refused here, as in a recipe"
    return executor


def task_of(executor, source="synthetic", **parts):
    """A task of this executor with the parts that a test needs; the others are None."""
    strategy = executor.strategy.at(source, None)
    names = ("name", "header", "weights", "site", "config", "state", "cohort", "min_cell")
    own = {"settings": strategy.settings, "contract": executor.contract, "job_seed": executor.seed}
    return Task(**dict.fromkeys(names) | own | parts)


class HospitalSite:
    """Runs tasks in one executor, or (``fresh``) in a new one each time, with ``settings`` over :data:`SETTINGS`.

    ``app`` is the folder in which FLARE has put the app of ``job``; a real site without one gets the part that says
    how many rounds and time steps the job has.
    """

    job = "job-1"

    def __init__(self, workspace, name="site-1", fresh=True, simulated=True, method="fedtar", app=None, **settings):
        self.workspace, self.name, self.fresh, self.simulated, self.app = workspace, name, fresh, simulated, app
        self.method, self.settings = method, {**SETTINGS, **settings}
        self.executor = executor_of(method, **self.settings)
        self.signal = Signal()
        if not simulated and app is None:
            self.app = workspace / self.job / "app"
            write_workflow(self.app, num_rounds=9, time_steps=T)

    def run(self, task, header, weights=None):
        if self.fresh:
            self.executor = executor_of(self.method, **self.settings)
        about = {"simulated": self.simulated, "name": self.name, "job": self.job, "app": self.app}
        ctx = context(self.workspace, task, header=header, sent=weights, **about)
        self.streamed = ctx.get_engine().streamed
        answer = self.executor.execute(task, ctx.get_prop(FLContextKey.TASK_DATA), ctx, self.signal)
        if answer.get_return_code() not in (None, ReturnCode.OK):
            return answer.get_return_code(), None
        # the guard of a site that lets pass what the method exchanges whole of the base model
        guard = OutboundGuard([self.method], extra_names=list(self.executor.strategy.settings.lora.exchange))
        result = FLModelUtils.from_shareable(guard.process(answer, ctx))
        return Reply.from_meta(result.meta), result.params

    def header(self, run_id, r, t, **more):
        return TaskHeader(self.method, run_id, r, t, 9, T, **more)

    def handshake(self, run_id="run", **more):
        more = {"after": version(0, 0), "initial_site": self.name, **more}
        return self.run(HANDSHAKE, self.header(run_id, 0, 0, **more))

    def train(self, w, r, t, run_id="run", **more):
        return self.run(TRAIN, self.header(run_id, r, t, after=version(r, t - 1), **more), w)

    def close(self, w, r, evaluate=False, run_id="run"):
        return self.run(CLOSE_ROUND, self.header(run_id, r, T, after=version(r, T), evaluate=evaluate), w)


def write_site_files(folder, home, monkeypatch):
    """Site files of synthetic sites whose state lies below ``folder``; ``home`` has their image cache."""
    monkeypatch.setenv("FEDTAR_HOME", str(home))
    (folder / "state").mkdir()
    sites = folder / "sites"
    sites.mkdir()
    for name in ("site-1", "hospital"):
        (sites / f"{name}.yaml").write_text(f"source: synthetic\nstate_dir: {folder / 'state'}\n")
    monkeypatch.setenv("FEDTAR_SITES", str(sites))


def a_round(site, w, r=1, run_id="run"):
    """One round at one site with alpha 0.5; returns w_T and the updates."""
    updates = []
    for t in range(1, T + 1):
        reply, update = site.train(w, r, t, run_id)
        assert reply.status == "ok", reply.reason
        updates.append(update)
        w = {name: w[name] + 0.5 * update[name] for name in w}
    return w, updates


def state_of(tmp_path, run_id="run"):
    return SiteState(tmp_path / "state", run_id, "site-1")
