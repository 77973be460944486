"""Messages that Kafka loses, refuses or reorders: each is stored once, is a dead letter or is in a gap."""

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
from tests.pipeline.kafka_pipeline import NODES, VISIBLE_S, KafkaPipeline, body, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.refusals, pytest.mark.usefixtures("fast_broker_checks")]
PipelineFactory = Callable[..., KafkaPipeline]
OFFSET_GAPS = (
    "SELECT cause, sum(next_sequence - first_sequence) FROM gaps WHERE source IN ('0', '1', '2', '3') GROUP BY 1"
)
"""Gaps of partitions, whose names are numbers; gaps of nodes have the node's name."""
RETENTION = "deleted by the brokers' retention before it was read"


def delete_before(address: Address, ends: dict[TopicPartition, int]) -> None:
    """Moves the start of each partition's log, as retention does."""
    with admin_of(address) as admin:
        admin.delete_records(ends)


def count_gaps(pipeline: KafkaPipeline) -> int:
    assert pipeline.service is not None
    return PipelineBackend(pipeline.service).read_health()["sources"]["gaps"]


def test_messages_deleted_by_retention_while_the_pipeline_is_stopped_are_counted(
    kafka: Address, new_pipeline: PipelineFactory
) -> None:
    pipeline = new_pipeline(make_topics(kafka)).start()
    pipeline.wait_until_healthy()
    pipeline.stop_writer()
    pipeline.finish()
    pipeline.stop_service()
    pipeline.write(25)
    pipeline.wait_until_sent()
    delete_before(kafka, pipeline.end_offsets())
    pipeline.write(5)
    pipeline.start_service()
    visible = wait_until(lambda: count_gaps(pipeline), VISIBLE_S, "gaps are counted")
    recovered = pipeline.wait_until_healthy()
    counts = pipeline.finish()
    assert len(counts.gaps) == 25 * len(NODES)
    assert pipeline.rows(OFFSET_GAPS) == [(RETENTION, 25 * len(NODES))]
    pipeline.observations.append(f"gap: {RETENTION}")
    pipeline.log_result("log start moved past our offset while the pipeline was away", visible, recovered, counts)


def test_messages_deleted_by_retention_while_they_are_read_are_counted(
    kafka: Address, new_pipeline: PipelineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "COMMIT_ROWS", 40)
    monkeypatch.setattr(transport, "FETCH_BYTES", 4096)
    monkeypatch.setattr(transport, "BUFFER_BYTES", 4096)
    pipeline = new_pipeline(make_topics(kafka, partitions=1))
    pipeline.sender.start()
    for _ in range(20):  # batches: a fetch brings whole ones
        pipeline.write(5)
        pipeline.wait_until_sent()
    service = pipeline.load_service()
    service.start_engine()
    wait_until(service.run_step, VISIBLE_S, "the first commit")
    delete_before(kafka, pipeline.end_offsets())
    pipeline.write(5)
    pipeline.wait_until_sent()
    counts = pipeline.wait_until_accounted(turn=service.run_step)
    assert set(counts.stored) >= {(node, 0) for node in NODES}
    assert counts.gaps
    assert pipeline.rows(OFFSET_GAPS) == [(RETENTION, len(counts.gaps))]
    pipeline.observations.append(f"gap: {RETENTION}")
    pipeline.log_result("log start moved past our offset while reading", None, None, counts)


def test_a_message_over_the_topic_limit_is_skipped_counted_and_reported(
    kafka: Address, new_pipeline: PipelineFactory
) -> None:
    pipeline = new_pipeline(make_topics(kafka)).start()
    pipeline.wait_until_healthy()
    limit = ConfigResource(ConfigResourceType.TOPIC, TELEMETRY, configs={"max.message.bytes": "20000"})
    with admin_of(kafka) as admin:
        admin.alter_configs([limit])
    pipeline.write(1, payload=40_000, nodes=["n0"])
    visible = wait_until(
        lambda: any("refuse a message" in text for text in pipeline.messages), VISIBLE_S, "the agent reports it"
    )
    pipeline.observations.append(pipeline.messages[-1])
    recovered = pipeline.wait_until_healthy()
    wait_until(lambda: count_gaps(pipeline), VISIBLE_S, "the gap is counted")
    counts = pipeline.finish()
    assert pipeline.sender.dispatcher.refused == len(counts.gaps) == 1
    pipeline.log_result("message larger than the topic's max.message.bytes", visible, recovered, counts)


