"""Sources of telemetry that do not report now: agents, collectors, BMCs, exporters, tools, disks of spools, clocks.

States come from memory (the newest row of each device), reasons from events. What a silent agent would report is not
listed: its own silence explains it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np

from pipeline.api.backend import SenderStates
from pipeline.api.fleet import SILENT
from pipeline.model.records import SECOND
from pipeline.model.signals import CATALOGUE
from pipeline.store.devices import Devices
from pipeline.store.latest import CurrentValues

Read = Callable[[str, Sequence[str]], CurrentValues]
INTERVALS = 3
"""Intervals of its messages after which a slow sender is silent. Chosen: one message may be late, one lost."""
OWN_ROW = 120 * SECOND
"""Age from which a row about a collector, BMC or exporter proves nothing (us). Chosen: twelve of their intervals."""
STARTING_S = 300.0
"""Time without a reading from which a collector that starts is a problem (s). Chosen: drivers load in two minutes."""
REFUSED = 900 * SECOND
"""How long a refusal of the driver or an overrun of the kernel log counts (us). Chosen: they are repeated sooner."""
_STATES = CATALOGUE["collector.state"].states
NO_DATA = "no data"

_REASONS = """
SELECT kind, entity, coalesce(data ->> '$.collector', data ->> '$.tool', '') AS part, arg_max(data, time),
       epoch_us(max(time)), arg_max(node, time)
FROM events
WHERE (kind = 'collector' AND NOT contains(data, '"ok"'))
   OR kind IN ('bmc_lost', 'exporter', 'fabric_tool', 'disk_slow', 'messages_rejected')
   OR (kind IN ('nvml_refused', 'kernel_log_overrun') AND time >= make_timestamptz($recent))
