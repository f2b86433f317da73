"""The large libraries that a report generator is made of, imported at one go."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collecting() -> Iterator[None]:
    """No garbage is collected inside, and what is there afterwards is looked at by no collection until the end.

    Modules make a million objects that live as long as the process. While more of them come, Python looks at all of
    them again and again: a sixth of the time that the imports take.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # else libraries find their objects alive at the end, and say so


def load_libraries() -> None:
    """Import what of transformers and PEFT every report generator needs; nothing where that was done."""
    if "peft" in sys.modules and "transformers.models.gpt2.modeling_gpt2" in sys.modules:
        return
    with without_collecting():
        import peft  # noqa: F401
        import transformers.models.cvt.modeling_cvt
        import transformers.models.gpt2.modeling_gpt2  # noqa: F401
