"""The files of an RMA packet: a summary of one page (HTML), a chart (SVG), CSV, JSON lines, and all of it (JSON)."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pipeline.model.entity_names import entity_name
from pipeline.model.records import from_iso

WIDTH, HEIGHT, LEFT, BOTTOM = 760, 220, 56, 24
MOST_ROWS = 15
"""Rows of a table of the summary; the files have all. Chosen: one page."""
MOST_PARTS = 48
"""Parts in the summary. Chosen: the node, its GPUs and NICs, and most of its memory."""
_COLUMNS = ("signal", "meaning", "unit", "first", "before", "after", "changed")
_UNIQUE = frozenset({"serial", "board_serial", "product_serial", "chassis_serial", "uuid", "product_uuid"})
"""Attributes that name one part and no other."""
MOST_COUNTERS = 10
"""Counters in the summary, errors first. Chosen: one page."""
_OF_USE = ("mJ", "uJ", "J", "By", "KiBy")
"""Units of counters that rise while a device works: the summary leaves them out."""
_STYLE = """@page { size: A4; margin: 12mm } body { font: 13px/1.4 sans-serif; color: #17212b; max-width: 800px;
margin: 16px auto } h1 { font-size: 20px; margin: 0 } h2 { font-size: 14px; margin: 14px 0 4px } table { width: 100%;
border-collapse: collapse; font-size: 12px } th, td { text-align: left; vertical-align: top; padding: 2px 8px 2px 0;
border-bottom: 1px solid #dde3e9; overflow-wrap: anywhere } th { color: #5a6874; font-weight: 500;
overflow-wrap: normal } td:first-child { white-space: nowrap }"""
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)
"""Time of the files within the zip: the same packet is the same bytes."""


def make_zip(packet: Mapping[str, Any]) -> bytes:
    """Returns the packet as a zip."""
    chart = draw_chart(packet["peers"])
    files = {
        "summary.html": write_summary(packet, chart),
        "packet.json": json.dumps(packet, indent=2, ensure_ascii=False) + "\n",
        "counters.csv": write_csv(
            packet["counters"], ("signal", "meaning", "unit", "first", "before", "after", "changed")
        ),
        "events.jsonl": "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in packet["events"]),
    }
    if chart:
        files["peers.svg"] = chart
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as made:
        for name, text in files.items():
            info = zipfile.ZipInfo(name, _ZIP_TIME)
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o600 << 16
            made.writestr(info, text)
    return raw.getvalue()


def name_file(packet: Mapping[str, Any]) -> str:
    """Returns the name of the zip: `rma-n042-20261127T0312.zip`, safe in a header and on a disk."""
    node = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in packet["node"])[:64]
    return f"rma-{node}-{packet['onset'][:16].replace('-', '').replace(':', '')}.zip"


def write_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Returns rows as CSV; a text that a spreadsheet would run as a formula is quoted."""
    out = io.StringIO()
    made = csv.writer(out, lineterminator="\n")
    made.writerow(columns)
    for row in rows:
        cells = ["" if row[name] is None else row[name] for name in columns]
        made.writerow([f"'{c}" if isinstance(c, str) and c[:1] in "=+-@" and c else c for c in cells])
    return out.getvalue()


def draw_chart(peers: Mapping[str, Any] | None) -> str:
    """Returns the device's line over the band of its peers as SVG, with the onset marked; "" without values."""
    if peers is None:
        return ""
    times = [from_iso(point[0]) for point in peers["points"]]
    values = [v for point in peers["points"] for v in point[1:] if v is not None]
    low, high, first = min(values), max(values), times[0]
    spread, span = (high - low) or 1.0, (times[-1] - first) or 1

    def place(time: int, value: float) -> str:
        x = LEFT + (time - first) / span * (WIDTH - LEFT - 8)
        y = 8 + (high - value) / spread * (HEIGHT - BOTTOM - 16)
        return f"{x:.1f},{y:.1f}"

    points = list(zip(times, peers["points"], strict=True))
    own = " ".join(place(t, p[1]) for t, p in points if p[1] is not None)
    middle = " ".join(place(t, p[3]) for t, p in points if p[3] is not None)
    band = [place(t, p[4]) for t, p in points if p[4] is not None]
    band += [place(t, p[2]) for t, p in reversed(points) if p[2] is not None]
    onset = LEFT + min(max(0.0, (from_iso(peers["onset"]) - first) / span), 1.0) * (WIDTH - LEFT - 8)
    unit = "°C" if peers["unit"] == "Cel" else peers["unit"].strip("{}")
    title = f"{peers['signal']} ({unit}): device orange, {peers['peers']} peers grey, onset dashed"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"<title>{escape(title)}</title>"
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/><polygon points="{" ".join(band)}" fill="#dde3e9"/>'
        f'<polyline points="{middle}" fill="none" stroke="#7c8894" stroke-width="1"/>'
        f'<line x1="{onset:.1f}" x2="{onset:.1f}" y1="8" y2="{HEIGHT - BOTTOM}" stroke="#17212b" '
        f'stroke-dasharray="4 3"/>'
        f'<polyline points="{own}" fill="none" stroke="#d55e00" stroke-width="2"/>'
        f'<g font-family="sans-serif" font-size="11" fill="#17212b"><text x="4" y="18">{high:g}</text>'
        f'<text x="4" y="{HEIGHT - BOTTOM - 4}">{low:g}</text><text x="{LEFT}" y="{HEIGHT - 8}">'
        f"{peers['points'][0][0][:16]}Z to {peers['points'][-1][0][:16]}Z, {escape(title)}"
        f"</text></g></svg>\n"
    )


