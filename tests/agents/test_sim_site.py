"""Faults of power, cooling and air, and what a site does on purpose: each shows where it should."""

from __future__ import annotations

import numpy as np
import pytest

from agents.sim.confounders.plant import InletRise, PowerCap, SensorOffset, SetpointShift
from agents.sim.faults.cooling import CoolantLeak, FacilityWater, Recirculation
from agents.sim.faults.power import PduTrip, PsuLoss
from agents.sim.layout import PSUS
from agents.sim.scenario import Line
from pipeline.records import SECOND
from tests.agents.sim_hour import END, ONSET, WITHIN, Run, only_within, quiet, struck


def test_the_other_supplies_of_a_node_carry_what_one_of_them_loses() -> None:
    run = struck(PsuLoss(part="supply", brake="no", extent="node"), "psu:sim-n002.3")
    output, lost = run.column("psu.output_power"), PSUS + 3
    others = [i for i in range(PSUS, 2 * PSUS) if i != lost]
    assert output[WITHIN, lost].max() == 0
    ratio = output[WITHIN, others] / quiet().column("psu.output_power")[WITHIN, others]
    assert np.abs(ratio - PSUS / (PSUS - 1)).max() < 0.02
    changed = run.changed("psu", "psu.output_power")
    assert only_within(changed)
    assert set(np.flatnonzero(changed.any(axis=0))) == {lost, *others}
    assert set(run.column("psu.status")[WITHIN, lost]) == {2}
    assert run.column("psu.input_voltage")[WITHIN, lost].min() > 220  # its input is well
    assert not run.changed("gpu", "gpu.sm_clock").any()


def test_a_supply_without_input_says_so() -> None:
    run = struck(PsuLoss(part="feed", brake="no", extent="node"), "psu:sim-n002.0")
    assert run.column("psu.input_voltage")[WITHIN, PSUS].max() == 0
    assert set(run.column("psu.input_status")[WITHIN, PSUS]) == {1}
    assert only_within(run.changed("psu", "psu.input_status"))


def test_a_shelf_takes_the_same_supply_of_all_nodes_of_its_rack_and_may_brake_them() -> None:
    run = struck(PsuLoss(part="supply", brake="yes", extent="rack"), "psu:sim-n010.1")
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


def test_all_nodes_of_a_tripped_unit_vanish_and_boot_with_counters_from_zero() -> None:
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
    stays = run.simulator.schedule.stays
    assert any(stay.end == ONSET for stay in stays)
    assert all(stay.end <= ONSET or stay.begin >= END + 300 or stay.gpus.min() >= 128 for stay in stays)


def test_warm_facility_water_warms_a_whole_loop_at_equal_resistance() -> None:
    run = struck(FacilityWater(rise=6.0, course="step"), "cdu:sim-c1")
    supply = run.column("coolant.supply_temperature") - quiet().column("coolant.supply_temperature")
    assert supply[WITHIN, 0] == pytest.approx(6.0, abs=0.01)
    heat = (run.column("gpu.temperature") - quiet().column("gpu.temperature"))[WITHIN]
    assert np.median(heat) == pytest.approx(6.0, abs=0.5)
    assert not run.changed("coolant", "coolant.flow").any()
    assert not run.changed("gpu", "gpu.power").any()
    assert only_within(run.changed("coolant", "coolant.supply_temperature"))


def test_fouling_grows_over_its_time_and_can_be_seen_from_3_kelvin_on() -> None:
    run = struck(FacilityWater(rise=6.0, course="fouling", days=30.0), "cdu:sim-c1")
    (line,) = run.simulator.truth()
    assert line["parameters"]["detectable"] == "2026-01-01T00:23:20.000000Z"  # half of two thirds of 1500 s
    rise = (run.column("coolant.supply_temperature") - quiet().column("coolant.supply_temperature"))[:, 0]
    assert rise[140] == pytest.approx(3.0, abs=0.1)
    assert rise[200] == pytest.approx(6.0, abs=0.1)


