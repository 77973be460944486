"""Finds GPUs that draw more or less than their like at the same clock and activity.

What a GPU of a product ought to draw at its clock and activity: a straight line, refitted all the time for a day.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.budget import GPUS, budget_line
from detectors.base.cohorts import Key
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report, make_evidence
from detectors.base.gates import Gates
from detectors.base.group_events import GroupEvents, Quantity
from detectors.base.streams import Bools, Channel, Floats, Step, Streams
from detectors.base.throttle import CAPPED, THROTTLE, has_reason, read_reasons
from detectors.straggler.gpu_placement import GpuPlacement
from pipeline.model.records import SECOND, Finding, Frame, Level

_DAY = 86_400.0  # s after which a sample counts 1/e
_READY = 300.0  # s of somebody's work before a line is believed; chosen
_OUTLIER = 0.25  # logarithm by which a sample counts as off its line at most: one that is broken bends no line; chosen
_IDLE = 0.15  # share of the power that no work explains: an H100 idles at 70 to 100 W of 700
_STIFF = 0.05  # relative spread of the work below which the usual slope counts for more than the fitted one; chosen
_SUMS = 6  # weight, x, y, xx, xy, seconds


class DrawFit:
    """Least squares of power on work (clock in GHz x activity) by product, in running sums with a day of memory."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}
        self._key: Key = ()
        self._kind = np.empty(0, np.int32)
        self._names: list[str] = []

    def expected(self, frame: Frame, work: Floats, power: Floats, inner: Bools, seconds: float) -> Floats:
        """(N,) W by the lines as they were, NaN without one; then learns from whose power is finite.

        inner: whose activity is that of the multiprocessors; utilisation says less, and has lines of its own.
        """
        kind = 2 * self._kinds(frame) + inner
        sums = np.array([self.sums.get(name, [0.0] * _SUMS) for name in self._names]).reshape(-1, _SUMS)
        level, slope = _lines(sums)
        line = level[kind] + slope[kind] * work
        line = np.where(line > 1, line, np.nan)
        told = np.isfinite(power) & np.isfinite(work)
        if told.any() and seconds > 0:
            y = np.where(np.isfinite(line), np.clip(power, line * np.exp(-_OUTLIER), line * np.exp(_OUTLIER)), power)
            self._learn(sums, kind[told], work[told], y[told], seconds)
        return line

    def _learn(self, sums: Floats, kind: NDArray[np.int32], x: Floats, y: Floats, seconds: float) -> None:
        count = np.bincount(kind, minlength=len(sums))
        seen = count > 0
        sums[seen, :5] *= np.exp(-seconds / _DAY)
        for k, column in enumerate((None, x, y, x * x, x * y)):
            sums[:, k] += seconds * (count if column is None else np.bincount(kind, column, len(sums)))
        sums[seen, 5] = np.minimum(sums[seen, 5] + seconds, _DAY)
        self.sums |= {self._names[k]: sums[k].tolist() for k in np.flatnonzero(seen).tolist()}

    def _kinds(self, frame: Frame) -> NDArray[np.int32]:
        """(N,) number of each GPU's product."""
        key = (id(frame.topology), frame.topology.version, len(frame.entities))
        if key != self._key:
            attributes, numbers = frame.topology.attributes, dict[str, int]()
            skus = [str(attributes.get(gpu, {}).get("sku", "")) for gpu in frame.entities]
            self._kind = np.array([numbers.setdefault(sku, len(numbers)) for sku in skus], np.int32)
            self._names = [f"{sku}|{what}" for sku in numbers for what in ("utilization", "sm_active")]
            self._key = key
        return self._kind

    def snapshot(self) -> dict[str, Any]:
        return {name: list(sums) for name, sums in self.sums.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.sums = {name: list(sums) for name, sums in state.items()}


def _lines(sums: Floats) -> tuple[Floats, Floats]:
    """(level, slope) of each; NaN where too little was seen."""
    ready = sums[:, 5] >= _READY
    weight, x, y, xx, xy, _ = np.where(ready[:, None], sums, np.nan).T
    x, y = x / weight, y / weight
    usual, stiff = (1 - _IDLE) * y / x, (_STIFF * x) ** 2
    slope = np.maximum(xy / weight - x * y + stiff * usual, 0.0) / (np.maximum(xx / weight - x * x, 0.0) + stiff)
    return y - slope * x, slope


_HELD_DOWN = CAPPED | THROTTLE
"""The voltage falls with the clock there, so that the line of those at full clock says nothing."""
_BUSY = 0.2  # activity below which the board itself draws most of the power; chosen
_RHYTHM = 30  # s between two looks: half of what is smoothed over; chosen
_JITTER = 4  # s by which frames are dated apart; chosen
_SMOOTH = 60.0  # s over which power and work are averaged alike: they are read at other moments; chosen
_STEPS = 0.3  # share by which the work differs from its average while the load steps; chosen
_MOST = 60.0  # s for which a hole in the telemetry counts
_FEWEST, _AT_WORK = 4, 0.2  # members of a cohort, and share of it, that must be at work; as thermal has it
_TOGETHER = Quantity(
    ("gpu.power", "gpu.sm_clock"), "draw more than the others at their work", "draw less than the others at their work"
)
_PHASE = 1800 * SECOND  # for so long many must be off alike: three phases of a job; chosen
_NODE = 0.5  # share of a node's GPUs on one side from which on its work or its host is odd, not a board; chosen
_K_PER_W = 0.03  # least thermal resistance of a liquid-cooled GPU; air-cooled ones have more
_FOLLOWS, _LEAST_K = 0.35, 1.0  # share of the heat that a true change of power shows at least, and K; chosen


@dataclass
class PowerDraw(Detector):
    """PCC on ln(P / P_fit): board power against a line of clock x activity by product, refitted over a day.

    Compared are the GPUs of a product in a stage or job, else in a rack, and each with its own past. Suspect: 10 % more
    or less than its like for `hold` s: a voltage regulator, a power limit, or the meter. Ticket after `patience` s, if
    the activity of the multiprocessors and the job are known (else other work looks the same) and its temperature
    follows the power: where it does not the meter lies, which telemetry_sensor tells. Never a page. Not judged: idle
    GPUs, those held down (power cap 0x4, heat, brake), steps of the load, announced work, and half a node at once.

    Source: dynamic power goes as clock x activity at one voltage (Weste and Harris, CMOS VLSI Design, section 5.2);
    delta: identical GPUs differ by 8 % (Sinha et al., SC 2022). hold: twice the longest benign slowdown of 300 s;
    patience: chosen, a change that outlasts most phases of a job.
    """

    name: ClassVar[str] = "power_draw"
    family: ClassVar[str] = "power"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = ("gpu.power", "gpu.sm_clock")
    any_of: ClassVar[tuple[str, ...]] = ("gpu.sm_active", "gpu.utilization")
    wants: ClassVar[tuple[str, ...]] = (
        *("gpu.throttle_reasons", "gpu.temperature"),
        *("event:maintenance_start", "event:maintenance_end", "event:version"),
    )
    cannot_see: ClassVar[str] = (
        "Less than 10 %, what was so from the beginning, idle and capped GPUs (a low power limit takes the clock "
        "along), and what half a node's GPUs show at once."
    )

    delta: float = 0.10
    hold: float = 600.0
    patience: float = 21_600.0

    fit: DrawFit = part(DrawFit)
    draws: Streams = part(lambda: Streams(Channel(floor=0.02, delta=0.10, phi=0.6, both=True)))
    heats: Streams = part(lambda: Streams(Channel(floor=0.8, delta=_LEAST_K, phi=0.6, both=True)))
    gates: Gates = part(Gates)
    seats: GpuPlacement = part(GpuPlacement)
    group: GroupEvents = part(lambda: GroupEvents(_TOGETHER, _PHASE))
    power: Floats = memory(np.nan)  # W and GHz, smoothed alike
    work: Floats = memory(np.nan)
    inner: Bools = memory(False, np.bool_)  # whether the activity of the multiprocessors was ever told
    placed: Bools = memory(False, np.bool_)
    worked: Bools = memory(False, np.bool_)
    since: Any = memory(0, np.int64)  # when a condition began, in us
    newest: dict[str, int] = notes()
    conditions: OpenConditions = notes()

    def __post_init__(self) -> None:
        self.draws.channel = Channel(floor=0.02, delta=self.delta, phi=0.6, both=True)

    def budget(self) -> list[str]:
        return [
            f"draw: {budget_line(self.draws.channel, GPUS, _RHYTHM)}",
            f"temperature: only a condition of the draw asks for it; {self.hold:g} s of hold, and it never pages",
        ]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        self.gates.update(frames)
        frame = frames.get("gpu")
        if frame is None or not len(frame.entities):
            return []
        self._renamed(frame, frames)
        last = self.newest.get("at", 0)
        if frame.time - last < (_RHYTHM - _JITTER) * SECOND:
            return []
        self.newest["at"] = frame.time
        seconds = min((frame.time - last) / SECOND, _MOST) if last else _RHYTHM
        self._renew(frame)
        gate = self._smooth(frame, seconds)
        learnt = np.where(gate, self.power[: len(gate)], np.nan)
        line = self.fit.expected(frame, self.work[: len(gate)], learnt, self.inner[: len(gate)], seconds)
        gate = self._enough(gate & np.isfinite(line))
        step = self.draws.step(np.log(learnt / line), self.seats.groups, frame.time, gate)
        heat = self.heats.step(frame["gpu.temperature"], self.seats.groups, frame.time, gate)
        sure = self.inner[: len(gate)] & self.seats.job_known  # else other work looks the same
        seats = self.seats
        alike = self.group.update(frame, frame.entities, step, seats.cohort_name, self.gates, self.name, sure)
        on = step.on & ~step.moved
        if not on.any():
            self.since[:] = 0
            close_ended(self.conditions, set())
            return alike
        return [*self._told(frame, step, heat, on), *alike]

    def _renew(self, frame: Frame) -> None:
        """Learns those anew on whom people worked, or whose company is another."""
        n, seats = len(frame.entities), self.seats
        working = self.gates.maintenance_mask(frame)
        anew = self.worked[:n] != working
        self.worked[:n] = working
        others = seats.update_topology(frame)
        if others is not None:  # among peers a GPU's own offset stays as it was; without them the job made it
            lone = ~seats.job_known | ~self.placed[:n] | (seats.groups < 0)
            anew |= others & lone
            self.placed[:n] = seats.job_known
        told = frame["gpu.sm_active"]
        first = np.isfinite(told) & ~self.inner[:n]
        self.inner[:n] |= first
        anew |= first
        if anew.any():
            self._forget(anew)

    def _forget(self, mask: Bools) -> None:
        n = len(mask)
        self.power[:n][mask] = self.work[:n][mask] = np.nan
        self.since[:n][mask] = 0
        for streams in (self.draws, self.heats):
            streams.reset(mask)

    def _renamed(self, frame: Frame, frames: Mapping[str, Frame]) -> None:
        """Learns those anew whose software or firmware changed, or that of what they are part of."""
        self.grow(len(frame.entities))
        named = {e.entity for each in frames.values() for e in each.events if e.kind == "version"}
        if named:
            above = frame.topology.ancestors
            self._forget(np.array([e in named or not named.isdisjoint(above(e)) for e in frame.entities], bool))

    def _smooth(self, frame: Frame, seconds: float) -> Bools:
        """Follows power and work; whose may be judged now."""
        n = len(frame.entities)
        activity = np.where(self.inner[:n], frame["gpu.sm_active"], frame["gpu.utilization"])
        now_w, now_x = frame["gpu.power"], activity * frame["gpu.sm_clock"] / 1000.0
        power, work = self.power[:n], self.work[:n]
        bits, _ = read_reasons(frame["gpu.throttle_reasons"])
        held_down = has_reason(bits, _HELD_DOWN)
        usable = (now_w > 1) & (activity >= _BUSY) & (now_x > 0) & np.isfinite(now_w + now_x)
        usable &= ~held_down & ~self.worked[:n]
        steady = np.abs(now_x - work) <= _STEPS * work
        share = 1 - np.exp(-seconds / _SMOOTH)
        for mean, now in ((power, now_w), (work, now_x)):
            mean += np.where(usable, share * (now - mean), 0.0)
            fresh = usable & np.isnan(mean)
            mean[fresh] = now[fresh]
        idle = (activity < _BUSY) | held_down
        power[idle] = work[idle] = np.nan
        return np.asarray(usable & steady)

    def _enough(self, gate: Bools) -> Bools:
        """Not those of a cohort of which few are at work: who hangs on when a job waits is odd."""
        groups = self.seats.groups
        mine, size = groups >= 0, int(groups.max(initial=0)) + 1
        count, whole = np.bincount(groups[gate & mine], minlength=size), np.bincount(groups[mine], minlength=size)
        few = count < np.maximum(_FEWEST, _AT_WORK * whole)
        return np.asarray(gate & ~(mine & few[groups]))

    def _told(self, frame: Frame, step: Step, heat: Step, on: Bools) -> list[Finding]:
        """since: a condition lasts while its stream is on, though the load may stop for a while."""
        n = len(on)
        on = on & ~self._whole_node(step, on)
        since = self.since[:n]
        first = on & (since == 0)
        since[first] = frame.time - np.minimum(step.held[first], int(self.hold)) * SECOND
        since[~on] = 0
        due = on & (frame.time - since >= self.hold * SECOND) & (np.abs(step.effect) >= self.delta / 2)
        close_ended(self.conditions, {frame.entities[i] for i in np.flatnonzero(due).tolist()})
        out, unheard = [], "gpu.temperature" not in frame.values
        for i in np.flatnonzero(due & step.judged & np.isfinite(self.power[:n])).tolist():
            follows = self._follows(step, heat, i)
            sure = bool(self.inner[i]) and bool(self.seats.job_known[i]) and (follows or unheard)
            level: Level = "ticket" if sure and frame.time - since[i] >= self.patience * SECOND else "suspect"
            if told := due_report(self.conditions, frame.entities[i], frame.time, int(since[i]), level):
                out.append(self._finding(frame, step, i, follows, *told))
        return out

    def _whole_node(self, step: Step, on: Bools) -> Bools:
        """(N,) those of nodes of which many are off on one side."""
        node, off = self.seats.node, np.zeros(len(on), bool)
        known, size = node >= 0, int(self.seats.node.max(initial=-1)) + 1
        whole = np.bincount(node[known], minlength=size)
        for side in (on & step.below, on & ~step.below):
            count = np.bincount(node[known & side], minlength=size)
            many = np.append((count > 1) & (count >= _NODE * whole), False)
            off |= side & many[node]
        return off

    def _follows(self, step: Step, heat: Step, i: int) -> bool | None:
        """Whether its temperature moved as the power says; None where none is told."""
        if not heat.judged[i]:
            return None
        watts = float(self.power[i]) * -np.expm1(-float(step.effect[i]))
        own = float(heat.effect[i])
        return bool(own * watts > 0 and abs(own) >= max(_FOLLOWS * _K_PER_W * abs(watts), _LEAST_K))

    def _finding(self, frame: Frame, step: Step, i: int, follows: bool | None, onset: int, level: Level) -> Finding:
        gpu, watts, off = frame.entities[i], float(self.power[i]), float(np.expm1(step.effect[i]))
        usual, alone = watts / (1 + off), bool(step.alone[i])
        cohort, spread = self.seats.cohort_name(i), None if alone else usual * float(step.spread[i])
        peers = 0 if alone else max(int(step.size[i]) - 1, 0)
        compared = Comparison(watts, usual, spread, cohort, peers, off, "W")
        why = {
            True: "its temperature follows: a voltage regulator or another power limit",
            False: "its temperature does not follow: more likely the meter",
            None: "its temperature tells nothing yet: a voltage regulator, a power limit or the meter",
        }[follows]
        side = "more" if off > 0 else "less"
        words = f"{gpu} draws {watts:.0f} W, {abs(off):.0%} {side} than {usual:.0f} W at the same clock and activity"
        summary = f"{words} ({cohort}); {why}"
        clears = f"ends when its power is within {self.delta / 2:.0%} of the usual at its clock and activity"
        activity = "gpu.sm_active" if self.inner[i] else "gpu.utilization"
        told = make_evidence(clears, compared, work_ghz=round(float(self.work[i]), 3), activity=activity)
        signals = ("gpu.power", "gpu.sm_clock", activity)
        return Finding(frame.time, onset, gpu, self.name, level, float(step.score[i]), summary, told, signals)
