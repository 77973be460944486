"""Slow GPUs and hosts without step times: which clocks and which idle SMs page, and cases without findings."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.straggler.straggler_inferred import StragglerInferred
from pipeline.model.records import SECOND, Event
from pipeline.model.topology import Topology
from tests.detectors.cases import straggler_inferred as site
from tests.detectors.cases.case import START, Case, at_known_site

SINCE = 60


def findings(change, ticks=150, topology=site.topology, detector=None):
    """Findings; `change(tick, values)`, which may return events, applies from tick SINCE on."""

    def instant(tick, broken, rng):
        values = site.healthy_values(tick, rng)
        events = change(tick, values) if broken else None
        return values, events or []

    case = Case(StragglerInferred, site.NAMES, topology, instant, frozenset(), fault=SINCE)
    return case.run_detector(detector or StragglerInferred(), range(ticks))


def low_clocks(gpus, factor, bits=0):
    def change(tick, values):
        values["gpu"]["gpu.sm_clock"][gpus] *= factor
        values["gpu"]["gpu.throttle_reasons"][gpus] = bits

    return change


def idle_sms(gpus, factor, node=None, share=0.4):
    """Makes the SMs of GPUs less active; on `node` tasks wait for processors."""

    def change(tick, values):
        values["gpu"]["gpu.sm_active"][gpus] *= factor
        if node is not None:
            values["node"]["node.cpu_pressure"][node] += share * 1e7 * (tick - SINCE)

    return change


def entities(found, level):
    return {f.entity for f in found if f.level == level}


def minutes(finding):
    return (finding.time - START) / SECOND / 60 - SINCE / 6


@pytest.mark.parametrize("bit", [0x8, 0x20, 0x40, 0x80])
def test_a_low_clock_under_a_throttle_bit_pages_within_two_minutes(bit):
    found = findings(low_clocks([5], 0.9, bit), 80)
    assert entities(found, "page") == {"gpu:n1.1"}
    assert minutes(found[0]) <= 2
    assert f"0x{bit:x}" in found[-1].evidence["cause"]
    assert found[-1].signals == ("gpu.sm_clock", "gpu.throttle_reasons")


def test_a_low_clock_that_no_event_reason_explains_pages_within_two_minutes():
    found = findings(low_clocks([5], 0.86), detector=at_known_site(StragglerInferred()))
    page = next(f for f in found if f.level == "page")
    assert {f.entity for f in found} == {"gpu:n1.1"}
    assert minutes(page) <= 2
    assert page.evidence["effect"] == pytest.approx(0.14, abs=0.02)
    assert page.evidence["cohort"] == "stage:7.0"


def test_a_clock_that_is_low_from_the_first_sample_on_is_found():
    def change(tick, values):
        values["gpu"]["gpu.sm_clock"][5] *= 0.6

    case = Case(
        StragglerInferred,
        site.NAMES,
        site.topology,
        lambda tick, _, rng: (change(tick, values := site.healthy_values(tick, rng)), (values, []))[1],
        frozenset(),
    )
    found = case.run_detector(StragglerInferred(), range(120))
    assert entities(found, "page") == {"gpu:n1.1"}


def test_a_low_clock_with_unknown_event_reasons_pages_after_the_hold():
    def change(tick, values):
        values["gpu"]["gpu.sm_clock"][5] *= 0.88

    def instant(tick, broken, rng):
        values = site.healthy_values(tick, rng)
        del values["gpu"]["gpu.throttle_reasons"]
        if broken:
            change(tick, values)
        return values, []

    case = Case(StragglerInferred, site.NAMES, site.topology, instant, frozenset(), fault=SINCE)
    found = case.run_detector(at_known_site(StragglerInferred()), range(160))
    page = next(f for f in found if f.level == "page")
    assert 9 <= minutes(page) <= 12


def test_a_throttle_bit_without_a_lower_clock_gives_no_finding():
    assert findings(low_clocks([5], 1.0, 0x20)) == []


def test_a_node_whose_clocks_fall_is_one_finding():
    found = findings(low_clocks(slice(4, 8), 0.9, 0x40), 90)
    assert {f.entity for f in found if minutes(f) > 3} == {"node:n1"}
    assert "Node n1: 4 GPUs, SM clock" in found[-1].summary


def test_a_power_cap_is_what_people_set_and_gives_no_finding():
    assert findings(low_clocks(slice(4, 8), 0.9, 0x4)) == []


def test_a_power_cap_of_all_gives_no_finding():
    assert findings(low_clocks(slice(None), 0.88, 0x4)) == []


def test_a_host_that_keeps_its_gpus_waiting_pages_the_node_after_eight_minutes():
    found = findings(idle_sms(slice(4, 8), 0.9, node=1), 150)
    page = next(f for f in found if f.level == "page")
    assert entities(found, "page") == {"node:n1"}
    assert 7 <= minutes(page) <= 9
    assert "tasks wait for CPU 40 %" in page.summary
    assert page.evidence["attribution"] == "HOST"


def test_the_load_average_of_a_host_is_used_where_the_kernel_has_no_pressure():
    def change(tick, values):
        idle_sms(slice(4, 8), 0.9)(tick, values)
        values["node"]["node.load1"][1] = 300.0

    def without(tick, values):
        change(tick, values)
        del values["node"]["node.cpu_pressure"]

    found = findings(lambda t, v: without(t, v), 120)
    assert entities(found, "page") <= {"node:n1"}


def test_idle_gpus_of_a_node_without_a_reason_are_suspects_only():
    found = findings(idle_sms(slice(4, 8), 0.9), 140)
    assert entities(found, "suspect") == {"node:n1"}
    assert entities(found, "page") == set()


def test_a_short_slowdown_of_a_host_does_not_page():
    def change(tick, values):
        if tick < SINCE + 30:
            idle_sms(slice(4, 8), 0.75, node=1)(tick, values)

    assert entities(findings(change, 140), "page") == set()


def test_a_gpu_that_is_more_active_than_its_peers_is_a_suspect_only():
    def change(tick, values):
        values["gpu"]["gpu.sm_active"][np.arange(site.SIZE) != 5] *= 0.92

    found = findings(change, 140)
    assert {f.entity for f in found} == {"gpu:n1.1"}
    assert entities(found, "page") == set()


def test_gpus_whose_job_reports_compute_times_are_left_to_the_straggler_detector():
    def instant(tick, broken, rng):
        values = site.healthy_values(tick, rng)
        values["rank"] = {"rank.compute_time": np.full(site.SIZE, 4.0)}
        if broken:
            low_clocks([5], 0.8, 0x40)(tick, values)
            idle_sms(slice(8, 12), 0.8, node=2)(tick, values)
        return values, []

    case = Case(StragglerInferred, site.NAMES, site.topology, instant, frozenset())
    assert case.run_detector(StragglerInferred(), range(160)) == []


def test_ranks_without_compute_times_change_nothing():
    def change(tick, values):
        values["rank"] = {"rank.step": np.full(site.SIZE, 1.0 * tick)}
        low_clocks([5], 0.9, 0x40)(tick, values)

    assert entities(findings(change, 80), "page") == {"gpu:n1.1"}


def test_where_no_job_is_known_gpus_of_the_node_are_the_peers():
    def bare():
        parents = {e: p for e, p in site.topology().parents.items() if not e.startswith(("rank", "stage"))}
        return Topology(parents)

    found = findings(low_clocks([5], 0.9, 0x20), 80, bare)
    assert entities(found, "page") == {"gpu:n1.1"}
    assert found[-1].evidence["cohort"] == "node:n1"
    assert findings(idle_sms(slice(4, 8), 0.8, node=1), 140, bare) == []


def test_an_evaluation_or_checkpoint_of_the_whole_job_gives_no_finding():
    def change(tick, values):
        values["gpu"]["gpu.sm_active"] *= 0.25 if tick % 40 < 5 else 0.6 if tick % 40 < 20 else 1

    assert findings(change, 240) == []


def test_idle_gpus_with_low_clocks_give_no_finding():
    def change(tick, values):
        values["gpu"]["gpu.sm_clock"][4:8] = 345.0
        values["gpu"]["gpu.sm_active"][4:8] = 0.0
        values["gpu"]["gpu.utilization"][4:8] = 0.0
        values["gpu"]["gpu.throttle_reasons"][4:8] = 0x1

    assert findings(change) == []


@pytest.mark.slow
def test_announced_work_and_the_version_after_it_give_no_finding():
    def change(tick, values):
        low_clocks(slice(4, 8), 0.93)(tick, values)
        if tick == SINCE:
            return [Event(START + tick * 10 * SECOND, "node:n1", "maintenance_start", {"seconds": 600})]
        if tick == SINCE + 60:
            return [Event(START + tick * 10 * SECOND, "node:n1", "maintenance_end", {})]
        return []

    assert findings(change, 400) == []


@pytest.mark.slow
def test_a_node_learns_again_after_a_new_version():
    def change(tick, values):
        low_clocks(slice(4, 8), 0.95)(tick, values)
        return [Event(START + tick * 10 * SECOND, "node:n1", "version", {"versions": {}})] if tick == SINCE else []

    assert findings(change, 300) == []


def test_gpus_without_readings_give_no_finding():
    def change(tick, values):
        for column in values["gpu"].values():
            column[::2] = np.nan
            if tick % 7 == 0:
                column[:] = np.nan

    assert findings(change, 300) == []


def test_a_slow_gpu_accepted_as_normal_gives_no_finding():
    detector = StragglerInferred()
    found = findings(low_clocks([5], 0.92), 130, detector=detector)
    assert found
    case = Case(
        StragglerInferred,
        site.NAMES,
        site.topology,
        lambda tick, _, rng: (low_clocks([5], 0.92)(tick, values := site.healthy_values(tick, rng)), (values, []))[1],
        frozenset(),
    )
    topology = site.topology()
    frames = case.frames(131, True, topology)
    detector.accept_as_normal("gpu:n1.1", frames)
    assert [f for t in range(132, 260) for f in detector.observe(case.frames(t, True, topology))] == []


def test_many_gpus_of_a_stage_that_slow_down_together_open_no_ticket_on_what_they_share():
    """The job's pace shows the harm; what its slow parts share is for the Desk to judge."""
    found = findings(low_clocks(list(range(0, site.SIZE // 2, 2)), 0.97), SINCE + 150)
    assert entities(found, "ticket") | entities(found, "page") == set()


@pytest.mark.slow
def test_another_job_on_the_same_gpus_gives_no_finding():
    topology = site.topology()
    other = {f"rank:8.{i}": ["stage:8.0", "job:8", site.GPUS[i]] for i in range(site.SIZE)}
    detector = StragglerInferred()
    case = Case(
        StragglerInferred,
        site.NAMES,
        lambda: topology,
        lambda t, _, rng: (site.healthy_values(t, rng), []),
        frozenset(),
    )
    found = []
    for tick in range(300):
        if tick == 100:
            topology.remove_entities([*site.RANKS, "stage:7.0", "stage:7.1", "job:7"])
            topology.merge({**other, "stage:8.0": ["job:8"]})
        found += detector.observe(case.frames(tick, False, topology))
    assert found == []


def test_slower_gpus_of_another_product_in_the_same_job_give_no_finding():
    def mixed():
        topology = site.topology()
        topology.merge({}, {gpu: {"sku": "A100" if i % 16 >= 8 else "H100"} for i, gpu in enumerate(site.GPUS)})
        return topology

    older = np.arange(site.SIZE) % 16 >= 8

    def instant(tick, broken, rng):
        values = site.healthy_values(tick, rng)
        values["gpu"]["gpu.sm_clock"][older] = 1290.0
        return values, []

    case = Case(StragglerInferred, site.NAMES, mixed, instant, frozenset())
    assert case.run_detector(StragglerInferred(), range(150)) == []


def test_a_stage_whose_clocks_all_fall_gives_no_finding():
    assert findings(low_clocks(slice(0, 16), 0.9, 0x40)) == []


def test_the_gpus_of_a_job_on_one_node_are_compared_with_each_other():
    def single():
        parents = {gpu: ["node:n0"] for gpu in site.GPUS} | {"node:n0": ["rack:r0"]}
        return Topology(parents | {r: ["job:7", g] for r, g in zip(site.RANKS, site.GPUS, strict=True)})

    found = findings(low_clocks([5], 0.9, 0x40), 80, single)
    assert entities(found, "page") == {"gpu:n1.1"}
    assert (found[-1].evidence["peers"], found[-1].evidence["cohort"]) == (31, "job:7")


def test_few_gpus_without_peers_give_no_finding():
    def instant(tick, broken, rng):
        values = {c: {k: v[:4] for k, v in columns.items()} for c, columns in site.healthy_values(tick, rng).items()}
        if broken:
            values["gpu"]["gpu.sm_clock"][:] *= 0.8
        return values, []

    case = Case(StragglerInferred, site.NAMES, Topology, instant, frozenset(), fault=SINCE)
    assert case.run_detector(StragglerInferred(), range(150)) == []


@pytest.mark.parametrize("begin", [40, 90])
def test_gpus_that_appear_later_or_disappear_give_no_finding(begin):
    def instant(tick, broken, rng):
        values = site.healthy_values(tick, rng)
        if tick < begin:
            values["gpu"] = {name: column[:24].copy() for name, column in values["gpu"].items()}
        elif tick > begin + 60:
            for column in values["gpu"].values():
                column[8:16] = np.nan
        return values, []

    case = Case(StragglerInferred, site.NAMES, site.topology, instant, frozenset())
    assert case.run_detector(StragglerInferred(), range(220)) == []


def test_a_finding_ends_when_the_job_does():
    topology, detector = site.topology(), StragglerInferred()

    def instant(tick, broken, rng):
        values = site.healthy_values(tick, rng)
        if tick < 120:
            low_clocks([5], 0.9, 0x40)(tick, values) if tick >= SINCE else None
        else:
            idle = values["gpu"]
            idle["gpu.sm_clock"][:] = 345.0
            idle["gpu.sm_active"][:] = idle["gpu.utilization"][:] = 0.0
            idle["gpu.throttle_reasons"][:] = 0x1
        return values, []

    case = Case(StragglerInferred, site.NAMES, lambda: topology, instant, frozenset())
    found = [f for t in range(200) for f in detector.observe(case.frames(t, True, topology))]
    assert found
    assert max(f.time for f in found) <= case.time(135)
    assert detector.conditions == {}


@pytest.mark.slow
def test_a_job_that_starts_on_a_slow_gpu_does_not_make_it_learn_again():
    """Otherwise a slow GPU would be normal to the next job."""
    topology, detector = site.topology(), StragglerInferred()
    other = {f"rank:8.{i}": ["stage:8.0", "job:8", site.GPUS[i]] for i in range(site.SIZE)}

    def instant(tick, broken, rng):
        values = site.healthy_values(tick, rng)
        if tick >= SINCE:
            low_clocks([5], 0.94)(tick, values)
        return values, []

    case = Case(StragglerInferred, site.NAMES, lambda: topology, instant, frozenset())
    found = []
    for tick in range(400):
        if tick == 200:
            topology.remove_entities([*site.RANKS, "stage:7.0", "stage:7.1", "job:7"])
            topology.merge({**other, "stage:8.0": ["job:8"]})
        found += detector.observe(case.frames(tick, False, topology))
    assert {f.entity for f in found} == {"gpu:n1.1"}
    assert case.time(399) - found[-1].time <= 120 * SECOND
    assert len({f.onset for f in found}) == 1


def test_gpus_of_a_loop_that_throttle_one_after_another_are_left_to_coolant():
    def change(tick, values):
        gpu, since = values["gpu"], tick - SINCE
        gpu["gpu.temperature"] += min(30.0, 6.0 * since)
        throttled = np.arange(site.SIZE) < since / 2
        gpu["gpu.sm_clock"][throttled] *= 0.8
        gpu["gpu.throttle_reasons"][throttled] = 0x40

    def instant(tick, broken, rng):
        values = site.healthy_values(tick, rng)
        values["gpu"]["gpu.temperature"] = np.full(site.SIZE, 55.0)
        if broken:
            change(tick, values)
        return values, []

    def looped():
        topology = site.topology()
        topology.merge({host: ["loop:l0", *topology.parents[host]] for host in site.HOSTS})
        return topology

    case = Case(StragglerInferred, site.NAMES, looped, instant, frozenset(), fault=SINCE)
    assert case.run_detector(StragglerInferred(), range(200)) == []


def test_a_gpu_repaired_while_idle_gives_no_further_finding():
    def instant(tick, broken, rng):
        values = site.healthy_values(tick, rng)
        if SINCE <= tick < 140:
            low_clocks([5], 0.9)(tick, values)
        if 140 <= tick < 180:
            values["gpu"]["gpu.sm_active"][:] = values["gpu"]["gpu.utilization"][:] = 0.0
        return values, []

    case = Case(StragglerInferred, site.NAMES, site.topology, instant, frozenset())
    found = case.run_detector(StragglerInferred(), range(260))
    assert found
    assert found[-1].time < case.time(155)


def test_the_first_title_has_the_newest_clock():
    first = findings(low_clocks([5], 0.85, 0x40), 80)[0]
    seen = first.evidence
    assert seen["value"] == pytest.approx(0.85 * seen["expected"], rel=0.02)
    assert seen["effect"] == pytest.approx(1 - seen["value"] / seen["expected"], abs=1e-6)
    assert f"SM clock {seen['value']:.0f} MHz, peers {seen['expected']:.0f}" in first.summary
    assert seen["attribution"] == "NODE"


def test_a_clock_that_recovers_for_a_moment_is_still_reported_as_low():
    def change(tick, values):
        low_clocks([5], 0.85 if tick % 6 else 1.0)(tick, values)

    assert all(f.evidence["effect"] >= 0.03 for f in findings(change, 200))


def test_the_spread_is_in_the_unit_of_the_value():
    found = findings(low_clocks([5], 0.85, 0x40), 80) + findings(idle_sms(slice(4, 8), 0.9, node=1), 120)
    of_clock = [f.evidence["spread"] for f in found if f.evidence["unit"] == "MHz"]
    of_activity = [f.evidence["spread"] / f.evidence["expected"] for f in found if f.evidence["unit"] == "1"]
    assert min(of_clock) >= 1.0
    assert of_activity
    assert max(of_activity) <= 0.1
