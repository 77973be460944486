"""Finds coolant loops that lose flow or deliver warm coolant, each against its own past.

Loops of one kind that depart together are reported once, on what they share: the hall's water or its pumps. Blamed are
only loops that depart themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.budget import DAY_S, rule_line
from detectors.base.calibration import arl0
from detectors.base.cohorts import comparable_attributes
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report
from detectors.base.gates import Gates
from detectors.base.state import State
from detectors.base.streams import ALONE, USUAL_STEP, Bools, Channel, Floats, Streams
from detectors.base.topology_index import EVERYTHING, per_device_topology, pop_members_mask
from detectors.heat.coolant_loops import (
    DOUBTED,
    LEAST,
    LEAST_DT,
    PG25,
    CoolantRules,
    FlowState,
    HeatBalance,
    LoopGpus,
    LoopJudge,
    LoopSteps,
    LoopVerdict,
    SupplyState,
    count_collapsed,
    follow_flow,
)
from pipeline.model.entity_names import pager_title
from pipeline.model.records import LEVELS, SECOND, Finding, Frame, Level, to_json
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import kind_of

_SIGNALS = ("coolant.flow", "coolant.supply_temperature", "coolant.pressure", "pump.speed")
_VALID = np.array([CATALOGUE[signal].valid for signal in _SIGNALS])[:, :, None]
_LOGARITHMS = (0, 2, 3)  # rows judged as -ln: a fall is harm
_TOGETHER, _MOST = 3, 0.6  # comparable loops, and share of them, that have one cause: two coincide too often; chosen
_CRITICAL = CATALOGUE["coolant.status"].states.index("critical")
_LOOKS = 2  # readings in a row of a status: one may be that of a BMC that starts; chosen
_DURING = 600 * SECOND  # us within which departures of one cause begin: coolant mixes within minutes; chosen


@dataclass
class FailedUnits(State):
    """CDUs, pumps and other units that their BMC reports as critical. (N,) each.

    count: readings of that in a row.   since: of the first of them.
    """

    count: NDArray[np.int32] = memory(0, np.int32)
    since: NDArray[np.int64] = memory(0, np.int64)

    def find(self, frame: Frame, gate: Bools) -> list[int]:
        """Returns the units with such a status; of a unit and its parts only the parts. gate: those not in
        maintenance."""
        n, status = len(frame.entities), frame["coolant.status"]
        self.grow(n)
        count, since = self.count[:n], self.since[:n]
        since[(status == _CRITICAL) & (count == 0)] = frame.time
        np.minimum(since, frame.time, out=since)  # the clock may have been set back
        count[:] = np.where(np.isnan(status), count, np.where(status == _CRITICAL, count + 1, 0))
        failed = np.flatnonzero((count >= _LOOKS) & gate).tolist()
        above = {e for i in failed for e in frame.topology.ancestors(frame.entities[i])}
        return [i for i in failed if frame.entities[i] not in above]


@dataclass
class Coolant(Detector):
    """CUSUM on ln(flow) downwards and supply temperature upwards, each loop against its own past; pressure, pump speed,
    return temperature and the GPUs' power confirm or excuse it.

    Flow: suspect from `flow_notice`; ticket after a minute, unless the pump was turned down. Page: two samples in a row
    below `collapse` of the usual flow, or less flow while GPUs of the loop throttle by heat. Ticket: `flow_delta` less
    with pressure or pump speed moved too, or, where neither is measured, after `hold` s. Flow that falls alone, while
    pressure and pump are constant, is the meter: a suspect. But where the coolant carries as much heat as before it is
    a restricted branch. Flow that falls with the power of its GPUs, or of all where its own are not known, follows the
    load: a suspect.

    Supply: suspect from `temperature_delta` K; page if GPUs of the loop throttle by heat, or it rose faster than its
    noise and any change of a set-point or of the weather, and as much again would bring one of its GPUs to its limit;
    ticket after `hold` s if none is near, or once it is `warm` K above usual and rose faster than weather or alone.
    What jumps within one sample is the sensor's unless the return follows; what rises on top of a jump is judged as any
    other rise, and after an hour the new level is the usual one.

    Three or more comparable loops, and 60 % of them, that lose flow within ten minutes, or that become warm, are one
    finding on what they share (hall, facility, else site:all); a failed pump here and a warm supply there are not.

    A pump, CDU or other unit that its BMC reports as critical is a ticket, whatever the flow: another pump may still
    carry the loop.

    Source: heat balance dT = 15.1 * kW / (L/min) for 25 % propylene glycol: a lost pump spends a GPU's margin in about
    12 s, so flow under 70 % of the loop's own past pages without waiting for statistics; CUSUM of Page (1954); pressure
    goes with the square of the flow, speed with it (affinity laws of pumps); 20 K/h is the most that ASHRAE allows;
    Redfish Status, Critical: "requires immediate attention" (DSP0268).
    """

    name: ClassVar[str] = "coolant"
    family: ClassVar[str] = "coolant"
    device_class: ClassVar[str] = "coolant"
    needs: ClassVar[tuple[str, ...]] = ("coolant.flow",)
    wants: ClassVar[tuple[str, ...]] = (
        *("coolant.supply_temperature", "coolant.return_temperature", "coolant.pressure", "pump.speed"),
        "coolant.status",
        *("gpu.power", "gpu.throttle_reasons", "gpu.temperature", "gpu.thermal_margin", "gpu.slowdown_margin"),
        *("gpu.operating_max_margin", "event:maintenance_start", "event:maintenance_end"),
    )
    cannot_see: ClassVar[str] = (
        "A single node's cold plate; fouling over weeks; whether water, valve or heat exchanger warms the supply; and "
        "the minutes until a loop's GPUs throttle."
    )

    threshold: float = 18.5
    flow_notice: float = 0.02
    """ln; the error of a flow meter, 2 %; half as much again until the site is known (detectors.base.calibration)."""
    flow_delta: float = 0.1
    temperature_delta: float = 2.75
    """K; three less half a step of noise, so that 3 K are found; chosen."""
    warm: float = 4.0
    """K; more than a set-point is moved by in one step, 1 to 3 K; chosen."""
    collapse: float = 0.7
    hold: float = 600.0

    flow: Streams = part(lambda: Streams(Channel(floor=0.004, delta=0.02, phi=0.6)))
    warmth: Streams = part(lambda: Streams(Channel(floor=0.3, delta=2.75, phi=0.9)))
    pressure: Streams = part(lambda: Streams(Channel(floor=0.02, delta=0.05, phi=0.6, both=True)))
    speed: Streams = part(lambda: Streams(Channel(floor=0.01, delta=0.05, phi=0.6, both=True)))
    load: Streams = part(lambda: Streams(Channel(floor=0.02, delta=0.05, phi=0.6, both=True)))
    balance: HeatBalance = part(HeatBalance)
    gates: Gates = part(Gates)
    flows: FlowState = part(FlowState)
    supplies: SupplyState = part(SupplyState)
    failed: FailedUnits = part(FailedUnits, kept=True)
    accepted: list[str] = notes(list)
    conditions: OpenConditions = notes()
    _gpus: LoopGpus = field(default_factory=LoopGpus, init=False, repr=False)
    _alone: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32), init=False, repr=False)

    def __post_init__(self) -> None:
        self.flow.channel = Channel(0.004, self.flow_notice, 0.6, self.threshold)
        self.warmth.channel = Channel(0.3, self.temperature_delta, 0.9, self.threshold)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings on loops with less flow or warmer supply than in their past."""
        self.gates.update(frames)
        frame, gpus = frames.get("coolant"), frames.get("gpu")
        if frame is None or not len(frame.entities):
            return []
        n, time = len(frame.entities), frame.time
        self.flows.grow(n)
        self.supplies.grow(n)
        self._reset_accepted(frame)
        gate = ~self.gates.maintenance_mask(frame)
        values = _read_values(frame)
        values[1] = self.supplies.update(values[1], frame["coolant.return_temperature"], self.temperature_delta, time)
        expected = self._find_usual_flow(n)
        if len(self._alone) != n:
            self._alone = np.full(n, -1, np.int32)
        power = -np.log(self._gpus.sum_power(frame, gpus))
        rows = zip((self.flow, self.warmth, self.pressure, self.speed, self.load), (*values, power), strict=True)
        flow, warmth, pressure, speed, load = (piece.step(row, self._alone, time, gate) for piece, row in rows)
        self.flows.ready[:n] |= flow.judged
        self._follow_flows(frame, values[0] - expected, expected, flow.effect, gate)
        calm = gate & ~flow.on & (flow.effect < self.flow_notice) & (self.flows.low[:n] == 0)
        fallen = np.where(flow.effect >= self.flow_notice, values[0] - expected, 0.0)
        self.balance.update(frame, power, calm, fallen)
        if (settled := self.supplies.settle(warmth, time)).any():
            self.warmth.reset(settled)
        return self._report(LoopSteps(frame, gpus, flow, warmth, pressure, speed, load, expected), gate)

    def budget(self) -> list[str]:
        """Returns the false alarm rates of flow and warmth of a loop."""
        return [
            *(f"{name}: {loop_budget_line(s.channel)}" for name, s in (("flow", self.flow), ("warmth", self.warmth))),
            f"witnesses: {rule_line('pressure, pump speed and power, which report nothing by themselves')}",
            f"status: {rule_line('what BMCs report as critical, twice in a row')}",
            f"collapse: {rule_line(f'two samples in a row under {self.collapse:.0%} of the usual flow')}",
        ]

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """Learns a loop, or all below what loops share, again from the next frame of loops on."""
        self.accepted.append(entity)

    def _reset_accepted(self, frame: Frame) -> None:
        if (mask := pop_members_mask(self.accepted, frame)) is not None:
            pieces = (self.flow, self.warmth, self.pressure, self.speed, self.load, self.balance)
            for piece in (*pieces, self.flows, self.supplies):
                piece.reset(mask)

    def _find_usual_flow(self, n: int) -> Floats:
        """Returns (N,) -ln of the usual flow; NaN for loops that are not learnt yet."""
        found, cells = np.full(n, np.nan), self.flow.cells
        known = min(cells.shape[1], n)
        found[:known] = cells[0, :known]
        found[~self.flows.ready[:n]] = np.nan
        return found

    def _follow_flows(
        self, frame: Frame, lost: Floats, expected: Floats, effect: NDArray[np.float32], gate: Bools
    ) -> None:
        """Follows collapses, and flows that are back."""
        n, time, flows = len(gate), frame.time, self.flows
        count_collapsed(frame["coolant.flow"], expected, gate, self.collapse, time, flows.low[:n], flows.low_since[:n])
        state = flows.large_since[:n], flows.well[:n], flows.back[:n]
        follow_flow(lost, effect, self.flow_delta, time, *state)

    def _report(self, steps: LoopSteps, gate: Bools) -> list[Finding]:
        """Returns findings on loops that depart, and on what they share where most do."""
        frame, n = steps.frame, len(gate)
        low = (steps.flow.on | (self.flows.low[:n] >= 2)) & ~self.flows.back[:n]
        warm = steps.warmth.on | (self.supplies.quick_at[:n] > 0)
        bad, found, failed = low | warm, list[Finding](), self.failed.find(frame, gate)
        holding = {frame.entities[i] for i in np.flatnonzero(bad).tolist()}
        holding |= {f"{frame.entities[i]}|status" for i in failed}
        measured = np.isfinite(frame["coolant.flow"]) | np.isfinite(frame["coolant.supply_temperature"])
        rules = CoolantRules(self.flow_delta, self.temperature_delta, self.warm, self.hold)
        groups = self._find_comparable(frame)
        judge = LoopJudge(rules, self.flows, self.supplies, self.pressure, self.speed, self.balance, self._gpus, groups)
        # flow that is back, though not yet for long enough to end the condition, is not reported
        due = bad & measured & gate & (warm | (self.flows.well[:n] == 0))
        verdicts = {i: judge.decide(steps, i) for i in np.flatnonzero(due).tolist()}
        for mine, others in self._find_shared(verdicts, np.where(measured & gate, groups, -1), frame.time):
            entity = find_common_ancestor(frame, [*mine, *others])
            holding.add(entity)
            found += self._report_shared(steps, entity, {i: verdicts.pop(i) for i in mine}, others)
        close_ended(self.conditions, holding)
        for i, verdict in verdicts.items():
            now = due_report(self.conditions, frame.entities[i], frame.time, verdict.onset, verdict.level)
            if now is not None:
                found.append(self._loop_finding(steps, i, now, verdict))
        for i in failed:
            key, since = f"{frame.entities[i]}|status", int(self.failed.since[i])
            due_now = due_report(self.conditions, key, frame.time, since, "ticket")
            if due_now is not None and np.isfinite(frame["coolant.status"][i]):
                found.append(self._failed_finding(frame, i, due_now))
        return found

    def _failed_finding(self, frame: Frame, i: int, due: tuple[int, Level]) -> Finding:
        speed = float(frame["pump.speed"][i])
        return self.finding(
            *(frame.time, frame.entities[i], due),
            score=1.0,
            summary=pager_title(frame.entities[i], f"failed, status critical{f', {speed:.0f} rpm' * (speed >= 0)}"),
            signals=("coolant.status", "pump.speed") if speed >= 0 else ("coolant.status",),
            clears="ends when its BMC does not report it as critical any more",
            speed=to_json(speed),
        )

    def _find_shared(
        self, verdicts: Mapping[int, LoopVerdict], groups: NDArray[np.int32], time: int
    ) -> list[tuple[list[int], list[int]]]:
        """Returns loops that depart together, and others that begin to: loops with less flow, or with enough flow that
        is warm, but not both as one. groups: (N,) comparable loops that are measured, else -1."""
        found, rising = [], self.supplies.find_rising(len(groups), self.temperature_delta, time)
        for group, low in sorted({(int(groups[i]), v.low) for i, v in verdicts.items()}, reverse=True):
            mine = [i for i, v in verdicts.items() if groups[i] == group and v.low is low]
            began = float(np.median([verdicts[i].onset for i in mine]))
            mine = [i for i in mine if abs(verdicts[i].onset - began) <= _DURING]
            warm = any(verdicts[i].warm for i in mine)
            others = [i for i in np.flatnonzero(rising & (groups == group)).tolist() if i not in verdicts and warm]
            count = len(mine) + len(others)
            if count >= _TOGETHER and count >= _MOST * np.count_nonzero(groups == group):
                found.append((mine, others))
        return found

    def _report_shared(
        self, steps: LoopSteps, entity: str, mine: Mapping[int, LoopVerdict], others: list[int]
    ) -> list[Finding]:
        """Returns the finding on what loops share, if it is due; the worst one of them represents all."""
        frame = steps.frame
        worst = max(mine, key=lambda i: (LEVELS.index(mine[i].level), mine[i].score, -i))
        verdict, onset = mine[worst], min(v.onset for v in mine.values())
        now = due_report(self.conditions, entity, frame.time, onset, verdict.level)
        if now is None:
            return []
        text = "; ".join(verdict.describe(steps, worst))
        more: dict[str, Any] = {
            "loops": [e for some in (mine, others) for e in sorted(frame.entities[i] for i in some)][:16],
            "judged": len(mine) + len(others),
            DOUBTED: now[1] == "suspect" and all(v.doubted for v in mine.values()),
            "supply_rise": max(round(v.rise, 2) for v in mine.values()),
        }
        return [
            self.finding(
                *(frame.time, entity, now),
                score=verdict.score,
                summary=pager_title(entity, f"{len(mine) + len(others)} loops: {text}"),
                signals=verdict.signals,
                clears="ends when flow and supply of the loops are back at their usual values",
                compared=_compare(steps, worst, verdict),
                **more,
            )
        ]

    def _loop_finding(self, steps: LoopSteps, i: int, now: Any, verdict: LoopVerdict) -> Finding:
        entity, parts = steps.frame.entities[i], verdict.describe(steps, i)
        count = len(self._gpus.find(entity, steps.gpus))
        affected = f", cools {count} GPUs" if count and len(parts) == 1 else ""
        more: dict[str, Any] = {
            "corroborated_by": list(verdict.others),
            DOUBTED: now[1] == "suspect" and verdict.doubted,
        }
        if verdict.warm:
            more |= {"supply_rise": round(verdict.rise, 2)}
            more |= {"supply_temperature": to_json(float(steps.frame["coolant.supply_temperature"][i]))}
        more |= _measure_heat(steps, i, self._gpus)
        return self.finding(
            *(steps.frame.time, entity, now),
            score=verdict.score,
            summary=pager_title(entity, "; ".join(parts) + affected),
            signals=verdict.signals,
            clears=f"ends when the {'flow' if verdict.low else 'supply'} is back at its usual value",
            compared=_compare(steps, i, verdict),
            **more,
        )

    @per_device_topology
    def _find_comparable(self, frame: Frame) -> NDArray[np.int32]:
        """Returns (N,) group number of each loop; loops of one kind with the same attributes have the same."""
        numbers: dict[str, int] = {}
        kinds = [f"{kind_of(e)} {comparable_attributes(frame.topology.attributes.get(e, {}))}" for e in frame.entities]
        return np.array([numbers.setdefault(kind, len(numbers)) for kind in kinds], np.int32)


