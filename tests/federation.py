"""A federation in one process: the real controller, with sites that are plain functions, for tests of an algorithm.

What FLARE would carry is carried by its own ``FLModelUtils`` both ways, so that headers and tensors go the real path;
processes, the network and the simulator have tests of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from nvflare.apis.client import Client
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.fedtar.controller import TemporalResidualController
from fedtar_flare.fedtar.policy import t_numbers
from fedtar_flare.flare.executor import abstain, ok
from fedtar_flare.protocol.exchange import ExchangeSchema
from fedtar_flare.protocol.messages import TaskHeader
from fedtar_flare.protocol.tasks import CLOSE_ROUND, HANDSHAKE, TRAIN
from fedtar_flare.version import __version__

NAMES = ("base_model.model.x.lora_A.weight", "base_model.model.x.lora_B.weight")


class InThisProcess:
    """Delivers a controller's messages in this process; stands before the controller among a class's bases.

    Args:
        folder: stands for the server's run folder.
        sites: name to a function ``(task, order, weights) -> (Reply, tensors or None)``; it may raise, or return None
            for a site that never answers.
        order_of_arrival: permutes the sites before they are asked.
    """

    def __init__(self, folder: Path, sites: dict[str, Callable], order_of_arrival: Callable = sorted, **settings):
        super().__init__(**settings)
        self.folder, self.local_sites, self.order_of_arrival = folder, sites, order_of_arrival
        self.fl_ctx = FLContext()
        self.abort_signal = Signal()
        self.engine = SimpleNamespace(get_clients=lambda: [Client(n, n) for n in self.local_sites])
        self.panics: list[str] = []
        self.disconnected: set[str] = set()
        self.silent_until = 0.0
        self.sent: list[tuple[str, str, int, int]] = []

    def get_run_dir(self):
        return str(self.folder)

    def scalar(self, tag, value, step):
        """TensorBoard's points go through FLARE's engine, which is not here."""

    def panic(self, reason: str):
        self.panics.append(reason)

    def get_client_disconnect_time(self, client_name):
        return 1.0 if client_name in self.disconnected else None

    def get_num_standing_tasks(self):
        return int(time.monotonic() < self.silent_until)

    def cancel_all_tasks(self, *args, **kwargs):
        self.silent_until = 0.0

    def send_model(self, task_name, data, targets, min_responses, timeout, callback):
        message = FLModelUtils.to_shareable(data)
        silent = False
        for site in self.order_of_arrival(targets):
            received = FLModelUtils.from_shareable(message)
            order = TaskHeader.from_meta(received.meta)
            self.sent.append((task_name, site, order.round, order.step))
            try:
                answer = self.local_sites[site](task_name, order, received.params or {})
            except Exception:
                self._accept_train_result(site, make_reply(ReturnCode.EXECUTION_EXCEPTION), self.fl_ctx)
                continue
            if answer is None:
                silent = True
                continue
            reply, tensors = answer
            kind = ParamsType.DIFF if self.contract.task(task_name).sends == "difference" else ParamsType.FULL
            model = (
                FLModel(params=tensors, params_type=kind, meta=reply.to_meta())
                if tensors
                else FLModel(metrics={}, meta=reply.to_meta())
            )
            model = FLModelUtils.from_shareable(FLModelUtils.to_shareable(model))
            model.meta["client_name"] = site
            callback(model)
        self.silent_until = time.monotonic() + timeout if silent else 0.0


class LocalFederation(InThisProcess, TemporalResidualController):
    """FedTAR in this process."""


class QuadraticSite:
    """A site whose loss at step t is ``0.5 * ||w - target_t||^2``; one local step of gradient descent with rate ``lr``.

    Args:
        name: of the site.
        targets: per step the pair of tensors that it is drawn to, or None where it has no visit.
        samples: n_k at every step.
        validation: the pair of tensors of its validation loss; None: it has no validation patient.
    """

    def __init__(self, name, targets, samples=1, validation=None, lr=0.5):
        self.name, self.targets, self.samples, self.validation, self.lr = name, targets, samples, validation, lr
        self.received: dict[tuple[int, int], dict] = {}

    def start(self):
        generator = torch.Generator().manual_seed(5)
        return {name: torch.randn(3, 2, generator=generator) for name in NAMES}

    def __call__(self, task, order, weights):
        if task == HANDSHAKE:
            payload = {
                "schema": ExchangeSchema.of(self.start()).to_dict(),
                "versions": {"fedtar_flare": __version__},
                "settings": "same",
                "counts": {split: [self.samples] * order.time_steps for split in ("train", "validation", "test")},
                "adapter_config": {"peft_type": "LORA"},
                "model": {"parameters": 100},
            }
            return ok(order, payload=payload), self.start() if order.initial_site == self.name else None
        if task == TRAIN:
            self.received[order.round, order.step - 1] = weights
            target = self.targets[order.step - 1]
            if target is None:
                return abstain(order, "no visit"), None
            update = {n: -self.lr * (weights[n] - goal) for n, goal in zip(NAMES, target, strict=True)}
            return ok(order, {"samples": self.samples, "train_loss": 1.0}), update
        assert task == CLOSE_ROUND
        self.received[order.round, order.time_steps] = weights
        if self.validation is None:
            return ok(order), None
        gradient = {n: weights[n] - goal for n, goal in zip(NAMES, self.validation, strict=True)}
        loss = sum(0.5 * float(g.double().square().sum()) for g in gradient.values())
        numbers = {"validation_loss": loss, "reports": self.samples}
        if order.method != LocalFederation.contract.method:
            return ok(order, numbers), None
        broadcasts = [self.received.get((order.round, t)) for t in range(order.time_steps + 1)]
        products = t_numbers(gradient, broadcasts) if all(w is not None for w in broadcasts) else None
        return ok(order, numbers, {"t_numbers": products}), None


def pair(seed):
    """Two tensors of the exchange's shapes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 2, generator=generator), torch.randn(3, 2, generator=generator)
