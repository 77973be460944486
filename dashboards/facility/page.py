"""`/facility`: all units of cooling and power. `/facility?entity=cdu:c1`: one unit, with trends and its parts."""

from __future__ import annotations

import streamlit as st

from dashboards import linked, links, snapshot
from dashboards import markup as common
from dashboards.answers import parse_series
from dashboards.evidence import TIME_GRID
from dashboards.facility import balance, charts, markup
from dashboards.facility.answers import Facility, Unit, parse_facility
from dashboards.routes import FACILITY_KINDS, href
from dashboards.theme import PALETTES
from dashboards.views import parts
from dashboards.words import age, amount, plain, signal_name
from pipeline.model.entity_names import entity_name
from pipeline.model.records import SECOND, iso
from pipeline.model.signals import CATALOGUE, class_of_entity
from pipeline.runtime.guides import guide

RANGES = {"1h": 3600, "6h": 6 * 3600, "24h": 24 * 3600, "7d": 7 * 24 * 3600}
"""Name in the address -> length of the trends (s)."""
POINTS = 180
"""Points of a trend. Chosen: more than the width of a chart shows."""


def page() -> None:
    """Draws the page."""
    entity = st.query_params.get("entity", "")
    parts.draw_refreshing(lambda: _one(entity) if entity else _all())


def _all() -> None:
    answer = snapshot.fetch(parse_facility, "facility")
    facility = answer.value
    if facility is None:
        parts.draw_head("State of cooling and power unknown", [], "", answer)
        parts.draw_error(answer)
        return
    parts.draw_head(markup.headline(facility), [], "", answer, of_now=True)
    parts.draw_error(answer)
    if not facility.units:
        text = (
            "Configure the BMCs of CDUs and PDUs in [collector.redfish], or name loops in [topology]: "
            f"{guide('redfish.md')}"
        )
        st.html(common.notice(text, "quiet", "Next:"))
        return
    st.html(markup.overview(facility))
    now = _time_of(answer)
    cooling = [u for u in facility.units if u.kind in markup.COOLING]
    power = [u for u in facility.units if u.kind in markup.POWER]
    st.html(linked.anchor("cooling") + common.section("Cooling", _note(cooling)))
    st.html(markup.cooling(cooling, now))
    st.html(linked.anchor("power") + common.section("Power", _note(power)))
    st.html(markup.power(power, now))
    st.html(common.section("Power supplies", "load of the supplies of each node"))
    st.html(balance.supplies(facility.supplies))
    st.html(linked.anchor("leaks") + common.section("Leak detectors"))
    st.html(markup.leaks([u for u in facility.units if u.kind == "leak_detector"], now))
    if facility.more:
        st.html(common.notice(f"{facility.more:,} more units are not listed; the worst are."))


def _time_of(answer: snapshot.CachedAnswer[Facility]) -> int:
    """Returns the time for which the ages of a page are right: while the API is away the units go on sending."""
    return answer.fetched if answer.error else snapshot.now()


def _note(units: list[Unit]) -> str:
    more = len(units) - markup.MAX_ROWS
    return f"the worst first; {more:,} more are not listed" if more > 0 else "the worst first"


def _one(entity: str) -> None:
    crumbs: list[links.Text] = [links.Link("Facility", href("facility")), entity_name(entity)]
    name = entity_name(entity)
    title = name[:1].upper() + name[1:]
    if entity.partition(":")[0] not in FACILITY_KINDS | {"leak_detector", "chassis", "output"}:
        st.html(common.title(title))
        st.html(common.notice("Expected a unit of cooling or power in the address, such as entity=cdu:c1.", "degraded"))
        return
    answer = snapshot.fetch(parse_facility, "facility", within=entity)
    if answer.value is None:
        text = f"{title} is not known" if answer.status == 404 else f"State of {name} unknown"
        parts.draw_head(text, [], "", answer, crumbs=crumbs)
        if answer.status != 404:
            parts.draw_error(answer)
        return
    unit = next(u for u in answer.value.units if u.entity == entity)
    badges, text, now = [markup.state_badge(unit)], _headline(unit, title), _time_of(answer)
    below = markup.last_data(unit, now, bool(answer.error))
    parts.draw_head(text, badges, below, answer, of_now=True, crumbs=crumbs, simulated=unit.simulated)
    parts.draw_error(answer)
    _details(unit, answer.value, now)


