"""Finds GPUs that draw more or less power than their peers at the same clock and activity.

Expected power: a straight line of power on clock x activity for each product, refitted continuously over a day.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.budget import GPUS, budget_line
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report
from detectors.base.gates import Gates
from detectors.base.group_events import GroupEvents, Quantity
from detectors.base.state import State
from detectors.base.streams import Bools, Channel, Floats, Step, Streams
from detectors.base.throttle import CAPPED, THROTTLE, has_reason, read_reasons
from detectors.base.topology_index import per_topology
from detectors.straggler.gpu_placement import GpuPlacement
from pipeline.model.entity_names import pager_title
from pipeline.model.records import SECOND, Finding, Frame, Level

_DAY = 86_400.0  # s after which a sample counts 1/e
_READY = 300.0  # s of work of any GPU before a line is used; chosen
_OUTLIER = 0.25  # most that a sample counts as off its line (logarithm): a broken board bends no line; chosen
_IDLE = 0.15  # share of the power that no work explains: an H100 idles at 70 to 100 W of 700
_STIFF = 0.05  # relative spread of the work below which the usual slope counts for more than the fitted one; chosen
_SUMS = 6  # weight, x, y, xx, xy, seconds
_HELD_DOWN = CAPPED | THROTTLE
"""Under these the voltage falls with the clock, so that the line of GPUs at full clock does not hold."""
_BUSY = 0.2  # activity below which the board itself draws most of the power; chosen
_EVERY = 30  # s between two evaluations: half of the smoothing time; chosen
_JITTER = 4  # s of jitter of frame times; chosen
_SMOOTH = 60.0  # s over which power and work are averaged alike: they are read at different moments; chosen
_STEPS = 0.3  # share by which the work differs from its average during a load step; chosen
_LONGEST = 60.0  # s that a gap in the telemetry counts at most
_LEAST_WORKING, _WORKING_SHARE = 4, 0.2  # members of a cohort, and share of it, that must be working; as for thermal
_TOGETHER = Quantity(("gpu.power", "gpu.sm_clock"), "draw more at equal load", "draw less at equal load")
_PHASE = 1800 * SECOND  # us for which many must be off alike: three phases of a job; chosen
_NODE = 0.5  # share of a node's GPUs on one side from which the cause is its work or its host, not a board; chosen
_K_PER_W = 0.03  # least thermal resistance of a liquid-cooled GPU; air-cooled ones have more
_FOLLOWS, _LEAST_K = 0.35, 1.0  # share of the heat, and K, that a real change of power shows at least; chosen


@dataclass
class DrawFit(State):
    """Least squares of power on work (clock in GHz x activity) by product. sums: running, with a day of memory."""

    sums: dict[str, list[float]] = notes()

    def expect(self, frame: Frame, work: Floats, power: Floats, sm: Bools, seconds: float) -> Floats:
        """Returns (N,) W by the lines so far, NaN without one; then learns from GPUs with finite power.

        sm: whose activity is that of the multiprocessors; utilization is less exact and has separate lines.
        """
        product, names = self._number_products(frame)
        line_of = 2 * product + sm
        sums = np.array([self.sums.get(name, [0.0] * _SUMS) for name in names]).reshape(-1, _SUMS)
        level, slope = _fit_lines(sums)
        line = level[line_of] + slope[line_of] * work
        line = np.where(line > 1, line, np.nan)
        known = np.isfinite(power) & np.isfinite(work)
        if known.any() and seconds > 0:
            y = np.where(np.isfinite(line), np.clip(power, line * np.exp(-_OUTLIER), line * np.exp(_OUTLIER)), power)
            self._learn(sums, names, line_of[known], work[known], y[known], seconds)
        return line

    def _learn(
        self, sums: Floats, names: list[str], line_of: NDArray[np.int32], x: Floats, y: Floats, seconds: float
    ) -> None:
        count = np.bincount(line_of, minlength=len(sums))
        seen = count > 0
        sums[seen, :5] *= np.exp(-seconds / _DAY)
        for k, column in enumerate((None, x, y, x * x, x * y)):
            sums[:, k] += seconds * (count if column is None else np.bincount(line_of, column, len(sums)))
        sums[seen, 5] = np.minimum(sums[seen, 5] + seconds, _DAY)
        self.sums |= {names[k]: sums[k].tolist() for k in np.flatnonzero(seen).tolist()}

    @per_topology
    def _number_products(self, frame: Frame) -> tuple[NDArray[np.int32], list[str]]:
        """Returns (N,) number of each GPU's product, and the names of the lines: two for each product."""
        attributes, numbers = frame.topology.attributes, dict[str, int]()
        skus = [str(attributes.get(gpu, {}).get("sku", "")) for gpu in frame.entities]
        product = np.array([numbers.setdefault(sku, len(numbers)) for sku in skus], np.int32)
        return product, [f"{sku}|{activity}" for sku in numbers for activity in ("utilization", "sm_active")]


