"""`fleetpulse once`: reads everything that this node can measure once, prints it and exits. Counters are raw."""

from __future__ import annotations

import csv
import io
import json
import sys
import threading
import time as clock_time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from agents.collector import Collector, Reading
from agents.collectors.registry import configured_collectors
from agents.node.batches import build_blocks
from agents.node.health import status_file
from agents.node.workers.pool import ReadResult, Worker, WorkerPool, merge_results
from agents.node.workers.processes import WorkerProcesses
from pipeline.config.sections import Config
from pipeline.model.records import iso
from pipeline.model.signals import CATALOGUE

Output = Literal["table", "json", "jsonl", "csv"]
Values = dict[str, float | int | None]
STEP_S = 0.25
"""How far a collector may exceed its deadline before it is abandoned; chosen, too short to notice."""
CLOSE_S = 0.5
"""How long ending waits for the collectors to close; chosen, a person waits for the prompt."""
DISK_S = 2.0
"""Timeout of reading the agent's status, which may be on a slow disk; chosen: a healthy disk takes 1 ms."""
DASH_NOTE = "- : not measured in one reading, or not supported; gauges over a span need two readings\n"
NO_ANSWER_YET = "no answer yet"
_UP_SIGNALS = {"bmc": "bmc.reachable", "exporter": "exporter.up"}
_DOWN_EVENTS = frozenset({"bmc_lost", "exporter"})


@dataclass(frozen=True, slots=True)
class CollectorReport:
    """The result of one collector at `time`: readings, or why there are none ("no data: no NVIDIA driver")."""

    collector: str
    time: int
    readings: tuple[Reading, ...] = ()
    problem: str = ""
    took: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether it failed or hung; absent hardware is not a failure."""
        return bool(self.problem) and not self.problem.startswith("no data: ")


def read_once(
    config: Config, collectors: Sequence[Collector] | None = None, processes: WorkerProcesses | None = None
) -> list[CollectorReport]:
    """Reads every collector once, all at the same time; one that exceeds its deadline is `hung`."""
    collectors = (
        configured_collectors(config.collector, config.source, config.agent.collectors)
        if collectors is None
        else collectors
    )
    pool, now = WorkerPool(collectors, config.agent.node, processes=processes), clock_time.time_ns() // 1000
    try:
        results = _collect_results(pool, now)
        _read_settling(pool, results)
        return [_build_report(worker, results.get(worker), now) for worker in pool.workers]
    finally:
        pool.close(CLOSE_S)


def _collect_results(pool: WorkerPool, now: int) -> dict[Worker, ReadResult]:
    """The result of each worker within its own deadline; none has to wait for the longest deadline."""
    results, before = pool.tick(now, 0.0, with_inventory=True), clock_time.monotonic()
    while busy := [worker for worker in pool.workers if worker.busy]:
        results |= pool.wait_for(busy, STEP_S)
        time = clock_time.monotonic()
        for worker in busy:
            worker.add_waiting_time(min(time - before, 2 * STEP_S))  # as in the agent, when the machine pauses
        before = time
    return results


def _read_settling(pool: WorkerPool, results: dict[Worker, ReadResult]) -> None:
    """Reads collectors whose first reading is empty by design again, until their values had time to arrive."""
    began = clock_time.monotonic()
    while waiting := [w for w in pool.workers if w.collector.settling > clock_time.monotonic() - began]:
        clock_time.sleep(STEP_S)
        ready = [w for w in waiting if w in results and results[w].state == "ok" and not w.busy and w.start_read(True)]
        if not ready:
            return
        for worker, result in pool.wait_for(ready, max(w.collector.deadline for w in ready)).items():
            results[worker] = merge_results(results[worker], result)


def _build_report(worker: Worker, result: ReadResult | None, time: int) -> CollectorReport:
    name = worker.collector.name
    if result is None:
        return CollectorReport(name, time, (), f"fault: {worker.reason or 'it was not read'}")
    reason = result.reason.partition("; abandoned, restart in")[0]  # this command restarts nothing
    problem = f"{result.state}: {reason}" if result.state != "ok" else ""
    return CollectorReport(name, time, result.readings, problem, result.took)


def print_once(config: Config, output: Output = "table", collectors: Sequence[Collector] | None = None) -> int:
    """Prints one reading on stdout; problems go to stderr, and in JSON also into the document.

    Returns 1 if a collector failed or hung, else 0: absent hardware is not a failure.
    """
    reports = read_once(config, collectors)
    for report in reports:
        if report.problem:
            sys.stderr.write(f"collector {report.collector}: {report.problem}\n")
        for entity, reason in find_unreachable(report.readings).items():
            sys.stderr.write(f"collector {report.collector}: {entity}: {reason}\n")
    if problem := describe_slow_disk(config):
        sys.stderr.write(f"{problem}\n")
    sys.stdout.write(_RENDERERS[output](config, reports))
    missing = any(value is None for values in _values_by_entity(reports).values() for value in values.values())
    if output == "table" and missing:
        sys.stdout.flush()
        sys.stderr.write(DASH_NOTE)
    return int(any(report.failed for report in reports))


def find_unreachable(readings: Sequence[Reading]) -> dict[str, str]:
    """BMCs and exporters that do not respond -> the reason; NO_ANSWER_YET if one neither answered nor failed yet."""
    up: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    for reading in readings:
        for event in reading.events:
            if event.kind in _DOWN_EVENTS:
                reasons[event.entity] = str(event.data.get("reason") or "")
        signal = _UP_SIGNALS.get(reading.device_class)
        column = reading.columns.get(signal) if signal is not None else None
        for i, entity in enumerate(reading.entities if signal is not None else ()):
            value = float(column[i]) if column is not None else float("nan")
            up[entity] = value if value == value else up.get(entity)
    return {
        entity: NO_ANSWER_YET if value is None else reasons.get(entity) or "no reason given"
        for entity, value in up.items()
        if not value
    }


def describe_slow_disk(config: Config) -> str:
    """What this node's agent reports about a slow disk, or that the disk of its status does not respond; else empty."""
    found: list[str] = []

    def read() -> None:
        """Collects the agent's `disk_slow` conditions."""
        try:
            conditions = status_file.read_status(config).conditions
            found.extend(one.text for one in conditions if one.name == "disk_slow")
        except status_file.NoStatus:
            return  # no agent runs, so none waits for the disk

    thread = threading.Thread(target=read, name="disk", daemon=True)
    thread.start()
    thread.join(DISK_S)
    if thread.is_alive():
        found.append(f"the disk of {config.spool.directory} has not responded for {DISK_S:g} s")
    return f"spool: {'; '.join(found)}; fleetpulse doctor measures it" if found else ""


