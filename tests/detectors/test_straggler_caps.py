"""Power caps that cut through a cohort and overlap: who is held, for how long, and who learns anew."""

from __future__ import annotations

import copy

import numpy as np

from detectors.straggler.power_caps import CapEffects, PowerCaps

GROUPS = np.zeros(40, np.int32)
ALL = np.ones(40, bool)
NODE = np.arange(40) < 8


def after(caps: PowerCaps, capped: np.ndarray, samples: int = 30) -> CapEffects:
    return [caps.update(capped, GROUPS, ALL, ALL) for _ in range(samples)][-1]


def test_nobody_is_held_while_nothing_is_capped_or_all_are():
    caps = PowerCaps()
    assert not after(caps, ~ALL).hold.any()
    assert not after(caps, ALL).hold.any()


def test_several_under_a_cap_of_their_own_are_held_at_once_and_one_alone_never():
    caps = PowerCaps()
    after(caps, ~ALL)
    assert caps.update(NODE, GROUPS, ALL, ALL).hold.tolist() == NODE.tolist()
    one = PowerCaps()
    after(one, ~ALL)
    assert not after(one, np.arange(40) == 3).hold.any()


def test_who_was_apart_is_held_until_its_own_cap_is_gone_and_keeps_what_it_learnt():
    caps = PowerCaps()
    after(caps, ~ALL)
    after(caps, NODE)
    assert after(caps, ALL).hold.tolist() == NODE.tolist()
    told = [caps.update(~ALL, GROUPS, ALL, ALL) for _ in range(30)]
    assert not told[-1].hold.any()
    assert not any(ruling.relearn for ruling in told)


def test_who_learnt_apart_from_its_cohort_learns_anew_when_that_ends():
    caps = PowerCaps()
    after(caps, NODE)
    told = [caps.update(~ALL, GROUPS, ALL, ALL) for _ in range(30)]
    assert sorted({slot for ruling in told for slot in ruling.relearn}) == list(range(8))
    assert not told[-1].hold.any()


def test_who_learnt_under_a_cap_with_all_its_cohort_learns_anew_when_its_own_is_the_last_to_go():
    caps = PowerCaps()
    after(caps, ALL)
    assert after(caps, NODE).hold.tolist() == NODE.tolist()
    told = [caps.update(~ALL, GROUPS, ALL, ALL) for _ in range(30)]
    assert sorted({slot for ruling in told for slot in ruling.relearn}) == list(range(8))
    assert not told[-1].hold.any()


def test_what_was_learnt_under_a_cap_is_learnt_over_time_to_be_without_one():
    caps = PowerCaps()
    after(caps, ALL)
    after(caps, ~ALL, 10_000)
    after(caps, NODE)
    assert not any(caps.update(~ALL, GROUPS, ALL, ALL).relearn for _ in range(30))


def test_a_snapshot_goes_on_as_if_nothing_had_happened():
    caps, other = PowerCaps(), PowerCaps()
    after(caps, ~ALL)
    after(caps, NODE, 2)
    other.restore(copy.deepcopy(caps.snapshot()))
    assert after(caps, NODE).hold.tolist() == after(other, NODE).hold.tolist()
    assert caps.relative.tolist() == other.relative.tolist()
