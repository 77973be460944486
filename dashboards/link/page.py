"""`/link?entity=`: both ends of a link, its optics, errors as rates, flaps, history, and neighbours on the leaf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

import numpy as np
import streamlit as st

from dashboards import links, markup, routes, snapshot
from dashboards.devices import cells, happened, html, ranges, requests
from dashboards.devices.answers import Compared, Comparison, EntityDetail, EventItems, Values
from dashboards.devices.html import entity_link, explore_href, link
from dashboards.devices.ranges import TimeRange
from dashboards.link import signals
from dashboards.link.ends import Ends, error_notes, flap_text, marks, merge_events, open_lists, past_rows, state_text
from dashboards.node import identity
from dashboards.snapshot import CachedAnswer
from dashboards.time_chart.component import Look, signal_title, time_charts
from dashboards.views import parts
from dashboards.words import age, ago, plain, quantity
from pipeline.model.entity_names import entity_name
from pipeline.model.records import SECOND
from pipeline.runtime.guides import guide

MAX_NEIGHBOURS = 64
"""Ports of the leaf that are listed. Chosen: those of one switch."""
MAX_EVENTS = 40
"""Rows of events. Chosen: a screen."""
NO_ERRORS = "No errors counted."
EXPECTED = "Expected a port or NVLink in the address: /link?entity=port:NODE.mlx5_0"
_PEER_NAMES = ("peer_name", "peer", "peer_system", "peer_guid")


def page() -> None:
    """Draws the page of the link in the address."""
    asked = st.query_params.get("entity", "").strip()
    if asked.partition(":")[0] not in ("port", "nvlink") or not asked.partition(":")[2]:
        st.html(markup.title("Link"))
        st.html(markup.notice(EXPECTED, "degraded", "No link selected."))
        return
    parts.draw_refreshing(lambda: _body(asked))


def _body(asked: str) -> None:
    answer = requests.fetch_entity(asked)
    detail = answer.value
    name = plain(entity_name(asked))
    if detail is None:
        if answer.status == 404:
            st.html(markup.title("Link"))
            text = "No inventory and no telemetry names it. Search for its node, whose page lists the ports."
            st.html(markup.notice(text, "degraded", f"{name} is not known."))
        else:
            parts.draw_head(name, [], "", answer)
            parts.draw_error(answer)
        return
    now = snapshot.now()
    peer = far_end(detail)
    known_peer = requests.fetch_entity(peer).value if peer else None
    values = requests.fetch_values(asked, [c.signal for c in signals.END_COLUMNS])
    chosen = ranges.read_range(now)
    events = requests.fetch_events(asked, chosen.start, chosen.end)
    far_events = None if known_peer is None else requests.fetch_events(peer, chosen.start, chosen.end).value
    ends = Ends(detail, known_peer, events.value, far_events)
    _head(ends, peer, answer, values, now)
    _ends(detail, known_peer, peer, values, now)
    ranges.draw_range(chosen, now, "link-range")
    _charts(ends, peer, chosen, now)
    _neighbours(detail, now)
    _happened(ends, events, now)


def far_end(detail: EntityDetail) -> str:
    """Returns the entity at the far end if inventories of both ends name it, else an empty text."""
    said = detail.attributes.get("peer")
    return detail.links.get(detail.entity) or (said if isinstance(said, str) and ":" in said else "")


def _head(both: Ends, peer: str, answer: CachedAnswer[EntityDetail], values: CachedAnswer[Values], now: int) -> None:
    detail = both.here
    ends = plain(entity_name(detail.entity)) + (f" to {entity_name(peer)}" if peer else "")
    st.html(links.breadcrumbs([*links.entity_crumbs(detail.above), entity_name(detail.entity)]))
    since = parts.unknown_since(answer, snapshot.fetch_fleet_of(), now)
    badges, state = [state_badge(values.value, detail.entity, now)], parts.statement(state_text(both), since, now)
    parts.draw_head(ends, badges, state, answer, simulated=detail.simulated)
    parts.draw_error(answer)
    if lines := open_lists(both, now):
        st.html(lines)


def state_badge(values: Values | None, entity: str, now: int) -> str:
    """Returns UP, DOWN or STATE UNKNOWN: without a row for a minute it is unknown."""
    own = None if values is None else values.of_class("nvlink" if entity.startswith("nvlink:") else "nic")
    if own is None or entity not in own.entities:
        return markup.badge("STATE UNKNOWN", "quiet")
    seen = own.last_seen[own.entities.index(entity)]
    value = own.value(f"{own.device_class}.state", entity)
    signal = own.signals.get(f"{own.device_class}.state")
    if signal is None or value is None or seen is None or now - seen > 60 * SECOND:
        return markup.badge("STATE UNKNOWN", "quiet")
    text = cells.text(signal, value)
    return markup.badge(text.upper(), "critical" if signal.normal and text not in signal.normal else "quiet")


# --- both ends ------------------------------------------------------------------------------------------------------


def _ends(
    detail: EntityDetail, peer_detail: EntityDetail | None, peer: str, values: CachedAnswer[Values], now: int
) -> None:
    left, right = st.columns(2, gap="medium")
    with left:
        st.html(markup.section("This end", entity_name(detail.entity)))
        st.html(f'<div class="fp-narrow">{html.facts(_end_rows(detail, values.value, now))}</div>')
        if values.value is None:
            st.html(markup.notice(values.error, "critical", "No newest values."))
        else:
            parts.draw_problem(values, "Newest values unknown.")
    with right:
        st.html(markup.section("Far end", entity_name(peer) if peer else "not monitored"))
        if peer_detail is None:
            st.html(far_end_notice(detail, peer))
            return
        far = requests.fetch_values(peer, [c.signal for c in signals.END_COLUMNS])
        st.html(f'<div class="fp-narrow">{html.facts(_end_rows(peer_detail, far.value, now))}</div>')


def _end_rows(detail: EntityDetail, values: Values | None, now: int) -> list[tuple[str, str]]:
    """Returns (label, markup) of one end: where, state, optics, then what the inventory says."""
    rows = [(label, shown) for label, shown in identity.place_rows(detail) if label not in ("Site", "PDU", "CDU")]
    own = None if values is None else next((c for c in values.classes.values() if detail.entity in c.entities), None)
    for column in signals.END_COLUMNS if own else ():
        signal = own.signals.get(column.signal) if own else None
        value = own.value(column.signal, detail.entity) if own else None
        if signal is None or value is None:
            continue
        peers = f" (peers {cells.measured(signal.median, signal)})" if signal.median is not None else ""
        chart = explore_href([detail.entity], [column.signal])
        rows.append((column.title, cells.cell(column, signal, value, chart) + escape(peers)))
    if own:
        seen = own.last_seen[own.entities.index(detail.entity)]
        rows.append(("Last data", escape("never" if seen is None else ago(seen, now))))
    rows += identity.attribute_rows(detail.attributes)
    if detail.kind == "port" and not any(str(k).startswith("module_") for k in detail.attributes):
        rows.append(("Cable or transceiver", "not read: the collector ethtool reads it where the driver allows it"))
    return rows


def far_end_notice(detail: EntityDetail, peer: str) -> str:
    """Returns the known facts of a far end that nothing monitors, and how to monitor it, as markup."""
    above = next((e for e in detail.above if e.partition(":")[0] in ("leaf", "switch", "spine")), None)
    said = next((str(detail.attributes[k]) for k in _PEER_NAMES if detail.attributes.get(k)), "")
    known = [f"Switch: {entity_link(above)}." if above else "", f"Reported as {escape(said)}." if said else ""]
    if peer:
        known.append(f"Named {entity_link(peer)}, but it sends no data.")
    if detail.kind == "nvlink":
        fix = "The other end of an NVLink has no counters: those of this GPU cover both directions."
    else:
        fix = (
            "On InfiniBand, a fabric agent monitors it. On Ethernet, LLDP on the node names the switch port; its "
            f"counters are not read (no SNMP or gNMI). See {guide('fabric.md')}."
        )
    lead = "<b>Far end not monitored.</b> Errors and flaps here may have their cause there."
    return f'<div class="fp-notice" role="status">{lead} {" ".join(filter(None, known))} {escape(fix)}</div>'


# --- charts ---------------------------------------------------------------------------------------------------------


def _charts(both: Ends, peer: str, chosen: TimeRange, now: int) -> None:
    detail = both.here
    ends = [detail.entity, *([peer] if peer else [])]
    asked = [signals.LEVELS[detail.kind], *signals.ERRORS[detail.kind]]
    found = [requests.fetch_comparison(ends, names, chosen.start, chosen.end) for names in asked]
    failed = next((answer for answer in found if answer.error), None)
    if failed is not None:
        parts.draw_error(failed)
    counters = list(zip(asked, found, strict=True))[1:]
    unread = [name for names, answer in counters if answer.value is None for name in names]
    stale = next((answer for _, answer in counters if answer.error), None)
    quiet = NO_ERRORS if stale is None else parts.last_known(NO_ERRORS, stale)
    known = [answer.value for answer in found if answer.value is not None]
    if not known:
        return
    merged = signals.with_bit_error_rate(
        Comparison(known[0].start, known[0].end, tuple(signal for one in known for signal in one.signals))
    )
    errors = [s for s in merged.signals if s.kind == "counter" and "bytes" not in s.name and "data" not in s.name]
    levels = [s for s in merged.signals if s not in errors and s.has_data()]
    bad = [signals.convert_to_hours(s) for s in errors if signals.has_errors(s)]
    st.html(markup.section("Error counters", f"rates in the time range; {flap_text(both)}"))
    st.html(error_table(errors, both.entities, unread, quiet))
    st.html(markup.section("History", "this end and the band of its peers" + (", far end beside it" if peer else "")))
    shown = replace(merged, signals=(*bad, *levels))
    if not shown.signals:
        st.html(markup.notice("No data of this link in this time range."))
        return
    picked = time_charts(
        shown, marks(both, now), Look(120, frozenset({detail.entity}), failed is not None, layout="two"), "link"
    )
    if picked:
        ranges.write_range(*picked)
        st.rerun(scope="fragment")


def error_table(errors: list[Compared], ends: Sequence[str], unread: Sequence[str] = (), none: str = NO_ERRORS) -> str:
    """Returns each counter that was read at an end, all per hour: on average, its highest point, and the average of
    this end's peers. unread: counters without an answer, of which nothing is known.  none: said if all are zero."""
    rows, quiet = [], []
    for signal in errors:
        title = signal_title(signal.name, signal.help).partition(": ")[2]
        lines = [one for end in ends for one in signal.lines if one.entity == end and np.isfinite(one.values).any()]
        if lines and not any((one.values > 0).any() for one in lines):
            quiet.append(title)
            continue
        for line in lines:
            peers = _per_hour(signal.band[0]) if signal.band is not None and line.entity == ends[0] else ""
            highest = quantity(float(np.nanmax(line.values)) * 3600)
            end = [entity_link(line.entity)] if len(ends) > 1 else []
            chart = link(explore_href([line.entity], [signal.name]), title)
            rows.append([chart, *end, escape(_per_hour(line.values)), escape(highest), escape(peers)])
    head = ("Counter", *(("End",) if len(ends) > 1 else ()), "Mean per hour", "Highest per hour", "Peers per hour")
    empty = "Errors unknown." if unread else none if quiet else "No error counter was read."
    unknown = [signal_title(name, "").partition(": ")[2] for name in unread]
    return html.table(head, rows, empty) + error_notes(quiet, unknown)


