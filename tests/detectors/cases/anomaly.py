"""A series of another exporter that doubles, beside eleven that stay as they are."""

from __future__ import annotations

from detectors.anomaly.anomaly import Anomaly
from pipeline.model.topology import Topology
from tests.detectors.cases.case import Case

NAMES = tuple(f"custom:exporter.series{i}" for i in range(12))


def instant(tick, broken, rng):
    values = 100.0 + rng.standard_normal(12)
    values[5] *= 2 if broken else 1
    return {"custom": {"custom.value": values}}, []


CASE = Case(
    detector=Anomaly,
    names={"custom": NAMES},
    topology=Topology,
    instant=instant,
    guilty=frozenset({NAMES[5]}),
    level="suspect",
    ticks=75,  # a new level is soon the normal one
)
