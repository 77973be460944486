"""What GPUs and hosts show of the cause of slowness: visible causes are named, none is guessed.

A fact of the device (a throttle bit, a low clock that no policy explains) is physical; PCIe links are for link_pcie. A
power cap is policy: the GPU is under a cap of which its peers are not, or a lower one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.calibration import Kinds
from detectors.base.cohorts import Cohorts, SpanningCohorts
from detectors.base.pressure import PRESSED, TIMES, Pressure
from detectors.base.state import State, memory, part
from detectors.base.statistics import count_near, grouped_median, median_of
from detectors.base.streams import Bools, Channel, Floats, Singles, Step, Streams
from detectors.base.throttle import CAPPED, IDLE, THROTTLE, has_reason, read_reasons, reason_names, reason_title
from detectors.straggler.gpu_placement import MOST_OF_COHORT, Placement
from pipeline.model.records import SECOND, Frame

Slots = NDArray[np.intp]
SIGNALS = (
    *("gpu.sm_clock", "gpu.throttle_reasons", "gpu.power", "gpu.power_limit"),
    *("gpu.temperature", "node.cpu_pressure", "node.load1", "node.cpu_count"),
)
CLOCK = Channel(floor=0.01, delta=0.03)
"""3 % of clock: two of the 15 MHz steps in which clocks are reported. Chosen."""
SLOW_CLOCK = 0.8
"""Share of its peers' SM clock below which a GPU is slow whatever it was before: identical ones differ by at most 22 %
(Sinha et al., SC 2022)."""
POLICY = "power_cap"
SETTINGS = CAPPED | 0x2 | 0x10  # NVML: power cap, application clocks, sync boost: set by people. A fact of NVML
_FRESH = 60 * SECOND  # us for which a throttle bit explains slowness: six samples at 10 s; chosen
AGO = 600 * SECOND
"""us within which GPUs change together: plates of a loop heat one by one, people set node after node, and single faults
do not coincide so closely. Chosen."""
_LATELY = 86_400 * SECOND  # us for which what is usual may be that of a cap: loads repeat within a day; chosen
_HEAT_GAIN, _WARMER = 0.01, 5.0
"""Gain of the usual temperature, 17 min at 10 s; and K by which half of a loop's GPUs must be warmer: five steps of
NVML's rounding. Chosen."""
_MISSED = 3  # readings in a row that are missing after which the power is not known; chosen
_SMOOTH = 0.15  # gain, as of the kernel's effect
_SOMETIMES = 0.1  # smoothed share of its time under a power cap from which the cap may lower a clock; chosen
_UNDER_CAP = 0.9  # smoothed share of its time that a GPU spends under a cap that does not come and go; chosen
_BETWEEN = 2.5
"""Times the fall of the clock, a mean over computing and waiting, that a power cap slows a GPU at most: the boards of a
training job are at their limit in less than half of the readings. Chosen."""
NODES = 3  # nodes that change together: two may coincide; chosen
_LESS = 0.97  # share of the peers' power or limit below which a cap is lower: beyond the 1 % of NVML's power; chosen


@dataclass(frozen=True, slots=True)
class Cause:
    """One visible cause. title: in few words; text: in full; physical: a fact of the device, which needs no hold.

    intended: people set it, so that its part of a slowdown is no fault.
    """

    key: str
    title: str
    text: str
    signal: str
    physical: bool
    value: float
    intended: bool = False

    @property
    def is_clock(self) -> bool:
        """Whether it is a low clock, and nothing says why."""
        return self.key.startswith("sm_clock")


@dataclass
class ClockWatch(State):
    """SM clocks against those of the cohort. below: ln by which each is below its cohort now, smoothed."""

    streams: Streams = part(lambda: Streams(CLOCK))
    below: Floats = memory(0.0)

    def step(self, clock: Floats, groups: NDArray[np.int32], time: int, gate: Bools, kinds: Kinds) -> Step:
        """Adds a sample of each: MHz, NaN without one. kinds: products (Detector.kinds)."""
        value = -np.log(np.where(clock > 0, clock, np.nan))
        step = self.streams.step(value, groups, time, gate, kinds)
        self.grow(len(clock))
        apart = np.where(gate & ~step.alone, value - step.median, np.nan)
        below = self.below[: len(clock)]
        below += np.where(np.isfinite(apart), _SMOOTH * (apart - below), 0.0)
        return step


