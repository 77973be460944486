"""Silent data corruption of simulated GPUs: its signs in canaries and training, and its undetected share."""

from __future__ import annotations

import numpy as np
import pytest

from agents.sim.chunk import Chunk
from agents.sim.faults.corruption import SilentDataCorruption
from agents.sim.faults.kind import DAY, Fault
from agents.sim.fleet import FleetSimulator
from agents.sim.layout import Layout
from agents.sim.physics.noise import generator
from agents.sim.scenario import Fleet, Line, Scenario
from benchmarks.detection.judge import judge
from detectors.sdc.sdc import SdcVote

ONSET, END = 1200.0, 4800.0
GPU, DEVICE = "gpu:sim-n002.3", 11


def simulate_fault(kind: SilentDataCorruption, seed: int = 1, hours: float = 2.0) -> tuple[FleetSimulator, list[Chunk]]:
    scenario = Scenario(hours * 3600, 10.0, None, Fleet(4, 8), (Line(kind, ONSET, END, GPU),))
    simulator = FleetSimulator(scenario, seed)
    return simulator, list(simulator.chunks())


def digests(simulator: FleetSimulator, chunks: list[Chunk]) -> list[tuple[float, bool]]:
    """(second, whether it was right) of the reported rounds of the defective GPU."""
    found = [e for c in chunks for _, e in c.events if e.kind == "digest" and e.entity == GPU]
    return [((e.time - simulator.start) / 1e6, e.data["digest"] == e.data["expected"]) for e in found]


def fault(kind: SilentDataCorruption, number: int = 1, end: float = 30 * DAY) -> Fault:
    return Fault(number, kind, GPU, DEVICE, 0.0, end, (7, number))


def test_wrong_rounds_are_reported_immediately_and_right_ones_for_twelve_rounds_after_them() -> None:
    simulator, chunks = simulate_fault(SilentDataCorruption(probability=0.3), hours=2.5)
    reported = digests(simulator, chunks)
    wrong = [time for time, right in reported if not right]
    assert 3 <= len(wrong) <= 16
    assert ONSET <= wrong[0] < wrong[-1] < END
    after = [time for time, _ in reported if time > wrong[-1]]
    assert after[:12] == [wrong[-1] + 120.0 * (k + 1) for k in range(12)]
    assert len(after) <= 13


def test_a_wrong_round_has_the_known_and_the_wrong_answer() -> None:
    _, chunks = simulate_fault(SilentDataCorruption(probability=1.0))
    found = [e.data for c in chunks for _, e in c.events if e.kind == "digest" and e.data.get("wrong")]
    assert {tuple(d["wrong"]) for d in found} == {(d["canary"],) for d in found}
    assert all(d["golden"] is False and d["again"] == 3 for d in found)
    assert len({d["digest"] for d in found}) == len(found)


@pytest.mark.slow
def test_the_detector_pages_for_the_defective_gpu_and_for_no_other() -> None:
    line = Line(SilentDataCorruption(probability=0.5), ONSET, END, GPU)
    scenario = Scenario(7200.0, 10.0, None, Fleet(4, 8), (line,))
    found = [f for f in judge(scenario, 3).findings if f.detector == SdcVote.name]
    assert {f.entity for f in found} == {GPU}
    assert "page" in {f.level for f in found}


def test_block_boundaries_change_no_round() -> None:
    kind = SilentDataCorruption(probability=0.4)
    simulator, chunks = simulate_fault(kind)
    again = FleetSimulator(simulator.scenario, 1)
    assert digests(simulator, chunks) == digests(again, list(again.chunks(7)))


def test_rounds_fail_at_the_rate_of_their_kernels() -> None:
    kind = SilentDataCorruption(decades=-4.0, reached="yes", failure="none")
    rounds = kind.failed_rounds(fault(kind, end=DAY))
    assert rounds.mean() == pytest.approx(1 - (1 - 1e-4) ** 520, abs=0.02)
    later = kind.error_probabilities(fault(kind))
    assert later[-1] / later[0] == pytest.approx(2, rel=0.1)  # doubles within a month


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        (SilentDataCorruption(decades=-1.0, reached="yes", failure="none"), "hard"),
        (SilentDataCorruption(decades=-1.0, reached="no", failure="none"), "invisible"),
        (SilentDataCorruption(decades=-12.0, reached="yes", failure="none"), "invisible"),
        (SilentDataCorruption(decades=-1.0, reached="no", failure="jump"), "soft"),
        (SilentDataCorruption(probability=0.5, decades=-8.0, reached="no", failure="jump"), "hard"),
        (SilentDataCorruption(probability=0.0), "invisible"),
    ],
)
def test_the_visibility_of_a_defect_follows_from_canaries_and_training(
    kind: SilentDataCorruption, verdict: str
) -> None:
    assert kind.truth_class(fault(kind), Layout(4, 8)) == verdict
    assert (kind.detectable_from(fault(kind)) < 30 * DAY) == (verdict != "invisible")


def test_canaries_alone_find_about_a_third_of_all_defects_within_a_month() -> None:
    kinds = [SilentDataCorruption().drawn(generator(1, n)) for n in range(400)]
    seen = [kind.failed_rounds(fault(kind, n)).any() for n, kind in enumerate(kinds)]
    assert np.mean(seen) == pytest.approx(0.36, abs=0.06)  # argued from the same figures: 36 %
    assert np.mean([kind.failure != "none" for kind in kinds]) == pytest.approx(0.17, abs=0.05)


def failing(failure: str) -> tuple[FleetSimulator, list[Chunk], float]:
    """A fleet in which training shows the defect within the recording, and when it does."""
    kind = SilentDataCorruption(decades=-8.0, reached="no", failure=failure)
    for seed in range(40):
        scenario = Scenario(7200.0, 10.0, None, Fleet(2, 8), (Line(kind, ONSET, END, "gpu:sim-n001.3"),))
        simulator = FleetSimulator(scenario, seed)
        moment = simulator.faults[0].kind.failure_time(simulator.faults[0])
        if moment < END - 100:
            return simulator, list(simulator.chunks()), moment
    raise AssertionError("no seed of 40 shows it; wanted about 6")


def norms(chunks: list[Chunk], rank: int) -> np.ndarray:
    return np.concatenate([c.columns["rank"]["rank.gradient_norm"][:, rank] for c in chunks])


def test_the_gradient_of_the_defective_rank_alone_jumps() -> None:
    simulator, chunks, moment = failing("jump")
    mine, other = norms(chunks, 3), norms(chunks, 4)
    ratio = mine / other
    high = np.flatnonzero(ratio > 2.5) * 10.0
    assert 1 <= len(high) <= 3
    assert moment <= high[0] <= high[-1] <= moment + 40
    assert simulator.truth()[0]["class"] == "soft"
    assert [s.end for s in simulator.schedule.allocations] == [np.inf]


def test_a_nan_gradient_ends_the_job() -> None:
    simulator, chunks, moment = failing("nonfinite")
    assert np.isnan(norms(chunks, 3)[int(moment // 10) : int(moment // 10) + 4]).any()
    assert simulator.schedule.allocations[0].end == moment + 30.0
    found = [c.columns["rank"]["rank.nonfinite"][-1] for c in chunks if c.times[-1] < simulator.time_at(moment + 60)]
    last = next(c for c in chunks if c.times[0] <= simulator.time_at(moment + 20) <= c.times[-1])
    counted = last.columns["rank"]["rank.nonfinite"]
    assert all(not rows.any() for rows in found[:-1])
    assert np.flatnonzero(counted.max(axis=0)).tolist() == [3]
    assert 1 <= counted[:, 3].max() <= 4
