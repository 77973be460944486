"""What is said of GPUs that look slow from the outside: level, onset, the sentence and its evidence.

Who is blamed for what clocks and activity show: a GPU or its node, and what else is seen of it from the outside.

What straggler_inferred keeps of GPUs, as those see it that put it into words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.findings import Comparison, make_evidence
from detectors.base.gates import Gates
from detectors.base.streams import Bools, Floats, Step, Streams
from detectors.base.throttle import CAPPED, THROTTLE, has_reason, reason_names
from detectors.straggler.gpu_placement import LEAST_PEERS, GpuPlacement
from detectors.straggler.pressure import Pressure
from pipeline.model.records import SECOND, Finding, Frame, Level


class Watched(Protocol):
    """Settings and arrays by GPU; see StragglerInferred."""

    name: ClassVar[str]
    delta: float
    duty_delta: float
    hold: float
    job_hold: float
    clocks: Streams
    duty: Streams
    placement: GpuPlacement
    gates: Gates
    pressure: Pressure
    raw: Floats
    power: Floats
    clock: Floats
    active: Floats
    width: Floats
    generation: Floats
    capped: Floats
    bits: NDArray[np.uint64]
    bit_since: NDArray[np.int64]
    stuck_since: NDArray[np.int64]
    low_since: NDArray[np.int64]
    high_since: NDArray[np.int64]
    judged: NDArray[np.int64]
    settled: NDArray[np.int64]
    tensor: Bools


_PART = 0.5  # of a node's GPUs that show the same: then the node is blamed, not its GPUs one by one; chosen
_FRESH = 120 * SECOND  # since a GPU was last at work; chosen: beyond a checkpoint
_PRESSED, _TIMES = 0.10, 3.0
"""Least share of the time in which tasks wait for a processor, and times that of the job's other nodes, that explain
idle SMs. The kernel's own averages are of 10 s; oomd's default acts on several times that share of memory. Chosen."""
_QUEUE = 1.0  # tasks for each processor from which they wait, where the kernel keeps no pressure counters


@dataclass(frozen=True, slots=True)
class Symptoms:
    """(N,) which GPUs show what. fast: clock low under a throttle bit; slow: clock low; stuck: far below all peers for
    long; low, high: SMs less, or more, active than the peers lead one to expect."""

    fast: Bools
    slow: Bools
    stuck: Bools
    low: Bools
    high: Bools
    clocks: Step
    duty: Step

    @property
    def any_symptom(self) -> Bools:
        """(N,) which GPUs show anything."""
        return self.fast | self.slow | self.stuck | self.low | self.high

    def any(self) -> bool:
        return bool(self.any_symptom.any())


@dataclass(frozen=True, slots=True)
class Sight:
    """What is known at one instant."""

    of: Watched
    frame: Frame
    nodes: Frame | None
    symptoms: Symptoms

    def working_peers(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """GPUs of the cohort of the first, these left out, that are at work now."""
        groups = self.of.placement.groups
        alike = (groups == groups[slots[0]]) & (self.frame.time - self.of.judged[: len(groups)] <= _FRESH)
        alike[slots] = False
        return np.flatnonzero(alike)

    def describe_context(self, slots: NDArray[np.intp], worst: int, mates: NDArray[np.intp]) -> dict[str, Any]:
        """Where it is and what else is seen: power beside that of the peers, which falls where they wait."""
        of, seats = self.of, self.of.placement
        found: dict[str, Any] = {"gpus": [self.frame.entities[i] for i in slots.tolist()]}
        if seats.node[worst] >= 0:
            found["node"] = seats.nodes[seats.node[worst]]
        if seats.job[worst] >= 0:
            found["job"] = seats.jobs[seats.job[worst]]
        watts: Floats = of.power[mates][np.isfinite(of.power[mates])]
        if np.isfinite(of.power[worst]) and len(watts):
            found |= {"power_w": round(float(of.power[worst])), "power_of_peers_w": round(float(np.median(watts)))}
        found["duty_effect"] = round(float(np.expm1(self.symptoms.duty.effect[worst])), 4)
        return found

    def find_cpu_pressure(self, node: str, slot: int) -> tuple[str, float, str] | None:
        """In words, with its size and signal, that tasks on a node wait for processors beside others of the job."""
        seats = self.of.placement
        numbers = np.unique(seats.node[(seats.job == seats.job[slot]) & (seats.node >= 0)]).tolist()
        others = [seats.nodes[k] for k in numbers if seats.nodes[k] != node]
        share, usual = self.of.pressure.share_of(node), self.of.pressure.median_share(others)
        if np.isfinite(share):
            if share < _PRESSED or share < _TIMES * usual:
                return None
            return f"tasks there wait for a processor {100 * share:.0f} % of the time", share, "node.cpu_pressure"
        if self.nodes is None or node not in self.nodes.entities:
            return None
        queue = self.nodes["node.load1"] / np.maximum(self.nodes["node.cpu_count"], 1)
        at = {e: i for i, e in enumerate(self.nodes.entities)}
        beside = np.array([queue[at[e]] for e in others if e in at])
        beside, mine = beside[np.isfinite(beside)], float(queue[at[node]])
        if not mine >= _QUEUE or (len(beside) and mine < _TIMES * float(np.median(beside))):
            return None
        return f"{mine:.1f} tasks are runnable there for each processor", mine, "node.load1"

    def find_slow_pcie(self, slot: int, mates: NDArray[np.intp]) -> tuple[str, float, str] | None:
        """In words, with its size and signal, that the PCIe link of a GPU is below its peers'."""
        for name, last, unit in (
            ("gpu.pcie_width", self.of.width, "{:.0f} lanes"),
            ("gpu.pcie_generation", self.of.generation, "generation {:.0f}"),
        ):
            known = last[mates][np.isfinite(last[mates])]
            if len(known) and last[slot] < (usual := float(np.median(known))):
                mine = float(last[slot])
                return f"its PCIe link is at {unit.format(mine)}, its peers' at {unit.format(usual)}", mine, name
        return None


