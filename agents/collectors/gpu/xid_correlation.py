"""Merges fault events on their way to the spool: one event per XID, whichever source reported it, with its root cause.

The kernel log and NVML both report XIDs. An event of one is paired with an event of the other, by count. Only events of
NVML alone are held back: they have no text, and the kernel log's line of the same XID arrives within a read. Everything
else is sent immediately; later consequences refer back to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agents.collector import Collector
from agents.collectors.gpu.xid_table import SEVERITIES, Xid, XidTable, load_xid_table, shipped_xid_table
from pipeline.model.records import SECOND, Event

MAX_SOURCE_SKEW = 10 * SECOND
"""How far apart two sources may report one XID. Chosen: reads are 1 s apart and a busy node delays some."""
HOLD_TIME = 2 * SECOND
"""How long an XID of NVML alone waits for the kernel log's line. Chosen: two reads."""
KEEP_TIME = 70 * SECOND
"""How long an event sent alone is remembered. Chosen: the kernel log reports counted repeats after 60 s."""
MAX_UNPAIRED = 1024
"""Most XIDs, by code and device, that wait or are remembered. Chosen: a node has some tens on its worst day."""


@dataclass
class _PendingXid:
    """What one source reported and the other did not. event: the first one; last_time: time of the last one."""

    event: Event
    last_time: int
    started: int
    count: int = 0


@dataclass
class _PendingXids:
    """Pending XIDs by code and device. A device is identified by its PCI address or its entity, whichever both sources
    report.
    """

    _pending: dict[tuple[int, str], _PendingXid] = field(default_factory=dict)

    def add(self, event: Event, count: int, now: int, merge: bool) -> None:
        """Adds events. merge: counts are added to the pending ones, however old these are, and leave with them."""
        known = next((self._pending[key] for key in _device_keys(event) if key in self._pending), None)
        if count <= 0:
            return
        if known is None or not (merge or _near_in_time(known, event)):
            known = _PendingXid(event, event.time, now)
        known.count, known.last_time = known.count + count, event.time
        known.started = known.started if merge else now
        for key in _device_keys(event):
            self._pending.pop(key, None)
            self._pending[key] = known  # moved to the end, so that the first ones are the oldest

    def match(self, event: Event, most: int) -> int:
        """Returns how many pending ones are paired with an event that counts `most`. They are no longer pending."""
        for key in _device_keys(event):
            known = self._pending.get(key)
            if known is not None and _near_in_time(known, event):
                taken = min(known.count, most)
                known.count -= taken
                return taken
        return 0

    def pop_older_than(self, now: int, age: int) -> list[_PendingXid]:
        """Removes and returns what has waited for `age`, has a time in the future, or exceeds the limit."""
        unlike = {id(one): one for one in self._pending.values()}
        spare = len(unlike) - MAX_UNPAIRED
        out = [one for i, one in enumerate(unlike.values()) if i < spare or not 0 <= now - one.started < age]
        gone = {id(one) for one in out}
        self._pending = {key: one for key, one in self._pending.items() if id(one) not in gone and one.count}
        return [one for one in out if one.count]


@dataclass
class XidPairing:
    """held: of NVML, waiting. logged: sent, of the kernel log alone. sent_alone: sent, of NVML alone."""

    _held: _PendingXids = field(default_factory=_PendingXids, init=False, repr=False)
    _logged: _PendingXids = field(default_factory=_PendingXids, init=False, repr=False)
    _sent_alone: _PendingXids = field(default_factory=_PendingXids, init=False, repr=False)

    def pair(self, events: Iterable[Event], now: int) -> list[Event]:
        """Returns what to send now: other events and those of the kernel log, then those of NVML alone."""
        others = []
        for event in events:
            if event.kind == "xid" and event.data.get("source") == "nvml":
                count = _event_count(event)
                self._held.add(event, count - self._logged.match(event, count), now, merge=True)
            else:
                others.append(event)
        reported_values = [self._join_kernel_event(event, now) if event.kind == "xid" else event for event in others]
        for ledger in (self._logged, self._sent_alone):
            ledger.pop_older_than(now, KEEP_TIME)
        return reported_values + self._release_held(now, HOLD_TIME)

    def flush(self) -> list[Event]:
        """Returns the events that are still held back."""
        return self._release_held(0, 0)

    def _join_kernel_event(self, event: Event, now: int) -> Event:
        """Adds NVML's data to the kernel log's event of the same XID. The count sent before is subtracted."""
        count = _event_count(event)
        held = self._held.match(event, count)
        sent = self._sent_alone.match(event, count - held)
        self._logged.add(event, count - held - sent, now, merge=False)
        if not held + sent:
            return event
        return replace(event, data={**event.data, "sources": ["kernel", "nvml"], "count": count - sent})

    def _release_held(self, now: int, age: int) -> list[Event]:
        found = []
        for one in self._held.pop_older_than(now, age):
            found.append(replace(one.event, data={**one.event.data, "count": one.count}))
            self._sent_alone.add(replace(one.event, time=one.last_time), one.count, now, merge=False)
        return found


