"""Finds lost power: supplies without output, feeds that tripped, voltages that are off, GPUs under the power brake."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.detector import Detector, memory, notes, part
from detectors.base.findings import OpenConditions, close_ended, due_report
from detectors.base.gates import Gates
from detectors.base.power_feeds import SIGNALS as FEED_SIGNALS
from detectors.base.power_feeds import PowerFeeds
from detectors.base.throttle import has_reason, read_reasons
from detectors.base.topology_index import TopologyIndex
from detectors.power.supplies import INPUT, OUTPUT, REMOVED, STATUS, Lost, Supplies
from detectors.power.supplies import SIGNALS as SUPPLY_SIGNALS
from detectors.power.voltages import MAINS, RAIL, Voltages, find_explained_brakes, find_voltage_findings
from detectors.power.voltages import SIGNALS as VOLTAGE_SIGNALS
from detectors.telemetry.silence import READINGS, LastSamples, shared_ancestors
from pipeline.model.entity_names import TITLE_LENGTH, pager_title, short_duration
from pipeline.model.records import LEVELS, SECOND, Finding, Frame, Level
from pipeline.model.topology import Topology, kind_of

BRAKE = 0x80
"""NVML clock event reason HwPowerBrakeSlowdown: an external signal slows the board down, by half by default."""
_LOOKS = 2  # readings in a row of a bit, or of a dark feed: one may be wrong; chosen
_LAPSES = 60 * SECOND
"""us without a reading after which the brake of a GPU is not known any more, at least READINGS of its node; chosen."""
_SHARED = (
    "pdu",
    "circuit",
    "shelf",
    "busway",
    "feed",
    "rack",
)  # kinds whose loss stops many nodes; an outlet stops one
_WHY = {
    STATUS: "failed",
    INPUT: "input lost",
    OUTPUT: "no output while the others carry its share",
    REMOVED: "removed",
}


@dataclass
class Power(Detector):
    """A lost supply is a ticket, and a page if the rest cannot carry the load or the power brake slows the GPUs.

    The same supply lost in all nodes of a rack or unit at the same time is a loss of its shelf or feed, reported once.
    A unit without voltage (or with a tripped breaker) pages in the same frame if most of its nodes fell silent or have
    supplies that lost their input, one finding with these; else it is a ticket: the meter may be wrong. A node is
    silent by its own usual interval, and a chassis without load whose host is dead is left to `telemetry`. The brake
    bit without a lost supply is a ticket, after `brake_seconds` a page. The power cap bit (0x4) is policy, and load
    swings of whole jobs are work: neither is reported.

    A voltage is off when it differs from its usual by a tenth twice in a row (a 12 V rail by 5 %), or is reported out
    of range: a ticket; many below one feed, rack or row are one of that entity. It pages where it is off by more than a
    fifth on many, or the brake holds GPUs there. A feed's meter whose supplies do not show it, or one rail among good
    ones, is a suspect.

    Source: NVML's clock event reasons; Redfish Status and LineInputStatus. Load sharing raises each of the rest by
    1/(n-1). Voltages: ITI (CBEMA) curve of 2000; EPS12V. brake_seconds: chosen; a site that sheds load for minutes on
    purpose has paid for that.
    """

    name: ClassVar[str] = "power"
    family: ClassVar[str] = "power"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = ("gpu.throttle_reasons",)
    wants: ClassVar[tuple[str, ...]] = (
        *SUPPLY_SIGNALS,
        *FEED_SIGNALS,
        *VOLTAGE_SIGNALS,
        *("node.load1", "event:maintenance_start", "event:maintenance_end"),
    )
    cannot_see: ClassVar[str] = (
        "A supply that fails while its BMC is not read; whether supply or cord is the cause where the input is not "
        "reported; a cold spare that would not start; a sag between two readings; and a voltage that was wrong from "
        "the first reading on."
    )

    brake_seconds: float = 300.0

    braked: NDArray[np.int32] = memory(0, np.int32)  # frames in a row with the brake bit
    since: NDArray[np.int64] = memory(0, np.int64)
    read_at: NDArray[np.int64] = memory(0, np.int64)  # newest reading of a GPU with the bit
    gates: Gates = part(Gates)
    feeds: PowerFeeds = part(PowerFeeds, kept=True)
    supplies: Supplies = part(Supplies, of="psu", kept=True)
    voltages: Voltages = part(Voltages, kept=True)
    nodes: LastSamples = part(lambda: LastSamples({"node": "node.load1"}), kept=True)
    conditions: OpenConditions = notes()
    _node_index: TopologyIndex = field(default_factory=TopologyIndex, init=False, repr=False)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings on lost supplies, dark feeds, brakes and voltages."""
        if not frames:
            return []
        time = max(frame.time for frame in frames.values())
        topology = next(iter(frames.values())).topology
        in_maintenance = self._maintenance(topology, time)
        self.gates.update(frames)
        self.nodes.update(frames, time)
        self.feeds.update(frames.get("power"), time)
        self.supplies.update(frames.get("psu"), time)
        self.voltages.update(frames, time)
        braked = self._find_braked(frames.get("gpu"), time)
        lost = [
            each
            for each in self.supplies.find_lost(topology)
            if not any(in_maintenance(e) for e in (each.entity, *each.chassis, *each.supplies))
        ]
        off = list(find_voltage_findings(self.voltages, braked, topology, time, self.name, in_maintenance))
        losses = list(self._report_lost(lost, braked, time))
        paged = (each for each, finding in zip(lost, losses, strict=True) if finding.level == "page")
        explained = {node for each in paged for node in each.chassis} | find_explained_brakes(braked, off, topology)
        starved = {node for each in lost if each.why == INPUT for node in each.chassis}
        dark = list(self._report_dark(starved, topology, time))
        tripped = {finding.entity for finding in dark if finding.level == "page"}
        fed = {node for node in starved if not tripped.isdisjoint(topology.ancestors(node))}
        losses = [
            f for each, f in zip(lost, losses, strict=True) if each.why != INPUT or not fed.issuperset(each.chassis)
        ]
        found = [*losses, *dark, *off]
        found += self._report_brake(explained, braked, topology, time)
        if not found and not self.conditions:
            return []
        merged = _merge_by_entity(found)
        close_ended(self.conditions, {f.entity for f in merged})
        due = ((f, due_report(self.conditions, f.entity, time, f.onset, f.level)) for f in merged)
        return [replace(f, onset=report[0], level=report[1]) for f, report in due if report is not None]

    def _maintenance(self, topology: Topology, time: int) -> Callable[[str], bool]:
        return lambda entity: self.gates.in_maintenance(entity, topology, time)

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """Makes the present voltage of an entity its usual one; see `Detector.accept_as_normal`."""
        super().accept_as_normal(entity, frames)
        self.voltages.relearn(entity, next((frame.topology for frame in frames.values()), None))

    def budget(self) -> list[str]:
        """Returns the false alarm rates of its rules."""
        return [
            "lost supplies, dark feeds, brake: a rule on logged facts, no statistical alarm rate",
            f"voltages: a rule of {MAINS:.0%} ({RAIL:.0%} for 12 V) twice in a row; a meter's 1 % is 10 of its"
            " deviations below that, so noise alone never reaches it",
        ]

    def _find_braked(self, frame: Frame | None, time: int) -> dict[str, int]:
        """Returns node -> since when the brake holds GPUs of it."""
        if frame is None or "gpu.throttle_reasons" not in frame.values:
            return {}
        reasons = frame["gpu.throttle_reasons"]
        self.grow(len(reasons))
        count, (bits, known) = self.braked[: len(reasons)], read_reasons(reasons)
        on = has_reason(bits, BRAKE)
        if not on.any() and not count.any():
            return {}
        self.since[: len(reasons)][on & (count == 0)] = time
        count[on] += 1
        read_at = self.read_at[: len(reasons)]
        read_at[on] = time
        np.minimum(read_at, time, out=read_at)  # the clock may have been set back
        lapses = max(_LAPSES, READINGS * self.nodes.interval())
        count[(known & ~on) | (time - read_at > lapses)] = 0
        braked: dict[str, int] = {}
        for i in np.flatnonzero(count >= _LOOKS).tolist():
            node = frame.topology.ancestor_of_kind(frame.entities[i], "node") or frame.entities[i]
            braked[node] = min(int(self.since[i]), braked.get(node, time))
        return braked

    def _report_lost(self, lost: list[Lost], braked: Mapping[str, int], time: int) -> Iterator[Finding]:
        for each in lost:
            nodes = [node for node in each.chassis if node in braked]
            level: Level = "page" if nodes or each.overload else "ticket"
            if each.why == OUTPUT and self.supplies.reports_ok(each.supplies[0]):
                level = "suspect"  # it may be a cold spare, as its BMC reports it as well
            count = len(each.supplies)
            what = "" if each.entity == each.supplies[0] else f"{count} power suppl{'y' if count == 1 else 'ies'} "
            brake = f"power brake on {len(nodes)} node{'s' * (len(nodes) > 1)}" if nodes else ""
            effect = brake or each.overload or f"{each.others} left in its chassis"
            yield self.finding(
                time,
                each.entity,
                (each.since, level),
                score=float(count),
                summary=pager_title(each.entity, f"{what}{_WHY[each.why].partition(' while')[0]}, {effect}"),
                signals=("psu.status", "psu.input_status", "psu.output_power"),
                clears="clears when it is reported OK twice in a row",
                supplies=list(each.supplies[:64]),
                chassis=list(each.chassis[:64]),
                left=each.others,
                braked=nodes[:64],
                why=_WHY[each.why],
            )

    def _report_dark(self, starved: Collection[str], topology: Topology, time: int) -> Iterator[Finding]:
        """Yields a finding for each feed without power. starved: nodes of which a supply has lost its input."""
        names, seen = self.nodes.names("node"), self.nodes.of_class("node").seen
        lost = self.nodes.known("node") & ~self.nodes.reporting("node")
        for entity, known in sorted(self.feeds.dark.items()):
            if known["looks"] < _LOOKS or self.gates.in_maintenance(entity, topology, time):
                continue
            host = topology.ancestor_of_kind(entity, "node")
            if host in names and seen[names.index(host)] <= known["since"]:
                continue  # the chassis of a host that is dead: the host's own finding says so
            self._node_index.update(names, topology)
            below = self._node_index.devices_below(entity)
            silent = [i for i in below if lost[i]]
            left = [i for i in below if names[i] in starved and not lost[i]]
            hit = sorted(silent + left)
            level: Level = "page" if len(hit) > len(below) / 2 and kind_of(entity) in _SHARED else "ticket"
            effect = f"{len(silent)} of {len(below)} nodes silent" if below else "no node below it is known"
            effect = f"{len(left)} of {len(below)} nodes on their other feed" if len(left) > len(silent) else effect
            effect = "its node reports" if host in names else effect
            why = known["why"].removeprefix("a ").partition(" (")[0]
            yield self.finding(
                time,
                entity,
                (known["since"], level),
                score=float(max(1, len(hit))),
                summary=pager_title(entity, f"{why}, {effect}"),
                signals=("power.voltage", "power.draw"),
                clears="clears when its voltage is back",
                nodes=[names[i] for i in hit][:64],
                why=known["why"],
            )

    def _report_brake(
        self, explained: set[str], braked: Mapping[str, int], topology: Topology, time: int
    ) -> Iterator[Finding]:
        """Yields brakes without a lost supply or a voltage that is off; of all nodes of a rack or unit, one of that."""
        left = {
            n: at for n, at in braked.items() if n not in explained and not self.gates.in_maintenance(n, topology, time)
        }
        for entity, nodes in self._group_nodes(left, topology).items():
            since = min(left[n] for n in nodes)
            level: Level = "page" if time - since > self.brake_seconds * SECOND else "ticket"
            subject = "GPUs" if nodes == [entity] else f"GPUs of {len(nodes)} nodes"
            yield self.finding(
                time,
                entity,
                (since, level),
                score=float(len(nodes)),
                summary=pager_title(
                    entity, f"{subject} under power brake for {short_duration((time - since) / SECOND)}"
                ),
                signals=("gpu.throttle_reasons",),
                clears="clears when no GPU there has the brake bit",
                nodes=nodes[:64],
            )

    def _group_nodes(self, left: Mapping[str, int], topology: Topology) -> dict[str, list[str]]:
        """Returns the entity that caused the brake -> its nodes."""
        names = list(self.nodes.names("node"))
        if len(left) < 2 or not names:
            return {node: [node] for node in sorted(left)}
        self._node_index.update(names, topology)
        flags = np.isin(names, list(left))
        found = shared_ancestors(flags, flags, np.ones(len(names), bool), self._node_index)
        groups: dict[str, list[str]] = {}
        rest = set(left)
        for entity in sorted(found, key=lambda e: -len(found[e])):
            members = [names[i] for i in found[entity] if names[i] in rest]
            if len(members) == len(found[entity]):
                groups[entity] = members
                rest -= set(members)
        return {**groups, **{node: [node] for node in sorted(rest)}}


def _merge_by_entity(found: Iterable[Finding]) -> list[Finding]:
    """Returns one finding for each entity, as conditions are known by their entity; the highest level leads."""
    by_entity: dict[str, list[Finding]] = {}
    for finding in found:
        by_entity.setdefault(finding.entity, []).append(finding)
    return [_merge(same) for same in by_entity.values()]


def _merge(same: Sequence[Finding]) -> Finding:
    if len(same) == 1:
        return same[0]
    lead = max(same, key=lambda f: LEVELS.index(f.level))
    others = [f.summary for f in same if f is not lead]
    title = f"{lead.summary} (+{len(others)} more)"
    return replace(
        lead,
        onset=min(f.onset for f in same),
        summary=title if len(title) <= TITLE_LENGTH else lead.summary,
        evidence={**lead.evidence, "also": others[:16]},
        signals=tuple(dict.fromkeys(signal for f in (lead, *same) for signal in f.signals)),
    )
