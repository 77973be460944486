"""Two writers of one store, and one that is killed while it writes: every row is stored once over real brokers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.ingest.ingest import Ingest
from pipeline.model.errors import Retryable
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.transport.kafka import KafkaTransport
from tests.kafka_broker import Address
from tests.kafka_clients import make_topics
from tests.pipeline.kafka_pipeline import VISIBLE_S, KafkaPipeline, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fast_broker_checks")]
PipelineFactory = Callable[..., KafkaPipeline]


def test_a_second_pipeline_on_the_store_exits_with_3_and_names_the_first(
    kafka: Address, new_pipeline: PipelineFactory, tmp_path: Path
) -> None:
    pipeline = new_pipeline(make_topics(kafka)).start()
    pipeline.wait_until_healthy()
    (tmp_path / "second.toml").write_text(
        f'[pipeline]\ntransport = "kafka"\n[kafka]\nbootstrap_servers = "{kafka.bootstrap}"\n'
        f'[store]\npath = "{pipeline.config.store.path}"\n[api]\nport = 0\n'
    )
    words = [sys.executable, os.path.abspath("fleetpulse.py"), "pipeline", "--config", str(tmp_path / "second.toml")]
    begin = time.monotonic()
    second = subprocess.run(words, capture_output=True, text=True, timeout=60)
    visible = time.monotonic() - begin
    assert second.returncode == 3
    assert f"PID {os.getpid()}" in second.stderr
    pipeline.observations.append(f"exit 3: {second.stderr.strip()}")
    recovered = pipeline.wait_until_healthy()
    counts = pipeline.finish()
    assert not counts.gaps
    pipeline.log_result("a second pipeline on the same store", visible, recovered, counts)


def test_of_two_writers_on_one_store_one_is_fenced_and_every_row_is_stored_once(
    kafka: Address, new_pipeline: PipelineFactory
) -> None:
    """DuckDB locks out a second process; this tests the second lock, with both writers in one process."""
    pipeline = new_pipeline(make_topics(kafka))
    pipeline.sender.start()
    pipeline.write(200)
    pipeline.wait_until_sent()
    with closing(Database(pipeline.config.store.path)) as database:
        pipeline.database = database
        transports = [KafkaTransport(pipeline.config.kafka) for _ in range(2)]
        writers = [
            Ingest(database, transport, Devices(database.connection), lambda: time.time_ns() // 1000)
            for transport in transports
        ]
        refusals: list[list[str]] = [[], []]
        stop = threading.Event()
        threads = [
            threading.Thread(target=_run_ingest, args=(writer, found, stop))
            for writer, found in zip(writers, refusals, strict=True)
        ]
        for thread in threads:
            thread.start()
        visible = wait_until(lambda: any(refusals), VISIBLE_S, "one is fenced")
        for _ in range(20):
            pipeline.write(5)
            pipeline.wait_until_sent()
        counts = pipeline.finish()
        stop.set()
        for thread in threads:
            thread.join()
        for transport in transports:
            transport.close()
        fenced = [found for found in refusals if found]
        assert len(fenced) == 1, "the other one continues"
        assert all("another pipeline wrote to it" in text for text in fenced[0])
        assert not counts.gaps
        assert pipeline.rows("SELECT 'letters', count(*) FROM dead_letter") == [("letters", 0)]
        pipeline.observations.append(fenced[0][0])
        pipeline.log_result("two writers on one store", visible, None, counts)
        pipeline.database = None


def _run_ingest(ingest: Ingest, refusals: list[str], stop: threading.Event) -> None:
    """Runs ingest steps as the loop of the pipeline does."""
    while not stop.wait(0.01):
        try:
            ingest.step()
        except Retryable as error:
            refusals.append(str(error))


# --- kill -9 ---------------------------------------------------------------------------------------------------------

MESSAGES, KILLS = 400, 8
READER = """
import sys, time
from pathlib import Path
from pipeline.ingest import ingest as module
from pipeline.config.sections import Kafka
from pipeline.ingest.ingest import Ingest
from pipeline.ingest.offsets import load_offsets
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.transport.kafka import KafkaTransport
module.COMMIT_ROWS = 40  # many small commits: many moments to die in
database = Database(Path(sys.argv[1]))
kafka = Kafka(bootstrap_servers=sys.argv[2])
transport = KafkaTransport(kafka, load_offsets(database.connection))
ingest = Ingest(database, transport, Devices(database.connection), lambda: time.time_ns() // 1000)
while not transport.partitions():
    pass
while ingest.step() is not None or ingest.backlog() is not None:
    print(".", flush=True)
"""


def test_no_row_is_lost_or_doubled_when_the_pipeline_is_killed_while_it_commits(
    kafka: Address, new_pipeline: PipelineFactory
) -> None:
    pipeline = new_pipeline(make_topics(kafka))
    pipeline.sender.start()
    for _ in range(10):
        pipeline.write(MESSAGES // 10)
        pipeline.wait_until_sent()
    words = [sys.executable, "-c", READER, str(pipeline.config.store.path), kafka.bootstrap]
    rng, kills, last = random.Random(1), 0, 1
    while last:
        reader = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=os.getcwd())
        assert reader.stdout is not None
        wanted = rng.randint(1, 4)
        for steps, _ in enumerate(reader.stdout, 1):
            if kills < KILLS and steps >= wanted:
                time.sleep(rng.uniform(0, 0.02))  # the kill falls anywhere within a commit
                reader.send_signal(signal.SIGKILL)
                kills += 1
                break
        reader.stdout.close()
        last = reader.wait()
        assert last in (0, -signal.SIGKILL)
    assert kills == KILLS
    pipeline.start_service()
    recovered = pipeline.wait_until_healthy()
    counts = pipeline.finish()
    assert not counts.gaps
    pipeline.observations.append(f"{kills} kills")
    pipeline.log_result("pipeline killed (kill -9) while it commits", None, recovered, counts)
