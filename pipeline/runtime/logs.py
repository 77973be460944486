"""Log lines of services on stderr, `2026-11-21T15:45:06.485949Z subject: text` as those of the agent, rate-limited."""

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

LOGGER_PREFIX = "fleetpulse."
MAX_LINES = 20
"""Lines of one kind (same subject and format string) in PERIOD_S. Chosen: enough to see what varies."""
PERIOD_S = 60.0
MAX_KINDS = 512
"""Kinds that are counted; the least recent is dropped. Chosen: the code has 200."""


class RateLimit(logging.Filter):
    """Passes MAX_LINES of a kind in PERIOD_S; the next line that passes contains the number of dropped lines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock, self._lock = clock, threading.Lock()
        self._counts: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the line passes."""
        with self._lock:
            return self._passes(record)

    def _passes(self, record: logging.LogRecord) -> bool:
        kind, now = (record.name, str(record.msg)), self._clock()
        begun, count = self._counts.pop(kind, (now, 0))
        hidden = 0
        if now - begun >= PERIOD_S:
            hidden, begun, count = max(0, count - MAX_LINES), now, 0
        self._counts[kind] = (begun, count + 1)
        while len(self._counts) > MAX_KINDS:
            self._counts.popitem(last=False)
        if hidden:
            record.msg = f"{record.getMessage()} ({hidden} similar lines dropped before)"
            record.args = ()
        return count < MAX_LINES


class _LineFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Formats one line of the log."""
        text = clean_text(record.message)  # a line break in a name could forge a line
        return f"{iso(int(record.created * SECOND))} {record.name.removeprefix(LOGGER_PREFIX)}: {text}"


def log_to_stderr(stream: TextIO | None = None) -> logging.Handler:
    """Writes warnings and errors of this process, also of libraries, to stderr from now on."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_LineFormatter())
    handler.addFilter(RateLimit())
    logging.getLogger().addHandler(handler)
    return handler


def limit_all_loggers() -> None:
    """Applies one rate limit to all loggers of this process, also later ones, independent of their handlers.

    For programs whose libraries have their own handlers; call it before importing them.
    """
    limit = RateLimit()

    class Limited(logging.Logger):
        """A logger with a limit of lines."""

        def handle(self, record: logging.LogRecord) -> None:
            """Passes a record unless its kind is over the limit."""
            if limit.filter(record):
                super().handle(record)

    logging.setLoggerClass(Limited)
    for logger in list(logging.Logger.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            logger.addFilter(limit)
