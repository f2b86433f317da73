"""Findings with their degree, and what became of each since the visit before, read off both visits together.

A head gives each finding's level at a visit (ordinal: absent, small, moderate, large) and compares two visits, whose
findings lie in the same place of the same patient. For a finding with levels b before and n now,

    p(b, n, c) ~ p_before(b) p_now(n) a(c | b, n) exp(z_c),

where a, a distribution over c, says which changes two levels allow, and z are the comparison's logits, 0 without an
image of before: the baseline, two independent readings. A report of before fixes b where it states the level.
Of findings that a warm start knows, the head in training tells presence, and the warm start's head degrees and changes
given presence: reports of some dozens of patients teach less of these than they make it forget.
"""

from collections.abc import Callable, Sequence
from math import log
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtar_flare.imaging.batch import PriorBatch
from fedtar_flare.learning.labels import LEVELS, PRESENT, UNKNOWN, Labeler
from fedtar_flare.metrics.grades import DIRECTIONS
from fedtar_flare.models.report_generator import Encoded, PromptPosition

CHANGES: tuple[str, ...] = ("none", *DIRECTIONS, "uncertain")
"""What became of a finding, by number: "none" where it was at neither visit, or where nothing is stated."""
NONE, NEW, INCREASED, DECREASED, UNCHANGED, RESOLVED, UNCERTAIN = range(7)
READ = 4  # levels that are read off an image; PRESENT is what a report may state
COMPARED = 6  # changes that are read off two visits
HIDDEN = 32
"""Hidden units of the comparison of one finding."""
WITHIN_LEVEL = 0.05
"""Weight of a change within a level, or against it, relative to the one between the two levels."""
EXCLUDED = -1e4
"""Log-probability of a level that a report excludes: finite, so that gradients are, too."""
UNTRAINED = 0.4  # probability of a finding that a head was never taught: under a half, so that it is not claimed
TEMPERATURES = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)  # that a calibration chooses among
FIXED_RMS = 1.5
"""Root mean square of a fixed prompt, about that of the shipped ones."""
CHANGE_RMS = 0.6
"""Root mean square of a fixed prompt of a level or a change. An untrained decoder names fewer findings above it."""


def _allowed() -> Tensor:
    """Log-probability of each change given the levels before and now, (4, 4, 6)."""
    weights = torch.zeros(READ, READ, COMPARED)
    for before in range(READ):
        for now in range(READ):
            if before and now:
                weights[before, now, [INCREASED, DECREASED, UNCHANGED]] = WITHIN_LEVEL
            weights[before, now, change_between(before, now)] = 1.0
    return (weights / weights.sum(-1, keepdim=True)).log()


def change_between(before: int, now: int) -> int:
    """Change between two levels, UNKNOWN where one is, or where a visit with the finding does not say its degree."""
    if UNKNOWN in (before, now):
        return UNKNOWN
    if not before or not now:
        return NEW if now else RESOLVED if before else NONE
    if PRESENT in (before, now):
        return UNKNOWN
    return INCREASED if now > before else DECREASED if now < before else UNCHANGED


ALLOWED = _allowed()


class Reading(NamedTuple):
    """What was read of B visits and D findings: levels (B, D), and changes (B, D) where a visit before is shown.

    ``presence``, ``degree`` and ``certainty`` are the probabilities, (B, D), of what was read: that the finding is
    present, of its degree if it is, and of its change.
    """

    levels: Tensor
    changes: Tensor
    presence: Tensor
    degree: Tensor
    certainty: Tensor


def attention(queries: Tensor, x: Tensor, slice_mask: Tensor) -> Tensor:
    """Weights (B, D, S N) of queries (D, C) on normalised tokens (B, S, N, C) with mask (B, S)."""
    scores = torch.einsum("dc,bsnc->bdsn", queries.float(), x) * x.shape[-1] ** -0.5
    hidden = ~slice_mask & slice_mask.any(1)[:, None]
    return scores.masked_fill(hidden[:, None, :, None], -torch.inf).flatten(2).softmax(-1)


