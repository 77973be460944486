"""GPUs that fail suddenly or become slow: the signs of their faults, their times, and the effects on jobs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agents.sim.chunk import Chunk
from agents.sim.faults.gpu import GpuEngineFault, GpuOffBus, GspTimeout
from agents.sim.faults.kind import Kind
from agents.sim.faults.slow import ColdPlate, PcieDowngrade
from agents.sim.fleet import FleetSimulator
from agents.sim.scenario import Fleet, Line, Scenario

ONSET, END = 1200.0, 2400.0
GPU, DEVICE = "gpu:sim-n002.3", 11


def simulate_faults(*kinds: Kind, end: float = END, nodes: int = 4) -> tuple[FleetSimulator, list[Chunk]]:
    lines = tuple(Line(kind, ONSET, end, GPU) for kind in kinds)
    simulator = FleetSimulator(Scenario(3600.0, 10.0, None, Fleet(nodes, 8), lines), 1)
    return simulator, list(simulator.chunks())


def column(chunks: list[Chunk], signal: str, device: int = DEVICE) -> np.ndarray:
    return np.concatenate([c.columns["gpu"][signal][:, device] for c in chunks]).astype(float)


def events_of_kind(
    simulator: FleetSimulator, chunks: list[Chunk], kind: str
) -> list[tuple[float, str, dict[str, Any]]]:
    found = [e for c in chunks for _, e in c.events if e.kind == kind]
    return [((e.time - simulator.start) / 1e6, e.entity, dict(e.data)) for e in found]


def codes(simulator: FleetSimulator, chunks: list[Chunk]) -> list[tuple[int, str]]:
    return [(data["xid"], entity) for _, entity, data in events_of_kind(simulator, chunks, "xid")]


def gone(chunks: list[Chunk], device: int = DEVICE) -> np.ndarray:
    """Seconds at which a GPU has no row."""
    return np.flatnonzero(~np.concatenate([c.present["gpu"][:, device] for c in chunks])) * 10.0


def stays_of(simulator: FleetSimulator) -> list[tuple[float, float]]:
    job = simulator.schedule.job_at(DEVICE, 0.0)
    assert job is not None
    return [(s.begin, s.end) for s in simulator.schedule.allocations if s.job.number == job.job.number]


def test_a_gpu_off_the_bus_disappears_with_the_events_of_driver_and_agent() -> None:
    simulator, chunks = simulate_faults(GpuOffBus(dies_after=30.0))
    assert gone(chunks).tolist() == np.arange(ONSET, END, 10.0).tolist()
    assert codes(simulator, chunks) == [(79, GPU), (154, GPU)]
    (root, after) = (data for _, _, data in events_of_kind(simulator, chunks, "xid"))
    assert root["name"] == "GPU has fallen off the bus"
    assert (root["class"], root["severity"], root["action"]) == ("pcie", "critical", "reboot node")
    assert (root["action_source"], root["pci"], root["source"]) == ("driver", "0000:61:00", "kernel")
    assert after["root"] == {"xid": 79, "entity": GPU, "time": simulator.time_at(ONSET)}
    ((when, entity, data),) = events_of_kind(simulator, chunks, "gpu_lost")
    assert (when, entity, data["pci"]) == (ONSET + 1, GPU, "0000:61:00")
    counted = [d for _, entity, d in events_of_kind(simulator, chunks, "gpu_count") if entity == "node:sim-n002"]
    assert counted == [{"expected": 8, "present": 7, "missing": ["0000:61:00"], "source": "nvml"}]


def test_the_job_of_a_gpu_off_the_bus_hangs_ends_and_restarts_on_other_nodes() -> None:
    simulator, chunks = simulate_faults(GpuOffBus(dies_after=60.0), nodes=8)
    (_, first), (again, _) = stays_of(simulator)[:2]
    assert first == ONSET + 60.0
    assert again > first
    later = simulator.schedule.job_at(8 * 3, END - 300)
    assert later is not None
    assert DEVICE not in later.gpus
    busy = column(chunks, "gpu.utilization", 0)
    assert busy[122:125].min() == 1.0
    assert column(chunks, "gpu.power", 0)[122:126].max() < 0.6 * column(chunks, "gpu.power", 0)[:100].max()


def test_a_node_is_rebooted_for_a_gpu_off_the_bus() -> None:
    simulator, chunks = simulate_faults(GpuOffBus(dies_after=30.0))
    neighbour = DEVICE + 1
    assert gone(chunks, neighbour).tolist() == np.arange(END - 240.0, END, 10.0).tolist()
    energy = column(chunks, "gpu.energy", neighbour)
    assert np.flatnonzero(np.diff(energy) < 0).tolist() == [239]
    assert np.flatnonzero(np.diff(column(chunks, "gpu.energy", 0)) < 0).tolist() == []
    assert simulator.truth()[0]["class"] == "hard"


def test_a_program_fault_is_reported_by_several_gpus_and_blames_none() -> None:
    simulator, chunks = simulate_faults(GpuEngineFault(origin="program", engine="memory"))
    found = codes(simulator, chunks)
    assert len({entity for code, entity in found if code == 31}) == 3
    assert all(entity.startswith("gpu:sim-n002.") for _, entity in found)
    assert sorted({code for code, _ in found}) == [31, 43]
    first = next(data for _, _, data in events_of_kind(simulator, chunks, "xid") if data["xid"] == 31)
    assert first["detail"]["fault"] == "FAULT_PDE"
    assert first["process"] == "python3"
    (line,) = simulator.truth()
    assert (line["class"], line["entities"], line["parameters"]["attribution"]) == ("benign", [], "job")
    assert stays_of(simulator)[0][1] == ONSET + 10.0


@pytest.mark.parametrize(("engine", "code"), [("compute", 13), ("memory", 31), ("scheduler", 109)])
def test_a_faulty_engine_is_reported_only_by_its_gpu_and_requires_a_reset(engine: str, code: int) -> None:
    simulator, chunks = simulate_faults(GpuEngineFault(origin="hardware", engine=engine))
    assert codes(simulator, chunks) == [(code, GPU), (43, GPU), (154, GPU)]
    datas = [data for _, _, data in events_of_kind(simulator, chunks, "xid")]
    assert [d.get("root", {}).get("xid") for d in datas] == [None, code, code]
    assert datas[0]["action"] == "reset GPU"
    (line,) = simulator.truth()
    assert (line["class"], line["parameters"]["attribution"]) == ("hard", "gpu")
    assert "entities" not in line


def test_a_hung_gsp_stops_the_rows_and_the_job_of_its_gpu_until_the_reset() -> None:
    simulator, chunks = simulate_faults(GspTimeout(code="119"), end=ONSET + 200.0)
    assert gone(chunks).tolist() == np.arange(ONSET, ONSET + 200.0, 10.0).tolist()
    (first, after) = events_of_kind(simulator, chunks, "xid")
    assert (first[0], first[2]["xid"], first[2]["detail"]["seconds"]) == (ONSET + 6, 119, 6)
    assert (after[2]["xid"], after[2]["root"]["xid"]) == (154, 119)
    ((when, _, slow),) = events_of_kind(simulator, chunks, "slow_call")
    assert (when, slow["seconds"]) == (ONSET + 200.0, 200.0)
    assert stays_of(simulator)[0][1] == ONSET + 200.0
    reset = events_of_kind(simulator, chunks, "counter_reset")
    assert GPU in {entity for _, entity, _ in reset}
    assert {when for when, _, _ in reset} == {ONSET + 200.0}


def test_a_gsp_error_is_xid_120() -> None:
    simulator, chunks = simulate_faults(GspTimeout(code="120"), end=ONSET + 60.0)
    assert [code for code, _ in codes(simulator, chunks)] == [120, 154]


@pytest.mark.parametrize(("lost", "width", "generation"), [("width", 8, 5), ("generation", 16, 3)])
def test_a_downgraded_pcie_link_slows_its_rank(lost: str, width: int, generation: int) -> None:
    simulator, chunks = simulate_faults(PcieDowngrade(lost=lost, slowdown=0.3, replays=100.0))
    within = slice(120, 240)
    for name, low, high in (("gpu.pcie_width", width, 16), ("gpu.pcie_generation", generation, 5)):
        values = column(chunks, name)
        assert set(values[within]) == {low}
        assert set(np.delete(values, within)) == {high}
    replays = column(chunks, "gpu.pcie_replays")
    assert np.diff(replays)[119] >= 100
    assert np.diff(replays).sum() < 103
    ((when, entity, data),) = events_of_kind(simulator, chunks, "aer")
    assert (when, entity, data["growth"], sum(data["errors"].values())) == (ONSET, "node:sim-n002", 100, 100)
    compute = np.concatenate([c.columns["rank"]["rank.compute_time"][:, DEVICE] for c in chunks])
    assert np.median(compute[within]) / np.median(compute[:120]) == pytest.approx(1.3, abs=0.02)
    assert simulator.truth()[0]["parameters"]["effect"] == 0.3


def test_a_worn_cold_plate_heats_only_its_own_gpu_by_its_share() -> None:
    simulator, chunks = simulate_faults(ColdPlate(rise=0.5, days=600 / 86_400), end=3600.0)
    _, sound = simulate_faults()
    supply, mine, before = 32.0, column(chunks, "gpu.temperature"), column(sound, "gpu.temperature")
    assert np.array_equal(mine[:119], before[:119])
    late = slice(200, 360)
    grown = (np.median(mine[late]) - supply) / (np.median(before[late]) - supply)
    assert 1.25 < grown < 1.5  # the plate has four fifths of the resistance of plate and coolant
    assert np.array_equal(column(chunks, "gpu.temperature", DEVICE + 1), column(sound, "gpu.temperature", DEVICE + 1))
    assert column(chunks, "gpu.throttle_reasons")[late].max() == 0
    assert np.median(column(chunks, "gpu.memory_temperature")[late] - mine[late]) == pytest.approx(6, abs=6)
    line = simulator.truth()[0]
    assert line["parameters"]["detectable"] == "2026-01-01T00:21:36.000000Z"  # 0.08 of 0.5 is a sixth of the ramp


def test_a_cold_plate_causes_throttling_only_above_the_limit() -> None:
    _, chunks = simulate_faults(ColdPlate(rise=2.5, days=600 / 86_400), end=3600.0)
    bits, heat = column(chunks, "gpu.throttle_reasons"), column(chunks, "gpu.temperature")
    assert set(bits[200:]) <= {0.0, 64.0}
    assert (bits[200:] == 64).any()
    assert np.median(heat[bits == 64]) > 84
    assert column(chunks, "gpu.sm_clock")[250:].mean() < 0.98 * column(chunks, "gpu.sm_clock")[:100].mean()


def test_a_ramp_longer_than_the_recording_is_invisible() -> None:
    simulator, _ = simulate_faults(ColdPlate(rise=0.2, days=30.0), end=3600.0)
    assert simulator.truth()[0]["class"] == "invisible"
