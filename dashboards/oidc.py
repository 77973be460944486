"""Whether a login at an OpenID Connect provider still counts.

Streamlit's login checks signature, issuer, nonce and expiry of the ID token once and keeps its claims in a signed
cookie for 30 days. Here they are checked again at each run of a page, and the provider is asked at intervals: the
answer of its userinfo endpoint ends a revoked login and brings the groups of now.

It is asked with the access token, which Streamlit keeps without a refresh token and without `expires_in`. After the
expiry that a JWT states, the provider refuses it as it refuses a revoked one. So it is asked more often towards that
expiry and not any more after it: a login that it accepted keeps its groups for `unchecked_minutes` after the last time
that it did. Of a token of another format no expiry is known.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import http.client
import json
import math
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Any, Literal, TypeGuard

from pipeline.config.dashboard import Oidc
from pipeline.http.addresses import is_loopback_url, make_opener
from pipeline.http.roles import MAX_NAME, MAX_SUBJECT, is_name

TIMEOUT_S = 2.5
"""Limit of one request to the provider (s): as for the API. Chosen."""
RETRY_S = 10
"""Time until a provider that did not answer is asked again (s). Chosen."""
MAX_BYTES = 1 << 20
"""Longest answer of the provider: thousands of groups. Chosen."""
MAX_LOGINS = 10_000
"""Logins that are remembered; a forgotten one is checked again. Chosen: 100 viewers, 100 logins each."""
CLOCK_S = 120
"""Difference of the clocks of provider and dashboard that is allowed (s), as in Streamlit's own check."""
EARLY_S = 10
"""How far the provider's clock may be ahead for a refusal to be one of an expired token (s), if the `Date` of the
answer says that it has expired there. Chosen: more than NTP leaves, and a revocation is missed in this time alone."""
LIFE_PARTS = 3
"""The provider is asked again after this part of the remaining life of an access token, at least RETRY_S. Chosen: a
third, so that the last check is in its last seconds whenever a page is open."""
LATEST = 10**12
"""Times from here on are none (s since 1970). Chosen: the year 33658, beyond the 9999 of some providers."""


@dataclass(frozen=True, slots=True)
class Login:
    """A login that counts. until: its latest end (s since 1970).   subject: who it is at the provider (`sub`)."""

    name: str
    groups: tuple[str, ...]
    until: int
    subject: str


@dataclass(frozen=True, slots=True)
class NoLogin:
    """No one is logged in, or the login no longer counts, and why."""

    barrier: Literal["logged_out", "ended", "refused"]
    reason: str


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the provider said about an access token. groups: None if it gave none.

    confirmed: it accepted the token, or did before the token expired.   accepted: when it last did; None: never.
    """

    asked: float
    confirmed: bool
    rejected: bool = False
    groups: tuple[str, ...] | None = None
    accepted: float | None = None
    expired: bool = False


_ANSWERS: OrderedDict[bytes, _Answer] = OrderedDict()
_ENDPOINTS: dict[str, str] = {}
_LOCK = threading.Lock()
_ASKING = tuple(threading.Lock() for _ in range(64))
"""Held while the provider is asked about a token; by the first byte of its hash."""
_WARNED = threading.Event()


def forget_logins() -> None:
    """Forgets what the provider said, so that it is asked again."""
    with _LOCK:
        _ANSWERS.clear()
        _ENDPOINTS.clear()
    _WARNED.clear()


def metadata_url(settings: Oidc) -> str:
    """Returns the address of the provider's metadata."""
    return settings.metadata_url or f"{settings.issuer.rstrip('/')}/.well-known/openid-configuration"


def check(settings: Oidc, user: Mapping[str, Any], clock: Callable[[], float] = time.time) -> Login | NoLogin:
    """Returns the login in `user`, the claims of Streamlit's cookie with `tokens`, or why there is none."""
    if not user.get("is_logged_in"):
        return NoLogin("logged_out", "Log in to see the fleet.")
    now = clock()
    issued, expires = user.get("iat"), user.get("exp")
    if (
        not is_name(str(user.get("sub") or ""), MAX_SUBJECT)
        or not _is_time(issued)
        or not _is_time(expires)
        or issued > now + CLOCK_S
    ):
        return NoLogin("refused", "The login has no valid subject or time (sub, iat, exp). Log in again.")
    audience = user.get("aud")
    known = [audience] if isinstance(audience, str) else audience
    if user.get("iss") != settings.issuer or not isinstance(known, list) or settings.client_id not in known:
        return NoLogin("refused", "The login is for another program or from another provider. Log in again.")
    end = issued + settings.max_hours * 3600
    if now >= end:
        return NoLogin("ended", f"The login ended after {settings.max_hours:g} h. Log in again.")
    given = (user.get("tokens") or {}).get("access")
    token = given if isinstance(given, str) else ""
    answer = _ask(settings, token, now) if token else _Answer(now, False)
    if answer.rejected:
        return NoLogin("ended", "The provider has ended this login. Log in again.")
    checked = answer.accepted if answer.expired else _expiry(token)
    if checked is None or now >= checked + settings.unchecked_minutes * 60:
        return NoLogin("ended", "The access token of this login has expired: nothing confirms it. Log in again.")
    if not answer.confirmed and now >= expires:
        return NoLogin("ended", "The login has expired, and the provider does not confirm it. Log in again.")
    groups = answer.groups if settings.groups_from == "userinfo" else _groups(user, settings.groups_claim)
    if groups is None:
        return NoLogin("refused", "The provider does not answer, so your groups are unknown. Try again in a minute.")
    _warn_of_short_life(settings, _expiry(token) - issued)
    until = int(min(end, checked + settings.unchecked_minutes * 60))
    return Login(_name(user, settings.name_claim), groups, until, str(user["sub"]))