def test_a_leak_empties_the_reservoir_before_its_rope_is_wet() -> None:
    run = struck(CoolantLeak(loss=0.4, wet=0.5), "rack:sim-r2")
    level, pressure = run.column("reservoir.level", "coolant")[:, 0], run.column("coolant.pressure")[:, 0]
    assert level[163] / level[:90].mean() == pytest.approx(1 - 0.4 * 730 / 1500, abs=0.01)
    assert pressure[230:240].mean() / pressure[:90].mean() == pytest.approx(0.88, abs=0.02)
    wet = run.column("leak.state")
    assert np.flatnonzero(wet[:, 1]).tolist() == list(range(165, 240))
    assert not wet[:, 0].any()
    told = [(e.entity, e.data["state"], (e.time - run.simulator.start) / SECOND) for e in run.events("leak")]
    assert told == [("leak_detector:sim-r2", "active", 1650.0), ("leak_detector:sim-r2", "cleared", 2401.0)]
    assert run.events("leak")[0].data["since"] == run.simulator.at(1650.0)
    assert not run.events("flow_collapse", "pressure_collapse")
    assert run.simulator.truth()[0]["entities"] == ["rack:sim-r2", "leak_detector:sim-r2"]


def test_recirculation_warms_the_inlets_of_a_row_and_runs_up_its_fans() -> None:
    run = Run(Line(Recirculation(rise=8.0, ramp=600.0), ONSET, END, "rack:sim-r1"), nodes=40)
    heat, fan = run.column("sensor.temperature")[:, 0::2], run.column("sensor.fan_speed")[:, 1::2]
    rise = np.median(heat[160:235], axis=0) - np.median(heat[:90], axis=0)
    assert rise[:32] == pytest.approx(8.0, abs=1.0)
    assert np.abs(rise[32:]).max() <= 1.0
    assert (np.median(fan[160:235], axis=0)[:32] > 10_500).all()
    assert np.median(fan[160:235], axis=0)[32:].max() < 8_500
    assert len(run.simulator.truth()[0]["entities"]) == 4


def test_a_set_point_moves_supply_and_gpus_there_and_back() -> None:
    run = struck(SetpointShift(shift=2.0, direction="down", ramp=600.0), "cdu:sim-c1")
    shift = (run.column("coolant.supply_temperature") - quiet().column("coolant.supply_temperature"))[:, 0]
    assert shift[[120, 150, 165, 210]] == pytest.approx([-1.0, -2.0, -2.0, -1.0], abs=0.02)
    assert only_within(run.changed("coolant", "coolant.supply_temperature"))
    assert not run.changed("coolant", "coolant.flow").any()


@pytest.mark.parametrize(("reach", "devices"), [("unit", 128), ("jobs", 128), ("fleet", 168)])
def test_a_power_cap_takes_clock_and_power_together(reach: str, devices: int) -> None:
    run = Run(Line(PowerCap(share=0.1, reach=reach), ONSET, END, "pdu:sim-p1"), nodes=24)
    bits, clock, power = (run.column(f"gpu.{name}") for name in ("throttle_reasons", "sm_clock", "power"))
    capped = (bits[WITHIN] == 0x4).any(axis=0)
    assert capped[:devices].all()
    ratio = np.median(clock[WITHIN][:, capped], axis=0) / np.median(clock[:90][:, capped], axis=0)
    assert ratio == pytest.approx(0.9, abs=0.02)
    assert np.median(power[WITHIN][:, capped]) < 0.9 * np.median(power[:90][:, capped])
    assert not (bits[:90] == 0x4).any()
    assert not (bits[240:] == 0x4).any()
    if reach == "unit":
        assert not capped[devices:].any()


def test_benign_warmth_and_offsets_stay_below_what_a_fault_is() -> None:
    run = struck(InletRise(rise=2.0, ramp=400.0), "rack:sim-r1")
    rise = np.median((run.column("sensor.temperature") - quiet().column("sensor.temperature"))[140:190, 0::2], axis=0)
    assert rise == pytest.approx(2.0, abs=0.5)
    run = struck(SensorOffset(size=1.0, which=0.0, mode="biased", direction="up"), "gpu:sim-n003.0")
    assert set((run.column("gpu.temperature") - quiet().column("gpu.temperature"))[90:240, 16]) == {1.0}
    for kind in (SetpointShift, PowerCap, InletRise, SensorOffset):
        assert kind.detectability == "benign"
        assert kind.rate.value >= 20
