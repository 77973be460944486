"""One line for a log that may be full or closed."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO


def write_log_line(text: str, stream: TextIO | None = None) -> None:
    """Writes a line on stderr, or on `stream`. A log that is full, or whose reader has gone, must cost no data: the
    line is lost, and there is no place to say so."""
    with contextlib.suppress(OSError, ValueError):
        out = stream or sys.stderr
        out.write(f"{text}\n")
        out.flush()
