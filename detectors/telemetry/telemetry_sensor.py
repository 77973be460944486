"""Finds faulty instruments: a reading is stuck, jumps or swings while related readings do not.

This file also checks the instruments of the plant: flow and supply temperature of a loop against its pressure, pump
and return; air inlets against those of the rack. Those of GPUs are in gpu_instruments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.budget import GPUS, budget_line, rule_line
from detectors.base.cohorts import Peers
from detectors.base.detector import Detector, notes, part
from detectors.base.findings import OpenConditions, close_ended, due_report, make_evidence
from detectors.base.gates import Gates
from detectors.base.streams import Channel, Streams
from detectors.base.topology_index import members_mask
from detectors.telemetry.gpu_instruments import HOLD, STILL, GpuInstruments, Wrong
from detectors.telemetry.instruments import K_ERROR, RHYTHM, Bools, Climate, LoopMeans, Shift, Still, Swing
from pipeline.model.records import SECOND, Finding, Frame
from pipeline.model.topology import Topology

LEAST_FLOW, LEAST_SUPPLY_K, LEAST_INLET_K = 0.05, 1.5, 2.2
"""Shifts that are one: twice the error of a flow meter; several times a thermometer's; chosen."""
UNMOVED = 0.5
"""Share of what a true change would do to the others, below which they have not moved: pressure goes with the square of
the flow, the pump's speed with it (affinity laws), the heat's rise of temperature against it; chosen."""
_RATIO, _FLOW_NOISE, _SUPPLY_NOISE, _INLET_NOISE = 4.0, 0.004, 0.05, 0.15
"""Times the usual change that is noise; least usual changes: share of the flow, K; chosen."""
_OFTEN = 0.5  # of the readings differ from the one before, or standing still says nothing; chosen
_SURE = 16.0
"""Expected changes that stayed away: at a quarter of its usual rate a sound one does that once in e**16; chosen."""
_FAN = 0.05  # share by which fans that follow a warm inlet speed up at least; chosen
_INLETS = ("inlet", "intake", "ambient")


