"""`/`: the state of all nodes, the map with what a selection has in common, and the unresolved incidents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from typing import cast

import streamlit as st

from dashboards import markup, routes, snapshot
from dashboards.answers import Fleet
from dashboards.fleet_map import table
from dashboards.fleet_map.answers import (
    COLOURS,
    FILTERS,
    GROUPINGS,
    Colour,
    FleetLayout,
    FleetMap,
    parse_layout,
    parse_map,
    selected_entities,
)
from dashboards.fleet_map.component import FILTER_WORDS, MapEvents, MapView, fleet_map
from dashboards.incident_list.component import incident_list, sort_incidents
from dashboards.links import Link, as_markup
from dashboards.report.document import write_report
from dashboards.snapshot import CachedAnswer
from dashboards.views import parts
from dashboards.views.parts import statement, unknown_since
from dashboards.views.sharing import draw_share
from dashboards.words import amount, joined
from pipeline.model.entity_names import entity_name
from pipeline.model.errors import FleetpulseError
from pipeline.model.records import SECOND, Incident, iso

MAX_INCIDENTS = 6
"""Incidents under the map; the list has all. Chosen."""
MAX_IN_ADDRESS = 30
"""Selected entities in the address (chosen: 1,000 characters); more stay in the session."""
COLOUR_NAMES: dict[Colour, str] = {
    "state": "State",
    "temperature": "Temperature",
    "power": "Power",
    "ber": "Link BER",
    "step": "Step time",
}
_WRITTEN, _INCIDENT = "fleet_selection", "incident:"
_CHOICES = ("fleet_by", "fleet_colour", "fleet_table")
"""Keys of the controls above the map."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the address asks for. Unknown words are ignored."""

    by: str
    colour: str
    within: str
    state: str
    selection: tuple[str, ...]
    table: bool


def page() -> None:
    """Draws the page."""
    parts.draw_refreshing(_body)


def read_address() -> Wanted:
    """Returns what the address asks for."""
    query = st.query_params
    by, colour, state = query.get("by", ""), query.get("colour", ""), query.get("state", "")
    within = query.get("within", "")
    return Wanted(
        by=by if by in GROUPINGS else "rack",
        colour=colour if colour in COLOURS else "state",
        within=within if ":" in within else "",
        state=state if state in FILTERS else "",
        selection=tuple(entity for entity in query.get_all("selection") if ":" in entity),
        table=query.get("table") == "1",
    )


def _body() -> None:
    wanted = read_address()
    where = {"within": wanted.within} if wanted.within else {}
    answer = snapshot.fetch(parse_map, "fleet/map", by=wanted.by, colour=wanted.colour, **where)
    stated = _find_state(answer, wanted.within, where)
    found = stated.value
    if found is None:
        parts.draw_head("Fleet state unknown", [], "", cast(CachedAnswer[Fleet], stated))
        parts.draw_error(stated)
        return
    now = snapshot.now()
    head = CachedAnswer(found.head, stated.fetched, stated.error, stated.status)
    since = unknown_since(head, head, now)
    known = replace(found, head=replace(found.head, stalled=found.head.stalled or since is not None))
    parts.draw_head(headline(known), [], sources(known), head, of_now=True, now=now)
    parts.draw_error(stated)
    parts.draw_empty_fleet(found.fleet)
    _toolbar(wanted)
    if answer.value is None or not stated.error:  # else the error above says it of all
        parts.draw_problem(
            answer, f"Map by {wanted.by}, coloured by {COLOUR_NAMES[cast(Colour, wanted.colour)]}, unknown."
        )
    if answer.value is not None:
        _map(answer.value, wanted, where, since is not None or bool(answer.error))
    _incidents(head, found)


def _find_state(answer: CachedAnswer[FleetMap], within: str, where: dict[str, str]) -> CachedAnswer[FleetMap]:
    """Returns the answer, or if it failed that for the plain map, or if that fails too the last one of any map: counts
    and incidents are the same on all, while one colour or grouping may fail alone."""
    if answer.error:
        answer = snapshot.fetch(parse_map, "fleet/map", by="rack", colour="state", **where)
    return snapshot.keep_last(("fleet/map", within), answer)


def _map(found: FleetMap, wanted: Wanted, where: dict[str, str], unknown: bool) -> None:
    layout = _layout(found, where)
    if layout is None:
        st.html(markup.notice("The names of the nodes are not known yet; the page asks again in a few seconds."))
    else:
        _draw_map(found, layout, wanted, unknown)


