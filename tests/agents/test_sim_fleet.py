"""The simulated fleet: repeatable by seed, and plausible physics."""

from __future__ import annotations

import numpy as np
import pytest

from agents.sim.chunk import Chunk
from agents.sim.faults.facility import CoolantLoss
from agents.sim.faults.slow import Straggler
from agents.sim.fleet import FleetSimulator
from agents.sim.layout import FACILITY
from agents.sim.scenario import Fleet, Line, Scenario
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import Topology


def quiet_scenario(nodes: int = 4, duration: float = 7200.0, interval: float = 10.0, **more: object) -> Scenario:
    return Scenario(duration, interval, None, Fleet(nodes, 8), **more)  # type: ignore[arg-type]


def whole_column(chunks: list[Chunk], device_class: str, signal: str) -> np.ndarray:
    return np.concatenate([c.columns[device_class][signal] for c in chunks])


def same(one: list[Chunk], other: list[Chunk]) -> bool:
    return all(
        np.array_equal(whole_column(one, c, name), whole_column(other, c, name), equal_nan=values.dtype.kind == "f")
        for c, block in one[0].columns.items()
        for name, values in block.items()
    )


def test_the_same_seed_gives_the_same_fleet_with_any_chunk_size() -> None:
    scenario = quiet_scenario(faults=(Line(Straggler(), 500.0, 900.0),), duration=1800.0)
    one = list(FleetSimulator(scenario, 5).chunks(60))
    other = list(FleetSimulator(scenario, 5).chunks(7))
    third = list(FleetSimulator(scenario, 5).chunks(lambda tick: 1 + tick % 13))
    assert same(one, other)
    assert same(one, third)
    events = [[e for c in cut for e in c.events] for cut in (one, other, third)]
    assert events[0] == events[1] == events[2]
    assert all(len(c.times) <= 7 for c in other)


def test_another_seed_gives_another_fleet() -> None:
    one, other = (list(FleetSimulator(quiet_scenario(duration=600.0), seed).chunks()) for seed in (1, 2))
    assert not np.array_equal(whole_column(one, "gpu", "gpu.power"), whole_column(other, "gpu", "gpu.power"))


def test_values_do_not_depend_on_where_the_scenario_starts() -> None:
    one = list(FleetSimulator(quiet_scenario(duration=600.0), 1, start=0).chunks())
    other = list(FleetSimulator(quiet_scenario(duration=600.0), 1, start=1_000_000_000).chunks())
    for chunk in (*one, *other):
        for block in chunk.columns.values():
            for name in [
                n for n in block if n.endswith(".generation")
            ]:  # the start time of a device, which depends on the time of day
                del block[name]  # type: ignore[attr-defined]
    assert same(one, other)
    assert int(other[0].times[0]) == 1_000_000_000


def test_the_number_of_ticks_is_duration_over_interval() -> None:
    times = np.concatenate([c.times for c in FleetSimulator(quiet_scenario(duration=605.0), 1).chunks()])
    assert len(times) == 60
    assert set(np.diff(times)) == {10_000_000}


def test_every_column_is_in_its_wire_type_and_its_valid_range() -> None:
    chunks = list(FleetSimulator(quiet_scenario(), 3).chunks())
    for block in chunks[0].columns.values():
        for name in block:
            values = whole_column(chunks, CATALOGUE[name].device_class, name)
            low, high = CATALOGUE[name].valid
            assert values.dtype == np.dtype(CATALOGUE[name].type), name
            assert low <= float(np.nanmin(values)), name
            assert float(np.nanmax(values)) <= high, name


def test_counters_never_decrease() -> None:
    chunks = list(FleetSimulator(quiet_scenario(), 3).chunks())
    for block in chunks[0].columns.values():
        for name in (n for n in block if CATALOGUE[n].kind == "counter"):
            values = whole_column(chunks, CATALOGUE[name].device_class, name).astype(np.int64)
            assert (np.diff(values, axis=0) >= 0).all(), name


@pytest.mark.slow
def test_a_fleet_without_faults_shows_no_fault() -> None:
    simulator = FleetSimulator(quiet_scenario(nodes=8, duration=21_600.0), 4)
    chunks = list(simulator.chunks())
    busy = simulator.layout.busy_count("gpu")
    assert simulator.truth() == []
    assert whole_column(chunks, "gpu", "gpu.throttle_reasons")[:, :busy].max() == 0
    assert whole_column(chunks, "gpu", "gpu.temperature").max() < 75
    assert (whole_column(chunks, "nic", "nic.state") == 1).all()
    assert np.ptp(whole_column(chunks, "nic", "nic.carrier_changes").astype(int), axis=0).max() == 0
    flow = whole_column(chunks, "coolant", "coolant.flow")
    assert (flow > 0.9 * flow.mean(axis=0)).all()
    digests = {(e.data["canary"], e.data["digest"]) for c in chunks for _, e in c.events if e.kind == "digest"}
    assert len(digests) == len({canary for canary, _ in digests}) == 3
    assert not [e for c in chunks for _, e in c.events if e.kind == "link_state"]


@pytest.mark.slow
def test_temperature_follows_power_with_a_lag() -> None:
    simulator = FleetSimulator(
        quiet_scenario(nodes=2, interval=1.0, duration=2400.0), 4
    )  # whose job draws nearly full power
    chunks = list(simulator.chunks())
    power, heat = whole_column(chunks, "gpu", "gpu.power")[:, 0], whole_column(chunks, "gpu", "gpu.temperature")[:, 0]
    fall = int(np.flatnonzero(power < 400)[0])  # a checkpoint begins: power falls immediately
    assert power[fall - 1] > 500
    assert heat[fall] > heat[fall - 1] - 4
    assert heat[fall + 40] < heat[fall - 1] - 10
    half = np.argmax(heat[fall:] < (heat[fall - 1] + heat[fall + 40]) / 2)
    assert 4 <= half <= 20  # 12 s first order: half of the way after 8.3 s


