"""Contents of an incident's page: main finding, chart, comparison, figures, impact, delivery status.

Times on an axis are those of the zone of the page.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import altair as alt

from dashboards import snapshot, words
from dashboards.answers import IncidentDetail, Mute, Point, Series
from dashboards.devices.cells import throttle_text
from dashboards.theme import Palette
from dashboards.words import amount, axis_label, chart_time, clock, percent, quantity, unit_name, zone_name
from pipeline.model.entity_names import entity_name
from pipeline.model.records import LEVELS, SECOND, Finding, Incident
from pipeline.model.signals import CATALOGUE, class_of_entity

MIN_BEFORE_ONSET = 30 * 60 * SECOND
"""Shortest time shown before the onset: enough to see the usual level. Chosen."""
TIME_GRID = 10 * SECOND
"""Requested times are rounded to this, so that viewers share one cached response. Chosen."""
MAX_CHART_SIGNALS = 4
"""Signals that are tried until one has data; each costs a request. Chosen."""
MAX_CORROBORATING = 4
"""Other findings that are named; the rest is counted. Chosen."""
COMPARISON_FIELDS = ("value", "expected", "spread", "cohort", "peers", "effect", "unit")
"""Evidence of a finding that compares a device with peers or with its own past."""
HANDLED_FIELDS = ("clears", "corroborated_by", "muted", "mode")
"""Evidence that the comparison or a notice shows, whatever was compared."""
VOTE_FIELDS = ("digest", "expected", "peers", "agreeing")
"""Evidence of a vote: own result, majority result, number of other voters, how many of them agree (optional)."""
SHARES = ("_share", "_below_peers", "_below_stage")
"""Ends of names of evidence that is a share."""
_DECADE = "decade"  # unit of log10 values


@dataclass(frozen=True, slots=True)
class Vote:
    """A vote over one computation. `agreeing`: how many of the others returned the expected result, if known."""

    entity: str
    own: str
    expected: str
    others: int
    agreeing: int | None


def main_finding(detail: IncidentDetail) -> Finding | None:
    """Returns the finding of the incident's entity and detector, else the one with the highest level, else the
    first."""
    incident = detail.incident
    return min(
        detail.findings,
        key=lambda f: (f.entity != incident.entity, f.detector != incident.detector, -LEVELS.index(f.level), f.onset),
        default=None,
    )


def describe_main_finding(finding: Finding, incident: Incident) -> str:
    """Returns the summary of the main finding, with a note if the title has other numbers: the store keeps the
    strongest report of a finding, and the title follows the newest."""
    text, title = words.plain(finding.summary), words.plain(incident.summary)
    own = (finding.entity, finding.detector) == (incident.entity, incident.detector)
    same = title.startswith(text) or text.startswith(title.removesuffix("…").rstrip())
    return f"{text} (strongest report; the title has the newest)" if own and not same else text


# --- comparison -------------------------------------------------------------------------------------


REPORTED_WITHIN = 180 * SECOND
"""A finding older than this, against the newest of its incident, is quiet: three repeats. Chosen."""
MAX_NAMED = 5
"""Findings that a notice names; the timeline has all. Chosen."""


def has_comparison(finding: Finding) -> bool:
    """Returns whether the evidence holds a measured and an expected value with a unit."""
    facts = finding.evidence
    return isinstance(facts.get("unit"), str) and all(_number(facts.get(k)) is not None for k in ("value", "expected"))


def comparison_rows(finding: Finding, detail: IncidentDetail, now: int) -> list[tuple[str, str]]:
    """Returns (label, text): entity, measured against expected, onset, corroboration, clear condition."""
    rows = [("Entity", entity_name(finding.entity))]
    if has_comparison(finding):
        rows += _compared_values(finding)
    rows.append(("Onset", words.ago(finding.onset, now)))
    rows.append(("Corroborated by", _corroboration(finding, detail)))
    if finding not in list_reported(detail):
        return [*rows, ("Last reported", words.ago(finding.time, now))]
    return [*rows, *_clear_condition(finding.evidence.get("clears"))]


def list_reported(detail: IncidentDetail) -> list[Finding]:
    """Returns the findings of an incident that are still reported; of a resolved one, all."""
    newest = max((f.time for f in detail.findings), default=0)
    return [
        f
        for f in detail.findings
        if detail.incident.resolved is not None or f.evidence.get("holds") is True or newest - f.time <= REPORTED_WITHIN
    ]


def quiet_notice(detail: IncidentDetail, now: int) -> str:
    """Returns when the main finding was last reported, and what keeps the incident open; empty while it is."""
    finding, reported = main_finding(detail), sorted(list_reported(detail), key=lambda f: f.onset)
    if finding is None or finding in reported:
        return ""
    named = [f"{f.detector} on {entity_name(f.entity)}" for f in reported]
    rest = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    return (
        f"{entity_name(finding.entity)} was last reported at {words.ago(finding.time, now)}. "
        f"Still reported: {', '.join(named[:MAX_NAMED])}{rest}."
    )


def _compared_values(finding: Finding) -> list[tuple[str, str]]:
    facts = finding.evidence
    value, expected, spread = float(facts["value"]), float(facts["expected"]), _number(facts.get("spread"))
    unit, level_unit = facts["unit"], _level_unit(finding)
    expected_text = _level(expected, level_unit)
    if spread is not None:
        expected_text += f", spread {quantity(spread, 'K' if level_unit == 'Cel' else unit)}"
    return [
        ("Measured", _level(value, level_unit)),
        ("Expected", expected_text),
        ("Compared with", _baseline(facts)),
        ("Difference", _difference(value, expected, level_unit)),
    ]


def _baseline(facts: Mapping[str, Any]) -> str:
    """Returns what the device is compared with: the peers and their number, or its own past."""
    cohort, peers = words.with_entity_names(str(facts.get("cohort") or "")), facts.get("peers")
    if not isinstance(peers, int) or peers < 1:
        return f"its {cohort}" if cohort.startswith("own past") else cohort or "unknown"
    return f"the median of {words.amount(peers, 'peer', 'peers')}" + (f": {cohort}" if cohort else "")


def _level_unit(finding: Finding) -> str:
    """Returns the unit of value and expected: Cel if the difference is in K and the signal in degrees Celsius."""
    unit = str(finding.evidence["unit"])
    first = next((CATALOGUE[name] for name in finding.signals if name in CATALOGUE), None)
    return "Cel" if unit == "K" and first is not None and first.unit == "Cel" else unit


def _level(value: float, unit: str) -> str:
    return f"{10**value:.1e}" if unit == _DECADE else quantity(value, unit)


def _difference(value: float, expected: float, unit: str) -> str:
    """Returns the difference with its unit, and in percent or as a factor where that has a meaning."""
    off = value - expected
    more = "more" if off >= 0 else "less"
    if unit == _DECADE:
        return f"{quantity(10 ** abs(off))} times {more}"
    text = f"{quantity(abs(off), 'K' if unit == 'Cel' else unit)} {more}"
    if unit == "Cel" or expected <= 0:
        return text
    if value >= 2 * expected:
        return f"{text}: {quantity(value / expected)} times as much"
    return f"{text}: {100 * abs(off) / expected:.3g} %"


def _corroboration(finding: Finding, detail: IncidentDetail) -> str:
    """Returns what the detector names as corroboration, else the other findings of the incident."""
    named = finding.evidence.get("corroborated_by")
    if isinstance(named, Mapping):
        return f"{named.get('detector')} on {entity_name(str(named.get('entity')))}"
    if isinstance(named, Sequence) and not isinstance(named, str) and named:
        return words.joined([words.signal_name(str(name)) for name in named])
    others = [f for f in detail.findings if f.detector != finding.detector]
    pairs = list(dict.fromkeys(f"{f.detector} on {entity_name(f.entity)}" for f in others))
    if not pairs:
        return "nothing so far"
    more = [f"{len(pairs) - MAX_CORROBORATING:,} more"] if len(pairs) > MAX_CORROBORATING else []
    return "other findings: " + words.joined([*pairs[:MAX_CORROBORATING], *more])


def _clear_condition(clears: Any) -> list[tuple[str, str]]:
    if not isinstance(clears, str) or not clears:
        return []
    for lead in ("clears when ", "clears with ", "ends when ", "over when ", "over with "):
        clears = clears.removeprefix(lead)
    if clears.endswith("it is over"):
        return [("Status", "over")]
    return [("Clears when", words.with_entity_names(clears))]


def suppression_notice(finding: Finding) -> str:
    """Returns the notice for a muted or only recorded finding; empty if it is neither."""
    muted, mode = finding.evidence.get("muted"), finding.evidence.get("mode")
    if isinstance(muted, Mapping):
        until = words.fact(muted.get("until"))
        return f"Muted until {until}: {muted.get('reason')}. The finding is stored, but sends no alert."
    return "Only recorded: this detector has the mode `record` here. It sends no alert." if mode == "record" else ""


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


# --- chart, vote and figures ------------------------------------------------------------------------


def chart_signals(detail: IncidentDetail) -> list[tuple[str, str]]:
    """Returns (entity, signal) of the charts to try, the most relevant first."""
    first = main_finding(detail)
    ordered = [first, *(f for f in detail.findings if f is not first)] if first else []
    pairs = ((_charted_entity(detail, f.entity, signal), signal) for f in ordered for signal in f.signals)
    return list(dict.fromkeys((entity, signal) for entity, signal in pairs if entity))[:MAX_CHART_SIGNALS]


def _charted_entity(detail: IncidentDetail, entity: str, signal: str) -> str:
    """Returns the entity whose values a chart shows: a leaf has no counters of its ports; empty if none fits."""
    known = CATALOGUE.get(signal)
    if known is None:
        return entity
    explained = (e.entity for e in detail.explanation.explained) if detail.explanation else ()
    candidates = (entity, *detail.incident.members, *explained)
    return next((e for e in candidates if class_of_entity(e) == known.device_class), "")


def chart_span(incident: Incident, now: int, seconds: float = 0) -> tuple[int, int]:
    """Returns start and end (UTC us): from well before the onset until now, or until shortly after the end.

    seconds: length of the range instead (s), which ends at the same time.
    """
    end = now if incident.resolved is None else min(now, incident.resolved + MIN_BEFORE_ONSET // 3)
    end = max(end, incident.onset + TIME_GRID)
    start = incident.onset - max(MIN_BEFORE_ONSET, (end - incident.onset) // 2)
    if seconds:
        start = end - int(seconds * SECOND)
    return start // TIME_GRID * TIME_GRID, end // TIME_GRID * TIME_GRID


def parse_vote(finding: Finding) -> Vote | None:
    """Returns the vote in the evidence, None if there is none."""
    facts = finding.evidence
    own, expected, others, agreeing = (facts.get(name) for name in VOTE_FIELDS)
    if not isinstance(own, str) or not isinstance(expected, str) or not isinstance(others, int):
        return None
    return Vote(finding.entity, own, expected, others, agreeing if isinstance(agreeing, int) else None)


def figure_rows(finding: Finding) -> list[tuple[str, str]]:
    """Returns (label, value with unit) of the evidence that neither the vote nor the comparison shows."""
    hidden = {*HANDLED_FIELDS, *(COMPARISON_FIELDS if has_comparison(finding) else ())}
    hidden.update(VOTE_FIELDS if parse_vote(finding) else ())
    rows: list[tuple[str, str]] = []
    for key, value in finding.evidence.items():
        if key in hidden:
            continue
        if isinstance(value, Mapping):
            known = CATALOGUE.get(key)
            unit = known.unit if known and not known.states else ""
            rows += [
                (f"{words.label(key)}: {words.label(str(k)).lower()}", words.fact(v, unit)) for k, v in value.items()
            ]
        else:
            rows.append((words.label(key), _with_unit(key, value, finding)))
    return rows


def _with_unit(key: str, value: Any, finding: Finding) -> str:
    if key.endswith("_s") and isinstance(value, (int, float)):
        return words.age(value)
    if key == "throttled" and isinstance(value, int) and not isinstance(value, bool):
        return throttle_text(value)
    if key == "odds" and isinstance(value, (int, float)):
        return odds_text(value)
    if key.endswith(SHARES) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return percent(value)
    return words.fact(value, _unit(key, finding))


def odds_text(odds: float) -> str:
    """Returns odds as text: `0.5 to 1`, `more than 1,000,000 to 1`."""
    shown = f"{odds:.3g}" if odds < 10 else f"{min(odds, MOST_ODDS):,.0f}"
    return f"{'more than ' * (odds > MOST_ODDS)}{shown} to 1"


def _unit(key: str, finding: Finding) -> str:
    """Returns the unit of a figure: of the first signal for `value` and `expected`, else of the signal of that name."""
    first = next((CATALOGUE[name] for name in finding.signals if name in CATALOGUE), None)
    if key in ("value", "expected"):
        return first.unit if first else ""
    if key.endswith("_rise"):
        return "K"
    if key.endswith("_kw"):
        return "kW"
    named = CATALOGUE.get(key) or (CATALOGUE.get(f"{first.device_class}.{key}") if first else None)
    return named.unit if named else ""


# --- impact, mutes, delivery status -----------------------------------------------------------------


def impact(detail: IncidentDetail) -> list[str]:
    """Returns the affected entities by kind and the affected jobs; without a blast radius, counts of the members."""
    entities, jobs = detail.blast_radius.get("entities"), detail.blast_radius.get("jobs")
    if not isinstance(entities, dict) or not entities:
        return words.counted(Counter(e.partition(":")[0] for e in {detail.incident.cause, *detail.incident.members}))
    others = {kind: number for kind, number in entities.items() if kind != "job" or not jobs}
    return [*words.counted(others), *(entity_name(str(job)) for job in jobs or ())]


def active_mutes(detail: IncidentDetail, mutes: Iterable[Mute], now: int) -> list[Mute]:
    """Returns the active mutes that apply to the incident's entity and one of its detectors."""
    incident = detail.incident
    around = {"*", incident.entity, incident.cause, *detail.above}
    detectors = {"*", incident.detector, *(f.detector for f in detail.findings)}
    return [m for m in mutes if m.is_active(now) and m.detector in detectors and m.scope in around]


