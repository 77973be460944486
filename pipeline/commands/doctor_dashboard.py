"""The checks of `fleetpulse doctor` on the dashboard: that it runs, its right to read, and how late it notices a
revoked login."""

from __future__ import annotations

from pathlib import Path

from pipeline.api.tokens import find_role_file, load_role_tokens
from pipeline.commands.checks import Check
from pipeline.commands.doctor_units import find_down
from pipeline.commands.installed import is_node
from pipeline.config.dashboard import Oidc
from pipeline.config.sections import Config
from pipeline.http import client
from pipeline.http.token_lines import read_token_lines
from pipeline.model.errors import FleetpulseError
from pipeline.model.roles import ROLES
from pipeline.runtime import systemd
from pipeline.runtime.credentials import is_copy, list_handed_out

NAME = "dashboard"
AS_ROOT = "run doctor as root, which reads the file"


def check_dashboard(config: Config) -> Check:
    """Asks systemd whether it runs if it should; then the API what the dashboard asks, with the token that it takes:
    that of the first line of its file."""
    path, meaning = config.dashboard.token_file, "the pages of the dashboard show no data"
    if is_node():
        return Check(NAME, "info", "a node has none")
    if fault := find_down(NAME, "no one sees the pages"):  # first: the copy of its token exists while it runs
        return fault
    try:
        if path is None and not _asks_for_token(config):
            return Check(NAME, "ok", "the API asks for no token")
    except FleetpulseError as error:
        return Check(NAME, "info", f"not known: {error}")
    if path is None and systemd.has_unit("dashboard"):
        return Check(NAME, "info", "its unit passes the token to it")
    if path is None and systemd.is_container_of("pipeline"):
        return Check(NAME, "info", "in a container of its own, which has its token")
    if path is None:
        found = "[dashboard] token_file is not set, and the API asks for a token"
        return Check(NAME, "fail", found, meaning, _suggest_file(config))
    try:
        first = next(iter(read_token_lines(path)), "")
    except (OSError, UnicodeDecodeError) as error:
        if is_copy(path) and not systemd.is_running(NAME):
            return Check(NAME, "info", "its unit is off: the copy of its token exists while it runs")
        fix = f"systemctl daemon-reload && systemctl restart {path.parent.name}" if is_copy(path) else AS_ROOT
        return Check(NAME, "fail", f"[dashboard] token_file {path} cannot be read: {error}", meaning, fix)
    return _ask_api(config, path, first.rpartition(":")[2])


def _asks_for_token(config: Config) -> bool:
    """Returns whether the API answers only with a token: those of `fleetpulse token create` count as those of its file.
    If it does not answer, the files say it. Raises ConfigError if they cannot be read."""
    if config.api.token_file is not None:
        return True
    try:
        status, _ = client.get(config, "/api/v1/fleet", token="none")  # instead of that of the environment
    except FleetpulseError:
        return bool(load_role_tokens(find_role_file(config.store.path)))
    return status == 401


def _suggest_file(config: Config) -> str:
    """Returns how the dashboard gets a token that the API accepts."""
    if config.api.token_file is not None:
        return f'[dashboard] token_file = "{config.api.token_file}"'
    made = "fleetpulse token create dashboard --role viewer --days 0"  # with a login the key is required
    return f"{made}; dashboard:TOKEN into a file for [dashboard] token_file"


def _ask_api(config: Config, path: Path, token: str) -> Check:
    """Asks the API for data with the dashboard's token, and with a login what that token may do for people."""
    has_login = config.dashboard.oidc is not None or config.dashboard.proxy_login is not None
    try:
        status, _ = client.get(config, "/api/v1/fleet", token=token)
        known, rights = client.get(config, "/api/v1/whoami", token=token) if has_login else (0, {})
    except FleetpulseError as error:
        return Check(NAME, "info", f"not known: {error}")
    fix, found = _suggest_token(config, path, has_login), f"[dashboard] token_file {path}"
    if status in (401, 403):
        meaning = "the pages of the dashboard show no data"
        return Check(NAME, "fail", f"{found}: the API refuses its first token (HTTP {status})", meaning, fix)
    if known == 200 and not rights["on_behalf_of"]:
        found += f": its first token, of {rights['name']}, may not act on behalf of others"
        meaning = "every request of a person who logs in is refused (HTTP 403): the pages show no data"
        return Check(NAME, "fail", found, meaning, fix)
    highest = max(config.dashboard.roles.values(), key=ROLES.index, default="viewer")
    if known == 200 and ROLES.index(rights["role"]) < ROLES.index(highest):
        found += f": its first token is {rights['role']}, and [dashboard] roles has {highest}"
        return Check(NAME, "warn", found, f"no one who logs in may do more than {rights['role']}", fix)
    return Check(NAME, "ok", "the API accepts its token")


def _suggest_token(config: Config, path: Path, has_login: bool) -> str:
    """Returns how to get the token that the dashboard needs: with a login one that names people."""
    handed_out = list_handed_out().get(path)
    place = f"as the first line of {handed_out.file if handed_out else path}"
    again = "; then systemctl restart fleetpulse-dashboard" if is_copy(path) else ""
    if not has_login:
        return f"fleetpulse token list; a token of a viewer, dashboard:TOKEN {place}{again}"
    return f"fleetpulse token create dashboard --role admin --on-behalf-of --days 0; dashboard:TOKEN {place}{again}"


def check_login(config: Config) -> Check:
    """Says how late a revoked login may be noticed. The dashboard alone knows how long tokens live."""
    settings = config.dashboard.oidc
    if settings is None:
        return Check("login", "info", "no [dashboard.oidc]")
    asked, unchecked = settings.check_seconds, settings.unchecked_minutes
    found = f"a revoked login or a lost group is noticed within {asked:g} s while the login's access token lives"
    if unchecked * 60 <= asked:
        return Check("login", "ok", found)
    found += f", after that only up to {unchecked:g} min later, at the next login"
    meaning = "tokens that live shorter than max_hours (Keycloak: 5 min) make it late; the dashboard's log names them"
    fix = (
        "at the provider, access tokens that live as long as max_hours; or a shorter [dashboard.oidc] unchecked_minutes"
    )
    return Check("login", "warn" if unchecked > Oidc.unchecked_minutes else "info", found, meaning, fix)
