"""The whole path from Kafka into durable DuckDB: samples per CPU-second, beside DuckDB's own appends in the same run.

    python -m benchmarks.kafka [--nodes 64] [--messages 480] [--ticks 10] [--single 960] [--partitions 32]

Starts a real broker (on a separate core if there are two), makes the product's topics and fills telemetry.v1.
Then reads it into a fresh store as the pipeline does: fetch, checksums, zstd, decode, dedupe, insert, commit with
offsets, checkpoint. CPU is that of the whole client process, its I/O threads included. Two fillings: messages of
`ticks` ticks in large Kafka batches, as senders that catch up leave them, and `single` messages of one tick per node,
each its own Kafka batch, as an agent at 1 Hz leaves them.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fleet import Fleet, bare, cpu, raw
from benchmarks.ingest import warm_up
from pipeline.config.sections import Kafka
from pipeline.ingest.ingest import Ingest
from pipeline.model.records import TELEMETRY
from pipeline.runtime.memory import reduce_gc, tune_allocator
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.transport import kafka_clients, topics, wire
from pipeline.transport.kafka import KafkaTransport
from tests.kafka_broker import Broker, BrokerError, missing

PATIENT = {"broker.session.timeout.ms": "9000"}
"""Kafka's default: with the 1 s of the tests, a busy machine makes the broker lose its leadership for seconds."""
BATCH_BYTES = 256 << 10
"""Kafka batch of a sender that catches up; streaming clients gain nothing beyond it."""
WAITING = 4096  # messages passed to the producer before it is flushed; it has no bound
IDLE_S = 0.01  # pause after a step that found nothing
LIMIT_S = 120.0  # chosen: 20 times the usual time; a path that hangs must not block the program


@dataclass(frozen=True)
class Read:
    """Figures of reading everything."""

    cpu: float
    wall: float
    commits: int
    rows: int
    file_bytes: int


def apart() -> Sequence[str]:
    """Puts this process on the first core and returns the command prefix that puts the broker on the second; () with
    only one."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2 or shutil.which("taskset") is None:
        return ()
    os.sched_setaffinity(0, {cores[0]})
    return ("taskset", "-c", str(cores[1]))


def make_topics(kafka: Kafka) -> None:
    """Creates the topics of `fleetpulse init` again."""
    with closing(kafka_clients.create_admin(kafka, "benchmark", 10.0)) as admin:
        admin.create_topics(topics.creation_requests(kafka, topics.configured_topics(kafka)))


def fill(kafka: Kafka, fleet: Fleet, batch_bytes: int) -> int:
    """Sends all messages in the order of their times; returns their bytes."""
    producer = kafka_clients.create_producer(kafka, "benchmark", batch_size=batch_bytes, linger_ms=50)
    epochs = [n.to_bytes(16, "big") for n in range(1, fleet.nodes + 1)]
    size, sent = 0, []
    for m in range(fleet.messages):
        for n in range(fleet.nodes):
            value = wire.seal(fleet.body(n, m), wire.TELEMETRY_KIND, epochs[n], m, fleet.time(m))
            size += len(value)
            sent.append(producer.send(TELEMETRY, key=fleet.node(n).encode(), value=value))
        if len(sent) >= WAITING or m + 1 == fleet.messages:
            producer.flush(LIMIT_S)
            for future in sent:
                future.get(0)  # raises the error of a message that was not sent
            sent.clear()
    producer.shut_down(5.0)
    return size


def read(kafka: Kafka, store: Path, fleet: Fleet) -> Read:
    """Reads until everything is stored and checkpointed."""
    database = Database(store)
    devices = Devices(database.connection)
    commits, until = 0, time.monotonic() + LIMIT_S
    start, wall = cpu(), time.perf_counter()
    transport = KafkaTransport(kafka)
    reader = Ingest(database, transport, devices, lambda: time.time_ns() // 1000)
    while reader.counters["samples"] < fleet.samples:
        if reader.step() is None:
            time.sleep(IDLE_S)
        else:
            commits += 1
        if time.monotonic() > until:
            raise SystemExit(f"{reader.counters['samples']} of {fleet.samples} samples stored after {LIMIT_S:.0f} s")
    database.connection.execute("CHECKPOINT")
    used = cpu() - start, time.perf_counter() - wall
    transport.close()
    found = database.connection.execute("SELECT count(*) FROM gpu").fetchone()
    database.close()
    return Read(*used, commits, found[0] if found else 0, store.stat().st_size)


def measure(kafka: Kafka, fleet: Fleet, folder: Path, batch_bytes: int) -> None:
    """Writes, reads and prints one batch of messages."""
    make_topics(kafka)
    wire_bytes = fill(kafka, fleet, batch_bytes)
    warm_up(folder)
    before = raw(folder / "before.duckdb", fleet)
    got = read(kafka, folder / "store.duckdb", fleet)
    ours = (before + raw(folder / "after.duckdb", fleet)) / 2
    pure = min(bare(folder / f"plain{i}.duckdb", fleet) for i in range(2))
    if got.rows != fleet.rows:
        raise SystemExit(f"{got.rows} rows stored, expected {fleet.rows}")
    samples, messages = fleet.samples, fleet.nodes * fleet.messages
    print(
        f"{messages} messages of {fleet.ticks} ticks, {wire_bytes / messages / 1e3:.1f} kB each, all rows stored once"
    )
    print(f"  {samples / 1e6:.1f} M samples in {got.commits} commits, {got.cpu:.2f} CPU s, {got.wall:.2f} s")
    print(f"  {wire_bytes / samples:.2f} B per sample on the wire, {got.file_bytes / samples:.2f} in the file")
    print(f"  Kafka to durable DuckDB: {samples / got.cpu / 1e6:6.1f} M samples per CPU-second")
    print(f"  our append of the same:  {samples / ours / 1e6:6.1f} M samples per CPU-second")
    print(f"  pure append, one thread: {samples / pure / 1e6:6.1f} M samples per CPU-second")
    print(f"  ratio to our append:     {ours / got.cpu:6.2f}")
    print(f"  ratio to a pure append:  {pure / got.cpu:6.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--messages", type=int, default=480, help="per node in the first filling; 0: without it")
    parser.add_argument("--ticks", type=int, default=10, help="per message in the first filling")
    parser.add_argument("--single", type=int, default=960, help="messages of one tick per node; 0: without it")
    parser.add_argument("--partitions", type=int, default=32)
    options = parser.parse_args()
    logging.getLogger("kafka").setLevel(logging.ERROR)
    if lacking := missing():
        sys.exit(f"benchmarks.kafka: {lacking}: run 'make parts'")
    fillings = [(options.messages, options.ticks, BATCH_BYTES), (options.single, 1, 1)]
    beside = apart()
    tune_allocator()  # as the pipeline does
    reduce_gc()
    for messages, ticks, batch_bytes in fillings:
        if not messages:
            continue
        fleet = Fleet.make(options.nodes, messages, ticks)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with Broker(folder / "broker", heap="512m", prefix=beside, properties=PATIENT) as broker:
                kafka = Kafka(bootstrap_servers=broker.bootstrap, partitions=options.partitions)
                measure(kafka, fleet, folder, batch_bytes)


if __name__ == "__main__":
    try:
        main()
    except BrokerError as error:
        sys.exit(f"benchmarks.kafka: {error}")
