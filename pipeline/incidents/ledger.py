"""Rows of findings, incidents, their history, the outbox and mutes. Writes go into the caller's transaction.

An incident, its history row and its payloads are written in one transaction, so that a crash keeps all or nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import duckdb

from pipeline.incidents.cases import PAIR_WINDOW, Case, Condition
from pipeline.incidents.changes import Change
from pipeline.incidents.desk import ACTOR
from pipeline.incidents.silences import expire, from_mute, load_silences, save_silence, to_mute
from pipeline.incidents.wrong_pages import add_unneeded_pages
from pipeline.judging.mutes import Mute
from pipeline.model.records import LEVELS, Finding, Incident, Life, iso, to_json


@dataclass(frozen=True, slots=True)
class Payload:
    """One message for one receiver. Resolved ones and updates are only for receivers whose newest is a firing one.

    incident: or the group of alerts that it is about.
    state:    `held` until groups and inhibition decide about it; else `pending`, to be sent.
    of_group: whether it is of a group, which itself knows what fires at its receiver.
    after_silence: whether it also is for a receiver whose newest message says that a silence ended the alert: it shows
              that message until its end.
    """

    incident: str
    receiver: str
    kind: Literal["firing", "resolved", "update"]
    body: str
    created: int
    state: Literal["pending", "held"] = "pending"
    of_group: bool = False
    after_silence: bool = False


_HELD = ("muted", "mode")  # evidence of suppression, always that of the newest finding
_FINDINGS = """
INSERT INTO findings
SELECT make_timestamptz(time), make_timestamptz(onset), * EXCLUDE (time, onset) FROM (
    SELECT unnest($1::BIGINT[]) AS time, unnest($2::BIGINT[]) AS onset, unnest($3::VARCHAR[]) AS entity,
           unnest($4::VARCHAR[]) AS detector, unnest($5::VARCHAR[]) AS level, unnest($6::DOUBLE[]) AS score,
           unnest($7::VARCHAR[]) AS summary, unnest($8::VARCHAR[]) AS evidence, unnest($9::VARCHAR[][]) AS signals,
           unnest($10::VARCHAR[]) AS incident)
ON CONFLICT (detector, entity, onset) DO UPDATE SET
    time = excluded.time, incident = coalesce(excluded.incident, findings.incident),
    level = CASE WHEN {rises} THEN excluded.level ELSE findings.level END,
    score = CASE WHEN {rises} THEN excluded.score ELSE findings.score END,
    summary = CASE WHEN {rises} THEN excluded.summary ELSE findings.summary END,
    evidence = CASE WHEN {rises} THEN excluded.evidence ELSE json_merge_patch(findings.evidence, {held}) END,
    signals = CASE WHEN {rises} THEN excluded.signals ELSE findings.signals END
""".format(
    rises=f"(list_position({list(LEVELS)}, excluded.level), coalesce(excluded.score, 0)) >= "
    f"(list_position({list(LEVELS)}, findings.level), coalesce(findings.score, 0))",
    held="json_object('muted', excluded.evidence -> '$.muted', 'mode', excluded.evidence -> '$.mode')",
)
_INCIDENT = """
INSERT INTO incidents
SELECT unnest($1::VARCHAR[]), unnest($2::VARCHAR[]), make_timestamptz(unnest($3::BIGINT[])),
       make_timestamptz(unnest($4::BIGINT[])), make_timestamptz(unnest($5::BIGINT[])), unnest($6::VARCHAR[]),
       unnest($7::VARCHAR[][]), unnest($8::DOUBLE[]), unnest($9::VARCHAR[]), unnest($10::VARCHAR[]),
       unnest($11::BOOLEAN[]), unnest($12::VARCHAR[]), unnest($13::VARCHAR[]), make_timestamptz(unnest($14::BIGINT[])),
       unnest($15::VARCHAR[]), unnest($16::VARCHAR[])
ON CONFLICT (id) DO UPDATE SET
    cause = excluded.cause, opened = excluded.opened, onset = excluded.onset, resolved = excluded.resolved,
    severity = excluded.severity, members = excluded.members, confidence = excluded.confidence, state = excluded.state,
    summary = excluded.summary, simulated = excluded.simulated, detector = excluded.detector, entity = excluded.entity,
    updated = excluded.updated, life = excluded.life, explanation = excluded.explanation
