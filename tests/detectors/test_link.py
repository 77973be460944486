"""The link detector: flaps, drops, errors, leaves, resets and ports that are not reported."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.link.link import Link
from detectors.runner import Runner
from pipeline.model.records import SECOND, Event
from pipeline.model.topology import Topology
from tests.detectors.snapshots import packed, read, written

START, STEP = 1_790_000_000 * SECOND, 10 * SECOND
PORT = "port:n1.p2"  # index 6


def flap_at(site, *ticks):
    """At each tick the port goes down; it is up again in the next one."""

    def change(tick, values):
        if tick in ticks:
            values["nic"]["nic.state"][6] = 0
            site.counters["nic.carrier_changes"][6] += 1
        if tick - 1 in ticks:
            site.counters["nic.carrier_changes"][6] += 1
        values["nic"]["nic.carrier_changes"] = site.counters["nic.carrier_changes"].copy()

    return change


def test_the_third_flap_in_twelve_hours_pages_within_a_minute(site, watch):
    found = watch(Link(), site, 1500, flap_at(site, 100, 700, 1300))
    page = next(f for f in found if f.level == "page")
    assert page.entity == PORT
    assert page.evidence["flaps"] == 3
    assert page.time == START + 1301 * STEP
    assert {f.level for f in found if f.time < page.time} == {"suspect"}


def below(site, *parents, **facts):
    """Moves the port below these entities, with these attributes."""
    site.topology = Topology({**site.topology.parents, PORT: parents}, {PORT: facts})


def pulled(tick, values):
    """A cable is unplugged for five minutes."""
    if 50 <= tick < 80:
        values["nic"]["nic.state"][6] = 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parents", "facts", "highest"),
    [
        (("node:n1",), {}, "ticket"),
        (("node:n1",), {"wireless": True}, "suspect"),
        (("node:n1", "leaf:l2"), {"wireless": True}, "suspect"),
        (("node:n1", "leaf:l2"), {"role": "unused"}, "suspect"),
        (("node:n1", "leaf:l2"), {"role": "management"}, "ticket"),
        (("node:n1", "leaf:l2"), {"role": "storage"}, "page"),
        (("node:n1", "leaf:l2"), {}, "page"),
        (("node:n1", "rail:2"), {}, "page"),
    ],
)
def test_a_port_outside_the_fabric_never_pages(site, watch, parents, facts, highest):
    below(site, *parents, **facts)
    flaps = watch(Link(), site, 1500, flap_at(site, 100, 700, 1300))
    assert {f.level for f in flaps} == {"suspect", highest}
    assert flaps[0].level == "suspect"
    assert flaps[-1].evidence["flaps"] == 3
    assert {f.level for f in watch(Link(), site, 200, pulled)} == {"suspect", highest}
    assert {f.level for f in watch(Link(), site, 200, errors(site, 1))} == {"suspect", highest}


def test_a_port_pages_once_the_topology_shows_that_it_is_in_a_fabric(site, watch):
    below(site, "node:n1")

    def change(tick, values):
        if tick >= 50:
            values["nic"]["nic.state"][6] = 0
        if tick == 150:
            site.topology.merge({PORT: ["node:n1", "leaf:l2"]})

    found = watch(Link(), site, 200, change)
    assert [*dict.fromkeys(f.level for f in found)] == ["suspect", "ticket", "page"]
    assert next(f.time for f in found if f.level == "page") == START + 150 * STEP


@pytest.mark.slow
def test_flaps_more_than_twelve_hours_apart_are_not_summed(site, watch):
    half_a_day = 4400
    found = watch(Link(), site, 2 * half_a_day + 300, flap_at(site, 100, half_a_day, 2 * half_a_day + 100))
    assert {f.level for f in found} == {"suspect"}


def test_a_flap_between_two_samples_is_seen_by_the_counter(site, watch):
    def change(tick, values):
        if tick >= 50:
            values["nic"]["nic.carrier_changes"][6] += 2 * min(3, (tick - 40) // 10)

    found = watch(Link(), site, 100, change)
    assert found[-1].level == "page"
    assert found[-1].evidence["flaps"] == 3


def test_events_count_as_flaps_where_there_is_no_counter(site, watch):
    def change(tick, values):
        del values["nic"]["nic.carrier_changes"]
        if tick in (50, 60, 70):
            time = START + tick * STEP
            return [
                Event(time - 5 * SECOND, PORT, "link_state", {"state": "down"}),
                Event(time - SECOND, PORT, "link_state", {"state": "up"}),
            ]
        return ()

    found = watch(Link(), site, 100, change)
    assert found[-1].level == "page"
    assert found[-1].evidence["flaps"] == 3


def test_events_and_counter_of_the_same_flap_count_once(site, watch):
    def change(tick, values):
        flap_at(site, 50)(tick, values)
        states = {50: "down", 51: "up"}
        return (
            [Event(START + tick * STEP - SECOND, PORT, "link_state", {"state": states[tick]})] if tick in states else ()
        )

    found = watch(Link(), site, 100, change)
    assert max(f.evidence.get("flaps", 0) for f in found) == 1


def test_a_port_down_for_four_minutes_pages_until_it_is_up(site, watch):
    def change(tick, values):
        if 50 <= tick < 120:
            values["nic"]["nic.state"][6] = 0

    found = watch(Link(), site, 200, change)
    page = next(f for f in found if f.level == "page")
    assert (page.time - page.onset) == 240 * SECOND
    assert page.onset == START + 50 * STEP
    assert not [f for f in found if "down_s" in f.evidence and f.time >= START + 120 * STEP]


def test_a_port_that_was_never_up_is_not_reported_and_its_bring_up_is_not_a_flap(site, watch):
    def change(tick, values):
        if tick < 400:
            values["nic"]["nic.state"][6] = 0
        else:
            values["nic"]["nic.carrier_changes"][6] += 1

    assert watch(Link(), site, 600, change) == []


def errors(site, per_tick, since=50, until=10**9, signal="nic.symbol_errors"):
    def change(tick, values):
        count = per_tick * max(0, min(tick, until) - since + 1)
        values["nic"][signal] = np.zeros(16)
        values["nic"][signal][6] = count

    return change


@pytest.mark.parametrize("signal", ["nic.symbol_errors", "nic.crc_errors"])
def test_errors_at_a_hundred_times_the_healthy_rate_page_within_five_minutes(site, watch, signal):
    change = errors(site, 0.4, signal=signal)  # 144 an hour, BER 1e-13 at 400 Gb/s

    def reset_counters(tick, values):
        change(tick, values)
        values["nic"][signal] = np.floor(values["nic"][signal])

    page = next(f for f in watch(Link(), site, 120, reset_counters) if f.level == "page")
    assert page.time <= START + (50 + 30) * STEP
    assert page.signals == (signal,)


@pytest.mark.slow
def test_errors_at_the_healthy_rate_are_not_reported_in_half_a_day(site, watch):
    rng, total = np.random.default_rng(1), np.zeros(16)

    def change(tick, values):
        total[:] += rng.poisson(1.44 / 360, 16)
        values["nic"]["nic.symbol_errors"] = total.copy()

    assert [f for f in watch(Link(), site, 4320, change) if f.level != "suspect"] == []


def test_one_burst_cannot_page_alone(site, watch):
    assert [f for f in watch(Link(), site, 200, errors(site, 10_000, 50, 50)) if f.level == "page"] == []


def test_a_counter_reset_is_not_a_burst(site, watch):
    def change(tick, values):
        values["nic"]["nic.symbol_errors"] = np.full(16, 1e6 if tick < 50 else 3.0)
        values["nic"]["nic.carrier_changes"] = np.full(16, 900.0 if tick < 50 else 2.0)

    assert watch(Link(), site, 150, change) == []


def outgrown(site, generations):
    """At tick 50 the driver is loaded again; at the next reading the counters are above their former values."""

    def change(tick, values):
        later = tick >= 50
        values["nic"]["nic.symbol_errors"] = np.full(16, 500.0 if later else 3.0)
        values["nic"]["nic.carrier_changes"] = np.full(16, 12.0 if later else 2.0)
        if generations:
            values["nic"]["nic.generation"] = np.full(16, 1_790_000_000.0 + 500 * later)

    return change


def test_a_reset_counter_above_its_former_value_is_not_growth(site, watch):
    assert watch(Link(), site, 150, outgrown(site, True)) == []
    assert watch(Link(), type(site)(), 150, outgrown(site, False)) != []


def test_a_counter_reset_across_a_restart_is_recognised(site, watch):
    first, second = Link(), Link()
    change = outgrown(site, True)
    assert watch(first, site, 50, change) == []
    second.restore(first.snapshot())
    assert watch(second, site, 100, change, 50) == []


def test_a_snapshot_of_an_older_version_is_ignored_and_logged(site, watch, caplog):
    """Through the Runner, as the store keeps it."""
    change = errors(site, 0.4)
    runner, again = Runner([Link()]), Runner([Link()])
    watch(runner, type(site)(), 100, change)
    state = read(packed(runner))
    del state["detectors"]["link"]["errors"]
    again.restore(written(state))
    assert "starts with empty state" in caplog.text
    assert again.detectors[0].errors.counters == {}


def test_a_restart_through_the_store_changes_nothing(site, watch):
    change = errors(site, 0.4)
    reset_counters = watch(Runner([Link()]), site, 200, change)
    runner, again = Runner([Link()]), Runner([Link()])
    found = watch(runner, type(site)(), 65, change)
    again.restore(packed(runner))
    assert found + watch(again, type(site)(), 135, change, 65) == reset_counters
    assert [f for f in reset_counters if f.level == "page"]


def test_a_leaf_that_goes_down_is_blamed_and_its_ports_are_not(site, watch):
    def change(tick, values):
        if 50 <= tick < 80:
            values["nic"]["nic.state"][2::4] = 0

    found = watch(Link(), site, 200, change)
    assert {(f.entity, f.level) for f in found} == {("leaf:l2", "page")}
    assert found[0].time == START + 50 * STEP
    assert found[-1].time < START + 80 * STEP


def test_ports_of_one_leaf_that_fail_one_by_one_are_blamed_each(site, watch):
    def change(tick, values):
        for k, port in enumerate((2, 6, 10)):
            if tick >= 50 + 30 * k:
                values["nic"]["nic.state"][port] = 0

    found = watch(Link(), site, 200, change)
    assert {f.entity for f in found} == {"port:n0.p2", "port:n1.p2", "port:n2.p2"}


def test_the_last_ports_of_a_leaf_that_is_back_are_not_blamed_one_by_one(site, watch):
    """They train their links for a minute; one stays down."""

    def change(tick, values):
        up_at = {2: 90, 6: 92, 10: 95, 14: 10**9}
        for port, at in up_at.items():
            if 50 <= tick < at:
                values["nic"]["nic.state"][port] = 0
        values["nic"]["nic.carrier_changes"] = np.full(16, 2.0)
        for port, at in up_at.items():
            values["nic"]["nic.carrier_changes"][port] += (tick >= 50) + (tick >= at)

    found = watch(Link(), site, 150, change)
    assert {f.entity for f in found if f.time < START + 100 * STEP} == {"leaf:l2"}
    assert {(f.entity, f.level) for f in found if f.time >= START + 100 * STEP} == {("port:n3.p2", "page")}


def slower(tick, values, speed=200_000.0, since=50, state=1.0):
    values["nic"]["nic.speed"] = np.full(16, 400_000.0)
    values["nic"]["nic.speed"][6] = speed if tick >= since else 400_000.0
    values["nic"]["nic.state"][6] = state if tick >= since else 1.0


def test_a_port_that_was_trained_to_half_its_speed_pages_within_a_minute(site, watch):
    page = next(f for f in watch(Link(), site, 100, slower) if f.level == "page")
    assert (page.entity, page.onset) == ("port:n1.p2", START + 50 * STEP)
    assert page.time - page.onset <= 60 * SECOND
    assert "runs at 200 Gb/s, was 400" in page.summary


@pytest.mark.parametrize("speed", [np.nan, -1.0, 0.0, 4_294_967_295.0])
def test_an_unknown_speed_is_not_a_lower_speed(site, watch, speed):
    assert watch(Link(), site, 200, lambda tick, values: slower(tick, values, speed)) == []


def test_a_port_that_is_down_is_not_reported_as_slow(site, watch):
    found = watch(Link(), site, 200, lambda tick, values: slower(tick, values, 2_500.0, state=0.0))
    assert found
    assert not any("Gb/s" in f.summary for f in found)


def test_a_speed_set_during_maintenance_is_accepted(site, watch):
    def change(tick, values):
        slower(tick, values)
        return [Event(START + tick * STEP, "node:n1", "maintenance_start", {"seconds": 900.0})] if tick == 45 else []

    assert watch(Link(), site, 600, change) == []


def test_a_port_with_single_samples_of_a_lower_speed_is_not_reported(site, watch):
    def change(tick, values):
        slower(tick, values, 200_000.0 if tick % 10 == 0 else 400_000.0)

    assert watch(Link(), site, 200, change) == []
