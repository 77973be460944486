"""What the next person on call needs: past incidents like this one, and the state of the site at a change of shift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import duckdb

from pipeline.incidents.ledger import load_open_incidents
from pipeline.incidents.silences import Silence, load_silences
from pipeline.incidents.storms import STORM
from pipeline.model.plain_text import make_printable
from pipeline.model.records import SECOND, Incident, iso
from pipeline.model.silence_end import describe_end
from pipeline.model.text_width import wrap_text

MOST_SIMILAR = 10
"""Most similar incidents that are listed. Chosen: what a person reads."""
SOON = 8 * 3600 * SECOND
"""Silences that end within this time are part of a handover. Chosen: a shift."""
_WORST = ("page", "ticket", "watch")
_ACTS = frozenset({"assigned", "commented", "feedback", "merged", "reopened", "split"})
"""Changes that a person makes of one incident: they are listed although its storm represents it."""
Storms = dict[str, dict[str, int]]
"""Id of a storm -> how many incidents are listed as a part of it alone: unresolved, acknowledged of these, changed."""
Section = tuple[int, int, list[str]]
"""Entries of a section, how many more are in storms, and lines."""

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

    open, muted: pages first, of these the unacknowledged, then the oldest. muted: silenced, or inhibited by a
    rule.   pending: incidents that wait for a person or a time: unacknowledged pages, acknowledgements that expire,
    silences that end.   storms: how many incidents are listed as a part of their storm alone.
    """
    unresolved = sorted(load_open_incidents(cursor), key=_rank)
    storms, own = _fold(unresolved)
    muted = [i for i in own if _is_muted(i)]
    silences = [s for s in load_silences(cursor, now) if s.state(now) != "expired"]
    changed = _list_changes(cursor, since, storms)
    return {
        "since": iso(since),
        "now": iso(now),
        "open": [i.as_json() for i in own if not _is_muted(i)],
        "muted": {"incidents": [i.as_json() for i in muted], "silences": [s.as_facts(now) for s in silences]},
        "pending": _list_pending(own, [s for s in silences if s.end <= now + SOON]),
        "changed": changed,
        "storms": [{"id": id_, **counts} for id_, counts in sorted(storms.items())],
    }


def _rank(incident: Incident) -> tuple[int, bool, int, str]:
    """Returns the place in a list: the worst, those that wait for a person, and the oldest come first."""
    return _WORST.index(incident.severity), incident.state == "acknowledged", incident.opened, incident.id


def _is_muted(incident: Incident) -> bool:
    """Returns whether receivers get nothing of it; what a person has taken is open all the same."""
    is_inhibited = bool(incident.life.inhibited_by or incident.life.inhibitor)
    return incident.state == "silenced" or (incident.state == "open" and is_inhibited)


def _fold(unresolved: Sequence[Incident]) -> tuple[Storms, list[Incident]]:
    """Returns how many incidents each storm has, and the incidents without those that are only a part of a storm: with
    no person of their own."""
    known = {i.id: i for i in unresolved if i.detector == STORM}
    storms: Storms = {}
    own = list[Incident]()
    for incident in unresolved:
        storm = next((known[id_] for id_ in incident.life.inhibited_by if id_ in known), None)
        life = incident.life
        if storm is None or life.assignee or life.acknowledged_by not in ("", storm.life.acknowledged_by):
            own.append(incident)
            continue
        counts = storms.setdefault(storm.id, dict.fromkeys(("unresolved", "acknowledged", "changed"), 0))
        counts["unresolved"] += 1
        counts["acknowledged"] += incident.state == "acknowledged"
    return storms, own


def _list_pending(incidents: Sequence[Incident], ending: Sequence[Silence]) -> list[dict[str, str]]:
    """Returns what waits: for a person, the oldest first; then what ends, the soonest first."""
    pending = list[dict[str, str]]()
    for i in incidents:
        until = i.life.acknowledged_until
        if i.state == "acknowledged" and until is not None:
            what = f"acknowledgement of {i.life.acknowledged_by} expires"
            pending.append(_pending(iso(until), i.id, what, i.summary))
        elif i.state == "open" and i.severity == "page" and not _is_muted(i):
            pending.append(_pending(iso(i.opened), i.id, _waiting_page(i.life.assignee), i.summary))
    pending += [_pending(iso(s.end), s.id, _name_end(s), s.reason) for s in ending]
    return sorted(pending, key=lambda row: (row["time"], row["id"]))


def _name_end(silence: Silence) -> str:
    grace = " with its grace" if silence.kind == "maintenance" else ""
    return f"{silence.kind} of {silence.author} ends{grace}"


def _waiting_page(assignee: str) -> str:
    return f"page of {assignee}, not acknowledged" if assignee else "page without an owner"


def _pending(time: str, id_: str, what: str, about: str) -> dict[str, str]:
    return {"time": time, "id": id_, "what": what, "about": about}


