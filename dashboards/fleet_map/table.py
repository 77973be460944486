"""The map as tables: one line per group, and one per node of a state; for screen readers and for copying."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from typing import cast

import numpy as np
from numpy.typing import NDArray

from dashboards import routes
from dashboards.answers import NODE_STATES, NodeState
from dashboards.fleet_map.answers import AFFECTED, DRAINED, FILTERS, SIMULATED, FleetLayout, FleetMap
from dashboards.fleet_map.component import FILTER_WORDS
from dashboards.links import Link, as_markup, entity_link, incident_link
from pipeline.model.entity_names import entity_name

MAX_LINES = 200
"""Lines of one table; more are counted. Chosen."""
_STATE = 7  # bits of a look


def filter_mask(looks: NDArray[np.uint8], state: str) -> NDArray[np.bool_]:
    """Returns which cells are in a state of FILTERS; one that is only affected is in no other, a drained one may be."""
    if state == "drained":
        return (looks & DRAINED) > 0
    only = (looks & AFFECTED) > 0
    if state == "affected":
        return only
    return np.asarray(~only & ((looks & _STATE) == [*NODE_STATES].index(cast(NodeState, state))))


def group_table(found: FleetMap, layout: FleetLayout) -> str:
    """Returns one line per group with its number of nodes per state, those with the worst nodes first."""
    looks = found.look_array()
    if not layout.groups or len(looks) != len(layout.names):
        return '<p class="fp-empty">No nodes.</p>'
    starts = np.cumsum([0, *(count for _, count in layout.groups)])[:-1]
    counts = {state: np.add.reduceat(filter_mask(looks, state).astype(np.int64), starts) for state in FILTERS}
    order = np.lexsort([-counts[state] for state in reversed(FILTERS[:-1])])
    lines = []
    for i in order[:MAX_LINES].tolist():
        entity, size = layout.groups[i]
        name = (
            as_markup(Link(entity_name(entity), routes.href("fleet", within=entity)))
            if entity
            else f"no {escape(found.by)}"
        )
        cells = [f"{size:,}", *(f"{int(counts[state][i]):,}" for state in FILTERS)]
        mark = " (cause)" if entity in found.causes else ""
        lines.append(f'<tr><th scope="row">{name}{mark}</th>{_cells(cells)}</tr>')
    head = [found.by, "nodes", *(FILTER_WORDS[state] for state in FILTERS)]
    return _table(f"Nodes by {found.by} and state", head, lines) + _more(len(layout.groups))


def node_table(found: FleetMap, layout: FleetLayout, state: str) -> str:
    """Returns the nodes in a state, each with its groups and incidents, in the order of the map."""
    looks = found.look_array()
    if len(looks) != len(layout.names):
        return ""
    group_of = np.repeat(np.arange(len(layout.groups)), [count for _, count in layout.groups])
    sets = np.frombuffer(base64.b64decode(found.incident_of), np.uint8)
    nodes: dict[str, list[int]] = {}
    for i in np.flatnonzero(filter_mask(looks, state)).tolist():
        nodes.setdefault(layout.names[i], []).append(i)
    lines = []
    for name, cells in list(nodes.items())[:MAX_LINES]:
        groups = [layout.groups[group_of[i]][0] for i in cells]
        ids = found.incident_sets[sets[cells[0]] - 1] if 0 < sets[cells[0]] < 255 else ()
        row = [
            ", ".join(as_markup(entity_link(g)) for g in groups if g) or f"no {escape(found.by)}",
            ", ".join(as_markup(incident_link(i)) for i in ids) or "none",
            "SIMULATED" if looks[cells[0]] & SIMULATED else "",
        ]
        lines.append(f'<tr><th scope="row">{as_markup(entity_link(name))}</th>{_cells(row)}</tr>')
    head = ["node", found.by, "incidents", ""]
    return _table(f"Nodes: {FILTER_WORDS[state]}", head, lines) + _more(len(nodes))


def _cells(texts: Iterable[str]) -> str:
    return "".join(f"<td>{text}</td>" for text in texts)


def _table(name: str, head: Sequence[str], lines: Sequence[str]) -> str:
    heads = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    return (
        f'<table class="fp-table"><caption class="fp-caption">{escape(name)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    )


def _more(number: int) -> str:
    return f'<p class="fp-empty">and {number - MAX_LINES:,} more</p>' if number > MAX_LINES else ""
