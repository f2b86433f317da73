"""Make the shipped small model again: its weights, and the start of its diagnosis branch.

``python -m tools.make_small_model --start OLD --out fedtar_flare/assets/small --seed 0``

Trains on CT phantoms of two visits each, in three parts. First the encoder learns to see: by a head
(:class:`.ComparisonHead`) that names the known findings and their degrees at both visits and what became of each
between them. A course read backwards is a course too. Then, with the encoder as it is, the decoder learns to write:
from the image alone, from prompts beside the image, and from prompts beside another phantom's, so that it writes
what they say; and from texts without any image. Last, FedMRG's head of presence is fitted. No image shows a new finding
(``NEW_FINDINGS``); texts and prompts speak of them, so the model has their words without the sight. Phantoms pass
through the very transforms that prepare a site's CT.

``OLD`` is a folder with the tokenizer, and weights to go on from; without weights there, from random ones.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedtar_flare.imaging.batch import ImageBatch, collate
from fedtar_flare.imaging.cache import Prepared
from fedtar_flare.learning.comparison import (
    COMPARED,
    DECREASED,
    INCREASED,
    NEW,
    NONE,
    RESOLVED,
    UNCHANGED,
    ComparisonBranch,
    change_losses,
    joint,
    level_losses,
    read,
    stated_changes,
)
from fedtar_flare.learning.diagnosis import COMPARISON, PRESENCE, AttentionHead, diagnosis_losses, head_file
from fedtar_flare.learning.labels import PRESENT, labeler
from fedtar_flare.learning.pretraining import WEIGHTS
from fedtar_flare.learning.training import batches, parts
from fedtar_flare.metrics.agreement import finding_f1
from fedtar_flare.metrics.language import report_statistics
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import preset
from fedtar_flare.models.report_generator import Encoded, ReportGenerator, report_loss
from fedtar_flare.models.tokenizer import ReportTokenizer
from fedtar_flare.models.weights import save_weights
from fedtar_flare.synthetic.reading import findings_in
from fedtar_flare.synthetic.vocabulary import FINDINGS, KNOWN_FINDINGS
from tools.corpus import text_corpus
from tools.phantom_pairs import phantom_patients

if TYPE_CHECKING:
    from fedtar_flare.imaging.transforms import InputSize

READER = labeler("synthetic")
KNOWN = [FINDINGS.index(name) for name in KNOWN_FINDINGS]
HELD_OUT_SEED_STEP = 1_000_003  # patients that are scored come from another stream than those trained on
TEXTS = 4000
AT_ONCE = 16
PATIENTS = 8
"""Patients of an update by which the encoder learns."""
SIGHT_RATES, SIGHT_STEPS = (3e-4, 3e-3), 4000
"""Learning rates of the encoder and of the head."""
ALONE, PROMPTED, ASTRAY, TEXT_BATCH = 6, 5, 5, 8
"""Reports of an update by which the decoder learns: from the image alone, with prompts beside their own image, with
prompts beside another's, and texts without any."""
TEXT_WEIGHT = 0.3  # of the loss of texts without image, relative to the others
WRITER_RATES, WRITER_STEPS = (5e-4, 5e-3), 1500
"""Learning rates of the decoder with its projection, and of the prompts."""
STYLED = 0.3
"""Share of reports in a style of their own; the others are in the generic one."""
VAGUE = 0.25
"""Share of prompts that do not say the degree."""
PRESENCE_BATCH, PRESENCE_STEPS, PRESENCE_RATE = 32, 2000, 3e-3
BACKWARDS = torch.tensor([NONE, RESOLVED, DECREASED, INCREASED, UNCHANGED, NEW])
"""Change of a course that is read backwards."""


def styled(reports: tuple[str, str], draw: random.Random) -> str:
    """The generic report, or one in a style of its own."""
    return reports[draw.random() < STYLED]