"""
_HISTORY = """
INSERT INTO history
SELECT n.incident, coalesce(h.number, 0) + n.place, make_timestamptz(n.time), n.kind, n.actor, n.comment, n.content
FROM (SELECT unnest($1::VARCHAR[]) AS incident, unnest($2::INTEGER[]) AS place, unnest($3::BIGINT[]) AS time,
             unnest($4::VARCHAR[]) AS kind, unnest($5::VARCHAR[]) AS actor, unnest($6::VARCHAR[]) AS comment,
             unnest($7::VARCHAR[]) AS content) n
LEFT JOIN (SELECT incident, max(number) AS number FROM history WHERE incident IN (SELECT unnest($1::VARCHAR[]))
           GROUP BY incident) h USING (incident)
"""
NOT_CONFIGURED = "the receiver is no longer configured"
"""Answer of messages that were never sent for that reason."""
_NEWEST_PAYLOADS = f"""
SELECT incident, receiver, max(number),
    arg_max(kind, number) FILTER (kind <> 'update' AND NOT (state = 'dead' AND answer = '{NOT_CONFIGURED}'))
FROM outbox WHERE incident IN (SELECT unnest($1::VARCHAR[])) GROUP BY ALL
"""
_SHOWN_SILENCED = """
SELECT incident, receiver FROM outbox WHERE kind <> 'update' AND incident IN (SELECT unnest($1::VARCHAR[]))
GROUP BY ALL HAVING arg_max(payload ->> '$.fleetpulse.event', number) = 'silenced'
"""
_PAYLOADS = """
INSERT INTO outbox
    (id, incident, number, receiver, kind, payload, created, attempts, next_attempt, state, answer)
SELECT id, incident, number, receiver, kind, payload, time, 0, time, state, ''
FROM (SELECT unnest($1::VARCHAR[]) AS id, unnest($2::VARCHAR[]) AS incident, unnest($3::INTEGER[]) AS number,
             unnest($4::VARCHAR[]) AS receiver, unnest($5::VARCHAR[]) AS kind, unnest($6::VARCHAR[]) AS payload,
             make_timestamptz(unnest($7::BIGINT[])) AS time, unnest($8::VARCHAR[]) AS state)
"""
_SKIP_SILENCED = """
UPDATE outbox SET state = 'muted', answer = 'silenced before it was sent'
FROM (SELECT incident, receiver, number FROM outbox WHERE id IN (SELECT unnest($1::VARCHAR[]))
      AND state = 'pending' AND payload ->> '$.fleetpulse.event' = 'silenced') n
WHERE outbox.incident = n.incident AND outbox.receiver = n.receiver AND outbox.number < n.number
AND outbox.state = 'pending' AND outbox.kind = 'firing' AND json_array_length(outbox.payload, '$.alerts') = 1
"""
_INCIDENTS = """
SELECT id, cause, epoch_us(opened), epoch_us(onset), epoch_us(resolved), severity, members, confidence, state, summary,
       simulated, detector, entity, epoch_us(updated), life, explanation FROM incidents
