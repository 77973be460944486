"""Change statistics of all streams of one device class, for the generic detector.

A move is the difference of two exponentially weighted means, on two scales (memories FAST and SLOW, in samples). Each
is measured against its own past: the quantile KNOWN of its size and the mean excess above that, in multiples of the
limit for the interval of the stream. The slow mean is of the median of three samples, so one glitch leaves no trace in
it. The loops are compiled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import N, State, memory, part
from detectors.base.streams import USUAL_STEP
from pipeline.model.compiling import compiled
from pipeline.model.records import SECOND, Frame
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
STRONGEST = 3  # signals of an entity whose mean counts; of many signals one alone proves nothing; chosen
RECENT = 3  # newest samples of an entity whose mean counts: one alone proves nothing either; chosen
MOST = 2.5  # limits that one signal counts at most; chosen: less than STRONGEST, and than RECENT
LOWEST = 4.0  # mean excesses: the limit at long intervals; one sample in a thousand of a lone signal, 3 sigma as usual
OVER = 0.5  # of the limit: less ends a condition; chosen
RARE = 100.0  # samples without growth after which the next growth of a counter of harm suffices by itself; chosen
SUSTAINED_S, SUSTAINED = 60.0, 3
"""s, or samples where that is sooner, for which a change must last to be worth a ticket: readings that are wrong for
moments are an instrument's, and metrics of a minute are means already. Chosen."""
RECURS = 3600 * SECOND
"""us: two changes of several signals within an hour are no glitches but a fault that comes and goes. Chosen."""
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
COUNT, LAST, TIME, INTERVAL, STILL, QUICK, NORMAL, SLOWEST, NEWEST, SECOND_NEWEST, TAILS = range(11)
"""Cells of a stream: samples, last reading, its time (us) and the usual interval (s), samples without growth of a
counter, three means, the two newest samples, then quantile, excess and their count by scale."""
CELLS = TAILS + 3 * SCALES
_BLOCKED, _ON, _ONSET, _BEFORE = range(4)  # the last: when the condition before this one began


@compiled
def _reading(cell: Floats, x: float, time: float, kind: int) -> float:
    """Returns the judged value: a level, growth per second of a counter, or a change of state; NaN: none."""
    last, before = cell[LAST], cell[TIME]
    cell[LAST], cell[TIME] = x, time
    passed = (time - before) / 1e6
    if before > 0.0 and passed > 0.0:
        usual = cell[INTERVAL]
        cell[INTERVAL] = passed if usual == 0.0 else usual + (min(passed, 2.0 * usual) - usual) / SLOW[1]
    if kind == GAUGE:
        return x
    if before == 0.0:
        return np.nan
    if kind == STATE:
        return 1.0 if x != last else 0.0
    if x < last or passed <= 0.0:  # a reset, or time that went back: growth is unknown
        return np.nan
    return float((x - last) / passed)


@compiled
def limit_at(limit: float, interval: float) -> float:
    """Returns the limit at an interval (s), for the same alarms a day: an exponential tail falls by e per excess.

    Samples closer than USUAL_STEP follow each other: they count as one look.
    """
    return min(max(limit + np.log(USUAL_STEP / interval), LOWEST), limit) if interval > 0.0 else limit


