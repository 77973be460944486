"""What a service says on stderr has one form, `2026-11-21T15:45:06.485949Z subject: text`, that of the agent."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TextIO

from pipeline.model.names import clean_text
from pipeline.model.records import SECOND, iso

OURS = "fleetpulse."
LINES = 20
"""Lines of one kind in PERIOD seconds: same subject, same text but its values. Chosen: they show what varies."""
PERIOD = 60.0
KINDS = 512
"""Kinds that are counted at once; the one that was quiet for longest is forgotten. Chosen: the whole code has 200."""


class RateLimit(logging.Filter):
    """Lets LINES of a kind pass in PERIOD seconds; the first that passes afterwards says how many did not."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock, self._lock = clock, threading.Lock()
        self._seen: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        with self._lock:
            return self._passes(record)

    def _passes(self, record: logging.LogRecord) -> bool:
        kind, now = (record.name, str(record.msg)), self._clock()
        begun, count = self._seen.pop(kind, (now, 0))
        hidden = 0
        if now - begun >= PERIOD:
            hidden, begun, count = max(0, count - LINES), now, 0
        self._seen[kind] = (begun, count + 1)
        while len(self._seen) > KINDS:
            self._seen.popitem(last=False)
        if hidden:
            record.msg = f"{record.getMessage()} (and {hidden} lines like this before it)"
            record.args = ()
        return count < LINES


class _Lines(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        text = clean_text(record.message)  # a name that breaks the line would forge the next one
        return f"{iso(int(record.created * SECOND))} {record.name.removeprefix(OURS)}: {text}"


def to_stderr(stream: TextIO | None = None) -> logging.Handler:
    """Has warnings and errors of this process, ours and those of libraries, written so from now on."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_Lines())
    handler.addFilter(RateLimit())
    logging.getLogger().addHandler(handler)
    return handler


def limit_all() -> None:
    """Has each logger of this process, also those made later, obey one rate limit, whatever handlers it has.

    For programs whose libraries write their lines themselves: to be called before these are imported.
    """
    limit = RateLimit()

    class Limited(logging.Logger):
        def handle(self, record: logging.LogRecord) -> None:
            if limit.filter(record):
                super().handle(record)

    logging.setLoggerClass(Limited)
    for logger in list(logging.Logger.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            logger.addFilter(limit)