"""
_FINDING = ("time", "onset", "entity", "detector", "level", "score", "summary", "evidence", "signals")
_NAMES = (
    *("id", "cause", "opened", "onset", "resolved", "severity", "members", "confidence", "state", "summary"),
    *("simulated", "detector", "entity", "updated", "life", "explanation"),
)
_FIELDS = {f.name: f.default for f in dataclasses.fields(Life)}


def write_changes(
    connection: duckdb.DuckDBPyConnection,
    findings: Sequence[Finding],
    changes: Sequence[Change],
    payloads: Sequence[Payload],
    time: int,
) -> None:
    """Writes findings, changes in their order, and the payloads for receivers."""
    _write_findings(connection, findings, changes)
    if changes:
        _write_incidents(connection, changes)
        _write_history(connection, changes)
    for change in changes:
        _move_findings(connection, change)
    ended = [c for c in changes if c.kind == "resolved" and c.actor == ACTOR and c.folded_into is None]
    add_unneeded_pages(connection, [(c.incident, c.time) for c in ended if c.split_from is None])
    write_payloads(connection, payloads)


def write_payloads(connection: duckdb.DuckDBPyConnection, payloads: Sequence[Payload]) -> list[str]:
    """Adds payloads, numbered on from the newest of their incident and receiver. Returns their ids; empty: not written,
    since its receiver has nothing that it could change."""
    if not payloads:
        return []
    rows: list[tuple[Any, ...]] = []
    ids: list[str] = []
    found = connection.execute(_NEWEST_PAYLOADS, [list({p.incident for p in payloads})]).fetchall()
    known = {(incident, receiver): (number, kind) for incident, receiver, number, kind in found}
    silenced = _find_shown_silenced(connection, [p.incident for p in payloads if p.after_silence])
    for p in payloads:
        number, newest = known.get((p.incident, p.receiver), (0, None))
        shows = p.after_silence and newest == "resolved" and (p.incident, p.receiver) in silenced
        is_written = p.of_group or p.kind == "firing" or newest == "firing" or shows
        thread = f"{p.incident}.{p.created}" if p.of_group else p.incident  # numbers begin again with a later group
        ids.append(f"{thread}.{number + 1}.{p.receiver}" if is_written else "")
        if is_written:
            known[p.incident, p.receiver] = number + 1, newest if p.kind == "update" else p.kind
            state = "pending" if shows else p.state
            rows.append((ids[-1], p.incident, number + 1, p.receiver, p.kind, p.body, p.created, state))
    if rows:
        connection.execute(_PAYLOADS, [list(column) for column in zip(*rows, strict=True)])
        skip_silenced(connection, [row[0] for row in rows if row[4] == "resolved"])
    return ids


def _find_shown_silenced(connection: duckdb.DuckDBPyConnection, incidents: Sequence[str]) -> set[tuple[str, str]]:
    """Returns (incident, receiver) of those whose newest message says that a silence ended the alert."""
    return set(connection.execute(_SHOWN_SILENCED, [incidents]).fetchall()) if incidents else set()


def skip_silenced(connection: duckdb.DuckDBPyConnection, ends: Sequence[str]) -> None:
    """Leaves out pages that still wait for their receiver when a silence ends them. ends: ids of messages, which are
    sent in any case: the receiver may have taken a page without an answer."""
    if ends:
        connection.execute(_SKIP_SILENCED, [list(ends)])


def save_snapshot(connection: duckdb.DuckDBPyConnection, key: str, time: int, state: str) -> None:
    """Stores the state under `key`, in place of the one before."""
    connection.execute(
        "INSERT OR REPLACE INTO snapshot VALUES ($1, make_timestamptz($2::BIGINT), $3)", [key, time, state]
    )


def load_snapshot(connection: duckdb.DuckDBPyConnection, key: str) -> tuple[int, str] | None:
    """Returns time and state under `key`; None if there is none."""
    found = connection.execute("SELECT epoch_us(time), state FROM snapshot WHERE key = $1", [key]).fetchall()
    return found[0] if found else None


def find_known_findings(
    connection: duckdb.DuckDBPyConnection, keys: Sequence[tuple[str, str, int]]
) -> set[tuple[str, str, int]]:
    """Returns those of the keys (detector, entity, onset) that are stored."""
    detectors, entities, onsets = map(list, zip(*keys, strict=True))
    rows = connection.execute(
        """SELECT f.detector, f.entity, epoch_us(f.onset) FROM findings f JOIN (
               SELECT unnest($1::VARCHAR[]) AS detector, unnest($2::VARCHAR[]) AS entity,
                      make_timestamptz(unnest($3::BIGINT[])) AS onset) k USING (detector, entity, onset)""",
        [detectors, entities, onsets],
    ).fetchall()
    return set(rows)


def load_open_incidents(connection: duckdb.DuckDBPyConnection) -> list[Incident]:
    """Returns the incidents that are not resolved, in order of opening."""
    return _load(connection, "WHERE resolved IS NULL ORDER BY opened, id", [])


def load_lives(connection: duckdb.DuckDBPyConnection, since: int) -> list[Incident]:
    """Returns the incidents that are not resolved, and those resolved after a time.

    One that an older version acknowledged has no life: it is acknowledged without an end.
    """
    found = _load(connection, "WHERE resolved IS NULL OR updated >= make_timestamptz($1::BIGINT) ORDER BY id", [since])
    for incident in found:
        if incident.state == "acknowledged" and not incident.life.acknowledged_by:
            row = connection.execute(
                "SELECT arg_max(actor, number) FROM history WHERE incident = $1 AND kind = 'acknowledged'",
                [incident.id],
            ).fetchone()
            incident.life = Life(acknowledged_by=str((row and row[0]) or ACTOR), told=len(incident.members))
    return found


def load_incident(connection: duckdb.DuckDBPyConnection, id_: str) -> Incident | None:
    """Returns one incident, None if it is not stored."""
    return next(iter(_load(connection, "WHERE id = $1", [id_])), None)


def load_incidents(connection: duckdb.DuckDBPyConnection, ids: Sequence[str]) -> list[Incident]:
    """Returns those of the incidents that are stored."""
    return _load(connection, "WHERE id IN (SELECT unnest($1::VARCHAR[]))", [list(ids)]) if ids else []


def count_history(connection: duckdb.DuckDBPyConnection, id_: str) -> int:
    """Returns the number of rows of the history of an incident: its version."""
    row = connection.execute("SELECT coalesce(max(number), 0) FROM history WHERE incident = $1", [id_]).fetchone()
    return int(row[0]) if row else 0


def count_histories(connection: duckdb.DuckDBPyConnection) -> dict[str, int]:
    """Returns the version of every incident."""
    return dict(connection.execute("SELECT incident, max(number) FROM history GROUP BY incident").fetchall())


def load_case(connection: duckdb.DuckDBPyConnection, incident: Incident) -> Case:
    """Returns the case of a resolved incident from its findings, so that it can be reopened."""
    rows = connection.execute(
        """SELECT detector, entity, epoch_us(onset), level, epoch_us(time), coalesce(score, 0), summary, signals,
                  epoch_us(min(onset) OVER (PARTITION BY detector, entity))
           FROM findings WHERE incident = $1 ORDER BY time, onset, detector, entity""",
        [incident.id],
    ).fetchall()
    conditions = {
        (detector, entity): Condition(
            *(detector, entity, onset, level, onset, time, score, summary, tuple(signals)), earliest=earliest
        )
        for detector, entity, onset, level, time, score, summary, signals, earliest in rows
    }
    return Case(replace(incident), conditions, raised_at=incident.opened, visible_since=incident.opened)


def list_incidents(
    cursor: duckdb.DuckDBPyConnection, state: str | None = None, ids: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Returns all incidents, those of one state or with these ids, newest first, in the form of the API."""
    where = "$1 IS NULL OR state = $1" if ids is None else "id IN (SELECT unnest($1))"
    found = _load(cursor, f"WHERE {where} ORDER BY opened DESC, id", [state if ids is None else list(ids)])
    return [incident.as_json() for incident in found]


