"""The login page, the page about one's own account, and the banner of a dashboard without a login."""

from __future__ import annotations

import streamlit as st

from dashboards import identity, markup, snapshot
from dashboards.identity import Person, Stranger
from dashboards.login_cookies import find_failure
from dashboards.words import clock
from pipeline.model.records import SECOND

_HEADING = {
    "logged_out": "",
    "ended": "Logged out.",
    "refused": "Login not accepted.",
    "no_role": "No access.",
}
ROLES = {
    "viewer": "read everything, query with SQL",
    "operator": "also write notes, silences, maintenance windows and mutes",
    "admin": "also change calibration and page budgets, and take nodes out of service",
}
LOCAL_BANNER = "Notes only (acknowledge, assign, comment, resolve), as user local. Silences need [dashboard.oidc]."


def draw_login(who: Stranger) -> None:
    """Draws the login page for a person without access: nothing about the fleet."""
    st.html(markup.title("Fleetpulse"))
    if who.barrier == "logged_out" and (why := find_failure(st.context.cookies)):
        st.html(markup.notice(why, "degraded", "The login failed."))
    else:
        tone = "quiet" if who.barrier == "logged_out" else "degraded"
        st.html(markup.notice(who.reason, tone, _HEADING[who.barrier]))
    if not identity.logs_out():
        return
    if who.barrier == "no_role":
        st.html(markup.notice(f"You are logged in as {who.name}."))
        st.button("Log out", key="logout", on_click=st.logout)
        return
    st.button("Log in", key="login", type="primary", on_click=st.login)


def draw_banner(who: Person) -> None:
    """Draws what cannot be done without a login; nothing with one."""
    if who.notes_only:
        st.html(markup.notice(LOCAL_BANNER, "quiet", "No login."))


def account_page() -> None:
    """Draws name, role and groups of the person, the end of the login, and the way out."""
    who = identity.current()
    if isinstance(who, Stranger):
        st.rerun(scope="app")
    st.html(markup.title(who.name))
    rows = [("Role", f"{who.role}: {ROLES[who.role]}"), ("Groups with a role", ", ".join(who.groups) or "none")]
    if who.until is not None:
        rows.append(("Login ends", clock(who.until * SECOND, snapshot.now())))
    st.html(markup.facts(rows))
    if identity.logs_out():
        st.button("Log out", key="logout", type="primary", on_click=st.logout)
