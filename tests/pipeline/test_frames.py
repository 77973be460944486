"""Frames: aligned, closed by the watermark, the same for every order and every commit boundary."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.judging.frames import Framer, to_float
from pipeline.model.records import SECOND, Event, Rows
from pipeline.model.signals import class_of_entity
from pipeline.model.topology import Topology
from tests.examples import examples

STEP = 10 * SECOND
NAMES = {"gpu": ["gpu:a.0", "gpu:a.1", "gpu:b.0"], "nic": ["port:a.x"]}


def framer(start=None):
    return Framer(STEP, Topology(), lambda c: NAMES.get(c, []), start=start)


def rows(*samples, device_class="gpu", signal="gpu.temperature"):
    """Returns rows from (second, device, value)."""
    time, device, value = zip(*samples, strict=True)
    return Rows(device_class, np.array(time) * SECOND, np.array(device, np.int32), {signal: np.array(value, "f4")})


def test_a_frame_has_one_cell_per_device_and_nan_for_missing_values():
    f = framer()
    f.add_rows(rows((1, 0, 50.0), (2, 2, 60.0)))
    [instant] = f.advance(STEP)
    frame = instant.frames["gpu"]
    assert list(frame.entities) == NAMES["gpu"]
    np.testing.assert_array_equal(frame["gpu.temperature"], [50.0, np.nan, 60.0])
    assert np.isnan(frame["gpu.power"]).all()


def test_a_frame_has_the_time_of_its_newest_sample():
    f = framer()
    f.add_rows(rows((1, 0, 1.0), (7, 1, 1.0)))
    f.add_rows(rows((8, 0, 1.0), device_class="nic", signal="nic.speed"))
    [instant] = f.advance(STEP)
    assert (instant.time, instant.end) == (8 * SECOND, STEP)
    assert {frame.time for frame in instant.frames.values()} == {8 * SECOND}


def test_the_newest_of_several_samples_in_a_cell_is_kept_and_a_missing_one_replaces_nothing():
    f = framer()
    f.add_rows(rows((5, 0, 2.0), (1, 0, 1.0), (9, 0, np.nan)))
    [instant] = f.advance(STEP)
    assert instant.frames["gpu"]["gpu.temperature"][0] == 2.0


def test_a_frame_waits_for_the_watermark():
    f = framer()
    f.add_rows(rows((1, 0, 1.0), (11, 0, 2.0)))
    assert list(f.advance(STEP - 1)) == []
    assert len(list(f.advance(STEP))) == 1
    assert len(list(f.advance(2 * STEP))) == 1


def test_rows_behind_the_watermark_are_counted_and_not_evaluated():
    f = framer()
    f.add_rows(rows((11, 0, 1.0)))
    list(f.advance(2 * STEP))
    f.add_rows(rows((3, 0, 1.0), (25, 0, 5.0)))
    f.add_events([Event(3 * SECOND, "gpu:a.0", "xid")])
    assert f.late == {"gpu": 1, "events": 1}
    [instant] = f.advance(3 * STEP)
    assert instant.frames["gpu"]["gpu.temperature"][0] == 5.0


def test_a_value_outside_the_valid_range_counts_as_missing():
    f = framer()
    f.add_rows(rows((1, 0, 5000.0)))
    [instant] = f.advance(STEP)
    assert np.isnan(instant.frames["gpu"]["gpu.temperature"][0])


def test_events_come_with_the_frame_of_their_class_also_without_samples():
    f = framer()
    f.add_events([Event(4 * SECOND, "gpu:a.1", "digest", {"digest": "x"}), Event(2 * SECOND, "port:a.x", "link_state")])
    [instant] = f.advance(STEP)
    assert [e.kind for e in instant.frames["gpu"].events] == ["digest"]
    assert [e.kind for e in instant.frames["nic"].events] == ["link_state"]
    assert instant.time == 4 * SECOND


def test_frames_are_read_only():
    f = framer()
    f.add_rows(rows((1, 0, 1.0)))
    [instant] = f.advance(STEP)
    with pytest.raises(ValueError, match="read-only"):
        instant.frames["gpu"]["gpu.temperature"][0] = 3.0


def test_a_restart_begins_at_the_frame_of_its_snapshot():
    f = framer(start=25 * SECOND)
    f.add_rows(rows((15, 0, 1.0), (21, 0, 2.0)))
    assert f.late == {"gpu": 1}
    [instant] = f.advance(3 * STEP)
    assert instant.frames["gpu"]["gpu.temperature"][0] == 2.0


def test_the_highest_unsigned_value_means_missing():
    np.testing.assert_array_equal(to_float(np.array([7, 255], "u1")), [7.0, np.nan])


def test_the_class_of_an_entity_follows_from_its_kind():
    assert [class_of_entity(e) for e in ("port:a.x", "cdu:c1", "job:81")] == ["nic", "coolant", "job"]


@settings(max_examples=examples(100), deadline=None)
@given(
    samples=st.dictionaries(
        st.tuples(st.integers(0, 59), st.integers(0, 2)), st.floats(0, 100, width=32), min_size=1, max_size=30
    ),
    data=st.data(),
)
def test_frames_do_not_depend_on_order_and_commit_boundaries(samples, data):
    whole = [(second, device, value) for (second, device), value in sorted(samples.items())]
    plain = framer()
    plain.add_rows(rows(*whole))
    wanted = list(plain.advance(6 * STEP))
    shuffled = data.draw(st.permutations(whole))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole)), max_size=5)) | {len(whole)})
    other, got, done = framer(), [], 0
    for cut in cuts:
        other.add_rows(rows(*shuffled[done:cut])) if cut > done else None
        done = cut
        rest = [second for second, _, _ in shuffled[cut:]]
        got += list(other.advance(min(rest, default=60) * SECOND))  # no watermark passes data that is still to come
    assert [i.time for i in got] == [i.time for i in wanted]
    for one, two in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one.frames["gpu"]["gpu.temperature"], two.frames["gpu"]["gpu.temperature"])


def test_for_unused_signals_a_frame_contains_only_which_devices_had_one():
    f = Framer(STEP, Topology(), lambda c: NAMES.get(c, []), signals=["gpu.temperature"])
    f.add_rows(rows((1, 0, 50.0)))
    f.add_rows(rows((2, 2, 300.0), signal="gpu.power"))
    f.add_rows(rows((3, 0, 1.0), device_class="nic", signal="nic.speed"))
    f.add_events([Event(4 * SECOND, "port:a.x", "link_state", {})])
    f.add_rows(rows((11, 0, 1.0), device_class="nic", signal="nic.speed"))
    first, second = f.advance(2 * STEP)
    assert set(first.frames["gpu"].values) == {"gpu.temperature"}
    assert first.frames["nic"].values == {}  # present because of its event
    assert {c: (list(names), seen.tolist()) for c, (names, seen) in first.seen.items()} == {
        "gpu": (NAMES["gpu"], [True, False, True]),
        "nic": (NAMES["nic"], [True]),
    }
    assert second.frames == {}
    assert second.time == 11 * SECOND
    assert second.seen["nic"][1].all()


def test_a_device_with_only_missing_or_invalid_values_was_not_seen():
    f = framer()
    f.add_rows(rows((1, 0, np.nan), (1, 1, 50.0), (1, 2, 5000.0)))
    [instant] = f.advance(STEP)
    assert instant.seen["gpu"][1].tolist() == [False, True, False]


@given(st.lists(st.tuples(st.integers(0, 29), st.integers(0, 2), st.booleans(), st.booleans()), max_size=30))
@settings(max_examples=examples(50), deadline=None)
def test_signals_that_arrive_in_separate_rows_are_joined_in_one_frame(samples):
    """As agents send them: temperature each second, power less often, in separate rows of the same device."""
    f, wanted = framer(), {}
    for i, (second, device, hot, both) in enumerate(sorted(samples, key=lambda s: s[0])):
        names = ["gpu.temperature", "gpu.power"] if both else ["gpu.temperature" if hot else "gpu.power"]
        columns = {name: np.array([float(i)], "f4") for name in names}
        f.add_rows(Rows("gpu", np.array([second * SECOND]), np.array([device], np.int32), columns))
        wanted.update({(second // 10, device, name): float(i) for name in names})
    found = {
        (instant.time // STEP, device, name): value
        for instant in f.advance(3 * STEP)
        for name, values in instant.frames["gpu"].values.items()
        for device, value in enumerate(values)
        if not np.isnan(value)
    }
    assert found == wanted
