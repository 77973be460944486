"""Power caps: bits that come and go under full load hide no slow rank, and a lower cap is named as one."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.straggler.straggler import Straggler
from detectors.straggler.straggler_inferred import StragglerInferred
from pipeline.model.records import LEVELS, SECOND
from tests.detectors.cases import straggler as site
from tests.detectors.cases import straggler_inferred as unhooked
from tests.detectors.cases.case import Case, at_known_site

SLOW = 5


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("gpus", [[5], [5, 6], [5, 9, 14]])
@pytest.mark.parametrize("cause", ["bit", "limit", "power"])
def test_a_lower_cap_on_one_to_three_gpus_is_policy_and_a_suspect_that_names_it(gpus, cause):
    def instant(tick, broken, rng):
        values = site.healthy_values(tick, rng)
        gpu = values["gpu"]
        gpu["gpu.power_limit"] = np.full(site.SIZE, 700.0 if cause == "limit" else np.nan)
        if cause != "bit":
            gpu["gpu.throttle_reasons"][:] = 4.0  # all are always at their limit
        if broken:
            values["rank"]["rank.compute_time"][gpus] *= 1.15
            gpu["gpu.sm_clock"][gpus] /= 1.15
            gpu["gpu.throttle_reasons"][gpus] = 4.0
            gpu["gpu.power_limit"][gpus] *= 0.8
            gpu["gpu.power"][gpus] *= 0.8 if cause == "power" else 1.0
        return values, []

    case = Case(Straggler, site.NAMES, site.topology, instant, frozenset(), fault=60)
    found = case.run_detector(Straggler(), range(160))
    assert {f.level for f in found} == {"suspect"}
    assert "power cap" in found[-1].summary


@pytest.mark.parametrize("gpus", [[5], [5, 9]])
def test_a_cap_on_single_gpus_of_a_job_without_compute_times_is_what_people_set(gpus):
    def instant(tick, broken, rng):
        values = unhooked.healthy_values(tick, rng)
        if broken:
            values["gpu"]["gpu.sm_clock"][gpus] /= 1.15
            values["gpu"]["gpu.throttle_reasons"][gpus] = 4.0
            values["gpu"]["gpu.power"][gpus] *= 0.8
        return values, []

    case = Case(StragglerInferred, unhooked.NAMES, unhooked.topology, instant, frozenset(), fault=60)
    assert case.run_detector(StragglerInferred(), range(160)) == []


def found(share, change, ticks=300):
    """Findings of a job whose GPUs are capped for a share of the time; change(rng, values) from tick 150 on."""

    def instant(tick, broken, rng):
        values = site.healthy_values(tick, rng)
        values["gpu"]["gpu.throttle_reasons"] = np.where(rng.random(site.SIZE) < share, 4.0, 0.0)
        if broken:
            change(rng, values)
        return values, []

    case = Case(Straggler, site.NAMES, site.topology, instant, frozenset(), fault=150)
    return case.run_detector(Straggler(), range(ticks))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
def test_a_slow_rank_pages_where_all_power_cap_bits_flicker(share):
    def slower(rng, values):
        values["rank"]["rank.compute_time"][SLOW] *= 1.15

    findings = found(share, slower)
    assert {f.entity for f in findings} == {site.RANKS[SLOW]}
    page = next(f for f in findings if f.level == "page")
    assert 300 <= (page.time - page.onset) / SECOND <= 400


def watch_from(fault, change, ticks):
    """Findings of a job that change(tick, values) touches; `fault` is the tick from which it is called."""

    def instant(tick, broken, rng):
        values = site.healthy_values(tick, rng)
        values["gpu"]["gpu.throttle_reasons"] = np.zeros(site.SIZE)
        change(tick, values)
        return values, []

    case = Case(Straggler, site.NAMES, site.topology, instant, frozenset(), fault=fault)
    return case.run_detector(Straggler(), range(ticks))


@pytest.mark.parametrize("gpus", [[5], [0, 1, 2, 3, 4, 5, 6, 7]])
def test_a_cap_that_has_just_ended_is_still_policy(gpus):
    """The median of ten steps is slow for minutes after it."""

    def change(tick, values):
        if 60 <= tick < 160:
            values["gpu"]["gpu.throttle_reasons"][gpus] = 4.0
            values["gpu"]["gpu.sm_clock"][gpus] /= 1.12
        if 60 <= tick < 190:
            values["rank"]["rank.compute_time"][gpus] *= 1.12

    assert {f.level for f in watch_from(60, change, 260)} <= {"suspect"}


@pytest.mark.slow
def test_a_few_percent_of_clock_on_all_gpus_of_a_node_is_no_broken_device():
    node = np.arange(site.SIZE) < site.WIDTH

    def change(tick, values):
        if tick >= 80:
            values["gpu"]["gpu.sm_clock"][node] /= 1.07
            values["rank"]["rank.compute_time"][node] *= 1.07

    assert {f.level for f in watch_from(80, change, 300)} == {"suspect"}


def test_a_few_percent_of_clock_on_one_gpu_is_a_ticket():
    def change(tick, values):
        if tick >= 80:
            values["gpu"]["gpu.sm_clock"][SLOW] /= 1.07
            values["rank"]["rank.compute_time"][SLOW] *= 1.07

    assert max((f.level for f in watch_from(80, change, 300)), key=LEVELS.index) == "ticket"


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("power", [True, False])
def test_a_lower_cap_of_a_node_does_not_page_where_bits_flicker(share, power):
    node = np.arange(site.SIZE) < site.WIDTH

    def capped(rng, values):
        values["rank"]["rank.compute_time"][node] *= 1.08
        values["gpu"]["gpu.sm_clock"][node] /= 1.08
        values["gpu"]["gpu.throttle_reasons"][node] = 4.0
        values["gpu"]["gpu.power"][node] *= 0.88 if power else np.nan

    assert not [f for f in found(share, capped, 600) if f.level == "page"]


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [70, 130, 320])
def test_a_slow_rank_of_a_job_with_steps_of_minutes_pages(seconds):
    made, last = {}, [-1]

    def instant(tick, broken, rng):
        values, number = site.healthy_values(tick, rng), tick * 10 // seconds
        if number != last[0]:
            made.update(values["rank"])
            last[0] = number
            if broken:
                made["rank.compute_time"][SLOW] *= 1.15
        values["rank"] = {name: column.copy() for name, column in made.items()}
        values["rank"]["rank.step"][:] = 1000.0 + number
        return values, []

    learned = 40 * seconds // 10
    case = Case(Straggler, site.NAMES, site.topology, instant, frozenset(), fault=learned)
    findings = case.run_detector(Straggler(), range(learned + 30 * seconds // 10))
    assert {f.entity for f in findings} == {site.RANKS[SLOW]}
    page = next(f for f in findings if f.level == "page")
    assert 300 <= (page.time - page.onset) / SECOND <= 15 * seconds


def test_a_cap_hides_no_slowdown_that_is_far_beyond_what_it_costs_in_clock():
    node = np.arange(site.SIZE) < site.WIDTH

    def change(tick, values):
        if tick >= 60:
            values["gpu"]["gpu.throttle_reasons"][node] = 4.0
            values["gpu"]["gpu.sm_clock"][node] /= 1.05
            values["rank"]["rank.compute_time"][node] *= 1.4

    found = watch_from(60, change, 160)
    assert "page" in {f.level for f in found}
    assert "power cap" not in found[-1].summary


def test_a_slow_gpu_that_draws_less_under_the_limit_of_its_peers_is_no_policy():
    def change(tick, values):
        gpu = values["gpu"]
        gpu["gpu.throttle_reasons"][:] = 4.0
        gpu["gpu.power_limit"] = np.full(site.SIZE, 700.0)
        if tick >= 100:
            values["rank"]["rank.compute_time"][SLOW] *= 1.15
            gpu["gpu.power"][SLOW] *= 0.9

    found = watch_from(100, change, 200)
    assert "page" in {f.level for f in found}
    assert "power cap" not in found[-1].summary


def test_minutes_under_a_cap_do_not_count_for_the_page_of_a_short_slowdown_beyond_it():
    node = np.arange(site.SIZE) < site.WIDTH

    def change(tick, values):
        if tick >= 60:
            values["gpu"]["gpu.throttle_reasons"][node] = 4.0
            values["gpu"]["gpu.sm_clock"][node] /= 1.08
            values["rank"]["rank.compute_time"][node] *= 1.15 if not 120 <= tick < 145 else 1.5

    assert {f.level for f in watch_from(60, change, 200)} == {"suspect"}


def test_a_few_percent_that_a_clock_under_the_cap_of_all_explains_are_no_ticket():
    def change(tick, values):
        values["gpu"]["gpu.throttle_reasons"][:] = 4.0
        if tick >= 100:
            values["rank"]["rank.compute_time"][SLOW] *= 1.07
            values["gpu"]["gpu.sm_clock"][SLOW] /= 1.06

    assert {f.level for f in watch_from(100, change, 200)} <= {"suspect"}


SPREAD = 1.04 + 0.10 * (np.arange(site.SIZE) % 11 == 3)
"""What a lower limit costs each GPU in clock: identical ones leak differently, here three of 32 most."""


def test_a_lower_limit_for_all_gpus_makes_no_finding_of_those_that_leak_most():
    def change(tick, values):
        gpu = values["gpu"]
        gpu["gpu.power_limit"] = np.full(site.SIZE, 600.0 if tick >= 100 else 700.0)
        if tick >= 100:
            gpu["gpu.throttle_reasons"][:] = 4.0
            gpu["gpu.sm_clock"] /= SPREAD
            values["rank"]["rank.compute_time"] *= SPREAD

    assert {f.level for f in watch_from(100, change, 250)} <= {"suspect"}


def test_a_lower_limit_for_all_gpus_of_a_job_without_compute_times_makes_no_finding():
    def instant(tick, broken, rng):
        values = unhooked.healthy_values(tick, rng)
        gpu = values["gpu"]
        gpu["gpu.power_limit"] = np.full(len(gpu["gpu.sm_clock"]), 600.0 if broken else 700.0)
        if broken:
            spread = 1.04 + 0.10 * (np.arange(len(gpu["gpu.sm_clock"])) % 11 == 3)
            gpu["gpu.sm_clock"] = gpu["gpu.sm_clock"] / spread
            gpu["gpu.throttle_reasons"] = np.where(rng.random(len(spread)) < 0.4, 4.0, 0.0)
        return values, []

    case = Case(StragglerInferred, unhooked.NAMES, unhooked.topology, instant, frozenset(), fault=60)
    assert case.run_detector(StragglerInferred(), range(200)) == []


@pytest.mark.parametrize("limit", [700.0, np.nan])
def test_a_busy_gpu_at_its_limit_whose_peers_wait_is_found_without_compute_times(limit):
    def instant(tick, broken, rng):
        values = unhooked.healthy_values(tick, rng)
        gpu, waits = values["gpu"], np.arange(unhooked.SIZE) != unhooked.GUILTY
        gpu["gpu.power_limit"] = np.full(unhooked.SIZE, limit)
        if broken:
            gpu["gpu.sm_active"][waits] *= 0.8
            gpu["gpu.power"][waits] *= 0.8
            gpu["gpu.throttle_reasons"][~waits] = 4.0
        return values, []

    case = Case(StragglerInferred, unhooked.NAMES, unhooked.topology, instant, frozenset(), fault=60)
    found = case.run_detector(StragglerInferred(), range(200))
    assert {f.entity for f in found} == {unhooked.GPUS[unhooked.GUILTY]}


def waiting_job(capped, slow=(), limits=True, bits=0x4):
    """Findings where only power shows activity: GPUs under a cap of 500 W, then the whole job waits half of its time,
    for `slow` ones if there are any."""

    def instant(tick, broken, rng):
        values = unhooked.healthy_values(tick, rng)
        gpu = values["gpu"]
        del gpu["gpu.sm_active"]
        if limits:
            gpu["gpu.power_limit"] = np.where(np.isin(np.arange(unhooked.SIZE), capped), 500.0, 700.0)
        if broken:
            gpu["gpu.power"][~np.isin(np.arange(unhooked.SIZE), slow)] *= 0.76
        else:
            gpu["gpu.power"][capped] = np.minimum(gpu["gpu.power"][capped], 500.0)
            gpu["gpu.throttle_reasons"][capped] = bits
        return values, []

    case = Case(StragglerInferred, unhooked.NAMES, unhooked.topology, instant, frozenset(), fault=200)
    return case.run_detector(at_known_site(StragglerInferred()), range(330))


@pytest.mark.parametrize("gpus", [[5], [4, 5, 6, 7]])
@pytest.mark.parametrize(("limits", "bits"), [(True, 0x4), (True, 0), (False, 0x4)])
def test_gpus_that_were_capped_are_not_busier_once_their_job_waits(gpus, limits, bits):
    assert waiting_job(gpus, limits=limits, bits=bits) == []


@pytest.mark.parametrize("slow", [5, 9])
def test_a_gpu_for_which_its_job_waits_pages_beside_one_that_was_capped_and_if_it_was_itself(slow):
    found = waiting_job([5], [slow])
    assert {f.entity for f in found if f.level == "page"} == {unhooked.GPUS[slow]}