def read_incident(cursor: duckdb.DuckDBPyConnection, id_: str) -> dict[str, Any]:
    """Returns one incident with findings (by onset), history and notifications. Raises KeyError if there is none."""
    found = _load(cursor, "WHERE id = $1", [id_])
    if not found:
        raise KeyError(f"incident {id_}: not found")
    more: dict[str, Any] = {"findings": _findings_of(cursor, id_), "history": _history_of(cursor, id_)}
    more |= {"notifications": list_notifications(cursor, id_), "explanation": dict(found[0].explanation)}
    return {**found[0].as_json(), **more}


def list_incidents_near(cursor: duckdb.DuckDBPyConnection, id_: str) -> list[dict[str, Any]]:
    """Returns other incidents with an onset within PAIR_WINDOW of the incident's, not those merged into another."""
    within = "abs(epoch_us(onset) - (SELECT epoch_us(onset) FROM incidents WHERE id = $1)) <= $2"
    merged = "id IN (SELECT incident FROM history WHERE kind = 'resolved' AND starts_with(comment, 'merged into '))"
    where = f"WHERE id != $1 AND {within} AND NOT (resolved IS NOT NULL AND {merged}) ORDER BY onset, id"
    return [incident.as_json() for incident in _load(cursor, where, [id_, PAIR_WINDOW])]


