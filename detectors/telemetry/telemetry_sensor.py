"""Finds instruments that lie: a number stands still, jumps or swings while what hangs together with it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from detectors.detector import Detector, notes, part
from detectors.method.budget import GPUS, in_words, rule
from detectors.method.conditions import Open, close, tell
from detectors.method.evidence import evidence
from detectors.method.gates import Gates
from detectors.method.members import members
from detectors.telemetry.gpu_instruments import HOLD, GpuInstruments, Wrong
from detectors.telemetry.instruments import RHYTHM
from detectors.telemetry.plant_instruments import AirInstruments, LoopInstruments
from pipeline.records import SECOND, Finding, Frame

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
    blind: ClassVar[str] = (
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
    conditions: Open = notes()

    def budget(self) -> list[str]:
        """Streams are judged every RHYTHM s; what stands still or swings, and the few loops, by rules."""
        gpus = {f"{name} of GPUs": piece.channel for name, piece in self.gpus.streams.items()}
        told = {**{name: (channel, GPUS) for name, channel in gpus.items()}, "inlet": (self.air.shift.channel, 1)}
        lines = [f"{name}: {in_words(c, streams, RHYTHM)}" for name, (c, streams) in told.items()]
        return [
            *lines,
            rule(f"what stands still, swings or moves alone for {HOLD} s: loops, and all other instruments"),
        ]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        if (time := self.gates.hear(frames)) is None:
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
                wrong += part_.look(frame, ~self.gates.working(frame))
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
        close(self.conditions, set(of_each))
        due = []
        for entity, mine in of_each.items():
            mine.sort(key=lambda each: each.since)
            if told := tell(self.conditions, entity, time, mine[0].since, "ticket"):
                due.append(self._finding(mine, time, told[0]))
        return due

    def forgive(self, entity: str, frames: Mapping[str, Frame]) -> None:
        super().forgive(entity, frames)
        for device_class, part_ in (("gpu", self.gpus), ("coolant", self.loops), ("sensor", self.air)):
            frame = frames.get(device_class)
            if frame is not None and (mask := members((entity,), frame)).any():
                part_.forget(mask)
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
        told = evidence("over when it agrees again, or with announced work on it", **more)
        score, signals = max(abs(each.effect) or 1.0 for each in mine), tuple(each.signal for each in mine)
        return Finding(time, onset, first.entity, self.name, "ticket", score, "; ".join(said), told, signals)
