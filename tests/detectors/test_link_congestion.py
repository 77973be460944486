"""Congestion: a leaf is blamed, never a port, and none for the pattern of a job or for flows that collide."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.link.link_congestion import LinkCongestion
from pipeline.model.records import SECOND, Finding, Frame
from tests.detectors.cases.case import START
from tests.detectors.cases.link_congestion import CONGESTED, FAULT, PORTS, RAILS, TICKS, counted, topology


def run_detector(
    change=lambda tick, values: values, ticks: int = TICKS, congested=CONGESTED, times: float = 8.0
) -> list[Finding]:
    detector, site, found = LinkCongestion(), topology(), []
    for tick in range(ticks):
        values = change(tick, counted(tick, FAULT, congested, times))
        found += detector.observe({"nic": Frame(START + tick * 10 * SECOND, "nic", PORTS, values, site)})
    return found


def test_a_congested_leaf_is_a_suspect_soon_and_a_ticket_after_ten_minutes() -> None:
    found = run_detector()
    assert {f.entity for f in found} == {"leaf:l1"}
    began = START + FAULT * 10 * SECOND
    assert found[0].level == "suspect"
    assert found[0].time - began <= 180 * SECOND
    ticket = next(f for f in found if f.level == "ticket")
    assert 600 * SECOND <= ticket.time - began <= 720 * SECOND
    assert ticket.evidence["ports"] == 6
    assert "6 of 8 busy ports" in ticket.summary
    assert ticket.entity.startswith("leaf:")


@pytest.mark.parametrize("ports", [2, 3, 4])
def test_flows_that_collide_on_an_uplink_are_not_reported(ports: int) -> None:
    assert run_detector(congested=CONGESTED[:ports], times=20.0) == []


def test_a_job_that_congests_all_rails_alike_blames_no_leaf() -> None:
    assert run_detector(congested=list(range(len(PORTS)))) == []


def test_more_traffic_with_the_same_waiting_per_byte_is_not_congestion() -> None:
    def busier(tick: int, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        more = 1 + 2.0 * max(0, tick - FAULT) / max(tick, 1)
        return {name: v if name == "nic.speed" else np.floor(v * more) for name, v in values.items()}

    assert run_detector(busier, congested=[]) == []


def test_a_leaf_whose_ports_have_errors_is_left_to_the_detector_link() -> None:
    def erring(tick: int, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        values["nic.symbol_errors"][CONGESTED] += 3.0 * max(0, tick - FAULT)
        return values

    assert run_detector(erring) == []


def test_with_few_ports_per_node_congestion_stays_a_suspect() -> None:
    def alone(tick: int, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        values["nic.tx_bytes"][np.arange(len(PORTS)) % RAILS != 1] = 1e12  # the other rails are idle
        return values

    assert {(f.entity, f.level) for f in run_detector(alone)} == {("leaf:l1", "suspect")}


def test_idle_ports_are_not_judged() -> None:
    def idle(tick: int, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return values | {"nic.tx_bytes": 1e12 + 1e4 * tick * np.ones(len(PORTS))}

    assert run_detector(idle) == []


def test_congestion_that_ends_is_no_longer_reported() -> None:
    end = FAULT + 90

    def eased(tick: int, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if tick < end:
            return values
        still = counted(tick, None, CONGESTED, 1.0)
        before, after = counted(end, FAULT, CONGESTED, 8.0), counted(end, None, CONGESTED, 1.0)
        return {name: still[name] + before[name] - after[name] for name in still if name != "nic.speed"} | {
            "nic.speed": still["nic.speed"]
        }

    found = run_detector(eased)
    assert "ticket" in {f.level for f in found}
    assert max(f.time for f in found) <= START + (end * 10 + 120) * SECOND


def test_two_congested_leaves_are_two_findings() -> None:
    congested = [*CONGESTED, *(n * RAILS + 2 for n in range(6))]
    assert {f.entity for f in run_detector(congested=congested[:6])} == {"leaf:l1"}
    # with half of a node's rails in it their median is between both: only one leaf may be found
    assert {f.entity for f in run_detector(congested=congested)} <= {"leaf:l1", "leaf:l2"}


def test_restarted_counters_and_gaps_cause_no_finding() -> None:
    def odd(tick: int, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if tick % 7 == 0:
            return {name: np.full(len(v), np.nan) for name, v in values.items()}
        return {name: np.where(np.arange(len(v)) % 5 == 0, v % 1e6, v) for name, v in values.items()}

    assert run_detector(odd, congested=[]) == []


def test_infinite_readings_are_ignored():
    """inf and -inf, as a replayed column may hold them."""

    def odd(tick, values):
        values["nic.symbol_errors"] = np.where(np.arange(len(PORTS)) % 3 == tick % 3, (-1.0) ** tick * np.inf, 0.0)
        return values

    found = run_detector(odd)
    assert found
    assert all(f.evidence["errors"] == 0 for f in found)
