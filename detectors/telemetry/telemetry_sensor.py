"""Finds faulty instruments: a reading is stuck, jumps or is noisy while related readings do not change.

This file also checks the instruments of the plant: flow and supply temperature of a loop against its pressure, pump
and return; air inlets against those of the rack. Those of GPUs are in gpu_instruments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.budget import GPUS, budget_line, rule_line
from detectors.base.cohorts import Peers
from detectors.base.detector import Detector, notes, part
from detectors.base.findings import OpenConditions, close_ended, due_report
from detectors.base.gates import Gates
from detectors.base.state import State
from detectors.base.statistics import grouped_median
from detectors.base.streams import Channel, Streams
from detectors.base.topology_index import per_device_topology
from detectors.telemetry.gpu_instruments import HOLD, STILL, GpuInstruments
from detectors.telemetry.instruments import (
    K_ERROR,
    RHYTHM,
    Bools,
    Climate,
    Floats,
    InstrumentFault,
    LevelShift,
    LoopMeans,
    NoiseLevel,
    StuckReading,
)
from pipeline.model.entity_names import pager_title
from pipeline.model.records import SECOND, Finding, Frame, Level
from pipeline.model.topology import Topology

LEAST_FLOW, LEAST_SUPPLY_K, LEAST_INLET_K = 0.05, 1.5, 2.2
"""Least shifts that count: twice the error of a flow meter; several times that of a thermometer; chosen."""
UNMOVED = 0.5
"""Share of the effect of a real change below which related readings have not moved: pressure follows the square of the
flow, the speed of the pump follows it (affinity laws), the rise of the temperature goes against it; chosen."""
_RATIO, _FLOW_NOISE, _SUPPLY_NOISE, _INLET_NOISE = 4.0, 0.004, 0.05, 0.15
"""Multiple of the usual change that is noise; least usual changes: share of the flow, K; chosen."""
_OFTEN = 0.5  # share of readings that differ from the one before, below which a constant reading is normal; chosen
_SURE = 16.0
"""Expected changes that did not come: at a quarter of its usual rate a working instrument does that once in e**16."""
QUANTA = 2.0
"""Steps by which what drives an instrument must move while it stays: its own rounding and that of the others."""
_FAN = 0.05  # share by which fans that follow a warm inlet speed up at least; chosen
_INLETS = ("inlet", "intake", "ambient")
_LABELS = {
    "gpu.temperature": "core temperature",
    "gpu.memory_temperature": "memory temperature",
    "gpu.power": "power meter",
    "coolant.flow": "flow meter",
    "coolant.supply_temperature": "supply temperature",
    "sensor.temperature": "sensor",
}


@dataclass
class LoopInstruments(State):
    """Instruments of coolant units; each is compared with itself, as there are few and they differ.

    odd_since: entity and signal -> since when the reading is shifted.
    """

    shifts: dict[str, LevelShift] = part(
        lambda: {name: LevelShift() for name in ("flow", "pressure", "pump", "supply", "return", "rise")}
    )
    noise: dict[str, NoiseLevel] = part(lambda: {name: NoiseLevel() for name in ("flow", "supply")})
    stuck: dict[str, StuckReading] = part(lambda: {name: StuckReading(("other",)) for name in ("flow", "supply")})
    odd_since: dict[str, int] = notes()
    climate: Climate = part(Climate, kept=True)
    _means: LoopMeans = field(default_factory=LoopMeans, init=False, repr=False)

    def update_climate(self, frame: Frame, gpus: Frame | None) -> None:
        """Adds the temperature and power of the GPUs of each loop; call it before `find_faults`."""
        self.climate.step(*self._means.means(frame, gpus))

    def find_faults(self, frame: Frame, gate: Bools) -> Iterator[InstrumentFault]:
        """Yields the instruments that are wrong now. gate: False for units in maintenance; these are learnt again."""
        if not gate.all():
            self.reset(~gate)
        flow, supply, back = (frame[f"coolant.{name}"] for name in ("flow", "supply_temperature", "return_temperature"))
        logs = {"flow": flow, "pressure": frame["coolant.pressure"], "pump": frame["pump.speed"], "rise": back - supply}
        values = {name: np.log(np.where(v > 0, v, np.nan)) for name, v in logs.items()}
        values |= {"supply": supply, "return": back}
        shifted = np.zeros(len(flow), bool)
        for key in self.odd_since:
            entity = key.partition("|")[0]
            shifted[[i for i, e in enumerate(frame.entities) if e == entity]] = True
        moved = {name: self.shifts[name].step(v, shifted) for name, v in values.items()}
        yield from self._biased(frame, moved)
        yield from self._noisy(frame, values)
        yield from self._stuck(frame, {"flow": flow, "supply": supply}, {"flow": values["pressure"], "supply": back})

    def _biased(self, frame: Frame, moved: Mapping[str, Floats]) -> Iterator[InstrumentFault]:
        flow, supply, known = moved["flow"], moved["supply"], {key.partition("|")[0] for key in self.odd_since}
        judged = (np.abs(flow) >= LEAST_FLOW) | (np.abs(supply) >= LEAST_SUPPLY_K)
        judged[[i for i, e in enumerate(frame.entities) if e in known] if known else []] = True
        for i in np.flatnonzero(judged).tolist():
            entity, q, t = frame.entities[i], float(flow[i]), float(supply[i])
            real = abs(moved["pressure"][i]) > UNMOVED * 2 * abs(q) or abs(moved["pump"][i]) > UNMOVED * abs(q)
            real |= -q * moved["rise"][i] > UNMOVED * q * q and abs(moved["supply"][i]) < LEAST_SUPPLY_K
            words = f"reads {abs(q):.0%} {'higher' if q > 0 else 'lower'}, pressure and pump unchanged"
            yield from self._if_held(abs(q) >= LEAST_FLOW and not real, frame, i, entity, "coolant.flow", q, "1", words)
            on = abs(t) >= LEAST_SUPPLY_K and not self._followed(i, t, float(moved["return"][i]))
            others = "return" if np.isnan(self.climate.shift[i]) else "return and GPUs"
            words = f"reads {abs(t):.1f} K {'higher' if t > 0 else 'lower'}, {others} unchanged"
            yield from self._if_held(on, frame, i, entity, "coolant.supply_temperature", t, "K", words)

    def _followed(self, i: int, t: float, back: float) -> bool:
        """Returns whether the return or the GPUs moved with the supply, or the load moved too much to decide."""
        gpus, load = float(self.climate.shift[i]), float(self.climate.load[i])
        if np.isnan(gpus):
            return abs(back) > UNMOVED * abs(t)  # the other way it is the load that moved it
        unclear = max(K_ERROR * abs(load), UNMOVED * abs(gpus)) > UNMOVED * abs(t)  # more happens than a supply's shift
        return unclear or back * t > UNMOVED * t * t or gpus * t > UNMOVED * t * t

    def _if_held(
        self, on: bool, frame: Frame, i: int, entity: str, signal: str, effect: float, unit: str, words: str
    ) -> Iterator[InstrumentFault]:
        key = f"{entity}|{signal}"
        if not on:
            self.odd_since.pop(key, None)
            return
        since = self.odd_since.setdefault(key, frame.time)
        if frame.time - since >= HOLD * SECOND:
            yield InstrumentFault(entity, signal, "biased", since, effect, unit, words, _own_past(frame[signal][i]))

    def _noisy(self, frame: Frame, values: Mapping[str, Floats]) -> Iterator[InstrumentFault]:
        named = {"flow": ("coolant.flow", _FLOW_NOISE), "supply": ("coolant.supply_temperature", _SUPPLY_NOISE)}
        for name, (signal, least) in named.items():
            times, held = self.noise[name].step(values[name], least, _RATIO)
            for i in np.flatnonzero(held >= STILL).tolist():
                words = f"noisy, changes {times[i]:.0f} times as large as usual"
                since = frame.time - int(held[i]) * RHYTHM * SECOND
                evidence = _own_past(frame[signal][i])
                yield InstrumentFault(
                    *(frame.entities[i], signal, "noisy", since, float(times[i]), "1", words, evidence)
                )

    def _stuck(
        self, frame: Frame, values: Mapping[str, Floats], others: Mapping[str, Floats]
    ) -> Iterator[InstrumentFault]:
        for name, signal in (("flow", "coolant.flow"), ("supply", "coolant.supply_temperature")):
            stuck = self.stuck[name]
            run, spans = stuck.step(values[name], other=others[name])
            usual = stuck.usual[: len(run)]
            on = (run >= STILL) & (usual >= _OFTEN) & (values[name] != 0)
            unit = np.where(on, values[name], 1.0) if name == "flow" else 1.0  # pressure is a logarithm
            on &= spans["other"] > QUANTA * stuck.quantum[: len(run)] / unit
            for i in np.flatnonzero(on).tolist():
                words = f"stuck at {values[name][i]:.2f} for {int(run[i])} readings while others move"
                since = frame.time - int(run[i]) * RHYTHM * SECOND
                evidence = _own_past(values[name][i])
                yield InstrumentFault(frame.entities[i], signal, "stuck", since, 0.0, "1", words, evidence)


def _own_past(value: Any) -> dict[str, Any]:
    return {"value": float(value), "cohort": "own past"}


@dataclass
class AirInstruments(State):
    """Temperature sensors of air inlets; they are compared with those of the rack."""

    shift: Streams = part(lambda: Streams(Channel(floor=0.5, delta=LEAST_INLET_K, phi=0.9, both=True)))
    noise: NoiseLevel = part(NoiseLevel)
    stuck: StuckReading = part(lambda: StuckReading(("like",)))
    _peers: Peers = field(default_factory=lambda: Peers(("rack",), least=4), init=False, repr=False)

    def find_faults(self, frame: Frame, gate: Bools) -> Iterator[InstrumentFault]:
        """Yields the instruments that are wrong now. gate: False for sensors in maintenance; these are learnt again."""
        if not gate.all():
            self.reset(~gate)
        inlet = self._inlets(frame)
        value = np.where(inlet, frame["sensor.temperature"], np.nan)
        groups = np.where(inlet, self._peers.groups(frame), -1).astype(np.int32)
        step = self.shift.step(value, groups, frame.time, gate & inlet)
        for i in np.flatnonzero(step.on & (step.held >= HOLD) & ~step.moved & (step.size > 1)).tolist():
            k = float(step.effect[i])
            words = f"reads {abs(k):.1f} K {'higher' if k > 0 else 'lower'} than the rack's inlets, fans unchanged"
            if not self._fans_follow(frame, i, k):
                yield self._fault(frame, i, "biased", int(step.held[i]), k, "K", words)
        run, spans = self.stuck.step(value, like=np.where(step.size > 1, step.median, np.nan))
        usual, quantum = self.stuck.usual[: len(run)], self.stuck.quantum[: len(run)]
        times, held = self.noise.step(value, _INLET_NOISE, _RATIO, quantum=quantum)
        for i in np.flatnonzero(held >= STILL).tolist():
            like = times[groups == groups[i]]
            if groups[i] >= 0 and times[i] >= _RATIO * np.median(like):
                words = f"noisy, changes {times[i]:.0f} times as large as usual"
                yield self._fault(frame, i, "noisy", int(held[i]) * RHYTHM, float(times[i]), "1", words)
        coarsest = np.fmax(quantum, grouped_median(quantum, groups)[0])
        followed = spans["like"] > QUANTA * coarsest
        for i in np.flatnonzero((run * usual / 4 >= _SURE) & (run >= STILL) & followed).tolist():
            words = f"stuck at {value[i]:.1f} °C for {int(run[i])} readings"
            yield self._fault(frame, i, "stuck", int(run[i]) * RHYTHM, 0.0, "K", words)

    def _fans_follow(self, frame: Frame, i: int, k: float) -> bool:
        """Returns whether the fans of the node confirm a warmer inlet; False where they are not measured."""
        node = frame.topology.ancestor_of_kind(frame.entities[i], "node")
        speeds = frame["sensor.fan_speed"]
        measured = np.flatnonzero(~np.isnan(speeds)).tolist()
        mine = [j for j in measured if _is_part_of(frame.topology, frame.entities[j], node)]
        like = speeds[~np.isnan(speeds)]
        if not mine or len(like) < 4:
            return False
        return bool(k > 0 and np.mean(speeds[mine]) > (1 + 3 * _FAN) * np.median(like))

    @per_device_topology
    def _inlets(self, frame: Frame) -> NDArray[np.bool_]:
        """(N,) sensors of air inlets."""
        attributes = frame.topology.attributes
        return np.array([_is_inlet(e, attributes.get(e, {})) for e in frame.entities], bool)

    def _fault(
        self, frame: Frame, i: int, mode: str, held: int, effect: float, unit: str, words: str
    ) -> InstrumentFault:
        evidence = {"value": float(frame["sensor.temperature"][i]), "cohort": self._peers.cohort_name(frame, i)}
        since = frame.time - held * SECOND
        return InstrumentFault(frame.entities[i], "sensor.temperature", mode, since, effect, unit, words, evidence)


def _is_inlet(entity: str, attributes: Mapping[str, object]) -> bool:
    names = f"{entity} {attributes.get('label')} {attributes.get('context')}".lower()
    return any(word in names for word in _INLETS)


def _is_part_of(topology: Topology, entity: str, node: str | None) -> bool:
    return node is not None and topology.ancestor_of_kind(entity, "node") == node


_JITTER = 6  # s by which samples of a frame are dated apart; chosen: half a frame and one


@dataclass
class TelemetrySensor(Detector):
    """An instrument that has been wrong for ten minutes is a ticket, never a page: the device that it measures is
    healthy.

    Stuck: the same reading, while what drives it moved by more than the steps that both round to, as measured at the
    site. Biased: it alone moved, and stays there, and no heat explains it: not a core that throttles, and never a
    memory that is hot (see `memory`). A GPU's temperature is compared with its memory's, its power and the node's other
    GPUs; its power with its temperature; the flow of a loop with pressure, pump and heat (affinity laws); its supply
    with its return; an air inlet with those of the rack and the fans. Noisy: its readings change much more than usual,
    those of its peers do not. After announced maintenance an instrument is learned again.

    Source: the kinds of fault as in Ni et al., "Sensor network data fault types", ACM Transactions on Sensor Networks
    5(3), 2009.

    linger_seconds: an instrument counts as faulty for this time after it was last wrong. Chosen: three days; without
                    load or with a small bias nothing shows the fault, and it does not repair itself; work ends it.
    """

    name: ClassVar[str] = "telemetry_sensor"
    family: ClassVar[str] = "telemetry"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = ("gpu.temperature", "gpu.power")
    wants: ClassVar[tuple[str, ...]] = (
        *("gpu.memory_temperature", "coolant.flow", "coolant.supply_temperature", "coolant.return_temperature"),
        *("coolant.pressure", "pump.speed", "sensor.temperature", "sensor.fan_speed", "gpu.throttle_reasons"),
        *("gpu.sm_clock", "gpu.utilization"),
        *("event:maintenance_start", "event:maintenance_end"),
    )
    cannot_see: ClassVar[str] = (
        "A bias from the beginning, a bias below 2.2 K, 5 % of a flow or some 60 W, and an idle GPU, whose readings do "
        "not vary."
    )

    linger_seconds: float = 259200.0

    judged: dict[str, int] = notes()  # "at" -> when instruments were judged last
    known: dict[str, dict[str, Any]] = notes()  # entity and signal -> its newest fault, and when it was found last
    gates: Gates = part(Gates)
    gpus: GpuInstruments = part(GpuInstruments)
    loops: LoopInstruments = part(LoopInstruments, of="coolant")
    air: AirInstruments = part(AirInstruments, of="sensor")
    conditions: OpenConditions = notes()

    def budget(self) -> list[str]:
        """Streams are judged every RHYTHM s; stuck and noisy readings, and the few loops, by rules."""
        gpus = {f"{name} of GPUs": piece.channel for name, piece in self.gpus.streams.items()}
        channels = {**{name: (channel, GPUS) for name, channel in gpus.items()}, "inlet": (self.air.shift.channel, 1)}
        lines = [f"{name}: {budget_line(c, streams, RHYTHM)}" for name, (c, streams) in channels.items()]
        return [*lines, rule_line(f"stuck, noisy or shifted readings for {HOLD} s: loops, and all other instruments")]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """See `Detector.observe`."""
        if (time := self.gates.update(frames)) is None:
            return []
        if 0 <= time - self.judged.get("at", 0) < (RHYTHM - _JITTER) * SECOND:
            return []
        self.judged["at"] = time
        faults = self._find_faults(frames)
        if not faults and not self.known:
            return []
        for fault in reversed(faults):
            if fault.signal == "gpu.memory_temperature" and f"{fault.entity}|gpu.temperature" in self.known:
                continue  # compared with a core temperature that is known to be wrong
            self.known[f"{fault.entity}|{fault.signal}"] = {"wrong": asdict(fault), "last": time}
        topology, lingers = next(iter(frames.values())).topology, self.linger_seconds * SECOND
        for key, known in list(self.known.items()):
            served = self.gates.in_maintenance(known["wrong"]["entity"], topology, time, settles=0)
            if served or not 0 <= time - known["last"] <= lingers:
                del self.known[key]
        by_entity: dict[str, list[InstrumentFault]] = {}
        for _, known in sorted(self.known.items()):
            by_entity.setdefault(known["wrong"]["entity"], []).append(InstrumentFault(**known["wrong"]))
        close_ended(self.conditions, set(by_entity))
        found = []
        for entity, mine in by_entity.items():
            mine.sort(key=lambda fault: fault.since)
            if due := due_report(self.conditions, entity, time, mine[0].since, "ticket"):
                found.append(self._finding(mine, time, due))
        return found

    def _find_faults(self, frames: Mapping[str, Frame]) -> list[InstrumentFault]:
        faults: list[InstrumentFault] = []
        for device_class, instruments in (("gpu", self.gpus), ("coolant", self.loops), ("sensor", self.air)):
            frame = frames.get(device_class)
            if frame is not None and frame.values:
                if instruments is self.loops:
                    self.loops.update_climate(frame, frames.get("gpu"))
                faults += instruments.find_faults(frame, ~self.gates.maintenance_mask(frame))
        return faults

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """See `Detector.accept_as_normal`; also its known faults."""
        super().accept_as_normal(entity, frames)
        for known in (self.known, self.loops.odd_since):
            for key in [k for k in known if k.partition("|")[0] == entity]:
                known.pop(key)

    def _finding(self, mine: Sequence[InstrumentFault], time: int, due: tuple[int, Level]) -> Finding:
        """All instruments of one entity that are wrong, the first one first."""
        first = mine[0]
        others = f" (and {len(mine) - 1} more)" if len(mine) > 1 else ""
        evidence = {"mode": first.mode, "effect": first.effect, "unit": first.unit, **first.evidence}
        if len(mine) > 1:
            evidence["instruments"] = {fault.signal: {"mode": fault.mode, "words": fault.words} for fault in mine}
        return self.finding(
            *(time, first.entity, due),
            score=max(abs(fault.effect) or 1.0 for fault in mine),
            summary=pager_title(first.entity, f"{_LABELS[first.signal]} {first.words}{others}"),
            signals=tuple(fault.signal for fault in mine),
            clears="clears when it agrees again, or with announced maintenance on it",
            **evidence,
        )
