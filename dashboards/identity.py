"""Who looks at a page, and what that person may do: the one place that every read and write of the pages asks.

Three ways, chosen by [dashboard]: a login at an OpenID Connect provider, a proxy that names people in headers, or none.
Without one every user is `local` and may write notes only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import streamlit as st

from dashboards import oidc
from dashboards.client import ApiError
from pipeline.config.dashboard import Dashboard, ProxyLogin
from pipeline.http.roles import (
    CLIENT_HEADER,
    ROLE_HEADER,
    SUBJECT_HEADER,
    USER_HEADER,
    encode_name,
    find_role,
    is_name,
    is_note,
)
from pipeline.model.roles import ROLES, Role

Barrier = Literal["logged_out", "ended", "refused", "no_role"]
"""Why a person has no access: never logged in, the login ended, it is not accepted, none of the groups has a role."""


@dataclass(frozen=True, slots=True)
class Person:
    """A person with access. client: the browser's address. groups: those with a role."""

    name: str
    role: Role
    notes_only: bool = False
    client: str = ""
    groups: tuple[str, ...] = ()
    until: int | None = None
    """When the login ends at the latest (s since 1970)."""
    subject: str = ""
    """Who it is at the provider of the login; the name may change."""

    def may(self, role: Role) -> bool:
        """Returns whether its role includes another one."""
        return ROLES.index(self.role) >= ROLES.index(role)

    def headers(self) -> tuple[tuple[str, str], ...]:
        """Returns the headers that name the person to the API; none without a login, as its token then counts."""
        if self.notes_only:
            return ()
        known = [(USER_HEADER, encode_name(self.name)), (ROLE_HEADER, self.role)]
        known += [(CLIENT_HEADER, self.client)] if self.client else []
        known += [(SUBJECT_HEADER, encode_name(self.subject))] if self.subject else []
        return tuple(known)


@dataclass(frozen=True, slots=True)
class Stranger:
    """A person without access, with the reason. name: empty before a login."""

    barrier: Barrier
    reason: str
    name: str = ""


_BOARD = Dashboard()
LOCAL = "local"


def configure(board: Dashboard) -> None:
    """Sets who may log in, for all sessions of this process."""
    global _BOARD
    _BOARD = board
    oidc.forget_logins()


def has_login() -> bool:
    """Returns whether people log in."""
    return _BOARD.oidc is not None or _BOARD.proxy_login is not None


def logs_out() -> bool:
    """Returns whether the dashboard itself can end a login."""
    return _BOARD.oidc is not None


def current() -> Person | Stranger:
    """Returns who looks at this session's pages now."""
    if _BOARD.oidc is not None:
        login = oidc.check(_BOARD.oidc, st.user.to_dict())
        if isinstance(login, oidc.NoLogin):
            return Stranger(login.barrier, login.reason)
        return _with_role(login.name, login.groups, login.until, login.subject)
    if _BOARD.proxy_login is not None:
        return _named_by_proxy(_BOARD.proxy_login)
    return Person(LOCAL, "operator", notes_only=True)


def _named_by_proxy(proxy: ProxyLogin) -> Person | Stranger:
    name, groups = (st.context.headers.get_all(header) for header in (proxy.user_header, proxy.groups_header))
    if len(name) != 1 or not is_name(name[0]):
        return Stranger("refused", f"The proxy in front gives no user in {proxy.user_header}. Ask its administrator.")
    return _with_role(name[0], tuple(g.strip() for value in groups for g in value.split(proxy.separator)), None)


def _with_role(name: str, groups: tuple[str, ...], until: int | None, subject: str = "") -> Person | Stranger:
    """Returns a person with the highest role of the groups, a stranger if none has one."""
    known = tuple(group for group in groups if group in _BOARD.roles)
    if not known:
        reason = "None of your groups has a role here. Ask the administrator of Fleetpulse for [dashboard.roles]."
        return Stranger("no_role", reason, name)
    role = max((_BOARD.roles[group] for group in known), key=ROLES.index)
    return Person(name, role, False, st.context.ip_address or "", known, until, subject)


def require(role: Role = "viewer") -> Person:
    """Returns who looks at the page. Raises ApiError (401, 403) without that role."""
    person = current()
    if isinstance(person, Stranger):
        raise ApiError(person.reason, 403 if person.barrier == "no_role" else 401)
    if not person.may(role):
        raise ApiError(f"{person.name} has the role {person.role}; this needs {role}.", 403)
    return person


def require_write(path: str, body: Mapping[str, Any], method: str = "POST") -> Person:
    """Returns who writes. path: below /api/v1. Raises ApiError (401, 403) if that person may not."""
    role = find_role(method, f"/api/v1/{path}")
    person = require(role)
    if person.notes_only and role != "viewer" and not _is_local_note(path, body):
        raise ApiError(NOTES_ONLY, 403)
    return person


NOTES_ONLY = (
    "Without a login the dashboard only writes notes (acknowledge, assign, comment, resolve). Configure "
    "[dashboard.oidc], or use the command line with a token: fleetpulse silences, fleetpulse act plan. Only a person "
    "who signed in approves an act."
)


def may_write(path: str, body: Mapping[str, Any] | None = None, method: str = "POST") -> bool:
    """Returns whether to offer a button. The write itself is checked again."""
    return not find_barrier(path, body, method)


def find_barrier(path: str, body: Mapping[str, Any] | None = None, method: str = "POST") -> str:
    """Returns why the person at the page may not write there; empty if they may."""
    try:
        require_write(path, body or {}, method)
    except ApiError as error:
        return str(error)
    return ""


def _is_local_note(path: str, body: Mapping[str, Any]) -> bool:
    """Returns whether every user of this machine may do it: `not_a_fault` teaches detectors, so it is no note."""
    return is_note(f"/api/v1/{path}") and not body.get("not_a_fault")
