"""Configuration of one BMC: `[[collector.redfish.bmcs]]`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.config.settings import constraint
from pipeline.model.errors import ConfigError

DEFAULT_SUBJECTS = ("coolant", "leaks", "power", "environment")
"""Subjects that are read by default. coolant: connectors, pumps, reservoirs, filters, loops. leaks: leak detectors.
power: supplies, shelves, PDUs, batteries. environment: power of chassis and coolant units, and the air around them."""
SUBJECTS = (*DEFAULT_SUBJECTS, "sensors")
"""All subjects. sensors: also all Sensors of the chassis; some hundred requests per 30 s if the BMC does not expand
them."""


_SECTION = "[[collector.redfish.bmcs]]"
_SECONDS = constraint("seconds, at least 0.2 and at most 86400", lambda value: 0.2 <= value <= 86_400)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _is_url(value: str) -> bool:
    try:
        parts = urlsplit(value)
        numbered = parts.port is None or parts.port > 0
    except ValueError:  # a port above 65535, or unmatched brackets
        return False
    plain = parts.path in ("", "/") and not parts.query and not parts.fragment and "@" not in parts.netloc
    return (
        parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and numbered
        and plain
        and value.isascii()
        and value.isprintable()
    )


@dataclass(frozen=True)
class BmcSettings:
    """One BMC, or anything else with Redfish. fast, leaks, sensors, slow, inventory: seconds between two reads.

    parents: what its devices are part of, nearest first, such as `rack:r12`. read: subjects that are read.
    """

    name: str = field(
        metadata=constraint("letters, digits, dots, dashes and underscores", lambda v: _NAME.fullmatch(v) is not None)
    )
    url: str = field(
        metadata=constraint("http(s)://HOST[:PORT], a port of 1 to 65535, without user, path or query", _is_url)
    )
    user: str = ""
    password_file: Path | None = None
    ca_file: Path | None = None
    verify: bool = True
    allow_http: bool = False
    parents: tuple[str, ...] = field(
        default=(), metadata=constraint("kind:name each", lambda v: all(":" in p for p in v))
    )
    read: tuple[str, ...] = field(
        default=DEFAULT_SUBJECTS,
        metadata=constraint(f"some of {', '.join(SUBJECTS)}", lambda v: set(v) <= set(SUBJECTS)),
    )
    fast: float = field(default=0.5, metadata=_SECONDS)
    leaks: float = field(default=5.0, metadata=_SECONDS)
    sensors: float = field(default=30.0, metadata=_SECONDS)
    slow: float = field(default=300.0, metadata=_SECONDS)
    inventory: float = field(default=3600.0, metadata=_SECONDS)
    timeout: float = field(default=200.0, metadata=constraint("seconds, 1 to 600", lambda v: 1 <= v <= 600 < math.inf))
    events: bool = True

    def __post_init__(self) -> None:
        where = f"{_SECTION} {self.name}"
        if self.url.startswith("http:") and not self.allow_http:
            raise ConfigError(f"{where}: url = {self.url!r}: expected https, or allow_http = true on a trusted network")
        if self.password_file is not None and not self.user:
            raise ConfigError(f"{where}: password_file without user; expected both or neither")
        if self.user and self.password_file is None:
            raise ConfigError(
                f"{where}: user = {self.user!r} without password_file; expected the file with the password"
            )
