"""Access tokens for SASL/OAUTHBEARER: fetched from a token endpoint (OAuth client credentials), or read from a file.

One token serves all Kafka clients of a process. It is renewed in the last quarter of its life; the clients log in again
on their open connections shortly before it expires (KIP-368). A token endpoint that hangs never blocks a client for
longer than FETCH_S, and for at most RENEW_WAIT_S while the last token is still valid. Tokens and secrets are never
logged.
"""

from __future__ import annotations

import base64
import email.utils
import json
import logging
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kafka.errors import KafkaConnectionError
from kafka.net.sasl.oauth import AbstractTokenProvider

from pipeline.config.sections import Kafka
from pipeline.http import certificates
from pipeline.http.addresses import make_opener
from pipeline.model.errors import ConfigError
from pipeline.model.regular_files import read_regular_text
from pipeline.transport.broker_errors import CLOCKS, BrokerProblem, classify_tls_error

log = logging.getLogger("fleetpulse.kafka")

FETCH_S = 5.0
"""Limit of one fetch (s); chosen: a sixth of the 30 s within which a problem must be visible."""
RENEW_WAIT_S = 0.5
"""Wait for a new token while the last one is valid (s); chosen: a healthy endpoint needs 0.05 s."""
RENEW_SHARE = 0.75
"""Share of a token's life after which it is renewed. Clients log in again after 85 to 95 % of it (kafka-python)."""
RETRY_S = 5.0
"""Pause after a failed fetch (s): 10,000 agents must not overload an endpoint that has just recovered. Chosen."""
MAX_BYTES = 1 << 20
"""Maximum size of a response or token file. Chosen: a token has 1 to 5 kB; brokers accept 512 KiB in a login."""
SKEW_S = 5.0
"""Clock difference to the endpoint that an error names (s); chosen: its Date header has whole seconds."""


