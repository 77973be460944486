"""Messages of one sender may arrive out of order, twice or never: each is stored once or is in a gap."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.ingest.ingest import Ingest
from pipeline.ingest.offsets import MAX_SPOOLS
from pipeline.model.records import EVENTS, SECOND, TELEMETRY, Event, EventBatch, Origin
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.transport import wire
from tests.examples import examples
from tests.pipeline.shared_log import ONE, TWO, WORD, SharedLog, one_row

T0 = 1_780_000_000 * SECOND
EPOCH = bytes(range(16))


class StoreHarness:
    """A store and the log that is read into it; `restart` drops everything that is not on disk."""

    def __init__(self, folder: Path) -> None:
        self.path, self.log = folder / "store.duckdb", SharedLog()
        self.database: Database | None = None
        self.restart()

    def restart(self) -> None:
        self.close()
        self.database = Database(self.path)
        self.ingest = Ingest(self.database, self.log, Devices(self.database.connection), lambda: T0)

    def drain(self) -> None:
        while self.ingest.step() is not None:
            pass

    def rows(self, query: str) -> list[tuple[object, ...]]:
        assert self.database is not None
        return self.database.connection.execute(query).fetchall()

    @property
    def stored(self) -> list[int]:
        """Stored sequences, with repetition."""
        return [int(value) for (value,) in self.rows("SELECT temperature FROM gpu ORDER BY ALL")]  # type: ignore[call-overload]

    @property
    def missing(self) -> list[int]:
        """Sequences in gaps, with repetition."""
        gaps = self.rows("SELECT first_sequence, next_sequence FROM gaps WHERE source = 'n1'")
        return sorted(s for first, after in gaps for s in range(first, after))  # type: ignore[call-overload]

    def close(self) -> None:
        if self.database is not None:
            self.database.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreHarness]:
    made = StoreHarness(tmp_path)
    yield made
    made.close()


def sealed(sequence: int, node: str = "n1", epoch: bytes = EPOCH) -> bytes:
    return one_row(node, epoch, sequence, T0 + sequence * SECOND)


def gap_report(topic: str, first: int, after: int, cause: str) -> bytes:
    """Returns the event with which an agent reports messages that its spool dropped."""
    data = {"topic": topic, "epoch": EPOCH.hex(), "first": first, "next": after, "cause": cause}
    batch = EventBatch(Origin("local", "n1", bytes(16)), (Event(T0, "node:n1", "gap", data),))
    return wire.seal(wire.encode_events(batch), wire.EVENTS_KIND, EPOCH, 0, 0)


def test_a_message_that_arrives_late_is_stored_and_its_gap_is_removed(store: StoreHarness) -> None:
    store.log.add(ONE, [sealed(0), sealed(3)])
    store.drain()
    assert store.missing == [1, 2]
    store.log.add(TWO, [sealed(1), sealed(2)])
    store.drain()
    assert store.stored == [0, 1, 2, 3]
    assert store.rows("FROM gaps") == []
    assert store.ingest.counters["healed"] == 2


@pytest.mark.slow
def test_a_gap_is_closed_after_a_restart_too(store: StoreHarness) -> None:
    store.log.add(ONE, [sealed(0), sealed(5)])
    store.drain()
    store.restart()
    store.log.add(ONE, [sealed(2), sealed(2)])
    store.drain()
    assert store.stored == [0, 2, 5]
    assert store.missing == [1, 3, 4]
    assert store.ingest.counters["duplicates"] == 1


def test_messages_sent_before_this_store_existed_are_one_gap(store: StoreHarness) -> None:
    store.log.add(ONE, [sealed(4)])
    store.drain()
    assert store.rows("SELECT first_sequence, next_sequence, cause FROM gaps") == [
        (0, 4, "sent before this store existed")
    ]


@pytest.mark.slow
def test_retention_of_the_broker_is_a_gap_of_offsets_and_of_their_sequences(store: StoreHarness) -> None:
    store.log.add(ONE, [sealed(i) for i in range(10)])
    store.drain()
    store.log.add(ONE, [sealed(i) for i in range(10, 20)])
    store.log.starts[ONE] = 15
    store.drain()
    assert store.stored == [*range(10), *range(15, 20)]
    assert store.rows("SELECT source, first_sequence, next_sequence, cause FROM gaps ORDER BY ALL") == [
        ("0", 10, 15, "retention"),
        ("n1", 10, 15, "lost before it was stored"),
    ]
    assert store.ingest.counters["gap_messages"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("event_first", [True, False])
def test_a_gap_has_the_cause_that_its_agent_reports(store: StoreHarness, event_first: bool) -> None:
    steps = [(WORD, [gap_report(TELEMETRY, 1, 4, "spool full")]), (ONE, [sealed(0), sealed(4)])]
    for partition, messages in steps if event_first else reversed(steps):
        store.log.add(partition, messages)
        store.drain()
    assert store.rows("SELECT first_sequence, next_sequence, cause FROM gaps") == [(1, 4, "spool full")]


def test_a_message_of_an_unknown_kind_is_a_dead_letter_and_reading_continues(store: StoreHarness) -> None:
    future = bytearray(sealed(1))
    future[3] = 99  # version
    store.log.add(ONE, [sealed(0), bytes(future), b"", sealed(1)])
    store.drain()
    assert store.stored == [0, 1]
    assert [offset for offset, _ in store.log.letters] == [1, 2]
    assert "99" in store.log.letters[0][1]
    assert store.rows("SELECT count(*) FROM dead_letter") == [(2,)]
    assert store.rows("FROM gaps") == []


def test_a_message_that_an_agent_dropped_is_a_gap_immediately_even_if_none_follows(store: StoreHarness) -> None:
    store.log.add(ONE, [sealed(0), sealed(1)])
    store.log.add(WORD, [gap_report(TELEMETRY, 2, 5, "refused")])
    store.drain()
    assert store.rows("SELECT first_sequence, next_sequence, cause FROM gaps") == [(2, 5, "refused")]


def test_messages_that_arrive_after_the_report_of_a_later_gap_are_stored(store: StoreHarness) -> None:
    store.log.add(ONE, [sealed(0)])
    store.log.add(WORD, [gap_report(TELEMETRY, 4, 6, "spool full")])
    store.drain()
    store.log.add(ONE, [sealed(1), sealed(2), sealed(3), sealed(6)])
    store.drain()
    assert store.stored == [0, 1, 2, 3, 6]
    assert store.rows("SELECT first_sequence, next_sequence, cause FROM gaps") == [(4, 6, "spool full")]


@pytest.mark.parametrize(
    "hostile", [{"first": -1}, {"next": 1 << 63}, {"next": "5"}, {"first": 9}, {"topic": 1}, {"epoch": None}]
)
def test_an_invalid_gap_report_is_stored_as_an_event_alone(store: StoreHarness, hostile: dict[str, object]) -> None:
    data = {"topic": TELEMETRY, "epoch": EPOCH.hex(), "first": 2, "next": 5, "cause": "x", **hostile}
    batch = EventBatch(Origin("local", "n1", bytes(16)), (Event(T0, "node:n1", "gap", data),))
    store.log.add(WORD, [wire.seal(wire.encode_events(batch), wire.EVENTS_KIND, EPOCH, 0, 0)])
    store.drain()
    assert store.rows("FROM gaps") == []
    assert store.rows("SELECT count(*) FROM events") == [(1,)]


@pytest.mark.slow
def test_a_new_spool_first_seen_late_loses_nothing_of_its_beginning(store: StoreHarness) -> None:
    store.log.add(ONE, [sealed(i) for i in range(4)])
    store.drain()
    store.log.add(ONE, [sealed(9, epoch=bytes(16))])
    store.drain()
    store.log.add(TWO, [sealed(i, epoch=bytes(16)) for i in range(9)])
    store.drain()
    assert store.rows("SELECT count(*) FROM gpu") == [(4 + 10,)]
    assert store.missing == []


def test_many_dead_letters_are_committed_in_bounded_parts(store: StoreHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.ingest.ingest.COMMIT_MESSAGES", 10)
    store.log.add(ONE, [b"junk"] * 35)
    commits = 0
    while store.ingest.step() is not None:
        commits += 1
    assert commits == 4
    assert store.rows("SELECT count(*) FROM dead_letter") == [(35,)]


@pytest.mark.slow
def test_many_gaps_of_one_sender_are_closed_without_a_statement_for_each(store: StoreHarness) -> None:
    store.log.add(ONE, [sealed(i) for i in range(0, 4000, 2)])
    store.drain()
    assert len(store.missing) == 1999
    store.log.add(TWO, [sealed(i) for i in range(1, 4000, 2)])
    store.drain()
    assert store.stored == list(range(4000))
    assert store.missing == []


@pytest.mark.slow
def test_gaps_beyond_the_memory_bound_stay_counted(store: StoreHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.ingest.offsets.MAX_GAPS", 2)
    for epoch in (b"a" * 16, b"b" * 16, b"c" * 16):
        store.log.add(ONE, [sealed(0, epoch=epoch), sealed(2, epoch=epoch)])
        store.drain()
    assert sum(map(len, store.ingest.offsets.gaps.values())) == 2
    assert store.missing == [1, 1, 1]


orders = st.lists(st.tuples(st.integers(0, 30), st.booleans(), st.booleans()), min_size=1, max_size=60)


@pytest.mark.slow
@given(orders, st.integers(1, 10))
@settings(max_examples=examples(30), deadline=None)
def test_in_any_order_each_message_of_each_spool_is_stored_once_or_is_in_a_gap(
    arrivals: list[tuple[int, bool, bool]], at_once: int
) -> None:
    epochs = {False: EPOCH, True: b"2" * 16}
    with TemporaryDirectory() as folder:
        store = StoreHarness(Path(folder))
        for start in range(0, len(arrivals), at_once):
            for sequence, second, new_epoch in arrivals[start : start + at_once]:
                store.log.add(TWO if second else ONE, [sealed(sequence, epoch=epochs[new_epoch])])
            store.drain()
            if start % 3 == 0:
                store.restart()
        came = {new_epoch: {s for s, _, a in arrivals if a == new_epoch} for new_epoch in epochs}
        assert store.stored == sorted([*came[False], *came[True]])
        assert store.missing == sorted(
            s for sequences in came.values() if sequences for s in range(max(sequences)) if s not in sequences
        )
        store.close()


@pytest.mark.slow
def test_invented_spools_of_a_sender_are_dropped_except_the_newest_and_do_not_affect_others(site) -> None:
    site.send("h2", T0)
    gap_report = {"topic": TELEMETRY, "first": 0, "next": 5, "cause": "x"}
    events = [Event(T0, "node:h1", "gap", gap_report | {"epoch": f"{i:032x}"}) for i in range(100)]
    events += [Event(T0, "node:h1", "gap", gap_report | {"topic": f"t{i}", "epoch": "0"}) for i in range(100)]
    for part in range(0, 200, 50):
        site.send_events("h1", *events[part : part + 50])
    ingest = site.open()
    while ingest.step() is not None:
        pass
    query = "SELECT node, topic, count(*) FROM producer_mark GROUP BY ALL ORDER BY ALL"
    stored = [("h1", EVENTS, 1), ("h1", TELEMETRY, MAX_SPOOLS), ("h2", TELEMETRY, 1)]
    assert site.rows(query) == stored
    assert len(ingest.offsets.marks) == 2 + MAX_SPOOLS
    site.send_events("h1", Event(T0, "node:h1", "gap", gap_report | {"epoch": "f" * 32}))
    site.drain()
    assert site.rows(query) == stored
    assert ("f" * 32,) in site.rows("SELECT epoch FROM producer_mark")