def _device_keys(event: Event) -> list[tuple[int, str]]:
    """Returns the keys of an event: its address, since two sources may number GPUs differently; without one its GPU.

    If no driver says which GPU is at an address, the entity is the node and identifies no device.
    """
    code, pci = int(event.data.get("xid", 0)), event.data.get("pci")
    name = pci or (None if event.entity.startswith("node:") else event.entity)
    return [(code, name)] if name else []


def _near_in_time(one: _PendingXid, event: Event) -> bool:
    """Returns whether an event, which may count repeats since some time, is of the time of the pending one."""
    return int(event.data.get("since", event.time)) - MAX_SOURCE_SKEW <= one.last_time <= event.time + MAX_SOURCE_SKEW


def _event_count(event: Event) -> int:
    return int(event.data.get("count", 1))


MAX_DELAY = 60 * SECOND
"""How long after its root cause a consequence may occur. Chosen: a GPU off the bus showed its SXid after 12 s, and
channels are cleaned up after GSP timeouts of 6 s each."""
MAX_LEAD = 2 * SECOND
"""How much earlier than its root cause a consequence may be logged. Chosen: XID 94 comes milliseconds before its 63."""
MAX_REMEMBERED = 1024
"""Most errors, by code and device, that are remembered. Chosen: the kernel log reports the same error of a device at
most 5 times a minute, and a node has some tens of errors at the same time on its worst day."""
MAX_RECORD_NUMBERS = 20_000
"""Most record numbers that are remembered. Two reads of 10,000 may be read again, since the kernel log collector saves
its position one read late."""
RECOVERY_XID = 154
KINDS = frozenset({"xid", "sxid", "recovery_action"})


@dataclass
class _RecentError:
    """An event that is remembered. root: root cause of a consequence."""

    time: int
    entity: str
    kind: str
    code: int
    severity: str
    fatal: bool
    pci: str | None
    root: Mapping[str, Any] | None = None
    cause: _RecentError | None = None

    @property
    def error_key(self) -> tuple[str, int, str]:
        """Kind, code and entity."""
        return self.kind, self.code, self.entity

    def same_device(self, event: Event) -> bool:
        """Returns whether an event is of the same device."""
        return self.entity == event.entity or (self.pci is not None and self.pci == event.data.get("pci"))

    def root_cause(self) -> Mapping[str, Any]:
        """Returns the root cause: follows causes of this call to one that has none, or whose root cause is known from
        before.
        """
        seen, passed = self, 0
        while seen.root is None and seen.cause is not None and passed < MAX_REMEMBERED:
            seen, passed = seen.cause, passed + 1
        return seen.root or {seen.kind: seen.code, "entity": seen.entity, "time": seen.time}


class _ErrorIndex:
    """Remembered errors by code and by device, so that a storm of errors is not compared pairwise."""

    def __init__(self, seen: Iterable[_RecentError]) -> None:
        self._codes: dict[int | str, list[_RecentError]] = {}
        self._devices: dict[str, list[_RecentError]] = {}
        for one in seen:
            self._codes.setdefault(one.code if one.kind == "xid" else one.kind, []).append(one)
            for place in {one.entity, one.pci} - {None}:
                self._devices.setdefault(str(place), []).append(one)

    def find(self, codes: Iterable[int | str], device_of: Event | None) -> list[_RecentError]:
        """Returns the errors with one of `codes` ("sxid" for any of a switch) and all of the device of an event."""
        found = [one for code in codes for one in self._codes.get(code, ())]
        if device_of is not None:
            for place in {device_of.entity, str(device_of.data.get("pci"))}:
                found += self._devices.get(place, ())
        return found


def correlator_for(collectors: Iterable[Collector]) -> XidCorrelator:
    """Returns a correlator with the XID table of the collectors, including the user's file if configured. Raises
    ConfigError.
    """
    own = (getattr(collector, "xid_table", None) for collector in collectors)
    return XidCorrelator(load_xid_table(next((path for path in own if path is not None), None)))


