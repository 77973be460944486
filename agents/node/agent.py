"""The agent's loop: read the collectors every interval, pack their readings into one Batch, write it to the spool.

Events are written immediately; the batches of [agent] linger seconds are joined into one message.

Only a signal stops the loop. A collector that hangs or fails is reported once and skipped; a full disk costs the oldest
data. Every change of state is one line on stderr and, for collectors, an event of kind `collector`.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
import time as clock_time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from agents.collector import Collector, Device, SamplingSchedule
from agents.collectors.gpu.xid_correlation import correlator_for
from agents.node.batches import build_batch, build_inventory_event, clean_event, merge_inventories
from agents.node.counter_generations import CounterGenerations
from agents.node.edge.rules import EdgeRules
from agents.node.health.report import open_health
from agents.node.joining import TickJoiner
from agents.node.self_metrics import SelfMetrics
from agents.node.snapshot import CollectorResult, Snapshot
from agents.node.spool import disk
from agents.node.spool.spools import NodeSpools
from agents.node.start_checks import check_next_start, check_settings, check_telemetry, configure
from agents.node.uplink.uplink import open_uplink
from agents.node.workers.pool import ReadResult, Worker, WorkerPool
from pipeline.config.origin import check_with_origin
from pipeline.config.sections import Config
from pipeline.model.names import clean_text
from pipeline.model.records import EVENTS, SECOND, TELEMETRY, Batch, Event, EventBatch, Origin, iso
from pipeline.runtime.log_line import write_log_line
from pipeline.runtime.reload import AGAIN, Load, Outcome, Reload
from pipeline.runtime.supervise import Stop
from pipeline.runtime.systemd import SystemdNotifier
from pipeline.transport import wire
from pipeline.transport.segments import folder_name

if TYPE_CHECKING:
    from agents.gateway.gateway import LocalReceiver
    from agents.node.uplink.sender import SpoolSender
    from agents.otlp.export import OpenTelemetry

INVENTORY_INTERVAL_US = 3600 * SECOND
"""The inventory is repeated hourly (DESIGN.md section 2), so that a store that lost it recovers."""
COLLECT_SHARE = 0.5
"""Share of the interval that a tick waits for its collectors; chosen, later results go with the next tick."""
CHECK_S = 4.0
"""How often hanging collectors are detected while ticks are further apart; with the longest deadline below 30 s."""
STOP_S = 1.0
"""How long stopping waits for the collectors to close; with the last sync the agent ends within 2 s."""
UPLINK_S = 0.8
"""How much longer stopping waits for the sender to Kafka, which had all that time too: the rest of the 2 s."""
RECEIVER_S = 0.2
"""How long stopping waits for the receiver of other programs' telemetry; chosen: they send again data that was not
acknowledged."""
LOGGED_EVENTS = frozenset(
    (
        *("gpu_lost", "gpu_back", "gpu_count", "recovery_action", "xid", "sxid", "nvml_refused", "slow_call"),
        *("link_state", "leak", "flow_collapse", "pressure_collapse", "temperature_rise"),
        *("bmc_lost", "bmc_back", "disk_slow", "exporter", "job_start", "job_end"),
    )
)
"""Kinds of events that are also logged, so that `journalctl` on the node shows what happened."""
_MAX_LOG_LINE = 240
"""Characters of one line; chosen, two lines of a terminal: the whole event is in the store."""


class AgentClock(Protocol):
    """Time, injected so that tests need not wait."""

    def now(self) -> int:
        """UTC microseconds."""

    def monotonic(self) -> float:
        """Seconds that never jump."""

    def wait(self, seconds: float, stop: threading.Event) -> bool:
        """Waits `seconds`, or until `stop` is set; whether it is set."""


class SystemClock:
    """The clock of the machine."""

    def now(self) -> int:
        """See `AgentClock.now`."""
        return clock_time.time_ns() // 1000

    def monotonic(self) -> float:
        """See `AgentClock.monotonic`."""
        return clock_time.monotonic()

    def wait(self, seconds: float, stop: threading.Event) -> bool:
        """See `AgentClock.wait`."""
        return stop.wait(seconds)


class ChangeLog:
    """The agent's log: one line per change of a subject, not per tick."""

    def __init__(self, stream: TextIO, clock: AgentClock) -> None:
        self._stream, self._clock = stream, clock
        self._last_lines: dict[str, str] = {}

    def write(self, subject: str, text: str) -> None:
        """Writes one line, if it differs from the last one of this subject."""
        if self._last_lines.get(subject) != text:
            self._last_lines[subject] = text
            write_log_line(f"{iso(self._clock.now())} {clean_text(f'{subject}: {text}')}", self._stream)


