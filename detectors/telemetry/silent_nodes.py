"""Silent nodes: nodes that fell silent together have one cause; a single one is dead, unreachable or rebooting.

Also short gaps in all telemetry of a node, which are over before a silence would be reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.gates import Gates
from detectors.base.power_feeds import PowerFeeds
from detectors.base.state import N, State, memory, notes, part
from detectors.base.topology_index import FramePositions, TopologyIndex, per_device_topology
from detectors.telemetry.host_facts import HostFacts
from detectors.telemetry.silence import (
    KNOWN,
    LATE,
    MISSED,
    NEARLY_ALL,
    READINGS,
    SITE,
    TOGETHER,
    Bools,
    LastSamples,
    shared_ancestors,
)
from detectors.telemetry.silent_jobs import JobVerdict, SilentJobs
from detectors.telemetry.silent_readers import LostReader, Readers
from pipeline.model.entity_names import entity_name, pager_title, short_duration
from pipeline.model.links import PEER
from pipeline.model.records import SECOND, Frame, Level
from pipeline.model.topology import Topology

BOOT = 900 * SECOND
"""us that a reboot takes at most: servers with 8 GPUs need 5 to 10 min. For so long a node without a job is a suspect,
as no work is lost. Chosen."""
DEAD = 600 * SECOND
"""us after which a silent node pages whose job has no other node to show that it goes on: systemd restarts agents ten
times as soon, and a network that fails takes more than one node. Chosen."""
DIES_WITH_IT = 60 * SECOND
"""us before a fatal error within which the end of a job belongs to it; chosen: launchers end a job within seconds."""
SETTLES = 120 * SECOND
"""us after which a node that reports again has its devices back: drivers load last; chosen."""
ALL_BLIND = 300 * SECOND
"""us after which the silence of all nodes pages: nothing is monitored then; chosen."""
MANY, MANY_SHARE = 8, 0.1
"""Nodes, and share of all, that do not fall silent at one moment by chance although no known entity holds them all.
Chosen: a chassis holds 2 to 4, a rack up to 18, which the topology knows."""
_LEFT = 0.5  # share of a group still silent below which the rest are judged each by itself; chosen
_LISTED = 64  # nodes in the evidence


@dataclass(frozen=True, slots=True)
class Silence:
    """A device or a group is silent now. `key` stays for as long as it lasts."""

    key: str
    entity: str
    since: int
    level: Level
    score: float
    summary: str
    cause: str
    clears: str
    signals: tuple[str, ...]
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Context:
    """The state of telemetry at an instant.

    seconds, node_seconds, dead_seconds: settings of the detector.   frame_s: time since the instant before.
    ports: the frame of class nic, with the far ends of the nodes' links where the switches are read.
    unread: nodes and units whose BMC is known not to respond.
    """

    last: LastSamples
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
    ports: Frame | None = None
    unread: frozenset[str] = frozenset()

    def in_maintenance(self, entity: str) -> bool:
        """Returns whether an entity, or something that it is part of, is in maintenance."""
        return self.gates.in_maintenance(entity, self.topology, self.time)

    def maintenance_mask(self, device_class: str) -> Bools:
        """Returns (N,) `in_maintenance` of the devices of a class."""
        frame = Frame(self.time, device_class, self.last.names(device_class), {}, self.topology)
        return self.gates.maintenance_mask(frame)

    def dark_feed(self, entity: str) -> str | None:
        """Returns the feed of an entity, or itself, that has no power."""
        around = (entity, *self.topology.ancestors(entity))
        return next((e for e in around if e in self.feeds.dark), None) if self.feeds.dark else None

    def silent_for(self, since: int) -> str:
        """Returns in words how long a silence lasts."""
        return short_duration((self.time - since) / SECOND)


@dataclass
class SilentNodes(State):
    """Groups of nodes that fell silent together, and nodes that are silent alone."""

    _groups: dict[str, dict[str, Any]] = notes()  # entity -> since, nodes, of, lives: node -> job that made steps
    _alone: dict[str, dict[str, Any]] = notes()  # node -> since, level, lives: job that made steps without it, or ""
    returned: set[str] = field(default_factory=set, init=False, repr=False)  # nodes that are back and were suspects
    _readers: Readers = part(Readers)
    _mute: list[int] = field(default_factory=list, init=False, repr=False)  # nodes without own data, GPUs report
    _lost_reader: LostReader | None = field(default=None, init=False, repr=False)  # of nearly all of those together
    _index: TopologyIndex = field(default_factory=TopologyIndex, init=False, repr=False)
    _gpus: TopologyIndex = field(default_factory=TopologyIndex, init=False, repr=False)
    _supplies: TopologyIndex = field(default_factory=TopologyIndex, init=False, repr=False)
    _ports: TopologyIndex = field(default_factory=TopologyIndex, init=False, repr=False)
    _far_ends: FramePositions = field(default_factory=FramePositions, init=False, repr=False)

    def find_silences(self, context: Context) -> Iterator[Silence]:
        """Yields the silent nodes and groups of this instant, each with its cause."""
        # nodes are compared with their GPUs, so that single readings that are lost make no silence
        silent = context.last.silent("node", context.node_seconds, READINGS)
        self.returned = set()
        if not (silent.any() or self._groups or self._alone):
            self._readers.clear("node")
            return
        names = context.last.names("node")
        if not len(names):
            return
        self._index.update(names, context.topology)
        silent = self._without_live_nodes(silent, context)
        self._sort_out(silent, context)
        for each in (*self._groups.values(), *self._alone.values()):
            each["since"] = min(each["since"], context.time)  # the clock may have been set back
        for entity, group in sorted(self._groups.items()):
            yield self._group_silence(entity, group, context)
        powered = self._nodes_with_power(context) if self._alone else set()
        for node, alone in sorted(self._alone.items()):
            yield self._single_silence(node, alone, "answers" if node in powered else "no data", context)
        if self._lost_reader is not None:
            yield self._unread_silence(self._lost_reader, context)
        for i in self._mute:
            yield self._mute_silence(names[i], int(context.last.of_class("node").seen[i]), context)

    def _mute_silence(self, node: str, since: int, context: Context) -> Silence:
        summary = pager_title(node, f"no data of its own for {context.silent_for(since)}, its GPUs report")
        clears, signals = "clears with the node's next sample", ("node.load1",)
        return Silence(f"{node}|own", node, since, "ticket", 1.0, summary, "collector", clears, signals)

    def _unread_silence(self, gone: LostReader, context: Context) -> Silence:
        count, names = len(gone.nodes), context.last.names("node")
        summary = pager_title(gone.entity, f"no node data from {count} of {gone.of} nodes, their GPUs report")
        clears = "clears with the next samples of nearly all"
        evidence = {"nodes": [names[i] for i in gone.nodes[:_LISTED]]}
        key, score, signals = "own|all", float(count), ("node.load1",)
        return Silence(key, gone.entity, gone.since, "ticket", score, summary, "collector", clears, signals, evidence)

    def _without_live_nodes(self, silent: Bools, context: Context) -> Bools:
        """Removes nodes in maintenance, and nodes whose GPUs still report: their agent is alive."""
        last, names = context.last, context.last.names("node")
        silent = silent[: len(names)]
        self._gpus.update(last.names("gpu"), context.topology)
        owner = self._gpus.node_positions(names)
        reporting = owner[last.reporting("gpu")[: len(owner)] & (owner >= 0)]
        alive, free = np.bincount(reporting, minlength=len(names)) > 0, ~context.maintenance_mask("node")
        # without GPUs that confirm it, single readings that are lost must not make a silence either
        surely = last.silent("node", context.node_seconds)[: len(names)]
        silent = silent & ((np.bincount(owner[owner >= 0], minlength=len(names)) > 0) | surely)
        # a node that comes back shows its GPUs first
        back = np.full(len(names) + 1, -1, np.int64)
        np.maximum.at(back, owner, last.of_class("gpu").since[: len(owner)])
        settled = context.time - back[:-1] > last.patience("node", context.node_seconds)[: len(names)] + SETTLES
        mute, counted = silent & alive & free & settled, alive & free
        mute &= surely
        self._lost_reader = self._readers.find_lost("node", mute, counted, np.arange(len(names)), self._index, last)
        left = mute if self._lost_reader is None else mute & ~self._lost_reader.silent
        self._mute = np.flatnonzero(left).tolist()
        return silent & free & ~alive

    def _sort_out(self, silent: Bools, context: Context) -> None:
        """Updates groups and single nodes."""
        names = context.last.names("node")
        quiet = {names[i] for i in np.flatnonzero(silent).tolist()}
        for node in [n for n in self._alone if n not in quiet]:
            if self._alone.pop(node).get("level") == "suspect":
                self.returned.add(node)
            context.facts.clear_node(node, context.topology)
        waiting = self._not_silent_yet(context) if self._groups else set()
        for entity, group in list(self._groups.items()):
            left = [n for n in group["nodes"] if n in quiet or n in waiting]
            for node in set(group["nodes"]) - set(left):
                context.facts.clear_node(node, context.topology)
            if len(left) < _LEFT * group["of"]:
                del self._groups[entity]
                lives = group.get("lives", {})
                self._alone.update({n: {"since": group["since"], "lives": lives.get(n, "")} for n in left})
            else:
                group["nodes"] = left
        known = {n for g in self._groups.values() for n in g["nodes"]} | set(self._alone)
        begun = [i for i in np.flatnonzero(silent).tolist() if names[i] not in known]
        free = ~context.maintenance_mask("node") if begun else np.zeros(0, bool)
        if begun and known:
            free &= np.array([n not in known for n in names])
        for i in begun:
            if free[i]:
                free[self._begin(i, free, context)] = False

    def _not_silent_yet(self, context: Context) -> set[str]:
        """Returns the nodes that are late, but not for as long as a silence takes: those of a group are not silent for
        their patience at the same instant."""
        last = context.last
        age = context.time - last.of_class("node").seen
        late = (age > LATE * last.interval()) & (age <= last.patience("node", context.node_seconds))
        return {last.names("node")[i] for i in np.flatnonzero(late[: len(last.names("node"))]).tolist()}

    def _begin(self, i: int, free: Bools, context: Context) -> list[int]:
        """Adds a node that has just fallen silent, with others or alone; returns the positions of those added.

        free: nodes that are in no group or maintenance.
        """
        nodes, names = context.last.of_class("node"), context.last.names("node")
        seen, since = nodes.seen, int(nodes.seen[i])
        counted = context.last.known("node")
        every = context.last.interval()
        reporting = (nodes.missed < MISSED) | (context.time - seen <= LATE * every)
        together = counted & free & ~reporting & (np.abs(seen - since) <= max(TOGETHER, 2 * every))
        looked_at = counted & (together | reporting | ~free)
        mine = np.zeros(len(names), bool)
        mine[i] = True
        found = {e: m for e, m in shared_ancestors(mine, together, looked_at & free, self._index).items() if i in m}
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
        best = max(order, key=lambda e: (context.dark_feed(e) == e, len(found[e]), -order.index(e)))
        members = [names[m] for m in found[best]]
        since = int(seen[found[best]].min())
        all_of = int(looked_at.sum())
        self._groups[best] = {"since": since, "nodes": members, "of": len(members), "lives": {}, "looked_at": all_of}
        return found[best]

    def _group_silence(self, entity: str, group: dict[str, Any], context: Context) -> Silence:
        nodes, since = group["nodes"], group["since"]
        which = f"{len(nodes)} nodes"
        if entity == SITE:
            whole = group["of"] >= NEARLY_ALL * group.get("looked_at", group["of"])
            which = f"all {which}" if whole else f"{len(nodes)} of {group['looked_at']} nodes"
        verdicts = [context.jobs.verdict(n, since, context.time, context.topology) for n in nodes]
        before = group.get("lives", {})
        lives = {n: v.job if v.state == "running" else before.get(n) for n, v in zip(nodes, verdicts, strict=True)}
        group["lives"] = {n: job for n, job in lives.items() if job}
        level, cause, why = self._group_cause(entity, group, verdicts, context)
        clears = f"clears when fewer than half of the {group['of']} nodes are silent"
        summary = pager_title(entity, f"{which} silent for {context.silent_for(since)}: {why}")
        jobs = sorted({v.job for v in verdicts if v.job})
        evidence = {"nodes": nodes[:_LISTED], "silent": len(nodes), "jobs": jobs}
        signals = ("node.load1", "power.voltage") if cause == "power" else ("node.load1",)
        key, score = f"{entity}|nodes", float(len(nodes))
        return Silence(key, entity, since, level, score, summary, cause, clears, signals, evidence)

    def _group_cause(
        self, entity: str, group: Mapping[str, Any], verdicts: list[JobVerdict], context: Context
    ) -> tuple[Level, str, str]:
        """Returns level, cause and the cause in words."""
        dark = context.dark_feed(entity)
        if dark is not None:
            return "page", "power", "no power" if dark == entity else f"no power at {entity_name(dark)}"
        lives = group["lives"].values()
        stopped = next((v for v in verdicts if v.state in ("ended", "hangs") and v.job not in lives), None)
        if stopped is not None:
            how = "ended" if stopped.state == "ended" else "hangs"
            return "page", "outage", f"power or network, {entity_name(stopped.job)} {how}"
        if on := next(iter(lives), None):
            return "ticket", "network", f"agents or network, {entity_name(on)} still runs"
        late = context.time - group["since"] > (ALL_BLIND if entity == SITE else context.dead_seconds * SECOND)
        return ("page" if late else "ticket"), "unknown", "cause unknown"

    def _single_silence(self, node: str, alone: dict[str, Any], bmc: str, context: Context) -> Silence:
        since = alone["since"]
        jobs = context.jobs.verdict(node, since, context.time, context.topology)
        if jobs.state == "running":
            alone["lives"] = jobs.job
        level, cause, why = self._single_cause(node, alone, jobs, context)
        alone["level"] = level
        clears = "clears with the node's next sample"
        score = 2.0 if level == "page" else 1.0
        signals = ("node.load1", "gpu.power")
        # after a required reboot the silence is blamed on the device that required it: it is part of that incident
        blamed = context.facts.reboot_required_by(node) if cause in ("boot", "host", "unknown") else None
        entity, evidence = blamed or node, {"bmc": bmc, "node": node}
        which = "" if entity == node else f"{entity_name(node)} "
        summary = pager_title(entity, f"{which}silent for {context.silent_for(since)}: {why}")
        return Silence(f"{node}|node", entity, since, level, score, summary, cause, clears, signals, evidence)

    def _single_cause(
        self, node: str, alone: Mapping[str, Any], jobs: JobVerdict, context: Context
    ) -> tuple[Level, str, str]:
        """Returns level, cause and the cause in words; without a job no work is lost, so it never pages."""
        dark, since = context.dark_feed(node), alone["since"]
        age, fact = context.time - since, context.facts.last_fatal(node, since + TOGETHER)
        # systemd ends a hung agent after 30 s and starts it again: a longer silence does not end by itself
        level: Level = "ticket" if age >= context.seconds * SECOND else "suspect"
        if dark is not None:
            return "page", "power", f"no power at {entity_name(dark)}"
        if alone["lives"]:
            return level, "agent", f"agent or network, {entity_name(alone['lives'])} still runs"
        if fact is not None:
            lost = jobs.state != "none" or context.jobs.ended_since(node, fact[0] - DIES_WITH_IT)
            return ("page" if lost else "ticket"), "host", f"host dead, {fact[1]}"
        if context.facts.reboot_required_by(node) and jobs.state != "hangs":
            return ("suspect" if age <= BOOT else "ticket"), "boot", "an XID required a reboot"
        if jobs.state in ("ended", "hangs"):
            how = "ended" if jobs.state == "ended" else "hangs"
            return "page", "host", f"host or network dead, {entity_name(jobs.job)} {how}"
        host = self._host_state(node, since, jobs.job, context) if jobs.job else ""
        if host == "dead":
            return "page", "host", f"host dead, {entity_name(jobs.job)} ran on it"
        if jobs.job and age > DEAD and host != "alive":
            alone_in_job = not context.jobs.reports_elsewhere(jobs.job, context.topology)
            level = "page" if alone_in_job or age > context.dead_seconds * SECOND else level
        if rules := context.facts.rejected_by(node, since):
            return level, "rejected", f"its messages are rejected ({rules})"
        if not jobs.job:
            return ("suspect" if age <= BOOT else "ticket"), "unknown", "host or agent dead, or a reboot"
        return level, "unknown", f"host or agent dead, {entity_name(jobs.job)} ran on it"

    def _host_state(self, node: str, since: int, job: str, context: Context) -> str:
        """Returns "dead" if all links of a node are down at their far ends, or its supplies give little since it fell
        silent, "alive" if they give as much as before, "" if neither is known."""
        known = context.last.names("nic")
        self._ports.update(known, context.topology)
        peers = (context.topology.attributes.get(known[i], {}).get(PEER) for i in self._ports.devices_below(node))
        states = [self._far_ends.value(context.ports, "nic.state", p) for p in peers if isinstance(p, str)]
        states = [state for state in states if state == state]
        if states and not any(states):
            return "dead"
        return context.jobs.supplied(node, since, job, context.topology)

    def _nodes_with_power(self, context: Context) -> set[str]:
        """Returns the single nodes with a power supply that is still read, which a BMC does without the host."""
        self._supplies.update(context.last.names("psu"), context.topology)
        reporting = context.last.reporting("psu")
        return {node for node in self._alone if bool(reporting[self._supplies.positions_below(node)].any())}


# Gaps: nodes without any data for a moment that report again.
GAP_LEAST = 2
"""Instants in a row without a sample of the node and all its GPUs: one may be a late reading; chosen."""
GAP_HOLDS = 600 * SECOND
"""us without another gap after which a gap is over: the Desk resolves after the same time; chosen."""
GAP_WAITS = 20 * SECOND
"""us after which a gap is reported: two readings, in which a restarted agent has reported its own CPU time; chosen."""
GAP_MANY, GAP_FEW = 0.1, 2
"""Share of the nodes above which the pipeline or its brokers paused, not the agents; that many nodes are never many."""
GAP_AGAIN = 3
"""Gaps from which it is a ticket whatever the agent did: no update needs so many starts; chosen."""
_RESTART = "agent.cpu_time"
_WHY = {"same": "its agent did not restart", "new": "its agent restarted", "unknown": "agent restarted or paused"}
_WHY |= {"boot": "it rebooted"}


@dataclass
class AgentStarts(State):
    """Which agents reported after a moment, and whether they restarted: their CPU time then begins at 0."""

    cpu: NDArray[np.float64] = memory(np.nan)
    reported: NDArray[np.int64] = memory(0, np.int64, shape=(2, N))  # when each reported last, and restarted last
    _names: Sequence[str] = field(default=(), init=False, repr=False)

    def update(self, frame: Frame) -> None:
        """Adds the CPU time of agents."""
        now = frame[_RESTART]
        self.grow(len(now))
        np.minimum(self.reported, frame.time, out=self.reported)  # the clock may have been set back
        there, before = ~np.isnan(now), self.cpu[: len(now)]
        self.reported[0, : len(now)][there] = frame.time
        self.reported[1, : len(now)][now < before] = frame.time
        np.copyto(before, now, where=there)
        self._names = frame.entities

    def compare(self, node: str, since: int, back: int, topology: Topology) -> str:
        """Returns whether the agent of a node is "new" since a gap, the "same", or does not report: "unknown"."""
        for i in self._agents_of_nodes(self._names[: len(self.cpu)], topology).get(node, []):
            if self.reported[0, i] >= back:
                return "new" if self.reported[1, i] >= since else "same"
        return "unknown"

    @per_device_topology
    def _agents_of_nodes(self, names: Sequence[str], topology: Topology) -> Mapping[str, list[int]]:
        agents: dict[str, list[int]] = {}
        for i, entity in enumerate(names):
            agents.setdefault(topology.ancestor_of_kind(entity, "node") or entity, []).append(i)
        return agents


@dataclass
class Gaps(State):
    """Nodes that report again after a gap that was no ticket as a silence."""

    _gaps: dict[str, dict[str, Any]] = notes()  # node -> since (us), began, back, seconds, times, agent, long
    _starts: AgentStarts = part(AgentStarts)
    _gpus: TopologyIndex = field(default_factory=TopologyIndex, init=False, repr=False)

    def find_gaps(self, context: Context, frames: Mapping[str, Frame], returned: Set[str]) -> Iterator[Silence]:
        """Yields the gaps to report now. returned: nodes whose silence was a suspect until now."""
        agents = frames.get("agent")
        if agents is not None and _RESTART in agents.values:
            self._starts.update(agents)
        back = np.flatnonzero(context.last.of_class("node").holes >= GAP_LEAST).tolist()
        if back:
            uptime = frames["node"].values.get("node.uptime")
            self._record([i for i in back if self._is_whole(i, context, returned)], uptime, context)
        if not self._gaps:
            return
        self._gaps = {n: k for n, k in self._gaps.items() if 0 <= context.time - k["back"] <= GAP_HOLDS}
        for node, gap in sorted(self._gaps.items()):
            if context.time - gap["back"] >= GAP_WAITS:
                began = gap.get("began", gap["since"])
                gap["agent"] = gap["agent"] or self._starts.compare(node, began, gap["back"], context.topology)
                yield self._silence(node, gap)

    def _is_whole(self, i: int, context: Context, returned: Set[str]) -> bool:
        """Returns whether all of a node's data had the gap, no ticket reported it, and it was not in maintenance."""
        nodes, gpus = context.last.of_class("node"), context.last.of_class("gpu")
        node, seconds = nodes.names[i], float(nodes.gaps[i]) / SECOND
        # that is how often it reports; the time of a frame is that of its newest sample, so a gap may be shorter by one
        if seconds - context.frame_s <= LATE * nodes.usual[i] / SECOND:
            return False
        if node in returned:
            return not context.in_maintenance(node)
        if seconds - context.frame_s > context.node_seconds or nodes.count[i] <= KNOWN or context.in_maintenance(node):
            return False
        self._gpus.update(gpus.names, context.topology)
        mine = [g for g in self._gpus.devices_below(node) if gpus.count[g] > KNOWN]
        if not mine:
            return bool(nodes.holes[i] >= MISSED)
        return all(gpus.holes[g] >= GAP_LEAST or gpus.missed[g] >= GAP_LEAST for g in mine)

    def _record(self, back: list[int], uptime: NDArray[np.float64] | None, context: Context) -> None:
        nodes = context.last.of_class("node")
        for i in back:
            since, node = context.time - int(nodes.gaps[i]), nodes.names[i]
            gap = self._gaps.setdefault(node, {"since": since, "times": 0})
            gap["times"] += 1
            gap |= {"back": context.time, "began": since, "seconds": (context.time - since) / SECOND, "agent": ""}
            if uptime is not None and uptime[i] < gap["seconds"]:
                gap["agent"] = "boot"
            gap["long"] = gap["seconds"] > context.seconds  # no agent takes as long to start
        together = [n for n, k in self._gaps.items() if context.time - k["back"] < GAP_WAITS]
        if len(together) > max(GAP_FEW, GAP_MANY * len(nodes.names)):
            for node in together:
                del self._gaps[node]

    def _silence(self, node: str, gap: Mapping[str, Any]) -> Silence:
        """A ticket if the agent did not restart or the gaps repeat; else it may be the restart of an update.

        A node that rebooted lost no data: without a job on it that is a suspect, planned or not.
        """
        sure = gap["agent"] == "same" or gap["times"] >= GAP_AGAIN or (gap["long"] and gap["agent"] != "boot")
        level: Level = "ticket" if sure else "suspect"
        what = f"{gap['times']} gaps, the last of" if gap["times"] > 1 else "gap of"
        summary = pager_title(node, f"{what} {short_duration(gap['seconds'])} in all data, {_WHY[gap['agent']]}")
        clears = f"clears when {GAP_HOLDS // SECOND} s pass without a gap"
        evidence = {name: gap[name] for name in ("seconds", "times", "agent")}
        key, signals = f"{node}|hole", ("node.load1", "gpu.power")
        return Silence(key, node, gap["since"], level, 1.0, summary, "hole", clears, signals, evidence)
