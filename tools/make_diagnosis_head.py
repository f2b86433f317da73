"""Make the shipped start of the diagnosis branch again: its head and its prompts.

``python -m tools.make_diagnosis_head --out FOLDER --seed 2``

The preset small has seen the known findings, but the head that taught them to it was thrown away. This one reads them
off the shipped encoder, which stays as it is, on phantoms of the warm start's kind: no site's patients, scanners or
styles. The rows of the new findings, which no image of it shows, stay at zero: their prompts say 'other' until
hospitals have taught them. Then the prompts are trained alone, on reports half of which come with another phantom's
image, so that the decoder learns from the prompts and not from the image's tokens what to write.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtar_flare.imaging.batch import ImageBatch, collate
from fedtar_flare.learning.diagnosis import PROMPTS, DiagnosisBranch, extend, head_file
from fedtar_flare.learning.labels import POSITIVE
from fedtar_flare.learning.training import batches, parts
from fedtar_flare.metrics.agreement import finding_f1
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import preset
from fedtar_flare.models.report_generator import ReportGenerator
from fedtar_flare.models.tokenizer import IGNORED, ReportTokenizer
from fedtar_flare.synthetic.reading import findings_in
from fedtar_flare.synthetic.vocabulary import FINDINGS, KNOWN_FINDINGS
from tools.make_small_model import HELD_OUT_SEED_STEP, Pairs, phantom_pairs

START: dict[str, Any] = {
    "labeler": "synthetic",
    "prompt_classes": "positive",
    "prompt_place": "memory",
    "head": "attention",
}
"""What the weights are for, as :func:`fedtar_flare.learning.diagnosis.extend` names it."""
AT_ONCE, BATCH, STEPS, LEARNING_RATE = 16, 32, 2000, 3e-3
PROMPT_BATCH, PROMPT_STEPS, PROMPT_RATE, FOCAL_GAMMA = 16, 400, 3e-2, 2.0
OTHER_IMAGE = 0.5
"""Share of the reports that come with another phantom's image."""


def focal_loss(logits: Tensor, labels: Tensor, gamma: float) -> Tensor:
    """As :func:`~fedtar_flare.models.report_generator.report_loss`, (B,), but each token counts ``(1 - p)^gamma``.

    p is its probability (focal loss, Lin et al., ICCV 2017, Eq. 4).
    """
    targets = labels[:, 1:]
    tokens = F.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(targets.shape)
    tokens = tokens * (-torch.expm1(-tokens)).clamp(min=1e-6) ** gamma
    return tokens.sum(1) / (targets != IGNORED).sum(1).clamp(min=1)


