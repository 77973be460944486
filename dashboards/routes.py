"""Addresses of the pages, and navigation between them within a session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import streamlit as st

if TYPE_CHECKING:
    from streamlit.navigation.page import Page

_PAGES = "pages"


def register_pages(pages: Mapping[str, Page]) -> None:
    """Stores the pages of the session by name, so that pages need not import each other."""
    st.session_state[_PAGES] = dict(pages)


def open_incident(identity: str) -> NoReturn:
    """Opens the page of one incident."""
    _open("incident", {"id": identity})


def open_incidents() -> NoReturn:
    """Opens the list of incidents."""
    _open("incidents", {})


def is_live() -> bool:
    """Returns whether the page refreshes; `?live=0` in the address turns it off."""
    return st.query_params.get("live") != "0"


def _open(name: str, query: dict[str, Any]) -> NoReturn:
    st.switch_page(st.session_state[_PAGES][name], query_params=query if is_live() else {**query, "live": "0"})
