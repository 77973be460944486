"""Each fault kind shows its signature within its window and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from agents.sim.chunk import Chunk
from agents.sim.faults.corruption import SilentDataCorruption
from agents.sim.faults.facility import CoolantLoss
from agents.sim.faults.kind import Kind
from agents.sim.faults.link import LinkDegradation
from agents.sim.faults.slow import Straggler
from agents.sim.faults.telemetry import TelemetryGap
from agents.sim.fleet import FleetSimulator
from agents.sim.scenario import Fleet, Line, Scenario

ONSET, END = 1200.0, 2400.0
BEFORE, WITHIN, AFTER = slice(0, 120), slice(130, 240), slice(265, 360)


def simulate_fault(kind: Kind, entity: str | None = None, seed: int = 1) -> tuple[FleetSimulator, list[Chunk]]:
    simulator = FleetSimulator(Scenario(3600.0, 10.0, None, Fleet(16, 8), (Line(kind, ONSET, END, entity),)), seed)
    return simulator, list(simulator.chunks())


def column(chunks: list[Chunk], device_class: str, signal: str, device: int) -> np.ndarray:
    return np.concatenate([c.columns[device_class][signal][:, device] for c in chunks]).astype(float)


def events(chunks: list[Chunk], kind: str) -> list[tuple[int, str, dict[str, object]]]:
    return [(e.time, e.entity, dict(e.data)) for c in chunks for _, e in c.events if e.kind == kind]


def test_a_defective_gpu_has_wrong_digests_only_during_its_fault() -> None:
    simulator, chunks = simulate_fault(SilentDataCorruption(probability=0.6))
    fault = simulator.faults[0]
    right = {}
    for _, entity, data in events(chunks, "digest"):
        if entity != fault.entity:
            assert right.setdefault(data["canary"], data["digest"]) == data["digest"]
    mine = [(t, d) for t, entity, d in events(chunks, "digest") if entity == fault.entity]
    wrong = [t for t, d in mine if d["digest"] != right[d["canary"]]]
    assert 3 <= len(wrong) <= 10  # 10 rounds at 0.6
    assert all(simulator.time_at(ONSET) <= t < simulator.time_at(END) for t in wrong)


def test_silent_data_corruption_changes_no_telemetry() -> None:
    _, chunks = simulate_fault(SilentDataCorruption(probability=1.0))
    sound = list(FleetSimulator(Scenario(3600.0, 10.0, None, Fleet(16, 8)), 1).chunks())
    for one, other in zip(chunks, sound, strict=True):
        for device_class, block in one.columns.items():
            for name, values in block.items():
                assert np.array_equal(values, other.columns[device_class][name], equal_nan=values.dtype.kind == "f")


def test_a_degraded_link_counts_errors_and_flaps_within_its_window() -> None:
    simulator, chunks = simulate_fault(LinkDegradation())
    port = simulator.faults[0].device
    for name in ("symbol_errors", "crc_errors", "carrier_changes"):
        values = column(chunks, "nic", f"nic.{name}", port)
        assert np.ptp(values[BEFORE]) <= 1
        assert values[WITHIN][-1] - values[BEFORE][-1] > 3
        assert np.ptp(values[AFTER]) <= 1
    reported = events(chunks, "link_state")
    assert [d["state"] for _, _, d in reported] == ["down", "up"] * (len(reported) // 2)
    assert {entity for _, entity, _ in reported} == {simulator.faults[0].entity}
    assert all(simulator.time_at(ONSET) < t < simulator.time_at(END) for t, _, _ in reported)
    changes = column(chunks, "nic", "nic.carrier_changes", port)
    assert changes[-1] - changes[0] == len(reported)


def test_a_port_that_is_down_has_no_traffic_and_no_speed() -> None:
    simulator, chunks = simulate_fault(LinkDegradation(flap_every=200.0, flap_length=40.0))
    port = simulator.faults[0].device
    down = column(chunks, "nic", "nic.state", port) == 0
    assert down.any()
    assert np.isnan(column(chunks, "nic", "nic.speed", port)[down]).all()
    sent = np.diff(column(chunks, "nic", "nic.tx_bytes", port), prepend=0)
    assert (sent[down] == 0).all()


def test_a_straggler_has_a_lower_clock_and_more_heat_and_slows_its_job() -> None:
    simulator, chunks = simulate_fault(Straggler(slowdown=0.25))
    fault = simulator.faults[0]
    stay = simulator.schedule.job_at(fault.device, ONSET)
    assert stay is not None
    other = int(stay.gpus[0] if fault.device != stay.gpus[0] else stay.gpus[1])  # busy nodes come first: rank = GPU
    ratios = {}
    for name, device_class in (("gpu.sm_clock", "gpu"), ("gpu.temperature", "gpu"), ("rank.compute_time", "rank")):
        mine, peer = (column(chunks, device_class, name, d) for d in (fault.device, other))
        ratios[name] = np.median(mine[WITHIN]) / np.median(mine[BEFORE])
        assert 0.97 < np.median(mine[AFTER]) / np.median(mine[BEFORE]) < 1.03
        cooler = 0.9 if name == "gpu.temperature" else 0.97  # waiting GPUs use less power
        assert cooler < np.median(peer[WITHIN]) / np.median(peer[BEFORE]) < 1.03
    assert 0.72 < ratios["gpu.sm_clock"] < 0.78
    assert 1.28 < ratios["rank.compute_time"] < 1.38
    assert ratios["gpu.temperature"] > 1.3
    steps = column(chunks, "rank", "rank.step_time", other)
    assert np.median(steps[WITHIN]) > 1.02 * np.median(steps[BEFORE])
    bits = column(chunks, "gpu", "gpu.throttle_reasons", fault.device)
    assert set(bits[WITHIN]) <= {0x20, 0x40}
    assert bits[BEFORE].max() == bits[AFTER].max() == 0


def test_a_failing_pump_lowers_flow_speed_and_pressure_within_its_window() -> None:
    _, chunks = simulate_fault(CoolantLoss(flow=0.4), "cdu:sim-c1")
    for name, left in (("coolant.flow", 0.4), ("pump.speed", 0.4), ("coolant.pressure", 0.16)):
        values = column(chunks, "coolant", name, 0)
        assert np.median(values[WITHIN]) / np.median(values[BEFORE]) == pytest.approx(left, abs=0.02)
        assert np.median(values[AFTER]) / np.median(values[BEFORE]) == pytest.approx(1, abs=0.01)


def test_a_silent_node_has_no_rows_and_no_events_within_its_window() -> None:
    simulator, chunks = simulate_fault(TelemetryGap())
    silent = np.concatenate([c.silent[:, simulator.faults[0].device] for c in chunks])
    assert silent.sum() == 120
    assert silent[120:240].all()
    node = simulator.faults[0].entity.removeprefix("node:")
    reported = [
        t for kind in ("digest", "inventory") for t, e, _ in events(chunks, kind) if e.split(":")[1][:8] == node
    ]
    assert reported
    assert not [t for t in reported if simulator.time_at(ONSET) <= t < simulator.time_at(END - 10)]


def test_the_background_does_not_depend_on_the_faults() -> None:
    simulator, chunks = simulate_fault(Straggler(slowdown=0.2), "gpu:sim-n001.0")
    sound = list(FleetSimulator(Scenario(3600.0, 10.0, None, Fleet(16, 8)), 1).chunks())
    far = simulator.layout.gpus - 1
    for name in ("gpu.power", "gpu.temperature", "gpu.sm_clock", "gpu.ecc_corrected"):
        assert np.array_equal(column(chunks, "gpu", name, far), column(sound, "gpu", name, far))


def test_the_truth_has_kind_entity_window_and_parameters() -> None:
    simulator, _ = simulate_fault(CoolantLoss(flow=0.5))
    (line,) = simulator.truth()
    assert line["kind"] == "coolant"
    assert line["entity"] == "cdu:sim-c1"
    assert (line["onset"], line["end"]) == ("2026-01-01T00:20:00.000000Z", "2026-01-01T00:40:00.000000Z")
    assert line["class"] == "soft"
    assert line["parameters"] == {
        "flow": 0.5,
        "ramp": 10.0,
        "row": 25,
        "attribution": "cooling",
        "effect": 0.5,
        "effect_unit": "flow",
    }
