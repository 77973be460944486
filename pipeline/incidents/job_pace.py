"""The pace of training jobs by the steps that their ranks report: minute by minute, and the usual pace of each job.

In synchronous training all ranks share the step, so the median of the ranks is the step of the job. A job is compared
with its own past: the median of the minutes before a moment. Medians of minutes keep checkpoints, evaluations and
single long steps out. Memory: KEPT_MINUTES per job, three numbers per rank.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from pipeline.model.records import SECOND, Frame

STEP, STEP_TIME = "rank.step", "rank.step_time"
SIGNALS = frozenset({STEP, STEP_TIME})
MINUTE = 60 * SECOND
KEPT_MINUTES = 360
"""Minutes kept per job: longer than the time between two checkpoints or evaluations. Chosen."""
BASE_MINUTES, LEAST_MINUTES = 60, 5
"""Minutes before a moment whose median is the usual step time, and fewest of them that count. Chosen: a median of five
differs from that of sixty by 1 % at the spread of real minutes."""
SLOWER = 0.03
"""Least slowdown that counts. Chosen: twice the daily swing of large runs (1 to 2 %, Llama 3, section 3.3.4)."""
LEAST_HANG, NEW_HANG = 60 * SECOND, 120 * SECOND
"""Time without a step from which a job may hang; of a job watched for less than an hour the longer one. Chosen."""
REPORTED_FOR = 540 * SECOND
"""Time for which a hung rank reports its last step at least (us): a minute less than the 600 s after which an agent
drops a rank without a step (STALE_S in agents/collectors/training/reported_ranks.py)."""
FURTHER = 1.25
"""Factor in the step time by which a slow job becomes slow again. Chosen: above what a slow rank varies by itself."""
_OF_STEPS, _OF_PAUSES = 3.0, 1.5  # times the usual step, and the longest pause so far, that are no hang; chosen
_RECENT = 3  # closed minutes whose median, with the open one, is the pace now; chosen
_APART = 1.5  # steps between ranks that wait for each other, and half a one for the median; chosen
_REWOUND = 0.05  # share of the step number below which a counter restarted at zero instead of at a checkpoint; chosen


@dataclass(frozen=True, slots=True)
class Minute:
    """One minute of a job in which it made a step. step_time: median (s).  steps: finished.  pause: longest time (us)
    without a step that ended in it."""

    time: int
    step_time: float
    steps: float
    pause: int = 0


@dataclass(frozen=True, slots=True)
class Restart:
    """A restart from a checkpoint. time: of its first step (us).  steps: made since that checkpoint; None if the
    counter restarted, so that they are not known.  stopped: its newest step before (us)."""

    time: int
    steps: float | None
    stopped: int


@dataclass(frozen=True, slots=True)
class Gap:
    """A time without a step that was longer than any pause of the job before: it hung, or its telemetry was missing.

    start, end: newest step before it, and first one after it (us).  steps: made in between, which separate one from the
    other; 0 after a restart from a checkpoint; None: not known, as the counter restarted.
    """

    start: int
    end: int
    steps: float | None


@dataclass(slots=True)
class JobPace:
    """The pace of one job. Times are event times (us).

    minutes: closed ones, oldest first.   moved_at: newest step.   first_at: since when it is watched.
    step: number of the newest step.   reported_at: when a rank reported its step last, new or not.
    slowed: (time, step time) since which it is slower than usual, and since which it is slower by FURTHER again:
    several faults may slow it one after the other.
    rewound: its newest restarts from a checkpoint.  gaps: its newest times without a step that have ended.
    restored: as it was stored; nothing is reported since.
    """

    minutes: deque[Minute] = field(default_factory=lambda: deque(maxlen=KEPT_MINUTES))
    normal: deque[float] = field(default_factory=lambda: deque(maxlen=BASE_MINUTES))
    moved_at: int = 0
    first_at: int = 0
    step: float = float("nan")
    slowed: list[tuple[int, float]] = field(default_factory=list)
    rewound: list[Restart] = field(default_factory=list)
    reported_at: int = 0
    gaps: list[Gap] = field(default_factory=list)
    restored: bool = False
    _open: int = 0
    _samples: list[float] = field(default_factory=list)
    _steps: float = 0.0
    _pause: int = 0

    @property
    def usual(self) -> float | None:
        """The usual step time (s): median of the newest minutes that were not slower; None: not known yet."""
        return median(self.normal) if len(self.normal) >= LEAST_MINUTES else None

    @property
    def changed_at(self) -> int | None:
        """Since when it is as slow as it is now; None: it is not slower than usual."""
        return self.slowed[-1][0] if self.slowed else None

    def add(self, time: int, step_time: float, step: float) -> Minute | None:
        """Adds what the ranks report of a new step; returns the minute that this closes."""
        closed = self.close_minute(time)
        if time <= self.moved_at:  # read again after a restart
            return closed
        start = time - time % MINUTE
        if self.minutes and start <= self.minutes[-1].time:  # of a minute that is stored
            self.moved_at, self.step = time, step
            return closed
        self._open = start
        if self.moved_at:
            self._pause = max(self._pause, time - self.moved_at)
        self._count(time, step)
        self._samples.append(step_time)
        self.first_at, self.moved_at, self.step = self.first_at or time, time, step
        return closed

    def _count(self, time: int, step: float) -> None:
        made: float | None = None
        if step >= self.step:
            made = step - self.step
            self._steps += made
        elif step < self.step:
            steps = None if step < _REWOUND * self.step else self.step - step
            self.rewound = [*self.rewound[-9:], Restart(time, steps, self.moved_at)]
            made = None if steps is None else 0.0
        if self.waits_at(time):
            self.gaps = [*self.gaps[-9:], Gap(self.moved_at, time, made)]

    def follows(self, time: int, step: float) -> bool:
        """Returns whether the first step after a pipeline restart differs from the stored one by more than ranks do
        among each other: steps were made, or a checkpoint was loaded, while nothing was read."""
        return self.restored and time > self.moved_at and abs(step - self.step) > _APART

    def close_minute(self, time: int) -> Minute | None:
        """Closes the open minute if `time` is after it, and returns it."""
        if not self._samples or time < self._open + MINUTE:
            return None
        made = Minute(self._open, median(self._samples), self._steps, self._pause)
        self._samples, self._steps, self._pause = [], 0.0, 0
        self.append(made)
        return made

    def append(self, minute: Minute) -> None:
        """Adds a closed minute; it counts as usual unless two in a row are slower than that."""
        self.minutes.append(minute)
        usual = self.usual
        if usual is None or minute.step_time <= (1 + SLOWER) * usual:
            self.normal.append(minute.step_time)
            self.slowed = []
        else:
            self._slow_down(minute)

    def _slow_down(self, minute: Minute) -> None:
        """Ends the changes after which it is no longer slower, and begins one if it is slower than after the last."""
        while len(self.slowed) > 1 and minute.step_time < (self.slowed[-2][1] + self.slowed[-1][1]) / 2:
            self.slowed.pop()
        if not self.slowed or minute.step_time > FURTHER * self.slowed[-1][1]:
            self.slowed.append((minute.time, minute.step_time))

    def base_before(self, moment: int) -> float | None:
        """Returns the usual step time (s) in the hour before a moment; None if it is not known."""
        first = moment - BASE_MINUTES * MINUTE
        found = [m.step_time for m in self.minutes if first <= m.time and m.time + MINUTE <= moment]
        return median(found) if len(found) >= LEAST_MINUTES else None

    def pace_at(self, moment: int) -> float | None:
        """Returns the step time (s) just before a moment: of the newest LEAST_MINUTES, none older than twice that."""
        found = [m.step_time for m in self.minutes if moment - 2 * LEAST_MINUTES * MINUTE <= m.time <= moment - MINUTE]
        return median(found[-LEAST_MINUTES:]) if found else None

    def recent(self, since: int, now: int) -> float | None:
        """Returns the step time (s) of the newest minutes after `since`; None without one in ten minutes."""
        since = max(since, now - 10 * MINUTE)
        newest = itertools.islice(reversed(self.minutes), _RECENT)
        found = [m.step_time for m in newest if m.time >= since]
        if self._samples and self._open >= since - since % MINUTE:
            found.append(median(self._samples))
        return median(found) if found else None

    def hang_limit(self) -> int:
        """Returns the time without a step (us) from which it hangs: beyond its usual step and its longest pause."""
        young = len(self.minutes) < BASE_MINUTES
        pause = max((m.pause for m in self.minutes), default=0)
        step = (self.usual or 0.0) * SECOND
        return int(max(NEW_HANG if young else LEAST_HANG, _OF_STEPS * step, _OF_PAUSES * pause))

    def waits_at(self, now: int) -> bool:
        """Returns whether no step is seen for longer than ever: it hangs, or its telemetry is missing."""
        waits = now - self.moved_at
        return self.moved_at > 0 and waits > LEAST_HANG and waits > self.hang_limit()  # mostly without reading minutes

    def known_at(self, now: int) -> int:
        """Returns until when it is known whether it makes steps (us): its newest report, or `now` if it hung for as
        long as agents report that."""
        known = max(self.reported_at, self.moved_at)
        return now if known - self.moved_at >= REPORTED_FOR else min(now, known)

    def hangs_at(self, now: int) -> bool:
        """Returns whether its ranks report that they made no step for longer than ever."""
        return self.waits_at(self.known_at(now))

    def pauses_at(self, now: int) -> bool:
        """Returns whether its next step is late: it saves, evaluates, or begins to hang."""
        return now - self.moved_at > 2 * (self.usual or 0.0) * SECOND + 20 * SECOND

    def measure_loss(self, base: float, start: int, end: int, now: int) -> float:
        """Returns the time (us) in [start, end) of which the job made no use, at a usual step time of `base` s.

        A minute of step time v loses the share 1 - base / v. Nothing is known of times without a minute: what a hang
        costs is in `gaps`, and older minutes are not kept. The open minute, which is the rest, is as the recent ones.
        """
        lost, covered = 0.0, start
        for m in self._within(start, end):
            overlap = min(m.time + MINUTE, end) - max(m.time, covered)
            if overlap > 0:
                lost += overlap * (1 - base / m.step_time)
                covered = max(covered, min(m.time + MINUTE, end))
        known = self.minutes[-1].time + MINUTE if self.minutes else self._open or self.moved_at
        rest, recent = end - max(covered, known), self.recent(start, now)
        if rest > 0 and recent is not None:
            lost += rest * (1 - base / recent)
        return lost

    def _within(self, start: int, end: int) -> list[Minute]:
        found = list[Minute]()
        for m in reversed(self.minutes):
            if m.time + MINUTE <= start:
                break
            if m.time < end:
                found.append(m)
        return found[::-1]


class PaceBook:
    """The pace of all jobs whose ranks report steps. `read` costs a sort of the ranks that made a step."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobPace] = {}
        self._names: list[str] = []
        self._job_of: NDArray[np.int32] = np.zeros(0, np.int32)
        self._known: object = None
        self._last: NDArray[np.float64] = np.zeros(0)

    def read(self, frame: Frame, job_of: Mapping[str, str], version: object) -> Iterator[tuple[str, Minute]]:
        """Adds an instant of the ranks; yields the minutes that end. job_of: rank -> job.  version: of that mapping."""
        if STEP not in frame.values or STEP_TIME not in frame.values:
            return
        self._place(frame, job_of, version)
        steps, times = frame[STEP], frame[STEP_TIME]
        moved = np.isfinite(steps) & np.isfinite(times) & (steps != self._last) & (times > 0)
        seen = np.isfinite(steps)
        known = np.isfinite(self._last)
        self._last[seen] = steps[seen]
        for first in (True, False):
            at = np.flatnonzero(moved & (known != first) & (self._job_of >= 0))
            for slot, step_time, step in _medians(self._job_of[at], times[at], steps[at]):
                name = self._names[slot]
                if first and not ((pace := self.jobs.get(name)) and pace.follows(frame.time, step)):
                    continue
                if (closed := self.jobs.setdefault(name, JobPace()).add(frame.time, step_time, step)) is not None:
                    yield name, closed
        reported = np.bincount(self._job_of[seen & (self._job_of >= 0)], minlength=len(self._names))
        for number in np.flatnonzero(reported).tolist():
            if (known_pace := self.jobs.get(self._names[number])) is not None:
                known_pace.reported_at, known_pace.restored = frame.time, False
        for name, pace in self.jobs.items():
            if (closed := pace.close_minute(frame.time)) is not None:
                yield name, closed

    def _place(self, frame: Frame, job_of: Mapping[str, str], version: object) -> None:
        """Finds the job of each rank of a frame, again after a change of either."""
        entities = frame.entities
        if len(self._last) < len(entities):
            self._last = np.append(self._last, np.full(len(entities) - len(self._last), np.nan))
        known = (version, len(entities))
        if self._known == known:
            return
        names = [job_of.get(rank, "") for rank in entities]
        self._names = [name for name in dict.fromkeys(names) if name]
        slots = {name: i for i, name in enumerate(self._names)}
        self._job_of = np.array([slots.get(name, -1) for name in names], np.int32)
        self._known = known

    def forget(self, jobs: Iterable[str]) -> None:
        """Drops jobs that ended long ago."""
        for job in jobs:
            self.jobs.pop(job, None)


def _medians(groups: NDArray[np.int32], *columns: NDArray[np.float64]) -> Iterator[tuple[int, float, float]]:
    """Yields (group, median of the first column, median of the second)."""
    if not len(groups):
        return
    found = []
    for values in columns:
        order = np.lexsort((values, groups))
        sorted_groups = groups[order]
        starts = np.flatnonzero(np.concatenate([[True], sorted_groups[1:] != sorted_groups[:-1]]))
        ends = np.append(starts[1:], len(order)) - 1
        ordered = values[order]
        found.append((ordered[(starts + ends) // 2] + ordered[(starts + ends + 1) // 2]) / 2)
    for i, start in enumerate(starts.tolist()):
        yield int(sorted_groups[start]), float(found[0][i]), float(found[1][i])