def write_summary(packet: Mapping[str, Any], chart: str) -> str:
    """Returns the one-page summary; every text from a device is escaped."""
    changed = [row for row in packet["counters"] if row["changed"] and row["unit"] not in _OF_USE]
    events = [(_clock(e["time"]), entity_name(e["entity"]), e["event"], _say(e)) for e in packet["events"]]
    tests = [
        (_clock(c["last"]), entity_name(c["entity"]), f"canary {c['canary']}", f"{c['wrong']} of {c['reports']} wrong")
        for c in packet["canaries"]
    ] + [
        (_clock(d["time"]), packet["node"], f"diagnostic level {d['level']}", "passed" if d["passed"] else d["state"])
        for d in packet["diagnostics"]
    ]
    counters = [
        (_shorten(r["meaning"]), *(_show(r[n]) for n in ("first", "before", "after"))) for r in changed[:MOST_COUNTERS]
    ]
    more = max(0, len(changed) - MOST_COUNTERS)
    same = len(packet["counters"]) - sum(bool(row["changed"]) for row in packet["counters"])
    title = f"RMA: {packet['device_name']}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{_rows(_head(packet))}"
        f"<h2>Identity</h2>{_rows(_identity(packet))}"
        f"<h2>Errors</h2>{_table(('Time', 'Device', 'Event', 'Text'), events, 'No hardware event in this time.')}"
        f"<h2>Counters that changed</h2>"
        f"{_table(('Counter', 'First value', 'Before onset', 'After'), counters, 'No counter changed.')}"
        f"<p>{more} more changed, {same} counters and states did not: counters.csv.</p>"
        f"<h2>Beside its peers</h2>{chart or '<p>No values in this time.</p>'}"
        f"<h2>Tests</h2>{_table(('Time', 'Device', 'Test', 'Result'), tests, 'No test ran in this time.')}"
        f"<p>Made {_clock(packet['made'])}. All rows, also counters of energy and traffic: packet.json, counters.csv, "
        "events.jsonl.</p></body></html>\n"
    )


def _head(packet: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns what the packet is about."""
    found = f"{packet['summary']} ({packet['detector']})" if packet["summary"] else "no incident is known"
    return [
        ("Device", packet["device_name"]),
        ("Node", packet["node"]),
        ("Fault", found),
        ("Since", _clock(packet["onset"])),
        ("Site", packet["site"] + (": SIMULATED, for practice" if packet["simulated"] else "")),
        (
            "Place",
            ", ".join(f"{kind} {name.partition(':')[2]}" for kind, name in packet["part_of"].items()) or "unknown",
        ),
        ("Incident", packet["incident"] or "none"),
    ]


def _identity(packet: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the device, its node, and the parts that have a serial number."""
    subjects = {packet["device"], f"node:{packet['node']}"}
    named = [row for row in packet["identity"] if len(row) > 2]
    nameless = [row for row in named if row["entity"] not in subjects and not _UNIQUE.intersection(row)]
    named = [row for row in named if row not in nameless]
    missing = [row for row in packet["identity"][:1] if not any("serial" in key for key in row)]
    left = len(named) - MOST_PARTS
    more = [("other parts", f"{left:,} more: packet.json")] if left > 0 else []
    more += [("other parts", f"{len(nameless)} without a serial number: packet.json")] if nameless else []
    more += [("to add by hand", f"serial number of {row['name']}: it reports none") for row in missing]
    return [
        (row["name"], ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in row.items() if k not in ("entity", "name")))
        for row in named[:MOST_PARTS]
    ] + more


def _say(event: Mapping[str, Any]) -> str:
    said = [f"{key} {event[key]}" for key in ("xid", "sxid") if key in event]
    said += [str(event[key]) for key in ("name", "text", "action", "pattern") if event.get(key)]
    return "; ".join(dict.fromkeys(said)) or json.dumps({k: v for k, v in event.items() if k not in ("time", "entity")})


def _shorten(meaning: str) -> str:
    """Returns what a counter counts, without the explanation after it."""
    return meaning.partition(";")[0].partition(": ")[0]


def _show(value: Any) -> str:
    return "no data" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _clock(text: str) -> str:
    return f"{text[:10]} {text[11:19]}Z"


def _rows(rows: Sequence[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><th>{escape(a)}</th><td>{escape(str(b))}</td></tr>" for a, b in rows) + "</table>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], empty: str) -> str:
    if not rows:
        return f"<p>{escape(empty)}</p>"
    more = f"<p>and {len(rows) - MOST_ROWS:,} more</p>" if len(rows) > MOST_ROWS else ""
    heads = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(c))}</td>" for c in row) + "</tr>" for row in rows[:MOST_ROWS])
    return f"<table><tr>{heads}</tr>{body}</table>{more}"
