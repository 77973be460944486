"""The frame in the header of every page: the search box (`/`), and the switch between UTC and local time.

It also opens links of all pages within the session, which is faster than loading the page again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streamlit as st

from dashboards import pages, routes, snapshot, theme, times
from dashboards.answers import require_list
from dashboards.words import STATE, plain
from pipeline.model.entity_names import KINDS, entity_name

_HERE = Path(__file__).parent
_KEY, _RUN = "frame", "frame-run"
OPEN_ADDRESS_JS = (_HERE / "open_address.js").read_text()
"""For the script of a component that opens pages."""
MIN_CHARACTERS = 2
"""Shortest text that is searched for. Chosen: one character matches nearly everything."""
_frame = st.components.v2.component(
    "fleetpulse.frame",
    html=(_HERE / "frame.html").read_text(),
    css=theme.css_variables(":host") + (_HERE / "frame.css").read_text(),
    js=(_HERE / "progress.js").read_text() + (_HERE / "frame.js").read_text(),
)


@dataclass(frozen=True, slots=True)
class Hit:
    """One result of a search: an entity, a serial number or an incident. `match` is the text that was found."""

    kind: str
    id: str
    match: str
    text: str
    state: str = ""


@dataclass(frozen=True, slots=True)
class Hits:
    """The first results, best first, and how many there are."""

    hits: tuple[Hit, ...]
    total: int


def parse_hits(table: Mapping[str, Any]) -> Hits:
    """Parses GET /api/v1/search."""
    names = ("kind", "id", "match", "text", "state")
    rows = require_list(table["results"])
    return Hits(tuple(Hit(*(str(row.get(name) or "") for name in names)) for row in rows), int(table["total"]))


def draw_frame() -> None:
    """Draws search and time zone; a search reruns only this part of the page."""
    st.session_state[_RUN] = st.session_state.get(_RUN, 0) + 1
    st.fragment(_draw)()


def _draw() -> None:
    state = st.session_state.get(_KEY) or {}
    query = str(state.get("query") or "").strip()
    data = {
        "pages": [entry.name for entry in pages.PAGES],
        "kept": list(routes.KEPT),
        "local": routes.is_local_time(),
        "zone": st.context.timezone or "",
        "run": st.session_state.get(_RUN, 0),
        "next": routes.take_next_address(),
        **_search(query),
    }
    drawn = _frame(
        key=_KEY,
        data=data,
        default={"query": ""},
        on_query_change=lambda: None,
        on_zone_change=lambda: None,
    )
    if drawn.zone:
        times.switch_zone()
        st.rerun()


def _search(query: str) -> dict[str, Any]:
    """Returns the results of a text for the script, or the error."""
    if len(query) < MIN_CHARACTERS:
        return {"query": query, "hits": [], "total": 0, "error": ""}
    answer = snapshot.fetch(parse_hits, "search", q=query)
    found = answer.value or Hits((), 0)
    return {"query": query, "hits": hit_rows(found.hits), "total": found.total, "error": answer.error}


def hit_rows(hits: Sequence[Hit]) -> list[dict[str, str]]:
    """Returns address, name, kind and second line of each result; all but `href` is text to show."""
    return [_row(hit) for hit in hits]


def _row(hit: Hit) -> dict[str, str]:
    if hit.kind == "incident":
        state = STATE.get(hit.state, hit.state)  # type: ignore[call-overload]
        return {
            "href": routes.href("incident", id=hit.id),
            "kind": "incident",
            "name": plain(hit.text) or hit.id,
            "below": f"{hit.id}, {str(state).lower()}",
        }
    below = hit.text if hit.match == hit.id else f"{hit.match}, {hit.text}".rstrip(", ")
    return {
        "href": routes.entity_href(hit.id),
        "kind": KINDS.get(hit.kind, (hit.kind,))[0],
        "name": entity_name(hit.id),
        "below": ", ".join(entity_name(part) for part in below.split(", ") if part),
    }
