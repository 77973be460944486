"""Brokers that go away, hang, forget or fill up: all is stored once or counted, seen, and mends by itself."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.commands import init_kafka
from pipeline.model.records import TELEMETRY
from tests.kafka_broker import Address, Broker
from tests.kafka_clients import delete_topics, kafka_of, make_topics
from tests.parts import do_without
from tests.pipeline.kafka_line import BRISK, SEEN_S, Line, until

pytestmark = [pytest.mark.slow, pytest.mark.refusals]
Lines = Callable[..., Line]


@pytest.mark.usefixtures("brisk")
def test_a_broker_that_is_killed_and_comes_back_costs_nothing(own_broker: Broker, new_line: Lines) -> None:
    line = new_line(make_topics(own_broker)).begin()
    line.well()
    own_broker.kill()
    visible = line.seen("connection refused", "connection refused")
    own_broker.start()
    recovered = line.well()
    books = line.settle()
    assert not books.gaps
    line.tell("broker killed (kill -9), started again", visible, recovered, books)


def test_a_broker_that_is_frozen_for_longer_than_the_delivery_timeout_costs_nothing(
    own_broker: Broker, new_line: Lines
) -> None:
    """With the times that the pipeline really has: it is seen within 30 s."""
    line = new_line(make_topics(own_broker)).begin()
    line.well()
    own_broker.freeze()
    visible = line.seen("does not respond", "does not respond")
    assert visible < SEEN_S
    acknowledged = line.sender.dispatcher.sent
    until(lambda: line.waited >= visible + BRISK.delivery, SEEN_S, "the freeze outlasts the delivery timeout")
    assert line.sender.dispatcher.sent == acknowledged
    own_broker.thaw()
    recovered = line.well()
    books = line.settle()
    assert not books.gaps
    line.tell("broker frozen (SIGSTOP) past the delivery timeout, thawed", visible, recovered, books)


@pytest.mark.usefixtures("brisk")
def test_a_topic_that_is_deleted_and_made_anew_is_read_from_its_start(kafka: Address, new_line: Lines) -> None:
    line = new_line(make_topics(kafka)).begin()
    line.well()
    delete_topics(kafka, [TELEMETRY])
    visible = line.seen(f"topic {TELEMETRY} does not exist: run `fleetpulse init`", "a topic is missing")
    init_kafka.create_topics(line.config.kafka, line.said.append)
    recovered = line.well()
    books = line.settle()
    assert len(line.rows("SELECT DISTINCT incarnation, 0 FROM ingest_commit WHERE topic = 'telemetry.v1'")) == 2
    line.tell("topic deleted, made anew by `fleetpulse init`", visible, recovered, books)


@pytest.mark.usefixtures("brisk")
def test_agent_and_pipeline_that_start_without_any_broker_wait_for_it(own_broker: Broker, new_line: Lines) -> None:
    own_broker.kill()
    line = new_line(kafka_of(own_broker)).begin()
    visible = line.seen("connection refused", "connection refused")
    own_broker.start()
    line.seen("run `fleetpulse init`", TELEMETRY)
    init_kafka.create_topics(line.config.kafka, line.said.append)
    recovered = line.well()
    books = line.settle()
    assert not books.gaps
    line.tell("started with no broker; then one without topics; then `fleetpulse init`", visible, recovered, books)


# --- the broker's disk -----------------------------------------------------------------------------------------------


class Disk:
    """A small file system of its own. It grows, but does not shrink."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder = folder
        folder.mkdir()
        self.mount(f"size={megabytes}m")

    def mount(self, options: str) -> None:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", self.folder], capture_output=True, text=True
        )
        if done.returncode:
            do_without("kafka", f"a disk that can be filled has to be mounted: {done.stderr.strip()}")

    def fill(self, leave: int) -> None:
        """Leaves so many bytes free."""
        with open(self.folder / "ballast", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(self.folder).free - leave)

    def grow(self, megabytes: int) -> None:
        self.mount(f"remount,size={megabytes}m")

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", self.folder], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() != 0:
        do_without("kafka", "a disk that can be filled has to be mounted: run the tests as root")
    disk = Disk(tmp_path / "disk", 64)
    yield disk
    disk.close()


@pytest.mark.usefixtures("brisk")
def test_a_broker_whose_disk_is_full_costs_nothing_once_there_is_room(
    small_disk: Disk, new_broker: Callable[..., Broker], new_line: Lines
) -> None:
    broker = new_broker(log_dirs=small_disk.folder / "data")
    line = new_line(make_topics(broker)).begin()
    line.well()
    small_disk.fill(leave=256 << 10)
    line.write(20, payload=10_000)
    until(lambda: not broker.running(), SEEN_S, "the broker ends: its only disk failed")
    visible = line.seen("connection refused", "connection refused")
    small_disk.grow(128)
    broker.start()
    recovered = line.well()
    books = line.settle()
    assert not books.gaps
    line.tell("broker's disk full (the broker ends), disk enlarged, started again", visible, recovered, books)
