"""GPUs that a change among peers does not show: a node that is all of its cohort, and a GPU slow since its start."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.straggler.straggler_inferred import StragglerInferred
from pipeline.model.records import SECOND
from pipeline.model.topology import Topology
from tests.detectors.cases import straggler_inferred as site
from tests.detectors.cases.case import START, Case, at_known_site

SINCE, WIDTH = 60, site.WIDTH
NODE = slice(WIDTH, 2 * WIDTH)


def single_node_jobs():
    """Each node has its own job."""
    parents = {gpu: [site.HOSTS[i // WIDTH]] for i, gpu in enumerate(site.GPUS)}
    return Topology(
        parents | {rank: [f"job:{i // WIDTH}", site.GPUS[i]] for i, rank in enumerate(site.RANKS)},
    )


def findings(change, ticks=200, topology=single_node_jobs, since=SINCE, detector=None):
    """Findings; `change(tick, values)` applies from tick `since` on."""

    def instant(tick, broken, rng):
        values = site.healthy_values(tick, rng)
        if broken:
            change(tick, values)
        return values, []

    case = Case(StragglerInferred, site.NAMES, topology, instant, frozenset(), fault=since)
    return case.run_detector(detector or at_known_site(StragglerInferred()), range(ticks))


def low_clocks(gpus, factor, bits=0):
    def change(tick, values):
        values["gpu"]["gpu.sm_clock"][gpus] *= factor
        values["gpu"]["gpu.throttle_reasons"][gpus] = bits

    return change


def entities(found, level):
    return {f.entity for f in found if f.level == level}


def minutes(finding):
    return (finding.time - START) / SECOND / 60 - SINCE / 6


def test_clocks_of_a_node_with_a_job_of_its_own_that_fall_without_a_reason_page_after_ten_minutes():
    found = findings(low_clocks(NODE, 0.8))
    page = next(f for f in found if f.level == "page")
    assert entities(found, "page") == {"node:n1"}
    assert 9 <= minutes(page) <= 13
    assert page.evidence["cohort"] == "own past"
    assert page.evidence["peers"] == 0
    assert "before 17" in page.summary
    assert "below own past, without an event reason" in page.evidence["cause"]


def test_a_lone_gpu_of_a_job_is_judged_by_its_own_past():
    def topology():
        parents = {gpu: [site.HOSTS[i // WIDTH]] for i, gpu in enumerate(site.GPUS)}
        return Topology(parents | {rank: [f"job:{i}", site.GPUS[i]] for i, rank in enumerate(site.RANKS)})

    assert entities(findings(low_clocks([5], 0.8), topology=topology), "page") == {"gpu:n1.1"}


def jobs_of(width, product="H100"):
    def topology():
        parents = {gpu: [site.HOSTS[i // WIDTH]] for i, gpu in enumerate(site.GPUS)}
        ranks = {rank: [f"job:{i // width}", site.GPUS[i]] for i, rank in enumerate(site.RANKS)}
        return Topology(parents | ranks, {gpu: {"sku": product} for gpu in site.GPUS})

    return topology


@pytest.mark.parametrize("width", [1, 2, 6])
def test_a_clock_that_is_stuck_since_the_start_of_a_job_of_fewer_than_eight_gpus_pages(width):
    found = findings(low_clocks([5], 0.7), topology=jobs_of(width), since=0)
    assert entities(found, "page") == {"gpu:n1.1"}
    assert found[-1].evidence["cohort"] == "all H100"
    assert found[-1].summary.endswith("no throttle bit")
    assert "peers 17" in found[-1].summary


@pytest.mark.parametrize(
    ("gpus", "factor", "bits"),
    [
        pytest.param([5], 0.85, 0, id="within the spread of a product"),
        pytest.param([5], 0.7, 0x4, id="a power cap"),
        pytest.param([5], 0.7, 0x2, id="application clocks"),
        pytest.param([1, 5, 9], 0.7, 0, id="so many that people did it"),
    ],
)
def test_clocks_that_are_low_since_the_start_of_a_small_job_for_another_reason_give_no_finding(gpus, factor, bits):
    assert findings(low_clocks(gpus, factor, bits), topology=jobs_of(2), since=0) == []


@pytest.mark.parametrize(
    ("gpus", "factor", "bits"),
    [
        pytest.param(NODE, 0.8, 0x4, id="a power cap"),
        pytest.param(NODE, 0.8, 0x2, id="application clocks"),
        pytest.param(NODE, 0.8, 0x1, id="idle"),
        pytest.param(NODE, 0.95, 0, id="less than a tenth"),
        pytest.param(slice(0, 3 * WIDTH), 0.8, 0, id="three nodes at once, as people set clocks"),
    ],
)
def test_clocks_that_people_or_little_work_lower_give_no_page(gpus, factor, bits):
    assert entities(findings(low_clocks(gpus, factor, bits)), "page") == set()


def test_clocks_that_fall_for_five_minutes_do_not_page():
    def change(tick, values):
        if tick < SINCE + 30:
            low_clocks(NODE, 0.8)(tick, values)

    assert entities(findings(change), "page") == set()


def test_a_power_cap_that_begins_later_does_not_end_what_was_found():
    detector, open_at = at_known_site(StragglerInferred()), {}

    def change(tick, values):
        low_clocks(NODE, 0.8, 0x4 if 150 <= tick < 200 else 0)(tick, values)
        if detector.conditions:
            open_at[tick] = set(detector.conditions)

    findings(change, ticks=260, detector=detector)
    assert all("node:n1" in open_at.get(tick, ()) for tick in range(130, 260))


def test_unknown_event_reasons_excuse_a_clock_without_peers():
    def instant(tick, broken, rng):
        values = site.healthy_values(tick, rng)
        del values["gpu"]["gpu.throttle_reasons"]
        if broken:
            values["gpu"]["gpu.sm_clock"][NODE] *= 0.8
        return values, []

    case = Case(StragglerInferred, site.NAMES, single_node_jobs, instant, frozenset(), fault=SINCE)
    assert case.run_detector(at_known_site(StragglerInferred()), range(200)) == []


def less_active(gpus, factor):
    def change(tick, values):
        values["gpu"]["gpu.sm_active"][gpus] *= factor

    return change


def test_a_gpu_less_active_than_all_peers_from_its_first_sample_on_pages_within_25_minutes():
    found = findings(less_active([5], 0.8), topology=site.topology, since=0)
    page = next(f for f in found if f.level == "page")
    assert entities(found, "page") == {"gpu:n1.1"}
    assert (page.time - START) / SECOND / 60 <= 25
    assert "since start" in page.summary
    assert "GPU 1 of n1: SMs active 58 %, peers 74 %" in page.summary


@pytest.mark.parametrize(
    ("gpus", "factor"),
    [
        pytest.param([5], 0.95, id="a few percent"),
        pytest.param([1, 5, 9], 0.8, id="three of sixteen: the job's design"),
        pytest.param(slice(0, 16), 0.7, id="a stage"),
    ],
)
def test_gpus_that_are_less_active_since_the_start_by_design_give_no_page(gpus, factor):
    assert entities(findings(less_active(gpus, factor), topology=site.topology, since=0), "page") == set()


def test_a_gpu_less_active_since_its_start_that_was_accepted_as_normal_gives_no_finding():
    detector, topology = at_known_site(StragglerInferred()), site.topology()
    found = findings(less_active([5], 0.8), topology=lambda: topology, since=0, detector=detector)
    assert found

    def instant(tick, broken, rng):
        values = site.healthy_values(tick, rng)
        less_active([5], 0.8)(tick, values)
        return values, []

    case = Case(StragglerInferred, site.NAMES, lambda: topology, instant, frozenset())
    detector.accept_as_normal("gpu:n1.1", {})
    after = [f for t in range(201, 400) for f in detector.observe(case.frames(t, False, topology))]
    assert after == []


def test_noisy_activity_of_a_cohort_hides_what_is_no_more_than_its_noise():
    spread = np.exp(0.05 * np.random.default_rng(1).standard_normal(site.SIZE))

    def change(tick, values):
        values["gpu"]["gpu.sm_active"] *= np.minimum(spread, 1.2)
        values["gpu"]["gpu.sm_active"][5] *= 0.85

    assert entities(findings(change, topology=site.topology, since=0), "page") == set()
