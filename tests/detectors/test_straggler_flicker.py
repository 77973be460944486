"""Power cap bits that come and go under full load, and steps of minutes: slow ranks are still found."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from detectors.straggler.power_caps import CapEffects, CapFlicker, PowerCaps
from detectors.straggler.straggler import Straggler
from pipeline.model.records import SECOND
from tests.detectors.cases import straggler as site
from tests.detectors.cases.case import Case

SIZE = 64
GROUPS = np.zeros(SIZE, np.int32)
ALL = np.ones(SIZE, bool)
NODES = np.arange(SIZE) < 24
SLOW = 5


def after(caps: PowerCaps, share: float | np.ndarray, rng: np.random.Generator, samples: int) -> list[CapEffects]:
    """The effects of caps on GPUs that are capped for a share of the time, sample by sample."""
    return [caps.update(rng.random(SIZE) < share, GROUPS, ALL, ALL) for _ in range(samples)]


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9, 0.95])
def test_bits_that_flicker_as_usual_hold_under_1_percent(share):
    caps, rng = PowerCaps(), np.random.default_rng(1)
    after(caps, share, rng, 150)
    held = np.array([effect.hold for effect in after(caps, share, rng, 500)])
    assert held.mean() < 0.01


@pytest.mark.parametrize("share", [0.15, 0.3, 0.5])
def test_a_permanent_cap_among_flickering_bits_is_seen_within_60_samples_and_ends(share):
    caps, rng = PowerCaps(), np.random.default_rng(1)
    after(caps, share, rng, 200)
    capped = after(caps, np.where(NODES, 1.0, share), rng, 300)
    assert all(effect.hold[NODES].mean() > 0.9 for effect in capped[60:])
    assert np.array([effect.hold[~NODES] for effect in capped]).mean() < 0.01
    assert not after(caps, share, rng, 100)[-1].hold.any()


def test_a_new_cap_with_a_flickering_bit_holds_the_gpus_that_it_slows():
    caps, rng = PowerCaps(), np.random.default_rng(1)
    after(caps, 0.0, rng, 200)
    held = np.array([effect.hold for effect in after(caps, np.where(NODES, 0.8, 0.0), rng, 300)])
    assert held[20:, NODES].mean() > 0.95
    assert not held[:, ~NODES].any()


def test_a_gpu_whose_bit_does_not_flicker_is_capped_while_its_bit_is_set():
    flicker, rng = CapFlicker(), np.random.default_rng(1)
    for _ in range(150):
        flicker.update((rng.random(SIZE) < 0.5) & (np.arange(SIZE) > 7), ALL, ALL)
    capped, changed = flicker.update(ALL, ALL, ALL)
    assert capped.tolist() == (np.arange(SIZE) <= 7).tolist()
    assert not changed.any()


def test_flicker_is_restored_after_a_restart_and_removed_with_its_gpu():
    caps, other, rng = PowerCaps(), PowerCaps(), np.random.default_rng(1)
    after(caps, 0.5, rng, 150)
    other.restore(copy.deepcopy(caps.snapshot()))
    bits = rng.random(SIZE) < 0.5
    one, two = caps.update(bits, GROUPS, ALL, ALL), other.update(bits, GROUPS, ALL, ALL)
    assert (one.hold.tolist(), one.doubt.tolist()) == (two.hold.tolist(), two.doubt.tolist())
    caps.reset_slots([3])
    assert np.flatnonzero(caps.flicker.unlearned(SIZE)).tolist() == [3]


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


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
def test_a_slow_rank_pages_where_all_power_cap_bits_flicker(share):
    def slower(rng, values):
        values["rank"]["rank.compute_time"][SLOW] *= 1.15

    findings = found(share, slower)
    assert {f.entity for f in findings} == {site.RANKS[SLOW]}
    page = next(f for f in findings if f.level == "page")
    assert 600 <= (page.time - page.onset) / SECOND <= 900


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
    assert 600 <= (page.time - page.onset) / SECOND <= 15 * seconds
