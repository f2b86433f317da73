"""The diagnosis branch: it predicts findings from the image, and prompts the decoder with one embedding for each.

The embeddings T are a tensor of its own: no text can spell a prompt. In the position ``last`` (:data:`.PromptPosition`)
T is (K, E) for K classes, around the mean of the words' embeddings: the order marks the finding. In the position
``memory`` T is (D, K, E), and begins near zero. The branch that compares two visits is :mod:`.comparison`'s.
"""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import without_prefix
from fedtar_flare.learning.choice import FindingsChoice
from fedtar_flare.learning.comparison import ComparisonBranch, attention
from fedtar_flare.learning.labels import PRESENT, Labeler, labeler
from fedtar_flare.models.config import ASSETS
from fedtar_flare.models.report_generator import Encoded, PromptPosition, ReportGenerator

NOISE = 0.01
"""Standard deviation of T around its start; that of a word is ten times as large."""
COMPARISON, PRESENCE = "comparison.", "presence."
"""Prefixes of the two heads in the shipped file: of levels and changes with all prompts, and of presence alone."""


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
        attended = attention(self.queries, x, slice_mask) @ x.flatten(1, 2)
        return torch.einsum("bdc,dkc->bdk", attended, self.weight.float()) + self.bias.float()


class DiagnosisBranch(nn.Module):
    """A head (``mean`` or ``attention``) of D findings and K classes on C channels, and the prompts' embeddings T."""

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
        generator = torch.Generator().manual_seed(seed)
        kind = partial(MeanHead, slices=slices) if head == "mean" else AttentionHead
        self.head: nn.Module = kind(findings, classes, channels, generator=generator)
        shape = (findings, classes, words.shape[1]) if position == "memory" else (classes, words.shape[1])
        start = NOISE * torch.randn(shape, generator=generator).to(words.device)
        self.embeddings = nn.Parameter(start if position == "memory" else words.detach().mean(0) + start)

    def forward(self, tokens: Tensor, slice_mask: Tensor) -> Tensor:
        """Logits (B, D, K), float32, of tokens (B, S, N, C) and mask (B, S)."""
        return self.head(tokens, slice_mask)

    def prompts(self, seen: Encoded) -> Tensor:
        """Prompts (B, D, E) of the predicted findings."""
        return self.embed(self(seen.tokens, seen.slice_mask).argmax(-1))

    def embed(self, classes: Tensor) -> Tensor:
        """Embed classes (B, D) as prompts (B, D, E)."""
        if self.position != "memory":
            return F.embedding(classes, self.embeddings)
        return self.embeddings[torch.arange(self.findings, device=classes.device), classes]


def diagnosis_losses(logits: Tensor, classes: Tensor) -> Tensor:
    """Cross-entropy (B,) of logits (B, D, K) and classes (B, D), mean over the D findings."""
    return F.cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction="none").view(classes.shape).mean(1)


def extend(generator: ReportGenerator, settings: Mapping[str, Any]) -> None:
    """Give a base model its diagnosis branch, none for the labeler ``none``; ConfigError where it does not fit."""
    compares = settings["prompt_classes"] == "levels"
    reader = labeler(settings["labeler"], "all" if compares else settings["prompt_classes"])
    if not reader.findings:
        return
    position = settings["prompt_place"]
    if position == "last":
        require_positions(len(reader.findings), generator.max_length, generator.decoder.config.max_position_embeddings)
    if position == "text" and not hasattr(generator.decoder, "get_image_features"):
        raise ConfigError("diagnosis.labeler: this 'vlm' gives no image features to read findings from; take 'none'")
    words = generator.decoder.get_input_embeddings().weight.detach()
    if compares:
        _compare(generator, reader, words, settings)
        return
    findings, classes = len(reader.findings), len(reader.classes)
    about = {"head": settings["head"], "position": position}
    branch = DiagnosisBranch(
        findings, classes, generator.channels, settings["slices"], words, settings["seed"], **about
    )
    if name := settings.get("head_weights"):
        state = _shipped(name, PRESENCE)
        state[_T] = _shipped(name, COMPARISON)[_T][:, [0, PRESENT]]
        _load(branch, state, name)
    generator.diagnosis = branch


def _compare(generator: ReportGenerator, reader: Labeler, words: Tensor, settings: Mapping[str, Any]) -> None:
    """Add a branch that compares two visits, and the choice of the text that says what it read."""
    seed, position = settings["seed"], settings["prompt_place"]
    branch = ComparisonBranch(reader, generator.channels, words, seed, position, settings["certain"])
    if name := settings["head_weights"]:
        _load(branch, _shipped(name, COMPARISON), name)
        branch.first = copy.deepcopy(branch.head).requires_grad_(False)
        branch.register_buffer("known", branch.head.weight.flatten(1).any(1)[:, None], persistent=False)
    branch.fix_untrained(seed)
    generator.diagnosis = branch
    if settings["candidates"] > 1 or settings["complete"]:
        generator.choice = FindingsChoice(branch, settings["candidates"], settings["complete"])


_T = "embeddings"


def _shipped(name: str, prefix: str) -> dict[str, Tensor]:
    """A part of the shipped file of heads."""
    from safetensors.torch import load_file

    return {key: value.float() for key, value in without_prefix(load_file(head_file(name)), prefix).items()}


def _load(branch: nn.Module, state: Mapping[str, Tensor], name: str) -> None:
    """Load shipped weights; ConfigError where the shapes differ."""
    shapes = {key: tuple(value.shape) for key, value in branch.state_dict().items()}
    if {key: tuple(value.shape) for key, value in state.items()} != shapes:
        text = f"the warm-started head '{name}' does not fit this model, which wants {shapes}"
        raise ConfigError(f"{text}: set fedmrg.head_weights to none")
    if not next(branch.parameters()).is_meta:  # an outline, of which memory is estimated, has no values
        branch.load_state_dict(dict(state))


def head_file(name: str) -> str:
    """Path of a shipped head."""
    return str(ASSETS / name / "diagnosis.safetensors")


def require_positions(findings: int, max_length: int, positions: int) -> None:
    """Refuse prompts and reports that are longer than the decoder's positions."""
    if findings + max_length > positions:
        text = f"{findings} diagnosis prompts and reports of {max_length} tokens exceed {positions} positions"
        raise ConfigError(f"{text}: set model.max_length to {positions - findings}, or fedmrg.prompts to memory")
