"""The libraries that models are made of, and where pre-trained parts come from: a local folder, else the hub."""

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import ConfigError

NO_CODE: dict[str, Any] = {"trust_remote_code": False}
"""For transformers, which else asks at the terminal whether to run the code of a model's folder."""


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Collect no garbage inside, and never scan what was made: a sixth of the time of imports."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()
            gc.enable()
            atexit.register(gc.unfreeze)  # else libraries find their objects alive at the end, and say so


def load_libraries() -> None:
    """Import the parts of transformers and PEFT that every report generator needs."""
    if "peft" in sys.modules and "transformers.models.gpt2.modeling_gpt2" in sys.modules:
        return
    with garbage_collection_paused():
        import peft  # noqa: F401
        import transformers.models.cvt.modeling_cvt
        import transformers.models.gpt2.modeling_gpt2  # noqa: F401


def stay_offline() -> None:
    """Fetch nothing from a hub in this process and its children from now on; cached files stay usable."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if (constants := sys.modules.get("huggingface_hub.constants")) is not None:
        constants.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


@contextmanager
def hub_access(allowed: bool) -> Iterator[None]:
    """Allow or forbid fetching from the Hugging Face hub while the context is open."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not allowed
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def is_folder(name: str) -> bool:
    """Whether a name is a local folder; ConfigError for a path at which no folder is."""
    path = Path(name).expanduser()
    if path.is_dir():
        return True
    if path.is_absolute() or name.startswith((".", "~", os.sep)):
        raise ConfigError(f"there is no folder {path}: name an existing model folder, or a Hugging Face hub name")
    return False


@contextmanager
def fetching(part: str, name: str, repository: str | None = None) -> Iterator[None]:
    """Load quietly; turn any error into a ConfigError that says what a folder lacks, or how to get a hub model."""
    from transformers.utils import logging

    folder = is_folder(name)
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # libraries raise anything from OSError to bare Exception here
        reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), 'no message')}"
        if folder:
            text = f"{part} folder {name} cannot be loaded ({reason}). It must hold config.json and model.safetensors"
            raise ConfigError(f"{text} as the hub has them") from error
        raise ConfigError(
            f"{part} '{name}' is no local folder, and could not be fetched ({reason}): run `hf download "
            f"{repository or name}` where there is a network and copy HF_HOME, or set {part}_name to the model's folder"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def load_or_make(kind: Any, config: Any, name: str | None, **settings: Any) -> tuple[Any, tuple[str, ...]]:
    """Load a transformers model, or a random one where ``name`` is None; also return its random parameters' names."""
    import torch

    settings = {"dtype": torch.float32, **NO_CODE, **settings}
    if name is None:
        model = kind.from_config(config, **settings) if hasattr(kind, "from_config") else kind(config)
        return model, tuple(key for key, _ in model.named_parameters())
    model, info = kind.from_pretrained(name, config=config, output_loading_info=True, **settings)
    return model, tuple(key for key, _ in model.named_parameters() if key in info["missing_keys"])
