"""`/node?entity=`: all about one node, or about a device of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import streamlit as st

from dashboards import links, markup, routes, snapshot
from dashboards.act_answers import parse_acts
from dashboards.answers import Node
from dashboards.data_quality.answers import parse_quality
from dashboards.devices import cells, happened, html, incident_rows, ranges, requests
from dashboards.devices.answers import Comparison, EntityDetail, EventItems, Values
from dashboards.devices.html import explore_href, link
from dashboards.devices.ranges import TimeRange
from dashboards.markup import TONES
from dashboards.node import identity, tables
from dashboards.snapshot import CachedAnswer
from dashboards.time_chart.component import Look, time_charts
from dashboards.views import acts, parts
from dashboards.words import NODE_STATE, plain
from pipeline.model.entity_names import entity_name

GPU_SIGNALS = ("gpu.temperature", "gpu.memory_temperature", "gpu.power", "gpu.sm_clock", "gpu.utilization")
SMALL_POINTS = 120
"""Points of a small chart: one per pixel. Chosen."""
FOCUS_SIGNALS = {
    "gpu": ("gpu.temperature", "gpu.power", "gpu.sm_clock", "gpu.utilization"),
    "psu": ("psu.output_power", "psu.input_voltage"),
    "sensor": ("sensor.temperature", "sensor.fan_speed", "sensor.power"),
    "nvlink": ("nvlink.crc_errors", "nvlink.replay_errors", "nvlink.state"),
    "disk": ("disk.temperature", "disk.io_time", "disk.media_errors"),
    "filesystem": ("filesystem.used", "filesystem.latency"),
    "dimm": ("dimm.corrected", "dimm.uncorrected"),
    "neuroncore": ("neuroncore.utilization", "neuroncore.memory_used"),
    "leak_detector": ("leak.state",),
    "collector": ("collector.state", "collector.latency"),
    "exporter": ("exporter.up", "exporter.scrape_time"),
    "service": ("service.state", "service.restarts"),
    "node": ("node.power", "node.load1", "node.memory_available"),
}
SUPPLY_SIGNALS = {
    "cdu": ("coolant.flow", "coolant.supply_temperature", "coolant.return_temperature"),
    "loop": ("coolant.flow", "coolant.supply_temperature", "coolant.return_temperature"),
    "pdu": ("power.draw", "power.voltage"),
    "shelf": ("power.draw", "power.voltage"),
}
MAX_ACTS = 20
"""Acts that are listed, the newest. Chosen."""
MAX_EVENTS = 60
"""Rows of the table of events. Chosen: two screens; Explore and SQL have all."""
EXPECTED = "Expected a node or a device of it in the address: /node?entity=node:NAME or gpu:NAME.0"


def page() -> None:
    """Draws the page of the entity in the address."""
    asked = st.query_params.get("entity", "").strip()
    asked = asked if ":" in asked or not asked else f"node:{asked}"
    kind, _, name = asked.partition(":")
    if not kind or not name:
        _draw_missing("No node selected.", EXPECTED)
        return
    parts.draw_refreshing(lambda: _body(asked))


def _draw_missing(heading: str, text: str) -> None:
    st.html(markup.title("Node"))
    st.html(markup.notice(text, "degraded", heading))
    st.html(link(routes.href("fleet"), "Show the fleet"))


def node_of(detail: EntityDetail) -> str:
    """Returns the node that an entity is or is part of, empty if there is none."""
    return detail.entity if detail.kind == "node" else detail.above_of_kind("node") or ""


def _body(asked: str) -> None:
    first = requests.fetch_entity(asked)
    if first.value is None:
        _draw_unknown(asked, first)
        return
    node = node_of(first.value)
    if not node:
        _draw_elsewhere(first.value)
        return
    answer = first if node == asked else requests.fetch_entity(node)
    detail = answer.value or first.value
    focus = first.value if asked != node else None
    now = snapshot.now()
    values = requests.fetch_values(node, tables.SIGNALS)
    silence = "" if focus is None else tables.describe_silence(values.value, focus.entity)
    _head(detail, focus, answer, now, silence)
    chosen = ranges.read_range(now)
    events = requests.fetch_events(node, chosen.start, chosen.end)
    if focus is not None:
        _focus(focus, values, chosen, now)
    _overview(detail, values, focus, now)
    ranges.draw_range(chosen, now, "node-range")
    _charts(detail, chosen, now, events)
    _parts(detail, values, now)
    _happened(detail, events, now)
    _acts(node, now)


def _draw_unknown(asked: str, answer: CachedAnswer[EntityDetail]) -> None:
    if answer.status == 404:
        text = "No inventory and no telemetry names it. It may be decommissioned, of another site, or misspelled."
        _draw_missing(f"{plain(entity_name(asked))} is not known.", text)
        return
    parts.draw_head(plain(entity_name(asked)), [], "", answer)
    parts.draw_error(answer)


def _draw_elsewhere(detail: EntityDetail) -> None:
    name = entity_name(detail.entity)
    st.html(markup.title(plain(name)))
    st.html(markup.notice(f"{plain(name)} is not part of a node.", "degraded"))
    if detail.kind in routes.FACILITY_KINDS or detail.kind in routes.GROUP_KINDS:
        st.html(html.entity_link(detail.entity, f"Open {name}"))
    nodes = [part.entity for part in detail.parts if part.entity.startswith("node:")]
    st.html(markup.section("Nodes", f"{len(nodes):,}"))
    st.html(" ".join(html.entity_link(e, e.partition(":")[2]) for e in nodes[:200]) or "none")


# --- head and overview ----------------------------------------------------------------------------------------------


def _fleet_node(entity: str) -> Node | None:
    fleet = snapshot.fetch_fleet_of(entity).value
    return None if fleet is None else next((n for n in fleet.nodes if n.entity == entity), None)


def _head(
    detail: EntityDetail, focus: EntityDetail | None, answer: CachedAnswer[EntityDetail], now: int, silence: str
) -> None:
    shown = focus or detail
    known = _fleet_node(detail.entity)
    badges = [_state_badge(known, focus, silence)]
    st.html(links.breadcrumbs(identity.crumbs(detail, focus.entity if focus else "")))
    since = parts.unknown_since(answer, snapshot.fetch_fleet_of(detail.entity), now)
    state = parts.statement(state_text(shown, known, silence), since, now)
    parts.draw_head(plain(entity_name(shown.entity)), badges, state, answer, simulated=shown.simulated)
    parts.draw_error(answer)
    if lines := incident_rows.open_list(shown.incidents, now):
        st.html(lines)


def _state_badge(known: Node | None, focus: EntityDetail | None, silence: str) -> str:
    state: str = "no_data" if known is None else known.state
    if focus is not None:
        state = device_state(focus, state, bool(silence))
    elif known is not None and state == "ok" and known.affected_by:
        state = "affected"
    tone = state if state in ("critical", "degraded", "watch", "affected") else "quiet"
    kind = "node" if focus is None else focus.kind.replace("_", " ")
    return markup.badge(f"{kind} {NODE_STATE.get(state, state)}".upper(), tone)


def device_state(focus: EntityDetail, of_node: str, is_silent: bool) -> str:
    """Returns the state of a device by its own incidents, in the order of the fleet map: critical, no data of it or its
    node, a lesser fault, only affected, ok. One with findings of a cause elsewhere is affected, as its node is."""
    found = incident_rows.sort_open(focus.incidents)
    own = next((TONES[one.incident.severity] for one in found if one.relation == "cause"), "")
    if own != "critical" and (is_silent or of_node == "no_data"):
        return "no_data"
    return own or ("affected" if found else "ok")


def state_text(shown: EntityDetail, known: Node | None, silence: str = "") -> str:
    """Returns whether the entity is a cause, is affected from above, or has no incidents; silence comes first.

    silence: for how long a device has sent nothing, though its node may send.
    """
    worst = incident_rows.worst(shown.incidents)
    missing = f"{silence[:1].upper()}{silence[1:]} from this device" if silence else ""
    if known and known.state == "no_data":
        missing = "No data from this node"
    quiet = f"{missing}: what follows is the last known state. " if missing else ""
    if worst is None:
        return f"{quiet}No unresolved incidents." if not quiet else quiet.strip()
    if worst.relation == "affected":
        return f"{quiet}No fault found on it; affected by {entity_name(worst.incident.cause)}."
    return (
        f"{quiet}{incident_rows.WORDS[worst.relation]} of an unresolved incident."
        if worst.relation == "cause"
        else (f"{quiet}Affected, and has findings too; suspected cause: {entity_name(worst.incident.cause)}.")
    )


def _overview(detail: EntityDetail, values: CachedAnswer[Values], focus: EntityDetail | None, now: int) -> None:
    left, right = st.columns([2.1, 1], gap="medium")
    with left:
        if values.value is None:
            st.html(markup.notice(values.error, "critical", "No newest values."))
        else:
            parts.draw_problem(values, "Newest values unknown.")
            _gpus(values.value, focus, now)
    with right:
        st.html(markup.section("Identity"))
        quality = snapshot.fetch(parse_quality, "quality").value
        usual = identity.usual_versions(quality.versions) if quality else {}
        own_rows = identity.attribute_rows(detail.attributes, usual)
        rows = [*identity.work_rows(detail), *identity.place_rows(detail), *own_rows]
        st.html(f'<div class="fp-narrow">{html.facts(rows)}</div>')
        keeper = str(detail.attributes.get("clock_keeper") or "")
        if values.value is not None and (own := tables.node_rows(values.value, now, keeper)):
            st.html(markup.section("Node"))
            st.html(f'<div class="fp-narrow">{html.facts(own)}</div>')


def _gpus(values: Values, focus: EntityDetail | None, now: int) -> None:
    gpus = values.of_class("gpu")
    note = f"newest values beside those of {escape_text(cells.peers_title(gpus))}" if gpus.entities else ""
    st.html(markup.section("GPUs", note))
    if not gpus.entities:
        st.html(
            markup.notice("No GPU of this node has sent data: it has none, or its collector reads nothing (below).")
        )
        return
    st.html(tables.device_table(gpus, tables.GPU_COLUMNS, "GPU", now, focus.entity if focus else ""))
    if text := recovery_text(values):
        st.html(markup.notice(text, "degraded", "Recovery action of the driver:"))


def escape_text(text: str) -> str:
    """Returns a text with a small first letter, for the middle of a sentence."""
    return text[:1].lower() + text[1:]


RECOVERY = (
    "NONE", "GPU_RESET", "NODE_REBOOT", "DRAIN_P2P", "DRAIN_AND_RESET", "RECOVER_IMEX_DOMAIN", "BUS_RESET",
    "SYSTEM_REBOOT",
)  # fmt: skip
"""Names of NVML_GPU_RECOVERY_ACTION_...: shown verbatim, so that vendor documentation can be searched for them."""


def recovery_text(values: Values) -> str:
    """Returns the recovery actions that the driver recommends, with NVML's own names; empty without any."""
    gpus = values.of_class("gpu")
    signal = gpus.signals.get("gpu.recovery_action")
    if signal is None:
        return ""
    found = [(e, int(v)) for e, v in zip(gpus.entities, signal.values, strict=True) if v]
    return "; ".join(
        f"{entity_name(e)}: {signal.states[v] if v < len(signal.states) else v} "
        f"(NVML_GPU_RECOVERY_ACTION_{RECOVERY[v] if v < len(RECOVERY) else v})"
        for e, v in found
    )


