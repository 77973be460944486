"""XID correlation: one event per XID, consequences with their root, and the driver's recovery action."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.collectors.gpu.xid import XidEvents
from agents.collectors.gpu.xid_correlation import (
    HOLD_TIME,
    MAX_DELAY,
    MAX_RECORD_NUMBERS,
    MAX_REMEMBERED,
    MAX_SOURCE_SKEW,
    XidCorrelator,
    correlator_for,
)
from agents.collectors.gpu.xid_table import load_xid_table
from agents.collectors.host.host import Host
from agents.collectors.host.kernel_log import MAX_RECORDS, KernelLog
from pipeline.model.records import SECOND, Event

T0 = 1_800_000_000 * SECOND
MS = 1000
TABLE = load_xid_table()


def xid(code: int, gpu: int = 0, at: int = 0, source: str = "kernel", **more: Any) -> Event:
    known = TABLE.find_xid(code)
    data = {"xid": code, "severity": known.severity, "action": known.action, "source": source, "count": 1, **more}
    return Event(T0 + at, f"gpu:n1.{gpu}", "xid", {"pci": f"0000:{gpu:02x}:00", **data})


def sxid(at: int = 0, fatal: bool = True) -> Event:
    severity = "critical" if fatal else "warning"
    return Event(T0 + at, "node:n1", "sxid", {"sxid": 20034, "fatal": fatal, "severity": severity})


def recovery(to: int, gpu: int = 0, at: int = 0) -> Event:
    return Event(T0 + at, f"gpu:n1.{gpu}", "recovery_action", {"to": to, "action": "reboot node"})


def codes(events: list[Event]) -> list[int]:
    return [event.data.get("xid", 0) for event in events]


def root(event: Event) -> tuple[int, str]:
    found = event.data["root"]
    return found.get("xid", found.get("sxid")), found["entity"]


# --- two sources -----------------------------------------------------------------------------------------------------


def test_both_sources_in_one_call_are_one_event_with_the_richer_text() -> None:
    reported = XidCorrelator().process([xid(79, source="nvml"), xid(79, at=300 * MS, text="gone")], T0)
    assert len(reported) == 1
    assert (reported[0].data["text"], reported[0].data["sources"], reported[0].data["source"]) == (
        "gone",
        ["kernel", "nvml"],
        "kernel",
    )


def test_nvml_events_wait_two_reads_for_the_kernel_log() -> None:
    folding = XidCorrelator()
    assert folding.process([xid(79, source="nvml")], T0) == []
    (reported,) = folding.process([xid(79, at=500 * MS, text="gone")], T0 + SECOND)
    assert reported.data["sources"] == ["kernel", "nvml"]
    assert folding.process([], T0 + 10 * SECOND) == []


def test_nvml_events_after_their_kernel_line_are_dropped() -> None:
    folding = XidCorrelator()
    assert len(folding.process([xid(79)], T0)) == 1
    assert folding.process([xid(79, at=SECOND, source="nvml")], T0 + SECOND) == []
    assert folding.process([], T0 + HOLD_TIME * 2) == []


def test_events_of_nvml_alone_are_sent_after_the_wait_with_their_count() -> None:
    folding = XidCorrelator()
    folding.process([xid(31, source="nvml"), xid(31, source="nvml")], T0)
    folding.process([xid(31, source="nvml", at=SECOND), xid(31, 1, source="nvml")], T0 + SECOND)
    reported = folding.process([], T0 + HOLD_TIME)
    assert [(e.entity, e.data["count"]) for e in reported] == [("gpu:n1.0", 3)]
    assert [e.entity for e in folding.process([], T0 + SECOND + HOLD_TIME)] == ["gpu:n1.1"]


def test_a_kernel_line_that_comes_too_late_counts_nothing_twice() -> None:
    folding = XidCorrelator()
    folding.process([xid(79, source="nvml")], T0)
    assert len(folding.process([], T0 + HOLD_TIME)) == 1
    (late,) = folding.process([xid(79, at=SECOND, text="gone")], T0 + 4 * SECOND)
    assert (late.data["count"], late.data["sources"]) == (0, ["kernel", "nvml"])


@pytest.mark.parametrize(
    "other", [xid(78, source="nvml"), xid(79, 1, source="nvml"), xid(79, at=MAX_SOURCE_SKEW + 1, source="nvml")]
)
def test_other_codes_gpus_and_times_are_separate_events(other: Event) -> None:
    folding = XidCorrelator()
    reported = folding.process([xid(79), other], T0) + folding.process([], T0 + HOLD_TIME)
    assert len(reported) == 2


def test_the_end_of_the_agent_flushes_held_events() -> None:
    folding = XidCorrelator()
    folding.process([xid(79, source="nvml")], T0)
    assert codes(folding.flush()) == [79]
    assert folding.flush() == []


def test_a_record_that_is_delivered_again_is_dropped() -> None:
    folding = XidCorrelator()
    assert len(folding.process([xid(13, seq=5), xid(13, seq=6)], T0)) == 2
    assert codes(folding.process([xid(13, seq=6), xid(13, seq=7)], T0 + SECOND)) == [13]
    assert codes(folding.process([xid(13, seq=7, since=T0, count=40)], T0 + 60 * SECOND)) == [13]


# --- roots -----------------------------------------------------------------------------------------------------------


def test_a_memory_error_is_the_root_of_its_remap_containment_and_cleanup() -> None:
    """In the order of a real log: 48, 63 and 94 within 25 ms, then the channels' 45."""
    reported = XidCorrelator().process([xid(94, at=25 * MS), xid(45, at=900 * MS), xid(48), xid(63, at=23 * MS)], T0)
    assert codes(reported) == [48, 63, 94, 45]
    assert "root" not in reported[0].data
    assert [root(event) for event in reported[1:]] == [(48, "gpu:n1.0")] * 3
    assert reported[1].data["root"]["time"] == T0


