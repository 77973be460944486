"""Inlet sensors that are stuck or read too low: a fault of an instrument is no finding about cooling."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detectors.heat.thermal import Thermal
from pipeline.model.records import SECOND
from tests.detectors.gpu_heat import START, HeatWorld

AIR = {"cooling": "air", "swing": 8.0, "nodes": 8, "interval": 30.0}


def run_world(wrong, hours=6.0, **settings):
    """Findings above suspect; `wrong(now s, air)` changes what the inlets report."""
    detector, found = Thermal(), []
    for frames in HeatWorld(**AIR, **settings).frames(hours):
        sensors = frames["sensor"]
        air = sensors["sensor.temperature"].copy()
        wrong((sensors.time - START) / SECOND, air)
        frames["sensor"] = replace(sensors, values={"sensor.temperature": air})
        found += detector.observe(frames)
    return [f for f in found if f.level != "suspect"]


def stuck_after(hours):
    held = {}

    def wrong(now, air):
        if now >= hours * 3600:
            air[1] = held.setdefault("air", air[1])

    return wrong


@pytest.mark.parametrize("hours", [0.0, 1.5])
def test_a_stuck_inlet_does_not_make_its_node_look_worse_cooled(hours):
    assert run_world(stuck_after(hours)) == []


def test_an_inlet_that_reads_too_low_does_not_make_its_node_look_worse_cooled():
    def wrong(now, air):
        air[1] -= 6.0 if now >= 2 * 3600 else 0.0

    assert run_world(wrong) == []


def test_inlets_that_are_read_in_turn_show_a_stuck_one_too():
    stuck, tick = stuck_after(1.5), [0]

    def wrong(now, air):
        stuck(now, air)
        tick[0] += 1
        air[np.arange(8) % 4 != tick[0] % 4] = np.nan

    assert run_world(wrong) == []


def test_a_node_that_cools_worse_is_found_beside_a_stuck_inlet_too():
    found = run_world(stuck_after(1.5), node_faults=[(1, 3.0, 1.35)])
    assert {f.entity for f in found} == {"node:n1"}
