"""How far ingest says that everything was read, when senders catch up or partitions do not answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline import wire
from pipeline.errors import Retryable
from pipeline.ingest import MUTE, Ingest
from pipeline.records import EVENTS, SECOND, TELEMETRY, Batch, Block, Origin
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.transport import Message, Partition

T0 = 1_780_000_000 * SECOND
ONE, TWO, WORD = Partition(TELEMETRY, "0", "id"), Partition(TELEMETRY, "1", "id"), Partition(EVENTS, "0", "id")


class Shared:
    """Partitions that nodes share, with the time at which each message was taken in; those in `mute` do not answer."""

    def __init__(self) -> None:
        self.held: dict[Partition, list[tuple[bytes, int]]] = {ONE: [], TWO: [], WORD: []}
        self.mute: set[Partition] = set()

    def partitions(self) -> list[Partition]:
        return list(self.held)

    def read(self, partition: Partition, offset: int, max_messages: int, max_bytes: int) -> list[Message]:
        if partition in self.mute:
            raise Retryable("no answer")
        return [Message(partition, offset + i, *found) for i, found in enumerate(self.held[partition][offset:])]

    def bounds(self, partition: Partition) -> tuple[int, int]:
        return 0, len(self.held[partition])

    def committed(self, partition: Partition, next_offset: int) -> None: ...

    def dead_letter(self, message: Message, reason: str) -> None: ...

    def reachable(self) -> None: ...

    def close(self) -> None: ...


class Rig:
    def __init__(self, folder: Path) -> None:
        self.clock, self.log, self.sequences = T0, Shared(), dict[str, int]()
        self.database = Database(folder / "store.duckdb")
        self.ingest = Ingest(self.database, self.log, Devices(self.database.connection), lambda: self.clock)

    def send(self, node: str, time: int, partition: Partition = ONE) -> None:
        sequence = self.sequences[node] = self.sequences.get(node, -1) + 1
        block = Block("gpu", (f"gpu:{node}.0",), {"gpu.temperature": np.zeros((1, 1), "f4")})
        body = wire.encode(Batch(Origin("local", node, bytes(16)), np.array([time]), (block,)))
        value = wire.seal(body, wire.TELEMETRY_KIND, node.encode().ljust(16), sequence, time)
        self.log.held[partition].append((value, self.clock))

    def drain(self) -> int | None:
        while self.ingest.step() is not None:
            pass
        return self.ingest.backlog()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.database.close()


def test_what_came_last_of_one_that_catches_up_holds_the_others(rig: Rig) -> None:
    for node in ("a", "b"):
        rig.send(node, T0)
    assert rig.drain() is None
    rig.clock += 600 * SECOND
    rig.send("a", T0 + SECOND)
    rig.send("a", rig.clock)
    assert rig.drain() == T0
    rig.send("b", rig.clock)
    assert rig.drain() is None


def test_a_message_that_comes_again_says_nothing_of_who_is_behind(rig: Rig) -> None:
    for node in ("a", "b"):
        rig.send(node, T0)
    rig.drain()
    rig.clock += 600 * SECOND
    again = rig.log.held[ONE][0][0]
    rig.log.held[ONE].append((again, rig.clock))
    assert rig.drain() is None


@pytest.mark.parametrize("mute", [TWO, WORD])
def test_a_partition_that_does_not_answer_while_others_do_is_waited_for_but_not_for_ever(
    rig: Rig, mute: Partition
) -> None:
    rig.log.mute = {mute}
    rig.send("a", T0)
    assert rig.drain() == 0
    rig.clock += MUTE + SECOND
    rig.send("a", rig.clock)
    assert rig.drain() is None


def test_partitions_that_all_fell_silent_are_waited_for_anew_when_the_first_answers(rig: Rig) -> None:
    rig.send("a", T0)
    rig.send("b", T0, TWO)
    assert rig.drain() is None
    rig.log.mute = {ONE, TWO, WORD}
    rig.drain()
    rig.clock += 10 * MUTE
    rig.drain()
    rig.log.mute = {TWO}
    assert rig.drain() == T0