def find_units(sight: Sight, sign: Bools, lagging: Bools) -> Iterator[tuple[str, NDArray[np.intp]]]:
    """Nodes most of whose working GPUs lag, and single GPUs, each with the GPUs that show it."""
    node, n = sight.of.placement.node, len(sign)
    at_work = sight.frame.time - sight.of.judged[:n] <= _FRESH
    for number in np.unique(node[sign]).tolist():
        here = node == number
        late = np.flatnonzero(here & (sign | lagging) & at_work)
        if number >= 0 and len(late) >= max(2.0, _PART * np.count_nonzero(here & at_work)):
            yield sight.of.placement.nodes[number], late
            continue
        for i in np.flatnonzero(sign & here).tolist():
            yield sight.frame.entities[i], np.array([i], np.intp)


_SEVERAL = 4  # GPUs under a power cap that they had not: policy, no broken one; chosen: half a node
_OFTEN = 0.5  # share of the time under a power cap from which that is a GPU's usual load; chosen
_RACK = 2  # whole nodes of one rack whose clocks fall at once: their power or coolant, not they; chosen
Slots = NDArray[np.intp]
Description = tuple[str, Mapping[str, Any], tuple[str, ...]]
"""Sentence, evidence and signals."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """One condition: who is blamed and how loudly; what is said is put into words only when it is due."""

    entity: str
    level: Level
    onset: int
    score: float
    describe: Callable[[], Description]

    def finding(self, time: int, due: tuple[int, Level], detector: str) -> Finding:
        onset, level = due
        return Finding(time, onset, self.entity, detector, level, self.score, *self.describe())


@dataclass(frozen=True, slots=True)
class ActivitySuspect:
    """GPUs that are more or less active than their peers. why: what explains it is seen; long: for longer than what is
    benign lasts."""

    suspect: Suspect
    job: int
    why: bool
    long: bool


@dataclass(frozen=True, slots=True)
class ClockDeficit:
    """What the clocks of some GPUs show. stuck: the worst is far below its peers, but not below its own past."""

    worst: int
    stuck: bool
    bits: int
    onset: int
    held: int
    policy: bool

    @property
    def named(self) -> str:
        return reason_names(self.bits)

    @property
    def reason(self) -> str:
        if self.named:
            return f"throttle bit {self.named}"
        return "under a power cap, which is policy" if self.policy else "without a throttle bit"


def find_suspects(sight: Sight) -> Iterator[Suspect]:
    """Who is blamed: first for clocks; SMs that are more or less active are told only of other nodes."""
    signs, seats = sight.symptoms, sight.of.placement
    clock = signs.fast | signs.slow | signs.stuck
    blamed = list(find_units(sight, clock, clock | (signs.clocks.effect >= sight.of.delta)))
    racks = Counter(_rack(sight, entity) for entity, _ in blamed if entity.startswith("node:"))
    for entity, slots in blamed:
        wide = entity.startswith("node:") and racks[_rack(sight, entity)] >= _RACK
        yield _clock_suspect(sight, entity, slots, wide)
    taken = np.isin(seats.node, seats.node[clock]) & (seats.node >= 0)
    found = [
        _activity_suspect(sight, entity, slots, sign is signs.low)
        for sign, since in ((signs.low, sight.of.low_since), (signs.high, sight.of.high_since))
        for entity, slots in find_units(sight, sign & ~taken, (since[: len(sign)] > 0) & ~taken)
    ]
    # where something slow is known, the rest of its job waits for it, each stage in its own way
    explained = {int(seats.job[slots[0]]) for _, slots in blamed} | {duty.job for duty in found if duty.why}
    yield from (duty.suspect for duty in found if duty.why or (duty.long and duty.job not in explained))


def _rack(sight: Sight, entity: str) -> str | None:
    return sight.frame.topology.ancestor_of_kind(entity, "rack")


def _measure_deficit(sight: Sight, slots: Slots) -> ClockDeficit:
    of, signs, time = sight.of, sight.symptoms, sight.frame.time
    step, n = signs.clocks, len(signs.slow)
    worst = int(slots[np.argmax(np.maximum(step.effect[slots], of.raw[slots]))])
    stuck = bool(step.effect[worst] < of.delta)
    bits = int(np.bitwise_or.reduce(np.where(of.bit_since[slots] > 0, of.bits[slots], 0).astype(np.uint64))) & THROTTLE
    since = of.stuck_since[slots] if stuck else of.bit_since[slots]
    began = min(int(since[since > 0].min(initial=time)), time - int(step.held[slots].max()) * SECOND)
    news = has_reason(of.bits[:n], CAPPED) & (of.capped[:n] < _OFTEN)
    policy = not bits and bool(np.count_nonzero(news & signs.slow) >= _SEVERAL) and bool(news[slots].any())
    return ClockDeficit(worst, stuck, bits, began, int(np.median(step.held[slots])), policy)


def _clock_suspect(sight: Sight, entity: str, slots: Slots, wide: bool) -> Suspect:
    of, signs = sight.of, sight.symptoms
    mates, low = sight.working_peers(slots), _measure_deficit(sight, slots)
    enough = (low.held >= of.hold or bool(signs.stuck[slots].any())) and len(mates) + 1 >= LEAST_PEERS
    sure = (bool(signs.fast[slots].any()) or enough) and not low.policy and not wide
    score = float(signs.clocks.score[slots].max())
    level: Level = "page" if sure else "suspect"
    return Suspect(entity, level, low.onset, score, lambda: _describe_clock(sight, entity, slots, mates, low, wide))


def _describe_clock(
    sight: Sight, entity: str, slots: Slots, mates: Slots, low: ClockDeficit, wide: bool
) -> Description:
    of, compared = sight.of, _compare_clock(sight, low, mates)
    waits = ": its job waits for it" if of.placement.job_known[low.worst] else ""
    who = f"{len(slots)} GPUs of {entity} run, the worst at" if len(slots) > 1 else f"{entity} runs at"
    return (
        f"{who} {compared.value:.0f} MHz where {len(mates)} busy GPUs of {compared.cohort} lead one to expect "
        f"{compared.expected:.0f} MHz ({100 * compared.effect:.0f} % less), {low.reason}, for "
        f"{_minutes((sight.frame.time - low.onset) / SECOND)}"
        + ("; other nodes of its rack fell too: their power or coolant" if wide else waits),
        make_evidence(
            f"its clock departs from what its peers lead one to expect by less than {50 * of.delta:.1f} %",
            compared,
            **sight.describe_context(slots, low.worst, mates),
            throttle_bits=low.bits,
            attribution="NODE",
            cause=low.named or low.reason,
            held_s=low.held,
        ),
        ("gpu.sm_clock", *(("gpu.throttle_reasons",) if low.bits or low.policy else ())),
    )


def _activity_suspect(sight: Sight, entity: str, slots: Slots, low: bool) -> ActivitySuspect:
    of, time, step = sight.of, sight.frame.time, sight.symptoms.duty
    mates, whole = sight.working_peers(slots), entity.startswith("node:")
    worst = int(slots[np.argmax(np.abs(step.effect[slots]))])
    since = (of.low_since if low else of.high_since)[slots]
    since = since[since > 0]
    held = (time - float(np.median(since))) / SECOND if len(since) else 0.0
    why = (sight.find_cpu_pressure(entity, worst) if whole else sight.find_slow_pcie(worst, mates)) if low else None
    long = held >= of.hold
    sure = why is not None and (long or not whole) and len(mates) + 1 >= LEAST_PEERS
    suspect = Suspect(
        entity,
        "page" if sure else "suspect",
        int(since.min(initial=time)),
        float(step.score[slots].max()),
        lambda: _describe_activity(sight, entity, slots, mates, worst, low, why, held),
    )
    return ActivitySuspect(suspect, int(of.placement.job[worst]), why is not None, long)


def _describe_activity(
    sight: Sight,
    entity: str,
    slots: Slots,
    mates: Slots,
    worst: int,
    low: bool,
    why: tuple[str, float, str] | None,
    held: float,
) -> Description:
    of, whole, compared = sight.of, entity.startswith("node:"), _compare_activity(sight, worst, mates)
    unseen = "what keeps it waiting is not seen" if low else "it may compute longer while they wait for it"
    part, some = "tensor cores" if of.tensor[worst] else "SMs", f"{len(slots)} GPUs of " if whole else ""
    return (
        f"{part} of {some}{entity} are active {100 * compared.value:.0f} % of the time where {len(mates)} GPUs of "
        f"{compared.cohort} lead one to expect {100 * compared.expected:.0f} %, for {_minutes(held)}: "
        f"{why[0] if why else unseen}",
        make_evidence(
            f"its activity departs from what its peers lead one to expect by less than {50 * of.duty_delta:.1f} %",
            compared,
            **sight.describe_context(slots, worst, mates),
            cause=why[0] if why else "not seen",
            attribution="HOST" if low and whole else "NODE",
            held_s=round(held),
        ),
        ("gpu.tensor_active" if of.tensor[worst] else "gpu.sm_active", *((why[2],) if why else ())),
    )


def _compare_clock(sight: Sight, low: ClockDeficit, mates: Slots) -> Comparison:
    """The clock of the worst beside what its peers lead one to expect: its newest, or the smoothed one if that is
    lower, since a condition that is about to end is told of what it was."""
    of, step, worst = sight.of, sight.symptoms.clocks, low.worst
    off = float(of.raw[worst] if low.stuck else step.effect[worst])
    base = 0.0 if low.stuck else float(of.clocks.cells[kernel.BASELINE, worst])
    expected = float(np.exp(-(step.median[worst] + base)))
    expected = expected if np.isfinite(expected) else float(of.clock[worst] * np.exp(off))
    cohort, value = of.placement.cohort_name(worst), expected * float(np.exp(-off))
    value = float(np.fmin(of.clock[worst], value))
    spread = _spread(step, worst, expected)
    return Comparison(value, expected, spread, cohort, len(mates), 1 - value / expected, "MHz")


def _compare_activity(sight: Sight, worst: int, mates: Slots) -> Comparison:
    """How active the worst was of late beside what its peers lead one to expect."""
    of, step = sight.of, sight.symptoms.duty
    expected = float(np.exp(step.median[worst] + of.duty.cells[kernel.BASELINE, worst]))
    expected = expected if np.isfinite(expected) else float(of.active[worst] * np.exp(-step.effect[worst]))
    value = expected * float(np.exp(step.effect[worst]))
    cohort, spread = of.placement.cohort_name(worst), _spread(step, worst, expected)
    return Comparison(value, expected, spread, cohort, len(mates), abs(value / expected - 1), "1")


def _spread(step: Step, slot: int, expected: float) -> float | None:
    """Of the cohort, in the unit of what is expected: streams reckon in logarithms."""
    spread = expected * float(step.spread[slot])
    return spread if np.isfinite(spread) else None


def _minutes(seconds: float) -> str:
    return "less than a minute" if seconds < 60 else f"{seconds / 60:.0f} min"
