"""Delivery of OTLP requests over HTTP and to Kafka: a bounded queue, and one thread that sends, with backoff.

Nothing here makes the agent wait: if the queue is full, the oldest request is dropped. Bodies are compressed; failures
are classified as retryable or permanent.
"""

from __future__ import annotations

import http.client
import random
import ssl
import threading
import urllib.error
import urllib.request
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from agents.otlp import messages
from pipeline.config.sections import Kafka, Opentelemetry
from pipeline.http import certificates
from pipeline.http.addresses import is_loopback_url, make_opener
from pipeline.model.errors import ConfigError, Permanent, Retryable
from pipeline.model.records import OTLP
from pipeline.model.regular_files import read_regular_text

MAX_BYTES = 4 << 20
"""Most bytes in the queue. Chosen: of a node with 8 GPUs about 15 requests, 2.5 minutes at the usual interval."""
PAUSE_S, PAUSE_MAX_S = 1.0, 60.0
"""Backoff after the first failure, and its maximum; it doubles, and is reduced at random by up to half, so that a fleet
does not call a recovered collector all at the same time. Chosen; OTLP requires exponential backoff with jitter."""

ACK_TIMEOUT_S = 30.0
"""Longest wait for the brokers' acknowledgement, as in the telemetry's own producer."""
BLOCK_MS = 5000
"""Longest wait for the topic's metadata; this thread has nothing else to do. Chosen."""
CLOSE_S = 0.5


