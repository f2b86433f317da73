"""A worker process: one JSON request per line in, one JSON answer per line out, until its input ends.

:mod:`fedtar_flare.imaging.workers` starts it as a program of its own, not as a fork: it is safe beside running threads
and never runs its parent's main module again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from fedtar_flare.errors import ConfigError, DataError

PACKAGE = "fedtar_flare."


def task(name: str) -> Callable[..., Any]:
    """The function named ``module:function``; raises :class:`ConfigError` for anything outside this package."""
    module, _, function = name.partition(":")
    if not module.startswith(PACKAGE) or not function.isidentifier():
        raise ConfigError(f"task '{name}' is not 'module:function' of the package {PACKAGE[:-1]}")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Do one request; unusable data is an answer, any other error ends the process."""
    try:
        return {"result": task(request["task"])(**request["arguments"])}
    except DataError as error:
        return {"refused": str(error), "reason": error.reason}
    except MemoryError:
        return {"refused": f"not enough memory for {request['arguments']}", "reason": "out-of-memory"}


def main() -> None:
    """Answer until the input ends; whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
