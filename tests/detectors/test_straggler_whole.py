"""Whole jobs without step times: slowdowns by the network, by the job itself, and those without a finding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detectors.straggler import job_throughput
from detectors.straggler.straggler_inferred import StragglerInferred
from pipeline.model.records import SECOND, Event
from pipeline.model.topology import Topology
from tests.detectors.cases import straggler_inferred as site
from tests.detectors.cases.case import START, Case, at_known_site

SINCE, STEP, TICKS = 60, 30, 160
LEAVES = 4
PORTS = tuple(f"port:n{n}.p{k}" for n in range(site.NODES) for k in range(LEAVES))
LEAF = np.arange(len(PORTS)) % LEAVES
SENT = 5e9


def topology():
    known = {e: list(p) for e, p in site.topology().parents.items()}
    leaves = {f"leaf:l{k}": [f"rail:{k}"] for k in range(LEAVES)}
    return Topology(
        {**known, **leaves, **{p: [f"node:n{i // LEAVES}", f"leaf:l{LEAF[i]}"] for i, p in enumerate(PORTS)}}
    )


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
    """Jobs are known after 20 min, not after two hours."""
    monkeypatch.setattr(job_throughput, "_KNOWN", 40)


class Site:
    """Counters that grow from tick to tick; `change(tick, values, rates)` may change their rates from tick SINCE on."""

    def __init__(self, change, traffic=True):
        self.change, self.traffic, self.totals = change, traffic, {}

    def __call__(self, tick, broken, rng):
        values = site.healthy_values(tick, rng)
        values["node"]["node.io_pressure"] = np.full(site.NODES, 1e9)
        rates = {
            "nic.tx_bytes": SENT * (1 + 0.02 * rng.standard_normal(len(PORTS))),
            "nic.port_tx_wait": np.full(len(PORTS), 1e4),
            "nic.ecn_marked": np.full(len(PORTS), 40.0),
            "nic.symbol_errors": np.zeros(len(PORTS)),
        }
        events = self.change(tick, values, rates) if broken else None
        if self.traffic:
            for name, rate in rates.items():
                self.totals[name] = self.totals.get(name, 1e12) + STEP * rate
            values["nic"] = {name: total.copy() for name, total in self.totals.items()}
        return values, events or []


def case(change, traffic=True):
    names = {**site.NAMES, "nic": PORTS}
    return Case(StragglerInferred, names, topology, Site(change, traffic), frozenset(), fault=SINCE, step=STEP)


def findings(change, ticks=TICKS, traffic=True, detector=None):
    return case(change, traffic).run_detector(detector or at_known_site(StragglerInferred()), range(ticks))


def minutes(finding):
    return (finding.time - START) / SECOND / 60 - SINCE * STEP / 60


def slower(sent=0.8, active=1.0, power=1.0):
    def change(tick, values, rates):
        rates["nic.tx_bytes"] *= sent
        values["gpu"]["gpu.sm_active"] *= active
        values["gpu"]["gpu.power"] *= power

    return change


def test_a_job_that_sends_less_while_its_gpus_wait_is_a_ticket_on_the_job_after_half_an_hour():
    found = findings(slower(0.8, active=0.85))
    assert {(f.entity, f.level, f.evidence["attribution"]) for f in found} == {("job:7", "ticket", "JOB")}
    assert 29 <= minutes(found[0]) <= 33
    assert abs(found[0].onset - START - SINCE * STEP * SECOND) <= 180 * SECOND
    assert found[0].evidence["effect"] == pytest.approx(0.2, abs=0.03)
    assert "cause not visible" in found[0].summary


def test_without_port_counters_a_less_active_job_may_do_other_work():
    assert findings(slower(active=0.8), traffic=False) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_service_whose_requests_swing_gives_no_finding(seed):
    rng = np.random.default_rng(seed)
    swing = np.zeros(TICKS + 1)
    for tick in range(1, TICKS + 1):  # bursts of a quarter of an hour
        swing[tick] = 0.967 * swing[tick - 1] + 0.25 * 0.3 * rng.standard_normal()

    def change(tick, values, rates):
        share = np.exp(swing[tick])
        rates["nic.tx_bytes"] *= share
        values["gpu"]["gpu.sm_active"] *= min(share, 1.0)

    assert replace(case(change), fault=0).run_detector(at_known_site(StragglerInferred()), range(TICKS)) == []


def test_a_job_that_sends_less_with_unchanged_activity_gives_no_finding():
    assert findings(slower(0.7)) == []


@pytest.mark.slow
def test_a_job_twice_as_slow_whose_gpus_wait_pages_without_a_culprit_within_15_minutes():
    found = findings(slower(0.45, active=0.8))
    assert {(f.entity, f.level, f.evidence["attribution"]) for f in found} == {("job:7", "page", "JOB")}
    assert 9 <= minutes(found[0]) <= 15


@pytest.mark.slow
def test_nodes_that_wait_for_storage_are_named_as_the_cause():
    def change(tick, values, rates):
        slower(0.8, active=0.8)(tick, values, rates)
        values["node"]["node.io_pressure"] += 0.5 * STEP * 1e6 * (tick - SINCE)

    found = findings(change)
    assert "wait for I/O" in found[0].summary
    assert found[0].signals == ("nic.tx_bytes", "node.io_pressure")


@pytest.mark.slow
def test_clocks_that_fall_together_are_named_as_the_cause():
    def change(tick, values, rates):
        slower(0.85)(tick, values, rates)
        values["gpu"]["gpu.sm_clock"] *= 0.85

    found = findings(change)
    assert {f.entity for f in found} == {"job:7"}
    assert "SM clocks" in found[0].evidence["cause"]


def test_clocks_a_few_percent_lower_do_not_explain_a_job_that_has_almost_stopped():
    def change(tick, values, rates):
        slower(0.45, active=0.3)(tick, values, rates)
        values["gpu"]["gpu.sm_clock"] *= 0.96

    found = findings(change)
    assert {f.evidence["cause"] for f in found} == {"GPUs wait, cause not visible"}


@pytest.mark.slow
def test_a_new_power_cap_of_all_is_policy():
    def change(tick, values, rates):
        slower(0.85)(tick, values, rates)
        values["gpu"]["gpu.sm_clock"] *= 0.85
        values["gpu"]["gpu.throttle_reasons"][:] = 0x4

    assert findings(change) == []


@pytest.mark.slow
def test_evaluations_checkpoints_and_the_end_of_a_job_give_no_finding():
    def evaluates(tick, values, rates):
        if tick < SINCE + 50:
            slower(1e-5, active=0.6, power=0.6)(tick, values, rates)

    def saves(tick, values, rates):
        if tick % 40 < 2:
            slower(0.3, active=0.25)(tick, values, rates)

    def ends(tick, values, rates):
        slower(1e-6, active=0.0, power=0.1)(tick, values, rates)

    for change in (evaluates, saves, ends):
        assert findings(change) == []


def test_a_job_that_restarts_with_other_work_learns_again():
    def change(tick, values, rates):
        slower(0.8, active=0.8)(tick, values, rates)
        start = Event(START + tick * STEP * SECOND, "job:7", "job_start", {"ranks": list(site.RANKS)})
        return [start] if tick == SINCE else []

    assert findings(change) == []


@pytest.mark.slow
def test_a_slow_gpu_explains_its_slow_job():
    def change(tick, values, rates):
        slower(0.8, active=0.85)(tick, values, rates)
        values["gpu"]["gpu.sm_clock"][5] *= 0.8
        values["gpu"]["gpu.throttle_reasons"][5] = 0x40

    assert {f.entity for f in findings(change)} == {"gpu:n1.1"}


@pytest.mark.slow
def test_a_busier_node_for_which_its_job_waits_is_a_ticket_since_it_may_have_more_work():
    busier = np.arange(site.SIZE) // (site.SIZE // site.NODES) == 1

    def change(tick, values, rates):
        slower(0.86)(tick, values, rates)
        values["gpu"]["gpu.sm_active"][~busier] *= 0.86

    levels = {(f.entity, f.level) for f in findings(change)}
    assert ("node:n1", "ticket") in levels
    assert "page" not in {level for _, level in levels}


@pytest.mark.slow
def test_a_job_that_reports_compute_times_is_left_to_the_detectors_of_jobs():
    def change(tick, values, rates):
        slower(0.8, active=0.85)(tick, values, rates)
        values["rank"] = {"rank.compute_time": np.full(site.SIZE, 4.0)}

    assert findings(change) == []


@pytest.mark.slow
def test_missing_and_reset_counters_give_no_finding():
    def nothing(tick, values, rates):
        for name in rates:
            rates[name] = np.full(len(PORTS), np.nan)

    def reset(tick, values, rates):
        if tick % 7 == 0:
            rates["nic.tx_bytes"][:] = -1e11

    for change in (nothing, reset):
        assert findings(change) == []


@pytest.mark.slow
def test_a_restart_gives_the_same_findings():
    whole = findings(slower(0.8, active=0.85))
    before, after = case(slower(0.8, active=0.85)), StragglerInferred()
    first = at_known_site(StragglerInferred())
    found = before.run_detector(first, range(90))
    after.restore(first.snapshot())
    assert [*found, *before.run_detector(after, range(90, TICKS))] == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "entity"), [(slower(0.8, active=0.85), "job:7"), (slower(0.5, active=0.85), "job:7")]
)
def test_a_slow_job_accepted_as_normal_gives_no_finding(change, entity):
    one, detector = case(change), StragglerInferred()
    assert one.run_detector(detector, range(TICKS))
    detector.accept_as_normal(entity, one.frames(TICKS, True, topology()))
    assert one.run_detector(detector, range(TICKS + 1, TICKS + 80)) == []


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(("first", "levels"), [(0, {"ticket"}), (SINCE, set())])
@pytest.mark.parametrize("gpus", [[5], [1, 5, 9, 13]])
def test_gpus_that_always_throttle_do_not_hide_a_slow_job_and_those_that_began_to_may_explain_it(first, levels, gpus):
    def change(tick, values, rates):
        if tick >= first:
            values["gpu"]["gpu.throttle_reasons"][gpus] = 0x20
            values["gpu"]["gpu.sm_clock"][gpus] *= 0.99
        if tick >= SINCE:
            slower(0.8, active=0.85)(tick, values, rates)

    found = replace(case(change), fault=0).run_detector(at_known_site(StragglerInferred()), range(TICKS))
    assert {f.level for f in found if f.entity == "job:7"} == levels


@pytest.mark.slow
@pytest.mark.parametrize("turns", [2, 3])
def test_a_slow_job_is_found_though_its_nodes_are_read_at_different_moments(turns):
    def change(tick, values, rates):
        slower(0.7, active=0.8)(tick, values, rates)

    run = case(change)
    steady = run.instant

    def in_turn(tick, broken, rng):
        values, events = steady(tick, broken, rng)
        for found in values.values():
            for name, column in found.items():
                node = np.arange(len(column)) * site.NODES // len(column)
                found[name] = np.where(node % turns == tick % turns, column, np.nan)
        return values, events

    found = replace(run, instant=in_turn).run_detector(at_known_site(StragglerInferred()), range(240))
    assert {(f.entity, f.level) for f in found} == {("job:7", "ticket")}
    assert 29 <= minutes(found[0]) <= 36


def test_a_job_that_waits_for_data_is_a_ticket_on_the_job_whatever_its_ports_show():
    def change(tick, values, rates):
        slower(0.15, active=0.3, power=0.6)(tick, values, rates)
        values["node"]["node.io_pressure"] += 0.5e6 * STEP * (tick - SINCE)

    found = findings(change)
    assert {(f.entity, f.level, f.evidence["attribution"]) for f in found} == {("job:7", "ticket", "JOB")}
    assert 9 <= minutes(found[0]) <= 14
    assert "tasks wait for I/O" in found[0].summary


@pytest.mark.parametrize(("pressed", "levels"), [(0.4, {"page"}), (0.05, set())])
def test_a_job_on_one_node_is_slowed_by_tasks_that_wait_for_processors(pressed, levels):
    """Its own swings are too large for a test of its pace; the host's pressure shows the cause."""
    homes = {gpu: [f"node:n{i // 8}"] for i, gpu in enumerate(site.GPUS)}
    ranks = {rank: [f"job:{i // 8}", site.GPUS[i]] for i, rank in enumerate(site.RANKS)}
    jobs_of_one = Topology({**homes, **ranks})

    def change(tick, values, rates):
        values["gpu"]["gpu.sm_active"][:8] *= 0.92
        values["node"]["node.cpu_pressure"][0] += pressed * 1e6 * STEP * (tick - SINCE)

    one = replace(case(change), topology=lambda: jobs_of_one)
    found = one.run_detector(at_known_site(StragglerInferred()), range(TICKS))
    assert {f.level for f in found if f.entity == "node:n0" and f.level != "suspect"} == levels