def test_a_consequence_that_is_logged_first_still_names_its_root_and_follows_it() -> None:
    reported = XidCorrelator().process([xid(94), xid(63, at=4 * MS)], T0)
    assert (codes(reported), root(reported[1])) == ([63, 94], (63, "gpu:n1.0"))


def test_a_gpu_off_the_bus_is_the_root_of_its_silent_firmware_even_if_that_is_logged_first() -> None:
    reported = XidCorrelator().process(
        [xid(119), xid(79, at=SECOND), xid(154, at=SECOND, detail={"to": 2}, action="reboot node")], T0
    )
    assert codes(reported) == [79, 119, 154]
    assert {root(event) for event in reported[1:]} == {(79, "gpu:n1.0")}


def test_a_later_consequence_refers_back() -> None:
    folding = XidCorrelator()
    folding.process([xid(119)], T0)
    (later,) = folding.process([xid(45, at=30 * SECOND)], T0 + 30 * SECOND)
    assert root(later) == (119, "gpu:n1.0")
    (alone,) = folding.process([xid(45, at=MAX_DELAY + SECOND)], T0 + MAX_DELAY + SECOND)
    assert "root" not in alone.data


def test_a_chain_ends_at_the_first_cause() -> None:
    folding = XidCorrelator()
    folding.process([xid(144)], T0)
    (ecc,) = folding.process([xid(48, at=SECOND)], T0 + SECOND)
    (remap,) = folding.process([xid(63, at=2 * SECOND)], T0 + 2 * SECOND)
    assert root(ecc) == root(remap) == (144, "gpu:n1.0")


def test_a_gpu_off_the_bus_is_the_root_of_errors_of_its_links_peers_and_switches() -> None:
    folding = XidCorrelator()
    reported = folding.process(
        [xid(74, 1, at=SECOND), xid(79, 3), xid(45, 1, at=2 * SECOND), xid(31, 2, at=SECOND)], T0
    )
    assert codes(reported)[0] == 79
    assert {root(event) for event in reported[1:]} == {(79, "gpu:n1.3")}
    (switch,) = folding.process([sxid(12 * SECOND)], T0 + 12 * SECOND)
    assert root(switch) == (79, "gpu:n1.3")


def test_a_fatal_switch_error_is_the_root_of_link_errors_and_a_harmless_one_is_not() -> None:
    reported = XidCorrelator().process([sxid(), xid(74, 2, at=SECOND)], T0)
    assert root(reported[1]) == (20034, "node:n1")
    assert all(
        "root" not in event.data for event in XidCorrelator().process([sxid(fatal=False), xid(74, 2, at=SECOND)], T0)
    )


def test_of_two_link_errors_of_peers_the_first_is_the_root() -> None:
    reported = XidCorrelator().process([xid(74, 1, at=40 * MS), xid(74, 4)], T0)
    assert [event.entity for event in reported] == ["gpu:n1.4", "gpu:n1.1"]
    assert root(reported[1]) == (74, "gpu:n1.4")


def test_unrelated_errors_have_no_root() -> None:
    reported = XidCorrelator().process([xid(13), xid(79, 1), xid(63, 2), xid(94, 5)], T0)
    assert all("root" not in event.data for event in reported)


def test_the_users_table_decides_consequences() -> None:
    changed = {**TABLE.xids, 43: replace(TABLE.find_xid(43), follows=frozenset())}
    reported = XidCorrelator(replace(TABLE, xids=changed)).process([xid(13), xid(43, at=MS)], T0)
    assert all("root" not in event.data for event in reported)
    assert "root" in XidCorrelator().process([xid(13), xid(43, at=MS)], T0)[1].data


