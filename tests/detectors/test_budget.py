"""The arithmetic of false alarms matches the published table and the kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from detectors import explain
from detectors.base.budget import budget_line, false_alarms, threshold_for
from detectors.base.calibration import arl0
from detectors.base.detector import Detector, part
from detectors.base.streams import Channel, Streams
from pipeline.model.records import SECOND


@pytest.mark.parametrize(("threshold", "ticks"), [(15, 2.5e7), (18, 5.2e8), (20, 4.0e9)])
def test_arl0_is_that_of_the_exact_chain(threshold, ticks):
    """Of clipped normal noise; clipping makes it a few percent longer than the closed form."""
    assert arl0(threshold) == pytest.approx(ticks, rel=0.25)


@pytest.mark.parametrize(("step", "threshold"), [(1, 21), (10, 18.5), (60, 17)])
def test_one_page_per_1000_nodes_and_day_over_ten_families_needs_these_thresholds(step, threshold):
    tests = 86_400 / step * 8 * 1000
    assert threshold_for(10 * tests) == pytest.approx(threshold, abs=0.7)


def test_threshold_and_arl0_are_inverse():
    assert threshold_for(arl0(18.5)) == pytest.approx(18.5, abs=1e-6)


def test_the_budget_counts_streams_and_ticks():
    one, eight = false_alarms(18.5, 1), false_alarms(18.5, 8)
    assert eight.per_1000 == pytest.approx(8 * one.per_1000)
    assert false_alarms(18.5, 8, 1.0).per_1000 == pytest.approx(10 * eight.per_1000)


def test_two_sided_channels_alarm_twice_as_often():
    assert false_alarms(18.5, 8, sides=2).per_1000 == pytest.approx(2 * false_alarms(18.5, 8).per_1000)


class Pair:
    """A piece with two metrics."""

    def __init__(self):
        self.hot, self.others = Streams(Channel(1.0, 1.0)), {"cold": Streams(Channel(1.0, 1.0, threshold=20.0))}

    def snapshot(self):
        return {"hot": self.hot.snapshot(), "cold": self.others["cold"].snapshot()}

    def restore(self, state):
        self.hot.restore(state["hot"])
        self.others["cold"].restore(state["cold"])


@dataclass
class Paired(Detector):
    name, family, device_class, needs, cannot_see = "paired", "paired", "gpu", (), "all"

    pair: Pair = part(Pair)
    own: Streams = part(lambda: Streams(Channel(1.0, 1.0)))

    def observe(self, frames):
        return []


def test_streams_in_parts_of_a_detector_are_listed_too():
    lines = Paired().budget()
    assert [line.split(":")[0] for line in lines] == ["pair.hot", "pair.others.cold", "own"]
    assert "threshold 20 at 10 s" in lines[1]


def test_the_budget_is_one_line():
    line = budget_line(Channel(1.0, 1.0), 8)
    assert "8 streams per node at most" in line
    assert "suspects per 1,000 node-days" in line
    assert "\n" not in line


def test_one_stream_is_one_and_thresholds_are_rounded():
    line = budget_line(Channel(1.0, 1.0), 1, 30.0)
    assert line.startswith("threshold 17.4 at 30 s:")
    assert "with 1 stream per node" in line


@pytest.mark.parametrize("name", ["telemetry_sensor"])
def test_two_sided_streams_list_the_alarms_of_both_sides(name):
    """Of a threshold of 17.4 on each side, at 30 s."""
    lines = [line for line in explain(name)["budget"] if "suspects per 1,000 node-days" in line]
    assert lines
    cost = f"{arl0(Channel(1.0, 1.0).limit(30)) / 2:.2g} ticks"
    assert all("at 30 s" in line and f"once in {cost} (" in line for line in lines), lines


def test_the_kernel_has_no_more_alarms_than_computed():
    """At a low threshold, where alarms can be counted: healthy streams of normal noise, own variance learnt first."""
    size, ticks, threshold = 2000, 600, 15.0
    rng, streams = np.random.default_rng(3), Streams(Channel(0.001, 0.0, 0.0, threshold=threshold))
    groups, alarms = np.zeros(size, np.int32), 0
    for tick in range(ticks):
        step = streams.step(rng.normal(0, 1, size), groups, (1 + tick) * 10 * SECOND)
        alarms += int(step.on.sum())
    assert alarms <= 5 * size * ticks / arl0(threshold) + 3


@pytest.mark.parametrize("name", ["telemetry", "telemetry_clock", "telemetry_blind", "xid"])
def test_detectors_with_rules_have_a_line_for_the_rule(name):
    (line,) = explain(name)["budget"]
    assert line.startswith("a rule on")
    assert line.endswith("no statistical alarm rate")


def test_instruments_list_the_false_alarms_at_their_own_rhythm():
    *streams, rule = explain("telemetry_sensor")["budget"]
    assert len(streams) == 4
    assert all("at 30 s" in line and "suspects per 1,000 node-days" in line for line in streams)
    assert rule.endswith("no statistical alarm rate")
