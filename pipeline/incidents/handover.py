"""What the next person on call needs: past incidents like this one, and the state of the site at a change of shift."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import duckdb

from pipeline.incidents.ledger import list_incidents
from pipeline.incidents.silences import load_silences
from pipeline.model.plain_text import make_printable
from pipeline.model.records import SECOND, iso

MOST_SIMILAR = 10
"""Most similar incidents that are listed. Chosen: what a person reads."""
SOON = 8 * 3600 * SECOND
"""Silences that end within this time are part of a handover. Chosen: a shift."""

_SIMILAR = """
SELECT i.id, i.cause, i.entity, i.detector, i.summary, i.severity, epoch_us(i.onset), epoch_us(i.resolved),
       coalesce(nullif(json_extract_string(i.life, '$.feedback'), ''), NULL) AS feedback,
       (SELECT arg_max(h.actor || ': ' || h.comment, h.number) FROM history h
        WHERE h.incident = i.id AND h.actor <> 'fleetpulse' AND h.comment <> '') AS note,
       CASE WHEN i.detector = s.detector AND (i.entity = s.entity OR i.cause = s.cause)
            THEN 'same detector and device'
            WHEN i.cause = s.cause THEN 'same cause' ELSE 'same detector' END AS why
FROM incidents i, (SELECT * FROM incidents WHERE id = $1) s
WHERE i.id <> s.id AND i.onset <= s.onset AND i.resolved IS NOT NULL AND i.simulated = s.simulated
  AND coalesce(json_extract_string(i.life, '$.merged_into'), '') = ''
  AND (i.cause = s.cause OR i.entity = s.entity
       OR (i.detector = s.detector AND split_part(i.cause, ':', 1) = split_part(s.cause, ':', 1)))
ORDER BY (i.detector = s.detector AND (i.entity = s.entity OR i.cause = s.cause)) DESC, (i.cause = s.cause) DESC,
         i.onset DESC, i.id LIMIT $2
"""
_SIMILAR_NAMES = (
    *("id", "cause", "entity", "detector", "summary", "severity", "onset", "resolved", "feedback", "note", "why"),
)


def list_similar(cursor: duckdb.DuckDBPyConnection, id_: str) -> list[dict[str, Any]]:
    """Returns past incidents of the same device, cause or detector, the most similar first, with what people wrote."""
    rows = cursor.execute(_SIMILAR, [id_, MOST_SIMILAR]).fetchall()
    return [
        {**dict(zip(_SIMILAR_NAMES, row, strict=True)), "onset": iso(row[6]), "resolved": iso(row[7])} for row in rows
    ]


def read_handover(cursor: duckdb.DuckDBPyConnection, since: int, now: int) -> dict[str, Any]:
    """Returns the open, muted and pending incidents, and what changed since a time, in the form of the API.

    pending: what waits for a person or a time: pages that nobody acknowledged, acknowledgements that expire, silences
    that end.
    """
    unresolved = [i for i in list_incidents(cursor) if i["resolved"] is None]
    silences = [s for s in load_silences(cursor, now) if s.state(now) != "expired"]
    pages = [i for i in unresolved if i["state"] == "open" and i["severity"] == "page"]
    pending = [_pending(i["opened"], i["id"], _waiting_page(i["assignee"]), i["summary"]) for i in pages]
    taken = [i for i in unresolved if i["state"] == "acknowledged" and i["acknowledged_until"]]
    pending += [
        _pending(i["acknowledged_until"], i["id"], f"acknowledgement of {i['acknowledged_by']} expires", i["summary"])
        for i in taken
    ]
    ending = [s for s in silences if s.end <= now + SOON]
    pending += [_pending(iso(s.end), s.id, f"{s.kind} of {s.author} ends", s.reason) for s in ending]
    return {
        "since": iso(since),
        "now": iso(now),
        "open": [i for i in unresolved if i["state"] != "silenced"],
        "muted": {
            "incidents": [i for i in unresolved if i["state"] == "silenced"],
            "silences": [s.as_facts(now) for s in silences],
        },
        "pending": sorted(pending, key=lambda row: (row["time"], row["id"])),
        "changed": _list_changes(cursor, since),
    }


def _waiting_page(assignee: str) -> str:
    return f"page of {assignee}, not acknowledged" if assignee else "page without an owner"


def _pending(time: str, id_: str, what: str, about: str) -> dict[str, str]:
    return {"time": time, "id": id_, "what": what, "about": about}


def _list_changes(cursor: duckdb.DuckDBPyConnection, since: int) -> list[dict[str, Any]]:
    """Returns an entry per incident that changed since a time, newest change first: its kinds of change, in order."""
    rows = cursor.execute(
        """SELECT h.incident, list(h.kind ORDER BY h.number), epoch_us(max(h.time)), any_value(i.summary),
                  any_value(i.state), any_value(i.severity)
           FROM history h JOIN incidents i ON i.id = h.incident WHERE h.time >= make_timestamptz($1::BIGINT)
           GROUP BY h.incident ORDER BY 3 DESC, 1""",
        [since],
    ).fetchall()
    names = ("id", "changes", "time", "summary", "state", "severity")
    return [{**dict(zip(names, row, strict=True)), "time": iso(row[2])} for row in rows]


def format_handover(found: Mapping[str, Any], width: int = 120) -> str:
    """Returns a handover as text for people, in lines of at most `width` characters; longer ones are wrapped."""
    muted = found["muted"]
    sections: Sequence[tuple[str, list[str]]] = (
        ("Open", [_incident_line(i) for i in found["open"]]),
        ("Muted", [_incident_line(i) for i in muted["incidents"]]),
        ("Silences", [_silence_line(s) for s in muted["silences"]]),
        ("Pending", [f"{_short(p['time'])}  {p['id']}  {p['what']}: {p['about']}" for p in found["pending"]]),
        (
            f"Changed since {_short(found['since'])}",
            [f"{_short(c['time'])}  {c['id']}  {c['state']:<12}  {c['summary']}" for c in found["changed"]],
        ),
    )
    sections = [(title, [make_printable(row) for row in rows]) for title, rows in sections]
    lines = [f"Handover at {_short(found['now'])} UTC"]
    for title, rows in sections:
        lines += ["", f"{title}: {len(rows) or 'nothing'}", *(f"  {row}" for row in rows)]
    return "\n".join("\n".join(_wrap(line, width)) for line in lines) + "\n"


def _wrap(line: str, width: int) -> list[str]:
    """Returns the lines of a long line: its columns keep their spaces, what goes on is indented."""
    indent = len(line) - len(line.lstrip())
    return textwrap.wrap(line, width, subsequent_indent=" " * (indent + 4), break_on_hyphens=False) or [""]


def _incident_line(incident: Mapping[str, Any]) -> str:
    who = incident["assignee"] or incident["acknowledged_by"] or "nobody"
    return f"{incident['id']}  {incident['severity']:<6}  {incident['state']:<12}  {who:<10}  {incident['summary']}"


def _silence_line(silence: Mapping[str, Any]) -> str:
    until = f"{silence['kind']} until {_short(silence['until'])}"
    return f"{silence['id']}  {until}  {silence['text']}  {silence['author']}: {silence['reason']}"


def _short(time: str) -> str:
    """Returns a time of the API without fractions: `2026-01-31 08:00`."""
    return time[:16].replace("T", " ")
