"""The coolant detector: collapse, slow loss, warm supply, second sensors and common movement."""

from __future__ import annotations

import pytest

from detectors.cohorts import likeness
from detectors.coolant import Coolant
from pipeline.records import SECOND

START, STEP = 1_790_000_000 * SECOND, 10 * SECOND


def scaled(signal, factor, loop=0, since=60):
    def change(tick, values):
        if tick >= since:
            values["coolant"][signal][loop] *= factor

    return change


def test_a_collapse_pages_at_the_second_sample(site, watch):
    found = watch(Coolant(), site, 80, scaled("coolant.flow", 0.5))
    assert (found[0].entity, found[0].level) == ("cdu:c0", "page")
    assert found[0].time == START + 61 * STEP
    assert found[0].onset == START + 60 * STEP
    assert found[0].evidence["expected"] == pytest.approx(300, rel=0.02)


def test_one_broken_reading_is_nothing(site, watch):
    def change(tick, values):
        if tick % 50 == 40:
            values["coolant"]["coolant.flow"][2] = 0.0

    assert watch(Coolant(), site, 400, change) == []


def test_a_loss_of_a_sixth_is_suspected_then_paged_after_the_hold(site, watch):
    found = watch(Coolant(), site, 200, scaled("coolant.flow", 0.83))
    assert found[0].level == "suspect"
    page = next(f for f in found if f.level == "page")
    assert 600 <= (page.time - page.onset) / SECOND <= 1000


def test_the_pump_corroborates_a_loss_of_a_sixth_and_pages_at_once(site, watch):
    def change(tick, values):
        scaled("coolant.flow", 0.83)(tick, values)
        scaled("pump.speed", 0.8)(tick, values)

    page = next(f for f in watch(Coolant(), site, 200, change) if f.level == "page")
    assert page.time <= START + 100 * STEP
    assert page.evidence["corroborated_by"] == ["pump.speed"]


def test_a_warm_supply_is_found(site, watch):
    def change(tick, values):
        if tick >= 60:
            values["coolant"]["coolant.supply_temperature"][3] += 5

    found = watch(Coolant(), site, 200, change)
    assert {f.entity for f in found} == {"cdu:c3"}
    assert found[-1].level == "page"
    assert found[-1].signals[0] == "coolant.supply_temperature"


def test_what_all_loops_do_together_is_no_fault(site, watch):
    def change(tick, values):
        if tick >= 60:
            values["coolant"]["coolant.flow"][:] *= 0.6
            values["coolant"]["coolant.supply_temperature"][:] += 6

    assert watch(Coolant(), site, 300, change) == []


def test_a_loop_without_peers_gets_a_ticket_after_the_hold_and_no_page(site, watch):
    site.names["coolant"] = ["cdu:alone"]

    def change(tick, values):
        values["coolant"] = {s: v[:1].copy() for s, v in values["coolant"].items()}
        scaled("coolant.flow", 0.83)(tick, values)

    assert [*dict.fromkeys(f.level for f in watch(Coolant(), site, 300, change))] == ["suspect", "ticket"]


def test_loops_of_another_make_are_no_peers(site, watch):
    """Two makes that move apart: each is judged by its own kind only, and both kinds are too few to be one."""
    facts = {f"cdu:c{i}": {"sku": "A" if i < 4 else "B"} for i in range(5)}
    site.topology.merge({}, facts)

    def change(tick, values):
        if tick >= 60:
            values["coolant"]["coolant.flow"][:4] *= 0.8

    assert watch(Coolant(), site, 300, change) == []


def test_loops_that_differ_in_serial_number_and_place_alone_are_peers():
    alike = {likeness({"model": "X1", "serial": serial, "location": serial, "bmc": serial}) for serial in "abc"}
    assert len(alike) == 1
    assert likeness({"model": "X2", "serial": "a"}) not in alike


def test_a_loop_that_stands_still_from_the_start_is_idle(site, watch):
    def change(tick, values):
        values["coolant"]["coolant.flow"][1] = 0.0

    assert watch(Coolant(), site, 300, change) == []
