"""Names the cause of low clocks and unequal activity without step times: a GPU or its node, with its finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.findings import Comparison, make_evidence
from detectors.base.streams import Bools, Floats, Step
from detectors.base.throttle import THROTTLE, reason_names, reason_title
from detectors.straggler.gpu_placement import LEAST_PEERS
from detectors.straggler.gpu_readings import GpuWatch
from pipeline.model.entity_names import pager_title
from pipeline.model.records import SECOND, Finding, Frame, Level

Slots = NDArray[np.intp]
Description = tuple[str, Mapping[str, Any], tuple[str, ...]]
"""Title, evidence and signals."""
_PART = 0.5  # share of a node's GPUs with the same symptom from which the node is blamed; chosen
_FRESH = 120 * SECOND  # us since a GPU last worked; chosen: beyond a checkpoint
_PRESSED, _TIMES = 0.10, 3.0
"""Least share of the time in which tasks wait for a processor, and times that of the job's other nodes, that explain
idle SMs. The kernel's own averages are of 10 s; oomd's default acts on several times that share of memory. Chosen."""
_QUEUE = 1.0  # tasks per processor from which they wait, where the kernel has no pressure counters
_SEVERAL = 4  # GPUs under a new power cap: policy, not one broken GPU; chosen: half a node
_RACK = 2  # whole nodes of a rack whose clocks fall together: their power or coolant, not they; chosen


@dataclass(frozen=True, slots=True)
class Symptoms:
    """(N,) GPUs by symptom. fast: low clock under a throttle bit.   slow: low clock.   stuck: far below all peers for
    long.   low, high: SMs less, or more, active than the peers'."""

    fast: Bools
    slow: Bools
    stuck: Bools
    low: Bools
    high: Bools
    clocks: Step
    duty: Step

    @property
    def any_symptom(self) -> Bools:
        """(N,) GPUs with any symptom."""
        return self.fast | self.slow | self.stuck | self.low | self.high

    def any(self) -> bool:
        """Returns whether any GPU has a symptom."""
        return bool(self.any_symptom.any())


@dataclass(frozen=True, slots=True)
class VisibleCause:
    """Why SMs wait. title: in few words; text: in full."""

    title: str
    text: str
    signal: str


@dataclass(frozen=True, slots=True)
class GpuInstant:
    """State of the GPUs at one instant."""

    watch: GpuWatch
    frame: Frame
    nodes: Frame | None
    symptoms: Symptoms

    def working_peers(self, slots: Slots) -> Slots:
        """Returns the working GPUs of the cohort of the first, without these."""
        groups = self.watch.placement.groups
        judged_at = self.watch.symptoms.judged_at[: len(groups)]
        alike = (groups == groups[slots[0]]) & (self.frame.time - judged_at <= _FRESH)
        alike[slots] = False
        return np.flatnonzero(alike)

    def describe_context(self, slots: Slots, worst: int, peers: Slots) -> dict[str, Any]:
        """Returns where it is, and its power beside that of its peers, which falls where they wait."""
        placement, power = self.watch.placement, self.watch.readings.power
        found: dict[str, Any] = {"gpus": [self.frame.entities[i] for i in slots.tolist()]}
        if placement.node[worst] >= 0:
            found["node"] = placement.nodes[placement.node[worst]]
        if placement.job[worst] >= 0:
            found["job"] = placement.jobs[placement.job[worst]]
        watts: Floats = power[peers][np.isfinite(power[peers])]
        if np.isfinite(power[worst]) and len(watts):
            found |= {"power_w": round(float(power[worst])), "power_of_peers_w": round(float(np.median(watts)))}
        found["duty_effect"] = round(float(np.expm1(self.symptoms.duty.effect[worst])), 4)
        return found

    def find_cpu_pressure(self, node: str, slot: int) -> VisibleCause | None:
        """Returns that tasks on a node wait for processors, unlike on others of the job; None if they do not."""
        placement, pressure = self.watch.placement, self.watch.pressure
        of_job = (placement.job == placement.job[slot]) & (placement.node >= 0)
        others = [placement.nodes[k] for k in np.unique(placement.node[of_job]).tolist() if placement.nodes[k] != node]
        share, usual = pressure.share_of(node), pressure.median_share(others)
        if np.isfinite(share):
            if share < _PRESSED or share < _TIMES * usual:
                return None
            text = f"tasks there wait for a processor {100 * share:.0f} % of the time"
            return VisibleCause(f"tasks wait for CPU {100 * share:.0f} %", text, "node.cpu_pressure")
        if self.nodes is None or node not in self.nodes.entities:
            return None
        queue = self.nodes["node.load1"] / np.maximum(self.nodes["node.cpu_count"], 1)
        at = {e: i for i, e in enumerate(self.nodes.entities)}
        known = np.array([queue[at[e]] for e in others if e in at])
        known, mine = known[np.isfinite(known)], float(queue[at[node]])
        if not mine >= _QUEUE or (len(known) and mine < _TIMES * float(np.median(known))):
            return None
        text = f"{mine:.1f} tasks are runnable there for each processor"
        return VisibleCause(f"{mine:.1f} tasks per CPU", text, "node.load1")

    def find_slow_pcie(self, slot: int, peers: Slots) -> VisibleCause | None:
        """Returns that the PCIe link of a GPU is below its peers'; None if it is not."""
        readings = self.watch.readings
        for name, last, unit in (
            ("gpu.pcie_width", readings.width, "{:.0f} lanes"),
            ("gpu.pcie_generation", readings.generation, "generation {:.0f}"),
        ):
            known = last[peers][np.isfinite(last[peers])]
            if len(known) and last[slot] < (usual := float(np.median(known))):
                value = unit.format(float(last[slot]))
                text = f"its PCIe link is at {value}, its peers' at {unit.format(usual)}"
                return VisibleCause(f"PCIe at {value}", text, name)
        return None


