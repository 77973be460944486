"""The agent's loop: read the collectors every interval, pack their readings into one Batch, write it to the spool.

Only a signal stops the loop. A collector that hangs or fails is reported once and skipped; a full disk costs the oldest
data. Every change of state is one line on stderr and, for collectors, an event of kind `collector`.
"""

from __future__ import annotations

import signal
import sys
import threading
import time as clock_time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from agents.collector import Collector, Device, Rhythm
from agents.collectors.gpu.xid_correlation import folding_for
from agents.collectors.registry import configured
from agents.node.batches import batch, inventory_event, merged, sendable
from agents.node.counter_generations import Generations
from agents.node.edge import Edge
from agents.node.health.report import open_fitness
from agents.node.once import Look, once, render_once
from agents.node.self_metrics import Vitals
from agents.node.snapshot import CollectorResult, Snapshot
from agents.node.spool import disk
from agents.node.spool.spools import Spools
from agents.node.systemd import Notify
from agents.node.uplink.uplink import open_uplink
from agents.node.workers.pool import Delivery, Looking, Worker
from pipeline.config.sections import Config
from pipeline.model.errors import ConfigError
from pipeline.model.names import clean_text
from pipeline.model.records import EVENTS, SECOND, TELEMETRY, Event, EventBatch, Origin, iso
from pipeline.runtime.supervise import Stop
from pipeline.transport import wire
from pipeline.transport.segments import folder_name

if TYPE_CHECKING:
    from agents.node.uplink.sender import Sender
    from agents.otlp.export import Telemetry


LOUD = frozenset(
    (
        *("gpu_lost", "gpu_back", "gpu_count", "recovery_action", "xid", "sxid", "nvml_refused", "slow_call"),
        *("link_state", "leak", "flow_collapse", "pressure_collapse", "temperature_rise"),
        *("bmc_lost", "bmc_back", "disk_slow", "exporter", "job_start", "job_end"),
    )
)
_MOST = 240
"""Characters of one line; chosen, two lines of a terminal: the whole event is in the store."""


def line(event: Event) -> tuple[str, str] | None:
    """Subject and text of the line that an event deserves, if it does."""
    if event.kind not in LOUD:
        return None
    facts = (
        f"{key} {value}" for key, value in event.data.items() if isinstance(value, (str, int, float)) and value != ""
    )
    return f"{event.kind} {event.entity}", ", ".join(facts)[:_MOST]


def open_telemetry(config: Config, origin: Origin, say: Callable[[str, str], object]) -> Telemetry | None:
    """What [opentelemetry] asks for, None if that is nothing. `say` gets subject and text. Raises ConfigError."""
    settings, where = config.opentelemetry, f"{config.source}: [opentelemetry]"
    if settings.kafka and config.pipeline.transport != "kafka":
        raise ConfigError(f'{where} kafka = true: there are brokers only with [pipeline] transport = "kafka"')
    if settings.metrics == "all" and not settings.endpoint:
        raise ConfigError(f'{where} metrics = "all": expected an endpoint, such as "http://127.0.0.1:4318"')
    if not (settings.endpoint or settings.kafka or settings.prometheus_port):
        return None
    from agents.otlp.export import opened

    return opened(config, origin, say)


__all__ = ["Agent", "Clock", "Look", "SystemClock", "once", "render_once", "run"]

INVENTORY_US = 3600 * SECOND
"""Inventory is told again hourly (DESIGN.md section 2), so that a store that lost it heals."""
PATIENCE = 0.5
"""Share of the interval that a tick waits for its collectors; chosen, what comes later goes with the next tick."""
STOP_S = 1.0
"""How long stopping waits for the collectors to close; with the last sync the agent ends within 2 s."""
MIND_S = 4.0
"""How often the collectors are minded while ticks are further apart; with the longest deadline below 30 s."""
UPLINK_S = 0.8
"""How much longer it waits for the sender to Kafka, which has then had all that time: what is left of the 2 s."""


class Clock(Protocol):
    """Time, injected so that tests need not wait."""

    def now(self) -> int:
        """UTC microseconds."""

    def monotonic(self) -> float:
        """Seconds that never jump."""

    def wait(self, seconds: float, stop: threading.Event) -> bool:
        """Waits, less if `stop` is set; whether it is."""


class SystemClock:
    """The clock of the machine."""

    def now(self) -> int:
        return clock_time.time_ns() // 1000

    def monotonic(self) -> float:
        return clock_time.monotonic()

    def wait(self, seconds: float, stop: threading.Event) -> bool:
        return stop.wait(seconds)