def mute_scopes(detail: IncidentDetail) -> list[str]:
    """Returns the scopes for a mute, the narrowest first; `*` (everywhere) is the last."""
    incident = detail.incident
    return list(dict.fromkeys([incident.entity, *detail.above, incident.cause, "*"]))


def mute_detectors(detail: IncidentDetail) -> list[str]:
    """Returns the detectors for a mute, the main one first; `*` (all) is the last."""
    return list(dict.fromkeys(filter(None, [detail.incident.detector, *(f.detector for f in detail.findings), "*"])))


def delivery_rows(detail: IncidentDetail, now: int) -> list[tuple[str, str, str, str]]:
    """Returns (time, receiver, type, status) of the notifications, the newest first."""
    ordered = sorted(detail.notifications, key=lambda n: n.created or 0, reverse=True)
    return [
        (_clock(n.created, now), n.receiver, n.kind, _delivery_status(n.state, n.attempts, n.answer, n.remote))
        for n in ordered
    ]


_STATES = {"held": "waits for its group or an inhibition", "grouped": "in its group's message", "muted": "not sent"}
"""Delivery states in words; the others are words already."""


def _clock(time: int | None, now: int) -> str:
    return "" if time is None else words.clock(time, now)


def _delivery_status(state: str, attempts: int, answer: str, remote: str) -> str:
    """Returns what became of a message; `remote`: who silenced its alert at the receiver."""
    tries = "" if attempts <= 1 else f" after {attempts} attempts"
    shown = f"{_STATES.get(state, state)}{tries}" + (f": {answer}" if answer else "")
    return f"{shown}; there {remote}" if remote else shown


