"""Who is waited for when all agents send at once what they kept during an outage."""

from __future__ import annotations

import pytest

from pipeline.ingest.senders import MAX_WAIT, OUTAGE_SPREAD, CatchUp
from pipeline.model.records import SECOND

T0 = 1_780_000_000 * SECOND
LATENESS = 30 * SECOND
OUTAGE = 600 * SECOND


class Fleet:
    """Nodes that were all heard at T0, then not for OUTAGE; `clock` is the time of the pipeline and of the brokers."""

    def __init__(self, *nodes: str) -> None:
        self.catch_up, self.clock = CatchUp(LATENESS), T0 + OUTAGE
        self.newest = dict.fromkeys(nodes, T0)

    def sends(self, node: str, newest: int, after: int = 0) -> None:
        self.clock += after
        self.catch_up.record_message(node, newest, self.clock, self.clock, self.newest)
        self.newest[node] = newest

    @property
    def hold(self) -> int | None:
        return self.catch_up.limit_watermark(self.clock, self.newest)


def test_nobody_is_waited_for_while_messages_are_fresh() -> None:
    fleet = Fleet("a", "b")
    fleet.sends("a", T0 + OUTAGE - SECOND)
    assert fleet.hold is None


def test_the_first_that_is_done_waits_for_those_that_have_not_begun() -> None:
    fleet = Fleet("a", "b", "c")
    fleet.sends("a", T0 + SECOND)
    assert fleet.hold == T0
    fleet.sends("a", fleet.clock)
    assert fleet.hold == T0
    fleet.sends("b", T0 + 5 * SECOND, after=2 * SECOND)
    fleet.sends("c", T0 + 9 * SECOND)
    assert fleet.hold == T0 + 5 * SECOND


def test_the_wait_ends_when_all_have_caught_up() -> None:
    fleet = Fleet("a", "b")
    fleet.sends("a", T0 + SECOND)
    fleet.sends("b", T0 + SECOND)
    fleet.sends("a", fleet.clock - SECOND)
    fleet.sends("b", fleet.clock - SECOND)
    assert fleet.hold is None


def test_one_that_stays_silent_is_not_waited_for_longer_than_patience() -> None:
    fleet = Fleet("a", "dead")
    fleet.sends("a", T0 + SECOND)
    fleet.sends("a", fleet.clock, after=MAX_WAIT)
    assert fleet.hold == T0
    fleet.clock += 1
    assert fleet.hold is None


def test_one_that_gains_on_the_clock_is_waited_for_however_long_it_takes() -> None:
    fleet = Fleet("a", "slow")
    fleet.sends("slow", T0)
    fleet.clock += MAX_WAIT
    for i in range(1, 25):
        fleet.sends("slow", T0 + i * 20 * SECOND, after=MAX_WAIT - SECOND)
        assert fleet.hold == T0 + i * 20 * SECOND


@pytest.mark.parametrize("pace", [0.0, 0.5, 1.0])
def test_one_that_does_not_gain_on_the_clock_is_not_waited_for(pace: float) -> None:
    fleet = Fleet("a", "slow")
    for i in range(30):
        fleet.sends("a", fleet.clock)
        fleet.sends("slow", T0 + round(i * pace) * SECOND, after=SECOND)
    assert fleet.hold is None


def test_a_clock_far_ahead_keeps_nobody_from_being_waited_for() -> None:
    fleet = Fleet("a", "b", "ahead")
    fleet.clock = T0
    for node, newest in (("a", T0), ("b", T0), ("ahead", T0 + 10 * OUTAGE)):
        fleet.sends(node, newest)
    fleet.sends("a", T0 + SECOND, after=OUTAGE)
    assert fleet.hold == T0


@pytest.mark.parametrize("alone", [OUTAGE_SPREAD + 1, 10 * OUTAGE_SPREAD])
def test_a_node_that_was_cut_off_alone_holds_nobody(alone: int) -> None:
    fleet = Fleet("cut", "a", "b")
    for node in ("a", "b"):
        fleet.sends(node, fleet.clock - SECOND)
    fleet.newest["cut"] = fleet.newest["a"] - alone
    fleet.sends("cut", fleet.newest["cut"] + SECOND)
    assert fleet.hold is None


def test_a_clock_that_is_slow_for_ever_holds_nobody_back_further_than_it_is_slow() -> None:
    fleet = Fleet("a", "slow clock")
    slow = 40 * SECOND
    for i in range(100):
        fleet.sends("a", T0 + OUTAGE + i * SECOND)
        fleet.sends("slow clock", T0 + OUTAGE + i * SECOND - slow, after=SECOND)
        assert fleet.hold is None or fleet.hold >= fleet.clock - slow - 2 * SECOND
