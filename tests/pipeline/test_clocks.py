"""Wrong clocks are corrected and measured, distinguished from late messages, and do not affect other senders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.ingest.clocks import BOUND, WINDOW, SenderClock
from pipeline.ingest.ingest import Ingest
from pipeline.ingest.senders import SAVE_EVERY, SLOW_DISK
from pipeline.model.records import SECOND, Batch, Block, Event, EventBatch, Origin
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.transport import wire
from tests.pipeline.shared_log import ONE, TWO, WORD, SharedLog

T0 = 1_780_000_000 * SECOND
HOUR, DAY = 3600 * SECOND, 86_400 * SECOND


def measure(clock: SenderClock, errors: list[int], begun: int = T0, step: int = 5 * SECOND) -> list[int]:
    """Returns the errors of a clock for messages every `step` whose `sent` differs from their arrival by `errors`."""
    return [clock.measure_message(begun + i * step + e, begun + i * step, True, BOUND) for i, e in enumerate(errors)]


def test_one_message_proves_a_clock_ahead() -> None:
    assert measure(SenderClock(), [240 * SECOND]) == [240 * SECOND]


def test_a_clock_within_the_bound_counts_as_right() -> None:
    assert set(measure(SenderClock(), [BOUND, -BOUND, SECOND, 0] * 10)) == {0}


def test_a_clock_behind_is_detected_after_two_windows() -> None:
    clock = SenderClock()
    moved = measure(clock, [-DAY - SECOND, -DAY] * 10)
    assert moved[0] == 0
    assert moved[-1] == clock.error == -DAY
    assert moved.index(-DAY) * 5 * SECOND <= 2 * WINDOW + 5 * SECOND


def test_a_backlog_sent_at_twice_its_original_rate_is_not_a_wrong_clock() -> None:
    clock = SenderClock()
    assert set(measure(clock, [-HOUR + i * 5 * SECOND for i in range(700)])) == {0}


def test_messages_delayed_by_the_pipeline_do_not_prove_a_clock_behind() -> None:
    clock = SenderClock()
    for i in range(100):
        assert clock.measure_message(T0 + i * SECOND, T0 + DAY + i * SECOND, False, BOUND) == 0


def test_a_clock_that_was_set_right_counts_as_right_again() -> None:
    for error in (HOUR, -HOUR):
        clock = SenderClock()
        measure(clock, [error] * 12)
        assert clock.error == error
        assert measure(clock, [0] * 12, T0 + 60 * SECOND)[-1] == clock.error == 0


def test_a_clock_that_is_less_ahead_than_before_is_measured_again() -> None:
    clock = SenderClock()
    measure(clock, [2 * HOUR] * 12)
    measure(clock, [HOUR] * 12, T0 + 60 * SECOND)
    assert clock.error == HOUR


class ClockHarness:
    """An ingest whose transport and clock belong to the test; `send` stamps messages with the sender's clock."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock, self.log, self.sequences = folder, T0, SharedLog(), dict[str, int]()
        self.start()

    def start(self) -> None:
        self.database = Database(self.folder / "store.duckdb")
        self.ingest = Ingest(self.database, self.log, Devices(self.database.connection), lambda: self.clock)

    def stop(self) -> None:
        self.database.close()

    def send(self, node: str, error: int = 0, ticks: int = 1, partition=ONE, appended: int = 0) -> None:
        stamps = (appended or self.clock) + error - np.arange(ticks)[::-1] * SECOND
        block = Block("gpu", (f"gpu:{node}.0",), {"gpu.temperature": np.full((ticks, 1), 50, "f4")})
        body = wire.encode(Batch(Origin("local", node, bytes(16)), stamps, (block,)))
        self._add(partition, node, body, wire.TELEMETRY_KIND, int(stamps[-1]), appended)

    def send_event(self, node: str, event: Event, sent: int) -> None:
        body = wire.encode_events(EventBatch(Origin("local", node, bytes(16)), (event,)))
        self._add(WORD, node, body, wire.EVENTS_KIND, sent, 0)

    def _add(self, partition, node: str, body: bytes, kind: int, sent: int, appended: int) -> None:
        sequence = self.sequences[node] = self.sequences.get(node, -1) + 1
        self.log.add(partition, [wire.seal(body, kind, node.encode().ljust(16), sequence, sent)], appended)

    def drain(self):
        committed = []
        while (done := self.ingest.step()) is not None:
            committed.append(done)
        return committed

    def times(self, node: str) -> list[int]:
        rows = self.database.connection.execute(
            "SELECT epoch_us(time) FROM gpu WHERE entity = ? ORDER BY time", [f"gpu:{node}.0"]
        ).fetchall()
        return [time for (time,) in rows]


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[ClockHarness]:
    made = ClockHarness(tmp_path)
    yield made
    made.stop()


