"""A FLARE context as a site's filters and executor get it, and messages of this package."""

import json
from types import SimpleNamespace

from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE, AnalyticsData
from nvflare.apis.dxo import from_shareable
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.core.files import write_json
from fedtar_flare.methods.fedtar.executor import PatientAdaptiveExecutor
from fedtar_flare.protocol.messages import OK, Reply, TaskHeader, ok, version
from fedtar_flare.runtime.site_executor import SiteExecutor
from fedtar_flare.site.approval import CLIENT_CONFIG, SERVER_CONFIG
from fedtar_flare.site.audit import HEADER_PROP

A, B = "base_model.model.x.lora_A.weight", "base_model.model.x.lora_B.weight"


def task_header(method="fedtar", run_id="run", round=1, step=1, **more):
    return TaskHeader(method, run_id, round, step, 2, 2, version(1, 0), **more)


def shareable(tensors, kind, meta):
    model = FLModel(params=tensors, params_type=kind, meta=meta) if tensors else FLModel(metrics={}, meta=meta)
    return FLModelUtils.to_shareable(model)


class Engine:
    """What an executor asks of FLARE's engine; keeps the scalars that it streams."""

    def __init__(self, workspace):
        self.get_workspace = lambda: workspace
        self.streamed = []

    def new_context(self):
        context = FLContext()
        context.get_engine = lambda: self
        return context

    def fire_event(self, event_type, fl_ctx):
        if event_type == ANALYTIC_EVENT_TYPE:
            self.streamed.append(AnalyticsData.from_dxo(from_shareable(fl_ctx.get_prop(FLContextKey.EVENT_DATA))))


def context(
    workspace, task="train", run_id="run", simulated=False, name="site-1", header=None, job="job-1", sent=None, app=None
):
    """Context of a task in which the server sent ``header`` and the tensors ``sent``; ``app``: the job's folder."""
    ctx = FLContext()
    ctx.set_prop("__identity_name__", name, private=False, sticky=False)
    ctx.set_prop("__run_num__", job, private=False, sticky=False)
    ctx.set_prop(FLContextKey.SIMULATE_MODE, simulated, private=True, sticky=False)
    ctx.set_prop(FLContextKey.TASK_NAME, task, private=True, sticky=False)
    ctx.set_prop(FLContextKey.TASK_ID, "task-1", private=True, sticky=False)
    header = header or task_header(run_id=run_id)
    ctx.set_prop(HEADER_PROP, header, private=True, sticky=False)
    task_data = shareable(sent, ParamsType.FULL, header.to_meta())
    ctx.set_prop(FLContextKey.TASK_DATA, task_data, private=True, sticky=False)
    folders = SimpleNamespace(get_root_dir=lambda: str(workspace), get_app_dir=lambda job: str(app))
    engine = Engine(folders)
    ctx.get_engine = lambda: engine
    return ctx


def put_app(app, settings):
    """An app of FedTAR as FLARE puts it at a site, as far as another process reads it."""
    (app / "config").mkdir(parents=True, exist_ok=True)
    path = f"{PatientAdaptiveExecutor.__module__}.{PatientAdaptiveExecutor.__qualname__}"
    executor = {"path": path, "args": {"preset": "tiny", "settings": settings}}
    content = {"format_version": 2, "executors": [{"tasks": ["*"], "executor": executor}]}
    (app / CLIENT_CONFIG).write_text(json.dumps(content))
    write_workflow(app, num_rounds=9, time_steps=2)


def write_workflow(app, **arguments):
    """The server's part of a job's app: what it says of its rounds, time steps, and the job that it resumes."""
    write_json(app / SERVER_CONFIG, {"workflows": [{"id": "controller", "args": arguments}]})


def message(
    tensors=None, kind=ParamsType.DIFF, status=OK, reason="", numbers=None, payload=None, method="fedtar", meta=None
):
    reply = Reply(status, 1, 1, reason, numbers or {}, payload or {}, method)
    return shareable(tensors, kind, reply.to_meta() | (meta or {}))


def read(shareable):
    model = FLModelUtils.from_shareable(shareable)
    return Reply.from_meta(model.meta), model.params or {}


class Recorder(SiteExecutor):
    """The executor with nothing to do: it keeps the tasks' headers and sends back the weights that came."""

    def __init__(self):
        super().__init__("fedtar")
        self.headers = []

    def _in_processes(self, task, header, weights, *site):
        self.headers.append(header)
        return ok(header, {"samples": 1} if weights else {}), dict(weights) if weights else None
