"""FedAvg of other parts of the model than LoRA: the rivals of FedMRG's paper that differ in what is exchanged.

All are FedAvg with as many exchanges and local updates; ``peft.kind`` says what is trained and averaged:

===========  ========================================================================================================
``adalora``  Fed-AdaLoRA: a singular value decomposition B diag(E) A for each targeted layer. PEFT prunes E by
             importance within each task, down to half of ``lora.rank`` in the mean. All of A, B and E is averaged, so
             that what one site pruned another may have kept; the importance is local, and begins anew in each task.
``vera``     Fed-VeRA: random factors that all layers and sites share; two vectors of each layer travel.
``loha``     FedPara's product of two low-rank products, by element. PEFT has it for the change of W, not for W itself.
``prompt``   Fed-Prompt: the embeddings of some words before the begin token.
``prefix``   Fed-Prefix: such words in every layer of the decoder.
``none``     no adapter: what ``lora.exchange`` names is trained and travels whole. With encoder, pooling and map before
             a frozen decoder, it is R2GenGPT's form; with all but what takes pixels or tells words, FedAvg of all.
===========  ========================================================================================================

``lora.rank`` and ``lora.alpha`` are those of the kind; the scale is ``alpha / rank`` but for VeRA, which has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from pydantic import Field
from torch import nn

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.settings import RunSettings, Settings
from fedtar_flare.data.cohort import Sample, shown_visits
from fedtar_flare.learning.config import LoRAConfig
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.methods.fedavg import METHOD as FEDAVG
from fedtar_flare.methods.fedavg import PooledSite
from fedtar_flare.models import learned_prompts
from fedtar_flare.models.adapters.kinds import Kind, Unadapted, add_adapter, replace_conv1d, schedule, without_adapter
from fedtar_flare.models.adapters.peft_file import OTHER_KINDS
from fedtar_flare.models.report_generator import ReportGenerator
from fedtar_flare.protocol.contract import Group

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER = Group("adapter", "averaged", OTHER_KINDS, "an adapter: AdaLoRA's or FedPara's factors, or VeRA's vectors")
PROMPTS = Group("prompts", "averaged", ("diagnosis.*",), "learnt vectors that stand for words, of all reports")
ORTHOGONALITY = 0.5
"""AdaLoRA's weight of the penalty on factors that are not orthogonal, PEFT's default."""
WORDS = ("prompt", "prefix")
"""Kinds that learn words instead of an adapter."""


class PEFTConfig(Settings):
    """What is trained and averaged."""

    kind: Literal["adalora", "vera", "loha", "prompt", "prefix", "none"] = Field(
        "adalora", description="of what travels; 'none': no adapter, but the parameters that lora.exchange names"
    )
    prompts: int = Field(16, ge=1, le=512, description="prompt, prefix: how many words are learnt")

    def extension(self, targets: Sequence[str], seed: int) -> dict[str, Any]:
        """Arguments of :func:`extend`, as the checkpoint stores them."""
        return {"kind": self.kind, "prompts": self.prompts, "targets": targets, "seed": seed}


def extend(generator: ReportGenerator, settings: dict[str, Any]) -> None:
    """Prepare a base model for its adapter: add learnt words, or for LoHa make its layers plain linear ones."""
    if settings["kind"] in WORDS:
        learned_prompts.extend(generator, settings["prompts"], settings["kind"] == "prefix", settings["seed"])
    elif settings["kind"] == "loha":
        replace_conv1d(generator, settings["targets"])


class PEFTSite(PooledSite):
    """Trains the parameters that ``peft.kind`` names."""

    @staticmethod
    def resolve(given: RunSettings, source: str) -> RunSettings:
        """With the learnt words exchanged too."""
        if given.peft.kind not in WORDS:
            return given
        return given.replace(lora=given.lora.replace(exchange=(*given.lora.exchange, *PROMPTS.names)))

    def check(self) -> None:
        """Refuse a job that trains nothing, and a rank too small to be pruned."""
        peft, lora = self.settings.peft, self.settings.given.lora
        if peft.kind == "none" and not lora.exchange:
            raise ConfigError("peft.kind is none: lora.exchange must name the parameters that are trained and travel")
        if peft.kind == "adalora" and lora.rank == 1:
            raise ConfigError("lora.rank 1 cannot be pruned: adalora needs at least 2")

    def extend(self, model: ReportGenerator) -> None:
        extend(model, self.settings.peft.extension(self.settings.model.lora_targets, self.seed))

    def shared_learner(self, source: str) -> tuple[type[ReportLearner], dict[str, Any]]:
        return self.learner_class, {"peft": self.settings.peft}


class PEFTLearner(ReportLearner):
    """Trains another kind of adapter, learnt words, or parameters of the model."""

    equal_layers = ""  # no plain LoRA

    def __init__(self, *, peft: PEFTConfig, seed: int, **settings: Any):
        self._peft, self._seed = peft, seed
        super().__init__(seed=seed, **settings)
        self._made = 0  # updates of the task

    @property
    def _extension(self) -> dict[str, Any]:
        return self._peft.extension(self._config.lora_targets, self._seed)

    def extend(self, generator: ReportGenerator) -> None:
        extend(generator, self._extension)

    def adapt(self, generator: ReportGenerator, lora: LoRAConfig, seed: int) -> PeftModel:
        """PEFT's model, or a stand-in of the same form where there is no adapter."""
        kind = self._peft.kind
        if kind in ("none", *WORDS):
            return cast("PeftModel", without_adapter(generator, lora.exchange))
        return add_adapter(
            generator,
            cast(Kind, kind),
            targets=self._config.lora_targets,
            rank=lora.rank,
            alpha=lora.alpha,
            seed=seed,
            extra=lora.exchange,
            updates=self.training.local_steps,
        )

    def describe(self) -> dict[str, Any]:
        """With the number of the model's parameters, the adapter's excluded."""
        adapter = sum(p.numel() for n, p in self.shared_parameters.items() if n.startswith("base_model.model."))
        whole = sum(parameter.numel() for parameter in self.model.parameters())
        return super().describe() | {"extension": self._extension, "parameters": whole - adapter}

    def adapter_config(self) -> dict[str, Any]:
        """The same at all sites: AdaLoRA's schedule in it is never that of a site's own number of updates."""
        if isinstance(self.model, Unadapted):
            return {}
        planned = schedule(self.training.local_steps) if self._peft.kind == "adalora" else {}
        return super().adapter_config() | planned

    # ------------------------------------------------------------------ AdaLoRA
    def shared_optimizer(self, parameters: Sequence[nn.Parameter], epochs: float) -> torch.optim.Optimizer:
        """AdaLoRA: forget the importance by which the task before pruned, and prune within this task's updates."""
        self._made = 0
        if self._peft.kind == "adalora":
            base, shown = cast(Any, self.model.base_model), shown_visits(self.cohort, None, self.min_cell)
            base.rankallocator.reset_ipt()
            updates = round(epochs * max(1, shown) / self.training.batch_size)
            vars(base.rankallocator.peft_config).update(schedule(updates))
        return super().shared_optimizer(parameters, epochs)

    def after_backward(self, start: Mapping[str, torch.Tensor]) -> None:
        """AdaLoRA: the gradient of ``0.5 / n sum_F |F F' - 1|`` over the n factors A and B'."""
        if self._peft.kind != "adalora":
            return
        factors = {n: p for n, p in self.shared_parameters.items() if n.endswith((".lora_A", ".lora_B"))}
        penalties = []
        with torch.enable_grad():
            for name, parameter in factors.items():
                rows = parameter if name.endswith("A") else parameter.T
                penalties.append(torch.linalg.norm(rows @ rows.T - torch.eye(len(rows), device=rows.device)))
            gradients = torch.autograd.grad(ORTHOGONALITY * torch.stack(penalties).mean(), [*factors.values()])
        for parameter, gradient in zip(factors.values(), gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def local_update(
        self, samples: Sequence[Sample], seed: str, optimizer: torch.optim.Optimizer, start: Mapping[str, torch.Tensor]
    ) -> float | None:
        """AdaLoRA: after the update, prune entries of E by the importance that this task's gradients give them."""
        loss = super().local_update(samples, seed, optimizer, start)
        if loss is not None and self._peft.kind == "adalora":
            self._made += 1
            cast(Any, self.model.base_model).update_and_allocate(self._made)
        return loss


METHOD = FEDAVG.derive(
    "fedpeft",
    "FedAvg of another adapter than LoRA",
    contract={
        "groups": (ADAPTER, PROMPTS, *(group for group in FEDAVG.contract.groups if group.name != ADAPTER.name)),
        "tasks": tuple(
            replace(t, down=(*t.down, PROMPTS.name), up=(*t.up, PROMPTS.name) if t.up else ())
            for t in FEDAVG.contract.tasks
        ),
    },
    site=PEFTSite,
    learner=PEFTLearner,
    settings={"peft": PEFTConfig},
    extend=extend,
    mixes_ranks=False,
    paper="",
)