@dataclass(frozen=True)
class Phantoms:
    """Images of patients, two each, one after the other; their reports, and what these say."""

    images: list[Prepared] = field(default_factory=list)
    reports: list[tuple[str, str]] = field(default_factory=list)
    compared: list[tuple[str, str] | None] = field(default_factory=list)
    states: list[dict[str, int]] = field(default_factory=list)

    @property
    def levels(self) -> Tensor:
        """Levels (N, D) that are drawn."""
        return torch.tensor([[states.get(name, 0) for name in FINDINGS] for states in self.states])

    @property
    def changes(self) -> Tensor:
        """Changes (N / 2, D) from the first visit to the second."""
        rows = [stated_changes("", b, a, READER) for a, b in self.levels.unflatten(0, (-1, 2)).tolist()]
        return torch.tensor(rows)

    def report(self, number: int, draw: random.Random) -> str:
        """A report with the changes since the visit before, in one of its styles."""
        return styled(self.compared[number] or self.reports[number], draw)


def phantoms(n: int, seed: int, size: InputSize, say: Callable[[str], None], names: Any = KNOWN_FINDINGS) -> Phantoms:
    """Phantoms of ``n`` patients with findings among ``names``, prepared like a site's CT."""
    prepare, made, started = volume_preparation(size), Phantoms(), time.monotonic()
    for i, visits in enumerate(phantom_patients(n, seed, names), start=1):
        for visit in visits:
            made.images.append(prepare(visit.hu, visit.spacing_mm))
            made.reports.append(visit.reports)
            made.compared.append(visit.compared)
            made.states.append({name: state.size for name, state in visit.states.items()})
        if i % 250 == 0:
            rate = i / (time.monotonic() - started)
            say(f"patient {i}/{n}  {rate:.1f}/s  {(n - i) / rate / 60:.1f} min left")
    return made


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


def branch_of(model: ReportGenerator, seed: int) -> ComparisonBranch:
    """A branch for a model, untrained."""
    words = model.decoder.get_input_embeddings().weight.detach()
    return ComparisonBranch(READER, model.channels, words, seed, "memory", certain=0.0)


def descend(
    groups: Sequence[tuple[Sequence[Tensor], float]], losses: Iterator[Tensor], steps: int, say: Callable[[str], None]
) -> None:
    """AdamW with a warm-up and a cosine, one step for each loss; ``groups`` are parameters and their rates."""
    trained = [parameter for parameters, _ in groups for parameter in parameters]
    optimizer = torch.optim.AdamW([{"params": [*p], "lr": rate} for p, rate in groups], weight_decay=0.05)
    warm = min(50, steps // 10 + 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min(1.0, (n + 1) / warm) * (0.02 + 0.49 * (1 + math.cos(math.pi * n / steps)))
    )
    total, started = 0.0, time.monotonic()
    for number, loss in zip(range(1, steps + 1), losses, strict=False):
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        total += loss.item()
        if number % 50 == 0:
            left = (steps - number) * (time.monotonic() - started) / number / 60
            say(f"step {number}/{steps}  loss {total / 50:.4f}  {left:.1f} min left")
            total = 0.0