def test_the_table_is_that_of_the_collectors(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('version = "9"\n[[xid]]\ncodes = [43]\nfollows = []\n')
    assert correlator_for([Host(), XidEvents(), KernelLog(xid_table=own)]).table.find_xid(43).follows == frozenset()
    assert correlator_for([Host(), XidEvents(), KernelLog()]).table is load_xid_table()


# --- the driver's recovery action ------------------------------------------------------------------------------------


def test_xid_154_sets_the_action_of_its_root_in_the_same_call() -> None:
    summary = xid(154, at=MS, action="drain and reset GPU", detail={"to": 4})
    first, second = XidCorrelator().process([xid(119), summary], T0)
    assert (first.data["xid"], first.data["action"], first.data["action_source"]) == (
        119,
        "drain and reset GPU",
        "driver",
    )
    assert root(second) == (119, "gpu:n1.0")


def test_the_recovery_action_of_nvml_does_so_too_and_is_sent() -> None:
    reported = XidCorrelator().process([xid(79), recovery(2, at=SECOND), recovery(2, 5)], T0)
    assert (reported[0].data["action"], reported[0].data["action_source"]) == ("reboot node", "driver")
    assert [event.kind for event in reported] == ["xid", "recovery_action", "recovery_action"]
    assert root(reported[2]) == (79, "gpu:n1.0")


def test_action_zero_changes_no_action() -> None:
    reported = XidCorrelator().process([xid(79), xid(154, at=MS, action="none", detail={"to": 0}), recovery(0)], T0)
    assert reported[0].data["action"] == "reboot node"


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_other_events_are_unchanged() -> None:
    other = Event(T0, "node:n1", "kernel", {"pattern": "panic", "seq": 9})
    assert XidCorrelator().process([other, Event(T0, "node:n1", "gap")], T0) == [other, Event(T0, "node:n1", "gap")]


def test_memory_stays_bounded_in_a_storm() -> None:
    folding = XidCorrelator()
    for second in range(20):
        storm = [xid(200 + n % 90, second * 9 + n // 90, second * SECOND, seq=second * 500 + n) for n in range(500)]
        assert len(folding.process(storm, T0 + second * SECOND)) == 500
    assert len(folding._recent) <= MAX_REMEMBERED + 500
    folding.process([], T0 + 3600 * SECOND)
    assert len(folding._recent) == 0


def test_all_records_of_two_reads_may_be_repeated_without_doubling_or_loss() -> None:
    assert MAX_RECORD_NUMBERS >= 2 * MAX_RECORDS
    folding = XidCorrelator()
    first = [Event(T0, "node:n1", "kernel", {"seq": seq}) for seq in range(2 * MAX_RECORDS)]
    later = [Event(T0, "node:n1", "kernel", {"seq": seq}) for seq in range(2 * MAX_RECORDS, 2 * MAX_RECORDS + 500)]
    assert len(folding.process(first, T0)) == 2 * MAX_RECORDS
    assert (
        folding.process([*first, *reversed(later)], T0 + SECOND) == later[::-1]
    )  # times of two processors may be mixed
    assert folding.process(later, T0 + 2 * SECOND) == []
    assert len(folding._record_numbers) == MAX_RECORD_NUMBERS


events = st.builds(
    xid,
    st.sampled_from([13, 31, 43, 45, 48, 63, 74, 79, 94, 95, 119, 144, 149, 154, 171, 999]),
    st.integers(0, 3),
    st.integers(0, 5 * SECOND),
    st.sampled_from(["kernel", "nvml"]),
)


@given(
    st.lists(
        st.one_of(events, st.builds(sxid, st.integers(0, SECOND)), st.builds(recovery, st.integers(0, 7))), max_size=30
    )
)
def test_nothing_is_lost_or_invented_and_roots_come_first(given_events: list[Event]) -> None:
    folding = XidCorrelator()
    reported = folding.process(given_events, T0)
    placed = ["root" in event.data for event in reported]
    assert placed == sorted(placed)
    reported += folding.process([], T0 + HOLD_TIME) + folding.flush()
    for kind in ("sxid", "recovery_action"):
        assert sum(e.kind == kind for e in reported) == sum(e.kind == kind for e in given_events)
    kernel = [e for e in given_events if e.kind == "xid" and e.data["source"] == "kernel"]
    assert sum(e.kind == "xid" and e.data["source"] == "kernel" for e in reported) == len(kernel)
    assert {(e.data["xid"], e.entity) for e in reported if e.kind == "xid"} == {
        (e.data["xid"], e.entity) for e in given_events if e.kind == "xid"
    }
    for event in reported:
        found = event.data.get("root")
        if found is not None:
            assert any(
                e.entity == found["entity"] and e.time == found["time"] and "root" not in e.data
                for e in reported
                if e.data.get("xid") == found.get("xid")
            )
