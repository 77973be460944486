"""Brokers that stop, hang, lose topics or are full: all is stored once or counted, and recovery is automatic."""

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
from tests.pipeline.kafka_pipeline import SHORT_TIMEOUTS, VISIBLE_S, KafkaPipeline, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.refusals]
PipelineFactory = Callable[..., KafkaPipeline]


@pytest.mark.usefixtures("fast_broker_checks")
def test_a_killed_broker_that_restarts_loses_nothing(own_broker: Broker, new_pipeline: PipelineFactory) -> None:
    pipeline = new_pipeline(make_topics(own_broker)).start()
    pipeline.wait_until_healthy()
    own_broker.kill()
    visible = pipeline.wait_for_trouble("connection refused", "connection refused")
    own_broker.start()
    recovered = pipeline.wait_until_healthy()
    counts = pipeline.finish()
    assert not counts.gaps
    pipeline.log_result("broker killed (kill -9), started again", visible, recovered, counts)


def test_a_broker_frozen_for_longer_than_the_delivery_timeout_loses_nothing(
    own_broker: Broker, new_pipeline: PipelineFactory
) -> None:
    """With the pipeline's default timeouts it is visible within 30 s."""
    pipeline = new_pipeline(make_topics(own_broker)).start()
    pipeline.wait_until_healthy()
    own_broker.freeze()
    visible = pipeline.wait_for_trouble("does not respond", "does not respond")
    assert visible < VISIBLE_S
    acknowledged = pipeline.sender.dispatcher.sent
    wait_until(
        lambda: pipeline.outage_s >= visible + SHORT_TIMEOUTS.delivery,
        VISIBLE_S,
        "the freeze outlasts the delivery timeout",
    )
    assert pipeline.sender.dispatcher.sent == acknowledged
    own_broker.thaw()
    recovered = pipeline.wait_until_healthy()
    counts = pipeline.finish()
    assert not counts.gaps
    pipeline.log_result("broker frozen (SIGSTOP) past the delivery timeout, thawed", visible, recovered, counts)


@pytest.mark.usefixtures("fast_broker_checks")
def test_a_topic_deleted_and_created_again_is_read_from_its_start(
    kafka: Address, new_pipeline: PipelineFactory
) -> None:
    pipeline = new_pipeline(make_topics(kafka)).start()
    pipeline.wait_until_healthy()
    delete_topics(kafka, [TELEMETRY])
    visible = pipeline.wait_for_trouble(
        f"topic {TELEMETRY} does not exist: run `fleetpulse init`", "a topic is missing"
    )
    init_kafka.create_topics(pipeline.config.kafka, pipeline.messages.append)
    recovered = pipeline.wait_until_healthy()
    counts = pipeline.finish()
    assert len(pipeline.rows("SELECT DISTINCT incarnation, 0 FROM ingest_commit WHERE topic = 'telemetry.v1'")) == 2
    pipeline.log_result("topic deleted, created again by `fleetpulse init`", visible, recovered, counts)


@pytest.mark.usefixtures("fast_broker_checks")
def test_agent_and_pipeline_started_without_a_broker_wait_for_it(
    own_broker: Broker, new_pipeline: PipelineFactory
) -> None:
    own_broker.kill()
    pipeline = new_pipeline(kafka_of(own_broker)).start()
    visible = pipeline.wait_for_trouble("connection refused", "connection refused")
    own_broker.start()
    pipeline.wait_for_trouble("run `fleetpulse init`", TELEMETRY)
    init_kafka.create_topics(pipeline.config.kafka, pipeline.messages.append)
    recovered = pipeline.wait_until_healthy()
    counts = pipeline.finish()
    assert not counts.gaps
    pipeline.log_result(
        "started with no broker; then one without topics; then `fleetpulse init`", visible, recovered, counts
    )


# --- the broker's disk -----------------------------------------------------------------------------------------------


class Disk:
    """A small separate file system. It can grow, but not shrink."""

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
        """Fills the disk until `leave` bytes are free."""
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


@pytest.mark.usefixtures("fast_broker_checks")
def test_a_broker_with_a_full_disk_loses_nothing_once_there_is_room(
    small_disk: Disk, new_broker: Callable[..., Broker], new_pipeline: PipelineFactory
) -> None:
    broker = new_broker(log_dirs=small_disk.folder / "data")
    pipeline = new_pipeline(make_topics(broker)).start()
    pipeline.wait_until_healthy()
    small_disk.fill(leave=256 << 10)
    pipeline.write(20, payload=10_000)
    wait_until(lambda: not broker.running(), VISIBLE_S, "the broker ends: its only disk failed")
    visible = pipeline.wait_for_trouble("connection refused", "connection refused")
    small_disk.grow(128)
    broker.start()
    recovered = pipeline.wait_until_healthy()
    counts = pipeline.finish()
    assert not counts.gaps
    pipeline.log_result(
        "broker's disk full (the broker ends), disk enlarged, started again", visible, recovered, counts
    )
