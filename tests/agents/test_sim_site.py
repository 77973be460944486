"""Faults of power, cooling and air, and planned changes of a site: each has its signature in the right place."""

from __future__ import annotations

import numpy as np
import pytest

from agents.sim.confounders.site import InletRise, PowerCap, SensorOffset, SetpointShift
from agents.sim.faults.facility import CoolantLeak, CoolantLoss, FacilityWater, PduTrip, PsuLoss, Recirculation
from agents.sim.fleet import FleetSimulator
from agents.sim.layout import PSUS
from agents.sim.scenario import Fleet, Line, Rates, Scenario
from pipeline.model.records import SECOND
from tests.agents.sim_hour import END, ONSET, WITHIN, Run, only_within, simulate_fault, simulate_quiet_hour


def test_the_other_supplies_of_a_node_carry_the_load_of_a_lost_one() -> None:
    run = simulate_fault(PsuLoss(part="supply", brake="no", extent="node"), "psu:sim-n002.3")
    output, lost = run.column("psu.output_power"), PSUS + 3
    others = [i for i in range(PSUS, 2 * PSUS) if i != lost]
    assert output[WITHIN, lost].max() == 0
    ratio = output[WITHIN, others] / simulate_quiet_hour().column("psu.output_power")[WITHIN, others]
    assert np.abs(ratio - PSUS / (PSUS - 1)).max() < 0.02
    changed = run.changed("psu", "psu.output_power")
    assert only_within(changed)
    assert set(np.flatnonzero(changed.any(axis=0))) == {lost, *others}
    assert set(run.column("psu.status")[WITHIN, lost]) == {2}
    assert run.column("psu.input_voltage")[WITHIN, lost].min() > 220  # its input is healthy
    assert not run.changed("gpu", "gpu.sm_clock").any()


def test_a_supply_without_input_reports_it() -> None:
    run = simulate_fault(PsuLoss(part="feed", brake="no", extent="node"), "psu:sim-n002.0")
    assert run.column("psu.input_voltage")[WITHIN, PSUS].max() == 0
    assert set(run.column("psu.input_status")[WITHIN, PSUS]) == {1}
    assert only_within(run.changed("psu", "psu.input_status"))


def test_a_failed_shelf_removes_one_supply_of_all_nodes_of_its_rack_and_may_brake_them() -> None:
    run = simulate_fault(PsuLoss(part="supply", brake="yes", extent="rack"), "psu:sim-n010.1")
    lost = run.column("psu.output_power")[WITHIN].max(axis=0) == 0
    assert np.flatnonzero(lost).tolist() == [n * PSUS + 1 for n in range(8, 16)]
    bits, clock = run.column("gpu.throttle_reasons"), run.column("gpu.sm_clock")
    assert set(bits[WITHIN, 64:112].ravel()) == {0x80}
    assert np.median(clock[WITHIN, 64:112]) / np.median(clock[:90, 64:112]) == pytest.approx(0.5, abs=0.02)
    assert not run.changed("gpu", "gpu.throttle_reasons")[:, :64].any()
    (line,) = run.simulator.truth()
    assert line["entities"][0] == "rack:sim-r2"
    steps = run.column("rank.step_time")[:, 111]  # of the job that has nodes in the rack
    assert np.nanmedian(steps[WITHIN]) > 1.5 * np.nanmedian(steps[:90])


