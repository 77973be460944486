"""A leak rope of a loop that becomes wet, beside one that stays dry."""

from __future__ import annotations

import numpy as np

from detectors.heat.coolant_leak import CoolantLeak
from pipeline.model.records import SECOND, Event
from pipeline.model.topology import Topology
from tests.detectors.cases.case import START, Case

ROPES = ("leak_detector:c0.tray", "leak_detector:c0.hose")


def instant(tick, broken, rng):
    state = np.array([0.0, 2.0 if broken else 0.0])
    events = []
    if broken and tick == 60:
        time = START + tick * 10 * SECOND
        data = {"state": "active", "since": time - SECOND, "leak": "critical", "value": 2}
        events = [Event(time, ROPES[1], "leak", data)]
    return {"leak": {"leak.state": state}}, events


CASE = Case(
    detector=CoolantLeak,
    names={"leak": ROPES},
    topology=lambda: Topology({rope: ["cdu:c0"] for rope in ROPES}),
    instant=instant,
    guilty=frozenset({ROPES[1]}),
    exact="the leak detector's own controller has judged",
)