class Phantoms:
    """Phantoms as a model with a frozen encoder sees them: their tokens are kept, in half precision."""

    def __init__(self, model: ReportGenerator, pairs: Pairs):
        self.model, self._images = model, pairs.images
        self.truth = torch.tensor([[int(f in shown) * POSITIVE for f in FINDINGS] for shown in pairs.findings])
        """Classes (B, D) of what they show."""
        with torch.no_grad():
            self._tokens = torch.cat([model.tokens(collate(part)).half() for part in parts(pairs.images, AT_ONCE)])

    def seen(self, chosen: Sequence[int]) -> tuple[ImageBatch, Tensor]:
        """Images and tokens (B, S, N, C) of these phantoms."""
        return collate([self._images[i] for i in chosen]), self._tokens[list(chosen)].float()

    @torch.no_grad()
    def memory(self, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        """What the decoder attends to, (B, M, E), and its mask (B, M)."""
        return self.model.memory(*self.seen(chosen))

    def diagnosed(self, chosen: Sequence[int]) -> Tensor:
        """Logits (B, D, K) of the model's branch."""
        images, tokens = self.seen(chosen)
        return cast(DiagnosisBranch, self.model.diagnosis)(tokens, images.slice_mask)


class FixedPrompts(nn.Module):
    """A prompter (see :data:`.PromptPosition`) of ``prompts`` (B, D, E), whatever the image."""

    position = "memory"

    def __init__(self, prompts: Tensor):
        super().__init__()
        self._prompts = prompts

    def prompts(self, *seen: Any) -> Tensor:
        """The same, whatever is seen."""
        return self._prompts


def descend(
    parameters: Sequence[nn.Parameter], rate: float, decay: float, losses: Iterator[Tensor], steps: int, say: Any
) -> None:
    """AdamW with a cosine, one step for each loss."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5 * (1 + math.cos(math.pi * n / steps)))
    for number, loss in enumerate(losses, start=1):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if number % 100 == 0:
            say(f"step {number}/{steps}  loss {loss.item():.4f}")


def fit_head(phantoms: Phantoms, seed: int, say: Callable[[str], None] = print) -> None:
    """Train the head in place on the known findings."""
    known = [FINDINGS.index(name) for name in KNOWN_FINDINGS]

    def losses() -> Iterator[Tensor]:
        for chosen in batches(len(phantoms.truth), BATCH, STEPS, seed):
            logits = phantoms.diagnosed(chosen)[:, known]
            yield F.cross_entropy(logits.flatten(0, 1), phantoms.truth[chosen][:, known].flatten())

    head = cast(DiagnosisBranch, phantoms.model.diagnosis).head
    descend(list(head.parameters()), LEARNING_RATE, 0.05, losses(), STEPS, say)


def fit_prompts(
    phantoms: Phantoms,
    tokenizer: ReportTokenizer,
    pairs: Pairs,
    seed: int,
    say: Callable[[str], None] = print,
    steps: int = PROMPT_STEPS,
) -> None:
    """Train the prompts in place, and nothing else of the model."""
    model, branch = phantoms.model, cast(DiagnosisBranch, phantoms.model.diagnosis)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is branch.embeddings)

    def losses() -> Iterator[Tensor]:
        draw, everyone = random.Random(seed), range(len(pairs.reports))
        for _ in range(steps):
            chosen = draw.choices(everyone, k=PROMPT_BATCH)
            images = [draw.choice(everyone) if draw.random() < OTHER_IMAGE else one for one in chosen]
            texts = [draw.choice((pairs.reports, pairs.styled))[one] for one in chosen]
            ids, labels = tokenizer.batch(texts)
            logits, _ = model.decode(*phantoms.memory(images), ids, branch.embed(phantoms.truth[chosen]))
            yield focal_loss(logits, labels, FOCAL_GAMMA).mean()

    descend([branch.embeddings], PROMPT_RATE, 0.0, losses(), steps, say)


@torch.no_grad()
def written_of(phantoms: Phantoms, tokenizer: ReportTokenizer, images: Sequence[int]) -> list[frozenset[str]]:
    """Findings of the reports that are written, greedily, from each phantom's true prompts and these images."""
    model, branch = phantoms.model, cast(DiagnosisBranch, phantoms.model.diagnosis)
    said = []
    for rows in parts(range(len(images)), PROMPT_BATCH):
        batch, tokens = phantoms.seen([images[i] for i in rows])
        model.diagnosis = FixedPrompts(branch.embed(phantoms.truth[list(rows)]))
        said += [findings_in(tokenizer.decode(ids)) for ids in model.generate(batch, 1, tokens=tokens).tolist()]
    model.diagnosis = branch
    return said


def main(argv: Sequence[str] | None = None) -> int:
    """The command (see the head of this file)."""
    parser = argparse.ArgumentParser(prog="python -m tools.make_diagnosis_head", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(head_file("small")).parent, help="folder of the weights")
    parser.add_argument("--seed", type=int, default=2, help="of phantoms and order (default 2)")
    parser.add_argument("--phantoms", type=int, default=1500, help="to train on (default 1500)")
    parser.add_argument("--held-out", type=int, default=200, help="to score on (default 200)")
    arguments = parser.parse_args(argv)
    from safetensors.torch import save_file

    say, config = partial(print, flush=True), preset("small")
    model, tokenizer = build_model(config), build_tokenizer(config)
    extend(model, START | {"slices": config.slices, "seed": arguments.seed})
    branch = cast(DiagnosisBranch, model.diagnosis)
    pairs = phantom_pairs(arguments.phantoms, arguments.seed, config, say)
    phantoms = Phantoms(model, pairs)
    fit_head(phantoms, arguments.seed, say)
    fit_prompts(phantoms, tokenizer, pairs, arguments.seed, say)
    arguments.out.mkdir(parents=True, exist_ok=True)
    state = {name: value.half() for name, value in branch.head.state_dict().items()}
    state |= {PROMPTS: branch.embeddings.detach().half()}
    save_file(state, arguments.out / Path(head_file("small")).name)
    pairs = phantom_pairs(arguments.held_out, arguments.seed + HELD_OUT_SEED_STEP, config)
    phantoms, findings = Phantoms(model, pairs), pairs.findings
    with torch.no_grad():
        rows = torch.cat([phantoms.diagnosed(part).argmax(-1) for part in parts(range(len(findings)), AT_ONCE)])
    seen = [frozenset(f for f, said in zip(FINDINGS, row, strict=True) if said == POSITIVE) for row in rows.tolist()]
    say(f"held-out phantoms: finding F1 of the head {finding_f1(findings, seen)['finding_f1']:.3f}")
    everyone = list(range(len(findings)))
    for order, what in ((everyone, "its own image"), ([*everyone[1:], 0], "another's image")):
        written = written_of(phantoms, tokenizer, order)
        by_prompt, by_image = (finding_f1(f, written)["finding_f1"] for f in (findings, [findings[i] for i in order]))
        say(f"written from true prompts and {what}: finding F1 of the prompts {by_prompt:.3f}, of it {by_image:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