def list_notifications(
    cursor: duckdb.DuckDBPyConnection,
    id_: str | None = None,
    most: int = 500,
    state: str | None = None,
    receiver: str | None = None,
) -> list[dict[str, Any]]:
    """Returns payloads without bodies, newest first; `state` is pending, held, grouped, delivered, dead or muted.

    remote: who silenced the alert at the receiver itself, until when and why.
    """
    rows = cursor.execute(
        """SELECT id, o.incident, o.receiver, kind, state, attempts, answer, part_of, s.text, epoch_us(created),
                  epoch_us(next_attempt)
           FROM outbox o LEFT JOIN notify_silences s ON s.receiver = o.receiver AND s.incident = o.incident
           WHERE ($1 IS NULL OR o.incident = $1) AND ($3 IS NULL OR state = $3) AND ($4 IS NULL OR o.receiver = $4)
           ORDER BY created DESC, number DESC, id LIMIT $2""",
        [id_, most, state, receiver],
    ).fetchall()
    names = ("id", "incident", "receiver", "kind", "state", "attempts", "answer", "part_of", "remote")
    return [{**dict(zip(names, r[:9], strict=True)), "created": iso(r[9]), "next_attempt": iso(r[10])} for r in rows]


def count_payloads(cursor: duckdb.DuckDBPyConnection) -> dict[tuple[str, str], int]:
    """Returns (receiver, state) -> number of payloads."""
    rows = cursor.execute("SELECT receiver, state, count(*) FROM outbox GROUP BY ALL").fetchall()
    return {(receiver, state): count for receiver, state, count in rows}


def _write_findings(
    connection: duckdb.DuckDBPyConnection, findings: Iterable[Finding], changes: Sequence[Change]
) -> None:
    """Upserts by (detector, entity, onset); keeps the newest of the rows with the highest level and score."""
    home = {key: change.incident.id for change in changes for key in change.finding_keys}
    newest: dict[tuple[str, str, int], Finding] = {}
    for f in findings:
        newest[f.key] = _merge_finding(newest.get(f.key, f), f)
    if newest:
        rows = [_finding_row(f, home.get(key)) for key, f in newest.items()]
        connection.execute(_FINDINGS, [list(column) for column in zip(*rows, strict=True)])


def _merge_finding(known: Finding, f: Finding) -> Finding:
    """Merges a finding with a later one as _FINDINGS does: findings written together must not change the row."""
    time = max(known.time, f.time)
    if _strength(f) >= _strength(known):
        return replace(f, time=time)
    evidence = {name: value for name, value in known.evidence.items() if name not in _HELD}
    return replace(
        known, time=time, evidence=evidence | {name: f.evidence[name] for name in _HELD if name in f.evidence}
    )


def _strength(f: Finding) -> tuple[int, float]:
    return LEVELS.index(f.level), to_json(f.score) or 0.0


def _finding_row(f: Finding, incident_id: str | None) -> tuple[Any, ...]:
    evidence = json.dumps(to_json(dict(f.evidence)))
    return (
        f.time,
        f.onset,
        f.entity,
        f.detector,
        f.level,
        to_json(f.score),
        f.summary,
        evidence,
        list(f.signals),
        incident_id,
    )


def _write_incidents(connection: duckdb.DuckDBPyConnection, changes: Sequence[Change]) -> None:
    """Upserts the newest state of each incident, in one statement: one by one, 1,000 took 6 s of CPU."""
    newest = {change.incident.id: change.incident for change in changes}
    rows = [
        (
            *(i.id, i.cause, i.opened, i.onset, i.resolved, i.severity, list(i.members), to_json(i.confidence)),
            *(i.state, i.summary, i.simulated, i.detector, i.entity, i.updated, encode_life(i.life)),
            json.dumps(to_json(dict(i.explanation))),
        )
        for i in newest.values()
    ]
    connection.execute(_INCIDENT, [list(column) for column in zip(*rows, strict=True)])


def _write_history(connection: duckdb.DuckDBPyConnection, changes: Sequence[Change]) -> None:
    """Adds a row for each change but a new title, numbered on from the newest of its incident."""
    places: Counter[str] = Counter()
    rows = []
    for change in (c for c in changes if c.kind != "retitled"):
        i = change.incident
        places[i.id] += 1
        content = json.dumps({**i.as_json(), "life": json.loads(encode_life(i.life))})
        rows.append((i.id, places[i.id], change.time, change.kind, change.actor, change.comment, content))
    if rows:
        connection.execute(_HISTORY, [list(column) for column in zip(*rows, strict=True)])


