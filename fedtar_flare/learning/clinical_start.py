"""Warm start on a hospital's own studies; a job takes the folder as ``model.weights``."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import write_json
from fedtar_flare.data.cells import patient_digest
from fedtar_flare.data.cohort import Cohort, Sample
from fedtar_flare.imaging.cache import Prepared
from fedtar_flare.imaging.pipeline import images_of, prepare_cohort
from fedtar_flare.imaging.transform_list import Spec
from fedtar_flare.learning.pretraining import PretrainingConfig, pretrain, write_reports
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import ModelConfig
from fedtar_flare.models.tokenizer import ReportTokenizer
from fedtar_flare.models.weights import save_weights, training_patients

WEIGHTS, ABOUT = "model.safetensors", "warmstart.json"


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
    from fedtar_flare.metrics.language import language_scores

    if not samples:
        return {}
    drafts = write_reports(model, tokenizer, PreparedImages(samples))
    scores = language_scores([sample.visit.report for sample in samples], drafts)
    return {name: round(scores[name], 4) for name in ("bleu_4", "rouge_l", "cider")}
