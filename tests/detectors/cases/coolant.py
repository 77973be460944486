"""A pump that fails: flow, pressure and speed of one of five loops fall together."""

from __future__ import annotations

import numpy as np

from detectors.heat.coolant import Coolant
from pipeline.model.topology import Topology
from tests.detectors.cases.case import Case

LOOPS = tuple(f"cdu:c{i}" for i in range(5))


def instant(tick, broken, rng):
    left = np.array([0.4 if broken else 1.0, 1, 1, 1, 1])
    values = {
        "coolant.flow": 300.0 * left * (1 + 0.01 * rng.standard_normal(5)),
        "coolant.supply_temperature": 32.0 + 0.2 * rng.standard_normal(5),
        "coolant.pressure": 2.0 * left**2 * (1 + 0.01 * rng.standard_normal(5)),
        "pump.speed": 3200.0 * left * (1 + 0.003 * rng.standard_normal(5)),
    }
    return {"coolant": values}, []


CASE = Case(
    detector=Coolant,
    names={"coolant": LOOPS},
    topology=lambda: Topology({"rack:r1": ["cdu:c0"]}),
    instant=instant,
    guilty=frozenset({"cdu:c0"}),
)
