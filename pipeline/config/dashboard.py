"""The section [dashboard]: where the pages are served, who may log in, and with which role."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.config.settings import HOST, constraint
from pipeline.model.errors import ConfigError
from pipeline.model.roles import Role

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_IN_URL = tuple(f"{host}{end}" for host in ("127.0.0.1", "[::1]", "localhost") for end in (":", "/"))
_PORT = constraint("a port, 0 to 65535", lambda value: 0 <= value <= 65535)
_POSITIVE = constraint("a number above 0 and at most 1000000000", lambda value: 0 < value <= 10**9)
_HOURS = constraint("hours, above 0 and at most 24", lambda value: 0 < value <= 24)
_UNCHECKED = constraint("minutes, 0 to 1440", lambda value: 0 <= value <= 1440)
_CHECK = constraint("seconds, 1 to 3600", lambda value: 1 <= value <= 3600)
_TEXT = constraint("a text that is not empty", lambda value: bool(value.strip()))
_BASE = constraint(
    "a path such as /fleet: it begins with a slash and does not end with one",
    lambda value: value == "" or (value.startswith("/") and value.strip("/") != "" and not value.endswith("/")),
)
_ISSUER = constraint(
    "a URL with https, or with http on loopback",
    lambda value: value.startswith(("https://", *(f"http://{host}" for host in _IN_URL))),
)
_METADATA = constraint(
    "a URL with https, or with http on loopback",
    lambda value: value == "" or value.startswith(("https://", *(f"http://{host}" for host in _IN_URL))),
)
_OPENID = constraint("scopes with openid among them", lambda value: "openid" in value)


@dataclass(frozen=True)
class Oidc:
    """[dashboard.oidc]: login at an OpenID Connect provider, by authorization code with PKCE.

    issuer: as in the provider's tokens; its metadata is at ISSUER/.well-known/openid-configuration.
    metadata_url: where the provider's metadata is, if not there.
    groups_from: where the provider gives the groups. `userinfo` is asked at each check.
    prompt: the OpenID parameter; empty: the provider decides.
    max_hours: longest login (12: a long shift). check_seconds: how often the provider is asked whether a login still
    counts (5 min: an employee who leaves is out before anyone notices). unchecked_minutes: longest use of a login whose
    access token has expired, after the provider last accepted it (1 h: what tokens live at most providers). Chosen.
    cookie_secret_file: signs the login cookies of several dashboards; a new one at each start without it.
    """

    issuer: str = field(metadata=_ISSUER)
    client_id: str = field(metadata=_TEXT)
    client_secret_file: Path
    metadata_url: str = field(default="", metadata=_METADATA)
    scopes: tuple[str, ...] = field(default=("openid", "profile", "email", "groups"), metadata=_OPENID)
    groups_claim: str = field(default="groups", metadata=_TEXT)
    groups_from: typing.Literal["userinfo", "id_token"] = "userinfo"
    name_claim: str = field(default="email", metadata=_TEXT)
    prompt: str = ""
    max_hours: float = field(default=12.0, metadata=_HOURS)
    check_seconds: float = field(default=300.0, metadata=_CHECK)
    unchecked_minutes: float = field(default=60.0, metadata=_UNCHECKED)
    cookie_secret_file: Path | None = None


@dataclass(frozen=True)
class ProxyLogin:
    """[dashboard.proxy_login]: a proxy on this host logs people in, and names them and their groups in headers.

    separator: between groups. check_seconds: how often a browser connects again, so that the proxy decides again (an
    hour: as long as most proxies keep a login). Chosen.
    """

    user_header: str = field(metadata=_TEXT)
    groups_header: str = field(metadata=_TEXT)
    separator: str = field(default=",", metadata=_TEXT)
    check_seconds: float = field(default=3600.0, metadata=_CHECK)


@dataclass(frozen=True)
class Dashboard:
    """[dashboard]: address of the pages, who may log in, and the API that they use (default: that of [api]).

    `behind_proxy`: a proxy in front controls access, so the pages may be served beyond loopback.
    `names`: host names under which browsers reach it, besides loopback, `host` and that of [notify] external_url.
    `base_path`: path under which a proxy serves it; the proxy passes it on.
    `trusted_proxies`: addresses of proxies whose X-Forwarded-For and X-Forwarded-Proto count.
    `roles`: role of each group of `oidc` or `proxy_login`; without a group here no one has access.
    `connections`: maximum connections, two per viewer.
    """

    host: str = field(default="127.0.0.1", metadata=HOST)
    port: int = field(default=8501, metadata=_PORT)
    behind_proxy: bool = False
    names: tuple[str, ...] = ()
    base_path: str = field(default="", metadata=_BASE)
    trusted_proxies: tuple[str, ...] = ()
    connections: int = field(default=512, metadata=_POSITIVE)
    api_url: str = ""
    token_file: Path | None = None
    oidc: Oidc | None = None
    proxy_login: ProxyLogin | None = None
    roles: Mapping[str, Role] = field(default_factory=dict)

    def __post_init__(self) -> None:
        has_login = self.oidc is not None or self.proxy_login is not None
        if self.oidc is not None and self.proxy_login is not None:
            raise ConfigError("oidc and proxy_login: expected one of them")
        if has_login and not self.roles:
            raise ConfigError('roles: missing; expected at least one group, such as roles = { "sre" = "operator" }')
        if self.roles and not has_login:
            raise ConfigError("roles: expected [dashboard.oidc] or [dashboard.proxy_login], which give groups")
        if has_login and self.token_file is None:
            raise ConfigError(
                "token_file: missing; with a login it needs a token that may name people: "
                "fleetpulse token create dashboard --role admin --on-behalf-of --days 0"
            )
        if self.proxy_login is not None and self.host not in _LOOPBACK:
            raise ConfigError(
                f"host = {self.host!r}: with proxy_login only the proxy may reach it; expected 127.0.0.1 or ::1"
            )
