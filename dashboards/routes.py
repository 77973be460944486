"""Addresses of the pages, and navigation between them within a session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn
from urllib.parse import urlencode

import streamlit as st

_OPENED, _NEXT = "opened", "next-address"
DEFAULT = "fleet"
"""The page at /; Streamlit has no other address for it."""
LOCAL_TIME = ("tz", "local")
"""Parameter of the address, and its value, for times in the browser's zone."""
KEPT = ("live", LOCAL_TIME[0])
"""Parameters of the address that every page keeps."""
PAUSED, SLOW = "0", "30"
"""Values of `live` in the address: no refreshing, and a refresh every 30 s. Without it, at INTERVAL_S."""
FACILITY_KINDS = frozenset(
    {"cdu", "loop", "connector", "pump", "reservoir", "filter", "pdu", "shelf", "circuit", "outlet"}
)
GROUP_KINDS = frozenset({"rack", "row", "hall", "pod", "leaf", "spine", "switch", "rail", "site", "fabric", "facility"})


def href(page: str, /, **query: str | list[str]) -> str:
    """Returns the address of a page, relative to any other: it holds behind a proxy with a base path."""
    asked, name = with_kept(query), "./" if page == DEFAULT else page
    return f"{name}?{urlencode(asked, doseq=True)}" if asked else name


def with_kept(query: Mapping[str, Any]) -> dict[str, Any]:
    """Returns parameters of a page, with those that every page keeps: how it refreshes, local time."""
    kept = {"live": live_value(), LOCAL_TIME[0]: LOCAL_TIME[1] if is_local_time() else ""}
    return {**query, **{name: value for name, value in kept.items() if value}}


def entity_href(entity: str) -> str:
    """Returns the address of the page about an entity `kind:name`: its node, job, link or facility part."""
    kind, _, name = entity.partition(":")
    if kind in ("node", "agent", "bmc"):
        return href("node", entity=f"node:{name}")
    if kind in ("job", "rank", "stage"):
        return href("jobs", entity=entity)
    if kind in ("port", "nvlink", "nic"):
        return href("link", entity=entity)
    if kind in FACILITY_KINDS:
        return href("facility", entity=entity)
    if kind == "detector":
        return href("detectors", detector=name)
    if kind in GROUP_KINDS:
        return href("fleet", within=entity)
    return href("node", entity=entity)


def keep_query(page: str) -> None:
    """Gives a page that is reached by links only the parameters it was opened with, if the address has none.

    A browser that is late reports the new page with the address of the page before; such a page needs its parameters.
    """
    if set(st.query_params) - set(KEPT):
        st.session_state[_OPENED] = (page, {name: st.query_params.get_all(name) for name in st.query_params})
        return
    opened = st.session_state.get(_OPENED)
    if opened and opened[0] == page:
        st.query_params.from_dict(with_kept(opened[1]))


def open_page(name: str, /, **query: str) -> NoReturn:
    """Opens a page: the run that follows gives the browser its address, as `take_next_address`.

    st.switch_page would first write the new parameters as a step of the old page into the browser's history: Back then
    leads to a mix of both.
    """
    st.session_state[_NEXT] = href(name, **query)
    st.rerun()


def take_next_address() -> str:
    """Returns the address that the browser shall open now, once; empty if there is none."""
    return str(st.session_state.pop(_NEXT, ""))


def change_query(**changes: str | list[str]) -> None:
    """Writes parameters of this page into the address, as one step of the browser's history; empty ones are removed."""
    asked = {name: st.query_params.get_all(name) for name in st.query_params}
    wanted = {name: [value] if isinstance(value, str) and value else value for name, value in changes.items()}
    changed = {name: value for name, value in {**asked, **wanted}.items() if value}
    if changed != asked:
        st.query_params.from_dict(changed)


def live_value() -> str:
    """Returns how the page refreshes: PAUSED, SLOW, or empty for the usual interval. Other words are ignored."""
    value = st.query_params.get("live", "")
    return value if value in (PAUSED, SLOW) else ""


def set_live(value: str) -> None:
    """Writes into the address how all pages refresh, as in `live_value`."""
    change_query(live=value if value in (PAUSED, SLOW) else "")


def is_local_time() -> bool:
    """Returns whether the address asks for times in the browser's zone."""
    return st.query_params.get(LOCAL_TIME[0]) == LOCAL_TIME[1]
