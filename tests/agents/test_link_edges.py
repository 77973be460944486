"""Link events: however often a port flaps, the last reported state becomes its true state."""

from __future__ import annotations

import pytest

from agents.collectors.nic.link_state import MAX_BURST, REFILL_S, LinkStateEvents
from pipeline.model.records import SECOND, Event

PORT = "port:n1.mlx5_0"


class ReportedPort:
    """A port that is active at first, and its reported events; updates are one second apart."""

    def __init__(self) -> None:
        self.edges, self.time, self.events, self.state = LinkStateEvents(), 0, list[Event](), "active"
        self.edges.update(0, PORT, "active", True)

    def add_events(self, *events: Event | None) -> None:
        for event in events:
            if event is not None:
                assert event.data["from"] == self.state
                self.state = event.data["to"]
                self.events.append(event)

    def update(self, state: str, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.time += SECOND
            self.add_events(self.edges.update(self.time, PORT, state, state == "active"))

    def flap(self, times: int) -> None:
        for i in range(times):
            self.update("active" if i % 2 else "down")


@pytest.mark.parametrize("flaps", [MAX_BURST, MAX_BURST + 1, 38, 39, 40, 41, 60, 61, 600, 601])
@pytest.mark.parametrize("final", ["down", "active"])
def test_the_last_reported_state_is_the_true_one_once_a_token_is_free(flaps: int, final: str) -> None:
    port = ReportedPort()
    port.flap(flaps)
    port.update(final, REFILL_S)
    assert port.state == final
    assert len(port.events) <= MAX_BURST + 1 + (flaps + REFILL_S) // REFILL_S


def test_all_events_of_a_burst_are_reported() -> None:
    port = ReportedPort()
    port.flap(MAX_BURST)
    assert len(port.events) == MAX_BURST


def test_a_port_removed_without_token_is_reported_later() -> None:
    port = ReportedPort()
    port.flap(MAX_BURST + 5)  # those that came in the meantime too
    port.update("down", 1)
    port.add_events(port.edges.port_removed(port.time, PORT))
    assert port.state != "gone"
    port.add_events(*port.edges.pending_removals(port.time + REFILL_S * SECOND, ()))
    assert port.state == "gone"
    assert port.edges.pending_removals(port.time + 3600 * SECOND, ()) == []


def test_a_port_that_came_back_is_not_reported_gone() -> None:
    port = ReportedPort()
    port.flap(MAX_BURST + 5)  # those that came in the meantime too
    port.add_events(port.edges.port_removed(port.time, PORT))
    assert port.edges.pending_removals(port.time + 3600 * SECOND, (PORT,)) == []
    assert port.edges.pending_removals(port.time + 7200 * SECOND, ()) == []


def test_a_clock_set_back_suppresses_no_port() -> None:
    port = ReportedPort()
    port.time = 7200 * SECOND
    port.flap(MAX_BURST + 5)  # those that came in the meantime too
    port.time -= 3600 * SECOND
    port.update("down", REFILL_S + 1)
    assert port.state == "down"
