"""Delivers an OTLP request over HTTP, compressed, and classifies failures as retryable or permanent."""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping

from agents.otlp import messages
from pipeline.config.sections import Opentelemetry
from pipeline.http.addresses import is_loopback_url, make_opener
from pipeline.model.errors import ConfigError, Permanent, Retryable

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
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {path}: cannot be read: {error}; expected lines 'Name: value'") from error
    if any(":" not in line for line in lines):
        raise ConfigError(f"{where}: {path}: expected lines 'Name: value'")
    if not settings.endpoint.startswith("https:") and not is_loopback_url(settings.endpoint):
        raise ConfigError(f"{where}: its headers would go to {settings.endpoint} unencrypted; expected https://")
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _tls_context(settings: Opentelemetry, source: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(settings.ca_file) if settings.ca_file else None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{source}: [opentelemetry] ca_file: {settings.ca_file}: {error}; expected certificates in PEM"
        ) from error
