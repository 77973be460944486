"""What a simulated fleet tells beside telemetry: its inventory, the begin and end of jobs, the order of all events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from agents.sim.effects import Effects, Happening
from agents.sim.layout import FACILITY, Layout
from agents.sim.schedule import Schedule, Stay

INVENTORY_EVERY = 3600.0  # s; the design's hourly inventory
_FIRST = {"inventory": 0, "job_end": 1, "job_start": 2}  # of the same moment; everything else comes after


def in_order(happenings: Sequence[Happening]) -> list[Happening]:
    """By time; at one moment the inventory comes first, and a job ends before the next one begins."""
    return sorted(happenings, key=lambda h: (h.time, _FIRST.get(h.kind, 3)))


def stage_entity(stay: Stay, stage: int) -> str:
    return f"stage:{stay.job.name}.{stage}"


def rank_parents(stay: Stay, layout: Layout) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Every rank of a stay with its stage, job and GPU."""
    gpus = layout.entities["gpu"]
    stages = stay.job.stage_of_rank.tolist()
    for rank, stage, gpu in zip(stay.job.names, stages, stay.gpus.tolist(), strict=True):
        yield rank, (stage_entity(stay, stage), stay.job.entity, gpus[gpu])


def job_parents(schedule: Schedule, layout: Layout) -> dict[str, tuple[str, ...]]:
    """Jobs, stages and ranks where they first ran; later moves are events."""
    found: dict[str, tuple[str, ...]] = {}
    for stay in schedule.stays:
        if stay.job.entity not in found:
            found[stay.job.entity] = ()
            found |= {stage_entity(stay, s): (stay.job.entity,) for s in range(stay.job.stages)}
            found |= dict(rank_parents(stay, layout))
    return found


class Calendar:
    """Tells who is there: at 0, every hour, after a boot and when a job begins or ends on a node, as agents do."""

    def __init__(self, layout: Layout, schedule: Schedule) -> None:
        self.layout, self.schedule = layout, schedule
        self._hardware = layout.inventory()

    def tell(self, effects: Effects, stays: Sequence[Stay]) -> None:
        """Adds the events of the block."""
        moments: dict[float, set[int]] = {}
        hour = float(np.floor(effects.until / INVENTORY_EVERY)) * INVENTORY_EVERY
        if effects.holds(hour):
            moments[hour] = set(range(len(self.layout.shippers)))
        for tick, node in np.argwhere(effects.node.reset.whole()).tolist() if effects.node.reset else []:
            moments.setdefault(float(effects.time[tick]), set()).add(node)  # its agent starts anew
        for stay in stays:
            for moment, tell in ((stay.begin, self._begun), (stay.end, self._ended)):
                if effects.holds(moment):
                    moments.setdefault(moment, set()).update(tell(stay, effects))
        for moment in sorted(moments):
            for shipper in sorted(moments[moment]):
                self._inventory(moment, shipper, effects)

    def _inventory(self, moment: float, shipper: int, effects: Effects) -> None:
        known = dict(self._hardware[shipper])
        for stay in self.schedule.within(moment - 1e-6, moment):
            if stay.begin <= moment < stay.end:
                known |= self._ranks_there(stay, shipper)
        entity = f"node:{self.layout.shippers[shipper]}"
        effects.tell(moment, entity, "inventory", shipper, entities=known)

    def _ranks_there(self, stay: Stay, shipper: int) -> dict[str, dict[str, object]]:
        """Ranks of a stay on one node with their stages and job."""
        if self.layout.shippers[shipper] == FACILITY or shipper not in self._nodes(stay):
            return {}
        found: dict[str, dict[str, object]] = {stay.job.entity: {"parents": [], "attributes": {}}}
        for rank, parents in self._of_node(stay, shipper).items():
            found[parents[0]] = {"parents": [stay.job.entity], "attributes": {}}
            found[rank] = {"parents": list(parents), "attributes": {"node": self.layout.shippers[shipper]}}
        return found

    def _begun(self, stay: Stay, effects: Effects) -> set[int]:
        """Every node tells of its own ranks."""
        nodes = self._nodes(stay)
        for node in sorted(nodes):
            ranks = {rank: {"stage": p[0], "gpu": p[2]} for rank, p in self._of_node(stay, node).items()}
            effects.tell(stay.begin, stay.job.entity, "job_start", node, ranks=ranks, world_size=stay.job.ranks)
        return nodes

    def _ended(self, stay: Stay, effects: Effects) -> set[int]:
        nodes = self._nodes(stay)
        for node in sorted(nodes):
            ranks = list(self._of_node(stay, node))
            effects.tell(stay.end, stay.job.entity, "job_end", node, ranks=ranks, seconds=stay.end - stay.begin)
        return nodes

    def _nodes(self, stay: Stay) -> set[int]:
        return set(self.layout.node_of_gpu[stay.gpus].tolist())

    def _of_node(self, stay: Stay, node: int) -> dict[str, tuple[str, str, str]]:
        """The ranks of a stay that run on one node."""
        width = self.layout.gpus_per_node
        places = np.flatnonzero(self.layout.node_of_gpu[stay.gpus] == node).tolist()
        assert len(places) <= width
        names, stages, gpus = stay.job.names, stay.job.stage_of_rank, self.layout.entities["gpu"]
        return {
            names[i]: (stage_entity(stay, int(stages[i])), stay.job.entity, gpus[int(stay.gpus[i])]) for i in places
        }
