"""Finds instruments that lie: a number stands still, jumps or swings while what hangs together with it does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from detectors.detector import Detector, notes, part
from detectors.method.conditions import Open, close, tell
from detectors.method.evidence import evidence
from detectors.method.gates import Gates
from detectors.telemetry.gpu_instruments import GpuInstruments, Wrong
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

    linger_seconds: a liar is one for so long after it was last caught; chosen: without load, as between two jobs, there
                    is nothing to catch it by.
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

    linger_seconds: float = 1800.0

    looked: dict[str, int] = notes()  # when instruments were judged last
    known: dict[str, dict[str, Any]] = notes()  # entity and signal -> what was wrong of it last, and when
    gates: Gates = part(Gates)
    gpus: GpuInstruments = part(GpuInstruments)
    loops: LoopInstruments = part(LoopInstruments)
    air: AirInstruments = part(AirInstruments)
    conditions: Open = notes()

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        if not frames:
            return []
        time = max(frame.time for frame in frames.values())
        self.gates.hear(frames)
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
        close(self.conditions, set(self.known))
        due = []
        for key, known in sorted(self.known.items()):
            each = Wrong(**known["wrong"])
            if told := tell(self.conditions, key, time, each.since, "ticket"):
                due.append(self._finding(each, time, told[0]))
        return due

    def _finding(self, wrong: Wrong, time: int, onset: int) -> Finding:
        summary = f"{wrong.signal} of {wrong.entity} {wrong.words}: the instrument is {wrong.mode}"
        more = {"mode": wrong.mode, "effect": wrong.effect, "unit": wrong.unit, **wrong.more}
        clears = "over when it agrees again, or with announced work on it"
        score = abs(wrong.effect) or 1.0
        told = evidence(clears, **more)
        return Finding(time, onset, wrong.entity, self.name, "ticket", score, summary, told, (wrong.signal,))
