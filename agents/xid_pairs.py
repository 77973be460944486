"""One event per XID that the kernel log and NVML both tell: one of the one is paired with one of the other, by count.

Nothing waits but what NVML alone told: its events bear no text, and the kernel log's line of the same XID comes within
a look. What is left without a partner is an event of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pipeline.model.records import SECOND, Event

SAME = 10 * SECOND
"""How far apart two sources may see one XID; chosen: looks are 1 s apart and a busy node delays some."""
HOLD = 2 * SECOND
"""How long an XID that only NVML told waits for the kernel log's line; chosen: two looks."""
KEPT = 70 * SECOND
"""How long what was told alone is remembered; chosen: the kernel log counts repeats in an event after 60 s."""
MOST = 1024
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
        spare = len(unlike) - MOST
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
