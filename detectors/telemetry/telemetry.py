"""Finds devices that stopped reporting, and why: dead host, dead agent, feed without power, hung GPU firmware.

Silent devices of nodes that still report count too: one GPU whose firmware hangs, a supply that is not read. Also
reports messages that agents lost: their samples are missing for good, although nothing was silent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.budget import rule_line
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.event_data import events_of, values_by_entity
from detectors.base.findings import OpenConditions, close_ended, due_report
from detectors.base.gates import Gates
from detectors.base.power_feeds import SIGNALS as FEED_SIGNALS
from detectors.base.power_feeds import PowerFeeds
from detectors.base.state import State
from detectors.base.topology_index import TopologyIndex
from detectors.telemetry.host_facts import HostFacts
from detectors.telemetry.rolling_work import RollingWork
from detectors.telemetry.silence import Bools, LastSamples, shared_ancestors
from detectors.telemetry.silent_jobs import SilentJobs
from detectors.telemetry.silent_nodes import SETTLES, Context, Gaps, Silence, SilentNodes
from detectors.telemetry.silent_readers import LostReader, Readers
from pipeline.model.entity_names import entity_name, pager_title, short_number
from pipeline.model.records import SECOND, Finding, Frame, Level

IN_NODES = ("gpu", "nic", "psu")
PLANT = ("coolant", "power")
_MEANING = {
    "gpu": "GPU",
    "nic": "port",
    "psu": "power supply",
    "coolant": "coolant unit",
    "power": "power unit",
}
_ALL_SILENT = {"gpu": "driver or NVML hangs", "nic": "driver gone", "psu": "BMC not read"}
_LISTED = 64  # nodes in the evidence
FORGOTTEN = 3600 * SECOND
"""us after its last state in which a BMC counts as known; chosen: more than an agent is out."""


@dataclass
class SilentDevices(State):
    """Devices that are silent while their node reports, units of the plant, and classes whose reader is gone."""

    _readers: Readers = part(Readers)
    _indexes: dict[str, TopologyIndex] = field(default_factory=dict, init=False, repr=False)

    def find_silences(self, context: Context) -> Iterator[Silence]:
        """Yields the silences of this instant, each with its cause."""
        for device_class in (*IN_NODES, *PLANT):
            silent = context.last.silent(device_class, context.seconds)
            if not silent.any():
                self._readers.clear(device_class)
                continue
            names = context.last.names(device_class)
            index = self._indexes.setdefault(device_class, TopologyIndex())
            index.update(names, context.topology)
            if device_class in PLANT:
                left = {i: names[i] for i in np.flatnonzero(silent).tolist() if names[i] not in context.unread}
                mine = {i: name for i, name in left.items() if not context.in_maintenance(name)}
                yield from self._plant_silences(device_class, mine, index, context)
            elif len(context.last.names("node")):
                yield from self._silences_in_nodes(device_class, silent[: len(names)], index, context)

    def _silences_in_nodes(
        self, device_class: str, silent: Bools, index: TopologyIndex, context: Context
    ) -> Iterator[Silence]:
        """Devices of nodes that report; nearly all together are the silence of their reader, reported once."""
        nodes = context.last.names("node")
        owner = index.node_positions(nodes)
        settled = self._settled_nodes(device_class, context)[: len(nodes)]
        if device_class == "psu" and context.unread:
            settled &= np.array([node not in context.unread for node in nodes])
        counted = np.append(settled, False)[owner]
        if counted.any():
            counted &= ~context.maintenance_mask(device_class)
        silent = silent & counted
        gone = self._readers.find_lost(device_class, silent, counted, owner, index, context.last)
        if gone is not None:
            yield self._unread_silence(device_class, gone, context)
            silent &= ~gone.silent
        by_node: dict[str, list[int]] = {}
        for i in np.flatnonzero(silent).tolist():
            by_node.setdefault(nodes[owner[i]], []).append(i)
        devices = context.last.of_class(device_class)
        for node, found in sorted(by_node.items()):
            if len(found) > 1 and len(found) == len(index.devices_below(node)):
                yield self._node_silence(node, device_class, len(found), int(devices.seen[found].min()), context)
                continue
            for i in found:
                yield self._single_silence(devices.names[i], node, device_class, int(devices.seen[i]), context)

    def _unread_silence(self, device_class: str, gone: LostReader, context: Context) -> Silence:
        """A ticket, unless the jobs of most of the nodes ended with it: then the devices are gone themselves."""
        names = context.last.names("node")
        nodes = [names[i] for i in gone.nodes]
        count = len(nodes)
        ended = device_class == "gpu" and _jobs_ended(nodes, gone.since, context)
        why = "their jobs ended" if ended else "reader gone"
        summary = pager_title(gone.entity, f"{_plural(device_class)} of {count} of {gone.of} nodes silent: {why}")
        clears, evidence = "clears with the next samples of nearly all", {"nodes": nodes[:_LISTED]}
        key = f"{device_class}|unread"
        level: Level = "page" if ended else "ticket"
        signal = (context.last.signals[device_class],)
        return Silence(key, gone.entity, gone.since, level, float(count), summary, "reader", clears, signal, evidence)

    def _settled_nodes(self, device_class: str, context: Context) -> Bools:
        """Returns (N,) nodes that report, and have for so long that their devices should, too."""
        patience = context.last.patience(device_class, context.seconds).max(initial=0) + SETTLES
        nodes = context.last.of_class("node")
        return np.asarray(context.last.reporting("node") & (context.time - nodes.since > patience))

    def _node_silence(self, node: str, device_class: str, count: int, since: int, context: Context) -> Silence:
        level, why = self._gpu_cause(node, node, since, context) if device_class == "gpu" else ("ticket", "")
        silent = f"all {count} {_plural(device_class)} silent for {context.silent_for(since)}"
        summary = pager_title(node, f"{silent}: {why or _ALL_SILENT[device_class]}")
        signal = (context.last.signals[device_class],)
        clears = "clears when the first of them reports"
        evidence = {"devices": count}
        return Silence(f"{node}|{device_class}", node, since, level, 1.0, summary, "devices", clears, signal, evidence)

    def _single_silence(self, entity: str, node: str, device_class: str, since: int, context: Context) -> Silence:
        level, why = self._gpu_cause(entity, node, since, context) if device_class == "gpu" else ("ticket", "")
        text = f"silent for {context.silent_for(since)} while its node reports"
        summary = pager_title(entity, f"{text}: {why}" if why else text)
        signal = (context.last.signals[device_class],)
        clears = f"clears with the next sample of the {_MEANING[device_class]}"
        score = 2.0 if level == "page" else 1.0
        return Silence(f"{entity}|device", entity, since, level, score, summary, "device", clears, signal)

    def _gpu_cause(self, entity: str, node: str, since: int, context: Context) -> tuple[Level, str]:
        """Returns level and cause in words, for a GPU or all of a node."""
        fact = context.facts.last_fatal(entity, context.time)
        if fact is not None:
            return "page", fact[1]
        jobs = context.jobs.verdict(node, since, context.time, context.topology)
        if jobs.state in ("ended", "hangs"):
            return "page", f"{entity_name(jobs.job)} {'ended' if jobs.state == 'ended' else 'hangs'}"
        return "ticket", "no XID reported"

    def _plant_silences(
        self, device_class: str, mine: Mapping[int, str], index: TopologyIndex, context: Context
    ) -> Iterator[Silence]:
        """Units that no node holds: all of them silent is the silence of their reader, reported once."""
        devices = context.last.of_class(device_class)
        left = dict(mine)
        sampled = devices.known(1)
        if len(mine) > 1 and len(mine) == np.count_nonzero(sampled):
            flags = np.zeros(len(devices.names), bool)
            flags[list(mine)] = True
            around = shared_ancestors(flags, flags, sampled, index)
            entity = next((e for e, m in around.items() if len(m) == len(mine)), devices.names[min(mine)])
            since = int(devices.seen[list(mine)].min())
            text = f"all {len(mine)} {_plural(device_class)} silent for {context.silent_for(since)}"
            yield self._unread_plant(f"{device_class}|all", entity, device_class, since, text, context)
            left = {}
        for i, entity in left.items():
            since = int(devices.seen[i])
            text = f"silent for {context.silent_for(since)}"
            yield self._unread_plant(f"{entity}|device", entity, device_class, since, text, context)

    def _unread_plant(
        self, key: str, entity: str, device_class: str, since: int, text: str, context: Context
    ) -> Silence:
        summary = pager_title(entity, f"{text}: its BMC or reader is gone")
        signal = (context.last.signals[device_class],)
        return Silence(key, entity, since, "ticket", 1.0, summary, "reader", "clears with its next sample", signal)


def _plural(device_class: str) -> str:
    return _MEANING[device_class].removesuffix("y") + ("ies" if device_class == "psu" else "s")


def _jobs_ended(nodes: Sequence[str], since: int, context: Context) -> bool:
    """Returns whether most of the nodes had jobs, and all of these ended: an end or two within minutes are usual."""
    ended = 0
    for node in nodes:
        state = context.jobs.verdict(node, since, context.time, context.topology).state
        if state not in ("ended", "none"):
            return False
        ended += state == "ended"
    return ended > len(nodes) / 2


HOLDS = 600 * SECOND
"""us without another loss after which a loss is over: the Desk resolves after the same time; chosen."""
_DROPPED = "its spool was full or could not be written"


@dataclass
class Losses(State):
    """Recent losses of each agent: from gap events, else from the growth of agent.dropped."""

    _lost: dict[str, dict[str, Any]] = notes()  # entity -> since, last, messages, cause
    _dropped: NDArray[np.float64] = memory(np.nan)

    def find_losses(self, frames: Mapping[str, Frame], time: int) -> Iterator[Silence]:
        """Yields the losses that hold now."""
        for event in events_of(frames, "gap"):
            first, following = event.data.get("first"), event.data.get("next")
            lost = following - first if isinstance(first, int) and isinstance(following, int) else None
            count = max(lost, 1) if lost is not None else 1
            self._add(event.entity, event.time, count, str(event.data.get("cause") or "cause unknown"))
        frame = frames.get("agent")
        if frame is not None and "agent.dropped" in frame.values:
            self._follow_counter(frame)
        self._lost = {e: k for e, k in self._lost.items() if time - k["last"] <= HOLDS}
        for entity, known in sorted(self._lost.items()):
            yield self._silence(entity, known)

    def _follow_counter(self, frame: Frame) -> None:
        """Adds the growth of the counter where no event reported the loss; it restarts with the agent."""
        now = frame["agent.dropped"]
        self.grow(len(now))
        before = self._dropped[: len(now)]
        for i in np.flatnonzero(now > before).tolist():
            entity = frame.entities[i]
            if entity not in self._lost or self._lost[entity]["cause"] == _DROPPED:
                self._add(entity, frame.time, int(now[i] - before[i]), _DROPPED)
        known = ~np.isnan(now)
        before[known] = now[known]

    def _add(self, entity: str, time: int, count: int, cause: str) -> None:
        known = self._lost.setdefault(entity, {"since": time, "last": time, "messages": 0, "cause": cause})
        known["last"], known["cause"] = max(time, known["last"]), cause
        known["messages"] += count

    def _silence(self, entity: str, known: Mapping[str, Any]) -> Silence:
        messages, cause, since = known["messages"], known["cause"], known["since"]
        summary = pager_title(entity, f"agent lost {short_number(messages)} messages: {cause}")
        clears = f"clears when {HOLDS // SECOND} s pass without a loss"
        evidence = {"messages": messages, "reason": cause}
        signals, key = ("agent.dropped",), f"{entity}|lost"
        return Silence(key, entity, since, "ticket", float(messages), summary, "loss", clears, signals, evidence)


WATCHED: Mapping[str, str] = {
    "node": "node.load1",
    "gpu": "gpu.power",
    "nic": "nic.state",
    "psu": "psu.output_power",
    "coolant": "coolant.flow",
    "power": "power.voltage",
}
"""A cheap signal of each class that all of its devices have; a device that never had it is not expected to report."""


@dataclass
class Telemetry(Detector):
    """A device that has been silent for `seconds` is a ticket, and a page where its host or its feed is known to be
    dead. A node is a suspect from `node_seconds` on, because an agent that hangs or stops is restarted within a minute.

    The cause is derived if possible. If all nodes of a shared feed, rack or loop fell silent together, that entity is
    the cause, in one finding. A node whose job ended or stopped at the same time, or whose kernel logged a fatal error
    that killed its job, is dead (page), as is one whose ranks were started elsewhere since, or one with a job whose
    links are down at their far ends or whose supplies give little since;
    one whose job still makes steps has a dead agent or no network (ticket). A job stopped if its
    other nodes make no step for two of its usual ones and 20 s; without steps, if nearly all of them draw and send far
    less than usual. A node without a job never pages, and is a suspect for the 15 min that a reboot takes.
    Announced maintenance, reboots that an XID required and ranks whose job ended do not count as silence. Messages that
    an agent lost are a ticket. A gap in all data of a node and its GPUs that was no ticket as a silence is a suspect
    once it is over, since agents are restarted and nodes rebooted, and a ticket if neither happened, if it is too long
    for the start of an agent, or if it comes a third time. Nodes that fall silent one after another, and come back
    while no job stopped, are rolling work: from the third on one ticket of the site, and each node a suspect for twice
    the longest of these silences. What would page still does.

    Source: NVIDIA's catalogue of XIDs for what requires a reboot; PyTorch's NCCL watchdog (10 min) for how long a job
    outlives a lost rank.

    seconds:       as in pipeline.judging.presence: six frames; chosen.
    node_seconds:  for nodes that report in each frame: longer than the start of an agent, and short enough that the
                   alert for a lost node comes within 60 s, with a frame of 10 s before it and what agents hold
                   back (5 s) after it; chosen.
    dead_seconds:  a node with a job, or a group, that fell silent without any report counts as dead after this time,
                   and pages, after ten minutes where no other node of its job would show that it goes on; chosen: no
                   unannounced reboot or new image takes longer.
    """

    name: ClassVar[str] = "telemetry"
    family: ClassVar[str] = "telemetry"
    device_class: ClassVar[str] = "node"
    needs: ClassVar[tuple[str, ...]] = ("node.load1",)
    wants: ClassVar[tuple[str, ...]] = (
        *(signal for signal in WATCHED.values() if signal != "node.load1"),
        *(signal for signal in FEED_SIGNALS if signal not in WATCHED.values()),
        *(
            "nic.tx_bytes",
            "node.uptime",
            "bmc.reachable",
            "rank.step",
            "agent.dropped",
            "agent.cpu_time",
            "event:gap",
            "event:kernel",
            "event:xid",
            "event:sxid",
        ),
        *("event:gpu_lost", "event:messages_rejected"),
        *("event:job_start", "event:job_end", "event:maintenance_start", "event:maintenance_end"),
    )
    cannot_see: ClassVar[str] = (
        "Devices that never reported, a gap of one reading or one that many nodes share, and a fleet that is silent as "
        "a whole: then there are no frames, which /readyz reports. Without jobs and feeds a dead host looks like a "
        "dead agent."
    )

    seconds: float = 60.0
    node_seconds: float = 35.0
    dead_seconds: float = 1800.0

    last: LastSamples = part(lambda: LastSamples(WATCHED), kept=True)
    gates: Gates = part(Gates)
    jobs: SilentJobs = part(SilentJobs, kept=True)
    facts: HostFacts = part(HostFacts)
    feeds: PowerFeeds = part(PowerFeeds, kept=True)
    losses: Losses = part(Losses, kept=True)
    gaps: Gaps = part(Gaps, kept=True)
    rolling: RollingWork = part(RollingWork, kept=True)
    unread: dict[str, int] = notes()  # BMC that does not respond -> newest time (us) that its agent reported that
    nodes: SilentNodes = part(SilentNodes)
    devices: SilentDevices = part(SilentDevices)
    conditions: OpenConditions = notes()

    def drop_ranks(self, kept: NDArray[np.bool_]) -> None:
        """See `Detector.drop_ranks`."""
        self.jobs.keep_cells(kept)

    def budget(self) -> list[str]:
        """See `Detector.budget`."""
        silences = f"silences of {self.node_seconds:g} or {self.seconds:g} s"
        return [rule_line(f"{silences}, gaps and losses, and on events before them")]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """See `Detector.observe`."""
        if (time := self.gates.update(frames)) is None:
            return []
        self.facts.update(frames, time)
        self.feeds.update(frames.get("power"), time)
        frame_s = max(0.0, (time - self.last.time) / SECOND) if self.last.time else 0.0
        self.last.update(frames, time)
        self.jobs.update(frames, time, self.last)
        found = [*self._silences(frames, time, frame_s), *self.losses.find_losses(frames, time)]
        if not found and not self.conditions:
            return []
        close_ended(self.conditions, {silence.key for silence in found})
        due = [(s, due_report(self.conditions, s.key, time, s.since, s.level)) for s in found]
        return [self._finding(silence, time, report) for silence, report in due if report is not None]

    def _silences(self, frames: Mapping[str, Frame], time: int, frame_s: float) -> Iterator[Silence]:
        """Nodes first: what belongs to a silent node is not reported by itself."""
        topology = next(iter(frames.values())).topology
        parts = self.last, self.gates, self.jobs, self.facts, self.feeds
        settings = self.seconds, self.node_seconds, self.dead_seconds
        unread = self._unread(frames, time)
        context = Context(*parts, topology, time, *settings, frame_s, frames.get("nic"), unread)
        nodes = [*self.nodes.find_silences(context)]
        gaps = [*self.gaps.find_gaps(context, frames, self.nodes.returned)]
        yield from self.rolling.fold([*nodes, *gaps], context)
        yield from self.devices.find_silences(context)

    def _unread(self, frames: Mapping[str, Frame], time: int) -> frozenset[str]:
        """Returns what the BMCs that do not respond belong to: `telemetry_blind` reports those."""
        for bmc, reachable in values_by_entity(frames.get("bmc"), "bmc.reachable").items():
            self.unread[bmc] = time if reachable <= 0 else 0
        self.unread = {bmc: at for bmc, at in self.unread.items() if 0 <= time - at <= FORGOTTEN}
        topology = next(iter(frames.values())).topology
        return frozenset(parent for bmc in self.unread for parent in topology.parents.get(bmc, ()))

    def _finding(self, silence: Silence, time: int, due: tuple[int, Level]) -> Finding:
        return self.finding(
            *(time, silence.entity, due),
            score=silence.score,
            summary=silence.summary,
            signals=silence.signals,
            clears=silence.clears,
            silent_s=(time - silence.since) / SECOND,
            cause=silence.cause,
            **silence.evidence,
        )
