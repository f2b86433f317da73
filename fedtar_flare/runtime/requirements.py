"""What a job asks of a site, from its settings alone: for the site's bounds, and as text for people."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import TYPE_CHECKING, Any

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.imaging.limits import machine_memory
from fedtar_flare.learning.config import LoRAConfig, TrainingConfig
from fedtar_flare.models.config import ModelConfig
from fedtar_flare.protocol.contract import Contract
from fedtar_flare.site.admission import JobRequest, Reach
from fedtar_flare.version import __version__

if TYPE_CHECKING:
    from fedtar_flare.data.cells import Timeline
    from fedtar_flare.models.report_generator import ReportGenerator
    from fedtar_flare.site.site_file import SiteConfig

LICENSES = {"microsoft/cvt-21-384-22k": "Apache-2.0", "distilgpt2": "Apache-2.0"} | {
    "google/medgemma-4b-it": "Health AI Developer Foundations terms of use"
}
"""As their model cards state; for other models see theirs."""


@dataclass(frozen=True)
class AdaptedModel:
    """A report generator and its adapter, described without weights."""

    config: ModelConfig
    """The base model."""
    lora: LoRAConfig
    """The adapter, of this site's rank."""
    extend: Callable[[ReportGenerator], None] = lambda model: None
    """Adds to a model what the method gives it."""
    personal_parameters: Callable[[int], int] = lambda values: 0
    """Most parameters that the method trains for itself, given the number of values of the shared adapter."""

    @property
    def names(self) -> tuple[str, ...]:
        """Hub names or local folders of the model's parts."""
        return tuple(name for name in (self.config.encoder_name, self.config.decoder_name) if name)

    def sizes(self) -> dict[str, int]:
        """Count ``parameters`` and ``exchanged`` values."""
        from fedtar_flare.models.outline import outline

        if any(not Path(name).expanduser().is_dir() for name in self.names):
            return {}  # on a hub: nothing is fetched to describe a job
        try:
            model = outline(self.config, self.extend)
        except ConfigError:
            return {}
        whole = sum(model.tensors[name] for name in model.exchanged(self.lora.exchange))
        factors = model.lora_values(self.config.lora_targets, self.lora.rank)
        return {"parameters": model.parameters, "exchanged": factors + whole}

    def reach(self, models: Mapping[str, Path | None] | None) -> Reach:
        """Work out what the job changes of the model."""
        from fedtar_flare.models.outline import UNKNOWN, outline

        config = self.config
        made_of = UNKNOWN if models is None else outline(config.with_local_paths(models), self.extend)
        values = made_of.lora_values(config.lora_targets, self.lora.rank)
        return Reach(
            adapted={"model.lora_targets": made_of.targeted(config.lora_targets)},
            whole={"lora.exchange": made_of.exchanged(self.lora.exchange)},
            barred=made_of.barred,
            parameters=0 if models is None else made_of.parameters + values + self.personal_parameters(values),
        )


def update_memory(
    model: AdaptedModel, training: TrainingConfig, earlier: int, half: bool, on_cpu: bool = False
) -> dict[str, float]:
    """Bytes that an update needs, by what for: an estimate, before any weight is read.

    The weights; what is trained, with its gradient and AdamW's two moments; and for each word of a micro-batch what
    layers keep for the backward pass, 12 values of their width and 4 of their inner width (or with checkpointing their
    inputs alone), and the logits; of images, what :func:`encoder_memory` says. ``earlier`` visits are shown too;
    ``half``: in bfloat16 autocast. ``on_cpu``: with what the process has already, and twice what is kept, since what
    is freed in between does not all go back.
    """
    from fedtar_flare.models.outline import encoder_memory, outline
    from fedtar_flare.models.vlm import inputs_length

    config, seen, texts = model.config, 0, 1 + earlier
    base = outline(config, model.extend).parameters
    if config.family == "vlm":
        prompt, text = inputs_length(config, earlier)
    else:  # of visits before no gradient is taken; by cross-attention, an image's token takes less than a word
        seen, tokens, text = encoder_memory(config)
        prompt, texts = tokens if config.decoder == "prefix" else tokens // 4, 1
    inner = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * text.hidden_size
    reports = min(training.micro_batch or training.batch_size, training.batch_size)
    layer = (12 * text.hidden_size + 4 * inner) * (3 if half else 4)
    inputs = 4 * text.num_hidden_layers * text.hidden_size
    word = inputs + layer if training.gradient_checkpointing else text.num_hidden_layers * layer
    stored = (prompt + texts * config.max_length) * word + 12 * config.max_length * text.vocab_size
    stored += seen * (3 if half else 4) / 4
    process = {"the process": float(1024 * getrusage(RUSAGE_SELF).ru_maxrss)} if on_cpu else {}
    return process | {
        "weights": base * {"float32": 4, "bfloat16": 2, "4bit": 0.57}[config.decoder_dtype],
        "what is trained": 16.0 * (model.reach({}).parameters - base),
        f"{reports} reports at once": float((2 if on_cpu else 1) * reports * stored),
    }


