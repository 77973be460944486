"""Creates kafka-python clients with the settings of [kafka]: address, backoff, TLS, SASL.

kafka-python starts its I/O thread before it looks for a broker and leaks the thread when it finds none. A service that
retries every few seconds would collect threads while the broker is away. The clients created here leave none behind.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import KafkaError, KafkaTimeoutError, UnknownTopicOrPartitionError
from kafka.net.compat import KafkaNetClient

from pipeline.config.sections import Kafka
from pipeline.model.errors import ConfigError
from pipeline.model.regular_files import read_regular_text
from pipeline.transport import kerberos, oauth_tokens, topics, wire

RECONNECT_MS = 1000
"""Maximum pause between two connection attempts. The client's default of 30 s keeps agents silent for half a minute
after a broker is back (measured: first record after 34 s, with this after 1.2 s)."""
REQUEST_MS = 10_000
"""Timeout of a request; chosen: a third of the 30 s after which a problem must be visible."""
LOGGER = "kafka"
"""Parent of all loggers of kafka-python."""


def mute_client_log() -> logging.Logger:
    """Keeps the client's log out of ours, and returns its logger.

    It logs several lines per connection attempt, and passwords at DEBUG. diagnosis.ClientErrors adds a handler.
    """
    logger = logging.getLogger(LOGGER)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())  # without a handler, logging writes to stderr
    return logger


def client_settings(kafka: Kafka, role: str) -> dict[str, Any]:
    """Keyword arguments of a kafka-python client whose id ends in `role`. Raises ConfigError on bad credentials."""
    mute_client_log()  # every client is created with these settings
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
    """Addresses of the brokers, from bootstrap_servers."""
    return [server.strip() for server in kafka.bootstrap_servers.split(",")]


def credential_files_state(kafka: Kafka) -> tuple[tuple[int, int, int] | None, ...]:
    """(inode, time, size) of each credential file, to detect that one was replaced; None for an unreadable file."""
    files = (kafka.password_file, kafka.ca_file, kafka.certificate_file, kafka.key_file)
    named = (*files, kafka.token_file, kafka.token_ca_file, kafka.keytab_file)
    return tuple(_file_state(path) for path in named if path is not None)


def _file_state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:  # being replaced; creating a client reports it
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _tls(kafka: Kafka) -> dict[str, Any]:
    paths = {"ca_file": kafka.ca_file, "certificate_file": kafka.certificate_file, "key_file": kafka.key_file}
    for key, path in paths.items():
        if path is not None:
            _read_credential(key, path)
    if (kafka.key_file is None) != (kafka.certificate_file is None):
        raise ConfigError("[kafka] certificate_file and key_file: one without the other; expected both or neither")
    names = {"ca_file": "ssl_cafile", "certificate_file": "ssl_certfile", "key_file": "ssl_keyfile"}
    return {names[key]: str(path) for key, path in paths.items() if path is not None}


def _sasl(kafka: Kafka) -> dict[str, Any]:
    own = {"OAUTHBEARER": _oauth, "GSSAPI": kerberos.kerberos_settings}.get(kafka.sasl_mechanism, _password)
    return {"sasl_mechanism": kafka.sasl_mechanism, **own(kafka)}


def _password(kafka: Kafka) -> dict[str, Any]:
    if not kafka.username or kafka.password_file is None:
        raise ConfigError(
            f"[kafka] security_protocol = {kafka.security_protocol!r}: expected username and password_file, "
            f"found username = {kafka.username!r}, password_file = {str(kafka.password_file or '')!r}"
        )
    password = oauth_tokens.read_secret("password_file", kafka.password_file)
    return {"sasl_plain_username": kafka.username, "sasl_plain_password": password}


def _oauth(kafka: Kafka) -> dict[str, Any]:
    if bool(kafka.token_endpoint) == (kafka.token_file is not None):
        raise ConfigError(
            "[kafka] sasl_mechanism = 'OAUTHBEARER': expected either token_endpoint or token_file, "
            f"found token_endpoint = {kafka.token_endpoint!r}, token_file = {str(kafka.token_file or '')!r}"
        )
    if kafka.token_file is None:
        if kafka.token_ca_file is not None:
            _read_credential("token_ca_file", kafka.token_ca_file)
        _password(kafka)  # the id and secret of a client
    else:
        oauth_tokens.read_secret("token_file", kafka.token_file)
    return {"sasl_oauth_token_provider": oauth_tokens.token_source(kafka)}


def _read_credential(key: str, path: Path) -> None:
    """Raises ConfigError unless the file is text that can be read."""
    try:
        read_regular_text(path)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not text"
        raise ConfigError(f"[kafka] {key} = {str(path)!r}: {why}; expected a readable file") from error


API_VERSION = (3, 9)
"""Protocol version of a producer before it connects; Kafka 2.1 to 4.3 accept it."""
CONNECTING_MS = 100
"""Wait of a producer's I/O thread while a broker connects; chosen; any event ends the wait."""

GRACE_S = 0.5
"""Time beyond its timeout that a client may take to find no broker. Chosen; usually it is 0.01 s late."""
MAX_CREATE_MS = 60_000
"""Limit for creating a client without a timeout: a producer, which connects later. Chosen."""


