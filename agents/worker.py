"""One thread per collector, for ever: a call that hangs holds up this thread and nothing else.

The agent asks and later takes what was delivered; it never waits for a worker beyond its tick. A hung worker is not
replaced, since the driver that holds it would hold the next one too: threads stay as many as collectors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Literal

from agents.batches import check
from agents.collector import Collector, Device, NoData, Reading

State = Literal["starting", "ok", "no data", "fault", "hung"]
NO_DATA_S = 60.0
"""How long a source that is not there is left alone; chosen, as Collector.open promises."""
FAULT_S = 10.0
"""How long a collector that failed twice running is left alone; chosen: a failing driver call may be dear."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one look brought: readings, or why there are none. inventory: None where it is as it was."""

    state: State
    reason: str = ""
    readings: tuple[Reading, ...] = ()
    inventory: Mapping[str, Device] | None = None
    late: bool = False


class Worker:
    """Runs one collector. All methods but `_run` are for the agent's thread."""

    def __init__(
        self, collector: Collector, node: str, monotonic: Callable[[], float], finished: threading.Condition
    ) -> None:
        self.collector = collector
        self.state: State = "starting"
        self.reason = ""
        self._node, self._monotonic, self._finished = node, monotonic, finished
        self._requests: SimpleQueue[bool | None] = SimpleQueue()
        self._asked: float | None = None
        self._delivery: Delivery | None = None
        self._ended = 0.0
        self._due = float("-inf")
        self._faults = 0
        self._opened = False
        self._entities: set[str] | None = None
        self._thread = threading.Thread(target=self._run, name=f"collector {collector.name}", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._asked is not None and self._delivery is None

    @property
    def hung(self) -> bool:
        """Whether the call under way has outlived its deadline."""
        return self.busy and self._asked is not None and self._monotonic() - self._asked > self.collector.deadline

    def ask(self, slack: float, refresh: bool = False) -> bool:
        """Starts a look if one is due within `slack` seconds and none is under way; `refresh` wants inventory."""
        now = self._monotonic()
        if self._asked is not None or now + slack < self._due:
            return False
        self._asked, self._due = now, now + self.collector.interval
        self._requests.put(refresh)
        return True

    def take(self) -> Delivery | None:
        """What the last look brought, once; its readings are left out if it outlived the deadline."""
        if self._asked is None or self._delivery is None:
            return None
        found, took = self._delivery, self._ended - self._asked
        self._delivery = self._asked = None
        self._plan(found)
        if took > self.collector.deadline:
            return Delivery(found.state, found.reason, (), found.inventory, late=True)
        return found

    def stop(self, timeout: float) -> None:
        """Closes the collector, unless it hangs."""
        self._requests.put(None)
        self._thread.join(0 if self.busy else timeout)

    def _plan(self, found: Delivery) -> None:
        self._faults = self._faults + 1 if found.state == "fault" else 0
        if found.state == "no data":
            self._due = self._monotonic() + NO_DATA_S
        elif self._faults > 1:
            self._due = self._monotonic() + FAULT_S

    # --- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (refresh := self._requests.get()) is not None:
            delivery = self._look(refresh)
            with self._finished:
                self._ended, self._delivery = self._monotonic(), delivery
                self._finished.notify_all()
        self.collector.close()

    def _look(self, refresh: bool) -> Delivery:
        try:
            if not self._opened:
                self.collector.open(self._node)
                self._opened, self._entities = True, None
            readings = self.collector.read()
            entities = {entity for reading in readings for entity in reading.entities}
            changed = refresh or entities != self._entities
            self._entities = entities
            inventory = self.collector.inventory() if changed else None
            for reading in readings:
                check(reading, inventory)
            return Delivery("ok", "", readings, inventory)
        except NoData as absent:
            return self._shut("no data", str(absent))
        except Exception as fault:  # noqa: BLE001 - whatever a driver does must not end the agent; it is told and counted
            return self._shut("fault", f"{type(fault).__name__}: {fault}")

    def _shut(self, state: State, reason: str) -> Delivery:
        """Leaves the source so that the next look opens it anew."""
        self._opened = False
        try:
            self.collector.close()
        except Exception as fault:  # noqa: BLE001 - as above
            reason = f"{reason}; closing it: {type(fault).__name__}: {fault}"
        return Delivery(state, reason)
