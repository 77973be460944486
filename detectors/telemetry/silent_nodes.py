"""Silent nodes: nodes that fell silent together have one cause; a single one is dead, unreachable or rebooting.

Also holes of less than a minute in all telemetry of a node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.gates import Gates
from detectors.base.power_feeds import PowerFeeds
from detectors.base.topology_index import TopologyIndex
from detectors.telemetry.host_facts import HostFacts
from detectors.telemetry.silence import KNOWN, MISSED, NEARLY_ALL, SITE, TOGETHER, Bools, LastSeen, shared
from detectors.telemetry.silent_jobs import SilentJobs, Verdict
from detectors.telemetry.silent_readers import Gone, Readers
from pipeline.model.records import SECOND, Frame, Level, iso
from pipeline.model.topology import Topology

BOOT = 900 * SECOND
"""A boot that was asked for takes no longer: a server of 8 GPUs needs 5 to 10 min; chosen."""
ALL_BLIND = 300 * SECOND
"""Nobody at all heard for so long is worth waking somebody: nothing is watched then; chosen."""
MANY, MANY_SHARE = 8, 0.1
"""Nodes, and share of all that are looked at, that one moment does not take by chance though nothing known holds them
all. Chosen: a chassis holds 2 to 4, a rack up to 18, which the topology knows."""
_LEFT = 0.5  # share of a group still silent below which the rest are judged each for itself; chosen


@dataclass(frozen=True, slots=True)
class Silence:
    """Somebody is silent now. `key` stays for as long as it lasts."""

    key: str
    entity: str
    since: int
    level: Level
    score: float
    summary: str
    cause: str
    clears: str
    signals: tuple[str, ...]
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Known:
    """All that is known at an instant. seconds, node_seconds, dead_seconds: the detector's own; frame_s: since the one
    before."""

    last: LastSeen
    gates: Gates
    jobs: SilentJobs
    facts: HostFacts
    feeds: PowerFeeds
    topology: Topology
    time: int
    seconds: float
    node_seconds: float
    dead_seconds: float
    frame_s: float = 10.0

    def in_work(self, entity: str) -> bool:
        return self.gates.in_maintenance(entity, self.topology, self.time)

    def working(self, device_class: str) -> Bools:
        """(N,) `in_work` of the devices of a class, of which each is looked up only when other work is announced."""
        return self.gates.maintenance_mask(
            Frame(self.time, device_class, self.last.names[device_class], {}, self.topology)
        )

    def dark(self, entity: str) -> str | None:
        """The feed of an entity, or itself, that has no power."""
        around = (entity, *self.topology.above(entity))
        return next((e for e in around if e in self.feeds.dark), None) if self.feeds.dark else None


class SilentNodes:
    """Groups that fell silent together, and who is silent alone."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, Any]] = {}  # entity -> since, nodes, lives: node -> job that stepped on
        self._alone: dict[str, dict[str, Any]] = {}  # node -> since, job that stepped on without it (or empty)
        self._mute: list[int] = []  # nodes whose GPUs speak, while nothing is heard of themselves
        self._unread: Gone | None = None  # nearly all of those at once
        self._readers = Readers()
        self._homes, self._gpus, self._supplies = TopologyIndex(), TopologyIndex(), TopologyIndex()

    def look(self, known: Known) -> Iterator[Silence]:
        """Who is silent now, and why."""
        silent = known.last.silent_nodes(known.node_seconds, known.seconds)
        if not (silent.any() or self._groups or self._alone):
            self._readers.over("node")
            return
        names = known.last.names.get("node", ())
        if not len(names):
            return
        self._homes.update(names, known.topology)
        silent = self._without(silent, known)
        self._sort(silent, known)
        for each in (*self._groups.values(), *self._alone.values()):
            each["since"] = min(each["since"], known.time)  # a time that stepped back
        for entity, group in sorted(self._groups.items()):
            yield self._group(entity, group, known)
        supplied = self._supplied(known) if self._alone else set()
        for node, alone in sorted(self._alone.items()):
            yield self._lone(node, alone, "answers" if node in supplied else "not heard", known)
        if self._unread is not None:
            yield self._all(self._unread, known)
        for i in self._mute:
            yield self._own(names[i], int(known.last.seen["node"][i]), known)

    def _own(self, node: str, since: int, known: Known) -> Silence:
        summary = f"{node} tells nothing of itself for {(known.time - since) / SECOND:.0f} s while its GPUs are heard"
        clears, signals = "over with the node's next sample", ("node.load1",)
        return Silence(f"{node}|own", node, since, "ticket", 1.0, summary, "collector", clears, signals)

    def _all(self, gone: Gone, known: Known) -> Silence:
        count, names = len(gone.nodes), known.last.names["node"]
        said = (
            f"{count} of {gone.of} nodes tell nothing of themselves since {clock(gone.since)} while GPUs of them speak"
        )
        summary = f"{said}: what reads them is gone (exporter, collector)"
        clears, more = "over with the next samples of nearly all", {"nodes": [names[i] for i in gone.nodes[:64]]}
        key, score, signals = "own|all", float(count), ("node.load1",)
        return Silence(key, gone.entity, gone.since, "ticket", score, summary, "collector", clears, signals, more)

    def _without(self, silent: Bools, known: Known) -> Bools:
        """Less those whom people work on, and those whose GPUs still speak: their agent is alive."""
        names = known.last.names["node"]
        silent = silent[: len(names)]
        self._gpus.update(known.last.names.get("gpu", ()), known.topology)
        owner = self._gpus.node_positions(names)
        heard = owner[known.last.speaks("gpu")[: len(owner)] & (owner >= 0)]
        alive, free = np.bincount(heard, minlength=len(names)) > 0, ~known.working("node")
        mute, counted = silent & alive & free, alive & free
        self._unread = self._readers.look("node", mute, counted, np.arange(len(names)), self._homes, known.last)
        left = mute if self._unread is None else mute & ~self._unread.silent
        self._mute = np.flatnonzero(left).tolist()
        return silent & free & ~alive

    def _sort(self, silent: Bools, known: Known) -> None:
        """Renews groups and lone ones."""
        names = known.last.names["node"]
        quiet = {names[i] for i in np.flatnonzero(silent).tolist()}
        for node in [n for n in self._alone if n not in quiet]:
            del self._alone[node]
            known.facts.booted(node, known.topology)
        for entity, group in list(self._groups.items()):
            left = [n for n in group["nodes"] if n in quiet]
            for node in set(group["nodes"]) - set(left):
                known.facts.booted(node, known.topology)
            if len(left) < _LEFT * group["of"]:
                del self._groups[entity]
                lives = group.get("lives", {})
                self._alone.update({n: {"since": group["since"], "lives": lives.get(n, "")} for n in left})
            else:
                group["nodes"] = left
        told = {n for g in self._groups.values() for n in g["nodes"]} | set(self._alone)
        begun = [i for i in np.flatnonzero(silent).tolist() if names[i] not in told]
        free = ~known.working("node") if begun else np.zeros(0, bool)
        if begun and told:
            free &= np.array([n not in told for n in names])
        for i in begun:
            if free[i]:
                free[self._begins(i, free, known)] = False

    def _begins(self, i: int, free: Bools, known: Known) -> list[int]:
        """A node that has just become silent: with others, or alone. free: who is neither told of nor worked on."""
        last, names = known.last, known.last.names["node"]
        seen, since = last.seen["node"], int(last.seen["node"][i])
        counted = last.known("node")
        together = counted & free & (last.missed["node"] >= MISSED) & (np.abs(seen - since) <= TOGETHER)
        looked_at = counted & (together | (last.missed["node"] < MISSED) | ~free)
        mine = np.zeros(len(names), bool)
        mine[i] = True
        found = {e: m for e, m in shared(mine, together, looked_at & free, self._homes).items() if i in m}
        found = {e: m for e, m in found.items() if e not in self._groups}
        if together.sum() >= 4 and together.sum() >= 0.9 * looked_at.sum() and SITE not in self._groups:
            whole = np.flatnonzero(together).tolist()
            found |= {} if any(len(m) == len(whole) for m in found.values()) else {SITE: whole}
        most = max(map(len, found.values()), default=0)
        crowd = together & free
        if crowd.sum() >= max(MANY, MANY_SHARE * looked_at.sum()) and most < NEARLY_ALL * crowd.sum():
            found = {SITE: np.flatnonzero(crowd).tolist()} if SITE not in self._groups else found
        if not found:
            self._alone[names[i]] = {"since": since, "lives": ""}
            return [i]
        order = list(found)
        best = max(order, key=lambda e: (known.dark(e) == e, len(found[e]), -order.index(e)))
        members = [names[m] for m in found[best]]
        since = int(seen[found[best]].min())
        all_of = int(looked_at.sum())
        self._groups[best] = {"since": since, "nodes": members, "of": len(members), "lives": {}, "looked_at": all_of}
        return found[best]

    def _group(self, entity: str, group: dict[str, Any], known: Known) -> Silence:
        nodes, since = group["nodes"], group["since"]
        said = f"{len(nodes)} nodes of {entity} fell silent within {TOGETHER // SECOND} s"
        if entity == SITE:
            whole = group["of"] >= NEARLY_ALL * group.get("looked_at", group["of"])
            which = (
                f"All {len(nodes)} nodes that were heard" if whole else f"{len(nodes)} of {group['looked_at']} nodes"
            )
            said = f"{which} fell silent within {TOGETHER // SECOND} s"
        verdicts = [known.jobs.of(n, since, known.time, known.topology) for n in nodes]
        before = group.get("lives", {})
        lives = {n: v.job if v.state == "goes on" else before.get(n) for n, v in zip(nodes, verdicts, strict=True)}
        group["lives"] = {n: job for n, job in lives.items() if job}
        level, cause, why = self._why_group(entity, group, verdicts, known)
        clears = f"over when fewer than half of the {group['of']} nodes are silent"
        summary = f"{said} at {clock(since)}: {why}"
        more = {"nodes": nodes[:64], "silent": len(nodes), "jobs": sorted({v.job for v in verdicts if v.job})}
        signals = ("node.load1", "power.voltage") if cause == "power" else ("node.load1",)
        return Silence(
            f"{entity}|nodes", entity, since, level, float(len(nodes)), summary, cause, clears, signals, more
        )

    def _why_group(
        self, entity: str, group: Mapping[str, Any], verdicts: list[Verdict], known: Known
    ) -> tuple[Level, str, str]:
        dark = known.dark(entity)
        if dark is not None:
            return "page", "power", f"{dark} has {known.feeds.dark[dark]['why']}"
        lives = group["lives"].values()
        stopped = next((v for v in verdicts if v.state in ("ended", "hangs") and v.job not in lives), None)
        if stopped is not None:
            how = "ended" if stopped.state == "ended" else "makes no step"
            return "page", "outage", f"{stopped.job} {how} since; cannot tell power from network, no feed shows a loss"
        if on := next(iter(lives), None):
            return "ticket", "network", f"{on} stepped on, so they live: their agents or their way to Kafka are gone"
        late = known.time - group["since"] > (ALL_BLIND if entity == SITE else known.dead_seconds * SECOND)
        return ("page" if late else "ticket"), "unknown", "no feed shows a loss and no job tells whether they live"

    def _lone(self, node: str, alone: dict[str, Any], bmc: str, known: Known) -> Silence:
        since = alone["since"]
        jobs = known.jobs.of(node, since, known.time, known.topology)
        if jobs.state == "goes on":
            alone["lives"] = jobs.job
        level, cause, why = self._why_lone(node, alone, jobs, known)
        seconds = (known.time - since) / SECOND
        summary = f"{node} has been silent for {seconds:.0f} s: {why}"
        clears = "over with the node's next sample"
        score = 2.0 if level == "page" else 1.0
        signals = ("node.load1", "gpu.power")
        # after a call for a reboot the silence is told of what called, so that it is part of that incident
        blamed = known.facts.asked(node) if cause in ("boot", "host", "unknown") else None
        entity, more = blamed or node, {"bmc": bmc, "node": node}
        return Silence(f"{node}|node", entity, since, level, score, summary, cause, clears, signals, more)

    def _why_lone(self, node: str, alone: Mapping[str, Any], jobs: Verdict, known: Known) -> tuple[Level, str, str]:
        dark, since = known.dark(node), alone["since"]
        fact = known.facts.of(node, since + TOGETHER)
        if dark is not None:
            return "page", "power", f"{dark}, which feeds it, has {known.feeds.dark[dark]['why']}"
        if alone["lives"]:
            return (
                "ticket",
                "agent",
                f"{alone['lives']} stepped on with its ranks: its agent or its way to Kafka is gone",
            )
        if fact is not None:
            return "page", "host", f"the host is dead; before, {fact[1]} ({(since - fact[0]) / SECOND:.0f} s earlier)"
        if known.facts.asked(node) and jobs.state != "hangs":
            wait = known.time - since <= BOOT
            return ("suspect" if wait else "ticket"), "boot", "an XID asked for its reboot, which this may be"
        if jobs.state in ("ended", "hangs"):
            how = "ended with it" if jobs.state == "ended" else "has made no step since"
            return "page", "host", f"{jobs.job} {how}: the host or its network is dead"
        late = known.time - since > known.dead_seconds * SECOND
        if rules := known.facts.rejected(node, since):
            return (
                ("page" if late else "ticket"),
                "rejected",
                f"what it sends arrives and is rejected (rule {rules}): see dead letters",
            )
        what = f"{jobs.job} ran on it and tells nothing" if jobs.job else "no job ran on it and nothing was told before"
        return ("page" if late else "ticket"), "unknown", f"{what}: host or agent, cannot tell which"

    def _supplied(self, known: Known) -> set[str]:
        """Lone ones of which a power supply is still read, which the BMC does without the host."""
        self._supplies.update(known.last.names.get("psu", ()), known.topology)
        speaks = known.last.speaks("psu")
        return {node for node in self._alone if bool(speaks[self._supplies.positions_below(node)].any())}

    def snapshot(self) -> dict[str, Any]:
        groups = {e: {**g, "nodes": list(g["nodes"])} for e, g in self._groups.items()}
        return {"groups": groups, "alone": dict(self._alone), "readers": self._readers.snapshot()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._groups, self._alone = dict(state["groups"]), dict(state["alone"])
        self._readers.restore(state.get("readers", {}))


def clock(time: int) -> str:
    """Time of day (UTC) for a summary."""
    return iso(time)[11:19]


LEAST = 2
"""Instants in a row without a sample of the node and all its GPUs: one may be a look that came late; chosen."""
HOLDS = 600 * SECOND
"""A hole is over when none followed for so long: the Desk's own quiet; chosen."""
WAITS = 20 * SECOND
"""After which it is told: two looks, in which an agent that was started anew has told of itself; chosen."""
MANY_PAUSED = 0.1
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
        self._gpus = TopologyIndex()

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
        self._gpus.update(last.names.get("gpu", ()), known.topology)
        mine = [g for g in self._gpus.devices_below(node) if last.count["gpu"][g] > KNOWN]
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
        if len(together) > max(_FEW, MANY_PAUSED * len(last.names["node"])):
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
