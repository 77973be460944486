"""A read returns the whole inventory if it changed, and only then."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest

from agents.collector import Collector, Device, Reading
from agents.node.workers.read_server import LENGTH, READ, READ_WITH_INVENTORY, ReadResult, serve_reads, unpack_result

FIRST, SECOND = ("pump:a.1", "pump:a.2"), ("pump:b.1",)


@dataclass
class Rotating(Collector):
    """Returns other pumps at each read, all of which are in its inventory from the start."""

    name: ClassVar[str] = "turns"
    signals: ClassVar[tuple[str, ...]] = ("pump.speed",)
    remote: ClassVar[bool] = True
    new: bool = False
    count: int = field(default=0, init=False)

    def read(self) -> tuple[Reading, ...]:
        self.count += 1
        entities = (FIRST, SECOND)[self.count % 2]
        return (Reading("coolant", entities, {"pump.speed": np.ones(len(entities), np.float32)}),)

    def inventory_changed(self) -> bool:
        new, self.new = self.new, False
        return new

    def inventory(self) -> Mapping[str, Device]:
        return dict.fromkeys((*FIRST, *SECOND), Device())


class PartialRotating(Rotating):
    """The same, declared as partial."""

    partial: ClassVar[bool] = True


class ReadClientDouble:
    """A collector behind a channel, read as a worker reads it."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel, self.stream = channel, channel.makefile("rb")

    def read(self, request: bytes = READ) -> ReadResult:
        self.channel.sendall(request)
        (length,) = LENGTH.unpack(self.stream.read(LENGTH.size))
        found = unpack_result(self.stream.read(length))
        assert (found.state, found.reason) == ("ok", "")
        return found

    def inventories(self, count: int) -> list[bool]:
        """For each of `count` reads, whether it returned the inventory."""
        return [self.read().inventory is not None for _ in range(count)]


@contextmanager
def serving(collector: Collector) -> Iterator[ReadClientDouble]:
    near, far = socket.socketpair()
    thread = threading.Thread(target=serve_reads, args=(far, collector, "n1"))
    thread.start()
    end = ReadClientDouble(near)
    try:
        yield end
    finally:
        end.stream.close()
        near.close()
        thread.join(10)
    assert not thread.is_alive()


def test_a_partial_collector_sends_its_inventory_once() -> None:
    with serving(PartialRotating()) as end:
        assert end.inventories(6) == [True, False, False, False, False, False]


def test_a_full_collector_sends_its_inventory_when_its_entities_change() -> None:
    with serving(Rotating()) as end:
        assert end.inventories(4) == [True, True, True, True]


@pytest.mark.parametrize("kind", [Rotating, PartialRotating])
def test_an_inventory_is_complete_after_a_partial_read(kind: type[Rotating]) -> None:
    with serving(kind()) as end:
        assert set(end.read().inventory or ()) == {*FIRST, *SECOND}


def test_a_change_known_only_to_the_collector_and_a_request_both_send_the_inventory() -> None:
    collector = PartialRotating()
    with serving(collector) as end:
        assert end.inventories(2) == [True, False]
        collector.new = True
        assert end.inventories(2) == [True, False]
        assert end.read(READ_WITH_INVENTORY).inventory is not None
        assert end.inventories(1) == [False]