class Outbox:
    """sent, dropped: requests since the start. `deliver` raises Retryable or Permanent.

    `log` gets changes of state; `end` is called last, by the delivering thread.
    """

    def __init__(
        self,
        name: str,
        deliver: Callable[[bytes], None],
        log: Callable[[str], object],
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self.sent = self.dropped = 0
        self._on_end = end
        self._deliver, self._log = deliver, log
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._pause = 0.0
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def enqueue(self, request: bytes) -> None:
        """Queues a request; never waits."""
        if self._thread.ident is None:
            self._thread.start()
        with self._changed:
            self._waiting.append(request)
            self._size += len(request)
            while self._size > MAX_BYTES:
                self._size -= len(self._waiting.popleft())
                self.dropped += 1
            self._changed.notify()

    def close(self, seconds: float) -> None:
        """Ends within about `seconds`: queued requests are tried once more as long as deliveries succeed."""
        with self._changed:
            self._stop.set()
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        self._send()
        self._on_end()

    def _send(self) -> None:
        while (request := self._next()) is not None:
            while not self._try_delivery(request):
                if self._stop.is_set():
                    self.dropped += 1
                    return

    def _next(self) -> bytes | None:
        """Returns the oldest request; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stop.is_set())
            if not self._waiting:
                return None
            request = self._waiting.popleft()
            self._size -= len(request)
            return request

    def _try_delivery(self, request: bytes) -> bool:
        """Tries once, and waits after a failure; returns whether the request is delivered or dropped."""
        try:
            self._deliver(request)
        except Retryable as error:
            self._wait(error)
            return False
        except Permanent as error:
            self._drop(str(error))
        except Exception as error:  # noqa: BLE001 - an error of a library must not end the thread; it is logged
            self._drop(f"{type(error).__name__}: {error}")
        else:
            self.sent += 1
            if self._pause:
                self._log(f"sending works again; {self.dropped} requests dropped since the start")
                self._pause = 0.0
        return True

    def _drop(self, why: str) -> None:
        with self._changed:
            self.dropped += 1
        self._log(f"request dropped: {why}")

    def _wait(self, error: Retryable) -> None:
        if not self._pause:
            self._log(f"cannot send: {error}; retrying")
        self._pause = min(max(PAUSE_S, 2 * self._pause), PAUSE_MAX_S)
        self._stop.wait(max(error.after_s, self._pause * random.uniform(0.5, 1.0)))


TIMEOUT_S = 10.0
"""The OTLP exporters' default (opentelemetry.io, OTLP exporter configuration)."""
RETRYABLE_STATUSES = (429, 502, 503, 504)
"""Statuses that the specification retries; all others are permanent (OTLP 1.x, Failures)."""
MAX_RETRY_AFTER_S = 300.0
"""Longest wait that a collector may request. Chosen."""
MAX_ANSWER_BYTES = 1 << 16


class HttpDelivery:
    """Sends requests to `ENDPOINT/v1/metrics`. Raises ConfigError if headers or certificates cannot be read."""

    def __init__(self, settings: Opentelemetry, source: str) -> None:
        self.url = settings.endpoint.rstrip("/") + "/v1/metrics"
        self._headers = {
            "Content-Type": "application/x-protobuf",
            "Content-Encoding": "gzip",
            "User-Agent": "fleetpulse-agent",
            **_read_headers(settings, source),
        }
        handlers = []
        if settings.endpoint.startswith("https:"):  # reading the system's certificates costs memory
            handlers.append(urllib.request.HTTPSHandler(context=_tls_context(settings, source)))
        self._opener = make_opener(*handlers, environment_proxies_to=self.url)

    def __call__(self, request: bytes) -> None:
        """Sends a request. Raises Retryable or Permanent with the reason."""
        call = urllib.request.Request(self.url, compress(request), self._headers, method="POST")
        try:
            with self._opener.open(call, timeout=TIMEOUT_S) as answer:
                refused, why = _parse_rejected(answer.read(MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                text = f"{self.url}: {error.code} {error.reason}"
                if error.code in RETRYABLE_STATUSES:
                    raise Retryable(text, _parse_retry_after(error.headers.get("Retry-After"))) from error
                raise Permanent(f"{text}; expected 200") from error
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
            raise Retryable(f"{self.url}: {getattr(error, 'reason', None) or error}") from error
        if refused:
            raise Permanent(f"{self.url}: {refused} points refused: {why}")


def compress(data: bytes) -> bytes:
    """Compresses with gzip level 1, the cheapest: repeated names and attributes compress well at any level."""
    packer = zlib.compressobj(1, wbits=31)  # 16 + 15: a gzip header, the largest window
    return packer.compress(data) + packer.flush()


def _parse_rejected(answer: bytes) -> tuple[int, str]:
    try:
        return messages.decode_rejected(answer)
    except ValueError:  # a proxy's own page with status 200; whether the points arrived is unknown
        return 0, ""


def _parse_retry_after(text: str | None) -> float:
    """Returns the seconds of a Retry-After header; 0 for its form with a date."""
    return min(float(text), MAX_RETRY_AFTER_S) if text and text.strip().isdecimal() else 0.0


def _read_headers(settings: Opentelemetry, source: str) -> Mapping[str, str]:
    """Returns the lines of `headers_file`. They may be secrets, so they leave the host only encrypted."""
    path = settings.headers_file
    if path is None:
        return {}
    where = f"{source}: [opentelemetry] headers_file"
    try:
        lines = [line for line in read_regular_text(path).splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {path}: cannot be read: {error}; expected lines 'Name: value'") from error
    if any(":" not in line for line in lines):
        raise ConfigError(f"{where}: {path}: expected lines 'Name: value'")
    if not settings.endpoint.startswith("https:") and not is_loopback_url(settings.endpoint):
        raise ConfigError(f"{where}: its headers would go to {settings.endpoint} unencrypted; expected https://")
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _tls_context(settings: Opentelemetry, source: str) -> ssl.SSLContext:
    try:
        return certificates.trust(settings.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{source}: [opentelemetry] ca_file: {settings.ca_file}: {error.strerror}; expected certificates in PEM"
        ) from error


class KafkaDelivery:
    """Delivers requests to Kafka's topic `otlp_metrics`, keyed by node, for the OpenTelemetry Collector.

    Best effort, beside the spool with the same telemetry: one request is in flight and waits for its acknowledgement.
    Raises ConfigError on bad credentials; the broker may be down. The client is imported only here.
    """

    def __init__(self, kafka: Kafka, node: str) -> None:
        from pipeline.transport import kafka_clients

        self._kafka, self._key = kafka, node.encode()
        self._producer: Any = None
        kafka_clients.client_settings(kafka, "agent")

    def __call__(self, request: bytes) -> None:
        """Sends a request. Raises Retryable or Permanent with the reason."""
        from kafka.errors import KafkaError

        from agents.node.uplink.client import is_permanent

        if self._producer is None:
            self._producer = self._make_producer()
        try:
            self._producer.send(OTLP, request, self._key).get(timeout=ACK_TIMEOUT_S)
        except KafkaError as error:
            if is_permanent(error):
                raise Permanent(f"topic {OTLP}: {error}") from error
            why = self._producer.explain_error(OTLP, error)
            self.close()  # a failed client may be unusable; the next one reads the credentials again
            raise Retryable(f"topic {OTLP}: {type(why).__name__}: {why}") from error

    def close(self) -> None:
        """Closes the client; the next request creates another one."""
        if self._producer is not None:
            self._producer.shut_down(CLOSE_S, force=True)
            self._producer = None

    def _make_producer(self) -> Any:
        from pipeline.transport import kafka_clients

        return kafka_clients.create_producer(
            self._kafka,
            "agent",
            compression_type="zstd",
            linger_ms=0,
            delivery_timeout_ms=round(ACK_TIMEOUT_S * 1000),
            max_block_ms=BLOCK_MS,
            metrics_enabled=False,
        )