class LoopInstruments:
    """State per coolant unit: it is compared with itself, as there are few and each is another."""

    def __init__(self) -> None:
        names = ("flow", "pressure", "pump", "supply", "return", "rise")
        self.shifts = {name: Shift() for name in names}
        self.swings = {name: Swing() for name in ("flow", "supply")}
        self.stills = {name: Still("other") for name in ("flow", "supply")}
        self.held: dict[str, int] = {}  # entity and signal -> since when it is odd
        self.means, self.climate = LoopMeans(), Climate()

    def feel(self, frame: Frame, gpus: Frame | None) -> None:
        """Takes what the GPUs of each loop feel of its supply; to be called before `look`."""
        self.climate.step(*self.means.of(frame, gpus))

    def look(self, frame: Frame, gate: Bools) -> Iterator[Wrong]:
        """Who is wrong now."""
        if not gate.all():
            self.reset(~gate)
        flow, supply, back = (frame[f"coolant.{name}"] for name in ("flow", "supply_temperature", "return_temperature"))
        logs = {"flow": flow, "pressure": frame["coolant.pressure"], "pump": frame["pump.speed"], "rise": back - supply}
        values = {name: np.log(np.where(v > 0, v, np.nan)) for name, v in logs.items()}
        values |= {"supply": supply, "return": back}
        odd = np.zeros(len(flow), bool)
        for key in self.held:
            entity = key.partition("|")[0]
            odd[[i for i, e in enumerate(frame.entities) if e == entity]] = True
        moved = {name: self.shifts[name].step(v, odd) for name, v in values.items()}
        yield from self._biased(frame, moved)
        yield from self._noisy(frame, values)
        yield from self._stuck(frame, {"flow": flow, "supply": supply}, {"flow": values["pressure"], "supply": back})

    def reset(self, mask: Bools) -> None:
        """These are learnt anew."""
        for each in (*self.shifts.values(), *self.swings.values(), *self.stills.values()):
            each.reset(mask)

    def _biased(self, frame: Frame, moved: Mapping[str, NDArray[np.float64]]) -> Iterator[Wrong]:
        flow, supply, known = moved["flow"], moved["supply"], {key.partition("|")[0] for key in self.held}
        judged = (np.abs(flow) >= LEAST_FLOW) | (np.abs(supply) >= LEAST_SUPPLY_K)
        judged[[i for i, e in enumerate(frame.entities) if e in known] if known else []] = True
        for i in np.flatnonzero(judged).tolist():
            entity, q, t = frame.entities[i], float(flow[i]), float(supply[i])
            real = abs(moved["pressure"][i]) > UNMOVED * 2 * abs(q) or abs(moved["pump"][i]) > UNMOVED * abs(q)
            real |= -q * moved["rise"][i] > UNMOVED * q * q and abs(moved["supply"][i]) < LEAST_SUPPLY_K
            words = f"tells {abs(q):.0%} {'more' if q > 0 else 'less'} than before; pressure, pump and heat are as ever"
            yield from self._if_held(abs(q) >= LEAST_FLOW and not real, frame, i, entity, "coolant.flow", q, "1", words)
            on = abs(t) >= LEAST_SUPPLY_K and not self._followed(i, t, float(moved["return"][i]))
            others = "the return does" if np.isnan(self.climate.shift[i]) else "return and GPUs do"
            words = f"tells {abs(t):.1f} K {'more' if t > 0 else 'less'} than before; {others} not follow"
            yield from self._if_held(on, frame, i, entity, "coolant.supply_temperature", t, "K", words)

    def _followed(self, i: int, t: float, back: float) -> bool:
        """Whether what comes after the supply moved with it, or its load moved too much to tell."""
        gpus, load = float(self.climate.shift[i]), float(self.climate.load[i])
        if np.isnan(gpus):
            return abs(back) > UNMOVED * abs(t)  # the other way it is the load that moved it
        unclear = max(K_ERROR * abs(load), UNMOVED * abs(gpus)) > UNMOVED * abs(t)  # more happens than a supply's shift
        return unclear or back * t > UNMOVED * t * t or gpus * t > UNMOVED * t * t

    def _if_held(
        self, on: bool, frame: Frame, i: int, entity: str, signal: str, effect: float, unit: str, words: str
    ) -> Iterator[Wrong]:
        key = f"{entity}|{signal}"
        if not on:
            self.held.pop(key, None)
            return
        since = self.held.setdefault(key, frame.time)
        if frame.time - since >= HOLD * SECOND:
            more = {"value": float(frame[signal][i]), "cohort": "own past"}
            yield Wrong(entity, signal, "biased", since, effect, unit, words, more)

    def _noisy(self, frame: Frame, values: Mapping[str, NDArray[np.float64]]) -> Iterator[Wrong]:
        named = {"flow": ("coolant.flow", _FLOW_NOISE), "supply": ("coolant.supply_temperature", _SUPPLY_NOISE)}
        for name, (signal, least) in named.items():
            times, held = self.swings[name].step(values[name], least, _RATIO)
            for i in np.flatnonzero(held >= STILL).tolist():
                words = f"swings {times[i]:.0f} times as much as usual from reading to reading"
                since = frame.time - int(held[i]) * RHYTHM * SECOND
                more = {"value": float(frame[signal][i]), "cohort": "own past"}
                yield Wrong(frame.entities[i], signal, "noisy", since, float(times[i]), "1", words, more)

    def _stuck(
        self, frame: Frame, values: Mapping[str, NDArray[np.float64]], others: Mapping[str, NDArray[np.float64]]
    ) -> Iterator[Wrong]:
        for name, signal in (("flow", "coolant.flow"), ("supply", "coolant.supply_temperature")):
            still = self.stills[name]
            run, spans = still.step(values[name], other=others[name])
            usual = still.cells["usual"][: len(run)]
            on = (run >= STILL) & (usual >= _OFTEN) & (spans["other"] > 0) & (values[name] != 0)
            for i in np.flatnonzero(on).tolist():
                words = f"has stood at {values[name][i]:.2f} for {int(run[i])} readings while the loop's others move"
                since = frame.time - int(run[i]) * RHYTHM * SECOND
                more = {"value": float(values[name][i]), "cohort": "own past"}
                yield Wrong(frame.entities[i], signal, "stuck", since, 0.0, "1", words, more)

    def snapshot(self) -> dict[str, Any]:
        kinds = {"shifts": self.shifts, "swings": self.swings, "stills": self.stills}
        kept = {kind: {n: each.snapshot() for n, each in parts.items()} for kind, parts in kinds.items()}  # type: ignore[attr-defined]
        return {**kept, "held": dict(self.held), "climate": self.climate.snapshot()}

    def restore(self, state: Mapping[str, Any]) -> None:
        for kind in ("shifts", "swings", "stills"):
            for name, each in getattr(self, kind).items():
                each.restore(state[kind][name])
        self.held = dict(state["held"])
        self.climate.restore(state["climate"])