def _values_by_entity(reports: Sequence[CollectorReport]) -> dict[str, Values]:
    """Entity -> signal -> value as it would be sent; None if it is missing."""
    found: dict[str, Values] = {}
    for block in build_blocks(reading for report in reports for reading in report.readings):
        for name, column in block.columns.items():
            for entity, value in zip(block.entities, column[0].tolist(), strict=True):
                found.setdefault(entity, {})[name] = _display_value(name, value)
    return found


def _display_value(name: str, value: float) -> float | int | None:
    """The number for display: missing is None, an f4 has only the 7 digits that it holds."""
    code = CATALOGUE[name].type
    if code[0] == "u":
        return None if value == np.iinfo(code).max else value
    if np.isnan(value):
        return None
    return float(f"{value:.7g}") if code == "f4" else value


def _render_json(config: Config, reports: Sequence[CollectorReport]) -> str:
    document = {
        "time": iso(reports[0].time),
        "site": config.site.name,
        "node": config.agent.node,
        "entities": _values_by_entity(reports),
        "collectors": {report.collector: report.problem or "ok" for report in reports},
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _render_jsonl(_: Config, reports: Sequence[CollectorReport]) -> str:
    rows = [
        {"time": iso(reports[0].time), "entity": entity, **values}
        for entity, values in _values_by_entity(reports).items()
    ]
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)


def _render_csv(_: Config, reports: Sequence[CollectorReport]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("time", "entity", "signal", "value", "unit"))
    for entity, values in _values_by_entity(reports).items():
        writer.writerows((iso(reports[0].time), entity, n, v, CATALOGUE[n].unit) for n, v in values.items())
    return text.getvalue()


def _render_table(_: Config, reports: Sequence[CollectorReport]) -> str:
    lines = [iso(reports[0].time)]
    for entity, values in _values_by_entity(reports).items():
        lines += ["", entity]
        lines += [f"  {n:<24} {_format_value(v):>20} {CATALOGUE[n].unit}" for n, v in values.items()]
    return "\n".join(lines) + "\n"


def _format_value(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.6g}"


_RENDERERS: dict[Output, Callable[[Config, Sequence[CollectorReport]], str]] = {
    "table": _render_table,
    "json": _render_json,
    "jsonl": _render_jsonl,
    "csv": _render_csv,
}
