"""Finds coolant loops that lose flow or deliver warm coolant, against their own past and the other loops.

What the thresholds of loops cost in false alarms: each is judged by its own past, at a higher threshold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base import topology_index
from detectors.base.budget import DAY_S, arl0, rule_line
from detectors.base.cohorts import likeness
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.findings import OpenConditions, close_ended, due_report
from detectors.base.gates import Gates
from detectors.base.streams import ALONE, USUAL_STEP, Bools, Channel, Floats, Step, Streams
from detectors.heat.coolant_loops import (
    LEAST,
    PEERS,
    Balance,
    Loops,
    Seen,
    collapsed,
    finding,
    held,
    level_of,
    slopes,
    together,
)
from detectors.heat.coolant_shared import Shared, Shift, blamed
from pipeline.model.records import SECOND, Finding, Frame
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import kind_of


def in_words(channel: Channel) -> str:
    """The budget of a loop's stream, such as that of one CDU, as one line."""
    threshold, sides = channel.limit(USUAL_STEP) + ALONE, 1 + channel.both
    run = arl0(threshold) / sides
    days = run * USUAL_STEP / DAY_S
    return (
        f"threshold {threshold:g} at {USUAL_STEP:g} s ({channel.threshold:g}, and {ALONE:g} more for what is judged by"
        f" its own past): a sound loop passes it once in {run:.2g} ticks ({days / 365.25:,.0f} years), which is at most"
        f" {1000 / days:.2g} suspects per 1,000 loop-days, before hold and corroboration"
    )


_REMEMBERED = 6 * 3600 * SECOND  # that it was rapid, or jumped; chosen
_SIGNALS = ("coolant.flow", "coolant.supply_temperature", "coolant.pressure", "pump.speed")
_VALID = np.array([CATALOGUE[signal].valid for signal in _SIGNALS])[:, :, None]
_LOGARITHMS = (0, 2, 3)  # of these, those that are judged as -ln: a fall is harm


