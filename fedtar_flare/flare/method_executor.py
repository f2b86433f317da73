"""Base of every method's executor: route the task, keep errors readable and private, keep state on disk."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.errors import FedTARError
from fedtar_flare.flare.tasks import ABSTAIN, ERROR, OK, Order, Reply
from fedtar_flare.flare.tensors import register_tensors

register_tensors()

Tensors = Mapping[str, torch.Tensor]


class TaskAborted(Exception):
    """The job was aborted while a task ran: leave without saving."""


class Site:
    """Where a task runs: the site's name, its FLARE workspace, whether it is simulated, and the abort signal."""

    def __init__(self, fl_ctx: FLContext, abort_signal: Signal):
        self.name = str(fl_ctx.get_identity_name())
        self.simulated = bool(fl_ctx.get_prop(FLContextKey.SIMULATE_MODE, False))
        self.workspace = Path(fl_ctx.get_engine().get_workspace().get_root_dir())
        self._abort_signal = abort_signal

    def state_root(self, configured: Path | None) -> Path:
        """Folder of the site state: the site file's, else the kit's own, else (simulator) the user's cache.

        Never inside FLARE's run folder: that one is deleted with the job, and in the simulator at every start.
        """
        if configured is not None:
            return configured
        return home() / "state" if self.simulated else self.workspace / "fedtar_state"

    def stop_if_aborted(self) -> None:
        """Raise :class:`TaskAborted` when the job was aborted; called between batches."""
        if self._abort_signal.triggered:
            raise TaskAborted


class MethodExecutor(Executor):
    """What every method's executor shares; a method implements :meth:`perform`."""

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Run one task. A site's failure is an answer with a public reason, never an exception that ends the job."""
        start = time.monotonic()
        order: Order | None = None
        try:
            model = FLModelUtils.from_shareable(shareable)
            order = Order.from_meta(model.meta)
            site = Site(fl_ctx, abort_signal)
            reply, tensors = self.perform(task_name, order, model.params or {}, site)
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

    @abstractmethod
    def perform(self, task: str, order: Order, weights: Tensors, site: Site) -> tuple[Reply, Tensors | None]:
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


def home() -> Path:
    """``$FEDTAR_HOME``, else ``~/.cache/fedtar_flare``: caches and simulated site state."""
    return Path(os.environ.get("FEDTAR_HOME") or Path.home() / ".cache" / "fedtar_flare")


def ok(order: Order, numbers: dict[str, float] | None = None, payload: dict[str, Any] | None = None) -> Reply:
    """A good answer to this order."""
    return Reply(OK, order.round, order.step, numbers=numbers or {}, payload=payload or {})


def abstain(order: Order, reason: str) -> Reply:
    """No update from this site at this step."""
    return Reply(ABSTAIN, order.round, order.step, reason)


def _failure(order: Order | None, reason: str) -> Reply:
    return Reply(ERROR, order.round if order else -1, order.step if order else -1, reason)


def _to_shareable(task: str, reply: Reply, tensors: Tensors | None) -> Shareable:
    if not tensors:
        return FLModelUtils.to_shareable(FLModel(metrics={}, meta=reply.to_meta()))
    kind = ParamsType.DIFF if task == "train" else ParamsType.FULL
    return FLModelUtils.to_shareable(FLModel(params=dict(tensors), params_type=kind, meta=reply.to_meta()))