@dataclass
class GpuReadings(State):
    """(N,) newest readings by GPU of the frame. watts: smoothed.   missed: readings in a row without power.
    limit: power limit.   bits, known: event reasons.

    throttled_at, began: when a throttle bit was last set, and since when again and again.   capped: share of the time
    under a power cap, smoothed; capped_at: when it was under one last for all of it.   heat: usual temperature (Cel).
    recapped, recapped_at: its power limit was changed and `pop_recapped` has not returned it; when (us).
    together: GPUs that throttle with others of their loop, rack or fleet.
    """

    clock: Floats = memory(np.nan)
    watts: Floats = memory(np.nan)
    missed: NDArray[np.int8] = memory(0, np.int8)
    limit: Floats = memory(np.nan)
    bits: NDArray[np.uint64] = memory(0, np.uint64)
    known: Bools = memory(False, np.bool_)
    throttled_at: NDArray[np.int64] = memory(0, np.int64)
    began: NDArray[np.int64] = memory(0, np.int64)
    heat: Floats = memory(np.nan)
    capped: Floats = memory(0.0)
    capped_at: NDArray[np.int64] = memory(0, np.int64)
    recapped: Bools = memory(False, np.bool_)
    recapped_at: NDArray[np.int64] = memory(0, np.int64)
    together: Bools = field(default_factory=lambda: np.zeros(0, bool), init=False, repr=False)
    _loops: SpanningCohorts = field(
        default_factory=lambda: SpanningCohorts("loop", "cdu", "rack", least=NODES), init=False, repr=False
    )
    _nodes: Cohorts = field(default_factory=lambda: Cohorts("node"), init=False, repr=False)

    def update(self, gpus: Frame) -> None:
        """Adds a frame of GPUs."""
        n = len(gpus.entities)
        self.grow(n)
        clock = np.where(gpus["gpu.sm_clock"] > 0, gpus["gpu.sm_clock"], np.nan)
        changed = np.abs(np.log(gpus["gpu.power_limit"] / self.limit[:n])) > -np.log(_LESS)
        self.recapped[:n] |= changed
        self.recapped_at[:n][changed] = gpus.time
        for last, now in ((self.clock, clock), (self.limit, gpus["gpu.power_limit"])):
            np.copyto(last[:n], now, where=np.isfinite(now))
        power, watts = gpus["gpu.power"], self.watts[:n]
        smooth = np.where(np.isfinite(watts), watts + _SMOOTH * (power - watts), power)
        np.copyto(watts, smooth, where=np.isfinite(power))
        bits, known = read_reasons(gpus["gpu.throttle_reasons"])
        missed, read = self.missed[:n], known | np.isfinite(clock)
        missed[:] = np.where(np.isfinite(power), 0, np.minimum(missed + read, _MISSED))
        watts[missed >= _MISSED] = np.nan
        self.bits[:n][known], self.known[:n] = bits[known], known
        throttled = has_reason(bits, THROTTLE) & ~has_reason(bits, IDLE)
        self.began[:n][throttled & (gpus.time - self.throttled_at[:n] > AGO)] = gpus.time
        self.throttled_at[:n][throttled] = gpus.time
        capped = self.capped[:n]
        works = known & ~has_reason(bits, IDLE)  # an idle GPU reports no cap
        capped += np.where(works, _SMOOTH * (has_reason(bits, CAPPED) - capped), 0.0)
        capped_at = self.capped_at[:n]
        capped_at[:] = np.where(capped >= _UNDER_CAP, gpus.time, np.minimum(capped_at, gpus.time))
        self.together = self._find_together(gpus)

    def pop_recapped(self, column: NDArray[np.int64], groups: NDArray[np.int32], time: int) -> Bools:
        """Returns (units,) those whose power limit was changed with that of most of their group, each once.

        Identical GPUs leak differently, so that a limit that is set for all costs each another clock: what was usual
        before says nothing. One of a few stands out, which is reported as a power cap. column: (units,) of their GPU.
        """
        waits = np.append(self.recapped, False)[column]
        changed = np.append((self.recapped_at > 0) & (time - self.recapped_at <= AGO), False)[column]
        found = np.zeros(len(waits), bool)
        for group in np.unique(groups[waits]).tolist():
            members = groups == group
            if 2 * np.count_nonzero(changed & members) > np.count_nonzero(members):
                found |= waits & members
        self.recapped[column[found]] = False
        return found

    def _find_together(self, gpus: Frame) -> Bools:
        """Returns (N,) GPUs that began to throttle with some on at least two other nodes of their loop, else rack, or
        while most of it is warmer; in a fleet without either, with most others: coolant or power has failed there."""
        n = len(gpus.entities)
        recent = (self.throttled_at[:n] > gpus.time - AGO) & (self.throttled_at[:n] <= gpus.time)
        found, heat = np.zeros(n, bool), self.heat[:n]
        warmer = gpus["gpu.temperature"] - heat
        heat[:] = np.where(np.isfinite(heat), heat + _HEAT_GAIN * np.nan_to_num(warmer), gpus["gpu.temperature"])
        if not recent.any():
            return found
        loops, nodes = self._loops.groups(gpus), self._nodes.groups(gpus)
        for loop in np.unique(loops[recent]).tolist():
            mine = np.flatnonzero(recent & (loops == loop))
            near = count_near(self.began[mine], nodes[mine], AGO)
            share = len(mine) / np.count_nonzero(loops == loop)
            if loop != self._loops.rest or share > MOST_OF_COHORT:
                found[mine] = (near >= NODES) | (median_of(warmer[loops == loop])[0] >= _WARMER)
        return found

    def unexplained(self, n: int) -> Bools:
        """Returns (n,) GPUs whose clock no reason of NVML explains, nor others that throttle with them."""
        bits = has_reason(self.bits[:n], SETTINGS | THROTTLE) | (self.capped[:n] > _SOMETIMES)
        return self.known[:n] & ~(bits | self.together)

    def discount_caps(self, effect: Floats | Singles, groups: NDArray[np.int32], time: int) -> Floats:
        """Returns (N,) ln by which GPUs draw more than is usual beside their peers, without what a cap took before: one
        with a lower limit than they have, or under a cap within a day, draws as much as they do once all wait. If it is
        slow it draws more."""
        n, limit, watts = len(effect), self.limit[: len(effect)], self.watts[: len(effect)]
        lately = (self.capped_at[:n] > 0) & (time - self.capped_at[:n] <= _LATELY)
        before = lately | (limit < _LESS * grouped_median(limit, groups)[0])
        share = grouped_median(watts, groups)[0] / watts
        above = np.where(share <= _LESS, -np.log(share), 0.0)
        return np.where((effect > 0) & before, np.minimum(effect, above), effect)

    def _cap_differs(self, mine: Slots, peers: Slots) -> bool:
        """Returns whether a power cap slows these GPUs, which are under one, and not their peers or not as much.

        At the same limit a slow GPU is capped while its peers, which wait for it, draw less: it always computes. Where
        limits are not known, it draws as much as peers that are capped too, and less at a lower limit. Where neither is
        known, or where it has no peers, nothing distinguishes them.
        """
        for values in (self.limit, self.watts):
            if values is self.watts and (not len(peers) or np.median(self.capped[peers]) < 0.5):
                return True
            now, usual = (float(median_of(values[each])[0]) for each in (mine, peers))
            if np.isfinite(now) and np.isfinite(usual):
                return now < _LESS * usual
        return True

    def find_causes(
        self, units: Placement, slots: Slots, peers: Slots, column: NDArray[np.int64], clocks: ClockWatch, time: int
    ) -> list[Cause]:
        """Returns what most of some slow GPUs show. slots, peers: units; column: (units,) of their GPU, -1 none."""
        mine, others = column[slots], column[peers]
        slots, mine, others = slots[mine >= 0], mine[mine >= 0], others[others >= 0]
        if not len(mine):
            return []
        throttled = (np.abs(time - self.throttled_at[mine]) <= _FRESH) & (self.throttled_at[mine] > 0)
        found, clock = [], self._clock_causes(slots, mine, others, clocks)
        # 1 if one has just begun, as the newest reading says, or just ended: steps of ten minutes outlive it
        under, ended = has_reason(self.bits[mine], CAPPED), time - self.capped_at[mine] <= AGO
        share = np.maximum(self.capped[mine], (under & self.known[mine]) | (ended & (self.capped_at[mine] > 0)))
        if 2 * np.count_nonzero(throttled) >= len(mine):
            bits = int(np.bitwise_or.reduce(self.bits[mine])) & THROTTLE or THROTTLE
            text = f"throttle bit of its GPU: {reason_names(bits)}"
            found.append(Cause("throttled", reason_title(bits), text, "gpu.throttle_reasons", True, bits))
        elif np.median(share) >= 0.5 and self._cap_differs(mine, others):
            text = "a power cap, which is policy"
            # medians of steps outlive a cap that has ended
            holds = 2 * np.count_nonzero(under & (self.capped[mine] >= _UNDER_CAP)) > len(mine)
            lower = 1 - median_of(self.clock[mine])[0] / median_of(self.clock[others])[0]  # as much as it costs at most
            explains = round(float(np.clip(lower, 0.0, 1.0)), 4) if holds and np.isfinite(lower) else 1.0
            return [Cause(POLICY, "power cap", text, "gpu.throttle_reasons", False, explains)]
        return [*found, *clock]

    def _clock_causes(self, slots: Slots, mine: Slots, others: Slots, clocks: ClockWatch) -> list[Cause]:
        cells = clocks.streams.cells
        slots = slots[slots < cells.shape[1]]
        if not len(slots):
            return []
        effect, score = np.median(cells[[kernel.EFFECT, kernel.UP]][:, slots], axis=1).tolist()
        below, low = float(np.median(clocks.below[slots])), -np.log(SLOW_CLOCK)
        below = below if effect < CLOCK.delta else 0.0  # slower than before is not slow since its start
        limited = has_reason(self.bits[mine], SETTINGS) | (self.capped[mine] >= 0.5)
        physical = bool(2 * np.count_nonzero(self.known[mine] & ~limited) >= len(mine))
        intended = bool(2 * np.count_nonzero(self.known[mine] & limited) > len(mine))
        if below >= low:
            since, key, less = " since start", "sm_clock_below_stage", -float(np.expm1(-below))
        elif effect >= CLOCK.delta and score > CLOCK.threshold / 2:
            now = 1 - median_of(self.clock[mine])[0] / median_of(self.clock[others])[0]
            since, key = "", "sm_clock_below_peers"
            less = float(np.fmax(-np.expm1(-effect), now))  # of half a cohort the median is between both
            if now < CLOCK.delta:  # the smoothed effect outlives its cause for minutes
                return []
            physical &= now >= CLOCK.delta  # False without peers
        else:
            return []
        text = f"SM clock {100 * less:.0f} % below that of its peers{since}"
        title = f"SM clock {100 * less:.0f} % low{since}"
        return [Cause(key, title, text, "gpu.sm_clock", physical, round(less, 4), intended)]


def find_host_cause(node: str, others: Sequence[str], pressure: Pressure) -> list[Cause]:
    """Returns that tasks of a node wait for a processor, unlike on the other nodes of its job."""
    share = float(pressure.shares_of([node])[0])
    if not share >= PRESSED or share < TIMES * pressure.median_share(others):
        return []
    title = f"tasks wait for CPU {100 * share:.0f} %"
    return [Cause("cpu_pressure", title, f"{title} of the time on {node}", pressure.signal, False, round(share, 3))]


def drop_small_cap(causes: Sequence[Cause], cost: float, least: float) -> list[Cause]:
    """Returns the causes without a power cap that leaves `least` of a slowdown unexplained. cost, least: ln.

    A cap slows a GPU by what it lowers its clock while it computes: clocks are also read between, where caps cost none.
    """
    return [c for c in causes if c.key != POLICY or c.value >= 1 or cost + _BETWEEN * np.log1p(-c.value) < least]


def describe_causes(found: Sequence[Cause]) -> str:
    """Returns the causes in full, for the evidence."""
    return "; ".join(cause.text for cause in found) if found else "cause not visible"
