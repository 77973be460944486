"""Polls one BMC: a thread that sends one request at a time, and what it found since the last read of the collector."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agents.collector import HANG_S, Device
from agents.collectors.bmc.redfish_cooling import UnitTotals
from agents.collectors.bmc.redfish_document import EntityRow, ParseFaults
from agents.collectors.bmc.redfish_events import SILENCE_S, EventListener, EventRecord
from agents.collectors.bmc.redfish_http import RedfishConnection, RedfishSession, RequestError
from agents.collectors.bmc.redfish_schedule import PollSchedule, PollTarget
from agents.collectors.bmc.redfish_settings import BmcSettings
from agents.collectors.bmc.redfish_tree import ResourceTree
from pipeline.model.records import Event

MAX_ENTITIES = 4096
"""Most entities of one BMC. Chosen: twice a floor PDU with 1000 outlets and their circuits."""
MAX_EVENTS = 256
"""Most events that wait for a read. Chosen: reads are a second apart."""
EVENTS_PER_MINUTE = 120
"""Most events of one BMC's stream per minute. Chosen: a longer storm contains no further information."""


@dataclass
class ResultQueue:
    """Results since the last read, bounded. now: UTC microseconds, the time of events."""

    now: Callable[[], int]
    dropped: int = 0
    """Number of dropped events."""
    _values: dict[str, tuple[str, dict[str, float]]] = field(default_factory=dict)
    _events: list[Event] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _minute: int = 0
    _sent: int = 0

    def add_values(self, row: EntityRow) -> bool:
        """Adds the values of a row. Returns False if there is no room for another entity."""
        reported_values = {signal: value for signal, value in row.values.items() if value is not None}
        with self._lock:
            if row.entity not in self._values and len(self._values) >= MAX_ENTITIES:
                return False
            if reported_values:
                self._values.setdefault(row.entity, (row.device_class, {}))[1].update(reported_values)
        return True

    def add_event(self, entity: str, kind: str, data: dict[str, object], always: bool = False) -> None:
        """Adds an event that happened now. `always`: not limited, for our own events, of which there are few."""
        time = self.now()
        with self._lock:
            minute = time // 60_000_000
            if minute != self._minute:
                self._minute, self._sent = minute, 0
            if len(self._events) >= MAX_EVENTS or (not always and self._sent >= EVENTS_PER_MINUTE):
                self.dropped += 1
                return
            self._sent += 0 if always else 1
            self._events.append(Event(time, entity, kind, data))

    def take_all(self) -> tuple[dict[str, tuple[str, dict[str, float]]], list[Event]]:
        """Returns everything since the last call."""
        with self._lock:
            values, self._values = self._values, {}
            events, self._events = self._events, []
        return values, events


def add_feed_parents(devices: Mapping[str, Device], loops: Mapping[str, str]) -> dict[str, Device]:
    """Returns the devices with loops and units as parents of what they feed. loops: path of a CoolingLoop -> its
    entity.

    A primary connector is fed by its loop, and so is its unit; a secondary one feeds its loop. Links that would form a
    circle are left out.
    """
    found = dict(devices)
    for child, parent in _feed_pairs(devices, loops):
        if child in found and parent in found and child not in {parent, *_ancestors(found, parent)}:
            device = found[child]
            if parent not in device.parents:
                found[child] = Device((parent, *device.parents), device.attributes)
    return found


