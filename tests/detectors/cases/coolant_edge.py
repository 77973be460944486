"""An agent reports a loop's collapsed flow."""

from __future__ import annotations

from detectors.heat.coolant_edge import CoolantEdge
from pipeline.model.records import SECOND, Event
from pipeline.model.topology import Topology
from tests.detectors.cases.case import START, Case
from tests.detectors.cases.coolant import LOOPS
from tests.detectors.cases.coolant import instant as loops


def instant(tick, broken, rng):
    values, events = loops(tick, broken, rng)
    if broken and tick == 60:
        time = START + tick * 10 * SECOND
        collapse = {"state": "active", "since": time - SECOND, "signal": "coolant.flow"}
        events.append(
            Event(time, "cdu:c0", "flow_collapse", {**collapse, "value": 120.0, "usual": 300.0, "share": 0.7})
        )
    return values, events


CASE = Case(
    detector=CoolantEdge,
    names={"coolant": LOOPS},
    topology=lambda: Topology({"rack:r1": ["cdu:c0"]}),
    instant=instant,
    guilty=frozenset({"cdu:c0"}),
    exact="the agent's rule has learnt and judged",
)
