"""Finds devices that stopped reporting, and why: dead host, dead agent, feed without power, hung GPU firmware.

Also reports messages that agents lost: their samples are missing for good, although nothing was silent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.budget import rule_line
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.findings import OpenConditions, close_ended, due_report
from detectors.base.gates import Gates
from detectors.base.power_feeds import SIGNALS as FEED_SIGNALS
from detectors.base.power_feeds import PowerFeeds
from detectors.base.state import State
from detectors.telemetry.host_facts import HostFacts
from detectors.telemetry.silence import LastSamples
from detectors.telemetry.silent_devices import SilentDevices
from detectors.telemetry.silent_jobs import SilentJobs
from detectors.telemetry.silent_nodes import Context, Gaps, Silence, SilentNodes
from pipeline.model.entity_names import pager_title, short_number
from pipeline.model.records import SECOND, Finding, Frame, Level

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
        for event in (e for f in frames.values() for e in f.events if e.kind == "gap"):
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
        clears = f"over when {HOLDS // SECOND} s pass without a loss"
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
    """A device that has been silent for `seconds`, a node for `node_seconds`, is a ticket, and a page where its host or
    its feed is known to be dead.

    The cause is derived where it can be. A shared feed, rack or loop whose nodes all fell silent together is blamed
    once. A node whose job ended with it or hangs since, or whose kernel logged a fatal error, is dead (page); one whose
    job still makes steps has a dead agent or no network (ticket). Announced work, reboots that an XID required and
    ranks whose job ended are no silence. Messages that an agent lost are a ticket. A shorter gap in all data of a node
    and its GPUs is a suspect, since agents are restarted, and a ticket if the agent did not restart, if it is too long
    for that, or if it comes a third time.

    Source: NVIDIA's catalogue of XIDs for what requires a reboot; PyTorch's NCCL watchdog (10 min) for how long a job
    outlives a lost rank.

    seconds:       as in pipeline.judging.presence: six frames; chosen.
    node_seconds:  for nodes that report in each frame: longer than the start of an agent, and short enough that the
                   alert for a lost node comes within 60 s, with a frame of 10 s before it and what agents hold
                   back (5 s) after it; chosen.
    dead_seconds:  a node or a group that fell silent together without a sign of life is taken for dead after so long,
                   and pages; chosen: no unannounced reboot or new image takes longer.
    """

    name: ClassVar[str] = "telemetry"
    family: ClassVar[str] = "telemetry"
    device_class: ClassVar[str] = "node"
    needs: ClassVar[tuple[str, ...]] = ("node.load1",)
    wants: ClassVar[tuple[str, ...]] = (
        *(signal for signal in WATCHED.values() if signal != "node.load1"),
        *(signal for signal in FEED_SIGNALS if signal not in WATCHED.values()),
        *("rank.step", "agent.dropped", "agent.cpu_time", "event:gap", "event:kernel", "event:xid", "event:sxid"),
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
    nodes: SilentNodes = part(SilentNodes)
    devices: SilentDevices = part(SilentDevices)
    conditions: OpenConditions = notes()

    def budget(self) -> list[str]:
        """See `Detector.budget`."""
        silences = f"silences of {self.node_seconds:g} or {self.seconds:g} s"
        return [rule_line(f"{silences}, gaps and losses, and on events before them")]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """See `Detector.observe`."""
        if (time := self.gates.update(frames)) is None:
            return []
        self.jobs.update(frames, time)
        self.facts.update(frames, time)
        self.feeds.update(frames.get("power"), time)
        frame_s = max(0.0, (time - self.last.time) / SECOND) if self.last.time else 0.0
        self.last.update(frames, time)
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
        context = Context(*parts, topology, time, self.seconds, self.node_seconds, self.dead_seconds, frame_s)
        yield from self.nodes.find_silences(context)
        yield from self.devices.find_silences(context)
        yield from self.gaps.find_gaps(context, frames.get("agent"))

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
