"""Folds events of faults on their way to the spool: one event per XID whoever saw it, and consequences name their root.

Nothing waits but what NVML alone told: its events bear no text, and the kernel log's line of the same XID comes within
a look. Everything else leaves in the call that brought it; what follows later points back to it.

One event per XID that the kernel log and NVML both tell: one of the one is paired with one of the other, by count.

Nothing waits but what NVML alone told: its events bear no text, and the kernel log's line of the same XID comes within
a look. What is left without a partner is an event of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agents.collector import Collector
from agents.collectors.gpu.xid_table import SEVERITIES, Table, Xid, load, shipped
from pipeline.model.records import SECOND, Event

SAME = 10 * SECOND
"""How far apart two sources may see one XID; chosen: looks are 1 s apart and a busy node delays some."""
HOLD = 2 * SECOND
"""How long an XID that only NVML told waits for the kernel log's line; chosen: two looks."""
KEPT = 70 * SECOND
"""How long what was told alone is remembered; chosen: the kernel log counts repeats in an event after 60 s."""
MAX_UNPAIRED = 1024
"""Most XIDs, told apart by code and device, that wait or are remembered; chosen: a node has some tens at once on its
worst day."""


@dataclass
class _Open:
    """What one source told and the other has not. event: the first of them; last: the time of the last."""

    event: Event
    last: int
    begun: int
    left: int = 0


@dataclass
class _Ledger:
    """What is open, by code and device. A device is known by its PCI address or its entity, whichever both tell."""

    _open: dict[tuple[int, str], _Open] = field(default_factory=dict)

    def put(self, event: Event, count: int, now: int, merge: bool) -> None:
        """merge: counts belong to what is open already, however old that is, and leave with it."""
        known = next((self._open[key] for key in _keys(event) if key in self._open), None)
        if count <= 0:
            return
        if known is None or not (merge or _near(known, event)):
            known = _Open(event, event.time, now)
        known.left, known.last = known.left + count, event.time
        known.begun = known.begun if merge else now
        for key in _keys(event):
            self._open.pop(key, None)
            self._open[key] = known  # last in order, so that the first are the oldest

    def take(self, event: Event, most: int) -> int:
        """How many of what is open are paired with an event that counts `most`; they are open no more."""
        for key in _keys(event):
            known = self._open.get(key)
            if known is not None and _near(known, event):
                taken = min(known.left, most)
                known.left -= taken
                return taken
        return 0

    def begun_before(self, now: int, age: int) -> list[_Open]:
        """Takes out what has waited for `age`, or longer than the clock can tell, and what is more than may wait."""
        unlike = {id(one): one for one in self._open.values()}
        spare = len(unlike) - MAX_UNPAIRED
        out = [one for i, one in enumerate(unlike.values()) if i < spare or not 0 <= now - one.begun < age]
        gone = {id(one) for one in out}
        self._open = {key: one for key, one in self._open.items() if id(one) not in gone and one.left}
        return [one for one in out if one.left]


@dataclass
class Pairs:
    """held: of NVML, waits. logged: sent, of the kernel log alone. alone: sent, of NVML alone."""

    _held: _Ledger = field(default_factory=_Ledger, init=False, repr=False)
    _logged: _Ledger = field(default_factory=_Ledger, init=False, repr=False)
    _alone: _Ledger = field(default_factory=_Ledger, init=False, repr=False)

    def take(self, events: Iterable[Event], now: int) -> list[Event]:
        """What is to be sent now: events of other kinds and of the kernel log, then what NVML alone told."""
        others = []
        for event in events:
            if event.kind == "xid" and event.data.get("source") == "nvml":
                count = _count(event)
                self._held.put(event, count - self._logged.take(event, count), now, merge=True)
            else:
                others.append(event)
        told = [self._joined(event, now) if event.kind == "xid" else event for event in others]
        for ledger in (self._logged, self._alone):
            ledger.begun_before(now, KEPT)
        return told + self._released(now, HOLD)

    def rest(self) -> list[Event]:
        """What is still held back."""
        return self._released(0, 0)

    def _joined(self, event: Event, now: int) -> Event:
        """The kernel log's event takes in what NVML told of the same XID; what was sent before counts no more."""
        count = _count(event)
        held = self._held.take(event, count)
        sent = self._alone.take(event, count - held)
        self._logged.put(event, count - held - sent, now, merge=False)
        if not held + sent:
            return event
        return replace(event, data={**event.data, "sources": ["kernel", "nvml"], "count": count - sent})

    def _released(self, now: int, age: int) -> list[Event]:
        found = []
        for one in self._held.begun_before(now, age):
            found.append(replace(one.event, data={**one.event.data, "count": one.left}))
            self._alone.put(replace(one.event, time=one.last), one.left, now, merge=False)
        return found


