"""The far end of every link: ports of InfiniBand switches, read through the fabric's own management tools.

One agent per fabric does this, on a host that may send management datagrams. It reads; it never resets a counter or
sets anything.

Columns of many ports, given in slices that each fit one message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from agents.collector import Collector, Device, NoData, Reading, wall_clock
from agents.collectors.fabric.polling import COUNTERS, LINKS, TOOLS, TOPOLOGY, Passes
from agents.collectors.fabric.tool_output import TABLE, Counts, Link, Place
from agents.collectors.fabric.topology import MOST_PORTS, View
from agents.collectors.nic.rdma_counters import Ceilings, PortCounter
from pipeline.model.records import Event

Table = tuple[tuple[str, ...], dict[str, NDArray[Any]]]
"""Entities and columns of them."""
SLICE = 1536
"""Most ports of one slice; chosen: two slices of the longest names (59 bytes) are 180 KB of the 256 KB that the layout
of a message may have (pipeline/transport/wire.py), and the node's own devices need some."""


class Share:
    """The newest table; each look takes a slice, going round, so that no port waits for ever behind those before it."""

    def __init__(self) -> None:
        self._entities: tuple[str, ...] = ()
        self._columns: dict[str, NDArray[Any]] = {}
        self._at = self._left = 0

    def put(self, entities: tuple[str, ...], columns: dict[str, NDArray[Any]]) -> None:
        """Takes a table in place of what was not given yet."""
        self._entities, self._columns = entities, columns
        self._left = -(-len(entities) // SLICE)
        self._at = self._at if self._at * SLICE < len(entities) else 0

    def take(self) -> tuple[Table, ...]:
        """The next slice, if one is left."""
        if not self._left:
            return ()
        part = slice(self._at * SLICE, (self._at + 1) * SLICE)
        self._left -= 1
        self._at = self._at + 1 if part.stop < len(self._entities) else 0
        return ((self._entities[part], {name: values[part] for name, values in self._columns.items()}),)


_MISSING = np.iinfo(np.uint64).max
_ACTIVE, _LINK_UP = 4, 5  # IBTA specification 14.2.5.6: PortState, PortPhysicalState
SILENT_PASSES = 3
"""Passes over the links that may fail before the fabric counts as not readable; chosen: one is a busy switch."""
_MOST_EVENTS = 500
"""Most events about counters of one look; chosen as for links."""


@dataclass
class Fabric(Collector):
    """nic.*: one entity per port of a switch that has or had a cable; `include` and `exclude` are of switches' names.

    device, port: the local adapter to ask through; by default the first that is active.
    """

    name: ClassVar[str] = "fabric"
    signals: ClassVar[tuple[str, ...]] = (
        *("nic.state", "nic.logical_state", "nic.phys_state", "nic.speed", "nic.width"),
        *(counter.signal for counter in TABLE.values()),
    )
    events: ClassVar[tuple[str, ...]] = (
        *("link_state", "link_peer", "switch_state", "fabric_tool"),
        *("counter_saturated",),
    )
    lane: ClassVar[str] = "fabric"
    remote: ClassVar[bool] = True
    partial: ClassVar[bool] = True
    enabled: bool = False
    tools: Path = Path("/usr/sbin")
    device: str = ""
    port: int = 0
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    links_every: float = 10.0
    counters_every: float = 30.0
    topology_every: float = 120.0
    limit: float = 60.0
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _passes: Passes | None = field(default=None, init=False, repr=False)
    _view: View = field(default_factory=View, init=False, repr=False)
    _ceilings: Ceilings = field(default_factory=Ceilings, init=False, repr=False)
    _wide: set[tuple[str, str]] = field(default_factory=set, init=False, repr=False)
    _high: set[tuple[Place, str]] = field(default_factory=set, init=False, repr=False)
    _states: Share = field(default_factory=Share, init=False, repr=False)
    _counters: Share = field(default_factory=Share, init=False, repr=False)
    _failing: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    _answered: float = field(default=0.0, init=False, repr=False)

    def wanted(self) -> bool:
        return self.enabled

    def open(self, node: str) -> None:
        self._node = node
        missing = [tool for tool in TOOLS.values() if not (self.tools / tool).is_file()]
        if not self.enabled:
            raise NoData("not enabled; set `enabled = true` on one agent of the fabric")
        if missing:
            raise NoData(f"{self.tools / missing[0]}: no such tool; install infiniband-diags, or set `tools`")
        if not self._view.ports:
            self._view = View(self.include, self.exclude)
        options = (*(("-C", self.device) if self.device else ()), *(("-P", str(self.port)) if self.port else ()))
        every = {LINKS: self.links_every, COUNTERS: self.counters_every, TOPOLOGY: self.topology_every}
        self._passes, self._answered = Passes(self.tools, options, self.limit, every), time.monotonic()
        # a tool that cannot ask says so at once; one that is still busy by then is on a large fabric
        if trouble := self._passes.begin(self.deadline / 2):
            raise NoData(_unreadable(trouble))

    def read(self) -> tuple[Reading, ...]:
        """What has arrived since the last look, a slice of ports at a time; it waits for nothing."""
        assert self._passes is not None, "read before open"
        now, found = self._now(), self._passes.take()
        events = self._tool_events(now, found.troubles)
        if found.facts is not None:
            self._view.learn(found.facts)
        if found.links is not None:
            self._states.put(*self._of_links(now, found.links, events))
        if found.counts is not None:
            self._counters.put(*self._of_counters(now, found.counts, events))
        readings = [Reading("nic", *slice) for share in (self._states, self._counters) for slice in share.take()]
        if events and not readings:
            readings = [Reading("nic", (), {})]
        if not readings:
            self._give_up()
        return (*readings[:-1], *(replace(reading, events=tuple(events)) for reading in readings[-1:]))

    def renewed(self) -> bool:
        return self._view.renewed()

    def inventory(self) -> Mapping[str, Device]:
        return self._view.inventory()

    def close(self) -> None:
        """What was seen stays known: a tool that fails for a while must not make every port a new one."""
        if self._passes is not None:
            self._passes.stop()
            self._passes = None

    def _give_up(self) -> None:
        """The fabric is not readable: said with the tool's own words, once it failed for long."""
        trouble = self._failing.get(LINKS, "")
        if trouble and time.monotonic() - self._answered > SILENT_PASSES * self.links_every:
            raise NoData(_unreadable(trouble))

    def _tool_events(self, now: int, troubles: Mapping[str, str]) -> list[Event]:
        """One event when a tool begins to fail, one when it works again."""
        events = []
        for name, trouble in troubles.items():
            if bool(trouble) != bool(self._failing.get(name)):
                data = {"tool": TOOLS[name], "state": "failing" if trouble else "ok", "reason": trouble}
                events.append(Event(now, f"node:{self._node}", "fabric_tool", data))
            self._failing[name] = trouble
        return events

    def _of_links(self, now: int, links: tuple[Link, ...], events: list[Event]) -> Table:
        """State and speed of all ports; those of a switch that is not seen are missing."""
        self._answered, view = time.monotonic(), self._view
        left_out = view.left_out
        events += view.look(now, links)
        if view.left_out and not left_out:
            reason = (
                f"more than {MOST_PORTS} ports with a cable; wanted fewer: share the switches by `include` among agents"
            )
            events.append(
                Event(now, f"node:{self._node}", "fabric_tool", {"tool": "agent", "state": "failing", "reason": reason})
            )
        seen = {link.place for link in links}
        ports = [view.ports[place] if place in seen else None for place in view.entities]
        logical = np.array([p.logical if p else np.nan for p in ports])
        physical = np.array([p.physical if p else np.nan for p in ports])
        trained = physical == _LINK_UP
        columns: dict[str, NDArray[Any]] = {
            "nic.state": np.where(np.isnan(logical), np.nan, logical == _ACTIVE),
            "nic.logical_state": logical,
            "nic.phys_state": physical,
            "nic.speed": np.where(trained, [p.speed if p else np.nan for p in ports], np.nan),
            "nic.width": np.where(trained, [p.width if p else np.nan for p in ports], np.nan),
        }
        return tuple(view.entities.values()), columns

    def _of_counters(self, now: int, counts: Counts, events: list[Event]) -> Table:
        """All counters of all ports; what a port did not answer is missing, never zero."""
        view = self._view
        columns: dict[str, NDArray[Any]] = {
            c.signal: np.full(len(view.entities), _MISSING, np.uint64) for c in TABLE.values()
        }
        for row, place in enumerate(view.entities):
            values = counts.values.get(place, {})
            answered = place in counts.values and counts.answered(view.ports[place].lid, place[1])
            for name, counter in TABLE.items():
                value = values.get(name, 0 if answered and counter.saturates else None)
                if value is not None and value * counter.scale < _MISSING:
                    columns[counter.signal][row] = value * counter.scale
                    self._ceiling(now, place, counter, value, events)
        return tuple(view.entities.values()), columns

    def _ceiling(self, now: int, place: Place, counter: PortCounter, value: int, events: list[Event]) -> None:
        """A switch that once counted past a classic counter's ceiling has wide ones, which never stand at it."""
        top, kind, key = (1 << counter.bits) - 1, (place[0], counter.signal), (place, counter.signal)
        if not counter.saturates or kind in self._wide:
            return
        if value > top:
            self._wide.add(kind)
        elif (value == top or key in self._high) and len(events) < _MOST_EVENTS:
            self._high.add(key)
            if event := self._ceilings.look(now, self._view.entities[place], counter, value):
                events.append(event)


def _unreadable(trouble: str) -> str:
    return f"{trouble}; wanted an active InfiniBand port and the right to open its umad device"
