"""Calibration at the site: how far quiet streams of a kind of device depart here, and the thresholds that follow.

Each stream has a margin: how near it is to a condition with the shipped threshold and least effect, 1 = there. In every
block of ten minutes the largest margin of each quiet stream is counted by kind of device. From the counts follows a
factor for threshold and least effect with which a quiet stream of this site exceeds both as rarely as the shipped ones
promise for normal noise (docs/detectors.md).

The tail is extrapolated from its body, as in Siffer et al., Anomaly Detection in Streams with Extreme Value Theory,
KDD 2017: faults are as rare as the quantile that is wanted, so what they do may not be measured with it. So only levels
count that more streams pass than have a fault, a stream counts when it passes a level and not while it stays above,
and a block in which far more streams than usual pass a level counts as usual (Huber, Robust Statistics, 1981).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import State, memory, notes, parts
from pipeline.model.records import SECOND

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
Kinds = tuple[NDArray[np.int32], Sequence[str]]
"""Kind of device of each entity, by number, -1 without one; and the names of the kinds (Detector.kinds)."""

BLOCK_S = 600.0
"""s of which the largest margin counts: longer than the memory of the smoothed effect at 60 s. Chosen."""
SHIPPED = 1.5
"""Factor without evidence: at 10 s a threshold of 27.75, near the highest, and half more than the least effect."""
START = 3.0
"""Factor before anything was seen, for START_S. Chosen: thrice the least effect, which is no noise of a sound site."""
START_S = 1200.0
"""s after which a record counts: two blocks, as the streams of the first one have hardly learnt their normal."""
LEAST, MOST = 0.8, 16.0
"""Factors: with less, the threshold would be below its least, 15; with more a detector sees nothing. Chosen."""
EVIDENCE_H = 4.0
"""h of a fleet after which its own tail counts half against the shipped factor. Chosen: a working shift's half."""
EVIDENCE_STREAMS = 200.0
"""Stream-hours that it takes at least. Chosen: 1,200 blocks, a dozen of them above the 99th percentile."""
MEMORY_S = 7 * 86_400.0
"""s in which evidence falls to 1/e. Chosen: a week, so that working days and weekends both count."""
_FIRST, _PER_OCTAVE, _LEVELS = 0.125, 6, 48  # levels of the margin: 1/8 to 28, each 12 % above the one before
_EDGES: Floats = _FIRST * 2.0 ** (np.arange(_LEVELS) / _PER_OCTAVE)
_ENOUGH = 10.0  # streams that passed a level, from which its share is known to a third
_FAULTS = 5e-4
"""Share of stream-blocks below which a tail may consist of faults: ten times 6.5 faults per 1,000 node-days (RSC-1:
Kokolis et al., HPCA 2025) with 8 streams each, over 8 x 144 x 1,000 stream-blocks."""
_RARE = 5e-3  # share of stream-blocks down to which a flat tail counts; chosen: a rarer one is of faults or transients
_BODY = 20.0  # times more often passed is the level where the tail begins: e**3, three scales of it; chosen
_SURGE = 3.0  # times the usual passings of a block that count at most, until most blocks have more; chosen
_LASTING = 5  # blocks, of which most must have more; chosen: a rack fails within one or two
_SETTLED = 6.0  # blocks from which there is a usual
_HOLE = 1e-9  # passings of a level that no stream stopped at, so that its logarithm is a number
_CURVED = 30.0  # passings that the curvature of the tail is shrunk by; chosen
_IN_CONDITION = np.uint8(255)  # a block that ended with a condition: the next one is not quiet
_UNJUDGED = -1.0
_BLOCK = int(BLOCK_S * SECOND)


def arl0(threshold: float, slack: float = 0.5) -> float:
    """Returns the mean number of independent normal samples until the sum of a healthy stream exceeds `threshold`.

    Siegmund (1985), Sequential Analysis, section 2.6: (exp(2kb) - 2kb - 1) / (2k^2), b = h + 1.166, the mean excess
    over the threshold.
    """
    rise = 2 * slack * (threshold + 1.166)
    return (math.exp(rise) - rise - 1) / (2 * slack * slack)


