"""The diagnosis branch: it reads the findings off the image, and prompts the decoder with them.

The decoder reads one prompt per finding. In training the prompts are what the report says, at inference what the branch
predicts. Their embeddings T are a tensor of its own, no part of the vocabulary: no text can spell a prompt. In the
place ``last`` (:data:`~fedtar_flare.models.prompting.Place`) T is (K, E) for K classes, around the mean of the words'
embeddings: the position tells the finding. Untrained, they disturb a decoder that was trained without any. In the place
``memory`` T is (D, K, E), which a decoder reads where it has learnt to look for findings, and begins near zero.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.learning.comparison import FIXED_RMS, NEW, RESOLVED, UNKNOWN, Comparison, changes_of
from fedtar_flare.learning.labels import POSITIVE, labeler
from fedtar_flare.learning.plain_words import add_plain_sentence, means_no_finding
from fedtar_flare.models.config import ASSETS
from fedtar_flare.models.prompting import Encoded, Place
from fedtar_flare.models.report_generator import ReportGenerator

__all__ = ["DiagnosisBranch", "diagnosis_losses", "extend", "require_positions", "slice_means"]

HeadKind = Literal["mean", "attention"]

NOISE = 0.01
"""Standard deviation of T around its start; a word's has ten times it."""
PROMPTS = "prompts"
"""Name of T in the file of a shipped head."""


def slice_means(tokens: Tensor, slice_mask: Tensor) -> Tensor:
    """Means (B, S, C) of each slice's tokens, float32; zero at slices that are padding."""
    return tokens.float().mean(2) * slice_mask[..., None]


class MeanHead(nn.Module):
    """The paper's: a linear map of the mean of the encoder's tokens, C channels, to K classes of D findings.

    It reads the mean of the slices' means; of several slices their largest values too, since a small finding is in few
    of them.
    """

    def __init__(self, findings: int, classes: int, channels: int, slices: int, generator: torch.Generator):
        super().__init__()
        self.shape, self.slices = (findings, classes), slices
        read = channels * (2 if slices > 1 else 1)
        self.weight = nn.Parameter((torch.rand(findings * classes, read, generator=generator) * 2 - 1) / read**0.5)
        self.bias = nn.Parameter(torch.zeros(findings * classes))

    def forward(self, tokens: Tensor, slice_mask: Tensor) -> Tensor:
        """Logits (B, D, K), float32, of tokens (B, S, N, C) and mask (B, S)."""
        means = slice_means(tokens, slice_mask)
        read = means.sum(1) / slice_mask.sum(1, keepdim=True).clamp(min=1)
        if self.slices > 1:
            largest = means.masked_fill(~slice_mask[..., None], -torch.inf).amax(1)
            read = torch.cat([read, largest], dim=1)
        return F.linear(read, self.weight.float(), self.bias.float()).view(-1, *self.shape)


class AttentionHead(nn.Module):
    """A learned query for each finding looks where in the image it is; a linear map, zero at first, reads it there."""

    def __init__(self, findings: int, classes: int, channels: int, generator: torch.Generator):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(findings, channels, generator=generator))
        self.weight = nn.Parameter(torch.zeros(findings, classes, channels))
        self.bias = nn.Parameter(torch.zeros(findings, classes))

    def forward(self, tokens: Tensor, slice_mask: Tensor) -> Tensor:
        """Logits (B, D, K), float32: ``w_dk . sum_n softmax_n(q_d . x_n / sqrt(C)) x_n + b_dk``, x normalised."""
        x = F.layer_norm(tokens.float(), tokens.shape[-1:])
        scores = torch.einsum("dc,bsnc->bdsn", self.queries.float(), x) * x.shape[-1] ** -0.5
        scores = scores.masked_fill(~slice_mask[:, None, :, None], -torch.inf).flatten(2)
        found = scores.softmax(-1) @ x.flatten(1, 2)
        return torch.einsum("bdc,dkc->bdk", found, self.weight.float()) + self.bias.float()