def _layout(found: FleetMap, where: dict[str, str]) -> FleetLayout | None:
    """Returns the names of the cells, None while they are of another topology than the values."""
    for mark in (found.layout, f"{found.layout} again"):  # the second time past the cache
        layout = snapshot.fetch(parse_layout, "fleet/layout", by=found.by, mark=mark, **where).value
        if layout is not None and layout.layout == found.layout:
            return layout
    return None


# --- choices ----------------------------------------------------------------------------------------------------------


def _toolbar(wanted: Wanted) -> None:
    for key, value in zip(_CHOICES, (wanted.by, wanted.colour, wanted.table), strict=True):
        if st.session_state.get(key) != value:  # a first visit, or a link
            st.session_state[key] = value
    with st.container(horizontal=True, vertical_alignment="center", gap="medium"):
        st.segmented_control(
            "Group by", GROUPINGS, key="fleet_by", format_func=str.title, required=True, on_change=_write_choices
        )
        st.segmented_control(
            "Colour by",
            COLOURS,
            key="fleet_colour",
            format_func=lambda name: COLOUR_NAMES[name],
            required=True,
            on_change=_write_choices,
        )
        st.toggle("As a table", key="fleet_table", on_change=_write_choices)
        st.download_button(
            "Report",
            partial(write_report_now, wanted.within),
            file_name=f"fleet-report-{iso(snapshot.now())[:10]}.html",
            mime="text/html",
            key="fleet_report",
            help="One HTML file to print or to save as PDF",
            on_click="ignore",
        )
    if wanted.within:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.html(f'<p class="fp-big">Only {markup.chips([entity_name(wanted.within)])}</p>')
            if st.button("Show the whole fleet", key="fleet_all"):
                routes.change_query(within="")
                st.rerun(scope="fragment")


def _write_choices() -> None:
    """Writes the choices into the address, before the run that draws them: a second run would cost 50 ms."""
    by, colour, shown = (st.session_state[key] for key in _CHOICES)
    routes.change_query(
        by="" if by == "rack" else by, colour="" if colour == "state" else colour, table="1" if shown else ""
    )


def write_report_now(within: str) -> str:
    """Returns the report of this moment, or why there is none."""
    snapshot.api_url()  # asks for access, as every read does
    client = snapshot.make_client()
    try:
        return write_report(lambda path, query: client.fetch(dict, path, query.items()), snapshot.now(), within)
    except FleetpulseError as error:
        return f"<!doctype html><title>Fleet report</title><p>The fleet cannot be read: {escape(str(error))}</p>"


# --- the map ----------------------------------------------------------------------------------------------------------


def _draw_map(found: FleetMap, layout: FleetLayout, wanted: Wanted, unknown: bool) -> None:
    own = tuple(st.session_state.get(_WRITTEN, ())) == wanted.selection
    view = MapView(unknown, wanted.state, () if own else wanted.selection, headline(found))
    events = fleet_map(found, layout, view)
    _follow(events, wanted)
    if wanted.state:
        st.html(table.node_table(found, layout, wanted.state))
    if wanted.table:
        st.html(table.group_table(found, layout))
    _draw_selection(_selection(events, layout, wanted), wanted)


def _follow(events: MapEvents, wanted: Wanted) -> None:
    """Does what a person did on the map: narrows it, filters by state."""
    if events.narrowed:
        routes.change_query(within=events.narrowed, selection="")
        st.rerun(scope="fragment")
    if events.filtered and events.filtered != (wanted.state or "none"):
        routes.change_query(state="" if events.filtered == "none" else events.filtered)
        st.rerun(scope="fragment")


def _selection(events: MapEvents, layout: FleetLayout, wanted: Wanted) -> Sequence[str]:
    """Returns the selected entities: those of the map, else of the address; writes them into the address."""
    written = tuple(st.session_state.get(_WRITTEN, ()))
    if events.selected.get("layout") != layout.layout:
        return wanted.selection or st.session_state.get("fleet_selected", ())
    marks = (events.selected["layout"], str(events.selected["ranges"]))
    if st.session_state.get("fleet_marks") == marks:  # nothing new: the address may have been changed since
        return wanted.selection if wanted.selection != written else st.session_state.get("fleet_selected", ())
    entities = tuple(selected_entities(layout, events.selected["ranges"]))
    st.session_state["fleet_marks"] = marks
    st.session_state["fleet_selected"] = entities
    st.session_state[_WRITTEN] = entities if len(entities) <= MAX_IN_ADDRESS else ()
    routes.change_query(selection=list(st.session_state[_WRITTEN]))
    return entities