@dataclass
class QuietRecord(State):
    """What quiet streams of one kind did. passed: (48,) how many newly passed each level; blocks: stream-blocks.

    seconds: time seen.   Passings, blocks and seconds fade with MEMORY_S.   recent: (5, 48) passings of the last
    blocks.   factor: in force.
    """

    passed: Floats = notes(lambda: np.zeros(_LEVELS))
    blocks: float = notes(float)
    seconds: float = notes(float)
    recent: Floats = notes(lambda: np.zeros((0, _LEVELS)))
    factor: float = notes(lambda: START)

    def add_block(self, passed: Floats, streams: int, target: float) -> None:
        """Adds the passings (48,) of one block of `streams` quiet streams; target: see `tail_factor`."""
        self.recent = np.vstack([self.recent, passed])[-_LASTING:]
        if self.blocks >= _SETTLED * streams:
            usual = 1 + _SURGE * self.passed * streams / self.blocks
            passed = np.minimum(passed, np.maximum(usual, np.median(self.recent, axis=0)))
        keep = math.exp(-BLOCK_S / MEMORY_S)
        self.passed = self.passed * keep + passed
        self.blocks = self.blocks * keep + streams
        self.seconds = self.seconds * keep + BLOCK_S
        if self.seconds < keep * START_S:
            return
        measured = tail_factor(self.passed, self.blocks, target)
        if measured is None:
            self.factor = min(self.factor, SHIPPED)
            return
        needed = max(EVIDENCE_STREAMS * 3600 / BLOCK_S, EVIDENCE_H * 3600 * self.blocks / self.seconds)
        doubt = needed / (needed + self.blocks)
        if measured > START:  # few streams do not show a tail: of 64 the first hours gave 16 where a day gave 4.5
            measured = START * (measured / START) ** (1 - doubt)
        self.factor = min(max(measured + max(SHIPPED - measured, 0.0) * doubt, LEAST), MOST)

    def count_passed(self, factor: float) -> int:
        """Returns how many quiet streams passed a margin within about a week."""
        return round(float(np.interp(math.log(factor), np.log(_EDGES), self.passed)))

    def as_json(self) -> dict[str, Any]:
        """Returns it as plain data."""
        passed = [round(float(n), 3) for n in self.passed]
        return {"factor": self.factor, "blocks": self.blocks, "seconds": self.seconds, "passed": passed}


def record_from_json(data: Mapping[str, Any]) -> QuietRecord:
    """Returns the record of `QuietRecord.as_json`. Raises KeyError, TypeError or ValueError if it is none."""
    passed = np.array(data["passed"], np.float64)
    numbers = [float(data[key]) for key in ("blocks", "seconds", "factor")]
    if passed.shape != (_LEVELS,) or not np.isfinite([*passed, *numbers]).all() or not LEAST <= numbers[2] <= MOST:
        raise ValueError(f"{_LEVELS} passings and a factor from {LEAST:g} to {MOST:g} expected")
    record = QuietRecord()
    record.restore(
        {
            "passed": passed,
            "blocks": numbers[0],
            "seconds": numbers[1],
            "factor": numbers[2],
            "recent": np.zeros((0, _LEVELS)),
        }
    )
    return record


def tail_factor(passed: Floats, blocks: float, target: float) -> float | None:
    """Returns the margin that a quiet stream passes in a share `target` of its blocks; None: too few passings to say.

    The logarithm of the share falls as a power of the margin from 1/2 to 2 (a Weibull tail: Beirlant et al., Statistics
    of Extremes, 2004, section 2.6): sums of normal noise fall with 1, smoothed effects of it with 2, heavy tails with
    less. Counting errors make the tail wider, never narrower. Of the levels from which it can be followed, that one
    counts which leads to the least margin: a tail that becomes flat there has begun to be of faults.
    """
    known = np.flatnonzero((passed >= _ENOUGH) & (passed >= _FAULTS * blocks))
    if not len(known):
        return LEAST if blocks * _FAULTS >= _ENOUGH else None
    first = int(known[passed[known] >= min(_RARE * blocks, passed[known].max())][-1])
    return min(_extrapolated(passed, blocks, target, int(high)) for high in known[known >= first])