def _fit_lines(sums: Floats) -> tuple[Floats, Floats]:
    """Returns (level, slope) of each line; NaN where too little was measured."""
    ready = sums[:, 5] >= _READY
    weight, x, y, xx, xy, _ = np.where(ready[:, None], sums, np.nan).T
    x, y = x / weight, y / weight
    usual, stiff = (1 - _IDLE) * y / x, (_STIFF * x) ** 2
    slope = np.maximum(xy / weight - x * y + stiff * usual, 0.0) / (np.maximum(xx / weight - x * x, 0.0) + stiff)
    return y - slope * x, slope


@dataclass
class PowerDraw(Detector):
    """Peer-conditioned CUSUM on ln(P / P_fit): power against a line of clock x activity by product, refitted daily.

    Compares GPUs of one product within a stage or job, else within a rack, and each with its own past. Suspect: 10 %
    more or less than its peers for `hold` s: a voltage regulator, a power limit, or the meter. Ticket after `patience`
    s, if the activity of the multiprocessors and the job are known (else other work looks the same) and its temperature
    follows the power: where it does not, the meter is wrong, which telemetry_sensor reports. Never a page. Not judged:
    idle GPUs, those that are limited (power cap 0x4, heat, brake), load steps, announced maintenance, and half a node
    together.

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
        "Less than 10 %; differences from the beginning; idle and capped GPUs (a low power limit lowers the clock "
        "too); and what half of a node's GPUs show at the same time."
    )

    delta: float = 0.10
    hold: float = 600.0
    patience: float = 21_600.0

    fit: DrawFit = part(DrawFit)
    draws: Streams = part(lambda: Streams(Channel(floor=0.02, delta=0.10, phi=0.6, both=True)))
    heats: Streams = part(lambda: Streams(Channel(floor=0.8, delta=_LEAST_K, phi=0.6, both=True)))
    gates: Gates = part(Gates)
    placement: GpuPlacement = part(GpuPlacement, kept=True)
    group: GroupEvents = part(lambda: GroupEvents(_TOGETHER, _PHASE))
    power: Floats = memory(np.nan)  # W, smoothed
    work: Floats = memory(np.nan)  # GHz x activity, smoothed alike
    sm: Bools = memory(False, np.bool_)  # whether the activity of the multiprocessors was ever reported
    job_known: Bools = memory(False, np.bool_)
    in_maintenance: Bools = memory(False, np.bool_)
    since: NDArray[np.int64] = memory(0, np.int64)  # us, when a condition began
    newest: dict[str, int] = notes()
    conditions: OpenConditions = notes()

    def __post_init__(self) -> None:
        self.draws.channel = Channel(floor=0.02, delta=self.delta, phi=0.6, both=True)

    def budget(self) -> list[str]:
        """Returns the false alarm rate of its test of power."""
        return [
            f"draw: {budget_line(self.draws.channel, GPUS, _EVERY)}",
            f"temperature: only a condition of the draw asks for it; {self.hold:g} s of hold, and it never pages",
        ]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings on GPUs that draw more or less than clock and activity explain."""
        self.gates.update(frames)
        frame = frames.get("gpu")
        if frame is None or not len(frame.entities):
            return []
        self._relearn_updated(frame, frames)
        last = self.newest.get("at", 0)
        if frame.time - last < (_EVERY - _JITTER) * SECOND:
            return []
        self.newest["at"] = frame.time
        seconds = min((frame.time - last) / SECOND, _LONGEST) if last else _EVERY
        self._relearn_moved(frame)
        gate = self._smooth(frame, seconds)
        learned = np.where(gate, self.power[: len(gate)], np.nan)
        line = self.fit.expect(frame, self.work[: len(gate)], learned, self.sm[: len(gate)], seconds)
        gate = self._exclude_idle_cohorts(gate & np.isfinite(line))
        groups = self.placement.groups
        step = self.draws.step(np.log(learned / line), groups, frame.time, gate)
        heat = self.heats.step(frame["gpu.temperature"], groups, frame.time, gate)
        sure = self.sm[: len(gate)] & self.placement.job_known  # else other work looks the same
        cohort = self.placement.cohort_name
        alike = self.group.update(frame, frame.entities, step, cohort, self.gates, self.name, sure)
        on = step.on & ~step.moved
        if not on.any():
            self.since[:] = 0
            close_ended(self.conditions, set())
            return alike
        return [*self._report(frame, step, heat, on), *alike]

    def _relearn_moved(self, frame: Frame) -> None:
        """Resets GPUs after maintenance, with other peers, or whose activity is read from another signal."""
        n, placement = len(frame.entities), self.placement
        in_maintenance = self.gates.maintenance_mask(frame)
        changed = self.in_maintenance[:n] != in_maintenance
        self.in_maintenance[:n] = in_maintenance
        regrouped = placement.update_topology(frame)
        if regrouped is not None:  # among peers a GPU's own offset stays as it was; without peers the job made it
            lone = ~placement.job_known | ~self.job_known[:n] | (placement.groups < 0)
            changed |= regrouped & lone
            self.job_known[:n] = placement.job_known
        first = np.isfinite(frame["gpu.sm_active"]) & ~self.sm[:n]
        self.sm[:n] |= first
        changed |= first
        if changed.any():
            self._relearn(changed)

    def _relearn(self, mask: Bools) -> None:
        n = len(mask)
        self.power[:n][mask] = self.work[:n][mask] = np.nan
        self.since[:n][mask] = 0
        for streams in (self.draws, self.heats):
            streams.reset(mask)

    def _relearn_updated(self, frame: Frame, frames: Mapping[str, Frame]) -> None:
        """Resets GPUs whose software or firmware changed, or that of what they are part of."""
        self.grow(len(frame.entities))
        updated = {e.entity for each in frames.values() for e in each.events if e.kind == "version"}
        if updated:
            above = frame.topology.ancestors
            self._relearn(np.array([e in updated or not updated.isdisjoint(above(e)) for e in frame.entities], bool))

    def _smooth(self, frame: Frame, seconds: float) -> Bools:
        """Smooths power and work; returns (N,) which GPUs may be judged now."""
        n = len(frame.entities)
        activity = np.where(self.sm[:n], frame["gpu.sm_active"], frame["gpu.utilization"])
        now_w, now_x = frame["gpu.power"], activity * frame["gpu.sm_clock"] / 1000.0
        power, work = self.power[:n], self.work[:n]
        bits, _ = read_reasons(frame["gpu.throttle_reasons"])
        held_down = has_reason(bits, _HELD_DOWN)
        usable = (now_w > 1) & (activity >= _BUSY) & (now_x > 0) & np.isfinite(now_w + now_x)
        usable &= ~held_down & ~self.in_maintenance[:n]
        steady = np.abs(now_x - work) <= _STEPS * work
        share = 1 - np.exp(-seconds / _SMOOTH)
        for mean, now in ((power, now_w), (work, now_x)):
            mean += np.where(usable, share * (now - mean), 0.0)
            fresh = usable & np.isnan(mean)
            mean[fresh] = now[fresh]
        idle = (activity < _BUSY) | held_down
        power[idle] = work[idle] = np.nan
        return np.asarray(usable & steady)

    def _exclude_idle_cohorts(self, gate: Bools) -> Bools:
        """Returns the gate without cohorts of which few members work: those that do while a job waits differ."""
        groups = self.placement.groups
        grouped, size = groups >= 0, int(groups.max(initial=0)) + 1
        working, whole = (np.bincount(groups[mask], minlength=size) for mask in (gate & grouped, grouped))
        few = working < np.maximum(_LEAST_WORKING, _WORKING_SHARE * whole)
        return np.asarray(gate & ~(grouped & few[groups]))

    def _report(self, frame: Frame, step: Step, heat: Step, on: Bools) -> list[Finding]:
        """Returns the findings that are due. A condition lasts while its stream is on, though the load may stop."""
        n = len(on)
        on = on & ~self._find_whole_nodes(step, on)
        since = self.since[:n]
        first = on & (since == 0)
        since[first] = frame.time - np.minimum(step.held[first], int(self.hold)) * SECOND
        since[~on] = 0
        due = on & (frame.time - since >= self.hold * SECOND) & (np.abs(step.effect) >= self.delta / 2)
        close_ended(self.conditions, {frame.entities[i] for i in np.flatnonzero(due).tolist()})
        found, unknown = [], "gpu.temperature" not in frame.values
        for i in np.flatnonzero(due & step.judged & np.isfinite(self.power[:n])).tolist():
            follows = self._temperature_follows(step, heat, i)
            sure = bool(self.sm[i]) and bool(self.placement.job_known[i]) and (follows or unknown)
            level: Level = "ticket" if sure and frame.time - since[i] >= self.patience * SECOND else "suspect"
            if report := due_report(self.conditions, frame.entities[i], frame.time, int(since[i]), level):
                found.append(self._draw_finding(frame, step, i, follows, report))
        return found

    def _find_whole_nodes(self, step: Step, on: Bools) -> Bools:
        """Returns (N,) GPUs of nodes of which many are off on the same side."""
        node, off = self.placement.node, np.zeros(len(on), bool)
        known, size = node >= 0, int(self.placement.node.max(initial=-1)) + 1
        whole = np.bincount(node[known], minlength=size)
        for side in (on & step.below, on & ~step.below):
            count = np.bincount(node[known & side], minlength=size)
            many = np.append((count > 1) & (count >= _NODE * whole), False)
            off |= side & many[node]
        return off

    def _temperature_follows(self, step: Step, heat: Step, i: int) -> bool | None:
        """Returns whether the temperature moved as the power does; None where it is not measured."""
        if not heat.judged[i]:
            return None
        watts = float(self.power[i]) * -np.expm1(-float(step.effect[i]))
        kelvin = float(heat.effect[i])
        return bool(kelvin * watts > 0 and abs(kelvin) >= max(_FOLLOWS * _K_PER_W * abs(watts), _LEAST_K))

    def _draw_finding(self, frame: Frame, step: Step, i: int, follows: bool | None, due: tuple[int, Level]) -> Finding:
        gpu, watts, off = frame.entities[i], float(self.power[i]), float(np.expm1(step.effect[i]))
        usual, alone = watts / (1 + off), bool(step.alone[i])
        cohort, spread = self.placement.cohort_name(i), None if alone else usual * float(step.spread[i])
        peers = 0 if alone else max(int(step.size[i]) - 1, 0)
        side, warmer = ("more", "warmer") if off > 0 else ("less", "cooler")
        note = {True: f", and is {warmer}", False: "; likely its meter", None: ""}[follows]
        text = f"draws {watts:.0f} W, {100 * abs(off):.0f} % {side} than expected at this load{note}"
        activity = "gpu.sm_active" if self.sm[i] else "gpu.utilization"
        return self.finding(
            frame.time,
            gpu,
            due,
            score=float(step.score[i]),
            summary=pager_title(gpu, text),
            signals=("gpu.power", "gpu.sm_clock", activity),
            clears=f"ends when its power is within {self.delta / 2:.0%} of the expected at its clock and activity",
            compared=Comparison(watts, usual, spread, cohort, peers, off, "W"),
            work_ghz=round(float(self.work[i]), 3),
            activity=activity,
        )
