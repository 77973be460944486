"""HTML of the page Facility."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from dashboards import linked
from dashboards.facility import balance
from dashboards.facility.answers import Facility, Hanging, Prediction, Unit
from dashboards.links import as_markup, entity_link, incident_link
from dashboards.markup import badge, notice_of, simulated_badge
from dashboards.words import (
    NODE_STATE,
    age,
    ago,
    amount,
    clock,
    joined,
    percent,
    quantity,
    reading,
    signal_name,
    silence,
)
from pipeline.model.entity_names import KINDS, entity_name
from pipeline.model.signals import CATALOGUE

COOLING = ("cdu", "loop", "connector", "pump", "reservoir", "filter")
POWER = ("pdu", "shelf", "chassis", "circuit", "outlet", "output")
MAX_ROWS = 200
"""Units listed per table. Chosen: the worst come first; an address with `entity` has any other."""
NO_VALVE = (
    '<p class="fp-empty">No connector reports the position of its valve (CoolantConnector ValvePositionPercent of '
    "Redfish).</p>"
)
_COOLING_HEAD: Sequence[str] = (
    *("Unit", "Throttling", "Flow", "Supply", "Return", "ΔT", "Pressure", "Pump", "Valve", "Supplies"),
    "Incidents",
)
NO_BALANCE = (
    '<p class="fp-empty">No PDU reports the currents of its phases, and no two supply the same racks: their balance is '
    "not known.</p>"
)
SOON = 60.0
"""Minutes to throttling from which it is urgent. Chosen: a technician's way."""


def delta(unit: Unit) -> float | None:
    """Returns return minus supply temperature (K): measured, else of the two temperatures."""
    measured = unit.number("coolant.delta_temperature")
    supply, back = unit.number("coolant.supply_temperature"), unit.number("coolant.return_temperature")
    return measured if measured is not None or supply is None or back is None else back - supply


def load(unit: Unit) -> tuple[float | None, str]:
    """Returns the power drawn as a share of the limit, and which limit: set, or of the supplies."""
    draw = unit.number("power.draw")
    for signal, word in (("power.limit", "limit"), ("power.capacity", "capacity")):
        limit = unit.number(signal)
        if draw is not None and limit:
            return draw / limit, f"{word} {watts(limit)}"
    share = unit.number("power.load")
    return share, "limit" if share is not None else "no limit reported"


def headline(facility: Facility) -> str:
    """Returns the worst of cooling and power in one sentence."""
    if not facility.units:
        return "No unit of cooling or power is known"
    soonest = find_soonest(facility.units)
    bad = {
        state: sum(counts.get(state, 0) for counts in facility.counts.values())
        for state in ("critical", "degraded", "no_data")
    }
    texts = [f"{number:,} {NODE_STATE[state]}" for state, number in bad.items() if number and state != "no_data"]
    total = amount(sum(n for c in facility.counts.values() for n in c.values()), "unit", "units")
    text = f"{joined(texts)} of {total}" if texts else f"No {'problem' if soonest is None else 'incident'} on {total}"
    if bad["no_data"]:
        text += f", {bad['no_data']:,} without data"
    if soonest is None:
        return text
    throttle = f"GPUs behind {entity_name(soonest.entity)} throttle {_minutes_text(soonest)}"
    return f"{text}; {throttle}" if texts else f"{throttle}; {text[:1].lower()}{text[1:]}"  # what is wrong comes first


def _minutes_text(unit: Unit) -> str:
    minutes = None if unit.throttle is None else unit.throttle.minutes
    return "now" if not minutes else f"in about {age(minutes * 60)}"


def find_soonest(units: Iterable[Unit]) -> Unit | None:
    """Returns the unit whose GPUs throttle first, None if none is predicted."""
    found = [(u.throttle.minutes, u.entity, u) for u in units if u.throttle and u.throttle.minutes is not None]
    return min(found)[2] if found else None


def overview(facility: Facility) -> str:
    """Returns the figures at the top."""
    power = [u for u in facility.units if u.kind in POWER]
    cooling = [u for u in facility.units if u.kind in COOLING]
    return linked.tiles(
        (
            _state_tile("cooling units ok", cooling, "#cooling"),
            _throttle_tile(cooling),
            _leak_tile([u for u in facility.units if u.kind == "leak_detector"]),
            _state_tile("power units ok", power, "#power"),
            _load_tile(power),
            _draw_tile([u for u in power if u.kind == "pdu"]),
        )
    )