def test_all_nodes_of_a_tripped_unit_disappear_and_boot_with_counters_from_zero() -> None:
    run = Run(Line(PduTrip(), ONSET, END, "pdu:sim-p1"), nodes=24)
    mine, ports = slice(0, 16), slice(0, 128)
    for signal, device_class in (("node.uptime", "node"), ("gpu.power", "gpu"), ("nic.tx_bytes", "nic")):
        values = run.column(signal, device_class)
        devices = mine if device_class == "node" else ports
        assert np.isnan(values[90:240, devices]).all()
        assert not np.isnan(values[:90, devices]).any()
        assert not np.isnan(values[240:, devices]).any()
        assert not np.isnan(values[:, devices.stop :]).any()
    assert run.column("node.uptime")[240:, mine].max() < 1300
    draw, volts = run.column("power.draw"), run.column("power.voltage")
    assert draw[90:240, 0].max() == 0
    assert volts[90:240, 0].max() == 0
    assert draw[:, 1].min() > 5000
    assert np.nanmax(run.column("gpu.temperature")[241, ports]) < 45  # cold for 25 minutes
    for signal in ("gpu.energy", "nic.tx_bytes", "node.cpu_busy_time"):
        values = run.column(signal)
        assert values[241, 0] < values[89, 0]
        assert (np.diff(values[240:], axis=0) >= 0).all()
    start = run.simulator.start // SECOND
    assert set(run.column("gpu.generation")[:, ports][240:].ravel()) == {start + END}
    assert set(run.column("gpu.generation")[:, 128:].ravel()) == {start}
    assert not run.events("counter_reset")  # after a boot the agent has no past


def test_the_jobs_on_a_tripped_unit_end_with_it() -> None:
    run = Run(Line(PduTrip(), ONSET, END, "pdu:sim-p1"), nodes=24)
    stays = run.simulator.schedule.allocations
    assert any(stay.end == ONSET for stay in stays)
    assert all(stay.end <= ONSET or stay.begin >= END + 300 or stay.gpus.min() >= 128 for stay in stays)


def test_warm_facility_water_warms_a_whole_loop_at_equal_resistance() -> None:
    run = simulate_fault(FacilityWater(rise=6.0, course="step"), "cdu:sim-c1")
    supply = run.column("coolant.supply_temperature") - simulate_quiet_hour().column("coolant.supply_temperature")
    assert supply[WITHIN, 0] == pytest.approx(6.0, abs=0.01)
    heat = (run.column("gpu.temperature") - simulate_quiet_hour().column("gpu.temperature"))[WITHIN]
    assert np.median(heat) == pytest.approx(6.0, abs=0.5)
    assert not run.changed("coolant", "coolant.flow").any()
    assert not run.changed("gpu", "gpu.power").any()
    assert only_within(run.changed("coolant", "coolant.supply_temperature"))


def test_fouling_grows_over_its_time_and_is_visible_from_3_kelvin_on() -> None:
    run = simulate_fault(FacilityWater(rise=6.0, course="fouling", days=1000 / 86_400), "cdu:sim-c1")
    (line,) = run.simulator.truth()
    assert line["parameters"]["detectable"] == "2026-01-01T00:23:20.000000Z"  # half of 1000 s
    rise = (run.column("coolant.supply_temperature") - simulate_quiet_hour().column("coolant.supply_temperature"))[:, 0]
    assert rise[140] == pytest.approx(3.0, abs=0.1)
    assert rise[200] == pytest.approx(6.0, abs=0.1)


def test_random_fouling_lasts_as_long_as_it_grows_and_a_random_step_some_hours() -> None:
    layout, rng = simulate_quiet_hour().simulator.layout, np.random.default_rng(1)
    for kind, seconds in (FacilityWater.draw_random(layout, rng) for _ in range(60)):
        assert isinstance(kind, FacilityWater)
        assert kind.days is not None
        if kind.course == "fouling":
            assert seconds == kind.days * 86_400 == kind.ramp()
        else:
            assert 2 * 3600 <= seconds < 10 * 86_400
    rates = Rates(faults=1.0, apart=False, kinds={"facility_water": 3000.0})
    scenario = Scenario(86_400.0, 10.0, None, Fleet(64, 8), (), rates=rates)
    drawn = [f for f in FleetSimulator(scenario, 2).faults if isinstance(f.kind, FacilityWater)]
    fouled = [f for f in drawn if isinstance(f.kind, FacilityWater) and f.kind.course == "fouling"]
    assert fouled
    assert all(f.end - f.onset == pytest.approx(f.kind.ramp()) for f in fouled if isinstance(f.kind, FacilityWater))


