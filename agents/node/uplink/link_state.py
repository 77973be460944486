"""The state of the link to Kafka: why messages do not arrive, logged once per change, not once per try."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from agents.node.uplink.streams import SendStream
from pipeline.config.sections import Kafka
from pipeline.transport import diagnosis, topics

NO_ACK_S = 10.0
"""Messages in flight without an acknowledgement for so long (s) are a problem: a third of the 30 s within which that
must be visible, and as long as a request may take."""
LOOKUP_S = 10.0
"""Pause between two lookups of the cause, while a problem lasts; chosen: each may cost a connection to a broker."""
BLOCKED_S = 2.0
"""A client may lack the metadata of a topic for so long (s) before that is a problem: it must connect first. Chosen."""


class LinkState:
    """Why messages do not arrive. For the sender's thread; `problem` may be read by any.

    problem: None if messages arrive, or none was sent yet.
    """

    def __init__(self, kafka: Kafka, log: Callable[[str], object]) -> None:
        self.problem: str | None = None
        self._kafka, self._log = kafka, log
        self._causes = diagnosis.ClientErrors()
        self._causes.attach()
        self._blocked_topics: dict[str, tuple[float, Exception]] = {}  # topic -> since when, why
        self._failure: str | None = None
        self._lookup: _CauseLookup | None = None
        self._refused: set[tuple[str, type[Exception]]] = set()
        self._uncaught = _ExceptionCounter()
        _io_logger().addHandler(self._uncaught)

    def close(self) -> None:
        """Detaches from the client's loggers."""
        _io_logger().removeHandler(self._uncaught)
        self._causes.detach()

    @property
    def io_thread_failed(self) -> bool:
        """Whether the client's I/O thread failed since `reset`: it then fails again and again, without a pause."""
        return self._uncaught.count > 0

    @property
    def blocked(self) -> bool:
        """Whether the client accepts no message for some topic."""
        return bool(self._blocked_topics)

    def reset(self) -> None:
        """Clears what the previous client reported: a new one is being made."""
        self._uncaught.count = 0
        self._causes.clear()
        unknown = TimeoutError("a new client has accepted no message yet")
        self._blocked_topics = {topic: (since, unknown) for topic, (since, _) in self._blocked_topics.items()}

    # --- what happens ------------------------------------------------------------------------------------------------

    def record_blocked(self, topic: str, error: Exception) -> None:
        """Records that the client accepts no message for a topic."""
        since, _ = self._blocked_topics.get(topic, (time.monotonic(), error))
        self._blocked_topics[topic] = since, error

    def record_acknowledged(self, stream: SendStream) -> None:
        """Records an acknowledgement."""
        self._failure = None
        self._blocked_topics.pop(stream.partition.topic, None)

    def log_refused(self, stream: SendStream, size: int, error: Exception) -> None:
        """Logs that a message was dropped because the brokers always refuse it: once per topic and reason."""
        topic, node = stream.partition.topic, stream.partition.name
        if (topic, type(error)) not in self._refused:
            self._refused.add((topic, type(error)))
            self._log(
                f"topic {topic}: the brokers refuse a message of {size} bytes of node {node}, it is dropped: "
                f"{type(error).__name__}; expected max.message.bytes of at least {size + topics.BATCH_OVERHEAD} on "
                "that topic; further ones are only counted"
            )

    def record_failure(self, error: Exception) -> None:
        """Records that the sender itself failed."""
        self._failure = f"sender: {type(error).__name__}: {error}; retrying"
        self._report(self._failure)

    # --- logging ----------------------------------------------------------------------------------------------------

    def update(self, streams: Iterable[SendStream], now: float, spool_problem: str | None) -> None:
        """Evaluates everything, and logs a change. `spool_problem`: what cannot be read or written in the spool."""
        slow = ((topic, error) for topic, (since, error) in self._blocked_topics.items() if now - since > BLOCKED_S)
        error = next(slow, None) or next(_failing_streams(streams, now), None)
        if error is None:
            self._lookup = None
            self._causes.clear()
            self._report(self._failure or spool_problem)
            return
        if self._lookup is None or (self._lookup.text and now - self._lookup.started > LOOKUP_S):
            self._lookup = _CauseLookup(self._kafka, self._causes, *error, now)
        self._report(self._failure or spool_problem or self._lookup.text or self.problem)

    def _report(self, problem: str | None) -> None:
        if _without_numbers(problem) != _without_numbers(self.problem):
            self._log(f"{problem}; all messages stay in the spool" if problem else "messages arrive again")
        self.problem = problem


class _CauseLookup(threading.Thread):
    """Finds the cause of a problem in its own thread, as that may take seconds. text: None until then."""

    def __init__(self, kafka: Kafka, causes: diagnosis.ClientErrors, topic: str, error: Exception, now: float) -> None:
        super().__init__(name="kafka-why", daemon=True)
        self.text: str | None = None
        self.started = now
        self._kafka, self._causes, self._topic, self._error = kafka, causes, topic, error
        self.start()

    def run(self) -> None:
        """The thread."""
        why: object = self._error  # known even if the lookup fails
        try:
            why = diagnosis.explain_failure(self._kafka, self._causes, self._error)
        finally:
            self.text = f"topic {self._topic}: {why}"


def _failing_streams(streams: Iterable[SendStream], now: float) -> Iterator[tuple[str, Exception]]:
    for stream in streams:
        if stream.error is not None:
            yield stream.partition.topic, stream.error
        elif stream.in_flight and now - stream.last_progress > NO_ACK_S:
            yield stream.partition.topic, TimeoutError(f"no acknowledgement for {NO_ACK_S:g} s")


def _without_numbers(text: str | None) -> str | None:
    """The text without its numbers, such as milliseconds, which vary while the problem stays the same."""
    return text and re.sub(r"\d+", "", text)


class _ExceptionCounter(logging.Handler):
    """Counts the exceptions that the client's I/O thread did not handle."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        self.count += record.exc_info is not None


def _io_logger() -> logging.Logger:
    return logging.getLogger("kafka.producer.sender")
