"""FleetSimulator: a fleet of nodes, racks, loops and jobs as an endless, repeatable stream of chunks.

Inside it always computes BLOCK ticks at once, so that the same scenario and seed give the same values however the
chunks are cut. Values are in wire type from here on: what is written to files is what is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.calendar import Calendar, in_order, job_parents
from agents.sim.chunk import Chunk
from agents.sim.effects import Effects, Moment
from agents.sim.layout import Layout
from agents.sim.physics.canary import Canaries
from agents.sim.physics.instruments import Instruments
from agents.sim.physics.plant import Plant
from agents.sim.physics.state import State
from agents.sim.scenario import DEFAULT_START, Scenario
from agents.sim.story import Story
from agents.sim.truth import lines
from pipeline.records import SECOND, Event

BLOCK = 60
"""Ticks computed at once: 10 min at 10 s; 512 GPUs then need about 30 MB. Part of what a seed means: never changes."""
TICKS_FOR_EVER = 1 << 62


class FleetSimulator:
    """One fleet. `start` is where second 0 of the scenario lies (UTC us); `live` adds the faults of [live]."""

    def __init__(self, scenario: Scenario, seed: int, start: int | None = None, live: bool = False) -> None:
        self.scenario, self.seed = scenario, seed
        chosen = scenario.start if start is None else start
        self.start = DEFAULT_START if chosen is None else chosen
        self.layout = Layout(scenario.fleet.nodes, scenario.fleet.gpus_per_node)
        story = Story.of(scenario, self.layout, seed, live)
        self.faults, self.schedule = story.faults, story.schedule
        self.planned, self.dropped = story.planned, story.dropped
        self.parents: Mapping[str, Sequence[str]] = self.layout.parents | job_parents(self.schedule, self.layout)
        self._state, fleet = State({"blocks": np.zeros(1, np.int64)}), scenario.fleet
        self._plant = Plant(self.layout, self.schedule, scenario.interval, seed, self._state)
        numbers = max((fault.number for fault in self.faults), default=0)
        self._instruments = Instruments(
            self.layout, scenario.interval, seed, fleet.missing, fleet.jitter, numbers, self._state
        )
        self._canaries = Canaries(self.layout, scenario.interval, seed)
        self._calendar = Calendar(self.layout, self.schedule)

    def entities(self, device_class: str) -> tuple[str, ...]:
        """Names in the order of the columns; of ranks all that there ever are: a chunk says which it has."""
        if device_class == "rank":
            return tuple(name for job in self.schedule.jobs for name in job.names)
        return self.layout.entities[device_class]

    def chunks(self, ticks: int | Callable[[int], int] = BLOCK, limit: int | None = None) -> Iterator[Chunk]:
        """Chunks up to `limit` ticks in all (the scenario's), from where a snapshot left off. For one use.

        ticks: how many in a chunk, or a function of its first tick's number; a chunk never crosses a block's border.
        """
        end, since = self.scenario.ticks if limit is None else limit, -(1 << 62)
        for first in range(self.ticks, end, BLOCK):
            block, begin, size = self._block(), 0, min(BLOCK, end - first)
            while begin < size:
                wanted = ticks if isinstance(ticks, int) else ticks(first + begin)
                behind = min(begin + max(1, wanted), size)
                yield block.cut(begin, behind, since)
                since, begin = int(block.times[behind - 1]), behind

    @property
    def ticks(self) -> int:
        """How many ticks were computed: whole blocks."""
        return int(self._state["blocks"][0]) * BLOCK

    def snapshot(self) -> bytes:
        """All that the next block needs; taken after the last chunk of a block."""
        return self._state.save()

    def restore(self, data: bytes) -> None:
        """Goes on behind a snapshot of the same scenario and seed: `chunks` begins there. Raises UsageError."""
        self._state.load(data)

    def truth(self, until: float | None = None) -> list[dict[str, Any]]:
        """Lines of truth.jsonl: what began before `until` seconds (the scenario's duration)."""
        horizon = self.scenario.duration if until is None else until
        return lines(self.faults, self.schedule, self.layout, self.start, horizon)

    def at(self, seconds: float) -> int:
        """UTC microseconds of a second of the scenario."""
        return self.start + round(seconds * SECOND)

    def _block(self) -> Chunk:
        number = int(self._state["blocks"][0])
        self._state["blocks"] = np.array([number + 1])
        time = (np.arange(BLOCK, dtype=np.float64) + number * BLOCK) * self.scenario.interval
        since = float(time[0]) - self.scenario.interval
        running = self.schedule.running(time, self.layout.gpus)
        stays = self.schedule.within(since, float(time[-1]))
        effects = Effects(time, since, self.layout, len(self.schedule.jobs), running, stays, self.start)
        for fault in self.faults:
            if fault.onset <= effects.until and fault.end + fault.kind.lingers > since:
                fault.kind.act(fault, effects)
        return self._chunk(number, effects)

    def _chunk(self, number: int, effects: Effects) -> Chunk:
        columns = self._plant.advance(number, effects)
        self._canaries.rounds(effects)
        self._calendar.tell(effects, effects.stays)
        gpus = np.concatenate([np.zeros(0, np.intp), *(stay.gpus for stay in effects.stays)])
        homes = {**self.layout.homes, "rank": self.layout.node_of_gpu[gpus]}
        names = tuple(name for stay in effects.stays for name in stay.job.names)
        silent = self._instruments.silent(effects)
        return Chunk(
            times=self.start + np.rint(effects.time * SECOND).astype(np.int64),
            entities={**self.layout.entities, "rank": names},
            columns=self._instruments.read(columns, effects, number),
            homes=homes,
            present=self._instruments.present(effects, silent, homes),
            late=self._instruments.late(effects, number),
            silent=silent,
            events=tuple(self._told(effects, silent)),
        )

    def _told(self, effects: Effects, silent: NDArray[np.bool_]) -> Iterator[tuple[int, Event]]:
        """Happenings as events in order of time, but for those of shippers that were silent."""
        found, home = in_order(effects.events), self.layout.shipper_of
        ticks = np.searchsorted(effects.time, [h.time for h in found]).tolist()
        quiet = set(zip(*(where.tolist() for where in np.nonzero(silent)), strict=True))
        for h, tick in zip(found, ticks, strict=True):
            shipper = home(h.entity) if h.shipper is None else h.shipper
            if (tick, shipper) not in quiet:
                data = {name: self.at(v) if isinstance(v, Moment) else v for name, v in h.data.items()}
                yield shipper, Event(self.at(h.time), h.entity, h.kind, data)