def _headline(unit: Unit, title: str) -> str:
    found = unit.throttle
    if found is not None and found.minutes is not None:
        when = "now" if not found.minutes else f"in about {age(found.minutes * 60)}"
        return f"{title}: GPUs throttle {when}"
    if unit.abnormal:
        signal = unit.abnormal[0]
        return f"{title}: {signal_name(signal)} {unit.values[signal]}"
    return title


def _details(unit: Unit, facility: Facility, now: int) -> None:
    if unit.incidents:
        titles = {i.id: plain(i.summary) for i in snapshot.fetch_unresolved().value or ()}
        st.html(markup.open_incidents(unit, titles))
    if box := markup.prediction(unit, facility.window_s):
        st.html(box)
    left, right = st.columns([1.25, 1], gap="medium")
    with left:
        _trends(unit, snapshot.now())
    with right:
        st.html(common.section("Now"))
        st.html(f'<div class="fp-narrow">{markup.facts(unit, now)}</div>')
        st.html(common.section("Supplies"))
        st.html(markup.hanging_lists(unit))
    below = [u for u in facility.units if u.entity != unit.entity]
    for name, kinds, draw in (
        ("Cooling parts", markup.COOLING, markup.cooling),
        ("Power parts", markup.POWER, markup.power),
        ("Leak detectors", ("leak_detector",), markup.leaks),
    ):
        own = [u for u in below if u.kind in kinds]
        if own:
            st.html(common.section(name, amount(len(own), "part", "parts")))
            st.html(draw(own, now))


def _trends(unit: Unit, now: int) -> None:
    asked = st.query_params.get("range", "1h")
    st.session_state["facility_range"] = asked if asked in RANGES else "1h"
    st.segmented_control(
        "Range", list(RANGES), key="facility_range", label_visibility="collapsed", on_change=_write_range
    )
    length = RANGES[st.session_state["facility_range"] or "1h"] * SECOND
    end = now // TIME_GRID * TIME_GRID
    palette = PALETTES["dark" if st.context.theme.type == "dark" else "light"]
    drawn = 0
    for signal in _charted(unit):
        given = {"entity": unit.entity, "signal": signal, "from": iso(end - length), "to": iso(end)}
        fresh = snapshot.fetch(parse_series, "series", **given, peers="class", points=str(POINTS))
        answer = snapshot.keep_last(("trend", unit.entity, signal, str(length)), fresh)
        if answer.value is not None and any(p.value is not None for p in answer.value.points):
            st.html(common.section(signal_name(signal), _peers(answer.value.peers)))
            st.altair_chart(charts.trend(answer.value, palette), key=f"trend-{signal}")
            drawn += 1
        elif answer.error:
            parts.draw_error(answer)
    if not drawn:
        st.html(common.notice("No readings of this unit in this time range."))


def _charted(unit: Unit) -> list[str]:
    """Returns the signals with a chart: those that the unit reports, of a silent one all of its class."""
    if unit.values:
        return [name for name in charts.TRENDS if unit.number(name) is not None]
    return [name for name in charts.TRENDS if CATALOGUE[name].device_class == class_of_entity(unit.entity)]


def _peers(number: int) -> str:
    """Returns what the unit's line is drawn beside."""
    if number < 2:
        return "dashed: the one other unit of its kind" if number else ""
    return f"median and middle 80 % of {number:,} others"


def _write_range() -> None:
    """Writes the range into the address; a second click selects the default."""
    st.query_params["range"] = st.session_state["facility_range"] or "1h"
