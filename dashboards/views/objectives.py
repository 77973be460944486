"""`/objectives?days=`: error budgets, lost GPU-hours by cause, energy, and the nodes that fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from dashboards import linked, markup, routes, snapshot
from dashboards.links import Link, Text, as_markup, entity_link
from dashboards.report import weekly
from dashboards.views import parts
from dashboards.words import amount

SPANS = {"1 d": 1, "7 d": 7, "30 d": 30, "90 d": 90}
"""Lengths of the time (days). Chosen: a day, the report's week, a month, a quarter."""
DEFAULT = "7 d"
MAX_ROWS = 20
"""Rows of one table. Chosen."""


def page() -> None:
    """Draws the page."""
    parts.draw_refreshing(_body)


def keep_answer(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parses GET /api/v1/objectives: the tables of the page are those of the report. Raises KeyError."""
    for name in ("objectives", "lost", "energy", "failures", "published", "ranking", "spares", "burn_in", "evaluated"):
        table[name]
    return table


def _body() -> None:
    asked = st.query_params.get("days", DEFAULT)
    days = SPANS.get(asked, SPANS[DEFAULT])
    answer = snapshot.fetch(keep_answer, "objectives", days=str(days))
    found = answer.value
    parts.draw_head("Objectives" if found is None else headline(found), [], "", answer, of_now=found is not None)
    parts.draw_error(answer)
    st.html(markup.tabs("Time", [Link(name, routes.href("objectives", days=name)) for name in SPANS], asked))
    if found is not None:
        _draw(found)


def headline(found: Mapping[str, Any]) -> str:
    """Returns which objectives burn or are missed, else the goodput."""
    burning = sum(row["alert"] is not None for row in found["objectives"])
    missed = sum((row["left_share"] or 0) < 0 for row in found["objectives"])
    if burning:
        return amount(burning, "objective burns its budget too fast", "objectives burn their budgets too fast")
    if missed:
        return f"{amount(missed, 'objective is', 'objectives are')} missed"
    goodput = found["goodput"]
    return "No job held a GPU" if goodput is None else f"Goodput {weekly.percent(goodput)}"


def _draw(found: Mapping[str, Any]) -> None:
    if not found["evaluated"]["complete"]:
        st.html(markup.notice(found["evaluated"]["note"], "degraded" if found["evaluated"]["late"] else "quiet"))
    default = bool(found["objectives"]) and not found["objectives"][0]["configured"]
    st.html(markup.section("Objectives", "defaults; set your own in [[impact.objectives]]" if default else ""))
    rows = [weekly.objective_cells(row) for row in found["objectives"]]
    st.html(_table(weekly.OBJECTIVE_HEAD, rows, weekly.NO_OBJECTIVE))
    lost, energy, since = found["lost"], found["energy"], found["since"][:10]
    used = f"{weekly.amount(lost)} used in them" if lost["kwh"] is not None else weekly.amount(lost)
    st.html(markup.section("GPU-hours lost", f"{weekly.hours(lost['gpu_hours'])}, {used}"))
    for by, title in weekly.LOST_BY:
        losses: list[Sequence[Text]] = [weekly.loss_cells(row, by) for row in lost[f"by_{by}"]]
        if by == "job":
            losses = list(map(_with_job, losses))
        st.html(_table((title, *weekly.LOSS_HEAD), losses, "Nothing was lost."))
    idle = f"{energy['idle_kwh']:,.0f} kWh of it without a job{weekly.measured_note(found)}"
    st.html(markup.section("Energy", f"{weekly.amount(energy)} of all GPUs, {idle}"))
    st.html(
        _table(
            weekly.ENERGY_HEAD, [_with_job(weekly.energy_cells(row)) for row in energy["by_job"]], "Not measured yet."
        )
    )
    st.html(markup.section("Time to failure", f"since {since}, with bounds at 90 %, beside published fleets"))
    rates = [weekly.failure_cells(row) for row in found["failures"]][:MAX_ROWS]
    st.html(_table(weekly.FAILURE_HEAD, [*rates, *map(weekly.published_cells, found["published"])], "None.", 40))
    _draw_nodes(found)


def _draw_nodes(found: Mapping[str, Any]) -> None:
    st.html(markup.section("Nodes that fail most", "a node that fails 3 times as often as the average is a lemon"))
    nodes = [_with_link(weekly.node_cells(row)) for row in found["ranking"]]
    st.html(_table(weekly.NODE_HEAD, nodes, "No node failed."))
    st.html(markup.section("Burn-in", "released nodes under tighter limits"))
    burns = [(entity_link(f"node:{r['node']}"), r["until"][:16], f"{len(r['incidents']):,}") for r in found["burn_in"]]
    st.html(_table(("Node", "Until", "Failures since"), burns, "No node is in burn-in."))
    st.html(markup.section("Spares", weekly.spare_note(found)))
    spares = [weekly.spare_cells(row) for row in found["spares"]["parts"]]
    st.html(_table(weekly.SPARE_HEAD, spares, "None."))


def _with_link(cells: Sequence[str]) -> tuple[Text, ...]:
    return (entity_link(f"node:{cells[0]}"), *cells[1:])


def _with_job(cells: Sequence[Text]) -> tuple[Text, ...]:
    """Returns the cells with a link to the job that the first one names, if it names one."""
    name = str(cells[0])
    return (entity_link(f"job:{name}", name), *cells[1:]) if name not in ("", "none") else tuple(cells)


def _table(head: Sequence[str], rows: Sequence[Sequence[Text]], empty: str, most: int = MAX_ROWS) -> str:
    rest = markup.empty(f"and {len(rows) - most:,} more: fleetpulse objectives") if len(rows) > most else ""
    cells = [[as_markup(cell) for cell in row] for row in rows[:most]]
    return linked.table(head, cells, f"{head[0]}: {empty.lower()}") + rest
