"""The diagnosis branch: it predicts findings from the image, and prompts the decoder with them.

The decoder gets one prompt per finding. In training the prompts are the findings of the report, at inference those
that the branch predicts. Their embeddings T are a tensor of its own, no part of the vocabulary: no text can spell a
prompt. In the position ``last`` (:data:`.PromptPosition`) T is (K, E) for K classes,
around the mean of the words' embeddings: the order marks the finding. Untrained, they disturb a decoder that was
trained without any. In the position ``memory`` T is (D, K, E), where a decoder has learnt to look for findings, and
begins near zero.
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
from fedtar_flare.models.report_generator import Encoded, PromptPosition, ReportGenerator

HeadKind = Literal["mean", "attention"]

NOISE = 0.01
"""Standard deviation of T around its start; that of a word is ten times as large."""
PROMPTS = "prompts"
"""Name of T in the file of a shipped head."""


def slice_means(tokens: Tensor, slice_mask: Tensor) -> Tensor:
    """Mean of each slice's tokens.

    Parameters
    ----------
    tokens : Tensor
        (B, S, N, C).
    slice_mask : Tensor
        (B, S), False at padding.

    Returns
    -------
    Tensor
        (B, S, C), float32; zero at padding.
    """
    return tokens.float().mean(2) * slice_mask[..., None]


class MeanHead(nn.Module):
    """FedMRG's head: a linear map of the mean over the slices' mean tokens, C channels, to K classes of D findings.

    With several slices their largest values are inputs too, since a small finding is in few of them.
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
    """A learned query for each finding attends to the image; a linear map, zero at first, classifies the result."""

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

    With a ``comparison`` the prompts also say what became of a finding, where a visit before is shown.

    Parameters
    ----------
    findings, classes, channels, slices : int
        D, K, C of the encoder, and S.
    words : Tensor
        The decoder's embeddings (V, E); T begins around their mean in the position ``last``.
    seed : int
        Of all initial values.
    head : {"mean", "attention"}
    position : PromptPosition
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
        position: PromptPosition = "last",
    ):
        super().__init__()
        self.findings, self.position = findings, position
        self.comparison: Comparison | None = None
        self.names: tuple[str, ...] = ()
        generator = torch.Generator().manual_seed(seed)
        self.head: nn.Module
        if head == "mean":
            self.head = MeanHead(findings, classes, channels, slices, generator)
        else:
            self.head = AttentionHead(findings, classes, channels, generator)
        if position in ("memory", "text"):
            start = NOISE * torch.randn(findings, classes, words.shape[1], generator=generator).to(words.device)
        else:
            noise = torch.randn(classes, words.shape[1], generator=generator)
            start = words.mean(0) + NOISE * noise.to(words.device)
        self.embeddings = nn.Parameter(start.detach().clone())

    def forward(self, tokens: Tensor, slice_mask: Tensor) -> Tensor:
        """Predict the findings.

        Parameters
        ----------
        tokens, slice_mask : Tensor
            (B, S, N, C) and (B, S).

        Returns
        -------
        Tensor
            Logits (B, D, K), float32.
        """
        return self.head(tokens, slice_mask)

    def prompts(self, seen: Encoded) -> Tensor:
        """Prompt the decoder with the predicted findings.

        Returns
        -------
        Tensor
            (B, D, E).
        """
        return self.embed(*self.predict(seen))

    def predict(self, seen: Encoded) -> tuple[Tensor, Tensor | None]:
        """Predict the classes of the findings, now and before.

        Returns
        -------
        classes, before : Tensor
            (B, D); the latter is None without a comparison.
        """
        classes = self(seen.tokens, seen.slice_mask).argmax(-1)
        if self.comparison is None or seen.prior is None:
            return classes, None
        images, tokens = seen.prior.images, seen.prior_tokens
        before = None if tokens is None or images is None else self(tokens, images.slice_mask).argmax(-1)
        return classes, self.comparison.before(seen.prior, before)

    def embed(self, classes: Tensor, before: Tensor | None = None) -> Tensor:
        """Embed classes as prompts.

        Parameters
        ----------
        classes, before : Tensor
            (B, D) now and, to be compared with, before.

        Returns
        -------
        Tensor
            (B, D, E); in the position ``text`` (B, D, 2), for :meth:`to_words`.
        """
        if self.position == "text":
            nothing = torch.full_like(classes, UNKNOWN)
            return torch.stack([classes, nothing if self.comparison is None or before is None else before], dim=-1)
        if self.position in ("last", "none"):
            return F.embedding(classes, self.embeddings)
        if self.comparison is not None and before is not None:
            return self.comparison.prompts(self.embeddings, classes, before)
        return self.embeddings[torch.arange(self.findings, device=classes.device), classes]

    def to_words(self, prompts: Tensor) -> list[str]:
        """Say prompts of the place ``text`` in words: findings that are present, new or gone.

        Parameters
        ----------
        prompts : Tensor
            (B, D, 2).
        """
        said = []
        for now, change in zip(prompts[..., 0].tolist(), changes_of(*prompts.unbind(-1)).tolist(), strict=True):
            rows = list(zip((name.replace("_", " ") for name in self.names), now, change, strict=True))
            there = [name + " (new)" * (new == NEW) for name, own, new in rows if own == POSITIVE]
            gone = [name for name, _, new in rows if new == RESOLVED]
            said.append(f"Findings: {', '.join(there) or 'none'}." + f" Gone: {', '.join(gone)}." * bool(gone))
        return said


