"""CheXbert and RadBERT from local checkpoints; nothing is fetched from anywhere.

CheXbert (Smit et al., EMNLP 2020) labels the 14 CheXpert classes of a chest radiograph's report, RadBERT of CT-RATE
(Hamamci et al., 2024) 18 classes of a chest CT's. Both take at most 512 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedtar_flare.errors import ConfigError
from fedtar_flare.metrics.ctrate_rules import OBSERVATIONS as CTRATE
from fedtar_flare.metrics.labeler import Label

LONGEST = 512
VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json")
"""Files of which a tokenizer has at least one."""
CHEXBERT_CLASSES = (
    "Enlarged Cardiomediastinum",
    "Cardiomegaly",
    "Lung Opacity",
    "Lung Lesion",
    "Edema",
    "Consolidation",
    "Pneumonia",
    "Atelectasis",
    "Pneumothorax",
    "Pleural Effusion",
    "Pleural Other",
    "Fracture",
    "Support Devices",
    "No Finding",
)
"""In the order of the checkpoint's heads; the last has the labels blank and positive alone."""
CHEXBERT_LABELS: tuple[Label, ...] = ("blank", "positive", "negative", "uncertain")
RADBERT_CLASSES = tuple(one.name for one in CTRATE)
"""In the order of the checkpoint's outputs."""
RADBERT_THRESHOLD = 0.5


class _CheXbertModel(nn.Module):
    """BERT, its first token's last hidden state, and a linear head per class."""

    def __init__(self, bert: nn.Module, width: int):
        super().__init__()
        self.bert = bert
        self.linear_heads = nn.ModuleList(
            nn.Linear(width, 2 if name == "No Finding" else len(CHEXBERT_LABELS)) for name in CHEXBERT_CLASSES
        )

    def forward(self, **tokens: torch.Tensor) -> list[torch.Tensor]:
        hidden = self.bert(**tokens).last_hidden_state[:, 0]
        return [head(hidden) for head in self.linear_heads]


class _RadBERTModel(nn.Module):
    """RoBERTa and one linear layer on its pooled output."""

    def __init__(self, encoder: nn.Module, width: int):
        super().__init__()
        self.model = encoder
        self.classifier = nn.Linear(width, len(RADBERT_CLASSES))

    def forward(self, **tokens: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.classifier(self.model(**tokens).pooler_output))


class CheXbert:
    """Labels of the 14 CheXpert classes by CheXbert.

    Args:
        folder: holds ``chexbert.pth`` as published, and the tokenizer and ``config.json`` of bert-base-uncased.

    Raises:
        ConfigError: a file is missing, or the checkpoint does not fit the model.
    """

    names = CHEXBERT_CLASSES

    def __init__(self, folder: Path | str, *, device: str = "cpu", batch_size: int = 16):
        self.folder = local_folder(folder, "CheXbert", needs=("chexbert.pth", "config.json"))
        self.device, self.batch_size = torch.device(device), batch_size
        config, self.tokenizer = config_and_tokenizer(self.folder, "CheXbert")
        from transformers import BertModel

        model = _CheXbertModel(BertModel(config), config.hidden_size)
        _load(model, self.folder / "chexbert.pth", "CheXbert")
        self.model = model.to(self.device).eval()

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> list[dict[str, Label]]:
        """Labels of each report, one per class."""
        labels: list[dict[str, Label]] = []
        for tokens in _batches(self, [" ".join(text.split()) for text in texts]):
            best = torch.stack([logits.argmax(dim=1) for logits in self.model(**tokens)], dim=1).tolist()
            labels += [
                {name: CHEXBERT_LABELS[k] for name, k in zip(CHEXBERT_CLASSES, row, strict=True)} for row in best
            ]
        return labels


