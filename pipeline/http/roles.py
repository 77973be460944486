"""Which role a request to the API needs, and the headers with which a program names the person who acts.

Shared by the API, which enforces both, and by the dashboard, which asks first and sends them.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

from pipeline.model.plain_text import CODES
from pipeline.model.roles import Role

USER_HEADER, ROLE_HEADER, CLIENT_HEADER = "Fleetpulse-User", "Fleetpulse-Role", "Fleetpulse-Client"
"""The person's name (percent-encoded UTF-8), role, and address."""
SUBJECT_HEADER = "Fleetpulse-Subject"
"""What identifies the person at the provider of the login (`sub`, percent-encoded): a name may change."""
MAX_SUBJECT = 255
"""Longest subject (characters). Source: OpenID Connect Core 1.0, section 2."""
MAX_NAME = 128
"""Longest name of a person (characters): the longest mail addresses in use. Chosen."""
MAX_CLIENT = 64
"""Longest address of a client (characters): an IPv6 address with a zone. Chosen."""
READING_PATHS = frozenset({"/api/v1/sql", "/api/v1/silences/preview", "/api/v1/share"})
"""POST requests that only read."""
ADMIN_PATHS = ("/api/v1/calibration", "/api/v1/budget", "/api/v1/nodes", "/api/v1/backup")
"""Paths of which writes need the role admin: settings of the site, and what takes nodes out of service."""
ACTS_PATH = "/api/v1/acts"
"""Acts on machines. Without a token anyone on the host would be the same nameless caller: it writes nothing here."""
EXECUTOR_PATH = "/api/v1/executor/"
"""What only a token of an executor may call: what carries out acts is not what asks for them."""
_NOTE_PATHS = re.compile(r"/api/v1/incidents/[^/]+/(acknowledge|assign|comment|feedback|reopen|resolve)")
_VERSIONED_PATHS = re.compile(
    r"/api/v1/(incidents/[^/]+/[a-z]+|silences/[^/]+(/expire)?|mutes/[^/]+/end|calibration"
    r"|acts/[^/]+/(approve|cancel))"
)
_FORBIDDEN = re.compile(rf"[\t\n{CODES}\u200b\u2060\ufeff]")
"""Control characters, those that change the direction of text, and those of no width: a name must look like what it is.
Joiners (U+200C, U+200D) stay: some scripts write names with them."""


def find_role(method: str, path: str) -> Role:
    """Returns the role that a request needs: reading and SQL viewer, settings and nodes admin, all else operator."""
    if path.startswith(ADMIN_PATHS) and method not in ("GET", "HEAD"):
        return "admin"
    return "viewer" if method in ("GET", "HEAD") or path in READING_PATHS else "operator"


def is_note(path: str) -> bool:
    """Returns whether a POST writes only a note on an incident: it changes neither alerts nor settings."""
    return _NOTE_PATHS.fullmatch(path) is not None


def has_version(path: str) -> bool:
    """Returns whether what a write changes has a version, so that `If-Match` means something."""
    return _VERSIONED_PATHS.fullmatch(path) is not None


def is_name(name: str, longest: int = MAX_NAME) -> bool:
    """Returns whether `name` can be a person's: 1 to `longest` visible characters without spaces at the ends."""
    return 0 < len(name) <= longest and name == name.strip() and _FORBIDDEN.search(name) is None


def encode_name(name: str) -> str:
    """Returns a name as the value of USER_HEADER."""
    return quote(name, safe="@.+-_")


def decode_name(value: str, longest: int = MAX_NAME) -> str:
    """Returns the name in a value of USER_HEADER or SUBJECT_HEADER. Raises ValueError if it is not one."""
    expected = f"expected 1 to {longest} visible characters, percent-encoded as UTF-8"
    try:
        name = unquote(value, errors="strict")
    except UnicodeDecodeError as error:
        raise ValueError(f"{value[:200]!r}: {expected}") from error
    if not is_name(name, longest):
        raise ValueError(f"{value[:200]!r}: {expected}")
    return name