def _throttle_tile(cooling: Sequence[Unit]) -> str:
    """Returns the tile of the first throttling; without a GPU whose distance to its limit is known it is unknown."""
    soonest = find_soonest(cooling)
    if soonest is None or soonest.throttle is None:
        asked = [u.throttle for u in cooling if u.throttle]
        blind = sum(not found.gpus for found in asked)
        if blind == len(asked):
            why = "no GPU reports its limit" if asked else "no GPU behind a cooling unit"
            return linked.tile("unknown", "time to throttling", why, "no-data" if asked else "none", "#cooling")
        below = f"unknown for {amount(blind, 'unit', 'units')}" if blind else ""
        return linked.tile("none", "throttling predicted", below, "none", "#cooling")
    below = f"{entity_name(soonest.entity)}, {amount(soonest.nodes.count, 'node', 'nodes')}"
    tone = "critical" if (soonest.throttle.minutes or 0) < SOON else "none"
    return linked.tile(_short_minutes(soonest), "to throttling", below, tone, "#cooling")


def _draw_tile(pdus: Sequence[Unit]) -> str:
    """Returns the tile of the power drawn; it names the PDUs that the sum lacks."""
    draws = [d for u in pdus if (d := u.number("power.draw")) is not None]
    if not draws:
        return linked.tile("unknown", "drawn by all PDUs", "" if pdus else "no PDU is read", "none", "#power")
    missing = len(pdus) - len(draws)
    if not missing:
        return linked.tile(watts(sum(draws)), "drawn by all PDUs", "", "none", "#power")
    word = f"drawn by {len(draws):,} of {amount(len(pdus), 'PDU', 'PDUs')}"
    return linked.tile(watts(sum(draws)), word, f"{missing:,} without data", "no-data", "#power")


def _leak_tile(detectors: Sequence[Unit]) -> str:
    wet = [u for u in detectors if u.values.get("leak.state") in ("warning", "critical")]
    blind = sum(u.state == "no_data" or "leak.state" not in u.values for u in detectors)
    below = f"{len(detectors):,} detectors" + (f", {blind:,} without data" if blind else "")
    tone = "critical" if wet else "watch" if blind else "none"
    return linked.tile(f"{len(wet):,}", "leaks", below if detectors else "no detector", tone, "#leaks")


def _load_tile(power: Sequence[Unit]) -> str:
    loads = [(share, u.entity) for u in power if (share := load(u)[0]) is not None]
    if not loads:
        return linked.tile("unknown", "highest load", "no limit is reported", "none", "#power")
    share, entity = max(loads)
    return linked.tile(
        percent(share), "highest load", entity_name(entity), "degraded" if share > 0.9 else "none", "#power"
    )


def _short_minutes(unit: Unit) -> str:
    minutes = unit.throttle.minutes if unit.throttle else None
    return "now" if not minutes else age(minutes * 60)


def _state_tile(word: str, units: Sequence[Unit], address: str) -> str:
    ok = sum(u.state == "ok" for u in units)
    blind = sum(u.state == "no_data" for u in units)
    bad = [u.state for u in units if u.state in ("critical", "degraded", "watch")]
    tone = "critical" if "critical" in bad else "degraded" if bad else "no-data" if blind else "none"
    below = f"{blind:,} without data" if blind else ("" if units else "none known")
    return linked.tile(f"{ok:,}/{len(units):,}", word, below, tone, address)


def describe_silence(unit: Unit, now: int) -> str:
    """Returns for how long a unit has sent no data, empty while it sends some."""
    return "" if unit.values else silence(unit.last_seen, now)


def last_data(unit: Unit, now: int, is_stale: bool = False) -> str:
    """Returns when a unit last sent data, as the line below its headline; first of all that it is silent.

    is_stale: newer data than that of `now` is not known, so that the age of the last is not either.
    """
    silent = describe_silence(unit, now)
    if unit.last_seen is None:
        return "No data of this unit has arrived yet." if silent else ""
    if silent:
        return f"{silent[:1].upper()}{silent[1:]}: last data {clock(unit.last_seen, now)}. Its state now is unknown."
    return f"Last data {clock(unit.last_seen, now) if is_stale else ago(unit.last_seen, now)}"


