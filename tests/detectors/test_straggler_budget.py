"""What the detectors of slow ranks, GPUs and jobs say that they cost in false alarms."""

from __future__ import annotations

import pytest

from detectors import configured
from detectors.base.budget import arl0
from detectors.base.streams import ALONE, Channel


def lines(name, **settings):
    return next(d for d in configured({name: settings}) if d.name == name).budget()


@pytest.mark.parametrize(
    ("name", "streams"),
    [
        ("straggler", ("compute time", "SM clock")),
        ("straggler_inferred", ("SM clock", "SM activity", "bytes sent of whole jobs", "SM activity of whole jobs")),
        ("straggler_job", ("step time of whole jobs",)),
    ],
)
def test_each_stream_has_its_arithmetic_and_the_rules_say_that_they_have_none(name, streams):
    told = lines(name)
    assert [line.split(":")[0].split(",")[0] for line in told[:-1]] == list(streams)
    assert all("once in" in line for line in told[:-1])
    assert told[-1].startswith("a rule on ")


@pytest.mark.parametrize(
    ("name", "setting", "value", "line"),
    [
        ("straggler", "threshold", 25.0, 0),
        ("straggler", "ratio", 1.5, -1),
        ("straggler_inferred", "threshold", 25.0, 1),
        ("straggler_inferred", "hold", 300.0, -1),
        ("straggler_job", "hang", 500.0, -1),
    ],
)
def test_the_real_settings_are_told(name, setting, value, line):
    assert lines(name)[line] != lines(name, **{setting: value})[line]
    assert f"{value:g}" in lines(name, **{setting: value})[line]


def times(line):
    return float(line.split("once in ")[1].split(" ")[0])


def test_what_is_judged_both_ways_passes_its_threshold_twice_as_often():
    clock, activity, *_ = lines("straggler_inferred")
    assert times(clock) == pytest.approx(2 * times(activity), rel=0.02)


@pytest.mark.parametrize(
    ("name", "line", "look"), [("straggler_inferred", 2, 60), ("straggler_inferred", 3, 60), ("straggler_job", 0, 30)]
)
def test_a_job_is_one_stream_whatever_its_nodes_and_is_judged_without_peers(name, line, look):
    told = lines(name)[line]
    assert "one stream per job, without peers" in told
    assert "a node" not in told
    assert f"at {look} s" in told
    assert times(told) == pytest.approx(arl0(Channel(0.02, 0.1).limit(look) + ALONE), rel=0.05)
