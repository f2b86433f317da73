"""A federation in one process: the real controller, with sites that are plain functions, for tests of an algorithm."""

import torch
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare import registry
from fedtar_flare.core.tensor_file import coarse_checksums
from fedtar_flare.methods.fedtar.controller import TemporalResidualController
from fedtar_flare.methods.fedtar.policy import t_numbers
from fedtar_flare.protocol.exchange import ExchangeSchema
from fedtar_flare.protocol.messages import TaskHeader, abstain, ok
from fedtar_flare.protocol.tasks import CLOSE_ROUND, HANDSHAKE, TRAIN
from fedtar_flare.runtime import in_process
from fedtar_flare.runtime.checkpoint import CheckpointFolder
from fedtar_flare.runtime.controller import FederatedController
from fedtar_flare.version import __version__

NAMES = ("base_model.model.x.lora_A.weight", "base_model.model.x.lora_B.weight")


def last(controller):
    """The last checkpoint of a run."""
    return CheckpointFolder(controller.results_folder / "checkpoint").last()[0]


def same_bits(one, other):
    """Whether two checkpoints hold the same weights and the same state of the method."""
    pairs = ((one.weights, other.weights), (one.method, other.method))
    return all(a.keys() == b.keys() and all(torch.equal(v, b[name]) for name, v in a.items()) for a, b in pairs)


class InThisProcess(in_process.InThisProcess):
    """The package's own engine, whose sites are functions ``(task, header, weights) -> (Reply, tensors or None)``.

    A function may raise, or return None for a site that never answers. Settings of the method at the server are given
    by name as well.
    """

    method_name = "fedtar"

    def __init__(self, *args, **kwargs):
        method = registry.method(self.method_name)
        names = method.server_settings.model_fields if method.server_settings else ()
        settings = {name: kwargs.pop(name) for name in method.server_groups if name in kwargs}
        if own := {name: kwargs.pop(name) for name in [*kwargs] if name in names}:
            settings["server"] = own
        super().__init__(*args, **{"method": self.method_name, **kwargs, "settings": settings})
        self.sent: list[tuple[str, str, int, int]] = []

    def deliver(self, site, task, message):
        received = FLModelUtils.from_shareable(message)
        header = TaskHeader.from_meta(received.meta)
        self.sent.append((task, site, header.round, header.step))
        answer = self.local_sites[site](task, header, received.params or {})
        if answer is None:
            return None
        reply, tensors = answer
        kind = ParamsType.DIFF if self.contract.task(task).sends == "difference" else ParamsType.FULL
        content = {"params": tensors, "params_type": kind} if tensors else {"metrics": {}}
        return FLModelUtils.to_shareable(FLModel(**content, meta=reply.to_meta()))


class LocalFederation(InThisProcess, TemporalResidualController):
    """FedTAR in this process."""


def federation_of(method):
    """A class like :class:`LocalFederation` for another method."""
    return type(method, (InThisProcess, FederatedController), {"method_name": method})


def slowed(controller, site, until):
    """The site's first answer to a training task comes as the (task, round) ``until`` is sent out."""
    send, deliver, held = controller.send_model, controller.deliver, []

    def delivered(name, task, message):
        answer = deliver(name, task, message)
        if (name, task) != (site, TRAIN) or held:
            return answer
        held.append(FLModelUtils.from_shareable(answer))
        held[0].meta["client_name"] = site
        return None

    def sent(task_name, data, callback, **kwargs):
        if (task_name, data.current_round) == until:
            held.pop(1)(held[0])
        send(task_name=task_name, data=data, callback=callback, **kwargs)
        if len(held) == 1 and task_name == TRAIN and data.current_round == 1:
            held.append(callback)

    controller.send_model, controller.deliver = sent, delivered


class QuadraticSite:
    """A site whose loss at step t is ``0.5 * ||w - target_t||^2``; one local step of gradient descent with rate ``lr``.

    ``targets`` has a pair of tensors for each step, or None where the site has no visit; ``validation`` is the pair of
    its validation loss, or None; ``samples`` is n_k at every step.
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
                **({"start": coarse_checksums(self.start())} if order.initial_site else {}),
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
        steps = order.arrived or order.time_steps
        self.received[order.round, steps] = weights
        if self.validation is None:
            return ok(order), None
        gradient = {n: weights[n] - goal for n, goal in zip(NAMES, self.validation, strict=True)}
        loss = sum(0.5 * float(g.double().square().sum()) for g in gradient.values())
        numbers = {"validation_loss": loss, "reports": self.samples}
        if order.method != "fedtar":
            return ok(order, numbers), None
        broadcasts = [self.received.get((order.round, t)) for t in range(steps + 1)]
        products = t_numbers(gradient, broadcasts) if all(w is not None for w in broadcasts) else None
        return ok(order, numbers, {"t_numbers": products}), None


class Spoilt(QuadraticSite):
    """Changes its answer to one task: ``spoil(header, reply, tensors)`` gives another."""

    def __init__(self, name, spoil, task, targets=None, samples=2):
        super().__init__(name, targets or [pair(4), pair(5)], samples, validation=pair(10))
        self.spoil, self.task = spoil, task

    def __call__(self, task, header, weights):
        answer = super().__call__(task, header, weights)
        return self.spoil(header, *answer) if task == self.task else answer


def pair(seed):
    """Two tensors of the exchange's shapes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 2, generator=generator), torch.randn(3, 2, generator=generator)
