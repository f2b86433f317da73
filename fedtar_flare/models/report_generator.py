"""The report generator: image of a visit in, report out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtar_flare.models.decoder import build_decoder
from fedtar_flare.models.encoders import build_encoder
from fedtar_flare.models.pooling import NoPooling, SliceAttentionPooling
from fedtar_flare.models.prefix_decoder import PrefixDecoder
from fedtar_flare.models.prior import PriorMarks, root_mean_square
from fedtar_flare.models.prompting import Choice, Prompter
from fedtar_flare.models.recomputation import RecomputedLayers
from fedtar_flare.models.tokenizer import IGNORED, ReportTokenizer

if TYPE_CHECKING:
    from fedtar_flare.imaging.batch import ImageBatch
    from fedtar_flare.models.config import ModelConfig


def report_loss(logits: Tensor, labels: Tensor, focus: float = 0.0) -> Tensor:
    """Mean token loss of each report, shape (B,), float32.

    ``logits`` (B, L, V) at position i predict the token at i + 1; ``labels`` (B, L) are -100 where no loss is taken.
    With ``focus`` above 0 each token counts ``(1 - p)^focus``, p its probability (focal loss, Lin et al., ICCV 2017,
    Eq. 4): the sentences that every report has, once learnt, leave the rest to what the image shows.
    """
    targets = labels[:, 1:]
    tokens = F.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(targets.shape)
    if focus:
        tokens = tokens * (-torch.expm1(-tokens)).clamp(min=1e-6) ** focus
    return tokens.sum(1) / (targets != IGNORED).sum(1).clamp(min=1)


class ReportGenerator(nn.Module):
    """Slice-wise encoder, slice pooling, bias-free projection, and a decoder: GPT-2 with cross-attention, or a causal
    language model that reads the image as a prefix.

    Repeated rows keep the batch's order: slice row i belongs to sample ``i // S``, beam row i to ``i // beams``.
    ``max_length`` and ``num_beams`` are defaults of :meth:`generate`; ``untrained`` names the parameters without
    pre-trained weights. ``diagnosis`` is None, or a :class:`Prompter` that a method sets; so is ``choice``, a
    :class:`Choice`, without which the likeliest beam is the report.
    """

    diagnosis: nn.Module | None
    choice: Choice | None = None

    def __init__(self, config: ModelConfig, tokenizer: ReportTokenizer, *, load_pretrained: bool):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.encoder, encoder_untrained = build_encoder(config, load_pretrained)
            pooled = config.pooling == "attention"
            self.pooling = SliceAttentionPooling(self.encoder.width, config.queries) if pooled else NoPooling()
            decoder, decoder_untrained = build_decoder(config, tokenizer.vocab_size, load_pretrained)
            self.projection = nn.Linear(self.encoder.width, decoder.config.hidden_size, bias=False)
            self.decoder: Any = decoder
        self._recomputed: RecomputedLayers | None = None
        self.register_module("diagnosis", None)
        self.prior_marks = PriorMarks(decoder.config.hidden_size)
        self.max_length, self.num_beams = config.max_length, config.num_beams
        self.bos_id, self.eos_id, self.pad_id = tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id
        self._text_of, self._ids_of = tokenizer.decode, tokenizer.encode
        self.untrained: tuple[str, ...] = (
            *(f"encoder.{name}" for name in encoder_untrained),
            *(f"pooling.{name}" for name, _ in self.pooling.named_parameters()),
            "projection.weight",
            *(f"decoder.{name}" for name in decoder_untrained),
        )

    def recompute_layers(self) -> None:
        """From now on the decoder's layers keep their inputs alone where a gradient is wanted (gradient checkpointing).

        Generation, and whatever else runs without gradients, is as before. ConfigError where the decoder cannot.
        """
        prefix = isinstance(self.decoder, PrefixDecoder)
        self._recomputed = RecomputedLayers(self.decoder.lm if prefix else self.decoder)

    def tokens(self, batch: ImageBatch) -> Tensor:
        """The encoder's tokens (B, S, N, C)."""
        tokens: Tensor = self.encoder(batch.images.flatten(0, 1))
        return tokens.unflatten(0, batch.images.shape[:2])

    def encode(self, batch: ImageBatch, tokens: Tensor | None = None) -> Tensor:
        """Decoder memory (B, M, E): M / S tokens for each slice, in the order of the slices.

        ``tokens``: what :meth:`tokens` gave, where that is known.
        """
        tokens = self.tokens(batch) if tokens is None else tokens
        return self.projection(self.pooling(tokens, batch.position_mm))

    def memory_mask(self, batch: ImageBatch, memory: Tensor) -> Tensor:
        """(B, M) bool: False at memory tokens of padded slices."""
        return batch.slice_mask.repeat_interleave(memory.shape[1] // batch.slice_mask.shape[1], dim=1)

    @torch.no_grad()
    def prior_tokens(self, batch: ImageBatch) -> Tensor | None:
        """The encoder's tokens (B, S', N, C) of the visits before; None where no image of them is shown."""
        return None if batch.prior is None or batch.prior.images is None else self.tokens(batch.prior.images)

    def memory(
        self, batch: ImageBatch, tokens: Tensor | None = None, prior_tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What the decoder attends to, (B, M, E) and its mask (B, M): the present image, then the visit before.

        Of the latter it gets the image's features and the decoder's own states over the report, scaled to the size of
        the present image's features. No gradient flows back through them, so that a training step stays cheap.

        ``prior_tokens``: what :meth:`prior_tokens` gave, where that is known.
        """
        memory = self.encode(batch, tokens)
        mask = self.memory_mask(batch, memory)
        prior = batch.prior
        if prior is None:
            return memory, mask
        memories, masks = [memory], [mask]
        size = root_mean_square(memory, mask)
        if prior.images is not None:
            with torch.no_grad():
                features = self.encode(prior.images, prior_tokens)
            memories.append(self.prior_marks(features, "image", prior.days, size))
            masks.append(self.memory_mask(prior.images, features))
        if prior.input_ids is not None and prior.text_mask is not None:
            with torch.no_grad():
                if isinstance(self.decoder, PrefixDecoder):
                    states = self.decoder.states_of(prior.input_ids)
                else:
                    states = self.decoder.transformer(prior.input_ids, use_cache=False).last_hidden_state
            states = F.rms_norm(states, states.shape[-1:]) * size[:, None, None].to(states.dtype)
            memories.append(self.prior_marks(states, "report", prior.days, size))
            masks.append(prior.text_mask)
        return torch.cat(memories, dim=1), torch.cat(masks, dim=1)

    def forward(
        self,
        batch: ImageBatch,
        input_ids: Tensor,
        labels: Tensor,
        focus: float = 0.0,
        tokens: Tensor | None = None,
        prompts: Tensor | None = None,
    ) -> Tensor:
        """Mean token loss of each report, (B,), float32, from what :meth:`ReportTokenizer.batch` returns.

        ``focus``: of :func:`report_loss`; ``tokens`` as in :meth:`encode`; ``prompts`` (B, D, E): what the decoder is
        told, instead of what :attr:`diagnosis` reads off the image.
        """
        tokens = self.tokens(batch) if tokens is None else tokens
        before = self.prior_tokens(batch)
        memory, mask = self.memory(batch, tokens, before)
        prompts = self.prompts(batch, tokens, before) if prompts is None else prompts
        logits, _ = self.decode(memory, mask, input_ids, prompts)
        return report_loss(logits, labels, focus)

    def prompts(self, batch: ImageBatch, tokens: Tensor, prior_tokens: Tensor | None = None) -> Tensor | None:
        """What :attr:`diagnosis` tells the decoder of these tokens, (B, D, E); None without one."""
        if self.diagnosis is None:
            return None
        return _prompter(self.diagnosis).prompts(tokens, batch.slice_mask, batch.prior, prior_tokens)

    def decode(
        self, memory: Tensor, mask: Tensor, input_ids: Tensor, prompts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits (B, L, V) and last hidden states (B, L, E) at each of ``input_ids``; i predicts the token at i + 1.

        Prompts (B, D, E) stand before the begin token, or in the memory. So it is the begin token, as without them,
        that a trained decoder begins its report from. (A decoder that reads the image as a prefix has them after it.)
        """
        memory, mask, prompts = self._placed(memory, mask, prompts)
        with nullcontext() if self._recomputed is None else self._recomputed.acting():
            if isinstance(self.decoder, PrefixDecoder):
                return self.decoder.decode(memory, mask, input_ids, prompts)
            states = self._states(memory, mask, input_ids, prompts)
            return self.decoder.lm_head(states), states

    def _states(self, memory: Tensor, mask: Tensor, input_ids: Tensor, prompts: Tensor | None) -> Tensor:
        """GPT-2's last hidden states (B, L, E); arguments as :meth:`decode`."""
        # Padding stands on the right, so the causal mask alone keeps it from every token that has a label.
        attended: dict[str, Any] = {
            "encoder_hidden_states": memory, "encoder_attention_mask": mask, "use_cache": False
        }  # fmt: skip
        if prompts is None:
            plain: Tensor = self.decoder.transformer(input_ids=input_ids, **attended).last_hidden_state
            return plain
        inputs, many = self._with_prompts(input_ids, prompts), prompts.shape[1]
        order = torch.arange(inputs.shape[1], device=inputs.device).expand(len(inputs), -1)
        states: Tensor = self.decoder.transformer(
            inputs_embeds=inputs,
            position_ids=self._places(order, many),
            # without a mask, positions that begin anew would be taken for another text
            attention_mask=self._weights(order, inputs.new_ones(inputs.shape[:2]), many),
            **attended,
        ).last_hidden_state[:, many:]
        return states

    def _placed(self, memory: Tensor, mask: Tensor, prompts: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Memory (B, M, E) and mask (B, M), with prompts whose place that is; and prompts that have another place."""
        if prompts is None or not prompts.shape[1]:
            return memory, mask, None
        if self.diagnosis is None or _prompter(self.diagnosis).place != "memory":
            return memory, mask, prompts
        there = mask.new_ones(prompts.shape[:2])
        return torch.cat([memory, prompts.to(memory.dtype)], dim=1), torch.cat([mask, there], dim=1), None

    def _places(self, order: Tensor, prompts: int) -> Tensor:
        """Positions of D prompts, begin token and words, from their order: begin token and words keep their own.

        So they stand where a trained decoder has learnt them. The prompts stand beside the begin token, or take the
        last positions.
        """
        first = 0 if self._beside_begin else self.decoder.config.n_positions - prompts + order
        return torch.where(order < prompts, first, order - prompts)

    def _weights(self, order: Tensor, mask: Tensor | None, prompts: int) -> Tensor | None:
        """What the decoder's attention takes for its mask: ``mask``, or with weights, (B, 1, Q, K), of Q in order.

        D prompts beside the begin token share its weight: each of the D + 1 has ``-log(D + 1)`` added to its scores. As
        long as they are copies of it, the decoder writes as if they were not there.
        """
        if not self._beside_begin:
            return mask
        keys = torch.arange(int(order.max()) + 1, device=order.device)
        shared = torch.where(keys <= prompts, -math.log(prompts + 1), 0.0)
        seen = keys <= order[:, None, :, None]
        return torch.where(seen, shared, torch.finfo(torch.float32).min)

    @property
    def _beside_begin(self) -> bool:
        return self.diagnosis is not None and _prompter(self.diagnosis).place == "begin"

    @contextmanager
    def _placing(self, prompts: int) -> Iterator[None]:
        """Let the decoder place and weigh what it generates as :meth:`decode` does."""

        def place(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            order = kwargs["position_ids"]
            weights = self._weights(order, kwargs["attention_mask"], prompts)
            return args, {**kwargs, "position_ids": self._places(order, prompts), "attention_mask": weights}

        hook = self.decoder.transformer.register_forward_pre_hook(place, with_kwargs=True) if prompts else None
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()

    def _with_prompts(self, input_ids: Tensor, prompts: Tensor) -> Tensor:
        words = self.decoder.get_input_embeddings()(input_ids)
        return torch.cat([prompts.to(words.dtype), words], dim=1)

    @torch.no_grad()
    def generate(
        self,
        batch: ImageBatch,
        num_beams: int | None = None,
        max_length: int | None = None,
        tokens: Tensor | None = None,
        context: Callable[[Sequence[int]], AbstractContextManager[Any]] | None = None,
    ) -> Tensor:
        """Token ids (B, L) of the likeliest beam, begin token first, padded after the end token (int64).

        With a :attr:`choice`, a report that does not say what the decoder was told is searched for once more, among as
        many beams as there are candidates, and completed. A report does not depend on the others of its batch.

        ``tokens`` as in :meth:`encode`; ``context``: what must be in force for these rows of the batch alone, where
        what is in force depends on the rows.
        """
        tokens = self.tokens(batch) if tokens is None else tokens
        before = self.prior_tokens(batch)
        memory, mask = self.memory(batch, tokens, before)
        memory, mask, prompts = self._placed(memory, mask, self.prompts(batch, tokens, before))
        length = max_length or self.max_length
        ids = self._search(memory, mask, prompts, num_beams or self.num_beams, 1, length)[:, 0]
        if self.choice is None:
            return ids
        told = self.choice.told(tokens, batch.slice_mask, batch.prior, before)
        many = self.choice.candidates
        wrong = [self._differing(*pair) for pair in zip(ids, told, strict=True)]
        again = [i for i, differing in enumerate(wrong) if differing]
        if again and many > 1:
            with nullcontext() if context is None else context(again):
                own = None if prompts is None else prompts[again]
                found = self._search(memory[again], mask[again], own, many, many, length)
            ids = F.pad(ids, (0, max(0, found.shape[2] - ids.shape[1])), value=self.pad_id)
            for i, beams in zip(again, found, strict=True):
                differing, best = min((self._differing(beam, told[i]), k) for k, beam in enumerate(beams))
                if differing < wrong[i]:
                    ids[i] = self.pad_id
                    ids[i, : beams.shape[1]] = beams[best]
        return self._completed(ids, told, again, length)

    def _completed(self, ids: Tensor, told: Sequence[Any], again: Sequence[int], length: int) -> Tensor:
        """Token ids (B, L') of the reports (B, L); those of ``again`` get what they leave out of what was told.

        One that has no room for it within ``length`` tokens stays as it is.
        """
        assert self.choice is not None
        rows = list(ids)
        for i in again:
            text = self._text_of(ids[i].tolist())
            longer = self.choice.completed(text, told[i])
            new = self._ids_of(longer) if longer != text else []
            if new and new[-1] == self.eos_id and len(new) <= length:
                rows[i] = torch.tensor(new).to(ids)
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.pad_id)

    def _differing(self, ids: Tensor, told: Any) -> int:
        assert self.choice is not None
        return self.choice.differing(self._text_of(ids.tolist()), told)

    def _search(
        self, memory: Tensor, mask: Tensor, prompts: Tensor | None, beams: int, wanted: int, length: int
    ) -> Tensor:
        """Token ids (B, wanted, L) of the likeliest beams, the likeliest first."""
        from transformers.generation.configuration_utils import GenerationConfig

        start = torch.full((memory.shape[0], 1), self.bos_id, dtype=torch.int64, device=memory.device)
        settings = GenerationConfig(
            max_new_tokens=length - 1,
            num_beams=beams,
            num_return_sequences=wanted,
            do_sample=False,
            bos_token_id=self.bos_id,
            eos_token_id=self.eos_id,
            pad_token_id=self.pad_id,
        )
        return self._written(memory, mask, start, prompts, settings).view(len(start), wanted, -1)

    def _written(self, memory: Tensor, mask: Tensor, start: Tensor, prompts: Tensor | None, settings: Any) -> Tensor:
        """Token ids as transformers' generation ``settings`` say: rows of a report together, the likeliest first."""
        if isinstance(self.decoder, PrefixDecoder):
            return self.decoder.write(memory, mask, start, prompts, settings)
        inputs: dict[str, Tensor] = {"attention_mask": torch.ones_like(start)}
        if prompts is not None:
            embedded = self._with_prompts(start, prompts)
            inputs = {"inputs_embeds": embedded, "attention_mask": start.new_ones(embedded.shape[:2])}
        with self._placing(0 if prompts is None else prompts.shape[1]):
            ids: Tensor = self.decoder.generate(
                start,
                **inputs,
                encoder_hidden_states=memory,
                encoder_attention_mask=mask,
                past_key_values=_beam_cache(),
                generation_config=settings,
            )
        return ids


def _beam_cache() -> Any:
    """Keys and values of a beam search: what the beams of a report attend to in its images is the same for all."""
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    class BeamCache(EncoderDecoderCache):
        def reorder_cache(self, beam_idx: Any) -> None:
            self.self_attention_cache.reorder_cache(beam_idx)

    return BeamCache(DynamicCache(), DynamicCache())


def _prompter(module: Any) -> Prompter:
    return module
