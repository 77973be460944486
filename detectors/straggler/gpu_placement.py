"""Where GPUs and ranks are: their stage, job and node, and the cohort that each is compared with.

A cohort is a stage of a job, or the whole job where one node is too large a part of the stage: if all of it changes,
the median must still be that of the others. Clocks of different products differ, so they are in different cohorts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import AncestorIndex, Ancestors
from detectors.base.job_index import JobIndex
from detectors.base.state import State, memory, notes
from detectors.base.statistics import group_medians_of
from detectors.base.streams import Bools, Floats
from detectors.base.topology_index import find_nodes
from pipeline.model.records import SECOND, Frame

Ints = NDArray[np.int32]
LEAST_PEERS = 8
"""Members of a cohort, the one judged included, below which it proves nothing without a visible cause: half a
standard deviation is the error of a median of seven."""
MOST_OF_COHORT = 0.3
"""Share of a cohort on one side above which its median does not hold (Huber, Robust Statistics, 1981)."""
_ABSURD = 1e30  # no time, logarithm or counter is as large
_REPORTS_FOR = 600 * SECOND
"""us after its last compute time during which a job counts as reporting them: longer than most checkpoints and
evaluations; chosen."""
_LADDER = (
    ("stage", LEAST_PEERS, MOST_OF_COHORT),
    ("job", LEAST_PEERS, MOST_OF_COHORT),
    ("stage", LEAST_PEERS, 1.0),
    ("job", LEAST_PEERS, 1.0),
    ("stage", 2, 1.0),
    ("job", 2, 1.0),
)
"""Cohorts in order of preference: kind, least members, largest share of one node."""
_UNREAD: Mapping[str, str] = {}  # no rank's


def _no_ints() -> Ints:
    return np.empty(0, np.int32)


@dataclass
class Placement(State):
    """Devices or ranks of jobs, each with its number of a kind of ancestor, -1 where there is none.

    names:   of the devices or ranks.   numbers: kind -> number of the ancestor.   entities: kind -> names by number.
    team:    number of the stage, or of the job where no stage is known.   groups: cohort.   cohorts: their names.
    pooled:  compared with members of other stages too.   lone: all of its team is on its node.
    crowded: its node is too large a part of its cohort, or it has none: the median would change with it.
    """

    names: Sequence[str] = field(default_factory=list, init=False, repr=False)
    numbers: dict[str, Ints] = field(default_factory=dict, init=False, repr=False)
    entities: dict[str, list[str]] = field(default_factory=dict, init=False, repr=False)
    team: Ints = field(default_factory=_no_ints, init=False, repr=False)
    groups: Ints = field(default_factory=_no_ints, init=False, repr=False)
    cohorts: list[str] = field(default_factory=list, init=False, repr=False)
    pooled: Bools = field(default_factory=lambda: np.empty(0, bool), init=False, repr=False)
    lone: Bools = field(default_factory=lambda: np.empty(0, bool), init=False, repr=False)
    crowded: Bools = field(default_factory=lambda: np.empty(0, bool), init=False, repr=False)
    _mates: dict[str, str] = notes()  # name -> name of its cohort
    _key: tuple[int, ...] = field(default=(), init=False, repr=False)
    _known: dict[str, Ancestors] = field(default_factory=dict, init=False, repr=False)

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `State.restore`; cohorts are built with the next frame."""
        super().restore(state)
        self._key = ()

    def is_placed(self, frame: Frame) -> bool:
        """Returns whether the topology and the devices are those of the last call."""
        known, self._key = self._key, (id(frame.topology), frame.topology.version, len(frame.entities))
        return known == self._key

    def place(
        self, names: Sequence[str], changed: Mapping[int, Mapping[str, str]], kinds: Sequence[str], fresh: bool
    ) -> None:
        """Numbers the ancestors.

        changed: position -> kind -> nearest ancestor, where they changed since the last call.   fresh: forgets that.
        """
        self.names = names
        for kind in kinds:
            if fresh or kind not in self._known:
                self._known[kind] = Ancestors()
            known = self._known[kind]
            known.update(len(names), ((i, around.get(kind)) for i, around in changed.items()))
            self.numbers[kind], self.entities[kind] = known.number()
        stage, job = self.numbers["stage"], self.numbers["job"]
        self.team = np.where(stage >= 0, stage, np.where(job >= 0, job + len(self.entities["stage"]), -1))
        node, teams = self.numbers["node"], len(self.entities["stage"]) + len(self.entities["job"])
        least, most = np.full(teams + 1, np.iinfo(np.int32).max), np.full(teams + 1, -1)
        np.minimum.at(least, self.team, node)
        np.maximum.at(most, self.team, node)
        self.lone = ((least == most) & (most >= 0))[self.team]

    def build_cohorts(self, product: Ints, least: int) -> None:
        """Finds the cohort of each. product: number of the product; least: members of the smallest cohort."""
        self.groups, self.cohorts = np.full(len(self.names), -1, np.int32), []
        self.crowded = np.ones(len(self.names), bool)
        products = 1 + int(product.max(initial=0))
        for kind, size, most in _LADDER:
            if size >= least:
                numbers = self.numbers[kind]
                self._form(kind, np.where(numbers >= 0, numbers * products + product, -1), products, size, most)
        jobs = set(self.entities["job"])
        of_job = np.array([*(name in jobs for name in self.cohorts), False], bool)
        self.pooled = of_job[self.groups] & (self.numbers["stage"] >= 0)

    def _form(self, kind: str, keys: NDArray[np.integer], products: int, size: int, most: float) -> None:
        """Forms a cohort of those without one of each key that has enough members, not too many on one node."""
        inside = np.flatnonzero(keys >= 0)
        found, of = np.unique(keys[inside], return_inverse=True)
        count, free = np.bincount(of, minlength=len(found)), self.groups[inside] < 0
        formed = (count >= size) & (np.bincount(of[free], minlength=len(found)) > 0)
        if most < 1:
            formed &= _largest_part(of, self.numbers["node"][inside], len(found)) / np.maximum(count, 1) <= most
        number = np.where(formed, np.cumsum(formed) - 1 + len(self.cohorts), -1).astype(np.int32)
        mine = free & formed[of]
        self.groups[inside[mine]], self.crowded[inside[mine]] = number[of[mine]], most == 1
        self.cohorts += [self.entities[kind][i] for i in (found[formed] // products).tolist()]

    def nodes_of_job(self, i: int) -> tuple[str, list[str]]:
        """Returns the node of a member, "" unknown, and the other nodes of its job."""
        nodes, jobs, mine = self.numbers["node"], self.numbers["job"], self.ancestor("node", i) or ""
        names = (self.entities["node"][k] for k in np.unique(nodes[(jobs == jobs[i]) & (nodes >= 0)]).tolist())
        return mine, [name for name in names if name != mine]

    def ancestor(self, kind: str, i: int) -> str | None:
        """Returns the stage, job, GPU or node of a member, if it is known."""
        number = int(self.numbers[kind][i]) if kind in self.numbers else -1
        return self.entities[kind][number] if number >= 0 else None

    def around(self, i: int) -> dict[str, str]:
        """Returns kind -> ancestor of a member, for the evidence."""
        return {kind: e for kind in self.numbers if (e := self.ancestor(kind, i)) is not None}

    def cohort_name(self, i: int) -> str:
        """Returns the name of the cohort that a member is compared with."""
        group = int(self.groups[i])
        return self.cohorts[group] if group >= 0 else "own past"

    def team_medians(self, values: Floats) -> Floats:
        """Returns (N,) median of each one's team; NaN without one."""
        known = np.where(np.abs(values) < _ABSURD, values, np.nan)
        median = group_medians_of(known, self.team, int(self.team.max(initial=-1)) + 1)
        return np.append(median, np.nan)[self.team]

    def follow_mates(self, names: Sequence[str], now: NDArray[np.object_]) -> NDArray[np.intp]:
        """Returns the positions of names that had other peers before. now: the name of each one's cohort."""
        before = np.array([*map(self._mates.get, names)], object)
        other = np.flatnonzero(before != now).tolist()
        self._mates.update((names[i], now[i]) for i in other)
        return np.array([i for i in other if before[i] is not None], np.intp)

    def others(self, slots: NDArray[np.intp], counted: Bools) -> NDArray[np.intp]:
        """Returns the counted members of the cohort of the first of `slots`, without those."""
        alike = (self.groups == self.groups[slots[0]]) & (self.groups >= 0) & counted
        alike[slots] = False
        return np.flatnonzero(alike)


def _largest_part(groups: NDArray[np.intp], nodes: Ints, size: int) -> NDArray[np.int64]:
    """Returns (size,) members of each group on its node with the most; 0 where no node is known."""
    known = nodes >= 0
    pairs, count = np.unique(groups[known] * (1 + int(nodes.max(initial=0))) + nodes[known], return_counts=True)
    largest = np.zeros(size, np.int64)
    np.maximum.at(largest, pairs // (1 + int(nodes.max(initial=0))), count)
    return largest


@dataclass
class GpuPlacement(Placement):
    """(N,) by GPU of the frame. Call `update_topology` once per instant. Without a known job, those of its node are
    its cohort.

    job_known: whether a rank is on it.   reported_at: when its job last reported a compute time.
    """

    reported_at: NDArray[np.int64] = memory(0, np.int64)
    job_known: Bools = field(default_factory=lambda: np.empty(0, bool), init=False, repr=False)
    _devices: tuple[int, int] = field(default=(0, -1), init=False, repr=False)  # id and version of the topology
    _around: list[Mapping[str, str] | None] = field(default_factory=list, init=False, repr=False)
    _ranks: AncestorIndex = field(default_factory=lambda: AncestorIndex("gpu"), init=False, repr=False)

    def update_topology(self, frame: Frame, product: Ints) -> Bools | None:
        """Follows topology and fleet; where they changed, returns (N,) GPUs with other peers than before.

        product: number of the product of each GPU, -1 unknown (Detector.kinds)."""
        if self.is_placed(frame):
            return None
        devices, fresh = (id(frame.topology), frame.topology.device_version), False
        if devices != self._devices:
            self._devices, self._around, fresh = devices, [], True
        around = [*map(JobIndex().ranks_by_gpu(frame.topology).get, frame.entities)]
        before = [*self._around, *[_UNREAD] * (len(around) - len(self._around))]
        nodes, self._around = find_nodes(frame), around
        moved = [i for i, (now, last) in enumerate(zip(around, before, strict=True)) if now is not last]
        changed = {i: _with_node(around[i] or {}, nodes[i]) for i in moved}
        self.place(frame.entities, changed, ("stage", "job", "node"), fresh)
        self.job_known = self.numbers["job"] >= 0
        self.build_cohorts(product + 1, LEAST_PEERS)
        alone = (self.groups < 0) & ~self.job_known & (self.numbers["node"] >= 0)
        self.groups[alone] = self.numbers["node"][alone] + len(self.cohorts)
        self.cohorts += self.entities["node"]
        cohorts = np.array([*self.cohorts, "", "own past"], object)  # the last one is that of -1
        now = cohorts[np.where(self.job_known, self.groups, len(self.cohorts))]
        return np.isin(np.arange(len(now)), self.follow_mates(frame.entities, now))

    def record_reporting(self, gpus: Frame, ranks: Frame | None) -> None:
        """Records GPUs whose training job reports compute times."""
        self.grow(len(gpus.entities))
        if ranks is None or "rank.compute_time" not in ranks.values:
            return
        at = self._ranks.positions(ranks, gpus)
        reporting = at[(at >= 0) & np.isfinite(ranks["rank.compute_time"])]
        self.reported_at[reporting] = ranks.time

    def reports_compute_time(self, time: int) -> Bools:
        """Returns (N,) GPUs whose job reported compute times recently: the detector `straggler` judges those."""
        return np.asarray((self.reported_at > 0) & (time - self.reported_at <= _REPORTS_FOR))


def _with_node(around: Mapping[str, str], node: str) -> Mapping[str, str]:
    """Returns the ancestors of a rank by kind, with the node of its GPU where that is known."""
    return around if not node or around.get("node") == node else {**around, "node": node}
