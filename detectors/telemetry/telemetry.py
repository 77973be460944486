"""Finds devices that stopped reporting, and why: dead host, dead agent, feed without power, hung GPU firmware.

Also reports messages that agents lost: their samples are missing for good, although nothing was silent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from detectors.base.budget import rule_line
from detectors.base.detector import Detector, notes, part
from detectors.base.findings import OpenConditions, close_ended, due_report, make_evidence
from detectors.base.gates import Gates
from detectors.base.power_feeds import SIGNALS as FEED_SIGNALS
from detectors.base.power_feeds import PowerFeeds
from detectors.telemetry.host_facts import HostFacts
from detectors.telemetry.silence import LastSeen
from detectors.telemetry.silent_devices import SilentDevices
from detectors.telemetry.silent_jobs import SilentJobs
from detectors.telemetry.silent_nodes import Holes, Known, Silence, SilentNodes
from pipeline.model.records import SECOND, Finding, Frame, Level

HOLDS = 600 * SECOND
"""A loss is over when none followed for so long: the Desk's own quiet; chosen."""


class Losses:
    """Per agent what it lost lately: gap events, else growth of agent.dropped."""

    def __init__(self) -> None:
        self._lost: dict[str, dict[str, Any]] = {}
        self._dropped = np.empty(0)

    def look(self, frames: Mapping[str, Frame], time: int) -> Iterator[Silence]:
        """Losses that hold now."""
        for event in (e for f in frames.values() for e in f.events if e.kind == "gap"):
            first, following = event.data.get("first"), event.data.get("next")
            lost = following - first if isinstance(first, int) and isinstance(following, int) else None
            count = max(lost, 1) if lost is not None else 1
            self._add(event.entity, event.time, count, str(event.data.get("cause") or "no cause told"))
        frame = frames.get("agent")
        if frame is not None and "agent.dropped" in frame.values:
            self._count(frame)
        self._lost = {e: k for e, k in self._lost.items() if time - k["last"] <= HOLDS}
        for entity, known in sorted(self._lost.items()):
            yield self._silence(entity, known)

    def _count(self, frame: Frame) -> None:
        """Growth of the counter, where no event told of the loss lately; it begins anew with the agent."""
        now = frame["agent.dropped"]
        if len(now) > len(self._dropped):
            self._dropped = np.append(self._dropped, np.full(len(now) - len(self._dropped), np.nan))
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
        summary = f"The agent of {entity} lost {known['messages']} messages for good: {known['cause']}"
        more = {"messages": known["messages"], "reason": known["cause"]}
        clears = f"over when {HOLDS // SECOND} s pass without a loss"
        signals = ("agent.dropped",)
        key, since = f"{entity}|lost", known["since"]
        return Silence(key, entity, since, "ticket", float(known["messages"]), summary, "loss", clears, signals, more)

    def snapshot(self) -> dict[str, Any]:
        return {"lost": {e: dict(k) for e, k in self._lost.items()}, "dropped": self._dropped.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._lost, self._dropped = dict(state["lost"]), state["dropped"]


_DROPPED = "its spool was full or could not be written"


WATCHED: Mapping[str, str] = {
    "node": "node.load1",
    "gpu": "gpu.power",
    "nic": "nic.state",
    "psu": "psu.output_power",
    "coolant": "coolant.flow",
    "power": "power.voltage",
}
"""One cheap signal per class that each of its devices has; whoever never had it is not expected to speak."""


@dataclass
class Telemetry(Detector):
    """Silence of `seconds`, of a node `node_seconds`, is a ticket, and a page where what else is known says that the
    host or its feed is dead.

    The cause is asked for where it can be told: a shared feed, rack or loop of which all nodes fell silent together is
    blamed once; a node whose job ended with it, hangs since, or whose kernel told a fatal error is dead (page); one
    whose job steps on has a dead agent or no network (ticket). Announced work, reboots that an XID asked for and ranks
    whose job ended are no gaps. Messages that an agent lost are a ticket. A shorter hole in all that a node and its
    GPUs tell is a suspect, since agents are started anew, and a ticket if the agent ran on, if it is too
    long for that, or comes a third time.

    Source: NVIDIA's catalogue of XIDs for what asks for a reboot; PyTorch's NCCL watchdog (10 min) for how long a job
    outlives a lost rank.

    seconds:       as pipeline.judging.presence has it: six frames; chosen.
    node_seconds:  the same of nodes that speak in each frame: more than the start of an agent takes, and so short that
                   the alert for a lost node is there within 60 s, with a frame of 10 s before it and what agents keep
                   back (5 s) after it; chosen.
    dead_seconds:  a node, or a group that fell silent together, of which nothing shows that it lives is taken for dead
                   after so long, and pages; chosen: no reboot or new image that nobody announced takes longer.
    """

    name: ClassVar[str] = "telemetry"
    family: ClassVar[str] = "telemetry"
    device_class: ClassVar[str] = "node"
    needs: ClassVar[tuple[str, ...]] = ("node.load1",)
    wants: ClassVar[tuple[str, ...]] = (
        *(signal for signal in WATCHED.values() if signal != "node.load1"),
        *(signal for signal in FEED_SIGNALS if signal not in WATCHED.values()),
        *(
            "rank.step",
            "agent.dropped",
            "agent.cpu_time",
            "event:gap",
            "event:kernel",
            "event:xid",
            "event:sxid",
            "event:gpu_lost",
            "event:messages_rejected",
        ),
        *("event:job_start", "event:job_end", "event:maintenance_start", "event:maintenance_end"),
    )
    cannot_see: ClassVar[str] = (
        "Whoever never spoke, a hole of one look or one that many share, and a fleet of which nobody "
        "speaks at all: then there are no frames, which the service's own readiness tells. Without jobs and feeds a "
        "dead host is like a dead agent."
    )

    seconds: float = 60.0
    node_seconds: float = 35.0
    dead_seconds: float = 1800.0

    last: LastSeen = part(lambda: LastSeen(WATCHED))
    gates: Gates = part(Gates)
    jobs: SilentJobs = part(SilentJobs)
    facts: HostFacts = part(HostFacts)
    feeds: PowerFeeds = part(PowerFeeds, kept=True)
    losses: Losses = part(Losses)
    holes: Holes = part(Holes)
    nodes: SilentNodes = part(SilentNodes)
    devices: SilentDevices = part(SilentDevices)
    conditions: OpenConditions = notes()

    def budget(self) -> list[str]:
        silences = f"silences of {self.node_seconds:g} or {self.seconds:g} s"
        return [rule_line(f"{silences}, holes and losses, and on what was told before them")]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        if (time := self.gates.update(frames)) is None:
            return []
        self.jobs.hear(frames, time)
        self.facts.hear(frames, time)
        self.feeds.update(frames.get("power"), time)
        frame_s = max(0.0, (time - self.last.time) / SECOND) if self.last.time else 0.0
        self.last.look(frames, time)
        found = [*self._silent(frames, time, frame_s), *self.losses.look(frames, time)]
        if not found and not self.conditions:
            return []
        close_ended(self.conditions, {silence.key for silence in found})
        due = [(s, due_report(self.conditions, s.key, time, s.since, s.level)) for s in found]
        return [self._finding(silence, time, *told) for silence, told in due if told is not None]

    def _silent(self, frames: Mapping[str, Frame], time: int, frame_s: float) -> Iterator[Silence]:
        """Nodes first: what belongs to a silent node needs no word of its own."""
        topology = next(iter(frames.values())).topology
        told = self.last, self.gates, self.jobs, self.facts, self.feeds
        known = Known(*told, topology, time, self.seconds, self.node_seconds, self.dead_seconds, frame_s)
        yield from self.nodes.look(known)
        yield from self.devices.look(known)
        yield from self.holes.look(known, frames.get("agent"))

    def _finding(self, silence: Silence, time: int, onset: int, level: Level) -> Finding:
        more = {"silent_s": (time - silence.since) / SECOND, "cause": silence.cause, **silence.more}
        told = make_evidence(silence.clears, **more)
        return Finding(
            time, onset, silence.entity, self.name, level, silence.score, silence.summary, told, silence.signals
        )
