"""A vision-language model of transformers as report generator: whatever ``AutoModelForImageTextToText`` loads.

Model, processor and chat template are used as published. A report is the answer in a conversation: each earlier visit
is a turn of its own, with its images, the days until now, and its report as the answer; the last turn has the present
images and ``model.prompt``. The report is tokenized apart from the prompt, which is the same in training and use.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from importlib.util import find_spec
from inspect import signature
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.imaging.batch import ImageBatch
from fedtar_flare.models.config import ASSETS, ModelConfig
from fedtar_flare.models.decoder import DTYPES, end_marks
from fedtar_flare.models.report_generator import Encoded, ReportGenerator, report_loss
from fedtar_flare.models.sources import NO_CODE, fetching, load_or_make
from fedtar_flare.models.tokenizer import IGNORED, ReportTokenizer

EARLIER = "An earlier study of this patient; days before the present one: {days}."  # introduces a turn
VIEWS = ("frontal:", "lateral:")  # words before the two images of a radiograph with a lateral view
_BRACKETED = re.compile(r"[<\[].*[>\]]", re.DOTALL)
_LANGUAGE = re.compile(r"\b(language_model|text_model|lm_head)\b")
TINY = str(ASSETS / "vlm-tiny")  # configuration and processor of a small Qwen2-VL, whose weights are random


class VisionLanguageGenerator(ReportGenerator):
    """A vision-language model with the interface of a :class:`ReportGenerator`; its prompts are words.

    Where adapters act by patient in vision layers, all samples must show equally many images (DataError).
    """

    def __init__(self, config: ModelConfig, tokenizer: ReportTokenizer, *, load_pretrained: bool):
        nn.Module.__init__(self)
        self._processor = processor_of(config.decoder_name or TINY)
        self._config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.decoder, untrained = _load_decoder(config, load_pretrained)
        self.channels = self.decoder.config.get_text_config().hidden_size
        self._prepare_writing(config, tokenizer)
        self.untrained = tuple(f"decoder.{name}" for name in untrained)

    def stage_modules(self) -> Sequence[nn.Module]:
        return ()

    def require_parts(self, what: str) -> NoReturn:
        raise ConfigError(f"{what} needs an encoder and a decoder: it cannot be had with model.family 'vlm'")

    @torch.no_grad()
    def tokens(self, batch: ImageBatch) -> Tensor:
        """Features (B, S, N, C) by the vision layers, for the diagnosis head; the images as they are without one."""
        if self.diagnosis is None:
            return batch.images
        processed = self._processor.image_processor(self._pictures(batch.images.flatten(0, 1)), return_tensors="pt")
        known = signature(self.decoder.get_image_features).parameters
        inputs = self._moved({name: value for name, value in processed.items() if name in known}, batch)
        features = self.decoder.get_image_features(**inputs, return_dict=True).pooler_output
        return torch.stack(list(features)).unflatten(0, batch.images.shape[:2])

    def forward(self, batch: ImageBatch, input_ids: Tensor, labels: Tensor, *_: Any, **more: Any) -> Tensor:
        """Mean token loss of each report, (B,), float32; the chat template takes the place of the begin token."""
        if (prompts := more.get("prompts")) is None and self.diagnosis is not None:
            prompts = self.prompts(more.get("seen") or self.encoded(batch))
        inputs, report = self.inputs(batch, prompts), input_ids[:, 1:]
        inputs = self._followed_by(inputs, report, labels[:, 1:] != IGNORED)
        with nullcontext() if self._recomputed is None else self._recomputed.checkpointing():
            positions = report.shape[1] + 1  # the prompt's last token predicts the first word
            logits = self.decoder(**inputs, logits_to_keep=positions, use_cache=False).logits
        return report_loss(logits, labels)

    def _followed_by(self, inputs: dict[str, Tensor], report: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Inputs of a prompt (B, L) and a report (B, R); types and masks grow as for words that the model writes."""
        words, length = inputs.pop("input_ids"), report.shape[1]
        longer: dict[str, Tensor] = inputs
        for _ in range(length):
            longer = self.decoder._update_model_kwargs_for_generation({}, dict(longer), is_encoder_decoder=False)
        for name, value in longer.items():
            if value.shape == words.shape:  # says of each token whether it is an image's
                longer[name] = F.pad(value, (0, length))
        longer["attention_mask"][:, -length:] = mask
        return longer | {"input_ids": torch.cat([words, report], dim=1)}

    def _search(
        self, batch: ImageBatch, seen: Encoded, prompts: Tensor | None, length: int
    ) -> Callable[[list[int] | None, int, int], Tensor]:
        tokenizer = self._processor.tokenizer  # no mark is part of a report
        marks = sorted({*tokenizer.all_special_ids, *marks_of(tokenizer).values()} - self.end_ids)

        def search(rows: list[int] | None, beams: int, wanted: int) -> Tensor:
            settings = self._settings(beams, wanted, length, suppress_tokens=marks)
            inputs = self.inputs(batch, prompts, rows)
            ids = self.decoder.generate(**inputs, generation_config=settings)[:, inputs["input_ids"].shape[1] :]
            return F.pad(ids, (1, 0), value=self.bos_id).unflatten(0, (-1, wanted))

        return search

    def inputs(
        self, batch: ImageBatch, prompts: Tensor | None = None, rows: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        """Inputs of B conversations (or ``rows`` of them) up to the answer, with the findings of ``prompts`` last."""
        findings = [""] * len(batch.images) if prompts is None else self.diagnosis.to_words(prompts)
        wanted = range(len(batch.images)) if rows is None else rows
        turns, images = zip(*(self._conversation(batch, i, findings[i]) for i in wanted), strict=True)
        adapted = (n for n, part in self.named_modules() if "forward" in vars(part) and "_hf_hook" not in vars(part))
        if len(set(map(len, images))) > 1 and not all(map(_LANGUAGE.search, adapted)):
            text = "adapters by patient in vision layers, where visits of a batch show different numbers of images"
            cure = "leave these layers out of model.lora_targets, or images out of data.prior"
            raise DataError(f"{text}: {cure}", reason="adapter-batch")
        texts = [self._processor.apply_chat_template(turn, add_generation_prompt=True) for turn in turns]
        begin = self._processor.tokenizer.bos_token
        words = {"padding": True, "add_special_tokens": not (begin and texts[0].startswith(begin))}
        processed = self._processor(text=texts, images=list(images), return_tensors="pt", **words)
        return self._moved({name: value for name, value in processed.items() if name != "labels"}, batch)

    def _moved(self, tensors: Mapping[str, Tensor], batch: ImageBatch) -> dict[str, Tensor]:
        """A processor's tensors on the model's device and in its precision."""
        kind, device = self.decoder.dtype, batch.images.device
        return {n: v.to(device, kind if v.is_floating_point() else v.dtype) for n, v in tensors.items()}

    def _conversation(
        self, batch: ImageBatch, row: int, findings: str = ""
    ) -> tuple[list[dict[str, Any]], list[Tensor]]:
        """Turns of one sample, and its images in their order."""
        turns: list[dict[str, Any]] = []
        question: list[dict[str, str]] = []
        images: list[Tensor] = []
        for days, seen, report in _visits(batch, row):
            views = self._views(seen, row)
            images += views
            for name in VIEWS if self._config.lateral and len(views) > 1 else [""] * len(views):
                question += [{"type": "text", "text": name}, {"type": "image"}] if name else [{"type": "image"}]
            when = "" if days is None else EARLIER.format(days=max(1, round(days))) + " "
            question.append({"type": "text", "text": when + self._config.prompt})
            if report is not None:
                answer = {"type": "text", "text": self._plain(report)}
                turns += [{"role": "user", "content": question}, {"role": "assistant", "content": [answer]}]
                question = []
        question[-1]["text"] = f"{question[-1]['text']} {findings}".strip()
        return [*turns, {"role": "user", "content": question}], images

    def _pictures(self, images: Tensor) -> list[Tensor]:
        """Images as the processor takes them: on the CPU if it works by Pillow."""
        from transformers.image_processing_backends import TorchvisionBackend

        return list(images if isinstance(self._processor.image_processor, TorchvisionBackend) else images.cpu())

    def _views(self, batch: ImageBatch | None, row: int) -> list[Tensor]:
        """Images (3, H, W) of a visit: each slice by itself, or all in one montage."""
        slices = [] if batch is None else self._pictures(batch.images[row][batch.slice_mask[row]])
        if self._config.slice_view == "slices" or self._config.lateral or len(slices) < 2:
            return slices
        side = math.ceil(math.sqrt(len(slices)))
        tiles = slices + [torch.zeros_like(slices[0])] * (side * math.ceil(len(slices) / side) - len(slices))
        return [torch.cat([torch.cat(tiles[i : i + side], 2) for i in range(0, len(tiles), side)], 1)]

    def _plain(self, text: str) -> str:
        """An earlier report with a space inside what the processor would take for its own marks."""
        marks = {str(value) for name, value in vars(self._processor).items() if name.endswith("_token") and value}
        marks |= marks_of(self._processor.tokenizer).keys()
        inside = "|".join(f"(?<={re.escape(mark[0])})(?={re.escape(mark[1:])})" for mark in marks)
        return re.sub(inside, " ", text)


def _visits(batch: ImageBatch, row: int) -> list[tuple[float | None, ImageBatch | None, str | None]]:
    """Days before, images and report of the visits that a sample shows, the present one last."""
    visits: list[tuple[float | None, ImageBatch | None, str | None]] = [(None, batch, None)]
    days, prior = 0.0, batch.prior
    while prior is not None:
        days += float(prior.days[row])
        shows = prior.images is not None and bool(prior.images.slice_mask[row].any())
        report = None if prior.reports is None else prior.reports[row]
        if shows or report is not None:
            visits.insert(0, (days, prior.images if shows else None, report))
        prior = prior.earlier
    return visits


@lru_cache(maxsize=2)
def processor_of(name: str) -> Any:
    """Return the processor of a model; ConfigError where it cannot be fetched, or has no chat template."""
    from transformers import AutoProcessor

    with fetching("decoder", name):
        processor = AutoProcessor.from_pretrained(name, **NO_CODE)
    if not getattr(processor, "chat_template", None) or not hasattr(processor, "image_processor"):
        raise ConfigError(f"decoder '{name}' has no image processor with a chat template: add a chat_template.jinja")
    processor.tokenizer.padding_side = "left"
    processor.tokenizer.pad_token = processor.tokenizer.pad_token or processor.tokenizer.eos_token
    content = [{"type": "image"}, {"type": "text", "text": "REPORT"}]
    try:
        turn = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        with torch.device("cpu"):  # memory is estimated of models on the meta device
            processor(text=[turn], images=[[torch.zeros(3, 64, 64, dtype=torch.uint8)]], return_tensors="pt")
    except Exception as error:  # of the processor or its template, which raise anything
        text = f"decoder '{name}' has a processor that takes no image with a question ({type(error).__name__}: {error})"
        cure = "add what its processor_config.json or chat_template.jinja lacks, such as patch_size"
        raise ConfigError(f"{text}: {cure}") from error
    return processor


def marks_of(tokenizer: Any) -> dict[str, int]:
    """Return the tokens that are a processor's or template's own, with ids; few published ones are registered."""
    added = tokenizer.added_tokens_decoder.items()
    marks = {token.content: i for i, token in added if token.special or _BRACKETED.fullmatch(token.content)}
    return {mark: i for mark, i in marks.items() if len(mark) > 1}


def vlm_tokenizer(config: ModelConfig) -> ReportTokenizer:
    """Return the tokenizer of reports, which end with the token that the chat template writes after an answer."""
    from tokenizers import Tokenizer

    name = config.decoder_name or TINY
    processor, named = processor_of(name), end_marks(name)
    tokenizer = processor.tokenizer
    turns = [{"role": role, "content": [{"type": "text", "text": "REPORT"}]} for role in ("user", "assistant")]
    after = tokenizer.encode(processor.apply_chat_template(turns).rpartition("REPORT")[2], add_special_tokens=False)
    marks = marks_of(tokenizer)
    written = [i for i in after if i in marks.values()]
    ends = [*(i for i in written if i in named), *written, tokenizer.eos_token_id, *named]
    end = next((i for i in ends if i is not None), None)
    if end is None:
        raise ConfigError(f"decoder '{name}': its tokenizer has no end token: a report would never end")
    begin = end if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in described["added_tokens"]:  # special ones are plain text in a report
        token["special"] = token["content"] in marks
    if "merges" in described["model"]:  # else the bytes of a mark could be merged into it
        merges = described["model"]["merges"]
        described["model"]["merges"] = [pair for pair in merges if "".join(pair) not in marks]
    plain = Tokenizer.from_str(json.dumps(described))
    return ReportTokenizer(
        plain, config.max_length, bos_id=begin, eos_id=end, pad_id=tokenizer.pad_token_id, ends=named
    )


def inputs_length(config: ModelConfig, earlier: int = 0) -> tuple[int, Any]:
    """Count the tokens of a prompt, images included, without loading the model."""
    from transformers import AutoConfig

    name = config.decoder_name or TINY
    processor = processor_of(name)
    images = [torch.zeros(3, config.image_size, config.image_size, dtype=torch.uint8)]
    if config.slice_view == "slices":
        images *= config.slices + config.lateral
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": EARLIER * bool(earlier) + config.prompt}]
    turn = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    text = AutoConfig.from_pretrained(name, **NO_CODE).get_text_config()
    return (1 + earlier) * processor(text=[turn], images=[images], return_tensors="pt")["input_ids"].shape[1], text


def _load_decoder(config: ModelConfig, load_pretrained: bool) -> tuple[Any, tuple[str, ...]]:
    """The model, and the names of its random parameters."""
    from transformers import AutoConfig, AutoModelForImageTextToText, BitsAndBytesConfig

    name = config.decoder_name or TINY
    settings: dict[str, Any] = {"dtype": DTYPES[config.decoder_dtype]}
    with fetching("decoder", name):
        if load_pretrained and config.decoder_dtype == "4bit":
            if find_spec("bitsandbytes") is None:
                raise ConfigError("model.decoder_dtype '4bit' needs bitsandbytes: pip install 'fedtar_flare[vlm]'")
            nf4: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
            settings["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, **nf4)
        described = AutoConfig.from_pretrained(name, **NO_CODE)
        return load_or_make(AutoModelForImageTextToText, described, name if load_pretrained else None, **settings)