def _move_findings(connection: duckdb.DuckDBPyConnection, change: Change) -> None:
    """Moves the findings of an incident that was merged or split."""
    i = change.incident
    if change.split_from is not None:
        names, entities = [k[0] for k in change.finding_keys], [k[1] for k in change.finding_keys]
        connection.execute(
            """UPDATE findings SET incident = $1 WHERE incident = $2
               AND (detector, entity) IN (SELECT (unnest($3::VARCHAR[]), unnest($4::VARCHAR[])))""",
            [i.id, change.split_from, names, entities],
        )
    elif change.folded_into is not None:
        connection.execute("UPDATE findings SET incident = $1 WHERE incident = $2", [change.folded_into, i.id])


def _load(cursor: duckdb.DuckDBPyConnection, where: str, parameters: Sequence[Any]) -> list[Incident]:
    decode: dict[str, Callable[[Any], Any]] = {
        "members": tuple,
        "life": decode_life,
        "explanation": _decode_explanation,
    }
    rows = [dict(zip(_NAMES, row, strict=True)) for row in cursor.execute(_INCIDENTS + where, parameters).fetchall()]
    return [Incident(**{**row, **{name: read(row[name]) for name, read in decode.items()}}) for row in rows]


def _decode_explanation(text: str | None) -> Mapping[str, Any]:
    return json.loads(text) if text else {}


def encode_life(life: Life) -> str:
    """Returns the fields that differ from those of an incident without changes by people, as JSON."""
    return json.dumps({name: value for name, value in dataclasses.asdict(life).items() if value != _FIELDS[name]})


def decode_life(text: str | None) -> Life:
    """Restores a life; an incident of an older store has none."""
    values: dict[str, Any] = json.loads(text) if text else {}
    known: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in _FIELDS}
    return Life(**known)


def _findings_of(cursor: duckdb.DuckDBPyConnection, id_: str) -> list[Mapping[str, Any]]:
    rows = cursor.execute(
        "SELECT epoch_us(time), epoch_us(onset), entity, detector, level, score, summary, evidence, signals "
        "FROM findings WHERE incident = $1 ORDER BY findings.onset, entity, detector",
        [id_],
    ).fetchall()
    return [
        {
            **dict(zip(_FINDING, row, strict=True)),
            "time": iso(row[0]),
            "onset": iso(row[1]),
            "evidence": json.loads(row[7]),
        }
        for row in rows
    ]


def _history_of(cursor: duckdb.DuckDBPyConnection, id_: str) -> list[Mapping[str, Any]]:
    rows = cursor.execute(
        "SELECT number, epoch_us(time), kind, actor, comment, incident_json FROM history "
        "WHERE incident = $1 ORDER BY number",
        [id_],
    ).fetchall()
    return [
        {"number": n, "time": iso(t), "kind": kind, "actor": actor, "comment": comment, "incident": json.loads(text)}
        for n, t, kind, actor, comment, text in rows
    ]


def add_mute(connection: duckdb.DuckDBPyConnection, mute: Mute) -> None:
    """Stores a mute, as a silence."""
    save_silence(connection, from_mute(mute))


def end_mute(connection: duckdb.DuckDBPyConnection, id_: str, user: str, time: int) -> None:
    """Ends a mute now; an expired one stays unchanged."""
    found = next((s for s in load_silences(connection, time) if s.id == id_ and s.kind == "mute"), None)
    if found is not None and found.end > time:
        save_silence(connection, expire(found, user, time))


def load_all_mutes(connection: duckdb.DuckDBPyConnection) -> list[Mute]:
    """Returns all mutes, also expired ones, newest first."""
    return [to_mute(s) for s in load_silences(connection) if s.kind == "mute"]


def load_active_mutes(connection: duckdb.DuckDBPyConnection, time: int) -> list[Mute]:
    """Returns the mutes in force at `time`, oldest first."""
    found = [s for s in load_silences(connection, time) if s.kind == "mute" and s.end > time]
    return [to_mute(s) for s in reversed(found)]
