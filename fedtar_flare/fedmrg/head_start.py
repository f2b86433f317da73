"""Make the shipped start of the diagnosis branch again: its head and its prompts.

``python -m fedtar_flare.fedmrg.head_start --out FOLDER --seed 2``

The preset small has seen the known findings, but the head that taught them to it was thrown away. This one reads them
off the shipped encoder, which stays as it is, on phantoms of the warm start's kind: no site's patients, scanners or
styles. The rows of the new findings, which no image of it shows, stay at zero: their prompts say 'other' until
hospitals have taught them. Then the prompts are taught to be heeded (:mod:`fedtar_flare.fedmrg.prompt_start`).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtar_flare.fedmrg.prompt_start import Phantoms, fit_prompts, written_of
from fedtar_flare.imaging.batch import collate
from fedtar_flare.imaging.pipeline import InputConfig
from fedtar_flare.learning.diagnosis import PROMPTS, AttentionHead, DiagnosisBranch, extend, head_file
from fedtar_flare.learning.labels import POSITIVE
from fedtar_flare.learning.training import batches
from fedtar_flare.learning.warm_start import HELD_OUT_SEED_STEP, Pairs, phantom_pairs
from fedtar_flare.metrics.clinical import finding_f1
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import preset
from fedtar_flare.models.report_generator import ReportGenerator
from fedtar_flare.synthetic.vocabulary import FINDINGS, KNOWN_FINDINGS

START: dict[str, Any] = {
    "labeler": "synthetic",
    "prompt_classes": "positive",
    "prompt_place": "memory",
    "head": "attention",
}
"""What the weights are for, as ``FedMRGConfig`` names it."""
AT_ONCE, BATCH, STEPS, LEARNING_RATE = 16, 32, 2000, 3e-3


@torch.no_grad()
def tokens_of(model: ReportGenerator, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Tokens (B, S, N, C) of the phantoms, float16, and their mask (B, S)."""
    tokens, masks = [], []
    for start in range(0, len(pairs.images), AT_ONCE):
        batch = collate(pairs.images[start : start + AT_ONCE])
        tokens.append(model.tokens(batch).half())
        masks.append(batch.slice_mask)
    return torch.cat(tokens), torch.cat(masks)


def truth_of(findings: Sequence[frozenset[str]]) -> Tensor:
    """Classes (B, D) of what phantoms show."""
    return torch.tensor([[POSITIVE if name in shown else 0 for name in FINDINGS] for shown in findings])


def fit(
    head: AttentionHead, tokens: Tensor, mask: Tensor, truth: Tensor, seed: int, say: Callable[[str], None] = print
) -> None:
    """Train the head in place on the known findings, by AdamW with a cosine."""
    known = [FINDINGS.index(name) for name in KNOWN_FINDINGS]
    optimizer = torch.optim.AdamW(head.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5 * (1 + math.cos(math.pi * n / STEPS)))
    for number, chosen in enumerate(batches(len(truth), BATCH, STEPS, seed), start=1):
        logits = head(tokens[chosen].float(), mask[chosen])[:, known]
        loss = F.cross_entropy(logits.flatten(0, 1), truth[chosen][:, known].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if number % 200 == 0:
            say(f"step {number}/{STEPS}  loss {loss.item():.4f}")


@torch.no_grad()
def said_of(head: AttentionHead, tokens: Tensor, mask: Tensor) -> Iterator[frozenset[str]]:
    """Findings that the head sees in each image."""
    for start in range(0, len(tokens), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        for row in head(tokens[part].float(), mask[part]).argmax(-1).tolist():
            yield frozenset(name for name, said in zip(FINDINGS, row, strict=True) if said == POSITIVE)


def main(argv: Sequence[str] | None = None) -> int:
    """The command (see the head of this file)."""
    parser = argparse.ArgumentParser(prog="python -m fedtar_flare.fedmrg.head_start", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(head_file("small")).parent, help="folder of the weights")
    parser.add_argument("--seed", type=int, default=2, help="of phantoms and order (default 2)")
    parser.add_argument("--phantoms", type=int, default=1500, help="to train on (default 1500)")
    parser.add_argument("--held-out", type=int, default=200, help="to score on (default 200)")
    arguments = parser.parse_args(argv)
    from safetensors.torch import save_file

    say, config = partial(print, flush=True), preset("small")
    model, images = build_model(config), InputConfig(image_size=config.image_size, slices=config.slices)
    pairs = phantom_pairs(arguments.phantoms, arguments.seed, images, say)
    tokens, truth = tokens_of(model, pairs), truth_of(pairs.findings)
    extend(model, START | {"slices": config.slices, "seed": arguments.seed})
    branch = cast(DiagnosisBranch, model.diagnosis)
    head = cast(AttentionHead, branch.head)
    fit(head, *tokens, truth, arguments.seed, say)
    phantoms = Phantoms(model, *tokens, collate(pairs.images).position_mm)
    tokenizer = build_tokenizer(config)
    fit_prompts(branch, phantoms, tokenizer, pairs, truth, arguments.seed, say)
    arguments.out.mkdir(parents=True, exist_ok=True)
    state = {name: value.half() for name, value in head.state_dict().items()}
    state |= {PROMPTS: branch.embeddings.detach().half()}
    save_file(state, arguments.out / Path(head_file("small")).name)
    held_out = phantom_pairs(arguments.held_out, arguments.seed + HELD_OUT_SEED_STEP, images)
    tokens, findings = tokens_of(model, held_out), held_out.findings
    scores = finding_f1(findings, list(said_of(head, *tokens)))
    say(f"held-out phantoms: finding F1 of the head {scores['finding_f1']:.3f}")
    phantoms = Phantoms(model, *tokens, collate(held_out.images).position_mm)
    others = [*range(1, len(findings)), 0]
    for beside, what in ((range(len(findings)), "its own image"), (others, "another's image")):
        written = written_of(branch, phantoms, tokenizer, list(beside), truth_of(findings))
        told, seen = (finding_f1(found, written)["finding_f1"] for found in (findings, [findings[i] for i in beside]))
        say(f"written from true prompts beside {what}: finding F1 of the prompts {told:.3f}, of the image {seen:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
