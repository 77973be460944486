"""What the detectors of slow ranks, GPUs and jobs say that they cost in false alarms."""

from __future__ import annotations

import pytest

from detectors import configured


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