def _warn_of_short_life(settings: Oidc, life: float) -> None:
    """Logs once that access tokens live shorter than logins, if a revoked login is noticed late because of it."""
    unchecked = settings.unchecked_minutes
    if life >= settings.max_hours * 3600 - CLOCK_S or unchecked * 60 <= settings.check_seconds or _WARNED.is_set():
        return
    _WARNED.set()
    sys.stderr.write(
        f"dashboard: [dashboard.oidc] the provider's access tokens live {life:.0f} s, logins up to max_hours = "
        f"{settings.max_hours:g}: after that a revoked login or a lost group is noticed only at the next login, up to "
        f"unchecked_minutes = {unchecked:g} later. Expected tokens that live as long as logins: set their life at the "
        "provider (Keycloak: Access Token Lifespan of the client), or a shorter unchecked_minutes\n"
    )
    sys.stderr.flush()


def _ask(settings: Oidc, token: str, now: float) -> _Answer:
    """Returns what the provider says about a token: its answer of the last check, or asks now if that is too old."""
    key = hashlib.sha256(token.encode()).digest()
    with _ASKING[key[0] % len(_ASKING)]:  # sessions of one login wait for one answer
        with _LOCK:
            last = _ANSWERS.get(key)
        if last is not None and last.rejected:
            return last
        expiry = _expiry(token)
        if now >= expiry:
            return _expired(now, last)
        if last is not None:
            soon = max(RETRY_S, (expiry - last.asked) / LIFE_PARTS)
            lifetime = min(settings.check_seconds, soon) if last.confirmed else RETRY_S
            if 0 <= now - last.asked < lifetime:
                return last
        answer = _read_answer(settings, token, now, last)
        with _LOCK:
            _ANSWERS[key] = answer
            _ANSWERS.move_to_end(key)
            while len(_ANSWERS) > MAX_LOGINS:
                _ANSWERS.popitem(last=False)
        return answer


def _read_answer(settings: Oidc, token: str, now: float, last: _Answer | None) -> _Answer:
    """Asks the userinfo endpoint. A provider that does not answer changes no groups, but confirms nothing."""
    try:
        metadata = metadata_url(settings)
        endpoint = _ENDPOINTS.get(metadata)
        if endpoint is None:
            endpoint = _ENDPOINTS[metadata] = str(_fetch(metadata)["userinfo_endpoint"])
        claims = _fetch(endpoint, token)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 401 and _expiry(token) <= _date(error) <= now + EARLY_S:
                return _expired(now, last)
            if error.code in (401, 403):
                return _Answer(now, False, rejected=True)
        return _unanswered(now, last)
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return _unanswered(now, last)
    return _Answer(now, True, groups=_groups(claims, settings.groups_claim), accepted=now)


def _unanswered(now: float, last: _Answer | None) -> _Answer:
    return _Answer(now, False) if last is None else _Answer(now, False, groups=last.groups, accepted=last.accepted)


def _expired(now: float, last: _Answer | None) -> _Answer:
    """Returns the answer about a token that the provider cannot confirm any more: what it said before."""
    before = _unanswered(now, last)
    return replace(before, confirmed=before.accepted is not None, expired=True)


def _date(error: urllib.error.HTTPError) -> float:
    """Returns the time of an answer by the provider's clock (s since 1970); 0 if it does not state it."""
    try:
        return parsedate_to_datetime(error.headers["Date"]).timestamp()
    except (TypeError, ValueError, OverflowError):
        return 0.0


def _expiry(token: str) -> float:
    """Returns when an access token expires (s since 1970); infinity if it does not state it, as it is no JWT.

    The token came from the provider, in a cookie that we signed: its own signature needs no check.
    """
    parts = token.split(".")
    try:
        table = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))) if len(parts) == 3 else {}
    except (ValueError, binascii.Error):
        return math.inf
    expires = table.get("exp") if isinstance(table, dict) else None
    return float(expires) if _is_time(expires) else math.inf


def _fetch(url: str, token: str = "") -> Mapping[str, Any]:
    """Returns the JSON object at a URL of the provider. Raises OSError, HTTPException, ValueError."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    if not url.startswith("https://") and not is_loopback_url(url):
        raise ValueError(f"{url}: expected https")  # the token would be readable on the network
    with make_opener(environment_proxies_to=url).open(request, timeout=TIMEOUT_S) as answer:
        found = json.loads(answer.read(MAX_BYTES))
    if not isinstance(found, dict):
        raise TypeError(f"{url}: expected a JSON object")
    return found


def _groups(claims: Mapping[str, Any], claim: str) -> tuple[str, ...]:
    """Returns the groups in a claim: a list, or one group as text."""
    given = claims.get(claim)
    listed = [given] if isinstance(given, str) else given
    return tuple(g for g in listed if isinstance(g, str)) if isinstance(listed, list) else ()


def _name(user: Mapping[str, Any], claim: str) -> str:
    """Returns the name to record: that claim if the provider vouches for it, else the subject."""
    given = user.get(claim)
    trusted = claim != "email" or user.get("email_verified") is not False
    if trusted and isinstance(given, str) and is_name(given):
        return given
    return str(user["sub"]).strip()[:MAX_NAME]


def _is_time(value: Any) -> TypeGuard[float]:
    """Returns whether a claim is a time in s; not NaN, which JSON of Python may contain."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < LATEST
