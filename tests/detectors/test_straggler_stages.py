"""Small stages: a stage with more work does not page; a rank that is slower than its stage does."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.straggler.straggler import Straggler
from pipeline.model.records import SECOND, Frame
from pipeline.model.topology import Topology

START = 1_790_000_000 * SECOND
SINCE = 80


def findings(nodes, width, stages, slow, factor=1.15, ticks=240, bits=0, pressed=None):
    """Findings of a job whose ranks `slow` compute longer from tick SINCE on; ranks fill nodes and stages in order.

    pressed: node whose tasks wait for processors for half of the time from then on.
    """
    size, rng, detector, found = nodes * width, np.random.default_rng(3), Straggler(), []
    stage = np.arange(size) * stages // size
    ranks = tuple(f"rank:7.{i}" for i in range(size))
    gpus = tuple(f"gpu:n{i // width}.{i % width}" for i in range(size))
    hosts = tuple(f"node:n{n}" for n in range(nodes))
    parents = {gpu: [f"node:n{i // width}"] for i, gpu in enumerate(gpus)}
    parents |= {rank: [f"stage:7.{stage[i]}", "job:7", gpus[i]] for i, rank in enumerate(ranks)}
    topology = Topology({**parents, **{f"stage:7.{s}": ["job:7"] for s in range(stages)}})
    for tick in range(ticks):
        compute = 20.0 * (1 + 0.05 * stage) * np.exp(0.02 * rng.standard_normal(size))
        throttle = np.zeros(size)
        if tick >= SINCE:
            compute[list(slow)] *= factor
            throttle[list(slow)] = bits
        waited = np.full(nodes, 1e9)
        if pressed is not None:
            waited[pressed] += 5e6 * max(tick - SINCE, 0)
        time = START + tick * 10 * SECOND
        values = {"rank.compute_time": compute, "rank.step": np.full(size, 8.0 * tick)}
        frames = {
            "rank": Frame(time, "rank", ranks, values, topology),
            "gpu": Frame(time, "gpu", gpus, {"gpu.throttle_reasons": throttle}, topology),
            "node": Frame(time, "node", hosts, {"node.cpu_pressure": waited}, topology),
        }
        found += detector.observe(frames)
    return found


def levels(found):
    return {(f.entity, f.level) for f in found}


@pytest.mark.parametrize("factor", [1.06, 1.15, 1.5])
def test_a_slow_stage_of_one_rank_does_not_page(factor):
    found = findings(8, 1, 8, [2], factor)
    assert levels(found) == {("rank:7.2", "suspect")}
    assert "no peer to compare" in found[-1].summary


@pytest.mark.parametrize("factor", [1.06, 1.15, 1.5])
def test_a_slow_stage_of_two_ranks_does_not_page(factor):
    found = findings(8, 4, 16, [4, 5], factor)
    assert {f.level for f in found} == {"suspect"}
    assert "all of its stage is slow" in found[-1].summary


def test_a_slow_stage_of_two_ranks_on_two_nodes_does_not_page():
    assert {f.level for f in findings(32, 1, 16, [4, 5])} <= {"suspect"}


@pytest.mark.slow
def test_a_slow_stage_of_one_rank_pages_if_its_gpu_throttles():
    assert ("rank:7.2", "page") in levels(findings(8, 1, 8, [2], bits=0x40))


def test_the_slower_rank_of_a_stage_of_two_pages_as_all_of_the_job_are_its_peers():
    found = levels(findings(8, 4, 16, [28], 1.3))
    assert ("rank:7.28", "page") in found
    assert {entity for entity, _ in found} == {"rank:7.28"}


@pytest.mark.parametrize("stages", [4, 8])
def test_a_slow_stage_on_one_node_does_not_page(stages):
    found = findings(4, 8, stages, range(8, 8 + 32 // stages))
    assert levels(found) == {("node:n1", "suspect")}
    assert "no other node to compare" in found[-1].summary


def test_a_slow_stage_of_four_ranks_on_four_nodes_gives_no_finding():
    assert findings(32, 1, 8, [4, 5, 6, 7]) == []


@pytest.mark.slow
def test_healthy_stages_of_two_ranks_give_no_finding():
    assert findings(8, 1, 4, [], ticks=600) == []


def test_the_numbers_of_the_evidence_agree_and_the_spread_is_in_seconds():
    for finding in findings(8, 4, 2, [5], 1.1):
        seen = finding.evidence
        assert seen["effect"] >= 0.015
        assert seen["value"] / seen["expected"] - 1 == pytest.approx(seen["effect"], abs=1e-6)
        assert seen["slowdown"] - 1 == pytest.approx(seen["effect"], abs=1e-3)
        assert 0.005 <= seen["spread"] / seen["expected"] <= 0.06, "as a share it would be a thousandth of that"


def late_learners(slow, ticks, detector=None, nodes=(0, 1, 2)):
    """Findings of a job of three stages of three nodes each; `nodes` are slow while `slow(tick)`.

    Two nodes of the first stage learn only from tick 120 on.
    """
    rng, detector, found = np.random.default_rng(3), detector or Straggler(), []
    ranks, gpus = tuple(f"rank:7.{i}" for i in range(36)), tuple(f"gpu:n{i // 4}.{i % 4}" for i in range(36))
    stage = np.arange(36) // 12
    parents = {rank: [f"stage:7.{stage[i]}", "job:7", gpus[i]] for i, rank in enumerate(ranks)}
    topology = Topology({**parents, **{gpu: [f"node:n{i // 4}"] for i, gpu in enumerate(gpus)}})
    for tick in ticks:
        compute = 20.0 * (1 + 0.05 * stage) * np.exp(0.005 * rng.standard_normal(36))
        compute[np.isin(np.arange(36) // 4, nodes)] *= 1.15 if slow(tick) else 1.0
        compute[4:12] = np.nan if tick < 120 else compute[4:12]
        values = {"rank.compute_time": compute, "rank.step": np.where(np.isfinite(compute), 8.0 * tick, np.nan)}
        found += detector.observe({"rank": Frame(START + tick * 10 * SECOND, "rank", ranks, values, topology)})
    return found


def test_ranks_that_learned_in_a_slow_stage_blame_none_of_its_nodes():
    found = late_learners(lambda tick: tick >= SINCE, range(400))
    assert "page" not in {f.level for f in found}


@pytest.mark.slow
def test_a_slow_rank_that_learned_late_is_still_found_after_a_pause_of_its_job():
    rng, detector, found = np.random.default_rng(3), Straggler(), []
    ranks, gpus = tuple(f"rank:7.{i}" for i in range(16)), tuple(f"gpu:n{i // 4}.{i % 4}" for i in range(16))
    parents = {rank: ["stage:7.0", "job:7", gpus[i]] for i, rank in enumerate(ranks)}
    topology = Topology({**parents, **{gpu: [f"node:n{i // 4}"] for i, gpu in enumerate(gpus)}})
    for tick in range(270):
        compute = 4.0 * np.exp(0.01 * rng.standard_normal(16))
        compute[5] *= 1.15 if tick >= 45 else 1.0
        compute[9] *= 1.15 if tick >= 95 else 1.0
        compute[8:12] = np.nan if tick < 60 else compute[8:12]  # these four learn while rank 5 is slow
        compute[:] = np.nan if 165 <= tick < 179 else compute  # an evaluation
        steps = np.where(np.isfinite(compute), 2000.0 + 2.0 * tick, np.nan)
        values = {"rank.compute_time": compute, "rank.step": steps}
        found += detector.observe({"rank": Frame(START + tick * 10 * SECOND, "rank", ranks, values, topology)})
    late = [f for f in found if f.time > START + 250 * 10 * SECOND]
    assert {f.entity for f in late} == {"rank:7.5", "rank:7.9"}


@pytest.mark.parametrize(("width", "stages"), [(8, 5), (8, 4)])
def test_a_host_that_starves_most_of_a_stage_pages_its_node(width, stages):
    """No other rank of the stage is left to compare it with: the rest of the job is, and the host shows why."""
    nodes = 5 if stages == 5 else 6
    found = findings(nodes, width, stages, range(8, 16), 1.3, pressed=1)
    assert ("node:n1", "page") in levels(found)
    assert "tasks wait for CPU" in next(f for f in found if f.level == "page").summary
