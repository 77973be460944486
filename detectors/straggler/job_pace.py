"""How fast whole jobs go against their own past: a stream per job, and what else is known of each, now and usually."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.state import State, memory, notes, part, parts, piece_of
from detectors.base.streams import LEARN, Bools, Channel, Floats, Streams
from pipeline.model.records import SECOND

Ints = NDArray[np.int64]
STILL_SLOWER = 0.05
"""Share by which a job must be slower now, too: half of what matters, so that a finding ends with its cause. Chosen."""
_SMOOTH = 0.3  # gain of the present value: memory of about 3 updates; chosen
_LEARNING = 0.02  # gain of the usual value: memory of 50 updates; chosen
_SWINGING = 1 / 240  # gain of the swings: memory of two hours; chosen
_STALE = 300 * SECOND  # us without a judged update after which sums restart: the job rested; chosen
_STAYS = 4 * 3600 * SECOND
"""us after which a slower job is at its usual pace: its owner changed it, or accepts it. Chosen: half a shift."""


@dataclass
class JobMeasure(State):
    """One measure by job slot: its value now, smoothed, and its usual value."""

    now: Floats = memory(np.nan)
    usual: Floats = memory(np.nan)


@dataclass
class JobPace(State):
    """By job slot. streams: ln of the time per step, or of its stand-in.   count: updates learned from.

    swing: mean square of its smoothed departure while it is not slow.   since: since when it is slow.
    judged_at: last judged update.   source: number of the stand-in.   jobs: slots.
    """

    streams: Streams = part(lambda: Streams(Channel(0.02, 0.10)))
    measures: dict[str, JobMeasure] = parts(JobMeasure)
    count: Ints = memory(0, np.int64)
    swing: Floats = memory(0.0)
    since: Ints = memory(0, np.int64)
    judged_at: Ints = memory(0, np.int64)
    source: NDArray[np.int8] = memory(0, np.int8)
    jobs: dict[str, int] = notes()

    def assign_slots(self, names: list[str]) -> tuple[Ints, NDArray[np.intp]]:
        """Returns (jobs + 1,) slot of each job, the last, -1, for none; and the slots of new jobs, which take those of
        jobs that are gone."""
        for job in self.jobs.keys() - set(names):
            del self.jobs[job]
        free = iter(sorted(set(range(len(names) + len(self.count))) - set(self.jobs.values())))
        fresh = [self.jobs.setdefault(job, next(free)) for job in names if job not in self.jobs]
        self.grow(1 + max(self.jobs.values(), default=-1))
        self.streams.grow(len(self.count))
        self.reset_jobs(fresh)
        return np.array([*(self.jobs[job] for job in names), -1], np.int64), np.array(fresh, np.intp)

    def update(
        self,
        found: Mapping[str, Floats],
        slower: Floats,
        source: NDArray[np.int8],
        gate: Bools,
        time: int,
        calm: Bools | None = None,
    ) -> None:
        """Adds an update. found: (slots,) by name.   slower: ln of the time per step.   source: what it is from.

        gate: jobs that may be judged, and learn; calm: learn what is usual."""
        size = len(self.count)
        for name, values in found.items():
            measure = piece_of(self.measures, name, JobMeasure)
            measure.grow(size)
            mean = np.where(np.isfinite(measure.now), measure.now + _SMOOTH * (values - measure.now), values)
            np.copyto(measure.now, mean, where=np.isfinite(mean))
        gate = gate & np.isfinite(slower)
        recent = (self.count > 0) & (time - self.judged_at <= _STALE)
        gate &= ~(recent & (source > self.source))  # a reading of the better measure is only late
        self.reset_jobs(np.flatnonzero(gate & (self.source != source) & (self.count > 0)))
        self.source[gate] = source[gate]
        rested = np.flatnonzero(gate & (self.judged_at > 0) & (time - self.judged_at > _STALE))
        self.streams.clear_conditions(rested)
        self.judged_at[gate] = time
        self.streams.step(slower, np.full(size, -1, np.int32), time, gate)
        up = self.streams.cells[kernel.UP, :size]
        self.since[up <= 0] = time
        learns = gate & (up <= 2) & (True if calm is None else calm)
        self.count += learns
        gain = np.maximum(1 / np.maximum(self.count, 1), _LEARNING) * learns
        square = np.square(self.streams.cells[kernel.EFFECT, :size].astype(np.float64))
        self.swing += np.maximum(1 / np.maximum(self.count, 1), _SWINGING) * learns * (square - self.swing)
        for measure in self.measures.values():
            moved = np.where(np.isfinite(measure.usual), measure.usual, measure.now)
            moved = moved + gain * (measure.now - moved)
            np.copyto(measure.usual, moved, where=learns & np.isfinite(moved))
        self.reset_jobs(np.flatnonzero(time - self.since > _STAYS))

    def slow_jobs(self) -> list[tuple[str, int]]:
        """Returns (job, slot) of jobs that are slower than their own past."""
        on = (self.streams.cells[kernel.WORD, : len(self.count)].view(np.uint32) & kernel.ON_UP) != 0
        on &= self.count >= LEARN
        return [(name, slot) for name, slot in sorted(self.jobs.items()) if on[slot]] if on.any() else []

    def values(self, slot: int) -> tuple[dict[str, float], dict[str, float]]:
        """Returns the measures of a job by name, now and usually; NaN where they are unknown."""
        pieces = self.measures.items()
        return {k: float(m.now[slot]) for k, m in pieces}, {k: float(m.usual[slot]) for k, m in pieces}

    def shares(self, name: str) -> Floats:
        """Returns (slots,) a measure as a share of its usual value; NaN where it is unknown or not learned."""
        if name not in self.measures:
            return np.full(len(self.count), np.nan)
        measure = self.measures[name]
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where((self.count >= LEARN) & (measure.usual > 0), measure.now / measure.usual, np.nan)

    def reset_jobs(self, slots: Iterable[int]) -> None:
        """Resets jobs that start again, or whose present pace is accepted."""
        mask = np.zeros(len(self.count), bool)
        mask[list(slots)] = True
        if mask.any():
            self.reset(mask)
