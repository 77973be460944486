"""GPUs of no loop, CDU or rack of three nodes: the rest of the fleet is one unit."""

from __future__ import annotations

import pytest

from detectors.heat.thermal import Thermal
from pipeline.incidents.desk import Desk
from pipeline.model.topology import Topology
from tests.detectors.cases.thermal import CASE, GPUS, WIDTH
from tests.detectors.test_thermal_unmonitored import SINCE, first, hot, run_detector

NODES = {gpu: (f"node:n{k // WIDTH}",) for k, gpu in enumerate(GPUS)}
PAIRS = {**NODES, **{f"node:n{n}": (f"rack:r{n // 2}",) for n in range(4)}}


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("parents", [NODES, PAIRS])
def test_where_nothing_spans_three_nodes_the_fleet_is_one_finding(parents):
    found = run_detector(hot(until=SINCE + 90), 220, graph=Topology(parents))
    assert {f.entity for f in found} == {"fleet:gpu"}
    assert (found[0].time, found[0].level) == (CASE.time(SINCE + 1), "ticket")
    assert first(found, "page").time == CASE.time(SINCE + 61)
    assert found[-1].time < CASE.time(SINCE + 90)
    assert {f.entity for f in run_detector(hot(range(WIDTH)), graph=Topology(parents))} == {"node:n0"}
    assert {f.entity for f in run_detector(hot([0, WIDTH]), graph=Topology(parents))} == {GPUS[0], GPUS[WIDTH]}


def test_the_finding_on_the_fleet_is_one_page_at_the_desk_and_ends_with_feedback():
    desk, detector = Desk(Topology(NODES)), Thermal()
    for finding in run_detector(hot(), 160, detector, graph=Topology(NODES)):
        desk.observe(finding.time, [finding])
    assert [(i.cause, i.severity) for i in desk.incidents.values()] == [("fleet:gpu", "page")]
    detector.accept_as_normal("fleet:gpu", {})
    assert run_detector(hot(), 60, detector, 160, Topology(NODES)) == []


def test_a_rack_of_three_nodes_is_reported_apart_from_the_fleet():
    racks = Topology({**NODES, **{f"node:n{n}": ("rack:r0",) for n in range(3)}, "node:n3": ("rack:r1",)})
    assert {f.entity for f in run_detector(hot(), graph=racks)} == {"rack:r0"}
