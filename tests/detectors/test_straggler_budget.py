"""The false alarm budgets of the straggler detectors."""

from __future__ import annotations

import pytest

from detectors import configured
from detectors.base.calibration import arl0
from detectors.base.streams import ALONE, Channel


def lines(name, **settings):
    return next(d for d in configured({name: settings}) if d.name == name).budget()


@pytest.mark.parametrize(
    ("name", "streams"),
    [
        ("straggler", ("compute time", "SM clock")),
        (
            "straggler_inferred",
            ("SM clock", "SM activity", "power", "SM clock without peers", "throughput of whole jobs"),
        ),
        ("straggler_job", ("step time of whole jobs",)),
    ],
)
def test_each_stream_has_an_alarm_rate_and_the_last_line_names_the_rules_without_one(name, streams):
    found = lines(name)
    assert [line.split(":")[0].split(",")[0] for line in found[:-1]] == list(streams)
    assert all("once in" in line for line in found[:-1])
    assert found[-1].startswith("a rule on ")


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
def test_the_lines_follow_the_settings(name, setting, value, line):
    assert lines(name)[line] != lines(name, **{setting: value})[line]
    assert f"{value:g}" in lines(name, **{setting: value})[line]


def times(line):
    return float(line.split("once in ")[1].split(" ")[0])


def test_a_stream_judged_in_both_directions_exceeds_its_threshold_twice_as_often():
    clock, activity, *_ = lines("straggler_inferred")
    assert times(clock) == pytest.approx(2 * times(activity), rel=0.02)


@pytest.mark.parametrize(("name", "line", "step"), [("straggler_inferred", 4, 30), ("straggler_job", 0, 30)])
def test_a_job_of_any_size_is_one_stream_without_peers(name, line, step):
    text = lines(name)[line]
    assert "one stream per job, without peers" in text
    assert "a node" not in text
    assert f"at {step} s" in text
    assert times(text) == pytest.approx(arl0(Channel(0.02, 0.1).limit(step) + ALONE), rel=0.05)