def test_one_timestamp_of_2199_changes_neither_the_newest_time_nor_last_seen(harness: ClockHarness) -> None:
    harness.send("a")
    harness.send("b", error=173 * 365 * DAY)
    harness.drain()
    progress = harness.ingest.progress
    assert progress.newest is not None
    assert progress.newest <= T0 + BOUND
    assert max(progress.nodes.values()) <= T0 + BOUND
    [(seen,)] = harness.database.connection.execute("SELECT epoch_us(max(last_seen)) FROM entities").fetchall()
    assert seen <= T0 + BOUND
    assert progress.clock_errors == {"b": 173 * 365 * DAY}


@pytest.mark.slow
def test_ticks_of_a_clock_ahead_keep_their_distances(harness: ClockHarness) -> None:
    for _ in range(3):
        harness.send("a", error=240 * SECOND, ticks=5)
        harness.drain()
        harness.clock += 5 * SECOND
    assert harness.times("a") == [T0 + i * SECOND for i in range(-4, 11)]


def test_a_future_timestamp_of_a_right_clock_is_clamped(harness: ClockHarness) -> None:
    stamps = np.array([T0, T0 + HOUR])
    block = Block("gpu", ("gpu:a.0",), {"gpu.temperature": np.full((2, 1), 50, "f4")})
    harness._add(ONE, "a", wire.encode(Batch(Origin("local", "a", bytes(16)), stamps, (block,))), 1, T0, 0)
    harness.drain()
    assert max(harness.times("a")) == T0 + BOUND


def test_a_neighbour_on_a_shared_partition_is_read_in_the_order_of_true_time(harness: ClockHarness) -> None:
    """Partition 0 has a node two hours ahead and its neighbour; partition 1 has a backlog of an hour."""
    for minute in range(60):
        at = T0 - HOUR + minute * 60 * SECOND
        harness.send("ahead", error=2 * HOUR, appended=at)
        harness.send("neighbour", appended=at)
        harness.send("other", partition=TWO, appended=at)
    harness.ingest._fetch()
    order = [item.time for item in harness.ingest._merge()]
    assert order == sorted(order)
    assert len(order) == 180


@pytest.mark.slow
def test_a_clock_a_day_behind_is_corrected_before_retention_could_delete_its_rows(harness: ClockHarness) -> None:
    for _ in range(20):
        harness.send("a", error=-DAY)
        harness.drain()
        harness.clock += 5 * SECOND
    assert harness.ingest.progress.clock_errors == {"a": -DAY}
    assert harness.times("a")[-1] == harness.clock - 5 * SECOND


def test_an_event_of_a_clock_ahead_is_corrected_together_with_its_onset(harness: ClockHarness) -> None:
    late = T0 + HOUR
    event = Event(late, "loop:a", "flow_collapse", {"state": "active", "since": late - 2 * SECOND})
    harness.send_event("a", event, late)
    [done] = harness.drain()
    found = done.events[0]
    assert (found.time, found.data["since"]) == (T0, T0 - 2 * SECOND)


@pytest.mark.slow
@pytest.mark.slow
def test_after_a_restart_the_nodes_and_their_last_arrivals_are_known(harness: ClockHarness) -> None:
    harness.send("a")
    harness.send("b", error=HOUR)
    harness.drain()
    harness.clock += SAVE_EVERY
    harness.send("b", error=HOUR)
    harness.drain()
    harness.stop()
    harness.start()
    progress = harness.ingest.progress
    assert progress.arrivals == {"a": T0, "b": T0 + SAVE_EVERY}
    assert progress.clock_errors == {"b": HOUR}


def test_arrival_times_come_from_our_clock_or_the_brokers_and_never_from_the_senders(harness: ClockHarness) -> None:
    harness.send("a", error=-HOUR)
    harness.send("b", error=HOUR)
    harness.send("c", error=-HOUR, appended=T0 - 7 * SECOND)
    harness.drain()
    assert harness.ingest.progress.arrivals == {"a": T0, "b": T0, "c": T0 - 7 * SECOND}


def send_with_delay(harness: ClockHarness, delay: int) -> dict[str, int]:
    """Sends messages with the same delay; returns the clock errors known after that."""
    for _ in range(24):
        harness.clock += 5 * SECOND
        harness.send("a", error=-delay)
        harness.drain()
    return dict(harness.ingest.progress.clock_errors)


