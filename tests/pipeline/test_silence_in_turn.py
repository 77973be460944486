"""A place silences its members at one moment; those that fall silent one after another are worked on in turn."""

from __future__ import annotations

import random

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


def two_versions() -> Topology:
    """Returns sixteen racks, of which twelve run the older one of two driver versions."""
    topology = hall(loops=16, racks=1)
    versions = {f"node:n{n}": {"nvidia_driver": "570" if n < 96 else "575"} for n in range(128)}
    bmcs = {f"bmc:n{n}": (f"node:n{n}",) for n in range(128)}
    return Topology(dict(topology.parents) | bmcs, versions)


def silences(detector: str, entity: str, every: int, topology: Topology | None = None) -> Case:
    """Returns a Desk after silences of eight devices of a rack that begin `every` seconds after each other."""
    case = site(topology or racks(), QUIET)
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


@pytest.mark.parametrize("every", [120, OUT_S, 600])
@pytest.mark.parametrize(("detector", "entity"), [("telemetry_blind", "bmc"), ("telemetry", "node")])
def test_work_on_one_rack_after_another_node_blames_no_version_that_most_of_the_fleet_runs(
    detector: str, entity: str, every: int
) -> None:
    case = silences(detector, entity, every + 1, two_versions())
    assert {c.incident.cause for c in case.changes} == {f"{entity}:n{n}" for n in range(8)}


@pytest.mark.parametrize("seed", range(6))
def test_nodes_of_a_pdu_that_were_last_seen_up_to_a_minute_apart_blame_the_pdu(seed: int) -> None:
    """Sixteen nodes lose power at one moment. Collectors of 60 s saw each at another time, some report immediately."""
    dice, case = random.Random(seed), site(two_versions())
    last = {n: case.time + dice.randrange(60) * SECOND for n in range(16, 32)}
    for _ in range(9):
        seen = [(n, at) for n, at in last.items() if case.time >= at + 15 * SECOND]
        case.report_findings(*(found(f"node:n{n}", "telemetry", "page", at) for n, at in seen), seconds=10)
    assert {i.cause for i in case.desk.incidents.values() if not i.resolved} == {"pdu:p1"}