def _feed_pairs(devices: Mapping[str, Device], loops: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields (fed entity, feeding entity) in a fixed order, so that the same link of a circle is always left out."""
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


def _ancestors(devices: Mapping[str, Device], entity: str) -> set[str]:
    above: set[str] = set()
    level = [entity]
    while level:
        level = [p for e in level if e in devices for p in devices[e].parents if p not in above]
        above.update(level)
    return above


IDLE_S = 0.5
"""Longest sleep of a thread without due requests. Chosen, so that it notices a stop."""
LOGOUT_S = 1.5
"""Longest wait for the logout at the end. Chosen: an agent ends within 2 s."""
MAX_URGENT = 64
"""Most resources that wait to be read because of an event; others are read at their interval. Chosen."""
MAX_ERROR_PATHS = 8
"""Failing resources without a success in between, after which the BMC counts as unreachable. Chosen: more than
disappear together when a part is removed. Fewer if it has fewer resources."""
_ETAG_S = 300.0
"""Resources with at least this interval are requested with their ETag; never a collection that includes its members,
since its ETag may be that of the collection alone."""


@dataclass
class BmcPoller:
    """Reads one BMC.

    Its owner starts it, takes the results every second, and stops it; none of that waits for the BMC.
    """

    bmc: BmcSettings
    now: Callable[[], int]
    monotonic: Callable[[], float] = time.monotonic
    reachable: bool | None = None
    latency: float | None = None
    faults: ParseFaults = field(default_factory=ParseFaults)
    failed_requests: int = 0
    last_failure: str = ""
    """Reason of the last failed request."""
    changed: bool = False
    """Whether the devices changed since the owner last reset this."""
    _failed_paths: dict[str, bool] = field(default_factory=dict)
    """Resources that failed since the last success: whether each is a fast one."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _ending: threading.Lock = field(default_factory=threading.Lock)
    _wake: threading.Condition = field(default_factory=threading.Condition)
    _urgent: list[str] = field(default_factory=list)
    _devices: dict[str, Device] = field(default_factory=dict)
    _loops: dict[str, str] = field(default_factory=dict)
    _devices_lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _current_request: tuple[str, float] | None = None
    """Path of the current request, including logins and redirects, and when it started."""

    def __post_init__(self) -> None:
        bmc = self.bmc
        url = bmc.url.rstrip("/")
        self.results = ResultQueue(self.now)
        self.client = RedfishConnection(url, bmc.timeout, bmc.ca_file, bmc.verify, self.monotonic)
        self.session = RedfishSession(self.client, bmc.user, bmc.password_file)
        self.schedule = PollSchedule(self.monotonic)
        self.units = UnitTotals()
        self.tree = ResourceTree(bmc, self.schedule, self.faults, self._remove_device)
        stream = RedfishConnection(url, SILENCE_S, bmc.ca_file, bmc.verify, self.monotonic)
        self.listener = EventListener(
            stream, self.session.current_headers, self._handle_event, self.faults.add, self._stop
        )

    # --- called by the owner ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread."""
        self.tree.start()
        self._thread = threading.Thread(target=self._run, name=f"redfish {self.bmc.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Requests the end without waiting for it."""
        with self._ending:
            self._stop.set()
            self.client.closing = True
            self.client.abort()
        self.listener.close()
        with self._wake:
            self._wake.notify()

    def join(self, seconds: float) -> None:
        """Waits up to `seconds` for the end of the thread."""
        if self._thread is not None:
            self._thread.join(seconds)

    def check(self) -> None:
        """Aborts a request that exceeded its time. Reports a BMC that has not responded for HANG_S, although it still
        may.

        Raises RuntimeError if the thread has ended.
        """
        self.client.abort_overdue()
        asked = self._current_request
        if asked is not None and self.reachable is not False and self.monotonic() - asked[1] >= HANG_S:
            self._set_unreachable(f"{asked[0]}: no response for {HANG_S:g} s; waiting up to {self.bmc.timeout:g} s")
        if self._thread is not None and not self._thread.is_alive() and not self._stop.is_set():
            raise RuntimeError(f"bmc:{self.bmc.name}: its thread ended: {self.last_failure or 'unknown reason'}")

    @property
    def failures(self) -> int:
        """Number of requests without a useful response, and of parts that could not be read."""
        return self.failed_requests + self.faults.count

    def pending_seconds(self) -> float:
        """Returns the seconds that the current request has taken; 0 without one."""
        began = self.client.request_started
        return 0.0 if began is None else max(0.0, self.monotonic() - began)

    def devices(self) -> dict[str, Device]:
        """Returns the devices of the BMC that were read so far."""
        with self._devices_lock:
            devices, loops = dict(self._devices), dict(self._loops)
        return add_feed_parents(devices, loops)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                target = self._next_target()
                if target is not None:
                    self._poll(target)
        except Exception as fault:  # noqa: BLE001 - reported at the next read, which restarts the poller
            self.last_failure = f"{type(fault).__name__}: {fault}"
        with self._ending:  # `stop` aborts the request before it, never the logout
            self.client.timeout = LOGOUT_S
            self.client.close()
        self.session.logout()
        self.client.close()

    def _next_target(self) -> PollTarget | None:
        """Returns the next target; sleeps a little if there is none."""
        with self._wake:
            urgent, self._urgent = self._urgent, []
        for path in urgent:
            if (target := self.tree.target_to_read(path)) is not None:
                self.schedule.schedule(target, urgent=True)
        found = self.schedule.pop_due()
        if found is None:
            with self._wake:
                if not self._urgent and not self._stop.is_set():
                    self._wake.wait(min(IDLE_S, max(0.001, self.schedule.seconds_until_due())))
        return found

    def _poll(self, target: PollTarget) -> None:
        began = self.monotonic()
        self._current_request = target.path, began
        try:
            answer = self.session.get(target.path + target.expand, target.etag)
            if answer.status != 304:
                self._handle_document(target, answer.document())
                seldom = target.interval >= _ETAG_S and not target.covers_members
                target.etag = answer.headers.get("etag", "")[:128] if seldom else ""
        except RequestError as failure:
            self._handle_failure(target, began, failure)
            return
        except Exception as error:  # noqa: BLE001 - no content of a document may end the thread; it is counted
            self._handle_failure(target, began, RequestError(f"{target.path}: {type(error).__name__}"))
            return
        finally:
            self._current_request = None
        self._set_reachable(self.monotonic() - began)
        self.schedule.record_success(target, began)
        if target.kind == "event_service" and self.bmc.events:
            self.listener.start(self.tree.event_stream_path)

    def _handle_failure(self, target: PollTarget, began: float, failure: RequestError) -> None:
        self.failed_requests += 1
        self.last_failure = str(failure) if target.path in str(failure) else f"{target.path}: {failure}"
        if self._stop.is_set():
            return
        if not failure.bmc_down and target.expand:
            target.expand = ""  # supported, but refused
            self.schedule.schedule(target)
            return
        self.schedule.record_failure(target, began, failure.bmc_down, failure.retry_after)
        if failure.bmc_down:
            self._set_unreachable(str(failure))
            return
        self._note_error_response(target, self.monotonic() - began)
        parent = self.tree.targets.get(target.parent)
        if parent is not None and target.failures == 1:
            self.schedule.schedule(parent, self.monotonic() + 5.0)  # it may no longer exist

    def _handle_document(self, target: PollTarget, body: Mapping[str, Any]) -> None:
        rows = self.tree.parse(target, body)
        if rows is None:
            raise RequestError(f"{target.path}: {self.faults.last}")
        for source, row in rows:
            self._store_row(row)
            if source.kind == "connector" and source.scope.side == "secondary":
                self._update_unit(source, row)
            if source.kind == "loop":
                with self._devices_lock:
                    self._loops[source.path] = row.entity

    def _store_row(self, row: EntityRow) -> None:
        if not self.results.add_values(row):
            self.faults.add(f"{row.entity}: more than {MAX_ENTITIES} entities")
            return
        known = self._devices.get(row.entity)
        if known is None or (row.attributes and any(known.attributes.get(k) != v for k, v in row.attributes.items())):
            before = known.attributes if known is not None else {}
            with self._devices_lock:
                self._devices[row.entity] = Device(row.parents, {**before, **row.attributes})
            self.changed = True

    def _update_unit(self, source: PollTarget, row: EntityRow) -> None:
        """Updates the row of the coolant unit of this secondary connector."""
        unit = source.scope.parents[0]
        collection = self.tree.targets.get(source.parent)
        paths = collection.children | {source.path} if collection is not None else {source.path}
        members = {e for path in paths if (t := self.tree.targets.get(path)) is not None for e in t.entities}
        whole = self.units.update(unit, row, self.monotonic(), members)
        if whole is not None:
            self._store_row(whole)

    def _remove_device(self, entity: str) -> None:
        with self._devices_lock:
            self._devices.pop(entity, None)
        self.changed = True
        self.units.remove(entity)

    # --- state of the BMC itself --------------------------------------------------------------------------------------

    def _set_reachable(self, took: float) -> None:
        self.latency = took
        if self.reachable is False:
            self.results.add_event(f"bmc:{self.bmc.name}", "bmc_back", {"latency": round(took, 3)}, always=True)
            self.schedule.retry_failed(self.tree.targets.values())
        self.reachable, self._failed_paths = True, {}

    def _note_error_response(self, target: PollTarget, took: float) -> None:
        """Handles an error response. A BMC that returns only errors counts as unreachable."""
        self.latency = took
        if len(self._failed_paths) < MAX_ERROR_PATHS or not target.is_fast:
            self._failed_paths[target.path] = target.is_fast
        known = self.tree.targets.values()
        enough = len(self._failed_paths) >= min(MAX_ERROR_PATHS, len(known))
        slow_too = not all(self._failed_paths.values()) or all(one.is_fast for one in known)
        if (enough and slow_too) or self.reachable is None:
            self._set_unreachable(f"only error responses: {self.last_failure}")

    def _set_unreachable(self, reason: str) -> None:
        if self.reachable is not False:
            self.results.add_event(f"bmc:{self.bmc.name}", "bmc_lost", {"reason": reason}, always=True)
        self.reachable = False

    def _handle_event(self, error_bytes: EventRecord) -> None:
        """Handles an event of the stream: a leak state that it reports is used immediately, and its resource is read
        next.

        The event is reported unless it only says that a resource changed.
        """
        target = self.tree.target_for_event(error_bytes.origin)
        entity = min(tuple(target.entities), default="") if target is not None else ""
        if not error_bytes.is_routine:
            self.results.add_event(entity or f"bmc:{self.bmc.name}", "redfish", dict(error_bytes.data))
        if target is None:
            return
        if error_bytes.leak is not None and entity.startswith("leak_detector:"):
            self.results.add_values(EntityRow(entity, "leak", {"leak.state": error_bytes.leak}))
        with self._wake:
            if target.path not in self._urgent and len(self._urgent) < MAX_URGENT:
                self._urgent.append(target.path)
            self._wake.notify()
