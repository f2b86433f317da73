"""FedAvg of other parts of the model than LoRA: the rivals of FedMRG's paper that differ in what travels.

All are FedAvg (:mod:`fedtar_flare.baselines.fedavg`) with as many exchanges and local updates; ``peft.kind`` says what
is trained and averaged:

===========  ========================================================================================================
``adalora``  Fed-AdaLoRA: a singular value decomposition B diag(E) A beside each targeted layer. PEFT prunes E by
             importance within each task, down to ``target_rank``. All of A, B and E is averaged, so that what one site
             pruned another may have kept; the importance is local, and begins anew in each task.
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

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedtar_flare.baselines.fedavg import CONTRACT as FEDAVG
from fedtar_flare.baselines.fedavg import FedAvgController, PooledExecutor
from fedtar_flare.baselines.peft_parts import WORDS, PEFTConfig, extend
from fedtar_flare.errors import ConfigError
from fedtar_flare.flare.recipe import MethodRecipe
from fedtar_flare.models.adapters.peft_file import OTHER_KINDS
from fedtar_flare.protocol.contract import Group
from fedtar_flare.protocol.messages import TaskHeader
from fedtar_flare.settings import build
from fedtar_flare.site.state import SiteState

if TYPE_CHECKING:
    from fedtar_flare.learning.learner import ReportLearner
    from fedtar_flare.models.report_generator import ReportGenerator

ADAPTER = Group("adapter", "averaged", (OTHER_KINDS,), "an adapter: AdaLoRA's or FedPara's factors, or VeRA's vectors")
PROMPTS = Group(
    "prompts", "averaged", (r"diagnosis\.(?:embeddings|states)",), "learnt vectors that stand for words, of all reports"
)
CONTRACT = replace(
    FEDAVG,
    method="fedpeft",
    title="FedAvg of another adapter than LoRA",
    groups=(ADAPTER, PROMPTS, *(group for group in FEDAVG.groups if group.name != ADAPTER.name)),
    tasks=tuple(
        replace(t, down=(*t.down, PROMPTS.name), up=(*t.up, PROMPTS.name) if t.up else ()) for t in FEDAVG.tasks
    ),
    server_classes=("fedtar_flare.baselines.fedpeft.FedPEFTController",),
    site_classes=("fedtar_flare.baselines.fedpeft.FedPEFTExecutor",),
)


class FedPEFTController(FedAvgController):
    """FedAvg of another part at the server: what FedAvg does."""

    contract = CONTRACT


class FedPEFTExecutor(PooledExecutor):
    """Trains what ``peft`` (:class:`PEFTConfig`) says; its other arguments are those of :class:`ReportExecutor`.

    Raises :class:`ConfigError` where nothing would be trained, or the rank is too small to be pruned.
    """

    contract = CONTRACT

    def __init__(self, *args: Any, peft: dict[str, Any] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.peft = peft
        config = self.peft_config = build(PEFTConfig, peft, "peft")
        if config.kind == "none" and not self.lora_config.exchange:
            raise ConfigError("peft.kind is none: lora.exchange must name the parameters that are trained and travel")
        if config.kind == "adalora" and not (config.target_rank or 1) < self.lora_config.rank:
            raise ConfigError(
                f"peft.kind is adalora: lora.rank is {self.lora_config.rank}, which must be above the rank that is "
                f"left, {config.target_rank or 1}"
            )
        if config.kind in WORDS:
            own = (r"diagnosis\.(?:embeddings|states)",)
            self.lora_config = self.lora_config.replace(exchange=(*self.lora_config.exchange, *own))

    def method_settings(self) -> tuple[Any, ...]:
        return (self.peft_config,)

    def extend(self, model: ReportGenerator) -> None:
        extend(model, self.peft_config.extension(self.model_config.lora_targets, self.seed))

    def learner_class(self) -> type[ReportLearner]:
        from fedtar_flare.baselines.peft_learner import PEFTLearner

        return PEFTLearner

    def learner_settings(self, header: TaskHeader, state: SiteState) -> dict[str, Any]:
        return {"peft": self.peft_config}

    def shared_learner(self, source: str) -> tuple[type[ReportLearner], dict[str, Any]]:
        """The same learner: all that it trains is shared."""
        return self.learner_class(), {"peft": self.peft_config}


class FedPEFTRecipe(MethodRecipe):
    """The job of FedAvg of another part; beside the arguments of :class:`MethodRecipe` it takes ``peft``."""

    contract = CONTRACT
    controller_class = FedPEFTController
    executor_class = FedPEFTExecutor
    own_groups = ("peft",)
