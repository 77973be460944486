"""The coolant detector: collapse, slow loss, warm supply, second sensors and common movement."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.base.cohorts import comparable_attributes
from detectors.heat.coolant import Coolant
from pipeline.model.records import LEVELS, SECOND, Event
from pipeline.model.topology import Topology
from tests.detectors.cases.case import at_known_site
from tests.detectors.conftest import Site

START, STEP = 1_790_000_000 * SECOND, 10 * SECOND


def scaled(signal, factor, loop=0, since=60):
    def change(tick, values):
        if tick >= since:
            values["coolant"][signal][loop] *= factor

    return change


def blind(*signals):
    """A site whose loops do not measure some signals."""

    def change(values):
        for signal in signals:
            values["coolant"].pop(signal, None)

    return change


def lost(factor, since=60):
    """A pump that turns slower: speed and flow fall with it, pressure with its square."""
    parts = {"coolant.flow": factor, "pump.speed": factor, "coolant.pressure": factor**2}

    def change(tick, values):
        for signal, share in parts.items():
            scaled(signal, share, since=since)(tick, values)

    return change


def test_a_collapse_pages_at_the_second_sample(site, watch):
    found = watch(Coolant(), site, 80, lost(0.5))
    assert (found[0].entity, found[0].level) == ("cdu:c0", "page")
    assert found[0].time == START + 61 * STEP
    assert found[0].onset == START + 60 * STEP
    assert found[0].evidence["expected"] == pytest.approx(300, rel=0.02)


@pytest.mark.slow
def test_one_broken_reading_gives_no_finding(site, watch):
    def change(tick, values):
        if tick % 50 == 40:
            values["coolant"]["coolant.flow"][2] = 0.0

    assert watch(Coolant(), site, 400, change) == []


def test_a_loss_of_a_sixth_is_a_ticket_within_minutes(site, watch):
    def change(tick, values):
        blind("coolant.pressure", "pump.speed")(values)
        scaled("coolant.flow", 0.83)(tick, values)

    found = watch(Coolant(), site, 200, change)
    ticket = next(f for f in found if f.level == "ticket")
    assert (ticket.time - START) / SECOND <= 600 + 240


def test_a_loss_of_a_sixth_confirmed_by_the_pump_is_a_ticket_without_a_hold(site, watch):
    def change(tick, values):
        scaled("coolant.flow", 0.83)(tick, values)
        scaled("pump.speed", 0.8)(tick, values)

    found = watch(Coolant(), site, 200, change)
    ticket = next(f for f in found if f.level == "ticket")
    assert ticket.time <= START + 100 * STEP
    assert ticket.evidence["corroborated_by"] == ["pump.speed"]
    assert "page" not in {f.level for f in found}


def test_less_flow_while_gpus_of_the_loop_throttle_by_heat_pages(site, watch):
    def change(tick, values):
        scaled("coolant.flow", 0.83)(tick, values)
        if tick >= 100:
            values["gpu"]["gpu.throttle_reasons"][:] = 0x40

    found = watch(Coolant(), site, 130, change)
    assert next(f for f in found if f.level == "page").time == START + 100 * STEP


@pytest.mark.parametrize(("nodes", "level"), [(1, "suspect"), (2, "suspect"), (3, "page")])
def test_gpus_that_throttle_on_one_node_or_two_are_no_harm_of_their_loop(site, watch, nodes, level):
    def change(tick, values):
        scaled("coolant.flow", 0.83)(tick, values)
        if tick >= 100:
            values["gpu"]["gpu.throttle_reasons"][: 4 * nodes] = 0x40

    found = watch(Coolant(), site, 200, change)
    assert max((f.level for f in found), key=LEVELS.index) == level


@pytest.mark.parametrize(("hot", "level"), [(4, "suspect"), (8, "suspect"), (12, "page")])
def test_a_warm_supply_is_as_near_to_a_limit_as_gpus_of_several_nodes(site, watch, hot, level):
    def change(tick, values):
        values["coolant"]["coolant.supply_temperature"][0] += min(max(tick - 60, 0) / 30, 1) * 3.6
        values["gpu"]["gpu.temperature"] = np.where(np.arange(16) < hot, 79.0, 55.0)

    found = watch(Coolant(), site, 110, change)
    assert max((f.level for f in found), key=LEVELS.index) == level


def test_a_warm_supply_is_found(site, watch):
    def change(tick, values):
        values["coolant"]["coolant.supply_temperature"][3] += min(max(tick - 60, 0) / 30, 1) * 5

    found = watch(Coolant(), site, 200, change)
    assert {f.entity for f in found} == {"cdu:c3"}
    assert found[-1].level == "page"
    assert found[-1].signals[0] == "coolant.supply_temperature"


def together(supply=0.0, minutes=20.0, throttles=False, start=60, **factors):
    """All loops together: factors of flow, pressure and pump speed; supplies that warm over some minutes."""

    def change(tick, values):
        since = max(tick - start, 0) / 6
        for signal, factor in factors.items():
            values["coolant"][signal.replace("__", ".")][:] *= factor if tick >= start else 1.0
        values["coolant"]["coolant.supply_temperature"][:] += supply * min(since / minutes, 1.0)
        if throttles and tick >= 90:
            values["gpu"]["gpu.throttle_reasons"][:] = 0x40

    return change


LESS = {"coolant__flow": 0.8, "coolant__pressure": 0.64, "pump__speed": 0.8}


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("change", "level"),
    [
        (together(**LESS), "ticket"),
        (together(18.0), "page"),
        (together(7.0, 18.0, start=250), "ticket"),
        (together(coolant__flow=0.6, throttles=True), "page"),
    ],
)
def test_a_common_loss_of_all_loops_is_one_finding_on_the_shared_entity(site, watch, change, level):
    site.topology.merge({f"cdu:c{i}": ("facility:west", "site:x") for i in range(5)})
    found = watch(Coolant(), site, 500, change)
    assert {f.entity for f in found if f.level != "suspect"} == {"facility:west"}
    assert len({f.onset for f in found if f.entity == "facility:west"}) == 1
    assert found[-1].level == level
    assert len(found[-1].evidence["loops"]) == 5


@pytest.mark.parametrize("failing", [(0,), (0, 1), (1, 3)])
def test_of_four_loops_only_those_that_fail_are_blamed(site, watch, failing):
    def change(tick, values):
        values["coolant"] = {name: column[:4].copy() for name, column in values["coolant"].items()}
        for loop in failing if tick >= 60 else ():
            for signal in ("coolant.flow", "pump.speed"):
                values["coolant"][signal][loop] *= 0.4
            values["coolant"]["coolant.pressure"][loop] *= 0.16

    site.names["coolant"] = site.names["coolant"][:4]
    found = watch(Coolant(), site, 300, change)
    assert {(f.entity, f.level) for f in found} == {(f"cdu:c{i}", "page") for i in failing}


@pytest.mark.slow
@pytest.mark.parametrize("rise", [4.0, 9.0])
def test_failed_pumps_and_the_warm_supply_of_another_loop_are_not_one_cause(site, watch, rise):
    def change(tick, values):
        values["coolant"] = {name: column[:4].copy() for name, column in values["coolant"].items()}
        for loop in (0, 1) if tick >= 60 else ():
            for signal, share in {"coolant.flow": 0.4, "coolant.pressure": 0.16, "pump.speed": 0.4}.items():
                values["coolant"][signal][loop] *= share
        values["coolant"]["coolant.supply_temperature"][2] += min(max(tick - 60, 0) / 30, 1) * rise

    site.names["coolant"] = site.names["coolant"][:4]
    found = watch(Coolant(), site, 300, change)
    assert {f.entity for f in found} == {"cdu:c0", "cdu:c1", "cdu:c2"}
    assert all("supply" in f.summary for f in found if f.entity == "cdu:c2")


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("hour", [3.0, -3.0])
def test_weather_that_moves_all_loops_by_three_kelvin_an_hour_is_no_ticket(site, watch, hour):
    def change(tick, values):
        values["coolant"]["coolant.supply_temperature"] += hour * min(max(tick - 100, 0) / 360, 2.5)

    assert {f.level for f in watch(Coolant(), site, 1300, change)} <= {"suspect"}


@pytest.mark.slow
@pytest.mark.parametrize(("own", "level"), [(2.5, "suspect"), (5.5, "ticket")])
def test_a_set_point_of_one_loop_counts_above_the_morning_rise_of_all(site, watch, own, level):
    def change(tick, values):
        share = min(max(tick - 300, 0) / 180, 1)
        values["coolant"]["coolant.supply_temperature"] += share * np.where(np.arange(5) == 2, 3 + own, 3)
        values["coolant"]["coolant.supply_temperature"][tick % 7 % 5] = np.nan  # some are not read at each instant
        values["coolant"]["coolant.supply_temperature"][(tick + 3) % 7 % 5] = np.nan

    found = watch(Coolant(), site, 700, change)
    assert max((f.level for f in found if f.entity == "cdu:c2"), key=LEVELS.index) == level
    assert {f.level for f in found if f.entity != "cdu:c2"} <= {"suspect"}


@pytest.mark.slow
def test_a_loop_whose_flow_follows_its_own_load_does_not_page(site, watch):
    def change(tick, values):
        values["gpu"]["gpu.power"] = np.full(16, 300.0 if tick >= 58 else 700.0)
        for signal, share in {"coolant.flow": 0.6, "coolant.pressure": 0.36, "pump.speed": 0.6}.items():
            scaled(signal, share, since=66)(tick, values)

    found = watch(Coolant(), site, 300, change)
    assert {f.level for f in found} <= {"suspect"}
    assert "as its load" in found[-1].summary


def test_collapsed_flows_without_pressure_page_on_the_whole_site_at_the_second_sample(site, watch):
    def change(tick, values):
        blind("coolant.pressure", "pump.speed")(values)
        together(coolant__flow=0.4)(tick, values)

    found = watch(Coolant(), site, 80, change)
    assert {(f.entity, f.level) for f in found} == {("site:all", "page")}
    assert found[0].time == START + 61 * STEP


@pytest.mark.slow
def test_meters_that_all_fall_while_pressure_and_pumps_are_constant_do_not_page(site, watch):
    assert {f.level for f in watch(Coolant(), site, 300, together(6.0, 1e-3, coolant__flow=0.6))} == {"suspect"}


@pytest.mark.slow
def test_pumps_that_follow_the_load_of_the_hall_do_not_page(site, watch):
    def change(tick, values):
        values["gpu"]["gpu.power"] = np.full(16, 300.0 if tick >= 58 else 700.0)
        together(**LESS)(tick, values)

    assert {f.level for f in watch(Coolant(), site, 300, change)} <= {"suspect"}


def test_a_flow_that_is_back_ends_the_condition(site, watch):
    def change(tick, values):
        if tick < 120:
            lost(0.6)(tick, values)

    found = watch(Coolant(), site, 200, change)
    assert found[-1].time <= START + 121 * STEP


@pytest.mark.slow
def test_a_flow_accepted_as_normal_is_the_new_usual_even_if_the_feedback_comes_between_frames(site, watch):
    detector = Coolant()
    assert watch(detector, site, 120, lost(0.6))[-1].level == "page"
    detector.accept_as_normal("cdu:c0", {})
    copy = Coolant()
    copy.restore(detector.snapshot())
    assert watch(copy, site, 200, lost(0.6), first=120) == []


@pytest.mark.slow
def test_a_common_departure_is_accepted_with_its_loops(site, watch):
    detector = Coolant()
    assert watch(detector, site, 120, together(**LESS))[-1].entity == "site:all"
    detector.accept_as_normal("site:all", {})
    assert watch(detector, site, 200, together(**LESS), first=120) == []


@pytest.mark.slow
def test_a_loop_without_peers_gets_a_ticket_after_the_hold_and_no_page(site, watch):
    site.names["coolant"] = ["cdu:alone"]

    def change(tick, values):
        values["coolant"] = {s: v[:1].copy() for s, v in values["coolant"].items()}
        blind("coolant.pressure", "pump.speed")(values)
        scaled("coolant.flow", 0.83)(tick, values)

    found = watch(Coolant(), site, 300, change)
    assert found[-1].level == "ticket"
    assert "page" not in {f.level for f in found}


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.91, 0.95])
def test_a_small_loss_that_lasts_for_a_minute_is_a_ticket_and_never_a_page(site, watch, share):
    def change(tick, values):
        blind("coolant.pressure", "pump.speed")(values)
        scaled("coolant.flow", share)(tick, values)

    found = watch(Coolant(), site, 400, change)
    assert found[-1].level == "ticket"
    assert "page" not in {f.level for f in found}


@pytest.mark.slow
def test_a_small_loss_of_a_pump_that_is_turned_down_stays_a_suspect(site, watch):
    assert {f.level for f in watch(Coolant(), site, 400, lost(0.94))} == {"suspect"}


@pytest.mark.slow
def test_loops_of_another_make_are_not_compared(site, watch):
    """Two makes that move apart: each is judged within its own kind, and both kinds are too few for a cohort."""
    facts = {f"cdu:c{i}": {"sku": "A" if i < 4 else "B"} for i in range(5)}
    site.topology.merge({}, facts)

    def change(tick, values):
        if tick >= 60:
            values["coolant"]["coolant.flow"][:4] *= 0.8

    found = watch(Coolant(), site, 300, change)
    assert {(f.entity, f.level, f.evidence["judged"]) for f in found} == {("site:all", "suspect", 4)}


def test_loops_that_differ_only_in_serial_number_and_place_are_peers():
    alike = {
        comparable_attributes({"model": "X1", "serial": serial, "location": serial, "bmc": serial}) for serial in "abc"
    }
    assert len(alike) == 1
    assert comparable_attributes({"model": "X2", "serial": "a"}) not in alike


def test_a_loop_without_flow_from_the_start_is_idle(site, watch):
    def change(tick, values):
        values["coolant"]["coolant.flow"][1] = 0.0

    assert watch(Coolant(), site, 300, change) == []


@pytest.mark.slow
def test_a_flow_that_falls_alone_is_its_meter_and_does_not_page(site, watch):
    found = watch(Coolant(), site, 300, scaled("coolant.flow", 0.6))
    assert {f.level for f in found} == {"suspect"}
    assert found[-1].evidence["doubted"]


@pytest.mark.slow
def test_a_valve_that_closes_raises_the_pressure_and_is_a_ticket(site, watch):
    def change(tick, values):
        scaled("coolant.flow", 0.8)(tick, values)
        scaled("coolant.pressure", 1.15)(tick, values)

    ticket = next(f for f in watch(Coolant(), site, 200, change) if f.level == "ticket")
    assert ticket.evidence["corroborated_by"] == ["coolant.pressure"]


@pytest.mark.slow
def test_a_supply_that_jumps_within_a_sample_is_its_sensor(site, watch):
    def change(tick, values):
        if tick >= 60:
            values["coolant"]["coolant.supply_temperature"][3] += 8

    assert {f.level for f in watch(Coolant(), site, 400, change)} == {"suspect"}


def warming(values, tick, since, kelvin=4.0, minutes=5):
    values["coolant"]["coolant.supply_temperature"][3] += kelvin * min(max(tick - since, 0) / (6 * minutes), 1)


@pytest.mark.parametrize("size", [30.0, -20.0])
def test_one_wild_sample_moves_nothing_and_silences_nothing(site, watch, size):
    def change(tick, values):
        if tick in (60, 90):
            values["coolant"]["coolant.supply_temperature"][3] += size
        warming(values, tick, 120)

    found = watch(Coolant(), site, 200, change)
    assert found[0].time > START + 120 * STEP
    page = next(f for f in found if f.level == "page")
    assert page.time <= START + (120 + 30) * STEP


def test_a_warm_supply_that_is_repaired_at_once_ends(site, watch):
    def change(tick, values):
        if tick < 240:
            warming(values, tick, 60, 8.0)

    detector = Coolant()
    assert watch(detector, site, 300, change)[-1].time <= START + 250 * STEP
    assert not detector.conditions


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("size", [8.0, -8.0])
@pytest.mark.parametrize("later", [200, 600])
def test_water_that_warms_after_its_sensor_stepped_pages(site, watch, size, later):
    """Two hours later too: after an hour the stepped reading is the usual one."""

    def change(tick, values):
        if tick >= 100:
            values["coolant"]["coolant.supply_temperature"][3] += size
        warming(values, tick, later, 12.0 if size < 0 and later == 200 else 5.0)

    found = watch(Coolant(), site, later + 100, change)
    assert "page" not in {f.level for f in found if f.time < START + later * STEP}
    assert {f.level for f in found if f.time > START + later * STEP} & {"page"}


def test_a_step_of_the_supply_that_the_return_follows_is_real(site, watch):
    def change(tick, values):
        returned = values["coolant"]["coolant.supply_temperature"] + 8.0
        values["coolant"]["coolant.return_temperature"] = returned
        if tick >= 60:
            values["coolant"]["coolant.supply_temperature"][3] += 8
            returned[3] += 8 if tick >= 66 else 0

    assert watch(Coolant(), site, 200, change)[-1].level == "ticket"


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("kelvin", [1.0, 2.0, 3.0, -3.0])
def test_a_set_point_that_is_moved_does_not_page(site, watch, kelvin):
    """As far as operators move it, within ten minutes."""

    def change(tick, values):
        values["coolant"]["coolant.supply_temperature"][3] += min(max(tick - 60, 0) / 60, 1) * kelvin

    assert {f.level for f in watch(Coolant(), site, 600, change)} <= {"suspect"}


@pytest.mark.slow
@pytest.mark.parametrize("kelvin", [4.6, 7.5])
def test_a_supply_that_warms_slowly_and_harms_none_is_a_ticket(site, watch, kelvin):
    def change(tick, values):
        values["coolant"]["coolant.supply_temperature"][3] += min(max(tick - 240, 0) / 150, 1) * kelvin

    assert max((f.level for f in watch(Coolant(), site, 700, change)), key=LEVELS.index) == "ticket"


@pytest.mark.slow
def test_water_that_warms_by_three_kelvin_within_minutes_pages(site, watch):
    def change(tick, values):
        values["coolant"]["coolant.supply_temperature"][3] += min(max(tick - 60, 0) / 30, 1) * 3.5

    page = next(f for f in watch(at_known_site(Coolant()), site, 200, change) if f.level == "page")
    assert page.time - page.onset <= 600 * SECOND


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(("core", "level"), [(50.0, "ticket"), (78.0, "page")])
@pytest.mark.parametrize("margin", [False, True])
def test_a_warm_supply_pages_only_where_gpus_are_near_their_limit(site, watch, core, level, margin):
    def change(tick, values):
        values["gpu"]["gpu.temperature"] = np.full(16, 50.0 if margin else core)
        if margin:
            values["gpu"]["gpu.thermal_margin"] = np.full(16, 80.0 - core)
        values["coolant"]["coolant.supply_temperature"][0] += min(max(tick - 60, 0) / 30, 1) * 4.5

    found = watch(at_known_site(Coolant()), site, 300, change)
    assert max((f.level for f in found), key=LEVELS.index) == level


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(("spread", "step"), [(0.8, 0.5), (1.0, 0.1), (0.5, 1.0)])
def test_noise_of_a_supply_that_lasts_for_minutes_does_not_page(site, watch, spread, step):
    """First-order noise of 95 s, as of a valve that hunts, in steps of the sensor."""
    rng, state = np.random.default_rng(4), np.zeros(8)

    def change(tick, values):
        supply, kept = values["coolant"]["coolant.supply_temperature"], np.exp(-10 / 95)
        state[:] = kept * state + spread * np.sqrt(1 - kept**2) * rng.standard_normal(8)
        supply[:] = np.round((32.0 + state[: len(supply)]) / step) * step

    assert {f.level for f in watch(Coolant(), site, 4000, change)} <= {"suspect"}


@pytest.mark.slow
def test_maintenance_of_a_loop_does_not_page(site, watch):
    def change(tick, values):
        lost(0.3)(tick, values) if tick < 100 else None
        kind = {59: "maintenance_start", 101: "maintenance_end"}.get(tick)
        return [Event(START + tick * STEP, "cdu:c0", kind, {"reason": "filter"})] if kind else []

    assert {f.level for f in watch(Coolant(), site, 300, change)} <= {"suspect"}


@pytest.mark.slow
def test_findings_continue_over_a_restart(site, watch):
    whole, first, second = Coolant(), Coolant(), Coolant()
    alike = Site(5), Site(5)
    expected = watch(whole, alike[0], 150, lost(0.7))
    parts = watch(first, alike[1], 75, lost(0.7))
    second.restore(first.snapshot())
    assert parts + watch(second, alike[1], 75, lost(0.7), first=75) == expected


@pytest.mark.slow
def test_nan_constants_and_absurd_values_are_accepted(site, watch):
    def change(tick, values):
        for number, column in enumerate(values["coolant"].values() if tick > 40 else ()):
            column[(tick + number) % 5] = (np.nan, -1.0, 0.0, 1e12, np.inf)[tick % 7 % 5]

    assert "page" not in {f.level for f in watch(Coolant(), site, 300, change)}


def units(status, interval=1, speed=0.0, since=60):
    """Two pumps of cdu:c0 beside the loops, read each `interval` frames; the first one, and its CDU, get a status."""

    def change(tick, values):
        columns = {signal: np.append(v, [np.nan, np.nan]) for signal, v in values["coolant"].items()}
        columns["pump.speed"][5:] = 3200.0
        columns["coolant.status"] = np.zeros(7)
        if tick >= since:
            columns["coolant.status"][[0, 5]], columns["pump.speed"][5] = status, speed
        if tick % interval:
            columns["coolant.status"][:] = np.nan
        values["coolant"] = columns

    return change


@pytest.fixture
def pumps(site):
    site.names["coolant"] += ["pump:c0.1", "pump:c0.2"]
    site.topology = Topology({**site.topology.parents, "pump:c0.1": ["cdu:c0"], "pump:c0.2": ["cdu:c0"]})
    return site


@pytest.mark.parametrize("interval", [1, 3, 6])
def test_a_pump_that_its_bmc_reports_as_critical_is_a_ticket_and_its_cdu_is_not_named_beside_it(pumps, watch, interval):
    found = watch(Coolant(), pumps, 120, units(2, interval))
    assert {(f.entity, f.level, f.summary) for f in found} == {
        ("pump:c0.1", "ticket", "Pump 1 of c0: failed, status critical, 0 rpm")
    }
    assert found[0].onset == START + 60 * STEP
    assert found[0].time == START + (60 + interval) * STEP


@pytest.mark.parametrize("status", [0, 1, 5])
def test_a_warning_or_a_pump_in_standby_is_no_failed_pump(pumps, watch, status):
    assert watch(Coolant(), pumps, 120, units(status)) == []


def test_a_critical_status_in_one_reading_or_during_maintenance_is_not_reported(pumps, watch):
    def once(tick, values):
        units(2 if tick == 70 else 0)(tick, values)

    assert watch(Coolant(), pumps, 120, once) == []

    def announced(tick, values):
        units(2)(tick, values)
        return [Event(START, "cdu:c0", "maintenance_start", {"seconds": 7200.0})] if tick == 0 else None

    assert watch(Coolant(), pumps, 120, announced) == []


def test_a_failed_pump_ends_with_its_status(pumps, watch):
    detector = Coolant()
    assert watch(detector, pumps, 100, units(2))
    assert watch(detector, pumps, 40, units(0), first=100) == []
    assert not detector.conditions