def find_units(now: GpuInstant, symptom: Bools, lagging: Bools) -> Iterator[tuple[str, Slots]]:
    """Yields nodes most of whose working GPUs lag, and single GPUs, each with the GPUs that show it."""
    node, n = now.watch.placement.node, len(symptom)
    at_work = now.frame.time - now.watch.symptoms.judged_at[:n] <= _FRESH
    for number in np.unique(node[symptom]).tolist():
        here = node == number
        late = np.flatnonzero(here & (symptom | lagging) & at_work)
        if number >= 0 and len(late) >= max(2.0, _PART * np.count_nonzero(here & at_work)):
            yield now.watch.placement.nodes[number], late
            continue
        for i in np.flatnonzero(symptom & here).tolist():
            yield now.frame.entities[i], np.array([i], np.intp)


@dataclass(frozen=True, slots=True)
class Suspect:
    """One condition. describe: called only when a finding is due."""

    entity: str
    level: Level
    onset: int
    score: float
    describe: Callable[[], Description]

    def finding(self, time: int, due: tuple[int, Level], detector: str) -> Finding:
        """Returns the finding of a condition that is due."""
        onset, level = due
        return Finding(time, onset, self.entity, detector, level, self.score, *self.describe())


@dataclass(frozen=True, slots=True)
class ActivitySuspect:
    """GPUs more or less active than their peers. explained: a cause is visible; long: longer than benign phases."""

    suspect: Suspect
    job: int
    explained: bool
    long: bool


@dataclass(frozen=True, slots=True)
class ClockDeficit:
    """What the clocks of some GPUs show. stuck: the worst is far below its peers, but not below its own past.

    bits: throttle bits of them.   held: s.   policy: a new power cap on several GPUs explains it.
    """

    worst: int
    stuck: bool
    bits: int
    onset: int
    held: int
    policy: bool

    @property
    def title(self) -> str:
        """Its reason in few words."""
        return reason_title(self.bits) or ("power cap" if self.policy else "no throttle bit")

    @property
    def cause(self) -> str:
        """Its reason, for the evidence."""
        if self.bits:
            return reason_names(self.bits)
        return "under a power cap, which is policy" if self.policy else "without a throttle bit"


