"""The addresses of the pages, and how one page leads to another within the session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import streamlit as st

if TYPE_CHECKING:
    from streamlit.navigation.page import Page

_PAGES = "pages"


def remember(pages: Mapping[str, Page]) -> None:
    """Keeps the session's pages by name; `app.py` says which there are, so that pages need not import each other."""
    st.session_state[_PAGES] = dict(pages)


def open_incident(identity: str) -> NoReturn:
    """Leaves the page for that of one incident."""
    _open("incident", {"id": identity})


def open_incidents() -> NoReturn:
    """Leaves the page for the list of incidents."""
    _open("incidents", {})


def live() -> bool:
    """False under `?live=0`, which freezes all refreshing."""
    return st.query_params.get("live") != "0"


def _open(name: str, query: dict[str, Any]) -> NoReturn:
    st.switch_page(st.session_state[_PAGES][name], query_params=query if live() else {**query, "live": "0"})
