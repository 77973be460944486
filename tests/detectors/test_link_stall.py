"""Ports that are up without traffic: a stopped NIC, and similar cases."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.link.link_stall import LinkStall
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.topology import Topology

START, STEP = 1_790_000_000 * SECOND, 10 * SECOND
PORT, NODE, SIX = "port:n1.p2", "node:n1", 6
ALL = np.arange(16)


class Traffic:
    """All ports are busy; from tick 60 to `until` some have no traffic, and some count failed work."""

    def __init__(self, stands=(SIX,), fails=(SIX,), idle=0.0, until=10**9, per_tick=20.0):
        self.stands, self.fails, self.idle = list(stands), list(fails), idle
        self.until, self.per_tick = until, per_tick
        self.bytes, self.failed = np.full(16, 1e14), np.zeros(16)
        self.state = np.ones(16)

    def __call__(self, tick, values):
        broken = 60 <= tick < self.until
        gained = np.full(16, self.idle if broken else 4e10 + 1e3 * tick)
        if broken:
            gained[self.stands] = 0
            self.failed[self.fails] += self.per_tick
        self.bytes += gained
        values["nic"] |= {
            "nic.state": self.state.copy(),
            "nic.rx_bytes": self.bytes.copy(),
            "nic.tx_bytes": self.bytes + 5.0,
            "nic.req_cqe_errors": self.failed.copy(),
        }
        return []


def pages(found):
    return [f for f in found if f.level == "page"]


def test_a_port_without_traffic_beside_busy_ports_pages_within_90_s(site, watch):
    page = pages(watch(LinkStall(), site, 120, Traffic(idle=2e5)))[0]
    assert page.entity == PORT
    assert page.time - page.onset <= 90 * SECOND
    assert page.onset == START + 59 * STEP
    assert (page.evidence["peers"], page.evidence["cohort"]) == (3, "node:n1")
    assert page.evidence["failed"] >= 100


def test_the_end_of_a_job_on_infiniband_is_not_reported(site, watch):
    assert watch(LinkStall(), site, 400, Traffic(stands=ALL, fails=())) == []


def test_a_job_with_timeouts_on_all_its_ports_blames_none(site, watch):
    assert watch(LinkStall(), site, 400, Traffic(stands=ALL, fails=ALL)) == []


def test_without_any_traffic_the_only_failing_port_is_a_suspect(site, watch):
    found = watch(LinkStall(), site, 200, Traffic(stands=ALL))
    assert {(f.entity, f.level) for f in found} == {(PORT, "suspect")}


def test_without_any_traffic_a_driver_error_pages(site, watch):
    traffic = Traffic(stands=ALL)

    def change(tick, values):
        traffic(tick, values)
        if tick == 61:
            return [Event(START + tick * STEP, PORT, "kernel", {"pattern": "mlx5_health", "class": "nic"})]
        return []

    page = pages(watch(LinkStall(), site, 200, change))[0]
    assert page.entity == PORT
    assert "its NIC does not respond" in page.summary


def test_an_unused_port_is_a_suspect(site, watch):
    found = watch(LinkStall(), site, 400, Traffic(fails=(), idle=2e5))
    assert {(f.entity, f.level) for f in found} == {(PORT, "suspect")}


def test_queue_pairs_flushed_when_a_job_is_killed_do_not_page(site, watch):
    """One reading with failed completions, then nothing."""
    traffic = Traffic(idle=2e5)

    def change(tick, values):
        traffic.per_tick = 500.0 if tick == 60 else 0.0
        return traffic(tick, values)

    assert pages(watch(LinkStall(), site, 400, change)) == []


def test_a_port_that_is_often_idle_is_not_judged(site, watch):
    traffic = Traffic(idle=2e5)
    rests = np.zeros(16)

    def change(tick, values):
        traffic(tick, values)
        if tick < 60 and tick % 20 == 0:
            rests[SIX] = traffic.bytes[SIX]
        if tick < 60 and tick % 20 < 2:
            values["nic"]["nic.rx_bytes"][SIX] = rests[SIX]
            values["nic"]["nic.tx_bytes"][SIX] = rests[SIX]
        return []

    assert watch(LinkStall(), site, 200, change) == []


def test_a_port_that_is_down_is_not_stalled(site, watch):
    traffic = Traffic(idle=2e5)

    def change(tick, values):
        traffic.state[SIX] = tick < 60
        return traffic(tick, values)

    assert watch(LinkStall(), site, 200, change) == []


def test_time_while_a_port_is_down_is_not_a_stall(site, watch):
    traffic = Traffic(idle=2e5)

    def change(tick, values):
        traffic.state[SIX] = 0.0 if 60 <= tick < 240 else 1.0
        return traffic(tick, values)

    page = pages(watch(LinkStall(), site, 300, change))[0]
    assert page.onset >= START + 239 * STEP
    assert page.time - page.onset <= 90 * SECOND


def test_a_node_whose_agent_is_silent_is_not_stalled(site, watch):
    traffic = Traffic(stands=(), fails=())

    def change(tick, values):
        traffic(tick, values)
        if 70 <= tick < 120:
            for column in values["nic"].values():
                column[4:8] = np.nan
        return []

    assert watch(LinkStall(), site, 200, change) == []


def test_maintenance_is_not_a_stall(site, watch):
    traffic = Traffic(idle=2e5)

    def change(tick, values):
        traffic(tick, values)
        return [Event(START + tick * STEP, NODE, "maintenance_start", {"seconds": 7200})] if tick == 50 else []

    assert watch(LinkStall(), site, 300, change) == []


def test_a_stall_ends_with_traffic_and_may_begin_again(site, watch):
    found = watch(LinkStall(), site, 200, Traffic(idle=2e5, until=100))
    assert found[-1].time < START + 100 * STEP
    assert {f.onset for f in found} == {START + 59 * STEP}


@pytest.mark.parametrize(
    ("facts", "highest"), [({"role": "unused"}, "suspect"), ({"role": "management"}, "ticket"), ({}, "page")]
)
def test_the_role_of_a_port_limits_its_level(site, watch, facts, highest):
    site.topology = Topology(site.topology.parents, {PORT: facts})
    assert watch(LinkStall(), site, 200, Traffic(idle=2e5))[-1].level == highest


def test_a_single_port_of_a_node_and_leaf_is_never_blamed_without_other_evidence():
    """There is no other port."""
    topology = Topology({"port:x.p0": ["node:x"]})
    detector, total = LinkStall(), 1e12
    for tick in range(200):
        total += 1e9 if tick < 60 else 0
        values = {
            "nic.state": np.ones(1),
            "nic.rx_bytes": np.array([total]),
            "nic.tx_bytes": np.array([total]),
            "nic.ack_timeouts": np.array([float(max(0, tick - 60))]),
        }
        found = detector.observe({"nic": Frame(START + tick * STEP, "nic", ("port:x.p0",), values, topology)})
        assert found == []


def waited(site, count):
    """A job ends; the far end of PORT, which is watched, reports `count(tick)` waits."""
    far = "port:n2.p2"
    site.topology = Topology(site.topology.parents, {PORT: {"peer": far}, far: {"peer": PORT}})
    traffic = Traffic(stands=ALL, fails=())

    def change(tick, values):
        traffic(tick, values)
        waits = np.zeros(16)
        waits[10] = count(tick)
        values["nic"]["nic.port_tx_wait"] = waits

    return change


def test_data_waiting_at_the_far_end_pages_the_port_that_takes_none(site, watch):
    assert {f.entity for f in pages(watch(LinkStall(), site, 200, waited(site, lambda t: 1e6 * max(0, t - 60))))} == {
        PORT
    }


@pytest.mark.parametrize(
    "count",
    [
        lambda t: 1e6 if t > 60 and t % 2 else 0.0,  # two sources report it in turn
        lambda t: 2.0**32 - 1 if t > 60 and t % 4 < 2 else 7.0,  # it is read as all bits set
        lambda t: np.inf if t > 60 and t % 2 else 7.0,
    ],
)
def test_waits_that_only_seem_to_grow_do_not_page(site, watch, count):
    assert pages(watch(LinkStall(), site, 200, waited(site, count))) == []


def test_waits_that_grew_during_traffic_do_not_count(site, watch):
    detector = LinkStall()
    watch(detector, site, 64, waited(site, lambda t: 1e6 * min(t, 60)))
    assert detector.pending.readings[SIX] == 0


@pytest.mark.parametrize("pattern", [["mlx5_health"], {"a": 1}, None, 7, float("nan")])
def test_a_malformed_kernel_log_event_causes_no_error(site, watch, pattern):
    def change(tick, values):
        return [Event(START + tick * STEP, PORT, "kernel", {"pattern": pattern})] if tick == 50 else []

    assert watch(LinkStall(), site, 100, change) == []


def test_ports_that_never_had_traffic_do_not_outvote_the_busy_ones(site, watch):
    """Two rails of the four are not used: beside a stopped port only those with traffic count."""
    site.topology = Topology({p: ["node:n1"] for p in site.names["nic"]})
    traffic = Traffic(idle=2e5)

    def change(tick, values):
        traffic(tick, values)
        for name in ("nic.rx_bytes", "nic.tx_bytes"):
            values["nic"][name][8:] = 7.0

    assert {f.entity for f in pages(watch(LinkStall(), site, 120, change))} == {PORT}


def test_a_counter_that_is_refreshed_less_often_than_read_is_not_a_stall():
    """Readings of a minute, of a counter that moves every second or third time."""
    names = tuple(f"port:n1.p{i}" for i in range(8))
    topology = Topology({name: ["node:n1"] for name in names})
    detector, found = LinkStall(), []
    for minute in range(200):
        total = 1e12 + 1e10 * minute * np.ones(8)
        total[2] = 1e12 + 1e10 * (minute // 3 * 3 if minute > 60 else minute)
        values = {"nic.state": np.ones(8), "nic.rx_bytes": total, "nic.tx_bytes": total}
        found += detector.observe({"nic": Frame(START + minute * 60 * SECOND, "nic", names, values, topology)})
    assert found == []


@pytest.mark.parametrize(("fails", "expected"), [(False, set()), (True, {"page"})])
def test_ports_of_one_job_that_stop_together_are_its_pause_unless_one_counts_failed_work(fails, expected):
    """Nodes with one port each: a job of four nodes writes a checkpoint, another one on the same leaf goes on."""
    ports, mine = tuple(f"port:n{i}.p0" for i in range(10)), np.arange(10) < 4
    parents = {p: (f"node:n{i}", "leaf:l0") for i, p in enumerate(ports)} | {
        f"gpu:n{i}.0": (f"node:n{i}",) for i in range(10)
    }
    ranks = {f"rank:{'ab'[i >= 4]}.{i}": (f"job:{'ab'[i >= 4]}", f"gpu:n{i}.0") for i in range(10)}
    detector, site, total, found = LinkStall(), Topology({**parents, **ranks}), np.full(10, 1e12), []
    for tick in range(120):
        total = total + np.where(mine & (tick >= 60), 0.0, 4e10)
        failed = np.where(np.arange(10) == 2, 20.0 * max(0, tick - 60) * fails, 0.0)
        values = {"nic.state": np.ones(10), "nic.rx_bytes": total, "nic.tx_bytes": total, "nic.ack_timeouts": failed}
        found += detector.observe({"nic": Frame(START + tick * STEP, "nic", ports, values, site)})
    assert {f.level for f in found} - {"suspect"} == expected
    assert bool(found) == fails
