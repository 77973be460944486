"""An agent reports three GPUs of one node whose temperature rises without more power."""

from __future__ import annotations

from detectors.heat.thermal_edge import ThermalEdge
from pipeline.model.records import SECOND, Event
from pipeline.model.topology import Topology
from tests.detectors.cases.case import START, Case

GPUS = tuple(f"gpu:n{n}.{i}" for n in range(4) for i in range(4))


def instant(tick, broken, rng):
    events = []
    if broken and tick == 60:
        time = START + tick * 10 * SECOND
        reported = {"state": "active", "since": time - SECOND, "signal": "gpu.temperature", "slope": 1.4}
        reported |= {"value": 71.0, "rise": 11.0, "seconds": 5.0}
        events = [Event(time, f"gpu:n3.{i}", "temperature_rise", reported) for i in range(3)]
    return {"gpu": {"gpu.temperature": 60.0 + rng.standard_normal(16)}}, events


def topology():
    return Topology({gpu: [f"node:{gpu[4:6]}"] for gpu in GPUS} | {f"node:n{n}": ["rack:r1"] for n in range(4)})


CASE = Case(
    detector=ThermalEdge,
    names={"gpu": GPUS},
    topology=topology,
    instant=instant,
    guilty=frozenset({"node:n3"}),
    ticks=110,  # a rise that its agent reports once is over ten minutes later
    exact="the agent's rule has learnt and judged",
)