def key_slices(queries: Tensor, tokens: Tensor, slice_mask: Tensor) -> Tensor:
    """The slice (B, D) that each query (D, C) attends to most, UNKNOWN where nothing is shown."""
    weights = attention(queries, F.layer_norm(tokens.float(), tokens.shape[-1:]), slice_mask)
    slices = weights.unflatten(-1, tokens.shape[1:3]).sum(-1).argmax(-1)
    return torch.where(slice_mask.any(1)[:, None], slices, UNKNOWN)


class ComparisonHead(nn.Module):
    """A query for each finding attends to a visit; the result gives its level, those of two visits its change.

    Logit of level k is the sum over j <= k of ``w_j . a + b_j`` (adjacent categories: Agresti, Analysis of Ordinal
    Categorical Data, 2010, ch. 4), 0 for absent: a level is told from its neighbours, and large from absent by all
    steps between. The comparison has one hidden layer, which sites do not train. Everything trained is 0 at first.
    """

    hidden: Tensor
    hidden_bias: Tensor

    def __init__(self, findings: int, channels: int, generator: torch.Generator):
        super().__init__()
        inputs = 2 * channels + 1
        self.queries = nn.Parameter(torch.randn(findings, channels, generator=generator))
        self.weight = nn.Parameter(torch.zeros(findings, READ - 1, channels))
        self.bias = nn.Parameter(torch.zeros(findings, READ - 1))
        self.change_weight = nn.Parameter(torch.zeros(findings, COMPARED, HIDDEN))
        self.change_bias = nn.Parameter(torch.zeros(findings, COMPARED))
        drawn = torch.randn(findings, HIDDEN, inputs, generator=generator)
        self.register_buffer("hidden", drawn * inputs**-0.5)
        self.register_buffer("hidden_bias", torch.zeros(findings, HIDDEN))

    def attend(self, tokens: Tensor, slice_mask: Tensor) -> Tensor:
        """Attend to tokens (B, S, N, C) with mask (B, S): (B, D, C), float32, zero where nothing is shown."""
        x = F.layer_norm(tokens.float(), tokens.shape[-1:])
        return (attention(self.queries, x, slice_mask) @ x.flatten(1, 2)) * slice_mask.any(1)[:, None, None]

    def levels(self, attended: Tensor) -> Tensor:
        """Log-probabilities (B, D, 4) of the levels at visits that were attended to (B, D, C)."""
        steps = torch.einsum("bdc,dkc->bdk", attended, self.weight.float()) + self.bias.float()
        return F.pad(steps.cumsum(-1), (1, 0)).log_softmax(-1)

    def compare(self, before: Tensor, now: Tensor, days: Tensor) -> Tensor:
        """Logits (B, D, 6) of the changes between attended visits (B, D, C) that are some days (B,) apart."""
        apart = torch.log2(1 + days.float())[:, None, None].expand(*now.shape[:2], 1) / 10
        pair = torch.cat([before, now, apart], dim=-1)
        hidden = F.gelu(torch.einsum("bdi,dhi->bdh", pair, self.hidden.float()) + self.hidden_bias.float())
        return torch.einsum("bdh,dkh->bdk", hidden, self.change_weight.float()) + self.change_bias.float()


def joint(before: Tensor, now: Tensor, change: Tensor) -> Tensor:
    """Log-probabilities (B, D, 4, 4, 6) of levels before and now and of the change.

    Parameters
    ----------
    before, now : Tensor
        Log-probabilities (B, D, 4) of the levels.
    change : Tensor
        Logits (B, D, 6) of the changes.
    """
    scores = before[..., :, None, None] + now[..., None, :, None] + change[..., None, None, :]
    scores = scores + ALLOWED.to(scores)
    return scores.flatten(-3).log_softmax(-1).view(scores.shape)


def _presence(scores: Tensor, dim: int = -1) -> Tensor:
    """Log-probability of absence, and, for each level that is present, of presence, in a dimension of levels."""
    absent, present = scores.split([1, READ - 1], dim)
    return torch.cat([absent, present.logsumexp(dim, keepdim=True).expand_as(present)], dim)


