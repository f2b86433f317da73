"""Base of the executor: routes tasks, keeps errors readable and private, keeps state on disk."""

from __future__ import annotations

import errno
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.errors import DISK_FULL, ExchangeError, FedTARError
from fedtar_flare.protocol.contract import Contract
from fedtar_flare.protocol.exchange import check_inbound
from fedtar_flare.protocol.messages import ABSTAIN, ERROR, OK, Reply, TaskHeader
from fedtar_flare.protocol.tensors import register_tensors
from fedtar_flare.runtime import forked
from fedtar_flare.runtime.scalars import send_scalar
from fedtar_flare.site import audit
from fedtar_flare.site.guard import not_allowed
from fedtar_flare.site.participation import Participation, participation
from fedtar_flare.site.place import Site, TaskAborted

register_tensors()

Tensors = Mapping[str, torch.Tensor]


class MethodExecutor(Executor):
    """What happens to a task whatever it is; a subclass has the ``contract`` and implements :meth:`perform`."""

    scalars_to: Callable[[str, float, int], None] | None = None
    """Where :meth:`send_scalar` gives its points; None: to the server."""
    opened: Callable[[], None] | None = None
    """Lets the other processes begin that do a task together with this one; None: there are none."""

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Run one task. A site's failure is an answer with a public reason, never an exception that ends the job."""
        start = time.monotonic()
        header: TaskHeader | None = None
        try:
            model = FLModelUtils.from_shareable(shareable)
            header = TaskHeader.from_meta(model.meta)
            fl_ctx.set_prop(audit.HEADER_PROP, header, private=True, sticky=False)
            if reason := not_allowed(fl_ctx):
                raise ExchangeError(reason)
            if header.method != self.method_name:
                raise ExchangeError(f"the task is of method '{header.method}', this job's is '{self.method_name}'")
            site = Site(fl_ctx, abort_signal)
            audit.require_writable(site, fl_ctx)
            check_inbound(model.params)
            veto = _veto(header, site)
            reply, tensors = veto or self._performed(task_name, header, model.params or {}, site, fl_ctx, abort_signal)
            if veto is None and (late := _veto(header, site)):  # the site changed its mind while the task ran
                reply, tensors = late
        except TaskAborted:
            return make_reply(ReturnCode.TASK_ABORTED)
        except FedTARError as error:
            self.logger.error(f"task '{task_name}': {error}")  # the logger alone: FLARE's log_error fires events
            reply, tensors = _failure(header, error.public), None
        except OSError as error:
            self.logger.exception(f"task '{task_name}' failed: {error}")
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reply, tensors = _failure(header, DISK_FULL if full else _unexpected(error)), None
        except Exception as error:
            self.logger.exception(f"task '{task_name}' failed: {error}")
            reply, tensors = _failure(header, _unexpected(error)), None
        if reply.status == ABSTAIN:
            self.logger.info(f"task '{task_name}': no update from here: {reply.reason}")
        reply.numbers["seconds"] = round(time.monotonic() - start, 3)
        return self._to_shareable(task_name, reply, tensors)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Keep the site's audit of what leaves (see :mod:`fedtar_flare.site.audit`)."""
        audit.record_event(event_type, fl_ctx)

    @property
    @abstractmethod
    def contract(self) -> Contract:
        """What the method exchanges."""

    @property
    def method_name(self) -> str:
        """Name of the method whose tasks are done."""
        return self.contract.method

    @abstractmethod
    def perform(self, task: str, header: TaskHeader, weights: Tensors, site: Site) -> tuple[Reply, Tensors | None]:
        """Do the task; return the reply and the tensors that go up with it (as the contract's ``sends`` says), or None.

        ``weights`` holds the float32 tensors that the server sent; it is empty when it sent none.

        Raises:
            FedTARError: its ``public`` text goes to the server, its full text to the site's own log.
        """

    def load_libraries(self) -> None:
        """Import what a task needs beside this class; called before a process is copied for each task."""

    def send_scalar(self, site: Site, tag: str, value: float, step: int) -> None:
        """Send one point of the curve ``tag`` at ``step`` to the server, where the site's audit can be written."""
        if self.scalars_to is not None:
            self.scalars_to(tag, value, step)
            return
        with site.engine.new_context() as context:
            audit.require_writable(site, context)  # the listener that sends it may come before the audit's
            send_scalar(self, context, tag, value, step)

    def _performed(
        self, task: str, header: TaskHeader, weights: Tensors, site: Site, fl_ctx: FLContext, abort_signal: Signal
    ) -> tuple[Reply, Tensors | None]:
        """:meth:`perform`, in a copy of a process that has imported everything where that spares the imports."""
        if site.simulated and forked.is_swapped(fl_ctx) and forked.may_fork(self):
            connection = forked.connect(site.app, os.getppid())
            if connection is not None:
                scalar = partial(self.send_scalar, site)
                return forked.perform(connection, task, header, weights, site, abort_signal, scalar)
        return self.perform(task, header, weights, site)

    def _to_shareable(self, task: str, reply: Reply, tensors: Tensors | None) -> Shareable:
        if not tensors:
            return FLModelUtils.to_shareable(FLModel(metrics={}, meta=reply.to_meta()))
        kind = ParamsType.DIFF if self.contract.task(task).sends == "difference" else ParamsType.FULL
        return FLModelUtils.to_shareable(FLModel(params=dict(tensors), params_type=kind, meta=reply.to_meta()))


def ok(header: TaskHeader, numbers: dict[str, float] | None = None, payload: dict[str, Any] | None = None) -> Reply:
    """A good answer to this task."""
    return Reply(OK, header.round, header.step, numbers=numbers or {}, payload=payload or {}, method=header.method)


def abstain(header: TaskHeader, reason: str) -> Reply:
    """No update from this site at this step."""
    return Reply(ABSTAIN, header.round, header.step, reason, method=header.method)


LEFT = "the site has left the federation"
"""Public reason of a site that takes part no more."""


def _veto(header: TaskHeader, site: Site) -> tuple[Reply, None] | None:
    """The answer of a site that does not take part now; None when it does."""
    state = participation(site.records)
    if state is Participation.PAUSED:
        return abstain(header, "paused by the site"), None
    if state is Participation.LEFT:
        return _failure(header, LEFT), None
    return None


def _unexpected(error: Exception) -> str:
    return f"unexpected {type(error).__name__} (see the site's own log)"


def _failure(header: TaskHeader | None, reason: str) -> Reply:
    place = (header.round, header.step, header.method) if header else (-1, -1, "")
    return Reply(ERROR, place[0], place[1], reason, method=place[2])
