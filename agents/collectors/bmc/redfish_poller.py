"""One BMC: a thread that asks it one thing at a time for ever, and what came of it since the last look.

What one BMC's threads found since the last look: each value is given once. All of it is bounded.

Which loop feeds which coolant unit, and which unit which loop: parents that connectors and loops name. Pure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agents.collector import HANG_S, Device
from agents.collectors.bmc.redfish_cooling import UnitTotals
from agents.collectors.bmc.redfish_document import Faults, Row
from agents.collectors.bmc.redfish_events import SILENCE_S, Listener, Said
from agents.collectors.bmc.redfish_http import Client, Failure, Session
from agents.collectors.bmc.redfish_schedule import Schedule, Target
from agents.collectors.bmc.redfish_settings import Bmc
from agents.collectors.bmc.redfish_tree import Tree
from pipeline.model.records import Event

MAX_ENTITIES = 4096
"""Most entities of one BMC; chosen: twice a floor PDU with 1000 outlets and their circuits."""
MAX_EVENTS = 256
"""Most events that wait for a look; chosen: the looks are a second apart."""
EVENTS_PER_MINUTE = 120
"""Most events that one BMC's stream may tell in a minute; chosen: what is a storm tells nothing more by its length."""


@dataclass
class Mailbox:
    """Values by entity, newest first. wall: UTC microseconds, the time of events."""

    wall: Callable[[], int]
    lost: int = 0
    """Events that were dropped."""
    _values: dict[str, tuple[str, dict[str, float]]] = field(default_factory=dict)
    _events: list[Event] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _minute: int = 0
    _told: int = 0

    def put(self, row: Row) -> bool:
        """Adds what a row tells; False where there is no room for one more entity."""
        told = {signal: value for signal, value in row.values.items() if value is not None}
        with self._lock:
            if row.entity not in self._values and len(self._values) >= MAX_ENTITIES:
                return False
            if told:
                self._values.setdefault(row.entity, (row.device_class, {}))[1].update(told)
        return True

    def tell(self, entity: str, kind: str, data: dict[str, object], always: bool = False) -> None:
        """Adds an event that happened now; `always` for our own, of which there are few."""
        time = self.wall()
        with self._lock:
            minute = time // 60_000_000
            if minute != self._minute:
                self._minute, self._told = minute, 0
            if len(self._events) >= MAX_EVENTS or (not always and self._told >= EVENTS_PER_MINUTE):
                self.lost += 1
                return
            self._told += 0 if always else 1
            self._events.append(Event(time, entity, kind, data))

    def take(self) -> tuple[dict[str, tuple[str, dict[str, float]]], list[Event]]:
        """Everything since the last call."""
        with self._lock:
            values, self._values = self._values, {}
            events, self._events = self._events, []
        return values, events


def fed(devices: Mapping[str, Device], loops: Mapping[str, str]) -> dict[str, Device]:
    """The devices with loops and units as parents of what they feed. loops: path of a CoolingLoop -> its entity.

    A primary connector is fed by its loop, and so is its unit; a secondary one feeds its loop. What would make a
    circle is left out, since nobody is his own ancestor.
    """
    found = dict(devices)
    for child, parent in _pairs(devices, loops):
        if child in found and parent in found and child not in {parent, *_above(found, parent)}:
            device = found[child]
            if parent not in device.parents:
                found[child] = Device((parent, *device.parents), device.attributes)
    return found