def find_suspects(now: GpuInstant) -> Iterator[Suspect]:
    """Yields the suspects: first those of clocks; unequal activity is reported only of other nodes."""
    symptoms, watch = now.symptoms, now.watch
    clock = symptoms.fast | symptoms.slow | symptoms.stuck
    blamed = list(find_units(now, clock, clock | (symptoms.clocks.effect >= watch.delta)))
    racks = Counter(_rack(now, entity) for entity, _ in blamed if entity.startswith("node:"))
    for entity, slots in blamed:
        wide = entity.startswith("node:") and racks[_rack(now, entity)] >= _RACK
        yield _clock_suspect(now, entity, slots, wide)
    node = watch.placement.node
    covered = np.isin(node, node[clock]) & (node >= 0)
    sides = (symptoms.low, watch.symptoms.low_since), (symptoms.high, watch.symptoms.high_since)
    found = [
        _activity_suspect(now, entity, slots, symptom is symptoms.low)
        for symptom, since in sides
        for entity, slots in find_units(now, symptom & ~covered, (since[: len(symptom)] > 0) & ~covered)
    ]
    # where a slow part is known, the rest of its job waits for it, each stage in its own way
    explained = {int(watch.placement.job[slots[0]]) for _, slots in blamed} | {s.job for s in found if s.explained}
    yield from (s.suspect for s in found if s.explained or (s.long and s.job not in explained))


def _rack(now: GpuInstant, entity: str) -> str | None:
    return now.frame.topology.ancestor_of_kind(entity, "rack")


def _measure_deficit(now: GpuInstant, slots: Slots) -> ClockDeficit:
    readings, history, time = now.watch.readings, now.watch.symptoms, now.frame.time
    step, n = now.symptoms.clocks, len(now.symptoms.slow)
    worst = int(slots[np.argmax(np.maximum(step.effect[slots], history.below[slots]))])
    stuck = bool(step.effect[worst] < now.watch.delta)
    active_bits = np.where(readings.throttled_since[slots] > 0, readings.bits[slots], 0).astype(np.uint64)
    bits = int(np.bitwise_or.reduce(active_bits)) & THROTTLE
    since = history.stuck_since[slots] if stuck else readings.throttled_since[slots]
    began = min(int(since[since > 0].min(initial=time)), time - int(step.held[slots].max()) * SECOND)
    new_cap = readings.is_newly_capped(n)
    several = bool(np.count_nonzero(new_cap & now.symptoms.slow) >= _SEVERAL)
    policy = not bits and several and bool(new_cap[slots].any())
    return ClockDeficit(worst, stuck, bits, began, int(np.median(step.held[slots])), policy)


def _clock_suspect(now: GpuInstant, entity: str, slots: Slots, wide: bool) -> Suspect:
    symptoms = now.symptoms
    peers, deficit = now.working_peers(slots), _measure_deficit(now, slots)
    long = deficit.held >= now.watch.hold or bool(symptoms.stuck[slots].any())
    enough = long and len(peers) + 1 >= LEAST_PEERS
    sure = (bool(symptoms.fast[slots].any()) or enough) and not deficit.policy and not wide
    score = float(symptoms.clocks.score[slots].max())
    level: Level = "page" if sure else "suspect"
    return Suspect(
        entity, level, deficit.onset, score, lambda: _describe_clock(now, entity, slots, peers, deficit, wide)
    )


def _describe_clock(
    now: GpuInstant, entity: str, slots: Slots, peers: Slots, deficit: ClockDeficit, wide: bool
) -> Description:
    watch, compared = now.watch, _compare_clock(now, deficit, peers)
    subject = f"{len(slots)} GPUs, " if len(slots) > 1 else ""
    clock = f"{subject}SM clock {compared.value:.0f} MHz, peers {compared.expected:.0f}"
    return (
        pager_title(entity, f"{clock}, {'as on other nodes of its rack' if wide else deficit.title}"),
        make_evidence(
            f"its clock is less than {50 * watch.delta:.1f} % below the expected one",
            compared,
            **now.describe_context(slots, deficit.worst, peers),
            throttle_bits=deficit.bits,
            attribution="NODE",
            cause=deficit.cause,
            held_s=deficit.held,
        ),
        ("gpu.sm_clock", *(("gpu.throttle_reasons",) if deficit.bits or deficit.policy else ())),
    )