@compiled
def _tail(
    cell: Floats, at: int, size: float, age: float, memory: float, tiny: float, floor: float, learns: bool
) -> float:
    """Returns by how many mean excesses the size of a move is above its learnt quantile; learns from it."""
    if age <= LEARN:
        cell[at + 2] += (size - cell[at + 2]) / age  # the mean size, in the place of the count
        cell[at], cell[at + 1] = _FIRST_QUANTILE * cell[at + 2], _FIRST_EXCESS * cell[at + 2]
        if age == LEARN:
            cell[at + 2] = _PRIOR
        return 0.0
    scale = max(cell[at + 1], tiny)
    beyond = (size - cell[at]) / max(scale, floor)
    if not learns and cell[at + 1] > tiny:
        return float(max(beyond, 0.0))
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
def _move(
    cell: Floats, k: int, x: float, middle: float, harm: int, settings: tuple[float, float, float], learns: bool
) -> float:
    """Returns how many limits a sample is off on one scale, with the sign of the move; learns the usual level."""
    limit, memory, least = settings
    normal = cell[NORMAL + k]
    move = (x if k == 0 else cell[QUICK]) - normal
    size = abs(move) if harm == 0 else max(move * harm, 0.0)
    tiny = _TINY * (abs(x) + abs(normal)) + 1e-300
    beyond = _tail(cell, TAILS + 3 * k, size, cell[COUNT] - 1.0, memory, tiny, least / limit * abs(normal), learns)
    cell[NORMAL + k] += max(1.0 / cell[COUNT], 1.0 / SLOW[k]) * (middle - normal)
    return float(min(beyond / limit, MOST) * (1.0 if move >= 0 else -1.0))


@compiled
def advance_changes(
    cells: Floats,
    sample: Floats,
    time: float,
    rule: NDArray[np.int8],
    settings: tuple[float, float, float],
    s: int,
    reported: Positions,
    unusual: Floats,
    usual: Floats,
    now: Floats,
) -> None:
    """Adds one sample of every stream of signal `s`, and computes how unusual its move is.

    cells: (N, CELLS), changed.  sample: (N,), NaN = none.  rule: kind, direction of harm, whether growth after rest
    is enough.  settings: limit, memory and least change.  reported: (N,) 0: no condition, so the sizes of moves are
    learnt.  Out: unusual (SCALES, S, N) limits with the sign of the move, NaN = not judged; usual (SCALES, S, N)
    expected values; now (S, N) judged values.
    """
    kind, harm, enough = rule[0], rule[1], rule[2]
    limit, memory, least = settings
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
            cell[QUICK : SECOND_NEWEST + 1] = x
            continue
        cell[QUICK] += max(1.0 / cell[COUNT], 1.0 / FAST[1]) * (x - cell[QUICK])
        a, b = cell[SECOND_NEWEST], cell[NEWEST]
        middle = max(min(a, b), min(max(a, b), x))
        cell[SECOND_NEWEST], cell[NEWEST] = b, x
        here = (limit_at(limit, cell[INTERVAL]), memory, least)
        for k in range(SCALES):
            usual[k, s, n] = cell[NORMAL + k]
            beyond = _move(cell, k, x, middle, harm, here, reported[n] == 0)
            if cell[COUNT] - 1.0 > LEARN:
                unusual[k, s, n] = MOST * STRONGEST if grows else beyond


@compiled
def advance_resting(
    cells: Floats, sample: Floats, time: float, kind: int, s: int, unusual: Floats, usual: Floats, now: Floats
) -> bool:
    """Adds one sample of every stream of a signal of which only growth after rest counts; returns whether any grew.

    Arguments: see `advance_changes`.
    """
    any_grew = False
    for n in range(sample.shape[0]):
        unusual[:, s, n] = np.nan
        if not np.isfinite(sample[n]):
            continue
        x = _reading(cells[n], sample[n], time, kind)
        if not np.isfinite(x):
            continue
        grew = _grows_after_rest(cells[n], x)
        unusual[:, s, n] = MOST * STRONGEST if grew else 0.0
        usual[:, s, n], now[s, n] = 0.0, x
        any_grew = any_grew or grew
    return any_grew


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
def score_entities(unusual: Floats, recent: Floats, score: Floats, scale: Positions, judged: Positions) -> None:
    """Computes for each entity the mean of its strongest signals on the scale where it is largest, in limits.

    recent: (SCALES * RECENT, N) means of the newest samples, the newest last, changed.  score: (N,) mean of them; -1:
    not judged now.  scale: where it is largest.  judged: how many signals were judged.
    """
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
            if not known:
                continue
            line = recent[k * RECENT : (k + 1) * RECENT, n]
            line[:-1] = line[1:]
            line[-1] = top.sum() / min(known, STRONGEST)
            if line.mean() > score[n]:
                score[n], scale[n] = line.mean(), k


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
        if self.signal.kind == "state":
            return f"{name} is not normal" if self.signal.normal else f"{name} changes"
        if self.grew_after_rest:
            return f"{name} grew after standing still"
        value, expected = f"{self.value:.4g} {self.unit}".strip(), f"{self.expected:.4g}"
        return f"{name} {value} after {expected}"


