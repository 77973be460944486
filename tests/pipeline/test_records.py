"""Records: times as text, and valid JSON for every value."""

import json
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.model.records import Finding, Incident, from_iso, iso, to_json


@given(st.datetimes(min_value=datetime(1970, 1, 2), max_value=datetime(2199, 12, 31)))
def test_a_time_as_text_reads_back_exactly(moment):
    stamp = int(moment.replace(microsecond=0, tzinfo=UTC).timestamp()) * 1_000_000 + moment.microsecond
    assert from_iso(iso(stamp)) == stamp
    assert len(iso(stamp)) == 27


def test_times_sort_as_text_in_time_order():
    assert iso(999_999) < iso(1_000_000) < iso(86_400_000_000)


def test_a_time_without_zone_is_utc_and_another_zone_is_converted():
    assert from_iso("2026-01-01T00:00:00") == from_iso("2026-01-01T01:00:00+01:00")
    with pytest.raises(ValueError, match="yesterday"):
        from_iso("yesterday")


def test_missing_numbers_are_null_in_json():
    assert json.loads(json.dumps(to_json({"a": [float("nan"), np.float32(2)], "b": np.int64(3)}))) == {
        "a": [None, 2.0],
        "b": 3,
    }


def test_a_finding_has_the_fields_of_the_contract():
    found = Finding(2, 1, "gpu:a.0", "sdc", "page", float("inf"), "x", {"n": np.int32(1)}, ("gpu.digest",)).as_json()
    assert set(found) == {"time", "onset", "entity", "detector", "level", "score", "summary", "evidence", "signals"}
    assert found["score"] is None


def test_an_incident_has_the_fields_of_the_contract():
    incident = Incident("inc-1", "gpu:a.0", 1, 1, "page", "x", "sdc", "gpu:a.0", ("gpu:a.0",))
    wanted = "id cause opened onset resolved severity members confidence state summary simulated"
    assert set(wanted.split()) <= set(incident.as_json())
