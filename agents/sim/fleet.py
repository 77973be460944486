"""FleetSimulator: a fleet of nodes, racks, loops and jobs as an endless, repeatable stream of chunks.

Inside it always computes BLOCK ticks at once, so that the same scenario and seed give the same values however the
chunks are cut. Values are in wire type from here on: what is written to files is what is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim import canary
from agents.sim.effects import Effects, Happening
from agents.sim.facility import SUPPLY_C, Facility
from agents.sim.gpus import Gpus
from agents.sim.hosts import Hosts
from agents.sim.jobs import Jobs
from agents.sim.layout import Layout
from agents.sim.links import Links
from agents.sim.noise import generator
from agents.sim.scenario import DEFAULT_START, Scenario, faults_of
from pipeline.records import SECOND, Event, iso
from pipeline.signals import CATALOGUE

BLOCK = 60
"""Ticks computed at once: 10 min at 10 s; 512 GPUs then need about 30 MB. Part of what a seed means: never changes."""
INVENTORY_EVERY = 3600.0  # s; the design's hourly inventory
TICKS_FOR_EVER = 1 << 62
_MISSING = 70  # key of the generator that loses rows


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive ticks of the whole fleet.

    times:   (ticks,) UTC microseconds.     columns: device class -> signal -> (ticks, devices) in wire type.
    silent:  (ticks, shippers) that sent nothing then: their rows and events do not exist.
    events:  (shipper, event) in order of time, up to the chunk's last tick.
    """

    times: NDArray[np.int64]
    columns: Mapping[str, Mapping[str, NDArray[Any]]]
    silent: NDArray[np.bool_]
    events: tuple[tuple[int, Event], ...]

    def cut(self, begin: int, end: int, since: int) -> Chunk:
        """Ticks [begin, end), with the events later than `since`."""
        until = int(self.times[end - 1])
        columns = {c: {n: v[begin:end] for n, v in block.items()} for c, block in self.columns.items()}
        events = tuple((s, e) for s, e in self.events if since < e.time <= until)
        return Chunk(self.times[begin:end], columns, self.silent[begin:end], events)

    def present(self, shippers: NDArray[np.intp]) -> NDArray[np.bool_]:
        """(ticks, devices) rows that exist, given each device's shipper."""
        return ~self.silent[:, shippers]


