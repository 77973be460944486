"""Events of links: however much a port flaps, what was told last becomes true."""

from __future__ import annotations

import pytest

from agents.collectors.nic.link_state import MAX_BURST, REFILL_S, LinkStateEvents
from pipeline.model.records import SECOND, Event

PORT = "port:n1.mlx5_0"


class Told:
    """A port that was active at first, and what was told of it; each look is a second later."""

    def __init__(self) -> None:
        self.edges, self.time, self.events, self.state = LinkStateEvents(), 0, list[Event](), "active"
        self.edges.update(0, PORT, "active", True)

    def take(self, *events: Event | None) -> None:
        for event in events:
            if event is not None:
                assert event.data["from"] == self.state
                self.state = event.data["to"]
                self.events.append(event)

    def look(self, state: str, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.time += SECOND
            self.take(self.edges.update(self.time, PORT, state, state == "active"))

    def flap(self, times: int) -> None:
        for i in range(times):
            self.look("active" if i % 2 else "down")


@pytest.mark.parametrize("flaps", [MAX_BURST, MAX_BURST + 1, 38, 39, 40, 41, 60, 61, 600, 601])
@pytest.mark.parametrize("final", ["down", "active"])
def test_the_last_reported_state_is_the_true_one_once_a_token_is_free(flaps: int, final: str) -> None:
    told = Told()
    told.flap(flaps)
    told.look(final, REFILL_S)
    assert told.state == final
    assert len(told.events) <= MAX_BURST + 1 + (flaps + REFILL_S) // REFILL_S


def test_all_events_of_a_burst_are_reported() -> None:
    told = Told()
    told.flap(MAX_BURST)
    assert len(told.events) == MAX_BURST


def test_a_port_removed_without_token_is_reported_later() -> None:
    told = Told()
    told.flap(MAX_BURST + 5)  # those that came in the meantime too
    told.look("down", 1)
    told.take(told.edges.port_removed(told.time, PORT))
    assert told.state != "gone"
    told.take(*told.edges.pending_removals(told.time + REFILL_S * SECOND, ()))
    assert told.state == "gone"
    assert told.edges.pending_removals(told.time + 3600 * SECOND, ()) == []


def test_a_port_that_came_back_is_not_reported_gone() -> None:
    told = Told()
    told.flap(MAX_BURST + 5)  # those that came in the meantime too
    told.take(told.edges.port_removed(told.time, PORT))
    assert told.edges.pending_removals(told.time + 3600 * SECOND, (PORT,)) == []
    assert told.edges.pending_removals(told.time + 7200 * SECOND, ()) == []


def test_a_clock_set_back_suppresses_no_port() -> None:
    told = Told()
    told.time = 7200 * SECOND
    told.flap(MAX_BURST + 5)  # those that came in the meantime too
    told.time -= 3600 * SECOND
    told.look("down", REFILL_S + 1)
    assert told.state == "down"
