"""[notify]: receivers of alerts, routes and inhibition. Names and meanings are those of Alertmanager.

Each kind of receiver has its own list, such as [[notify.slack]]. Secrets are in files, which are read at each use, so
that a rotated secret needs no restart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pipeline.config.settings import KEY, constraint
from pipeline.model.errors import ConfigError

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0, "y": 31_536_000.0}
_DURATION = re.compile(r"(?:\d+(?:ms|[smhdwy]))+")
DAY_S = 86_400.0


def parse_duration(text: str) -> float:
    """Returns the seconds of a duration of Prometheus such as `30s`, `5m` or `1h30m`. Raises ConfigError."""
    if text != "0" and not _DURATION.fullmatch(text):
        raise ConfigError("not a duration such as 30s, 5m or 1h30m")
    return float(sum(int(n) * _UNITS[unit] for n, unit in re.findall(r"(\d+)(ms|[smhdwy])", text)))


_NAME = constraint(
    "1 to 64 of A-Z a-z 0-9 _ . - (it goes into an HTTP header)",
    lambda value: re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", value) is not None,
)
_WAIT = constraint("a duration such as 30s", lambda value: parse_duration(value) >= 0)
_SILENCE = constraint("a duration up to 1d, 0 for none", lambda value: parse_duration(value) <= DAY_S)
_INTERVAL = constraint("a duration of at least 1s", lambda value: parse_duration(value) >= 1)
_RESEND = constraint("a duration from 5s to 1h", lambda value: 5 <= parse_duration(value) <= 3600)
_LABELS = constraint(
    "names of labels, or '...' alone for one group per alert",
    lambda v: v == ("...",) or all(re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name) for name in v),
)
_COUNT = constraint("a number from 0 (no limit) to 1000000000", lambda value: 0 <= value <= 10**9)
_URLS = constraint("at least one URL", lambda value: bool(value))
_KEYS = {KEY: "continue"}


@dataclass(frozen=True)
class Webhook:
    """[[notify.webhooks]]: POST of a JSON body to a URL."""

    section: ClassVar[str] = "notify.webhooks"
    name: str = field(metadata=_NAME)
    url: str = ""
    format: Literal["alertmanager", "event", "cloudevents"] = "alertmanager"
    allow_http: bool = False
    allow_private: tuple[str, ...] = ()
    send_watch: bool = False
    url_file: Path | None = None
    health_url: str = ""
    token_file: Path | None = None
    username: str = ""
    password_file: Path | None = None
    headers_file: Path | None = None
    signing_secret_file: Path | None = None
    max_alerts: int = field(default=0, metadata=_COUNT)

    def __post_init__(self) -> None:
        """Raises ConfigError unless there is one URL."""
        if bool(self.url) == (self.url_file is not None):
            raise ConfigError("url: missing; a value is required, or url_file instead of it")


@dataclass(frozen=True)
class Alertmanager:
    """[[notify.alertmanagers]]: alerts pushed into every one of these Alertmanagers (POST /api/v2/alerts)."""

    section: ClassVar[str] = "notify.alertmanagers"
    name: str = field(metadata=_NAME)
    urls: tuple[str, ...] = field(metadata=_URLS)
    allow_http: bool = False
    allow_private: tuple[str, ...] = ()
    send_watch: bool = False
    token_file: Path | None = None
    username: str = ""
    password_file: Path | None = None
    headers_file: Path | None = None
    resend_interval: str = field(default="1m", metadata=_RESEND)
    ack_as_silence: str = field(default="0", metadata=_SILENCE)


@dataclass(frozen=True)
class PagerDuty:
    """[[notify.pagerduty]]: Events API v2; with `webhook_secret_file` also PagerDuty's webhook v3 to us."""

    section: ClassVar[str] = "notify.pagerduty"
    name: str = field(metadata=_NAME)
    routing_key_file: Path
    region: Literal["us", "eu"] = "us"
    url: str = ""
    allow_http: bool = False
    allow_private: tuple[str, ...] = ()
    send_watch: bool = False
    title: str = ""
    webhook_secret_file: Path | None = None


@dataclass(frozen=True)
class Slack:
    """[[notify.slack]]: one message per incident. `token_file` and `channel`, or `url_file` of an incoming webhook."""

    section: ClassVar[str] = "notify.slack"
    name: str = field(metadata=_NAME)
    channel: str = ""
    token_file: Path | None = None
    url_file: Path | None = None
    url: str = "https://slack.com/api"
    allow_http: bool = False
    allow_private: tuple[str, ...] = ()
    send_watch: bool = False
    title: str = ""
    text: str = ""


@dataclass(frozen=True)
class Teams:
    """[[notify.teams]]: an Adaptive Card to the URL of a workflow."""

    section: ClassVar[str] = "notify.teams"
    name: str = field(metadata=_NAME)
    url_file: Path
    allow_http: bool = False
    allow_private: tuple[str, ...] = ()
    send_watch: bool = False
    title: str = ""
    text: str = ""


@dataclass(frozen=True)
class Apprise:
    """[[notify.apprise]]: text to every service that apprise knows (extra `apprise`). It cannot close what it opened.

    urls_file: one apprise URL per line.
    """

    section: ClassVar[str] = "notify.apprise"
    name: str = field(metadata=_NAME)
    urls_file: Path
    send_watch: bool = False
    title: str = ""
    text: str = ""


ReceiverConfig = Webhook | Alertmanager | PagerDuty | Slack | Teams | Apprise


@dataclass(frozen=True)
class Route:
    """[notify.route] and the tables in its `routes`: which receiver gets an alert, and how alerts are grouped.

    Everything but the matchers is inherited from the route above if it is not set.
    """

    receiver: str = ""
    matchers: tuple[str, ...] = ()
    group_by: tuple[str, ...] | None = field(default=None, metadata=_LABELS)
    group_wait: str | None = field(default=None, metadata=_WAIT)
    group_interval: str | None = field(default=None, metadata=_INTERVAL)
    repeat_interval: str | None = field(default=None, metadata=_INTERVAL)
    continue_: bool = field(default=False, metadata=_KEYS)
    routes: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class InhibitRule:
    """[[notify.inhibit_rules]]: while an alert matches the source, alerts that match the target are not sent.

    equal: labels that must be equal in both; a label that both lack is equal.
    """

    source_matchers: tuple[str, ...]
    target_matchers: tuple[str, ...]
    equal: tuple[str, ...] = ()


@dataclass(frozen=True)
class Notify:
    """[notify]: receivers of alerts, and the address of the dashboard for links in alerts."""

    webhooks: tuple[Webhook, ...] = ()
    external_url: str = ""
    alertmanagers: tuple[Alertmanager, ...] = ()
    pagerduty: tuple[PagerDuty, ...] = ()
    slack: tuple[Slack, ...] = ()
    teams: tuple[Teams, ...] = ()
    apprise: tuple[Apprise, ...] = ()
    route: Route | None = None
    inhibit_rules: tuple[InhibitRule, ...] = ()

    @property
    def receivers(self) -> tuple[ReceiverConfig, ...]:
        """All receivers, in the order of the sections."""
        return (*self.webhooks, *self.alertmanagers, *self.pagerduty, *self.slack, *self.teams, *self.apprise)
