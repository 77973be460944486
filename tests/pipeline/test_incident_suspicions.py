"""Suspicions do not fold pages in, do not lead an incident and do not name its cause."""

from __future__ import annotations

import json

import pytest

from pipeline.model.records import LEVELS, Finding
from tests.pipeline.test_incidents import START, Case, fleet, found


@pytest.fixture
def case() -> Case:
    return Case(fleet(nodes=12))


def change(entity: str, onset: int = START, level: str = "suspect") -> Finding:
    """Returns a finding of the generic detector: a change of unknown meaning."""
    return found(entity, "anomaly", level, onset)  # type: ignore[arg-type]


def pages(case: Case) -> set[str]:
    return {i.cause for i in case.desk.incidents.values() if i.resolved is None and i.severity == "page"}


@pytest.mark.parametrize("watched", ["port:n1.mlx5_3", "node:n1", "gpu:n1.3"])
@pytest.mark.parametrize("level", ["suspect", "ticket"])
def test_a_page_next_to_or_below_a_change_of_its_node_keeps_its_own_cause(case: Case, watched: str, level: str) -> None:
    case.report_findings(change(watched, level=level))
    case.report_findings(found("rank:81.4"))
    assert pages(case) == {"gpu:n1.0"}
    (page,) = [i for i in case.desk.incidents.values() if i.severity == "page"]
    assert (page.entity, page.detector, page.members) == ("rank:81.4", "straggler", ("rank:81.4",))


@pytest.mark.parametrize("level", ["suspect", "ticket"])
def test_a_condition_below_a_change_of_unknown_meaning_has_its_own_cause_from_suspect_to_page(
    case: Case, level: str
) -> None:
    case.report_findings(change("node:n1", level=level))
    for higher in ("suspect", "ticket", "page"):
        case.report_findings(found("rank:81.4", level=higher))
        assert case.causes() == {"gpu:n1.0", "node:n1"}
    assert pages(case) == {"gpu:n1.0"}


@pytest.mark.parametrize("level", ["suspect", "ticket", "page"])
@pytest.mark.parametrize("before", ["suspect", "ticket"])
def test_a_finding_takes_in_the_change_of_its_own_entity_and_not_the_other_way_round(
    case: Case, before: str, level: str
) -> None:
    case.report_findings(change("gpu:n1.0", level=before))
    (first,) = case.desk.incidents.values()
    case.report_findings(found("gpu:n1.0", "xid", level))
    (own,) = [i for i in case.desk.incidents.values() if i.resolved is None]
    assert own.id != first.id
    assert own.detector == ("anomaly" if (before, level) == ("ticket", "suspect") else "xid")
    highest = max(before, level, key=LEVELS.index)
    assert own.severity == {"suspect": "watch"}.get(highest, highest)
    assert case.desk.incidents[first.id].resolved is not None
    case.report_findings(change("gpu:n1.0", level=before), found("gpu:n1.0", "xid", level))
    assert case.causes() == {"gpu:n1.0"}


def test_a_page_opens_its_own_incident_beside_an_acknowledged_change_of_the_same_entity(case: Case) -> None:
    case.report_findings(change("node:n1", level="ticket"))
    (first,) = case.desk.incidents
    case.desk.acknowledge(first, "ann", "looking", case.desk.time)
    case.report_findings(found("node:n1", "memory"))
    (page,) = [i for i in case.desk.incidents.values() if i.severity == "page"]
    assert (page.id != first, page.state, page.detector) == (True, "open", "memory")


def test_changes_of_three_parts_of_a_node_do_not_name_the_cause_of_a_page_of_a_fourth(case: Case) -> None:
    case.report_findings(*(change(f"gpu:n1.{i}") for i in range(3)))
    case.report_findings(found("gpu:n1.3", "memory"))
    assert pages(case) == {"gpu:n1.3"}


def test_a_page_on_a_watched_node_belongs_to_the_fault_that_explains_it(case: Case) -> None:
    """A failed pump warms a node that already had a changed counter: one page, for the pump."""
    case.report_findings(change("node:n1"))
    case.report_findings(found("cdu:c1", "coolant_edge"))
    case.report_findings(found("node:n1", "thermal_edge"))
    assert pages(case) == {"cdu:c1"}