class LoginError(KafkaConnectionError):  # type: ignore[misc] # kafka-python ships no types
    """No login is possible: there is no token or ticket. kafka-python treats it as a failed connection and retries.

    problem: the finding and the remedy.
    """

    def __init__(self, problem: BrokerProblem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Token:
    """A token with its claims, if it is a JWT. received, expires: UTC s; expires is None if unknown."""

    text: str = field(repr=False)
    received: float
    expires: float | None
    claims: dict[str, Any] = field(default_factory=dict)

    def is_valid(self, now: float) -> bool:
        """Whether it is not expired by our clock."""
        return self.expires is None or now < self.expires

    def is_due(self, now: float) -> bool:
        """Whether it should be renewed; one without a known life is renewed at each login."""
        return self.expires is None or now >= self.received + RENEW_SHARE * (self.expires - self.received)

    def describe(self, now: float) -> str:
        """What identifies the token, never its text: issuer, audience, subject and remaining life."""
        named = [(word, self.claims.get(key)) for word, key in (("issuer", "iss"), ("audience", "aud"))]
        named.append(("subject", self.claims.get("sub")))
        parts = [f"{word} {value}" for word, value in named if value]
        if self.expires is not None:
            left = self.expires - now
            parts.append(f"expires in {left:.0f} s" if left >= 0 else f"expired {-left:.0f} s ago")
        return ", ".join(parts) or "an opaque token"


class TokenSource(AbstractTokenProvider):  # type: ignore[misc] # kafka-python ships no types
    """The current token of one [kafka]; for any thread."""

    def __init__(self, kafka: Kafka, clock: Callable[[], float] = time.time) -> None:
        super().__init__()
        self._kafka, self._clock = kafka, clock
        self._lock = threading.Lock()
        self._token: Token | None = None
        self._fetch: _Fetch | None = None
        self._failure: tuple[float, BrokerProblem] | None = None  # monotonic time, why

    @property
    def where(self) -> str:
        """Where tokens come from."""
        if self._kafka.token_file is not None:
            return f"token_file {self._kafka.token_file}"
        return f"token endpoint {self._kafka.token_endpoint}"

    @property
    def current(self) -> Token | None:
        """The last token, even if it has expired."""
        return self._token

    def token(self) -> str:
        """See `AbstractTokenProvider.token`. Raises LoginError."""
        if self._kafka.token_file is not None:
            found = self._token = _read_token_file(self._kafka.token_file, self._clock())
            return found.text
        with self._lock:
            return self._current_or_fetched().text

    def describe(self) -> str:
        """The last token in words, without the token itself."""
        return self._token.describe(self._clock()) if self._token else "no token yet"

    def _current_or_fetched(self) -> Token:
        now = self._clock()
        valid = self._token if self._token is not None and self._token.is_valid(now) else None
        if valid is not None and not valid.is_due(now):
            return valid
        if self._failure is not None and time.monotonic() - self._failure[0] < RETRY_S:
            if valid is not None:
                return valid
            raise LoginError(self._failure[1])
        if self._fetch is None:
            self._fetch = _Fetch(self._kafka, self._clock)
        self._fetch.finished.wait(FETCH_S if valid is None else RENEW_WAIT_S)
        problem = self._take_result()
        if problem is None:
            assert self._token is not None
            return self._token
        if valid is None:
            raise LoginError(problem)
        return valid

    def _take_result(self) -> BrokerProblem | None:
        """Takes the outcome of the fetch; returns why there is no new token. One that hangs is kept, not doubled."""
        fetch = self._fetch
        assert fetch is not None
        if not fetch.finished.is_set():
            text = f"{self.where}: does not respond"
            return self._count_failure(BrokerProblem("login server", text, ENDPOINT))
        self._fetch = None
        if fetch.token is None:
            assert fetch.problem is not None
            return self._count_failure(fetch.problem)
        if self._failure is not None:
            log.warning("%s: issues tokens again", self.where)
        self._token, self._failure = fetch.token, None
        return None

    def _count_failure(self, problem: BrokerProblem) -> BrokerProblem:
        if self._failure is None and self._token is not None:
            log.warning("the token cannot be renewed: %s; the last one: %s", problem, self.describe())
        self._failure = time.monotonic(), problem
        return problem


ENDPOINT = "start the token endpoint, or correct [kafka] token_endpoint"
CERTIFICATES = "correct [kafka] token_ca_file: expected a readable file of PEM certificates"
SECRET = "correct [kafka] username and password_file: the id and secret of a client at the token endpoint"


class _Fetch(threading.Thread):
    """One request to the token endpoint, in its own daemon thread: name resolution and TLS have no timeout."""

    def __init__(self, kafka: Kafka, clock: Callable[[], float]) -> None:
        super().__init__(name="kafka-token", daemon=True)
        self.finished = threading.Event()
        self.token: Token | None = None
        self.problem: BrokerProblem | None = None
        self._kafka, self._clock = kafka, clock
        self._where = f"token endpoint {kafka.token_endpoint}"
        self.start()

    def run(self) -> None:
        """The thread."""
        try:
            self.token = self._request()
        except LoginError as error:
            self.problem = error.problem
        except Exception as error:  # noqa: BLE001 - a response that is not OAuth; the text must not hold the token
            self.problem = BrokerProblem("login server", f"{self._where}: {type(error).__name__}", ENDPOINT)
        finally:
            self.finished.set()

    def _request(self) -> Token:
        kafka = self._kafka
        assert kafka.password_file is not None
        form = {"grant_type": "client_credentials", "scope": kafka.token_scope, "audience": kafka.token_audience}
        pair = f"{_quote(kafka.username)}:{_quote(read_secret('password_file', kafka.password_file))}"
        headers = {
            "Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}",
            "Content-Type": "application/x-www-form-urlencoded",
            "Accept": "application/json",
        }
        body = urllib.parse.urlencode({key: value for key, value in form.items() if value}).encode()
        request = urllib.request.Request(kafka.token_endpoint, body, headers)
        try:
            context = certificates.trust(kafka.token_ca_file)
        except OSError as error:
            text = f"[kafka] token_ca_file = {str(kafka.token_ca_file)!r}: {error.strerror}"
            raise LoginError(BrokerProblem("credential", text, CERTIFICATES)) from None
        opener = make_opener(urllib.request.HTTPSHandler(context=context), environment_proxies_to=kafka.token_endpoint)
        try:
            with opener.open(request, timeout=FETCH_S) as response:
                return self._read_token(response.read(MAX_BYTES), response.headers.get("Date"))
        except urllib.error.HTTPError as error:
            with error:
                raise LoginError(self._explain_status(error)) from None
        except urllib.error.URLError as error:
            raise LoginError(self._explain_connection(error.reason)) from None
        except OSError as error:
            raise LoginError(self._explain_connection(error)) from None

    def _read_token(self, body: bytes, date: str | None) -> Token:
        now, answer = self._clock(), _json_object(body)
        text, life = answer.get("access_token"), answer.get("expires_in")
        if not isinstance(text, str) or not text.isprintable() or not text:
            text = f"{self._where}: its response has no access_token; is this the token endpoint?"
            raise LoginError(BrokerProblem("login server", text, "correct [kafka] token_endpoint"))
        token = parse_token(text, now, float(life) if isinstance(life, (int, float)) else None)
        ahead = now - email.utils.parsedate_to_datetime(date).timestamp() if date else 0.0
        if not token.is_valid(now):
            skew = f"; this host's clock is {abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}"
            skew = skew if abs(ahead) > SKEW_S else ""
            text = f"{self._where}: its new token {token.describe(now)}{skew}"
            raise LoginError(BrokerProblem("credential", text, CLOCKS))
        return token

    def _explain_status(self, error: urllib.error.HTTPError) -> BrokerProblem:
        answer = _json_object(error.read(MAX_BYTES))
        code, why = answer.get("error"), answer.get("error_description")
        words = ": ".join(str(word)[:200] for word in (code, why) if word) or f"HTTP status {error.code}"
        if code in ("invalid_client", "unauthorized_client") or error.code in (401, 403):
            text = f"{self._where}: refuses client {self._kafka.username!r}: {words}"
            return BrokerProblem("credential", text, SECRET)
        if code in ("invalid_scope", "invalid_target", "invalid_request"):
            text = f"{self._where}: refuses the request: {words}"
            return BrokerProblem("credential", text, "correct [kafka] token_scope and token_audience")
        return BrokerProblem("login server", f"{self._where}: fails: {words}", ENDPOINT)

    def _explain_connection(self, error: object) -> BrokerProblem:
        if isinstance(error, BaseException) and (found := classify_tls_error(error, self._where, "token_ca_file")):
            return found
        if isinstance(error, TimeoutError):
            return BrokerProblem("login server", f"{self._where}: does not respond", ENDPOINT)
        why = (getattr(error, "strerror", None) or str(error)).lower()
        return BrokerProblem("login server", f"{self._where}: {why}", ENDPOINT)


def parse_token(text: str, now: float, life: float | None = None) -> Token:
    """A token received at `now`. Its life is the claim exp, else `life` (s), else unknown."""
    claims: dict[str, Any] = {}
    pieces = text.split(".")
    if len(pieces) == 3:
        try:
            claims = _json_object(base64.urlsafe_b64decode(pieces[1] + "=" * (-len(pieces[1]) % 4)))
        except ValueError:  # not a JWT: the brokers decide
            claims = {}
    stated = claims.get("exp")
    expires = float(stated) if isinstance(stated, (int, float)) else None if life is None else now + life
    return Token(text, now, expires, claims)


def _read_token_file(path: Path, now: float) -> Token:
    """The token in a file, which another program renews. Raises LoginError."""
    try:
        token = parse_token(read_secret("token_file", path), now)
    except ConfigError as error:
        raise LoginError(BrokerProblem("credential", str(error), "correct the file")) from error
    if not token.is_valid(now):
        text = f"[kafka] token_file = {str(path)!r}: the token {token.describe(now)}"
        raise LoginError(BrokerProblem("credential", text, "start the program that renews the file, or compare clocks"))
    return token


def read_secret(key: str, path: Path) -> str:
    """The text of a secret's file, without its line end. Raises ConfigError."""
    try:
        text = read_regular_text(path)[:MAX_BYTES].rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not text"
        raise ConfigError(f"[kafka] {key} = {str(path)!r}: {why}; expected a readable file") from error
    if not text:
        what = {"password_file": "password", "token_file": "token"}.get(key, "content")
        raise ConfigError(f"[kafka] {key} = {str(path)!r}: is empty; expected the {what}")
    return text


def _quote(text: str) -> str:
    """As RFC 6749 section 2.3.1 wants id and secret in a Basic header."""
    return urllib.parse.quote_plus(text)


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


_SOURCES: dict[tuple[object, ...], TokenSource] = {}
_SOURCES_LOCK = threading.Lock()
MAX_SOURCES = 16
"""Token sources of one process; chosen: one per configuration, and tests have several."""


def token_source(kafka: Kafka) -> TokenSource:
    """The token source of this configuration, shared by all clients of the process."""
    own = (kafka.token_endpoint, kafka.token_file, kafka.username, kafka.password_file)
    key = (*own, kafka.token_scope, kafka.token_audience, kafka.token_ca_file)
    with _SOURCES_LOCK:
        if key not in _SOURCES:
            while len(_SOURCES) >= MAX_SOURCES:
                del _SOURCES[next(iter(_SOURCES))]
            _SOURCES[key] = TokenSource(kafka)
        return _SOURCES[key]