def _list_changes(cursor: duckdb.DuckDBPyConnection, since: int, storms: Storms) -> list[dict[str, Any]]:
    """Returns an entry per incident that changed since a time, newest change first: its kinds of change, in order.

    What changed with a storm, and by no person's act on it alone, is counted in `storms`.
    """
    rows = cursor.execute(
        """SELECT h.incident, list(h.kind ORDER BY h.number), epoch_us(max(h.time)), any_value(i.summary),
                  any_value(i.state), any_value(i.severity), any_value(s.id)
           FROM history h JOIN incidents i ON i.id = h.incident
           LEFT JOIN incidents s ON s.detector = $2 AND s.id = json_extract_string(i.life, '$.inhibited_by[0]')
           WHERE h.time >= make_timestamptz($1::BIGINT) GROUP BY h.incident ORDER BY 3 DESC, 1""",
        [since, STORM],
    ).fetchall()
    names = ("id", "changes", "time", "summary", "state", "severity")
    found = list[dict[str, Any]]()
    for *row, storm in rows:
        if storm is not None and _ACTS.isdisjoint(row[1]):
            counts = storms.setdefault(storm, dict.fromkeys(("unresolved", "acknowledged", "changed"), 0))
            counts["changed"] += 1
        else:
            found.append({**dict(zip(names, row, strict=True)), "time": iso(row[2])})
    return found


def format_handover(found: Mapping[str, Any], width: int = 120) -> str:
    """Returns a handover as text for people, in lines of at most `width` characters; longer ones are wrapped."""
    muted, storms = found["muted"], {storm["id"]: storm for storm in found.get("storms", ())}
    pending = [f"{_short(p['time'])}  {p['id']}  {p['what']}: {p['about']}" for p in found["pending"]]
    sections: Sequence[tuple[str, Section]] = (
        ("Open", _list_incidents(found["open"], storms)),
        ("Silenced", _list_incidents(muted["incidents"], storms)),
        ("Silences", (len(muted["silences"]), 0, [_silence_line(s) for s in muted["silences"]])),
        ("Pending", (len(pending), 0, pending)),
        (f"Changed since {_short(found['since'])}", _list_changed(found["changed"], storms)),
    )
    lines = [f"Handover at {_short(found['now'])} UTC"]
    for title, (count, parts, rows) in sections:
        number = f"{count + parts:,}{f' ({parts:,} in storms)' if parts else ''}" if rows else "nothing"
        lines += ["", f"{title}: {number}", *(f"  {make_printable(row)}" for row in rows)]
    return "\n".join("\n".join(_wrap(line, width)) for line in lines) + "\n"


def _list_incidents(incidents: Sequence[Mapping[str, Any]], storms: Mapping[str, Any]) -> Section:
    """Returns the lines of incidents, each storm followed by what it represents."""
    rows, parts = list[str](), 0
    for incident in incidents:
        rows.append(_incident_line(incident))
        number, taken = (storms.get(incident["id"], {}).get(name, 0) for name in ("unresolved", "acknowledged"))
        if number:
            rows.append(f"    {number:,} more in it{f', {taken:,} of them acknowledged' if taken else ''}")
        parts += number
    return len(incidents), parts, rows


def _list_changed(changed: Sequence[Mapping[str, Any]], storms: Mapping[str, Any]) -> Section:
    """Returns the lines of what changed; those of storms that did not change themselves are at the end."""
    rows, left = list[str](), {id_: storm["changed"] for id_, storm in storms.items() if storm["changed"]}
    parts = sum(left.values())
    for c in changed:
        rows.append(f"{_short(c['time'])}  {c['id']}  {c['state']:<12}  {c['summary']}")
        if number := left.pop(c["id"], 0):
            rows.append(f"    {number:,} more in it")
    rows += [f"{number:,} in storm {id_}" for id_, number in left.items()]
    return len(changed), parts, rows


def _wrap(line: str, width: int) -> list[str]:
    """Returns the lines of a long line: its columns keep their spaces, what goes on is indented."""
    indent = len(line) - len(line.lstrip())
    return wrap_text(line, width, " " * (indent + 4)) or [""]


def _incident_line(incident: Mapping[str, Any]) -> str:
    who = incident["assignee"] or incident["acknowledged_by"] or "nobody"
    state = "inhibited" if incident["state"] == "open" and _is_inhibited(incident) else incident["state"]
    return f"{incident['id']}  {incident['severity']:<6}  {state:<12}  {who:<10}  {incident['summary']}"


def _is_inhibited(incident: Mapping[str, Any]) -> bool:
    return bool(incident.get("inhibitor") or incident.get("inhibited_by"))


def _silence_line(silence: Mapping[str, Any]) -> str:
    until = f"{silence['kind']} until {describe_end(silence)}"
    return f"{silence['id']}  {until}  {silence['text']}  {silence['author']}: {silence['reason']}"


def _short(time: str) -> str:
    """Returns a time of the API without fractions: `2026-01-31 08:00`."""
    return time[:16].replace("T", " ")
