"""Small stages: a stage that gets more work is no slow rank, and a rank that is slow beside its stage is one."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.straggler.straggler import Straggler
from pipeline.records import SECOND, Frame
from pipeline.topology import Topology

START = 1_790_000_000 * SECOND
SINCE = 80


def shown(nodes, width, stages, slow, factor=1.15, ticks=240, bits=0):
    """Findings of a job whose ranks `slow` compute longer from SINCE on; ranks fill nodes, and stages, in order."""
    size, rng, detector, found = nodes * width, np.random.default_rng(3), Straggler(), []
    stage = np.arange(size) * stages // size
    ranks = tuple(f"rank:7.{i}" for i in range(size))
    gpus = tuple(f"gpu:n{i // width}.{i % width}" for i in range(size))
    parents = {gpu: [f"node:n{i // width}"] for i, gpu in enumerate(gpus)}
    parents |= {rank: [f"stage:7.{stage[i]}", "job:7", gpus[i]] for i, rank in enumerate(ranks)}
    topology = Topology({**parents, **{f"stage:7.{s}": ["job:7"] for s in range(stages)}})
    for tick in range(ticks):
        compute = 20.0 * (1 + 0.05 * stage) * np.exp(0.02 * rng.standard_normal(size))
        throttle = np.zeros(size)
        if tick >= SINCE:
            compute[list(slow)] *= factor
            throttle[list(slow)] = bits
        time = START + tick * 10 * SECOND
        values = {"rank.compute_time": compute, "rank.step": np.full(size, 8.0 * tick)}
        frames = {
            "rank": Frame(time, "rank", ranks, values, topology),
            "gpu": Frame(time, "gpu", gpus, {"gpu.throttle_reasons": throttle}, topology),
        }
        found += detector.observe(frames)
    return found


def told(found):
    return {(f.entity, f.level) for f in found}


@pytest.mark.parametrize("factor", [1.06, 1.15, 1.5])
def test_a_stage_of_one_rank_that_is_slow_wakes_nobody(factor):
    found = shown(8, 1, 8, [2], factor)
    assert told(found) == {("rank:7.2", "suspect")}
    assert "its stage has no other rank, so the stage itself may be slow" in found[-1].summary


@pytest.mark.parametrize("factor", [1.06, 1.15, 1.5])
def test_a_stage_of_two_ranks_that_is_slow_wakes_nobody(factor):
    found = shown(8, 4, 16, [4, 5], factor)
    assert {f.level for f in found} == {"suspect"}
    assert "all ranks of its stage are slow, so the stage itself may be slow" in found[-1].summary


def test_a_stage_of_two_ranks_on_two_nodes_that_is_slow_wakes_nobody():
    assert {f.level for f in shown(32, 1, 16, [4, 5])} == {"suspect"}


def test_a_stage_of_one_rank_whose_gpu_shows_why_pages():
    assert ("rank:7.2", "page") in told(shown(8, 1, 8, [2], bits=0x40))


def test_one_rank_of_a_stage_of_two_that_is_slow_beside_the_other_is_blamed():
    assert told(shown(8, 4, 16, [4])) == {("rank:7.4", "suspect"), ("rank:7.4", "page")}


@pytest.mark.parametrize("stages", [4, 8])
def test_a_stage_that_is_one_node_wakes_nobody(stages):
    found = shown(4, 8, stages, range(8, 8 + 32 // stages))
    assert told(found) == {("node:n1", "suspect")}
    assert "its stage has no other node" in found[-1].summary


def test_a_stage_of_four_ranks_on_four_nodes_that_is_slow_blames_nobody():
    assert shown(32, 1, 8, [4, 5, 6, 7]) == []


def test_stages_of_two_ranks_blame_nobody_while_all_is_well():
    assert shown(8, 1, 4, [], ticks=600) == []


def test_the_numbers_of_a_sentence_agree_and_the_spread_is_in_seconds():
    for finding in shown(8, 4, 2, [5], 1.1):
        seen = finding.evidence
        assert seen["effect"] >= 0.015
        assert seen["value"] / seen["expected"] - 1 == pytest.approx(seen["effect"], abs=1e-6)
        assert seen["slowdown"] - 1 == pytest.approx(seen["effect"], abs=1e-3)
        assert 0.005 <= seen["spread"] / seen["expected"] <= 0.04
