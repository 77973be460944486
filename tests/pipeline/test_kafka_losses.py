"""What Kafka itself loses, refuses or mixes up: each message is stored once, is a dead letter or lies in a gap."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kafka import TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType

from agents.node.uplink import client
from pipeline.commands.pipeline import PipelineBackend
from pipeline.ingest import ingest
from pipeline.model.records import TELEMETRY
from pipeline.transport import kafka as transport
from pipeline.transport import topics, wire
from tests.kafka_broker import Address, Broker
from tests.kafka_clients import admin_of, make_topics, read, write
from tests.pipeline.kafka_line import NODES, SEEN_S, Line, body, until

pytestmark = [pytest.mark.slow, pytest.mark.refusals, pytest.mark.usefixtures("brisk")]
Lines = Callable[..., Line]
OFFSET_GAPS = (
    "SELECT cause, sum(next_sequence - first_sequence) FROM gaps WHERE source IN ('0', '1', '2', '3') GROUP BY 1"
)
"""Gaps of partitions, whose names are numbers; those of nodes bear a node's name."""
RETENTION = "deleted by the brokers' retention before it was read"


def delete_before(address: Address, ends: dict[TopicPartition, int]) -> None:
    """Moves the start of each partition's log, as retention does."""
    with admin_of(address) as admin:
        admin.delete_records(ends)


def counted(line: Line) -> int:
    assert line.service is not None
    return PipelineBackend(line.service).read_health()["sources"]["gaps"]


def test_what_retention_deletes_while_the_pipeline_is_away_is_counted(kafka: Address, new_line: Lines) -> None:
    line = new_line(make_topics(kafka)).begin()
    line.well()
    line.rest()
    line.settle()
    line.shut()
    line.write(25)
    line.sent()
    delete_before(kafka, line.ends())
    line.write(5)
    line.open()
    visible = until(lambda: counted(line), SEEN_S, "gaps are counted")
    recovered = line.well()
    books = line.settle()
    assert len(books.gaps) == 25 * len(NODES)
    assert line.rows(OFFSET_GAPS) == [(RETENTION, 25 * len(NODES))]
    line.notes.append(f"gap: {RETENTION}")
    line.tell("log start moved past our offset while the pipeline was away", visible, recovered, books)


def test_what_retention_deletes_while_it_is_being_read_is_counted(
    kafka: Address, new_line: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "COMMIT_ROWS", 40)
    monkeypatch.setattr(transport, "FETCH_BYTES", 4096)
    monkeypatch.setattr(transport, "BUFFER_BYTES", 4096)
    line = new_line(make_topics(kafka, partitions=1))
    line.sender.start()
    for _ in range(20):  # batches: a fetch brings whole ones
        line.write(5)
        line.sent()
    service = line.load()
    service.start_engine()
    until(service.run_step, SEEN_S, "the first commit")
    delete_before(kafka, line.ends())
    line.write(5)
    line.sent()
    books = line.balanced(turn=service.run_step)
    assert set(books.stored) >= {(node, 0) for node in NODES}
    assert books.gaps
    assert line.rows(OFFSET_GAPS) == [(RETENTION, len(books.gaps))]
    line.notes.append(f"gap: {RETENTION}")
    line.tell("log start moved past our offset while reading", None, None, books)


def test_a_message_that_the_topic_does_not_admit_is_passed_over_counted_and_told(
    kafka: Address, new_line: Lines
) -> None:
    line = new_line(make_topics(kafka)).begin()
    line.well()
    limit = ConfigResource(ConfigResourceType.TOPIC, TELEMETRY, configs={"max.message.bytes": "20000"})
    with admin_of(kafka) as admin:
        admin.alter_configs([limit])
    line.write(1, payload=40_000, nodes=["n0"])
    visible = until(lambda: any("refuse a message" in text for text in line.said), SEEN_S, "the agent tells it")
    line.notes.append(line.said[-1])
    recovered = line.well()
    until(lambda: counted(line), SEEN_S, "the gap is counted")
    books = line.settle()
    assert line.sender.dispatcher.refused == len(books.gaps) == 1
    line.tell("message larger than the topic's max.message.bytes", visible, recovered, books)