@pytest.mark.slow
@pytest.mark.slow
def test_messages_that_wait_for_a_slow_disk_are_not_a_clock_behind(harness: ClockHarness) -> None:
    """A disk of 12 s once caused a ticket "clock 12 s behind" for a right clock, and moved its telemetry."""
    harness.send("a")
    harness.send_event("a", Event(harness.clock, "node:a", "disk_slow", {"state": "active"}), harness.clock)
    harness.drain()
    sent = [T0, *(T0 + (5 * i - 12) * SECOND for i in range(1, 49))]
    assert send_with_delay(harness, 12 * SECOND) == {}
    harness.stop()
    harness.start()
    assert send_with_delay(harness, 12 * SECOND) == {}, "also after a restart"
    assert harness.times("a") == sorted(sent)
    harness.send_event("a", Event(harness.clock, "node:a", "disk_slow", {"state": "cleared"}), harness.clock)
    assert send_with_delay(harness, 12 * SECOND) == {"a": -12 * SECOND}, "without it nothing else explains the delay"


@pytest.mark.slow
@pytest.mark.slow
def test_an_agent_that_never_reports_a_healthy_disk_hides_its_clock_error_for_an_hour(harness: ClockHarness) -> None:
    harness.send_event("a", Event(harness.clock, "node:a", "disk_slow", {"state": "active"}), harness.clock)
    harness.drain()
    harness.clock += SLOW_DISK
    assert send_with_delay(harness, 12 * SECOND) == {"a": -12 * SECOND}


def test_an_event_alone_counts_as_an_arrival(harness: ClockHarness) -> None:
    harness.send_event("a", Event(T0, "gpu:a.0", "xid", {"xid": 79}), T0)
    harness.drain()
    assert harness.ingest.progress.arrivals == {"a": T0}
    assert harness.ingest.progress.nodes == {}


@pytest.mark.slow
def test_last_seen_in_an_older_store_does_not_stay_in_the_future(harness: ClockHarness) -> None:
    harness.send("a")
    harness.drain()
    harness.database.connection.execute("UPDATE latest_gpu SET time = '2199-01-01'")
    harness.stop()
    harness.start()
    assert harness.ingest.progress.nodes == {"a": T0}
    harness.clock += SECOND
    harness.send("a")
    harness.drain()
    assert harness.database.connection.execute("SELECT epoch_us(last_seen) FROM entities").fetchall() == [
        (T0 + SECOND,)
    ]


@pytest.mark.slow
def test_a_wrong_clock_is_one_event_and_its_correction_another(harness: ClockHarness) -> None:
    for error in (HOUR, HOUR, 0, 0, 0, 0, 0, 0, 0, 0, 0):
        harness.send("a", error=error)
        harness.drain()
        harness.clock += 5 * SECOND
    rows = harness.database.connection.execute("SELECT entity, kind, data ->> '$.seconds' FROM events ORDER BY time")
    assert rows.fetchall() == [("node:a", "clock_error", "3600.0"), ("node:a", "clock_error", "0.0")]


def count_clock_events(harness: ClockHarness) -> tuple[int, int]:
    """Returns the number of events that report a wrong clock, and of those that clear it."""
    query = "SELECT count(*) FILTER (data ->> '$.seconds' <> '0.0'), count(*) FROM events WHERE kind = 'clock_error'"
    [(wrong, every)] = harness.database.connection.execute(query).fetchall()
    return wrong, every - wrong


