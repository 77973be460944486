"""Power cap bits that come and go under full load, and steps of minutes: who is slow is found all the same."""

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
    """What is ruled of GPUs that are under a cap for such shares of the time, sample by sample."""
    return [caps.update(rng.random(SIZE) < share, GROUPS, ALL, ALL) for _ in range(samples)]


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9, 0.95])
def test_bits_that_flicker_as_ever_hold_hardly_anybody(share):
    caps, rng = PowerCaps(), np.random.default_rng(1)
    after(caps, share, rng, 150)
    held = np.array([ruling.hold for ruling in after(caps, share, rng, 500)])
    assert held.mean() < 0.01


@pytest.mark.parametrize("share", [0.15, 0.3, 0.5])
def test_a_cap_that_holds_for_good_where_bits_flicker_is_seen_within_a_hold_and_ends(share):
    caps, rng = PowerCaps(), np.random.default_rng(1)
    after(caps, share, rng, 200)
    capped = after(caps, np.where(NODES, 1.0, share), rng, 300)
    assert all(ruling.hold[NODES].mean() > 0.9 for ruling in capped[60:])
    assert np.array([ruling.hold[~NODES] for ruling in capped]).mean() < 0.01
    assert not after(caps, share, rng, 100)[-1].hold.any()


def test_a_cap_whose_bit_flickers_where_none_did_holds_whom_it_slows():
    caps, rng = PowerCaps(), np.random.default_rng(1)
    after(caps, 0.0, rng, 200)
    held = np.array([ruling.hold for ruling in after(caps, np.where(NODES, 0.8, 0.0), rng, 300)])
    assert held[20:, NODES].mean() > 0.95
    assert not held[:, ~NODES].any()


def test_a_gpu_that_does_not_flicker_is_under_a_cap_as_its_bit_says():
    flicker, rng = CapFlicker(), np.random.default_rng(1)
    for _ in range(150):
        flicker.update((rng.random(SIZE) < 0.5) & (np.arange(SIZE) > 7), ALL, ALL)
    capped, turned = flicker.update(ALL, ALL, ALL)
    assert capped.tolist() == (np.arange(SIZE) <= 7).tolist()
    assert not turned.any()


def test_what_flickers_is_known_again_after_a_restart_and_forgotten_with_its_gpu():
    caps, other, rng = PowerCaps(), PowerCaps(), np.random.default_rng(1)
    after(caps, 0.5, rng, 150)
    other.restore(copy.deepcopy(caps.snapshot()))
    bits = rng.random(SIZE) < 0.5
    one, two = caps.update(bits, GROUPS, ALL, ALL), other.update(bits, GROUPS, ALL, ALL)
    assert (one.hold.tolist(), one.doubt.tolist()) == (two.hold.tolist(), two.doubt.tolist())
    caps.reset_slots([3])
    assert np.flatnonzero(caps.flicker.unlearned(SIZE)).tolist() == [3]


def found(share, change, ticks=300):
    """What is told of a job whose GPUs are under a cap for that share of the time; change(rng, values) from 150 on."""

    def instant(tick, broken, rng):
        values = site.quiet(tick, rng)
        values["gpu"]["gpu.throttle_reasons"] = np.where(rng.random(site.SIZE) < share, 4.0, 0.0)
        if broken:
            change(rng, values)
        return values, []

    case = Case(Straggler, site.NAMES, site.topology, instant, frozenset(), fault=150)
    return case.shown(Straggler(), range(ticks))


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
def test_a_lower_cap_of_a_node_pages_nobody_where_bits_flicker(share, power):
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
        values, number = site.quiet(tick, rng), tick * 10 // seconds
        if number != last[0]:
            made.update(values["rank"])
            last[0] = number
            if broken:
                made["rank.compute_time"][SLOW] *= 1.15
        values["rank"] = {name: column.copy() for name, column in made.items()}
        values["rank"]["rank.step"][:] = 1000.0 + number
        return values, []

    learnt = 40 * seconds // 10
    case = Case(Straggler, site.NAMES, site.topology, instant, frozenset(), fault=learnt)
    findings = case.shown(Straggler(), range(learnt + 30 * seconds // 10))
    assert {f.entity for f in findings} == {site.RANKS[SLOW]}
    page = next(f for f in findings if f.level == "page")
    assert 600 <= (page.time - page.onset) / SECOND <= 15 * seconds