class DiagnosisBranch(nn.Module):
    """A head on the encoder's tokens, and the prompts' embeddings T.

    With a :attr:`comparison`, the prompts tell what became of a finding too, where a visit before is shown.

    There are D ``findings`` of K ``classes``; ``channels`` is C of the encoder. T begins around the mean of ``words``,
    the decoder's embeddings (V, E), in the place ``last``. The initial values follow from ``seed`` alone.
    """

    def __init__(
        self,
        findings: int,
        classes: int,
        channels: int,
        slices: int,
        words: Tensor,
        seed: int,
        head: HeadKind = "mean",
        place: Place = "last",
    ):
        super().__init__()
        self.findings, self.place = findings, place
        self.comparison: Comparison | None = None
        self.names: tuple[str, ...] = ()
        generator = torch.Generator().manual_seed(seed)
        self.head: nn.Module
        if head == "mean":
            self.head = MeanHead(findings, classes, channels, slices, generator)
        else:
            self.head = AttentionHead(findings, classes, channels, generator)
        if place in ("memory", "text"):
            start = NOISE * torch.randn(findings, classes, words.shape[1], generator=generator).to(words.device)
        else:
            noise = torch.randn(classes, words.shape[1], generator=generator)
            start = words.mean(0) + NOISE * noise.to(words.device)
        self.embeddings = nn.Parameter(start.detach().clone())

    def forward(self, tokens: Tensor, slice_mask: Tensor) -> Tensor:
        """Logits (B, D, K) of tokens (B, S, N, C) and mask (B, S), float32."""
        return self.head(tokens, slice_mask)

    def prompts(self, seen: Encoded) -> Tensor:
        """Prompts (B, D, E) of what the branch predicts."""
        return self.embed(*self.predict(seen))

    def predict(self, seen: Encoded) -> tuple[Tensor, Tensor | None]:
        """Classes (B, D) that the branch predicts, and those before, (B, D); None without a comparison."""
        classes = self(seen.tokens, seen.slice_mask).argmax(-1)
        if self.comparison is None or seen.prior is None:
            return classes, None
        images, tokens = seen.prior.images, seen.prior_tokens
        before = None if tokens is None or images is None else self(tokens, images.slice_mask).argmax(-1)
        return classes, self.comparison.before(seen.prior, before)

    def embed(self, classes: Tensor, before: Tensor | None = None) -> Tensor:
        """Prompts (B, D, E) of classes (B, D), compared with those before where they are given.

        In the place ``text``, the classes (B, D, 2) now and before themselves, which :meth:`to_words` reads.
        """
        if self.place == "text":
            nothing = torch.full_like(classes, UNKNOWN)
            return torch.stack([classes, nothing if self.comparison is None or before is None else before], dim=-1)
        if self.place in ("last", "none"):
            return F.embedding(classes, self.embeddings)
        if self.comparison is not None and before is not None:
            return self.comparison.prompts(self.embeddings, classes, before)
        return self.embeddings[torch.arange(self.findings, device=classes.device), classes]

    def to_words(self, prompts: Tensor) -> list[str]:
        """Prompts (B, D, 2) of the place ``text`` in words: what is there, new or gone."""
        said = []
        for now, change in zip(prompts[..., 0].tolist(), changes_of(*prompts.unbind(-1)).tolist(), strict=True):
            rows = list(zip((name.replace("_", " ") for name in self.names), now, change, strict=True))
            there = [name + " (new)" * (new == NEW) for name, own, new in rows if own == POSITIVE]
            gone = [name for name, _, new in rows if new == RESOLVED]
            said.append(f"Findings: {', '.join(there) or 'none'}." + f" Gone: {', '.join(gone)}." * bool(gone))
        return said


class PromptedFindings(NamedTuple):
    """Number of each finding's class, and of what became of it; None where nothing is known of the visit before."""

    classes: list[int]
    changes: list[int] | None = None


@dataclass(frozen=True)
class FindingsChoice:
    """A :class:`~fedtar_flare.models.prompting.Choice` of the beam that says what the decoder was prompted with.

    A decoder does not always write the findings of its prompts. Its beams differ in them, and ``label``, the labeler
    that made the prompts of training, reads the classes of the D findings in each of ``candidates`` beams (1: there is
    no choice). ``names`` are those of the findings, where a report that leaves one out is to be completed by a plain
    sentence.
    """

    branch: DiagnosisBranch
    label: Callable[[str], Sequence[int]]
    candidates: int
    names: tuple[str, ...] = ()

    def prompted_findings(self, seen: Encoded) -> list[PromptedFindings]:
        """For each of B images."""
        now, before = self.branch.predict(seen)
        if before is None:
            return [PromptedFindings(classes) for classes in now.tolist()]
        shown = (before != UNKNOWN).any(1).tolist()
        rows = zip(now.tolist(), changes_of(now, before).tolist(), shown, strict=True)
        return [PromptedFindings(classes, changes if known else None) for classes, changes, known in rows]

    def count_differences(self, text: str, prompted: PromptedFindings) -> int:
        """Findings that are in another class in the text; of two texts with as many, the one that says of fewer
        findings otherwise what became of them differs less.
        """
        found = sum(said != wanted for said, wanted in zip(self.label(text), prompted.classes, strict=True))
        comparison = self.branch.comparison
        if comparison is None or prompted.changes is None:
            return found
        return found * (1 + len(prompted.changes)) + comparison.count_differences(text, prompted.changes)

    def complete(self, text: str, prompted: PromptedFindings) -> str:
        """The text, with a plain sentence for each finding of the prompts that it does not state."""
        for number, name in enumerate(self.names):
            if prompted.classes[number] == POSITIVE and not means_no_finding(name) and number not in self._stated(text):
                text = add_plain_sentence(text, name, number, self._stated)
        return text

    def _stated(self, text: str) -> frozenset[int]:
        """Numbers of the findings in a text, without the one that says that there is none."""
        pairs = zip(self.label(text), self.names, strict=True)
        return frozenset(i for i, (label, name) in enumerate(pairs) if label == POSITIVE and not means_no_finding(name))


