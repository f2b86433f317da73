"""Warm start: train a whole report generator before any federation; a job takes the folder as ``model.weights``."""

import math
import time
from collections.abc import Callable, Collection, Sequence
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from pydantic import Field

from fedtar_flare.core.draws import orders
from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import write_json
from fedtar_flare.core.settings import Settings
from fedtar_flare.data.cells import patient_digest
from fedtar_flare.data.cohort import Cohort, Sample
from fedtar_flare.imaging.batch import collate
from fedtar_flare.imaging.cache import Prepared
from fedtar_flare.imaging.pipeline import images_of, prepare_cohort
from fedtar_flare.imaging.transform_list import Spec
from fedtar_flare.learning.training import parts
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import ModelConfig
from fedtar_flare.models.report_generator import ReportGenerator, report_loss
from fedtar_flare.models.tokenizer import ReportTokenizer
from fedtar_flare.models.weights import save_weights, training_patients

GENERATION_BATCH = 20
WEIGHTS, ABOUT = "model.safetensors", "warmstart.json"
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
    pairs = chain.from_iterable(orders(len(reports), config.seed))  # a batch may span two epochs
    losses: list[float] = []
    model.train()
    _statistics(model, batch_norm)
    started = time.monotonic()
    for step in range(1, config.steps + 1):
        if step > 0.8 * config.steps:
            _statistics(model, False)  # the last updates fit the weights to the statistics that will stay
        chosen = list(islice(pairs, config.batch_size))
        memory, mask = model.encode(collate([images[i] for i in chosen]).to(device))
        input_ids, labels = (ids.to(device) for ids in tokenizer.batch([reports[i] for i in chosen]))
        loss = report_loss(model.decode(memory, mask, input_ids)[0], labels).mean()
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


class PreparedImages(Sequence[Prepared]):
    """Prepared images of samples, loaded from the cache one by one: a corpus need not fit in memory."""

    def __init__(self, samples: Sequence[Sample]):
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return images_of(self._samples[index])
        return images_of([self._samples[index]])[0]


def warm_start(
    config: ModelConfig,
    cohort: Cohort,
    cache: Path,
    settings: PretrainingConfig,
    out: Path,
    *,
    train: Literal["all", "new"] = "all",
    transforms: Sequence[Spec] = (),
    device: str = "cpu",
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train a report generator on training patients, score it on validation patients, and write it to a folder.

    Images are prepared in the folder ``cache``.
    """
    if (out / WEIGHTS).exists():
        raise ConfigError(f"{out / WEIGHTS} is there already; name another folder, or delete it first")
    cohort = prepare_cohort(cohort, config, cache, transforms)
    samples, held_out = cohort.samples("train"), cohort.samples("validation")
    reports = [sample.visit.report for sample in samples]
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(config)
    model = build_model(config).to(device)
    new = list(model.untrained)
    if train == "new" and not new:
        raise ConfigError("every weight of this model is pre-trained: there is nothing new to train; choose all")
    only = new if train == "new" else None
    say(f"{len(samples)} training studies, {len(held_out)} validation studies")
    say(f"{len(only or list(model.parameters()))} tensors are trained")
    how: dict[str, Any] = {"only": only, "batch_norm": any(name.startswith("encoder.") for name in new)}
    pretrain(model, tokenizer, PreparedImages(samples), reports, settings, say=say, **how)
    digests = [patient_digest(patient, cohort.key) for patient in {sample.visit.patient_id for sample in samples}]
    save_weights(model, out / WEIGHTS, patients=digests)
    about = {
        "preset": config.preset,
        "training_studies": len(samples),
        "validation_studies": len(held_out),
        "left_out": cohort.rejected,
        "train": train,
        "settings": settings.to_dict(),
        "validation": _scores(model, tokenizer, held_out),
    }
    write_json(out / ABOUT, about)
    return about


def refuse_known_tests(cohort: Cohort, weights: str | None) -> None:
    """Refuse weights that were trained on patients whom a site tests on."""
    known = training_patients(Path(weights)) if weights else frozenset()
    tested = {sample.visit.patient_id for sample in cohort.samples("test")} if known else set()
    if n := sum(patient_digest(patient_id, cohort.key) in known for patient_id in tested):
        text = f"{weights} was trained on {n} of the {len(tested)} patients that this site tests on, so scores would "
        text += "be too good: make a warm start with the site's own split (fedtar warmstart --site-file)"
        raise ConfigError(text, public="the starting weights were trained on patients that the site tests on")


@torch.no_grad()
def _scores(model: Any, tokenizer: ReportTokenizer, samples: Sequence[Sample]) -> dict[str, float]:
    from fedtar_flare.metrics.language import report_statistics

    if not samples:
        return {}
    drafts = write_reports(model, tokenizer, PreparedImages(samples))
    scores = report_statistics([sample.visit.report for sample in samples], drafts).scores()
    return {name: round(scores[name], 4) for name in ("bleu_4", "rouge_l", "cider")}
