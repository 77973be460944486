"""One OTLP request to a collector over HTTP: compressed, and what its answer means for trying again."""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping

from agents.otlp import messages
from pipeline.config.sections import Opentelemetry
from pipeline.http.addresses import is_loopback_url, opener
from pipeline.model.errors import ConfigError, Permanent, Retryable

TIMEOUT_S = 10.0
"""The OTLP exporters' default (opentelemetry.io, OTLP exporter configuration)."""
AGAIN = (429, 502, 503, 504)
"""Answers after which the specification wants another try; all others are final (OTLP 1.x, Failures)."""
AFTER_MOST_S = 300.0
"""How long a collector may tell us to wait; chosen."""
MAX_ANSWER = 1 << 16


class Post:
    """Delivers requests to `ENDPOINT/v1/metrics`. Raises ConfigError where headers or certificates cannot be read."""

    def __init__(self, settings: Opentelemetry, source: str) -> None:
        self.url = settings.endpoint.rstrip("/") + "/v1/metrics"
        self._headers = {
            "Content-Type": "application/x-protobuf",
            "Content-Encoding": "gzip",
            "User-Agent": "fleetpulse-agent",
            **_headers(settings, source),
        }
        more = []
        if settings.endpoint.startswith("https:"):  # reading the system's certificates costs memory
            more.append(urllib.request.HTTPSHandler(context=_trust(settings, source)))
        self._opener = opener(*more, environment_proxies_to=self.url)

    def __call__(self, request: bytes) -> None:
        """Raises Retryable or Permanent, which says why."""
        call = urllib.request.Request(self.url, gzip(request), self._headers, method="POST")
        try:
            with self._opener.open(call, timeout=TIMEOUT_S) as answer:
                refused, why = _refused(answer.read(MAX_ANSWER))
        except urllib.error.HTTPError as error:
            with error:
                text = f"{self.url}: {error.code} {error.reason}"
                if error.code in AGAIN:
                    raise Retryable(text, _after(error.headers.get("Retry-After"))) from error
                raise Permanent(f"{text}; wanted 200") from error
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
            raise Retryable(f"{self.url}: {getattr(error, 'reason', None) or error}") from error
        if refused:
            raise Permanent(f"{self.url}: {refused} points refused: {why}")


def gzip(data: bytes) -> bytes:
    """Level 1, the cheapest: names and attributes that repeat are most of a request, and any level folds those."""
    packer = zlib.compressobj(1, wbits=31)  # 16 + 15: a gzip header, the largest window
    return packer.compress(data) + packer.flush()


def _refused(answer: bytes) -> tuple[int, str]:
    try:
        return messages.rejected(answer)
    except ValueError:  # a proxy's own page with 200; the points may have arrived, and nothing else can be known
        return 0, ""


def _after(text: str | None) -> float:
    """Seconds of a Retry-After; the form with a date counts as none."""
    return min(float(text), AFTER_MOST_S) if text and text.strip().isdecimal() else 0.0


def _headers(settings: Opentelemetry, source: str) -> Mapping[str, str]:
    """The lines of `headers_file`. They may be secrets, so that they leave the host encrypted only."""
    path = settings.headers_file
    if path is None:
        return {}
    where = f"{source}: [opentelemetry] headers_file"
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {path}: cannot be read: {error}; wanted lines 'Name: value'") from error
    if any(":" not in line for line in lines):
        raise ConfigError(f"{where}: {path}: wanted lines 'Name: value'")
    if not settings.endpoint.startswith("https:") and not is_loopback_url(settings.endpoint):
        raise ConfigError(f"{where}: its headers would go to {settings.endpoint} in clear; wanted https://")
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _trust(settings: Opentelemetry, source: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(settings.ca_file) if settings.ca_file else None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{source}: [opentelemetry] ca_file: {settings.ca_file}: {error}; wanted certificates in PEM"
        ) from error
