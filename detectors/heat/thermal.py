"""Finds GPUs that cool worse than they did: thermal resistance against peers, own past, and over weeks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.budget import rule_line
from detectors.base.cohorts import Peers
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.findings import OpenConditions, close_ended
from detectors.base.gates import Gates
from detectors.base.group_events import GroupEvents, Quantity
from detectors.base.state import State
from detectors.base.streams import Bools, Channel, Step, Streams
from detectors.base.topology_index import pop_members_mask
from detectors.heat.drift import SURE, SlowTrends, trend_budget
from detectors.heat.exclusions import COLLAPSE_EVENTS, CohortShift, CoolantCollapses, SensorDoubts, exclude_idle_cohorts
from detectors.heat.resistance import ResistanceSample, SupplyTemperatures, ThermalResistance
from detectors.heat.thermal_blame import (
    BlameRules,
    GpuHeat,
    NodesAndRacks,
    ThermalVerdict,
    find_blamed,
    report_verdicts,
)
from detectors.heat.throttling import (
    READINGS,
    ThrottleStreaks,
    UnitThrottling,
    UnmonitoredUnits,
    find_recurring,
    find_throttling,
    is_throttled_by_heat,
)
from pipeline.model.records import SECOND, Finding, Frame

_TOGETHER = Quantity(("gpu.temperature", "gpu.power"), "cool worse", "cool better")
_RECOVERED = 0.15  # ln R below the level before a pause: five times the noise of a sample; chosen
_USUAL_STEP = 10.0  # s, before the length of a tick is known


@dataclass
class GpuConditions(State):
    """(N,) each. since: when a rise of R began, 0 none.   recovered: R fell back during a pause.

    normal_at: last sample with a normal resistance; 0 never.   wearing: R has risen over weeks.
    """

    since: NDArray[np.int64] = memory(0, np.int64)
    recovered: Bools = memory(False, np.bool_)
    normal_at: NDArray[np.int64] = memory(0, np.int64)
    wearing: Bools = memory(False, np.bool_)


@dataclass
class ThermalPeers(State):
    """The cohort of each GPU. cohort: checksum of its name, to notice a change; 0 unknown.   sizes: by cohort."""

    cohort: NDArray[np.int64] = memory(0, np.int64)
    ladder: Peers = field(
        default_factory=lambda: Peers(
            ("cdu", "@sku"), ("loop", "@sku"), ("rack", "@sku"), ("@sku",), ("cdu",), ("rack",)
        ),
        init=False,
        repr=False,
    )
    sizes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64), init=False, repr=False)
    _groups: NDArray[np.int32] | None = field(default=None, init=False, repr=False)

    def update(self, frame: Frame) -> tuple[NDArray[np.int32], Bools]:
        """Returns (N,) cohort of each GPU, and which GPUs have another one than before."""
        groups = self.ladder.groups(frame)
        changed = np.zeros(len(groups), bool)
        if self._groups is groups:
            return groups, changed
        self.grow(len(groups))
        self._groups, self.sizes = groups, np.bincount(groups[groups >= 0], minlength=1)
        names = [zlib.crc32(self.ladder.cohort_name(frame, i).encode()) + 1 for i in range(len(groups))]
        now, known = np.array(names, np.int64), self.cohort[: len(groups)]
        changed = (known != 0) & (known != now)
        known[:] = now
        return groups, changed


@dataclass
class Thermal(Detector):
    """Peer-conditioned CUSUM on ln((T - T_supply) / P) of each GPU within its loop; Mann-Kendall on its hourly means.

    Suspect once the sum passes its threshold and R is up by `delta`; ticket after `patience` s. Page: the GPU throttles
    by heat, or will within `near` minutes; or after `hold` s with R up by `page_delta` within hours and its memory
    warmer too. Most GPUs of a node, or nodes of a rack, are one finding on the node or rack: their coolant.

    A GPU that reports thermal throttling for two frames is a ticket at any R, unless its whole loop throttles; a page
    after `hold` s at its limit unless R is known to be normal: then it is one ticket until a day without throttling. A
    loop (else CDU, else rack) whose coolant was not read for 10 min is one ticket when GPUs of most of its nodes
    throttle by heat, or 30 % of its working GPUs on three nodes; a page once 30 % of them did for `hold` s. A trend of
    two days (z > 5) with R up by `worn` since the GPU was first seen is a ticket. While the agent of a loop reports
    that its flow or pressure collapsed, no resistance on it is judged: the loop is the cause. A core temperature that
    moves while the memory's does not is a faulty sensor: see telemetry_sensor.

    Source: P/C of a plate, lag 10 to 20 s (resistance.py); delta: three times what 1 K of NVML's rounding is at 40 K
    over the coolant; 87 Cel is where current parts begin to slow down if they report no margin (leptonai/gpud);
    hold: twice the longest benign slowdown of 300 s, chosen; 30 %: from there on a median does not hold (Huber, 1981).
    """

    name: ClassVar[str] = "thermal"
    family: ClassVar[str] = "thermal"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = ("gpu.temperature", "gpu.power")
    wants: ClassVar[tuple[str, ...]] = (
        *("gpu.energy", "gpu.memory_temperature", "gpu.throttle_reasons", "gpu.thermal_margin", "gpu.slowdown_margin"),
        *(
            *READINGS,
            "event:maintenance_start",
            "event:maintenance_end",
            *(f"event:{kind}" for kind in COLLAPSE_EVENTS),
        ),
    )
    cannot_see: ClassVar[str] = (
        "Idle GPUs; what moves all GPUs of a loop together (coolant reports that; where no unit of the loop is "
        "monitored, it is reported once heat throttles many of them, without the cause); wear of less than 6 %; and "
        "whether paste, plate or a clogged channel is to blame."
    )

    delta: float = 0.08
    page_delta: float = 0.12
    """Share; a rise of 15 % stays above it although a temperature is rounded to 1 K; chosen."""
    worn: float = 0.06
    """ln of R since the first half day; hourly means are good to 1 %, other jobs move them by a few; chosen."""
    patience: float = 240.0
    """s after which a suspect is a ticket; with the CUSUM's own time still within 10 min; chosen."""
    hold: float = 600.0
    near: float = 15.0
    """Minutes; the person on call has a quarter of an hour; chosen."""
    slowdown: float = 87.0

    resistance: ThermalResistance = part(ThermalResistance)
    cores: Streams = part(lambda: Streams(Channel(floor=0.012, delta=0.08, phi=0.6)))
    memories: Streams = part(lambda: Streams(Channel(floor=0.5, delta=1.0, phi=0.6)))
    trends: SlowTrends = part(SlowTrends)
    gates: Gates = part(Gates)
    shift: CohortShift = part(CohortShift)
    collapses: CoolantCollapses = part(CoolantCollapses)
    unmonitored: UnmonitoredUnits = part(UnmonitoredUnits)
    doubts: SensorDoubts = part(SensorDoubts)
    group: GroupEvents = part(lambda: GroupEvents(_TOGETHER))
    peers: ThermalPeers = part(ThermalPeers)
    throttling: ThrottleStreaks = part(ThrottleStreaks)
    gpus: GpuConditions = part(GpuConditions)
    accepted: list[str] = notes(list)
    in_maintenance: Bools = memory(False, np.bool_)
    conditions: OpenConditions = notes()
    _units: NodesAndRacks = field(default_factory=NodesAndRacks, init=False, repr=False)
    _supplies: SupplyTemperatures = field(default_factory=SupplyTemperatures, init=False, repr=False)

    def __post_init__(self) -> None:
        self.cores.channel = Channel(floor=0.012, delta=self.delta, phi=0.6)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings on GPUs that are hotter than their power explains, and on their nodes and racks."""
        self.gates.update(frames)
        self.collapses.update(frames)
        self.unmonitored.record_readings(frames)
        frame = frames.get("gpu")
        if frame is None or not len(frame.entities):
            return []
        n = len(frame.entities)
        self.grow(n)
        self.gpus.grow(n)
        self.throttling.grow(n)
        groups = self._find_groups(frame)
        supply = self._supplies.read(frame, frames.get("coolant"))
        sample = self.resistance.measure(frame, supply, self.shift.supply_error(n))
        in_maintenance = self.gates.maintenance_mask(frame)
        gate = self._find_gate(frame, groups, sample, in_maintenance)
        step = self.cores.step(sample.ln_r, groups, frame.time, gate)
        memory_step = self.memories.step(sample.above, groups, frame.time, gate)
        self.doubts.update(memory_step, self.memories.step_s or _USUAL_STEP)
        own = self.cores.cells[0]
        self.shift.update(sample, step, own, groups, frame.time, self.cores.step_s or _USUAL_STEP)
        self._update_wear(sample, step, gate, frame.time)
        throttled = self.throttling.update(frame["gpu.throttle_reasons"], frame.time) & ~in_maintenance
        units = self._judge_units(frame, throttled, in_maintenance)
        throttled &= ~self.throttling.accepted[:n]
        alike = self._group_findings(frame, sample, step)
        recurring = self.conditions and self.throttling.last[:n].any()
        if not (step.on.any() or throttled.any() or self.gpus.wearing[:n].any() or recurring or units.holding):
            self.gpus.since[:n], self.gpus.recovered[:n] = 0, False
            close_ended(self.conditions, set())
            return alike
        heat = self._collect_heat(frame, sample, step, memory_step)
        found = find_blamed(frame, heat, self._rules())
        found |= {e: verdict for e, verdict in units.found.items() if e not in found}
        found |= self._find_throttling(frame, heat, throttled, units, found)
        holding = {*units.holding, *heat.unmeasured(frame)}
        return [*report_verdicts(frame, found, holding, self.conditions, self.name), *alike]

    def _rules(self) -> BlameRules:
        limits = self.delta, self.page_delta, self.patience, self.hold, self.near
        return BlameRules(*limits, self.trends, self.peers.ladder)

    def _find_throttling(
        self,
        frame: Frame,
        heat: GpuHeat,
        throttled: Bools,
        units: UnitThrottling,
        found: Mapping[str, ThermalVerdict],
    ) -> dict[str, ThermalVerdict]:
        """Returns the GPUs that report thermal throttling and are not part of a verdict."""
        n, step, groups, streaks = len(throttled), heat.step, self.peers.ladder.groups(frame), self.throttling
        known = set(found) | {g for verdict in found.values() for g in verdict.evidence.get("gpus", ())}
        last = np.minimum(streaks.last[:n], frame.time)  # the clock may have been set back
        last[last >= units.since] = 0  # the whole loop began to throttle with it
        normal = self._is_normal(step, frame.time)
        streaks.last[:n] = np.where(throttled & normal & ~units.members, frame.time, last)
        verdicts = find_recurring(frame, self.conditions, streaks.last[:n], normal | ~step.judged)
        verdicts |= find_throttling(frame, throttled, streaks.since, heat, groups, self.hold, ~normal, units.members)
        return {e: verdict for e, verdict in verdicts.items() if known.isdisjoint((e, *verdict.evidence["gpus"]))}

    def _judge_units(self, frame: Frame, throttled: Bools, in_maintenance: Bools) -> UnitThrottling:
        """Returns loops and racks without coolant telemetry that throttle as a whole."""
        if not (throttled.any() or self.unmonitored.units):
            return UnitThrottling()
        dry = self.collapses.cooled_by(frame)  # reported by the loop's agent: coolant_edge's
        others = in_maintenance if dry is None else in_maintenance | dry
        powers = self.resistance.powers(len(throttled))
        return self.unmonitored.update(frame, throttled, self.throttling.since, powers, others, self.hold)

    def _group_findings(self, frame: Frame, sample: ResistanceSample, step: Step) -> list[Finding]:
        """Returns what many of a loop have in common, without what a power meter or the supply's sensor explains."""
        if not (self.group.began or step.moved.any()):
            return []
        own = np.abs(step.effect - sample.power_error) >= self.delta / 2
        counted = own & ~self.shift.is_settling(len(sample.ln_r))
        cohort, blamed = (lambda i: self.peers.ladder.cohort_name(frame, i)), self.conditions
        return self.group.update(frame, frame.entities, step, cohort, self.gates, self.name, counted, blamed)

    def budget(self) -> list[str]:
        """Returns the false alarm rates of its tests."""
        return [
            *super().budget(),
            f"wear: {trend_budget(8)}, and by {self.worn:.0%} at least",
            f"throttling: {rule_line('clock event reasons, twice in a row')}",
            f"units without coolant telemetry: {rule_line('clock event reasons of GPUs on three nodes')}",
        ]

    def _is_normal(self, step: Step, time: int) -> Bools:
        """Returns (N,) GPUs judged within `hold` s to have a normal resistance: close to their limit, or on warm
        water."""
        normal_at = self.gpus.normal_at[: len(step.on)]
        well = ~step.moved & (step.effect < self.delta / 2)
        normal_at[:] = np.where(step.judged & well, time, np.minimum(normal_at, time))
        return np.asarray((normal_at > 0) & (time - normal_at <= self.hold * SECOND))

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """Learns a GPU, or all below a node or rack, again from the next frame of GPUs on."""
        self.accepted.append(entity)

    def _find_groups(self, frame: Frame) -> NDArray[np.int32]:
        """Returns (N,) cohorts; of GPUs with another one than before the trends start again."""
        groups, changed = self.peers.update(frame)
        if changed.any():
            self.trends.reset(changed)
            self.gpus.wearing[: len(groups)][changed] = False
            self.shift.reset(changed)
        return groups

    def _find_gate(
        self, frame: Frame, groups: NDArray[np.int32], sample: ResistanceSample, in_maintenance: Bools
    ) -> Bools:
        """Returns (N,) GPUs whose resistance may be judged now; it changes with maintenance: plates, sensors."""
        n = len(frame.entities)
        over = self.in_maintenance[:n] & ~in_maintenance
        self.in_maintenance[:n] = in_maintenance
        changed = sample.fresh | over
        updated = {e.entity for e in frame.events if e.kind == "version"}
        if updated:
            changed = changed | np.fromiter((e in updated for e in frame.entities), bool, n)
        if (accepted := pop_members_mask(self.accepted, frame)) is not None:
            changed = changed | accepted
            self.throttling.accepted[:n] |= accepted & (self.throttling.count[:n] > 0)
            self.unmonitored.accept_gpus(frame, accepted)
        if sample.fresh.any():
            self.shift.reset(sample.fresh)
        if changed.any():
            self._relearn(changed)
        gate = sample.usable & ~in_maintenance & ~self.shift.is_settling(n)
        if (dry := self.collapses.cooled_by(frame)) is not None:
            gate &= ~dry
        exclude_idle_cohorts(gate, groups, self.peers.sizes)
        return np.asarray(gate)

    def _relearn(self, mask: Bools) -> None:
        for streams in (self.cores, self.memories):
            streams.reset(mask[: streams.cells.shape[1]])
        for piece in (self.trends, self.doubts, self.gpus):
            piece.reset(mask)
        self.throttling.last[: len(mask)][mask] = 0

    def _update_wear(self, sample: ResistanceSample, step: Step, gate: Bools, time: int) -> None:
        """Adds what each is above its peers to the hourly means; once an hour, finds the GPUs that wear."""
        others = np.where(step.alone, 0.0, step.median)
        if self.trends.add(np.where(gate, sample.ln_r - others, np.nan), time):
            z, grown = self.trends.test()
            wearing = self.gpus.wearing[: len(z)]
            starts = (z > SURE) & (grown > self.worn)
            wearing[:] = np.where(wearing, grown > self.worn / 2, starts) & np.isfinite(grown)

    def _collect_heat(self, frame: Frame, sample: ResistanceSample, step: Step, memory_step: Step) -> GpuHeat:
        """Returns the state of each GPU at this instant."""
        n = len(frame.entities)
        reasons = frame["gpu.throttle_reasons"]
        margin, at = frame["gpu.thermal_margin"], frame["gpu.slowdown_margin"]
        left = margin - np.where(np.isfinite(at), at, 0.0)
        left = np.where(np.isfinite(left), left, self.slowdown - frame["gpu.temperature"])
        throttled = is_throttled_by_heat(reasons)
        memory_known = np.isfinite(sample.above) & memory_step.judged
        warmer = sample.rise * -np.expm1(-step.effect)  # K that the core is warmer for its resistance
        doubted = self.doubts.find_doubted(memory_known, memory_step, warmer, step, self.hold, frame.time)
        witness, sensor = memory_known & ~doubted, doubted & ~throttled
        real = step.effect - sample.power_error >= self.delta / 2
        now = np.where(step.alone, step.effect, sample.ln_r - step.median - self.cores.cells[0, :n])
        recovered, since = self.gpus.recovered[:n], self.gpus.since[:n]
        over = (now < step.effect / 3) & (step.effect - now > _RECOVERED)
        recovered[:] = (recovered | over) & step.on & ~(now >= np.maximum(step.effect, self.delta))
        on = step.on & ~step.moved & ~sensor & real & ~recovered & ~self.shift.is_settling(n)
        first = on & (since == 0)
        since[first] = frame.time - step.held[first] * SECOND
        since[~on] = 0
        wearing = self.gpus.wearing[:n]
        return GpuHeat(
            sample=sample,
            step=step,
            bad=(on | wearing) & step.judged,
            on=on,
            wearing=wearing,
            throttled=throttled,
            left=left,
            witness=witness,
            since=since,
            units=self._units.find(frame),
        )
