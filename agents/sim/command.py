"""`fleetpulse simulate`: writes a fleet with known faults to files, sends it to spools or Kafka, or both.

Where the scenario names no start: with --to second 0 lies at now - backfill - (duration - backfill) * (1 - 1 /
speed), so that a stream at speed 1 runs with the clock, one at speed 0 ends now, and no sample is in the
future.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from agents.node.uplink.uplink import open_uplink
from agents.sim.chunk import Chunk
from agents.sim.fleet import ENDLESS_TICKS, FleetSimulator
from agents.sim.scenario import Scenario
from agents.sim.scenario_file import LONGEST, YEARS, load
from agents.sim.stream import BrokerFlush, NodeSpools, SendSchedule
from pipeline.config.sections import Config
from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND, Event, iso

BACKFILLED = "back-fill sent"
"""Printed when the history of --backfill is durable and real time starts; the demo waits for these words."""


class Sink(Protocol):
    """Writer of the files; pipeline.recording provides one, and fleetpulse.py passes it in."""

    def telemetry(
        self,
        device_class: str,
        times: NDArray[np.int64],
        entities: Sequence[str],
        columns: Mapping[str, NDArray[Any]],
        present: NDArray[np.bool_],
    ) -> None:
        """Writes rows of one class: times, columns in wire type and present (rows that exist): (ticks, devices)."""

    def events(self, events: Sequence[Event]) -> None:
        """Writes events in order of time."""

    def close(
        self,
        parents: Mapping[str, Sequence[str]],
        attributes: Mapping[str, Mapping[str, object]],
        truth: Sequence[Mapping[str, Any]],
        meta: Mapping[str, Any],
    ) -> None:
        """Closes all files; writes topology.toml, truth.jsonl and meta.json."""


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """The options of one run. `to`: spool or kafka; None: files only.

    backfill: history (s) that is sent at full speed before real time.
    """

    scenario: str
    seed: int = 0
    to: str | None = None
    speed: float = 1.0
    backfill: float | None = None


@dataclass(slots=True)
class RunCounts:
    """Numbers of samples, rows and events made."""

    ticks: int = 0
    rows: int = 0
    samples: int = 0
    events: int = 0
    dropped: int = 0
    refused: int = 0
    started: float = field(default_factory=time.monotonic)

    def add(self, chunk: Chunk) -> None:
        """Counts a chunk; rows that do not exist do not count."""
        self.ticks += len(chunk.times)
        self.events += len(chunk.events)
        for device_class, present in chunk.present.items():
            if device_class in chunk.columns:
                rows = int(np.count_nonzero(present))
                self.rows += rows
                self.samples += rows * len(chunk.columns[device_class])


def utc_now() -> int:
    """UTC microseconds of this host's clock."""
    return time.time_ns() // 1000


def simulate(
    options: SimulateOptions,
    config: Config,
    sink: Sink | None,
    wait: Callable[[float], bool],
    now: Callable[[], int] = utc_now,
    log: Callable[[str], Any] = lambda line: sys.stderr.write(line + "\n"),
    on_planned: Callable[[], Any] = lambda: None,
) -> int:
    """Runs the scenario to its end, or until `wait(seconds)` returns True (it was stopped). Returns the exit code.

    `on_planned` is called when all events are planned: from then on `wait` is called often, before not at all.
    With `backfill` and a scenario that has [live] faults it continues in real time until it is stopped.
    """
    _check(options, sink)
    scenario = load(options.scenario)
    endless = options.backfill is not None and scenario.live.every > 0
    begin = now()
    simulator = FleetSimulator(scenario, options.seed, _start(scenario, options, begin), endless)
    on_planned()
    if simulator.dropped:
        log(f"simulate: {simulator.dropped} of {simulator.planned} events found no free time and were left out")
    schedule = SendSchedule(begin, options.speed if options.to else 0.0, scenario.interval, options.backfill or 0.0)
    spools = _open_spools(options, config, simulator, now, wait, log)
    counts = RunCounts()
    try:
        _run(simulator, schedule, spools, sink, counts, ENDLESS_TICKS if endless else scenario.ticks, wait, now, log)
        if spools and not spools.flush():
            log("simulate: stopped; what the brokers did not acknowledge is in the spool")
    finally:
        if spools:
            spools.close()
            counts.dropped, counts.refused = spools.dropped, spools.refused
    if sink:
        _finish(simulator, options, sink, counts)
    _sum_up(counts, scenario, log)
    return 1 if counts.dropped or counts.refused else 0


def _sum_up(counts: RunCounts, scenario: Scenario, log: Callable[[str], Any]) -> None:
    """Reports the samples that were written and lost."""
    took = time.monotonic() - counts.started
    log(
        f"simulate: {scenario.fleet.nodes} nodes, {counts.ticks * scenario.interval:g} s, {counts.samples} samples in "
        f"{counts.rows} rows, {counts.events} events in {took:.1f} s"
    )
    if counts.dropped:
        log(
            f"simulate: {counts.dropped} messages did not fit into the spool and are counted gaps; "
            "increase [spool] max_bytes"
        )
    if counts.refused:
        log(f"simulate: {counts.refused} messages were refused by the brokers and are counted gaps")