def create_admin(kafka: Kafka, role: str, seconds: float) -> KafkaAdminClient:
    """A connected admin client. Raises kafka's KafkaTimeoutError if no broker responds within `seconds`."""
    limit = round(seconds * 1000)
    own = {**client_settings(kafka, role), "bootstrap_timeout_ms": limit, "request_timeout_ms": limit}
    return _create_client(KafkaAdminClient, own)


def create_consumer(kafka: Kafka, role: str, seconds: float, **more: Any) -> KafkaConsumer:
    """A connected consumer without a group. Raises kafka's KafkaTimeoutError if no broker responds within `seconds`."""
    own = {**client_settings(kafka, role), "bootstrap_timeout_ms": round(seconds * 1000), **more}
    return _create_client(_Consumer, own)


def create_producer(kafka: Kafka, role: str, **more: Any) -> Producer:
    """A producer that connects whenever a broker becomes reachable.

    Without idempotence: with it, this client never sends again after an outage longer than delivery_timeout_ms, nor
    after one refused message (measured on 3.0.12). Our own key (topic, node, epoch, sequence) removes duplicates.
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
    made: Producer = _create_client(Producer, {**client_settings(kafka, role), **own, **more}, _PatientNetClient)
    return made


class Producer(KafkaProducer):  # type: ignore[misc] # kafka-python ships no types
    """A producer that can always be shut down, whatever the brokers do, and that explains a failed send."""

    # uses private names, since there is no public way; kafka-python is pinned, and tests check these names

    @property
    def is_alive(self) -> bool:
        """Whether its I/O thread is running."""
        return bool(self._sender.is_alive())

    def shut_down(self, seconds: float, force: bool = False) -> None:
        """Closes within about `seconds`, then by force, which drops unsent messages; `force`: immediately.

        The public `close` raises while messages wait for a broker that is away, and leaves the thread running.
        """
        if not force:
            with contextlib.suppress(KafkaError):
                self.close(seconds)
                return
        self._sender.force_close()
        self._sender.join(seconds)
        with contextlib.suppress(KafkaTimeoutError):  # still running: its thread is a daemon
            self.close(0)

    def explain_error(self, topic: str, error: Exception) -> Exception:
        """The cause of a failed send: a timeout although a broker was reached means that the topic is missing."""
        if isinstance(error, KafkaTimeoutError) and self._metadata.brokers():
            error = UnknownTopicOrPartitionError(topic)
        return error


class _Consumer(KafkaConsumer):  # type: ignore[misc] # kafka-python ships no types
    """A consumer that continues with partitions that were paused and resumed.

    kafka-python parks fetched records of a paused partition and uses them only while no other partition's records are
    current. A drained partition stays current, so that the parked one is never fetched again (measured on 3.0.12).
    """

    # uses private names, as in Producer

    def poll(self, *given: Any, **more: Any) -> Any:
        """See `KafkaConsumer.poll`."""
        if not self._fetcher._next_partition_records:
            self._fetcher._next_partition_records = None
        return super().poll(*given, **more)

    def hold_requests(self, milliseconds: int) -> None:
        """Sets how long a broker holds the next fetch requests without data: `fetch_max_wait_ms`."""
        self._fetcher.config["fetch_max_wait_ms"] = milliseconds

    def read_records(self, reader: Callable[..., Any]) -> None:
        """Lets `reader` read fetched records, which takes and has what `Fetcher.PartitionRecords` takes and has."""
        self._fetcher.PartitionRecords = reader

    def polled_offset(self, partition: TopicPartition) -> int | None:
        """Offset after the last polled record; None if unknown.

        `position` may query the brokers, without a timeout, and raise the errors of the next poll: after a broker's
        restart it checks whether the log was truncated.
        """
        position = self._subscription.assignment[partition].position
        return None if position is None else int(position.offset)


class _PatientNetClient(KafkaNetClient):  # type: ignore[misc] # kafka-python ships no types
    """A client whose producer sleeps while a broker connects or a response is pending.

    The producer takes these seconds for milliseconds, and 0, which it gets during a connection attempt or an open
    request, for "ask again immediately": it used up to a whole core with a hanging broker (measured on 3.0.12).
    """

    def connection_delay(self, node_id: Any) -> float:
        """See `KafkaNetClient.connection_delay`; in milliseconds, at least CONNECTING_MS."""
        seconds: float = super().connection_delay(node_id)
        return max(seconds * 1000, CONNECTING_MS)


def _create_client(kind: type, settings: dict[str, Any], network: type = KafkaNetClient) -> Any:
    begun: list[KafkaNetClient] = []

    def client(**configuration: Any) -> KafkaNetClient:
        begun.append(network(**configuration))
        return begun[-1]

    def end() -> None:
        for left in begun:
            with contextlib.suppress(RuntimeError):  # it is already closed after its own failure
                left.close()

    # the client's TLS handshake has no timeout: with a frozen broker it would never return (seen with 3.0.12)
    watchdog = threading.Timer(settings.get("bootstrap_timeout_ms", MAX_CREATE_MS) / 1000 + GRACE_S, end)
    watchdog.daemon = True
    watchdog.start()
    try:
        return kind(kafka_client=client, **settings)
    except BaseException:
        end()
        raise
    finally:
        watchdog.cancel()
