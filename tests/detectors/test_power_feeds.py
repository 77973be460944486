"""Feeds without power; absurd readings, or readings in another unit, make no feed dark for good."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.base.power_feeds import _OPEN, PowerFeeds
from detectors.power.power import Power
from pipeline.model.records import SECOND, Frame
from pipeline.model.topology import Topology

T0, STEP = 1_790_000_000 * SECOND, 30
NAMES = ("pdu:p0", "pdu:p1")


def run_detector(volts, draw=lambda tick: 5e4, ticks=60, feeds=None, first=0):
    """Returns the feeds after instants of 30 s; volts and draw of the second one by tick."""
    feeds = feeds or PowerFeeds()
    for tick in range(first, first + ticks):
        time = T0 + tick * STEP * SECOND
        values = {"power.voltage": np.array([230.0, volts(tick)]), "power.draw": np.array([5e4, draw(tick)])}
        feeds.update(Frame(time, "power", NAMES, values, Topology()), time)
    return feeds


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("when", [0, 5, 19, 20, 40])
@pytest.mark.parametrize("value", [65_535.0, 1e30])
def test_one_absurd_voltage_makes_no_feed_dark(when, value):
    feeds = PowerFeeds()
    for tick in range(60):
        run_detector(lambda t: value if t == when else 230.0, ticks=1, feeds=feeds, first=tick)
        assert not feeds.dark
    assert set(run_detector(lambda t: 0.0, ticks=2, feeds=feeds, first=60).dark) == {"pdu:p1"}


def test_nine_absurd_loads_among_the_first_twenty_make_no_feed_dark():
    nan = float("nan")
    assert not run_detector(lambda t: nan, lambda t: 4e6 if t % 2 and t < 18 else 5e4).dark


def test_a_voltage_that_was_always_wrong_is_not_a_loss():
    assert not run_detector(lambda t: 65_535.0 if t < 25 else 230.0).dark


@pytest.mark.slow
def test_a_load_that_was_wrong_from_the_beginning_is_learned_again_within_a_day():
    nan = float("nan")
    feeds = run_detector(lambda t: nan, lambda t: 4e6 if t < 25 else 5e4 + t % 7, ticks=120)
    assert set(feeds.dark) == {"pdu:p1"}
    run_detector(lambda t: nan, lambda t: 5e4 + t % 7, ticks=2880, feeds=feeds, first=120)
    assert not feeds.dark
    assert set(run_detector(lambda t: nan, lambda t: 20.0, ticks=2, feeds=feeds, first=3000).dark) == {"pdu:p1"}


@pytest.mark.parametrize("volts", [0.0, 2.0, 20.0])
def test_a_feed_without_voltage_stays_dark_until_it_has_voltage(volts):
    feeds = run_detector(lambda t: 230.0, ticks=30)
    assert set(run_detector(lambda t: volts, lambda t: 0.0, ticks=3500, feeds=feeds, first=30).dark) == {"pdu:p1"}


def test_a_feed_that_was_dark_while_its_baseline_was_learned_can_be_dark_again():
    feeds = run_detector(lambda t: 0.0 if t < 25 else 230.0, ticks=200)
    assert not feeds.dark
    assert set(run_detector(lambda t: 0.0, ticks=2, feeds=feeds, first=200).dark) == {"pdu:p1"}


def test_a_restart_in_the_middle_of_learning_changes_nothing():
    whole, half = run_detector(lambda t: 230.0, ticks=30), run_detector(lambda t: 230.0, ticks=12)
    other = PowerFeeds()
    other.restore(half.snapshot())
    run_detector(lambda t: 230.0, ticks=18, feeds=other, first=12)
    one, two = (feeds.snapshot()["usual"]["power.voltage"] for feeds in (other, whole))
    assert all(np.array_equal(one[name], two[name], True) for name in one)


@pytest.mark.parametrize("interval", [10, 30, 60])
def test_a_tripped_unit_whose_nodes_report_at_their_own_interval_has_no_silent_node(interval):
    found = run_chassis(interval, dies=False)
    assert {(f.entity, f.level) for f in found} == {("pdu:p0", "ticket")}
    assert {f.summary for f in found} == {"PDU p0: tripped breaker, 0 of 4 nodes silent"}


@pytest.mark.parametrize("interval", [10, 60])
def test_a_tripped_unit_whose_nodes_are_silent_pages_whatever_their_interval(interval):
    found = run_chassis(interval, dies=True)
    assert ("pdu:p0", "page") in {(f.entity, f.level) for f in found}
    assert found[-1].summary == "PDU p0: tripped breaker, 4 of 4 nodes silent"


@pytest.mark.parametrize("interval", [10, 60])
def test_the_chassis_of_a_dead_host_is_not_reported_beside_it(interval):
    assert run_chassis(interval, dies=True, idle="chassis:n0") == []
    found = run_chassis(interval, dies=False, idle="chassis:n0")
    assert {(f.entity, f.level) for f in found} == {("chassis:n0", "ticket")}
    assert "its node reports" in found[0].summary


def run_chassis(interval, dies, idle=""):
    """Four nodes on a PDU, read each `interval` s; after an hour it trips, or a chassis has no load."""
    nodes = tuple(f"node:n{n}" for n in range(4))
    units = ("pdu:p0", *(f"chassis:n{n}" for n in range(4)))
    graph = Topology({n: ["pdu:p0"] for n in nodes} | {f"chassis:{n[5:]}": [n] for n in nodes})
    detector, found = Power(), []
    for tick in range(450):
        broken, frames = tick >= 361, {}
        draw, breaker = np.full(5, 8e3), np.zeros(5)
        if broken and idle:
            draw[units.index(idle)] = 60.0
        breaker[0] = _OPEN if broken and not idle else 0
        columns = {"power.draw": draw, "power.breaker": breaker}
        time = T0 + tick * 10 * SECOND
        frames["power"] = Frame(time, "power", units, columns, graph)
        if tick * 10 % interval == 0 and not (broken and dies and not idle):
            load = np.where([broken and dies and n[5:] == idle[8:] for n in nodes], np.nan, 20.0)
            frames["node"] = Frame(time, "node", nodes, {"node.load1": load}, graph)
            frames["gpu"] = Frame(time, "gpu", ("gpu:n0.0",), {"gpu.throttle_reasons": np.zeros(1)}, graph)
        found += detector.observe(frames)
    return found
