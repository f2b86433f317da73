"""A site's classifier as a function of its module: losses and gradients on examples."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtar_flare.data.minimum_cell import winsorised_mean
from fedtar_flare.learning.device import choose_device
from fedtar_flare.learning.training import parts
from fedtar_flare.methods.fedkei.mixing import Kind, Layout, Vectors
from fedtar_flare.methods.fedkei.tasks import Examples
from fedtar_flare.models.adapters.lora import adapter_config, load_shared_state, shared_parameters, shared_state
from fedtar_flare.models.classifier import ClassifierConfig, build_classifier
from fedtar_flare.models.weights import fingerprint

EVALUATION_BATCH = 64


class TaskModel:
    """The classifier, with whatever module was loaded last; :attr:`start` is w0, the same bits at all sites."""

    min_cell: int = 1
    """Fewest patients whose extreme losses may show in a mean loss that leaves the site."""
    checkpoint: Callable[[], None] = staticmethod(lambda: None)
    """Called before each batch; it raises where the task is to stop."""
    batch_losses: Sequence[tuple[str, float]] = ()
    """Patient and loss of each example of the last batch."""

    def __init__(
        self,
        config: ClassifierConfig,
        *,
        device: str = "cpu",
        precision: str = "float32",
        local_paths: Mapping[str, Path | None] | None = None,
    ):
        self.config = config
        self.classifier = build_classifier(config, local_paths)
        size = sum(parameter.numel() for parameter in self.classifier.parameters())
        device, self._autocast = choose_device(device, precision, size)
        self.device = torch.device(device)
        self.start = shared_state(self.classifier)
        self.layout = Layout.of(self.start)
        self.fingerprint = fingerprint(self.classifier)
        self.classifier.to(self.device)
        self.parameters = shared_parameters(self.classifier)

    def state(self) -> dict[str, Tensor]:
        """The loaded module, float32 on the CPU."""
        return shared_state(self.classifier)

    def load(self, module: Mapping[str, Tensor]) -> None:
        """Load a module; :class:`ExchangeError` names a tensor that does not fit."""
        load_shared_state(self.classifier, module)

    def describe(self) -> dict[str, Any]:
        """Name, sizes and PEFT's configuration of the adapter, without any path of the site."""
        trained = sum(value.numel() for value in self.start.values())
        return {
            "base_model": self.config.encoder_name or f"fedtar_flare classifier '{self.config.encoder}'",
            "adapter": self.config.adapter,
            "adapter_config": adapter_config(self.classifier),
            "parameters": sum(p.numel() for p in self.classifier.parameters()) - trained,
            "trained": trained,
            "fingerprint": self.fingerprint,
            "config": self.config.to_dict(),
        }

    # ------------------------------------------------------------------ with the loaded module
    def logits(self, examples: Examples, indices: Sequence[int]) -> Tensor:
        """Logits (B, 2), float32 or finer."""
        self.checkpoint()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            logits: Tensor = self.classifier(examples.batch(indices).to(self.device))
        return logits.float() if logits.dtype == torch.bfloat16 else logits

    def cross_entropy(self, logits: Tensor, examples: Examples, indices: Sequence[int]) -> Tensor:
        """Mean cross-entropy of these examples; sets :attr:`batch_losses`."""
        truth = examples.labels[list(indices)].to(logits.device)
        each = F.cross_entropy(logits.detach(), truth, reduction="none").tolist()
        self.batch_losses = [(examples.patients[i], loss) for i, loss in zip(indices, each, strict=True)]
        return F.cross_entropy(logits, truth)

    def gradients(
        self, examples: Examples, indices: Sequence[int], parameters: Mapping[str, Tensor] | None = None
    ) -> tuple[float, dict[str, Tensor]]:
        """Mean loss, and its gradient in these parameters of the module (None: all)."""
        parameters = self.parameters if parameters is None else parameters
        loss = self.cross_entropy(self.logits(examples, indices), examples, indices)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        return float(loss.detach()), dict(zip(parameters, gradients, strict=True))

    def fisher(self, examples: Examples) -> dict[str, Tensor]:
        """Diagonal of the empirical Fisher information: mean of examples' squared gradients; float32, on the CPU."""
        squares = {name: torch.zeros_like(value) for name, value in self.parameters.items()}
        for i in range(len(examples.labels)):
            for name, gradient in self.gradients(examples, [i])[1].items():
                squares[name].addcmul_(gradient, gradient, value=1 / len(examples.labels))
        return {name: value.float().cpu() for name, value in sorted(squares.items())}

    @torch.no_grad()
    def scores(self, examples: Examples) -> Tensor:
        """Scores (n,) of the new disease in 0..1, float64, on the CPU."""
        everything = range(len(examples.labels))
        logits = [self.logits(examples, part).double().cpu() for part in parts(everything, EVALUATION_BATCH)]
        return torch.cat([part.softmax(1)[:, 1] for part in logits] or [torch.zeros(0, dtype=torch.float64)])

    # ------------------------------------------------------------------ as functions of theta (d,) by kind
    def vectors(self, module: Mapping[str, Tensor]) -> dict[Kind, Tensor]:
        """A module as vectors (d,), of the classifier's dtype and on its device."""
        like = next(iter(self.parameters.values()))
        return {kind: value.to(like) for kind, value in self.layout.vectors(module).items()}

    @torch.no_grad()
    def load_vectors(self, theta: Vectors) -> None:
        """Load theta, in the classifier's own precision."""
        tensors = self.layout.tensors(theta)
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[name])

    def gradient(self, theta: Vectors, examples: Examples, indices: Sequence[int], size: int) -> dict[Kind, Tensor]:
        """Gradient of the mean loss of all these examples, ``size`` at a time."""
        self.load_vectors(theta)
        mean = {kind: torch.zeros_like(value) for kind, value in theta.items()}
        for chosen in parts(indices, size):
            for kind, value in self.layout.vectors(self.gradients(examples, chosen)[1]).items():
                mean[kind] += value * (len(chosen) / len(indices))
        return mean

    @torch.no_grad()
    def mean_loss(self, theta: Vectors, examples: Examples) -> float | None:
        """Mean loss of all examples, as it may leave the site; None without examples."""
        count = len(examples.labels)
        if not count:
            return None
        self.load_vectors(theta)
        losses: list[tuple[str, float]] = []
        for part in parts(range(count), EVALUATION_BATCH):
            self.cross_entropy(self.logits(examples, part), examples, part)
            losses += self.batch_losses
        return winsorised_mean(losses, self.min_cell)
