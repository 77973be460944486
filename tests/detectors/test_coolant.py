"""The coolant detector: collapse, slow loss, warm supply, second sensors and common movement."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.base.cohorts import comparable_attributes
from detectors.heat.coolant import Coolant
from pipeline.model.records import LEVELS, SECOND, Event
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


def test_one_broken_reading_gives_no_finding(site, watch):
    def change(tick, values):
        if tick % 50 == 40:
            values["coolant"]["coolant.flow"][2] = 0.0

    assert watch(Coolant(), site, 400, change) == []


def test_a_loss_of_a_sixth_is_a_suspect_and_pages_after_the_hold(site, watch):
    def change(tick, values):
        blind("coolant.pressure", "pump.speed")(values)
        scaled("coolant.flow", 0.83)(tick, values)

    found = watch(Coolant(), site, 200, change)
    assert found[0].level == "suspect"
    page = next(f for f in found if f.level == "page")
    assert 600 <= (page.time - page.onset) / SECOND <= 1000


def test_a_loss_of_a_sixth_confirmed_by_the_pump_pages_without_a_hold(site, watch):
    def change(tick, values):
        scaled("coolant.flow", 0.83)(tick, values)
        scaled("pump.speed", 0.8)(tick, values)

    page = next(f for f in watch(Coolant(), site, 200, change) if f.level == "page")
    assert page.time <= START + 100 * STEP
    assert page.evidence["corroborated_by"] == ["pump.speed"]


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


@pytest.mark.parametrize(
    "change",
    [together(**LESS), together(18.0), together(7.0, 18.0, start=250), together(coolant__flow=0.6, throttles=True)],
)
def test_a_common_loss_of_all_loops_is_one_page_on_the_shared_entity(site, watch, change):
    site.topology.merge({f"cdu:c{i}": ("facility:west", "site:x") for i in range(5)})
    found = watch(Coolant(), site, 500, change)
    assert {f.entity for f in found} == {"facility:west"}
    assert len({f.onset for f in found}) == 1
    assert found[-1].level == "page"
    assert len(found[-1].evidence["loops"]) == 5


def test_collapsed_flows_without_pressure_page_on_the_whole_site_at_the_second_sample(site, watch):
    def change(tick, values):
        blind("coolant.pressure", "pump.speed")(values)
        together(coolant__flow=0.4)(tick, values)

    found = watch(Coolant(), site, 80, change)
    assert {(f.entity, f.level) for f in found} == {("site:all", "page")}
    assert found[0].time == START + 61 * STEP


def test_meters_that_all_fall_while_pressure_and_pumps_are_constant_do_not_page(site, watch):
    assert {f.level for f in watch(Coolant(), site, 300, together(6.0, 1e-3, coolant__flow=0.6))} == {"suspect"}


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
    assert found[-1].evidence["peers"] == 4


def test_a_flow_accepted_as_normal_is_the_new_usual_even_if_the_feedback_comes_between_frames(site, watch):
    detector = Coolant()
    assert watch(detector, site, 120, lost(0.6))[-1].level == "page"
    detector.accept_as_normal("cdu:c0", {})
    copy = Coolant()
    copy.restore(detector.snapshot())
    assert watch(copy, site, 200, lost(0.6), first=120) == []


def test_a_common_departure_is_accepted_with_its_loops(site, watch):
    detector = Coolant()
    assert watch(detector, site, 120, together(**LESS))[-1].entity == "site:all"
    detector.accept_as_normal("site:all", {})
    assert watch(detector, site, 200, together(**LESS), first=120) == []


def test_a_loop_without_peers_gets_a_ticket_after_the_hold_and_no_page(site, watch):
    site.names["coolant"] = ["cdu:alone"]

    def change(tick, values):
        values["coolant"] = {s: v[:1].copy() for s, v in values["coolant"].items()}
        blind("coolant.pressure", "pump.speed")(values)
        scaled("coolant.flow", 0.83)(tick, values)

    assert [*dict.fromkeys(f.level for f in watch(Coolant(), site, 300, change))] == ["suspect", "ticket"]


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


def test_a_flow_that_falls_alone_is_its_meter_and_does_not_page(site, watch):
    found = watch(Coolant(), site, 300, scaled("coolant.flow", 0.6))
    assert {f.level for f in found} == {"suspect"}
    assert found[-1].evidence["doubted"]


def test_a_valve_that_closes_raises_the_pressure_and_pages(site, watch):
    def change(tick, values):
        scaled("coolant.flow", 0.8)(tick, values)
        scaled("coolant.pressure", 1.15)(tick, values)

    page = next(f for f in watch(Coolant(), site, 200, change) if f.level == "page")
    assert page.evidence["corroborated_by"] == ["coolant.pressure"]


def test_a_supply_that_jumps_within_a_sample_is_its_sensor(site, watch):
    def change(tick, values):
        if tick >= 60:
            values["coolant"]["coolant.supply_temperature"][3] += 8

    assert "page" not in {f.level for f in watch(Coolant(), site, 400, change)}


@pytest.mark.parametrize("kelvin", [1.0, 2.0, 3.0, -3.0])
def test_a_set_point_that_is_moved_does_not_page(site, watch, kelvin):
    """As far as operators move it, within ten minutes."""

    def change(tick, values):
        values["coolant"]["coolant.supply_temperature"][3] += min(max(tick - 60, 0) / 60, 1) * kelvin

    assert {f.level for f in watch(Coolant(), site, 600, change)} <= {"suspect"}


@pytest.mark.parametrize(("kelvin", "level"), [(4.6, "ticket"), (7.5, "page")])
def test_a_supply_that_warms_slowly_is_a_ticket_and_a_page_when_two_set_points_cannot_explain_it(
    site, watch, kelvin, level
):
    def change(tick, values):
        values["coolant"]["coolant.supply_temperature"][3] += min(max(tick - 240, 0) / 150, 1) * kelvin

    assert max((f.level for f in watch(Coolant(), site, 700, change)), key=LEVELS.index) == level


def test_water_that_warms_by_three_kelvin_within_minutes_pages(site, watch):
    def change(tick, values):
        values["coolant"]["coolant.supply_temperature"][3] += min(max(tick - 60, 0) / 30, 1) * 3.5

    page = next(f for f in watch(at_known_site(Coolant()), site, 200, change) if f.level == "page")
    assert page.time - page.onset <= 600 * SECOND


def test_maintenance_of_a_loop_does_not_page(site, watch):
    def change(tick, values):
        lost(0.3)(tick, values) if tick < 100 else None
        kind = {59: "maintenance_start", 101: "maintenance_end"}.get(tick)
        return [Event(START + tick * STEP, "cdu:c0", kind, {"reason": "filter"})] if kind else []

    assert {f.level for f in watch(Coolant(), site, 300, change)} <= {"suspect"}


def test_findings_continue_over_a_restart(site, watch):
    whole, first, second = Coolant(), Coolant(), Coolant()
    alike = Site(5), Site(5)
    expected = watch(whole, alike[0], 150, lost(0.7))
    parts = watch(first, alike[1], 75, lost(0.7))
    second.restore(first.snapshot())
    assert parts + watch(second, alike[1], 75, lost(0.7), first=75) == expected


def test_nan_constants_and_absurd_values_are_accepted(site, watch):
    def change(tick, values):
        for number, column in enumerate(values["coolant"].values() if tick > 40 else ()):
            column[(tick + number) % 5] = (np.nan, -1.0, 0.0, 1e12, np.inf)[tick % 7 % 5]

    assert "page" not in {f.level for f in watch(Coolant(), site, 300, change)}