def levels_given(levels: Tensor, seen: Tensor | None) -> Tensor:
    """Log-probabilities (B, D, 4) of the levels (B, D) in a report, PRESENT being any degree, else as ``seen``."""
    seen = torch.zeros(*levels.shape, READ, device=levels.device).log_softmax(-1) if seen is None else seen
    numbers = torch.arange(READ, device=levels.device)
    fits = (numbers == levels[..., None]) | ((levels == PRESENT)[..., None] & (numbers > 0))
    given = seen.masked_fill(~fits, EXCLUDED).log_softmax(-1)
    return torch.where((levels == UNKNOWN)[..., None], seen, given)


def change_chances(together: Tensor, present: Tensor, temperature: float = 1.0) -> Tensor:
    """Probabilities (B, D, 6) of the changes where a finding is present (B, D) or absent, at a temperature."""
    chances = together.exp().sum(-3)  # (B, D, 4, 6), now and change
    given = torch.where(present[..., None], chances[..., 1:, :].sum(-2), chances[..., 0, :]).clamp(min=1e-12)
    return (given.log() / temperature).softmax(-1)


def calibrated(chances: Sequence[Callable[[float], Tensor]], changes: Sequence[Tensor]) -> float:
    """Temperature under which the changes (B, D) that reports state are likeliest (Guo et al., ICML 2017).

    Parameters
    ----------
    chances : sequence of callable
        Each gives the probabilities (B, D, 6) of a batch at a temperature.
    changes : sequence of Tensor
        The batches' changes; those that are not among the six are left out, and :data:`NONE` too.
    """

    def loss(temperature: float) -> float:
        total = 0.0
        for of, true in zip(chances, changes, strict=True):
            stated = (true > NONE) & (true < COMPARED)
            likely = of(temperature).gather(-1, true.clamp(0, COMPARED - 1)[..., None])[..., 0]
            total -= float(likely.clamp(min=1e-6).log()[stated].sum())
        return total

    return min(TEMPERATURES, key=lambda temperature: (loss(temperature), abs(log(temperature))))


def read(
    now: Tensor, together: Tensor | None, compared: Tensor | None, certain: float, temperature: float = 1.0
) -> Reading:
    """Read levels and changes off the probabilities.

    Parameters
    ----------
    now : Tensor
        Log-probabilities (B, D, 4) of the levels at a visit.
    together : Tensor or None
        Log-probabilities (B, D, 4, 4, 6) with the visit before (:func:`joint`); None: there is none.
    compared : Tensor or None
        (B, D), of which findings that visit is shown.
    certain : float
        Probability under which a change is :data:`UNCERTAIN`.
    temperature : float
        Of the probabilities of the changes.
    """
    levels = now.exp()
    shown = torch.zeros(now.shape[:2], dtype=torch.bool, device=now.device) if compared is None else compared
    if together is not None:
        levels = torch.where(shown[..., None], together.exp().sum((-3, -1)), levels)
    presence = 1 - levels[..., 0]
    present = presence > 0.5
    degree, best = levels[..., 1:].max(-1)
    changes, certainty = torch.zeros_like(best), torch.ones_like(presence)
    if together is not None:
        certainty, changes = change_chances(together, present, temperature).max(-1)
        changes = torch.where(certainty < certain, UNCERTAIN, changes) * shown
        certainty = torch.where(shown, certainty, 1.0)
    return Reading(torch.where(present, best + 1, 0), changes, presence, degree / presence.clamp(min=1e-12), certainty)


def stated_changes(text: str, levels: Sequence[int], before: Sequence[int] | None, reader: Labeler) -> list[int]:
    """Changes of the findings that a report states: by its words, else by its levels and those of the report before.

    Parameters
    ----------
    text : str
        The report.
    levels, before : sequence of int
        Levels (D) of the report, and of the one before; ``before`` is None where that is not known.
    reader : Labeler
        Reads the words.

    Returns
    -------
    list of int
        Numbers among :data:`CHANGES`, UNKNOWN where the reports do not say, or where the text contradicts itself.
    """
    words: dict[str, set[int]] = {}
    for name, direction in reader.changes(text):
        words.setdefault(name, set()).add(CHANGES.index(direction))
    changes: list[int] = []
    for i, name in enumerate(reader.findings):
        stated = words.get(name, set())
        if stated:
            of_present = stated != {RESOLVED}
            changes.append(*stated if len(stated) == 1 and of_present == (levels[i] > 0) else [UNKNOWN])
        else:
            changes.append(UNKNOWN if before is None else change_between(before[i], levels[i]))
    return changes


