"""The printable report: one HTML file without scripts or links to files, which a browser prints to PDF.

Every part comes from the API; a part that cannot be read says why, so that a report is never silently shorter.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any
from urllib.parse import quote

from dashboards import cause_and_impact, evidence
from dashboards.answers import parse_detail
from dashboards.data_quality.answers import parse_destinations
from dashboards.detail_answers import Impact
from dashboards.fleet_map.answers import FILTERS, FleetLayout, FleetMap, parse_layout, parse_map
from dashboards.report.markup import table, write_document
from dashboards.report.picture import draw_picture
from dashboards.words import NODE_STATE, SEVERITY, STATE, age, amount, percent, plain
from pipeline.model.entity_names import entity_name
from pipeline.model.errors import FleetpulseError
from pipeline.model.records import SECOND, Severity, from_iso, iso

Read = Callable[[str, Mapping[str, str]], Mapping[str, Any]]
"""Returns the answer of `GET /api/v1/{path}` with a query. Raises FleetpulseError."""
MAX_DETAILED = 10
"""Incidents with impact and recommended action, and all critical ones; the others are one line each. Chosen: four pages
of A4."""
MAX_JOBS = 10
"""Jobs of an incident that are named; more are counted. Chosen."""
MAX_LINES = 100
"""Lines of one table. Chosen."""
_ORDER: Mapping[Severity, int] = {"page": 0, "ticket": 1, "watch": 2}


@dataclass(frozen=True, slots=True)
class MapParts:
    """The map, its layout, and whether both are of the same topology."""

    found: FleetMap
    layout: FleetLayout

    @property
    def fits(self) -> bool:
        """Whether the layout names the cells of the map."""
        return self.found.layout == self.layout.layout


def read_map(read: Read, query: Mapping[str, str]) -> MapParts:
    """Returns the map with its layout; both are read again while the topology changes in between."""
    where = {name: value for name, value in query.items() if value and name != "colour"}
    for _ in range(3):
        parts = MapParts(parse_map(read("fleet/map", query)), parse_layout(read("fleet/layout", where)))
        if parts.fits:
            break
    return parts


def write_report(read: Read, now: int, within: str = "") -> str:
    """Returns the report as one HTML document. Raises FleetpulseError if the fleet cannot be read."""
    parts = read_map(read, {"within": within} if within else {})
    site = str(_try(lambda: read("version", {})).get("site", ""))
    where = f" · {entity_name(within)}" if within else ""
    title = f"Fleet report{f' {site}' if site else ''}{where}"
    head = parts.found.head
    simulated = (
        f" {parts.found.simulated:,} of {parts.found.nodes:,} nodes are SIMULATED." if parts.found.simulated else ""
    )
    sections = [
        _stale(head.unready),
        _state(parts),
        _incidents(read, parts, now),
        _quality(parts),
        _detectors(read),
        _receivers(read),
    ]
    about = f"State of {_time(head.as_of)}, printed {_time(now)}.{simulated if parts.found.simulated else ''}"
    return write_document(title, about, sections)


def _stale(unready: Sequence[str]) -> str:
    if not unready:
        return ""
    return f'<p class="warn"><b>The pipeline is not ready:</b> {escape("; ".join(unready))}</p>'


def _state(parts: MapParts) -> str:
    found = parts.found
    tiles = "".join(
        f'<li class="{name}"><b>{found.counts[name]:,}</b> {NODE_STATE.get(name, name)}</li>' for name in FILTERS
    )
    picture = '<p class="warn">The map changed while it was read; print the report again.</p>'
    if parts.fits:
        drawn = base64.b64encode(map_picture(parts)).decode()
        picture = f'<img alt="Map of the nodes by {escape(found.by)}" src="data:image/png;base64,{drawn}">'
    return f'<h2>Fleet state</h2><ul class="tiles">{tiles}</ul>{picture}'


def map_picture(parts: MapParts) -> bytes:
    """Returns the map as PNG with its counts and time."""
    found = parts.found
    counts = ", ".join(f"{found.counts[name]:,} {NODE_STATE.get(name, name)}" for name in FILTERS if found.counts[name])
    title = f"{amount(found.nodes, 'node', 'nodes')}: {counts or 'none'}"
    colour = f" · colour: {found.scale['label']}" if found.scale else ""
    simulated = f" · {found.simulated:,} SIMULATED" if found.simulated else ""
    within = f" · {entity_name(found.within)}" if found.within else ""
    caption = f"{iso(found.head.as_of)[:19]}Z · grouped by {found.by}{within}{colour}{simulated}"
    return draw_picture(found, parts.layout, title, caption)


def _incidents(read: Read, parts: MapParts, now: int) -> str:
    try:
        rows = list(read("incidents", {})["incidents"])
    except FleetpulseError as error:
        return _missing("Unresolved incidents", error)
    own = {identity for ids in parts.found.incident_sets for identity in ids}
    rows = [r for r in rows if r["resolved"] is None and (not parts.found.within or r["id"] in own)]
    rows.sort(key=lambda r: str(r["opened"]), reverse=True)
    rows.sort(key=lambda r: _ORDER.get(r["severity"], len(_ORDER)))
    lines = [_incident_line(row, now) for row in rows[:MAX_LINES]]
    head = ("Severity", "Incident", "Cause", "For", "State", "Confidence")
    critical = sum(row["severity"] == "page" for row in rows)
    detailed = min(max(MAX_DETAILED, critical), MAX_LINES)
    details = "".join(_impact(read, row, now) for row in rows[:detailed]) + _without_detail(rows[detailed:])
    return (
        f"<h2>Unresolved incidents ({len(rows):,})</h2>{table(head, lines, 'None.')}"
        f"{_more(len(rows))}{f'<h2>Impact and recommended action</h2>{details}' if details else ''}"
    )


def _without_detail(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns how many incidents have no impact and action here, by severity; empty without any."""
    counts = Counter(str(row["severity"]) for row in rows)
    shown = [f"{counts[severity]:,} {SEVERITY[severity]}" for severity in _ORDER if counts[severity]]
    return f"<p>and {len(rows):,} more, not detailed here: {', '.join(shown)}.</p>" if rows else ""


