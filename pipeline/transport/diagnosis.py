"""Tells why brokers cannot be used: kafka-python calls a wrong password and a dead host alike "unable to bootstrap"."""

from __future__ import annotations

import logging
import time
from collections import deque

from pipeline.config.sections import Kafka
from pipeline.model.errors import ConfigError
from pipeline.transport import brokers
from pipeline.transport.handshake import why_not
from pipeline.transport.troubles import Trouble, of_error

__all__ = ["Causes", "Trouble", "trouble", "why_not"]

KEPT = 16
"""Errors kept of a client's talk; chosen: one failed try to connect logs about five."""
ASK_S = 2.0
"""How long a handshake may take that a running client's owner waits for (s). Chosen."""
AGAIN_S = 10.0
"""A trouble found by a handshake stands so long (s): 10,000 agents that a broker refuses must not double its load.
Chosen. That nothing was wrong never stands: what goes wrong next would be told a while too late."""
ACKNOWLEDGE = "look at the log, load and disk of the brokers"


class Causes(logging.Handler):
    """The last errors that this process's Kafka clients logged. Clients swallow them: their log alone shows them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.errors: deque[BaseException] = deque(maxlen=KEPT)
        self.asked: tuple[float, Trouble | None] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        told = record.args if isinstance(record.args, tuple) else ()
        found = [item for item in told if isinstance(item, BaseException)]
        if record.exc_info and record.exc_info[1] is not None:
            found.append(record.exc_info[1])
        self.errors.extend(error.with_traceback(None) for error in found)  # a traceback would hold the client's frames

    def attach(self) -> None:
        """Begins to listen."""
        brokers.quiet().addHandler(self)

    def detach(self) -> None:
        """Ends listening."""
        logging.getLogger(brokers.LOGGER).removeHandler(self)

    def clear(self) -> None:
        """All is well again: what was heard is past."""
        self.errors.clear()
        self.asked = None


def trouble(kafka: Kafka, causes: Causes, error: BaseException) -> Trouble:
    """Why a running client fails with `error`. Waits ASK_S at most, and only where its errors do not tell."""
    from kafka.errors import KafkaTimeoutError  # only where Kafka is in force

    # the newest that was heard; KafkaTimeoutError only says that trying ended, not why
    heard = next((heard for heard in reversed(list(causes.errors)) if not isinstance(heard, KafkaTimeoutError)), error)
    if found := of_error(kafka, error) or of_error(kafka, heard):
        return found
    asked = causes.asked
    if asked is None or asked[1] is None or time.monotonic() - asked[0] > AGAIN_S:
        causes.asked = asked = (time.monotonic(), _asked(kafka))
    return asked[1] or _unexplained(kafka, error)


def _unexplained(kafka: Kafka, error: BaseException) -> Trouble:
    """A handshake found nothing wrong. The client's words on time that ran out tell no cause, only its own insides."""
    from kafka.errors import KafkaTimeoutError

    text = str(error) or type(error).__name__
    if isinstance(error, KafkaTimeoutError | TimeoutError):
        text = "lets us in, but does not acknowledge messages or answer in time"
    return Trouble("unreachable", f"kafka {kafka.bootstrap_servers}: {text}", ACKNOWLEDGE)


def _asked(kafka: Kafka) -> Trouble | None:
    try:
        return why_not(kafka, ASK_S)
    except ConfigError as error:
        return Trouble("credential", str(error), "mend the file")
