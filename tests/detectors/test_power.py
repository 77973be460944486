"""Lost supplies, tripped units and the power brake; and power policy, load swings or a wrong meter."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.power.power import Power, _merge_by_entity
from detectors.power.supplies import Supplies
from pipeline.model.records import SECOND, Event, Finding, Frame
from pipeline.model.signals import class_of_entity
from pipeline.model.topology import Topology

START, FAULT = 1_790_000_000 * SECOND, 40
NAMES = {
    "node": tuple(f"node:r{r}n{n}" for r in range(2) for n in range(4)),
    "gpu": tuple(f"gpu:r{r}n{n}.{g}" for r in range(2) for n in range(4) for g in range(2)),
    "psu": tuple(f"psu:r{r}n{n}.{p}" for r in range(2) for n in range(4) for p in range(4)),
    "power": ("pdu:p0", "pdu:p1"),
}


class Site:
    """Eight nodes with four supplies in two racks, each on its own PDU."""

    def __init__(self) -> None:
        parents = {f"rack:r{r}": [f"pdu:p{r}"] for r in range(2)} | {n: [f"rack:{n[5:7]}"] for n in NAMES["node"]}
        parents |= {e: [f"node:{e[4:8]}"] for e in (*NAMES["gpu"], *NAMES["psu"])}
        self.detector, self.topology, self.findings = Power(), Topology(parents), []

    def run(self, change=lambda values: None, ticks=20, events=()):
        """FAULT healthy instants, then `ticks` with the values that `change` alters."""
        for tick in range(FAULT + ticks):
            values = {
                "node": {"node.load1": np.full(8, 20.0)},
                "gpu": {"gpu.throttle_reasons": np.zeros(16)},
                "psu": {"psu.status": np.zeros(32), "psu.output_power": np.full(32, 1500.0 + tick % 3)},
                "power": {"power.voltage": np.full(2, 415.0), "power.draw": np.full(2, 24e3)},
            }
            if tick >= FAULT:
                change(values)
            mine = [e for e in events if tick == FAULT]
            frames = {
                c: Frame(START + tick * 10 * SECOND, c, NAMES[c], v, self.topology, _of(mine, c))
                for c, v in values.items()
            }
            self.findings += self.detector.observe(frames)
        return {(f.entity, f.level) for f in self.findings}


def _of(events, device_class):
    return tuple(e for e in events if class_of_entity(e.entity) == device_class)


@pytest.fixture
def site():
    return Site()


def test_a_supply_that_its_bmc_reports_as_failed_is_a_ticket(site):
    def failed(values):
        values["psu"]["psu.status"][5], values["psu"]["psu.output_power"][5] = 2, 0

    assert site.run(failed) == {("psu:r0n1.1", "ticket")}
    assert site.findings[0].summary == "Power supply 1 of r0n1: failed, 3 left in its chassis"


def test_a_lost_supply_with_the_brake_on_pages(site):
    def braked(values):
        values["psu"]["psu.status"][5] = 2
        values["gpu"]["gpu.throttle_reasons"][2:4] = 0x80 | 0x4

    assert ("psu:r0n1.1", "page") in site.run(braked)
    assert {f.entity for f in site.findings} <= {"psu:r0n1.1", "node:r0n1"}


def test_more_than_half_of_the_supplies_lost_pages(site):
    def failed(values):
        values["psu"]["psu.status"][4:7] = 2

    assert site.run(failed) == {("node:r0n1", "page")}


def test_supplies_that_cannot_carry_the_load_page(site):
    def failed(values):
        values["psu"]["psu.capacity"] = np.full(32, 1900.0)
        values["psu"]["psu.status"][5] = 2

    assert site.run(failed) == {("psu:r0n1.1", "page")}


def test_the_same_supply_of_all_nodes_of_a_rack_is_one_loss_of_the_rack(site):
    def failed(values):
        values["psu"]["psu.status"][2:16:4] = 2

    assert site.run(failed) == {("rack:r0", "ticket")}


def test_a_supply_without_output_that_its_bmc_reports_as_well_is_a_suspect_as_a_cold_spare(site):
    def silent(values):
        values["psu"]["psu.output_power"][4:8] = (2000, 0, 2000, 2000)

    assert site.run(silent) == {("psu:r0n1.1", "suspect")}


@pytest.mark.slow
@pytest.mark.parametrize("state", [5, 6])
def test_supplies_that_take_turns_in_standby_are_never_lost(site, state):
    """Cold redundancy: two of four supplies of each chassis rest, in turns of ten minutes."""
    changes = iter(range(10_000))

    def resting(values):
        rests = (np.arange(32) + next(changes) // 60) % 2 == 0
        values["psu"]["psu.output_power"] = np.where(rests, 0.0, 3000.0)
        values["psu"]["psu.status"] = np.where(rests, state, 0)

    assert site.run(resting, ticks=400) == set()


def test_a_supply_that_fails_after_standby_is_a_ticket(site):
    changes = iter(range(10_000))

    def failing(values):
        late = next(changes) >= 60
        values["psu"]["psu.output_power"][5] = 0.0
        values["psu"]["psu.status"][5] = 2 if late else 5

    assert site.run(failing, ticks=100) == {("psu:r0n1.1", "ticket")}
    assert site.findings[0].onset == START + (FAULT + 60) * 10 * SECOND


@pytest.mark.parametrize("every", [1, 3, 6])
def test_the_supplies_of_a_rack_are_one_loss_however_seldom_each_is_read(site, every):
    """every: readings of 10 s between two of a BMC; each BMC is read at another moment."""
    ticks, phase = iter(range(10_000)), np.repeat(np.arange(8), 4)

    def unfed(values):
        tick = next(ticks)
        values["psu"]["psu.status"][1:16:4] = 2
        unread = (tick + phase) % every != 0
        for column in values["psu"].values():
            column[unread] = np.nan

    healthy = Site.run

    def seldom(values):
        unfed(values)

    found = healthy(site, seldom, ticks=60)
    assert ("rack:r0", "ticket") in found or ("pdu:p0", "ticket") in found


def test_a_load_that_falls_everywhere_gives_no_finding(site):
    def idle(values):
        values["psu"]["psu.output_power"][:] = 100.0
        values["power"]["power.draw"][:] = 8e3

    assert {level for _, level in site.run(idle)} <= set()


def test_the_power_cap_bit_gives_no_finding(site):
    def capped(values):
        values["gpu"]["gpu.throttle_reasons"][:] = 0x4 | 0x1

    assert site.run(capped, 60) == set()


def test_the_brake_alone_is_a_ticket_and_a_page_after_five_minutes(site):
    def braked(values):
        values["gpu"]["gpu.throttle_reasons"][:8] = 0x80

    assert site.run(braked, 20) == {("rack:r0", "ticket")}
    assert ("rack:r0", "page") in Site().run(braked, 60)


def test_one_reading_of_a_bit_gives_no_finding(site):
    ticks = iter(range(100))

    def once(values):
        if next(ticks) == 0:
            values["gpu"]["gpu.throttle_reasons"][3] = 0x80

    assert site.run(once) == set()


def test_a_unit_without_voltage_whose_nodes_are_silent_pages(site):
    def tripped(values):
        values["power"]["power.voltage"][0] = values["power"]["power.draw"][0] = 0
        values["node"]["node.load1"][:4] = values["psu"]["psu.output_power"][:16] = np.nan
        values["psu"]["psu.status"][:16] = values["gpu"]["gpu.throttle_reasons"][:8] = np.nan

    assert {("pdu:p0", "page")} <= site.run(tripped)
    assert {f.entity for f in site.findings} == {"pdu:p0"}
    assert "no voltage, 4 of 4 nodes silent" in site.findings[-1].summary


@pytest.mark.parametrize(
    ("nodes", "found"), [(4, {("pdu:p0", "page")}), (1, {("pdu:p0", "ticket"), ("node:r0n0", "ticket")})]
)
def test_a_tripped_unit_pages_while_its_nodes_run_on_their_other_feed_and_names_their_supplies(site, nodes, found):
    def tripped(values):
        values["power"]["power.voltage"][0] = values["power"]["power.draw"][0] = 0
        values["psu"]["psu.input_status"] = np.zeros(32)
        values["psu"]["psu.input_status"][: 4 * nodes : 2] = 1
        values["psu"]["psu.output_power"][: 4 * nodes : 2] = 0.0
        values["psu"]["psu.output_power"][1 : 4 * nodes : 2] *= 2

    assert site.run(tripped) == found
    if nodes == 4:
        assert site.findings[-1].summary == "PDU p0: no voltage, 4 of 4 nodes on their other feed"


def test_a_meter_that_reads_nothing_while_its_nodes_report_is_a_ticket(site):
    def dead(values):
        values["power"]["power.voltage"][0] = 0

    assert site.run(dead) == {("pdu:p0", "ticket")}


def test_announced_work_on_a_supply_gives_no_finding(site):
    def pulled(values):
        values["psu"]["psu.status"][5] = 4

    work = Event(START + FAULT * 10 * SECOND, "node:r0n1", "maintenance_start", {"seconds": 3600.0})
    assert site.run(pulled, events=[work]) == set()
    assert Site().run(pulled) == {("psu:r0n1.1", "ticket")}


def test_a_recovered_supply_ends_its_condition(site):
    ticks = iter(range(100))

    def for_a_while(values):
        if next(ticks) < 6:
            values["psu"]["psu.status"][5] = 2

    site.run(for_a_while, 30)
    assert site.detector.conditions == {}


def test_the_brake_of_a_node_that_is_gone_ends(site):
    def gone(values):
        values["gpu"]["gpu.throttle_reasons"][2:4] = 0x80 if site.reported < 3 else np.nan
        site.reported += 1

    site.reported = 0
    assert site.run(gone, ticks=90) == {("node:r0n1", "ticket")}
    assert max(f.time for f in site.findings) < START + (FAULT + 12) * 10 * SECOND


@pytest.mark.parametrize(("signal", "bad", "well", "hours"), [("psu.status", 2, 0, 1), ("power.voltage", 0, 415, 24)])
def test_a_loss_without_further_readings_ends(signal, bad, well, hours):
    site, topology = Power(), Site().topology
    device_class = signal.split(".")[0]

    def shown(time, value):
        values = np.full(len(NAMES[device_class]), float(well))
        values[1] = value
        frame = Frame(time, device_class, NAMES[device_class], {signal: values}, topology, ())
        node = Frame(time, "node", NAMES["node"], {"node.load1": np.full(8, 20.0)}, topology, ())
        return site.observe({device_class: frame, "node": node})

    for tick in range(60):
        shown(START + tick * 10 * SECOND, well if tick < 30 else bad)
    end = START + 600 * SECOND
    assert shown(end + (hours * 3600 - 60) * SECOND, np.nan)
    assert shown(end + (hours * 3600 + 60) * SECOND, np.nan) == []


@pytest.mark.parametrize("invalid", [np.inf, -np.inf, 2.0**64, -1.0, 65535.0])
def test_an_invalid_status_gives_no_finding(site, invalid):
    def absurd(values):
        values["psu"]["psu.status"][3] = invalid

    assert site.run(absurd) == set()


def test_two_conditions_of_one_entity_are_one_finding():
    finding = Finding(START, START - 5, "rack:r0", "power", "ticket", 1.0, "a brake", {"clears": "x"}, ("a",))
    other = Finding(START, START - 9, "rack:r0", "power", "page", 1.0, "a loss", {"clears": "y"}, ("b",))
    (joined,) = _merge_by_entity([finding, other])
    assert (joined.level, joined.onset, joined.summary) == ("page", START - 9, "a loss (+1 more)")
    assert joined.evidence["also"] == ["a brake"]
    assert joined.signals == ("b", "a")


@pytest.mark.parametrize("every", [1, 3, 6])
def test_the_usual_time_between_readings_is_that_of_supplies_read_less_often_than_others(every):
    supplies, names = Supplies(), NAMES["psu"][:4]
    for tick in range(400):
        output = np.where(np.arange(4) < 2, 1500.0, 1500.0 if tick % every == 0 else np.nan)
        frame = Frame(START + tick * 10 * SECOND, "psu", names, {"psu.output_power": output}, Topology({}))
        supplies.update(frame, frame.time)
    assert supplies.every[:4] == pytest.approx(np.array([10, 10, 10 * every, 10 * every]) * SECOND, rel=0.05)
