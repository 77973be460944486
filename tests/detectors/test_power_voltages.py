"""Voltages that sag or rise: of feeds, of what supplies take in, of rails; and meters that lie."""

from __future__ import annotations

import json

import numpy as np
import pytest

from detectors.power.power import Power
from detectors.runner import Runner
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.topology import Topology

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

    def sound(self):
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

    def run(self, change=lambda told: None, ticks=10, events=()):
        """FAULT sound instants, then some with what `change` makes of them."""
        for tick in range(FAULT + ticks):
            told = self.sound()
            if tick >= FAULT:
                change(told)
            mine = tuple(events) if tick == FAULT else ()
            frames = {
                c: Frame(START + tick * 30 * SECOND, c, NAMES[c], v, self.topology, mine if c == "node" else ())
                for c, v in told.items()
            }
            self.findings += self.detector.observe(frames)
        return {(f.entity, f.level) for f in self.findings}


@pytest.fixture
def site():
    return Site()


def sag(unit, share):
    """A unit and the supplies below it at a share of their voltage."""

    def change(told):
        told["power"]["power.voltage"][unit] *= share
        told["psu"]["psu.input_voltage"][16 * unit : 16 * unit + 16] *= share

    return change


def test_sound_voltages_say_nothing(site):
    assert site.run() == set()


def test_a_sag_within_what_equipment_bears_for_ever_says_nothing(site):
    assert site.run(sag(0, 0.93)) == set()


def test_a_unit_that_sags_with_its_supplies_is_one_ticket(site):
    assert site.run(sag(0, 0.86)) == {("pdu:p0", "ticket")}
    assert "pdu:p0: voltage sags (3" in site.findings[0].summary
    assert site.findings[0].onset == START + FAULT * 30 * SECOND


def test_a_sag_beyond_what_equipment_bears_for_seconds_pages(site):
    assert ("pdu:p0", "page") in site.run(sag(0, 0.75))


def test_a_sag_across_a_row_is_told_of_the_row_once(site):
    def row(told):
        sag(0, 0.75)(told)
        sag(1, 0.75)(told)

    assert site.run(row) == {("row:1", "page")}


def test_one_reading_is_none(site):
    def once(told):
        if not hasattr(site, "done"):
            sag(0, 0.5)(told)
            site.done = True

    assert site.run(once) == set()


def test_a_unit_whose_supplies_see_nothing_has_a_bad_meter(site):
    def meter(told):
        told["power"]["power.voltage"][0] *= 0.7

    assert site.run(meter) == {("pdu:p0", "suspect")}
    assert "more likely its meter" in site.findings[0].summary


def test_supplies_of_a_whole_rack_are_their_feeds_without_its_meter(site):
    def feed(told):
        del told["power"]["power.voltage"]
        told["psu"]["psu.input_voltage"][0:16:2] *= 0.75

    assert site.run(feed) == {("rack:r0", "page")}


def test_one_supply_alone_is_a_ticket_of_its_own(site):
    def one(told):
        told["psu"]["psu.input_voltage"][5] *= 0.7

    assert site.run(one) == {("psu:r0n1.1", "ticket")}


def test_what_a_bmc_calls_out_of_range_needs_no_voltage(site):
    def said(told):
        del told["psu"]["psu.input_voltage"]
        told["psu"]["psu.input_status"][5] = 2

    assert site.run(said) == {("psu:r0n1.1", "ticket")}
    assert "out of range" in site.findings[0].summary


def test_a_voltage_that_is_too_high_is_told(site):
    assert site.run(sag(0, 1.15)) == {("pdu:p0", "ticket")}
    assert "is too high" in site.findings[0].summary


def test_a_brake_below_a_sag_pages_and_is_not_told_twice(site):
    def braked(told):
        sag(0, 0.86)(told)
        told["gpu"]["gpu.throttle_reasons"][0:8] = 0x80

    assert site.run(braked, ticks=20) == {("pdu:p0", "page")}


def test_twelve_volt_rails_that_sag_are_a_ticket_of_their_node(site):
    def rails(told):
        told["sensor"]["sensor.voltage"][[4, 7]] *= 0.92

    assert site.run(rails) == {("node:r0n1", "ticket")}


def test_a_rail_among_sound_ones_is_a_suspect_and_a_core_is_none(site):
    def rail(told):
        told["sensor"]["sensor.voltage"][4] *= 0.92
        told["sensor"]["sensor.voltage"][10] *= 0.7

    assert site.run(rail) == {("node:r0n1", "suspect")}


