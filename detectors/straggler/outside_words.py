"""What is said of GPUs that look slow from the outside: level, onset, the sentence and its evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.findings import Compared, evidence
from detectors.base.streams import Step
from detectors.base.throttle import CAPPED, THROTTLE, has, named
from detectors.straggler.outside import Sight, units
from detectors.straggler.seats import PEERS
from pipeline.records import SECOND, Finding, Level

_SEVERAL = 4  # GPUs under a power cap that they had not: policy, no broken one; chosen: half a node
_OFTEN = 0.5  # share of the time under a power cap from which that is a GPU's usual load; chosen
_RACK = 2  # whole nodes of one rack whose clocks fall at once: their power or coolant, not they; chosen
Slots = NDArray[np.intp]
Told = tuple[str, Mapping[str, Any], tuple[str, ...]]
"""Sentence, evidence and signals."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """One condition: who is blamed and how loudly; what is said is put into words only when it is due."""

    entity: str
    level: Level
    onset: int
    score: float
    words: Callable[[], Told]

    def finding(self, time: int, due: tuple[int, Level], detector: str) -> Finding:
        onset, level = due
        return Finding(time, onset, self.entity, detector, level, self.score, *self.words())


@dataclass(frozen=True, slots=True)
class Duty:
    """GPUs that are more or less active than their peers. why: what explains it is seen; long: for longer than what is
    benign lasts."""

    suspect: Suspect
    job: int
    why: bool
    long: bool


@dataclass(frozen=True, slots=True)
class Low:
    """What the clocks of some GPUs show. stuck: the worst is far below its peers, but not below its own past."""

    worst: int
    stuck: bool
    bits: int
    onset: int
    held: int
    policy: bool

    @property
    def named(self) -> str:
        return named(self.bits)

    @property
    def reason(self) -> str:
        if self.named:
            return f"throttle bit {self.named}"
        return "under a power cap, which is policy" if self.policy else "without a throttle bit"


def suspects(sight: Sight) -> Iterator[Suspect]:
    """Who is blamed: first for clocks; SMs that are more or less active are told only of other nodes."""
    signs, seats = sight.signs, sight.of.seats
    clock = signs.fast | signs.slow | signs.stuck
    blamed = list(units(sight, clock, clock | (signs.clocks.effect >= sight.of.delta)))
    racks = Counter(_rack(sight, entity) for entity, _ in blamed if entity.startswith("node:"))
    for entity, slots in blamed:
        wide = entity.startswith("node:") and racks[_rack(sight, entity)] >= _RACK
        yield _of_clock(sight, entity, slots, wide)
    taken = np.isin(seats.node, seats.node[clock]) & (seats.node >= 0)
    found = [
        _of_duty(sight, entity, slots, sign is signs.low)
        for sign, since in ((signs.low, sight.of.low_since), (signs.high, sight.of.high_since))
        for entity, slots in units(sight, sign & ~taken, (since[: len(sign)] > 0) & ~taken)
    ]
    # where something slow is known, the rest of its job waits for it, each stage in its own way
    explained = {int(seats.job[slots[0]]) for _, slots in blamed} | {duty.job for duty in found if duty.why}
    yield from (duty.suspect for duty in found if duty.why or (duty.long and duty.job not in explained))


def _rack(sight: Sight, entity: str) -> str | None:
    return sight.frame.topology.above_of_kind(entity, "rack")


def _low(sight: Sight, slots: Slots) -> Low:
    of, signs, time = sight.of, sight.signs, sight.frame.time
    step, n = signs.clocks, len(signs.slow)
    worst = int(slots[np.argmax(np.maximum(step.effect[slots], of.raw[slots]))])
    stuck = bool(step.effect[worst] < of.delta)
    bits = int(np.bitwise_or.reduce(np.where(of.bit_since[slots] > 0, of.bits[slots], 0).astype(np.uint64))) & THROTTLE
    since = of.stuck_since[slots] if stuck else of.bit_since[slots]
    began = min(int(since[since > 0].min(initial=time)), time - int(step.held[slots].max()) * SECOND)
    news = has(of.bits[:n], CAPPED) & (of.capped[:n] < _OFTEN)
    policy = not bits and bool(np.count_nonzero(news & signs.slow) >= _SEVERAL) and bool(news[slots].any())
    return Low(worst, stuck, bits, began, int(np.median(step.held[slots])), policy)


def _of_clock(sight: Sight, entity: str, slots: Slots, wide: bool) -> Suspect:
    of, signs = sight.of, sight.signs
    mates, low = sight.mates(slots), _low(sight, slots)
    enough = (low.held >= of.hold or bool(signs.stuck[slots].any())) and len(mates) + 1 >= PEERS
    sure = (bool(signs.fast[slots].any()) or enough) and not low.policy and not wide
    score = float(signs.clocks.score[slots].max())
    level: Level = "page" if sure else "suspect"
    return Suspect(entity, level, low.onset, score, lambda: _clock_words(sight, entity, slots, mates, low, wide))


def _clock_words(sight: Sight, entity: str, slots: Slots, mates: Slots, low: Low, wide: bool) -> Told:
    of, compared = sight.of, _clocked(sight, low, mates)
    waits = ": its job waits for it" if of.seats.placed[low.worst] else ""
    who = f"{len(slots)} GPUs of {entity} run, the worst at" if len(slots) > 1 else f"{entity} runs at"
    return (
        f"{who} {compared.value:.0f} MHz where {len(mates)} busy GPUs of {compared.cohort} lead one to expect "
        f"{compared.expected:.0f} MHz ({100 * compared.effect:.0f} % less), {low.reason}, for "
        f"{_minutes((sight.frame.time - low.onset) / SECOND)}"
        + ("; other nodes of its rack fell too: their power or coolant" if wide else waits),
        evidence(
            f"its clock departs from what its peers lead one to expect by less than {50 * of.delta:.1f} %",
            compared,
            **sight.around(slots, low.worst, mates),
            throttle_bits=low.bits,
            attribution="NODE",
            cause=low.named or low.reason,
            held_s=low.held,
        ),
        ("gpu.sm_clock", *(("gpu.throttle_reasons",) if low.bits or low.policy else ())),
    )


def _of_duty(sight: Sight, entity: str, slots: Slots, low: bool) -> Duty:
    of, time, step = sight.of, sight.frame.time, sight.signs.duty
    mates, whole = sight.mates(slots), entity.startswith("node:")
    worst = int(slots[np.argmax(np.abs(step.effect[slots]))])
    since = (of.low_since if low else of.high_since)[slots]
    since = since[since > 0]
    held = (time - float(np.median(since))) / SECOND if len(since) else 0.0
    why = (sight.pressed(entity, worst) if whole else sight.narrow(worst, mates)) if low else None
    long = held >= of.hold
    sure = why is not None and (long or not whole) and len(mates) + 1 >= PEERS
    suspect = Suspect(
        entity,
        "page" if sure else "suspect",
        int(since.min(initial=time)),
        float(step.score[slots].max()),
        lambda: _duty_words(sight, entity, slots, mates, worst, low, why, held),
    )
    return Duty(suspect, int(of.seats.job[worst]), why is not None, long)


def _duty_words(
    sight: Sight,
    entity: str,
    slots: Slots,
    mates: Slots,
    worst: int,
    low: bool,
    why: tuple[str, float, str] | None,
    held: float,
) -> Told:
    of, whole, compared = sight.of, entity.startswith("node:"), _active(sight, worst, mates)
    unseen = "what keeps it waiting is not seen" if low else "it may compute longer while they wait for it"
    part, some = "tensor cores" if of.tensor[worst] else "SMs", f"{len(slots)} GPUs of " if whole else ""
    return (
        f"{part} of {some}{entity} are active {100 * compared.value:.0f} % of the time where {len(mates)} GPUs of "
        f"{compared.cohort} lead one to expect {100 * compared.expected:.0f} %, for {_minutes(held)}: "
        f"{why[0] if why else unseen}",
        evidence(
            f"its activity departs from what its peers lead one to expect by less than {50 * of.duty_delta:.1f} %",
            compared,
            **sight.around(slots, worst, mates),
            cause=why[0] if why else "not seen",
            attribution="HOST" if low and whole else "NODE",
            held_s=round(held),
        ),
        ("gpu.tensor_active" if of.tensor[worst] else "gpu.sm_active", *((why[2],) if why else ())),
    )


def _clocked(sight: Sight, low: Low, mates: Slots) -> Compared:
    """The clock of the worst beside what its peers lead one to expect: its newest, or the smoothed one if that is
    lower, since a condition that is about to end is told of what it was."""
    of, step, worst = sight.of, sight.signs.clocks, low.worst
    off = float(of.raw[worst] if low.stuck else step.effect[worst])
    base = 0.0 if low.stuck else float(of.clocks.cells[kernel.BASELINE, worst])
    expected = float(np.exp(-(step.median[worst] + base)))
    expected = expected if np.isfinite(expected) else float(of.clock[worst] * np.exp(off))
    cohort, value = of.seats.cohort(worst), expected * float(np.exp(-off))
    value = float(np.fmin(of.clock[worst], value))
    spread = _spread(step, worst, expected)
    return Compared(value, expected, spread, cohort, len(mates), 1 - value / expected, "MHz")


def _active(sight: Sight, worst: int, mates: Slots) -> Compared:
    """How active the worst was of late beside what its peers lead one to expect."""
    of, step = sight.of, sight.signs.duty
    expected = float(np.exp(step.median[worst] + of.duty.cells[kernel.BASELINE, worst]))
    expected = expected if np.isfinite(expected) else float(of.active[worst] * np.exp(-step.effect[worst]))
    value = expected * float(np.exp(step.effect[worst]))
    cohort, spread = of.seats.cohort(worst), _spread(step, worst, expected)
    return Compared(value, expected, spread, cohort, len(mates), abs(value / expected - 1), "1")


def _spread(step: Step, slot: int, expected: float) -> float | None:
    """Of the cohort, in the unit of what is expected: streams reckon in logarithms."""
    spread = expected * float(step.spread[slot])
    return spread if np.isfinite(spread) else None


def _minutes(seconds: float) -> str:
    return "less than a minute" if seconds < 60 else f"{seconds / 60:.0f} min"