def _focus(focus: EntityDetail, values: CachedAnswer[Values], chosen: TimeRange, now: int) -> None:
    """Draws the device that the address names: its values beside peers, its identity, its charts."""
    left, right = st.columns([2.1, 1], gap="medium")
    with left:
        names = FOCUS_SIGNALS.get(focus.kind, ())
        st.html(markup.section("Against its peers", entity_name(focus.entity)))
        if names:
            _draw_comparison([(focus.entity, names[:4])], chosen, focus, now, "focus")
            st.html(link(explore_href([focus.entity], list(names)), "All signals of it in Explore"))
    with right:
        st.html(markup.section("Device"))
        rows = [*identity.attribute_rows(focus.attributes), *identity.work_rows(focus)]
        if values.value is not None:
            rows += tables.focus_rows(values.value, focus.entity, focus)
        st.html(f'<div class="fp-narrow">{html.facts(rows, "No attributes known.")}</div>')


# --- charts ---------------------------------------------------------------------------------------------------------


def _charts(detail: EntityDetail, chosen: TimeRange, now: int, events: CachedAnswer[EventItems]) -> None:
    gpus = [part.entity for part in detail.parts_of_kind("gpu")]
    if gpus:
        answer = requests.fetch_comparison([detail.entity], GPU_SIGNALS, chosen.start, chosen.end, points=SMALL_POINTS)
        st.html(markup.section("GPUs over time", "band: middle 80 % of the peers; a frame marks a line outside of it"))
        parts.draw_error(answer)
        if answer.value is not None:
            _small_multiples(answer.value, detail, events, now, bool(answer.error))
    st.html(
        markup.section("Node, power and coolant", "the node and the units that supply it, with the band of their peers")
    )
    supplies = [(above, SUPPLY_SIGNALS[kind]) for kind in SUPPLY_SIGNALS if (above := detail.above_of_kind(kind))]
    _draw_comparison([(detail.entity, FOCUS_SIGNALS["node"]), *supplies], chosen, detail, now, "node")


