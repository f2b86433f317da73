"""The report generator: image of a visit in, report out; and the prompts and choice of beams that a method may add."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtar_flare.imaging.batch import ImageBatch, PriorBatch
from fedtar_flare.models.config import ModelConfig
from fedtar_flare.models.decoder import CrossDecoder, PrefixDecoder, build_decoder
from fedtar_flare.models.encoders import NoPooling, PriorMarks, SliceAttentionPooling, build_encoder
from fedtar_flare.models.r2gen import image_layers
from fedtar_flare.models.recomputation import RecomputedLayers
from fedtar_flare.models.tokenizer import IGNORED, ReportTokenizer

PromptPosition = Literal["last", "begin", "memory", "text", "none"]
"""Where a prompter, a module with ``position`` and ``prompts(encoded)``, puts its embeddings (B, D, E) for the decoder.

``begin``: before the report, at the begin token's position, whose weight in the decoder's attention they share;
``last``: before the report, at the decoder's last positions, with a weight of their own; ``memory``: among the image's
tokens; ``text``: in words (a vision-language model); ``none``: nowhere."""


class Encoded(NamedTuple):
    """What the encoder gives of B visits, and what is shown of the visits before them."""

    tokens: Tensor  # (B, S, N, C)
    slice_mask: Tensor  # (B, S), False at padding
    prior: PriorBatch | None = None  # the visits before
    prior_tokens: Tensor | None = None  # (B, S', N, C) of the images before


def report_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean token loss of each report (B,), float32, of logits (B, L, V) before, and labels (B, L) at, each token."""
    targets = labels[:, 1:]
    tokens = F.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(targets.shape)
    return tokens.sum(1) / (targets != IGNORED).sum(1).clamp(min=1)


