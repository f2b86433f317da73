"""The diagnosis branch: it predicts findings from the image, and prompts the decoder with one embedding for each.

The embeddings T are a tensor of its own: no text can spell a prompt. In the position ``last`` (:data:`.PromptPosition`)
T is (K, E) for K classes, around the mean of the words' embeddings: the order marks the finding. In the position
``memory`` T is (D, K, E), and begins near zero.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.learning.comparison import FIXED_RMS, NEW, RESOLVED, UNKNOWN, Comparison, changes_of
from fedtar_flare.learning.labels import POSITIVE, labeler
from fedtar_flare.models.config import ASSETS
from fedtar_flare.models.report_generator import Encoded, PromptPosition, ReportGenerator

NOISE = 0.01
"""Standard deviation of T around its start; that of a word is ten times as large."""
PROMPTS = "prompts"
"""Name of T in the file of a shipped head."""
_SIDES = {"right", "left"}
_SENTENCE_ENDS = re.compile(r"(?<=[.;!])\s+|\n+")


def slice_means(tokens: Tensor, slice_mask: Tensor) -> Tensor:
    """Mean (B, S, C) of each slice's tokens (B, S, N, C), float32; zero where the mask (B, S) is False, at padding."""
    return tokens.float().mean(2) * slice_mask[..., None]


class MeanHead(nn.Module):
    """FedMRG's head: a linear map of the mean over slices' mean tokens and, of several slices, of their largest."""

    def __init__(self, findings: int, classes: int, channels: int, slices: int, generator: torch.Generator):
        super().__init__()
        self.shape, self.slices = (findings, classes), slices
        inputs = channels * (2 if slices > 1 else 1)
        self.weight = nn.Parameter((torch.rand(findings * classes, inputs, generator=generator) * 2 - 1) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(findings * classes))

    def forward(self, tokens: Tensor, slice_mask: Tensor) -> Tensor:
        """Logits (B, D, K), float32, of tokens (B, S, N, C) and mask (B, S)."""
        means = slice_means(tokens, slice_mask)
        features = means.sum(1) / slice_mask.sum(1, keepdim=True).clamp(min=1)
        if self.slices > 1:
            largest = means.masked_fill(~slice_mask[..., None], -torch.inf).amax(1)
            features = torch.cat([features, largest], dim=1)
        return F.linear(features, self.weight.float(), self.bias.float()).view(-1, *self.shape)


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
        attended = scores.softmax(-1) @ x.flatten(1, 2)
        return torch.einsum("bdc,dkc->bdk", attended, self.weight.float()) + self.bias.float()


class DiagnosisBranch(nn.Module):
    """A head (``mean`` or ``attention``) on the encoder's tokens, and the prompts' embeddings T.

    There are D findings and K classes, C channels and S slices; ``words`` are the decoder's embeddings (V, E). With a
    ``comparison`` the prompts also say what became of a finding.
    """

    def __init__(
        self,
        findings: int,
        classes: int,
        channels: int,
        slices: int,
        words: Tensor,
        seed: int,
        head: str = "mean",
        position: PromptPosition = "last",
    ):
        super().__init__()
        self.findings, self.position = findings, position
        self.comparison: Comparison | None = None
        self.names: tuple[str, ...] = ()
        generator = torch.Generator().manual_seed(seed)
        kind = partial(MeanHead, slices=slices) if head == "mean" else AttentionHead
        self.head: nn.Module = kind(findings, classes, channels, generator=generator)
        around_words = position not in ("memory", "text")
        shape = (classes, words.shape[1]) if around_words else (findings, classes, words.shape[1])
        start = NOISE * torch.randn(shape, generator=generator).to(words.device)
        self.embeddings = nn.Parameter(words.detach().mean(0) + start if around_words else start)

    def forward(self, tokens: Tensor, slice_mask: Tensor) -> Tensor:
        """Logits (B, D, K), float32, of tokens (B, S, N, C) and mask (B, S)."""
        return self.head(tokens, slice_mask)

    def prompts(self, seen: Encoded) -> Tensor:
        """Prompts (B, D, E) of the predicted findings."""
        return self.embed(*self.predict(seen))

    def predict(self, seen: Encoded) -> tuple[Tensor, Tensor | None]:
        """Predict the classes (B, D) of the findings, now and before; the latter are None without a comparison."""
        classes = self(seen.tokens, seen.slice_mask).argmax(-1)
        if self.comparison is None or seen.prior is None:
            return classes, None
        images, tokens = seen.prior.images, seen.prior_tokens
        before = None if tokens is None or images is None else self(tokens, images.slice_mask).argmax(-1)
        return classes, self.comparison.before(seen.prior, before)

    def embed(self, classes: Tensor, before: Tensor | None = None) -> Tensor:
        """Embed classes (B, D), compared with those before, as prompts (B, D, E); in position ``text`` (B, D, 2)."""
        if self.position == "text":
            nothing = torch.full_like(classes, UNKNOWN)
            return torch.stack([classes, nothing if self.comparison is None or before is None else before], dim=-1)
        if self.position in ("last", "none"):
            return F.embedding(classes, self.embeddings)
        if self.comparison is not None and before is not None:
            return self.comparison.prompts(self.embeddings, classes, before)
        return self.embeddings[torch.arange(self.findings, device=classes.device), classes]

    def to_words(self, prompts: Tensor) -> list[str]:
        """Say prompts (B, D, 2) of the position ``text`` in words: findings that are present, new or gone."""
        texts = []
        for now, change in zip(prompts[..., 0].tolist(), changes_of(*prompts.unbind(-1)).tolist(), strict=True):
            rows = list(zip((name.replace("_", " ") for name in self.names), now, change, strict=True))
            present = [name + " (new)" * (new == NEW) for name, class_, new in rows if class_ == POSITIVE]
            gone = [name for name, _, new in rows if new == RESOLVED]
            texts.append(f"Findings: {', '.join(present) or 'none'}." + f" Gone: {', '.join(gone)}." * bool(gone))
        return texts


