"""Broken instruments, and the events of the agents' edge rules for them and for lost coolant flow."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from agents.collector import Reading
from agents.node.edge.rules import EdgeRules
from agents.sim.faults.facility import CoolantLeak, CoolantLoss
from agents.sim.faults.telemetry import SensorFault
from agents.sim.fleet import FleetSimulator
from agents.sim.kinds import KINDS, list_kinds
from agents.sim.scenario import Fleet, Line, Scenario
from agents.sim.world import worlds
from pipeline.config.sections import Edge as Settings
from pipeline.model.records import SECOND, Event
from tests.agents.sim_hour import END, ONSET, SEED, WITHIN, simulate_fault, simulate_quiet_hour


@pytest.mark.parametrize("signal", ["gpu.temperature", "gpu.power"])
def test_a_broken_instrument_changes_only_its_own_signal(signal: str) -> None:
    which = 0.0 if signal == "gpu.temperature" else 1.0
    biased = simulate_fault(SensorFault(size=5.0, which=which, mode="biased", direction="down"), "gpu:sim-n001.2")
    step = (biased.column(signal) - simulate_quiet_hour().column(signal))[:, 2]
    assert set(step[90:240]) == {-5.0 if which == 0 else -50.0}
    stuck = simulate_fault(SensorFault(size=5.0, which=which, mode="stuck"), "gpu:sim-n001.2")
    assert set(stuck.column(signal)[90:240, 2]) == {simulate_quiet_hour().column(signal)[90, 2]}
    noisy = simulate_fault(SensorFault(size=5.0, which=which, mode="noisy"), "gpu:sim-n001.2")
    swing = (noisy.column(signal) - simulate_quiet_hour().column(signal))[90:240, 2]
    assert 3.5 < swing.std() / (1 if which == 0 else 10) < 6.5
    for run in (biased, stuck, noisy):
        for device_class, block in run.chunks[0].columns.items():
            for name in block:
                changed = run.changed(device_class, name)
                assert not changed.any() if name != signal else set(np.flatnonzero(changed.any(axis=0))) == {2}, name
                assert not changed[:90].any()
                assert not changed[240:].any()
        assert run.simulator.truth()[0]["parameters"]["attribution"] == "instrument"
    reported = [run.simulator.truth()[0]["parameters"] for run in (biased, stuck)]
    assert [p.get("severity") for p in reported] == [pytest.approx(3 / 13), None]
    assert [(p["size"], p["direction"]) for p in reported] == [(5.0, "down"), (None, None)]


def test_rows_of_faults_share_their_rate_and_name_existing_signals() -> None:
    assert sum(KINDS[name].rate.value for name in ("straggler", "cold_plate")) == pytest.approx(0.8)
    assert KINDS["coolant"].rate.value == pytest.approx(0.1 * 0.2)
    reported = {name for block in simulate_quiet_hour().chunks[0].columns.values() for name in block}
    world = next(w for w in worlds("train", 40) if w.fabric.kind == "roce" and not w.instruments.absent)
    other = FleetSimulator(Scenario(600.0, 10.0, None, Fleet(16, 8)).in_world(world), 1)
    reported |= {name for block in next(other.chunks()).columns.values() for name in block}
    assert {s for kind in KINDS.values() for s in kind.signals if not s.startswith("event:")} <= reported


@pytest.mark.parametrize(
    ("entity", "signal"), [("cdu:sim-c1", "coolant.flow"), ("sensor:sim-n004.inlet", "sensor.temperature")]
)
def test_instruments_of_loops_and_of_the_air_can_fail_too(entity: str, signal: str) -> None:
    run = simulate_fault(SensorFault(size=4.0, which=0.0, mode="biased", direction="up"), entity)
    changed = run.changed(signal.split(".")[0], signal)
    device = 0 if entity.startswith("cdu") else 6
    assert np.argwhere(changed.any(axis=0)).ravel().tolist() == [device]
    ratio = run.column(signal)[WITHIN, device] / simulate_quiet_hour().column(signal)[WITHIN, device]
    wanted = 1.12 if entity.startswith("cdu") else ratio.mean()
    assert ratio == pytest.approx(wanted, abs=0.02)
    assert not run.changed("gpu", "gpu.temperature").any()


def test_a_noisy_instrument_changes_at_every_tick_also_below_a_second() -> None:
    line = Line(SensorFault(size=8.0, which=0.0, mode="noisy"), 10.0, 40.0, "cdu:sim-c1")
    found = []
    for lines in ((line,), ()):
        chunks = FleetSimulator(Scenario(60.0, 0.1, None, Fleet(2, 8), lines), 1).chunks()
        found.append(np.concatenate([c.columns["coolant"]["coolant.flow"][:, 0] for c in chunks]))
    swing = (found[0] / found[1] - 1)[101:399]
    assert len(set(np.round(swing, 3))) > 100  # 30 if each second had one draw
    assert abs(np.corrcoef(swing[1:], swing[:-1])[0, 1]) < 0.2


def test_the_list_names_instruments() -> None:
    assert "affects an instrument" in list_kinds()
    assert "affects a GPU" in list_kinds()
    assert "a instrument" not in list_kinds()


def test_a_stuck_instrument_stays_stuck_after_a_snapshot() -> None:
    scenario = Scenario(
        2400.0, 10.0, None, Fleet(2, 8), (Line(SensorFault(which=0.0, mode="stuck"), 300.0, 2000.0, "gpu:sim-n001.0"),)
    )
    whole, first = FleetSimulator(scenario, 1), FleetSimulator(scenario, 1)
    chunks = list(whole.chunks())
    next(first.chunks())
    again = FleetSimulator(scenario, 1)
    again.restore(first.snapshot())
    for one, other in zip(chunks[1:], again.chunks(), strict=True):
        assert np.array_equal(one.columns["gpu"]["gpu.temperature"], other.columns["gpu"]["gpu.temperature"])
        assert np.array_equal(
            one.columns["sensor"]["sensor.temperature"], other.columns["sensor"]["sensor.temperature"], equal_nan=True
        )


def test_a_failing_pump_causes_the_events_of_the_edge_rules() -> None:
    run = simulate_fault(CoolantLoss(flow=0.4, ramp=2.0), "cdu:sim-c1")
    reported = run.events("flow_collapse", "pressure_collapse")
    onset, end = run.simulator.time_at(ONSET), run.simulator.time_at(END)
    assert [e.data["state"] for e in reported] == ["active", "active", "cleared", "cleared"]
    assert {e.kind for e in reported[:2]} == {e.kind for e in reported[2:]} == {"flow_collapse", "pressure_collapse"}
    assert all(0 < e.time - onset <= 4 * SECOND for e in reported[:2])
    assert all(0 < e.time - end <= 10 * SECOND for e in reported[2:])
    assert all(onset <= e.data["since"] < e.time for e in reported[:2])
    assert {e.entity for e in reported} == {"cdu:sim-c1"}
    usual = np.median(simulate_quiet_hour().column("coolant.flow")[:, 0])
    assert usual == pytest.approx(next(e.data["usual"] for e in reported if e.kind == "flow_collapse"), rel=0.02)
    assert not simulate_fault(CoolantLoss(flow=0.8), "cdu:sim-c1").events("flow_collapse", "pressure_collapse")


def test_simulated_collapse_and_leak_events_are_those_of_the_edge_rules() -> None:
    pump = Line(CoolantLoss(flow=0.45, ramp=8.0), 300.0, 500.0, "cdu:sim-c1")
    leak = Line(CoolantLeak(loss=0.3, wet=0.5), 620.0, 700.0, "rack:sim-r1")
    simulator, edge = FleetSimulator(Scenario(780.0, 1.0, None, Fleet(2, 8), (pump, leak)), SEED), EdgeRules(Settings())
    expected, reported = [], []
    for chunk in simulator.chunks():
        reported += [e for _, e in chunk.events if e.kind in ("flow_collapse", "pressure_collapse", "leak")]
        for k, time in enumerate(chunk.times.tolist()):
            columns = {c: {n: v[k] for n, v in chunk.columns[c].items()} for c in ("coolant", "leak")}
            expected += edge.evaluate(time, [Reading(c, chunk.entities[c], columns[c]) for c in columns])
    for mine, other in zip(
        sorted(reported, key=_key), sorted((e for e in expected if e.kind != "temperature_rise"), key=_key), strict=True
    ):
        assert _key(mine) == _key(other)
        assert mine.data.keys() == other.data.keys()
        assert abs(mine.time - other.time) <= SECOND
        assert abs(mine.data["since"] - other.data["since"]) <= SECOND
        assert mine.data["value"] == pytest.approx(other.data["value"], rel=0.1)


def _key(event: Event) -> tuple[str, str, str]:
    return event.entity, event.kind, str(event.data["state"])


@pytest.mark.slow
def test_simulated_temperature_events_are_those_of_the_edge_rule() -> None:
    pump = Line(CoolantLoss(flow=0.1, ramp=8.0), 300.0, 500.0, "cdu:sim-c1")
    simulator, edge = FleetSimulator(Scenario(420.0, 1.0, None, Fleet(2, 8), (pump,)), SEED), EdgeRules(Settings())
    expected, reported = [], []
    for chunk in simulator.chunks():
        reported += [e for _, e in chunk.events if e.kind == "temperature_rise"]
        for k, time in enumerate(chunk.times.tolist()):
            expected += edge.evaluate(time, [Reading("gpu", chunk.entities["gpu"], _row(chunk.columns["gpu"], k))])
    assert sorted(map(_key, reported)) == sorted(map(_key, expected))
    assert len(reported) == 32
    for mine, other in zip(sorted(reported, key=_key), sorted(expected, key=_key), strict=True):
        assert mine.data.keys() == other.data.keys()
        # the end is when power or temperature falls, and power strays by 4 % from second to second: both may be late
        assert abs(mine.time - other.time) <= (8 if mine.data["state"] == "active" else 20) * SECOND


@pytest.mark.slow
def test_a_jump_of_an_instrument_causes_the_event_of_the_rule_at_its_start_or_at_its_repair() -> None:
    for direction, moment in (("up", ONSET), ("down", END)):
        for entity, which in (("gpu:sim-n001.2", 0.0), ("cdu:sim-c1", 1.0)):
            run = simulate_fault(SensorFault(size=9.0, which=which, mode="biased", direction=direction), entity)
            reported = run.events("temperature_rise")
            assert [(e.entity, e.data["state"]) for e in reported] == [(entity, "active"), (entity, "cleared")]
            assert (reported[0].time - run.simulator.start) / SECOND == moment + 1
            assert 10 <= (reported[1].time - reported[0].time) / SECOND <= 24
    assert not simulate_fault(SensorFault(size=2.0, which=0.0, mode="biased", direction="up")).events(
        "temperature_rise"
    )


def test_a_flow_meter_that_reads_far_too_low_causes_a_flow_collapse_without_pressure_collapse() -> None:
    run = simulate_fault(SensorFault(size=12.0, which=0.0, mode="biased", direction="down"), "cdu:sim-c1")
    assert [
        (e.kind, e.data["state"]) for e in run.events("flow_collapse", "pressure_collapse", "temperature_rise")
    ] == [
        ("flow_collapse", "active"),
        ("flow_collapse", "cleared"),
    ]


def _row(columns: Mapping[str, np.ndarray], tick: int) -> dict[str, np.ndarray]:
    return {name: values[tick] for name, values in columns.items()}