@dataclass
class Coolant(Detector):
    """PCC on ln(flow) downwards and on supply temperature upwards; pressure and pump speed bear the flow out.

    Flow: suspect from `flow_notice`. Page: two samples in a row below `collapse` of the expected flow, or `flow_delta`
    less with pressure or pump speed moved too; where neither is measured after `hold` s, with fewer than 4 comparable
    loops a ticket instead. Flow that falls alone, while pressure and pump say otherwise, is the meter: a suspect; but
    where the coolant carries off as much heat as before it is a branch that is restricted (a connector, a rack's
    manifold) at a pressure that its unit holds: page after `hold` s, with fewer than 4 comparable ones a ticket.
    Supply: suspect from `temperature_delta` K; ticket once it is `warm` K above usual for `hold` s; page once it rose
    faster than any set-point does, or is `hot` K above for `hold` s, or the GPUs throttle. A supply that jumps within
    one sample is the sensor. What four or more comparable loops do together is taken out of each and judged by itself:
    one finding on what the loops share (hall, facility, else site:all), by the same rules.

    Source: heat balance dT = 15.1 * kW / (L/min) for 25 % propylene glycol: a lost pump spends a GPU's margin in
    about 12 s, so flow under 70 % of the loop's own past pages without waiting for statistics; CUSUM of Page (1954);
    pressure goes with the square of the flow, speed with it (affinity laws of pumps).
    """

    name: ClassVar[str] = "coolant"
    family: ClassVar[str] = "coolant"
    device_class: ClassVar[str] = "coolant"
    needs: ClassVar[tuple[str, ...]] = ("coolant.flow",)
    wants: ClassVar[tuple[str, ...]] = (
        *("coolant.supply_temperature", "coolant.return_temperature", "coolant.pressure", "pump.speed"),
        *("gpu.power", "gpu.throttle_reasons", "event:maintenance_start", "event:maintenance_end"),
    )
    cannot_see: ClassVar[str] = (
        "A single node's cold plate, fouling over weeks, and whether water, valve or heat exchanger warms the supply; "
        "it does not foretell the minutes until a loop's GPUs throttle."
    )

    threshold: float = 18.5
    flow_notice: float = 0.03
    """ln; half as much again as the error of a flow meter, 2 %: shown, never told to anybody; chosen."""
    flow_delta: float = 0.1
    temperature_delta: float = 2.75
    """K; three less half a step of noise, so that 3 K are found; chosen."""
    warm: float = 4.0
    """K; beyond what set-points are moved by at once, 1 to 3 K; chosen."""
    hot: float = 6.0
    """K; two such moves of the same loop do not come as high, and GPUs have some 25 K to their limit; chosen."""
    collapse: float = 0.7
    hold: float = 600.0

    flow: Streams = part(lambda: Streams(Channel(floor=0.004, delta=0.02, phi=0.6)))
    warmth: Streams = part(lambda: Streams(Channel(floor=0.3, delta=2.75, phi=0.9)))
    pressure: Streams = part(lambda: Streams(Channel(floor=0.02, delta=0.05, phi=0.6, both=True)))
    speed: Streams = part(lambda: Streams(Channel(floor=0.01, delta=0.05, phi=0.6, both=True)))
    shared: Shared = part(Shared)
    balance: Balance = part(Balance)
    gates: Gates = part(Gates)
    forgiven: list[str] = notes(list)
    back: Bools = memory(False, np.bool_)
    well: NDArray[np.int64] = memory(0, np.int64)
    ready: Bools = memory(False, np.bool_)
    low: NDArray[np.int64] = memory(0, np.int64)
    low_since: NDArray[np.int64] = memory(0, np.int64)
    large_since: NDArray[np.int64] = memory(0, np.int64)
    last: Floats = memory(np.nan)
    last_at: NDArray[np.int64] = memory(0, np.int64)
    fast: Floats = memory(np.nan)
    slow: Floats = memory(np.nan)
    rapid_at: NDArray[np.int64] = memory(-_REMEMBERED, np.int64)
    jumped_at: NDArray[np.int64] = memory(-_REMEMBERED, np.int64)
    conditions: OpenConditions = notes()
    _loops: Loops = field(default_factory=Loops, init=False, repr=False)
    _key: tuple[int, int] = field(default=(-1, -1), init=False, repr=False)
    _alone: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32), init=False, repr=False)
    _alike: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32), init=False, repr=False)

    def __post_init__(self) -> None:
        self.flow.channel = Channel(0.004, self.flow_notice, 0.6, self.threshold)
        self.warmth.channel = Channel(0.3, self.temperature_delta, 0.9, self.threshold)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        self.gates.update(frames)
        frame = frames.get("coolant")
        if frame is None or not len(frame.entities):
            return []
        n = len(frame.entities)
        self.grow(n)
        self._forgiven(frame)
        gate = ~self.gates.maintenance_mask(frame)
        values = _read(frame)
        baseline = self._baselines(n)
        # what comparable loops share is taken out, so that a loop that is measured alone is judged by its own past
        common = together(values - baseline, self._comparable(frame))
        shared = np.where(np.isnan(common), 0.0, common)
        pieces = (self.flow, self.warmth, self.pressure, self.speed)
        alone = self._nobody(n)
        steps = [piece.step(row, alone, frame.time, gate) for piece, row in zip(pieces, values - shared, strict=True)]
        expected = baseline[0] + shared[0]
        flow, warmth, pressure, speed = steps
        self.ready[:n] |= flow.judged
        self._follow(frame, values, expected, flow, gate)
        calm = gate & ~flow.on & (flow.effect < self.flow_notice) & (self.low[:n] == 0)
        fallen = np.where(flow.effect >= self.flow_notice, values[0] - expected, 0.0)
        self.balance.follow(frame, frames.get("gpu"), self._loops, calm, fallen)
        seen = Seen(frame, frames.get("gpu"), flow, warmth, pressure, speed, expected)
        less, warmer, sank, slower = common
        shift = Shift(frame, seen.gpus, self._comparable(frame), less, warmer, sank, slower)
        return self._told(seen, shift, gate)

    def _told(self, seen: Seen, shift: Shift, gate: Bools) -> list[Finding]:
        """Loops that stand out, and what they share where all move."""
        frame, n = seen.frame, len(gate)
        told = self.shared.take(shift, gate, self)
        every = blamed(shift, told, self.shared, self, self._loops, gate)
        low = (seen.flow.on | (self.low[:n] >= 2)) & ~self.back[:n]
        bad = low | seen.warmth.on
        holding = {frame.entities[i] for i in np.flatnonzero(bad).tolist()}
        close_ended(self.conditions, holding | ({every.entity} if every else set()))
        found = list[Finding | None]()
        if every and (due := due_report(self.conditions, every.entity, frame.time, every.onset, every.level)):
            found.append(replace(every.finding, onset=due[0], level=due[1]))
        if bad.any():
            measured = np.isfinite(frame["coolant.flow"]) | np.isfinite(frame["coolant.supply_temperature"])
            found += [self._finding(seen, i) for i in np.flatnonzero(bad & measured & gate).tolist()]
        return [one for one in found if one is not None]

    def budget(self) -> list[str]:
        own = {"flow": self.flow, "warmth": self.warmth}
        together = {"flow together": self.shared.flow, "warmth together": self.shared.warmth}
        return [
            *(f"{name}: {in_words(streams.channel)}" for name, streams in (own | together).items()),
            f"witnesses: {rule_line('pressure, pump speed and power, which tell nothing by themselves')}",
            f"collapse: {rule_line(f'two samples in a row under {self.collapse:.0%} of the usual flow')}",
        ]

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """A loop, or all below what loops share, is learnt anew from the next frame of loops on."""
        self.forgiven.append(entity)

    def _forgiven(self, frame: Frame) -> None:
        mask = topology_index.pop_members_mask(self.forgiven, frame)
        if mask is None:
            return
        for piece in (self.flow, self.warmth, self.pressure, self.speed, self.shared, self.balance):
            piece.reset(mask)
        for cells in (self.ready, self.low, self.large_since, self.back, self.well):
            cells[: len(mask)][mask] = 0
        for at in (self.rapid_at, self.jumped_at):
            at[: len(mask)][mask] = -_REMEMBERED

    def _baselines(self, n: int) -> Floats:
        """(4, N) what each signal usually is; NaN for loops that are not learnt yet."""
        found = np.full((len(_SIGNALS), n), np.nan)
        for row, streams in zip(found, (self.flow, self.warmth, self.pressure, self.speed), strict=True):
            known = min(streams.cells.shape[1], n)
            row[:known] = streams.cells[0, :known]
        found[:, ~self.ready[:n]] = np.nan
        return found

    def _nobody(self, n: int) -> NDArray[np.int32]:
        """(N,) no cohort; the same array as long as the loops are as many."""
        if len(self._alone) != n:
            self._alone = np.full(n, -1, np.int32)
        return self._alone

    def _follow(self, frame: Frame, values: Floats, expected: Floats, flow: Step, gate: Bools) -> None:
        """Collapses, flows that are back, and supplies that rise or jump."""
        n, time = len(gate), frame.time
        collapsed(frame["coolant.flow"], expected, gate, self.collapse, time, self.low[:n], self.low_since[:n])
        lost, large = values[0] - expected, self.large_since[:n]
        held(lost, flow.effect, self.flow_delta, time, large, self.well[:n], self.back[:n])
        means, ats = (self.fast[:n], self.slow[:n]), (self.rapid_at[:n], self.jumped_at[:n])
        slopes(values[1], time, self.last[:n], self.last_at[:n], *means, *ats)

    def _comparable(self, frame: Frame) -> NDArray[np.int32]:
        """Group numbers of loops of one kind that are alike."""
        key = (frame.topology.version, len(frame.entities))
        if key != self._key:
            numbers: dict[str, int] = {}
            looks = [f"{kind_of(e)} {likeness(frame.topology.attributes.get(e, {}))}" for e in frame.entities]
            self._alike = np.array([numbers.setdefault(look, len(numbers)) for look in looks], np.int32)
            self._key = key
        return self._alike

    def _finding(self, seen: Seen, i: int) -> Finding | None:
        if self.well[i] and not seen.warmth.on[i]:
            return None  # its flow is back, though not for long enough yet to say that it ended
        frame, time = seen.frame, seen.frame.time
        peers = int(np.count_nonzero(self._alike == self._alike[i]))
        verdict = level_of(seen, i, self, peers >= PEERS, self._loops)
        began = [time - int(seen.flow.held[i]) * SECOND] * int(seen.flow.on[i] and not self.back[i])
        began += [time - int(seen.warmth.held[i]) * SECOND] * int(seen.warmth.on[i])
        began += [int(self.low_since[i])] * int(self.low[i] >= 2)
        due = due_report(self.conditions, frame.entities[i], time, min(began), verdict.level)
        return None if due is None else finding(seen, i, due, verdict, self, self._loops, peers)

    def jumped(self, i: int, time: int) -> bool:
        """Whether the sensor of the supply jumped of late."""
        return 0 <= time - int(self.jumped_at[i]) < _REMEMBERED

    def rapid(self, i: int, time: int) -> bool:
        """Whether the supply rose of late faster than set-points do."""
        return 0 <= time - int(self.rapid_at[i]) < _REMEMBERED


def _read(frame: Frame) -> Floats:
    """(4, N) readings that the signals can have, as they are judged: -ln of at least LEAST; the supply in Cel."""
    values = np.array([frame[signal] for signal in _SIGNALS])
    values[~((values >= _VALID[:, 0]) & (values <= _VALID[:, 1]))] = np.nan
    for row in _LOGARITHMS:
        values[row] = -np.log(np.maximum(values[row], LEAST))
    return values
