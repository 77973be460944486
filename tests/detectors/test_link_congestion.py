"""Congestion: a leaf is blamed, never a port, and none for the pattern of a job or for flows that collide."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.link.link_congestion import LinkCongestion
from pipeline.model.records import SECOND, Finding, Frame
from pipeline.model.topology import Topology
from tests.detectors.cases.case import START
from tests.detectors.cases.link_congestion import CONGESTED, FAULT, LOAD, PORTS, RAILS, TICKS, counted, topology
from tests.detectors.fabrics import Fabric


def run_detector(
    change=lambda tick, values: values,
    ticks: int = TICKS,
    congested=CONGESTED,
    times: float = 8.0,
    site: Topology | None = None,
) -> list[Finding]:
    detector, site, found = LinkCongestion(), site or topology(), []
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


@pytest.mark.parametrize(("lost", "level"), [(0.05, "suspect"), (0.3, "page")])
def test_a_job_on_one_leaf_alone_pages_once_it_waits_more_and_sends_less(lost: float, level: str) -> None:
    """No other leaf shows what the job does, but more waiting and less traffic together are no phase of a job."""

    def alone(tick: int, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        values["nic.tx_bytes"] -= np.floor(lost * LOAD * 10.0 * max(0, tick - FAULT))
        values["nic.tx_bytes"][np.arange(len(PORTS)) % RAILS != 1] = 1e12  # the other rails are idle
        return {name: v for name, v in values.items() if not name.startswith(("nic.cnp", "nic.ecn"))}

    found = run_detector(alone)
    assert {f.entity for f in found} == {"leaf:l1"}
    assert found[-1].level == level


@pytest.mark.parametrize("signal", ["nic.rx_pause_duration", "nic.rx_pause"])
def test_pauses_by_the_switch_are_the_waiting_of_ethernet(signal: str) -> None:
    """Of a leaf that loses packets: 2 % of the time on six ports, as counted or in frames of 84 us."""
    each = 1.0 if signal == "nic.rx_pause_duration" else 1 / 84

    def paused(tick: int, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        counted = np.full(len(PORTS), 1e6)
        counted[CONGESTED] += np.floor(2e4 * each * 10.0 * max(0, tick - FAULT))
        values["nic.tx_bytes"][CONGESTED] -= np.floor(0.3 * LOAD * 10.0 * max(0, tick - FAULT))
        return {name: values[name] for name in ("nic.tx_bytes", "nic.speed")} | {signal: counted}

    found = run_detector(paused)
    assert {f.entity for f in found} == {"leaf:l1"}
    assert found[-1].level == "page"
    assert "pauses by the switch" in found[-1].summary


def test_less_traffic_of_a_single_job_and_nothing_else_stays_a_suspect() -> None:
    def less(tick: int, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        values["nic.tx_bytes"][CONGESTED] -= np.floor(0.3 * LOAD * 10.0 * max(0, tick - FAULT))
        return {name: values[name] for name in ("nic.tx_bytes", "nic.speed")}

    parents = {**topology().parents, **{f"gpu:n{n}.0": (f"node:n{n}",) for n in range(8)}}
    ranks = {f"rank:a.{n}": ("job:a", f"gpu:n{n}.0") for n in range(8)}
    assert {f.level for f in run_detector(less, site=Topology({**parents, **ranks}))} <= {"suspect"}
    assert run_detector(less)[-1].level == "page"  # nodes without a known job are work of their own


def test_minutes_in_which_a_leaf_sends_nothing_do_not_count_for_its_page() -> None:
    leaf = np.arange(len(PORTS)) % RAILS == 1

    def pausing(tick: int, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        slow = [t for t in range(FAULT, tick) if not 0 <= t - FAULT - 18 < 48]
        values["nic.tx_bytes"][CONGESTED] -= np.floor(0.3 * LOAD * 10.0 * len(slow))
        values["nic.tx_bytes"][leaf] -= np.floor(LOAD * 10.0 * (max(0, tick - FAULT) - len(slow)))
        return {name: values[name] for name in ("nic.tx_bytes", "nic.speed")}

    until = FAULT + 18 + 48 + 24
    assert "page" not in {f.level for f in run_detector(pausing, ticks=until)}
    assert run_detector(pausing, ticks=until + 48)[-1].level == "page"


def test_more_marks_on_a_third_of_the_ports_are_congestion_and_not_a_broken_leaf() -> None:
    def fewer(tick: int, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        since, marks = max(0, tick - FAULT), ("nic.cnp_sent", "nic.cnp_handled", "nic.ecn_marked")
        values["nic.tx_bytes"] -= np.floor(0.15 * LOAD * 10.0 * since)  # the job is slower everywhere
        for name in marks:
            values[name][CONGESTED] += 400.0 * 10 * since
            values[name][CONGESTED[3:]] -= 400.0 * 10 * max(0, since - 30)
        return {name: values[name] for name in ("nic.tx_bytes", "nic.speed", *marks)}

    found = run_detector(fewer, congested=[])
    assert {f.entity for f in found} == {"leaf:l1"}
    assert found[-1].level == "ticket"


def test_idle_ports_are_not_judged() -> None:
    def idle(tick: int, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return values | {"nic.tx_bytes": 1e12 + 1e4 * tick * np.ones(len(PORTS))}

    assert run_detector(idle) == []


@pytest.mark.parametrize(("load", "levels"), [(0.01, set()), (0.03, {"suspect", "ticket"})])
def test_ports_that_carry_a_percent_of_their_line_are_not_judged(load: float, levels: set[str]) -> None:
    """Requests of users decide what they send, each node its own: half a leaf may send less. Usual here is a tenth."""

    def slow(tick: int, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: v if name == "nic.speed" else np.floor(v * load / 0.1) for name, v in values.items()}

    assert {f.level for f in run_detector(slow)} == levels


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


@pytest.mark.parametrize("roce", [False, True], ids=["InfiniBand", "Ethernet"])
@pytest.mark.parametrize(("begin", "end"), [(0, 30), (30, 300)], ids=["since it started", "for hours"])
def test_the_end_of_congestion_on_a_leaf_is_none_on_the_other_leaf_of_its_job(begin: int, end: int, roce: bool) -> None:
    def congested(fabric: Fabric, tick: int, growth: dict[str, np.ndarray]) -> None:
        if begin <= tick // 6 < end:
            for name in ("nic.port_tx_wait", "nic.ecn_marked", "nic.cnp_handled"):
                if name in growth:
                    growth[name] = growth[name] * np.where(fabric.leaf == 0, 20.0, 1.0)

    fabric, detector = Fabric(nodes=8, rails=False, roce=roce, jobs=[range(8)]), LinkCongestion()
    found = [f for frames in fabric.frames((end + 30) * 6, congested) for f in detector.observe(frames)]
    assert {f.entity for f in found} == ({"leaf:l0"} if begin else set())


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
