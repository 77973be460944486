"""Events of links: however much a port flaps, the last reported state becomes the true one."""

from __future__ import annotations

import pytest

from agents.collectors.nic.link_state import BURST, REFILL_S, Edges
from pipeline.model.records import SECOND, Event

PORT = "port:n1.mlx5_0"


class Told:
    """A port that is active at first, and its reported events; each read is a second later."""

    def __init__(self) -> None:
        self.edges, self.time, self.events, self.state = Edges(), 0, list[Event](), "active"
        self.edges.look(0, PORT, "active", True)

    def take(self, *events: Event | None) -> None:
        for event in events:
            if event is not None:
                assert event.data["from"] == self.state
                self.state = event.data["to"]
                self.events.append(event)

    def look(self, state: str, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.time += SECOND
            self.take(self.edges.look(self.time, PORT, state, state == "active"))

    def flap(self, times: int) -> None:
        for i in range(times):
            self.look("active" if i % 2 else "down")


@pytest.mark.parametrize("flaps", [BURST, BURST + 1, 38, 39, 40, 41, 60, 61, 600, 601])
@pytest.mark.parametrize("final", ["down", "active"])
def test_the_last_reported_state_is_the_true_one_once_reporting_is_allowed(flaps: int, final: str) -> None:
    told = Told()
    told.flap(flaps)
    told.look(final, REFILL_S)
    assert told.state == final
    assert len(told.events) <= BURST + 1 + (flaps + REFILL_S) // REFILL_S


def test_a_whole_burst_is_reported() -> None:
    told = Told()
    told.flap(BURST)
    assert len(told.events) == BURST


def test_a_port_removed_while_muted_is_reported_later() -> None:
    told = Told()
    told.flap(BURST + 5)  # including those that arrived meanwhile
    told.look("down", 1)
    told.take(told.edges.gone(told.time, PORT))
    assert told.state != "gone"
    told.take(*told.edges.late(told.time + REFILL_S * SECOND, ()))
    assert told.state == "gone"
    assert told.edges.late(told.time + 3600 * SECOND, ()) == []


def test_a_returned_port_is_not_reported_as_removed() -> None:
    told = Told()
    told.flap(BURST + 5)  # including those that arrived meanwhile
    told.take(told.edges.gone(told.time, PORT))
    assert told.edges.late(told.time + 3600 * SECOND, (PORT,)) == []
    assert told.edges.late(told.time + 7200 * SECOND, ()) == []


def test_a_clock_set_back_mutes_no_port() -> None:
    told = Told()
    told.time = 7200 * SECOND
    told.flap(BURST + 5)  # including those that arrived meanwhile
    told.time -= 3600 * SECOND
    told.look("down", REFILL_S + 1)
    assert told.state == "down"
