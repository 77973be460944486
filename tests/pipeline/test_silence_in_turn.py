"""A place silences its members at one moment; those that fall silent one after another are worked on in turn."""

from __future__ import annotations

import pytest

from pipeline.model.records import SECOND, Finding
from pipeline.model.topology import Topology
from tests.pipeline.test_incidents import Case, found
from tests.pipeline.test_shared_causes import QUIET, hall, site

OUT_S = 180
"""Seconds for which a BMC does not respond while it is updated."""


def racks() -> Topology:
    parents = dict(hall(loops=1, racks=4).parents)
    return Topology(parents | {f"bmc:n{n}": (f"node:n{n}",) for n in range(32)})


def silences(detector: str, entity: str, every: int) -> Case:
    """Returns a Desk after silences of eight devices of a rack that begin `every` seconds after each other."""
    case = site(racks(), QUIET)
    began = case.time
    for second in range(0, 8 * every + 2 * OUT_S, 20):
        now: list[Finding] = []
        for n in range(8):
            if every * n + 60 <= second <= every * n + OUT_S:
                onset = began + every * n * SECOND
                now.append(found(f"{entity}:n{n}", detector, "suspect", onset, signals=("bmc.reachable",)))
        case.report_findings(*now, seconds=20)
    return case


@pytest.mark.parametrize("every", [60, 90, OUT_S, 600])
@pytest.mark.parametrize(("detector", "entity"), [("telemetry_blind", "bmc"), ("telemetry", "node")])
def test_bmcs_and_nodes_of_a_rack_that_are_updated_one_after_another_blame_no_place(
    detector: str, entity: str, every: int
) -> None:
    case = silences(detector, entity, every + 1)
    opened = {(c.incident.cause, c.incident.severity) for c in case.changes}
    assert opened == {(f"{entity}:n{n}", "watch") for n in range(8)}


@pytest.mark.parametrize(("detector", "entity"), [("telemetry_blind", "bmc"), ("telemetry", "node")])
def test_bmcs_and_nodes_of_a_rack_that_fall_silent_together_blame_the_rack(detector: str, entity: str) -> None:
    case = silences(detector, entity, 5)
    assert {(i.cause, i.severity) for i in case.desk.incidents.values() if not i.resolved} == {("rack:r0", "ticket")}


def test_rolling_work_takes_in_no_node_that_dies_meanwhile() -> None:
    case = Case(racks())
    work = found("site:all", "telemetry", "ticket", evidence={"rolling_work": 8})
    for minute in range(10):
        dead = [found("node:n9", "telemetry", "page", onset=case.time)] if minute == 5 else []
        case.report_findings(work, *dead, seconds=60)
    assert {i.cause: i.severity for i in case.desk.incidents.values()} == {"site:all": "ticket", "node:n9": "page"}
