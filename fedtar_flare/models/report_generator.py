"""The report generator: image of a visit in, report out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtar_flare.models.decoder import build_decoder
from fedtar_flare.models.encoders import build_encoder
from fedtar_flare.models.prior import PriorMarks, root_mean_square
from fedtar_flare.models.tokenizer import IGNORED, ReportTokenizer

if TYPE_CHECKING:
    from fedtar_flare.imaging.batch import ImageBatch
    from fedtar_flare.models.config import ModelConfig


WAVELENGTHS_MM = (16.0, 1024.0)  # shortest and longest of the position features
FREQUENCIES = 8


def report_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean token loss of each report, shape (B,), float32.

    ``logits`` (B, L, V) at position i predict the token at i + 1; ``labels`` (B, L) are -100 where no loss is taken.
    """
    targets = labels[:, 1:]
    tokens = F.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(targets.shape)
    return tokens.sum(1) / (targets != IGNORED).sum(1).clamp(min=1)


class SliceAttentionPooling(nn.Module):
    """Learned queries read each slice, and the slice's position along the body is added to what they find.

    A slice gives ``queries`` memory tokens, softmax(q . norm(x)) of its own tokens, whatever the other slices and their
    number. Positions are in millimetres (sines and cosines, then a linear map): thick and thin slices share one scale.
    """

    def __init__(self, width: int, queries: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.queries = nn.Parameter(torch.randn(queries, width))
        self.position = nn.Linear(2 * FREQUENCIES, width)
        short, long = WAVELENGTHS_MM
        wavelengths = torch.logspace(math.log2(short), math.log2(long), FREQUENCIES, base=2)
        self.register_buffer("angular_frequency", 2 * math.pi / wavelengths, persistent=False)
        self.angular_frequency: Tensor

    def forward(self, tokens: Tensor, position_mm: Tensor) -> Tensor:
        """Memory (B, S * queries, C) of tokens (B, S, N, C) at positions (B, S) in millimetres."""
        x = self.norm(tokens)
        scores = torch.einsum("qc,bsnc->bsqn", self.queries, x) * x.shape[-1] ** -0.5
        found = scores.softmax(-1).to(x.dtype) @ x
        angles = position_mm[..., None] * self.angular_frequency
        position = self.position(torch.cat([angles.sin(), angles.cos()], dim=-1))
        return (found + position.unsqueeze(2)).flatten(1, 2)


class NoPooling(nn.Module):
    """The paper's form: every token of the one radiograph goes to the decoder unchanged."""

    def forward(self, tokens: Tensor, position_mm: Tensor) -> Tensor:
        """Memory (B, S * N, C) of tokens (B, S, N, C)."""
        return tokens.flatten(1, 2)


class ReportGenerator(nn.Module):
    """Slice-wise encoder, slice pooling, bias-free projection, GPT-2 decoder with cross-attention.

    Repeated rows keep the batch's order: slice row i belongs to sample ``i // S``, beam row i to ``i // beams``.
    ``max_length`` and ``num_beams`` are defaults of :meth:`generate`; ``untrained`` names the parameters without
    pre-trained weights.
    """

    def __init__(self, config: ModelConfig, tokenizer: ReportTokenizer, *, load_pretrained: bool):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.encoder, encoder_untrained = build_encoder(config, load_pretrained)
            pooled = config.pooling == "attention"
            self.pooling = SliceAttentionPooling(self.encoder.width, config.queries) if pooled else NoPooling()
            decoder, decoder_untrained = build_decoder(config, tokenizer.vocab_size, load_pretrained)
            self.projection = nn.Linear(self.encoder.width, decoder.config.n_embd, bias=False)
            self.decoder = decoder
        self.prior_marks = PriorMarks(decoder.config.n_embd)
        self.max_length, self.num_beams = config.max_length, config.num_beams
        self.bos_id, self.eos_id, self.pad_id = tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id
        self.untrained: tuple[str, ...] = (
            *(f"encoder.{name}" for name in encoder_untrained),
            *(f"pooling.{name}" for name, _ in self.pooling.named_parameters()),
            "projection.weight",
            *(f"decoder.{name}" for name in decoder_untrained),
        )

    def encode(self, batch: ImageBatch) -> Tensor:
        """Decoder memory (B, M, E): M / S tokens for each slice, in the order of the slices."""
        b, s = batch.images.shape[:2]
        tokens = self.encoder(batch.images.flatten(0, 1))
        return self.projection(self.pooling(tokens.unflatten(0, (b, s)), batch.position_mm))

    def memory_mask(self, batch: ImageBatch, memory: Tensor) -> Tensor:
        """(B, M) bool: False at memory tokens of padded slices."""
        return batch.slice_mask.repeat_interleave(memory.shape[1] // batch.slice_mask.shape[1], dim=1)

    def memory(self, batch: ImageBatch) -> tuple[Tensor, Tensor]:
        """What the decoder attends to, (B, M, E) and its mask (B, M): the present image, then the visit before.

        Of the latter it gets the image's features and the decoder's own states over the report, scaled to the size of
        the present image's features. No gradient flows back through them, so that a training step stays cheap.
        """
        memory = self.encode(batch)
        mask = self.memory_mask(batch, memory)
        prior = batch.prior
        if prior is None:
            return memory, mask
        memories, masks = [memory], [mask]
        size = root_mean_square(memory, mask)
        if prior.images is not None:
            with torch.no_grad():
                features = self.encode(prior.images)
            memories.append(self.prior_marks(features, "image", prior.days, size))
            masks.append(self.memory_mask(prior.images, features))
        if prior.input_ids is not None and prior.text_mask is not None:
            with torch.no_grad():
                states = self.decoder.transformer(prior.input_ids, use_cache=False).last_hidden_state
            states = F.rms_norm(states, states.shape[-1:]) * size[:, None, None].to(states.dtype)
            memories.append(self.prior_marks(states, "report", prior.days, size))
            masks.append(prior.text_mask)
        return torch.cat(memories, dim=1), torch.cat(masks, dim=1)

    def forward(self, batch: ImageBatch, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Mean token loss of each report, (B,), float32, from what :meth:`ReportTokenizer.batch` returns."""
        memory, mask = self.memory(batch)
        # Padding stands on the right, so the causal mask alone keeps it from every token that has a label.
        logits = self.decoder(
            input_ids=input_ids,
            encoder_hidden_states=memory,
            encoder_attention_mask=mask,
            use_cache=False,
        ).logits
        return report_loss(logits, labels)

    @torch.no_grad()
    def generate(self, batch: ImageBatch, num_beams: int | None = None, max_length: int | None = None) -> Tensor:
        """Token ids (B, L) of the best beam, begin token first, padded after the end token (int64).

        A report does not depend on the others of its batch.
        """
        from transformers.generation.configuration_utils import GenerationConfig

        memory, mask = self.memory(batch)
        start = torch.full((memory.shape[0], 1), self.bos_id, dtype=torch.int64, device=memory.device)
        decoder: Any = self.decoder
        ids: Tensor = decoder.generate(
            start,
            attention_mask=torch.ones_like(start),
            encoder_hidden_states=memory,
            encoder_attention_mask=mask,
            generation_config=GenerationConfig(
                max_length=max_length or self.max_length,
                num_beams=num_beams or self.num_beams,
                do_sample=False,
                bos_token_id=self.bos_id,
                eos_token_id=self.eos_id,
                pad_token_id=self.pad_id,
            ),
        )
        return ids
