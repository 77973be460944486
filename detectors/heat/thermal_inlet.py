"""Finds racks and rows with warm intake air: inlets warmer than those elsewhere, and fans that run faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.detector import Detector, notes, part
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report
from detectors.base.gates import Gates
from detectors.base.streams import Channel, Step, Streams
from detectors.base.topology_index import per_topology, pop_members_mask
from detectors.heat.inlet_sensors import InletIndex, Inlets
from pipeline.model.entity_names import pager_title
from pipeline.model.records import SECOND, Finding, Frame, Level

_FEWEST = 3  # inlets of a rack, or racks, from which a median is valid; chosen
_MOST = 0.6  # share of a rack's inlets, and of a row's racks, with one cause; chosen
_ELSEWHERE = 24  # inlets in all from which the others show the weather; chosen


@dataclass
class ThermalInlet(Detector):
    """Peer-conditioned CUSUM on inlets against all others and their own past; reports a rack with most `delta` K up.

    Ticket after `hold` s if its fans run `fans` faster than usual, if the air is `calm` K warmer, or, where the fans of
    less than half of its nodes are measured, `alone` K. Fans that run up by less mean two warm afternoons together, or
    fans at their limit: then `alone` K are a ticket after `lasts` s. One warm inlet alone is a sensor, and not reported
    here. A row whose racks are warm is reported as the row.

    Source: 3 K are what ASHRAE's classes leave between recommended (27 Cel) and usual supply air (24); delta leaves
    half a step of a BMC's rounding. A fan that runs 0.7 faster takes 4.9 times the power (fan laws): it needs to.
    """

    name: ClassVar[str] = "thermal_inlet"
    family: ClassVar[str] = "thermal"
    device_class: ClassVar[str] = "sensor"
    needs: ClassVar[tuple[str, ...]] = ("sensor.temperature",)
    wants: ClassVar[tuple[str, ...]] = ("sensor.fan_speed", "event:maintenance_start", "event:maintenance_end")
    cannot_see: ClassVar[str] = (
        "Inlets whose sensor is not named inlet, intake or ambient; air that warms in the whole hall; and which panel "
        "or air handler is to blame."
    )

    delta: float = 2.75
    alone: float = 3.5
    calm: float = 6.0
    """K; two warm afternoons of 3 K each; chosen."""
    fans: float = 0.7
    hold: float = 600.0
    lasts: float = 4 * 3600.0
    """s; an afternoon; chosen."""

    warmth: Streams = part(lambda: Streams(Channel(floor=0.5, delta=2.75, phi=0.9)))
    speeds: Streams = part(lambda: Streams(Channel(floor=0.05, delta=0.2, phi=0.9)))
    gates: Gates = part(Gates)
    conditions: OpenConditions = notes()
    onsets: dict[str, int] = notes()
    accepted: list[str] = notes(list)
    _index: InletIndex = field(default_factory=InletIndex, init=False, repr=False)

    def __post_init__(self) -> None:
        self.warmth.channel = Channel(floor=0.5, delta=self.delta, phi=0.9)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings on racks and rows with warm air at their inlets."""
        self.gates.update(frames)
        frame = frames.get("sensor")
        if frame is None or not len(frame.entities):
            return []
        inlets = self._index.find(frame)
        if (mask := pop_members_mask(self.accepted, frame)) is not None:
            self.warmth.reset(mask)
            self.speeds.reset(mask)
        gate = ~self.gates.maintenance_mask(frame)
        step = self.warmth.step(
            frame["sensor.temperature"], self._compare_inlets(frame), frame.time, inlets.inlet & gate
        )
        speed = frame["sensor.fan_speed"]
        turning = np.where(speed > 0, speed, np.nan)
        fans = self.speeds.step(np.log(turning), np.full(len(speed), -1, np.int32), frame.time, gate)
        warm = step.on & inlets.inlet
        racks = self._find_warm_racks(inlets, step) if warm.any() else {}
        self.onsets = {rack: at for rack, at in self.onsets.items() if rack in racks}
        return self._report(frame, inlets, step, fans, racks)

    def budget(self) -> list[str]:
        """Returns the false alarm rates of its tests."""
        most = f"{_FEWEST} inlets and {_MOST:.0%} of a rack"
        return [
            *super().budget(),
            f"rack: a rule on how many are warm together: {most}, so that no single stream reports",
        ]

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """Learns all sensors of a rack or row again from the next frame of sensors on."""
        self.accepted.append(entity)

    @per_topology
    def _compare_inlets(self, frame: Frame) -> NDArray[np.int32]:
        """Returns (N,) 0 for inlets that are compared with each other, -1 none."""
        inlets = self._index.find(frame)
        inlet = inlets.inlet & (inlets.rack >= 0)
        enough = inlet.sum() >= _ELSEWHERE and len(inlets.racks) >= _FEWEST
        return np.where(inlet & enough, 0, -1).astype(np.int32)

    def _find_warm_racks(self, inlets: Inlets, step: Step) -> dict[str, NDArray[np.int64]]:
        """Returns rack -> its warm inlets, where most of them are warm."""
        found = {}
        judged = inlets.inlet & step.judged
        for rack in np.unique(inlets.rack[step.on & inlets.inlet & (inlets.rack >= 0)]).tolist():
            members = judged & (inlets.rack == rack)
            warm = members & (step.effect >= self.delta / 2)
            if warm.sum() >= max(_FEWEST, _MOST * members.sum()) and np.median(step.effect[members]) >= self.delta / 2:
                found[inlets.racks[rack]] = np.flatnonzero(warm)
        return found

    def _report(
        self, frame: Frame, inlets: Inlets, step: Step, fans: Step, racks: Mapping[str, NDArray[np.int64]]
    ) -> list[Finding]:
        blamed = _join_rows(frame, racks, inlets.racks)
        close_ended(self.conditions, set(blamed))
        found = []
        for entity, warm in sorted(blamed.items()):
            faster = _fan_rise(inlets, fans, warm)
            up, held = float(np.median(step.effect[warm])), int(np.median(step.held[warm]))
            least = self.alone if np.isnan(faster) else self.calm
            sure = up >= least or (up >= self.delta and faster >= self.fans)
            long = held >= self.hold if sure else (up >= self.alone and held >= self.lasts)
            level: Level = "ticket" if long else "suspect"
            onset = self.onsets.setdefault(entity, frame.time - held * SECOND)
            if due := due_report(self.conditions, entity, frame.time, onset, level):
                found.append(self._inlet_finding(frame, entity, due, step, warm, up, faster))
        return found

    def _inlet_finding(
        self,
        frame: Frame,
        entity: str,
        due: tuple[int, Level],
        step: Step,
        warm: NDArray[np.int64],
        up: float,
        faster: float,
    ) -> Finding:
        value = float(np.nanmedian(frame["sensor.temperature"][warm])) if len(warm) else float("nan")
        alone = bool(step.alone[warm[0]])
        others = 0 if alone else int(step.size[warm[0]]) - len(warm)
        fans = "" if np.isnan(faster) else f", fans {100 * faster:.0f} % faster"
        cohort = "own past" if alone else "all inlets elsewhere"
        return self.finding(
            frame.time,
            entity,
            due,
            score=float(np.median(step.score[warm])),
            summary=pager_title(entity, f"intake air {value:.0f} °C, {up:.1f} K above usual{fans}"),
            signals=("sensor.temperature", "sensor.fan_speed") if faster >= self.fans else ("sensor.temperature",),
            clears=f"ends when less than {self.delta / 2:.2g} K is left of it",
            compared=Comparison(value, value - up, float(step.spread[warm[0]]), cohort, others, up, "K"),
            inlets=[frame.entities[i] for i in warm[:16].tolist()],
            fans_faster=None if np.isnan(faster) else round(faster, 3),
        )


def _fan_rise(inlets: Inlets, fans: Step, warm: NDArray[np.int64]) -> float:
    """Returns the share by which fans in the racks of the warm inlets run faster; NaN if too few are measured."""
    here = np.isin(inlets.rack, np.unique(inlets.rack[warm]))
    blowers = here & ~inlets.inlet & fans.judged
    enough = 2 * len(np.unique(inlets.node[blowers])) >= len(np.unique(inlets.node[here & inlets.inlet]))
    return float(np.expm1(np.median(fans.effect[blowers]))) if enough and blowers.any() else float("nan")


def _join_rows(frame: Frame, racks: Mapping[str, NDArray[np.int64]], known: list[str]) -> dict[str, NDArray[np.int64]]:
    """Returns the same, with a row in place of its racks where most of them are warm."""
    above = frame.topology.ancestor_of_kind
    found, rows = dict(racks), dict[str, list[str]]()
    for rack in racks:
        if row := above(rack, "row"):
            rows.setdefault(row, []).append(rack)
    for row, warm in rows.items():
        size = sum(above(rack, "row") == row for rack in known)
        if len(warm) >= 2 and len(warm) >= _MOST * size:
            found[row] = np.concatenate([found.pop(rack) for rack in warm])
    return found
