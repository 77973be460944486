"""One event per XID that two sources tell: paired one by one, and what has no partner is an event of its own."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agents.collectors.gpu.xid_correlation import HOLD, KEPT, MAX_UNPAIRED, SAME, Pairs
from pipeline.model.records import SECOND, Event

T0 = 1_800_000_000 * SECOND


def xid(code: int, source: str, at: int = 0, count: int = 1, gpu: int = 0, **more: Any) -> Event:
    data = {"xid": code, "source": source, "count": count, "pci": f"0000:{gpu:02x}:00", **more}
    return Event(T0 + at, f"gpu:n1.{gpu}", "xid", data)


def counts(events: list[Event]) -> list[tuple[str, int]]:
    return [(event.data["source"], event.data["count"]) for event in events]


def test_a_second_xid_that_only_nvml_tells_is_not_taken_for_the_first() -> None:
    pairs = Pairs()
    assert counts(pairs.take([xid(31, "kernel"), xid(31, "nvml")], T0)) == [("kernel", 1)]
    assert pairs.take([xid(31, "nvml", 8 * SECOND)], T0 + 8 * SECOND) == []
    (own,) = pairs.take([], T0 + 8 * SECOND + HOLD)
    assert (own.data["source"], own.time) == ("nvml", T0 + 8 * SECOND)


def test_one_line_of_the_kernel_log_takes_in_one_of_five_that_nvml_told() -> None:
    pairs = Pairs()
    assert pairs.take([xid(48, "nvml") for _ in range(5)], T0) == []
    (joined,) = pairs.take([xid(48, "kernel")], T0 + SECOND)
    assert (joined.data["sources"], joined.data["count"]) == (["kernel", "nvml"], 1)
    assert counts(pairs.take([], T0 + HOLD)) == [("nvml", 4)]


def test_a_line_that_counts_repeats_takes_in_as_many() -> None:
    pairs = Pairs()
    pairs.take([xid(48, "kernel", count=3)], T0)
    assert pairs.take([xid(48, "nvml", SECOND) for _ in range(4)], T0 + SECOND) == []
    assert counts(pairs.take([], T0 + SECOND + HOLD)) == [("nvml", 1)]


def test_repeats_that_the_kernel_log_counts_a_minute_later_are_not_counted_twice() -> None:
    pairs, told = Pairs(), []
    for second in range(60):
        at = second * SECOND
        lines = [xid(31, "kernel", at)] if second < 5 else []
        told += pairs.take([*lines, xid(31, "nvml", at)], T0 + at)
    told += pairs.take([xid(31, "kernel", 59 * SECOND, 55, since=T0 + 5 * SECOND)], T0 + 60 * SECOND)
    told += pairs.take([], T0 + 70 * SECOND)
    assert sum(event.data["count"] for event in told) == 60


def test_a_storm_longer_than_what_is_told_alone_is_remembered_is_not_counted_twice() -> None:
    pairs, told = Pairs(), []
    for second in range(90):
        told += pairs.take([xid(31, "nvml", second * SECOND)], T0 + second * SECOND)
    told += pairs.take([xid(31, "kernel", 89 * SECOND, 90, since=T0)], T0 + 90 * SECOND)
    assert sum(event.data["count"] for event in [*told, *pairs.rest()]) == 90


def test_a_line_that_counts_repeats_takes_in_what_nvml_told_at_the_first_of_them() -> None:
    pairs = Pairs()
    told = [*pairs.take([xid(31, "nvml")], T0), *pairs.take([], T0 + HOLD)]
    told += pairs.take([xid(31, "kernel", 30 * SECOND, 3, since=T0)], T0 + 30 * SECOND)
    assert counts(told) == [("nvml", 1), ("kernel", 2)]


def test_what_is_open_is_forgotten_in_time_and_bounded() -> None:
    pairs = Pairs()
    storm = [xid(code, source, gpu=gpu) for code in range(100) for gpu in range(40) for source in ("nvml", "kernel")]
    assert len(pairs.take(storm[::2], T0)) == 4000 - MAX_UNPAIRED  # more than may wait is told at once
    assert len(pairs.take(storm[1::2], T0 + SECOND)) == 4000
    assert all(len(ledger._open) <= 2 * MAX_UNPAIRED for ledger in (pairs._held, pairs._logged, pairs._alone))
    pairs.take([], T0 + SECOND + KEPT)
    assert not any(ledger._open for ledger in (pairs._held, pairs._logged, pairs._alone))


def test_nothing_waits_longer_because_the_clock_was_set_back() -> None:
    pairs = Pairs()
    pairs.take([xid(79, "nvml")], T0)
    assert counts(pairs.take([], T0 - 3600 * SECOND)) == [("nvml", 1)]


def test_a_gpu_that_one_source_knows_by_its_address_alone_is_the_same() -> None:
    line = Event(T0, "node:n1", "xid", {"xid": 79, "source": "kernel", "count": 1, "pci": "0000:03:00"})
    other = Event(T0, "node:n1", "xid", {"xid": 79, "source": "kernel", "count": 1, "pci": "0000:04:00"})
    pairs = Pairs()
    told = pairs.take([line, other, xid(79, "nvml", gpu=3)], T0)
    assert [event.data.get("sources") for event in told] == [["kernel", "nvml"], None]


looks = st.lists(st.lists(st.tuples(st.sampled_from(["kernel", "nvml"]), st.integers(0, 1)), max_size=6), max_size=6)


@given(looks)
def test_of_two_sources_that_count_one_thing_the_greater_count_is_told(
    given_looks: list[list[tuple[str, int]]],
) -> None:
    pairs, told, wanted = Pairs(), [], Counter[tuple[str, int]]()
    for second, found in enumerate(given_looks):
        wanted.update(found)
        told += pairs.take([xid(31, source, second * SECOND, gpu=gpu) for source, gpu in found], T0 + second * SECOND)
    told += pairs.rest()
    assert len(given_looks) * SECOND <= SAME
    for gpu in range(2):
        count = sum(event.data["count"] for event in told if event.entity == f"gpu:n1.{gpu}")
        assert count == max(wanted["kernel", gpu], wanted["nvml", gpu])