def diagnosis_losses(logits: Tensor, classes: Tensor) -> Tensor:
    """Cross-entropy of each report, mean over its D findings, shape (B,)."""
    return F.cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction="none").view(classes.shape).mean(1)


def extend(generator: ReportGenerator, settings: Mapping[str, Any]) -> None:
    """Give a base model its diagnosis branch; none for the labeler ``none``.

    ``settings`` has ``labeler``, ``slices`` and ``seed``, and may have ``prompt_classes``, ``prompt_place``, ``head``,
    ``head_weights``, ``fixed_prompts`` (prompts that are not to be trained, :func:`fix_prompts`), ``candidates`` and
    ``complete`` (:class:`FindingsChoice`), and ``changes`` (prompts tell what became of a finding,
    :class:`~fedtar_flare.learning.comparison.Comparison`). Raises :class:`ConfigError` where the decoder has too few
    positions for prompts and report, or the head's weights do not fit.
    """
    found = labeler(settings["labeler"], settings.get("prompt_classes", "all"))
    if not found.findings:
        return
    place = settings.get("prompt_place", "last")
    if place == "last":
        require_positions(len(found.findings), generator.max_length, generator.decoder.config.max_position_embeddings)
    branch = DiagnosisBranch(
        len(found.findings),
        len(found.classes),
        generator.channels,
        settings["slices"],
        generator.decoder.get_input_embeddings().weight.detach(),
        settings["seed"],
        settings.get("head", "mean"),
        place,
    )
    if weights := settings.get("head_weights"):
        load_shipped_head(branch, weights)
    if settings.get("fixed_prompts"):
        fix_prompts(branch, settings["seed"])
    if settings.get("changes"):
        comparison = Comparison(found, branch.embeddings.shape[2], settings["seed"])
        branch.comparison = comparison.to(branch.embeddings.device)
    branch.names, generator.diagnosis = found.findings, branch
    candidates, complete = settings.get("candidates", 1), settings.get("complete", False)
    if candidates > 1 or complete:
        generator.choice = FindingsChoice(branch, found.label, candidates, found.findings if complete else ())


@torch.no_grad()
def fix_prompts(branch: DiagnosisBranch, seed: int) -> None:
    """Fix every prompt that nobody trained: that of a finding's last class at a random direction, others at zero.

    Random directions of many dimensions are as good as orthogonal, and a decoder can learn to read them; prompts near
    zero it does not learn to heed (docs/research/experiments.md).
    """
    rows = branch.embeddings
    untrained = rows.square().mean(2, keepdim=True).sqrt() < 10 * NOISE
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(rows.shape[0], rows.shape[2], generator=generator).to(rows)
    fixed = torch.zeros_like(rows)
    fixed[:, -1] = FIXED_RMS * drawn / drawn.square().mean(1, keepdim=True).sqrt()
    rows.copy_(torch.where(untrained, fixed, rows))


def load_shipped_head(branch: DiagnosisBranch, name: str) -> None:
    """Load a shipped head and, in the place ``memory``, its prompts; :class:`ConfigError` where the shapes differ."""
    from safetensors.torch import load_file

    state = {key: value.float() for key, value in load_file(head_file(name)).items()}
    prompts = state.pop(PROMPTS)
    shapes = {key: tuple(value.shape) for key, value in branch.head.state_dict().items()}
    if {key: tuple(value.shape) for key, value in state.items()} != shapes:
        raise ConfigError(
            f"the warm-started head '{name}' does not fit this model, which wants one of {shapes}: set "
            "fedmrg.head_weights to none"
        )
    branch.head.load_state_dict(state)
    if branch.place != "memory":
        return
    if prompts.shape != branch.embeddings.shape:
        raise ConfigError(
            f"the warm-started prompts '{name}' have the shape {tuple(prompts.shape)}, the model wants "
            f"{tuple(branch.embeddings.shape)}: set fedmrg.head_weights to none"
        )
    with torch.no_grad():
        branch.embeddings.copy_(prompts)


def head_file(name: str) -> str:
    """Where a shipped head lies."""
    return str(ASSETS / name / "diagnosis.safetensors")


def require_positions(findings: int, max_length: int, positions: int) -> None:
    """Raise :class:`ConfigError` where prompts and report together are longer than the decoder's positions."""
    if findings + max_length > positions:
        raise ConfigError(
            f"{findings} diagnosis prompts and reports of {max_length} tokens (model.max_length) do not fit in the "
            f"decoder's {positions} positions: set model.max_length to {positions - findings} or less, "
            "fedmrg.prompts to memory, or fedmrg.labeler to none"
        )
