"""Jobs that hang, wait for data or slow down as a whole; and those that only evaluate, save or die of others."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.straggler.straggler_job import StragglerJob
from pipeline.model.records import SECOND, Event
from tests.detectors.cases.straggler import CASE, HOSTS, NODES, SIZE, quiet, topology

SINCE = 60


def shown(change, ticks=240, detector=None):
    """Findings while `change(tick, values)` alters quiet instants; it may return events."""
    detector, graph, found = detector or StragglerJob(), topology(), []
    for tick in range(ticks):
        values = quiet(tick, np.random.default_rng([tick, 7]))
        values["nic"] = {"nic.tx_bytes": 1e12 + 4e10 * np.full(NODES, float(tick))}
        found += detector.observe(framed(tick, values, change(tick, values) or (), graph))
    return found


def framed(tick, values, events, graph):
    names = {**CASE.names, "nic": tuple(f"port:n{n}.p0" for n in range(NODES))}
    graph.merge({port: [HOSTS[n]] for n, port in enumerate(names["nic"])})
    return type(CASE)(StragglerJob, names, topology, CASE.instant, CASE.guilty).framed(tick, values, events, graph)


def stands(tick, values, watts, busy=1.0, until=10**9):
    """No step from SINCE on, at so much power."""
    if SINCE <= tick < until:
        values["rank"] = quiet(SINCE - 1, np.random.default_rng(0))["rank"]
        values["gpu"]["gpu.power"] = np.full(SIZE, watts)
        values["gpu"]["gpu.utilization"] = np.full(SIZE, busy)
        values["nic"] = {"nic.tx_bytes": np.full(NODES, 1e12 + 4e10 * SINCE)}


def levels(found):
    return {(f.entity, f.level) for f in found}


def test_a_hang_pages_on_the_job_after_six_minutes():
    found = shown(lambda tick, values: stands(tick, values, 180.0), 160)
    page = next(f for f in found if f.level == "page")
    assert page.entity == "job:7"
    assert 360 <= (page.time - CASE.time(SINCE - 1)) / SECOND <= 420
    assert "no step for 6 min" in page.summary
    assert "GPUs at 30 % of usual power" in page.summary


def test_a_job_that_dies_within_five_minutes_was_no_hang():
    def change(tick, values):
        stands(tick, values, 180.0)
        if tick >= SINCE + 30:
            values["rank"] = {name: np.full(SIZE, np.nan) for name in values["rank"]}

    assert "page" not in {f.level for f in shown(change)}


@pytest.mark.parametrize(
    "told",
    [
        Event(CASE.time(SINCE), "gpu:n2.1", "xid", {"xid": 79}),
        Event(CASE.time(SINCE), "port:n2.p0", "link_state", {"state": "down"}),
        Event(CASE.time(SINCE), "gpu:n2.1", "gpu_lost", {}),
    ],
    ids=lambda e: e.kind,
)
def test_what_was_logged_when_it_stopped_explains_it(told):
    def change(tick, values):
        stands(tick, values, 180.0)
        return [told] if tick == SINCE else []

    found = shown(change)
    assert levels(found) == {("job:7", "suspect")}
    assert found[-1].evidence["explained_by"].endswith(told.entity)


def test_an_evaluation_works_on_and_is_no_hang():
    assert shown(lambda tick, values: stands(tick, values, 380.0, until=SINCE + 90)) == []


def test_a_job_that_still_sends_is_no_hang():
    def change(tick, values):
        sent = values["nic"]
        stands(tick, values, 180.0)
        values["nic"] = sent

    assert shown(change) == []


def test_a_long_checkpoint_that_was_told_is_no_stall():
    def change(tick, values):
        stands(tick, values, 150.0, 0.3, SINCE + 40)
        values["node"]["node.io_pressure"] += 8e6 * min(max(0, tick - SINCE), 40)
        return [Event(CASE.time(SINCE), "job:7", "checkpoint", {"seconds": 400.0})] if tick == SINCE else []

    assert shown(change) == []


def test_a_data_stall_is_a_ticket_on_the_job_and_ends_with_the_next_step():
    def change(tick, values):
        stands(tick, values, 100.0, 0.3, SINCE + 40)
        values["node"]["node.io_pressure"] += 8e6 * min(max(0, tick - SINCE), 40)

    found = shown(change)
    assert levels(found) == {("job:7", "ticket")}
    assert "I/O wait 80 %" in found[-1].summary
    assert max(f.time for f in found) <= CASE.time(SINCE + 41)


def longer(tick, values, compute, network, who=slice(0, SIZE)):
    """Steps of which parts take longer from tick 200 on."""
    rank = values["rank"]
    usual = rank["rank.compute_time"].max() + 1.0
    if tick >= 200:
        rank["rank.compute_time"][who] += compute
    step = rank["rank.compute_time"].max() + 1.0 + (network if tick >= 200 else 0.0)
    rank["rank.step_time"] = np.full(SIZE, step)
    rank["rank.communication_time"] = step - rank["rank.compute_time"]
    assert step >= usual - 1e-9


@pytest.mark.parametrize("tickets", [False, True])
def test_collectives_that_take_longer_name_the_network(tickets):
    found = shown(lambda tick, values: longer(tick, values, 0.0, 1.5), 420, StragglerJob(tickets=tickets))
    assert levels(found) == {("job:7", "suspect")} | ({("job:7", "ticket")} if tickets else set())
    assert "in collectives" in found[-1].summary
    assert found[-1].evidence["attribution"] == "NETWORK"


def test_a_job_whose_pace_is_called_no_fault_takes_it_for_usual():
    detector, said = StragglerJob(), 330

    def change(tick, values):
        longer(tick, values, 0.0, 1.5 if tick < 700 else 4.0)
        if tick == said:
            detector.accept_as_normal("job:8", {})
            detector.accept_as_normal("job:7", {})

    ticks = [round((f.time - CASE.time(0)) / (CASE.time(1) - CASE.time(0))) for f in shown(change, 900, detector)]
    before, after = [t for t in ticks if t < said], [t for t in ticks if t >= said]
    assert before, "it was found"
    assert after, "it is found again"
    assert min(after) >= 700, "but only once it is slower still"


def test_a_stage_that_computes_longer_is_the_jobs_own_and_stays_a_suspect():
    found = shown(lambda tick, values: longer(tick, values, 1.5, 0.0, slice(16, SIZE)), 420)
    assert levels(found) == {("job:7", "suspect")}
    assert "in its slowest stage" in found[-1].summary


def test_one_slow_rank_is_for_another_detector():
    assert shown(lambda tick, values: longer(tick, values, 2.0, 0.0, 20), 420) == []


def test_a_power_cap_explains_a_slow_job():
    def change(tick, values):
        longer(tick, values, 1.5, 0.0)
        values["gpu"]["gpu.throttle_reasons"] = np.full(SIZE, 0x4 * (tick >= 200), float)

    assert shown(change, 420) == []


def test_a_job_without_power_meters_is_never_said_to_hang():
    def change(tick, values):
        stands(tick, values, 180.0)
        values["gpu"] = {}

    assert shown(change) == []


@pytest.mark.parametrize("entity", ["node:n2", "rack:r1", "job:7"])
def test_a_hang_during_announced_work_wakes_nobody_and_says_why(entity):
    def change(tick, values):
        stands(tick, values, 180.0)
        return (
            [Event(CASE.time(SINCE - 5), entity, "maintenance_start", {"seconds": 7200})] if tick == SINCE - 5 else []
        )

    found = shown(change, 180)
    assert levels(found) == {("job:7", "suspect")}
    assert "announced work on" in found[-1].evidence["explained_by"]


def test_work_on_another_node_explains_no_hang():
    def change(tick, values):
        stands(tick, values, 180.0)
        return [Event(CASE.time(50), "node:elsewhere", "maintenance_start", {"seconds": 7200})] if tick == 50 else []

    assert ("job:7", "page") in levels(shown(change, 180))


@pytest.mark.parametrize("xid", [{"a": 1}, float("nan"), "79", None, 10**400], ids=lambda v: repr(v)[:9])
def test_an_xid_without_a_number_still_explains_a_hang(xid):
    def change(tick, values):
        stands(tick, values, 180.0)
        return [Event(CASE.time(SINCE), "gpu:n2.1", "xid", {"xid": xid})] if tick == SINCE else []

    assert shown(change, 160)[-1].evidence["explained_by"] == "xid of gpu:n2.1"
