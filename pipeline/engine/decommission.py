"""Nodes that are out of service for good, until a person returns them: stored, counted, never evaluated.

    decommissioned   its open incidents are resolved with the reason; an event `maintenance_start` makes the detectors
                     expect nothing of it, and is repeated for as long as a silent node is looked for
    afterwards       telemetry and events that it still sends are stored and counted, and reach no frame; findings about
                     it are dropped; counts of agents and the fleet leave it out
    returned         only by a person: a node that starts again by mistake must not page. `maintenance_end` follows

What belongs to a node: the node and all that is named after it, such as gpu:n042.3. What it read for others, such as a
coolant unit, does not: its silence stays a finding until another sender reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import duckdb
import numpy as np
from numpy.typing import NDArray

from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND, Event, Finding, Incident, Rows, iso, select_rows

TABLE = "decommissioned"
MAX_NODES = 100_000
"""Most nodes that are decommissioned at a time. Chosen: as many as senders are known."""
ANNOUNCED_S = 86_400
"""Length of the announced maintenance (s): detectors believe no longer one (detectors/base/gates.py)."""
ANNOUNCE_EVERY = 12 * 3600 * SECOND
"""Time between two announcements (us). Chosen: one may be missed."""
LOOKED_FOR = 96 * 3600 * SECOND
"""How long they are repeated (us): detectors look for a silent node for 72 h."""


Write = Callable[[duckdb.DuckDBPyConnection], None]
"""What writes a change in a transaction of the caller."""
_OWN_KINDS = ("maintenance_start", "maintenance_end")


@dataclass(frozen=True, slots=True)
class Decommission:
    """A node out of service: start, author and reason, and time and author of its return."""

    node: str
    since: int
    user: str
    reason: str
    returned: int | None = None
    returned_by: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns the JSON object of the API."""
        back = None if self.returned is None else iso(self.returned)
        times = {"since": iso(self.since), "returned": back}
        return {"node": self.node, "user": self.user, "reason": self.reason, "returned_by": self.returned_by, **times}


def list_decommissions(connection: duckdb.DuckDBPyConnection) -> list[Decommission]:
    """Returns all rows, also of returned nodes; newest first."""
    rows = connection.execute(
        """SELECT node, epoch_us(since), "user", reason, epoch_us(returned), returned_by FROM decommissioned
           ORDER BY since DESC, node"""
    ).fetchall()
    return [Decommission(*row) for row in rows]


class Decommissioned:
    """The nodes that are out of service now, and what of their data is not evaluated. Empty: everything passes."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, now: int) -> None:
        self.nodes = {row.node: row for row in list_decommissions(connection) if row.returned is None}
        self.rows = self.events = 0
        self._announced = dict.fromkeys(self.nodes, now - ANNOUNCE_EVERY)
        self._masks: dict[str, NDArray[np.bool_]] = {}

    def has(self, entity: str) -> bool:
        """Whether the entity is or belongs to a decommissioned node, by its name."""
        if not self.nodes:
            return False
        name = entity.partition(":")[2]
        ends = [i for i, letter in enumerate(name) if letter == "."]
        return name in self.nodes or any(name[:end] in self.nodes for end in ends)

    def keep_rows(self, rows: Rows, names: Sequence[str]) -> Rows:
        """Returns the rows of other nodes. names: devices of the class by slot."""
        if not self.nodes:
            return rows
        mask = self._masks.get(rows.device_class, np.zeros(0, bool))
        if len(mask) < len(names):
            mask = np.concatenate([mask, [self.has(name) for name in names[len(mask) :]]]).astype(bool)
            self._masks[rows.device_class] = mask
        out = mask[rows.device]
        dropped = int(np.count_nonzero(out))
        self.rows += dropped
        return select_rows(rows, ~out) if dropped else rows

    def keep_events(self, events: Iterable[Event]) -> list[Event]:
        """Returns the events of other nodes."""
        given = list(events)
        kept = [event for event in given if not self.has_event(event)] if self.nodes else given
        self.events += len(given) - len(kept)
        return kept

    def has_event(self, event: Event) -> bool:
        """Whether an event is about a decommissioned node; but its maintenance passes, which we announce."""
        return event.kind not in _OWN_KINDS and self.has(event.entity)

    def keep_findings(self, findings: Iterable[Finding]) -> list[Finding]:
        """Returns the findings about others."""
        return [finding for finding in findings if not self.has(finding.entity)] if self.nodes else list(findings)

    def keep_senders(self, times: Mapping[str, int]) -> Mapping[str, int]:
        """Returns the times of other nodes, by node."""
        return {node: time for node, time in times.items() if node not in self.nodes} if self.nodes else times

    def set(self, row: Decommission) -> None:
        """Adds a node, or removes it if it was returned."""
        self._masks.clear()
        self.nodes.pop(row.node, None)
        self._announced.pop(row.node, None)
        if row.returned is None:
            self.nodes[row.node], self._announced[row.node] = row, row.since

    def due_announcements(self, now: int) -> list[Event]:
        """Returns the events `maintenance_start` that are due again; call it at least every ANNOUNCE_EVERY."""
        due = [
            row
            for row in self.nodes.values()
            if now - row.since < LOOKED_FOR and now - self._announced[row.node] >= ANNOUNCE_EVERY
        ]
        self._announced |= dict.fromkeys((row.node for row in due), now)
        return [announce(row, now) for row in due]

    def find_concerned(self, incidents: Iterable[Incident], sites: Iterable[str] = ()) -> list[str]:
        """Returns the ids of unresolved incidents of which all causes and members belong to decommissioned nodes.

        sites: those without another node, which belong to them too.
        """
        gone = {f"site:{site}" for site in sites}
        return [
            i.id
            for i in incidents
            if i.resolved is None and all(e in gone or self.has(e) for e in (i.cause, i.entity, *i.members))
        ]


def announce(row: Decommission, now: int) -> Event:
    """Returns the event that makes detectors expect nothing of a node."""
    data = {"reason": f"decommissioned by {row.user}: {row.reason}", "seconds": ANNOUNCED_S}
    return Event(now, f"node:{row.node}", "maintenance_start", data)


def add_row(row: Decommission) -> Write:
    """Returns what writes a row of a decommissioned node, in a transaction of the caller."""

    def write(connection: duckdb.DuckDBPyConnection) -> None:
        values = [row.node, row.since, row.user, row.reason]
        connection.execute("INSERT INTO decommissioned VALUES (?, make_timestamptz(?), ?, ?, NULL, NULL)", values)

    return write


def end_row(row: Decommission) -> Write:
    """Returns what writes the return of a node, in a transaction of the caller."""

    def write(connection: duckdb.DuckDBPyConnection) -> None:
        values = [row.returned, row.returned_by, row.node]
        connection.execute(
            "UPDATE decommissioned SET returned = make_timestamptz(?), returned_by = ? "
            "WHERE node = ? AND returned IS NULL",
            values,
        )

    return write


def check_node(node: str, reason: str, known: Callable[[str], bool], number: int) -> None:
    """Raises UsageError if a node is unknown, the reason is empty, or too many are decommissioned."""
    if not known(f"node:{node}"):
        raise UsageError(f"node {node!r}: is not known; GET /api/v1/fleet lists the nodes")
    if not reason.strip():
        raise UsageError("reason: is empty; expected why the node is out of service, for the next person on call")
    if number >= MAX_NODES:
        raise UsageError(f"nodes: {MAX_NODES} are decommissioned, which is the maximum; return some of them")


def end(row: Decommission, now: int, user: str) -> Decommission:
    """Returns the row of a node that is returned now."""
    return replace(row, returned=now, returned_by=user)