class Agent:
    """One node: collectors, spools, loop. Made before the process has other threads (it forks)."""

    def __init__(
        self,
        config: Config,
        collectors: Sequence[Collector],
        clock: Clock | None = None,
        log: TextIO | None = None,
        patience: float = PATIENCE,
        simulated: bool = False,
        notify: Notify | None = None,
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self._config, self._log, self._patience = config, log or sys.stderr, patience * config.agent.interval
        node, interval = config.agent.node, config.agent.interval
        self._origin = Origin(config.site.name, node, disk.boot_id(), simulated)
        self._said: dict[str, str] = {}
        self._followed: dict[Worker, tuple[str, str]] = {}
        self._devices: dict[str, dict[str, Device]] = {}
        self._told = -INVENTORY_US
        self._refreshed = 0
        self._last = self._late = self._gaps = 0
        self._stop: threading.Event | None = None
        self.looking = Looking(collectors, node, interval, self.clock.monotonic, self._stopping)  # first: it forks
        self.uplink: Sender | None = None
        self.spools = Spools(config.spool, self._origin, self._say, self.clock, self._wake)
        home = config.spool.directory / folder_name(node)
        self._generations = Generations(home / "generations.json", self._origin.boot_id, self.spools)
        self._vitals = Vitals(node, self.looking, Rhythm(node, self.clock.now))
        self._folding, self._edge = folding_for(collectors), Edge(config.edge)
        self._fitness = open_fitness(config, self._origin, self._say, files=self.spools)
        self._telemetry = open_telemetry(config, self._origin, self._say)
        self._notify = notify or Notify({})
        self.uplink = open_uplink(config, config.pipeline.transport, [node], self._say_uplink, "agent", self.spools)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def loop(self, stop: threading.Event) -> None:
        """Ticks at whole multiples of the interval until `stop` is set, then closes."""
        self._stop, interval = stop, round(self._config.agent.interval * SECOND)
        self._say("agent", f"{self._origin.node}: started, every {self._config.agent.interval:g} s")
        if self.uplink:
            self.uplink.start()
        self._notify.ready(self._config.agent.interval)
        while not self._pause(interval, stop):
            now = self.clock.now()
            self.tick(now - now % interval)
            self._notify.alive(self._status())
        self._notify.stopping()
        self.close()
        self._say("agent", f"{self._origin.node}: stopped")

    def _pause(self, interval: int, stop: threading.Event) -> bool:
        """Waits for the next tick, or until `stop`; on a long way there, what hangs is noticed and told."""
        while (left := (interval - self.clock.now() % interval) / SECOND) > MIND_S:
            if self.clock.wait(MIND_S, stop):
                return True
            self.looking.mind()
            now = self.clock.now()
            changes = [event for worker in self.looking.workers for event in self._follow(worker, now)]
            disk_events = self.spools.mind()
            self._put_events([*changes, *disk_events])
            self._fitness.take((), disk_events, self.looking.workers, now)
            self._notify.alive(self._status())
        return self.clock.wait(left, stop)

    def _stopping(self) -> bool:
        return self._stop is not None and self._stop.is_set()

    def tick(self, time: int) -> None:
        """One look at everything that is due, stamped `time`. A second call with the same time does nothing."""
        if time == self._last:  # the wall clock was set back, or a wait ended early
            return
        skipped = time - self._last - round(self._config.agent.interval * SECOND)
        self._late += self._last > 0 and skipped > 0
        self._last = time
        delivered = self.looking.tick(time, self._patience, self._refresh(time))
        changes = [event for worker in self.looking.workers for event in self._follow(worker, time)]
        readings = [reading for found in delivered.values() for reading in found.readings]
        readings += self._vitals.readings(bool(changes) or not readings, self._known())  # each tick says: I am here
        generations, resets = self._generations.follow(time, readings)
        seen = self._folding.take([event for reading in readings for event in reading.events], time)
        for said in filter(None, map(line, seen)):
            self._say(*said)
        lost = self.uplink.take_events() if self.uplink else []
        self._gaps += len(lost)
        edges, disk_events = self._edge.take(time, readings), self.spools.mind()
        self._put_events([*edges, *seen, *changes, *resets, *self._inventory(time, delivered), *lost, *disk_events])
        self._fitness.take(readings, [*edges, *seen, *resets, *disk_events], self.looking.workers, time)
        if found := batch(self._origin, time, [*readings, *generations]):
            self.spools.put(TELEMETRY, lambda: wire.encode(found), wire.TELEMETRY_KIND)
        if self._telemetry:
            if found:
                self._telemetry.take(found)
            self._telemetry.observe(self._snapshot(time, delivered))

    def close(self) -> None:
        """Stops the workers that do not hang, and makes everything spooled durable."""
        until = self.clock.monotonic() + STOP_S
        if self.uplink:
            self.uplink.stop()
        self.looking.close(STOP_S)
        self._put_events(self._folding.rest())
        self._generations.save()
        self.spools.close()
        self._notify.close()
        if self._telemetry:
            self._telemetry.close(max(0.0, until - self.clock.monotonic()))
        if self.uplink:
            self.uplink.close(max(0.0, until + UPLINK_S - self.clock.monotonic()))

    def _put_events(self, events: list[Event]) -> None:
        if events:
            whole = EventBatch(self._origin, tuple(map(sendable, sorted(events, key=lambda e: e.time))))
            self.spools.put(EVENTS, lambda: wire.encode_events(whole), wire.EVENTS_KIND)

    def _wake(self) -> None:
        """Called by the thread that writes: there is something to send."""
        if self.uplink:
            self.uplink.wake()

    # --- collectors --------------------------------------------------------------------------------------------------

    def _refresh(self, time: int) -> bool:
        """Whether all collectors shall tell their inventory again."""
        if time - self._refreshed < INVENTORY_US:
            return False
        self._refreshed = time
        return True

    def _follow(self, worker: Worker, time: int) -> list[Event]:
        """Says a change of a worker's state, as a line and as an event."""
        state, reason = now = (worker.state, worker.reason)
        if now == self._followed.get(worker, ("starting", "")):
            return []
        self._followed[worker] = now
        name = worker.collector.name
        self._say(f"collector {name}", f"{state}: {reason}" if reason else state)
        data = {"collector": name, "state": state, "reason": reason}
        return [Event(time, f"node:{self._origin.node}", "collector", data)]

    def _inventory(self, time: int, delivered: dict[Worker, Delivery]) -> list[Event]:
        """The inventory event, if this is the first tick, something changed or an hour has passed."""
        changed = False
        for worker, delivery in delivered.items():
            if delivery.inventory is not None:
                devices = dict(delivery.inventory)
                changed |= self._devices.get(worker.collector.name) != devices
                self._devices[worker.collector.name] = devices
        if not changed and time - self._told < INVENTORY_US:
            return []
        self._told = time
        devices = merged([*self._devices.values(), self._vitals.inventory()])
        if self._telemetry:
            self._telemetry.describe(devices)
        return [inventory_event(time, self._origin.node, devices)]

    # --- what is said ------------------------------------------------------------------------------------------------

    def _known(self) -> dict[str, float]:
        """What the agent knows of its spools."""
        known: dict[str, float] = {"agent.spool_bytes": self.spools.size, "agent.dropped": self.spools.lost}
        known["agent.spool_wait"] = self.spools.wait
        return known | ({"agent.unsent": self.uplink.unsent} if self.uplink else {})

    def _snapshot(self, time: int, delivered: dict[Worker, Delivery]) -> Snapshot:
        """The agent after this tick, for its own metrics."""
        return Snapshot(
            time,
            tuple(CollectorResult(worker.collector.name, d.state, d.took) for worker, d in delivered.items()),
            restarts={worker.collector.name: worker.restarts for worker in self.looking.workers},
            spool_bytes=self.spools.size,
            spool_wait=self.spools.wait,
            dropped=self.spools.lost,
            gaps=self._gaps + self.spools.gaps,
            unsent=self.uplink.unsent if self.uplink else None,
            lag=self.uplink.lag if self.uplink else None,
            late_ticks=self._late,
            cpu_time=self._vitals.cpu_time,
            memory=self._vitals.memory,
        )

    def _status(self) -> str:
        """One line for `systemctl status`."""
        bad = [w.collector.name for w in self.looking.workers if w.state in ("fault", "hung")]
        return f"{len(self.looking.workers)} collectors, in trouble: {', '.join(bad) or 'none'}"

    def _say_uplink(self, text: str) -> None:
        self._say("kafka", text)

    def _say(self, subject: str, text: str) -> None:
        """One line per change of what is to be said of a subject."""
        if self._said.get(subject) != text:
            self._said[subject] = text
            self._log.write(f"{iso(self.clock.now())} {clean_text(f'{subject}: {text}')}\n")
            self._log.flush()


def run(
    config: Config,
    stop: threading.Event | None = None,
    collectors: Sequence[Collector] | None = None,
    simulated: bool = False,
) -> int:
    """`fleetpulse agent`: runs until SIGTERM, SIGINT or `stop`, over `collectors` or else the configured ones.

    Raises ConfigError or SpoolError before it starts.
    """
    if not config.agent.interval > 0:
        raise ConfigError(f"{config.source}: [agent] interval = {config.agent.interval}: wanted more than 0 s")
    stop = stop or Stop()
    chosen = configured(config.collector, config.source, config.agent.collectors) if collectors is None else collectors
    agent = Agent(config, chosen, simulated=simulated, notify=Notify())
    before = _on_signals(lambda *_: stop.set())
    try:
        agent.loop(stop)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _on_signals(handler: Callable[..., None]) -> dict[signal.Signals, Any]:
    """Installs `handler` where that can be done (the main thread); returns what was there."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
