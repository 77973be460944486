"""Change statistics of all streams of one device class, for the generic detector.

A move is the difference of two exponentially weighted means, on two scales (memories FAST and SLOW, in samples). Each
is measured against its own past: the quantile KNOWN of its size and the mean excess above that. The loops are compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.kernel import compiled
from detectors.base.state import N, State, memory, part
from pipeline.model.records import Frame
from pipeline.model.signals import Signal

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Positions = NDArray[np.int64]
CohortOrder = tuple[Positions, Positions]
"""Entities sorted by cohort, and where each cohort begins."""

LEARN = 20  # samples of a stream before it is judged: the replay contract
FAST = np.array([1.0, 3.0])  # samples; a jump, and what three samples agree on; chosen
SLOW = np.array([10.0, 30.0])  # samples; ten times as many, for the usual level; chosen
SCALES = len(FAST)
KNOWN = 0.95  # quantile of the size of moves above which the tail is measured, as in SPOT
MOST = 15.0  # mean excesses that one signal counts at most; chosen: less than STRONGEST times the limit
STRONGEST = 3  # signals of an entity whose mean counts; of many signals one alone proves nothing; chosen
RARE = 100.0  # samples without growth after which the next growth of a counter of harm suffices by itself; chosen
HOLD = 2  # samples in a row that must be unusual; chosen
LASTS = int(SLOW[-1])  # samples after which a changed level is the new normal, and its condition over
PEERS = 8  # entities of a kind and of like attributes from which their common part is subtracted; chosen
_CLIP = 10.0  # mean excesses beyond which a move is not learnt; chosen
_PRIOR = 4.0  # excesses that the first guess of the tail is worth; chosen
_FIRST_MOVE = 0.05  # of the first move of a signal that stood still: its mean excess from then on; chosen
_FIRST_QUANTILE, _FIRST_EXCESS = 2.0, 0.8  # of the mean size of moves while it is young: a Laplace or normal tail
_TINY = 1e-9  # of the level: less is rounding

GAUGE, COUNTER, STATE = 0, 1, 2
_KINDS = {"gauge": GAUGE, "counter": COUNTER, "state": STATE}
_HARM = {"up": 1, "down": -1, "both": 0}
COUNT, LAST, TIME, STILL, QUICK, NORMAL, SLOWEST, TAILS = range(8)
"""Cells of a stream: samples, last reading and its time, samples without growth of a counter, three means, then
quantile, excess and their count by scale."""
CELLS = TAILS + 3 * SCALES
_HOT, _ON, _ONSET = range(3)


@compiled
def _reading(cell: Floats, x: float, time: float, kind: int) -> float:
    """Returns the judged value: a level, growth per second of a counter, or a change of state; NaN: none."""
    if kind == GAUGE:
        return x
    last, before = cell[LAST], cell[TIME]
    cell[LAST], cell[TIME] = x, time
    if before == 0.0:
        return np.nan
    if kind == STATE:
        return 1.0 if x != last else 0.0
    if x < last or time <= before:  # a reset, or time that went back: growth is unknown
        return np.nan
    return float((x - last) / (time - before) * 1e6)


@compiled
def _tail(cell: Floats, at: int, size: float, age: float, memory: float, tiny: float, floor: float) -> float:
    """Returns by how many mean excesses the size of a move is above its learnt quantile; learns from it."""
    if age <= LEARN:
        cell[at + 2] += (size - cell[at + 2]) / age  # the mean size, in the place of the count
        cell[at], cell[at + 1] = _FIRST_QUANTILE * cell[at + 2], _FIRST_EXCESS * cell[at + 2]
        if age == LEARN:
            cell[at + 2] = _PRIOR
        return 0.0
    scale = max(cell[at + 1], tiny)
    beyond = (size - cell[at]) / max(scale, floor)
    if cell[at + 1] <= tiny and size > tiny:
        cell[at + 1] = _FIRST_MOVE * size  # a signal that was constant: this is a move now, and soon normal
        return float(size / max(scale, floor))
    taught = min(size, cell[at] + _CLIP * scale)
    gain = 2.0 * _CLIP * scale * max(1.0 / age, 1.0 / memory)  # Robbins and Monro (1951), in units of the tail
    if taught > cell[at]:
        cell[at + 2] += 1.0
        cell[at] += gain * KNOWN
        learnt = max(1.0 / cell[at + 2], 1.0 / (memory * (1.0 - KNOWN)))
        cell[at + 1] = cell[at + 1] + learnt * (max(taught - cell[at], 0.0) - cell[at + 1])
    else:
        cell[at] = max(cell[at] - gain * (1.0 - KNOWN), 0.0)
    return float(max(beyond, 0.0))


@compiled
def _grows_after_rest(cell: Floats, x: float) -> bool:
    """Returns whether a counter that stood still for RARE samples grows, or did so in the sample before."""
    if x > 0.0:
        grows = cell[STILL] >= RARE or cell[STILL] < 0.0
        cell[STILL] = -1.0 if cell[STILL] >= RARE else 0.0
        return bool(grows)
    cell[STILL] += 1.0
    if cell[STILL] == 0.0:
        cell[STILL] = 1.0
        return True
    return False


@compiled
def _move(cell: Floats, k: int, x: float, harm: int, settings: tuple[float, float]) -> float:
    """Returns how unusual a sample is on one scale, with the sign of the move; learns the usual level."""
    memory, least = settings
    normal = cell[NORMAL + k]
    move = (x if k == 0 else cell[QUICK]) - normal
    size = abs(move) if harm == 0 else max(move * harm, 0.0)
    tiny = _TINY * (abs(x) + abs(normal)) + 1e-300
    beyond = min(_tail(cell, TAILS + 3 * k, size, cell[COUNT] - 1.0, memory, tiny, least * abs(normal)), MOST)
    cell[NORMAL + k] += max(1.0 / cell[COUNT], 1.0 / SLOW[k]) * (x - normal)
    return float(beyond if move >= 0 else -beyond)


@compiled
def advance_changes(
    cells: Floats,
    sample: Floats,
    time: float,
    rule: NDArray[np.int8],
    settings: tuple[float, float],
    s: int,
    unusual: Floats,
    usual: Floats,
    now: Floats,
) -> None:
    """Adds one sample of every stream of signal `s`, and computes how unusual its move is.

    cells: (N, CELLS), changed.  sample: (N,), NaN = none.  rule: kind, direction of harm, whether a move alone is
    enough.  Out: unusual (SCALES, S, N) mean excesses with the sign of the move, NaN = not judged; usual (SCALES, S, N)
    expected values; now (S, N) judged values.
    """
    kind, harm, enough = rule[0], rule[1], rule[2]
    for n in range(sample.shape[0]):
        cell = cells[n]
        unusual[:, s, n] = np.nan
        now[s, n] = np.nan
        if not np.isfinite(sample[n]):
            continue
        x = _reading(cell, sample[n], time, kind)
        now[s, n] = x
        if not np.isfinite(x):
            continue
        grows = enough and _grows_after_rest(cell, x)
        cell[COUNT] += 1.0
        if cell[COUNT] == 1.0:
            cell[QUICK], cell[NORMAL], cell[SLOWEST] = x, x, x
            continue
        cell[QUICK] += max(1.0 / cell[COUNT], 1.0 / FAST[1]) * (x - cell[QUICK])
        for k in range(SCALES):
            usual[k, s, n] = cell[NORMAL + k]
            beyond = _move(cell, k, x, harm, settings)
            if cell[COUNT] - 1.0 > LEARN:
                unusual[k, s, n] = MOST * STRONGEST if grows else beyond


@compiled
def subtract_peers(unusual: Floats, order: Positions, starts: Positions, least: int, large: float) -> None:
    """Subtracts from every move what its peers have in common: their median, if it has the same sign.

    order: entities sorted by cohort; starts: where each cohort begins in it, and the end of the last.  least: members
    that make a cohort.  large: where no move is as large as that, nothing is computed.
    """
    buffer = np.empty(unusual.shape[2])
    for k in range(unusual.shape[0]):
        for s in range(unusual.shape[1]):
            line = unusual[k, s]
            for g in range(len(starts) - 1):
                size, largest = 0, 0.0
                for i in range(starts[g], starts[g + 1]):
                    value = line[order[i]]
                    if np.isfinite(value):
                        buffer[size] = value
                        size += 1
                        largest = max(largest, abs(value))
                if size < least or largest < large:
                    continue
                ordered = np.sort(buffer[:size])
                middle = 0.5 * (ordered[(size - 1) // 2] + ordered[size // 2])
                for i in range(starts[g], starts[g + 1]):
                    value = line[order[i]]
                    if value > 0.0 and middle > 0.0:
                        line[order[i]] = max(value - middle, 0.0)
                    elif value < 0.0 and middle < 0.0:
                        line[order[i]] = min(value - middle, 0.0)


@compiled
def score_entities(unusual: Floats, score: Floats, scale: Positions, judged: Positions) -> None:
    """Computes for each entity the mean of its strongest signals on the scale where it is largest; -1: not judged."""
    top = np.empty(STRONGEST)
    for n in range(unusual.shape[2]):
        score[n], scale[n], judged[n] = -1.0, 0, 0
        for k in range(unusual.shape[0]):
            top[:] = 0.0
            known = 0
            for s in range(unusual.shape[1]):
                value = abs(unusual[k, s, n])
                if not np.isfinite(value):
                    continue
                known += 1
                for place in range(STRONGEST):
                    if value > top[place]:
                        top[place], value = value, top[place]
            judged[n] = max(judged[n], known)
            if known and top.sum() / min(known, STRONGEST) > score[n]:
                score[n], scale[n] = top.sum() / min(known, STRONGEST), k


@dataclass(frozen=True, slots=True)
class SignalMove:
    """The newest move of one signal of an entity: value, expected value, and how unusual the move is."""

    signal: Signal
    value: float
    expected: float
    score: float

    @property
    def unit(self) -> str:
        """Unit of the value: a counter's growth per second; UCUM's 1 is left out."""
        unit = "" if self.signal.unit == "1" else self.signal.unit
        return f"{unit or '1'}/s" if self.signal.kind == "counter" else unit

    @property
    def grew_after_rest(self) -> bool:
        """Whether it is a counter of harm that grows after standing still."""
        return self.score > MOST

    @property
    def words(self) -> str:
        """The move in words."""
        name = self.signal.name
        if self.grew_after_rest:
            return f"{name} grew after standing still"
        if self.signal.kind == "state":
            return f"{name} is not normal" if self.signal.normal else f"{name} changes"
        value, expected = f"{self.value:.4g} {self.unit}".strip(), f"{self.expected:.4g}"
        return f"{name} {value} after {expected}"


@dataclass
class SignalStreams(State):
    """The streams of one signal. rule: see `advance_changes`."""

    signal: Signal
    cells: Floats = memory(0.0, shape=(N, CELLS))
    rule: NDArray[np.int8] = field(init=False)

    def __post_init__(self) -> None:
        kind = GAUGE if self.signal.kind == "state" and self.signal.normal else _KINDS[self.signal.kind]
        harm = 1 if self.signal.kind == "state" else _HARM[self.signal.harm]
        enough = self.signal.kind == "counter" and self.signal.harm == "up"
        self.rule = np.array([kind, harm, enough], np.int8)

    def sample(self, column: Floats) -> Floats:
        """Returns the column to judge: a state with a declared normal counts as 0 while normal, else as 1."""
        if self.signal.kind != "state" or not self.signal.normal:
            return column
        normal = [i for i, name in enumerate(self.signal.states) if name in self.signal.normal]
        return np.where(np.isfinite(column), np.where(np.isin(column, normal), 0.0, 1.0), np.nan)


@dataclass
class ClassChanges(State):
    """Streams of S signals x N entities of one class, and which entities have a condition.

    A condition begins when the strongest moves of an entity have been unusual for HOLD samples, and ends when they are
    half as unusual as that, or after LASTS samples: then the new level is the normal one.

    score, judged: (N,) of the newest sample: the score of each entity, and how many of its signals were judged.
    """

    signals: tuple[Signal, ...]
    streams: dict[str, SignalStreams] = part(dict)
    marks: NDArray[np.int64] = memory(0, np.int64, shape=(3, N))
    score: Floats = field(default_factory=lambda: np.empty(0), init=False, repr=False)
    judged: Positions = field(default_factory=lambda: np.empty(0, np.int64), init=False, repr=False)
    _scale: Positions = field(default_factory=lambda: np.empty(0, np.int64), init=False, repr=False)
    _unusual: Floats = field(default_factory=lambda: np.empty((SCALES, 0, 0)), init=False, repr=False)
    _usual: Floats = field(default_factory=lambda: np.empty((SCALES, 0, 0)), init=False, repr=False)
    _now: Floats = field(default_factory=lambda: np.empty((0, 0)), init=False, repr=False)

    def __post_init__(self) -> None:
        self.streams = {signal.name: SignalStreams(signal) for signal in self.signals}

    def step(self, frame: Frame, cohorts: CohortOrder, quiet: Bools, settings: tuple[float, float, float]) -> Bools:
        """Adds one sample; returns (N,) whether a condition holds.

        cohorts: see `subtract_peers`.  quiet: entities in maintenance.  settings: limit, memory and the least change,
        as in Anomaly.
        """
        limit, memory_, least = settings
        n = len(frame.entities)
        self._resize(n)
        for s, streams in enumerate(self.streams.values()):
            sample = np.array(streams.sample(frame[streams.signal.name]), np.float64)
            out = (self._unusual, self._usual, self._now)
            advance_changes(streams.cells, sample, float(frame.time), streams.rule, (memory_, least / limit), s, *out)
        if len(cohorts[1]) > 1:
            subtract_peers(self._unusual, *cohorts, PEERS, limit / 2)
        score_entities(self._unusual, self.score, self._scale, self.judged)
        return self._decide(frame.time, limit, quiet)

    def _resize(self, n: int) -> None:
        self.grow(n)
        for streams in self.streams.values():
            streams.grow(n)
        if len(self.score) != n:
            width = len(self.signals)
            self.score, self.judged, self._scale = np.empty(n), np.empty(n, np.int64), np.empty(n, np.int64)
            self._unusual, self._usual = np.empty((SCALES, width, n)), np.empty((SCALES, width, n))
            self._now = np.empty((width, n))

    def _decide(self, time: int, limit: float, quiet: Bools) -> Bools:
        hot, on, onset = self.marks[:, : len(self.score)]
        known = self.score >= 0
        above = known & (self.score >= limit) & ~quiet
        calm = known & (self.score < limit / 2)
        hot[known] = np.where(above & (hot >= 0), hot + 1, np.where(calm | (hot >= 0), 0, hot))[known]
        onset[(hot == 1) & (on == 0)] = time
        over = (on > 0) & known & (calm | (on >= LASTS) | quiet)
        for i in np.flatnonzero(over & (on >= LASTS)).tolist():
            self.settle(i)
        begins = (on == 0) & (hot >= HOLD)
        on[:] = np.where(over, 0, np.where(known & ((on > 0) | begins), on + 1, on))
        hot[over] = np.where(calm, 0, -1)[over]  # it must be calm before it can begin again
        return np.asarray(on > 0)

    def settle(self, i: int) -> None:
        """Makes the present level of an entity its normal one and ends its condition."""
        if i >= self.marks.shape[1]:
            return  # never judged
        for streams in self.streams.values():
            streams.cells[i, NORMAL : NORMAL + SCALES] = streams.cells[i, QUICK]
        self.marks[_ON, i], self.marks[_HOT, i] = 0, -1

    def onset(self, i: int) -> int:
        """Returns when the condition of an entity began (us)."""
        return int(self.marks[_ONSET, i])

    def lasted(self, i: int) -> int:
        """Returns for how many samples its condition has held."""
        return int(self.marks[_ON, i])

    def moves(self, i: int) -> list[SignalMove]:
        """Returns the signals of an entity that moved, the most unusual first."""
        k = int(self._scale[i])
        scores = np.nan_to_num(self._unusual[k, :, i])
        order = [int(s) for s in np.argsort(-np.abs(scores), kind="stable") if abs(scores[s]) > 0]
        found = (
            (self.signals[s], float(self._now[s, i]), float(self._usual[k, s, i]), float(scores[s])) for s in order
        )
        return [SignalMove(*values) for values in found]


@dataclass
class DeviceClasses(State):
    """Change statistics of every class that is judged."""

    classes: dict[str, ClassChanges] = part(dict)

    def begin(self, signals: Mapping[str, Sequence[Signal]]) -> None:
        """Begins with these classes and signals."""
        self.classes = {c: ClassChanges(tuple(found)) for c, found in signals.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `State.restore`; a class with other signals than before starts with empty state."""
        for device_class, changes in self.classes.items():
            saved = state["classes"].get(device_class)
            if saved is not None and list(saved["streams"]) == list(changes.streams):
                changes.restore(saved)