def test_a_lost_input_is_no_sag(site):
    def lost(told):
        told["psu"]["psu.input_voltage"][5] = 0.0
        told["psu"]["psu.input_status"][5] = 1

    assert site.run(lost) == {("psu:r0n1.1", "ticket")}
    assert "sags" not in site.findings[0].summary


def test_announced_work_is_no_sag(site):
    work = Event(START + FAULT * 30 * SECOND, "pdu:p0", "maintenance_start", {"seconds": 7200})
    assert site.run(sag(0, 0.75), events=(work,)) == set()


def test_a_long_sag_does_not_become_the_usual_and_ends_when_it_is_over(site):
    site.run(sag(0, 0.86), ticks=400)
    assert site.detector.conditions
    site.run(ticks=5)
    assert not site.detector.conditions


def test_a_person_may_say_that_it_is_the_usual(site):
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
    state = Runner([site.detector]).snapshot()
    again = Runner([Power()])
    again.restore(json.dumps(json.loads(state)))
    assert again.detectors[0].snapshot()["voltages"]["off"] == site.detector.snapshot()["voltages"]["off"]
    assert again.detectors[0].conditions == site.detector.conditions


def test_absurd_and_missing_voltages_say_nothing(site):
    def storm(told):
        told["psu"]["psu.input_voltage"][:] = np.nan
        told["power"]["power.voltage"][:] = -1.0
        told["sensor"]["sensor.voltage"][:] = np.nan

    site.run(storm)
    assert all(f.level != "page" and "sag" not in f.summary for f in site.findings)


@pytest.mark.parametrize("rails", [(0, 3), (0,), ()])
def test_a_brake_pages_whatever_the_rails_of_its_node_show(site, rails):
    def braked(told):
        told["gpu"]["gpu.throttle_reasons"][:2] = 0x80
        told["sensor"]["sensor.voltage"][list(rails)] *= 0.93

    assert ("node:r0n0", "page") in site.run(braked, ticks=40)


def test_rails_and_brakes_of_a_whole_row_are_one_page_that_says_how_many(site):
    def all_(told):
        told["gpu"]["gpu.throttle_reasons"][:] = 0x80
        told["sensor"]["sensor.voltage"] *= 0.93

    assert site.run(all_, ticks=40) == {("row:1", "page")}
    assert "16 rails in 8 chassis" in site.findings[-1].summary
    assert "GPUs of 8 nodes" in site.findings[-1].summary


def test_a_supply_that_may_rest_excuses_no_brake(site):
    def rests(told):
        told["psu"]["psu.output_power"][:4] = (0.0, 2000.0, 2000.0, 2000.0)
        told["gpu"]["gpu.throttle_reasons"][:2] = 0x80

    assert ("node:r0n0", "page") in site.run(rests, ticks=40)


def test_a_person_may_speak_of_a_fleet_that_has_grown_and_of_what_lies_above(site):
    site.run(sag(0, 0.86))
    told, more = site.sound(), (*NAMES["psu"], "psu:new.0", "psu:new.1")
    sag(0, 0.86)(told)
    told["psu"] = {name: np.append(values, values[:2]) for name, values in told["psu"].items()}
    for tick in range(60, 63):
        names = {**NAMES, "psu": more}
        moment = START + tick * 30 * SECOND
        frames = {c: Frame(moment, c, names[c], values, site.topology) for c, values in told.items()}
        site.detector.observe(frames)
    assert site.detector.conditions
    site.detector.accept_as_normal("row:1", frames)
    site.detector.observe(frames)
    assert not site.detector.conditions


def test_a_misread_voltage_does_not_become_the_usual():
    site = Site()
    sound = site.sound

    def misread():
        told = sound()
        told["psu"]["psu.input_voltage"][:4] = (65_535.0, 65_535.0, 230.0, 1.0) if not hasattr(site, "seen") else 230.0
        site.seen = True
        return told

    site.sound = misread
    assert site.run(sag(0, 0.86)) == {("pdu:p0", "ticket")}
    assert np.allclose(site.detector.voltages.cells["psu.input_voltage"][0, :4], 230.0, rtol=0.02)


def test_a_usual_of_another_unit_is_learnt_anew_but_what_a_dead_feed_shows_is_not(site):
    sound = site.sound

    def before():
        told = sound()
        told["psu"]["psu.input_voltage"][0] *= 100.0
        return told

    site.sound = before
    site.run()
    site.sound = sound
    told = sound()
    told["psu"]["psu.input_voltage"][1] = 5.0
    for tick in range(40, 1100):
        site.detector.observe(
            {"psu": Frame(START + tick * 30 * SECOND, "psu", NAMES["psu"], told["psu"], site.topology)}
        )
    assert np.allclose(site.detector.voltages.cells["psu.input_voltage"][0, :2], 230.0, rtol=0.02)
