"""`simulate --to kafka`: the brokers get exactly what is in the files, and nothing is lost for going too fast."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from agents.sim.command import BACKFILLED, Order, simulate
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


def test_the_files_hold_exactly_what_the_brokers_got_though_the_spool_is_too_small_for_it(
    kafka: Address, scenario: str, tmp_path: Path
) -> None:
    """120 kB hold a tenth of it: sending ahead of the brokers would drop the rest."""
    settings = Config(spool=Spool(tmp_path / "spool", max_bytes=120_000), kafka=make_topics(kafka))
    said: list[str] = []
    out = RecordingWriter(tmp_path / "out")
    assert simulate(Order(scenario, 3, "kafka", 0.0), settings, out, waited, say=said.append) == 0
    for device_class in ("gpu", "node", "nic"):
        assert (
            rows(kafka, device_class) == pq.read_metadata(tmp_path / f"out/telemetry-{device_class}.parquet").num_rows
        )
    events = [event for record in read(kafka, EVENTS) for event in wire.decode_events(record.value).events]
    assert sorted(map(repr, events)) == sorted(map(repr, read_events([tmp_path / "out/events.jsonl"])))
    assert len(said) == 1


@pytest.mark.slow
def test_the_history_is_called_sent_when_the_brokers_have_it_which_may_be_away_for_a_while(
    own_broker: Broker, scenario: str, tmp_path: Path
) -> None:
    settings = Config(spool=Spool(tmp_path / "spool"), kafka=make_topics(own_broker))
    own_broker.kill()
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if BACKFILLED in line:
            assert rows(own_broker, "node") == 3 * 180  # whole messages of 60 ticks, up to the last before now
        elif "connection refused" in line:
            own_broker.start()

    def wait(seconds: float) -> bool:
        time.sleep(min(seconds, 0.02))
        return any(BACKFILLED in line for line in said)

    assert simulate(Order(scenario, 3, "kafka", 1.0, 1140.0), settings, None, wait, say=say) == 0
    assert "connection refused" in said[0]
    assert sum(BACKFILLED in line for line in said) == 1


@pytest.mark.slow
def test_who_stops_a_simulation_that_waits_for_dead_brokers_is_told_where_the_rest_is(
    scenario: str, tmp_path: Path, own_broker: Broker
) -> None:
    settings = Config(spool=Spool(tmp_path / "spool"), kafka=make_topics(own_broker))
    own_broker.kill()
    said: list[str] = []

    def wait(seconds: float) -> bool:
        time.sleep(min(seconds, 0.02))
        return any("connection refused" in line for line in said)

    began = time.monotonic()
    assert simulate(Order(scenario, 3, "kafka", 0.0), settings, None, wait, say=said.append) == 0
    assert any("is in the spool" in line for line in said)
    assert time.monotonic() - began < 20


def test_brokers_that_cannot_be_configured_are_refused_before_anything_is_made(scenario: str, tmp_path: Path) -> None:
    settings = Config(spool=Spool(tmp_path / "spool"), kafka=replace(Kafka(), security_protocol="SASL_SSL"))
    with pytest.raises(ConfigError, match="expected username and password_file") as error:
        simulate(Order(scenario, 3, "kafka"), settings, None, waited)
    assert error.value.exit_code == 2
    assert not (tmp_path / "spool").exists()


def test_what_the_brokers_refuse_for_ever_makes_the_exit_code_1(kafka: Address, scenario: str, tmp_path: Path) -> None:
    settings = make_topics(kafka)
    make_topic(kafka, TELEMETRY, max_message_bytes="2000")
    said: list[str] = []
    order = Order(scenario, 3, "kafka", 0.0)
    assert simulate(order, Config(spool=Spool(tmp_path / "spool"), kafka=settings), None, waited, say=said.append) == 1
    assert any("refused by the brokers" in line for line in said)
    assert np.count_nonzero(["max.message.bytes" in line for line in said]) == 1
    events = [event for record in read(kafka, EVENTS) for event in wire.decode_events(record.value).events]
    told = [event for event in events if event.kind == "gap"]
    assert {event.data["cause"] for event in told} == {"refused by the brokers: MessageSizeTooLargeError"}
    (count,) = [int(line.split()[1]) for line in said if "refused by the brokers" in line]
    assert sum(event.data["next"] - event.data["first"] for event in told) == count > 0
