"""Who is blamed for what clocks and activity show: a GPU or its node, and what else is seen of it from the outside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.streams import Bools, Floats, Step
from detectors.straggler.watched import Watched
from pipeline.records import SECOND, Frame

_PART = 0.5  # of a node's GPUs that show the same: then the node is blamed, not its GPUs one by one; chosen
_FRESH = 120 * SECOND  # since a GPU was last at work; chosen: beyond a checkpoint
_PRESSED, _TIMES = 0.10, 3.0
"""Least share of the time in which tasks wait for a processor, and times that of the job's other nodes, that explain
idle SMs. The kernel's own averages are of 10 s; oomd's default acts on several times that share of memory. Chosen."""
_QUEUE = 1.0  # tasks for each processor from which they wait, where the kernel keeps no pressure counters


@dataclass(frozen=True, slots=True)
class Signs:
    """(N,) which GPUs show what. fast: clock low under a throttle bit; slow: clock low; stuck: far below all peers for
    long; low, high: SMs less, or more, active than the peers lead one to expect."""

    fast: Bools
    slow: Bools
    stuck: Bools
    low: Bools
    high: Bools
    clocks: Step
    duty: Step

    @property
    def anybody(self) -> Bools:
        """(N,) which GPUs show anything."""
        return self.fast | self.slow | self.stuck | self.low | self.high

    def any(self) -> bool:
        return bool(self.anybody.any())


@dataclass(frozen=True, slots=True)
class Sight:
    """What is known at one instant."""

    of: Watched
    frame: Frame
    nodes: Frame | None
    signs: Signs

    def mates(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """GPUs of the cohort of the first, these left out, that are at work now."""
        groups = self.of.seats.groups
        alike = (groups == groups[slots[0]]) & (self.frame.time - self.of.judged[: len(groups)] <= _FRESH)
        alike[slots] = False
        return np.flatnonzero(alike)

    def around(self, slots: NDArray[np.intp], worst: int, mates: NDArray[np.intp]) -> dict[str, Any]:
        """Where it is and what else is seen: power beside that of the peers, which falls where they wait."""
        of, seats = self.of, self.of.seats
        found: dict[str, Any] = {"gpus": [self.frame.entities[i] for i in slots.tolist()]}
        if seats.node[worst] >= 0:
            found["node"] = seats.nodes[seats.node[worst]]
        if seats.job[worst] >= 0:
            found["job"] = seats.jobs[seats.job[worst]]
        watts: Floats = of.power[mates][np.isfinite(of.power[mates])]
        if np.isfinite(of.power[worst]) and len(watts):
            found |= {"power_w": round(float(of.power[worst])), "power_of_peers_w": round(float(np.median(watts)))}
        found["duty_effect"] = round(float(np.expm1(self.signs.duty.effect[worst])), 4)
        return found

    def pressed(self, node: str, slot: int) -> tuple[str, float, str] | None:
        """In words, with its size and signal, that tasks on a node wait for processors beside others of the job."""
        seats = self.of.seats
        numbers = np.unique(seats.node[(seats.job == seats.job[slot]) & (seats.node >= 0)]).tolist()
        others = [seats.nodes[k] for k in numbers if seats.nodes[k] != node]
        share, usual = self.of.pressure.of(node), self.of.pressure.usual(others)
        if np.isfinite(share):
            if share < _PRESSED or share < _TIMES * usual:
                return None
            return f"tasks there wait for a processor {100 * share:.0f} % of the time", share, "node.cpu_pressure"
        if self.nodes is None or node not in self.nodes.entities:
            return None
        queue = self.nodes["node.load1"] / np.maximum(self.nodes["node.cpu_count"], 1)
        at = {e: i for i, e in enumerate(self.nodes.entities)}
        beside = np.array([queue[at[e]] for e in others if e in at])
        beside, mine = beside[np.isfinite(beside)], float(queue[at[node]])
        if not mine >= _QUEUE or (len(beside) and mine < _TIMES * float(np.median(beside))):
            return None
        return f"{mine:.1f} tasks are runnable there for each processor", mine, "node.load1"

    def narrow(self, slot: int, mates: NDArray[np.intp]) -> tuple[str, float, str] | None:
        """In words, with its size and signal, that the PCIe link of a GPU is below its peers'."""
        for name, last, unit in (
            ("gpu.pcie_width", self.of.width, "{:.0f} lanes"),
            ("gpu.pcie_generation", self.of.generation, "generation {:.0f}"),
        ):
            known = last[mates][np.isfinite(last[mates])]
            if len(known) and last[slot] < (usual := float(np.median(known))):
                mine = float(last[slot])
                return f"its PCIe link is at {unit.format(mine)}, its peers' at {unit.format(usual)}", mine, name
        return None


def units(sight: Sight, sign: Bools, lagging: Bools) -> Iterator[tuple[str, NDArray[np.intp]]]:
    """Nodes most of whose working GPUs lag, and single GPUs, each with the GPUs that show it."""
    node, n = sight.of.seats.node, len(sign)
    at_work = sight.frame.time - sight.of.judged[:n] <= _FRESH
    for number in np.unique(node[sign]).tolist():
        here = node == number
        late = np.flatnonzero(here & (sign | lagging) & at_work)
        if number >= 0 and len(late) >= max(2.0, _PART * np.count_nonzero(here & at_work)):
            yield sight.of.seats.nodes[number], late
            continue
        for i in np.flatnonzero(sign & here).tolist():
            yield sight.frame.entities[i], np.array([i], np.intp)
