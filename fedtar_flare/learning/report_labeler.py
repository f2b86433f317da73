"""CheXbert and RadBERT as labelers of reports, from a local folder; nothing is fetched, and no file's code is run.

CheXbert (Smit et al., EMNLP 2020) has a linear head for each of 14 classes on BERT's first token; RadBERT of CT-RATE
(Hamamci et al., 2024) one linear layer for 18 classes on RoBERTa's pooled output, positive from one half on.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import PRIVATE, checksum, is_pointer, open_regular, read_json, write_json
from fedtar_flare.learning.labels import CLASSES
from fedtar_flare.learning.training import retry_smaller_batch
from fedtar_flare.metrics.labeler import NEURAL, classes_of
from fedtar_flare.metrics.reports import TextLabeler
from fedtar_flare.models.weights import load_weights, model_tensors, save_weights

LONGEST, BATCH = 512, 32  # tokens of a report, and reports of a batch
MOST_LAYERS, MOST_VALUES = 64, 1e9  # of an encoder; BERT large has 24 layers and 0.34e9 values
ABOUT = "labeler.json"


class LabelerModel(nn.Module):
    """An encoder with its classification heads, under the names of the published checkpoints."""

    def __init__(self, kind: str, config: Any):
        from transformers import AutoModel

        super().__init__()
        self.kind, encoder, classes = kind, AutoModel.from_config(config), classes_of(kind)
        if kind == "chexbert":
            self.bert = encoder
            outputs = [len(CLASSES)] * (len(classes) - 1) + [2]  # No Finding is blank or positive
            self.linear_heads = nn.ModuleList(nn.Linear(config.hidden_size, n) for n in outputs)
        else:
            self.model = encoder
            self.classifier = nn.Linear(config.hidden_size, len(classes))

    def forward(self, tokens: Any) -> Tensor:
        """Numbers (B, K) of the classes among :data:`.CLASSES`."""
        if self.kind == "chexbert":
            first = self.bert(**tokens).last_hidden_state[:, 0]
            return torch.stack([head(first).argmax(dim=1) for head in self.linear_heads], dim=1)
        return (self.classifier(self.model(**tokens).pooler_output) >= 0).long()


def import_labeler(file: Path, out: Path, tokenizer: Path | None = None) -> dict[str, Any]:
    """Write a published checkpoint as a labeler's folder."""
    state, folder = _read(file), tokenizer or file.parent
    kind = "chexbert" if any(name.startswith("linear_heads.") for name in state) else "radbert"
    model, words = _built(kind, folder)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        why = "; ".join(line.strip()[:200] for line in str(error).splitlines()[1:3])
        raise ConfigError(f"{file} does not fit {kind} with the encoder of {folder}: {why}") from error
    save_weights(model, out / "model.safetensors", torch.float32)
    words.chat_template = None  # a labeler has no use for one, and templates are saved under names of their own
    words.save_pretrained(out)
    (model.bert if kind == "chexbert" else model.model).config.save_pretrained(out)
    about = {"kind": kind, "checksum": checksum(model_tensors(model))[:16]}
    write_json(out / ABOUT, about)
    return about


def _read(file: Path) -> dict[str, Tensor]:
    """Load the tensors of a checkpoint by the names within the model; code in it is never run."""
    try:
        with open_regular(file) as opened:
            state = torch.load(opened, map_location="cpu", weights_only=True)
        state = state.get("model_state_dict", state)
        # older versions of transformers kept position ids as a weight; they are no parameter
        state = {name.removeprefix("module."): v for name, v in state.items() if not name.endswith("position_ids")}
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: there is no such file") from error
    except Exception as error:  # torch.load raises what the file makes it raise
        why = f"cannot be read as torch's file of a state dict; was it cut short? ({str(error)[:120]})"
        if code := re.search(r"GLOBAL (\S+)", str(error)):
            why = f"needs {code[1]} to be run, and code of a checkpoint never is: take one of tensors alone"
        elif is_pointer(file):
            why = "is a pointer of git-lfs: run 'git lfs pull'"
        raise ConfigError(f"{file} {why}") from error
    return state