@pytest.mark.slow
@pytest.mark.slow
def test_invented_nodes_with_wrong_clocks_store_no_more_events_than_the_bound(
    harness: ClockHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.ingest.senders.MAX_REPORTED", 5)
    harness.send("a", error=HOUR)
    harness.drain()
    for second in range(31):
        for number in range(20):
            harness.send(f"ghost{number}", error=(number + 2) * HOUR)
        harness.send("a", error=HOUR if second < 30 else 30 * HOUR)
        harness.drain()
        harness.clock += SECOND
    assert count_clock_events(harness) == (6, 0), "five clocks, and another amount of one of them"
    assert len(harness.ingest.progress.clock_errors) == 21, "all are corrected and counted"


def test_a_wrong_clock_that_is_silent_for_an_hour_frees_its_place(
    harness: ClockHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.ingest.senders.MAX_REPORTED", 1)
    harness.send("ghost", error=HOUR)
    harness.drain()
    harness.clock += HOUR
    harness.send("a", error=HOUR)
    harness.drain()
    assert count_clock_events(harness) == (2, 1)


# --- senders that delay frames --------------------------------------------------------------------------------------


def run_senders(
    harness: ClockHarness, seconds: int, *senders: tuple[str, int], lateness: int = 30 * SECOND
) -> int | None:
    """Each sender sends every second for `seconds` with its delay; returns the time that all have passed."""
    for _ in range(seconds):
        for node, late in senders:
            harness.send(node, error=-late)
        harness.drain()
        harness.clock += SECOND
    return harness.ingest.senders.find_passed_time(harness.clock, lateness)


@pytest.mark.slow
def test_a_frame_closes_as_soon_as_every_sender_has_passed_it(harness: ClockHarness) -> None:
    assert run_senders(harness, 5, ("a", 0), ("b", 3 * SECOND)) == harness.clock - SECOND - 3 * SECOND


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("linger", [1, 5, 10])
def test_joined_ticks_close_a_frame_with_the_tick_at_its_end(harness: ClockHarness, linger: int) -> None:
    """Windows of agents end at multiples of the linger (agents/node/joining.py), frames at multiples of 10 s."""
    assert T0 % (10 * SECOND) == 0
    for second in range(1, 41):
        harness.clock += SECOND
        for node in ("a", "b") if second % linger == 0 else ():
            harness.send(node, ticks=linger)
        harness.drain()
        if second % 10 == 0:
            assert harness.ingest.senders.find_passed_time(harness.clock, 30 * SECOND) == harness.clock


@pytest.mark.slow
@pytest.mark.slow
def test_a_silent_sender_delays_frames_for_ten_seconds_at_most(harness: ClockHarness) -> None:
    run_senders(harness, 5, ("a", 0), ("b", 0))
    fell = harness.clock - SECOND
    assert run_senders(harness, 9, ("a", 0)) == fell
    assert run_senders(harness, 2, ("a", 0)) == harness.clock - SECOND


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize(("linger", "holds"), [(1, 10), (5, 10), (10, 15)])
def test_a_silent_sender_that_joined_ticks_delays_frames_for_its_linger_and_five_seconds(
    harness: ClockHarness, linger: int, holds: int
) -> None:
    """Not for three times its linger: its interval is that of its ticks."""
    for second in range(1, 31):
        if second % linger == 0:
            harness.send("dead", ticks=linger)
        run_senders(harness, 1, ("a", 0))
    fell = harness.clock - SECOND
    assert harness.ingest.senders.newest["dead"] == fell
    assert run_senders(harness, holds - 1, ("a", 0)) == fell
    assert run_senders(harness, 2, ("a", 0)) == harness.clock - SECOND


def test_a_late_sender_is_waited_for_no_longer_than_the_lateness(harness: ClockHarness) -> None:
    assert run_senders(harness, 5, ("a", 0), ("b", 100 * SECOND)) == harness.clock - SECOND - 30 * SECOND


def test_a_sender_with_a_wrong_clock_does_not_use_up_the_lateness_of_others(harness: ClockHarness) -> None:
    """The fleet is 45 s behind and one clock is 240 s ahead: it is corrected; the others set the newest time."""
    late = 45 * SECOND
    for _ in range(5):
        harness.send("ahead", error=240 * SECOND)
        harness.send("b", error=-late)
        harness.drain()
        harness.clock += SECOND
    assert harness.ingest.senders.find_passed_time(harness.clock, 30 * SECOND) == harness.clock - SECOND - late


@pytest.mark.slow
def test_a_sender_slower_than_the_lateness_delays_no_other(harness: ClockHarness) -> None:
    for second in range(150):
        if second % 60 == 0:
            harness.send("slow")
        run_senders(harness, 1, ("a", 0), ("b", 0))
    assert harness.ingest.senders.find_passed_time(harness.clock, 30 * SECOND) == harness.clock - SECOND


@pytest.mark.slow
def test_a_stall_of_the_pipeline_does_not_make_a_sender_slow(harness: ClockHarness) -> None:
    run_senders(harness, 5, ("a", 0), ("b", 0))
    for _ in range(20):
        harness.send("a")
        harness.send("b")
        harness.clock += SECOND
    harness.drain()
    assert run_senders(harness, 12, ("a", 0)) == harness.clock - SECOND, (
        "b is silent, and the wait for it is not longer than before"
    )


@pytest.mark.slow
@pytest.mark.slow
def test_after_a_restart_the_first_sender_does_not_close_the_frames_of_the_others(harness: ClockHarness) -> None:
    run_senders(harness, 15, ("a", 0), ("b", 0))
    last = harness.clock - SECOND
    harness.stop()
    harness.clock += 20 * SECOND
    harness.start()
    assert run_senders(harness, 5, ("a", 0)) == max(last, harness.clock - SECOND - 30 * SECOND)
    assert run_senders(harness, 10, ("a", 0)) == harness.clock - SECOND


@pytest.mark.slow
@pytest.mark.slow
def test_setting_our_clock_back_does_not_keep_a_lost_sender_alive(harness: ClockHarness) -> None:
    run_senders(harness, 5, ("a", 0), ("dead", 0))
    back = HOUR
    harness.clock -= back
    for _ in range(15):
        harness.send("a", error=back)
        harness.drain()
        harness.clock += SECOND
    assert harness.ingest.senders.find_passed_time(harness.clock, 30 * SECOND) == harness.ingest.senders.newest["a"]
    assert harness.ingest.progress.arrivals["a"] == harness.clock - SECOND


@pytest.mark.slow
@pytest.mark.slow
def test_when_the_last_right_clock_is_silent_the_corrected_ones_are_evaluated(harness: ClockHarness) -> None:
    run_senders(harness, 5, ("a", -HOUR), ("right", 0))
    assert run_senders(harness, 60, ("a", -HOUR)) == harness.clock - SECOND


# --- an error of our clock, or a delay of all -------------------------------------------------------------------------


def read_clock_events(harness: ClockHarness) -> list[tuple[str, float]]:
    query = "SELECT entity, CAST(data ->> '$.seconds' AS DOUBLE) FROM events WHERE kind = 'clock_error' ORDER BY time"
    return harness.database.connection.execute(query).fetchall()


def send_from_fleet(
    harness: ClockHarness, seconds: int, error: int, *own: tuple[str, int], nodes: str = "abcdefgh"
) -> None:
    """Sends from nodes whose clocks share one error, and from others with separate errors, for `seconds`."""
    for second in range(0, seconds, 5):
        for i, node in enumerate(nodes):
            if (second // 5 + i) % 2 == 0:  # they send every 10 s, at other moments
                harness.send(node, error=error)
        for node, its in own:
            harness.send(node, error=its)
        harness.drain()
        harness.clock += 5 * SECOND


@pytest.mark.slow
@pytest.mark.slow
def test_an_error_that_most_senders_share_is_one_report_without_a_sender(harness: ClockHarness) -> None:
    send_from_fleet(harness, 60, 0)
    send_from_fleet(harness, 120, -300 * SECOND)
    assert read_clock_events(harness) == [("site:all", -300.0)]
    send_from_fleet(harness, 120, 0)
    assert read_clock_events(harness) == [("site:all", -300.0), ("site:all", 0.0)]


@pytest.mark.slow
@pytest.mark.slow
def test_a_shared_error_that_changes_is_reported_with_its_new_value(harness: ClockHarness) -> None:
    send_from_fleet(harness, 120, -45 * SECOND)
    send_from_fleet(harness, 120, -300 * SECOND)
    reported = read_clock_events(harness)
    assert (reported[0], reported[-1]) == (("site:all", -45.0), ("site:all", -300.0))
    assert {entity for entity, _ in reported} == {"site:all"}


@pytest.mark.slow
@pytest.mark.slow
def test_a_clock_with_a_different_error_than_the_others_is_reported_separately(harness: ClockHarness) -> None:
    send_from_fleet(harness, 120, -300 * SECOND, ("odd", HOUR))
    assert sorted(read_clock_events(harness)) == [("node:odd", 3600.0), ("site:all", -300.0)]


@pytest.mark.slow
@pytest.mark.slow
def test_with_two_senders_an_error_is_not_attributed_to_our_clock(harness: ClockHarness) -> None:
    send_from_fleet(harness, 120, HOUR, nodes="ab")
    assert sorted(read_clock_events(harness)) == [("node:a", 3600.0), ("node:b", 3600.0)]


@pytest.mark.slow
def test_half_of_the_senders_are_not_a_majority(harness: ClockHarness) -> None:
    send_from_fleet(harness, 30, 0, ("x", 0), ("y", 0), nodes="ab")
    send_from_fleet(harness, 60, 0, ("x", HOUR), ("y", HOUR), nodes="ab")
    assert sorted(read_clock_events(harness)) == [("node:x", 3600.0), ("node:y", 3600.0)]


@pytest.mark.slow
@pytest.mark.slow
def test_after_a_restart_reported_errors_stay_reported(harness: ClockHarness) -> None:
    send_from_fleet(harness, 120, -300 * SECOND, ("odd", HOUR))
    before = read_clock_events(harness)
    harness.stop()
    harness.start()
    send_from_fleet(harness, 60, -300 * SECOND, ("odd", HOUR))
    assert read_clock_events(harness) == before
