"""Creates kafka-python clients with the settings of [kafka]: address, backoff, TLS, SASL.

kafka-python starts its I/O thread before it looks for a broker and leaks the thread when it finds none. A service that
retries every few seconds would collect threads while the broker is away. The clients created here leave none behind.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import KafkaError, KafkaTimeoutError, UnknownTopicOrPartitionError
from kafka.net.compat import KafkaNetClient

from pipeline.config.sections import Kafka
from pipeline.model.errors import ConfigError
from pipeline.transport import topics, wire

RECONNECT_MS = 1000
"""Longest pause between two tries to connect. The client's 30 s would leave agents silent for half a minute after a
broker is back (measured: first record 34 s after the broker, 1.2 s with this)."""
REQUEST_MS = 10_000
"""A request without an answer for so long has failed; chosen: a third of the 30 s after which trouble must be seen."""
LOGGER = "kafka"
"""Under which all loggers of the client lie."""


def mute_client_log() -> logging.Logger:
    """The client's logger, tamed: it logs several lines per try to connect, and passwords at DEBUG.

    Nothing of it goes on to our own log; who wants to hear it adds a handler (diagnosis.Causes).
    """
    logger = logging.getLogger(LOGGER)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())  # without any, logging itself would write to stderr
    return logger


def client_settings(kafka: Kafka, role: str) -> dict[str, Any]:
    """Keyword arguments of any kafka-python client, whose id ends in `role`. Raises ConfigError on bad credentials."""
    mute_client_log()  # nobody makes a client without these settings
    out: dict[str, Any] = {
        "bootstrap_servers": broker_addresses(kafka),
        "client_id": f"fleetpulse-{role}",
        "reconnect_backoff_max_ms": RECONNECT_MS,
        "request_timeout_ms": REQUEST_MS,
        "security_protocol": kafka.security_protocol,
    }
    if kafka.security_protocol.endswith("SSL"):
        out |= _tls(kafka)
    if kafka.security_protocol.startswith("SASL"):
        out |= _sasl(kafka)
    return out


def broker_addresses(kafka: Kafka) -> list[str]:
    """Addresses at which the brokers are looked for."""
    return [server.strip() for server in kafka.bootstrap_servers.split(",")]


def credential_files_state(kafka: Kafka) -> tuple[tuple[int, int, int] | None, ...]:
    """What changes when a file with credentials is written or replaced; None for one that cannot be seen."""
    named = (kafka.password_file, kafka.ca_file, kafka.certificate_file, kafka.key_file)
    return tuple(_file_state(path) for path in named if path is not None)


def _file_state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:  # being replaced; who makes a client hears of it
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _tls(kafka: Kafka) -> dict[str, Any]:
    paths = {"ca_file": kafka.ca_file, "certificate_file": kafka.certificate_file, "key_file": kafka.key_file}
    for key, path in paths.items():
        if path is not None:
            _read_credential(key, path)
    if (kafka.key_file is None) != (kafka.certificate_file is None):
        raise ConfigError("[kafka] certificate_file and key_file: one without the other; wanted both or neither")
    names = {"ca_file": "ssl_cafile", "certificate_file": "ssl_certfile", "key_file": "ssl_keyfile"}
    return {names[key]: str(path) for key, path in paths.items() if path is not None}


def _sasl(kafka: Kafka) -> dict[str, Any]:
    if not kafka.username or kafka.password_file is None:
        raise ConfigError(
            f"[kafka] security_protocol = {kafka.security_protocol!r}: expected username and password_file, "
            f"found username = {kafka.username!r}, password_file = {str(kafka.password_file or '')!r}"
        )
    password = _read_credential("password_file", kafka.password_file).rstrip("\r\n")
    if not password:
        raise ConfigError(f"[kafka] password_file = {str(kafka.password_file)!r}: is empty; wanted the password in it")
    return {
        "sasl_mechanism": kafka.sasl_mechanism,
        "sasl_plain_username": kafka.username,
        "sasl_plain_password": password,
    }


def _read_credential(key: str, path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not text"
        raise ConfigError(f"[kafka] {key} = {str(path)!r}: {why}; wanted a file that we may read") from error


API_VERSION = (3, 9)
"""Protocol of a producer that has not met a broker yet; Kafka 2.1 to 4.3 understand what it sends."""
CONNECTING_MS = 100
"""How long a producer's I/O thread waits for a broker that is no further yet; chosen: any news ends the wait."""

GRACE_S = 0.5
"""How much longer than it was told a client may take to find no broker. Chosen: it ends 0.01 s late if it can."""
LONGEST_MS = 60_000
"""What making a client may take that was told no limit: a producer, which looks for its brokers later. Chosen."""