def _small_multiples(
    found: Comparison, detail: EntityDetail, events: CachedAnswer[EventItems], now: int, stale: bool
) -> None:
    seen = Comparison(found.start, found.end, tuple(s for s in found.signals if s.has_data()))
    if not seen.signals:
        st.html(markup.notice("No data of its GPUs in this time range."))
        return
    pairs = [(line.entity, signal.name) for signal in seen.signals for line in signal.lines]
    name = st.query_params.get("range", ranges.DEFAULT)
    hrefs = {(e, s): explore_href([e], [s], name) for e, s in pairs}
    items = events.value.items if events.value else ()
    found_marks = [*incident_rows.marks(detail.incidents, now), *happened.marks(items)]
    look = Look(46, frozenset(), stale, hrefs, find_outliers(seen), "grid")
    time_charts(seen, found_marks, look, "gpus")


OUTLIER_SHARE = 0.3
"""Share of the last quarter of a chart in which a line is outside the band of its peers, to be framed. Chosen."""
OUTLIER_NOW = 3
"""Newest points of which all are outside of it: a fault of a few minutes is framed too. Chosen: one may be noise."""


def find_outliers(found: Comparison) -> frozenset[tuple[str, str]]:
    """Returns (entity, signal) of lines that left the middle 80 % of their peers by half its width, for long or now."""
    outliers = set()
    for signal in found.signals:
        if signal.band is None or signal.peers < cells.MIN_PEERS:
            continue
        _, low, high = signal.band
        room = np.maximum((high - low) / 2, np.abs(high) * 0.02)
        recent = slice(-max(4, len(low) // 4), None)
        for line in signal.lines:
            with np.errstate(invalid="ignore"):
                out = (line.values > high + room) | (line.values < low - room)
            known = np.isfinite(line.values) & np.isfinite(low)
            newest = out[np.flatnonzero(known)[-OUTLIER_NOW:]]
            lasting = known[recent].any() and out[recent].sum() / known[recent].sum() >= OUTLIER_SHARE
            if lasting or (len(newest) == OUTLIER_NOW and newest.all()):
                outliers.add((line.entity, signal.name))
    return frozenset(outliers)


def _draw_comparison(
    asked: Sequence[tuple[str, Sequence[str]]], chosen: TimeRange, detail: EntityDetail, now: int, key: str
) -> None:
    """Draws (entity, signals) that have data, in two columns; a zoom changes the address."""
    answers = [requests.fetch_comparison([entity], names, chosen.start, chosen.end) for entity, names in asked]
    failed = next((answer for answer in answers if answer.error), None)
    if failed is not None:
        parts.draw_error(failed)
    known = [answer.value for answer in answers if answer.value is not None]
    seen = tuple(signal for one in known for signal in one.signals if signal.has_data())
    if not seen:
        if failed is None:
            st.html(markup.notice(f"No data of {entity_name(asked[0][0])} in this time range."))
        return
    own = frozenset(entity for entity, _ in asked)
    look = Look(130, own, failed is not None, layout="two")
    shown = Comparison(known[0].start, known[0].end, seen)
    picked = time_charts(shown, incident_rows.marks(detail.incidents, now), look, f"chart-{key}")
    if picked:
        ranges.write_range(*picked)
        st.rerun(scope="fragment")


# --- parts and events -----------------------------------------------------------------------------------------------


def _parts(detail: EntityDetail, values: CachedAnswer[Values], now: int) -> None:
    if values.value is None:
        return
    ports, supplies = values.value.of_class("nic"), values.value.of_class("psu")
    collectors = values.value.of_class("collector")
    st.html(markup.section("Ports and links", "a name opens the link with both ends"))
    st.html(tables.device_table(ports, tables.PORT_COLUMNS, "Port", now, extra=tables.far_ends(detail)))
    left, right = st.columns(2, gap="medium")
    with left:
        st.html(markup.section("Power supplies"))
        st.html(tables.device_table(supplies, tables.PSU_COLUMNS, "Power supply", now))
    with right:
        st.html(markup.section("BMC and agent", "what reads this node"))
        health = tables.health_rows(values.value, now)
        st.html(f'<div class="fp-narrow">{html.facts(health, "No BMC and no agent reports its own state.")}</div>')
        st.html(markup.section("Data quality", "collectors of the agent on this node"))
        st.html(tables.device_table(collectors, tables.COLLECTOR_COLUMNS, "Collector", now))


def _happened(detail: EntityDetail, events: CachedAnswer[EventItems], now: int) -> None:
    found = events.value
    more = "" if found is None or not found.truncated else ", older ones are left out"
    st.html(markup.section("Events, findings and data gaps", f"in the time range, newest first{more}"))
    if found is None:
        st.html(markup.notice(events.error, "critical", "No events."))
    else:
        parts.draw_problem(events, "Newest events unknown.")
        rows = happened.rows(found.items[:MAX_EVENTS], now, detail.entity)
        head = ("Time", "Entity", "What", "Meaning")
        empty = "Nothing happened in this time range."
        if events.error:  # only then: history is fetched once a minute
            empty = parts.last_known(empty, events)
        st.html(html.table(head, rows, empty, "fp-events fp-stacked"))
    st.html(markup.section("Past incidents"))
    columns = ("Onset", "Severity", "Title", "Duration", "Relation")
    st.html(html.table(columns, incident_rows.past_rows(detail.incidents, now), "No past incidents are stored."))


def _acts(node: str, now: int) -> None:
    """Draws the acts on the node, and whether it is held now."""
    answer = snapshot.fetch(parse_acts, "acts")
    if answer.value is None:
        st.html(markup.section("Acts") + markup.notice(answer.error, "critical", "Acts unavailable."))
        return
    own = [act for act in answer.value.acts if node in act.targets or node in act.held]
    held = any(act.in_force and node in act.held for act in own)
    state = "held: the scheduler gives it no new work" if held else "not held by Fleetpulse"
    st.html(markup.section("Acts", parts.last_known(state, answer)))
    parts.draw_problem(answer, "Acts unknown.")
    head = ("Act", "State", "Requested by", "Incident", "Since", "Reason")
    empty = parts.last_known("No act was proposed for this node.", answer)
    st.html(markup.table(head, acts.act_rows(own[:MAX_ACTS], now), empty))
    st.html(link(routes.href("acts"), "All acts"))
