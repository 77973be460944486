"""The packet for a return to the vendor: what a vendor asks for, of one device and its node, around one fault.

Only these facts go into it: identity, hardware events, counters, values beside peers, results of tests. No
names of people, jobs, accounts or addresses, and no comments; text from devices passes `redact`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from pipeline.incidents.ledger import load_incident
from pipeline.model.entity_names import entity_name
from pipeline.model.errors import UsageError
from pipeline.model.event_kinds import CANARY_IS_WRONG
from pipeline.model.records import SECOND, iso
from pipeline.model.signals import CATALOGUE, CLASS_OF_KIND, Signal
from pipeline.model.topology import Topology, kind_of
from pipeline.store import schema

HOUR = 3600 * SECOND
MOST_EVENTS, MOST_DEVICES, MOST_PEERS = 500, 64, 32
"""Rows of one packet. Chosen: a page of each in print, all of a node."""
PLACES = ("rack", "chassis", "row")
POINTS = 120
"""Points of a line of the chart. Chosen."""
IDENTITY = (
    *("sku", "model", "name", "vendor", "manufacturer", "part", "part_number", "serial", "chassis_serial"),
    *("product_serial", "board_serial", "product_uuid", "uuid", "slot", "tray", "module_id", "host_id", "index"),
    *("pci", "address", "vbios", "gsp_firmware", "inforom", "firmware", "bios", "bmc", "driver", "cuda"),
    *("kernel", "fw_ver", "board_id"),
)
"""Attributes that name a part, its place and its firmware; all others stay out."""
EVENTS = (
    *("xid", "sxid", "recovery_action", "gpu_lost", "gpu_back", "gpu_count", "aer", "sel", "kernel"),
    *("nvml_refused", "counter_reset", "version"),
)
_EVENT_KEYS = (
    *("xid", "sxid", "name", "class", "severity", "reach", "action", "then", "text", "pci", "uuid", "serial"),
    *("device", "kind", "pattern", "growth", "total", "errors", "from", "to", "count", "sensor", "type"),
    *("event", "asserted", "reading", "threshold", "present", "expected", "missing", "call", "calls", "signals"),
    *("versions", "before", "state"),
)
_SECRET = re.compile(
    r"(?i)\b(pass(?:word|wd|phrase)?|secret|token|api[_-]?key|authorization|bearer|cookie|credential\w*)\b"
    r"(?:\s*[:=]\s*|\s+)(?:bearer\s+|basic\s+)?\S+"
    r"|\b(?:whsec_|fp_|ghp_|AKIA|eyJ)[\w.\-+/=]{8,}"
    r"|-----BEGIN [A-Z ]+-----[\s\S]*?(?:-----END [A-Z ]+-----|$)"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)


def redact(value: Any) -> Any:
    """Returns a value without what looks like a password, token or key in its texts."""
    if isinstance(value, str):
        return _SECRET.sub("[removed]", value)
    if isinstance(value, Mapping):
        return {str(k): redact(v) for k, v in value.items()}
    return [redact(v) for v in value] if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True, slots=True)
class Subject:
    """What the packet is about. entity: a device or node.  node: `node:NAME`.  onset: of the fault (us)."""

    entity: str
    node: str
    onset: int
    incident: str = ""
    summary: str = ""
    detector: str = ""


def find_subject(cursor: duckdb.DuckDBPyConnection, topology: Topology, name: str, now: int) -> Subject:
    """Returns the subject of an incident, device or node; without an incident its newest one. Raises KeyError."""
    found = load_incident(cursor, name)
    if found is None:
        entity = name if ":" in name else f"node:{name}"
        below = [entity, *topology.descendants(entity)]
        row = cursor.execute(
            """SELECT id FROM incidents
               WHERE list_contains($1::VARCHAR[], cause) OR list_has_any($1::VARCHAR[], members)
               ORDER BY resolved IS NULL DESC, onset DESC LIMIT 1""",
            [below],
        ).fetchone()
        found = load_incident(cursor, row[0]) if row else None
        if found is None:
            node = topology.ancestor_of_kind(entity, "node")
            if node is None or not (entity in topology.parents or topology.descendants(entity)):
                raise KeyError(name)
            return Subject(entity, node, now)
        if entity != found.cause and kind_of(entity) != "node":
            return _make_subject(found, entity, topology)
    return _make_subject(found, "", topology)


def _make_subject(found: Any, entity: str, topology: Topology) -> Subject:
    chosen = entity or next(
        (e for e in (found.cause, found.entity, *found.members) if topology.ancestor_of_kind(e, "node")), ""
    )
    node = topology.ancestor_of_kind(chosen, "node") if chosen else None
    if node is None:
        raise UsageError(f"incident {found.id}: its cause {found.cause} is on no node; name the device or node instead")
    return Subject(chosen, node, found.onset, found.id, found.summary, found.detector)


def collect_packet(
    cursor: duckdb.DuckDBPyConnection, topology: Topology, subject: Subject, hours: float, now: int, site: str
) -> dict[str, Any]:
    """Returns the packet. hours: before the onset, and after it."""
    start, end = subject.onset - round(hours * HOUR), min(now, subject.onset + round(hours * HOUR))
    parts = [
        subject.node,
        *(e for e in topology.descendants(subject.node) if kind_of(e) not in ("rank", "stage", "job")),
    ]
    counters = read_counters(cursor, subject.entity, start, subject.onset, end)
    packet = {
        "made": iso(now),
        "site": site,
        "simulated": is_simulated(cursor, subject.node),
        "device": subject.entity,
        "device_name": entity_name(subject.entity),
        "node": subject.node.removeprefix("node:"),
        "incident": subject.incident or None,
        "summary": subject.summary or None,
        "detector": subject.detector or None,
        "onset": iso(subject.onset),
        "from": iso(start),
        "to": iso(end),
        "part_of": {
            k: v for k, v in topology.nearest_ancestors(subject.node).items() if k in ("rack", "chassis", "row")
        },
        "identity": read_identity(cursor, [subject.entity, *sorted(parts, key=_rank_part)])[: MOST_DEVICES + 1],
        "events": read_events(cursor, subject.node, start, end),
        "counters": counters,
        "peers": read_peers(cursor, topology, subject, start, end),
        "canaries": read_canaries(cursor, subject.node, start, now),
        "diagnostics": read_diagnostics(cursor, subject.node, start),
    }
    found: dict[str, Any] = redact(packet)
    return found


def _rank_part(entity: str) -> int:
    """Returns the place of a part in the list: the node, its GPUs, all others in their order."""
    return {"node": 0, "gpu": 1}.get(kind_of(entity), 2)


def is_simulated(cursor: duckdb.DuckDBPyConnection, node: str) -> bool:
    """Returns whether a node is simulated: then its packet is for practice."""
    found = cursor.execute("SELECT bool_or(simulated) FROM device WHERE entity = $1", [node]).fetchone()
    return bool(found and found[0])


def read_identity(cursor: duckdb.DuckDBPyConnection, entities: Sequence[str]) -> list[dict[str, Any]]:
    """Returns serial numbers, slots and firmware of the device, its node and the parts of it."""
    rows = dict(
        cursor.execute(
            "SELECT entity, attributes FROM entity WHERE list_contains($1::VARCHAR[], entity)", [list(entities)]
        ).fetchall()
    )
    found = []
    for entity in dict.fromkeys(entities):
        facts = json.loads(rows.get(entity) or "{}")
        kept = {key: facts[key] for key in IDENTITY if facts.get(key) not in (None, "", {}, [])}
        if kept or entity == entities[0]:
            found.append({"entity": entity, "name": entity_name(entity), **kept})
    return found


def read_events(cursor: duckdb.DuckDBPyConnection, node: str, start: int, end: int) -> list[dict[str, Any]]:
    """Returns hardware events of a node, oldest first, with XIDs and their text."""
    rows = cursor.execute(
        """SELECT epoch_us(time), entity, kind, data FROM events
           WHERE node = $1 AND list_contains($2::VARCHAR[], kind) AND time >= make_timestamptz($3::BIGINT)
             AND time <= make_timestamptz($4::BIGINT) ORDER BY time LIMIT $5""",
        [node.removeprefix("node:"), EVENTS, start, end, MOST_EVENTS],
    ).fetchall()
    found = []
    for time, entity, kind, data in rows:
        table = json.loads(data)
        found.append(
            {"time": iso(time), "entity": entity, "event": kind} | {k: table[k] for k in _EVENT_KEYS if k in table}
        )
    return found


def read_counters(
    cursor: duckdb.DuckDBPyConnection, entity: str, start: int, onset: int, end: int
) -> list[dict[str, Any]]:
    """Returns counters and states of a device: first value of the time, last before the onset, last after it."""
    device_class = CLASS_OF_KIND.get(kind_of(entity))
    if device_class is None:
        return []
    have = schema.class_types(cursor, device_class)
    signals = [
        s for s in CATALOGUE.values()
        if s.device_class == device_class and s.column in have and (s.kind == "counter" or s.states)
    ]  # fmt: skip
    if not signals:
        return []
    source = schema.select_class(cursor, device_class, ["time", "entity", *(s.column for s in signals)], start, end + 1)
    after = "time > make_timestamptz($2::BIGINT)"
    picks = ", ".join(
        f'arg_min("{s.column}", time), arg_max("{s.column}", time) FILTER (NOT {after}), '
        f'arg_max("{s.column}", time) FILTER ({after})'
        for s in signals
    )
    row = cursor.execute(
        f"""WITH c AS ({source}) SELECT {picks} FROM c
            WHERE entity = $1 AND time >= make_timestamptz($3::BIGINT) AND time <= make_timestamptz($4::BIGINT)""",
        [entity, onset, start, end],
    ).fetchone()
    values = row or (None,) * 3 * len(signals)
    found = [_describe_counter(s, *values[3 * p : 3 * p + 3]) for p, s in enumerate(signals)]
    kept = [line for line in found if any(line[name] is not None for name in ("first", "before", "after"))]
    return sorted(kept, key=lambda line: (not line["changed"], line["unit"] != "{error}", str(line["signal"])))


def _describe_counter(signal: Signal, first: Any, before: Any, after: Any) -> dict[str, Any]:
    last = after if after is not None else before
    changed = last is not None and first is not None and last != first
    line = {"signal": signal.name, "meaning": signal.help, "unit": signal.unit}
    line |= {"first": first, "before": before, "after": after}
    return {**line, "changed": changed}


def read_peers(
    cursor: duckdb.DuckDBPyConnection, topology: Topology, subject: Subject, start: int, end: int
) -> dict[str, Any] | None:
    """Returns one signal of the device and the band of its peers in the node; None without values."""
    kind = kind_of(subject.entity)
    device_class = CLASS_OF_KIND.get(kind)
    if device_class is None:
        return None
    signal = _choose_signal(cursor, subject, device_class)
    if signal is None:
        return None
    around = topology.descendants(subject.node) if kind != "node" else ()
    peers = [e for e in around if kind_of(e) == kind and e != subject.entity][:MOST_PEERS]
    source = schema.select_class(cursor, device_class, ["time", "entity", signal.column], start, end + 1)
    value = f'"{signal.column}"::DOUBLE'
    step = max(SECOND, _measure_span(cursor, source, subject.entity) // POINTS)
    rows = cursor.execute(
        f"""WITH c AS ({source})
            SELECT epoch_us(time) // {step} * {step} + {step // 2} AS bucket, avg({value}) FILTER (entity = $1),
                   min({value}) FILTER (entity <> $1), median({value}) FILTER (entity <> $1),
                   max({value}) FILTER (entity <> $1)
            FROM c WHERE list_contains($2::VARCHAR[], entity) AND time >= make_timestamptz($3::BIGINT)
              AND time <= make_timestamptz($4::BIGINT) GROUP BY bucket ORDER BY bucket""",
        [subject.entity, [subject.entity, *peers], start, end],
    ).fetchall()
    if not any(row[1] is not None for row in rows):
        return None
    return {
        "signal": signal.name,
        "unit": signal.unit,
        "peers": len(peers),
        "onset": iso(subject.onset),
        "points": [[iso(at), *(None if v is None else round(v, 4) for v in values)] for at, *values in rows],
    }


def _measure_span(cursor: duckdb.DuckDBPyConnection, source: str, entity: str) -> int:
    """Returns the time between the first and the last row of a device (us), 0 without rows."""
    found = cursor.execute(
        f"WITH c AS ({source}) SELECT epoch_us(max(time)) - epoch_us(min(time)) FROM c WHERE entity = $1", [entity]
    ).fetchone()
    return int(found[0] or 0) if found else 0


def _choose_signal(cursor: duckdb.DuckDBPyConnection, subject: Subject, device_class: str) -> Any:
    """Returns the signal that the incident is about, else the temperature, power or first gauge of the class."""
    have = schema.class_types(cursor, device_class)
    named = cursor.execute(
        "SELECT signals FROM findings WHERE incident = $1 ORDER BY time", [subject.incident]
    ).fetchall()
    wanted = [name for (names,) in named for name in names or ()]
    wanted += [f"{device_class}.{name}" for name in ("temperature", "power", "state", "load1")]
    fits: Callable[[str], bool] = lambda n: n in CATALOGUE and CATALOGUE[n].device_class == device_class  # noqa: E731
    return next((CATALOGUE[n] for n in wanted if fits(n) and CATALOGUE[n].column in have), None)


def read_canaries(cursor: duckdb.DuckDBPyConnection, node: str, start: int, now: int) -> list[dict[str, Any]]:
    """Returns results of known-answer tests on a node: by device and canary, how many ran and how many were wrong."""
    rows = cursor.execute(
        f"""SELECT entity, data ->> '$.canary', count(*), count(*) FILTER ({CANARY_IS_WRONG}),
                  epoch_us(max(time))
           FROM events WHERE node = $1 AND kind = 'digest' AND time >= make_timestamptz($2::BIGINT)
             AND time <= make_timestamptz($3::BIGINT) GROUP BY ALL ORDER BY 4 DESC, 1, 2 LIMIT $4""",
        [node.removeprefix("node:"), start, now, MOST_EVENTS],
    ).fetchall()
    names = ("entity", "canary", "reports", "wrong")
    return [{**dict(zip(names, row[:4], strict=True)), "last": iso(row[4])} for row in rows]


def read_diagnostics(cursor: duckdb.DuckDBPyConnection, node: str, start: int) -> list[dict[str, Any]]:
    """Returns the diagnostics that ended on a node since a time: level, state and output. What never ran is no test."""
    rows = cursor.execute(
        """SELECT id, state, epoch_us(updated), document -> '$.params', document -> '$.result' FROM acts
           WHERE verb = 'diagnose' AND list_contains(targets, $1) AND updated >= make_timestamptz($2::BIGINT)
           ORDER BY updated""",
        [node, start],
    ).fetchall()
    found = []
    for id_, state, time, params, result in rows:
        target = (json.loads(result or "{}").get("targets") or {}).get(node) or {}
        if "done" not in target:
            continue
        level = json.loads(params or "{}").get("level", "1")
        passed = bool(target.get("done")) and state == "verified"
        output = str(target.get("output") or "")[:4000]
        found.append(
            {"act": id_, "level": level, "state": state, "passed": passed, "time": iso(time), "output": output}
        )
    return found
