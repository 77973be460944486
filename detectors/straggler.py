"""Finds ranks that compute slower than their own pipeline stage, and says whether their GPU shows why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.baseline import CELL, LEARN, Cells, Floats, Pcc, grouped_median
from detectors.cohorts import Cohorts, Index
from detectors.conditions import Open, close, tell
from detectors.detector import Detector, memory, notes
from pipeline.records import SECOND, Finding, Frame, Level

_RECENT = 10
_STEPS = np.dtype([("ratio", "<f8", (_RECENT,))])
# NVML clock event reasons that are no policy: hardware slowdown, software and hardware thermal, power brake
_THROTTLE = 0x8 | 0x20 | 0x40 | 0x80
_FRESH = 60 * SECOND  # how long a throttle bit explains slowness; chosen
_CLOCK = Pcc(floor=0.01, delta=0.03)  # 3 % of clock: above the 15 MHz steps in which clocks are told; chosen


@dataclass
class Straggler(Detector):
    """PCC on ln(compute time) within the pipeline stage; stages differ by design and are never pooled.

    Suspect once the sum passes `threshold` and the smoothed slowdown `delta` (natural logarithm), or once the median
    of ten steps is `ratio` times the stage's. Page at once if the rank's GPU lost clock against its peers or sets a
    throttle bit; else after `hold` s (`quick_hold` s above `quick_effect`) among at least `peers` ranks. A stage of
    which more than `most` is slow blames nobody.

    Source: the clipped form of Page's CUSUM (Biometrika 41, 1954); Greyhound (2025) for the check that the mean
    moved; Lin et al. (2025) found workers the main cause in only 1.7 % of slow jobs, so a slow stage blames nobody.
    """

    name: ClassVar[str] = "straggler"
    family: ClassVar[str] = "straggler"
    device_class: ClassVar[str] = "rank"
    needs: ClassVar[tuple[str, ...]] = ("rank.compute_time",)
    wants: ClassVar[tuple[str, ...]] = ("rank.step", "gpu.sm_clock", "gpu.throttle_reasons")
    blind: ClassVar[str] = (
        "A rank that was slow from its first sample by less than 1.25, and slowness of a third of a stage at once."
    )

    threshold: float = 21.0
    delta: float = 0.03
    ratio: float = 1.25
    hold: float = 600.0
    quick_effect: float = 0.2
    quick_hold: float = 360.0
    peers: int = 8
    most: float = 0.3

    cells: Cells = memory(0, CELL)
    clocks: Cells = memory(0, CELL)
    recent: Cells = memory(0, _STEPS)
    throttled: NDArray[np.int64] = memory(0, np.int64)
    behind: NDArray[np.int64] = memory(0, np.int64)
    steps: NDArray[np.float64] = memory(np.nan)
    conditions: Open = notes()
    _stages: Cohorts = field(default_factory=lambda: Cohorts("stage", "job"), init=False, repr=False)
    _gpus: Index = field(default_factory=lambda: Index("gpu"), init=False, repr=False)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        frame = frames.get("rank")
        if frame is None or not len(frame.entities):
            return []
        self.grow(len(frame.entities))
        stages = self._stages.of(frame)
        seconds = frame["rank.compute_time"]
        times = np.log(np.where(seconds > 0, seconds, np.nan))
        median, size = grouped_median(times, stages)
        residual = np.where((size > 1) & self._finished(frame), times - median, np.nan)
        Pcc(0.01, self.delta, self.threshold).step(self._head(self.cells, frame), residual, stages, frame.time)
        self._watch_gpus(frame, frames.get("gpu"), stages)
        slow = self._slow(frame, residual)
        judged = np.isfinite(residual)
        guilty = self._not_the_stage(slow, judged, stages)
        return self._findings(frame, guilty, slow, judged, seconds, stages)

    @staticmethod
    def _head(cells: Cells, frame: Frame) -> Cells:
        return cells[: len(frame.entities)]

    def _finished(self, frame: Frame) -> NDArray[np.bool_]:
        """Ranks that finished a step since the last look; the same step told twice is no second witness."""
        step, last = frame["rank.step"], self.steps[: len(frame.entities)]
        known = np.isfinite(step)
        fresh = ~known | (step != last)
        last[known] = step[known]
        return np.asarray(fresh)

    def _slow(self, frame: Frame, residual: Floats) -> NDArray[np.bool_]:
        """Ranks with a condition: the CUSUM's, or far behind the stage in the median of ten steps."""
        known = np.isfinite(residual)
        recent, cells = self._head(self.recent, frame)["ratio"], self._head(self.cells, frame)
        recent[known] = np.roll(recent[known], 1, axis=1)
        recent[known, 0] = residual[known]
        limit = np.log(self.ratio)
        behind = self._head(self.behind, frame)
        # half of the limit ends it, so that a ratio near the limit does not flicker
        near = np.flatnonzero((cells["count"] > LEARN) & ((residual > limit / 2) | (behind > 0)) & known)
        typical = np.median(recent[near], axis=1)
        began = np.where(behind[near] == 0, frame.time, behind[near])
        behind[near] = np.where(typical >= np.where(behind[near] > 0, limit / 2, limit), began, 0)
        return np.asarray(cells["on"] | (behind > 0))

    def _not_the_stage(
        self, slow: NDArray[np.bool_], known: NDArray[np.bool_], stages: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """Without the ranks of stages of which too many are slow: there the median is no witness."""
        if not slow.any():
            return slow
        groups = stages + 1
        size = np.bincount(groups, known, int(groups.max()) + 1)
        share = np.bincount(groups, slow & known, len(size)) / np.maximum(size, 1)
        return np.asarray(slow & known & (stages >= 0) & ~((share > self.most) & (size >= 4))[groups])

    def _watch_gpus(self, frame: Frame, gpus: Frame | None, stages: NDArray[np.int32]) -> None:
        """Keeps what the ranks' GPUs show: clock against the stage's clocks, and throttle bits."""
        if gpus is None:
            return
        clock = self._gpus.take(frame, gpus, "gpu.sm_clock")
        speed = np.log(np.where(clock > 0, clock, np.nan))
        slower = grouped_median(speed, stages)[0] - speed
        _CLOCK.step(self._head(self.clocks, frame), slower, stages, frame.time)
        bits = np.nan_to_num(self._gpus.take(frame, gpus, "gpu.throttle_reasons")).astype(np.uint64)
        self._head(self.throttled, frame)[(bits & np.uint64(_THROTTLE)) != 0] = frame.time

    def _findings(
        self,
        frame: Frame,
        guilty: NDArray[np.bool_],
        slow: NDArray[np.bool_],
        judged: NDArray[np.bool_],
        seconds: Floats,
        stages: NDArray[np.int32],
    ) -> list[Finding]:
        unjudged = slow & ~judged
        close(self.conditions, {frame.entities[i] for i in np.flatnonzero(guilty | unjudged).tolist()})
        found = []
        for i in np.flatnonzero(guilty).tolist():
            others = np.flatnonzero((stages == stages[i]) & np.isfinite(seconds))
            others = others[others != i]
            reason = self._reason(i, frame.time)
            level = self._level(i, frame.time, len(others) + 1, bool(reason))
            began = [t for t, holds in ((self.cells["since"][i], self.cells["on"][i]), (self.behind[i],) * 2) if holds]
            due = tell(self.conditions, frame.entities[i], frame.time, int(min(began)), level)
            if due:
                found.append(
                    self._finding(frame, i, due, seconds, float(np.median(seconds[others])), len(others), reason)
                )
        return found

    def _level(self, i: int, time: int, peers: int, corroborated: bool) -> Level:
        """Page with a physical cause at once, else after the hold and only among enough peers."""
        if corroborated:
            return "page"
        cell = self.cells[i]
        hold = self.quick_hold if cell["effect"] >= self.quick_effect else self.hold
        held = cell["on"] and cell["above"] > 0 and time - int(cell["above"]) >= hold * SECOND
        return "page" if held and peers >= self.peers else "suspect"

    def _reason(self, i: int, time: int) -> dict[str, Any]:
        """What the rank's GPU shows; empty if nothing."""
        reason: dict[str, Any] = {}
        if self.clocks["effect"][i] >= _CLOCK.delta and self.clocks["sum"][i] > _CLOCK.threshold / 2:
            reason["sm_clock_below_peers"] = round(float(np.expm1(self.clocks["effect"][i])), 4)
        if self.throttled[i] and time - int(self.throttled[i]) <= _FRESH:
            reason["throttled"] = True
        return reason

    def _finding(
        self,
        frame: Frame,
        i: int,
        due: tuple[int, Level],
        seconds: Floats,
        expected: float,
        peers: int,
        reason: dict[str, Any],
    ) -> Finding:
        entity, value = frame.entities[i], float(seconds[i])
        slowdown = value / expected
        evidence: dict[str, Any] = {
            "slowdown": round(slowdown, 4),
            "value": value,
            "expected": expected,
            "peers": peers,
        }
        for kind in ("gpu", "node", "stage"):
            if (above := frame.topology.above_of_kind(entity, kind)) is not None:
                evidence[kind] = above
        seen = {"sm_clock_below_peers": "gpu.sm_clock", "throttled": "gpu.throttle_reasons"}
        why = f"; its GPU shows {' and '.join(k.replace('_', ' ') for k in reason)}" if reason else ""
        return Finding(
            time=frame.time,
            onset=due[0],
            entity=entity,
            detector=self.name,
            level=due[1],
            score=float(max(self.cells["sum"][i], 0.0)),
            summary=f"{entity} computes {value:.3g} s a step, {slowdown:.2f} times its stage's {expected:.3g} s{why}",
            evidence={**evidence, **reason},
            signals=("rank.compute_time", *(seen[k] for k in reason)),
        )
