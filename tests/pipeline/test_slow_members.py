"""Slow members of a job, or beside a bad link: that is their cause only where no device shows a state of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.model.records import SECOND, Finding
from pipeline.model.topology import Topology
from tests.pipeline.test_incidents import START, Case, fleet, found
from tests.pipeline.test_shared_causes import hall, site

NODES = range(6)
JOB = Topology(dict(hall(loops=1).parents) | {f"rank:a.{n}": ("stage:a.0", "job:a", f"gpu:n{n}.0") for n in NODES})
SLOW = ("rank.compute_time",)


@pytest.mark.parametrize("own", ["gpu.sm_clock", "gpu.throttle_reasons"])
def test_two_members_of_a_stage_with_low_clocks_are_two_incidents(own: str) -> None:
    case = site(JOB)
    for minute in range(4):
        late = [found("node:n3", signals=(*SLOW, "gpu.sm_clock"), onset=START + 30 * SECOND)] if minute else []
        case.report_findings(found("rank:a.2", signals=(*SLOW, own)), *late, seconds=60)
    assert case.causes() == {"gpu:n2.0", "node:n3"}


def test_many_members_of_a_stage_that_only_compute_longer_are_one_incident_of_the_job() -> None:
    case = site(JOB)
    for _ in range(4):
        case.report_findings(*(found(f"rank:a.{n}", signals=SLOW) for n in NODES), seconds=60)
    assert case.causes() == {"job:a"}


def test_a_member_of_a_slow_job_whose_clock_falls_later_is_an_incident_of_its_own() -> None:
    case, slow = site(JOB), [found(f"rank:a.{n}", signals=SLOW) for n in NODES]
    for _ in range(4):
        case.report_findings(*slow, seconds=60)
    case.report_findings(*slow, found("node:n3", "straggler", "page", case.time, signals=(*SLOW, "gpu.sm_clock")))
    assert case.causes() == {"job:a", "node:n3"}


def test_an_incident_of_a_job_whose_members_all_show_low_clocks_is_no_longer_of_the_job() -> None:
    """The last that left it left nothing behind, and no finding of that instant was evaluated."""
    case = site(JOB)
    for _ in range(4):
        case.report_findings(*(found(f"rank:a.{n}", signals=SLOW) for n in NODES), seconds=60)
    late = [found(f"rank:a.{n}", signals=(*SLOW, "gpu.sm_clock"), onset=case.time) for n in NODES]
    case.report_findings(*late, found("node:n9", "xid"))
    assert "job:a" not in case.causes()
    assert "node:n9" in case.causes()
    assert {m for i in case.desk.incidents.values() for m in i.members} >= {f"rank:a.{n}" for n in NODES}


PORT = found("port:n2.mlx5_1", "link")
THROTTLED = found("rank:81.9", signals=(*SLOW, "gpu.throttle_reasons"))
LOW_CLOCK = found("rank:81.9", signals=(*SLOW, "gpu.sm_clock"))


@pytest.mark.parametrize("reports", [(PORT, THROTTLED), (THROTTLED, PORT), (PORT, LOW_CLOCK)])
def test_a_throttled_gpu_beside_a_bad_link_of_its_node_is_an_incident_of_its_own(reports: tuple[Finding, ...]) -> None:
    case = Case()
    for one in reports:
        case.report_findings(one)
    assert case.causes() == {"port:n2.mlx5_1", "gpu:n2.1"}


@pytest.mark.parametrize("cause", ["filesystem:n2./scratch", "disk:n2.nvme0", "service:n2.ntp"])
def test_a_throttled_gpu_beside_a_fault_of_its_host_is_an_incident_of_its_own(cause: str) -> None:
    case = Case()
    for one in (found(cause, "service_failed"), THROTTLED):
        case.report_findings(one)
    assert case.causes() == {cause, "gpu:n2.1"}


def test_a_throttled_gpu_with_errors_of_its_nvlink_is_one_incident() -> None:
    case = Case(Topology(dict(fleet().parents) | {"nvlink:n2.1.3": ("gpu:n2.1", "node:n2")}))
    for one in (found("nvlink:n2.1.3", "link_nvlink"), THROTTLED):
        case.report_findings(one)
    assert len(case.causes()) == 1


def test_suspicions_of_throttling_and_of_a_link_do_not_corroborate_each_other() -> None:
    case = Case()
    for one in (PORT, THROTTLED):
        case.report_findings(replace(one, level="suspect"))
    assert {i.severity for i in case.desk.incidents.values()} == {"watch"}


def test_a_rank_that_is_slow_beside_a_bad_link_leaves_it_when_its_gpu_throttles() -> None:
    case = Case()
    case.report_findings(PORT)
    case.report_findings(replace(THROTTLED, signals=SLOW))
    assert case.causes() == {"port:n2.mlx5_1"}
    case.report_findings(THROTTLED)
    assert case.causes() == {"port:n2.mlx5_1", "gpu:n2.1"}