class ReportGenerator(nn.Module):
    """Slice-wise encoder, slice pooling, bias-free projection, and a decoder with cross-attention or a prefix.

    Slice row i belongs to sample ``i // S``, beam row i to ``i // beams``.
    """

    diagnosis: Any  # a method's prompter (:data:`PromptPosition`), or None
    image_layers: Any
    decoder: Any
    cross_decoder: CrossDecoder | None = None
    choice: Any = None  # a method's choice among beams, else the likeliest (:class:`.choice.FindingsChoice`)
    channels: int  # C of :meth:`tokens`

    def __init__(self, config: ModelConfig, tokenizer: ReportTokenizer, *, load_pretrained: bool):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.encoder, encoder_untrained = build_encoder(config, load_pretrained)
            self.channels = self.encoder.width
            pooled = config.pooling == "attention"
            self.pooling = SliceAttentionPooling(self.channels, config.queries) if pooled else NoPooling()
            decoder, decoder_untrained = build_decoder(config, tokenizer.vocab_size, load_pretrained)
            width = decoder.config.hidden_size
            self.projection = nn.Linear(self.channels, width, bias=False)
            self.register_module("image_layers", image_layers(config) if config.of_paper else None)
            self.decoder = decoder
        self.cross_decoder = None if isinstance(decoder, PrefixDecoder) else CrossDecoder(decoder)
        self._prepare_writing(config, tokenizer)
        self.prior_marks = PriorMarks(width)
        self.untrained: tuple[str, ...] = (  # parameters without pre-trained weights
            *(f"encoder.{name}" for name in encoder_untrained),
            *(f"pooling.{name}" for name, _ in self.pooling.named_parameters()),
            "projection.weight",
            *(f"image_layers.{name}" for name, _ in (self.image_layers or nn.Module()).named_parameters()),
            *(f"decoder.{name}" for name in decoder_untrained),
        )

    def _prepare_writing(self, config: ModelConfig, tokenizer: ReportTokenizer) -> None:
        """Set what every kind of model needs to write; nothing prompts it yet."""
        self._recomputed: RecomputedLayers | None = None
        self.register_module("diagnosis", None)
        self.max_length, self.num_beams = config.max_length, config.num_beams
        self.bos_id, self.eos_id, self.pad_id = tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id
        self.end_ids = tokenizer.end_ids
        self._text_of, self._ids_of = tokenizer.decode, tokenizer.encode

    def recompute_layers(self) -> None:
        """Checkpoint the decoder's gradients from now on (:class:`RecomputedLayers`); ConfigError if it cannot."""
        prefix = isinstance(self.decoder, PrefixDecoder)
        self._recomputed = RecomputedLayers(self.decoder.lm if prefix else self.decoder)

    def stage_modules(self) -> Sequence[nn.Module]:
        """Return the encoder's stages; the first frozen ones process an image only once."""
        return self.encoder.stage_modules()

    def require_parts(self, what: str) -> None:
        """Raise ConfigError unless the model is an encoder with a decoder."""

    def tokens(self, batch: ImageBatch) -> Tensor:
        """Encode each slice: (B, S, N, C)."""
        tokens: Tensor = self.encoder(batch.images.flatten(0, 1))
        return tokens.unflatten(0, batch.images.shape[:2])

    def encoded(self, batch: ImageBatch) -> Encoded:
        """Encode each slice of the present images and, without a gradient, of those before."""
        prior = batch.prior
        with torch.no_grad():
            before = None if prior is None or prior.images is None else self.tokens(prior.images)
        return Encoded(self.tokens(batch), batch.slice_mask, prior, before)

    def encode(self, batch: ImageBatch, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Encode the present images: memory (B, M, E), M / S tokens a slice, and mask (B, M), False at padding."""
        tokens = self.tokens(batch) if tokens is None else tokens
        memory: Tensor = self.projection(self.pooling(tokens, batch.position_mm))
        mask = batch.slice_mask.repeat_interleave(memory.shape[1] // batch.slice_mask.shape[1], dim=1)
        if self.image_layers is not None:
            memory = self.image_layers(memory, src_key_padding_mask=~mask & mask.any(1, keepdim=True))
        return memory, mask

    def memory(self, batch: ImageBatch, seen: Encoded) -> tuple[Tensor, Tensor]:
        """Encode what the decoder attends to, (B, M, E) with its mask (B, M): the present image, then the visit before.

        The latter, scaled to the present features' size, has no gradient, so that a training step stays cheap. It is
        left out where a prompter compares the visits: its prompts say what became of what was there.
        """
        memory, mask = self.encode(batch, seen.tokens)
        prior = seen.prior
        if prior is None or getattr(self.diagnosis, "compares", False):
            return memory, mask
        memories, masks = [memory], [mask]
        squares = memory.detach().float().square().mean(-1) * mask
        size = (squares.sum(1) / mask.sum(1).clamp(min=1)).sqrt()  # root mean square (B,)
        if prior.images is not None:
            with torch.no_grad():
                features, features_mask = self.encode(prior.images, seen.prior_tokens)
            memories.append(self.prior_marks(features, "image", prior.days, size))
            masks.append(features_mask)
        if prior.input_ids is not None and prior.text_mask is not None:
            with torch.no_grad():
                states = (self.cross_decoder or self.decoder).states_of(prior.input_ids)
            states = F.rms_norm(states, states.shape[-1:]) * size[:, None, None].to(states.dtype)
            memories.append(self.prior_marks(states, "report", prior.days, size))
            masks.append(prior.text_mask)
        return torch.cat(memories, dim=1), torch.cat(masks, dim=1)

    def forward(
        self,
        batch: ImageBatch,
        input_ids: Tensor,
        labels: Tensor,
        seen: Encoded | None = None,
        prompts: Tensor | None = None,
    ) -> Tensor:
        """Mean token loss of each report, (B,), float32; ``prompts`` (B, D, E) take the place of the predicted ones."""
        return report_loss(self.predict(batch, input_ids, seen, prompts)[0], labels)

    def predict(
        self, batch: ImageBatch, input_ids: Tensor, seen: Encoded | None = None, prompts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Encode the images and predict the next token at each position, as :meth:`decode`."""
        seen = self.encoded(batch) if seen is None else seen
        memory, mask = self.memory(batch, seen)
        return self.decode(memory, mask, input_ids, self.prompts(seen) if prompts is None else prompts)

    def prompts(self, seen: Encoded) -> Tensor | None:
        """Return the decoder's prompts (B, D, E) as :attr:`diagnosis` predicts them, None without it."""
        return None if self.diagnosis is None else self.diagnosis.prompts(seen)

    def decode(
        self, memory: Tensor, mask: Tensor, input_ids: Tensor, prompts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Predict each next token of a text: logits (B, L, V), and the last hidden states (B, L, E)."""
        memory, mask, prompts = self._prompted(memory, mask, prompts)
        with nullcontext() if self._recomputed is None else self._recomputed.checkpointing():
            return (self.cross_decoder or self.decoder).decode(memory, mask, input_ids, prompts)

    def _prompted(self, memory: Tensor, mask: Tensor, prompts: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Put prompts into memory (B, M, E) and mask (B, M) if that is their position; return the others."""
        position = None if self.diagnosis is None else self.diagnosis.position
        if prompts is None or not prompts.shape[1] or position == "none":
            return memory, mask, None
        if position != "memory":
            return memory, mask, prompts
        attended = mask.new_ones(prompts.shape[:2])
        return torch.cat([memory, prompts.to(memory.dtype)], dim=1), torch.cat([mask, attended], dim=1), None

    @torch.no_grad()
    def generate(
        self,
        batch: ImageBatch,
        num_beams: int | None = None,
        max_length: int | None = None,
        seen: Encoded | None = None,
        context: Callable[[Sequence[int]], AbstractContextManager[Any]] | None = None,
    ) -> Tensor:
        """Write reports by beam search: ids (B, L), begin token first; with a :attr:`choice`, completed by it."""
        seen, length = self.encoded(batch) if seen is None else seen, max_length or self.max_length
        search = self._search(batch, seen, self.prompts(seen), length)
        ids = search(None, num_beams or self.num_beams, 1)[:, 0]
        if self.choice is None:
            return ids
        choice, number = self.choice, self.choice.candidates
        prompted = choice.prompted_findings(seen)

        def differences(report: Tensor, row: int) -> int:
            return choice.count_differences(self._text_of(report.tolist()), prompted[row])

        wrong = [differences(report, row) for row, report in enumerate(ids)]
        again = [row for row, count in enumerate(wrong) if count]
        if again and number > 1:
            with nullcontext() if context is None else context(again):
                candidates = search(again, number, number)
            ids = F.pad(ids, (0, max(0, candidates.shape[2] - ids.shape[1])), value=self.pad_id)
            for row, beams in zip(again, candidates, strict=True):
                fewest, best = min((differences(beam, row), k) for k, beam in enumerate(beams))
                if fewest < wrong[row]:
                    ids[row] = self.pad_id
                    ids[row, : beams.shape[1]] = beams[best]
        reports = list(ids)
        for row in again:
            text = self._text_of(ids[row].tolist())
            longer = choice.complete(text, prompted[row])
            new = self._ids_of(longer) if longer != text else []
            if new and new[-1] == self.eos_id and len(new) <= length:  # else there is no room for what was left out
                reports[row] = torch.tensor(new).to(ids)
        return nn.utils.rnn.pad_sequence(reports, batch_first=True, padding_value=self.pad_id)

    def _search(
        self, batch: ImageBatch, seen: Encoded, prompts: Tensor | None, length: int
    ) -> Callable[[list[int] | None, int, int], Tensor]:
        """Return a beam search: of rows (None: all), beams and their number wanted it makes ids (B, wanted, L)."""
        memory, mask, prompts = self._prompted(*self.memory(batch, seen), prompts)

        def search(rows: list[int] | None, beams: int, wanted: int) -> Tensor:
            chosen = slice(None) if rows is None else rows
            begin = torch.full((len(mask[chosen]), 1), self.bos_id, dtype=torch.int64, device=memory.device)
            prompted = None if prompts is None else prompts[chosen]
            settings = self._settings(beams, wanted, length)
            ids = (self.cross_decoder or self.decoder).write(memory[chosen], mask[chosen], begin, prompted, settings)
            return ids.view(len(begin), wanted, -1)

        return search

    def _settings(self, beams: int, wanted: int, length: int, **others: Any) -> Any:
        from transformers.generation.configuration_utils import GenerationConfig

        return GenerationConfig(
            max_new_tokens=length - 1,
            num_beams=beams,
            num_return_sequences=wanted,
            do_sample=False,
            bos_token_id=self.bos_id,
            eos_token_id=sorted(self.end_ids),
            pad_token_id=self.pad_id,
            **others,
        )