def _pairs(devices: Mapping[str, Device], loops: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(who is fed, by whom), in a fixed order, so that of a circle always the same is left out."""
    for entity in sorted(devices):
        device = devices[entity]
        loop = loops.get(str(device.attributes.get("loop")))
        if entity.startswith("connector:") and loop is not None and device.parents:
            unit = device.parents[0]
            if unit.startswith("cdu:"):
                yield (loop, unit) if device.attributes.get("side") == "secondary" else (unit, loop)
        elif entity.startswith("loop:"):
            named = device.attributes.get("consumers") or ()
            for unit in sorted(devices):
                if unit.startswith("cdu:") and devices[unit].attributes.get("name") in named:
                    yield unit, entity


def _above(devices: Mapping[str, Device], entity: str) -> set[str]:
    above: set[str] = set()
    level = [entity]
    while level:
        level = [p for e in level if e in devices for p in devices[e].parents if p not in above]
        above.update(level)
    return above


IDLE_S = 0.5
"""Longest sleep of a thread that has nothing to ask; chosen, so that it sees that it shall end."""
LOGOUT_S = 1.5
"""Longest wait for a BMC to take the session back at the end; chosen: an agent ends within 2 s."""
MAX_URGENT = 64
"""Most resources that wait to be read because an event named them; the others come in their turn. Chosen."""
BARREN = 8
"""Resources, each with an error and none with an answer in between, after which the BMC tells nothing; chosen: more
than vanish together where a part is taken out. Fewer where it has fewer."""
_ETAG_S = 300.0
"""Resources that are read as seldom as this are asked for only where they changed; never a collection that brings its
members along, since its ETag may be that of the collection alone."""


@dataclass
class Watch:
    """Reads one BMC. Its owner starts it, takes what came each second, and stops it; that never waits for the BMC."""

    bmc: Bmc
    wall: Callable[[], int]
    monotonic: Callable[[], float] = time.monotonic
    reachable: bool | None = None
    latency: float | None = None
    faults: Faults = field(default_factory=Faults)
    failed: int = 0
    reason: str = ""
    """Why the newest request that brought nothing did so."""
    changed: bool = False
    """Whether there are other devices than when that was last asked."""
    _barren: dict[str, bool] = field(default_factory=dict)
    """Resources that gave errors since the newest useful answer: whether each is a fast one."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _wake: threading.Condition = field(default_factory=threading.Condition)
    _urgent: list[str] = field(default_factory=list)
    _devices: dict[str, Device] = field(default_factory=dict)
    _loops: dict[str, str] = field(default_factory=dict)
    _known: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _asked: tuple[str, float] | None = None
    """Path of the question under way, logins and redirects included, and when it began."""

    def __post_init__(self) -> None:
        bmc = self.bmc
        url = bmc.url.rstrip("/")
        self.mail = Mailbox(self.wall)
        self.client = Client(url, bmc.timeout, bmc.ca_file, bmc.verify, self.monotonic)
        self.session = Session(self.client, bmc.user, bmc.password_file)
        self.schedule = Schedule(self.monotonic)
        self.units = UnitTotals()
        self.tree = Tree(bmc, self.schedule, self.faults, self._gone)
        stream = Client(url, SILENCE_S, bmc.ca_file, bmc.verify, self.monotonic)
        self.listener = Listener(stream, self.session.known, self._heard, self.faults.add, self._stop)

    # --- the owner's side ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.tree.plant()
        self._thread = threading.Thread(target=self._run, name=f"redfish {self.bmc.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Asks for the end without waiting for it."""
        self._stop.set()
        self.listener.close()
        self.client.ended = True
        self.client.abort()
        with self._wake:
            self._wake.notify()

    def join(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)

    def mind(self) -> None:
        """Ends a request that outlived its time; reports a BMC that has not answered for HANG_S, though it may yet.

        Raises RuntimeError where the thread has ended.
        """
        self.client.overdue()
        asked = self._asked
        if asked is not None and self.reachable is not False and self.monotonic() - asked[1] >= HANG_S:
            self._lost(f"{asked[0]}: no answer for {HANG_S:g} s; it is waited for up to {self.bmc.timeout:g} s")
        if self._thread is not None and not self._thread.is_alive() and not self._stop.is_set():
            raise RuntimeError(f"bmc:{self.bmc.name}: its thread ended: {self.reason or 'it could not say why'}")

    @property
    def failures(self) -> int:
        """Requests without a useful answer, and parts of answers that could not be read."""
        return self.failed + self.faults.count

    def pending(self) -> float:
        began = self.client.began
        return 0.0 if began is None else max(0.0, self.monotonic() - began)

    def devices(self) -> dict[str, Device]:
        """What the BMC has, as far as it was read."""
        with self._known:
            devices, loops = dict(self._devices), dict(self._loops)
        return fed(devices, loops)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                target = self._next()
                if target is not None:
                    self._ask(target)
        except Exception as fault:  # noqa: BLE001 - the next look tells it, and the BMC is begun anew
            self.reason = f"{type(fault).__name__}: {fault}"
        self.client.timeout = LOGOUT_S
        self.client.close()
        self.session.logout()
        self.client.close()

    def _next(self) -> Target | None:
        """The next target; sleeps a little where there is none."""
        with self._wake:
            urgent, self._urgent = self._urgent, []
        for path in urgent:
            if (target := self.tree.bringer(path)) is not None:
                self.schedule.put(target, urgent=True)
        found = self.schedule.next()
        if found is None:
            with self._wake:
                if not self._urgent and not self._stop.is_set():
                    self._wake.wait(min(IDLE_S, max(0.001, self.schedule.wait())))
        return found

    def _ask(self, target: Target) -> None:
        began = self.monotonic()
        self._asked = target.path, began
        try:
            answer = self.session.get(target.path + target.expand, target.etag)
            if answer.status != 304:
                self._take(target, answer.document())
                seldom = target.every >= _ETAG_S and not target.covers
                target.etag = answer.headers.get("etag", "")[:128] if seldom else ""
        except Failure as failure:
            self._trouble(target, began, failure)
            return
        except Exception as error:  # noqa: BLE001 - whatever a document holds must not end the watch; it is counted
            self._trouble(target, began, Failure(f"{target.path}: {type(error).__name__}"))
            return
        finally:
            self._asked = None
        self._back(self.monotonic() - began)
        self.schedule.answered(target, began)
        if target.kind == "event_service" and self.bmc.events:
            self.listener.follow(self.tree.events)

    def _trouble(self, target: Target, began: float, failure: Failure) -> None:
        self.failed += 1
        self.reason = str(failure) if target.path in str(failure) else f"{target.path}: {failure}"
        if self._stop.is_set():
            return
        if not failure.away and target.expand:
            target.expand = ""  # promised, and refused
            self.schedule.put(target)
            return
        self.schedule.failed(target, began, failure.away, failure.after)
        if failure.away:
            self._lost(str(failure))
            return
        self._fruitless(target, self.monotonic() - began)
        parent = self.tree.targets.get(target.parent)
        if parent is not None and target.failures == 1:
            self.schedule.put(parent, self.monotonic() + 5.0)  # it may no longer be there

    def _take(self, target: Target, body: Mapping[str, Any]) -> None:
        rows = self.tree.take(target, body)
        if rows is None:
            raise Failure(f"{target.path}: {self.faults.newest}")
        for source, row in rows:
            self._put(row)
            if source.kind == "connector" and source.place.side == "secondary":
                self._unit(source, row)
            if source.kind == "loop":
                with self._known:
                    self._loops[source.path] = row.entity

    def _put(self, row: Row) -> None:
        if not self.mail.put(row):
            self.faults.add(f"{row.entity}: one entity too many")
            return
        known = self._devices.get(row.entity)
        if known is None or (row.attributes and any(known.attributes.get(k) != v for k, v in row.attributes.items())):
            before = known.attributes if known is not None else {}
            with self._known:
                self._devices[row.entity] = Device(row.parents, {**before, **row.attributes})
            self.changed = True

    def _unit(self, source: Target, row: Row) -> None:
        """The row of the coolant unit whose secondary connector this is."""
        unit = source.place.parents[0]
        collection = self.tree.targets.get(source.parent)
        paths = collection.children | {source.path} if collection is not None else {source.path}
        members = {e for path in paths if (t := self.tree.targets.get(path)) is not None for e in t.entities}
        whole = self.units.row(unit, row, self.monotonic(), members)
        if whole is not None:
            self._put(whole)

    def _gone(self, entity: str) -> None:
        with self._known:
            self._devices.pop(entity, None)
        self.changed = True
        self.units.drop(entity)

    # --- what is told of the BMC itself -------------------------------------------------------------------------------

    def _back(self, took: float) -> None:
        self.latency = took
        if self.reachable is False:
            self.mail.tell(f"bmc:{self.bmc.name}", "bmc_back", {"latency": round(took, 3)}, always=True)
            self.schedule.afresh(self.tree.targets.values())
        self.reachable, self._barren = True, {}

    def _fruitless(self, target: Target, took: float) -> None:
        """The BMC answered, with an error; one that gives nothing but errors tells as little as one that is away."""
        self.latency = took
        if len(self._barren) < BARREN or not target.fast:
            self._barren[target.path] = target.fast
        known = self.tree.targets.values()
        enough = len(self._barren) >= min(BARREN, len(known))
        slow_too = not all(self._barren.values()) or all(one.fast for one in known)
        if (enough and slow_too) or self.reachable is None:
            self._lost(f"it answers with errors alone: {self.reason}")

    def _lost(self, reason: str) -> None:
        if self.reachable is not False:
            self.mail.tell(f"bmc:{self.bmc.name}", "bmc_lost", {"reason": reason}, always=True)
        self.reachable = False

    def _heard(self, said: Said) -> None:
        """An event of the stream: a leak that it names holds at once, and what it is about is read next.

        It is told, unless all it says is that a resource changed, which reading it shows.
        """
        target = self.tree.about(said.origin)
        entity = min(tuple(target.entities), default="") if target is not None else ""
        if not said.routine:
            self.mail.tell(entity or f"bmc:{self.bmc.name}", "redfish", dict(said.data))
        if target is None:
            return
        if said.leak is not None and entity.startswith("leak_detector:"):
            self.mail.put(Row(entity, "leak", {"leak.state": said.leak}))
        with self._wake:
            if target.path not in self._urgent and len(self._urgent) < MAX_URGENT:
                self._urgent.append(target.path)
            self._wake.notify()