def level_losses(now: Tensor, levels: Tensor) -> Tensor:
    """Cross-entropy (B,) of log-probabilities (B, D, 4) and levels (B, D), mean over D; PRESENT: of any degree."""
    present = now[..., 1:].logsumexp(-1)
    of_level = now.gather(-1, levels.clamp(max=READ - 1)[..., None])[..., 0]
    return -torch.where(levels == PRESENT, present, of_level).mean(1)


def change_losses(together: Tensor, changes: Tensor) -> Tensor:
    """Cross-entropy (B,) of log-probabilities (B, D, 4, 4, 6) and the changes (B, D) that are stated, mean over D.

    A change that the report before excludes teaches nothing.
    """
    of_change = together.flatten(-3, -2).logsumexp(-2)
    chosen = of_change.gather(-1, changes.clamp(0, COMPARED - 1)[..., None])[..., 0]
    known = (changes >= 0) & (changes < COMPARED) & (chosen > EXCLUDED / 2)
    return -torch.where(known, chosen, 0).mean(1)


class ComparisonBranch(nn.Module):
    """The head, and prompts for the decoder: the level of each finding, and what became of it.

    A prompt is ``T[finding, level]``, of a finding that is gone ``T[finding, present]``, plus the vector of its change,
    the same for every finding. In the position ``text`` a prompt is both numbers, to be put in words.
    """

    known: Tensor
    compares = True  # so the decoder is not shown the visit before: its prompts say what became of it

    def __init__(
        self, reader: Labeler, channels: int, words: Tensor, seed: int, position: PromptPosition, certain: float
    ):
        super().__init__()
        self.reader, self.position, self.certain = reader, position, certain
        self.temperature = 1.0
        generator = torch.Generator().manual_seed(seed)
        findings, width = len(reader.findings), words.shape[1]
        self.head = ComparisonHead(findings, channels, generator)
        self.first: ComparisonHead | None = None
        self.embeddings = nn.Parameter(torch.zeros(findings, len(LEVELS), width, device=words.device))
        self.changes = nn.Parameter(torch.zeros(len(DIRECTIONS), width, device=words.device))

    def prompts(self, seen: Encoded) -> Tensor:
        """Prompts (B, D, E) of what is read."""
        reading = self.read(seen)
        return self.embed(reading.levels, reading.changes)

    def read(self, seen: Encoded) -> Reading:
        """Read the findings of visits, compared with the visits before as far as these are shown."""
        now, together, shown = self.likelihoods(seen)
        return read(now, together, shown, self.certain, self.temperature)

    def key_slices(self, seen: Encoded) -> tuple[Tensor, Tensor]:
        """The slices (B, D) that each finding's query attends to most, now and before; UNKNOWN without an image."""
        queries = self.head.queries if self.first is None else self.head.queries.where(~self.known, self.first.queries)
        now, prior = key_slices(queries, seen.tokens, seen.slice_mask), seen.prior
        if prior is None or prior.images is None or seen.prior_tokens is None:
            return now, torch.full_like(now, UNKNOWN)
        return now, key_slices(queries, seen.prior_tokens, prior.images.slice_mask)

    def likelihoods(self, seen: Encoded) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probabilities of the levels now (B, D, 4), and jointly with those before, where shown (B, D)."""
        now, together, shown = self.by_head(self.head, seen)
        if self.first is not None:
            first, both, _ = self.by_head(self.first, seen)
            now = torch.where(self.known, first + _presence(now) - _presence(first), now)
            if together is not None and both is not None:
                graded = both + _presence(_presence(together.logsumexp(-1, keepdim=True), -3), -2)
                graded = graded - _presence(_presence(both.logsumexp(-1, keepdim=True), -3), -2)
                together = torch.where(self.known[..., None, None], graded, together)
        return now, together, shown

    def by_head(self, head: ComparisonHead, seen: Encoded) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """:meth:`likelihoods` of one head alone; those of the trained head are what it learns by."""
        attended = head.attend(seen.tokens, seen.slice_mask)
        now = head.levels(attended)
        prior, tokens = seen.prior, seen.prior_tokens
        if prior is None:
            return now, None, None
        before, change = None, now.new_zeros(*now.shape[:2], COMPARED)
        stated = self.levels_before(prior, now.device)
        shown = stated != UNKNOWN
        if prior.images is not None and tokens is not None:
            mask = prior.images.slice_mask
            earlier, with_image = head.attend(tokens, mask), mask.any(1)
            before = torch.where(with_image[:, None, None], head.levels(earlier), -log(READ))
            change = head.compare(earlier, attended, prior.days) * with_image[:, None, None]
            shown = shown | with_image[:, None]
        real = torch.tensor([name != self.reader.no_finding for name in self.reader.findings], device=now.device)
        return now, joint(levels_given(stated, before), now, change), shown & real

    def levels_before(self, prior: PriorBatch, device: torch.device) -> Tensor:
        """Levels (B, D) that the reports before state, UNKNOWN where none is shown or it has no word."""
        nothing = [UNKNOWN] * len(self.reader.findings)
        reports = prior.reports or [None] * len(prior.days)
        rows = [self.reader.stated_levels(text) if text and text.strip() else nothing for text in reports]
        return torch.tensor(rows, dtype=torch.long, device=device)

    def embed(self, levels: Tensor, changes: Tensor) -> Tensor:
        """Embed levels and changes (B, D) as prompts (B, D, E); in position ``text`` (B, D, 2)."""
        if self.position == "text":
            return torch.stack([levels, changes], dim=-1)
        rows = torch.where(changes == RESOLVED, PRESENT, levels)
        prompts = self.embeddings[torch.arange(rows.shape[1], device=rows.device), rows]
        changed = (changes > NONE) & (changes < UNCERTAIN)
        return prompts + self.changes[(changes - 1).clamp(0, len(DIRECTIONS) - 1)] * changed[..., None]

    @torch.no_grad()
    def fix_untrained(self, seed: int) -> None:
        """Fix untrained prompts, which are 0, at random directions: a finding's, and smaller ones of level and change.

        Decoders heed none near zero. A level's direction is the same for every finding; that of absence is none.
        """
        first, taught = self.head.bias[:, 0], self.head.weight.flatten(1).any(1)
        first.copy_(torch.where(taught, first, log(UNTRAINED / (1 - UNTRAINED) / (READ - 1))))
        generator = torch.Generator().manual_seed(seed)
        findings, levels, width = self.embeddings.shape
        drawn = torch.randn(findings + levels - 1 + len(self.changes), width, generator=generator).to(self.embeddings)
        drawn = drawn / drawn.square().mean(1, keepdim=True).sqrt()
        of_findings, of_levels, of_changes = drawn.split([findings, levels - 1, len(self.changes)])
        present = FIXED_RMS * of_findings[:, None] + CHANGE_RMS * of_levels
        prompts, trained = self.embeddings[:, 1:], self.embeddings.flatten(1).any(1)
        prompts.copy_(torch.where(trained[:, None, None], prompts, present))
        self.changes.copy_(torch.where(self.changes.any(), self.changes, CHANGE_RMS * of_changes))

    def to_words(self, prompts: Tensor) -> list[str]:
        """Put prompts (B, D, 2) of the position ``text`` in words: findings, degrees and changes, and what is gone."""
        texts = []
        for row in prompts.tolist():
            present, gone = [], []
            for name, (level, change) in zip(self.reader.findings, row, strict=True):
                words = name.replace("_", " ")
                if level and name != self.reader.no_finding:
                    degree = f"{LEVELS[level]} " * (level != PRESENT)
                    present.append(degree + words + f" ({CHANGES[change]})" * (change != NONE))
                elif change == RESOLVED:
                    gone.append(words)
            texts.append(f"Findings: {', '.join(present) or 'none'}." + f" Gone: {', '.join(gone)}." * bool(gone))
        return texts
