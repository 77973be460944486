"""The map of all nodes. The script receives bytes, not objects: three or four bytes per cell, and names once."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streamlit as st

from dashboards import routes, theme
from dashboards.answers import NODE_STATES
from dashboards.fleet_map.answers import FILTERS, FleetLayout, FleetMap
from dashboards.frame.component import OPEN_ADDRESS_JS
from dashboards.words import NODE_STATE
from pipeline.model.records import iso

_HERE = Path(__file__).parent
_SCRIPTS = ("layout.js", "paint.js", "input.js", "picture.js", "fleet_map.js")
_map = st.components.v2.component(
    "fleetpulse.fleet_map",
    html=(_HERE / "fleet_map.html").read_text(),
    css=theme.css_variables(":host") + (_HERE / "fleet_map.css").read_text(),
    js="\n".join((OPEN_ADDRESS_JS, *((_HERE / name).read_text() for name in _SCRIPTS))),
)
_store = st.components.v2.component("fleetpulse.fleet_layout", js=(_HERE / "layout_store.js").read_text())
FILTER_WORDS: Mapping[str, str] = {**NODE_STATE, "affected": "affected", "drained": "drained"}


@dataclass(frozen=True, slots=True)
class MapEvents:
    """What a person did since the last run. narrowed: group.  filtered: a state, `none` to show all.
    selected: layout and ranges of cells, as they are now."""

    narrowed: str
    filtered: str
    selected: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MapView:
    """How the map is shown. unknown: the state is not known now.  state: the filter.  selection: of the address."""

    unknown: bool
    state: str
    selection: Sequence[str]
    title: str


def fleet_map(found: FleetMap, layout: FleetLayout, view: MapView) -> MapEvents:
    """Draws the map and returns what a person did."""
    _store(key="fleet_layout", data=layout_bytes(layout), height=1)

    def nothing() -> None:
        """The result has the value; the map needs no call."""

    got = _map(
        key="fleet_map",
        data=map_data(found, view),
        on_narrowed_change=nothing,
        on_filtered_change=nothing,
        on_selected_change=nothing,
    )
    selected = got.selected if isinstance(got.selected, Mapping) else {}
    return MapEvents(str(got.narrowed or ""), str(got.filtered or ""), selected)


_ENCODED: OrderedDict[str, bytes] = OrderedDict()
MAX_ENCODED = 16
"""Layouts kept as bytes, which would be encoded at every refresh of every viewer otherwise. Chosen: all groupings."""


def layout_bytes(layout: FleetLayout) -> bytes:
    """Returns the data of layout_store.js, encoded once per layout."""
    known = _ENCODED.get(layout.layout)
    if known is None:
        table = {"layout": layout.layout, "groups": layout.groups, "names": layout.names}
        known = _ENCODED[layout.layout] = json.dumps(table).encode()
        while len(_ENCODED) > MAX_ENCODED:
            _ENCODED.popitem(last=False)
    return known


def map_data(found: FleetMap, view: MapView) -> dict[str, Any]:
    """Returns the data of the script."""
    return {
        "layout": found.layout,
        "by": found.by,
        "looks": found.looks,
        "ages": without_zeros(found.ages),
        "levels": found.levels,
        "scale": found.scale,
        "incident_sets": found.incident_sets,
        "incident_of": without_zeros(found.incident_of),
        "causes": found.causes,
        "counts": dict(found.counts),
        "changes": {name: f"{change:+,} in 1 h" for name, change in found.changes.items()},
        "words": [NODE_STATE[state] for state in NODE_STATES],
        "tiles": [FILTER_WORDS[name] for name in FILTERS],
        "open": routes.href("node"),
        "hrefs": {name: routes.href("fleet", state=name) for name in FILTERS},
        "state": view.state,
        "unknown": view.unknown,
        "selection": list(view.selection),
        "selection_id": "\n".join(view.selection),
        "title": view.title,
        "caption": caption(found, view.unknown),
        "stamp": iso(found.head.as_of)[:19].replace(":", ""),
    }


def without_zeros(text: str) -> str:
    """Returns base64, or nothing if all bytes are zero: in most seconds all data is fresh."""
    return text if text.strip("A=") else ""


def caption(found: FleetMap, unknown: bool) -> str:
    """Returns the line under the title of a picture: time, grouping, colour, simulation."""
    moment = f"{'last known, ' if unknown else ''}as of {iso(found.head.as_of)[:10]} {iso(found.head.as_of)[11:19]}Z"
    parts = [moment, f"grouped by {found.by}"]
    if found.scale is not None:
        parts.append(f"colour: {found.scale['label']}")
    if found.simulated:
        parts.append(f"{found.simulated:,} of {found.nodes:,} nodes SIMULATED")
    return " · ".join(parts)