class PromptedFindings(NamedTuple):
    """Class of each finding, and what became of it; None where nothing is known of the visit before."""

    classes: list[int]
    changes: list[int] | None = None


@dataclass(frozen=True)
class FindingsChoice:
    """Chooses the beam that states the prompted findings (:class:`~fedtar_flare.models.report_generator.Choice`).

    A decoder does not always write the findings of its prompts. Its beams differ in them, and ``label``, the labeler
    of the training reports, gives the findings' classes in each of ``candidates`` beams (1: no choice). ``names`` are
    those of the findings, where a report that leaves one out is to be completed by a plain sentence.
    """

    branch: DiagnosisBranch
    label: Callable[[str], Sequence[int]]
    candidates: int
    names: tuple[str, ...] = ()

    def prompted_findings(self, seen: Encoded) -> list[PromptedFindings]:
        """Findings that the decoder is prompted with, for each of B visits."""
        now, before = self.branch.predict(seen)
        if before is None:
            return [PromptedFindings(classes) for classes in now.tolist()]
        shown = (before != UNKNOWN).any(1).tolist()
        rows = zip(now.tolist(), changes_of(now, before).tolist(), shown, strict=True)
        return [PromptedFindings(classes, changes if known else None) for classes, changes, known in rows]

    def count_differences(self, text: str, prompted: PromptedFindings) -> int:
        """Findings whose class differs in the text; ties are broken by the statements of change that differ."""
        found = sum(said != wanted for said, wanted in zip(self.label(text), prompted.classes, strict=True))
        comparison = self.branch.comparison
        if comparison is None or prompted.changes is None:
            return found
        return found * (1 + len(prompted.changes)) + comparison.count_differences(text, prompted.changes)

    def complete(self, text: str, prompted: PromptedFindings) -> str:
        """The text, with a plain sentence for each prompted finding that it does not state."""
        for number, name in enumerate(self.names):
            if prompted.classes[number] == POSITIVE and not means_no_finding(name) and number not in self._stated(text):
                text = add_plain_sentence(text, name, number, self._stated)
        return text

    def _stated(self, text: str) -> frozenset[int]:
        """Numbers of the findings that a text states, without "no finding"."""
        pairs = zip(self.label(text), self.names, strict=True)
        return frozenset(i for i, (label, name) in enumerate(pairs) if label == POSITIVE and not means_no_finding(name))


def diagnosis_losses(logits: Tensor, classes: Tensor) -> Tensor:
    """Cross-entropy of each report's findings.

    Parameters
    ----------
    logits, classes : Tensor
        (B, D, K) and (B, D).

    Returns
    -------
    Tensor
        (B,), mean over the D findings.
    """
    return F.cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction="none").view(classes.shape).mean(1)


def extend(generator: ReportGenerator, settings: Mapping[str, Any]) -> None:
    """Give a base model its diagnosis branch; none for the labeler ``none``.

    ConfigError where the decoder has too few positions for prompts and report, or the head's weights do not fit.
    """
    found = labeler(settings["labeler"], settings.get("prompt_classes", "all"))
    if not found.findings:
        return
    position = settings.get("prompt_place", "last")
    if position == "last":
        require_positions(len(found.findings), generator.max_length, generator.decoder.config.max_position_embeddings)
    branch = DiagnosisBranch(
        len(found.findings),
        len(found.classes),
        generator.channels,
        settings["slices"],
        generator.decoder.get_input_embeddings().weight.detach(),
        settings["seed"],
        settings.get("head", "mean"),
        position,
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
    """Fix every untrained prompt: that of a finding's last class at a random direction, the others at zero.

    Random directions of many dimensions are nearly orthogonal, and a decoder can learn to tell them apart; it does not
    learn to heed prompts near zero (docs/research/experiments.md).
    """
    rows = branch.embeddings
    untrained = rows.square().mean(2, keepdim=True).sqrt() < 10 * NOISE
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(rows.shape[0], rows.shape[2], generator=generator).to(rows)
    fixed = torch.zeros_like(rows)
    fixed[:, -1] = FIXED_RMS * drawn / drawn.square().mean(1, keepdim=True).sqrt()
    rows.copy_(torch.where(untrained, fixed, rows))


def load_shipped_head(branch: DiagnosisBranch, name: str) -> None:
    """Load a shipped head and, in the position ``memory``, its prompts; ConfigError where the shapes differ."""
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
    if branch.position != "memory":
        return
    if prompts.shape != branch.embeddings.shape:
        raise ConfigError(
            f"the warm-started prompts '{name}' have the shape {tuple(prompts.shape)}, the model wants "
            f"{tuple(branch.embeddings.shape)}: set fedmrg.head_weights to none"
        )
    with torch.no_grad():
        branch.embeddings.copy_(prompts)


def head_file(name: str) -> str:
    """Path of a shipped head."""
    return str(ASSETS / name / "diagnosis.safetensors")


def require_positions(findings: int, max_length: int, positions: int) -> None:
    """Refuse prompts and reports that are longer than the decoder's positions."""
    if findings + max_length > positions:
        raise ConfigError(
            f"{findings} diagnosis prompts and reports of {max_length} tokens (model.max_length) do not fit in the "
            f"decoder's {positions} positions: set model.max_length to {positions - findings} or less, "
            "fedmrg.prompts to memory, or fedmrg.labeler to none"
        )
