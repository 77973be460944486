"""A calibration is exported, loaded, pinned and compared as one document; replay begins with it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from detectors import configured
from detectors.base.calibration import START
from detectors.calibrations import (
    export_calibration,
    list_calibration,
    load_calibration,
    pin_calibration,
    read_calibration,
)
from detectors.heat.thermal import Thermal
from detectors.runner import Runner
from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.topology import Topology
from tests.detectors.snapshots import packed

SIZE = 64


def learnt(sd=0.08, hours=24):
    """Returns a detector whose cores were quiet for some hours, with slow noise of `sd` in ln R."""
    detector = Thermal()
    feed(detector, sd, range(hours * 60))
    return detector


def feed(detector, sd, ticks):
    rng, noise = np.random.default_rng(1), np.zeros(SIZE)
    for tick in ticks:
        noise = 0.95 * noise + np.sqrt(1 - 0.95**2) * rng.normal(0, sd, SIZE)
        detector.cores.step(noise, np.zeros(SIZE, np.int32), (1 + tick) * 60 * SECOND)


def factor(detector):
    return detector.tails()["cores"].factor("")


def test_an_exported_calibration_loads_into_another_detector():
    one, other = learnt(), Thermal()
    document = json.loads(json.dumps(export_calibration([one])))
    assert set(document["detectors"]) == {"thermal"}
    assert factor(other) == START
    load_calibration([other], document)
    assert factor(other) == pytest.approx(factor(one))


def test_a_pinned_calibration_stays_while_more_is_learnt_and_is_followed_again_after_it():
    detector, known = learnt(0.02), export_calibration([learnt(0.08)])
    own = factor(detector)
    pin_calibration([detector], known)
    pinned = factor(detector)
    assert pinned > 1.5 * own
    feed(detector, 0.02, range(1440, 2880))
    assert factor(detector) == pinned
    pin_calibration([detector], None)
    assert factor(detector) < own


def test_an_event_pins_releases_and_rolls_back_also_after_a_restart():
    document = export_calibration([learnt(0.08)])
    runner = Runner([Thermal()])

    def happen(time, action):
        event = Event(time, "site:all", "calibration", {"action": action, "version": 1, "calibration": document})
        runner.observe({"site": Frame(time, "site", (), {}, Topology(), (event,))})
        return factor(runner.detectors[0])

    pinned = happen(SECOND, "pin")
    assert pinned > START
    again = Runner([Thermal()])
    again.restore(packed(runner))
    assert factor(again.detectors[0]) == pinned
    assert happen(2 * SECOND, "unpin") == START
    assert happen(3 * SECOND, "rollback") == pinned


def test_rows_show_thresholds_evidence_and_what_passed_and_compare_with_another_version():
    rows = list_calibration([learnt(0.02)], export_calibration([learnt(0.08)]))
    row = next(r for r in rows if r["statistic"] == "cores")
    assert (row["detector"], row["kind"], row["devices"]) == ("thermal", "", SIZE)
    assert 20 < row["hours"] <= 24
    assert 15 <= row["threshold"] <= 30
    assert row["least_effect"] >= 0.08
    assert row["other_factor"] > row["factor"]
    assert row["suspects"] >= row["other_suspects"]


@pytest.mark.parametrize(
    ("text", "match"), [("[]", "object"), ("{", "no JSON"), ('{"format": 9}', "format 9"), (None, "cannot be read")]
)
def test_a_file_that_is_no_calibration_is_refused_with_the_reason(tmp_path, text, match):
    path = tmp_path / "calibration.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=match):
        load_calibration(configured(), read_calibration(path))


def test_a_damaged_document_changes_nothing():
    detector = learnt()
    before, document = factor(detector), export_calibration([detector])
    document["detectors"]["thermal"]["cores"][""]["passed"] = [1]
    with pytest.raises(UsageError, match="thermal"):
        load_calibration([detector], document)
    assert factor(detector) == before
