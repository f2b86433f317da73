"""The real controller with sites that are plain functions, for tests of an algorithm at the server."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare import registry
from fedtar_flare.core.files import coarse_checksums
from fedtar_flare.methods.fedtar.release import t_numbers
from fedtar_flare.protocol.contract import CLOSE_ROUND, HANDSHAKE, TRAIN
from fedtar_flare.protocol.exchange import ExchangeSchema, Tensors
from fedtar_flare.protocol.messages import Reply, TaskHeader, abstain, ok
from fedtar_flare.runtime.checkpoint import Checkpoint, CheckpointFolder
from fedtar_flare.runtime.controller import FederatedController
from fedtar_flare.runtime.simulation import InThisProcess
from fedtar_flare.version import __version__

__all__ = ["FunctionFederation", "QuadraticSite"]

NAMES = ("base_model.model.x.lora_A.weight", "base_model.model.x.lora_B.weight")
"""Tensors of the adapter of a :class:`QuadraticSite`, each of shape (3, 2)."""


class FunctionFederation(InThisProcess):
    """A federation in this process whose sites are functions; a function may raise, as a site may fail.

    Parameters
    ----------
    folder : Path
        Stands for the server's run folder.
    sites : dict of str to callable
        Make a reply and tensors of task, header and weights; None when the site never answers.
    method : str
        Name of an installed method.
    joins : dict of str to int, optional
        The round in which a late site connects, by name.
    **settings
        Arguments of the controller, and settings of the method's algorithm at the server.
    """

    def __init__(
        self,
        folder: Path,
        sites: Mapping[str, Any],
        method: str = "fedtar",
        joins: Mapping[str, int] | None = None,
        **settings: Any,
    ):
        definition = registry.method(method)
        names = definition.server_settings.model_fields if definition.server_settings else ()
        groups = {name: settings.pop(name) for name in definition.server_groups if name in settings}
        if own := {name: settings.pop(name) for name in [*settings] if name in names}:
            groups["server"] = own
        super().__init__(folder, sites, joins, method=method, settings=groups, **settings)
        self.sent: list[tuple[str, str, int, int]] = []
        """Task, site, round and step of each message that was sent."""

    def deliver(self, site: str, task: str, message: Shareable) -> Shareable | None:
        received = FLModelUtils.from_shareable(message)
        header = TaskHeader.from_meta(received.meta)
        self.sent.append((task, site, header.round, header.step))
        function: Any = self.local_sites[site]
        answer = function(task, header, received.params or {})
        if answer is None:
            return None
        reply, tensors = answer
        kind = ParamsType.DIFF if self.contract.task(task).sends == "difference" else ParamsType.FULL
        content = {"params": tensors, "params_type": kind} if tensors else {"metrics": {}}
        return FLModelUtils.to_shareable(FLModel(**content, meta=reply.to_meta()))


class QuadraticSite:
    """A site of known losses: at step t ``0.5 ||w - target_t||^2``, one step of gradient descent a task.

    Parameters
    ----------
    name : str
        The site's name.
    targets : sequence
        A pair of tensors (3, 2) for each step; None where the site has no visit.
    samples : int
        n_k at every step.
    validation : pair of Tensor, optional
        Target of its validation loss; None: no validation patient.
    lr : float
        Learning rate.
    """

    def __init__(
        self,
        name: str,
        targets: Sequence[tuple[torch.Tensor, ...] | None],
        samples: int = 1,
        validation: tuple[torch.Tensor, ...] | None = None,
        lr: float = 0.5,
    ):
        self.name, self.targets, self.samples, self.validation, self.lr = name, targets, samples, validation, lr
        self.received: dict[tuple[int, int], Tensors] = {}
        """Weights that came down, by round and step; those after the last step stand at T."""

    def start(self) -> dict[str, torch.Tensor]:
        """Make the initial weights, the same at every site.

        Returns
        -------
        dict of str to Tensor
            By :data:`NAMES`.
        """
        generator = torch.Generator().manual_seed(5)
        return {name: torch.randn(3, 2, generator=generator) for name in NAMES}

    def __call__(self, task: str, header: TaskHeader, weights: Tensors) -> tuple[Reply, Tensors | None]:
        """Do one of the three shared tasks."""
        if task == HANDSHAKE:
            payload = {
                "schema": ExchangeSchema.of(self.start()).to_dict(),
                "versions": {"fedtar_flare": __version__},
                "settings": "same",
                "counts": {split: [self.samples] * header.time_steps for split in ("train", "validation", "test")},
                "adapter_config": {"peft_type": "LORA"},
                "model": {"parameters": 100},
                **({"start": coarse_checksums(self.start())} if header.initial_site else {}),
            }
            return ok(header, payload=payload), self.start() if header.initial_site == self.name else None
        if task == TRAIN:
            self.received[header.round, header.step - 1] = weights
            target = self.targets[header.step - 1]
            if target is None:
                return abstain(header, "no visit"), None
            update = {n: -self.lr * (weights[n] - goal) for n, goal in zip(NAMES, target, strict=True)}
            return ok(header, {"samples": self.samples, "train_loss": 1.0}), update
        assert task == CLOSE_ROUND
        steps = header.arrived or header.time_steps
        self.received[header.round, steps] = weights
        if self.validation is None:
            return ok(header), None
        gradient = {n: weights[n] - goal for n, goal in zip(NAMES, self.validation, strict=True)}
        loss = sum(0.5 * float(g.double().square().sum()) for g in gradient.values())
        numbers = {"validation_loss": loss, "reports": float(self.samples)}
        if header.method != "fedtar":
            return ok(header, numbers), None
        path = [w for t in range(steps + 1) if (w := self.received.get((header.round, t))) is not None]
        products = t_numbers(gradient, path) if len(path) == steps + 1 else None
        return ok(header, numbers, {"t_numbers": products}), None


def random_pair(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw two tensors (3, 2), such as a :class:`QuadraticSite` exchanges."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 2, generator=generator), torch.randn(3, 2, generator=generator)


def last_checkpoint(run: FederatedController | Path) -> Checkpoint:
    """Read the last checkpoint of a run, or of its results folder."""
    folder = run if isinstance(run, Path) else run.results_folder
    return CheckpointFolder(folder / "checkpoint").last()[0]


def same_bits(first: Checkpoint, second: Checkpoint) -> bool:
    """Say whether two checkpoints hold the same weights and the same state of the method."""
    pairs = ((first.weights, second.weights), (first.method, second.method))
    return all(a.keys() == b.keys() and all(torch.equal(v, b[name]) for name, v in a.items()) for a, b in pairs)
