"""The learner of :mod:`fedtar_flare.baselines.fedpeft`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from fedtar_flare.baselines.peft_parts import WORDS, PEFTConfig, extend
from fedtar_flare.data.cohort import Sample
from fedtar_flare.learning.config import LoRAConfig
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.learning.training import Trained
from fedtar_flare.models.adapters.kinds import Bare, Kind, add_adapter, without_adapter
from fedtar_flare.models.adapters.lora import shared_parameters
from fedtar_flare.models.report_generator import ReportGenerator

if TYPE_CHECKING:
    from peft import PeftModel


class PEFTLearner(ReportLearner):
    """Trains another kind of adapter, learnt words, or parameters alone; arguments beside ``peft`` as its base."""

    def __init__(self, *, peft: PEFTConfig, seed: int, **settings: Any):
        self._peft, self._seed = peft, seed
        super().__init__(seed=seed, **settings)
        self._made = 0

    @property
    def _extension(self) -> dict[str, Any]:
        return self._peft.extension(self._config.lora_targets, self._seed)

    def extend(self, generator: ReportGenerator) -> None:
        extend(generator, self._extension)

    def adapt(self, generator: ReportGenerator, lora: LoRAConfig, seed: int) -> PeftModel:
        """PEFT's model; where there is no adapter, what stands for one."""
        kind = self._peft.kind
        if kind == "none" or kind in WORDS:
            return cast("PeftModel", without_adapter(generator, lora.exchange))
        return add_adapter(
            generator,
            cast(Kind, kind),
            targets=self._config.lora_targets,
            rank=lora.rank,
            alpha=lora.alpha,
            seed=seed,
            extra=lora.exchange,
            target_rank=self._peft.target_rank,
            updates=self.training.local_steps,
        )

    def describe(self) -> dict[str, Any]:
        """The parameters of an adapter are not the model's."""
        own = sum(p.numel() for n, p in shared_parameters(self.model).items() if n.startswith("base_model.model."))
        whole = sum(parameter.numel() for parameter in self.model.parameters())
        return super().describe() | {"extension": self._extension, "parameters": whole - own}

    def adapter_config(self) -> dict[str, Any]:
        """Empty where there is no adapter."""
        return {} if isinstance(self.model, Bare) else super().adapter_config()

    # ------------------------------------------------------------------ AdaLoRA
    def train(self, *args: Any, **kwargs: Any) -> Trained:
        """The importance by which AdaLoRA prunes begins anew."""
        self._made = 0
        if self._peft.kind == "adalora":
            self._tuner.rankallocator.reset_ipt()
        return super().train(*args, **kwargs)

    def after_backward(self, start: Mapping[str, torch.Tensor]) -> None:
        """AdaLoRA: the gradient of ``orthogonality / n sum_F |F F' - 1|`` over the n factors A and B'."""
        if self._peft.kind != "adalora" or not self._peft.orthogonality:
            return
        factors = {n: p for n, p in shared_parameters(self.model).items() if n.endswith((".lora_A", ".lora_B"))}
        with torch.enable_grad():
            penalties = [_off(p if name.endswith("A") else p.T) for name, p in factors.items()]
            penalty = self._peft.orthogonality * torch.stack(penalties).mean()
            for parameter, gradient in zip(
                factors.values(), torch.autograd.grad(penalty, [*factors.values()]), strict=True
            ):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def local_update(
        self, samples: Sequence[Sample], seed: str, optimizer: torch.optim.Optimizer, start: Mapping[str, torch.Tensor]
    ) -> float | None:
        """AdaLoRA: then entries of E are pruned by what the gradients of this task say of them."""
        loss = super().local_update(samples, seed, optimizer, start)
        if loss is not None and self._peft.kind == "adalora":
            self._made += 1
            self._tuner.update_and_allocate(self._made)
        return loss

    @property
    def _tuner(self) -> Any:
        return self.model.base_model


def _off(rows: torch.Tensor) -> torch.Tensor:
    """How far rows (r, n) are from orthonormal: the Frobenius norm of ``R R' - 1``."""
    return torch.linalg.norm(rows @ rows.T - torch.eye(len(rows), device=rows.device))
