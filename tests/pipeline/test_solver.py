"""Factors beyond containment (jobs, versions, changes, names), what the solver counts, and how sure it is."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from pipeline.incidents.confidence import ALONE, NAMED, SHARED, Assessment
from pipeline.incidents.desk import Desk
from pipeline.incidents.factors import CHANGE_WINDOW, FACTOR_KINDS, FactorIndex
from pipeline.incidents.solver import concentration
from pipeline.model.records import SECOND
from pipeline.model.topology import Topology, kind_of
from tests.pipeline.test_incidents import START, Case, found
from tests.pipeline.test_shared_causes import hall, nodes, site

OLD, NEW = {"nvidia_driver": "570.1"}, {"nvidia_driver": "575.2"}


def with_job(ranks_on: range = range(4, 20)) -> Topology:
    """Returns a hall in which a job has a rank on GPU 0 of some nodes."""
    ranks = {f"rank:7.{i}": ("stage:7.0", "job:7", f"gpu:n{n}.0") for i, n in enumerate(ranks_on)}
    return Topology(dict(hall().parents) | ranks)


def with_versions(new: range) -> Topology:
    parents = hall().parents
    return Topology(parents, {f"node:n{n}": NEW if n in new else OLD for n in range(64)})


def test_ranks_of_a_job_that_are_slow_together_blame_the_job_and_not_the_devices() -> None:
    case = site(with_job())
    case.report_findings(*(found(f"rank:7.{i}", level="suspect") for i in range(0, 16, 2)))
    assert case.causes() == {"job:7"}


def test_a_slow_job_does_not_hide_one_slow_rank() -> None:
    case = site(with_job())
    case.report_findings(found("job:7", "straggler_job", "suspect"), found("rank:7.3"))
    assert case.causes() == {"job:7", "gpu:n7.0"}


def test_silent_members_count_less_against_a_job_than_against_a_device() -> None:
    assert {kind: known.silence for kind, known in FACTOR_KINDS.items() if known.silence < 1} == dict.fromkeys(
        ("job", "stage", "version", "change"), 0.35
    )


def test_a_job_that_hangs_after_its_supply_failed_is_a_symptom_and_one_that_hung_before_is_not() -> None:
    for later, causes in ((400, {"pdu:p0"}), (-600, {"pdu:p0", "job:7"}), (1200, {"pdu:p0", "job:7"})):
        case = site(with_job())
        case.report_findings(found("pdu:p0", "power", onset=START))
        case.report_findings(found("pdu:p0", "power", onset=START), seconds=500)
        case.report_findings(found("pdu:p0", "power", onset=START), seconds=500)
        hangs = found("job:7", "straggler_job", onset=START + later * SECOND)
        case.report_findings(found("pdu:p0", "power", onset=START), hangs, seconds=300)
        assert case.causes() == causes


def test_nodes_with_one_driver_version_in_many_racks_blame_the_version() -> None:
    struck = range(0, 64, 5)
    topology = Topology(hall().parents, {f"node:n{n}": NEW if n % 5 == 0 else OLD for n in range(64)})
    case = site(topology)
    case.report_findings(*(found(f"gpu:n{n}.0", "xid") for n in struck))
    assert case.causes() == {"version:nvidia_driver=575.2"}


@pytest.mark.parametrize(
    ("detector", "struck", "blamed"),
    [
        ("straggler", range(8, 16), False),  # one rack of six that run the version: heat or power of the rack
        ("straggler", range(0, 48, 6), True),
        ("xid", range(8, 16), True),  # of which a rack is no cause
    ],
)
def test_a_version_of_most_nodes_is_not_blamed_for_what_one_place_explains(
    detector: str, struck: range, blamed: bool
) -> None:
    case = site(with_versions(range(48, 64)))
    case.report_findings(*(found(f"gpu:n{n}.0", detector) for n in struck))
    assert ("version:nvidia_driver=570.1" in case.causes()) == blamed


def test_a_place_is_distinguished_from_a_version_by_its_share_of_the_affected() -> None:
    assert concentration(8, 8, 8, 96) == pytest.approx(8 * math.log(12))
    assert concentration(6, 8, 8, 96) == pytest.approx(6 * math.log(0.75 * 12) + 2 * math.log(0.25 * 12 / 11))
    assert concentration(1, 8, 16, 96) == 0, "less than its share"
    assert concentration(8, 8, 96, 96) == 0, "the version runs nowhere else"


def test_a_version_that_shows_one_by_one_takes_in_its_earlier_pages() -> None:
    topology = Topology(hall().parents, {f"node:n{n}": NEW if n % 5 == 0 else OLD for n in range(64)})
    case = site(topology)
    for n in range(0, 60, 5):
        case.report_findings(found(f"gpu:n{n}.0", "xid", onset=case.time), seconds=70)
    assert case.causes() == {"version:nvidia_driver=575.2"}


def test_a_version_that_the_whole_fleet_has_is_no_factor() -> None:
    index = FactorIndex(with_versions(range(64)))
    index.refresh(START)
    assert not any(kind_of(factor) == "version" for factor in index.units)


def test_a_changed_version_is_a_factor_for_a_day_also_after_a_restart() -> None:
    topology = with_versions(range(0))
    index = FactorIndex(topology)
    index.refresh(START)
    topology.merge({}, {f"node:n{n}": NEW for n in range(6)})
    index.refresh(START + 1)
    assert index.units["change:nvidia_driver=575.2"] == tuple(f"node:n{n}" for n in range(6))
    again = FactorIndex(topology)
    again.load_json(json.loads(json.dumps(index.as_json())))
    again.refresh(START + 2)
    assert again.units == index.units
    again.refresh(START + 2 + CHANGE_WINDOW)
    assert "change:nvidia_driver=575.2" not in again.units


def test_without_topology_names_and_labels_say_what_belongs_together() -> None:
    case = Case(Topology())
    case.report_findings(*(found(f"gpu:r12-n{n}.{g}", "thermal") for n in range(6) for g in range(4)))
    assert case.causes() == {"rack:r12"}
    labels: dict[str, dict[str, Any]] = {f"node:h{n}": {"leaf": "l9", "rack": "a7"} for n in range(6)}
    case = Case(Topology({}, labels))
    case.report_findings(*(found(f"node:h{n}", "power") for n in range(6)))
    assert case.causes() == {"rack:a7"}
    case = Case(Topology())
    case.report_findings(*(found(f"rank:81.{r}", "straggler", "suspect") for r in range(9)))
    assert case.causes() == {"job:81"}


def test_the_leak_detector_of_a_rack_tells_which_part_of_the_loop_leaks() -> None:
    topology = Topology(dict(hall().parents) | {"leak_detector:r1": ("rack:r1",)})
    case = site(topology)
    case.report_findings(found("cdu:c0", "coolant_leak", "ticket"))
    for _ in range(10):
        case.report_findings(found("cdu:c0", "coolant_leak", "ticket"), seconds=300)
    assert case.causes() == {"cdu:c0"}
    (change,) = case.report_findings(found("leak_detector:r1", "coolant_leak", evidence={"holds": True}))
    assert (change.kind, change.incident.cause) == ("cause_changed", "rack:r1")
    case.report_findings(found("cdu:c0", "coolant", "page", onset=case.time))
    assert case.causes() == {"rack:r1"}, "the loop loses what the rack leaks"


@pytest.mark.parametrize("rope_first", [True, False])
@pytest.mark.parametrize(
    ("where", "cause"),
    [(("cdu:c0",), "cdu:c0"), (("node:n3",), "cdu:c0"), (("rack:r1",), "rack:r1"), ((), "cdu:c0"), (None, "cdu:c0")],
    ids=["coolant unit", "tray of a node", "rack", "no known place", "not in the inventory"],
)
def test_a_leak_that_its_rope_and_its_reservoir_show_an_hour_apart_is_one_page(
    where: tuple[str, ...] | None, cause: str, rope_first: bool
) -> None:
    case = site(Topology(dict(hall().parents) | ({} if where is None else {"leak_detector:x": where})))
    began = case.time
    rope = found("leak_detector:x", "coolant_leak", onset=began, evidence={"holds": True})
    loss = found("cdu:c0", "coolant_leak", onset=began)
    first, second = (rope, loss) if rope_first else (loss, rope)
    for minute in range(90):
        case.report_findings(first, *([second] if minute >= 60 else []), seconds=60)
    assert case.causes() == {cause}
    case.report_findings(found("cdu:c2", "coolant_leak", onset=case.time))
    assert case.causes() == {cause, "cdu:c2"}, "another loop has its own leak"


def test_a_rope_of_another_loop_is_another_leak() -> None:
    case = site(Topology(dict(hall().parents) | {"leak_detector:x": ("cdu:c1",)}))
    case.report_findings(found("cdu:c0", "coolant_leak"))
    case.report_findings(found("leak_detector:x", "coolant_leak", evidence={"holds": True}))
    assert case.causes() == {"cdu:c0", "leak_detector:x"}


@pytest.mark.parametrize(
    ("parents", "suspect"),
    [
        (("rack:r1", "cdu:c1"), "rack:r1"),
        (("cdu:c1", "rack:r1"), "leak_detector:r1"),  # the coolant unit stands in the row of the rack
    ],
)
def test_a_leak_detector_in_a_coolant_unit_keeps_its_name_and_one_in_a_rack_blames_the_rack(
    parents: tuple[str, ...], suspect: str
) -> None:
    assert FactorIndex(Topology({"leak_detector:r1": parents})).suspect_of("leak_detector:r1") == suspect


def test_each_incident_says_how_sure_its_cause_is_and_what_else_was_weighed() -> None:
    case = site(hall(nodes=16))
    case.report_findings(*nodes(range(8)), found("gpu:n60.0", "sdc"))
    rack, gpu = sorted(case.desk.incidents.values(), key=lambda i: i.cause, reverse=True)
    assert rack.confidence is not None
    assert 0.7 <= rack.confidence < 1
    assert (rack.explanation["basis"], gpu.explanation["basis"]) == (SHARED, ALONE)
    others = rack.explanation["alternatives"]
    assert {"cdu:c0", "row:a"} <= {other["cause"] for other in others}
    assert sum(other["probability"] for other in others) == pytest.approx(1 - rack.confidence, abs=0.01)
    assert rack.explanation["faults_per_day"] == FACTOR_KINDS["rack"].per_day
    assert "8 of 16 nodes" in rack.explanation["evidence"]


def test_more_margin_never_makes_a_cause_less_sure() -> None:
    for basis in (NAMED, SHARED, *(f"{ALONE} {severity}" for severity in ("watch", "ticket", "page"))):
        found_ = [Assessment(basis, margin, ()).confidence for margin in (-10.0, 1.0, 10.0, 100.0)]
        assert found_ == sorted(found_)


def test_a_restart_keeps_confidence_and_explanation() -> None:
    case = site(hall(nodes=16))
    case.report_findings(*nodes(range(8)))
    again = Desk(case.desk.topology)
    again.restore(case.desk.snapshot())
    before, after = (desk.incidents.popitem()[1] for desk in (case.desk, again))
    assert (after.confidence, after.explanation) == (before.confidence, before.explanation)


@pytest.mark.parametrize(
    ("topology", "confidence"),
    [(hall(), 0.94), (Topology(), 0.3), (Topology({"node:n1": (), "gpu:n1.0": ("node:n1",)}), 0.94)],
)
def test_where_no_topology_says_what_devices_share_a_page_is_not_sure(topology: Topology, confidence: float) -> None:
    case = Case(topology)
    case.report_findings(found("gpu:n1.0", "xid"))
    assert case.only().confidence == confidence
