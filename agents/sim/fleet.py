"""FleetSimulator: a fleet of nodes, racks, loops and jobs as an endless, repeatable stream of chunks.

It always computes BLOCK ticks together, so that the same scenario and seed give the same values for any size of chunk.
Values are in wire type: files contain exactly the sent values. The calendar adds inventory and job events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.chunk import Chunk
from agents.sim.effects import Effects, EventTime, PlannedEvent
from agents.sim.fault_plan import FaultPlan, truth_lines
from agents.sim.layout import Layout
from agents.sim.physics.canary import Canaries
from agents.sim.physics.instruments import Instruments
from agents.sim.physics.jobs import collective_share
from agents.sim.physics.plant import Plant
from agents.sim.physics.state import State
from agents.sim.scenario import DEFAULT_START, Scenario
from agents.sim.schedule import Allocation, Schedule
from agents.sim.world import DEFAULT
from pipeline.model.records import SECOND, Event

INVENTORY_EVERY = 3600.0  # s, as agents send it
_FIRST = {"inventory": 0, "job_end": 1, "job_start": 2}  # of the same moment; everything else comes after


def sort_events(events: Sequence[PlannedEvent]) -> list[PlannedEvent]:
    """Sorts events by time; at one time the inventory comes first, and a job ends before the next one starts."""
    return sorted(events, key=lambda h: (h.time, _FIRST.get(h.kind, 3)))


def stage_entity(allocation: Allocation, stage: int) -> str:
    """Returns the entity of a pipeline stage."""
    return f"stage:{allocation.job.name}.{stage}"


def rank_parents(allocation: Allocation, layout: Layout) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Returns every rank of an allocation with its stage, job and GPU; without the training hook no stage is known."""
    gpus = layout.entities["gpu"]
    stages = allocation.job.stage_of_rank.tolist()
    for rank, stage, gpu in zip(allocation.job.names, stages, allocation.gpus.tolist(), strict=True):
        known = (stage_entity(allocation, stage),) if allocation.job.hooked else ()
        yield rank, (*known, allocation.job.entity, gpus[gpu])


def job_parents(schedule: Schedule, layout: Layout) -> dict[str, tuple[str, ...]]:
    """Returns jobs, stages and ranks with the parents of their first allocation; later moves are events."""
    found: dict[str, tuple[str, ...]] = {}
    for allocation in schedule.allocations:
        if allocation.job.entity not in found:
            found[allocation.job.entity] = ()
            stages = range(allocation.job.stages if allocation.job.hooked else 0)
            found |= {stage_entity(allocation, s): (allocation.job.entity,) for s in stages}
            found |= dict(rank_parents(allocation, layout))
    return found


