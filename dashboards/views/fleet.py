"""`/`: the state of all nodes, the map, and the unresolved incidents."""

from __future__ import annotations

from dataclasses import replace

import streamlit as st

from dashboards import markup, routes, snapshot
from dashboards.answers import Fleet, Node
from dashboards.fleet_map.component import fleet_map
from dashboards.incident_list.component import incident_list, sort_incidents
from dashboards.snapshot import CachedAnswer
from dashboards.views import parts
from dashboards.views.parts import statement, unknown_since
from dashboards.words import NODE_STATE, age, ago, amount, plain
from pipeline.model.entity_names import entity_name
from pipeline.model.records import SECOND, Incident

MAX_INCIDENTS = 6
"""Incidents under the map; the list has all. Chosen."""


def page() -> None:
    """Draws the page."""
    parts.draw_refreshing(_body)


def _body() -> None:
    answer = snapshot.fetch_fleet()
    fleet = answer.value
    if fleet is None:
        parts.draw_head("Fleet state unknown", [], "", answer)
        parts.draw_error(answer)
        return
    now = snapshot.now()
    known = fleet if unknown_since(answer, answer, now) is None else replace(fleet, stalled=True)
    parts.draw_head(markup.headline(known), [], sources(known), answer, of_now=True, now=now)
    parts.draw_error(answer)
    parts.draw_empty_fleet(fleet)
    st.html(markup.tiles(fleet))
    picked = fleet_map(fleet.nodes, fleet.as_of, stale=bool(answer.error))
    if picked:
        _open(fleet, picked)
    _panel(fleet)
    _incidents(answer, fleet)


def _open(fleet: Fleet, entity: str) -> None:
    """Opens the incident of a node that has exactly one, else the panel of the node."""
    node = next((n for n in fleet.nodes if n.entity == entity), None)
    if node and len(node.incidents) == 1:
        routes.open_incident(node.incidents[0])
    st.query_params["node"] = entity


def _panel(fleet: Fleet) -> None:
    entity = st.query_params.get("node")
    if not entity:
        return
    node = next((n for n in fleet.nodes if n.entity == entity), None)
    with st.container(border=True):
        if node is None:
            st.html(markup.notice(f"Node not found: {entity_name(entity)}."))
        else:
            st.html(markup.title(plain(entity_name(entity)), [_badge(node), markup.simulated_badge(node.simulated)]))
            st.html(markup.facts(node_facts(node, fleet.as_of)))
        row = st.container(horizontal=True)
        for identity in node.incidents if node else ():
            if row.button(f"Open {identity}", key=f"open-{identity}", type="primary"):
                routes.open_incident(identity)
        if row.button("Close", key="close-panel"):
            del st.query_params["node"]
            st.rerun(scope="fragment")


def _badge(node: Node) -> str:
    tone = node.state if node.state in ("critical", "degraded", "watch") else "quiet"
    return markup.badge(NODE_STATE[node.state].upper(), tone)


def node_facts(node: Node, now: int) -> list[tuple[str, str]]:
    """Returns rack, time of the last data, and number of unresolved incidents."""
    return [
        ("Rack", entity_name(node.rack) if node.rack else "unknown"),
        ("Last data", "never" if node.last_seen is None else ago(node.last_seen, now)),
        ("Unresolved incidents", str(len(node.incidents)) if node.incidents else "none"),
    ]


def _incidents(of_fleet: CachedAnswer[Fleet], fleet: Fleet) -> None:
    answer = snapshot.fetch_incidents()
    since = unknown_since(answer, of_fleet, snapshot.now())
    unresolved = [i for i in answer.value or () if i.state != "resolved"]
    more = f"{MAX_INCIDENTS} of {len(unresolved):,}" if len(unresolved) > MAX_INCIDENTS else ""
    st.html(markup.section("Unresolved incidents", more))
    if answer.value is None:
        st.html(markup.notice(answer.error, "critical", "Incidents unavailable."))
        return
    if since is not None:
        last = (
            "no unresolved incidents."
            if not unresolved
            else f"{amount(len(unresolved), 'incident', 'incidents')}, below."
        )
        st.html(markup.notice(statement(last, since, snapshot.now()), "degraded"))
    elif not unresolved:
        st.html(markup.notice(healthy_text(fleet), of_now=True))
    if unresolved:
        _show(sort_incidents(unresolved)[:MAX_INCIDENTS], fleet.as_of)


def _show(incidents: list[Incident], now: int) -> None:
    picked = incident_list(incidents, now, key="open_incidents")
    if picked:
        routes.open_incident(picked)


def reporting(fleet: Fleet) -> str:
    """Returns `64 of 65 agents reporting`; only the number of known agents while the pipeline is stalled."""
    agents = fleet.sources.get("agents", len(fleet.nodes))
    if fleet.stalled:
        return f"{amount(agents, 'agent', 'agents')} known"
    return f"{agents - fleet.sources.get('silent', 0):,} of {amount(agents, 'agent', 'agents')} reporting"


def healthy_text(fleet: Fleet) -> str:
    """Returns the text of an empty list, with the reporting agents and the oldest last data of a node."""
    worst = max((fleet.as_of - n.last_seen for n in fleet.nodes if n.last_seen is not None), default=0)
    return f"No unresolved incidents. {reporting(fleet)}, oldest data of a node {age(worst / SECOND)} ago."


def sources(fleet: Fleet) -> str:
    """Returns the quality of the data in one line: reporting agents, gaps, unreadable messages, backlog, simulation."""
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
    simulated = sum(node.simulated for node in fleet.nodes)
    if simulated:
        texts.append(f"{simulated:,} of {len(fleet.nodes):,} nodes are SIMULATED")
    return " · ".join(texts)
