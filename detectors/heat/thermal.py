"""Finds GPUs whose heat leaves them worse than it did: thermal resistance against peers, own past, and over weeks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base import topology_index
from detectors.base.budget import rule_line
from detectors.base.cohorts import Peers
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.findings import OpenConditions, close_ended
from detectors.base.gates import Gates
from detectors.base.group_events import GroupEvents, Quantity
from detectors.base.streams import Bools, Channel, Step, Streams
from detectors.heat import throttling
from detectors.heat.drift import SURE, Drifts, trend_in_words
from detectors.heat.exclusions import KINDS, Collapses, Doubts, LoopShift, attended
from detectors.heat.resistance import Measured, Resistance, Supplies
from detectors.heat.thermal_blame import Blamed, Heat, Units, blamed, told
from detectors.heat.throttling import READINGS, Shared, Unread
from pipeline.model.records import SECOND, Finding, Frame

_TOGETHER = Quantity(
    ("gpu.temperature", "gpu.power"), "lose their heat worse than the others", "lose it better than the others"
)
_OVER = 0.15  # of a logarithm below what was found before a pause: five times the noise of a sample; chosen


@dataclass
class Thermal(Detector):
    """PCC on ln((T - T_supply) / P) of each GPU against the GPUs of its loop; Mann-Kendall on its hourly means.

    Suspect once the sum passes its threshold and R is up by `delta`; ticket after `patience` s. Page: the GPU throttles
    by heat, or will within `near` minutes; or after `hold` s with R up by `page_delta` within hours and its memory
    warmer too. Most GPUs of a node, or nodes of a rack, are one finding on the node or rack: their coolant.

    A GPU that says for two frames that heat slows it down is a ticket whatever its R, unless its whole loop is; a page
    after `hold` s at its limit unless R is known to be as ever: then it is one ticket until a day passed without. A
    loop (else unit, else rack) whose coolant nobody read for 10 min and of which heat slows down GPUs of most nodes, or
    30 % of its GPUs at work on three nodes, is one ticket; a page once 30 % of them were for `hold` s. A
    trend of two days (z > 5) with R up by `worn` since the GPU was first seen is a ticket. While the agent beside a
    loop tells that its flow or pressure collapsed, no resistance on it is judged: that is the loop's. One temperature
    that moves while the memory beside it does not is a sensor: telemetry_sensor's.

    Source: P/C of a plate, lag 10 to 20 s (resistance.py); delta: what 1 K of NVML's rounding lets through at 40 K over
    the coolant, threefold; 87 Cel is where current parts begin to slow down if they tell no margin (leptonai/gpud);
    hold: twice the longest benign slowdown of 300 s, chosen; 30 %: from there on there is no median (crowds.py).
    """

    name: ClassVar[str] = "thermal"
    family: ClassVar[str] = "thermal"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = ("gpu.temperature", "gpu.power")
    wants: ClassVar[tuple[str, ...]] = (
        *("gpu.energy", "gpu.memory_temperature", "gpu.throttle_reasons", "gpu.thermal_margin", "gpu.slowdown_margin"),
        *(*READINGS, "event:maintenance_start", "event:maintenance_end", *(f"event:{kind}" for kind in KINDS)),
    )
    cannot_see: ClassVar[str] = (
        "Idle GPUs, what moves all GPUs of a loop at once (coolant tells that; where no unit of the loop is read, it "
        "is told once heat slows down many of them, and not what is to blame), wear of less than 6 %, and whether "
        "paste, plate or a clogged channel is to blame."
    )

    delta: float = 0.08
    page_delta: float = 0.12
    """Share; a rise of 15 % stays above it although a temperature is rounded to 1 K; chosen."""
    worn: float = 0.06
    """ln of R since the first half day; hourly means are good to 1 %, other jobs move them by some; chosen."""
    patience: float = 240.0
    """s after which a suspect is a ticket; with the CUSUM's own time still within 10 min; chosen."""
    hold: float = 600.0
    near: float = 15.0
    """Minutes: who is called has a quarter of an hour; chosen."""
    slowdown: float = 87.0

    resistance: Resistance = part(Resistance)
    cores: Streams = part(lambda: Streams(Channel(floor=0.012, delta=0.08, phi=0.6)))
    memories: Streams = part(lambda: Streams(Channel(floor=0.5, delta=1.0, phi=0.6)))
    drifts: Drifts = part(Drifts)
    gates: Gates = part(Gates)
    shift: LoopShift = part(LoopShift)
    collapses: Collapses = part(Collapses)
    unread: Unread = part(Unread)
    doubts: Doubts = part(Doubts)
    group: GroupEvents = part(lambda: GroupEvents(_TOGETHER))
    cohort: NDArray[np.int64] = memory(0, np.int64)
    bits: NDArray[np.int64] = memory(0, np.int64)
    bits_since: NDArray[np.int64] = memory(0, np.int64)
    bits_last: NDArray[np.int64] = memory(0, np.int64)
    excused: Bools = memory(False, np.bool_)
    forgiven: list[str] = notes(list)
    worked: Bools = memory(False, np.bool_)
    wearing: Bools = memory(False, np.bool_)
    since: NDArray[np.int64] = memory(0, np.int64)
    mended: Bools = memory(False, np.bool_)
    sheds: NDArray[np.int64] = memory(0, np.int64)
    conditions: OpenConditions = notes()
    _peers: Peers = field(
        default_factory=lambda: Peers(
            ("cdu", "@sku"), ("loop", "@sku"), ("rack", "@sku"), ("@sku",), ("cdu",), ("rack",)
        ),
        init=False,
        repr=False,
    )
    _numbered: Any = field(default=None, init=False, repr=False)
    _members: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64), init=False, repr=False)
    _units: Units = field(default_factory=Units, init=False, repr=False)
    _supplies: Supplies = field(default_factory=Supplies, init=False, repr=False)

    def __post_init__(self) -> None:
        self.cores.channel = Channel(floor=0.012, delta=self.delta, phi=0.6)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        self.gates.update(frames)
        self.collapses.hear(frames)
        self.unread.hear(frames)
        frame = frames.get("gpu")
        if frame is None or not len(frame.entities):
            return []
        self.grow(len(frame.entities))
        groups = self._peers.groups(frame)
        self._renumbered(frame, groups)
        supply = self._supplies.of(frame, frames.get("coolant"))
        seen = self.resistance.take(frame, supply, self.shift.off(len(groups)))
        working = self.gates.maintenance_mask(frame)
        gate = self._gate(frame, seen, working)
        step = self.cores.step(seen.ln_r, groups, frame.time, gate)
        memory_step = self.memories.step(seen.above, groups, frame.time, gate)
        self.doubts.follow(memory_step, self.memories.step_s or 10.0)
        self.shift.follow(seen, step, self.cores.cells[0], groups, frame.time, self.cores.step_s or 10.0)
        self._trend(seen, step, gate, frame.time)
        slowed = self._slowed(frame, working)
        shared = self._shared(frame, slowed, working)
        slowed &= ~self.excused[: len(groups)]
        alike = self._together(frame, seen, step)
        chronic = self.conditions and self.bits_last[: len(groups)].any()
        if not (step.on.any() or slowed.any() or self.wearing[: len(groups)].any() or chronic or shared.holding):
            self.since[: len(groups)], self.mended[: len(groups)] = 0, False
            close_ended(self.conditions, set())
            return alike
        heat = self._heat(frame, seen, step, memory_step)
        found = blamed(frame, heat, self)
        found |= {e: one for e, one in shared.found.items() if e not in found}
        found |= self._by_bits(frame, heat, slowed, shared, found)
        return [*told(frame, found, {*shared.holding, *heat.unheard(frame)}, self.conditions, self.name), *alike]

    def _by_bits(
        self, frame: Frame, heat: Heat, slowed: Bools, shared: Shared, found: Mapping[str, Blamed]
    ) -> dict[str, Blamed]:
        """Who says that heat slows it down, and is not part of what was found."""
        n, step, groups = len(slowed), heat.step, self._peers.groups(frame)
        known = set(found) | {g for one in found.values() for g in one.evidence.get("gpus", ())}
        last = np.minimum(self.bits_last[:n], frame.time)  # the clock may have gone back
        last[last >= shared.since] = 0  # that was how it began for the whole loop
        usual = self._usual(step, frame.time)
        self.bits_last[:n] = np.where(slowed & usual & ~shared.members, frame.time, last)
        said = throttling.chronic(frame, self.conditions, self.bits_last[:n], usual | ~step.judged)
        said |= throttling.blamed(frame, slowed, self.bits_since, heat, groups, self.hold, ~usual, shared.members)
        return {e: one for e, one in said.items() if known.isdisjoint((e, *one.evidence["gpus"]))}

    def _shared(self, frame: Frame, slowed: Bools, working: Bools) -> Shared:
        """Loops and racks that heat slows down as a whole, where nobody reads what cools them."""
        if not (slowed.any() or self.unread.crowds):
            return Shared()
        dry = self.collapses.below(frame)  # the agent beside the loop told it: coolant_edge's
        others = working if dry is None else working | dry
        return self.unread.take(frame, slowed, self.bits_since, self.resistance.powers(len(slowed)), others, self.hold)

    def _together(self, frame: Frame, seen: Measured, step: Step) -> list[Finding]:
        """What many of a loop have in common; not what a meter of power or the sensor of the supply explains."""
        if not (self.group.began or step.moved.any()):
            return []
        counted = (np.abs(step.effect - seen.misread) >= self.delta / 2) & ~self.shift.settling(len(seen.ln_r))
        cohort, blamed = (lambda i: self._peers.cohort_name(frame, i)), self.conditions
        return self.group.update(frame, frame.entities, step, cohort, self.gates, self.name, counted, blamed)

    def budget(self) -> list[str]:
        return [
            *super().budget(),
            f"wear: {trend_in_words(8)}, and by {self.worn:.0%} at least",
            f"slowed down: {rule_line('clock event reasons, twice in a row')}",
            f"loops that nobody reads: {rule_line('clock event reasons of GPUs on three nodes')}",
        ]

    def _usual(self, step: Step, time: int) -> Bools:
        """(N,) who was judged within `hold` s to lose its heat as ever: close to its limit, or on warm water."""
        sheds, well = self.sheds[: len(step.on)], ~step.moved & (step.effect < self.delta / 2)
        sheds[:] = np.where(step.judged & well, time, np.minimum(sheds, time))
        return np.asarray((sheds > 0) & (time - sheds <= self.hold * SECOND))

    def _slowed(self, frame: Frame, working: Bools) -> Bools:
        """Who says that heat slows it down, but for those at work on."""
        n, reasons = len(frame.entities), frame["gpu.throttle_reasons"]
        on = throttling.follow(self.bits[:n], self.bits_since[:n], reasons, frame.time)
        self.excused[:n] &= self.bits[:n] > 0
        return np.asarray(on & ~working)

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """A GPU, or all below a node or rack, is learnt anew from the next frame of GPUs on."""
        self.forgiven.append(entity)

    def _renumbered(self, frame: Frame, groups: NDArray[np.int32]) -> None:
        """What is above peers is no series with what is above others, or above nobody: trends begin anew."""
        if self._numbered is groups:
            return
        self._numbered, self._members = groups, np.bincount(groups[groups >= 0], minlength=1)
        names = [zlib.crc32(self._peers.cohort_name(frame, i).encode()) + 1 for i in range(len(groups))]
        now = np.array(names, np.int64)
        known = self.cohort[: len(now)]
        changed = (known != 0) & (known != now)
        if changed.any():
            self.drifts.reset(changed)
            self.wearing[: len(now)][changed] = False
            self.shift.reset(changed)
        known[:] = now

    def _gate(self, frame: Frame, seen: Measured, working: Bools) -> Bools:
        """Whose resistance may be judged now. After work it is another one: a plate was off, a sensor calibrated."""
        n = len(frame.entities)
        over = self.worked[:n] & ~working
        self.worked[:n] = working
        exchanged = [e for e in frame.events if e.kind == "version"]
        anew = seen.fresh | over
        if exchanged:
            names = {e.entity for e in exchanged}
            anew = anew | np.fromiter((e in names for e in frame.entities), bool, n)
        if (no_fault := topology_index.pop_members_mask(self.forgiven, frame)) is not None:
            anew = anew | no_fault
            self.excused[:n] |= no_fault & (self.bits[:n] > 0)
            self.unread.excuse(frame, no_fault)
        if seen.fresh.any():
            self.shift.reset(seen.fresh)
        if anew.any():
            self._forget(anew)
        gate = seen.usable & ~working & ~self.shift.settling(n)
        if (dry := self.collapses.below(frame)) is not None:
            gate &= ~dry
        attended(gate, self._peers.groups(frame), self._members)
        return np.asarray(gate)

    def _forget(self, mask: Bools) -> None:
        for streams in (self.cores, self.memories):
            streams.reset(mask[: streams.cells.shape[1]])
        self.drifts.reset(mask)
        self.wearing[: len(mask)][mask] = False
        self.doubts.reset(mask)
        for cells in (self.since, self.bits_last, self.sheds, self.mended):
            cells[: len(mask)][mask] = 0

    def _trend(self, seen: Measured, step: Step, gate: Bools, time: int) -> None:
        """Hourly means of what each is above its peers; once an hour, who wears."""
        others = np.where(step.alone, 0.0, step.median)
        if self.drifts.take(np.where(gate, seen.ln_r - others, np.nan), time):
            z, grown = self.drifts.judge()
            mine = self.wearing[: len(z)]
            mine[:] = np.where(mine, grown > self.worn / 2, (z > SURE) & (grown > self.worn)) & np.isfinite(grown)

    def _heat(self, frame: Frame, seen: Measured, step: Step, memory_step: Step) -> Heat:
        """What is known of each GPU at this instant."""
        n = len(frame.entities)
        reasons = frame["gpu.throttle_reasons"]
        margin, at = frame["gpu.thermal_margin"], frame["gpu.slowdown_margin"]
        left = margin - np.where(np.isfinite(at), at, 0.0)
        left = np.where(np.isfinite(left), left, self.slowdown - frame["gpu.temperature"])
        throttled = throttling.told(reasons)
        memory_told = np.isfinite(seen.above) & memory_step.judged
        warmer = seen.rise * -np.expm1(-step.effect)  # K that the core is warmer for its resistance
        doubted = self.doubts.settle(memory_told, memory_step, warmer, step, self.hold, frame.time)
        witness, alone = memory_told & ~doubted, doubted & ~throttled
        honest = step.effect - seen.misread >= self.delta / 2
        now = np.where(step.alone, step.effect, seen.ln_r - step.median - self.cores.cells[0, :n])
        mended, over = self.mended[:n], (now < step.effect / 3) & (step.effect - now > _OVER)
        mended[:] = (mended | over) & step.on & ~(now >= np.maximum(step.effect, self.delta))
        on = step.on & ~step.moved & ~alone & honest & ~mended & ~self.shift.settling(n)
        first = on & (self.since[:n] == 0)
        self.since[:n][first] = frame.time - step.held[first] * SECOND
        self.since[:n][~on] = 0
        return Heat(
            seen=seen,
            step=step,
            bad=(on | self.wearing[:n]) & step.judged,
            on=on,
            wearing=self.wearing[:n],
            throttled=throttled,
            left=left,
            witness=witness,
            since=self.since[:n],
            units=self._units.of(frame),
        )