class RadBERT:
    """Labels of the 18 CT-RATE classes by RadBERT: positive where the probability is at least one half, else blank.

    Args:
        folder: a tokenizer, ``config.json``, and the weights: one ``.pth`` file of CT-RATE's own classifier, or
            ``model.safetensors`` or ``pytorch_model.bin`` of a sequence classifier with 18 outputs.

    Raises:
        ConfigError: a file is missing, there are several ``.pth`` files, or the weights do not fit.
    """

    names = RADBERT_CLASSES

    def __init__(self, folder: Path | str, *, device: str = "cpu", batch_size: int = 16):
        self.folder = local_folder(folder, "RadBERT", needs=("config.json",))
        self.device, self.batch_size = torch.device(device), batch_size
        self.model = self._model().to(self.device).eval()

    def _model(self) -> nn.Module:
        from transformers import AutoModel, AutoModelForSequenceClassification

        config, self.tokenizer = config_and_tokenizer(self.folder, "RadBERT")
        files = sorted(self.folder.glob("*.pth"))
        if len(files) > 1:
            raise ConfigError(f"{self.folder} holds {len(files)} .pth files; leave the one checkpoint that is meant")
        if files:
            model = _RadBERTModel(AutoModel.from_config(config), config.hidden_size)
            _load(model, files[0], "RadBERT")
            return model
        try:
            found = AutoModelForSequenceClassification.from_pretrained(self.folder, local_files_only=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"{self.folder}: no RadBERT checkpoint that can be read ({first_line(error)})") from error
        if found.config.num_labels != len(RADBERT_CLASSES):
            raise ConfigError(
                f"{self.folder}: the classifier has {found.config.num_labels} outputs; "
                f"RadBERT of CT-RATE has {len(RADBERT_CLASSES)}"
            )
        return found

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> list[dict[str, Label]]:
        """Labels of each report, one per class."""
        labels: list[dict[str, Label]] = []
        for tokens in _batches(self, list(texts)):
            out: Any = self.model(**tokens)
            logits: torch.Tensor = out if isinstance(out, torch.Tensor) else out.logits
            for row in (logits.sigmoid() >= RADBERT_THRESHOLD).tolist():
                labels.append({n: "positive" if on else "blank" for n, on in zip(RADBERT_CLASSES, row, strict=True)})
        return labels


def _batches(labeler: CheXbert | RadBERT, texts: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Tokens of the texts, a batch at a time."""
    for start in range(0, len(texts), labeler.batch_size):
        batch = list(texts[start : start + labeler.batch_size])
        tokens = labeler.tokenizer(batch, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
        yield {name: values.to(labeler.device) for name, values in tokens.items()}


def local_folder(
    folder: Path | str, name: str, needs: Sequence[str], instead: str = "use the rule-based labeler"
) -> Path:
    """The folder of a checkpoint; :class:`ConfigError` where it lacks a file, with what can be done instead."""
    folder = Path(folder)
    missing = [file for file in needs if not (folder / file).is_file()]
    if missing:
        raise ConfigError(
            f"{name}: {folder} has no {' and no '.join(missing)}. {name} is read from a local folder and never "
            f"downloaded: put its checkpoint, config.json and tokenizer there, or {instead}"
        )
    return folder


def config_and_tokenizer(folder: Path, name: str) -> tuple[Any, Any]:
    """Configuration and tokenizer in a folder; :class:`ConfigError` where they cannot be read or do not fit."""
    from transformers import AutoConfig, AutoTokenizer

    if not any((folder / file).is_file() for file in VOCABULARIES):  # transformers would make an empty tokenizer
        raise ConfigError(f"{name}: {folder} has no tokenizer ({', '.join(VOCABULARIES)}); nothing is downloaded")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: {folder} cannot be read ({first_line(error)}); nothing is downloaded") from error
    if len(tokenizer) > config.vocab_size:
        raise ConfigError(
            f"{name}: the tokenizer in {folder} has {len(tokenizer)} tokens and the model {config.vocab_size}: "
            "they do not belong together"
        )
    return config, tokenizer


def _load(model: nn.Module, file: Path, name: str) -> None:
    """Load a checkpoint as published: plain tensors, perhaps under ``model_state_dict`` and behind ``module.``."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        state = state.get("model_state_dict", state)
        # older versions of transformers kept position ids as a weight; they are no parameter
        state = {k.removeprefix("module."): v for k, v in state.items() if not k.endswith("position_ids")}
        model.load_state_dict(state)
    except Exception as error:  # torch.load raises what the file makes it raise
        raise ConfigError(f"{name}: {file} does not fit the model ({first_line(error)})") from error


def first_line(error: Exception) -> str:
    """What an error says, in short."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
