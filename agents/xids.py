"""Folds events of faults on their way to the spool: one event per XID whoever saw it, and consequences name their root.

Nothing waits but what NVML alone told: its events bear no text, and the kernel log's line of the same XID comes within
a look. Everything else leaves in the call that brought it; what follows later points back to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agents.collector import Collector
from agents.sources.xids.table import SEVERITIES, Table, Xid, load, shipped
from agents.xid_pairs import SAME, Pairs
from pipeline.model.records import SECOND, Event

FOLLOWS = 60 * SECOND
"""How long after its root a consequence may come; chosen: a GPU off the bus showed its SXid after 12 s, and channels
are cleaned up after GSP timeouts of 6 s each."""
BEFORE = 2 * SECOND
"""How much earlier than its root a consequence may be logged; chosen: XID 94 comes milliseconds before its 63."""
MOST = 1024
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
        while seen.root is None and seen.cause is not None and passed < MOST:
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
        fits = [s for s in near if -BEFORE <= event.time - s.time <= FOLLOWS and self._causes(s, event)]
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
        old = [key for key, seen in self._recent.items() if now - seen.time > FOLLOWS + SAME]
        for key in [*old, *list(self._recent)[:-MOST]]:
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