class InventoryTracker:
    """The inventories of the collectors by name, and when they were last requested and sent."""

    def __init__(self) -> None:
        self.by_collector: dict[str, dict[str, Device]] = {}
        self._sent, self._requested = -INVENTORY_INTERVAL_US, 0

    def request_due(self, time: int) -> bool:
        """Whether all collectors must return their inventory now."""
        if 0 <= time - self._requested < INVENTORY_INTERVAL_US:  # not after a clock in the future was set back
            return False
        self._requested = time
        return True

    def update(self, time: int, found: Mapping[str, Mapping[str, Device] | None]) -> bool:
        """Records inventories; whether the event is due: at the first tick, after a change, or after an hour."""
        changed = False
        for name, inventory in found.items():
            if inventory is not None:
                devices = dict(inventory)
                changed |= self.by_collector.get(name) != devices
                self.by_collector[name] = devices
        if not changed and 0 <= time - self._sent < INVENTORY_INTERVAL_US:
            return False
        self._sent = time
        return True


class Agent:
    """One node: collectors, spools, loop. Made before the process has other threads (it forks)."""

    def __init__(
        self,
        config: Config,
        collectors: Sequence[Collector],
        clock: AgentClock | None = None,
        log: TextIO | None = None,
        collect_share: float = COLLECT_SHARE,
        simulated: bool = False,
        systemd: SystemdNotifier | None = None,
    ) -> None:
        self.clock: AgentClock = clock or SystemClock()
        self._config, self._change_log = config, ChangeLog(log or sys.stderr, self.clock)
        self._collect_s = collect_share * config.agent.interval
        node, interval = config.agent.node, config.agent.interval
        self._origin = Origin(config.site.name, node, disk.read_boot_id(), simulated)
        self._worker_states: dict[Worker, tuple[str, str]] = {}
        self._inventory = InventoryTracker()
        self._last_tick = self._late_ticks = self._gaps = 0
        self._joiner = TickJoiner(round(config.agent.linger * SECOND), round(interval * SECOND))
        self._encoder = wire.Encoder()
        self._stop: threading.Event | None = None
        self.pool = WorkerPool(collectors, node, interval, self.clock.monotonic, self._stop_requested)  # forks: first
        self.uplink: SpoolSender | None = None
        self.spools = NodeSpools(config.spool, self._origin, self._log, self.clock, self._wake_sender)
        home = config.spool.directory / folder_name(node)
        self._generations = CounterGenerations(home / "generations.json", self._origin.boot_id, self.spools)
        self._self_metrics = SelfMetrics(node, self.pool, SamplingSchedule(node, self.clock.now))
        self._xid_events, self._edge = correlator_for(collectors), EdgeRules(config.edge)
        self._health = open_health(config, self._origin, self._log, files=self.spools)
        self._telemetry = open_telemetry(config, self._origin, self._log)
        self._systemd = systemd or SystemdNotifier({})
        self.uplink = open_uplink(config, config.pipeline.transport, [node], self._log_uplink, "agent", self.spools)
        self.receiver = open_receiver(config, self._origin, self._wake_sender, self._log)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event, ask_again: Callable[[], bool] = lambda: False) -> None:
        """Ticks at whole multiples of the interval until `stop` is set or `ask_again` returns true, then closes."""
        self._stop, interval = stop, round(self._config.agent.interval * SECOND)
        self._log("agent", f"{self._origin.node}: started, every {self._config.agent.interval:g} s")
        if self.uplink:
            self.uplink.start()
        self._systemd.notify_ready(self._config.agent.interval)
        while not (again := ask_again()) and not self._wait_for_tick(interval, stop):
            now = self.clock.now()
            self.tick(now - now % interval)
            self._systemd.notify_alive(self._status_line())
        (self._systemd.notify_reloading if again else self._systemd.notify_stopping)()
        self.close()
        self._log("agent", f"{self._origin.node}: stopped")

    def _wait_for_tick(self, interval: int, stop: threading.Event) -> bool:
        """Waits for the next tick or `stop`; whether it is `stop`. In a long wait, hanging collectors are reported."""
        while (left := (interval - self.clock.now() % interval) / SECOND) > CHECK_S:
            if self.clock.wait(CHECK_S, stop):
                return True
            self.pool.drop_overdue()
            now = self.clock.now()
            changes = [event for worker in self.pool.workers for event in self._worker_events(worker, now)]
            disk_events = self.spools.check_disk()
            self._put_events([*changes, *disk_events])
            self._health.update((), disk_events, self.pool.workers, now)
            self._systemd.notify_alive(self._status_line())
        return self.clock.wait(left, stop)

    def _stop_requested(self) -> bool:
        return self._stop is not None and self._stop.is_set()

    def tick(self, time: int) -> None:
        """Reads everything that is due, with the timestamp `time`. A second call with the same time does nothing."""
        if time == self._last_tick:  # the wall clock was set back, or a wait ended early
            return
        skipped = time - self._last_tick - round(self._config.agent.interval * SECOND)
        self._late_ticks += self._last_tick > 0 and skipped > 0
        self._last_tick = time
        results = self.pool.tick(time, self._collect_s, self._inventory.request_due(time))
        changes = [event for worker in self.pool.workers for event in self._worker_events(worker, time)]
        readings = [reading for found in results.values() for reading in found.readings]
        # the agent reports itself at least when nothing else was read, so that each tick shows that it runs
        readings += self._self_metrics.build_readings(bool(changes) or not readings, self._spool_metrics())
        generations, resets = self._generations.update(time, readings)
        seen = self._xid_events.process([event for reading in readings for event in reading.events], time)
        for line in filter(None, map(format_log_line, seen)):
            self._log(*line)
        gaps = self.uplink.take_events() if self.uplink else []
        self._gaps += len(gaps)
        edges, disk_events = self._edge.evaluate(time, readings), self.spools.check_disk()
        inventory = self._inventory_events(time, results)
        self._put_events([*edges, *seen, *changes, *resets, *inventory, *gaps, *disk_events])
        self._health.update(readings, [*edges, *seen, *resets, *disk_events], self.pool.workers, time)
        if found := build_batch(self._origin, time, [*readings, *generations]):
            self._put_telemetry(self._joiner.add_tick(found))
        if self._telemetry:
            if found:
                self._telemetry.add_batch(found)
            self._telemetry.update_snapshot(self._build_snapshot(time, results))

    def record_reload(self, outcome: Outcome, reason: str) -> None:
        """Sends an event about a configuration that was read again."""
        data = {"outcome": outcome, "reason": reason}
        self._put_events([Event(self.clock.now(), f"node:{self._origin.node}", "configuration", data)])

    def close(self) -> None:
        """Stops the workers that do not hang, and makes everything spooled durable."""
        until = self.clock.monotonic() + STOP_S
        if self.uplink:
            self.uplink.stop()
        if self.receiver:
            self.receiver.close(RECEIVER_S)
        self.pool.close(STOP_S)
        self._put_events(self._xid_events.flush())
        self._put_telemetry(self._joiner.flush())
        self._generations.save()
        self.spools.close()
        self._systemd.close()
        if self._telemetry:
            self._telemetry.close(max(0.0, until - self.clock.monotonic()))
        if self.uplink:
            self.uplink.close(max(0.0, until + UPLINK_S - self.clock.monotonic()))

    def _put_telemetry(self, batches: list[Batch]) -> None:
        for batch in batches:
            self.spools.put(TELEMETRY, functools.partial(self._encoder.encode, batch), wire.TELEMETRY_KIND)
        self.spools.set_joining(TELEMETRY, self._joiner.count)

    def _put_events(self, events: list[Event]) -> None:
        if events:
            whole = EventBatch(self._origin, tuple(map(clean_event, sorted(events, key=lambda e: e.time))))
            self.spools.put(EVENTS, lambda: wire.encode_events(whole), wire.EVENTS_KIND)

    def _wake_sender(self) -> None:
        """Called by the spools' writing thread: new messages are durable."""
        if self.uplink:
            self.uplink.wake()

    # --- collectors --------------------------------------------------------------------------------------------------

    def _worker_events(self, worker: Worker, time: int) -> list[Event]:
        """Logs a change of a worker's state, and returns its event."""
        state, reason = now = (worker.state, worker.reason)
        if now == self._worker_states.get(worker, ("starting", "")):
            return []
        self._worker_states[worker] = now
        name = worker.collector.name
        self._log(f"collector {name}", f"{state}: {reason}" if reason else state)
        data = {"collector": name, "state": state, "reason": reason}
        return [Event(time, f"node:{self._origin.node}", "collector", data)]

    def _inventory_events(self, time: int, results: dict[Worker, ReadResult]) -> list[Event]:
        """The inventory event, if it is due."""
        if not self._inventory.update(time, {w.collector.name: result.inventory for w, result in results.items()}):
            return []
        devices = merge_inventories([*self._inventory.by_collector.values(), self._self_metrics.inventory()])
        if self._telemetry:
            self._telemetry.set_devices(devices)
        return [build_inventory_event(time, self._origin.node, devices)]

    # --- state and log -----------------------------------------------------------------------------------------------

    def _spool_metrics(self) -> dict[str, float]:
        """Signals of the agent's spools and uplink."""
        known: dict[str, float] = {"agent.spool_bytes": self.spools.size, "agent.dropped": self.spools.lost}
        known["agent.spool_wait"] = self.spools.longest_wait
        return known | ({"agent.unsent": self.uplink.unsent} if self.uplink else {})

    def _build_snapshot(self, time: int, results: dict[Worker, ReadResult]) -> Snapshot:
        """The state of the agent after this tick, for its own metrics."""
        return Snapshot(
            time,
            tuple(CollectorResult(worker.collector.name, d.state, d.took) for worker, d in results.items()),
            restarts={worker.collector.name: worker.restarts for worker in self.pool.workers},
            spool_bytes=self.spools.size,
            spool_wait=self.spools.longest_wait,
            dropped=self.spools.lost,
            gaps=self._gaps + self.spools.gaps,
            unsent=self.uplink.unsent if self.uplink else None,
            lag=self.uplink.lag if self.uplink else None,
            late_ticks=self._late_ticks,
            cpu_time=self._self_metrics.cpu_time,
            memory=self._self_metrics.memory,
        )

    def _status_line(self) -> str:
        """One line for `systemctl status`."""
        bad = [w.collector.name for w in self.pool.workers if w.state in ("fault", "hung")]
        return f"{len(self.pool.workers)} collectors, failing: {', '.join(bad) or 'none'}"

    def tell_configuration(self, text: str) -> None:
        """Shows with which configuration it runs, in `systemctl status`."""
        self._systemd.notify_configuration(text)

    def log_configuration(self, text: str) -> None:
        """Writes a line about a configuration that was read again."""
        self._log("configuration", text)

    def _log_uplink(self, text: str) -> None:
        self._log("kafka", text)

    def _log(self, subject: str, text: str) -> None:
        self._change_log.write(subject, text)


