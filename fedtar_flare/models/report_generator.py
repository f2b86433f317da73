"""The report generator: image of a visit in, report out."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtar_flare.imaging.batch import ImageBatch
from fedtar_flare.models.config import ModelConfig
from fedtar_flare.models.cross_decoder import CrossDecoder
from fedtar_flare.models.decoder import build_decoder
from fedtar_flare.models.encoders import build_encoder
from fedtar_flare.models.memory import NoPooling, PriorMarks, SliceAttentionPooling, root_mean_square
from fedtar_flare.models.prefix_decoder import PrefixDecoder
from fedtar_flare.models.prompting import Choice, Encoded
from fedtar_flare.models.r2gen import image_layers
from fedtar_flare.models.recomputation import RecomputedLayers
from fedtar_flare.models.tokenizer import IGNORED, ReportTokenizer


def report_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean token loss of each report.

    Parameters
    ----------
    logits : Tensor
        (B, L, V); position i predicts the token at i + 1.
    labels : Tensor
        (B, L), -100 at positions without a loss.

    Returns
    -------
    Tensor
        (B,), float32.
    """
    targets = labels[:, 1:]
    tokens = F.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(targets.shape)
    return tokens.sum(1) / (targets != IGNORED).sum(1).clamp(min=1)


class ReportGenerator(nn.Module):
    """Slice-wise encoder, slice pooling, bias-free projection, and a decoder.

    The decoder is GPT-2 with cross-attention, or a causal language model with the image as a prefix. Repeated rows keep
    the batch's order: slice row i belongs to sample ``i // S``, beam row i to ``i // beams``.

    Parameters
    ----------
    config : ModelConfig
        ``max_length`` and ``num_beams`` become defaults of :meth:`generate`.
    tokenizer : ReportTokenizer
    load_pretrained : bool
        Load the weights of named parts; False where a checkpoint of the whole model is loaded later.

    Attributes
    ----------
    channels : int
        C of :meth:`tokens`.
    untrained : tuple of str
        Parameters without pre-trained weights.
    diagnosis : nn.Module or None
        A method's prompter (:data:`~fedtar_flare.models.prompting.PromptPosition`).
    choice : Choice or None
        A method's choice among beams; without it the likeliest beam is the report.
    """

    diagnosis: Any
    image_layers: Any
    decoder: Any
    cross_decoder: CrossDecoder | None = None
    choice: Choice | None = None
    channels: int

    def __init__(self, config: ModelConfig, tokenizer: ReportTokenizer, *, load_pretrained: bool):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.encoder, encoder_untrained = build_encoder(config, load_pretrained)
            self.channels = self.encoder.width
            pooled = config.pooling == "attention"
            self.pooling = SliceAttentionPooling(self.encoder.width, config.queries) if pooled else NoPooling()
            decoder, decoder_untrained = build_decoder(config, tokenizer.vocab_size, load_pretrained)
            self.projection = nn.Linear(self.encoder.width, decoder.config.hidden_size, bias=False)
            self.register_module("image_layers", image_layers(config) if config.of_paper else None)
            self.decoder = decoder
            self.cross_decoder = None if isinstance(decoder, PrefixDecoder) else CrossDecoder(decoder)
        self._prepare_writing(config, tokenizer)
        self.prior_marks = PriorMarks(decoder.config.hidden_size)
        self.untrained: tuple[str, ...] = (
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
        """Encode each slice.

        Returns
        -------
        Tensor
            (B, S, N, C).
        """
        tokens: Tensor = self.encoder(batch.images.flatten(0, 1))
        return tokens.unflatten(0, batch.images.shape[:2])

    def encode(self, batch: ImageBatch, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Encode the present images for the decoder.

        Parameters
        ----------
        tokens : Tensor, optional
            (B, S, N, C), as of :meth:`tokens`.

        Returns
        -------
        memory, mask : Tensor
            (B, M, E), M / S tokens for each slice in their order, and (B, M), False for padded slices.
        """
        tokens = self.tokens(batch) if tokens is None else tokens
        memory: Tensor = self.projection(self.pooling(tokens, batch.position_mm))
        mask = batch.slice_mask.repeat_interleave(memory.shape[1] // batch.slice_mask.shape[1], dim=1)
        if self.image_layers is not None:
            memory = self.image_layers(memory, src_key_padding_mask=~mask)
        return memory, mask

    @torch.no_grad()
    def prior_tokens(self, batch: ImageBatch) -> Tensor | None:
        """Encode the images of the visits before."""
        return None if batch.prior is None or batch.prior.images is None else self.tokens(batch.prior.images)

    def memory(
        self, batch: ImageBatch, tokens: Tensor | None = None, prior_tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Encode what the decoder attends to: the present image, then the visit before.

        Of the latter it gets the image's features and the decoder's own states over the report, scaled to the size of
        the present image's features. No gradient flows back through them, so that a training step stays cheap.

        Returns
        -------
        memory, mask : Tensor
            (B, M, E) and (B, M), bool.
        """
        memory, mask = self.encode(batch, tokens)
        prior = batch.prior
        if prior is None:
            return memory, mask
        memories, masks = [memory], [mask]
        size = root_mean_square(memory, mask)
        if prior.images is not None:
            with torch.no_grad():
                features, features_mask = self.encode(prior.images, prior_tokens)
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
        tokens: Tensor | None = None,
        prompts: Tensor | None = None,
    ) -> Tensor:
        """Mean token loss of each report.

        Parameters
        ----------
        input_ids, labels : Tensor
            (B, L), as of :meth:`ReportTokenizer.batch`.
        prompts : Tensor, optional
            (B, D, E), instead of those that :attr:`diagnosis` predicts.

        Returns
        -------
        Tensor
            (B,), float32.
        """
        tokens = self.tokens(batch) if tokens is None else tokens
        before = self.prior_tokens(batch)
        memory, mask = self.memory(batch, tokens, before)
        prompts = self.prompts(batch, tokens, before) if prompts is None else prompts
        logits, _ = self.decode(memory, mask, input_ids, prompts)
        return report_loss(logits, labels)

    def prompts(self, batch: ImageBatch, tokens: Tensor, prior_tokens: Tensor | None = None) -> Tensor | None:
        """Return the decoder's prompts as :attr:`diagnosis` predicts them.

        Returns
        -------
        Tensor or None
            (B, D, E); None without :attr:`diagnosis`.
        """
        if self.diagnosis is None:
            return None
        prompts: Tensor = self.diagnosis.prompts(Encoded(tokens, batch.slice_mask, batch.prior, prior_tokens))
        return prompts

    def decode(
        self, memory: Tensor, mask: Tensor, input_ids: Tensor, prompts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Predict the next token at each position of a text.

        Prompts stand before the begin token, or in the memory: a trained decoder still begins its report from the begin
        token. (A decoder with the image as a prefix has them after it.)

        Parameters
        ----------
        input_ids : Tensor
            (B, L).
        prompts : Tensor, optional
            (B, D, E).

        Returns
        -------
        logits, states : Tensor
            (B, L, V), where i predicts the token at i + 1, and the last hidden states (B, L, E).
        """
        memory, mask, prompts = self._placed(memory, mask, prompts)
        with nullcontext() if self._recomputed is None else self._recomputed.checkpointing():
            return (self.cross_decoder or self.decoder).decode(memory, mask, input_ids, prompts)

    def _placed(self, memory: Tensor, mask: Tensor, prompts: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Put prompts into memory (B, M, E) and mask (B, M) if that is their position; return the others."""
        position = None if self.diagnosis is None else self.diagnosis.position
        if prompts is None or not prompts.shape[1] or position == "none":
            return memory, mask, None
        if position != "memory":
            return memory, mask, prompts
        there = mask.new_ones(prompts.shape[:2])
        return torch.cat([memory, prompts.to(memory.dtype)], dim=1), torch.cat([mask, there], dim=1), None

    @torch.no_grad()
    def generate(
        self,
        batch: ImageBatch,
        num_beams: int | None = None,
        max_length: int | None = None,
        tokens: Tensor | None = None,
        context: Callable[[Sequence[int]], AbstractContextManager[Any]] | None = None,
    ) -> Tensor:
        """Write reports by beam search; a report does not depend on the others of its batch.

        With a :attr:`choice`, a report that does not state the prompted findings is searched for once more, among as
        many beams as there are candidates, and completed.

        Returns
        -------
        Tensor
            (B, L), int64: begin token first, padded after the end token.
        """
        tokens = self.tokens(batch) if tokens is None else tokens
        before, length = self.prior_tokens(batch), max_length or self.max_length
        search = self._search(batch, tokens, before, self.prompts(batch, tokens, before), length)
        ids = search(None, num_beams or self.num_beams, 1)[:, 0]
        if self.choice is None:
            return ids
        prompted = self.choice.prompted_findings(Encoded(tokens, batch.slice_mask, batch.prior, before))
        many = self.choice.candidates
        wrong = [self._differing(*pair) for pair in zip(ids, prompted, strict=True)]
        again = [i for i, differing in enumerate(wrong) if differing]
        if again and many > 1:
            with nullcontext() if context is None else context(again):
                found = search(again, many, many)
            ids = F.pad(ids, (0, max(0, found.shape[2] - ids.shape[1])), value=self.pad_id)
            for i, beams in zip(again, found, strict=True):
                differing, best = min((self._differing(beam, prompted[i]), k) for k, beam in enumerate(beams))
                if differing < wrong[i]:
                    ids[i] = self.pad_id
                    ids[i, : beams.shape[1]] = beams[best]
        rows = list(ids)
        for i in again:
            text = self._text_of(ids[i].tolist())
            longer = self.choice.complete(text, prompted[i])
            new = self._ids_of(longer) if longer != text else []
            if new and new[-1] == self.eos_id and len(new) <= length:  # else there is no room for what was left out
                rows[i] = torch.tensor(new).to(ids)
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.pad_id)

    def _differing(self, ids: Tensor, prompted: Any) -> int:
        assert self.choice is not None
        return self.choice.count_differences(self._text_of(ids.tolist()), prompted)

    def _search(
        self, batch: ImageBatch, tokens: Tensor, before: Tensor | None, prompts: Tensor | None, length: int
    ) -> Callable[[list[int] | None, int, int], Tensor]:
        """Return a beam search for reports of at most this length.

        The search takes rows (None: all), the number of beams and the number wanted of the likeliest; it returns token
        ids (B, wanted, L).
        """
        memory, mask, prompts = self._placed(*self.memory(batch, tokens, before), prompts)

        def search(rows: list[int] | None, beams: int, wanted: int) -> Tensor:
            read = (memory, mask) if rows is None else (memory[rows], mask[rows])
            own = prompts if prompts is None or rows is None else prompts[rows]
            start = torch.full((len(read[0]), 1), self.bos_id, dtype=torch.int64, device=memory.device)
            found = (self.cross_decoder or self.decoder).write(*read, start, own, self._settings(beams, wanted, length))
            return found.view(len(start), wanted, -1)

        return search

    def _settings(self, beams: int, wanted: int, length: int, **others: Any) -> Any:
        from transformers.generation.configuration_utils import GenerationConfig

        return GenerationConfig(
            max_new_tokens=length - 1,
            num_beams=beams,
            num_return_sequences=wanted,
            do_sample=False,
            bos_token_id=self.bos_id,
            eos_token_id=self.eos_id,
            pad_token_id=self.pad_id,
            **others,
        )