class AirInstruments:
    """State per board sensor of a temperature; those of air inlets are compared with the rack's."""

    def __init__(self) -> None:
        self._peers = Peers(("rack",), least=4)
        self.shift = Streams(Channel(floor=0.5, delta=LEAST_INLET_K, phi=0.9, both=True))
        self.swing, self.still = Swing(), Still("like")
        self._key: tuple[int, int, int] = (0, -1, 0)
        self._inlet = np.zeros(0, bool)

    def look(self, frame: Frame, gate: Bools) -> Iterator[Wrong]:
        """Who is wrong now."""
        if not gate.all():
            self.reset(~gate)
        self._renew(frame)
        value = np.where(self._inlet, frame["sensor.temperature"], np.nan)
        groups = np.where(self._inlet, self._peers.groups(frame), -1).astype(np.int32)
        step = self.shift.step(value, groups, frame.time, gate & self._inlet)
        for i in np.flatnonzero(step.on & (step.held >= HOLD) & ~step.moved & (step.size > 1)).tolist():
            k = float(step.effect[i])
            words = f"tells {abs(k):.1f} K {'more' if k > 0 else 'less'} than the rack's other inlets and its own past"
            if not self._fans(frame, i, k):
                yield self._wrong(frame, i, "biased", int(step.held[i]), k, "K", f"{words}; its fans are as ever")
        times, held = self.swing.step(value, _INLET_NOISE, _RATIO)
        for i in np.flatnonzero(held >= STILL).tolist():
            like = times[groups == groups[i]]
            if groups[i] >= 0 and times[i] >= _RATIO * np.median(like):
                words = (
                    f"swings {times[i]:.0f} times as much as usual from reading to reading, the rack's others do not"
                )
                yield self._wrong(frame, i, "noisy", int(held[i]) * RHYTHM, float(times[i]), "1", words)
        run, spans = self.still.step(value, like=np.where(step.size > 1, step.median, np.nan))
        usual = self.still.cells["usual"][: len(run)]
        for i in np.flatnonzero((run * usual / 4 >= _SURE) & (run >= STILL) & (spans["like"] > 0)).tolist():
            words = f"has stood at {value[i]:.1f} Cel for {int(run[i])} readings, though {usual[i]:.0%} used to differ"
            yield self._wrong(frame, i, "stuck", int(run[i]) * RHYTHM, 0.0, "K", words)

    def reset(self, mask: Bools) -> None:
        """These are learnt anew."""
        for each in (self.shift, self.swing, self.still):
            each.reset(mask)

    def _fans(self, frame: Frame, i: int, k: float) -> bool:
        """Whether the fans of the node, or else what nobody measures, bear a change of the inlet out."""
        node = frame.topology.ancestor_of_kind(frame.entities[i], "node")
        speeds = frame["sensor.fan_speed"]
        mine = [j for j in np.flatnonzero(~np.isnan(speeds)).tolist() if _of(frame.topology, frame.entities[j], node)]
        like = speeds[~np.isnan(speeds)]
        if not mine or len(like) < 4:
            return False
        return bool(k > 0 and np.mean(speeds[mine]) > (1 + 3 * _FAN) * np.median(like))

    def _renew(self, frame: Frame) -> None:
        key = (id(frame.topology), frame.topology.version, len(frame.entities))
        if key != self._key:
            self._key = key
            self._inlet = np.array([_is_inlet(e, frame.topology.attributes.get(e, {})) for e in frame.entities], bool)

    def _wrong(self, frame: Frame, i: int, mode: str, held: int, effect: float, unit: str, words: str) -> Wrong:
        value, cohort = float(frame["sensor.temperature"][i]), self._peers.cohort_name(frame, i)
        more = {"value": value, "cohort": cohort}
        since = frame.time - held * SECOND
        return Wrong(frame.entities[i], "sensor.temperature", mode, since, effect, unit, words, more)

    def snapshot(self) -> dict[str, Any]:
        return {name: getattr(self, name).snapshot() for name in ("shift", "swing", "still")}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name in ("shift", "swing", "still"):
            getattr(self, name).restore(state[name])


def _is_inlet(entity: str, attributes: Mapping[str, object]) -> bool:
    said = f"{entity} {attributes.get('label')} {attributes.get('context')}".lower()
    return any(word in said for word in _INLETS)


def _of(topology: Topology, entity: str, node: str | None) -> bool:
    return node is not None and topology.ancestor_of_kind(entity, "node") == node


_JITTER = 6  # s by which samples of a frame are dated apart; chosen: half a frame and one


