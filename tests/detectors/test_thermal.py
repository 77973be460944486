"""Thermal resistance: one GPU, a node, a rack, wear over days; sensors, loads and set-points that look similar."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.base.gates import SETTLES
from detectors.heat.thermal import Thermal
from pipeline.model.records import SECOND, Event, Frame
from tests.detectors.cases.case import at_known_site
from tests.detectors.cases.thermal import CASE, GPUS, GUILTY, PLATE, SUPPLY, WIDTH, heat, topology

AT = GPUS.index(GUILTY)


def run_detector(change, ticks=240, detector=None, first=0):
    """Findings; `change(tick, values, resistance)` breaks something before and after the physics."""
    detector, graph, out = detector or Thermal(), topology(), []
    for tick in range(first, first + ticks):
        rng = np.random.default_rng([tick, 1])
        resistance = PLATE * np.exp(np.random.default_rng(3).normal(0, 0.1, len(GPUS)))
        before = change(tick, None, resistance)
        values = heat(rng, resistance, SUPPLY if before is None else before)
        events = change(tick, values, resistance)
        out += detector.observe(CASE.frames_of(tick, values, events if isinstance(events, list) else [], graph))
    return out


def plate(share, gpus=(AT,), since=60):
    def change(tick, values, resistance):
        if values is None and tick >= since:
            resistance[list(gpus)] *= share

    return change


def reading(signal, more, gpus=(AT,), since=60):
    def change(tick, values, resistance):
        if values is not None and tick >= since:
            values["gpu"][signal][list(gpus)] += more

    return change


def levels(found):
    return {f.level for f in found}


def test_a_rise_of_15_percent_is_a_ticket_within_ten_minutes():
    found = run_detector(plate(1.15), detector=at_known_site(Thermal()))
    assert {f.entity for f in found} == {GUILTY}
    ticket = next(f for f in found if f.level != "suspect")
    assert ticket.time - CASE.time(60) <= 600 * SECOND
    assert abs(found[-1].onset - CASE.time(60)) <= 120 * SECOND


def test_a_gpu_that_throttles_by_heat_pages_in_the_same_frame():
    def change(tick, values, resistance):
        plate(1.6)(tick, values, resistance)
        if values is not None and tick >= 66:
            values["gpu"]["gpu.throttle_reasons"][AT] = 0x40

    page = next(f for f in run_detector(change) if f.level == "page")
    assert page.time - CASE.time(60) <= 180 * SECOND
    assert page.evidence["throttled"]


def test_all_gpus_of_a_node_are_one_finding_on_the_node():
    found = run_detector(plate(1.4, range(8, 16)))
    assert {f.entity for f in found if f.level == "ticket"} == {"node:n1"}
    assert "manifold" in found[-1].evidence["verdict"]


def test_a_whole_loop_that_moves_blames_no_gpu():
    assert run_detector(plate(1.4, range(len(GPUS)))) == []


@pytest.mark.slow
@pytest.mark.parametrize("kelvin", [2.0, 6.0, 15.0])
def test_a_core_that_warms_without_its_memory_is_a_sensor(kelvin):
    assert levels(run_detector(reading("gpu.temperature", kelvin), 250)) <= {"suspect"}


@pytest.mark.slow
@pytest.mark.parametrize("kelvin", [3.0, -3.0, 10.0, -10.0])
def test_a_set_point_or_a_supply_sensor_that_moves_gives_no_finding(kelvin):
    def real(tick, values, resistance):
        return SUPPLY + kelvin * min(max(tick - 60, 0) / 60, 1) if values is None else None

    def sensor(tick, values, resistance):
        if values is not None and tick >= 60:
            values["coolant"]["coolant.supply_temperature"] += kelvin

    assert run_detector(real, 300) == []
    assert levels(run_detector(sensor, 300)) <= {"suspect"}


def test_a_load_step_and_idle_gpus_give_no_finding():
    def change(tick, values, resistance):
        if values is not None and tick % 60 > 40:
            values["gpu"]["gpu.power"][:16] *= 0.2
            values["gpu"]["gpu.temperature"][:16] = np.rint(SUPPLY + 5)

    assert run_detector(change, 250) == []


@pytest.mark.slow
def test_a_power_that_reads_low_against_the_energy_counter_is_a_sensor():
    def change(tick, values, resistance):
        if values is not None:
            values["gpu"]["gpu.energy"] = np.full(len(GPUS), 1e9 + 640e3 * 10 * tick)
            if tick >= 60:
                values["gpu"]["gpu.power"][AT] *= 0.8

    assert "page" not in levels(run_detector(change, 250))
    assert "ticket" not in levels(run_detector(change, 250))


@pytest.mark.slow
def test_a_temperature_that_is_constant_while_the_power_moves_is_not_judged():
    def change(tick, values, resistance):
        if values is not None and tick >= 40:
            values["gpu"]["gpu.temperature"][AT] = 57.0
            values["gpu"]["gpu.power"][AT] *= 0.8 if tick >= 70 else 1.0

    assert levels(run_detector(change, 300)) <= {"suspect"}


def serviced(share, gpus):
    def change(tick, values, resistance):
        plate(share, gpus)(tick, values, resistance)
        kind = {59: "maintenance_start", 70: "maintenance_end"}.get(tick)
        return [Event(CASE.time(tick), "node:n1", kind, {"reason": "plates"})] if kind and values else None

    return change


@pytest.mark.slow
def test_plates_that_are_others_after_maintenance_are_their_new_normal():
    assert run_detector(serviced(1.3, range(8, 11)), 250) == []


@pytest.mark.slow
def test_a_node_whose_gpus_all_cool_worse_since_maintenance_is_one_ticket_on_the_node():
    found = run_detector(serviced(1.4, range(8, 16)), 250)
    assert {f.entity for f in found} == {"node:n1"}
    assert levels(found) == {"suspect", "ticket"}
    assert found[0].time - CASE.time(70) <= SETTLES + 300 * SECOND


@pytest.mark.slow
def test_a_gpu_that_will_reach_its_limit_within_the_hour_pages_and_one_far_from_it_does_not():
    def change(limit):
        def warm(tick, values, resistance):
            if values is None:
                resistance[AT] *= 1 + 1.2 * min(max(tick - 60, 0) / 400, 1)
            else:
                margin = limit - values["gpu"]["gpu.temperature"]
                values["gpu"] |= {"gpu.thermal_margin": margin, "gpu.slowdown_margin": np.zeros(len(GPUS))}

        return warm

    page = next(f for f in run_detector(change(82.0), 300) if f.level == "page")
    assert page.evidence["minutes_to_limit"] <= 60
    assert page.evidence["kelvin_left"] > 3
    assert "page" not in levels(run_detector(change(200.0), 300))


@pytest.mark.slow
def test_wear_over_days_is_one_ticket_although_samples_are_lost():
    detector, graph, found = Thermal(), topology(), []
    for tick in range(5600):  # 56 h, a sample every 36 s
        resistance = PLATE * np.exp(np.random.default_rng(3).normal(0, 0.1, len(GPUS)))
        resistance[AT] *= 1 + 0.12 * tick / 5600
        values = heat(np.random.default_rng([tick, 1]), resistance)
        values["gpu"]["gpu.temperature"][AT] = np.nan if tick % 50 == 0 else values["gpu"]["gpu.temperature"][AT]
        frames = CASE.frames_of(0, values, [], graph)
        moved = {c: Frame(f.time + tick * 36 * SECOND, c, f.entities, f.values, graph) for c, f in frames.items()}
        found += detector.observe(moved)
    worn = [f for f in found if "worse than when new" in f.summary]
    assert {(f.entity, f.level) for f in worn} == {(GUILTY, "ticket")}
    assert len({f.onset for f in worn}) == 1


def test_nan_constants_vanishing_and_new_gpus_and_time_that_steps_back_are_accepted():
    detector, graph = Thermal(), topology()
    for tick in range(200):
        values = heat(np.random.default_rng([tick, 1]), np.full(len(GPUS), PLATE))
        for column in values["gpu"].values():
            column[tick % 32] = np.nan
            column[:4] = np.nan if tick > 100 else column[:4]
        if tick < 50:
            values["gpu"] = {name: column[: 2 * WIDTH] for name, column in values["gpu"].items()}
        at = tick - 30 if tick == 120 else tick
        assert detector.observe(CASE.frames_of(at, values, [], graph)) == []


@pytest.mark.slow
def test_findings_continue_over_a_restart():
    first, second = Thermal(), Thermal()
    whole = run_detector(plate(1.4), 160)
    parts = run_detector(plate(1.4), 80, first)
    second.restore(first.snapshot())
    assert parts + run_detector(plate(1.4), 80, second, 80) == whole


@pytest.mark.parametrize("bits", [0x8, 0x20, 0x40])
def test_a_gpu_that_reports_thermal_throttling_is_a_suspect_then_a_ticket_at_any_resistance(bits):
    found = run_detector(reading("gpu.throttle_reasons", bits), 150)
    assert {f.entity for f in found} == {GUILTY}
    assert (found[0].time, found[0].onset, found[0].level) == (CASE.time(61), CASE.time(60), "suspect")
    assert next(f for f in found if f.level == "ticket").time == CASE.time(84)
    assert "page" not in levels(found)
    named = (
        "HW slowdown for" if bits == 0x8 else "thermal throttle for"
    )  # 0x8 is set for power and external signals, too
    assert all(named in f.summary for f in found)


def test_a_gpu_that_throttles_for_a_minute_while_its_fans_follow_the_load_is_no_ticket():
    def change(tick, values, resistance):
        if values is not None and tick % 100 in range(60, 66):
            values["gpu"]["gpu.throttle_reasons"][AT] = 0x20

    assert levels(run_detector(change, 300)) == {"suspect"}


def at_its_limit(tick, values, resistance, until=10**9):
    if values is not None:
        values["gpu"]["gpu.thermal_margin"] = np.where(np.arange(len(GPUS)) == AT, 1.0, 20.0)
        if 60 <= tick < until:
            values["gpu"]["gpu.throttle_reasons"][AT] = 0x40


def test_a_gpu_of_unknown_resistance_that_throttles_at_its_limit_for_ten_minutes_pages():
    def change(tick, values, resistance):
        at_its_limit(tick, values, resistance)
        if values is not None:
            values["gpu"]["gpu.power"][AT] = np.nan

    found = run_detector(change, 150)
    page = next(f for f in found if f.level == "page")
    assert page.time - page.onset == 600 * SECOND


@pytest.mark.slow
def test_a_gpu_with_normal_resistance_close_to_its_limit_is_one_ticket_for_a_day_and_no_page():
    def change(tick, values, resistance):
        at_its_limit(tick, values, resistance, until=200)

    detector = Thermal()
    found = run_detector(change, 500, detector)
    assert {f.entity for f in found} == {GUILTY}
    assert "page" not in levels(found)
    assert len({f.onset for f in found}) == 1
    assert found[-1].time - found[0].time > 430 * 10 * SECOND
    assert "recurring thermal throttle" in found[-1].summary
    again = Thermal()
    again.restore(detector.snapshot())
    assert {f.level for f in run_detector(change, 30, again, 500)} == {"ticket"}
    assert run_detector(change, 30, detector, 500 + 8640 - 270) == []


@pytest.mark.slow
def test_maintenance_of_a_gpu_with_recurring_throttling_ends_its_ticket():
    def change(tick, values, resistance):
        at_its_limit(tick, values, resistance, until=100)
        if values is not None and tick in (150, 160):
            kind = "maintenance_start" if tick == 150 else "maintenance_end"
            return [Event(CASE.time(tick), "node:n1", kind, {"reason": "plates"})]
        return None

    assert max(f.time for f in run_detector(change, 300)) <= CASE.time(160) + SETTLES


@pytest.mark.slow
def test_a_gpu_close_to_its_limit_stays_one_ticket_while_idle_and_does_not_page_in_a_dip_of_its_load():
    def change(tick, values, resistance):
        at_its_limit(tick, values, resistance, until=200)
        if values is not None and 150 <= tick < 153:
            values["gpu"]["gpu.temperature"][AT] = np.nan
        if values is not None and tick >= 220:
            values["gpu"]["gpu.power"][AT], values["gpu"]["gpu.temperature"][AT] = 90.0, SUPPLY + 4.0

    found = run_detector(change, 500)
    assert {f.entity for f in found} == {GUILTY}
    assert "page" not in levels(found)
    assert found[-1].time >= CASE.time(490)


@pytest.mark.slow
@pytest.mark.parametrize("follows", [0.4, 0.5, 0.7])
def test_a_plate_whose_memory_follows_in_part_is_reported_and_stays_reported(follows):
    def change(tick, values, resistance):
        if values is not None and tick >= 60:
            core, mine = values["gpu"]["gpu.temperature"], np.arange(len(GPUS)) == AT
            warmer = np.where(mine, 0.3 * (core - SUPPLY), 0.0)
            values["gpu"]["gpu.temperature"] = core + warmer
            values["gpu"]["gpu.memory_temperature"] += follows * warmer

    found = run_detector(change, 500)
    assert {"ticket", "page"} & levels(found)
    assert found[-1].time >= CASE.time(490)


@pytest.mark.slow
def test_a_memory_temperature_that_stops_does_not_excuse_the_core():
    def change(tick, values, resistance):
        plate(1.3)(tick, values, resistance)
        if values is not None and tick >= 60:
            values["gpu"]["gpu.memory_temperature"][AT] -= 12.0 if tick < 180 else np.nan

    assert {"ticket", "page"} & {f.level for f in run_detector(change, 400) if f.time >= CASE.time(250)}


@pytest.mark.slow
def test_a_power_brake_one_sample_a_whole_loop_and_announced_work_are_not_throttling_of_a_gpu():
    def once(tick, values, resistance):
        if values is not None and tick == 60:
            values["gpu"]["gpu.throttle_reasons"][AT] = 0x40

    def work(tick, values, resistance):
        reading("gpu.throttle_reasons", 0x40)(tick, values, resistance)
        if values is not None and tick == 59:
            return [Event(CASE.time(tick), "node:n1", "maintenance_start", {"reason": "plates"})]
        return None

    for change in (reading("gpu.throttle_reasons", 0x88), once, work):
        assert run_detector(change, 120) == []
    assert {f.entity for f in run_detector(reading("gpu.throttle_reasons", 0x40, range(len(GPUS))), 120)} == {"cdu:c1"}


def test_most_gpus_of_a_node_that_throttle_by_heat_are_reported_as_the_node():
    assert {f.entity for f in run_detector(reading("gpu.throttle_reasons", 0x40, range(8, 16)), 120)} == {"node:n1"}


def loaded(detector, ticks, resistance, lie=lambda tick: 0.0, cold=False, power=lambda tick: 640.0):
    """Dies that lag their power by 15 s; `resistance(tick)` of GUILTY against usual, `lie`: K of the supply sensor."""
    rng, graph, out = np.random.default_rng(1), topology(), []
    plates = PLATE * np.exp(np.random.default_rng(3).normal(0, 0.05, len(GPUS)))
    core = np.full(len(GPUS), 40.0) if cold else SUPPLY + plates * power(0)
    for tick in range(ticks):
        factor = np.where(np.arange(len(GPUS)) == AT, resistance(tick), 1.0)
        drawn = power(tick) * (1 + 0.02 * rng.standard_normal(len(GPUS)))
        core = core + (1 - np.exp(-10 / 15)) * (SUPPLY + plates * factor * drawn - core)
        gpu = {"gpu.temperature": np.rint(core + 0.3 * rng.standard_normal(len(GPUS))), "gpu.power": np.rint(drawn)}
        gpu |= {"gpu.memory_temperature": np.rint(core + 18 * drawn / 640)}
        values = {"gpu": gpu, "coolant": {"coolant.supply_temperature": np.array([SUPPLY + lie(tick)])}}
        out += detector.observe(CASE.frames_of(tick, values, [], graph))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("kelvin", [-3.0, 3.0, -8.0])
def test_a_fault_after_the_supply_sensor_stepped_is_found_within_the_hour(kelvin):
    found = loaded(Thermal(), 500, lambda t: 1.5 if t > 150 else 1.0, lambda t: kelvin if t > 120 else 0.0)
    assert {f.entity for f in found if f.level != "suspect"} == {GUILTY}
    assert found[-1].level == "ticket"
    assert found[-1].time > CASE.time(480)


def test_a_cohort_first_seen_on_cold_plates_is_judged_within_the_hour():
    found = loaded(Thermal(), 240, lambda tick: 1.4 if tick > 100 else 1.0, cold=True)
    assert {f.entity for f in found} == {GUILTY}
    assert next(f for f in found if f.level != "suspect").time <= CASE.time(150)


@pytest.mark.slow
def test_a_gpu_that_finds_peers_has_a_new_trend_and_no_wear():
    detector, alone = Thermal(), topology()
    alone.remove_entities(GPUS)
    small = {"gpu": {}}
    rng = np.random.default_rng(1)
    for hour in range(44):
        graph = alone if hour < 24 else topology()
        n = 4 if hour < 24 else len(GPUS)
        for at in range(100):
            small["gpu"] = {name: column[:n] for name, column in heat(rng, np.full(len(GPUS), PLATE))["gpu"].items()}
            frame = CASE.frames_of(0, {"gpu": small["gpu"]}, [], graph)["gpu"]
            time = frame.time + (hour * 3600 + at * 36) * SECOND
            assert detector.observe({"gpu": Frame(time, "gpu", frame.entities, frame.values, graph)}) == []


@pytest.mark.slow
@pytest.mark.parametrize("named", [GUILTY, "node:n1", "rack:r0"])
def test_a_resistance_accepted_as_normal_becomes_the_usual_one(named):
    detector = Thermal()

    def change(tick, values, resistance):
        plate(1.4)(tick, values, resistance)
        reading("gpu.throttle_reasons", 0x40)(tick, values, resistance)

    assert run_detector(change, 120, detector)[-1].level == "page"
    detector.accept_as_normal(named, {})
    assert run_detector(change, 150, detector, 120) == []