def _draw_selection(selection: Sequence[str], wanted: Wanted) -> None:
    incident = next((e.removeprefix(_INCIDENT) for e in selection if e.startswith(_INCIDENT)), "")
    entities = [e for e in selection if not e.startswith(_INCIDENT)]
    if incident or entities:
        draw_share(entities, incident, "" if wanted.within in selection else wanted.within)


# --- words ------------------------------------------------------------------------------------------------------------


def headline(found: FleetMap) -> str:
    """Returns the state of the fleet in one sentence; nodes without data never count as healthy."""
    count, total = found.counts, found.nodes
    if not total:
        return f"No nodes in {entity_name(found.within)}" if found.within else "No node has sent data yet"
    where = f" in {entity_name(found.within)}" if found.within else ""
    nodes = f"{amount(total, 'node', 'nodes')}{where}"
    bad = [f"{count[s]:,} {FILTER_WORDS[s]}" for s in ("critical", "degraded", "affected") if count[s]]
    no_data = f", {count['no_data']:,} without data" if count["no_data"] else ""
    if bad:
        return f"{joined(bad)} of {nodes}{no_data}"
    if count["no_data"] == total:
        return f"No data from any node{where}"
    if count["no_data"]:
        return f"No data from {count['no_data']:,} of {nodes}, no problems on the others"
    return f"No problems on {nodes}"


def reporting(fleet: Fleet) -> str:
    """Returns `64 of 65 agents reporting`; only the number of known agents while the pipeline is stalled."""
    agents = fleet.sources.get("agents", len(fleet.nodes))
    if fleet.stalled:
        return f"{amount(agents, 'agent', 'agents')} known"
    return f"{agents - fleet.sources.get('silent', 0):,} of {amount(agents, 'agent', 'agents')} reporting"


def healthy_text(fleet: Fleet) -> str:
    """Returns the text of an empty list, with the reporting agents and how far the evaluation is behind."""
    lag = "" if fleet.lag_s is None else f", evaluated up to {fleet.lag_s:.0f} s ago"
    return f"No unresolved incidents. {reporting(fleet)}{lag}."


def sources(found: FleetMap) -> str:
    """Returns the quality of the data in one line: reporting agents, gaps, unreadable messages, backlog, simulation."""
    fleet = found.head
    texts = [reporting(fleet)]
    for key, one, many in (
        ("gaps", "data gap", "data gaps"),
        ("dead_letters", "unreadable message", "unreadable messages"),
    ):
        if count := fleet.sources.get(key, 0):
            texts.append(amount(count, one, many))
    if fleet.stalled:
        texts.append("waiting for input")
    elif fleet.backlog:
        texts.append("processing a backlog")
    if found.missing:
        texts.append(f"{found.missing:,} without a value of this colour")
    return " · ".join(texts)


# --- incidents --------------------------------------------------------------------------------------------------------


def _incidents(of_fleet: CachedAnswer[Fleet], found: FleetMap) -> None:
    answer = snapshot.fetch_unresolved()
    since = unknown_since(answer, of_fleet, snapshot.now())
    unresolved = list(answer.value or ())
    if found.within or found.nodes < found.fleet:
        own = {identity for ids in found.incident_sets for identity in ids}
        unresolved = [i for i in unresolved if i.id in own]
    st.html(markup.section("Unresolved incidents", _note(unresolved, found.head.as_of)))
    if answer.value is None:
        st.html(markup.notice(answer.error, "critical", "Incidents unavailable."))
        return
    if since is not None:
        number = amount(len(unresolved), "incident", "incidents")
        last = f"{number}, below." if unresolved else "no unresolved incidents."
        st.html(markup.notice(statement(last, since, snapshot.now()), "degraded"))
    elif not unresolved:
        st.html(markup.notice(healthy_text(found.head), of_now=True))
    if unresolved:
        _show(sort_incidents(unresolved)[:MAX_INCIDENTS], found.head.as_of)
    if len(unresolved) > MAX_INCIDENTS:
        every = Link(f"All {len(unresolved):,} unresolved incidents", routes.href("incidents"))
        st.html(f'<p class="fp-empty">{as_markup(every)}</p>')


def _note(unresolved: Sequence[Incident], now: int) -> str:
    parts_ = []
    if len(unresolved) > MAX_INCIDENTS:
        parts_.append(f"{MAX_INCIDENTS} of {len(unresolved):,}")
    if new := sum(now - i.opened < 3600 * SECOND for i in unresolved):
        parts_.append(f"{new:,} opened in the last hour")
    return ", ".join(parts_)


def _show(incidents: list[Incident], now: int) -> None:
    incident_list(incidents, now, key="open_incidents")
