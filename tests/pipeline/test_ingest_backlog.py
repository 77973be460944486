"""The watermark of ingest when senders catch up or partitions do not answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import duckdb
import pytest

from pipeline.ingest.ingest import MAX_OFFLINE, MAX_UNANSWERED, Ingest
from pipeline.model.errors import Retryable
from pipeline.model.records import SECOND
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.transport import Partition
from tests.pipeline.shared_log import ONE, TWO, WORD, SharedLog, one_row

T0 = 1_780_000_000 * SECOND


class BacklogHarness:
    def __init__(self, folder: Path) -> None:
        self.clock, self.log, self.sequences = T0, SharedLog(), dict[str, int]()
        self.database = Database(folder / "store.duckdb")
        self.ingest = Ingest(self.database, self.log, Devices(self.database.connection), lambda: self.clock)

    def send(self, node: str, time: int, partition: Partition = ONE) -> None:
        sequence = self.sequences[node] = self.sequences.get(node, -1) + 1
        self.log.add(partition, [one_row(node, node.encode().ljust(16), sequence, time)], self.clock)

    def drain(self) -> int | None:
        while self.ingest.step() is not None:
            pass
        return self.ingest.backlog()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[BacklogHarness]:
    made = BacklogHarness(tmp_path)
    yield made
    made.database.close()


def test_the_last_message_of_a_sender_that_catches_up_holds_the_others_back(harness: BacklogHarness) -> None:
    for node in ("a", "b"):
        harness.send(node, T0)
    assert harness.drain() is None
    harness.clock += 600 * SECOND
    harness.send("a", T0 + SECOND)
    harness.send("a", harness.clock)
    assert harness.drain() == T0
    harness.send("b", harness.clock)
    assert harness.drain() is None


def test_a_first_step_that_fails_leaves_all_unread(harness: BacklogHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.send("a", T0)
    with monkeypatch.context() as broken:
        broken.setattr(harness.database, "transaction", _raise_disk_full)
        with pytest.raises(Retryable, match="disk full"):
            harness.ingest.step()
    assert harness.ingest.progress.backlog == 0
    assert harness.drain() is None


def _raise_disk_full() -> NoReturn:
    raise duckdb.IOException("disk full")


def test_a_repeated_message_does_not_change_which_senders_are_behind(harness: BacklogHarness) -> None:
    for node in ("a", "b"):
        harness.send(node, T0)
    harness.drain()
    harness.clock += 600 * SECOND
    again = harness.log.held[ONE][0][0]
    harness.log.add(ONE, [again], harness.clock)
    assert harness.drain() is None


@pytest.mark.parametrize("mute", [TWO, WORD])
def test_a_partition_that_does_not_answer_is_waited_for_up_to_a_limit(harness: BacklogHarness, mute: Partition) -> None:
    harness.log.mute = {mute}
    harness.send("a", T0)
    assert harness.drain() == 0
    harness.clock += MAX_UNANSWERED + SECOND
    harness.send("a", harness.clock)
    assert harness.drain() is None


def test_a_partition_without_a_leader_holds_the_others_for_a_short_time_only(harness: BacklogHarness) -> None:
    for node, partition in (("a", ONE), ("b", TWO)):
        harness.send(node, T0, partition)
    assert harness.drain() is None
    harness.log.offline = {TWO}
    harness.send("a", T0 + SECOND)
    assert harness.drain() == T0
    harness.clock += MAX_OFFLINE + SECOND
    harness.send("a", harness.clock)
    assert harness.drain() is None
    harness.log.offline = set()
    harness.log.mute = {TWO}  # it has a leader again, which did not respond yet
    assert harness.drain() is None
    harness.log.mute = set()
    harness.send("b", harness.clock, TWO)
    assert harness.drain() is None
    harness.log.mute = {TWO}  # another outage, of a partition with a leader
    harness.clock += MAX_OFFLINE + SECOND
    assert harness.drain() is not None


def test_partitions_that_all_stopped_are_waited_for_again_when_the_first_answers(harness: BacklogHarness) -> None:
    harness.send("a", T0)
    harness.send("b", T0, TWO)
    assert harness.drain() is None
    harness.log.mute = {ONE, TWO, WORD}
    harness.drain()
    harness.clock += 10 * MAX_UNANSWERED
    harness.drain()
    harness.log.mute = {TWO}
    assert harness.drain() == T0


def test_a_partition_that_disappears_holds_nothing_back(harness: BacklogHarness) -> None:
    harness.send("a", T0 - 5 * SECOND)
    harness.send("b", T0, TWO)
    assert harness.drain() is None
    records = harness.log.held.pop(TWO)  # the agent removed a folder of its spool that was read
    harness.send("a", T0 - 4 * SECOND)
    assert harness.drain() is None
    assert harness.ingest.newest() == T0
    harness.log.held[TWO] = records
    harness.clock += SECOND
    harness.send("b", harness.clock, TWO)
    assert harness.drain() is None
    assert harness.ingest.newest() == harness.clock


def test_each_partition_of_a_sender_keeps_its_own_newest_time(harness: BacklogHarness) -> None:
    """A topic got more partitions: messages of one sender, accepted together, lie in two of them."""
    harness.send("a", T0)
    harness.drain()
    harness.send("a", T0 + 1 * SECOND, ONE)
    harness.send("a", T0 + 2 * SECOND, TWO)
    harness.send("a", T0 + 3 * SECOND, ONE)
    assert harness.drain() is None
    assert harness.ingest._newest == {ONE: T0 + 3 * SECOND, TWO: T0 + 2 * SECOND}
    assert harness.ingest.newest() == T0 + 3 * SECOND
