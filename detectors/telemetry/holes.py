"""Holes of less than a minute in all that a node tells: it speaks again, and what it measured meanwhile is lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.method.homes import Homes
from detectors.telemetry.silence import KNOWN, MISSED
from detectors.telemetry.silent_nodes import Known, Silence
from pipeline.records import SECOND, Frame, Level
from pipeline.topology import Topology

LEAST = 2
"""Instants in a row without a sample of the node and all its GPUs: one may be a look that came late; chosen."""
HOLDS = 600 * SECOND
"""A hole is over when none followed for so long: the Desk's own quiet; chosen."""
WAITS = 20 * SECOND
"""After which it is told: two looks, in which an agent that was started anew has told of itself; chosen."""
MANY = 0.1
"""Share of the nodes above which it was the pipeline or its brokers that paused, and no node's agent; chosen."""
_FEW = 2  # nodes that are never many
AGAIN = 3
"""Holes from which it is a ticket whoever made them: no update needs so many starts; chosen."""
_RESTART = "agent.cpu_time"
_WHY = {
    "same": "its agent ran on and stood still, or the way from it did",
    "new": "its agent was started anew",
    "unknown": "its agent was started anew or stood still, which it does not tell",
}


class Holes:
    """Nodes that spoke again lately after a hole that was too short for a silence."""

    def __init__(self) -> None:
        self._holes: dict[str, dict[str, Any]] = {}  # node -> since (us), back, seconds, times, agent
        self._cpu: NDArray[np.float64] = np.empty(0)
        self._told: NDArray[np.int64] = np.zeros(
            (2, 0), np.int64
        )  # when each agent told of itself, and began anew last
        self._names: Sequence[str] = ()
        self._agents: dict[str, list[int]] = {}  # node -> positions of its agents
        self._key = (0, -1, 0)
        self._gpus = Homes()

    def look(self, known: Known, agents: Frame | None) -> Iterator[Silence]:
        """Holes that are to be told now."""
        if agents is not None and _RESTART in agents.values:
            self._follow(agents)
        back = np.flatnonzero(known.last.holes.get("node", np.zeros(0, np.int32)) >= LEAST).tolist()
        if back:
            self._note([i for i in back if self._is_whole(i, known)], known)
        if not self._holes:
            return
        self._holes = {n: k for n, k in self._holes.items() if 0 <= known.time - k["back"] <= HOLDS}
        for node, hole in sorted(self._holes.items()):
            if known.time - hole["back"] >= WAITS:
                hole["agent"] = hole["agent"] or self._agent(node, hole, known.topology)
                yield self._silence(node, hole)

    def _follow(self, frame: Frame) -> None:
        """Takes the processor time of agents, which begins anew with them."""
        now = frame[_RESTART]
        if (more := len(now) - len(self._cpu)) > 0:
            self._cpu = np.append(self._cpu, np.full(more, np.nan))
            self._told = np.append(self._told, np.zeros((2, more), np.int64), axis=1)
        np.minimum(self._told, frame.time, out=self._told)  # a time that stepped back
        told, before = ~np.isnan(now), self._cpu[: len(now)]
        self._told[0, : len(now)][told] = frame.time
        self._told[1, : len(now)][now < before] = frame.time
        np.copyto(before, now, where=told)
        self._names = frame.entities

    def _agent(self, node: str, hole: Mapping[str, Any], topology: Topology) -> str:
        """Whether the agent of a node is another than before the hole, the same, or tells nothing of itself."""
        self._renew(topology)
        for i in self._agents.get(node, []):
            if self._told[0, i] >= hole["back"]:
                return "new" if self._told[1, i] >= hole.get("began", hole["since"]) else "same"
        return "unknown"

    def _renew(self, topology: Topology) -> None:
        """Looks up whose the agents are, if fleet or topology changed."""
        names = self._names[: len(self._cpu)]
        key = (id(topology), topology.version, len(names))
        if key == self._key:
            return
        self._key, self._agents = key, {}
        for i, entity in enumerate(names):
            self._agents.setdefault(topology.above_of_kind(entity, "node") or entity, []).append(i)

    def _is_whole(self, i: int, known: Known) -> bool:
        """Whether it was a hole of all that the node tells, of which no silence was told, and nobody worked on it."""
        last = known.last
        node, seconds = last.names["node"][i], float(last.gaps["node"][i]) / SECOND
        if seconds <= 1.5 * last.usual[i] / SECOND:  # that is how often it speaks
            return False
        if seconds - known.frame_s > known.node_seconds or last.count["node"][i] <= KNOWN or known.in_work(node):
            return False
        self._gpus.renew(last.names.get("gpu", ()), known.topology)
        mine = [g for g in self._gpus.members(node) if last.count["gpu"][g] > KNOWN]
        if not mine:
            return bool(last.holes["node"][i] >= MISSED)
        return all(last.holes["gpu"][g] >= LEAST or last.missed["gpu"][g] >= LEAST for g in mine)

    def _note(self, back: list[int], known: Known) -> None:
        last = known.last
        for i in back:
            since, node = known.time - int(last.gaps["node"][i]), last.names["node"][i]
            hole = self._holes.setdefault(node, {"since": since, "times": 0})
            hole["times"] += 1
            hole |= {"back": known.time, "began": since, "seconds": (known.time - since) / SECOND, "agent": ""}
            hole["long"] = hole["seconds"] > known.seconds  # no agent takes as long to start
        together = [n for n, k in self._holes.items() if known.time - k["back"] < WAITS]
        if len(together) > max(_FEW, MANY * len(last.names["node"])):
            for node in together:
                del self._holes[node]

    def _silence(self, node: str, hole: Mapping[str, Any]) -> Silence:
        """A ticket if the agent ran on, or has holes again and again; else it may be a start of it, as at an update."""
        sure = hole["agent"] == "same" or hole["times"] >= AGAIN or hole["long"]
        level: Level = "ticket" if sure else "suspect"
        again = f", {hole['times']} times with less than {HOLDS // SECOND} s between" if hole["times"] > 1 else ""
        said = f"{node} told nothing for {hole['seconds']:.0f} s and speaks again{again}: {_WHY[hole['agent']]}"
        summary = f"{said}; what it measured meanwhile is lost, or comes too late to be judged"
        clears = f"over when {HOLDS // SECOND} s pass without a hole"
        more = {name: hole[name] for name in ("seconds", "times", "agent")}
        key, signals = f"{node}|hole", ("node.load1", "gpu.power")
        return Silence(key, node, hole["since"], level, 1.0, summary, "hole", clears, signals, more)

    def snapshot(self) -> dict[str, Any]:
        return {
            "holes": {n: dict(k) for n, k in self._holes.items()},
            "cpu": self._cpu.copy(),
            "told": self._told.copy(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._holes, self._cpu, self._told = dict(state["holes"]), state["cpu"], state["told"]
        self._names, self._key = (), (0, -1, 0)