def _per_hour(rates: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> str:
    known = rates[np.isfinite(rates)]
    return quantity(float(known.mean()) * 3600) if len(known) else "no data"


# --- neighbours and events ------------------------------------------------------------------------------------------


def _neighbours(detail: EntityDetail, now: int) -> None:
    leaf = next((e for e in detail.above if e.partition(":")[0] in ("leaf", "switch")), None)
    if leaf is None:
        st.html(markup.section("Neighbours", "no leaf switch known"))
        return
    answer = requests.fetch_values(leaf, [c.signal for c in signals.NEIGHBOUR_COLUMNS])
    st.html(markup.section("Neighbours on the same leaf switch", entity_name(leaf)))
    if answer.value is None:
        st.html(markup.notice(answer.error, "critical", "No neighbours."))
        return
    ports = answer.value.of_class("nic")
    shown = cells.present(signals.NEIGHBOUR_COLUMNS, ports)
    rows = []
    for i, entity in enumerate(ports.entities[:MAX_NEIGHBOURS]):
        seen = ports.last_seen[i]
        old = seen is None or now - seen > 60 * SECOND
        since = "" if not old else " no data" + ("" if seen is None else f" for {age((now - seen) / SECOND)}")
        name = entity_link(entity) + (f' <span class="fp-silent">{escape(since.strip())}</span>' if old else "")
        name = f'<b class="fp-focus">{name}</b>' if entity == detail.entity else name
        found = [cells.cell(c, ports.signals[c.signal], ports.signals[c.signal].values[i]) for c in shown]
        rows.append([name, *found])
    more = len(ports.entities) + ports.left_out - len(rows)
    st.html(html.table(["Port", *(c.title for c in shown)], rows, "No port of it sends data.", "fp-devices"))
    if more > 0:
        st.html(link(routes.entity_href(leaf), f"{more:,} more ports of {entity_name(leaf)}"))


def _happened(both: Ends, events: CachedAnswer[EventItems], now: int) -> None:
    st.html(markup.section("Events and findings", "in the time range, newest first"))
    if events.value is None:
        st.html(markup.notice(events.error, "critical", "No events."))
    else:
        parts.draw_problem(events, "Newest events unknown.")
        rows = happened.rows(merge_events(both)[:MAX_EVENTS], now, both.here.entity)
        empty = "Nothing happened in this time range."
        if events.error:  # only then: history is fetched once a minute
            empty = parts.last_known(empty, events)
        st.html(html.table(("Time", "Entity", "What", "Meaning"), rows, empty, "fp-events"))
    st.html(markup.section("Past incidents"))
    head = ("Onset", "Severity", "Title", "Duration", "Relation")
    st.html(html.table(head, past_rows(both, now), "No past incidents are stored."))