def _incident_line(row: Mapping[str, Any], now: int) -> tuple[str, ...]:
    sure = row.get("confidence")
    return (
        SEVERITY.get(row["severity"], row["severity"]),
        f"{plain(row['summary'])} ({row['id']}){' SIMULATED' if row.get('simulated') else ''}",
        entity_name(row["cause"]),
        age((now - from_iso(row["onset"])) / SECOND),
        STATE.get(row["state"], row["state"]),
        "" if sure is None else percent(sure),
    )


def _impact(read: Read, row: Mapping[str, Any], now: int) -> str:
    try:
        detail = parse_detail(read(f"incidents/{quote(str(row['id']), safe='')}", {}))
    except FleetpulseError as error:
        return f"<p>{escape(row['id'])}: {escape(str(error))}</p>"
    found = detail.impact
    if found is None:
        lines = [("Affected", ", ".join(evidence.impact(detail)) or "unknown")]
    else:
        lines = [("Affected", "; ".join(cause_and_impact.impact_lines(found))), ("Jobs", _jobs(found, now))]
    lines.append(("Recommended action", cause_and_impact.action_text(detail, now)))
    if detail.runbook_url:
        own = cause_and_impact.read_detector_page(detail.runbook_url)
        lines.append(("About this detector" if own else "Runbook", detail.runbook_url))
    body = "".join(f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in lines)
    return f"<h3>{escape(plain(str(row['summary'])))}</h3><table>{body}</table>"


def _jobs(found: Impact, now: int) -> str:
    """Returns the jobs that an incident reaches, each with its effect: `job 81 (31 % slower)`."""
    shown = [f"{entity_name(job.job)} ({cause_and_impact.job_effect(job, now)})" for job in found.jobs[:MAX_JOBS]]
    more = [f"{found.job_count - len(shown):,} more"] if found.job_count > len(shown) else []
    if found.unlisted:
        nodes = "" if found.unlisted >= found.nodes else f" of {amount(found.unlisted, 'node', 'nodes')}"
        more.append(f"jobs{nodes} not known" if shown or nodes else "not known")
    return ", ".join([*shown, *more]) or "none"


def _quality(parts: MapParts) -> str:
    sources, lag = parts.found.head.sources, parts.found.head.lag_s
    agents = sources.get("agents", 0)
    rows = [
        ("Agents reporting", f"{agents - sources.get('silent', 0):,} of {agents:,}"),
        ("Nodes without data", f"{parts.found.counts['no_data']:,} of {parts.found.nodes:,}"),
        ("Data gaps", f"{sources.get('gaps', 0):,}"),
        ("Unreadable messages", f"{sources.get('dead_letters', 0):,}"),
        ("Lag of the evaluation", "unknown" if lag is None else age(lag)),
    ]
    newest = parts.found.head.newest
    rows.append(("Newest data", "none" if newest is None else _time(newest)))
    body = "".join(f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in rows)
    return f"<h2>Data quality</h2><table>{body}</table>"


def _detectors(read: Read) -> str:
    try:
        rows = read("detectors", {})["detectors"]
        budgets = {row["detector"]: row for row in read("budget", {})["budgets"]}
        silences = read("silences", {"active": "true"})["silences"]
    except FleetpulseError as error:
        return _missing("Detectors", error)
    off = [row for row in rows if row["off"]]
    failed = [f"{row['name']} ({row['errors']:,} frames)" for row in rows if row["errors"]]
    lowered = [name for name, row in budgets.items() if row["lowered"]]
    lines = [
        ("Active", f"{len(rows) - len(off):,} of {len(rows):,}"),
        ("Disabled, missing signals", "; ".join(f"{r['name']}: {', '.join(r['off'])}" for r in off) or "none"),
        ("Failed since the start", ", ".join(failed) or "none"),
        ("Pages lowered to tickets by their budget", ", ".join(lowered) or "none"),
        ("Active silences, maintenance windows and mutes", f"{len(silences):,}"),
    ]
    body = "".join(f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in lines)
    return f"<h2>Detectors</h2><table>{body}</table>"


def _receivers(read: Read) -> str:
    try:
        found = parse_destinations(read("receivers", {}))
    except FleetpulseError as error:
        return _missing("Delivery of alerts", error)
    lines = [
        (d.receiver, d.state, d.answer, "never" if d.delivered is None else _time(d.delivered), d.pending, d.dead)
        for d in found[:MAX_LINES]
    ]
    head = ("Receiver", "State", "Last answer", "Last delivered", "Waiting", "Dead")
    rows = [tuple(map(str, line)) for line in lines]
    none = "No receiver is configured: no one is paged."
    return f"<h2>Delivery of alerts</h2>{table(head, rows, none)}{_more(len(found))}"


def _missing(name: str, error: Exception) -> str:
    return f'<h2>{escape(name)}</h2><p class="warn">Unavailable: {escape(str(error))}</p>'


def _more(number: int) -> str:
    return f"<p>and {number - MAX_LINES:,} more</p>" if number > MAX_LINES else ""


def _time(moment: int) -> str:
    return f"{iso(moment)[:10]} {iso(moment)[11:19]}Z"


def _try(read: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    try:
        return read()
    except FleetpulseError:
        return {}