def test_keys_that_move_to_new_partitions_cost_nothing(
    kafka: Address, new_line: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = client._settings
    brisk: Callable[[Any], dict[str, Any]] = lambda times: {**settings(times), "metadata_max_age_ms": 500}  # noqa: E731
    monkeypatch.setattr(client, "_settings", brisk)  # the client looks for new partitions every five minutes
    line = new_line(make_topics(kafka), nodes=[f"n{i}" for i in range(8)]).begin()
    line.well()
    with admin_of(kafka) as admin:
        admin.create_partitions(dict.fromkeys(topics.READ, 8))
    moved = "SELECT 'messages', count(*) FROM ingest_commit WHERE topic = 'telemetry.v1' AND partition::INT >= 4"
    visible = until(lambda: line.rows(moved)[0][1], SEEN_S, "messages come through new partitions")
    recovered = line.well()
    books = line.settle()
    assert not books.gaps
    line.notes.append("order changes healed")
    line.tell("partitions raised from 4 to 8 while sending", visible, recovered, books)


def test_what_is_no_message_of_ours_becomes_one_dead_letter_each(kafka: Address, new_line: Lines) -> None:
    line = new_line(make_topics(kafka)).begin()
    line.well()
    future = bytearray(wire.seal(body("n0", 0, 0), wire.TELEMETRY_KIND, bytes(16), 0, 0, False))
    future[3] = 99  # version
    strange: list[Any] = [bytes(future), b"garbage", b"", None, os.urandom(wire.MAX_MESSAGE)]
    write(kafka, TELEMETRY, strange)
    letters = 'SELECT reason, count(*) FROM dead_letter GROUP BY ALL ORDER BY min("offset")'
    visible = until(lambda: sum(n for _, n in line.rows(letters)) == 5, SEEN_S, "dead letters are counted")
    line.well()
    line.shut()
    line.open()
    recovered = line.well()
    books = line.settle()
    assert not books.gaps
    found = line.rows(letters)
    assert sum(n for _, n in found) == 5
    assert "99" in found[0][0]
    until(lambda: len(read(kafka, f"{TELEMETRY}.dlq")) == 5, SEEN_S, "copies are in Kafka")
    copies = read(kafka, f"{TELEMETRY}.dlq")
    assert [copy.value or b"" for copy in copies] == [value or b"" for value in strange]
    headers = dict(copies[0].headers)
    assert (headers["topic"], headers["reason"].decode()) == (TELEMETRY.encode(), found[0][0])
    line.notes.append(f"{len(copies)} dead letters, as: {found[0][0]}")
    line.tell("wrong version, garbage, empty, null and 4 MiB of noise", visible, recovered, books)


# --- a broker that lost or damaged what it had ------------------------------------------------------------------------


def restored_from_backup(broker: Broker, line: Line, backup: Path, meanwhile: int) -> None:
    """All is stored; then the broker has its disk of 500 messages a node ago, and `meanwhile` more are to be sent."""
    line.well()
    line.settle()
    broker.stop()
    shutil.copytree(broker.log_dirs, backup)
    broker.start()
    line.write(500)
    line.settle()
    broker.stop()
    shutil.rmtree(broker.log_dirs)
    shutil.copytree(backup, broker.log_dirs)
    line.write(meanwhile)
    broker.start()


def test_a_log_that_was_cut_short_is_read_again_from_its_start_and_nothing_is_stored_twice(
    own_broker: Broker, new_line: Lines, tmp_path: Path
) -> None:
    line = new_line(make_topics(own_broker)).begin()
    restored_from_backup(own_broker, line, tmp_path / "backup", 1)
    again = "SELECT DISTINCT incarnation, 0 FROM ingest_commit WHERE incarnation LIKE '%~1'"
    visible = until(lambda: line.rows(again), SEEN_S, "the log is read again")
    recovered = line.well()
    line.shut()
    line.open()
    line.write(10)
    line.well()
    books = line.settle()
    assert not books.gaps
    line.notes.append("log: the log ends before the offset that is stored: the brokers lost messages; reading it again")
    line.tell("brokers restored from an older copy of their disk", visible, recovered, books)


def test_a_log_that_was_cut_short_and_soon_is_longer_than_it_was_costs_no_more_than_what_is_counted(
    own_broker: Broker, new_line: Lines, tmp_path: Path
) -> None:
    """Where the reader looks too late, nothing tells that its offset is another message's now."""
    line = new_line(make_topics(own_broker)).begin()
    restored_from_backup(own_broker, line, tmp_path / "backup", 800)
    recovered = line.well()
    books = line.settle()
    line.notes.append("read again, or a gap of what took the place of what was read")
    line.tell("the same, and more was sent at once than was lost", None, recovered, books)


def test_a_damaged_record_on_the_brokers_disk_is_a_gap(own_broker: Broker, new_line: Lines) -> None:
    line = new_line(make_topics(own_broker)).begin()
    line.well()
    line.settle()
    line.shut()
    for _ in range(20):
        line.write(5)
        line.sent()
    own_broker.stop()
    segment = max(own_broker.log_dirs.glob(f"{TELEMETRY}-*/*.log"), key=lambda path: path.stat().st_size)
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)
    own_broker.start()
    line.open()
    visible = until(lambda: counted(line), SEEN_S, "gaps are counted")
    recovered = line.well()
    books = line.settle()
    assert 0 < len(books.gaps) < 50
    causes = line.rows(OFFSET_GAPS)
    assert len(causes) == 1
    assert "checksum" in causes[0][0]
    line.notes.append(f"gap: {causes[0][0]}")
    line.tell("a byte flipped in a segment on the broker's disk", visible, recovered, books)
