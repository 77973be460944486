"""Compares what was said with what really happened: `fleetpulse score`.

An alert is an incident that pages; without incidents, a condition (detector, entity, onset) that pages. It answers an
event if detector and cause count for the event's kind (COUNTS), the cause is the guilty entity or an ancestor of it
(a rank stands for its GPU), and a page of it came between 60 s before the onset and 10 min after the end. One page
answers one event; an incident that pages again after it was reopened may answer another one. An incident that only
answers what another one answered is a duplicate, and false: they should have been one. A page within a benign event
is false.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detectors.intervals import poisson, wilson
from pipeline.errors import UsageError
from pipeline.recordings import read_topology
from pipeline.records import SECOND, from_iso
from pipeline.topology import Topology, kind_of

LEAD, GRACE = 60 * SECOND, 600 * SECOND
_DAY = 86_400 * SECOND


@dataclass(frozen=True, slots=True)
class Counting:
    """Which detectors and which kinds of cause are an answer to a kind of fault."""

    detectors: frozenset[str]
    causes: frozenset[str]


COUNTS: Mapping[str, Counting] = {
    "sdc": Counting(frozenset({"sdc"}), frozenset({"gpu", "node"})),
    "link_degradation": Counting(frozenset({"link"}), frozenset({"port", "node", "leaf", "rail"})),
    "straggler": Counting(frozenset({"straggler"}), frozenset({"rank", "gpu", "node"})),
    # slow ranks may be what first shows a warm loop; then the cause must be the loop or its rack all the same
    "coolant": Counting(
        frozenset({"coolant", "coolant_edge", "thermal_edge", "straggler"}), frozenset({"cdu", "loop", "rack"})
    ),
}
"""A kind that is not here may be answered by any detector, on the guilty entity or any ancestor."""


@dataclass(slots=True)
class Alert:
    """What paged: on what, by whom. `suspects` are the entities that it names, most blamed first.

    times: when a condition of it began to page. A reopened incident has several, and may answer an event with each.
    """

    times: tuple[int, ...]
    cause: str
    detector: str
    suspects: tuple[str, ...]

    @property
    def time(self) -> int:
        return self.times[0]


@dataclass(frozen=True, slots=True)
class Truth:
    """One line of truth.jsonl. `onset` is from where the delay counts: for ramps, when it can be seen at all."""

    id: str
    kind: str
    entities: tuple[str, ...]
    onset: int
    end: int
    detectability: str
    visible: int


def score(
    findings: str | Path,
    truth: str | Path,
    incidents: str | Path | None = None,
    topology: str | Path | None = None,
    meta: str | Path | None = None,
    json_file: str | Path | None = None,
) -> dict[str, Any]:
    """The figures, as plain data; also written to `json_file`. Raises UsageError naming file and line."""
    graph = read_topology(topology) if topology else Topology()
    told = _lines(findings, ("time", "onset", "entity", "detector", "level"))
    cases = _lines(incidents, ("id", "cause", "opened", "severity", "members")) if incidents else None
    events = [_truth(row) for row in _lines(truth, ("id", "kind", "entity", "onset", "end"))]
    alerts = _alerts(told, cases)
    days = _node_days(meta) if meta else None
    result = figures(events, alerts, graph, days)
    if json_file:
        try:
            Path(json_file).write_text(json.dumps(result, indent=1) + "\n")
        except OSError as error:
            raise UsageError(f"{json_file}: cannot be written: {error.strerror}") from error
    return result


def figures(events: Sequence[Truth], alerts: Sequence[Alert], topology: Topology, days: float | None) -> dict[str, Any]:
    """All figures of alerts against events."""
    wanted = [e for e in events if e.detectability in ("hard", "soft")]
    hits, duplicates = _match(wanted, alerts, topology)
    right = {id(alert) for alert, _ in hits.values()}
    false = [a for a in alerts if id(a) not in right]
    kinds = dict.fromkeys(e.kind for e in wanted)
    total = _block(wanted, hits, topology) | {"duplicates": len(duplicates)}
    return {
        **total,
        "alerts": len(alerts),
        "false": len(false),
        "precision": (len(alerts) - len(false)) / len(alerts) if alerts else None,
        "node_days": days,
        "false_pages_per_1000_node_days": _rate(len(false), days),
        "compression": sum(len(a.times) for a in alerts) / len(alerts) if alerts else None,
        "false_by_detector": dict(sorted(Counter(a.detector for a in false).items())),
        "missed": [e.id for e in wanted if e.id not in hits],
        "not_counted": dict(sorted(Counter(e.detectability for e in events if e not in wanted).items())),
        "kinds": {k: _block([e for e in wanted if e.kind == k], hits, topology) for k in kinds},
    }


Hit = tuple[Alert, int]


def _match(events: Sequence[Truth], alerts: Sequence[Alert], topology: Topology) -> tuple[dict[str, Hit], list[Alert]]:
    """The first alert of each event with its time, and the alerts that only answer what was answered already."""
    hits: dict[str, Hit] = {}
    fitting: dict[int, Alert] = {}
    for time, alert in sorted(
        ((t, a) for a in alerts for t in a.times), key=lambda x: (x[0], x[1].cause, x[1].detector)
    ):
        fits = [e for e in events if _answers(alert, time, e, topology)]
        fitting |= {id(alert): alert} if fits else {}
        if open_ := [e for e in fits if e.id not in hits]:
            hits[min(open_, key=lambda e: (abs(time - e.onset), e.id)).id] = (alert, time)
    used = {id(alert) for alert, _ in hits.values()}
    return hits, [alert for key, alert in fitting.items() if key not in used]


def _answers(alert: Alert, time: int, event: Truth, topology: Topology) -> bool:
    if not event.onset - LEAD <= time <= event.end + GRACE:
        return False
    counting = COUNTS.get(event.kind)
    if counting and not (alert.detector in counting.detectors and kind_of(alert.cause) in counting.causes):
        return False
    return any(_is(alert.cause, root, topology) or alert.cause in topology.above(root) for root in event.entities)


def _is(entity: str, root: str, topology: Topology) -> bool:
    """Whether it is the guilty entity, or the rank that runs on it."""
    return entity == root or (kind_of(entity) == "rank" and root in topology.parents.get(entity, ()))


def _block(events: Sequence[Truth], hits: Mapping[str, Hit], topology: Topology) -> dict[str, Any]:
    """Recall, delay and localisation of some events."""
    found = [(e, *hits[e.id]) for e in events if e.id in hits]
    delays = sorted((min(time, max(e.end, e.visible)) - e.visible) / SECOND for e, _, time in found)
    first = [any(_is(a.cause, root, topology) for root in e.entities) for e, a, _ in found]
    three = [any(_is(s, root, topology) for s in a.suspects[:3] for root in e.entities) for e, a, _ in found]
    return {
        "events": len(events),
        "found": len(found),
        "recall": len(found) / len(events) if events else None,
        "recall_95": wilson(len(found), len(events)),
        "delay_median_s": statistics.median(delays) if delays else None,
        "delay_p90_s": delays[math.ceil(0.9 * len(delays)) - 1] if delays else None,
        "top1": sum(first) / len(found) if found else None,
        "top3": sum(three) / len(found) if found else None,
    }


def _rate(count: int, days: float | None) -> dict[str, float] | None:
    """Count per 1,000 node-days with its exact 95 % interval."""
    if not days:
        return None
    low, high = poisson(count)
    return {"value": 1000 * count / days, "low": 1000 * low / days, "high": 1000 * high / days}


def _alerts(findings: Sequence[Mapping[str, Any]], incidents: Sequence[Mapping[str, Any]] | None) -> list[Alert]:
    """Pages, by the incidents if there are some; an incident pages when its first finding of that level is there."""
    conditions: dict[tuple[str, str, str], Alert] = {}
    for f in findings:
        key = (f["detector"], f["entity"], f["onset"])
        if f["level"] == "page" and key not in conditions:
            conditions[key] = Alert((from_iso(f["time"]),), f["entity"], f["detector"], (f["entity"],))
    if incidents is None:
        return list(conditions.values())
    by_entity: dict[str, list[Alert]] = defaultdict(list)
    for alert in conditions.values():
        by_entity[alert.cause].append(alert)
    return [_of_incident(i, by_entity) for i in incidents if i["severity"] == "page"]


def _of_incident(incident: Mapping[str, Any], by_entity: Mapping[str, Sequence[Alert]]) -> Alert:
    opened, members = from_iso(incident["opened"]), incident["members"]
    until = from_iso(incident["resolved"]) if incident.get("resolved") else sys.maxsize
    mine = [a for m in members for a in by_entity.get(m, ()) if opened <= a.time <= until]
    mine.sort(key=lambda a: (a.time, a.cause))
    detector = incident.get("detector") or (mine[0].detector if mine else "")
    suspects = dict.fromkeys([incident["cause"], incident.get("entity") or incident["cause"], *(a.cause for a in mine)])
    times = tuple(a.time for a in mine) or (opened,)
    return Alert(times, incident["cause"], detector, tuple(suspects))


def _truth(row: Mapping[str, Any]) -> Truth:
    onset, seen = from_iso(row["onset"]), (row.get("parameters") or {}).get("detectable")
    visible = from_iso(seen) if isinstance(seen, str) else onset
    entities = tuple(row.get("entities") or [row["entity"]])
    return Truth(row["id"], row["kind"], entities, onset, from_iso(row["end"]), row.get("class", "soft"), visible)


def _node_days(path: str | Path) -> float:
    """Length of the recording times its nodes."""
    try:
        meta = json.loads(Path(path).read_text())
        return float(meta["nodes"]) * (from_iso(meta["end"]) - from_iso(meta["start"])) / _DAY
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; wanted meta.json") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: {type(error).__name__}: {error}; wanted nodes (number), start and end (times)"
        ) from error


def _lines(path: str | Path, needed: Sequence[str]) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file. Raises UsageError naming the line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}; wanted JSON lines") from error
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
            missing = [key for key in needed if key not in row]
            for key in {"time", "onset", "end", "opened"} & row.keys():
                from_iso(row[key])
        except (ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{path}: line {number}: {error}; wanted an object with {', '.join(needed)}") from error
        if missing:
            raise UsageError(f"{path}: line {number}: {', '.join(missing)} missing; wanted {', '.join(needed)}")
        rows.append(row)
    return rows


COLUMNS = ("kind", "events", "found", "recall", "recall_95", "delay_median_s", "delay_p90_s", "top1", "top3")


def rows(result: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """The table that `fleetpulse score` prints: one row per kind, then all."""
    for kind, block in [*result["kinds"].items(), ("all", result)]:
        row = {name: block.get(name) for name in COLUMNS[1:]}
        yield {"kind": kind, **{k: _short(v) for k, v in row.items()}}


def summary(result: Mapping[str, Any]) -> str:
    """What the table has no room for, in one line."""
    rate = result["false_pages_per_1000_node_days"]
    false = (
        f"{rate['value']:.2f} ({rate['low']:.2f} to {rate['high']:.2f}) per 1,000 node-days" if rate else "no meta.json"
    )
    precision = "-" if result["precision"] is None else f"{result['precision']:.3f}"
    return f"precision {precision}, {result['false']} false of {result['alerts']} pages: {false}"


def _short(value: Any) -> Any:
    if isinstance(value, tuple):
        return " to ".join(f"{v:.2f}" for v in value)
    return round(value, 3) if isinstance(value, float) else value