def compared(
    model: ReportGenerator, branch: ComparisonBranch, before: Sequence[Prepared], now: Sequence[Prepared], days: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the known findings: levels (2 B, D, 4), those before first, and jointly (B, D, 4, 4, 6)."""
    batch, n = collate([*before, *now]), len(now)
    attended = branch.head.attend(model.tokens(batch), batch.slice_mask)
    levels = branch.head.levels(attended)[:, KNOWN]
    change = branch.head.compare(attended[:n], attended[n:], days)[:, KNOWN]
    return levels, joint(levels[:n], levels[n:], change)


def fit_sight(
    model: ReportGenerator, branch: ComparisonBranch, data: Phantoms, steps: int, seed: int, say: Callable[[str], None]
) -> None:
    """Train encoder and head in place."""
    levels, changes, head = data.levels.unflatten(0, (-1, 2)), data.changes, branch.head
    draw = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    encoder = [p.requires_grad_(True) for p in model.encoder.parameters()]
    hidden = [head.hidden.requires_grad_(True), head.hidden_bias.requires_grad_(True)]

    def losses() -> Iterator[Tensor]:
        for chosen in batches(len(changes), PATIENTS, steps, seed):
            order = (1, 0) if torch.rand((), generator=draw) < 0.5 else (0, 1)
            before, now = ([data.images[2 * i + k] for i in chosen] for k in order)
            days = torch.exp(1.1 + 4.5 * torch.rand(len(chosen), generator=draw))
            seen, together = compared(model, branch, before, now, days)
            true = torch.cat([levels[chosen, k] for k in order])[:, KNOWN]
            change = changes[chosen][:, KNOWN]
            change = change if order == (0, 1) else BACKWARDS[change]
            yield level_losses(seen, true).mean() + change_losses(together, change).mean()

    descend([(encoder, SIGHT_RATES[0]), ([*head.parameters(), *hidden], SIGHT_RATES[1])], losses(), steps, say)
    for buffer in hidden:
        buffer.requires_grad_(False)


class Seen:
    """Phantoms as a frozen encoder sees them: their tokens are kept, in half precision."""

    def __init__(self, model: ReportGenerator, data: Phantoms):
        self.data = data
        with torch.no_grad():
            self._tokens = torch.cat([model.tokens(collate(part)).half() for part in parts(data.images, AT_ONCE)])

    def __call__(self, chosen: Sequence[int]) -> tuple[ImageBatch, Encoded]:
        """Images of these phantoms, and what the encoder gives of them."""
        batch = collate([self.data.images[i] for i in chosen])
        return batch, Encoded(self._tokens[list(chosen)].float(), batch.slice_mask)


def fit_writer(
    model: ReportGenerator,
    branch: ComparisonBranch,
    tokenizer: ReportTokenizer,
    data: Phantoms,
    texts: Sequence[str],
    steps: int,
    seed: int,
    say: Callable[[str], None],
) -> None:
    """Train the decoder, its projection and the prompts in place; the encoder stays as it is."""
    seen, draw, everyone = Seen(model, data), random.Random(seed), range(len(data.images))
    shown = [row.tolist() for row in data.levels]
    frozen = {id(parameter) for parameter in model.encoder.parameters()}
    trained = [p.requires_grad_(True) for p in model.parameters() if id(p) not in frozen]

    def loss_of(numbers: Sequence[int], reports: Sequence[str], prompts: Tensor | None = None) -> Tensor:
        ids, labels = tokenizer.batch(reports)
        logits, _ = model.decode(*model.memory(*seen(numbers)), ids, prompts)
        return report_loss(logits, labels).mean()

    def prompted(number: int) -> tuple[str, list[int] | None]:
        return data.report(number, draw), shown[number - 1] if number % 2 else None

    def losses() -> Iterator[Tensor]:
        for _ in range(steps):
            numbers = draw.choices(everyone, k=ALONE)
            loss = loss_of(numbers, [styled(data.reports[i], draw) for i in numbers]) * ALONE
            own = draw.choices(everyone, k=PROMPTED)
            targets = [prompted(i) for i in own]
            for _ in range(ASTRAY):
                targets.append(prompted(draw.choice(everyone)) if draw.random() < 0.5 else (draw.choice(texts), None))
            reports, before = zip(*targets, strict=True)
            prompts = vague(reports, before)
            loss = loss + loss_of(own + draw.choices(everyone, k=ASTRAY), reports, prompts) * len(targets)
            ids, labels = tokenizer.batch(draw.choices(texts, k=TEXT_BATCH))
            alone = report_loss(model.decoder(input_ids=ids, use_cache=False).logits, labels).mean()
            yield loss / (ALONE + PROMPTED + ASTRAY) + TEXT_WEIGHT * alone

    def vague(reports: Sequence[str], before: Sequence[list[int] | None]) -> Tensor:
        levels = torch.tensor([READER.levels(text) for text in reports])
        pairs = zip(reports, levels.tolist(), before, strict=True)
        changes = torch.tensor([stated_changes(text, row, earlier, READER) for text, row, earlier in pairs])
        blurred = torch.tensor([[draw.random() < VAGUE for _ in FINDINGS] for _ in reports])
        return branch.embed(torch.where(blurred & (levels > 0), PRESENT, levels), changes.clamp(min=NONE))

    model.diagnosis = branch
    prompts = [branch.embeddings, branch.changes]
    descend([(trained, WRITER_RATES[0]), (prompts, WRITER_RATES[1])], losses(), steps, say)
    model.diagnosis = None


def fit_presence(
    model: ReportGenerator, data: Phantoms, steps: int, seed: int, say: Callable[[str], None]
) -> AttentionHead:
    """FedMRG's head of presence alone, on the frozen encoder; rows of new findings stay 0."""
    seen, true = Seen(model, data), (data.levels > 0).long()[:, KNOWN]
    head = AttentionHead(len(FINDINGS), 2, model.channels, torch.Generator().manual_seed(seed))

    def losses() -> Iterator[Tensor]:
        for chosen in batches(len(true), PRESENCE_BATCH, steps, seed):
            _, encoded = seen(chosen)
            logits = head(encoded.tokens, encoded.slice_mask)[:, KNOWN]
            yield diagnosis_losses(logits, true[chosen]).mean()

    descend([(list(head.parameters()), PRESENCE_RATE)], losses(), steps, say)
    return head


class FixedPrompts(nn.Module):
    """A prompter (see :data:`.PromptPosition`) of ``prompts`` (B, D, E), whatever the image."""

    position = "memory"

    def __init__(self, prompts: Tensor):
        super().__init__()
        self._prompts = prompts

    def prompts(self, *seen: Any) -> Tensor:
        """The same, whatever is seen."""
        return self._prompts


@torch.no_grad()
def scores_of_sight(model: ReportGenerator, branch: ComparisonBranch, data: Phantoms) -> dict[str, float]:
    """Of the known findings: presence F1, degrees right, F1 of changes (without stable ones), and two readings' F1."""
    levels, changes = data.levels.unflatten(0, (-1, 2))[:, 1, KNOWN], data.changes[:, KNOWN]
    readings, alone = [], []
    for chosen in parts(range(len(changes)), AT_ONCE):
        before, now = ([data.images[2 * i + k] for i in chosen] for k in (0, 1))
        seen, together = compared(model, branch, before, now, torch.full((len(chosen),), 90.0))
        n, everyone = len(chosen), torch.ones(len(chosen), len(KNOWN), dtype=torch.bool)
        readings.append(read(seen[n:], together, everyone, 0.0))
        alone.append(read(seen[n:], joint(seen[:n], seen[n:], torch.zeros(n, len(KNOWN), COMPARED)), everyone, 0.0))
    read_levels = torch.cat([r.levels for r in readings])
    both = (levels > 0) & (read_levels > 0)
    f1 = [_change_f1(changes, torch.cat([r.changes for r in rows])) for rows in (readings, alone)]
    return {
        "presence F1": _f1(levels > 0, read_levels > 0),
        "degrees right": (levels == read_levels)[both].float().mean().item(),
        "changes F1": f1[0],
        "changes F1 of two readings": f1[1],
    }


def _f1(true: Tensor, read: Tensor) -> float:
    return float(2 * (true & read).sum() / (true.sum() + read.sum()).clamp(min=1))


def _change_f1(true: Tensor, read: Tensor) -> float:
    changed, claimed = ((x != NONE) & (x != UNCHANGED) for x in (true, read))
    return float(2 * (changed & (true == read)).sum() / (changed.sum() + claimed.sum()).clamp(min=1))


@torch.no_grad()
def scores_of_writing(
    model: ReportGenerator, branch: ComparisonBranch, tokenizer: ReportTokenizer, data: Phantoms
) -> dict[str, float]:
    """BLEU-4 and finding F1 from images alone; then what is written from true prompts, beside each kind of image."""
    seen, n, scores = Seen(model, data), len(data.images), dict[str, float]()
    findings = [frozenset(states) for states in data.states]
    reports = [(data.compared[i] or data.reports[i])[0] for i in range(n)]
    before = [data.levels[i - 1].tolist() if i % 2 else None for i in range(n)]
    levels = torch.tensor([READER.levels(text) for text in reports])
    changes = torch.tensor([stated_changes(*row, READER) for row in zip(reports, levels.tolist(), before, strict=True)])
    changes = changes.clamp(min=NONE)

    def written(order: Sequence[int], prompted: bool) -> list[str]:
        texts = []
        for rows in parts(range(n), AT_ONCE):
            batch, encoded = seen([order[i] for i in rows])
            chosen = list(rows)
            model.diagnosis = FixedPrompts(branch.embed(levels[chosen], changes[chosen])) if prompted else None
            texts += [tokenizer.decode(ids) for ids in model.generate(batch, 1, seen=encoded).tolist()]
        model.diagnosis = None
        return texts

    own, others = list(range(n)), [*range(2, n), 0, 1]
    texts = written(own, False)
    scores["BLEU-4"] = report_statistics([texts_of[0] for texts_of in data.reports], texts).scores()["bleu_4"]
    scores["finding F1"] = cast(float, finding_f1(findings, list(map(findings_in, texts)))["finding_f1"])
    for order, what in ((own, "its own image"), (others, "another's image")):
        texts = written(order, True)
        stated = torch.tensor([READER.levels(text) for text in texts])
        claims = torch.tensor(
            [stated_changes(*row, READER) for row in zip(texts, stated.tolist(), before, strict=True)]
        )
        both = (levels > 0) & (stated > 0)
        scores |= {
            f"finding F1 of the prompts beside {what}": _f1(levels > 0, stated > 0),
            f"degrees as prompted beside {what}": (levels == stated)[both].float().mean().item(),
            f"changes F1 of the prompts beside {what}": _change_f1(changes, claims.clamp(min=NONE)),
        }
    return scores


def save_heads(branch: ComparisonBranch, presence: nn.Module, file: Path) -> None:
    """Write both heads, with the prompts, in float16."""
    from safetensors.torch import save_file

    state = {f"{COMPARISON}{name}": value for name, value in branch.state_dict().items()}
    state |= {f"{PRESENCE}head.{name}": value for name, value in presence.state_dict().items()}
    save_file({name: value.detach().half().contiguous() for name, value in state.items()}, file)


def main(argv: Sequence[str] | None = None) -> int:
    """The command (see the head of this file)."""
    parser = argparse.ArgumentParser(prog="python -m tools.make_small_model", description=__doc__)
    parser.add_argument("--start", type=Path, required=True, help="folder of a tokenizer, and weights to go on from")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, heads and tokenizer")
    parser.add_argument("--preset", default="small", help="model preset (default small)")
    parser.add_argument("--seed", type=int, default=0, help="of data, order and weights (default 0)")
    parser.add_argument("--patients", type=int, default=2250, help="to train on, of two visits (default 2250)")
    parser.add_argument("--held-out", type=int, default=100, help="to score on (default 100)")
    parser.add_argument("--sight", type=int, default=SIGHT_STEPS, help="updates of the encoder")
    parser.add_argument("--writer", type=int, default=WRITER_STEPS, help="updates of the decoder")
    parser.add_argument("--presence", type=int, default=PRESENCE_STEPS, help="updates of FedMRG's head")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    say, folder, seed = partial(print, flush=True), arguments.out, arguments.seed
    weights, tokenizer_file = arguments.start / WEIGHTS, arguments.start / "tokenizer.json"
    named = str(weights) if weights.exists() else None
    config = preset(arguments.preset, seed=seed, weights=named, tokenizer=str(tokenizer_file))
    model, tokenizer = build_model(config), build_tokenizer(config)
    branch = branch_of(model, seed)
    data = phantoms(arguments.patients, seed, config, say)
    fit_sight(model, branch, data, arguments.sight, seed, say)
    branch.fix_untrained(seed)
    fit_writer(model, branch, tokenizer, data, text_corpus(TEXTS, seed), arguments.writer, seed, say)
    presence = fit_presence(model, data, arguments.presence, seed, say)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / tokenizer_file.name).exists():
        shutil.copy(tokenizer_file, folder)
    save_weights(model, folder / WEIGHTS)  # in float16
    save_heads(branch, presence, folder / Path(head_file("small")).name)
    for names in (KNOWN_FINDINGS, FINDINGS):
        held_out = phantoms(arguments.held_out, seed + HELD_OUT_SEED_STEP, config, say, names)
        where = "held-out phantoms" + (", some with new findings" if names == FINDINGS else "")
        scores = scores_of_sight(model, branch, held_out) | scores_of_writing(model, branch, tokenizer, held_out)
        for name, value in scores.items():
            say(f"{where}: {name} {value:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
