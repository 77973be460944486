"""The watermark of ingest when senders catch up or partitions do not answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import duckdb
import pytest

from pipeline.ingest.ingest import MAX_UNANSWERED, Ingest
from pipeline.model.errors import Retryable
from pipeline.model.records import SECOND
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.transport import Partition
from tests.pipeline.shared_log import ONE, TWO, WORD, SharedLog, one_row

T0 = 1_780_000_000 * SECOND


class Rig:
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
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.database.close()


def test_the_last_message_of_a_sender_that_catches_up_holds_the_others_back(rig: Rig) -> None:
    for node in ("a", "b"):
        rig.send(node, T0)
    assert rig.drain() is None
    rig.clock += 600 * SECOND
    rig.send("a", T0 + SECOND)
    rig.send("a", rig.clock)
    assert rig.drain() == T0
    rig.send("b", rig.clock)
    assert rig.drain() is None


def test_a_first_step_that_fails_leaves_all_unread(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.send("a", T0)
    with monkeypatch.context() as broken:
        broken.setattr(rig.database, "transaction", _full)
        with pytest.raises(Retryable, match="disk full"):
            rig.ingest.step()
    assert rig.ingest.progress.backlog == 0
    assert rig.drain() is None


def _full() -> NoReturn:
    raise duckdb.IOException("disk full")


def test_a_repeated_message_does_not_change_which_senders_are_behind(rig: Rig) -> None:
    for node in ("a", "b"):
        rig.send(node, T0)
    rig.drain()
    rig.clock += 600 * SECOND
    again = rig.log.held[ONE][0][0]
    rig.log.add(ONE, [again], rig.clock)
    assert rig.drain() is None


@pytest.mark.parametrize("mute", [TWO, WORD])
def test_a_partition_that_does_not_answer_is_waited_for_up_to_a_limit(rig: Rig, mute: Partition) -> None:
    rig.log.mute = {mute}
    rig.send("a", T0)
    assert rig.drain() == 0
    rig.clock += MAX_UNANSWERED + SECOND
    rig.send("a", rig.clock)
    assert rig.drain() is None


def test_partitions_that_all_stopped_are_waited_for_again_when_the_first_answers(rig: Rig) -> None:
    rig.send("a", T0)
    rig.send("b", T0, TWO)
    assert rig.drain() is None
    rig.log.mute = {ONE, TWO, WORD}
    rig.drain()
    rig.clock += 10 * MAX_UNANSWERED
    rig.drain()
    rig.log.mute = {TWO}
    assert rig.drain() == T0
