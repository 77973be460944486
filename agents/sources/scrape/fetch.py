"""One GET of an exporter's page over HTTP: bounded in bytes and in time, no redirects, no proxies."""

from __future__ import annotations

import http.client
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path

from pipeline.errors import ConfigError

MOST_BYTES = 32 << 20
"""Largest page; chosen: 65,000 switch ports with 4 counters each are about 25 MiB."""
CHUNK = 1 << 16
ACCEPT = "text/plain;version=0.0.4;q=1,application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.1"
"""The plain format first: every exporter has it, and its parser forgives more."""


class Unreachable(Exception):  # noqa: N818 - what is wrong is with the exporter
    """The exporter gave no page; the text says why."""


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it would carry the token elsewhere."""

    def redirect_request(self, *_: object) -> None:
        return None


class Fetch:
    """GETs of one URL. Raises ConfigError where certificates or the token cannot be read."""

    def __init__(self, url: str, timeout: float, ca_file: Path | None = None, token_file: Path | None = None) -> None:
        self.url, self._timeout, self._token_file = url, timeout, token_file
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _Stay()]
        if url.startswith("https:"):
            handlers.append(urllib.request.HTTPSHandler(context=_trust(ca_file)))
        self._opener = urllib.request.build_opener(*handlers)
        self._token()

    def __call__(self) -> str:
        """The page. Raises Unreachable."""
        until = time.monotonic() + self._timeout
        try:
            headers = {"Accept": ACCEPT, "User-Agent": "fleetpulse-agent", **self._token()}
            with self._opener.open(urllib.request.Request(self.url, headers=headers), timeout=self._timeout) as answer:
                if answer.status != 200:
                    raise Unreachable(f"answered {answer.status}; wanted 200")
                return _text(answer, until)
        except urllib.error.HTTPError as error:
            with error:
                raise Unreachable(f"answered {error.code} {error.reason}; wanted 200") from None
        except (OSError, http.client.HTTPException, ConfigError) as error:  # URLError is an OSError
            raise Unreachable(str(getattr(error, "reason", None) or error or type(error).__name__)) from None

    def _token(self) -> dict[str, str]:
        """Read anew for each call: tokens are rotated."""
        if self._token_file is None:
            return {}
        try:
            token = self._token_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"token_file {self._token_file}: {error}; wanted a bearer token") from None
        return {"Authorization": f"Bearer {token}"}


def _text(answer: http.client.HTTPResponse, until: float) -> str:
    """The whole body, unless it is too long or drips for longer than it may."""
    parts, size = [], 0
    while part := answer.read1(CHUNK):
        size += len(part)
        if size > MOST_BYTES:
            raise Unreachable(f"a page of more than {MOST_BYTES >> 20} MiB")
        if time.monotonic() > until:
            raise Unreachable(f"no whole page in time; {size} bytes came")
        parts.append(part)
    wanted = answer.length
    if wanted:  # read1 gives what there was, where the other end closed too early
        raise Unreachable(f"the page broke off {wanted} bytes before its end")
    return b"".join(parts).decode("utf-8", "replace")


def _trust(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(ca_file) if ca_file else None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ca_file {ca_file}: {error}; wanted certificates in PEM") from None
