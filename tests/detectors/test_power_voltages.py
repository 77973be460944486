"""Voltages that sag or rise: of feeds, of inputs of supplies, of rails; and wrong meters."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.power.power import Power
from detectors.runner import Runner
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.topology import Topology
from tests.detectors.snapshots import packed

START, FAULT = 1_790_000_000 * SECOND, 30
NAMES = {
    "node": tuple(f"node:r{r}n{n}" for r in range(2) for n in range(4)),
    "gpu": tuple(f"gpu:r{r}n{n}.{g}" for r in range(2) for n in range(4) for g in range(2)),
    "psu": tuple(f"psu:r{r}n{n}.{p}" for r in range(2) for n in range(4) for p in range(4)),
    "power": ("pdu:p0", "pdu:p1"),
    "sensor": tuple(f"sensor:r{r}n{n}.{s}" for r in range(2) for n in range(4) for s in range(4)),
}
RAILS = np.tile([12.1, 54.0, 0.9, 12.0], 8)


class Site:
    """Eight nodes in two racks of one row, each rack on its own unit; two 12 V rails, a busbar and a core a node."""

    def __init__(self):
        parents = {f"rack:r{r}": [f"pdu:p{r}"] for r in range(2)} | {n: [f"rack:{n[5:7]}"] for n in NAMES["node"]}
        parents |= {e: [f"node:{e.partition(':')[2][:4]}"] for c in ("gpu", "psu", "sensor") for e in NAMES[c]}
        parents |= {"pdu:p0": ["row:1"], "pdu:p1": ["row:1"]}
        self.detector, self.topology, self.findings = Power(), Topology(parents), []
        self.rng = np.random.default_rng(0)

    def healthy(self):
        return {
            "node": {"node.load1": np.full(8, 20.0)},
            "gpu": {"gpu.throttle_reasons": np.zeros(16)},
            "psu": {
                "psu.status": np.zeros(32),
                "psu.output_power": np.full(32, 1500.0),
                "psu.input_voltage": 230 + self.rng.standard_normal(32),
                "psu.input_status": np.zeros(32),
            },
            "power": {"power.voltage": 415 + self.rng.standard_normal(2), "power.draw": np.full(2, 24e3)},
            "sensor": {"sensor.voltage": RAILS * (1 + 0.005 * self.rng.standard_normal(32))},
        }

    def run(self, change=lambda values: None, ticks=10, events=()):
        """FAULT healthy instants, then `ticks` with the values that `change` alters."""
        for tick in range(FAULT + ticks):
            values = self.healthy()
            if tick >= FAULT:
                change(values)
            mine = tuple(events) if tick == FAULT else ()
            frames = {
                c: Frame(START + tick * 30 * SECOND, c, NAMES[c], v, self.topology, mine if c == "node" else ())
                for c, v in values.items()
            }
            self.findings += self.detector.observe(frames)
        return {(f.entity, f.level) for f in self.findings}


@pytest.fixture
def site():
    return Site()


def sag(unit, share):
    """A unit and the supplies below it at a share of their voltage."""

    def change(values):
        values["power"]["power.voltage"][unit] *= share
        values["psu"]["psu.input_voltage"][16 * unit : 16 * unit + 16] *= share

    return change


def test_healthy_voltages_give_no_finding(site):
    assert site.run() == set()


def test_a_sag_within_the_permanent_tolerance_of_equipment_gives_no_finding(site):
    assert site.run(sag(0, 0.93)) == set()


def test_a_unit_that_sags_with_its_supplies_is_one_ticket(site):
    assert site.run(sag(0, 0.86)) == {("pdu:p0", "ticket")}
    assert "PDU p0: voltage sag to 3" in site.findings[0].summary
    assert site.findings[0].onset == START + FAULT * 30 * SECOND


def test_a_sag_beyond_the_short_term_tolerance_of_equipment_pages(site):
    assert ("pdu:p0", "page") in site.run(sag(0, 0.75))


def test_a_sag_across_a_row_is_one_finding_of_the_row(site):
    def row(values):
        sag(0, 0.75)(values)
        sag(1, 0.75)(values)

    assert site.run(row) == {("row:1", "page")}


def test_one_reading_gives_no_finding(site):
    def once(values):
        if not hasattr(site, "done"):
            sag(0, 0.5)(values)
            site.done = True

    assert site.run(once) == set()


def test_a_unit_whose_supplies_show_no_sag_is_a_suspect(site):
    def meter(values):
        values["power"]["power.voltage"][0] *= 0.7

    assert site.run(meter) == {("pdu:p0", "suspect")}
    assert "likely its meter" in site.findings[0].summary


def test_supplies_of_a_whole_rack_are_one_finding_where_the_feed_has_no_meter(site):
    def feed(values):
        del values["power"]["power.voltage"]
        values["psu"]["psu.input_voltage"][0:16:2] *= 0.75

    assert site.run(feed) == {("rack:r0", "page")}


def test_one_supply_alone_is_a_ticket(site):
    def one(values):
        values["psu"]["psu.input_voltage"][5] *= 0.7

    assert site.run(one) == {("psu:r0n1.1", "ticket")}


def test_an_input_that_its_bmc_reports_out_of_range_needs_no_voltage(site):
    def reported(values):
        del values["psu"]["psu.input_voltage"]
        values["psu"]["psu.input_status"][5] = 2

    assert site.run(reported) == {("psu:r0n1.1", "ticket")}
    assert "out of range" in site.findings[0].summary


def test_a_voltage_that_is_too_high_is_a_ticket(site):
    assert site.run(sag(0, 1.15)) == {("pdu:p0", "ticket")}
    assert "voltage high, " in site.findings[0].summary


def test_a_brake_below_a_sag_is_one_page(site):
    def braked(values):
        sag(0, 0.86)(values)
        values["gpu"]["gpu.throttle_reasons"][0:8] = 0x80

    assert site.run(braked, ticks=20) == {("pdu:p0", "page")}


def test_twelve_volt_rails_that_sag_are_a_ticket_of_their_node(site):
    def rails(values):
        values["sensor"]["sensor.voltage"][[4, 7]] *= 0.92

    assert site.run(rails) == {("node:r0n1", "ticket")}


def test_one_rail_among_good_ones_is_a_suspect_and_a_core_voltage_is_not_judged(site):
    def rail(values):
        values["sensor"]["sensor.voltage"][4] *= 0.92
        values["sensor"]["sensor.voltage"][10] *= 0.7

    assert site.run(rail) == {("node:r0n1", "suspect")}


def test_a_lost_input_is_not_reported_as_a_sag(site):
    def lost(values):
        values["psu"]["psu.input_voltage"][5] = 0.0
        values["psu"]["psu.input_status"][5] = 1

    assert site.run(lost) == {("psu:r0n1.1", "ticket")}
    assert "sag" not in site.findings[0].summary


def test_announced_work_gives_no_finding(site):
    work = Event(START + FAULT * 30 * SECOND, "pdu:p0", "maintenance_start", {"seconds": 7200})
    assert site.run(sag(0, 0.75), events=(work,)) == set()


def test_a_long_sag_does_not_become_the_usual_and_ends_when_it_is_over(site):
    site.run(sag(0, 0.86), ticks=400)
    assert site.detector.conditions
    site.run(ticks=5)
    assert not site.detector.conditions


def test_a_voltage_accepted_as_normal_becomes_the_usual_one(site):
    site.run(sag(0, 0.86))
    site.detector.accept_as_normal("pdu:p0", {})
    site.findings.clear()
    for _ in range(3):
        site.detector.observe({"power": _power(site, 357.0)})
    assert not site.detector.conditions


def _power(site, volts):
    values = {"power.voltage": np.array([volts, 415.0]), "power.draw": np.full(2, 24e3)}
    return Frame(START + 90_000 * SECOND, "power", NAMES["power"], values, site.topology)


def test_a_restart_midway_keeps_the_condition(site):
    site.run(sag(0, 0.86))
    state = packed(Runner([site.detector]))
    again = Runner([Power()])
    again.restore(state)
    assert again.detectors[0].snapshot()["voltages"]["off"] == site.detector.snapshot()["voltages"]["off"]
    assert again.detectors[0].conditions == site.detector.conditions


def test_absurd_and_missing_voltages_give_no_sag(site):
    def storm(values):
        values["psu"]["psu.input_voltage"][:] = np.nan
        values["power"]["power.voltage"][:] = -1.0
        values["sensor"]["sensor.voltage"][:] = np.nan

    site.run(storm)
    assert all(f.level != "page" and "sag" not in f.summary for f in site.findings)


@pytest.mark.parametrize("rails", [(0, 3), (0,), ()])
def test_a_brake_pages_at_any_rail_voltage_of_its_node(site, rails):
    def braked(values):
        values["gpu"]["gpu.throttle_reasons"][:2] = 0x80
        values["sensor"]["sensor.voltage"][list(rails)] *= 0.93

    assert ("node:r0n0", "page") in site.run(braked, ticks=40)


def test_rails_and_brakes_of_a_whole_row_are_one_page_with_counts(site):
    def all_(values):
        values["gpu"]["gpu.throttle_reasons"][:] = 0x80
        values["sensor"]["sensor.voltage"] *= 0.93

    assert site.run(all_, ticks=40) == {("row:1", "page")}
    assert "16 rails in 8 chassis" in site.findings[-1].summary
    assert "brake on 8 nodes" in site.findings[-1].summary


def test_a_possible_cold_spare_does_not_explain_a_brake(site):
    def rests(values):
        values["psu"]["psu.output_power"][:4] = (0.0, 2000.0, 2000.0, 2000.0)
        values["gpu"]["gpu.throttle_reasons"][:2] = 0x80

    assert ("node:r0n0", "page") in site.run(rests, ticks=40)


def test_feedback_works_on_a_fleet_that_has_grown_and_on_entities_above(site):
    site.run(sag(0, 0.86))
    values, more = site.healthy(), (*NAMES["psu"], "psu:new.0", "psu:new.1")
    sag(0, 0.86)(values)
    values["psu"] = {name: np.append(values, values[:2]) for name, values in values["psu"].items()}
    for tick in range(60, 63):
        names = {**NAMES, "psu": more}
        moment = START + tick * 30 * SECOND
        frames = {c: Frame(moment, c, names[c], values, site.topology) for c, values in values.items()}
        site.detector.observe(frames)
    assert site.detector.conditions
    site.detector.accept_as_normal("row:1", frames)
    site.detector.observe(frames)
    assert not site.detector.conditions


def test_a_misread_voltage_does_not_become_the_usual():
    site = Site()
    healthy = site.healthy

    def misread():
        values = healthy()
        values["psu"]["psu.input_voltage"][:4] = (
            (65_535.0, 65_535.0, 230.0, 1.0) if not hasattr(site, "seen") else 230.0
        )
        site.seen = True
        return values

    site.healthy = misread
    assert site.run(sag(0, 0.86)) == {("pdu:p0", "ticket")}
    assert np.allclose(site.detector.voltages.readings["psu.input_voltage"].cells[0, :4], 230.0, rtol=0.02)


def test_a_usual_voltage_in_another_unit_is_learned_again_but_that_of_a_dead_feed_is_not(site):
    healthy = site.healthy

    def before():
        values = healthy()
        values["psu"]["psu.input_voltage"][0] *= 100.0
        return values

    site.healthy = before
    site.run()
    site.healthy = healthy
    values = healthy()
    values["psu"]["psu.input_voltage"][1] = 5.0
    for tick in range(40, 1100):
        site.detector.observe(
            {"psu": Frame(START + tick * 30 * SECOND, "psu", NAMES["psu"], values["psu"], site.topology)}
        )
    assert np.allclose(site.detector.voltages.readings["psu.input_voltage"].cells[0, :2], 230.0, rtol=0.02)