def _open_spools(
    options: SimulateOptions,
    config: Config,
    simulator: FleetSimulator,
    now: Callable[[], int],
    wait: Callable[[float], bool],
    log: Callable[[str], Any],
) -> NodeSpools | None:
    """Opens the outlets of the stream, if any. Raises ConfigError before anything is made."""
    if options.to is None:
        return None
    sender = open_uplink(
        config,
        options.to,
        list(simulator.layout.sender_names),
        lambda text: log(f"simulate: kafka: {text}"),
        "simulate",
    )
    broker = BrokerFlush(sender, config.spool, wait) if sender else None
    return NodeSpools(simulator, config.spool, config.site.name, now, broker, config.agent.linger)


def _run(
    simulator: FleetSimulator,
    schedule: SendSchedule,
    spools: NodeSpools | None,
    sink: Sink | None,
    counts: RunCounts,
    limit: int,
    wait: Callable[[float], bool],
    now: Callable[[], int],
    log: Callable[[str], Any],
) -> None:
    """Sends and writes chunk after chunk, each when its last tick is due."""
    history = schedule.backfill > 0
    for chunk in simulator.chunks(lambda tick: schedule.ready(tick, now()), limit):
        last = counts.ticks + len(chunk.times) - 1
        if history and last * schedule.interval >= schedule.backfill:
            history = False
            if spools and not spools.flush():
                return
            log(f"simulate: {BACKFILLED}: {counts.samples} samples, {counts.events} events")
        if wait(max(0, schedule.due(last) - now()) / SECOND):
            return
        if spools:
            spools.send(chunk, history)
        if sink:
            _write(sink, chunk)
        counts.add(chunk)


def _write(sink: Sink, chunk: Chunk) -> None:
    """Writes the same values to files."""
    for device_class, columns in chunk.columns.items():
        if names := chunk.entities[device_class]:  # between two jobs there are no ranks
            sink.telemetry(device_class, chunk.sample_times(device_class), names, columns, chunk.present[device_class])
    sink.events([event for _, event in chunk.events])


def _finish(simulator: FleetSimulator, options: SimulateOptions, sink: Sink, counts: RunCounts) -> None:
    """Writes topology, truth and meta of the written samples."""
    layout, scenario = simulator.layout, simulator.scenario
    seconds = counts.ticks * scenario.interval
    attributes = {entity: found for entity in simulator.parents if (found := layout.attributes(entity))}
    meta: dict[str, object] = {
        "name": f"simulated-{options.seed}",
        "title": f"Simulated fleet of {layout.nodes} nodes with {layout.gpus_per_node} GPUs each",
        "origin": "fleetpulse simulate",
        "simulated": True,
        "seed": options.seed,
        "nodes": layout.nodes,
        "gpus": layout.gpus,
        "samples": counts.samples,
        "start": iso(simulator.start),
        "end": iso(simulator.time_at(seconds)),
        "interval": scenario.interval,
        "rows": counts.rows,
        "planned": simulator.planned,
        "dropped": simulator.dropped,
        "events": len(truth := simulator.truth(seconds)),
    }
    if scenario.world:
        meta["world"] = scenario.world.describe()
    sink.close(simulator.parents, attributes, truth, meta)


def _start(scenario: Scenario, options: SimulateOptions, begin: int) -> int | None:
    """Returns the time of second 0: the scenario's own start, else so that a stream fits the clock (whole seconds)."""
    if scenario.start is not None or not options.to:
        return scenario.start
    backfill = options.backfill or 0.0
    rest = max(0.0, scenario.duration - backfill)
    ahead = rest if options.speed == 0 else rest * max(0.0, 1 - 1 / options.speed)
    return (begin - round((backfill + ahead) * SECOND)) // SECOND * SECOND


def _check(options: SimulateOptions, sink: Sink | None) -> None:
    """Raises UsageError for options that contradict each other."""
    if options.to not in (None, "spool", "kafka"):
        raise UsageError(f"simulate: --to {options.to}: no such transport; expected --to spool or --to kafka")
    if options.to is None and sink is None:
        raise UsageError("simulate: no destination; expected --output DIR, --to spool or kafka, or both")
    if not 0 <= options.speed < float("inf"):
        raise UsageError(
            f"simulate: --speed {options.speed}: expected 0 (as fast as possible) or a factor on real time"
        )
    if options.seed < 0:
        raise UsageError(f"simulate: --seed {options.seed}: expected a whole number from 0")
    if options.backfill is not None and (
        not 0 < options.backfill <= LONGEST or options.to is None or options.speed != 1
    ):
        raise UsageError(
            f"simulate: --backfill {options.backfill:g}: expected seconds above 0, at most {YEARS} years, together "
            "with --to and --speed 1"
        )