def _activity_suspect(now: GpuInstant, entity: str, slots: Slots, low: bool) -> ActivitySuspect:
    watch, time, step = now.watch, now.frame.time, now.symptoms.duty
    peers, whole = now.working_peers(slots), entity.startswith("node:")
    worst = int(slots[np.argmax(np.abs(step.effect[slots]))])
    since = (watch.symptoms.low_since if low else watch.symptoms.high_since)[slots]
    since = since[since > 0]
    held = (time - float(np.median(since))) / SECOND if len(since) else 0.0
    cause = (now.find_cpu_pressure(entity, worst) if whole else now.find_slow_pcie(worst, peers)) if low else None
    long = held >= watch.hold
    sure = cause is not None and (long or not whole) and len(peers) + 1 >= LEAST_PEERS
    suspect = Suspect(
        entity,
        "page" if sure else "suspect",
        int(since.min(initial=time)),
        float(step.score[slots].max()),
        lambda: _describe_activity(now, entity, slots, peers, worst, low, cause, held),
    )
    return ActivitySuspect(suspect, int(watch.placement.job[worst]), cause is not None, long)


def _describe_activity(
    now: GpuInstant,
    entity: str,
    slots: Slots,
    peers: Slots,
    worst: int,
    low: bool,
    cause: VisibleCause | None,
    held: float,
) -> Description:
    watch, whole, compared = now.watch, entity.startswith("node:"), _compare_activity(now, worst, peers)
    tensor = bool(watch.readings.tensor[worst])
    cores, subject = "tensor cores" if tensor else "SMs", f"{len(slots)} GPUs, " if whole else ""
    active = f"{subject}{cores} active {100 * compared.value:.0f} %, peers {100 * compared.expected:.0f} %"
    why = cause.title if cause else "cause not visible" if low else "slow or more work"
    return (
        pager_title(entity, f"{active}, {why}"),
        make_evidence(
            f"its activity differs from the expected one by less than {50 * watch.duty_delta:.1f} %",
            compared,
            **now.describe_context(slots, worst, peers),
            cause=cause.text if cause else "not seen",
            attribution="HOST" if low and whole else "NODE",
            held_s=round(held),
        ),
        ("gpu.tensor_active" if tensor else "gpu.sm_active", *((cause.signal,) if cause else ())),
    )


def _compare_clock(now: GpuInstant, deficit: ClockDeficit, peers: Slots) -> Comparison:
    """Returns the clock of the worst beside the expected one.

    Its newest, or the smoothed one if that is lower: a condition about to end is reported as it was.
    """
    watch, step, worst = now.watch, now.symptoms.clocks, deficit.worst
    clock = watch.readings.clock[worst]
    off = float(watch.symptoms.below[worst] if deficit.stuck else step.effect[worst])
    base = 0.0 if deficit.stuck else float(watch.clocks.cells[kernel.BASELINE, worst])
    expected = float(np.exp(-(step.median[worst] + base)))
    expected = expected if np.isfinite(expected) else float(clock * np.exp(off))
    cohort, value = watch.placement.cohort_name(worst), expected * float(np.exp(-off))
    value = float(np.fmin(clock, value))
    spread = _spread(step, worst, expected)
    return Comparison(value, expected, spread, cohort, len(peers), 1 - value / expected, "MHz")


def _compare_activity(now: GpuInstant, worst: int, peers: Slots) -> Comparison:
    """Returns the recent activity of the worst beside the expected one."""
    watch, step = now.watch, now.symptoms.duty
    expected = float(np.exp(step.median[worst] + watch.duty.cells[kernel.BASELINE, worst]))
    fallback = float(watch.readings.active[worst] * np.exp(-step.effect[worst]))
    expected = expected if np.isfinite(expected) else fallback
    value = expected * float(np.exp(step.effect[worst]))
    cohort, spread = watch.placement.cohort_name(worst), _spread(step, worst, expected)
    return Comparison(value, expected, spread, cohort, len(peers), abs(value / expected - 1), "1")


def _spread(step: Step, slot: int, expected: float) -> float | None:
    """Returns the spread of the cohort in the unit of the expected value: streams are in logarithms."""
    spread = expected * float(step.spread[slot])
    return spread if np.isfinite(spread) else None