GROUP BY ALL"""


@dataclass(frozen=True, slots=True)
class SourceProblem:
    """One source that does not report, or reports wrongly.

    kind: agent, collector, bmc, exporter, tool, driver, disk, clock.  part: name of the collector or tool, else "".
    state: the problem, in a word or two.  node: the node that sends it.  since: UTC us, None if unknown.
    reason: what the source itself reported, unchanged.
    """

    kind: str
    part: str
    state: str
    entity: str
    node: str
    since: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """The newest event about a source: its data, its time (us), and the node that sent it."""

    data: Mapping[str, Any]
    time: int
    node: str

    def text(self, key: str) -> str:
        """Returns a field as text, "" without it."""
        value = self.data.get(key, "")
        return value if isinstance(value, str) else json.dumps(value)


Reports = Mapping[tuple[str, str, str], Report]
"""(kind of event, entity, collector or tool) -> newest event."""


def read_reports(cursor: duckdb.DuckDBPyConnection, now: int) -> Reports:
    """Returns the newest event about each source that had a problem."""
    rows = cursor.execute(_REASONS, {"recent": now - REFUSED}).fetchall()
    return {(kind, entity, part): Report(_table(data), time, node) for kind, entity, part, data, time, node in rows}


def _table(text: str) -> Mapping[str, Any]:
    found = json.loads(text)
    return found if isinstance(found, dict) else {}


def find_silent(senders: SenderStates, now: int) -> set[str]:
    """Returns the nodes whose agent sent nothing for SILENT or INTERVALS of its messages."""
    return {
        node
        for node, arrived in senders.arrivals.items()
        if now - arrived > max(SILENT, INTERVALS * senders.intervals.get(node, 0))
    }


def find_problems(
    read: Read, devices: Devices, senders: SenderStates, reports: Reports, known: Iterable[str], now: int
) -> list[SourceProblem]:
    """Returns all sources that do not report now. known: nodes that the inventory or telemetry names."""
    silent = find_silent(senders, now)
    newer = set(senders.newer)
    found = [_silent_agent(node, senders, reports, newer) for node in sorted(silent)]
    found += [_blocked_agent(node, None) for node in sorted(newer - silent)]
    # of a node whose devices another sender reports there is no agent to expect
    found += [
        SourceProblem("agent", "", "never reported", f"agent:{node}", node, None, "")
        for node in known
        if node not in senders.arrivals and node not in newer
    ]
    found += _collectors(read, devices, silent, reports, now)
    found += _answering(read, devices, silent, reports, now)
    found += _reported(reports, silent)
    found += [
        SourceProblem("clock", "", "ahead" if error > 0 else "behind", f"node:{node}", node, None, _seconds(error))
        for node, error in sorted(senders.clock_errors.items())
        if node not in silent
    ]
    return found


def _seconds(error: int) -> str:
    return f"{abs(error) / SECOND:,.0f} s"


def _silent_agent(node: str, senders: SenderStates, reports: Reports, newer: Collection[str]) -> SourceProblem:
    arrived = senders.arrivals[node]
    rejected = reports.get(("messages_rejected", f"node:{node}", ""))
    if node in newer:
        return _blocked_agent(node, arrived)
    if rejected is not None and rejected.time >= arrived - SILENT:
        rules = rejected.data.get("rules")
        words = ", ".join(map(str, rules)) if isinstance(rules, dict) else rejected.text("rules")
        return SourceProblem("agent", "", "rejected", f"agent:{node}", node, arrived, f"rules: {words}")
    return SourceProblem("agent", "", "silent", f"agent:{node}", node, arrived, "")


def _blocked_agent(node: str, since: int | None) -> SourceProblem:
    return SourceProblem("agent", "", "newer than the pipeline", f"agent:{node}", node, since, "")


def _fresh(
    read: Read, devices: Devices, device_class: str, columns: Sequence[str], silent: Collection[str], now: int
) -> Iterator[tuple[str, str, int, dict[str, float]]]:
    """Yields (entity, node, time, values) of the devices of a class whose row is new and whose agent is not silent."""
    found = read(device_class, columns)
    names, origins = devices.names(device_class), devices.origins(device_class)
    at = np.flatnonzero((found.slot >= 0) & (now - found.time <= OWN_ROW))
    taken = {column: values[at].astype(float).tolist() for column, values in found.values.items()}
    for i, (slot, time) in enumerate(zip(found.slot[at].tolist(), found.time[at].tolist(), strict=True)):
        node = origins[slot][1]
        if node not in silent:
            yield names[slot], node, time, {column: values[i] for column, values in taken.items()}


def _collectors(
    read: Read, devices: Devices, silent: Collection[str], reports: Reports, now: int
) -> Iterator[SourceProblem]:
    for entity, node, time, values in _fresh(read, devices, "collector", ("state", "silence"), silent, now):
        number, silence = int(values.get("state", 1)), values.get("silence", 0.0)
        state = _STATES[number] if number < len(_STATES) else "ok"
        quiet = silence if np.isfinite(silence) else 0.0
        if state == "ok" or (state == "starting" and quiet < STARTING_S):
            continue
        part = entity.partition(":")[2].removeprefix(f"{node}.")
        report = reports.get(("collector", f"node:{node}", part))
        since = report.time if report is not None else time - int(quiet * SECOND)
        reason = "" if report is None else report.text("reason")
        yield SourceProblem("collector", part, state, entity, node, since, reason)


_ANSWERS = (("bmc", "reachable", "does not respond", "bmc_lost"), ("exporter", "up", "does not respond", "exporter"))


def _answering(
    read: Read, devices: Devices, silent: Collection[str], reports: Reports, now: int
) -> Iterator[SourceProblem]:
    """Yields BMCs and exporters that do not respond."""
    for device_class, column, state, kind in _ANSWERS:
        for entity, node, time, values in _fresh(read, devices, device_class, (column,), silent, now):
            if values.get(column, 1.0) != 0.0:
                continue
            report = reports.get((kind, entity, ""))
            since, reason = (time, "") if report is None else (report.time, report.text("reason"))
            yield SourceProblem(device_class, "", state, entity, node, since, reason)


def _reported(reports: Reports, silent: Collection[str]) -> Iterator[SourceProblem]:
    """Yields what only events report: tools of a fabric, slow disks, refusals of the driver, overruns of the log."""
    for (kind, entity, part), report in reports.items():
        node, state = report.node, report.text("state")
        if node in silent:
            continue
        if kind == "fabric_tool" and state == "failing":
            yield SourceProblem("tool", part, state, entity, node, report.time, report.text("reason"))
        elif kind == "disk_slow" and state == "active":
            waited = f"messages wait {report.text('seconds')} s, {report.text('waiting')} waiting"
            yield SourceProblem("disk", "", "slow", entity, node, report.time, waited)
        elif kind == "nvml_refused":
            yield SourceProblem("driver", "", "refuses calls", entity, node, report.time, report.text("calls"))
        elif kind == "kernel_log_overrun":
            missed = f"{report.text('missed')} records overwritten before they were read"
            yield SourceProblem("collector", "kernel_log", "overrun", entity, node, report.time, missed)
