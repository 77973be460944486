"""Backups of a pipeline that reads real Kafka, the loss of its store, a restore, and the reads after it."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.api.server import create_app, start_server
from pipeline.commands.pipeline import PipelineBackend
from pipeline.config import sections
from tests.kafka_broker import Address
from tests.kafka_clients import make_topics
from tests.pipeline.kafka_pipeline import VISIBLE_S, KafkaPipeline, wait_until
from tests.pipeline.test_kafka_losses import OFFSET_GAPS, RETENTION, count_gaps, delete_before

pytestmark = [pytest.mark.slow, pytest.mark.refusals, pytest.mark.usefixtures("fast_broker_checks")]
PipelineFactory = Callable[..., KafkaPipeline]


@contextmanager
def served(pipeline: KafkaPipeline) -> Iterator[Path]:
    """Serves the API of a running pipeline; yields a configuration file for commands."""
    assert pipeline.service is not None
    stop, store = threading.Event(), pipeline.config.store.path
    config = dataclasses.replace(pipeline.config, api=sections.Api(port=0))
    api = start_server(create_app(PipelineBackend(pipeline.service), config), config, stop)
    try:
        yield write_config(store, pipeline, api.port)
    finally:
        stop.set()
        api.join()


def write_config(store: Path, pipeline: KafkaPipeline, port: int) -> Path:
    file = store.parent / "fleetpulse.toml"
    file.write_text(
        f'[api]\nport = {port}\n[pipeline]\ntransport = "kafka"\n[store]\npath = "{store}"\nfree_bytes = 0\n'
        f'[kafka]\nbootstrap_servers = "{pipeline.config.kafka.bootstrap_servers}"\n'
    )
    return file


def fleetpulse(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, os.path.abspath("fleetpulse.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


def lose_store(store: Path) -> None:
    for path in list(store.parent.glob(f"{store.name}*")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def test_a_restored_store_reads_the_log_on_from_its_offsets_and_stores_each_message_once(
    kafka: Address, new_pipeline: PipelineFactory, tmp_path: Path
) -> None:
    pipeline = new_pipeline(make_topics(kafka)).start()
    pipeline.wait_until_healthy()
    store = pipeline.config.store.path
    with served(pipeline) as config:
        for number in range(2):  # ingest goes on
            made = fleetpulse("backup", tmp_path / f"backup{number}", "--config", config)
            assert (made.returncode, made.stdout.splitlines()[0].split()[0]) == (0, "folder"), made.stderr
        refused = fleetpulse("backup", tmp_path / "backup1", "--config", config)
        assert refused.returncode == 2
        assert "exists" in refused.stderr
    stored = len(pipeline.count_messages().stored)
    wait_until(lambda: len(pipeline.count_messages().stored) > stored + 50, VISIBLE_S, "more rows than in the backup")
    pipeline.stop_service()
    lose_store(store)
    restored = fleetpulse("restore", tmp_path / "backup1", "--config", write_config(store, pipeline, 1))
    assert restored.returncode == 0, restored.stderr
    assert "what Kafka keeps" in restored.stderr
    pipeline.start_service()
    counts = pipeline.finish()
    assert counts.gaps == {}
    assert set(counts.stored) == counts.sent


def test_what_the_brokers_deleted_since_an_older_backup_is_a_counted_gap(
    kafka: Address, new_pipeline: PipelineFactory, tmp_path: Path
) -> None:
    pipeline = new_pipeline(make_topics(kafka)).start()
    pipeline.wait_until_healthy()
    store = pipeline.config.store.path
    with served(pipeline) as config:
        made = fleetpulse("backup", tmp_path / "backup", "--config", config)
        assert made.returncode == 0, made.stderr
    pipeline.write(25)
    pipeline.finish()
    pipeline.stop_service()
    delete_before(kafka, pipeline.end_offsets())
    pipeline.write(5)
    lose_store(store)
    assert fleetpulse("restore", tmp_path / "backup", "--config", write_config(store, pipeline, 1)).returncode == 0
    pipeline.start_service()
    wait_until(lambda: count_gaps(pipeline), VISIBLE_S, "gaps are counted")
    counts = pipeline.finish()
    assert len(counts.gaps) >= 25 * len(pipeline.nodes)
    assert pipeline.rows(OFFSET_GAPS)[0][0] == RETENTION


@pytest.mark.parametrize("repeats", [3])
def test_ingest_goes_on_while_a_client_holds_checkpoints(
    kafka: Address, new_pipeline: PipelineFactory, repeats: int
) -> None:
    pipeline = new_pipeline(make_topics(kafka)).start()
    pipeline.wait_until_healthy()
    assert pipeline.service is not None
    for _ in range(repeats):
        began = time.monotonic()
        moment = pipeline.service.backups.begin()
        took = time.monotonic() - began
        stored = len(pipeline.count_messages().stored)
        wait_until(lambda n=stored: len(pipeline.count_messages().stored) > n + 10, VISIBLE_S, "commits go on")
        assert pipeline.service.backups.end(moment.id)
        assert took < 5  # milliseconds alone
    assert not pipeline.finish().gaps