class PromptedFindings(NamedTuple):
    """Class of each finding, and what became of it; None where nothing is known of the visit before."""

    classes: list[int]
    changes: list[int] | None = None


@dataclass(frozen=True)
class FindingsChoice:
    """Chooses the beam that states the prompted findings.

    ``label`` gives the findings' classes in each of ``candidates`` beams (1: no choice). ``names`` are those of the
    findings, where a report that leaves one out is completed by a plain sentence.
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
        different = sum(said != wanted for said, wanted in zip(self.label(text), prompted.classes, strict=True))
        comparison = self.branch.comparison
        if comparison is None or prompted.changes is None:
            return different
        return different * (1 + len(prompted.changes)) + comparison.count_differences(text, prompted.changes)

    def complete(self, text: str, prompted: PromptedFindings) -> str:
        """The text, with a plain sentence for each prompted finding that it does not state.

        Sentences that name such a finding without stating any are left out; the text then states nothing else anew.
        """
        for number, name in enumerate(self.names):
            stated = self._stated(text)
            if prompted.classes[number] != POSITIVE or _means_no_finding(name) or number in stated:
                continue
            words = _words(name)
            left = []
            for sentence in filter(None, map(str.strip, _SENTENCE_ENDS.split(text))):
                if self._stated(sentence) or not set(words) - _SIDES <= set(_words(sentence)):
                    left.append(sentence)
            side_first = [words[-1], *words[:-1]] if words[-1] in _SIDES else words
            longer = " ".join([*left, f"There is {' '.join(side_first)}."])
            if self._stated(longer) == stated | {number}:
                text = longer
        return text

    def _stated(self, text: str) -> frozenset[int]:
        """Numbers of the findings that a text states, without "no finding"."""
        pairs = zip(self.label(text), self.names, strict=True)
        return frozenset(
            i for i, (label, name) in enumerate(pairs) if label == POSITIVE and not _means_no_finding(name)
        )


def _means_no_finding(name: str) -> bool:
    return name.lower().replace("_", " ") == "no finding"


def _words(text: str) -> list[str]:
    """Words of a text or of a finding's name, in which underscores may separate them; a side is the last."""
    return re.findall(r"[a-z0-9]+", text.lower().replace("_", " "))


def diagnosis_losses(logits: Tensor, classes: Tensor) -> Tensor:
    """Cross-entropy (B,) of logits (B, D, K) and classes (B, D), mean over the D findings."""
    return F.cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction="none").view(classes.shape).mean(1)


def extend(generator: ReportGenerator, settings: Mapping[str, Any]) -> None:
    """Give a base model its diagnosis branch, none for the labeler ``none``; ConfigError where it does not fit."""
    reader = labeler(settings["labeler"], settings.get("prompt_classes", "all"))
    if not reader.findings:
        return
    position = settings.get("prompt_place", "last")
    if position == "last":
        require_positions(len(reader.findings), generator.max_length, generator.decoder.config.max_position_embeddings)
    if position == "text" and not hasattr(generator.decoder, "get_image_features"):
        raise ConfigError("diagnosis.labeler: this 'vlm' gives no image features to read findings from; take 'none'")
    branch = DiagnosisBranch(
        len(reader.findings),
        len(reader.classes),
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
        comparison = Comparison(reader, branch.embeddings.shape[2], settings["seed"])
        branch.comparison = comparison.to(branch.embeddings.device)
    branch.names, generator.diagnosis = reader.findings, branch
    candidates, complete = settings.get("candidates", 1), settings.get("complete", False)
    if candidates > 1 or complete:
        generator.choice = FindingsChoice(branch, reader.label, candidates, reader.findings if complete else ())


@torch.no_grad()
def fix_prompts(branch: DiagnosisBranch, seed: int) -> None:
    """Fix untrained prompts: that of a finding's last class at a random direction, as decoders heed none near zero."""
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
    cure = "set fedmrg.head_weights to none"
    if {key: tuple(value.shape) for key, value in state.items()} != shapes:
        raise ConfigError(f"the warm-started head '{name}' does not fit this model, which wants {shapes}: {cure}")
    branch.head.load_state_dict(state)
    if branch.position == "memory":
        sent, wanted = tuple(prompts.shape), tuple(branch.embeddings.shape)
        if sent != wanted:
            raise ConfigError(f"the prompts '{name}' have the shape {sent}, the model wants {wanted}: {cure}")
        with torch.no_grad():
            branch.embeddings.copy_(prompts)


def head_file(name: str) -> str:
    """Path of a shipped head."""
    return str(ASSETS / name / "diagnosis.safetensors")


def require_positions(findings: int, max_length: int, positions: int) -> None:
    """Refuse prompts and reports that are longer than the decoder's positions."""
    if findings + max_length > positions:
        text = (
            f"{findings} diagnosis prompts and reports of {max_length} tokens are more than the decoder's {positions}"
        )
        raise ConfigError(
            f"{text} positions: set model.max_length to {positions - findings}, or fedmrg.prompts to memory"
        )
