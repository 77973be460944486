"""What is to be said of how sending to Kafka goes: one line when it changes, not one per try."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from agents.node.uplink.streams import Stream
from pipeline.config.sections import Kafka
from pipeline.transport import diagnosis, topics

QUIET_S = 10.0
"""A stream with messages in flight and no acknowledgement for so long (s) is in trouble: a third of the 30 s within
which that must be seen, and as long as a request may take."""
ASK_S = 10.0
"""Seconds between two questions for the cause, while trouble lasts; chosen: each may cost a connection to a broker."""
SLOW_S = 2.0
"""For so long (s) a client may know nothing of a topic before that is trouble: it has to connect first. Chosen."""


class Outlook:
    """Why messages do not get through. For the sender's thread; `trouble` may be read by any.

    trouble: None when all is well, or nothing was tried yet.
    """

    def __init__(self, kafka: Kafka, say: Callable[[str], object]) -> None:
        self.trouble: str | None = None
        self._kafka, self._say = kafka, say
        self._causes = diagnosis.Causes()
        self._causes.attach()
        self._closed: dict[str, tuple[float, Exception]] = {}  # topic -> since when, why
        self._broken: str | None = None
        self._question: _Question | None = None
        self._refused: set[tuple[str, type[Exception]]] = set()
        self._uncaught = _Uncaught()
        _io_thread().addHandler(self._uncaught)

    def close(self) -> None:
        """Listens to the client no longer."""
        _io_thread().removeHandler(self._uncaught)
        self._causes.detach()

    @property
    def raving(self) -> bool:
        """Whether the client's I/O thread failed since `afresh`: it then does so again and again, without a pause."""
        return self._uncaught.count > 0

    @property
    def helpless(self) -> bool:
        """Whether the client takes no message for some topic."""
        return bool(self._closed)

    def afresh(self) -> None:
        """The client is made anew: what the one before heard and met is past."""
        self._uncaught.count = 0
        self._causes.clear()
        unknown = TimeoutError("a client made anew has taken no message yet")
        self._closed = {topic: (since, unknown) for topic, (since, _) in self._closed.items()}

    # --- what happens ------------------------------------------------------------------------------------------------

    def not_taken(self, topic: str, error: Exception) -> None:
        """The client takes no message for a topic."""
        since, _ = self._closed.get(topic, (time.monotonic(), error))
        self._closed[topic] = since, error

    def arrived(self, stream: Stream) -> None:
        """A message was acknowledged."""
        self._broken = None
        self._closed.pop(stream.partition.topic, None)

    def refused(self, stream: Stream, size: int, error: Exception) -> None:
        """A message was given up, as the brokers will never have it: said once per topic and reason."""
        topic, node = stream.partition.topic, stream.partition.name
        if (topic, type(error)) not in self._refused:
            self._refused.add((topic, type(error)))
            self._say(
                f"topic {topic}: a message of {size} bytes of node {node} is refused for ever and passed over: "
                f"{type(error).__name__}; wanted max.message.bytes of at least {size + topics.BATCH_OVERHEAD} on that "
                "topic; further ones are only counted"
            )

    def broken(self, error: Exception) -> None:
        """The sender itself failed."""
        self._broken = f"sender: {type(error).__name__}: {error}; trying again"
        self._tell(self._broken)

    # --- what is said ------------------------------------------------------------------------------------------------

    def weigh(self, streams: Iterable[Stream], now: float, unread: str | None) -> None:
        """Weighs everything, and says it if that is a change. `unread`: what the spool cannot read or write."""
        slow = ((topic, error) for topic, (since, error) in self._closed.items() if now - since > SLOW_S)
        error = next(slow, None) or next(_failing(streams, now), None)
        if error is None:
            self._question = None
            self._causes.clear()
            self._tell(self._broken or unread)
            return
        if self._question is None or (self._question.text and now - self._question.asked > ASK_S):
            self._question = _Question(self._kafka, self._causes, *error, now)
        self._tell(self._broken or unread or self._question.text or self.trouble)

    def _tell(self, trouble: str | None) -> None:
        if _gist(trouble) != _gist(self.trouble):
            self._say(f"{trouble}; all is kept in the spool" if trouble else "messages get through again")
        self.trouble = trouble


class _Question(threading.Thread):
    """Asks for the cause of trouble, in a thread of its own: an answer may take seconds. `text`: None before."""

    def __init__(self, kafka: Kafka, causes: diagnosis.Causes, topic: str, error: Exception, now: float) -> None:
        super().__init__(name="kafka-why", daemon=True)
        self.text: str | None = None
        self.asked = now
        self._kafka, self._causes, self._topic, self._error = kafka, causes, topic, error
        self.start()

    def run(self) -> None:
        why: object = self._error  # what is known even if asking fails
        try:
            why = diagnosis.trouble(self._kafka, self._causes, self._error)
        finally:
            self.text = f"topic {self._topic}: {why}"


def _failing(streams: Iterable[Stream], now: float) -> Iterator[tuple[str, Exception]]:
    for stream in streams:
        if stream.trouble is not None:
            yield stream.partition.topic, stream.trouble
        elif stream.waiting and now - stream.since > QUIET_S:
            yield stream.partition.topic, TimeoutError(f"no acknowledgement for {QUIET_S:g} s")


def _gist(text: str | None) -> str | None:
    """What stays the same while numbers, as of milliseconds, vary."""
    return text and re.sub(r"\d+", "", text)


class _Uncaught(logging.Handler):
    """Counts the exceptions that the client's I/O thread did not expect."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.exc_info is not None


def _io_thread() -> logging.Logger:
    return logging.getLogger("kafka.producer.sender")
