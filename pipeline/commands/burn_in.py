"""Tighter limits for nodes in their burn-in: a ticket elsewhere pages here, and the first error is a ticket.

A node is in burn-in for [acts] burn_in_days after it was released here. Detectors keep their thresholds, which are
certified; findings from here are in addition to theirs, under the name `burn_in`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Literal

import duckdb

from pipeline.commands.link_soak import read_rises
from pipeline.commands.service import PipelineService
from pipeline.model.entity_names import TITLE_LENGTH, entity_name
from pipeline.model.records import SECOND, Finding, Incident
from pipeline.model.signals import CLASS_OF_KIND
from pipeline.model.topology import Topology, kind_of
from pipeline.objectives.failures import read_burn_ins

DETECTOR = "burn_in"
EVERY = 60 * SECOND
"""Time between two looks (us). Chosen: as that of objectives."""
WINDOW = 600 * SECOND
"""Time in which a counter must not rise (us). Chosen: an error is reported for as long."""
SETTLE = 300 * SECOND
"""Time after the release that does not count (us): links come up, programs start. Chosen."""
MOST_NODES = 64
"""Nodes that are looked at. Chosen: more than a fleet of 100,000 GPUs repairs in a week."""
DAY = 86_400 * SECOND
_NEWEST = "SELECT signals, evidence FROM findings WHERE incident = $1 ORDER BY time DESC LIMIT 1"
FIRST_ERRORS: Mapping[str, tuple[str, ...]] = {
    "gpu": (
        *("ecc_uncorrected", "rows_corrected", "rows_uncorrected", "pcie_replay_rollovers", "pcie_non_fatal"),
        *("pcie_fatal", "canary_mismatches"),
    ),
    "nic": ("link_downs", "carrier_downs", "phy_link_downs", "symbol_errors", "phy_symbol_errors", "icrc_errors"),
    "nvlink": ("crc_errors", "recovery_errors", "recoveries_failed", "integrity_errors", "effective_errors"),
}
"""Counters whose first rise is a ticket, by class of device. Elsewhere a detector asks for more of them."""


class BurnInWatch:
    """Called by the loop of the pipeline; does something once a minute, for nodes in burn-in alone."""

    def __init__(self, service: PipelineService) -> None:
        self._service = service
        self._last = 0
        self._raised: set[str] = set()

    def run(self) -> bool:
        """Reports what fails in its burn-in. Returns whether there was anything."""
        service, now = self._service, self._service.clock()
        engine, days = service.engine, service.config.acts.burn_in_days
        if engine is None or days <= 0 or 0 <= now - self._last < EVERY:
            return False
        self._last = now
        with contextlib.closing(service.database.cursor()) as cursor:
            ends = read_burn_ins(cursor, now, days)
            released = {node: end - round(days * DAY) for node, end in list(ends.items())[:MOST_NODES]}
            if not released:
                return False
            with engine.lock:
                topology, shown = engine.topology, list(engine.life.shown.values())
            found = find_first_errors(cursor, topology, released, now)
            found += self._raise_tickets(cursor, shown, topology, released, now)
        if found:
            engine.apply(lambda desk: desk.observe_own(now, found), [], found)
        return bool(found)

    def _raise_tickets(
        self,
        cursor: duckdb.DuckDBPyConnection,
        shown: Iterable[Incident],
        topology: Topology,
        released: Mapping[str, int],
        now: int,
    ) -> list[Finding]:
        """Returns one finding for each ticket that began in a burn-in; once, since a severity does not fall.

        It has signals and evidence of the incident's newest finding, so that its page shows the same charts.
        """
        shown = [i for i in shown if i.resolved is None]
        self._raised &= {incident.id for incident in shown}
        made = []
        for incident in shown:
            node = topology.ancestor_of_kind(incident.cause, "node") or ""
            due = incident.severity == "ticket" and incident.detector != DETECTOR and incident.id not in self._raised
            if due and incident.onset >= released.get(node.partition(":")[2], now + 1):
                self._raised.add(incident.id)
                row = cursor.execute(_NEWEST, [incident.id]).fetchone()
                signals, evidence = (tuple(row[0]), json.loads(row[1])) if row else ((), {})
                told = {**evidence, "detector": incident.detector}
                made.append(_make(incident.cause, incident.onset, "page", incident.summary, told, now, signals))
        return made


def find_first_errors(
    cursor: duckdb.DuckDBPyConnection, topology: Topology, released: Mapping[str, int], now: int
) -> list[Finding]:
    """Returns a ticket for each device of a node in burn-in that counted an error within WINDOW."""
    made = []
    for node, since in released.items():
        start = max(now - WINDOW, since + SETTLE)
        below = topology.descendants(f"node:{node}") if start < now else ()
        for device_class, columns in FIRST_ERRORS.items():
            own = [e for e in below if CLASS_OF_KIND.get(kind_of(e)) == device_class]
            for entity, row in read_rises(cursor, device_class, columns, own, start, now).items():
                rose = {name: row[name] for name in columns if row.get(name, 0) > 0}
                if rose:
                    said = ", ".join(f"{name.replace('_', ' ')} +{number:,.0f}" for name, number in rose.items())
                    text, signals = f"{entity_name(entity)}: {said}", tuple(f"{device_class}.{name}" for name in rose)
                    made.append(_make(entity, start, "ticket", text, rose, now, signals))
    return made


def _make(
    entity: str,
    onset: int,
    level: Literal["page", "ticket"],
    text: str,
    evidence: Mapping[str, object],
    now: int,
    signals: tuple[str, ...] = (),
) -> Finding:
    mark = " (burn-in)"
    title = text if text.endswith(mark) else text[: TITLE_LENGTH - len(mark)] + mark
    return Finding(now, onset, entity, DETECTOR, level, 1.0, title, dict(evidence), signals)