def _built(kind: str, folder: Path) -> tuple[LabelerModel, Any]:
    """Build the model with random weights, and the tokenizer, as a folder describes them."""
    from transformers import AutoConfig, AutoTokenizer

    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt", "vocab.json")):
            raise OSError("no tokenizer.json, vocab.txt or vocab.json")  # transformers would make an empty tokenizer
        tokenizer, config = (auto.from_pretrained(folder, **local) for auto in (AutoTokenizer, AutoConfig))
        wide, rows = config.hidden_size, config.vocab_size + config.max_position_embeddings + config.type_vocab_size
        size = config.num_hidden_layers * wide * (4 * wide + 2 * config.intermediate_size) + rows * wide
        if config.num_hidden_layers > MOST_LAYERS or size > MOST_VALUES:  # before any is made
            raise ValueError(f"an encoder of {config.num_hidden_layers} layers, {size:.1e} values")
        if len(tokenizer) > config.vocab_size:
            raise ValueError(f"{len(tokenizer)} tokens of the tokenizer, {config.vocab_size} of the model")
        with torch.random.fork_rng(devices=[]):  # for weights that are replaced: training shall not notice
            return LabelerModel(kind, config).eval(), tokenizer
    except Exception as error:  # the library raises anything
        text = f"{folder} must hold config.json and the tokenizer of {kind}'s encoder, as the hub has them"
        raise ConfigError(f"{text} ({str(error)[:200]})") from error


@dataclass(frozen=True)
class ReportLabeler:
    """A labeler's ``folder``, loaded when needed; ``cache`` has labels of references, by a digest of the text."""

    folder: Path
    device: str = "cpu"
    cache: Path | None = None

    def __post_init__(self) -> None:
        if not (self.folder / ABOUT).is_file() or read_json(self.folder / ABOUT).get("kind") not in NEURAL:
            text = f"{self.folder} holds no labeler: make it by 'fedtar labeler import CHECKPOINT -o {self.folder}'"
            raise ConfigError(text, public="the labeler that the site file names is not in its folder")

    def label(
        self, references: Iterable[str], drafts: Iterable[str], checkpoint: Callable[[], None] = lambda: None
    ) -> TextLabeler:
        """Label texts."""
        about, known = read_json(self.folder / ABOUT), dict[str, str]()
        file = self.cache and self.cache / f"labels-{about['checksum']}.json"
        if file and file.is_file():
            known = read_json(file)
        digests = {text: hashlib.sha256(text.encode()).hexdigest()[:32] for text in references}
        codes = {text: known[digest] for text, digest in digests.items() if digest in known}
        new = [text for text in dict.fromkeys([*digests, *drafts]) if text not in codes]
        codes |= self._labels(about["kind"], new, checkpoint) if new else {}
        if file and not digests.keys().isdisjoint(new):
            write_json(file, known | {digest: codes[text] for text, digest in digests.items()}, PRIVATE)
        return TextLabeler(about["kind"], codes.__getitem__)

    @torch.no_grad()
    def _labels(self, kind: str, texts: Sequence[str], checkpoint: Callable[[], None]) -> dict[str, str]:
        model, tokenizer = _built(kind, self.folder)
        load_weights(model.to(self.device), self.folder)
        texts, size, codes = sorted(texts, key=len), BATCH, dict[str, str]()

        def label(size: int) -> int:
            chosen = texts[len(codes) :][:size]
            words = [" ".join(text.split()) for text in chosen] if kind == "chexbert" else chosen
            tokens = tokenizer(words, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
            numbers = model(tokens.to(self.device)).tolist()
            codes.update(zip(chosen, ("".join(CLASSES[i][0] for i in row) for row in numbers), strict=True))
            return size

        while len(codes) < len(texts):
            checkpoint()
            size = retry_smaller_batch(size, label)
        return codes