class FleetSimulator:
    """One fleet. `start` is where second 0 of the scenario lies (UTC us); `live` adds the faults of [live]."""

    def __init__(self, scenario: Scenario, seed: int, start: int | None = None, live: bool = False) -> None:
        self.scenario, self.seed = scenario, seed
        chosen = scenario.start if start is None else start
        self.start = DEFAULT_START if chosen is None else chosen
        self.layout = Layout(scenario.fleet.nodes, scenario.fleet.gpus_per_node)
        self.faults = faults_of(scenario, self.layout, seed, live)
        interval = scenario.interval
        self._jobs = Jobs(self.layout, interval, seed)
        self._gpus = Gpus(self.layout, interval, seed, SUPPLY_C)
        self._links = Links(self.layout, interval, seed)
        self._hosts = Hosts(self.layout, interval, seed)
        self._facility = Facility(self.layout, interval, seed)
        self._known = dict(self.layout.inventory())
        self._blocks = 0

    def entities(self, device_class: str) -> tuple[str, ...]:
        """Names in the order of the columns."""
        return self.layout.entities[device_class]

    def chunks(self, ticks: int | Callable[[int], int] = BLOCK, limit: int | None = None) -> Iterator[Chunk]:
        """Chunks up to `limit` ticks in all (the scenario's). For one use.

        ticks: how many in a chunk, or a function of its first tick's number; a chunk never crosses a block's border.
        """
        end, since = self.scenario.ticks if limit is None else limit, -(1 << 62)
        for first in range(0, end, BLOCK):
            block, begin, size = self._block(), 0, min(BLOCK, end - first)
            while begin < size:
                wanted = ticks if isinstance(ticks, int) else ticks(first + begin)
                behind = min(begin + max(1, wanted), size)
                yield block.cut(begin, behind, since)
                since, begin = int(block.times[behind - 1]), behind

    def truth(self, until: float | None = None) -> list[dict[str, Any]]:
        """Lines of truth.jsonl: the faults that began before `until` seconds (the scenario's duration)."""
        horizon = self.scenario.duration if until is None else until
        return [
            {
                "id": f"fault-{f.number}",
                "kind": f.kind.name,
                "entity": f.entity,
                "onset": iso(self.at(f.onset)),
                "end": iso(self.at(min(f.end, horizon))),
                "class": f.kind.detectability,
                "signals": list(f.kind.signals),
                "parameters": f.kind.parameters(),
            }
            for f in self.faults
            if f.onset < horizon
        ]

    def at(self, seconds: float) -> int:
        """UTC microseconds of a second of the scenario."""
        return self.start + round(seconds * SECOND)

    def _block(self) -> Chunk:
        number, self._blocks = self._blocks, self._blocks + 1
        time = (np.arange(BLOCK, dtype=np.float64) + number * BLOCK) * self.scenario.interval
        since = float(time[0]) - self.scenario.interval
        effects = Effects(time, since, self.layout)
        for fault in self.faults:
            if fault.onset <= effects.until and fault.end > since:
                fault.kind.act(fault, effects)
        columns = self._physics(number, effects)
        canary.rounds(effects, self.seed, self.scenario.interval)
        self._inventory(effects)
        times = self.start + np.rint(time * SECOND).astype(np.int64)
        return Chunk(times, columns, effects.silent, tuple(self._calendar(effects)))

    def _physics(self, number: int, effects: Effects) -> dict[str, dict[str, NDArray[Any]]]:
        """All columns of the block: load, then heat, then the pace of the jobs, then what follows from it."""
        tempo, supply = self._jobs.load(effects), self._facility.supply(number, effects)
        gpu, clock = self._gpus.advance(number, tempo, supply, effects)
        rank = self._jobs.advance(number, tempo, clock, effects)
        nic = self._links.advance(number, tempo, effects)
        node = self._hosts.advance(number, tempo, effects)
        coolant, power = self._facility.advance(number, supply, gpu["gpu.power"], effects)
        found = {"gpu": gpu, "nic": nic, "node": node, "rank": rank, "power": power, "coolant": coolant}
        rng = generator(self.seed, _MISSING, number)
        return {c: self._wire(block, rng) for c, block in found.items()}

    def _wire(self, block: dict[str, NDArray[Any]], rng: np.random.Generator) -> dict[str, NDArray[Any]]:
        """Columns in wire type and catalogue order, with the share of lost rows that the fleet has."""
        out = {name: np.ascontiguousarray(block[name], CATALOGUE[name].type) for name in CATALOGUE if name in block}
        if self.scenario.fleet.missing:
            lost = rng.random(next(iter(out.values())).shape) < self.scenario.fleet.missing
            for values in out.values():
                if values.dtype.kind == "f":
                    values[lost] = np.nan
        return out

    def _inventory(self, effects: Effects) -> None:
        """One event per shipper with all its entities, at 0 and then hourly, as real agents tell it."""
        hour = int(np.floor(effects.until / INVENTORY_EVERY)) * INVENTORY_EVERY
        if not effects.since < hour <= effects.until:
            return
        effects.events += [Happening(hour, e, "inventory", {"entities": known}) for e, known in self._known.items()]

    def _calendar(self, effects: Effects) -> Iterator[tuple[int, Event]]:
        """Happenings as events in order of time, but for those of nodes that were silent."""
        quiet = np.flatnonzero(effects.silent.any(axis=0)).tolist()
        order = {"inventory": 0}
        for h in sorted(effects.events, key=lambda h: (h.time, order.get(h.kind, 1))):
            shipper = self.layout.shipper_of(h.entity)
            if shipper in quiet and effects.silent[np.searchsorted(effects.time, h.time), shipper]:
                continue
            yield shipper, Event(self.at(h.time), h.entity, h.kind, h.data)
