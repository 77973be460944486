"""Memory of simulated GPUs: the errors of a healthy fleet, and those of faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agents.sim.chunk import Chunk
from agents.sim.faults.kind import Kind
from agents.sim.faults.memory import HbmContained, HbmCorrectedBurst, HbmUncontained, RemapFailure, SramEcc
from agents.sim.fleet import FleetSimulator
from agents.sim.scenario import Fleet, Line, Scenario

ONSET, END = 1200.0, 3000.0
GPU, DEVICE = "gpu:sim-n002.3", 11
COUNTERS = (
    *("dram_corrected", "dram_uncorrected", "sram_corrected", "sram_uncorrected", "ecc_corrected", "ecc_uncorrected"),
    *("rows_corrected", "rows_uncorrected"),
)


def simulate_fault(kind: Kind | None, end: float = END, hours: float = 1.0, interval: float = 10.0) -> Any:
    lines = () if kind is None else (Line(kind, ONSET, end, GPU),)
    simulator = FleetSimulator(Scenario(hours * 3600, interval, None, Fleet(4, 8), lines), 1)
    return simulator, list(simulator.chunks())


def column(chunks: list[Chunk], name: str, device: int | slice = DEVICE) -> np.ndarray:
    return np.concatenate([c.columns["gpu"][f"gpu.{name}"][:, device] for c in chunks]).astype(np.int64)


def steps(chunks: list[Chunk], name: str) -> dict[float, int]:
    """Seconds at which a column of the GPU changes -> by how much, where it rises."""
    change = np.diff(column(chunks, name))
    return {10.0 * (k + 1): int(change[k]) for k in np.flatnonzero(change > 0)}


def xids(chunks: list[Chunk]) -> list[dict[str, Any]]:
    return [dict(e.data) for c in chunks for _, e in c.events if e.kind == "xid"]


@pytest.mark.slow
def test_healthy_memory_has_a_few_corrected_errors_and_no_others() -> None:
    simulator = FleetSimulator(Scenario(7 * 86_400.0, 600.0, None, Fleet(32, 8)), 3)
    chunks = list(simulator.chunks())
    every = slice(None)
    grown = column(chunks, "dram_corrected", every)[-1] - column(chunks, "dram_corrected", every)[0]
    assert grown.sum() == pytest.approx(0.005 * 24 * 7 * 256, rel=0.35)
    assert np.sort(grown)[-26:].sum() > 0.4 * grown.sum()  # a tenth of the GPUs has much of it
    for name in ("dram_uncorrected", "sram_uncorrected", "ecc_uncorrected", "rows_corrected", "rows_uncorrected"):
        assert np.ptp(column(chunks, name, every), axis=0).max() == 0
    for name in ("rows_pending", "rows_failed"):
        assert column(chunks, name, every).max() == 0


def test_total_memory_counters_are_the_sums_of_their_parts_and_never_decrease() -> None:
    _, chunks = simulate_fault(SramEcc(corrected=100.0), 3600.0)
    for what in ("corrected", "uncorrected"):
        parts = column(chunks, f"dram_{what}") + column(chunks, f"sram_{what}")
        assert np.array_equal(parts, column(chunks, f"ecc_{what}"))
    for name in COUNTERS:
        assert np.diff(column(chunks, name, slice(None)), axis=0).min() >= 0


def test_faults_change_no_other_gpus_memory() -> None:
    _, sound = simulate_fault(None)
    _, chunks = simulate_fault(HbmUncontained(errors=3.0))
    others = np.delete(np.arange(32), DEVICE)
    for name in COUNTERS:
        assert np.array_equal(column(chunks, name, others), column(sound, name, others))


@pytest.mark.slow
def test_a_burst_of_corrected_errors_is_uneven_and_remaps_a_row() -> None:
    simulator, chunks = simulate_fault(HbmCorrectedBurst(decades=4.0), 1200.0 + 40 * 3600, 48.0, 60.0)
    fault = simulator.faults[0]
    moments = fault.kind.flap_times(fault)
    counts = np.histogram(moments, ONSET + 3600.0 * np.arange(41))[0]
    assert counts.mean() == pytest.approx(50, rel=0.5)
    assert counts.var() > 10 * counts.mean()
    values = column(chunks, "dram_corrected")
    assert values[int(ONSET / 60)] == values[0]
    remap = fault.kind.remap_time(fault)
    assert remap is not None
    assert column(chunks, "rows_corrected")[-1] == column(chunks, "rows_corrected")[0] + 1
    pending = np.flatnonzero(column(chunks, "rows_pending")) * 60.0
    assert pending[0] == np.ceil(remap / 60) * 60
    assert pending[-1] == fault.end - 60
    assert [x["xid"] for x in xids(chunks)] == [63]
    assert values[int(fault.end / 60)] <= 2  # the reset restarted the counter
    (line,) = simulator.truth()
    assert line["parameters"]["detectable"] > line["onset"]
    assert line["class"] == "soft"


def test_a_burst_too_faint_for_the_recording_is_invisible() -> None:
    simulator, chunks = simulate_fault(HbmCorrectedBurst(decades=0.0))
    assert simulator.truth()[0]["class"] == "invisible"
    assert xids(chunks) == []


def test_a_contained_error_remaps_a_row_that_waits_for_the_reset() -> None:
    simulator, chunks = simulate_fault(HbmContained(kills="yes", clears="yes"))
    assert [x["xid"] for x in xids(chunks)] == [48, 63, 94]
    assert xids(chunks)[2]["root"]["xid"] == 48
    assert xids(chunks)[0]["detail"]["where"] == "framebuffer"
    assert steps(chunks, "dram_uncorrected") == {ONSET: 1}
    assert steps(chunks, "rows_uncorrected") == {ONSET: 1}
    pending = np.flatnonzero(column(chunks, "rows_pending")) * 10.0
    assert (pending[0], pending[-1], len(pending)) == (ONSET, END - 10, 180)
    assert column(chunks, "ecc_uncorrected")[-1] == 0
    assert column(chunks, "rows_uncorrected")[-1] == column(chunks, "rows_uncorrected")[0] + 1
    reset = [e for c in chunks for _, e in c.events if e.kind == "counter_reset" and e.entity == GPU]
    assert [e.time for e in reset] == [simulator.time_at(END)]
    assert set(reset[0].data["signals"]) >= {"gpu.dram_uncorrected", "gpu.ecc_uncorrected"}
    assert simulator.schedule.allocations[0].end == ONSET + 5.0


def test_a_contained_error_that_kills_nothing_stops_the_job_for_the_reset() -> None:
    simulator, _ = simulate_fault(HbmContained(kills="no", clears="yes"))
    assert simulator.schedule.allocations[0].end == END - 120.0


def test_an_error_that_a_reset_does_not_clear_recurs() -> None:
    _, chunks = simulate_fault(HbmContained(kills="yes", clears="no"))
    assert [x["xid"] for x in xids(chunks)].count(48) == 2
    assert sorted(steps(chunks, "dram_uncorrected")) == [ONSET, (ONSET + END) / 2 + 300.0]
    assert column(chunks, "rows_pending")[120:300].min() == 1


def test_an_uncontained_error_ends_all_programs_on_the_gpu() -> None:
    simulator, chunks = simulate_fault(HbmUncontained(errors=4.9))
    found = xids(chunks)
    assert [x["xid"] for x in found] == [48, 63, 95, 154]
    assert next(x for x in found if x["xid"] == 95)["detail"]["reset_required"] is True
    assert steps(chunks, "dram_uncorrected") == {ONSET: 4}
    assert simulator.schedule.allocations[0].end == ONSET + 5.0


def test_a_failed_row_remap_is_reported_until_the_gpu_is_replaced() -> None:
    simulator, chunks = simulate_fault(RemapFailure(wears=300.0))
    assert [x["xid"] for x in xids(chunks)] == [63] * 8 + [48, 64, 154]
    assert (np.flatnonzero(column(chunks, "rows_failed")) * 10.0 == np.arange(ONSET + 300, END, 10.0)).all()
    assert steps(chunks, "rows_uncorrected") == {}
    rows = column(chunks, "rows_corrected") + column(chunks, "rows_uncorrected")
    assert rows[int(ONSET + 300) // 10] - rows[int(ONSET) // 10 - 1] == 8  # the bank's spare rows, before one fails
    assert column(chunks, "rows_pending")[int(ONSET + 300) // 10] == 1
    assert simulator.schedule.allocations[0].end == ONSET + 305
    assert simulator.truth()[0]["parameters"]["detectable"] == "2026-01-01T00:25:00.000000Z"  # no page before it fails


def test_rows_that_are_remapped_in_time_until_the_recording_ends_need_no_page() -> None:
    simulator, _ = simulate_fault(RemapFailure(wears=1000.0), 86_400.0, hours=0.5)
    assert simulator.truth()[0]["class"] == "invisible"


def test_an_sram_error_is_counted_only_as_sram_error() -> None:
    _, chunks = simulate_fault(SramEcc(corrected=500.0))
    assert [x["xid"] for x in xids(chunks)] == [48, 94, 154]
    assert xids(chunks)[0]["detail"]["where"] == "SM"
    assert steps(chunks, "sram_uncorrected") == {ONSET: 1}
    assert sum(steps(chunks, "sram_corrected").values()) == pytest.approx(500, abs=5)
    assert max(steps(chunks, "sram_corrected")) <= ONSET + 610.0
    assert steps(chunks, "rows_uncorrected") == {}
