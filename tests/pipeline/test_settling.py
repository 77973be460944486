"""A receiver that is back after an outage gets all that is due within seconds, the oldest page first."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from pipeline.incidents import ledger
from pipeline.incidents.changes import Change
from pipeline.incidents.ledger import Payload
from pipeline.model.records import Incident
from pipeline.notify import sending
from pipeline.notify.settling import Result, Settlements
from pipeline.store.database import Database
from tests.pipeline.notifier_harness import START, NotifierHarness, Receiver


class Store:
    """A store that counts its transactions, and fails on request."""

    def __init__(self, folder: Path) -> None:
        self.database, self.transactions, self.fails = Database(folder / "store.duckdb"), 0, False

    @contextlib.contextmanager
    def transaction(self) -> Iterator[duckdb.DuckDBPyConnection]:
        self.transactions += 1
        with self.database.transaction() as connection:
            if self.fails:
                raise OSError("no space left on the disk")
            yield connection

    def cursor(self) -> duckdb.DuckDBPyConnection:
        return self.database.cursor()

    def states(self) -> list[Any]:
        query = "SELECT state, count(*), sum(attempts)::INTEGER FROM outbox GROUP BY state ORDER BY state"
        return self.database.connection.execute(query).fetchall()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path)
    with made.database.transaction() as connection:
        payloads = [Payload(f"inc-{i}", "r0", "firing", "{}", START) for i in range(500)]
        ledger.write_changes(connection, [], [], payloads, START)
    yield made
    made.database.close()


def result(number: int, state: str = "delivered") -> Result:
    return Result(f"inc-{number}.1.r0", f"inc-{number}", state, "HTTP 200", START, True, "", START)


def test_500_deliveries_are_written_in_a_few_transactions(store: Store) -> None:
    settled = Settlements(store, "r0", lambda: 0.0)
    for number in range(500):
        settled.add(result(number))
    settled.write()
    assert store.states() == [("delivered", 500, 500)]
    assert store.transactions == 6


def test_a_refusal_is_written_at_once_with_the_deliveries_before_it(store: Store) -> None:
    settled = Settlements(store, "r0", lambda: 0.0)
    for number in range(5):
        settled.add(result(number))
    settled.add(result(5, "dead"))
    assert store.states() == [("dead", 1, 1), ("delivered", 5, 5), ("pending", 494, 0)]


def test_a_slow_receiver_does_not_hold_results_back_for_long(store: Store) -> None:
    clock = iter(range(100))
    settled = Settlements(store, "r0", lambda: float(next(clock)))
    settled.add(result(0))
    settled.add(result(1))
    assert store.states()[0] == ("delivered", 2, 2)


def test_a_store_that_cannot_write_stops_the_sending_after_one_message(store: Store) -> None:
    store.fails = True
    with pytest.raises(OSError, match="no space"):
        Settlements(store, "r0").add(result(0))


@pytest.mark.slow
def test_2000_messages_go_within_5_s_of_cpu_after_an_outage_the_oldest_page_first(
    tmp_path: Path, receivers: Callable[[], Receiver]
) -> None:
    receiver = receivers()
    harness = NotifierHarness(tmp_path, [f"http://127.0.0.1:{receiver.server_port}/"])
    causes = [f"gpu:n{number:04d}.0" for number in range(2000)]
    about: list[Any] = [
        (cause, START + i, START + i, "page", "wrong", "sdc", cause, (cause,)) for i, cause in enumerate(causes)
    ]
    changes = [Change("opened", Incident(f"inc-{one[0]}", *one), one[1], "fleetpulse") for one in about]
    payloads = [p for change in changes for p in harness.notifier.make_payloads([change], change.time)]
    assert harness.database is not None
    with harness.database.transaction() as connection:
        ledger.write_changes(connection, [], changes, payloads, START)
    receiver.statuses = [500, 500, 500]
    for _ in range(3):
        harness.send_due(10)
    begun = time.thread_time()
    harness.now = harness.notifier.health["r0"].next_probe
    while harness.send_due(0.001):
        pass
    assert time.thread_time() - begun < 5.0
    arrived = list(dict.fromkeys(cause for _, cause in receiver.alerts[3:]))
    assert sorted(arrived) == causes
    assert max(abs(place - causes.index(cause)) for place, cause in enumerate(arrived)) < sending.MOST
    assert {state for _, state, _ in harness.rows()} == {"delivered"}
    harness.close()