def _extrapolated(passed: Floats, blocks: float, target: float, high: int) -> float:
    """Returns the margin at which the share falls to `target`, from a tail that ends at the level `high`."""
    above = np.flatnonzero(passed[: high + 1] >= min(_BODY * passed[high], passed.max()))
    low = max(int(above[-1]) if len(above) else 0, int(passed[: high + 1].argmax()))
    low = max(min(low, high - 1), 0)
    reach = max(math.log((passed[high] + math.sqrt(passed[high])) / blocks / target), 0.0)
    power = _tail_power(passed, low, high)
    first, last = _EDGES[low] ** power, _EDGES[high] ** power
    fall = math.log(max(passed[low], 1.01 * passed[high]) / passed[high])
    fall = max(fall - 1 / math.sqrt(passed[high]), fall / 2)
    return float((last + (last - first) * reach / fall) ** (1 / power)) if high else float(_EDGES[0])


def _tail_power(passed: Floats, low: int, high: int) -> float:
    """Returns the power of the margin with which the tail between two levels falls; 1 (exponential) if unknown."""
    middle = (low + high) // 2
    if high - low < 3:
        return 1.0
    edges = _EDGES[[low, middle, high]]
    there = np.maximum(passed, _HOLE)
    falls = np.log(there[[low, middle]] / there[[middle, high]])
    if falls.min() <= 0:  # the flat part is where the tail begins, or where it ends
        return 2.0 if falls[0] <= 0 else 0.5
    slopes, centres = falls / np.diff(edges), (edges[1:] + edges[:-1]) / 2
    found = math.log(slopes[1] / slopes[0]) / math.log(centres[1] / centres[0])
    return float(min(max(1 + found * passed[high] / (passed[high] + _CURVED), 0.5), 2.0))