def format_log_line(event: Event) -> tuple[str, str] | None:
    """Subject and text of an event's log line; None if it is not logged."""
    if event.kind not in LOGGED_EVENTS:
        return None
    facts = (
        f"{key} {value}" for key, value in event.data.items() if isinstance(value, (str, int, float)) and value != ""
    )
    return f"{event.kind} {event.entity}", ", ".join(facts)[:_MAX_LOG_LINE]


def open_telemetry(config: Config, origin: Origin, log: Callable[[str, str], object]) -> OpenTelemetry | None:
    """The exporter that [opentelemetry] configures; None, and nothing loaded, if it is off (the default).

    `log` gets subject and text. Raises ConfigError.
    """
    check_telemetry(config)
    settings = config.opentelemetry
    if not (settings.endpoint or settings.kafka or settings.prometheus_port):
        return None
    from agents.otlp.export import build_opentelemetry

    return build_opentelemetry(config, origin, log)


def open_receiver(
    config: Config, origin: Origin, on_durable: Callable[[], object], log: Callable[[str, str], object]
) -> LocalReceiver | None:
    """What receives OTLP from programs of this node; None, and nothing loaded, without [agent] otlp_port."""
    if not config.agent.otlp_port:
        return None
    from agents.gateway.gateway import LocalReceiver

    return LocalReceiver(config, origin, on_durable, log)


