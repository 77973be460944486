"""Every detector lists its false alarms."""

from __future__ import annotations

import re

import pytest

from detectors import configured
from detectors.base.detector import Detector

EVERY = configured()


@pytest.mark.parametrize("detector", EVERY, ids=[d.name for d in EVERY])
def test_every_detector_lists_its_false_alarms(detector: Detector):
    lines = detector.budget()
    assert lines, "at least one line expected: the arithmetic of its threshold, or a rule on logged facts"
    for line in lines:
        assert re.search(r"\d", line) or "rule" in line, f"wanted a figure, or `a rule on ...`: {line}"
        assert len(line.split()) >= 4, f"wanted a sentence: {line}"
        assert not re.search(r"\b(nan|inf|None)\b", line), f"wanted a number: {line}"


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        *(("memory", "limit", 9.0), ("anomaly", "limit", 4.0), ("sdc_gradient", "factor", 3.0)),
        *(("sdc", "ledger_days", 10.0), ("sdc_replica", "page_at", 3)),
    ],
)
def test_another_setting_makes_another_budget(name: str, setting: str, value: float):
    usual, other = configured(), configured({name: {setting: value}})
    lines = [next(d for d in mine if d.name == name).budget() for mine in (usual, other)]
    assert lines[0] != lines[1]
