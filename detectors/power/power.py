"""Finds lost power: supplies that give nothing, feeds that tripped, and GPUs that the power brake holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from detectors.base.detector import Detector, memory, notes, part
from detectors.base.findings import OpenConditions, close_ended, due_report, make_evidence
from detectors.base.gates import Gates
from detectors.base.power_feeds import SIGNALS as FEED_SIGNALS
from detectors.base.power_feeds import PowerFeeds
from detectors.base.throttle import has_reason, read_reasons
from detectors.base.topology_index import TopologyIndex
from detectors.power import voltages
from detectors.power.supplies import INPUT, OUTPUT, PULLED, STATUS, Lost, Supplies
from detectors.power.supplies import SIGNALS as SUPPLY_SIGNALS
from detectors.power.voltages import MAINS, RAIL, Voltages
from detectors.power.voltages import SIGNALS as VOLTAGE_SIGNALS
from detectors.telemetry.silence import LastSeen, shared_ancestors
from pipeline.model.records import LEVELS, SECOND, Finding, Frame, Level
from pipeline.model.topology import Topology, kind_of

BRAKE = 0x80
"""NVML clock event reason HwPowerBrakeSlowdown: the board was told from outside to slow down, by half by default."""
_LOOKS = 2  # of a bit, or of a dark feed, in a row: one odd reading is none; chosen
_LAPSES = 60 * SECOND  # without a reading after which nobody knows of a GPU's brake any more; chosen: six frames
_MEETS = ("pdu", "circuit", "shelf", "busway", "feed", "rack")  # kinds whose loss stops many; an outlet stops one
_SAID = {
    STATUS: "its BMC calls it failed",
    INPUT: "its input is lost",
    OUTPUT: "it gives nothing while the others carry its share",
    PULLED: "it was taken out",
}


@dataclass
class Power(Detector):
    """A lost supply is a ticket, and a page if the rest cannot carry the load or the power brake slows the GPUs.

    The same supply lost in all nodes of a rack or unit at once is its shelf's or feed's loss, told once. A unit without
    voltage (or a tripped breaker) of which the nodes fell silent pages at once; while they speak it is a ticket: they
    live on another feed, or the meter is wrong. The brake bit without a lost supply is a ticket, after `brake_seconds`
    a page. The power cap bit (0x4) is policy, and swings of whole jobs are work: nothing is said of either.

    A voltage is off when twice in a row it is a tenth from its usual (a 12 V rail 5 %), or told out of range: a
    ticket, of many below one feed, rack or row that one's. It pages where it is off by more than a fifth on many, or
    the brake holds GPUs there. A feed's meter whose supplies see nothing, or a rail among sound ones, is a suspect.

    Source: NVML's clock event reasons; Redfish Status and LineInputStatus. Load sharing lifts each of the rest by
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
        "A supply that fails while nobody reads its BMC, whether supply or cord is to blame where no input is told, "
        "a cold spare that would not start, a sag that is over between two readings, and a voltage that was wrong from "
        "the first reading on."
    )

    brake_seconds: float = 300.0

    braked: Any = memory(0, np.int32)  # frames in a row with the brake bit
    since: Any = memory(0, np.int64)
    heard: Any = memory(0, np.int64)  # the newest reading of a GPU that has the bit
    gates: Gates = part(Gates)
    feeds: PowerFeeds = part(PowerFeeds, kept=True)
    supplies: Supplies = part(Supplies)
    voltages: Voltages = part(Voltages)
    nodes: LastSeen = part(lambda: LastSeen({"node": "node.load1"}), kept=True)
    conditions: OpenConditions = notes()

    def __post_init__(self) -> None:
        self._gpus, self._hosts = TopologyIndex(), TopologyIndex()

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        if not frames:
            return []
        time = max(frame.time for frame in frames.values())
        topology = next(iter(frames.values())).topology
        self.gates.update(frames)
        self.nodes.update(frames, time)
        self.feeds.update(frames.get("power"), time)
        self.supplies.look(frames.get("psu"), time)
        self.voltages.look(frames, time)
        held = self._brakes(frames.get("gpu"), time)
        lost = [each for each in self.supplies.lost(topology, time) if not self._worked_on(each, topology, time)]
        off = list(voltages.findings(self.voltages, held, topology, time, self.name, self._quiet(topology, time)))
        of_lost = list(self._lost(lost, held, time))
        paged = (each for each, finding in zip(lost, of_lost, strict=True) if finding.level == "page")
        excused = {node for each in paged for node in each.chassis} | voltages.below(held, off, topology)
        found = [*of_lost, *self._dark(topology, time), *off]
        found += self._held(excused, held, topology, time)
        if not found and not self.conditions:
            return []
        of_each = _joined(found)
        close_ended(self.conditions, {f.entity for f in of_each})
        due = ((f, due_report(self.conditions, f.entity, time, f.onset, f.level)) for f in of_each)
        return [replace(f, onset=told[0], level=told[1]) for f, told in due if told is not None]

    def _quiet(self, topology: Topology, time: int) -> Callable[[str], bool]:
        return lambda entity: self.gates.in_maintenance(entity, topology, time)

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """The voltage that it has now is the usual one."""
        super().accept_as_normal(entity, frames)
        self.voltages.forget(entity, next((frame.topology for frame in frames.values()), None))

    def budget(self) -> list[str]:
        return [
            "lost supplies, dark feeds, brake: a rule on logged facts, no statistical alarm rate",
            f"voltages: a rule of {MAINS:.0%} ({RAIL:.0%} for 12 V) twice in a row; a meter's 1 % is 10 of its"
            " deviations below that, so noise alone never reaches it",
        ]

    def _worked_on(self, lost: Lost, topology: Topology, time: int) -> bool:
        around = (lost.entity, *lost.chassis, *lost.supplies)
        return any(self.gates.in_maintenance(e, topology, time) for e in around)

    def _brakes(self, frame: Frame | None, time: int) -> dict[str, int]:
        """Node -> since when the brake holds GPUs of it."""
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
        heard = self.heard[: len(reasons)]
        heard[on] = time
        np.minimum(heard, time, out=heard)  # a time that stepped back is no future
        count[(known & ~on) | (time - heard > _LAPSES)] = 0
        self._gpus.update(frame.entities, frame.topology)
        held: dict[str, int] = {}
        for i in np.flatnonzero(count >= _LOOKS).tolist():
            node = frame.topology.ancestor_of_kind(frame.entities[i], "node") or frame.entities[i]
            held[node] = min(int(self.since[i]), held.get(node, time))
        return held

    def _lost(self, lost: list[Lost], held: Mapping[str, int], time: int) -> Iterator[Finding]:
        for each in lost:
            braked = [node for node in each.chassis if node in held]
            level: Level = "page" if braked or each.overload else "ticket"
            if each.why == OUTPUT and self.supplies.explicit(each.supplies[0]):
                level = "suspect"  # it may rest as a cold spare, as its BMC says that it is well
            names = each.supplies[0] if len(each.supplies) == 1 else f"{len(each.supplies)} supplies"
            where = "" if each.entity == names else f" of {each.entity}"
            left = f"{each.others} of the same chassis are left"
            so = (
                f"the power brake slows the GPUs of {len(braked)} node{'s' * (len(braked) > 1)}"
                if braked
                else each.overload or left
            )
            summary = f"{names}{where} lost: {_SAID[each.why]}; {so}"
            told = make_evidence(
                "over when it is told well twice in a row",
                supplies=list(each.supplies[:64]),
                chassis=list(each.chassis[:64]),
                left=each.others,
                braked=braked[:64],
                why=_SAID[each.why],
            )
            signals = ("psu.status", "psu.input_status", "psu.output_power")
            score = float(len(each.supplies))
            yield Finding(time, each.since, each.entity, self.name, level, score, summary, told, signals)

    def _dark(self, topology: Topology, time: int) -> Iterator[Finding]:
        """Feeds without power."""
        for entity, known in sorted(self.feeds.dark.items()):
            if known["looks"] < _LOOKS or self.gates.in_maintenance(entity, topology, time):
                continue
            self._hosts.update(self.nodes.names("node"), topology)
            below = self._hosts.devices_below(entity)
            silent = [i for i in below if self.nodes.of_class("node").missed[i] >= _LOOKS]
            level: Level = "page" if len(silent) > len(below) / 2 and kind_of(entity) in _MEETS else "ticket"
            what = f"{len(silent)} of its {len(below)} nodes are silent" if below else "no node is known to hang on it"
            so = "it has tripped" if level == "page" else "the rest live on another feed, or its meter is wrong"
            summary = f"{entity} has {known['why']}, and {what}: {so}"
            names = self.nodes.names("node")
            told = make_evidence(
                "over when its voltage is back", nodes=[names[i] for i in silent][:64], why=known["why"]
            )
            score = float(max(1, len(silent)))
            signals = ("power.voltage", "power.draw")
            yield Finding(time, known["since"], entity, self.name, level, score, summary, told, signals)

    def _held(self, excused: set[str], held: Mapping[str, int], topology: Topology, time: int) -> Iterator[Finding]:
        """The brake where no supply is lost and no voltage is off; of all nodes of a rack or unit, it is braked."""
        left = {
            n: at for n, at in held.items() if n not in excused and not self.gates.in_maintenance(n, topology, time)
        }
        for entity, nodes in self._places(left, topology).items():
            since = min(left[n] for n in nodes)
            level: Level = "page" if time - since > self.brake_seconds * SECOND else "ticket"
            who = f"GPUs of {entity}" if nodes == [entity] else f"GPUs of {len(nodes)} nodes of {entity}"
            summary = f"The power brake has held {who} for {(time - since) / SECOND:.0f} s; no supply is told lost"
            told = make_evidence("over when no GPU there has the brake bit", nodes=nodes[:64])
            signals = ("gpu.throttle_reasons",)
            score = float(len(nodes))
            yield Finding(time, since, entity, self.name, level, score, summary, told, signals)

    def _places(self, left: Mapping[str, int], topology: Topology) -> dict[str, list[str]]:
        """Who is blamed for the brake -> its nodes."""
        names = list(self.nodes.names("node"))
        if len(left) < 2 or not names:
            return {node: [node] for node in sorted(left)}
        self._hosts.update(names, topology)
        flags = np.isin(names, list(left))
        found = shared_ancestors(flags, flags, np.ones(len(names), bool), self._hosts)
        out: dict[str, list[str]] = {}
        over = set(left)
        for entity in sorted(found, key=lambda e: -len(found[e])):
            mine = [names[i] for i in found[entity] if names[i] in over]
            if len(mine) == len(found[entity]):
                out[entity] = mine
                over -= set(mine)
        return {**out, **{node: [node] for node in sorted(over)}}


def _joined(found: Iterable[Finding]) -> list[Finding]:
    """One finding of each entity, as who hears of it knows conditions by their entities: the loudest leads."""
    of_each: dict[str, list[Finding]] = {}
    for finding in found:
        of_each.setdefault(finding.entity, []).append(finding)
    return [_together(mine) for mine in of_each.values()]


def _together(mine: Sequence[Finding]) -> Finding:
    if len(mine) == 1:
        return mine[0]
    lead = max(mine, key=lambda f: LEVELS.index(f.level))
    others = [f.summary for f in mine if f is not lead]
    return replace(
        lead,
        onset=min(f.onset for f in mine),
        summary="; also: ".join((lead.summary, *others[:3])),
        evidence={**lead.evidence, "also": others[:16]},
        signals=tuple(dict.fromkeys(signal for f in (lead, *mine) for signal in f.signals)),
    )
