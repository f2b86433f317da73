"""Make the shipped small model again.

``python -m tools.make_small_model --preset small --out fedtar_flare/assets/small --seed 0``

Trains on CT phantoms, each with a report in the generic style and one in a style of its own, mixed with text alone: the
model sees the known findings well, says them in many words, and knows no site's way of writing. At first the encoder
learns to name the findings alone, through a head that is thrown away afterwards: they tell it far more per image than
the words of a report do. New findings (``NEW_FINDINGS``) are in no image, only in the text alone: the model has their
words without the sight. The phantoms pass through the very transforms that prepare a site's CT.

``--start FOLDER`` goes on from the weights in a folder, with a tokenizer learnt anew.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtar_flare.imaging.cache import Prepared
from fedtar_flare.learning.clinical_start import WEIGHTS, with_tokenizer
from fedtar_flare.learning.pretraining import PretrainingConfig, pretrain, write_reports
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import preset
from fedtar_flare.models.report_generator import ReportGenerator
from fedtar_flare.models.tokenizer import ReportTokenizer
from fedtar_flare.models.weights import save_weights
from fedtar_flare.synthetic.reading import findings_in
from fedtar_flare.synthetic.vocabulary import FINDINGS, KNOWN_FINDINGS
from tools.corpus import text_corpus
from tools.phantom_pairs import generic_pairs

if TYPE_CHECKING:
    from fedtar_flare.imaging.transforms import InputSize

VOCABULARY = 1500
EMBEDDING = "decoder.transformer.wte.weight"
TEXTS = 4000
STEPS = 2000
HELD_OUT_SEED_STEP = 1_000_003  # pairs that are scored come from another stream than those trained on


class FindingHead(nn.Module):
    """Which findings an image shows, from the decoder's memory (width E); used in the warm start alone.

    ``findings`` are those of every pair; the loss is binary cross-entropy.
    """

    def __init__(self, width: int, findings: Sequence[frozenset[str]], seed: int):
        super().__init__()
        names = sorted(set().union(*findings))
        self.truth = torch.tensor([[float(name in shown) for name in names] for shown in findings])
        self.norm = nn.LayerNorm(width)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.queries = nn.Parameter(torch.randn(len(names), width))
            self.weight = nn.Parameter(torch.randn(len(names), width) * width**-0.5)
        self.bias = nn.Parameter(torch.zeros(len(names)))

    def logits(self, memory: Tensor, mask: Tensor) -> Tensor:
        """Logits (B, F) of memory (B, M, E) with mask (B, M)."""
        x = self.norm(memory)
        scores = torch.einsum("fe,bme->bfm", self.queries, x) * x.shape[-1] ** -0.5
        found = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1) @ x
        return (found * self.weight).sum(-1) + self.bias

    def forward(self, memory: Tensor, mask: Tensor, pairs: Sequence[int]) -> Tensor:
        """The loss of these pairs."""
        truth = self.truth[list(pairs)].to(memory.device)
        return F.binary_cross_entropy_with_logits(self.logits(memory, mask).float(), truth)


@dataclass(frozen=True)
class Pairs:
    """Phantoms as the encoder sees them, their reports, and their findings, in the same order."""

    images: list[Prepared]
    reports: list[str]
    styled: list[str]
    findings: list[frozenset[str]]


def phantom_pairs(
    n: int,
    seed: int,
    size: InputSize,
    say: Callable[[str], None] = lambda line: None,
    names: Sequence[str] = KNOWN_FINDINGS,
) -> Pairs:
    """``n`` phantoms with findings among ``names``, prepared like a site's CT."""
    prepare = volume_preparation(size)
    pairs = Pairs([], [], [], [])
    started = time.monotonic()
    for i, pair in enumerate(generic_pairs(n, seed, names), start=1):
        pairs.images.append(prepare(pair.hu, pair.spacing_mm))
        pairs.reports.append(pair.report)
        pairs.styled.append(pair.styled)
        pairs.findings.append(pair.findings)
        if i % 250 == 0:
            rate = i / (time.monotonic() - started)
            say(f"phantom {i}/{n}  {rate:.1f}/s  {(n - i) / rate / 60:.1f} min left")
    return pairs


def volume_preparation(size: InputSize) -> Callable[[np.ndarray, tuple[float, float, float]], Prepared]:
    """The steps of :func:`fedtar_flare.imaging.transforms.preparation` after the reader, for a volume in memory.

    The returned function takes int16 HU (z, y, x), z to the head, y to the back and x to the patient's left, and the
    spacing along them in mm.
    """
    from monai.data import MetaTensor
    from monai.transforms import Compose

    from fedtar_flare.imaging.transforms import preparation

    steps = Compose(preparation("ct", size).transforms[1:])

    def prepare(hu: np.ndarray, spacing_mm: tuple[float, float, float]) -> Prepared:
        z, y, x = spacing_mm
        ras = torch.tensor([[0, 0, -x, 0], [0, -y, 0, 0], [z, 0, 0, 0], [0, 0, 0, 1]], dtype=torch.float64)
        result: dict[str, Any] = steps({"image": MetaTensor(torch.from_numpy(hu)[None], affine=ras)})
        return Prepared(np.ascontiguousarray(result["image"], np.uint8), np.asarray(result["position_mm"], np.float32))

    return prepare


