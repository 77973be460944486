"""How fast whole jobs step beside their own past, and whether computing or the network made them slower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.streams import LEARN, Bools, Channel, Floats, Streams
from detectors.straggler.places import Places
from pipeline.records import SECOND, Frame

LOOK = 30 * SECOND
"""How often the pace of jobs is judged: some steps of a large job. Chosen."""
_PARTS = ("step", "compute", "network", "capped")
_LEARNING = 0.02  # of what is usual: about 50 looks of memory, 25 minutes; chosen
_SMOOTH = 0.3  # of what is now: about 3 looks; chosen
_STILL = 0.05  # share by which steps must be longer now for a part to be blamed: half of what matters
_HALF = 0.5  # of what a step takes longer must be found in one part of it to blame that part; chosen
_POLICY = 0.25  # more of the GPUs under a power cap than usual: the cap explains the rest; chosen
Maker = Literal["network", "job", "rank", "cap", "over"]


@dataclass(frozen=True, slots=True)
class Pace:
    """What a job does now and usually. stage: of those whose median computes longest; made: what made it slower."""

    step: float
    usual: float
    compute: float
    usual_compute: float
    network: float
    usual_network: float
    made: Maker


class Paces:
    """One cell per job slot: what a step usually takes, and of what it is made."""

    def __init__(self) -> None:
        self.streams = Streams(Channel(0.02, 0.10))
        self.now = {name: np.empty(0) for name in _PARTS}
        self.usual = {name: np.empty(0) for name in _PARTS}
        self.count = np.empty(0, np.int64)
        self.since = np.empty(0, np.int64)
        self.looked = 0

    def look(self, frame: Frame, places: Places, of: NDArray[np.int32], jobs: int, gate: Bools, capped: Bools) -> bool:
        """Takes the steps of an instant; whether it was time to. of: (S,) job slot of each rank; gate: (jobs,)."""
        self._grow(jobs)
        if 0 <= frame.time - self.looked < LOOK:
            return False
        self.looked = frame.time
        mine = of >= 0
        step = _mean(places.take(frame, "rank.step_time"), of, mine, jobs)
        compute = places.medians(places.take(frame, "rank.compute_time"))
        network = places.take(frame, "rank.communication_time")
        longest, least = np.full(jobs, -np.inf), np.full(jobs, np.inf)
        with np.errstate(invalid="ignore"):
            np.fmax.at(longest, of[mine], compute[mine])
            np.fmin.at(least, of[mine], network[mine])
        found = (step, longest, least, _mean(capped.astype(float), of, mine, jobs))
        for name, values in zip(_PARTS, found, strict=True):
            last = self.now[name]
            mean = np.where(np.isfinite(last), last + _SMOOTH * (values - last), values)
            last[:] = np.where(np.isfinite(mean), mean, last)
        with np.errstate(divide="ignore", invalid="ignore"):
            value = np.log(step)
        gate = gate & np.isfinite(value)
        self.streams.step(value, np.full(jobs, -1, np.int32), frame.time, gate)
        self.since[self.streams.cells[kernel.UP, :jobs] <= 0] = frame.time
        self._learn(gate & (self.streams.cells[kernel.UP, :jobs] <= 2))
        return True

    def _learn(self, take: Bools) -> None:
        """Follows what is usual, but not while a job may be slow."""
        self.count += take
        gain = np.maximum(1 / np.maximum(self.count, 1), _LEARNING) * take
        for name in _PARTS:
            moved = self.usual[name] + gain * (self.now[name] - self.usual[name])
            self.usual[name] = np.where(np.isfinite(moved), moved, self.usual[name])

    def slow(self) -> NDArray[np.intp]:
        """Jobs that are slower than their own past."""
        words = self.streams.cells[kernel.WORD].view(np.uint32)
        return np.flatnonzero(((words & kernel.ON_UP) != 0)[: len(self.count)] & (self.count >= LEARN))

    def of(self, job: int) -> Pace:
        """One job, and what made it slower: the network if collectives take the time, the job if a stage does."""
        now, usual = ({name: float(cells[name][job]) for name in _PARTS} for cells in (self.now, self.usual))
        longer = {name: now[name] - usual[name] for name in _PARTS}
        made: Maker = "rank"
        if not longer["step"] >= _STILL * usual["step"]:
            made = "over"
        elif longer["capped"] >= _POLICY:
            made = "cap"
        elif longer["network"] >= _HALF * longer["step"]:
            made = "network"
        elif longer["compute"] >= _HALF * longer["step"]:
            made = "job"
        both = [(now[name], usual[name]) for name in _PARTS[:3]]
        return Pace(*both[0], *both[1], *both[2], made)

    def effect(self, job: int) -> float:
        """Share by which its steps are longer, smoothed."""
        return float(np.expm1(self.streams.cells[kernel.EFFECT, job]))

    def score(self, job: int) -> float:
        return float(self.streams.cells[kernel.UP, job])

    def forget(self, jobs: NDArray[np.intp]) -> None:
        """Jobs of which nothing is known any more."""
        self._grow(int(jobs.max(initial=-1)) + 1)
        mask = np.zeros(self.streams.cells.shape[1], bool)
        mask[jobs[jobs < len(mask)]] = True
        self.streams.forget(mask)
        self.count[jobs] = self.since[jobs] = 0
        for name in _PARTS:
            self.usual[name][jobs], self.now[name][jobs] = 0.0, np.nan

    def _grow(self, size: int) -> None:
        if (more := size - len(self.count)) > 0:
            self.count, self.since = (np.append(cells, np.zeros(more, np.int64)) for cells in (self.count, self.since))
            self.usual = {name: np.append(cells, np.zeros(more)) for name, cells in self.usual.items()}
            self.now = {name: np.append(cells, np.full(more, np.nan)) for name, cells in self.now.items()}

    def snapshot(self) -> dict[str, Any]:
        names = ("now", "usual", "count", "since", "looked")
        return {"streams": self.streams.snapshot(), **{name: getattr(self, name) for name in names}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.streams.restore(state["streams"])
        for name in state.keys() - {"streams"}:
            setattr(self, name, state[name])


def _mean(values: Floats, of: NDArray[np.int32], mine: Bools, jobs: int) -> Floats:
    """(jobs,) mean of what is known of each job's ranks; NaN of none."""
    known = mine & np.isfinite(values)
    total, size = np.bincount(of[known], values[known], jobs), np.bincount(of[known], minlength=jobs)
    with np.errstate(invalid="ignore"):
        return np.asarray(total / np.where(size > 0, size, np.nan))