HEIGHT = 250
"""Height (px): evidence and buttons stay visible at 1440 x 900. Chosen."""
MOST_ODDS = 1_000_000
"""Odds beyond which the number says no more to people. Chosen."""
MIN_BAND_PEERS = 5
"""Fewest peers for which a band of 80 % is drawn; with fewer, the median is enough. Chosen."""
NARROW = 560
"""Width of a chart (px) below which each name of the legend has its own line. Chosen: the names need about 500."""
GAP_STEPS = 3
"""A line breaks where points are further apart than this many usual steps. Chosen."""
_DAY = 86_400 * SECOND


def peers_chart(series: Series, onset: int, palette: Palette, height: int = HEIGHT) -> alt.LayerChart:
    """Returns a chart: the device's line, the median and 80 % band of its peers, and the onset."""
    names = legend_names(series)
    drawn = 3 if series.peers >= MIN_BAND_PEERS else 2 if series.peers else 1
    scale = alt.Scale(domain=list(names)[:drawn], range=[palette.device, palette.median, palette.band][:drawn])
    legend = alt.Legend(
        orient="top",
        title=None,
        symbolType="square",
        symbolOpacity=1,
        symbolStrokeWidth=5,
        symbolSize=50,
        labelLimit=400,
        columns=alt.ExprRef(f"width < {NARROW} ? 1 : 3"),
    )
    colour = alt.Color("mark:N", scale=scale, legend=legend)
    x = alt.X("time:T", title=None, scale=alt.Scale(type="utc", nice=False), axis=_time_axis(series))
    unit, fitted = unit_name(series.unit) or None, alt.Scale(zero=False, nice=True)

    def chart(part: str, name: str) -> alt.Chart:
        data = alt.InlineData(values=chart_rows(series, part))
        return alt.Chart(data).transform_calculate(mark=json.dumps(name)).encode(x=x, color=colour)

    band = (
        chart("median", names[2])
        .mark_area(opacity=0.38)
        .encode(y=alt.Y("low:Q", title=unit, scale=fitted), y2="high:Q")
    )
    median = chart("median", names[1]).mark_line(strokeDash=[5, 3], strokeWidth=1.5)
    median = median.encode(y=alt.Y("median:Q", title=unit))
    device = (
        chart("value", names[0])
        .mark_line(strokeWidth=2.4)
        .encode(y=alt.Y("value:Q", title=unit, scale=fitted), tooltip=_tooltip(series))
    )
    layers = [band] * (series.peers >= MIN_BAND_PEERS) + [median] * (series.peers > 0) + [device]
    return alt.LayerChart(layer=[*layers, *_onset(onset, palette)]).properties(height=height)