@pytest.mark.parametrize(("interval", "flow"), [(1.0, 0.0), (1.0, 0.3), (5.0, 0.05), (10.0, 0.0), (10.0, 0.3)])
def test_gpus_without_coolant_warm_by_their_heat_capacity_until_they_shut_down(interval: float, flow: float) -> None:
    line = Line(CoolantLoss(flow=flow), 300.0, 900.0, "cdu:sim-c1")
    chunks = list(FleetSimulator(Scenario(1500.0, interval, None, Fleet(2, 8), (line,)), 3).chunks())
    heat, bits, clock, power, back = (
        np.concatenate([c.columns[name.split(".")[0]][name] for c in chunks])
        for name in (
            *("gpu.temperature", "gpu.throttle_reasons", "gpu.sm_clock", "gpu.power"),
            "coolant.return_temperature",
        )
    )
    ticks, begin, end = round(10 / interval), round(300 / interval), round(900 / interval)
    steepest = ((heat[ticks:] - heat[:-ticks]) / 10)[begin - ticks : end].max()
    assert 0.7 < steepest < 1.75  # 0.7 kW on 440 J/K: 1.6 K/s, and noise
    assert heat.max() <= 97
    assert back.max() < 97
    late = slice(end - 10 * ticks, end - 1)
    shut = bits[late] & 0x8 > 0
    if flow < 0.1:
        assert shut.all()
        assert (bits[late] & 0x40).all()
        assert set(clock[late].ravel()) == {345}
        assert power[late].max() < 120
    else:
        assert not shut.any()
        assert np.median(heat[late]) == pytest.approx(87, abs=2)
    assert np.median(power[-10:]) > 600  # works again when the coolant is back


def test_a_leak_empties_the_reservoir_before_its_rope_is_wet() -> None:
    run = simulate_fault(CoolantLeak(loss=0.4, wet=0.5), "rack:sim-r2")
    level, pressure = run.column("reservoir.level", "coolant")[:, 0], run.column("coolant.pressure")[:, 0]
    assert level[163] / level[:90].mean() == pytest.approx(1 - 0.4 * 730 / 1500, abs=0.01)
    assert pressure[230:240].mean() / pressure[:90].mean() == pytest.approx(0.88, abs=0.02)
    wet = run.column("leak.state")
    assert np.flatnonzero(wet[:, 1]).tolist() == list(range(165, 240))
    assert not wet[:, 0].any()
    leaks = [(e.entity, e.data["state"], (e.time - run.simulator.start) / SECOND) for e in run.events("leak")]
    assert leaks == [("leak_detector:sim-r2", "active", 1650.0), ("leak_detector:sim-r2", "cleared", 2401.0)]
    assert run.events("leak")[0].data["since"] == run.simulator.time_at(1650.0)
    assert not run.events("flow_collapse", "pressure_collapse")
    assert run.simulator.truth()[0]["entities"] == ["rack:sim-r2", "leak_detector:sim-r2", "cdu:sim-c1"]


def test_recirculation_warms_the_inlets_of_a_row_and_runs_up_its_fans() -> None:
    run = Run(Line(Recirculation(rise=8.0, ramp=600.0), ONSET, END, "rack:sim-r1"), nodes=40)
    heat, fan = run.column("sensor.temperature")[:, 0::2], run.column("sensor.fan_speed")[:, 1::2]
    rise = np.median(heat[160:235], axis=0) - np.median(heat[:90], axis=0)
    assert rise[:32] == pytest.approx(8.0, abs=1.0)
    assert np.abs(rise[32:]).max() <= 1.0
    assert (np.median(fan[160:235], axis=0)[:32] > 11_500).all()
    mild = Run(Line(Recirculation(rise=3.0, ramp=600.0), ONSET, END, "rack:sim-r1"))
    assert np.median(mild.column("sensor.fan_speed")[160:235, 1::2]) > 11_500  # all they can, however warm it is
    assert np.median(fan[160:235], axis=0)[32:].max() < 8_500
    assert len(run.simulator.truth()[0]["entities"]) == 4


