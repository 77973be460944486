"""What a service says on stderr has one form, `2026-11-21T15:45:06.485949Z subject: text`, that of the agent."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from pipeline.records import SECOND, iso

OURS = "fleetpulse."


class _Lines(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return f"{iso(int(record.created * SECOND))} {record.name.removeprefix(OURS)}: {record.message}"


def to_stderr(stream: TextIO | None = None) -> logging.Handler:
    """Has warnings and errors of this process, ours and those of libraries, written so from now on."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_Lines())
    logging.getLogger().addHandler(handler)
    return handler