def scores(model: ReportGenerator, tokenizer: ReportTokenizer, pairs: Pairs) -> dict[str, float | None]:
    """BLEU-4, F1 of known and new findings (micro) and each finding's recall, of the reports that the model writes."""
    from fedtar_flare.metrics.agreement import finding_counts, known_and_new
    from fedtar_flare.metrics.language import language_scores

    written = write_reports(model, tokenizer, pairs.images)
    stated = [findings_in(text) for text in written]
    counts = finding_counts(pairs.findings, stated)
    recalls = {f"recall of {name}": right / there for name, (there, _, right) in counts.items() if there}
    clinical = known_and_new(pairs.findings, stated, frozenset(KNOWN_FINDINGS))
    return {"bleu_4": language_scores(pairs.reports, written)["bleu_4"], **clinical, **recalls}


def take_over(model: ReportGenerator, tokenizer: ReportTokenizer, start: Path) -> None:
    """Give the model the weights in ``start``; a token that was none there begins at the mean of its former pieces."""
    from safetensors.torch import load_file

    state = load_file(start / WEIGHTS)
    pieces = spelled_by(tokenizer, ReportTokenizer.load(start / "tokenizer.json", tokenizer.max_length))
    state[EMBEDDING] = torch.stack([state[EMBEDDING][ids].float().mean(0) for ids in pieces])
    model.load_state_dict(state | {"decoder.lm_head.weight": state[EMBEDDING]})  # one tensor by two names


def spelled_by(tokenizer: ReportTokenizer, other: ReportTokenizer) -> list[list[int]]:
    """For each of a tokenizer's ids, the ids by which ``other`` writes the same token."""
    spelled = []
    for number in range(tokenizer.vocab_size):
        same = other._tokenizer.token_to_id(str(tokenizer._tokenizer.id_to_token(number)))
        spelled.append(other.encode(tokenizer.decode([number]))[1:-1] if same is None else [same])
    return spelled


def main(argv: Sequence[str] | None = None) -> int:
    """The command (see the head of this file)."""
    parser = argparse.ArgumentParser(prog="python -m tools.make_small_model", description=__doc__)
    parser.add_argument("--preset", default="small", help="model preset (default small)")
    parser.add_argument("--out", type=Path, required=True, help="folder for tokenizer.json and model.safetensors")
    parser.add_argument("--seed", type=int, default=0, help="of data, order and weights (default 0)")
    parser.add_argument("--phantoms", type=int, default=3000, help="paired phantoms (default 3000)")
    parser.add_argument("--held-out", type=int, default=200, help="phantoms that are only scored (default 200)")
    steps = "optimiser updates; the first two fifths learn findings alone"
    parser.add_argument("--steps", type=int, default=STEPS, help=steps)
    parser.add_argument("--start", type=Path, help="folder of an earlier start to go on from, at a third of the rate")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)

    say, folder = partial(print, flush=True), arguments.out
    config = preset(arguments.preset, seed=arguments.seed, weights=None)
    pairs = phantom_pairs(arguments.phantoms, arguments.seed, config, say)
    held_out = {
        names: phantom_pairs(arguments.held_out, arguments.seed + HELD_OUT_SEED_STEP, config, names=names)
        for names in (KNOWN_FINDINGS, FINDINGS)
    }
    texts, reports = text_corpus(TEXTS, arguments.seed), pairs.reports + pairs.styled
    settings = PretrainingConfig(steps=arguments.steps, seed=arguments.seed)
    more: dict[str, Any] = {"finding_steps": 2 * arguments.steps // 5}
    folder.mkdir(parents=True, exist_ok=True)
    config = with_tokenizer(config, texts + reports, VOCABULARY, folder)
    model, tokenizer = build_model(config), build_tokenizer(config)
    findings: FindingHead | None = FindingHead(model.projection.out_features, pairs.findings * 2, arguments.seed)
    if arguments.start is not None:  # without a new finding head
        take_over(model, tokenizer, arguments.start)
        settings, findings = settings.replace(lr=5e-4), None
        more = {"warmup": 20, "batch_norm": False}
    pretrain(model, tokenizer, pairs.images * 2, reports, texts, settings, on_progress=say, findings=findings, **more)
    save_weights(model, folder / WEIGHTS)  # in float16
    made = config.replace(weights=str(folder / WEIGHTS))
    model = build_model(made)
    for names, phantoms in held_out.items():
        where = "held-out phantoms" + (", some with new findings" if names == FINDINGS else "")
        for name, value in scores(model, tokenizer, phantoms).items():
            say(f"{where}: {name} {'-' if value is None else f'{value:.3f}'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
