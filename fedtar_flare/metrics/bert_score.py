"""BERTScore (Zhang et al., ICLR 2020) from a local checkpoint; nothing is fetched from anywhere.

Every word of one report is matched with the most similar word of the other, by the cosine of their hidden states. As in
the authors' ``bert-score``: special tokens can be matched with, but do not count; no weights by rarity, no rescaling.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtar_flare.errors import ConfigError
from fedtar_flare.metrics.language import require_pairs
from fedtar_flare.metrics.neural_labelers import LONGEST, config_and_tokenizer, first_line, local_folder

NAME = "BERTScore"


class _Words(NamedTuple):
    """Unit vectors (n, d) of a text's tokens, and which of them count."""

    vectors: Tensor
    counted: Tensor


def bert_scores(
    references: Sequence[str],
    hypotheses: Sequence[str],
    folder: Path | str,
    layer: int,
    *,
    device: str = "cpu",
    batch_size: int = 16,
) -> list[float]:
    """F1 of each report against its reference; 0 where one of the two has no word.

    Values of different checkpoints or layers cannot be compared: say which were used.

    Args:
        folder: ``config.json``, tokenizer and weights of an encoder such as BERT or RoBERTa.
        layer: whose hidden states are compared, from 1; the authors take 9 of bert-base-uncased, 17 of roberta-large.

    Raises:
        ConfigError: a file is missing, the weights do not fit, or there is no such layer.
        DataError: ``unequal-lengths`` or ``no-reports``.
    """
    require_pairs(references, hypotheses)
    encoder = _Encoder(folder, layer, device)
    scores: list[float] = []
    for start in range(0, len(references), batch_size):
        pairs = (encoder(texts[start : start + batch_size]) for texts in (references, hypotheses))
        scores += [_f1(reference, hypothesis) for reference, hypothesis in zip(*pairs, strict=True)]
    return scores


def _f1(reference: _Words, hypothesis: _Words) -> float:
    if not (reference.counted.any() and hypothesis.counted.any()):
        return 0.0
    similar = hypothesis.vectors @ reference.vectors.T
    precision = similar.amax(1)[hypothesis.counted].mean().item()
    recall = similar.amax(0)[reference.counted].mean().item()
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


class _Encoder:
    """Hidden states of a layer, of texts."""

    def __init__(self, folder: Path | str, layer: int, device: str):
        folder = local_folder(folder, NAME, needs=("config.json",), instead="leave this score out")
        config, self.tokenizer = config_and_tokenizer(folder, NAME)
        self.layer, self.device = layer, torch.device(device)
        self.model = _model(folder).to(self.device).eval()
        if not 1 <= layer <= config.num_hidden_layers:
            raise ConfigError(f"{NAME}: layer {layer}: the model in {folder} has 1 to {config.num_hidden_layers}")

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> list[_Words]:
        tokens = self.tokenizer(
            [f" {text.strip()}" for text in texts],  # so that RoBERTa's first word is a word as the others are
            padding=True,
            truncation=True,
            max_length=LONGEST,
            return_special_tokens_mask=True,
            return_tensors="pt",
        )
        special, mask = tokens.pop("special_tokens_mask").bool(), tokens["attention_mask"].bool()
        states = self.model(**tokens.to(self.device), output_hidden_states=True).hidden_states[self.layer].cpu()
        unit = torch.nn.functional.normalize(states.float(), dim=-1)
        return [_Words(unit[i, mask[i]], ~special[i, mask[i]]) for i in range(len(texts))]


def _model(folder: Path) -> Any:
    from transformers import AutoModel

    try:
        model, about = AutoModel.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{NAME}: {folder} holds no model that can be read ({first_line(error)})") from error
    if missing := sorted(name for name in about["missing_keys"] if "pooler" not in name):
        raise ConfigError(f"{NAME}: the weights in {folder} are of another model: they lack {missing[0]}")
    return model
