"""A FLARE context as a site's filters and executor get it, and messages of this package."""

from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.protocol.messages import OK, Reply, TaskHeader, ok, version
from fedtar_flare.runtime.simulation import site_context
from fedtar_flare.runtime.site_executor import SiteExecutor
from fedtar_flare.site.audit import HEADER_PROP
from fedtar_flare.testing.hospital import task_message

A, B = "base_model.model.x.lora_A.weight", "base_model.model.x.lora_B.weight"


def task_header(method="fedtar", run_id="run", round=1, step=1, **more):
    return TaskHeader(method, run_id, round, step, 2, 2, version(1, 0), **more)


def shareable(tensors, kind, meta):
    model = FLModel(params=tensors, params_type=kind, meta=meta) if tensors else FLModel(metrics={}, meta=meta)
    return FLModelUtils.to_shareable(model)


def context(workspace, task="train", run_id="run", simulated=False, header=None, sent=None, **others):
    """Context of a task in which the server sent ``header`` and the tensors ``sent``."""
    header = header or task_header(run_id=run_id)
    made = site_context(workspace, task, task_message(header, sent), simulated=simulated, **others)
    made.set_prop(HEADER_PROP, header, private=True, sticky=False)
    return made


def message(
    tensors=None, kind=ParamsType.DIFF, status=OK, reason="", numbers=None, payload=None, method="fedtar", meta=None
):
    reply = Reply(status, 1, 1, reason, numbers or {}, payload or {}, method)
    return shareable(tensors, kind, reply.to_meta() | (meta or {}))


def read(shareable):
    model = FLModelUtils.from_shareable(shareable)
    return Reply.from_meta(model.meta), model.params or {}


def sends_back(task, header, weights):
    return ok(header, {"samples": 1} if weights else {}), dict(weights) if weights else None


class Recorder(SiteExecutor):
    """The executor in front of a plain function: it keeps the tasks' headers."""

    def __init__(self, does=sends_back):
        super().__init__("fedtar")
        self.headers, self.does = [], does

    def _in_processes(self, task, header, weights, *site):
        self.headers.append(header)
        return self.does(task, header, weights)
