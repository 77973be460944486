"""The three pages with their addresses, and how one page leads to another within the session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import streamlit as st

if TYPE_CHECKING:
    from streamlit.navigation.page import Page


def fleet_page() -> Page:
    """`/`"""
    from dashboards.views import fleet  # views lead to each other: importing them here keeps that from being a circle

    return st.Page(fleet.page, title="Fleet", url_path="fleet", icon=":material/grid_view:", default=True)


def incidents_page() -> Page:
    """`/incidents?state=`"""
    from dashboards.views import incidents

    return st.Page(incidents.page, title="Incidents", url_path="incidents", icon=":material/notifications:")


def incident_page() -> Page:
    """`/incident?id=`"""
    from dashboards.views import incident

    return st.Page(incident.page, title="Incident", url_path="incident", visibility="hidden")


def open_incident(identity: str) -> NoReturn:
    """Leaves the page for that of one incident."""
    st.switch_page(incident_page(), query_params=_kept({"id": identity}))


def open_incidents() -> NoReturn:
    """Leaves the page for the list of incidents."""
    st.switch_page(incidents_page(), query_params=_kept({}))


def live() -> bool:
    """False under `?live=0`, which freezes all refreshing."""
    return st.query_params.get("live") != "0"


def _kept(query: dict[str, Any]) -> dict[str, Any]:
    return query if live() else {**query, "live": "0"}
