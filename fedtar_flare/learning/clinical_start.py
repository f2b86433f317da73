"""Warm start on a hospital's own studies or reports; a job takes the folder as ``model.weights``."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import read_lines, write_json
from fedtar_flare.data.cells import SPLITS, patient_digest
from fedtar_flare.data.cohort import Cohort, Sample, Split
from fedtar_flare.data.sources.tables import rows_of
from fedtar_flare.imaging.cache import Prepared
from fedtar_flare.imaging.pipeline import images_of, prepare_cohort
from fedtar_flare.imaging.transform_list import Spec
from fedtar_flare.learning.pretraining import PretrainingConfig, pretrain, write_reports
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import ModelConfig
from fedtar_flare.models.tokenizer import ReportTokenizer
from fedtar_flare.models.weights import save_weights, training_patients

WEIGHTS, TOKENIZER, ABOUT = "model.safetensors", "tokenizer.json", "warmstart.json"


@dataclass(frozen=True)
class Corpus:
    """Training data of a warm start; ConfigError where the cohorts mix CT and radiographs."""

    pairs: tuple[tuple[Cohort, Path], ...]
    """Cohorts, each with the folder of its prepared images."""
    texts: tuple[str, ...] = ()
    """Reports without images."""

    def __post_init__(self) -> None:
        if len({cohort.modality for cohort, _ in self.pairs}) > 1:
            raise ConfigError("the sites mix CT and radiographs: one model learns from one of them")

    def samples(self, split: Split) -> list[Sample]:
        """Return one split's samples; a patient in several splits is in the one furthest from training."""
        later, samples = set[str](), list[Sample]()
        for cohort, _ in self.pairs:
            for other in SPLITS[SPLITS.index(split) + 1 :]:
                later |= {sample.visit.patient_id for sample in cohort.samples(other)}
            samples += cohort.samples(split)
        return [sample for sample in samples if sample.visit.patient_id not in later]


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
    corpus: Corpus,
    settings: PretrainingConfig,
    out: Path,
    *,
    train: Literal["all", "new"] = "all",
    vocabulary: int | None = None,
    transforms: Sequence[Spec] = (),
    device: str = "cpu",
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train a report generator on training patients, score it on validation patients, and write it to a folder."""
    if (out / WEIGHTS).exists():
        raise ConfigError(f"{out / WEIGHTS} is there already; name another folder, or delete it first")
    pairs = ((prepare_cohort(cohort, config, cache, transforms), cache) for cohort, cache in corpus.pairs)
    corpus = Corpus(tuple(pairs), corpus.texts)
    samples, held_out = corpus.samples("train"), corpus.samples("validation")
    reports = [sample.visit.report for sample in samples]
    texts = list(corpus.texts)
    out.mkdir(parents=True, exist_ok=True)
    if vocabulary is not None:
        ReportTokenizer.train([*texts, *reports], vocabulary, config.max_length).save(out / TOKENIZER)
        config = config.replace(tokenizer=str(out / TOKENIZER))
    tokenizer = build_tokenizer(config)
    model = build_model(config).to(device)
    new = list(model.untrained)
    if train == "new" and not new:
        raise ConfigError("every weight of this model is pre-trained: there is nothing new to train; choose all")
    only = new if train == "new" else None
    say(f"{len(samples)} training studies, {len(held_out)} validation studies, {len(texts)} further texts")
    say(f"{len(only or list(model.parameters()))} tensors are trained")
    how: dict[str, Any] = {"only": only, "batch_norm": any(name.startswith("encoder.") for name in new)}
    pretrain(model, tokenizer, PreparedImages(samples), reports, texts, settings, say=say, **how)
    learnt, keys = {sample.visit.patient_id for sample in samples}, {cohort.key for cohort, _ in corpus.pairs}
    digests = [patient_digest(patient_id, key) for patient_id in learnt for key in keys]  # whichever site tests on them
    save_weights(model, out / WEIGHTS, patients=digests)
    about = {
        "preset": config.preset,
        "training_studies": len(samples),
        "validation_studies": len(held_out),
        "texts": len(texts),
        "left_out": dict(sum((Counter(cohort.rejected) for cohort, _ in corpus.pairs), Counter())),
        "train": train,
        "settings": settings.to_dict(),
        "validation": _scores(model, tokenizer, held_out),
    }
    write_json(out / ABOUT, about)
    return about


def read_texts(path: Path) -> tuple[str, ...]:
    """Read reports from a CSV file's column ``report``, or from a text file with empty lines between reports."""
    if path.suffix.lower() == ".csv":
        texts = [row["report"] for row in rows_of(path, ["report"])]
    else:
        content = "\n".join(read_lines(path, "the file of texts"))
        texts = [" ".join(part.split()) for part in content.split("\n\n")]
    if not (texts := [text for text in texts if text]):
        raise ConfigError(f"{path} holds no text")
    return tuple(texts)


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
