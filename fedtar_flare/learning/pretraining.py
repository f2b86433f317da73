"""Train a whole report generator before any federation, on pairs of image and report."""

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import attrgetter
from statistics import fmean
from typing import Any

import torch
from pydantic import Field

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.settings import Settings
from fedtar_flare.imaging.batch import collate
from fedtar_flare.imaging.cache import Prepared
from fedtar_flare.learning.training import parts
from fedtar_flare.models.report_generator import ReportGenerator, report_loss
from fedtar_flare.models.tokenizer import ReportTokenizer

GENERATION_BATCH = 20
WEIGHT_DECAY, MAX_GRAD_NORM = 0.05, 1.0
EVERY = 25  # updates between two lines of progress


class PretrainingConfig(Settings):
    """Settings of a warm start."""

    steps: int = Field(1500, ge=1, description="optimiser updates")
    batch_size: int = Field(8, ge=1, description="paired reports per update")
    lr: float = Field(1.5e-3, gt=0, description="highest AdamW learning rate")
    seed: int = Field(0, description="seed of the order of the samples")


def pretrain(
    model: ReportGenerator,
    tokenizer: ReportTokenizer,
    images: Sequence[Prepared],
    reports: Sequence[str],
    config: PretrainingConfig,
    *,
    say: Callable[[str], object] = lambda line: None,
    only: Collection[str] | None = None,
    batch_norm: bool = True,
) -> None:
    """Train ``model`` in place on pairs of ``images`` and ``reports``; ``only`` names what is trained.

    The rate rises over a tenth of the updates, at most 100, then falls by a cosine to a twentieth.
    """
    model.require_parts("a warm start")
    if not images:
        raise ConfigError("a warm start needs pairs of images and reports: there are none")
    device = next(model.parameters()).device
    frozen = [p for n, p in model.named_parameters() if p.requires_grad and only is not None and n not in only]
    for parameter in frozen:
        parameter.requires_grad_(False)
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay} for decay in (WEIGHT_DECAY, 0.0)]
    for parameter in filter(attrgetter("requires_grad"), model.parameters()):
        groups[0 if parameter.dim() > 1 else 1]["params"].append(parameter)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.98))
    warm = min(100, config.steps // 10)

    def share_of_lr(step: int) -> float:
        if step < warm:
            return (step + 1) / (warm + 1)
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, config.steps - warm)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_lr)
    pairs = _endless(len(reports), config.batch_size, config.seed)
    losses: list[float] = []
    model.train()
    _statistics(model, batch_norm)
    started = time.monotonic()
    for step in range(1, config.steps + 1):
        if step > 0.8 * config.steps:
            _statistics(model, False)  # the last updates fit the weights to the statistics that will stay
        chosen = next(pairs)
        memory, mask = model.encode(collate([images[i] for i in chosen]).to(device))
        input_ids, labels = (ids.to(device) for ids in tokenizer.batch([reports[i] for i in chosen]))
        seen = {"encoder_hidden_states": memory, "encoder_attention_mask": mask}
        loss = report_loss(model.decoder(input_ids=input_ids, use_cache=False, **seen).logits, labels).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        losses.append(loss.item())
        if step % EVERY == 0 or step == config.steps:
            rate = step / (time.monotonic() - started)
            left = f"{(config.steps - step) / rate / 60:.1f} min left"
            say(f"step {step}/{config.steps}, loss {fmean(losses):.3f}, {rate:.2f}/s, {left}")
            losses.clear()
    for parameter in frozen:
        parameter.requires_grad_(True)
    model.eval()


def write_reports(model: ReportGenerator, tokenizer: ReportTokenizer, images: Sequence[Prepared]) -> list[str]:
    """Reports that the model generates for these images, in their order."""
    device = next(model.parameters()).device
    drafts = []
    for part in parts(images, GENERATION_BATCH):
        drafts += [tokenizer.decode(row) for row in model.generate(collate(part).to(device)).tolist()]
    return drafts


def _statistics(model: ReportGenerator, learn: bool) -> None:
    """Set whether the encoder's BatchNorm layers normalise by the batch and learn its statistics."""
    for module in model.encoder.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.train(learn)


def _endless(number: int, size: int, seed: int) -> Iterator[list[int]]:
    """Batches of indices through shuffled epochs; a batch may span two epochs."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while True:
        while len(order) < size:
            order += torch.randperm(number, generator=generator).tolist()
        yield order[:size]
        order = order[size:]
