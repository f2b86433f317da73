"""Base of every method's executor: route the task, keep errors readable and private, keep state on disk."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.errors import ExchangeError, FedTARError
from fedtar_flare.protocol.exchange import check_inbound
from fedtar_flare.protocol.messages import ABSTAIN, ERROR, OK, Reply, TaskHeader
from fedtar_flare.protocol.tensors import register_tensors
from fedtar_flare.site import audit
from fedtar_flare.site.guard import not_allowed
from fedtar_flare.site.participation import Participation, participation
from fedtar_flare.site.place import Site, TaskAborted, home

register_tensors()

__all__ = ["MethodExecutor", "Site", "TaskAborted", "Tensors", "abstain", "home", "ok"]

Tensors = Mapping[str, torch.Tensor]


class MethodExecutor(Executor):
    """What every method's executor shares; a method implements :meth:`perform`."""

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Run one task. A site's failure is an answer with a public reason, never an exception that ends the job."""
        start = time.monotonic()
        order: TaskHeader | None = None
        try:
            model = FLModelUtils.from_shareable(shareable)
            order = TaskHeader.from_meta(model.meta)
            fl_ctx.set_prop(audit.HEADER_PROP, order, private=True, sticky=False)
            if reason := not_allowed(fl_ctx):
                raise ExchangeError(reason)
            site = Site(fl_ctx, abort_signal)
            audit.require_writable(site, fl_ctx)
            check_inbound(model.params)
            veto = _veto(order, site)
            reply, tensors = veto or self.perform(task_name, order, model.params or {}, site)
            if veto is None and (late := _veto(order, site)):  # the site changed its mind while the task ran
                reply, tensors = late
        except TaskAborted:
            return make_reply(ReturnCode.TASK_ABORTED)
        except FedTARError as error:
            self.logger.error(f"task '{task_name}': {error}")  # the logger alone: FLARE's log_error fires events
            reply, tensors = _failure(order, error.public), None
        except Exception as error:
            self.logger.exception(f"task '{task_name}' failed: {error}")
            reply, tensors = _failure(order, f"unexpected {type(error).__name__} (see the site's own log)"), None
        if reply.status == ABSTAIN:
            self.logger.info(f"task '{task_name}': no update from here: {reply.reason}")
        reply.numbers["seconds"] = round(time.monotonic() - start, 3)
        return _to_shareable(task_name, reply, tensors)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Keep the site's audit of what leaves (see :mod:`fedtar_flare.site.audit`)."""
        audit.record_event(event_type, fl_ctx)

    @abstractmethod
    def perform(self, task: str, order: TaskHeader, weights: Tensors, site: Site) -> tuple[Reply, Tensors | None]:
        """Do the task.

        Args:
            task: the task's name.
            order: its header.
            weights: tensors that the server sent, name to float32 tensor; empty when it sent none.
            site: where it runs.

        Returns:
            the reply and the tensors that go up with it (full weights in a handshake, else a difference), or None.

        Raises:
            FedTARError: its ``public`` text goes to the server, its full text to the site's own log.
        """


def ok(order: TaskHeader, numbers: dict[str, float] | None = None, payload: dict[str, Any] | None = None) -> Reply:
    """A good answer to this task."""
    return Reply(OK, order.round, order.step, numbers=numbers or {}, payload=payload or {}, method=order.method)


def abstain(order: TaskHeader, reason: str) -> Reply:
    """No update from this site at this step."""
    return Reply(ABSTAIN, order.round, order.step, reason, method=order.method)


def _veto(order: TaskHeader, site: Site) -> tuple[Reply, None] | None:
    """The answer of a site that does not take part now; None when it does."""
    state = participation(site.records)
    if state is Participation.PAUSED:
        return abstain(order, "paused by the site"), None
    if state is Participation.LEFT:
        return _failure(order, "the site has left the federation"), None
    return None


def _failure(order: TaskHeader | None, reason: str) -> Reply:
    if order is None:
        return Reply(ERROR, -1, -1, reason)
    return Reply(ERROR, order.round, order.step, reason, method=order.method)


def _to_shareable(task: str, reply: Reply, tensors: Tensors | None) -> Shareable:
    if not tensors:
        return FLModelUtils.to_shareable(FLModel(metrics={}, meta=reply.to_meta()))
    kind = ParamsType.DIFF if task == "train" else ParamsType.FULL
    return FLModelUtils.to_shareable(FLModel(params=dict(tensors), params_type=kind, meta=reply.to_meta()))