def test_an_earlier_page_joins_the_fault_that_explains_it_although_its_node_was_watched(case: Case) -> None:
    case.report_findings(change("node:n1"))
    case.report_findings(found("node:n1", "thermal_edge"))
    assert pages(case) == {"node:n1"}
    case.report_findings(found("cdu:c1", "coolant_edge"))
    assert pages(case) == {"cdu:c1"}
    case.report_findings(change("node:n1"), seconds=300)
    assert case.causes() == {"cdu:c1", "node:n1"}, "the change is not a symptom of the pump"


def test_a_long_watched_incident_can_still_be_explained_when_it_becomes_a_page(case: Case) -> None:
    case.report_findings(found("node:n1", "thermal", "suspect"))
    for _ in range(60):
        case.report_findings(found("node:n1", "thermal", "suspect"))
    case.report_findings(found("node:n1", "thermal"))
    case.report_findings(found("cdu:c1", "coolant"))
    assert pages(case) == {"cdu:c1"}


def test_a_suspicion_of_another_kind_does_not_name_the_cause(case: Case) -> None:
    """Two ports with possible errors and one that is down: the leaf needs several ports with one kind of trouble."""
    case.report_findings(
        found("port:n1.mlx5_0", "telemetry", "suspect"), found("port:n2.mlx5_0", "telemetry", "suspect")
    )
    case.report_findings(found("port:n3.mlx5_0", "link"))
    assert pages(case) == {"port:n3.mlx5_0"}


def test_enough_suspects_of_the_same_kind_name_the_cause_of_a_page(case: Case) -> None:
    case.report_findings(*(found(f"port:n{n}.mlx5_0", "link", "suspect") for n in range(4)))
    assert case.causes() == {"leaf:l0"}
    case.report_findings(found("port:n1.mlx5_0", "link"))
    assert pages(case) == {"leaf:l0"}


def test_a_change_does_not_corroborate_a_suspect(case: Case) -> None:
    case.report_findings(change("gpu:n1.0"))
    case.report_findings(found("rank:81.4", level="suspect"))
    assert {i.severity for i in case.desk.incidents.values()} == {"watch"}


@pytest.mark.parametrize("detector", ["telemetry", "telemetry_clock", "telemetry_sensor"])
def test_a_suspect_about_an_instrument_or_an_agent_corroborates_none(case: Case, detector: str) -> None:
    case.report_findings(found("node:n1", "memory", level="suspect"))
    case.report_findings(found("node:n1", detector, level="suspect"))
    assert {i.severity for i in case.desk.incidents.values()} == {"watch"}
    case.report_findings(found("node:n1", "xid", level="suspect"))
    assert {i.severity for i in case.desk.incidents.values()} == {"ticket"}


def test_findings_that_leave_an_incident_get_a_new_id_also_after_a_restart(case: Case) -> None:
    """The id comes from the first finding, which here is the one that leaves."""
    suspect = found("node:n1", "straggler", "suspect")
    case.report_findings(suspect)
    first = case.only().id
    case.report_findings(found("rank:81.4", level="suspect"))
    assert case.causes() == {"node:n1"}
    case.report_findings(found("rank:81.4"))
    case.desk.restore(case.desk.snapshot())
    for _ in range(3):
        case.report_findings(suspect, found("rank:81.4"))
    causes = {i.id: i.cause for i in case.desk.incidents.values()}
    assert causes.pop(first) == "gpu:n1.0"
    assert list(causes.values()) == ["node:n1"]


def test_a_snapshot_from_before_this_rule_is_loaded(case: Case) -> None:
    case.report_findings(found("gpu:n1.2", "memory"), change("node:n2"))
    state = json.loads(case.desk.snapshot())
    for one in state["cases"]:
        del one["raised"]
    case.desk.restore(json.dumps(state))
    case.report_findings(found("gpu:n1.2", "memory"))
    assert pages(case) == {"gpu:n1.2"}
