"""Scores by neural models through RadEval (Xu et al., EMNLP 2025), at a site after a run, from local weights.

Nothing is fetched. No run computes these scores, and nothing that leaves a site has them.
"""

import hashlib
import math
import os
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from fedtar_flare.core.errors import ConfigError

_CHEXBERT = ("chexbert", "bert-base-uncased")
WEIGHTS: dict[str, tuple[str, ...]] = {
    "radgraph": ("radgraph-xl",),
    "ratescore": ("Angelakeke/RaTE-NER-Deberta", "FremyCompany/BioLORD-2023-C"),
    "green": ("StanfordAIMI/GREEN-radllama2-7b",),
    "radcliq": ("radgraph", "distilroberta-base", *_CHEXBERT),
    "bertscore": ("distilbert-base-uncased",),
    "semb_score": _CHEXBERT,
    "crimson": ("rajpurkarlab/medgemma-4b-it-crimson",),
}
"""What each metric loads: repositories of the Hugging Face hub, or RadGraph's and CheXbert's files of :data:`_RRG`."""
_RRG = "StanfordAIMI/RRG_scorers"
PROVIDERS = ("mammo_green", "radfact_ct")  # RadEval's metrics by a model that only its provider runs


class RadEvalMetrics:
    """Metrics of RadEval with weights in a cache folder of the hub; ``about`` has its version and their SHA-256."""

    def __init__(self, names: Sequence[str], folder: Path | None = None):
        for name in names:
            if name not in WEIGHTS:
                why = "would send reports to a provider, out of the hospital" if name in PROVIDERS else "is unknown"
                raise ConfigError(f"metric '{name}' {why} (known: {', '.join(WEIGHTS)})")
        self._names, self._folder = names, (folder or Path(constants.HF_HUB_CACHE)).resolve()
        _stay_local(self._folder)
        digests, missing = [], []
        for name in names:
            for part in WEIGHTS[name]:
                files, how = _files(part, self._folder)
                digests.append(f"{part} {hashlib.sha256(''.join(map(_digest, files)).encode()).hexdigest()}")
                if not files:
                    missing.append(f"{name} needs {part}: {how}.")
        if missing:
            raise ConfigError(f"weights are not there, and nothing is fetched. {' '.join(missing)}")
        self.about = f"RadEval {version('radeval')}; SHA-256 of its weights: {', '.join(digests)}."

    def values(self, references: Sequence[str], drafts: Sequence[str]) -> dict[str, list[float | None]]:
        """By a score's name the value of each draft, None where it has none; an empty draft is read as "None"."""
        values = {}
        for name in self._names:
            try:
                with redirect_stdout(sys.stderr):
                    found = _run(name, [*references], [draft if draft.strip() else "None" for draft in drafts])
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                raise ConfigError(f"RadEval's {name} fails with the weights in {self._folder} ({reason})") from error
            for key, of in found.items():
                if len(of) != len(drafts):
                    raise ConfigError(f"RadEval's {name} has {len(of)} values of {len(drafts)} drafts: is one no text?")
                values[key] = [float(v) if v is not None and math.isfinite(v) else None for v in of]
        return values


def _stay_local(folder: Path) -> None:
    """Let RadEval read ``folder`` alone, and fetch nothing, not even what NLTK fetches when it is imported."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(folder), "XDG_CACHE_HOME": str(folder)}
    constants.HF_HUB_OFFLINE, constants.HF_HUB_CACHE = True, str(folder)  # as read when they were imported
    try:
        import nltk

        nltk.download = lambda *_, **__: False
        import radeval
    except ModuleNotFoundError as error:
        raise ConfigError("RadEval is not installed: pip install 'fedtar_flare[radeval]'") from error
    sys.modules.setdefault("RadEval", radeval)  # RadGraph's own imports of release 2.2.1 name it so


def _run(name: str, references: list[str], drafts: list[str]) -> dict[str, Any]:
    """Values by key. A metric is loaded for this alone, so that no two models need memory."""
    if name == "semb_score":  # a part of RadCliQ, which RadEval does not show by itself
        import torch
        from radeval.metrics.RadCliQv1.semb_score import semantic_embedding_scores

        device = "cuda" if torch.cuda.is_available() else "cpu"
        return {name: semantic_embedding_scores(references, drafts, device=device)}
    from radeval import RadEval

    options = {"provider": "hf"} if name == "crimson" else {}
    return RadEval(metrics={name: options}, per_sample=True, show_progress=False)(references, drafts)


def _files(part: str, folder: Path) -> tuple[list[Path], str]:
    """Files of a part of the weights, none where its main file is missing, and how to bring it."""
    if part.startswith("radgraph"):
        top = folder / "radgraph/0.1.18" / part  # where RadEval unpacks it
        found, how = top.glob("weights.th"), f"hf download {_RRG} {part}.tar.gz --local-dir . and unpack it in {top}, "
        how += f"then hf download the encoder that its config.json names --cache-dir {folder}"
    elif part == "chexbert":
        cache = folder / part
        found, how = (
            cache.glob("models--*/snapshots/*/chexbert.pth"),
            f"hf download {_RRG} chexbert.pth --cache-dir {cache}",
        )
    else:
        found = folder.glob(f"models--{part.replace('/', '--')}/snapshots/*/config.json")
        how = f"hf download {part} --cache-dir {folder}"
    files = sorted(file for main in found for file in main.parent.rglob("*") if file.is_file())
    if code := next((file for file in files if file.suffix == ".py"), None):
        raise ConfigError(f"{code}: RadEval might run this code of the weights: remove it")
    for config in (file for file in files if file.name.endswith("config.json")):
        if re.search(rb'"auto_map"\s*:[^}]*--', config.read_bytes()):  # OWNER/NAME--MODULE.CLASS
            raise ConfigError(f"{config}: its auto_map names code of another repository, which RadEval might run")
    return files, how


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n"
