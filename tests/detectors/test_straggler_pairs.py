"""A job of two nodes: the slowdown in a finding is measured against the other node, not the median of both."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.straggler.straggler import Straggler
from pipeline.model.topology import Topology
from tests.detectors.cases.case import Case, at_known_site

WIDTH, SIZE, SINCE = 8, 16, 120
RANKS = tuple(f"rank:7.{i}" for i in range(SIZE))
GPUS = tuple(f"gpu:n{i // WIDTH}.{i % WIDTH}" for i in range(SIZE))


def topology():
    gpus = {gpu: [f"node:n{i // WIDTH}"] for i, gpu in enumerate(GPUS)}
    return Topology(
        {**gpus, "stage:7.0": ["job:7"], **{r: ["stage:7.0", "job:7", GPUS[i]] for i, r in enumerate(RANKS)}}
    )


def findings(factor, heat=False, slow=WIDTH):
    """Findings: the first `slow` ranks compute `factor` times as long from tick SINCE on."""

    def instant(tick, broken, rng):
        compute, clock, bits = 4.0 * (1 + 0.005 * rng.standard_normal(SIZE)), np.full(SIZE, 1755.0), np.zeros(SIZE)
        if broken:
            compute[:slow] *= factor
            if heat:
                clock[:slow] /= factor
                bits[:slow] = 0x40
        ranks = {"rank.step": np.full(SIZE, 1000.0 + 2 * tick), "rank.compute_time": compute}
        return {"rank": ranks, "gpu": {"gpu.sm_clock": clock, "gpu.throttle_reasons": bits}}, []

    names = {"rank": RANKS, "gpu": GPUS}
    return Case(Straggler, names, topology, instant, frozenset(), fault=SINCE).run_detector(
        at_known_site(Straggler()), range(SINCE + 240)
    )


@pytest.mark.parametrize("factor", [1.1, 1.15, 1.5])
def test_the_slow_node_is_compared_with_the_other(factor):
    page = findings(factor)[-1]
    assert (page.entity, page.level) == ("node:n0", "page")
    assert page.evidence["effect"] == pytest.approx(factor - 1, abs=0.025)
    assert page.evidence["slowdown"] == pytest.approx(factor, abs=0.025)
    assert page.evidence["expected"] == pytest.approx(4.0, abs=0.04)
    assert page.evidence["peers"] == WIDTH


def test_the_clock_of_the_slow_node_is_compared_with_the_other():
    page = findings(1.15, heat=True)[-1]
    assert "SM clock 13 % below" in page.evidence["cause"]
    assert page.evidence["sm_clock_below_peers"] == pytest.approx(1 - 1 / 1.15, abs=0.01)


def test_one_slow_rank_of_two_nodes_is_compared_with_the_median():
    found = findings(1.15, slow=1)
    assert found[-1].evidence["effect"] == pytest.approx(0.15, abs=0.03)
    assert found[-1].evidence["peers"] == SIZE - 1


def test_a_node_of_two_that_is_a_little_slow_never_pages_as_the_detector_documents():
    assert "page" not in {f.level for f in findings(1.05)}
    assert "two-node job" in Straggler.cannot_see
