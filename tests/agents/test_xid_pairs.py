"""One event per XID from two sources: events are paired one by one, and unpaired ones are reported alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agents.collectors.gpu.xid_correlation import HOLD_TIME, KEEP_TIME, MAX_SOURCE_SKEW, MAX_UNPAIRED, XidPairing
from pipeline.model.records import SECOND, Event

T0 = 1_800_000_000 * SECOND


def xid(code: int, source: str, at: int = 0, count: int = 1, gpu: int = 0, **more: Any) -> Event:
    data = {"xid": code, "source": source, "count": count, "pci": f"0000:{gpu:02x}:00", **more}
    return Event(T0 + at, f"gpu:n1.{gpu}", "xid", data)


def counts(events: list[Event]) -> list[tuple[str, int]]:
    return [(event.data["source"], event.data["count"]) for event in events]


def test_a_second_xid_from_nvml_alone_is_not_merged_with_the_first() -> None:
    pairs = XidPairing()
    assert counts(pairs.pair([xid(31, "kernel"), xid(31, "nvml")], T0)) == [("kernel", 1)]
    assert pairs.pair([xid(31, "nvml", 8 * SECOND)], T0 + 8 * SECOND) == []
    (own,) = pairs.pair([], T0 + 8 * SECOND + HOLD_TIME)
    assert (own.data["source"], own.time) == ("nvml", T0 + 8 * SECOND)


def test_one_kernel_line_is_paired_with_one_of_five_nvml_events() -> None:
    pairs = XidPairing()
    assert pairs.pair([xid(48, "nvml") for _ in range(5)], T0) == []
    (joined,) = pairs.pair([xid(48, "kernel")], T0 + SECOND)
    assert (joined.data["sources"], joined.data["count"]) == (["kernel", "nvml"], 1)
    assert counts(pairs.pair([], T0 + HOLD_TIME)) == [("nvml", 4)]


def test_a_line_with_a_count_is_paired_with_as_many() -> None:
    pairs = XidPairing()
    pairs.pair([xid(48, "kernel", count=3)], T0)
    assert pairs.pair([xid(48, "nvml", SECOND) for _ in range(4)], T0 + SECOND) == []
    assert counts(pairs.pair([], T0 + SECOND + HOLD_TIME)) == [("nvml", 1)]


def test_repeats_that_the_kernel_log_counts_a_minute_later_are_not_counted_twice() -> None:
    pairs, reported = XidPairing(), []
    for second in range(60):
        at = second * SECOND
        lines = [xid(31, "kernel", at)] if second < 5 else []
        reported += pairs.pair([*lines, xid(31, "nvml", at)], T0 + at)
    reported += pairs.pair([xid(31, "kernel", 59 * SECOND, 55, since=T0 + 5 * SECOND)], T0 + 60 * SECOND)
    reported += pairs.pair([], T0 + 70 * SECOND)
    assert sum(event.data["count"] for event in reported) == 60


def test_a_storm_longer_than_the_memory_is_not_counted_twice() -> None:
    pairs, reported = XidPairing(), []
    for second in range(90):
        reported += pairs.pair([xid(31, "nvml", second * SECOND)], T0 + second * SECOND)
    reported += pairs.pair([xid(31, "kernel", 89 * SECOND, 90, since=T0)], T0 + 90 * SECOND)
    assert sum(event.data["count"] for event in [*reported, *pairs.flush()]) == 90


def test_a_line_with_a_count_is_paired_with_nvml_events_of_its_first_repeat() -> None:
    pairs = XidPairing()
    reported = [*pairs.pair([xid(31, "nvml")], T0), *pairs.pair([], T0 + HOLD_TIME)]
    reported += pairs.pair([xid(31, "kernel", 30 * SECOND, 3, since=T0)], T0 + 30 * SECOND)
    assert counts(reported) == [("nvml", 1), ("kernel", 2)]


def test_pending_events_expire_and_are_bounded() -> None:
    pairs = XidPairing()
    storm = [xid(code, source, gpu=gpu) for code in range(100) for gpu in range(40) for source in ("nvml", "kernel")]
    assert len(pairs.pair(storm[::2], T0)) == 4000 - MAX_UNPAIRED  # events above the limit are reported immediately
    assert len(pairs.pair(storm[1::2], T0 + SECOND)) == 4000
    assert all(len(ledger._pending) <= 2 * MAX_UNPAIRED for ledger in (pairs._held, pairs._logged, pairs._sent_alone))
    pairs.pair([], T0 + SECOND + KEEP_TIME)
    assert not any(ledger._pending for ledger in (pairs._held, pairs._logged, pairs._sent_alone))


def test_a_clock_set_back_extends_no_wait() -> None:
    pairs = XidPairing()
    pairs.pair([xid(79, "nvml")], T0)
    assert counts(pairs.pair([], T0 - 3600 * SECOND)) == [("nvml", 1)]


def test_a_gpu_identified_only_by_address_is_the_same() -> None:
    line = Event(T0, "node:n1", "xid", {"xid": 79, "source": "kernel", "count": 1, "pci": "0000:03:00"})
    other = Event(T0, "node:n1", "xid", {"xid": 79, "source": "kernel", "count": 1, "pci": "0000:04:00"})
    pairs = XidPairing()
    reported = pairs.pair([line, other, xid(79, "nvml", gpu=3)], T0)
    assert [event.data.get("sources") for event in reported] == [["kernel", "nvml"], None]


def test_two_gpus_that_have_the_same_index_by_two_sources_are_not_the_same() -> None:
    line = Event(T0, "gpu:n1.3", "xid", {"xid": 79, "source": "kernel", "count": 1, "pci": "0000:04:00"})
    pairs = XidPairing()
    assert pairs.pair([line, xid(79, "nvml", gpu=3)], T0) == [line]
    assert counts(pairs.pair([], T0 + HOLD_TIME)) == [("nvml", 1)]


READS = st.lists(st.lists(st.tuples(st.sampled_from(["kernel", "nvml"]), st.integers(0, 1)), max_size=6), max_size=6)


@given(READS)
def test_of_two_counts_of_the_same_xid_the_greater_is_reported(
    reads: list[list[tuple[str, int]]],
) -> None:
    pairs, reported, wanted = XidPairing(), [], Counter[tuple[str, int]]()
    for second, found in enumerate(reads):
        wanted.update(found)
        reported += pairs.pair(
            [xid(31, source, second * SECOND, gpu=gpu) for source, gpu in found], T0 + second * SECOND
        )
    reported += pairs.flush()
    assert len(reads) * SECOND <= MAX_SOURCE_SKEW
    for gpu in range(2):
        count = sum(event.data["count"] for event in reported if event.entity == f"gpu:n1.{gpu}")
        assert count == max(wanted["kernel", gpu], wanted["nvml", gpu])