@dataclass
class TelemetrySensor(Detector):
    """An instrument that has been wrong for ten minutes is a ticket, never a page: what it measures is well.

    Stuck: the same reading, while what it measures must have moved. Biased: it alone moved, and stays there: a GPU's
    temperature against its memory's, power and the node's other GPUs; its power against its temperature; a loop's flow
    against pressure, pump and heat (affinity laws); its supply against its return; an air inlet against the rack's and
    the fans. Noisy: it swings much more than usual, and its like do not. After announced work it is learnt anew.

    Source: the kinds of fault as in Ni et al., "Sensor network data fault types", ACM Transactions on Sensor Networks
    5(3), 2009.

    linger_seconds: a liar is one for so long after it was last caught; chosen: without load, as between two jobs, or
                    with a small lie there is nothing to catch it by for hours, and it does not mend itself.
    """

    name: ClassVar[str] = "telemetry_sensor"
    family: ClassVar[str] = "telemetry"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = ("gpu.temperature", "gpu.power")
    wants: ClassVar[tuple[str, ...]] = (
        *("gpu.memory_temperature", "coolant.flow", "coolant.supply_temperature", "coolant.return_temperature"),
        *("coolant.pressure", "pump.speed", "sensor.temperature", "sensor.fan_speed"),
        *("event:maintenance_start", "event:maintenance_end"),
    )
    cannot_see: ClassVar[str] = (
        "A bias that was there from the beginning, below 2.2 K, 5 % of a flow or some 60 W, and an idle GPU, of which "
        "nothing varies."
    )

    linger_seconds: float = 14400.0

    looked: dict[str, int] = notes()  # when instruments were judged last
    known: dict[str, dict[str, Any]] = notes()  # entity and signal -> what was wrong of it last, and when
    gates: Gates = part(Gates)
    gpus: GpuInstruments = part(GpuInstruments)
    loops: LoopInstruments = part(LoopInstruments)
    air: AirInstruments = part(AirInstruments)
    conditions: OpenConditions = notes()

    def budget(self) -> list[str]:
        """Streams are judged every RHYTHM s; what stands still or swings, and the few loops, by rules."""
        gpus = {f"{name} of GPUs": piece.channel for name, piece in self.gpus.streams.items()}
        told = {**{name: (channel, GPUS) for name, channel in gpus.items()}, "inlet": (self.air.shift.channel, 1)}
        lines = [f"{name}: {budget_line(c, streams, RHYTHM)}" for name, (c, streams) in told.items()]
        return [
            *lines,
            rule_line(f"what stands still, swings or moves alone for {HOLD} s: loops, and all other instruments"),
        ]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        if (time := self.gates.update(frames)) is None:
            return []
        if 0 <= time - self.looked.get("at", 0) < (RHYTHM - _JITTER) * SECOND:
            return []
        self.looked["at"] = time
        wrong: list[Wrong] = []
        for device_class, part_ in (("gpu", self.gpus), ("coolant", self.loops), ("sensor", self.air)):
            frame = frames.get(device_class)
            if frame is not None and frame.values:
                if part_ is self.loops:
                    self.loops.feel(frame, frames.get("gpu"))
                wrong += part_.look(frame, ~self.gates.maintenance_mask(frame))
        if not wrong and not self.known:
            return []
        for each in reversed(wrong):
            if each.signal == "gpu.memory_temperature" and f"{each.entity}|gpu.temperature" in self.known:
                continue  # compared with a core that is known to lie
            self.known[f"{each.entity}|{each.signal}"] = {"wrong": asdict(each), "last": time}
        self.known = {k: v for k, v in self.known.items() if 0 <= time - v["last"] <= self.linger_seconds * SECOND}
        of_each: dict[str, list[Wrong]] = {}
        for _, known in sorted(self.known.items()):
            of_each.setdefault(known["wrong"]["entity"], []).append(Wrong(**known["wrong"]))
        close_ended(self.conditions, set(of_each))
        due = []
        for entity, mine in of_each.items():
            mine.sort(key=lambda each: each.since)
            if told := due_report(self.conditions, entity, time, mine[0].since, "ticket"):
                due.append(self._finding(mine, time, told[0]))
        return due

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        super().accept_as_normal(entity, frames)
        for device_class, part_ in (("gpu", self.gpus), ("coolant", self.loops), ("sensor", self.air)):
            frame = frames.get(device_class)
            if frame is not None and (mask := members_mask((entity,), frame)).any():
                part_.reset(mask)
        for known in (self.known, self.loops.held):
            for key in [k for k in known if k.partition("|")[0] == entity]:
                known.pop(key)

    def _finding(self, mine: Sequence[Wrong], time: int, onset: int) -> Finding:
        """All instruments of one entity that are wrong, the first one first."""
        first = mine[0]
        said = [f"{each.signal} of {each.entity} {each.words}: the instrument is {each.mode}" for each in mine]
        more = {"mode": first.mode, "effect": first.effect, "unit": first.unit, **first.more}
        if len(mine) > 1:
            more["instruments"] = {each.signal: {"mode": each.mode, "words": each.words} for each in mine}
        told = make_evidence("over when it agrees again, or with announced work on it", **more)
        score, signals = max(abs(each.effect) or 1.0 for each in mine), tuple(each.signal for each in mine)
        return Finding(time, onset, first.entity, self.name, "ticket", score, "; ".join(said), told, signals)
