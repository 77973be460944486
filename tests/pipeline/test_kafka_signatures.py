"""Signatures over a real broker: agents sign, the pipeline accepts signed messages, a missing key is named."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.commands.pipeline import PipelineBackend
from pipeline.commands.service import PipelineService
from pipeline.model.errors import ConfigError
from pipeline.model.records import TELEMETRY
from pipeline.transport import wire
from tests.kafka_broker import Address
from tests.kafka_clients import make_topics, write
from tests.pipeline.kafka_pipeline import NODES, KafkaPipeline, body, wait_until


def write_keys(folder: Path, *nodes: str) -> Path:
    folder.mkdir()
    for node in nodes:
        path = folder / f"{node}.key"
        path.touch(mode=0o600)
        path.write_text(f"{node}-".ljust(64, "k") + "\n")
    return folder


def test_signed_messages_arrive_and_forged_ones_are_dead_letters(
    kafka: Address, new_pipeline: Callable[..., KafkaPipeline], tmp_path: Path
) -> None:
    pipeline = new_pipeline(make_topics(kafka, node_keys=write_keys(tmp_path / "keys", *NODES)))
    pipeline.start()
    pipeline.wait_until_healthy()
    forged = wire.seal(body("n1", time.time_ns() // 1000, 0, 0), wire.TELEMETRY_KIND, b"x" * 16, 0, 0)
    write(kafka, TELEMETRY, [forged], key="n1")
    service = pipeline.service
    assert isinstance(service, PipelineService)
    wait_until(lambda: service.ingest.rejected["signature"] == 1, 30.0, "the forged message is rejected")
    assert service.ingest.rejected["sender"] == 0
    assert PipelineBackend(service).read_counters()['fleetpulse_ingest_rejected_total{rule="signature"}'] == 1.0


def test_an_agent_without_its_key_does_not_start(
    new_pipeline: Callable[..., KafkaPipeline], kafka: Address, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"no n3\.key; expected the key of n3"):
        new_pipeline(make_topics(kafka, node_keys=write_keys(tmp_path / "keys", "n0", "n1", "n2")))