def _name_cell(unit: Unit, now: int) -> str:
    silent = describe_silence(unit, now)
    note = f' <span class="fp-silent">{escape(silent)}</span>' if silent else ""
    return f"{as_markup(entity_link(unit.entity))} {state_badge(unit)} {simulated_badge(unit.simulated)}{note}"


def state_badge(unit: Unit) -> str:
    """Returns the badge of the unit's state."""
    tone = unit.state if unit.state in ("critical", "degraded", "watch") else "quiet"
    return badge(NODE_STATE[unit.state].upper(), tone)


def cooling(units: Sequence[Unit], now: int) -> str:
    """Returns the table of cooling units, the worst first, with the median of all CDUs and loops."""
    valves = find_valves(units)
    rows: list[Sequence[str]] = [
        (
            _name_cell(u, now),
            _throttle_cell(u.throttle),
            _value(u.number("coolant.flow"), "L/min"),
            _value(u.number("coolant.supply_temperature"), "Cel"),
            _value(u.number("coolant.return_temperature"), "Cel"),
            _value(delta(u), "K"),
            _value(_pressure(u), "bar"),
            _pump(u),
            _valve(u, valves),
            hangs(u),
            _incidents(u),
        )
        for u in units[:MAX_ROWS]
    ]
    if len(units) > 2:
        rows.append(_median_row(units))
    head, note = _COOLING_HEAD, ""
    if units and not valves:
        (head, rows), note = _drop_column("Valve", head, rows), NO_VALVE
    return linked.table(head, rows, "No cooling unit is known: no BMC of a CDU is read.", "Cooling units") + note


