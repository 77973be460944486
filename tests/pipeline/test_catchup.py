"""The catch-up wait: all agents send the messages that they kept during an outage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.ingest.senders import MAX_WAIT, OUTAGE_SPREAD, CatchUp
from pipeline.model.records import SECOND

T0 = 1_780_000_000 * SECOND
LATENESS = 30 * SECOND
OUTAGE = 600 * SECOND


class Fleet:
    """Nodes last seen at T0 and silent for OUTAGE; `clock` is the time of the pipeline and of the brokers."""

    def __init__(self, *nodes: str) -> None:
        self.catch_up, self.clock = CatchUp(LATENESS), T0 + OUTAGE
        self.newest = dict.fromkeys(nodes, T0)

    def send(self, node: str, newest: int, after: int = 0) -> None:
        self.clock += after
        self.catch_up.record_message(node, newest, self.clock, self.clock, self.newest)
        self.newest[node] = newest

    @property
    def hold(self) -> int | None:
        return self.catch_up.limit_watermark(self.clock, self.newest)


def test_there_is_no_wait_while_messages_are_fresh() -> None:
    fleet = Fleet("a", "b")
    fleet.send("a", T0 + OUTAGE - SECOND)
    assert fleet.hold is None


def test_the_first_node_that_has_caught_up_waits_for_those_that_have_not_begun() -> None:
    fleet = Fleet("a", "b", "c")
    fleet.send("a", T0 + SECOND)
    assert fleet.hold == T0
    fleet.send("a", fleet.clock)
    assert fleet.hold == T0
    fleet.send("b", T0 + 5 * SECOND, after=2 * SECOND)
    fleet.send("c", T0 + 9 * SECOND)
    assert fleet.hold == T0 + 5 * SECOND


def test_the_wait_ends_when_all_have_caught_up() -> None:
    fleet = Fleet("a", "b")
    fleet.send("a", T0 + SECOND)
    fleet.send("b", T0 + SECOND)
    fleet.send("a", fleet.clock - SECOND)
    fleet.send("b", fleet.clock - SECOND)
    assert fleet.hold is None


def test_a_silent_node_is_waited_for_no_longer_than_the_limit() -> None:
    fleet = Fleet("a", "dead")
    fleet.send("a", T0 + SECOND)
    fleet.send("a", fleet.clock, after=MAX_WAIT)
    assert fleet.hold == T0
    fleet.clock += 1
    assert fleet.hold is None


def test_a_node_that_catches_up_is_waited_for_however_long_it_takes() -> None:
    fleet = Fleet("a", "slow")
    fleet.send("slow", T0)
    fleet.clock += MAX_WAIT
    for i in range(1, 25):
        fleet.send("slow", T0 + i * 20 * SECOND, after=MAX_WAIT - SECOND)
        assert fleet.hold == T0 + i * 20 * SECOND


@pytest.mark.parametrize("pace", [0.0, 0.5, 1.0])
def test_a_node_that_does_not_catch_up_is_not_waited_for(pace: float) -> None:
    fleet = Fleet("a", "slow")
    for i in range(30):
        fleet.send("a", fleet.clock)
        fleet.send("slow", T0 + round(i * pace) * SECOND, after=SECOND)
    assert fleet.hold is None


def test_a_clock_far_ahead_does_not_prevent_the_wait_for_others() -> None:
    fleet = Fleet("a", "b", "ahead")
    fleet.clock = T0
    for node, newest in (("a", T0), ("b", T0), ("ahead", T0 + 10 * OUTAGE)):
        fleet.send(node, newest)
    fleet.send("a", T0 + SECOND, after=OUTAGE)
    assert fleet.hold == T0


@pytest.mark.parametrize("alone", [OUTAGE_SPREAD + 1, 10 * OUTAGE_SPREAD])
def test_a_node_that_alone_was_cut_off_delays_no_other(alone: int) -> None:
    fleet = Fleet("cut", "a", "b")
    for node in ("a", "b"):
        fleet.send(node, fleet.clock - SECOND)
    fleet.newest["cut"] = fleet.newest["a"] - alone
    fleet.send("cut", fleet.newest["cut"] + SECOND)
    assert fleet.hold is None


def test_a_slow_clock_delays_others_by_no_more_than_its_error() -> None:
    fleet = Fleet("a", "slow clock")
    slow = 40 * SECOND
    for i in range(100):
        fleet.send("a", T0 + OUTAGE + i * SECOND)
        fleet.send("slow clock", T0 + OUTAGE + i * SECOND - slow, after=SECOND)
        assert fleet.hold is None or fleet.hold >= fleet.clock - slow - 2 * SECOND


sent = st.tuples(
    st.sampled_from("abc"),
    st.sampled_from((0, 5, 20, 29, 31, 100, 595, 600, 629, 631, 700)),
    st.sampled_from((0, 1, 1, 1)),
)


@given(st.lists(st.tuples(st.integers(0, 20), st.lists(sent, max_size=6)), max_size=8))
def test_the_messages_of_a_commit_are_recorded_as_one_by_one(
    commits: list[tuple[int, list[tuple[str, int, int]]]],
) -> None:
    """Each message: node, seconds after T0 of its newest event, and whether its append time is known."""
    together, alone = Fleet("a", "b"), Fleet("a", "b")
    for after, messages in commits:
        now = together.clock = alone.clock = together.clock + after * SECOND
        found = [(node, T0 + at * SECOND, now if known else 0) for node, at, known in messages]
        together.catch_up.record_messages(found, now, together.newest)
        for node, newest, appended in found:
            if appended:
                alone.catch_up.record_message(node, newest, appended, now, alone.newest)
            alone.newest[node] = max(newest, alone.newest.get(node, newest))
        together.newest = dict(alone.newest)
        assert (together.hold, together.catch_up._newest) == (alone.hold, alone.catch_up._newest)
        assert together.catch_up._catching_up == alone.catch_up._catching_up
