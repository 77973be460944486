"""A BMC that stops answering, beside one that does not."""

from __future__ import annotations

import numpy as np

from detectors.telemetry.telemetry_blind import TelemetryBlind
from pipeline.model.topology import Topology
from tests.detectors.cases.case import Case

NAMES = {"bmc": ("bmc:row1", "bmc:row2"), "exporter": ("exporter:facility",)}


def instant(tick, broken, rng):
    answers = np.array([1.0, 0.0 if broken else 1.0])
    return {"bmc": {"bmc.reachable": answers}, "exporter": {"exporter.up": np.ones(1)}}, []


CASE = Case(
    detector=TelemetryBlind,
    names=NAMES,
    topology=Topology,
    instant=instant,
    guilty=frozenset({"bmc:row2"}),
    level="ticket",
    exact="an answer comes or it does not",
)