class Calendar:
    """Adds inventory and job events as agents send them: at 0, every hour, after a boot, at job starts and ends."""

    def __init__(self, layout: Layout, schedule: Schedule) -> None:
        self.layout, self.schedule = layout, schedule
        self._hardware = layout.inventory()
        self._node_sets: dict[tuple[str, float], set[int]] = {}  # of the allocations of one block

    def add_events(self, effects: Effects, allocations: Sequence[Allocation]) -> None:
        """Adds the events of the block."""
        self._node_sets = {}
        moments: dict[float, set[int]] = {}
        hour = float(np.floor(effects.until / INVENTORY_EVERY)) * INVENTORY_EVERY
        if effects.contains(hour):
            moments[hour] = set(range(len(self.layout.sender_names)))
        for tick, node in np.argwhere(effects.node.reset.array()).tolist() if effects.node.reset else []:
            moments.setdefault(float(effects.time[tick]), set()).add(node)  # its agent restarts
        for allocation in allocations:
            for moment, add in ((allocation.begin, self._add_job_starts), (allocation.end, self._add_job_ends)):
                if effects.contains(moment):
                    moments.setdefault(moment, set()).update(add(allocation, effects))
        for moment in sorted(moments):
            running = self._running(moment)
            for sender in sorted(moments[moment]):
                self._inventory(moment, sender, running.get(sender, ()), effects)

    def _running(self, moment: float) -> dict[int, list[Allocation]]:
        """Returns node -> the allocations with ranks on it."""
        found: dict[int, list[Allocation]] = {}
        for allocation in self.schedule.allocations_within(moment - 1e-6, moment):
            if allocation.begin <= moment < allocation.end:
                for node in self._nodes(allocation):
                    found.setdefault(node, []).append(allocation)
        return found

    def _inventory(self, moment: float, sender: int, running: Iterable[Allocation], effects: Effects) -> None:
        known = dict(self._hardware[sender])
        for allocation in running:
            known |= self._ranks_there(allocation, sender)
        entity = f"node:{self.layout.sender_names[sender]}"
        effects.add_event(moment, entity, "inventory", sender, entities=known)

    def _ranks_there(self, allocation: Allocation, sender: int) -> dict[str, dict[str, object]]:
        """Returns the ranks of an allocation on one node with their stages and job."""
        found: dict[str, dict[str, object]] = {allocation.job.entity: {"parents": [], "attributes": {}}}
        for rank, parents in self._of_node(allocation, sender).items():
            found |= {stage: {"parents": [allocation.job.entity], "attributes": {}} for stage in parents[:-2]}
            found[rank] = {"parents": list(parents), "attributes": {"node": self.layout.sender_names[sender]}}
        return found

    def _add_job_starts(self, allocation: Allocation, effects: Effects) -> set[int]:
        """Adds the job starts; every node reports its own ranks."""
        nodes = self._nodes(allocation)
        for node in sorted(nodes):
            mine = self._of_node(allocation, node).items()
            ranks = {rank: {**({"stage": p[0]} if len(p) > 2 else {}), "gpu": p[-1]} for rank, p in mine}
            effects.add_event(
                allocation.begin, allocation.job.entity, "job_start", node, ranks=ranks, world_size=allocation.job.ranks
            )
        return nodes

    def _add_job_ends(self, allocation: Allocation, effects: Effects) -> set[int]:
        nodes = self._nodes(allocation)
        for node in sorted(nodes):
            ranks = list(self._of_node(allocation, node))
            effects.add_event(
                allocation.end,
                allocation.job.entity,
                "job_end",
                node,
                ranks=ranks,
                seconds=allocation.end - allocation.begin,
            )
        return nodes

    def _nodes(self, allocation: Allocation) -> set[int]:
        key = allocation.job.entity, allocation.begin
        if key not in self._node_sets:
            self._node_sets[key] = set(self.layout.node_of_gpu[allocation.gpus].tolist())
        return self._node_sets[key]

    def _of_node(self, allocation: Allocation, node: int) -> dict[str, tuple[str, ...]]:
        """Returns the ranks of an allocation on one node."""
        width = self.layout.gpus_per_node
        places = np.flatnonzero(self.layout.node_of_gpu[allocation.gpus] == node).tolist()
        assert len(places) <= width
        job, gpus = allocation.job, self.layout.entities["gpu"]
        known = {i: (stage_entity(allocation, int(job.stage_of_rank[i])),) if job.hooked else () for i in places}
        return {job.names[i]: (*known[i], job.entity, gpus[int(allocation.gpus[i])]) for i in places}


BLOCK = 60
"""Ticks computed together: 10 min at 10 s; 512 GPUs need about 30 MB. Fixed: else seeds give other fleets."""
ENDLESS_TICKS = 1 << 62