@dataclass
class QuietTail(State):
    """The quiet tail of the streams of one metric; a part() of what has the streams.

    peak:    (N,) largest margin in this block, -1 without one; the owner raises it, as `add` does.
    before:  (N,) level of the block before.
    records: by kind.   revision: changes whenever factors may.   since: when this block began.
    pinned:  factors in force instead, by kind, `*` for all others.
    """

    peak: Singles = memory(_UNJUDGED, np.float32)
    before: NDArray[np.uint8] = memory(0, np.uint8)
    records: dict[str, QuietRecord] = parts(QuietRecord, kept=True)
    since: int = notes(int)
    pinned: dict[str, float] = notes()
    revision: int = field(default=0, init=False, repr=False)
    _of: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, np.intp), init=False, repr=False)
    _names: list[str] = field(default_factory=list, init=False, repr=False)
    _sorted: tuple[int, Kinds | None, Bools | None] = field(default=(-1, None, None), init=False, repr=False)

    def add(self, margin: Floats, quiet: Bools, time: int, target: float, kinds: Kinds | None = None) -> Floats:
        """Adds the margins (N,) of one instant, NaN = none, for statistics that are no `Streams`; returns `factors`.

        margin: 1 = what the shipped threshold needs.   quiet: no condition holds, and none of its group.
        target: share of blocks in which a quiet entity may pass its threshold.
        """
        size = len(margin)
        self.grow(size)
        self.sort(size, kinds)
        np.fmax(self.peak[:size], margin, out=self.peak[:size], casting="same_kind")
        if self.is_over(time):
            self.close_block(~quiet, np.zeros(size, bool), target)
        return self.factors()

    def sort(self, size: int, kinds: Kinds | None, alone: Bools | None = None) -> None:
        """Sorts the entities by kind, and those without peers apart."""
        was = self._sorted
        if was[0] == size and was[2] is alone and _same_kinds(was[1], kinds):
            return
        number = kinds[0][:size].astype(np.intp) if kinds else np.full(size, -1, np.intp)
        names = list(kinds[1]) if kinds else []
        lonely = alone[:size] if alone is not None else np.zeros(size, bool)
        place, found = np.unique(2 * (number + 1) + lonely, return_inverse=True)
        labels = ["" if n < 2 else names[n // 2 - 1] for n in place.tolist()]
        self._names = [label + ALONE_KIND * (n % 2) for label, n in zip(labels, place.tolist(), strict=True)]
        self._of = found.reshape(size).astype(np.intp)
        self._sorted = size, kinds, alone
        self.revision += 1

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `State.restore`."""
        super().restore(state)
        self.revision += 1

    def load(self, records: Mapping[str, QuietRecord]) -> None:
        """Replaces the learnt values, and ends a pin."""
        self.records = dict(records)
        self.pin({})

    def pin(self, factors: Mapping[str, float]) -> None:
        """Sets factors in force instead of the measured ones, by kind, `*` for all others; none ends that."""
        self.pinned = dict(factors)
        self.revision += 1

    def factors(self) -> Floats:
        """Returns (N,) the factor of each entity, as sorted last."""
        known = [self.factor(name) for name in self._names]
        return np.array([*known, START])[self._of]

    def factor(self, kind: str) -> float:
        """Returns the factor in force for a kind of device."""
        measured = self.records[kind].factor if kind in self.records else START
        return self.pinned.get(kind, self.pinned.get("*", measured))

    def is_over(self, time: int) -> bool:
        """Returns whether the block is over, and begins the next one if so; a gap of hours drops the block."""
        passed = time - self.since
        if 0 <= passed < _BLOCK:
            return False
        follows = bool(self.since) and 0 < passed < 100 * _BLOCK
        self.since = time
        if not follows:
            self.peak[:] = _UNJUDGED
        return follows

    def close_block(self, on: Bools, moved: Bools, target: float) -> None:
        """Counts a block that is over. on, moved: (N,) streams that are not quiet now."""
        size = len(on)
        peak, before = self.peak[:size], self.before[:size]
        with np.errstate(divide="ignore"):
            level = np.floor(np.log2(np.maximum(peak, 0) / np.float32(_FIRST)) * _PER_OCTAVE)
        level = np.clip(level + 1, 0, _LEVELS).astype(np.intp)
        counted = (peak >= 0) & (before != _IN_CONDITION) & ~moved
        self._count(level, counted, before.astype(np.intp), target)
        self.revision += 1
        judged = peak >= 0
        before[:] = np.where(judged, level, before)
        before[on | moved] = _IN_CONDITION
        before[~(on | moved) & (before == _IN_CONDITION)] = 0
        self.peak[:] = _UNJUDGED

    def _count(self, level: NDArray[np.intp], counted: Bools, before: NDArray[np.intp], target: float) -> None:
        """Adds a block: of each kind how many of the counted streams passed each level that they were below before."""
        streams = np.bincount(self._of[counted], minlength=len(self._names))
        risen = np.flatnonzero(counted & (level > before))
        change = np.zeros((len(self._names), _LEVELS + 1))
        np.add.at(change, (self._of[risen], before[risen]), 1)
        np.add.at(change, (self._of[risen], level[risen]), -1)
        passed = np.cumsum(change, axis=1)[:, :_LEVELS]
        for row in np.flatnonzero(streams).tolist():
            record = self.records.setdefault(self._names[row], QuietRecord())
            record.add_block(passed[row], int(streams[row]), target)


def _same_kinds(first: Kinds | None, second: Kinds | None) -> bool:
    if first is None or second is None:
        return first is second
    return first[0] is second[0] or (first[1] == second[1] and np.array_equal(first[0], second[0]))


ALONE_KIND = " (own past)"
"""Added to the kind of streams without peers: what moves the whole fleet moves them too, so their tail is another."""
