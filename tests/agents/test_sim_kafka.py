"""`simulate --to kafka`: the brokers get exactly the samples in the files, and none is lost at high speed."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from agents.sim.command import BACKFILLED, SimulateOptions, simulate
from pipeline.config.sections import Config, Kafka, Spool
from pipeline.model.errors import ConfigError
from pipeline.model.records import EVENTS, TELEMETRY
from pipeline.recording.reader import read_events
from pipeline.recording.writer import RecordingWriter
from pipeline.transport import wire
from tests.kafka_broker import Address, Broker
from tests.kafka_clients import make_topic, make_topics, read

TEXT = "version = 1\nduration = 1200\ninterval = 5\n[fleet]\nnodes = 3\ngpus_per_node = 4\n"
pytestmark = pytest.mark.refusals


def waited(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def rows(address: Address, device_class: str) -> int:
    """Rows of a class in the topic, without repeats; checks that each node's messages lie in order."""
    bodies, newest = {}, {}
    for record in read(address, TELEMETRY):
        envelope = wire.unpack_envelope(record.value)
        bodies.setdefault((record.key, envelope.epoch, envelope.sequence), record.value)
        assert newest.get(record.key, -1) < envelope.sequence
        newest[record.key] = envelope.sequence
    blocks = [(batch.times, block) for batch in map(wire.decode, bodies.values()) for block in batch.blocks]
    return sum(len(times) * len(b.entities) for times, b in blocks if b.device_class == device_class)


def test_files_and_brokers_have_the_same_samples_even_with_a_small_spool(
    kafka: Address, scenario: str, tmp_path: Path
) -> None:
    """120 kB hold a tenth of it: sending ahead of the brokers would drop the rest."""
    settings = Config(spool=Spool(tmp_path / "spool", max_bytes=120_000), kafka=make_topics(kafka))
    log_lines: list[str] = []
    out = RecordingWriter(tmp_path / "out")
    assert simulate(SimulateOptions(scenario, 3, "kafka", 0.0), settings, out, waited, log=log_lines.append) == 0
    for device_class in ("gpu", "node", "nic"):
        assert (
            rows(kafka, device_class) == pq.read_metadata(tmp_path / f"out/telemetry-{device_class}.parquet").num_rows
        )
    events = [event for record in read(kafka, EVENTS) for event in wire.decode_events(record.value).events]
    assert sorted(map(repr, events)) == sorted(map(repr, read_events([tmp_path / "out/events.jsonl"])))
    assert len(log_lines) == 1


@pytest.mark.slow
def test_backfill_counts_as_sent_once_the_brokers_have_it_even_after_an_outage(
    own_broker: Broker, scenario: str, tmp_path: Path
) -> None:
    settings = Config(spool=Spool(tmp_path / "spool"), kafka=make_topics(own_broker))
    own_broker.kill()
    log_lines: list[str] = []

    def log(line: str) -> None:
        log_lines.append(line)
        if BACKFILLED in line:
            assert rows(own_broker, "node") == 3 * 180  # whole messages of 60 ticks, up to the last before now
        elif "connection refused" in line:
            own_broker.start()

    def wait(seconds: float) -> bool:
        time.sleep(min(seconds, 0.02))
        return any(BACKFILLED in line for line in log_lines)

    assert simulate(SimulateOptions(scenario, 3, "kafka", 1.0, 1140.0), settings, None, wait, log=log) == 0
    assert "connection refused" in log_lines[0]
    assert sum(BACKFILLED in line for line in log_lines) == 1


@pytest.mark.slow
def test_a_simulation_stopped_while_brokers_are_down_reports_the_location_of_unsent_samples(
    scenario: str, tmp_path: Path, own_broker: Broker
) -> None:
    settings = Config(spool=Spool(tmp_path / "spool"), kafka=make_topics(own_broker))
    own_broker.kill()
    log_lines: list[str] = []

    def wait(seconds: float) -> bool:
        time.sleep(min(seconds, 0.02))
        return any("connection refused" in line for line in log_lines)

    began = time.monotonic()
    assert simulate(SimulateOptions(scenario, 3, "kafka", 0.0), settings, None, wait, log=log_lines.append) == 0
    assert any("is in the spool" in line for line in log_lines)
    assert time.monotonic() - began < 20


def test_an_invalid_broker_configuration_is_refused_before_anything_is_written(scenario: str, tmp_path: Path) -> None:
    settings = Config(spool=Spool(tmp_path / "spool"), kafka=replace(Kafka(), security_protocol="SASL_SSL"))
    with pytest.raises(ConfigError, match="expected username and password_file") as error:
        simulate(SimulateOptions(scenario, 3, "kafka"), settings, None, waited)
    assert error.value.exit_code == 2
    assert not (tmp_path / "spool").exists()


def test_messages_that_brokers_refuse_permanently_give_exit_code_1(
    kafka: Address, scenario: str, tmp_path: Path
) -> None:
    settings = make_topics(kafka)
    make_topic(kafka, TELEMETRY, max_message_bytes="600")
    log_lines: list[str] = []
    order = SimulateOptions(scenario, 3, "kafka", 0.0)
    assert (
        simulate(order, Config(spool=Spool(tmp_path / "spool"), kafka=settings), None, waited, log=log_lines.append)
        == 1
    )
    assert any("refused by the brokers" in line for line in log_lines)
    assert np.count_nonzero(["max.message.bytes" in line for line in log_lines]) == 1
    events = [event for record in read(kafka, EVENTS) for event in wire.decode_events(record.value).events]
    reported = [event for event in events if event.kind == "gap"]
    assert {event.data["cause"] for event in reported} == {"refused by the brokers: MessageSizeTooLargeError"}
    (count,) = [int(line.split()[1]) for line in log_lines if "refused by the brokers" in line]
    assert sum(event.data["next"] - event.data["first"] for event in reported) == count > 0