def _drop_column(
    name: str, head: Sequence[str], rows: Iterable[Sequence[str]]
) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Returns head and rows of a table without one of its columns."""
    at = head.index(name)
    return (*head[:at], *head[at + 1 :]), [(*row[:at], *row[at + 1 :]) for row in rows]


def find_valves(units: Iterable[Unit]) -> dict[str, Unit]:
    """Returns unit -> the least open of the connectors that it consists of or is, for those that report a valve."""
    found: dict[str, Unit] = {}
    for unit in units:
        opening = unit.number("coolant.valve_position")
        if opening is None:
            continue
        for name in (unit.entity, *unit.parents):
            known = found.get(name)
            if known is None or opening < (known.number("coolant.valve_position") or 0.0):
                found[name] = unit
    return found


def _valve(unit: Unit, valves: Mapping[str, Unit]) -> str:
    """Returns how far the valve of a unit is open, of several the least, with its connector."""
    found = valves.get(unit.entity)
    opening = None if found is None else found.number("coolant.valve_position")
    if found is None or opening is None:
        return ""
    text = f"{percent(opening)} open"
    return text if found is unit else f"{text}, {linked.entity_link(found.entity)}"


def _median_row(units: Sequence[Unit]) -> tuple[str, ...]:
    """Returns the medians over all units, to compare with."""

    def middle(values: Iterable[float | None], unit: str) -> str:
        known = [v for v in values if v is not None]
        return _value(statistics.median(known), unit) if len(known) > 2 else ""

    return (
        "<i>Median of all</i>",
        "",
        middle((u.number("coolant.flow") for u in units), "L/min"),
        middle((u.number("coolant.supply_temperature") for u in units), "Cel"),
        middle((u.number("coolant.return_temperature") for u in units), "Cel"),
        middle(map(delta, units), "K"),
        middle(map(_pressure, units), "bar"),
        middle((u.number("pump.speed") for u in units), "rpm"),
        "",
        "",
        "",
    )


def _pressure(unit: Unit) -> float | None:
    """Returns the pressure difference, else supply less return pressure."""
    found = unit.number("coolant.pressure")
    supply, back = unit.number("coolant.supply_pressure"), unit.number("coolant.return_pressure")
    return found if found is not None or supply is None else supply - (back or 0.0)


def _pump(unit: Unit) -> str:
    """Returns speed and status of the pump."""
    speed, share = unit.number("pump.speed"), unit.number("pump.speed_ratio")
    text = _value(speed, "rpm") if speed is not None else "" if share is None else percent(share)
    words = [str(unit.values[name]) for name in unit.abnormal if name.startswith(("pump", "coolant"))]
    return " ".join([text, *(badge(word.upper(), "degraded") for word in words)])


def _value(value: float | None, unit: str) -> str:
    return (
        '<span class="fp-unknown">not measured</span>' if value is None else _one_line(quantity(round(value, 2), unit))
    )


def _one_line(text: str) -> str:
    """Returns a number with its unit as markup that no narrow column breaks in two."""
    return f'<span class="fp-one-line">{escape(text)}</span>'


def watts(value: float) -> str:
    """Returns a power in W, or from 10 kW on in kW."""
    return f"{value / 1000:,.0f} kW" if 10_000 <= value < 1e6 else quantity(value, "W")


def _watts(value: float | None) -> str:
    return _value(None, "W") if value is None else escape(watts(value))


def _throttle_cell(prediction: Prediction | None) -> str:
    if prediction is None:
        return '<span class="fp-unknown">no GPU behind it</span>'
    if prediction.minutes is None:
        return f'<span class="fp-unknown">not predictable: {escape(prediction.reason)}</span>'
    text = "now" if not prediction.minutes else f"in {age(prediction.minutes * 60)}"
    return badge(text.upper(), "critical" if prediction.minutes < SOON else "degraded")


def hangs(unit: Unit, most: int = 2) -> str:
    """Returns what depends on a unit: the first racks and jobs as links, and numbers."""
    texts = []
    for kind, hanging in (("rack", unit.racks), ("job", unit.jobs)):
        if hanging.count:
            texts.append(_few(hanging, kind, most))
    if unit.nodes.count:
        texts.append(amount(unit.nodes.count, "node", "nodes"))
    return "; ".join(texts)


def _few(hanging: Hanging, kind: str, most: int) -> str:
    names = linked.entity_links(hanging.first[:most], hanging.count, short=True)
    return f"{KINDS[kind][0 if hanging.count == 1 else 1]} {names}"


def open_incidents(unit: Unit, titles: Mapping[str, str]) -> str:
    """Returns the unresolved incidents of a unit as links with their titles, below its headline."""
    shown = ", ".join(as_markup(incident_link(i, titles.get(i, ""))) for i in unit.incidents[:5])
    more = f" and {len(unit.incidents) - 5:,} more" if len(unit.incidents) > 5 else ""
    tone = unit.state if unit.state in ("critical", "degraded") else "degraded"
    return notice_of("Unresolved:", shown + more, tone)


def _incidents(unit: Unit) -> str:
    shown = ", ".join(as_markup(incident_link(i)) for i in unit.incidents[:3])
    return shown + (f" and {len(unit.incidents) - 3:,} more" if len(unit.incidents) > 3 else "")


def power(units: Sequence[Unit], now: int) -> str:
    """Returns the table of power units."""
    rows: list[Sequence[str]] = []
    for u in units[:MAX_ROWS]:
        share, limit = load(u)
        words = [f"{signal_name(n)}: {u.values[n]}" for n in u.abnormal]
        rows.append(
            (
                _name_cell(u, now),
                _watts(u.number("power.draw")),
                (f"{_bar(share)} " if share is not None else "") + f'<span class="fp-unknown">{escape(limit)}</span>',
                _value(u.number("power.voltage"), "V"),
                balance.cell(u.balance),
                " ".join(badge(word.upper(), "degraded") for word in words) or "normal",
                hangs(u),
                _incidents(u),
            )
        )
    head: Sequence[str] = ("Unit", "Draw", "Of its limit", "Voltage", "Balance", "Status", "Supplies", "Incidents")
    at, note = head.index("Balance"), ""
    if rows and not any(row[at] for row in rows):
        (head, rows), note = _drop_column("Balance", head, rows), NO_BALANCE
    return linked.table(head, rows, "No PDU or power shelf is known: no BMC of one is read.", "Power units") + note


def _bar(share: float) -> str:
    tone = "critical" if share > 1 else "degraded" if share > 0.9 else "ok"
    width = max(0, min(100, round(share * 100)))
    meter = f'<i class="fp-meter fp-meter-{tone}"><i style="width:{width}%"></i></i>'
    return f'<b class="fp-share">{percent(share)}</b>{meter}'


def leaks(units: Sequence[Unit], now: int) -> str:
    """Returns leak detectors that are not dry; the dry ones are counted."""
    dry = [u for u in units if u.values.get("leak.state") in ("ok", "absent")]
    rows = [
        (
            as_markup(entity_link(u.entity)),
            badge(str(u.values.get("leak.state", "no data")).upper(), "critical" if u.abnormal else "quiet"),
            ", ".join(as_markup(entity_link(p)) for p in u.parents[:2] or u.racks.first[:2]),
            "never" if u.last_seen is None else escape(ago(u.last_seen, now)),
            _incidents(u),
        )
        for u in units
        if u not in dry
    ]
    text = f'<p class="fp-empty">{amount(len(dry), "detector is", "detectors are")} dry.</p>' if dry else ""
    empty = "" if dry else "No leak detector is known."
    head = ("Detector", "State", "Where", "Last data", "Incidents")
    return (linked.table(head, rows[:MAX_ROWS], empty, "Leak detectors") if rows or empty else "") + text


def facts(unit: Unit, now: int) -> str:
    """Returns all current values of a unit."""
    rows = [
        (_label(name), _fact(value, name) if isinstance(value, float) else value)
        for name, value in unit.values.items()
        if name in CATALOGUE
    ]
    difference = delta(unit)
    if difference is not None and "coolant.delta_temperature" not in unit.values:
        rows.append(("Return minus supply", quantity(round(difference, 2), "K")))
    share, limit = load(unit)
    if share is not None:
        rows.append(("Load", f"{percent(share)} of {limit}"))
    rows.append(("Last data", "never" if unit.last_seen is None else ago(unit.last_seen, now)))
    body = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(str(v))}</dd></div>" for k, v in rows)
    return f'<dl class="fp-facts">{body}</dl>'


def _fact(value: float, signal: str) -> str:
    unit = CATALOGUE[signal].unit
    return watts(value) if unit == "W" else reading(round(value, 3), signal, unit)


def _label(name: str) -> str:
    text = signal_name(name)
    return text[:1].upper() + text[1:]


def prediction(unit: Unit, window_s: float) -> str:
    """Returns when the GPUs behind a unit throttle, and how that is computed."""
    found = unit.throttle
    if found is None:
        return ""
    if found.minutes is None:
        text = f"Not predictable: {found.reason}."
        if found.left is not None and found.gpu:
            text += f" {entity_name(found.gpu)} is nearest to its limit: {quantity(found.left, 'K')} left."
        return _box("Throttling", escape(text), "quiet")
    gpu = as_markup(entity_link(found.gpu or ""))
    if not found.rate or found.left is None:
        return _box("Throttling now", f"{gpu} is at the limit that it reports.", "critical")
    how = (
        f"{gpu} is {quantity(found.left, 'K')} below the limit that it reports. The "
        f"{amount(found.gpus, 'GPU', 'GPUs')} with the least margin warm by {found.rate:.2f} ± {found.error or 0:.2f} "
        f"K/min (line through the last {age(found.over_s or window_s)}). {quantity(found.left, 'K')} ÷ "
        f"{found.rate:.2f} K/min = {age(found.minutes * 60)}."
    )
    tone = "critical" if found.minutes < SOON else "degraded"
    return _box(f"GPUs throttle in about {age(found.minutes * 60)}", how, tone)


def _box(heading: str, text: str, tone: str) -> str:
    role = "alert" if tone == "critical" else "status"
    return f'<div class="fp-notice fp-notice-{tone}" role="{role}"><b>{escape(heading)}.</b> {text}</div>'


def hanging_lists(unit: Unit) -> str:
    """Returns racks, nodes and jobs of a unit as links."""
    rows = [
        (word, linked.entity_links(hanging.first, hanging.count, short=True))
        for word, hanging in (("Racks", unit.racks), ("Nodes", unit.nodes), ("Jobs", unit.jobs))
        if hanging.count
    ]
    if unit.incidents:
        rows.insert(0, ("Incidents", ", ".join(as_markup(incident_link(i)) for i in unit.incidents)))
    if not rows:
        return '<p class="fp-empty">The topology names nothing below it.</p>'
    body = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in rows)
    return f'<dl class="fp-lines">{body}</dl>'