def find_common_ancestor(frame: Frame, members: list[int]) -> str:
    """Returns the nearest entity above all of these loops."""
    first, *others = [frame.topology.ancestors(frame.entities[i]) for i in members]
    shared = set(first).intersection(*others)
    return next((e for e in first if e in shared), EVERYTHING)


def loop_budget_line(channel: Channel) -> str:
    """Returns what the stream of a loop, such as that of one CDU, costs in false alarms, as one line.

    Each loop is judged by its own past, at a higher threshold.
    """
    threshold, sides = channel.limit(USUAL_STEP) + ALONE, 1 + channel.both
    run = arl0(threshold) / sides
    days = run * USUAL_STEP / DAY_S
    return (
        f"threshold {threshold:g} at {USUAL_STEP:g} s ({channel.threshold:g}, and {ALONE:g} more without peers):"
        f" 1 false alarm per {run:.2g} ticks and loop ({days / 365.25:,.0f} years), at most {1000 / days:.2g} suspects"
        " per 1,000 loop-days, before hold and corroboration"
    )


def _compare(steps: LoopSteps, i: int, verdict: LoopVerdict) -> Comparison:
    """Returns the flow compared with its usual value, else the supply."""
    if verdict.low:
        flow, usual = float(steps.frame["coolant.flow"][i]), float(np.exp(-steps.expected[i]))
        return Comparison(flow, usual, None, "own past", 0, 1 - flow / usual, "L/min")
    supply = float(steps.frame["coolant.supply_temperature"][i])
    return Comparison(supply, supply - verdict.rise, None, "own past", 0, verdict.rise, "K")


def _measure_heat(steps: LoopSteps, i: int, loops: LoopGpus) -> dict[str, Any]:
    """Returns the heat that the coolant carries, and its share of the GPUs' power: evidence, no level depends on it."""
    frame = steps.frame
    warmed = float(frame["coolant.return_temperature"][i] - frame["coolant.supply_temperature"][i])
    flow = float(frame["coolant.flow"][i])
    if not (warmed >= LEAST_DT and flow > 0):
        return {}
    carried = flow * warmed / PG25
    below = loops.find(frame.entities[i], steps.gpus)
    power = float(np.nansum(steps.gpus["gpu.power"][below])) / 1000 if steps.gpus is not None and len(below) else 0.0
    return {"heat_kw": round(carried, 1), "heat_share": round(carried / power, 2) if power > 1 else None}


def _read_values(frame: Frame) -> Floats:
    """Returns (4, N) valid readings as they are judged: -ln of at least LEAST; the supply in Cel."""
    values = np.array([frame[signal] for signal in _SIGNALS])
    values[~((values >= _VALID[:, 0]) & (values <= _VALID[:, 1]))] = np.nan
    for row in _LOGARITHMS:
        values[row] = -np.log(np.maximum(values[row], LEAST))
    return values