def _is_still_off(cell: Floats) -> bool:
    """Returns whether both newest samples are at least half as far off as the mean that a glitch moves, too."""
    moved = cell[QUICK] - cell[SLOWEST]
    newest = min((cell[at] - cell[SLOWEST]) * np.sign(moved) for at in (NEWEST, SECOND_NEWEST))
    return bool(newest >= 0.5 * abs(moved) > 0.0)


@dataclass
class SignalStreams(State):
    """The streams of one signal. rests: only growth after rest counts, or a state that leaves normal; rule: see
    `advance_changes`."""

    signal: Signal
    rests: bool = False
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
        value = np.where(np.isfinite(column), 1.0, np.nan)
        for normal in self.signal.normal:
            value[column == self.signal.states.index(normal)] = 0.0
        return value


@dataclass
class ClassChanges(State):
    """Streams of S signals x N entities of one class, and which entities have a condition.

    A condition begins when the strongest moves of an entity, over the RECENT newest samples, reach the limit, and ends
    when they are half as unusual as that, or after LASTS samples: then the new level is the normal one.

    resting: signals of which only growth after rest counts.
    score, judged: (N,) of the newest sample: the score of each entity, and how many of its signals were judged.
    """

    signals: tuple[Signal, ...]
    resting: frozenset[str] = frozenset()
    streams: dict[str, SignalStreams] = part(dict)
    marks: NDArray[np.int64] = memory(0, np.int64, shape=(4, N))
    recent: Floats = memory(0.0, shape=(SCALES * RECENT, N))
    score: Floats = field(default_factory=lambda: np.empty(0), init=False, repr=False)
    judged: Positions = field(default_factory=lambda: np.empty(0, np.int64), init=False, repr=False)
    _is_moving: bool = field(default=True, init=False, repr=False)
    _scale: Positions = field(default_factory=lambda: np.empty(0, np.int64), init=False, repr=False)
    _unusual: Floats = field(default_factory=lambda: np.empty((SCALES, 0, 0)), init=False, repr=False)
    _usual: Floats = field(default_factory=lambda: np.empty((SCALES, 0, 0)), init=False, repr=False)
    _now: Floats = field(default_factory=lambda: np.empty((0, 0)), init=False, repr=False)

    def __post_init__(self) -> None:
        self.streams = {signal.name: SignalStreams(signal, signal.name in self.resting) for signal in self.signals}

    def step(self, frame: Frame, cohorts: CohortOrder, quiet: Bools, settings: tuple[float, float, float]) -> Bools:
        """Adds one sample; returns (N,) whether a condition holds.

        cohorts: see `subtract_peers`.  quiet: entities in maintenance.  settings: limit, memory and the least change,
        as in Anomaly.
        """
        n = len(frame.entities)
        self._resize(n)
        out = (self._unusual, self._usual, self._now)
        moves = self._is_moving or len(self.resting.intersection(self.streams)) < len(self.streams)
        for s, streams in enumerate(self.streams.values()):
            sample = np.array(streams.sample(frame[streams.signal.name]), np.float64)
            where = (streams.cells, sample, float(frame.time))
            if streams.rests:
                moves |= advance_resting(*where, streams.rule[0], s, *out)
            else:
                advance_changes(*where, streams.rule, settings, s, self.marks[_ON], *out)
        if not moves:  # only resting signals, and all rest
            return np.zeros(n, bool)
        if len(cohorts[1]) > 1:
            subtract_peers(self._unusual, *cohorts, PEERS, OVER)
        score_entities(self._unusual, self.recent[:, :n], self.score, self._scale, self.judged)
        on = self._decide(frame.time, quiet)
        self._is_moving = bool(on.any() or self.recent.any() or self.marks[_BLOCKED].any())
        return on

    def _resize(self, n: int) -> None:
        self.grow(n)
        for streams in self.streams.values():
            streams.grow(n)
        if len(self.score) != n:
            width = len(self.signals)
            self.score, self.judged, self._scale = np.empty(n), np.empty(n, np.int64), np.empty(n, np.int64)
            self._unusual, self._usual = np.empty((SCALES, width, n)), np.empty((SCALES, width, n))
            self._now = np.empty((width, n))

    def _decide(self, time: int, quiet: Bools) -> Bools:
        blocked, on, onset, before = self.marks[:, : len(self.score)]
        known = self.score >= 0
        calm = known & (self.score < OVER)
        blocked[calm] = 0
        onset[calm & (on == 0)] = 0
        onset[known & ~calm & (onset == 0)] = time
        over = (on > 0) & known & (calm | (on >= LASTS) | quiet)
        before[over] = onset[over]
        for i in np.flatnonzero(over & (on >= LASTS)).tolist():
            self.settle(i)
        begins = (on == 0) & known & (self.score >= 1.0) & (blocked == 0) & ~quiet
        on[:] = np.where(over, 0, np.where(known & ((on > 0) | begins), on + 1, on))
        blocked[over & ~calm] = 1  # it must be calm before it can begin again
        return np.asarray(on > 0)

    def settle(self, i: int) -> None:
        """Makes the present level of an entity its normal one and ends its condition."""
        if i >= self.marks.shape[1]:
            return  # never judged
        for streams in self.streams.values():
            streams.cells[i, NORMAL : NORMAL + SCALES] = streams.cells[i, QUICK]
        self.marks[_ON, i], self.marks[_BLOCKED, i] = 0, 1

    def onset(self, i: int) -> int:
        """Returns when the condition of an entity began (us)."""
        return int(self.marks[_ONSET, i])

    def has_several(self, i: int) -> bool:
        """Returns whether STRONGEST signals were judged, and not only resting ones moved."""
        strongest = self.moves(i)[:STRONGEST]
        return self.judged[i] >= STRONGEST and any(move.signal.name not in self.resting for move in strongest)

    def is_sustained(self, i: int) -> bool:
        """Returns whether its condition has held for SUSTAINED_S, or for SUSTAINED samples, and the two newest samples
        of two of its strongest signals are still off. At intervals of SUSTAINED_S one sample is enough, and so it is in
        the second condition within RECURS."""
        usual = [streams.cells[i, INTERVAL] for streams in self.streams.values() if streams.cells[i, INTERVAL] > 0]
        needed = min(math.ceil(SUSTAINED_S / min(usual, default=SUSTAINED_S)), SUSTAINED)
        recurs = self.marks[_BEFORE, i] > 0 and self.marks[_ONSET, i] - self.marks[_BEFORE, i] <= RECURS
        if needed <= 1 or recurs:
            return True
        if self.marks[_ON, i] < needed:
            return False
        strongest = (self.streams[move.signal.name].cells[i] for move in self.moves(i)[:STRONGEST])
        return sum(map(_is_still_off, strongest)) > STRONGEST // 2

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

    def begin(self, signals: Mapping[str, Sequence[Signal]], resting: frozenset[str]) -> None:
        """Begins with these classes and signals; `resting`: see `ClassChanges`."""
        self.classes = {c: ClassChanges(tuple(found), resting) for c, found in signals.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `State.restore`; a class with other signals than before starts with empty state."""
        for device_class, changes in self.classes.items():
            saved = state["classes"].get(device_class)
            if saved is not None and list(saved["streams"]) == list(changes.streams):
                changes.restore(saved)
