"""The map of all nodes. The script receives bytes, not objects: two bytes and a name per node."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import streamlit as st

from dashboards import theme
from dashboards.answers import NODE_STATES, Node
from dashboards.words import NODE_STATE
from pipeline.model.records import SECOND

NEVER = 65_535
"""Age (s) that means "no data yet"; longer ages are cut to NEVER - 1 (18 h)."""
_HERE = Path(__file__).parent
_map = st.components.v2.component(
    "fleetpulse.fleet_map",
    html=(_HERE / "fleet_map.html").read_text(),
    css=theme.css_variables(":host") + (_HERE / "fleet_map.css").read_text(),
    js=(_HERE / "fleet_map.js").read_text(),
)


def fleet_map(nodes: Sequence[Node], now: int, stale: bool) -> str | None:
    """Draws the map and returns the entity of the clicked node, None without a click. `stale` fades the map."""
    picked = _map(key="fleet_map", data=map_data(nodes, now, stale), on_picked_change=lambda: None).picked
    return str(picked) if picked else None


def map_data(nodes: Sequence[Node], now: int, stale: bool) -> dict[str, Any]:
    """Returns the data of the script: racks in natural order; state, age, simulated bit and name per node."""
    placed = sorted(nodes, key=lambda n: (n.rack == "", natural_key(n.rack), natural_key(n.entity)))
    ages = [NEVER if n.last_seen is None else _seconds(now - n.last_seen) for n in placed]
    return {
        "racks": [[rack.partition(":")[2] or rack, len(list(group))] for rack, group in groupby(placed, _rack)],
        "names": [n.entity for n in placed],
        "states": _bytes(np.array([NODE_STATES.index(n.state) for n in placed], np.uint8)),
        "simulated": _bytes(np.array([n.simulated for n in placed], np.uint8)),
        "ages": _bytes(np.array(ages, "<u2")),
        "incidents": {str(i): len(n.incidents) for i, n in enumerate(placed) if n.incidents},
        "words": [NODE_STATE[state] for state in NODE_STATES],
        "stale": stale,
    }


def natural_key(text: str) -> tuple[tuple[int, int | str], ...]:
    """Returns a sort key that puts n9 before n10."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"([0-9]+)", text) if part)


def _rack(node: Node) -> str:
    return node.rack


def _seconds(micros: int) -> int:
    return max(0, min(NEVER - 1, micros // SECOND))


def _bytes(values: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()