@dataclass
class XidCorrelator:
    """One per agent. `process` is called at every tick, also without events; `flush` when the agent ends."""

    table: XidTable = field(default_factory=shipped_xid_table)
    _recent: dict[tuple[str, int, str], _RecentError] = field(default_factory=dict, init=False, repr=False)
    _pairing: XidPairing = field(default_factory=XidPairing, init=False, repr=False)
    _record_numbers: dict[int, None] = field(default_factory=dict, init=False, repr=False)

    def process(self, events: Iterable[Event], now: int) -> list[Event]:
        """Returns what to send now: other events unchanged, then root causes, then their consequences."""
        others: list[Event] = []
        reported_values: list[Event] = []
        for event in events:
            if self._is_replayed(event):
                continue
            (reported_values if event.kind in KINDS else others).append(event)
        return others + self._add_root_causes(self._pairing.pair(reported_values, now), now)

    def flush(self) -> list[Event]:
        """Returns the events that are still held back."""
        held = self._pairing.flush()
        return self._add_root_causes(held, max((event.time for event in held), default=0))

    def _is_replayed(self, event: Event) -> bool:
        """Returns whether this kernel log record was processed already: its worker was killed before it saved its
        position.
        """
        number = event.data.get("seq")
        if not isinstance(number, int) or event.data.get("since") is not None:
            return False
        if number in self._record_numbers:
            return True
        self._record_numbers[number] = None
        if len(self._record_numbers) > MAX_RECORD_NUMBERS:
            del self._record_numbers[next(iter(self._record_numbers))]
        return False

    # --- root causes and consequences --------------------------------------------------------------------------------

    def _add_root_causes(self, reported_values: list[Event], now: int) -> list[Event]:
        """Adds root causes to consequences, and the driver's recovery action to root causes. Root causes come first."""
        reported_values = sorted(reported_values, key=lambda event: event.time)
        fresh = [_recent_error(event) for event in reported_values]
        self._drop_old(now)
        index = _ErrorIndex((self._recent | {seen.error_key: seen for seen in reversed(fresh)}).values())
        for event, seen in zip(reported_values, fresh, strict=True):
            seen.cause = self._find_cause(event, index)
        roots = [seen.cause.root_cause() if seen.cause is not None else None for seen in fresh]
        for seen, root in zip(fresh, roots, strict=True):
            seen.root, seen.cause = root, None
        for seen in fresh:
            self._recent.pop(seen.error_key, None)
            self._recent[seen.error_key] = seen
        found = [_with_data(e, root=dict(s.root)) if s.root else e for e, s in zip(reported_values, fresh, strict=True)]
        found = _with_actions(found)
        return [e for e in found if "root" not in e.data] + [e for e in found if "root" in e.data]

    def _find_cause(self, event: Event, index: _ErrorIndex) -> _RecentError | None:
        """Returns the most severe, then nearest, error of which this event may be a consequence."""
        entry = self.table.find_xid(int(event.data.get("xid", 0)))
        anything = event.kind == "recovery_action" or "any" in entry.follows
        near = index.find({79} if event.kind == "sxid" else entry.follows | entry.peers, event if anything else None)
        fits = [s for s in near if -MAX_LEAD <= event.time - s.time <= MAX_DELAY and self._can_cause(s, event)]
        order = {severity: rank for rank, severity in enumerate(SEVERITIES)}
        return max(fits, key=lambda s: (order.get(s.severity, 0), -abs(event.time - s.time)), default=None)

    def _can_cause(self, seen: _RecentError, event: Event) -> bool:
        if event.kind == "sxid":  # a switch link goes down together with the GPU at its other end
            return seen.kind == "xid" and seen.code == 79
        here = seen.same_device(event)
        if event.kind == "recovery_action":
            return here and seen.kind == "xid" and not self._is_summary(seen.code)
        entry = self.table.find_xid(int(event.data.get("xid", 0)))
        if seen.kind == "sxid":
            return seen.fatal and "sxid" in entry.peers
        if seen.kind != "xid" or (seen.code == entry.code and here):
            return False
        if not here:
            return seen.code in entry.peers and (seen.code != entry.code or seen.time < event.time)
        return seen.code in entry.follows or ("any" in entry.follows and not self._is_summary(seen.code))

    def _is_summary(self, code: int) -> bool:
        """Returns whether a code may be a consequence of any error. Then nothing is a consequence of it."""
        return "any" in self._xid_entry(code).follows

    def _xid_entry(self, code: int) -> Xid:
        return self.table.find_xid(code)

    def _drop_old(self, now: int) -> None:
        old = [key for key, seen in self._recent.items() if now - seen.time > MAX_DELAY + MAX_SOURCE_SKEW]
        for key in [*old, *list(self._recent)[:-MAX_REMEMBERED]]:
            self._recent.pop(key, None)


def _recent_error(event: Event) -> _RecentError:
    data = event.data
    code = data.get("xid", data.get("sxid", 0))
    fatal = event.kind == "sxid" and data.get("fatal", data.get("severity") == "critical") is True
    return _RecentError(
        event.time, event.entity, event.kind, code, data.get("severity", "info"), fatal, data.get("pci")
    )


def _with_data(event: Event, **more: Any) -> Event:
    return replace(event, data={**event.data, **more})


def _with_actions(events: list[Event]) -> list[Event]:
    """Adds the action of XID 154 or NVML's recovery action to the root cause of the same call. It overrides the table's
    action.
    """
    wanted: dict[tuple[str, Any, int], str] = {}
    for event in events:
        root, to = event.data.get("root"), event.data.get("to", event.data.get("detail", {}).get("to"))
        has_action = event.kind == "recovery_action" or event.data.get("xid") == RECOVERY_XID
        if root and has_action and to:  # 0 means repaired
            wanted[root["entity"], root.get("xid"), root["time"]] = str(event.data["action"])
    found = []
    for event in events:
        action = wanted.get((event.entity, event.data.get("xid"), event.time))
        found.append(event if action is None else _with_data(event, action=action, action_source="driver"))
    return found