def _keys(event: Event) -> list[tuple[int, str]]:
    """The node is the entity where no driver says which GPU is at an address: then it names no device."""
    code, pci = int(event.data.get("xid", 0)), event.data.get("pci")
    names = [pci, None if event.entity.startswith("node:") else event.entity]
    return [(code, name) for name in names if name]


def _near(one: _Open, event: Event) -> bool:
    """Whether an event, which may count what came since some time, is of the time of what is open."""
    return int(event.data.get("since", event.time)) - SAME <= one.last <= event.time + SAME


def _count(event: Event) -> int:
    return int(event.data.get("count", 1))


MAX_DELAY = 60 * SECOND
"""How long after its root a consequence may come; chosen: a GPU off the bus showed its SXid after 12 s, and channels
are cleaned up after GSP timeouts of 6 s each."""
MAX_LEAD = 2 * SECOND
"""How much earlier than its root a consequence may be logged; chosen: XID 94 comes milliseconds before its 63."""
MAX_REMEMBERED = 1024
"""Most errors, told apart by code and device, that are remembered; chosen: the kernel log tells the same error of a
device at most 5 times a minute, and a node has some tens of errors at once on its worst day."""
REPLAYED = 20_000
"""Most records that are remembered by number; what the kernel log's collector may tell anew: two looks of 10,000, since
it keeps its place at the look after the next."""
RECOVERY_XID = 154
KINDS = frozenset({"xid", "sxid", "recovery_action"})


@dataclass
class _Seen:
    """What is remembered of an event. root: that of a consequence."""

    time: int
    entity: str
    kind: str
    code: int
    severity: str
    fatal: bool
    pci: str | None
    root: Mapping[str, Any] | None = None
    cause: _Seen | None = None

    @property
    def key(self) -> tuple[str, int, str]:
        return self.kind, self.code, self.entity

    def is_at(self, event: Event) -> bool:
        """Whether an event is of the same device."""
        return self.entity == event.entity or (self.pci is not None and self.pci == event.data.get("pci"))

    def as_root(self) -> Mapping[str, Any]:
        """The first cause: along causes of this call to one that has none, or whose root is known from before."""
        seen, passed = self, 0
        while seen.root is None and seen.cause is not None and passed < MAX_REMEMBERED:
            seen, passed = seen.cause, passed + 1
        return seen.root or {seen.kind: seen.code, "entity": seen.entity, "time": seen.time}


class _Index:
    """What is remembered, by code and by device, so that a storm of errors is not compared each with each."""

    def __init__(self, seen: Iterable[_Seen]) -> None:
        self._codes: dict[int | str, list[_Seen]] = {}
        self._places: dict[str, list[_Seen]] = {}
        for one in seen:
            self._codes.setdefault(one.code if one.kind == "xid" else one.kind, []).append(one)
            for place in {one.entity, one.pci} - {None}:
                self._places.setdefault(str(place), []).append(one)

    def of(self, codes: Iterable[int | str], device_of: Event | None) -> list[_Seen]:
        """Those with one of `codes`, "sxid" for any of a switch, and all of the device that an event is of."""
        found = [one for code in codes for one in self._codes.get(code, ())]
        if device_of is not None:
            for place in {device_of.entity, str(device_of.data.get("pci"))}:
                found += self._places.get(place, ())
        return found


def folding_for(collectors: Iterable[Collector]) -> Folding:
    """With the table of the collectors: that of the user where one is configured with it. Raises ConfigError."""
    own = (getattr(collector, "xid_table", None) for collector in collectors)
    return Folding(load(next((path for path in own if path is not None), None)))