def test_the_slowest_rank_sets_the_step_time_of_its_whole_job() -> None:
    simulator = FleetSimulator(quiet_scenario(duration=600.0), 1)
    chunk = next(simulator.chunks())
    job = slice(0, simulator.schedule.jobs[0].ranks)
    step, compute = (chunk.columns["rank"][f"rank.{n}"][:, job] for n in ("step_time", "compute_time"))
    assert np.ptp(step, axis=1).max() == 0
    assert (step[:, 0] > compute.max(axis=1)).all()


def test_loss_of_flow_heats_the_racks_of_its_loop_and_no_others() -> None:
    fault = Line(CoolantLoss(flow=0.35), 1200.0, 2400.0, "cdu:sim-c1")
    simulator = FleetSimulator(quiet_scenario(nodes=64, duration=3000.0, faults=(fault,)), 2)
    chunks = list(simulator.chunks())
    busy = simulator.layout.busy_count("gpu")
    heat, loop = whole_column(chunks, "gpu", "gpu.temperature")[:, :busy], simulator.layout.loop_of_gpu[:busy]
    before, after = np.median(heat[100:119], axis=0), np.median(heat[140:235], axis=0)
    assert (after - before)[loop == 0].min() > 15
    assert np.abs(after - before)[loop == 1].max() < 4
    supply = whole_column(chunks, "coolant", "coolant.supply_temperature")
    assert np.abs(supply[130:] - supply[0]).max() < 2


def test_throttled_racks_lose_clock_power_and_time() -> None:
    fault = Line(CoolantLoss(flow=0.25), 600.0, 3000.0, "cdu:sim-c1")
    chunks = list(FleetSimulator(quiet_scenario(nodes=8, duration=3000.0, faults=(fault,)), 4).chunks())
    clock, heat = (
        whole_column(chunks, "gpu", "gpu.sm_clock")[:, 0],
        whole_column(chunks, "gpu", "gpu.temperature")[:, 0],
    )
    assert clock[200:].mean() < 0.96 * clock[:50].mean()
    assert 83 < heat[200:].max() < 95
    assert whole_column(chunks, "gpu", "gpu.throttle_reasons")[200:, 0].max() == 0x40


def test_the_number_of_missing_samples_is_as_configured() -> None:
    scenario = Scenario(6000.0, 10.0, None, Fleet(4, 8, missing=0.1))
    power = whole_column(list(FleetSimulator(scenario, 1).chunks()), "gpu", "gpu.power")
    assert 0.08 < np.isnan(power).mean() < 0.12


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 8), (3, 4), (65, 2)])
def test_fleets_of_any_size_run_and_have_one_topology(nodes: int, gpus: int) -> None:
    simulator = FleetSimulator(Scenario(100.0, 10.0, None, Fleet(nodes, gpus)), 1)
    chunk = next(simulator.chunks())
    for device_class, block in chunk.columns.items():
        assert all(v.shape == (10, len(chunk.entities[device_class])) for v in block.values())
        assert chunk.entities[device_class] == simulator.entities(device_class)
        owners = [simulator.layout.sender_names[n] for n in chunk.senders[device_class].tolist()]
        named = zip(owners, chunk.entities[device_class], strict=True)
        assert device_class == "rank" or all(owner == FACILITY or owner in name for owner, name in named)
    reported = [e.data["entities"] for _, e in chunk.events if e.kind == "inventory"]
    assert {entity for entities in reported for entity in entities} == set(simulator.parents)


def test_parents_lead_from_a_rank_to_its_loop() -> None:
    topology = Topology(FleetSimulator(quiet_scenario(nodes=64), 1).parents)
    assert topology.parents["rank:sim-81.17"] == ("stage:sim-81.0", "job:sim-81", "gpu:sim-n003.1")
    assert topology.ancestor_of_kind("rank:sim-81.17", "cdu") == "cdu:sim-c1"
    assert topology.parents["port:sim-n001.mlx5_3"] == ("node:sim-n001", "leaf:sim-l4", "rail:sim-3")
    assert len(topology.descendants("pdu:sim-p1")) > 16 * 8


def test_inventory_is_sent_at_the_start_and_every_hour() -> None:
    chunks = FleetSimulator(quiet_scenario(nodes=2, duration=7300.0), 1).chunks()
    reported = [
        (e.time, e.entity) for c in chunks for _, e in c.events if e.kind == "inventory" and e.entity == "node:sim-n001"
    ]
    first = reported[0][0]
    assert [time - first for time, _ in reported] == [0, 3_600_000_000, 7_200_000_000]


def test_each_healthy_gpu_reports_one_canary_in_six_hours() -> None:
    chunks = FleetSimulator(quiet_scenario(nodes=2, interval=60.0, duration=18 * 3600.0), 1).chunks()
    reported = [e for c in chunks for _, e in c.events if e.kind == "digest" and e.entity == "gpu:sim-n002.5"]
    assert set(np.diff([e.time for e in reported])) == {21_600_000_000}
    assert len(reported) == 3
    assert len({e.data["canary"] for e in reported}) == 3
    assert all(e.data["digest"] == e.data["expected"] for e in reported)