def test_keys_that_move_to_new_partitions_lose_nothing(
    kafka: Address, new_pipeline: PipelineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = client._settings
    fast_broker_checks: Callable[[Any], dict[str, Any]] = lambda times: {**settings(times), "metadata_max_age_ms": 500}  # noqa: E731
    monkeypatch.setattr(
        client, "_settings", fast_broker_checks
    )  # the client looks for new partitions every five minutes
    pipeline = new_pipeline(make_topics(kafka), nodes=[f"n{i}" for i in range(8)]).start()
    pipeline.wait_until_healthy()
    with admin_of(kafka) as admin:
        admin.create_partitions(dict.fromkeys(topics.READ, 8))
    moved = "SELECT 'messages', count(*) FROM ingest_commit WHERE topic = 'telemetry.v1' AND partition::INT >= 4"
    visible = wait_until(lambda: pipeline.rows(moved)[0][1], VISIBLE_S, "messages come through new partitions")
    recovered = pipeline.wait_until_healthy()
    counts = pipeline.finish()
    assert not counts.gaps
    pipeline.observations.append("order changes healed")
    pipeline.log_result("partitions raised from 4 to 8 while sending", visible, recovered, counts)


def test_each_foreign_message_becomes_one_dead_letter(kafka: Address, new_pipeline: PipelineFactory) -> None:
    pipeline = new_pipeline(make_topics(kafka)).start()
    pipeline.wait_until_healthy()
    future = bytearray(wire.seal(body("n0", 0, 0), wire.TELEMETRY_KIND, bytes(16), 0, 0, False))
    future[3] = 99  # version
    strange: list[Any] = [bytes(future), b"garbage", b"", None, os.urandom(wire.MAX_MESSAGE)]
    write(kafka, TELEMETRY, strange)
    letters = 'SELECT reason, count(*) FROM dead_letter GROUP BY ALL ORDER BY min("offset")'
    visible = wait_until(lambda: sum(n for _, n in pipeline.rows(letters)) == 5, VISIBLE_S, "dead letters are counted")
    wait_until(lambda: len(read(kafka, f"{TELEMETRY}.dlq")) == 5, VISIBLE_S, "copies are in Kafka")
    pipeline.wait_until_healthy()
    pipeline.stop_service()
    pipeline.start_service()
    recovered = pipeline.wait_until_healthy()
    counts = pipeline.finish()
    assert not counts.gaps
    found = pipeline.rows(letters)
    assert sum(n for _, n in found) == 5
    assert "99" in found[0][0]
    copies = read(kafka, f"{TELEMETRY}.dlq")
    assert [copy.value or b"" for copy in copies] == [value or b"" for value in strange]
    headers = dict(copies[0].headers)
    assert (headers["topic"], headers["reason"].decode()) == (TELEMETRY.encode(), found[0][0])
    pipeline.observations.append(f"{len(copies)} dead letters, as: {found[0][0]}")
    pipeline.log_result("wrong version, garbage, empty, null and 4 MiB of noise", visible, recovered, counts)


# --- a broker that lost or damaged what it had ------------------------------------------------------------------------


def restore_from_backup(broker: Broker, pipeline: KafkaPipeline, backup: Path, unsent: int) -> None:
    """Restores the broker's disk from 500 messages per node ago; `unsent` more messages per node wait."""
    pipeline.wait_until_healthy()
    pipeline.finish()
    broker.stop()
    shutil.copytree(broker.log_dirs, backup)
    broker.start()
    pipeline.write(500)
    pipeline.finish()
    broker.stop()
    shutil.rmtree(broker.log_dirs)
    shutil.copytree(backup, broker.log_dirs)
    pipeline.write(unsent)
    broker.start()


def test_a_truncated_log_is_read_again_from_its_start_and_nothing_is_stored_twice(
    own_broker: Broker, new_pipeline: PipelineFactory, tmp_path: Path
) -> None:
    pipeline = new_pipeline(make_topics(own_broker)).start()
    restore_from_backup(own_broker, pipeline, tmp_path / "backup", 1)
    again = "SELECT DISTINCT incarnation, 0 FROM ingest_commit WHERE incarnation LIKE '%~1'"
    visible = wait_until(lambda: pipeline.rows(again), VISIBLE_S, "the log is read again")
    recovered = pipeline.wait_until_healthy()
    pipeline.stop_service()
    pipeline.start_service()
    pipeline.write(10)
    pipeline.wait_until_healthy()
    counts = pipeline.finish()
    assert not counts.gaps
    pipeline.observations.append(
        "log: the log ends before the offset that is stored: the brokers lost messages; reading it again"
    )
    pipeline.log_result("brokers restored from an older copy of their disk", visible, recovered, counts)


def test_a_truncated_log_that_soon_grows_again_loses_only_counted_messages(
    own_broker: Broker, new_pipeline: PipelineFactory, tmp_path: Path
) -> None:
    """A reader that reads late cannot detect that its offset belongs to another message now."""
    pipeline = new_pipeline(make_topics(own_broker)).start()
    restore_from_backup(own_broker, pipeline, tmp_path / "backup", 800)
    recovered = pipeline.wait_until_healthy()
    counts = pipeline.finish()
    pipeline.observations.append("read again, or a gap for the messages at the reused offsets")
    pipeline.log_result("the same, and more messages were sent than were lost", None, recovered, counts)


def test_a_damaged_record_on_the_brokers_disk_is_a_gap(own_broker: Broker, new_pipeline: PipelineFactory) -> None:
    pipeline = new_pipeline(make_topics(own_broker)).start()
    pipeline.wait_until_healthy()
    pipeline.finish()
    pipeline.stop_service()
    segment = max(own_broker.log_dirs.glob(f"{TELEMETRY}-*/*.log"), key=lambda path: path.stat().st_size)
    consumed = segment.stat().st_size
    for _ in range(20):
        pipeline.write(5)
        pipeline.wait_until_sent()
    own_broker.stop()
    data = bytearray(segment.read_bytes())
    starts = [consumed]  # of the batches that are still to be read
    while starts[-1] < len(data):
        starts.append(starts[-1] + 12 + int.from_bytes(data[starts[-1] + 8 : starts[-1] + 12], "big"))
    first, after = starts[len(starts) // 2 - 1 : len(starts) // 2 + 1]
    data[(first + after) // 2] ^= 0xFF  # in its records: the checksum does not cover the first 16 bytes
    segment.write_bytes(data)
    own_broker.start()
    pipeline.start_service()
    visible = wait_until(lambda: count_gaps(pipeline), VISIBLE_S, "gaps are counted")
    recovered = pipeline.wait_until_healthy()
    counts = pipeline.finish()
    assert 0 < len(counts.gaps) < 50
    causes = pipeline.rows(OFFSET_GAPS)
    assert len(causes) == 1
    assert "checksum" in causes[0][0]
    pipeline.observations.append(f"gap: {causes[0][0]}")
    pipeline.log_result("a byte flipped in a segment on the broker's disk", visible, recovered, counts)