def test_a_set_point_moves_supply_and_gpus_there_and_back() -> None:
    run = simulate_fault(SetpointShift(shift=2.0, direction="down", ramp=600.0), "cdu:sim-c1")
    shift = (run.column("coolant.supply_temperature") - simulate_quiet_hour().column("coolant.supply_temperature"))[
        :, 0
    ]
    assert shift[[120, 150, 165, 210]] == pytest.approx([-1.0, -2.0, -2.0, -1.0], abs=0.02)
    assert only_within(run.changed("coolant", "coolant.supply_temperature"))
    assert not run.changed("coolant", "coolant.flow").any()


@pytest.mark.parametrize(("reach", "devices"), [("unit", 128), ("jobs", 128), ("fleet", 168)])
def test_a_power_cap_lowers_clock_and_power_together(reach: str, devices: int) -> None:
    run = Run(Line(PowerCap(share=0.1, reach=reach), ONSET, END, "pdu:sim-p1"), nodes=24)
    bits, clock, power = (run.column(f"gpu.{name}") for name in ("throttle_reasons", "sm_clock", "power"))
    capped = (bits[WITHIN] == 0x4).any(axis=0)
    assert capped[:devices].all()
    ratio = np.median(clock[WITHIN][:, capped], axis=0) / np.median(clock[:90][:, capped], axis=0)
    assert ratio == pytest.approx(0.9, abs=0.02)
    assert np.median(power[WITHIN][:, capped]) < 0.9 * np.median(power[:90][:, capped])
    assert np.median(power[WITHIN][:, capped], axis=0).max() < 1.02 * 700 * 0.9**1.7  # no GPU above the cap
    assert not (bits[:90] == 0x4).any()
    assert not (bits[240:] == 0x4).any()
    if reach == "unit":
        assert not capped[devices:].any()


def test_of_overlapping_power_caps_the_lowest_applies() -> None:
    lowest = Line(PowerCap(share=0.14, reach="fleet"), ONSET, END, "pdu:sim-p1")
    beneath = Line(PowerCap(share=0.07, reach="unit"), ONSET, END, "pdu:sim-p1")
    alone, both = Run(lowest, nodes=24), Run(lowest, beneath, nodes=24)
    for name in ("sm_clock", "power", "throttle_reasons"):
        assert np.array_equal(both.column(f"gpu.{name}"), alone.column(f"gpu.{name}"))
    assert np.array_equal(both.column("rank.compute_time"), alone.column("rank.compute_time"), equal_nan=True)


def test_benign_warming_and_offsets_stay_below_the_size_of_a_fault() -> None:
    run = simulate_fault(InletRise(rise=2.0, ramp=400.0), "rack:sim-r1")
    rise = np.median(
        (run.column("sensor.temperature") - simulate_quiet_hour().column("sensor.temperature"))[140:190, 0::2], axis=0
    )
    assert rise == pytest.approx(2.0, abs=0.5)
    run = simulate_fault(SensorOffset(size=1.0, which=0.0, direction="up", work=300.0), "gpu:sim-n003.0")
    shift = (run.column("gpu.temperature") - simulate_quiet_hour().column("gpu.temperature"))[:, 16]
    assert [set(shift[ticks]) for ticks in (slice(120), slice(120, 240), slice(240, None))] == [{0.0}, {1.0}, {0.0}]
    service = run.events("maintenance_start", "maintenance_end")
    assert [(e.entity, e.kind, (e.time - run.simulator.start) / SECOND) for e in service] == [
        ("gpu:sim-n003.0", "maintenance_start", ONSET),
        ("gpu:sim-n003.0", "maintenance_end", ONSET + 300),
    ]
    assert "mode" not in SensorOffset().parameters()  # a constant reading is broken
    for kind in (SetpointShift, PowerCap, InletRise, SensorOffset):
        assert kind.detectability == "benign"
        assert kind.rate.value >= 20
