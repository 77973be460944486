"""Power caps of a part of a cohort, and overlapping caps: which GPUs are on hold, how long, and which learn again."""

from __future__ import annotations

import copy

import numpy as np

from detectors.straggler.power_caps import CapEffects, PowerCaps

GROUPS = np.zeros(40, np.int32)
ALL = np.ones(40, bool)
NODE = np.arange(40) < 8


def after(caps: PowerCaps, capped: np.ndarray, samples: int = 30) -> CapEffects:
    return [caps.update(capped, GROUPS, ALL, ALL) for _ in range(samples)][-1]


def test_no_gpu_is_on_hold_while_none_or_all_are_capped():
    caps = PowerCaps()
    assert not after(caps, ~ALL).hold.any()
    assert not after(caps, ALL).hold.any()


def test_several_gpus_under_their_own_cap_are_on_hold_and_a_single_one_never():
    caps = PowerCaps()
    after(caps, ~ALL)
    assert caps.update(NODE, GROUPS, ALL, ALL).hold.tolist() == NODE.tolist()
    one = PowerCaps()
    after(one, ~ALL)
    assert not after(one, np.arange(40) == 3).hold.any()


def test_a_hold_lasts_until_the_own_cap_ends_and_keeps_the_baseline():
    caps = PowerCaps()
    after(caps, ~ALL)
    after(caps, NODE)
    assert after(caps, ALL).hold.tolist() == NODE.tolist()
    effects = [caps.update(~ALL, GROUPS, ALL, ALL) for _ in range(30)]
    assert not effects[-1].hold.any()
    assert not any(effect.relearn for effect in effects)


def test_gpus_that_learned_under_their_own_cap_learn_again_when_it_ends():
    caps = PowerCaps()
    after(caps, NODE)
    effects = [caps.update(~ALL, GROUPS, ALL, ALL) for _ in range(30)]
    assert sorted({slot for effect in effects for slot in effect.relearn}) == list(range(8))
    assert not effects[-1].hold.any()


def test_gpus_that_learned_under_a_cap_of_the_cohort_learn_again_when_theirs_ends_last():
    caps = PowerCaps()
    after(caps, ALL)
    assert after(caps, NODE).hold.tolist() == NODE.tolist()
    effects = [caps.update(~ALL, GROUPS, ALL, ALL) for _ in range(30)]
    assert sorted({slot for effect in effects for slot in effect.relearn}) == list(range(8))
    assert not effects[-1].hold.any()


def test_a_baseline_learned_under_a_cap_follows_in_time_once_the_cap_has_ended():
    caps = PowerCaps()
    after(caps, ALL)
    after(caps, ~ALL, 10_000)
    after(caps, NODE)
    assert not any(caps.update(~ALL, GROUPS, ALL, ALL).relearn for _ in range(30))


def test_a_restored_snapshot_continues_the_same():
    caps, other = PowerCaps(), PowerCaps()
    after(caps, ~ALL)
    after(caps, NODE, 2)
    other.restore(copy.deepcopy(caps.snapshot()))
    assert after(caps, NODE).hold.tolist() == after(other, NODE).hold.tolist()
    assert caps.relative.tolist() == other.relative.tolist()
