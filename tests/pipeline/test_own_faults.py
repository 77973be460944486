"""A cause takes in what it can do: a fault of a member of another kind stays a separate incident."""

from __future__ import annotations

import pytest

from pipeline.model.records import Level
from pipeline.model.topology import Topology
from tests.pipeline.test_incidents import found
from tests.pipeline.test_shared_causes import hall, site

AIR, SUPPLY = ("sensor.temperature", "sensor.fan_speed"), ("coolant.supply_temperature",)
HEAT = ("gpu.temperature", "gpu.power")


def with_ranks() -> Topology:
    parents = dict(hall().parents)
    return Topology(parents | {f"rank:a.{n}": ("stage:a.0", "job:a", f"gpu:n{n}.0") for n in range(16)})


@pytest.mark.parametrize("signal", ["rank.compute_time", "gpu.sm_clock", "node.cpu_pressure"])
@pytest.mark.parametrize("first", ["suspect", "page"])
def test_a_gray_leaf_does_not_explain_a_rank_that_computes_slowly(signal: str, first: Level) -> None:
    case = site(with_ranks())
    slow = [found("rank:a.3", "straggler", level, signals=(signal,)) for level in (first, "page")]
    leaf = found("leaf:l0", "link_congestion")
    case.report_findings(leaf)
    case.report_findings(leaf, slow[0], seconds=60)
    case.report_findings(leaf, slow[1], seconds=60)
    assert {i.cause: i.severity for i in case.desk.incidents.values()} == {"leaf:l0": "page", "gpu:n3.0": "page"}


def test_a_slowness_of_which_a_low_clock_is_found_later_leaves_the_leaf() -> None:
    case = site(with_ranks())
    leaf, active = found("leaf:l0", "link_congestion"), ("gpu.sm_active",)
    case.report_findings(leaf)
    case.report_findings(leaf, found("gpu:n3.0", "straggler_inferred", "suspect", signals=active), seconds=60)
    assert case.causes() == {"leaf:l0"}
    case.report_findings(leaf, found("gpu:n3.0", "straggler_inferred", signals=(*active, "gpu.sm_clock")), seconds=60)
    assert case.causes() == {"leaf:l0", "gpu:n3.0"}


def test_slow_collectives_below_a_gray_leaf_are_its_symptom() -> None:
    case = site(with_ranks())
    leaf = found("leaf:l0", "link_congestion")
    case.report_findings(leaf)
    case.report_findings(leaf, found("job:a", "straggler_job", signals=("rank.step_time", "rank.communication_time")))
    assert case.causes() == {"leaf:l0"}


def test_ranks_that_compute_slowly_make_no_leaf_a_suspect() -> None:
    case = site(with_ranks())
    case.report_findings(*(found(f"rank:a.{n}", "straggler", signals=("rank.compute_time",)) for n in range(8)))
    assert not {c for c in case.causes() if c.startswith(("leaf:", "rail:", "pod:"))}


@pytest.mark.parametrize("first", ["suspect", "ticket", "page"])
@pytest.mark.parametrize(
    ("cause", "detector", "signals"), [("row:a", "thermal_inlet", AIR), ("cdu:c0", "coolant", SUPPLY)]
)
@pytest.mark.parametrize("entity", ["node:n3", "gpu:n3.1"])
def test_warm_air_or_supply_does_not_explain_a_node_or_gpu_that_cools_worse(
    entity: str, cause: str, detector: str, signals: tuple[str, ...], first: Level
) -> None:
    case = site(hall())
    warm = found(cause, detector, "ticket", signals=signals)
    case.report_findings(warm)
    for level in (first, first, "page"):
        case.report_findings(warm, found(entity, "thermal", level, signals=HEAT), seconds=60)
    assert {i.cause: i.severity for i in case.desk.incidents.values()} == {cause: "ticket", entity: "page"}


def test_gpus_that_throttle_in_warm_air_with_a_usual_resistance_are_its_symptoms() -> None:
    case = site(hall())
    warm = found("row:a", "thermal_inlet", "ticket", signals=AIR)
    hot = [found(f"gpu:n{n}.0", "thermal", "suspect", signals=HEAT) for n in range(12)]
    for _ in range(5):
        case.report_findings(warm, *hot, seconds=60)
    assert case.causes() == {"row:a"}


def test_a_loop_without_flow_explains_gpus_that_cool_worse() -> None:
    case = site(hall())
    low = found("cdu:c0", "coolant", signals=("coolant.flow", "coolant.supply_temperature"))
    case.report_findings(low)
    case.report_findings(low, found("gpu:n3.1", "thermal", signals=HEAT), seconds=60)
    assert case.causes() == {"cdu:c0"}


@pytest.mark.parametrize("level", ["ticket", "page"])
def test_many_nodes_that_cool_worse_in_a_warm_row_at_once_are_one_incident(level: Level) -> None:
    case = site(hall())
    case.report_findings(found("row:a", "thermal_inlet", "ticket", signals=AIR))
    hot = [found(f"node:n{n}", "thermal", level, signals=HEAT) for n in range(0, 64, 2)]
    for _ in range(3):
        case.report_findings(found("row:a", "thermal_inlet", "ticket", signals=AIR), *hot, seconds=60)
    assert case.causes() == {"row:a"}