def legend_names(series: Series) -> tuple[str, str, str]:
    """Returns the legend: the device, the median of its peers, the middle 80 % of them."""
    where = {"": "", "class": " of its kind"}.get(series.peer_kind, f" in the same {series.peer_kind}")
    several = f"median of {amount(series.peers, 'peer', 'peers')}{where}"
    return entity_name(series.entity), several if series.peers != 1 else f"its one peer{where}", "middle 80 % of peers"


def chart_rows(series: Series, part: str) -> list[dict[str, Any]]:
    """Returns the rows of the points that have `part`, times in ms for Vega, with an empty row in each gap."""
    points = [p for p in series.points if getattr(p, part) is not None]
    steps = sorted(b.time - a.time for a, b in pairwise(points))
    usual = steps[(len(steps) - 1) // 2] if steps else 0
    rows: list[dict[str, Any]] = []
    for i, point in enumerate(points):
        if i and point.time - points[i - 1].time > GAP_STEPS * usual:
            rows.append({"time": chart_time(points[i - 1].time + usual), part: None})
        rows.append(_row(point, series.unit))
    return rows


def _row(point: Point, unit: str) -> dict[str, Any]:
    return {
        "time": chart_time(point.time),
        "value": point.value,
        "median": point.median,
        "low": point.low,
        "high": point.high,
        "value_text": "not measured" if point.value is None else quantity(point.value, unit),
        "median_text": "not measured" if point.median is None else quantity(point.median, unit),
    }


def _time_axis(series: Series) -> alt.Axis:
    span = series.points[-1].time - series.points[0].time if series.points else 0
    return alt.Axis(format="%d %b %H:%M" if span > _DAY else "%H:%M", grid=False, tickCount=8, labelExpr=axis_label())


def time_tooltip(time: int) -> alt.Tooltip:
    """Returns the line of a tooltip with the time of a point, named as the zone of this run."""
    return alt.Tooltip(
        "time:T", title=zone_name(time), format="%H:%M:%S", timeUnit="utcyearmonthdatehoursminutesseconds"
    )


def _tooltip(series: Series) -> list[alt.Tooltip]:
    return [
        time_tooltip(series.points[-1].time if series.points else 0),
        alt.Tooltip("value_text:N", title=entity_name(series.entity)),
        alt.Tooltip("median_text:N", title="median of peers"),
    ]


def _onset(onset: int, palette: Palette) -> list[alt.Chart]:
    base = alt.Chart(
        alt.InlineData(values=[{"time": chart_time(onset), "label": f"onset {clock(onset, snapshot.now())}"}])
    )
    x = alt.X("time:T", scale=alt.Scale(type="utc"))
    rule = base.mark_rule(color=palette.ink, strokeWidth=1.5).encode(x=x)
    label = base.mark_text(
        align="center", baseline="bottom", dy=-3, fontSize=12, fontWeight=600, color=palette.ink
    ).encode(x=x, y=alt.value(0), text="label:N")
    return [rule, label]