def run(
    config: Config,
    stop: threading.Event | None = None,
    collectors: Sequence[Collector] | None = None,
    simulated: bool = False,
    load_again: Load | None = None,
) -> int:
    """`fleetpulse agent`: runs until SIGTERM, SIGINT or `stop`, with `collectors` or else the configured ones.

    load_again: reads the configuration after SIGHUP; the result is then reload.AGAIN if a new start is due.
    Raises ConfigError or SpoolError before it starts.
    """
    check_settings(config)
    stop = stop or Stop()
    chosen = check_with_origin(config, configure) if collectors is None else collectors
    agent = Agent(config, chosen, simulated=simulated, systemd=SystemdNotifier())
    before = _install_handlers(lambda *_: stop.set())
    hangup = watch_hangup(config, load_again, agent) if load_again else None
    try:
        agent.run(stop, hangup.poll if hangup else lambda: False)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return AGAIN if hangup is not None and hangup.accepted else 0


def watch_hangup(config: Config, load: Load, agent: Agent) -> Reload:
    """Returns what answers SIGHUP, with an event. load: reads the configuration and raises for a wrong one."""

    def load_checked() -> Config:
        fresh = load()
        check_next_start(config, fresh)
        return fresh

    fixed = ("site.name", "agent.node", "spool.directory")
    told = agent.tell_configuration
    return Reload("agent", config, load_checked, fixed, agent.record_reload, agent.log_configuration, told)


def _install_handlers(handler: Callable[..., None]) -> dict[signal.Signals, Any]:
    """Installs `handler` if this is the main thread; returns the previous handlers."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
