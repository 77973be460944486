"""`/`: is anything wrong, where, and is it one thing?"""

from __future__ import annotations

from dataclasses import replace

import streamlit as st

from dashboards import markup, routes, snapshot
from dashboards.answers import Fleet, Node
from dashboards.fleet_map.component import fleet_map
from dashboards.incident_list.component import in_order, incident_list
from dashboards.snapshot import Answer
from dashboards.views import parts
from dashboards.views.parts import statement, unknown_since
from dashboards.words import NODE_STATE, age, ago, amount, plain
from pipeline.model.entity_names import entity_name
from pipeline.model.records import SECOND, Incident

SHOWN = 6
"""Open incidents under the map; the others are one click away. Chosen."""


def page() -> None:
    """Draws the page."""
    parts.refreshing(_body)


def _body() -> None:
    answer = snapshot.fleet()
    fleet = answer.value
    if fleet is None:
        parts.head("The fleet is out of sight", [], "", answer)
        parts.trouble(answer)
        return
    now = snapshot.now()
    known = fleet if unknown_since(answer, answer, now) is None else replace(fleet, stalled=True)
    parts.head(markup.headline(known), [], sources(known), answer, of_now=True, now=now)
    parts.trouble(answer)
    st.html(markup.tiles(fleet))
    picked = fleet_map(fleet.nodes, fleet.as_of, stale=bool(answer.error))
    if picked:
        _open(fleet, picked)
    _panel(fleet)
    _incidents(answer, fleet)


def _open(fleet: Fleet, entity: str) -> None:
    """A node with one incident leads to it; any other opens its panel, and the address says so."""
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
            st.html(markup.notice(f"There is no {entity_name(entity)} in this fleet."))
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
    """What is known about a node without asking further."""
    return [
        ("Rack", entity_name(node.rack) if node.rack else "unknown"),
        ("Last heard", "never" if node.last_seen is None else ago(node.last_seen, now)),
        ("Open incidents", str(len(node.incidents)) if node.incidents else "none"),
    ]


def _incidents(of_fleet: Answer[Fleet], fleet: Fleet) -> None:
    answer = snapshot.incidents()
    since = unknown_since(answer, of_fleet, snapshot.now())
    unresolved = [i for i in answer.value or () if i.state != "resolved"]
    more = f"{SHOWN} of {len(unresolved):,}" if len(unresolved) > SHOWN else ""
    st.html(markup.section("Open incidents", more))
    if answer.value is None:
        st.html(markup.notice(answer.error, "critical", "The incidents could not be read."))
        return
    if since is not None:
        last = "no open incidents." if not unresolved else f"{amount(len(unresolved), 'incident', 'incidents')}, below."
        st.html(markup.notice(statement(last, since, snapshot.now()), "degraded"))
    elif not unresolved:
        st.html(markup.notice(quiet(fleet), of_now=True))
    if unresolved:
        _show(in_order(unresolved)[:SHOWN], fleet.as_of)


def _show(incidents: list[Incident], now: int) -> None:
    picked = incident_list(incidents, now, key="open_incidents")
    if picked:
        routes.open_incident(picked)


def reporting(fleet: Fleet) -> str:
    """`64 of 65 agents reporting`; nobody knows while nothing comes in."""
    agents = fleet.sources.get("agents", len(fleet.nodes))
    if fleet.stalled:
        return f"{amount(agents, 'agent', 'agents')} known"
    return f"{agents - fleet.sources.get('silent', 0):,} of {amount(agents, 'agent', 'agents')} reporting"


def quiet(fleet: Fleet) -> str:
    """The sentence for an empty list: that nothing is wrong, and why one may believe it."""
    worst = max((fleet.as_of - n.last_seen for n in fleet.nodes if n.last_seen is not None), default=0)
    return f"No open incidents. {reporting(fleet)}, the quietest node spoke {age(worst / SECOND)} ago."


def sources(fleet: Fleet) -> str:
    """How far the picture can be trusted, in one line."""
    texts = [reporting(fleet)]
    for key, one, many in (("gaps", "gap in the data", "gaps in the data"), ("dead_letters", "message", "messages")):
        if count := fleet.sources.get(key, 0):
            texts.append(amount(count, one, many) + (" could not be read" if key == "dead_letters" else ""))
    if fleet.stalled:
        texts.append("waiting for input")
    elif fleet.backlog:
        texts.append("catching up with a backlog")
    simulated = sum(node.simulated for node in fleet.nodes)
    if simulated:
        texts.append(f"{simulated:,} of {len(fleet.nodes):,} nodes are SIMULATED")
    return " · ".join(texts)