@dataclass
class Folding:
    """One per agent. `take` is called at every tick, also with nothing; `rest` when the agent ends."""

    table: Table = field(default_factory=shipped)
    _recent: dict[tuple[str, int, str], _Seen] = field(default_factory=dict, init=False, repr=False)
    _pairs: Pairs = field(default_factory=Pairs, init=False, repr=False)
    _numbers: dict[int, None] = field(default_factory=dict, init=False, repr=False)

    def take(self, events: Iterable[Event], now: int) -> list[Event]:
        """What is to be sent now: events that are no XIDs as they are, then roots, then their consequences."""
        others: list[Event] = []
        told: list[Event] = []
        for event in events:
            if self._repeated(event):
                continue
            (told if event.kind in KINDS else others).append(event)
        return others + self._rooted(self._pairs.take(told, now), now)

    def rest(self) -> list[Event]:
        """What is still held back."""
        held = self._pairs.rest()
        return self._rooted(held, max((event.time for event in held), default=0))

    def _repeated(self, event: Event) -> bool:
        """Whether this record of the kernel log was taken already: its worker was killed before it kept its place."""
        number = event.data.get("seq")
        if not isinstance(number, int) or event.data.get("since") is not None:
            return False
        if number in self._numbers:
            return True
        self._numbers[number] = None
        if len(self._numbers) > REPLAYED:
            del self._numbers[next(iter(self._numbers))]
        return False

    # --- roots and consequences --------------------------------------------------------------------------------------

    def _rooted(self, told: list[Event], now: int) -> list[Event]:
        """Roots first; consequences name them, and what the driver wants done is put into the root."""
        told = sorted(told, key=lambda event: event.time)
        fresh = [_seen(event) for event in told]
        self._forget(now)
        index = _Index((self._recent | {seen.key: seen for seen in reversed(fresh)}).values())
        for event, seen in zip(told, fresh, strict=True):
            seen.cause = self._root(event, index)
        roots = [seen.cause.as_root() if seen.cause is not None else None for seen in fresh]
        for seen, root in zip(fresh, roots, strict=True):
            seen.root, seen.cause = root, None
        for seen in fresh:
            self._recent.pop(seen.key, None)
            self._recent[seen.key] = seen
        found = [_with(e, root=dict(s.root)) if s.root else e for e, s in zip(told, fresh, strict=True)]
        found = _with_actions(found)
        return [e for e in found if "root" not in e.data] + [e for e in found if "root" in e.data]

    def _root(self, event: Event, index: _Index) -> _Seen | None:
        """The gravest, then nearest, of what this event may be a consequence of."""
        entry = self.table.xid(int(event.data.get("xid", 0)))
        anything = event.kind == "recovery_action" or "any" in entry.follows
        near = index.of({79} if event.kind == "sxid" else entry.follows | entry.peers, event if anything else None)
        fits = [s for s in near if -MAX_LEAD <= event.time - s.time <= MAX_DELAY and self._causes(s, event)]
        order = {severity: rank for rank, severity in enumerate(SEVERITIES)}
        return max(fits, key=lambda s: (order.get(s.severity, 0), -abs(event.time - s.time)), default=None)

    def _causes(self, seen: _Seen, event: Event) -> bool:
        if event.kind == "sxid":  # a link of the switch goes down with the GPU at its other end
            return seen.kind == "xid" and seen.code == 79
        here = seen.is_at(event)
        if event.kind == "recovery_action":
            return here and seen.kind == "xid" and not self._is_summary(seen.code)
        entry = self.table.xid(int(event.data.get("xid", 0)))
        if seen.kind == "sxid":
            return seen.fatal and "sxid" in entry.peers
        if seen.kind != "xid" or (seen.code == entry.code and here):
            return False
        if not here:
            return seen.code in entry.peers and (seen.code != entry.code or seen.time < event.time)
        return seen.code in entry.follows or ("any" in entry.follows and not self._is_summary(seen.code))

    def _is_summary(self, code: int) -> bool:
        """Whether a code is a consequence of just anything: then nothing is a consequence of it."""
        return "any" in self._entry(code).follows

    def _entry(self, code: int) -> Xid:
        return self.table.xid(code)

    def _forget(self, now: int) -> None:
        old = [key for key, seen in self._recent.items() if now - seen.time > MAX_DELAY + SAME]
        for key in [*old, *list(self._recent)[:-MAX_REMEMBERED]]:
            self._recent.pop(key, None)


def _seen(event: Event) -> _Seen:
    data = event.data
    code = data.get("xid", data.get("sxid", 0))
    fatal = event.kind == "sxid" and data.get("fatal", data.get("severity") == "critical") is True
    return _Seen(event.time, event.entity, event.kind, code, data.get("severity", "info"), fatal, data.get("pci"))


def _with(event: Event, **more: Any) -> Event:
    return replace(event, data={**event.data, **more})


def _with_actions(events: list[Event]) -> list[Event]:
    """XID 154 and NVML's recovery action say what to do: that goes into the root of the same call, over the table's."""
    wanted: dict[tuple[str, Any, int], str] = {}
    for event in events:
        root, to = event.data.get("root"), event.data.get("to", event.data.get("detail", {}).get("to"))
        tells = event.kind == "recovery_action" or event.data.get("xid") == RECOVERY_XID
        if root and tells and to:  # 0 is the all-clear after a repair
            wanted[root["entity"], root.get("xid"), root["time"]] = str(event.data["action"])
    found = []
    for event in events:
        action = wanted.get((event.entity, event.data.get("xid"), event.time))
        found.append(event if action is None else _with(event, action=action, action_source="driver"))
    return found