def require_memory(model: AdaptedModel, training: TrainingConfig, timeline: Timeline, site: SiteConfig) -> None:
    """Refuse a model whose :func:`update_memory` is not here; one on a GPU may halve its batches until they fit."""
    import torch

    from fedtar_flare.learning.device import choose_device

    located = replace(model, config=model.config.with_local_paths(site.policy.models))
    device, half = choose_device(site.device, site.precision, located.reach({}).parameters)
    if model.config.family != "vlm" and device != "cpu":
        return
    needs = update_memory(located, training, timeline.priors if timeline.prior_kinds else 0, half, device == "cpu")
    free = machine_memory() if device == "cpu" else torch.cuda.mem_get_info(device)[0]
    if (needed := sum(needs.values())) > free:
        listed = ", ".join(f"{size / 1e9:.2f} of {what}" for what, size in needs.items())
        name = model.config.decoder_name or model.config.preset
        text = f"model '{name}' needs about {needed / 1e9:.2f} GB: {listed}; {device} has {free / 1e9:.2f} GB. Set "
        text += "training.micro_batch, training.gradient_checkpointing or model.decoder_dtype, or the site's lora_rank"
        raise ConfigError(text, public="the model needs more memory than the site has")


def report_request(model: AdaptedModel, training: TrainingConfig, rounds: int, time_steps: int) -> JobRequest:
    """Describe what a job that trains a report generator asks of a site."""
    config, lora = model.config, model.lora
    steps = {"training.local_steps": training.local_steps} if training.local_epochs is None else {}
    clip = {"training.max_grad_norm": training.max_grad_norm} if training.max_grad_norm > 0 else {}
    return JobRequest(
        patients={"reports of an update": max(steps.values(), default=1) * training.batch_size},
        local_steps=steps,
        batch_size={"training.batch_size": training.batch_size},
        gradient_scale=clip | {"lora.alpha / rank": lora.alpha / lora.rank},
        learning_rate={"training.lr": training.lr},
        decay={"training.lr x weight_decay": training.lr * training.weight_decay},
        rank={"lora.rank": lora.rank},
        pixels={"pixels of a study": (config.slices + config.lateral) * config.image_size**2},
        tokens={
            "model.max_length": config.max_length,
            "model.decoder_positions": config.decoder_config["n_positions"],
            "model.slices x queries": config.slices * config.queries,
        },
        beams={"model.num_beams": config.num_beams},
        rounds={"rounds": rounds},
        time_steps={"time steps": time_steps},
        models={f"model.{setting}": name for setting, name in config.named.items()},
        reach=model.reach,
        noise_multiplier={"training.noise_multiplier": training.noise_multiplier or 0.0},
    )


def describe(recipe: Any) -> str:
    """Write what a job needs of a site, and what leaves it, as text for people."""
    strategy, config, contract = recipe.executor.strategy, recipe.controller.config, recipe.contract
    adapted, cell = strategy.adapted_model(config.time_steps), max(5, strategy.settings.data.min_cell)
    model, sizes = adapted.config, adapted.sizes()
    studies = "radiographs" if model.slices == 1 else "chest CT series"
    material = f"over up to {config.time_steps} time steps, with reports" if strategy.reads_reports else "with labels"
    columns = ", ".join(["patient_id", "study_datetime", "image", *strategy.columns])
    unit = "time step" if strategy.reads_reports else "task"
    if model.weights == "small" or not adapted.names:
        by = "shipped with fedtar_flare" if model.weights == "small" else "made by the job"
        parts = f"{by} (licence: Apache-2.0)"
    else:
        parts = "; ".join(f"{n} (licence: {LICENSES.get(n, 'see its model card')})" for n in adapted.names)
    size = "its size is known where its parts are local folders."
    if sizes:
        size = f"{sizes['parameters']:,} parameters, {4 * sizes['parameters']:,} bytes in memory before training."
    exchanged = sizes.get("exchanged") if contract.shares else 0
    gpu = "not needed" if strategy.preset in ("small", "tiny", "vlm-tiny") else "strongly advised"
    lines = [
        f"Job {recipe.name}, fedtar_flare {__version__}. A site that joins needs:",
        "",
        f"data: {studies} of patients {material}, as a manifest with the columns {columns}. It trains at a {unit} "
        f"where it has at least {cell} patients with training visits, and is passed over at the others.",
        *(f"images: the job adds to their preparation {json.dumps(one)}" for one in strategy.settings.data.transforms),
        f"model: {parts}. Weights: {model.weights or 'those of the parts'}; {size}",
        f"computer: a GPU is {gpu}; Python 3.11 to 3.13; a cache of {3 * model.slices * model.image_size**2} bytes a "
        "study.",
        f"work: {config.num_rounds} rounds, {config.time_steps} time steps, {strategy.work()}, at most "
        f"{config.step_time_limit} s a task.",
        "",
        f"{contract.title}: what leaves the site, and in which task. Nothing else can.",
        *leaving(contract),
        f"at each exchange: {exchanged:,} values ({4 * exchanged:,} bytes)." if exchanged else "",
        f"stays at the site: {contract.stays}, and whatever is not named above.",
        *([f"CAUTION: {contract.caution}."] if contract.caution else []),
    ]
    return "\n".join(textwrap.fill(line, 110, subsequent_indent="  ") for line in lines)


def leaving(contract: Contract) -> Iterator[str]:
    """Write what may leave a site by a method's contract, line by line: tasks, their tensors and fields."""
    sends = {"initial": "full weights, of the one site that is asked for them", "difference": "what changed"}
    groups = {group.name: group for group in contract.groups}
    for task in contract.tasks:
        yield f"{task.name} ({task.about}):"
        for group in (groups[name] for name in task.up):
            form = sends[task.sends] if group.form == "averaged" else group.form
            yield f"  tensors {group.name}: {group.about} ({form}){'; PERSONAL DATA' if group.personal else ''}"
        yield from (f"  {field.name}: {field.about}" for field in task.fields)
