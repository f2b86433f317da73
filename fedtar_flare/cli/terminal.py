"""Progress on standard error: a line that rewrites itself on a terminal, plain lines now and then elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TextIO

from fedtar_flare.progress import EVERY_SECONDS

TERMINAL_SECONDS = 0.2


class ProgressLine:
    """Shows the lines of :class:`fedtar_flare.progress.Progress`, by default on standard error."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._open = False
        self.every = TERMINAL_SECONDS if self._terminal else EVERY_SECONDS

    def __call__(self, line: str) -> None:
        print(f"\r{line}\x1b[K" if self._terminal else line, end="" if self._terminal else "\n", file=self._stream)
        self._stream.flush()
        self._open = self._terminal

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._open:
            print("\r\x1b[K", end="", file=self._stream, flush=True)
