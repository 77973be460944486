"""The false alarm rates that each link detector states, from its settings."""

from __future__ import annotations

import math

import pytest

from detectors.link.alarm_rates import describe_cusum_rate, describe_trend_rate
from detectors.link.link import Link
from detectors.link.link_congestion import LinkCongestion
from detectors.link.link_nvlink import LinkNvlink
from detectors.link.link_optic import LinkOptic
from detectors.link.link_pcie import LinkPcie
from detectors.link.link_stall import LinkStall

ALL = (Link, LinkStall, LinkOptic, LinkCongestion, LinkNvlink, LinkPcie)


@pytest.mark.parametrize("kind", ALL)
def test_each_detector_states_a_rate_or_that_it_has_none(kind):
    lines = kind().budget()
    assert lines
    assert all("per 1,000 node-days" in line or "no statistical alarm rate" in line for line in lines)
    assert not any("\n" in line for line in lines)


def test_a_higher_limit_costs_fewer_alarms():
    assert Link(limit=21.0).budget() != Link(limit=25.0).budget()
    assert LinkOptic(z=5.0).budget() != LinkOptic(z=6.0).budget()


def test_the_rates_follow_from_the_settings():
    alarms = 8 * 1000 * 8640 / math.exp(21)
    assert f"at most {alarms:.2g} alarms per 1,000 node-days" in describe_cusum_rate(21.0, 10.0, 8)
    assert "probability 2.9e-07 per check" in describe_trend_rate(5.0, 24, 8)