def admin(kafka: Kafka, role: str, seconds: float) -> KafkaAdminClient:
    """A connected admin client. Raises kafka's KafkaTimeoutError if no broker answers within `seconds`."""
    limit = round(seconds * 1000)
    own = {**client_settings(kafka, role), "bootstrap_timeout_ms": limit, "request_timeout_ms": limit}
    return _made(KafkaAdminClient, own)


def consumer(kafka: Kafka, role: str, seconds: float, **more: Any) -> KafkaConsumer:
    """A connected consumer without group. Raises kafka's KafkaTimeoutError if no broker answers within `seconds`."""
    own = {**client_settings(kafka, role), "bootstrap_timeout_ms": round(seconds * 1000), **more}
    return _made(_Reader, own)


def producer(kafka: Kafka, role: str, **more: Any) -> Producer:
    """A producer that connects when a broker is there, whenever that is.

    Without idempotence: with it this client never sends again after an outage that outlasts delivery_timeout_ms, nor
    after one refused message (measured on 3.0.12). Our own key (topic, node, epoch, sequence) makes copies harmless.
    """
    own: dict[str, Any] = {
        "acks": "all",
        "enable_idempotence": False,
        "max_in_flight_requests_per_connection": 1,
        "compression_type": None,  # a message is one zstd frame
        "allow_auto_create_topics": False,
        "max_request_size": wire.MAX_MESSAGE + topics.BATCH_OVERHEAD,
        "api_version": API_VERSION,
    }
    made: Producer = _made(Producer, {**client_settings(kafka, role), **own, **more}, _CalmClient)
    return made


class Producer(KafkaProducer):  # type: ignore[misc] # kafka-python ships no types
    """A producer that can be ended whatever the brokers do, and that knows what a refused send means."""

    # private names, for want of a public way; the version of kafka-python is pinned, and tests hold these to it

    @property
    def alive(self) -> bool:
        """Whether its I/O thread still runs."""
        return bool(self._sender.is_alive())

    def end(self, seconds: float, force: bool = False) -> None:
        """Closes within about `seconds`, and then by force, which gives up what it holds; at once by `force`.

        The public way raises while messages wait for a broker that is away, and leaves the thread running.
        """
        if not force:
            with contextlib.suppress(KafkaError):
                self.close(seconds)
                return
        self._sender.force_close()
        self._sender.join(seconds)
        with contextlib.suppress(KafkaTimeoutError):  # not even by force: its thread is a daemon
            self.close(0)

    def meaning(self, topic: str, error: Exception) -> Exception:
        """What a refused send means: where a broker was met, time that ran out says that the topic is not there."""
        if isinstance(error, KafkaTimeoutError) and self._metadata.brokers():
            error = UnknownTopicOrPartitionError(topic)
        return error


class _Reader(KafkaConsumer):  # type: ignore[misc] # kafka-python ships no types
    """A consumer that goes on with partitions that were paused and resumed.

    It parks what it has of a paused partition, and takes it up again only while no other partition's records are in
    hand. A drained one stays in its hand, so that the parked partition is never fetched again (measured on 3.0.12).
    """

    # private names, as in Producer

    def poll(self, *given: Any, **more: Any) -> Any:
        if not self._fetcher._next_partition_records:
            self._fetcher._next_partition_records = None
        return super().poll(*given, **more)

    def reached(self, partition: TopicPartition) -> int | None:
        """Offset behind what was polled: `position`, which may ask the brokers, without limit, and fail in their stead.

        After a broker's restart it asks whether the log was cut short, and raises what else the next poll raises.
        """
        position = self._subscription.assignment[partition].position
        return None if position is None else int(position.offset)


class _CalmClient(KafkaNetClient):  # type: ignore[misc] # kafka-python ships no types
    """A client whose producer sleeps while a broker connects, answers or does not.

    The producer takes these seconds for milliseconds, and 0, which it gets while a connection is being made or has a
    request open, for "ask again at once": it turned up to a whole core with a broker that hangs (measured on 3.0.12).
    """

    def connection_delay(self, node_id: Any) -> float:
        seconds: float = super().connection_delay(node_id)
        return max(seconds * 1000, CONNECTING_MS)


def _made(kind: type, settings: dict[str, Any], network: type = KafkaNetClient) -> Any:
    begun: list[KafkaNetClient] = []

    def client(**configuration: Any) -> KafkaNetClient:
        begun.append(network(**configuration))
        return begun[-1]

    def end() -> None:
        for left in begun:
            with contextlib.suppress(RuntimeError):  # one that gave up by itself meanwhile is closed
                left.close()

    # the client's TLS handshake heeds no limit: with a frozen broker it would never return (seen with 3.0.12)
    watchdog = threading.Timer(settings.get("bootstrap_timeout_ms", LONGEST_MS) / 1000 + GRACE_S, end)
    watchdog.daemon = True
    watchdog.start()
    try:
        return kind(kafka_client=client, **settings)
    except BaseException:
        end()
        raise
    finally:
        watchdog.cancel()