class FleetSimulator:
    """One fleet. `start` is the time of second 0 (UTC us); `live` adds the faults of [live]."""

    def __init__(self, scenario: Scenario, seed: int, start: int | None = None, live: bool = False) -> None:
        self.scenario, self.seed = scenario, seed
        chosen = scenario.start if start is None else start
        self.start = DEFAULT_START if chosen is None else chosen
        self.world = scenario.world or DEFAULT
        self.layout = Layout(scenario.fleet.nodes, scenario.fleet.gpus_per_node, self.world)
        story = FaultPlan.plan(scenario, self.layout, seed, live)
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
        """Returns names in the order of the columns; of ranks all of the scenario: a chunk has those that exist."""
        if device_class == "rank":
            return tuple(name for job in self.schedule.jobs for name in job.names)
        return self.layout.entities[device_class]

    def chunks(self, ticks: int | Callable[[int], int] = BLOCK, limit: int | None = None) -> Iterator[Chunk]:
        """Yields chunks up to `limit` ticks in total (default: the scenario's), from a snapshot on. Use it once.

        ticks: how many in a chunk, or a function of its first tick's number; a chunk never spans two blocks.
        """
        end, since = self.scenario.ticks if limit is None else limit, -(1 << 62)
        for first in range(self.ticks, end, BLOCK):
            block, begin, size = self._block(), 0, min(BLOCK, end - first)
            while begin < size:
                wanted = ticks if isinstance(ticks, int) else ticks(first + begin)
                stop = min(begin + max(1, wanted), size)
                yield block.between(begin, stop, since)
                since, begin = int(block.times[stop - 1]), stop

    @property
    def ticks(self) -> int:
        """Number of computed ticks: whole blocks."""
        return int(self._state["blocks"][0]) * BLOCK

    def snapshot(self) -> bytes:
        """Returns everything that the next block needs; valid after the last chunk of a block."""
        return self._state.save()

    def restore(self, data: bytes) -> None:
        """Continues from a snapshot of the same scenario and seed. Raises UsageError for another one."""
        self._state.load(data)

    def truth(self, until: float | None = None) -> list[dict[str, Any]]:
        """Returns the lines of truth.jsonl for events before `until` seconds (default: the scenario's duration)."""
        horizon = self.scenario.duration if until is None else until
        waits = partial(collective_share, self.seed, self.layout.world.work)
        return truth_lines(self.faults, self.schedule, self.layout, self.start, horizon, waits)

    def time_at(self, seconds: float) -> int:
        """Returns UTC microseconds of a second of the scenario."""
        return self.start + round(seconds * SECOND)

    def _block(self) -> Chunk:
        number = int(self._state["blocks"][0])
        self._state["blocks"] = np.array([number + 1])
        time = (np.arange(BLOCK, dtype=np.float64) + number * BLOCK) * self.scenario.interval
        since = float(time[0]) - self.scenario.interval
        running = self.schedule.running_jobs(time, self.layout.gpus)
        allocations = self.schedule.allocations_within(since, float(time[-1]))
        effects = Effects(time, since, self.layout, len(self.schedule.jobs), running, allocations, self.start)
        for fault in self.faults:
            if fault.onset <= effects.until and fault.end + fault.kind.tail > since:
                fault.kind.act(fault, effects)
        return self._chunk(number, effects)

    def _chunk(self, number: int, effects: Effects) -> Chunk:
        columns = self._plant.step(number, effects)
        self._canaries.add_events(effects)
        self._calendar.add_events(effects, effects.allocations)
        gpus = np.concatenate([np.zeros(0, np.intp), *(allocation.gpus for allocation in effects.reporting)])
        homes = {**self.layout.senders, "rank": self.layout.node_of_gpu[gpus]}
        names = tuple(name for allocation in effects.reporting for name in allocation.job.names)
        silent = self._instruments.silent(effects)
        return Chunk(
            times=self.start + np.rint(effects.time * SECOND).astype(np.int64),
            entities={**self.layout.entities, "rank": names},
            columns=self._instruments.read(columns, effects, number),
            senders=homes,
            present=self._instruments.present(effects, silent, homes),
            late=self._instruments.late(effects, number),
            silent=silent,
            events=tuple(self._sent_events(effects, silent)),
        )

    def _sent_events(self, effects: Effects, silent: NDArray[np.bool_]) -> Iterator[tuple[int, Event]]:
        """Returns planned events in order of time, without those of silent senders."""
        read = (event for event in effects.events if self.world.reads(f"event:{event.kind}"))
        found, home = sort_events(list(read)), self.layout.sender_of
        ticks = np.searchsorted(effects.time, [h.time for h in found]).tolist()
        quiet = set(zip(*(where.tolist() for where in np.nonzero(silent)), strict=True))
        for h, tick in zip(found, ticks, strict=True):
            sender = home(h.entity) if h.sender is None else h.sender
            if (tick, sender) not in quiet:
                data = {name: self.time_at(v) if isinstance(v, EventTime) else v for name, v in h.data.items()}
                yield sender, Event(self.time_at(h.time), h.entity, h.kind, data)
