"""The agent's loop: every interval ask the collectors, put what they brought into one Batch, spool it durably.

Nothing stops the loop but a signal: a collector that hangs or fails is said once and passed over, a full disk costs the
oldest data. Every change of state is one line on stderr and, for collectors, an event of kind `collector`.
"""

from __future__ import annotations

import errno
import signal
import sys
import threading
import time as clock_time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TextIO

from agents import disk
from agents.batches import batch, inventory_event
from agents.collector import Collector, Device
from agents.collectors import configured
from agents.once import Look, once, render_once
from agents.spool import Spool
from agents.uplink import open_uplink
from agents.worker import Delivery, State, Worker
from pipeline import wire
from pipeline.config import Config
from pipeline.errors import ConfigError, Permanent, SpoolError
from pipeline.records import EVENTS, SECOND, TELEMETRY, Event, EventBatch, Origin, iso
from pipeline.stopping import Stop

__all__ = ["Agent", "Clock", "Look", "SystemClock", "once", "render_once", "run"]

INVENTORY_US = 3600 * SECOND
"""Inventory is told again hourly (DESIGN.md section 2), so that a store that lost it heals."""
PATIENCE = 0.5
"""Share of the interval that a tick waits for its collectors; chosen, what comes later goes with the next tick."""
STOP_S = 1.0
"""How long stopping waits for the collectors to close; with the last sync the agent ends within 2 s."""
UPLINK_S = 0.8
"""How much longer it waits for the sender to Kafka, which has then had all that time: what is left of the 2 s."""
QUIET_S = 600.0
"""A spool that lost nothing for so long is well again; chosen: longer than a 4 MiB segment takes to fill."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


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
    """One node's collectors, spools and loop."""

    def __init__(
        self,
        config: Config,
        collectors: Sequence[Collector],
        clock: Clock | None = None,
        log: TextIO | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self._config, self._log, self._patience = config, log or sys.stderr, patience * config.agent.interval
        self._origin = Origin(config.site.name, config.agent.node, disk.boot_id())
        self._spools: dict[str, Spool] = {}
        self._said: dict[str, str] = {}
        self._losing: dict[str, float] = {}
        self._devices: dict[str, dict[str, Device]] = {}
        self._told = -INVENTORY_US
        self._refreshed = 0
        self._last = 0
        self._finished = threading.Condition()
        self.unspooled = 0
        self._open_spools()
        self.uplink = open_uplink(config, config.pipeline.transport, [self._origin.node], self._say_uplink, "agent")
        self.workers = [Worker(c, config.agent.node, self.clock.monotonic, self._finished) for c in collectors]

    # --- the loop ----------------------------------------------------------------------------------------------------

    def loop(self, stop: threading.Event) -> None:
        """Ticks at whole multiples of the interval until `stop` is set, then closes."""
        interval = round(self._config.agent.interval * SECOND)
        self._say("agent", f"{self._origin.node}: started, every {self._config.agent.interval:g} s")
        if self.uplink:
            self.uplink.start()
        while not self.clock.wait((interval - self.clock.now() % interval) / SECOND, stop):
            now = self.clock.now()
            self.tick(now - now % interval)
        self.close()
        self._say("agent", f"{self._origin.node}: stopped")

    def tick(self, time: int) -> None:
        """One look at everything that is due, stamped `time`. A second call with the same time does nothing."""
        if time == self._last:  # the wall clock was set back, or a wait ended early
            return
        self._last = time
        delivered = self._deliveries(time)
        events = [event for worker in self.workers for event in self._follow(worker, delivered.get(worker), time)]
        readings = [reading for found in delivered.values() for reading in found.readings]
        events += [event for reading in readings for event in reading.events]
        events += self._inventory(time, delivered)
        events += self.uplink.take_events() if self.uplink else []
        if found := batch(self._origin, time, readings):
            self._put(TELEMETRY, lambda: wire.encode(found), wire.TELEMETRY_KIND)
        if events:
            whole = EventBatch(self._origin, tuple(sorted(events, key=lambda e: e.time)))
            self._put(EVENTS, lambda: wire.encode_events(whole), wire.EVENTS_KIND)
        if self.uplink:
            self.uplink.wake()

    def close(self) -> None:
        """Stops the workers that do not hang, and makes everything spooled durable."""
        until = self.clock.monotonic() + STOP_S
        if self.uplink:
            self.uplink.stop()
        for worker in self.workers:
            worker.stop(max(0.0, until - self.clock.monotonic()))
        for spool in self._spools.values():
            spool.close()
        if self.uplink:
            self.uplink.close(max(0.0, until + UPLINK_S - self.clock.monotonic()))

    # --- collectors --------------------------------------------------------------------------------------------------

    def _deliveries(self, time: int) -> dict[Worker, Delivery]:
        """What the workers bring within the patience of this tick, and what came late since the last one."""
        refresh = time - self._refreshed >= INVENTORY_US
        if refresh:
            self._refreshed = time
        late = {w: d for w in self.workers if (d := w.take()) is not None}
        asked = [w for w in self.workers if w not in late and w.ask(self._config.agent.interval / 2, refresh)]
        with self._finished:
            self._finished.wait_for(lambda: not any(w.busy for w in asked), self._patience)
        return late | {w: d for w in asked if (d := w.take()) is not None}

    def _follow(self, worker: Worker, delivery: Delivery | None, time: int) -> list[Event]:
        """Says a change of a worker's state, as a line and as an event."""
        state, reason = worker.state, worker.reason
        if worker.hung:
            state, reason = "hung", f"no answer within {worker.collector.deadline:g} s"
        elif delivery is not None:
            state, reason = delivery.state, delivery.reason
        if (state, reason) == (worker.state, worker.reason):
            return []
        worker.state, worker.reason = state, reason
        name = worker.collector.name
        self._say(f"collector {name}", f"{state}: {reason}" if reason else state)
        return [self._state_event(time, name, state, reason)]

    def _state_event(self, time: int, name: str, state: State, reason: str) -> Event:
        return Event(
            time, f"node:{self._origin.node}", "collector", {"collector": name, "state": state, "reason": reason}
        )

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
        return [inventory_event(time, self._origin.node, {e: d for f in self._devices.values() for e, d in f.items()})]

    # --- spools ------------------------------------------------------------------------------------------------------

    def _open_spools(self) -> None:
        """Opens what is not open. Raises SpoolError if that can never work; a disk without room is tried again."""
        settings = self._config.spool
        for topic in (TELEMETRY, EVENTS):
            if topic not in self._spools:
                try:
                    self._spools[topic] = Spool(
                        settings.directory,
                        self._origin.node,
                        topic,
                        max_bytes=settings.max_bytes,
                        segment_bytes=settings.segment_bytes,
                        free_bytes=settings.free_bytes,
                    )
                except OSError as error:
                    if error.errno not in _NO_ROOM:
                        raise SpoolError(
                            f"{settings.directory}: {error.strerror}; wanted a folder that the agent may write: "
                            "set [spool] directory"
                        ) from error
                    self._say(f"spool {topic}", f"cannot be opened: {error.strerror}; trying again")

    def _put(self, topic: str, encode: Callable[[], bytes], kind: int) -> None:
        """Spools one message durably; says when that begins or ceases to cost data."""
        if topic not in self._spools:
            self._open_spools()
        spool = self._spools.get(topic)
        if spool is None:
            self.unspooled += 1
            return
        dropped = spool.dropped
        try:
            spool.append(encode(), kind, self.clock.now())
        except (OSError, Permanent) as error:  # too large for the wire, or a spool that cannot be made anew
            self.unspooled += 1
            self._say(f"spool {topic}", f"a message is lost: {error}")
            return
        spool.sync()
        self._say_losses(topic, spool, spool.dropped > dropped)

    def _say_losses(self, topic: str, spool: Spool, losing: bool) -> None:
        """Says when a spool begins to lose data, and when it has not for QUIET_S; a full one loses once per segment."""
        now = self.clock.monotonic()
        if losing:
            if topic not in self._losing:
                self._say(f"spool {topic}", f"losing data: {spool.trouble}; the newest is kept, gaps are counted")
            self._losing[topic] = now
        elif now - self._losing.get(topic, now) > QUIET_S:
            del self._losing[topic]
            self._say(f"spool {topic}", f"no loss for {QUIET_S:g} s; {spool.dropped} messages lost since the start")

    def _say_uplink(self, text: str) -> None:
        self._say("kafka", text)

    def _say(self, subject: str, text: str) -> None:
        """One line per change of what is to be said of a subject."""
        if self._said.get(subject) != text:
            self._said[subject] = text
            self._log.write(f"{iso(self.clock.now())} {subject}: {text}\n")
            self._log.flush()


def run(config: Config, stop: threading.Event | None = None) -> int:
    """`fleetpulse agent`: runs until SIGTERM, SIGINT or `stop`. Raises ConfigError or SpoolError before it starts."""
    if not config.agent.interval > 0:
        raise ConfigError(f"{config.source}: [agent] interval = {config.agent.interval}: wanted more than 0 s")
    stop = stop or Stop()
    agent = Agent(config, configured(config.collector, config.source))
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
