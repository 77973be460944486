"""OTLP into durable DuckDB over a pure append of the same rows: samples per CPU-second, in one run.

    python -m benchmarks.otlp [--nodes 64] [--messages 60] [--gpus 8]

Writes requests as a Collector sends them (a resource per node and scrape, dcgm-exporter's names, custom signals), then
reads them from a log in memory through the real ingest: walk, layout cache, admission, insert, commit with offsets,
checkpoint. Kafka itself is not part of it. The ceiling is what one thread needs to append the same rows into tables
with just their columns.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from benchmarks.fleet import cpu
from pipeline.foreign.mapping import load_mapping
from pipeline.ingest.foreign import ForeignDecoder, build_foreign_rows
from pipeline.ingest.ingest import Ingest
from pipeline.ingest.messages import Arrival
from pipeline.model.records import OTLP, SECOND
from pipeline.model.signals import CATALOGUE
from pipeline.runtime.memory import reduce_gc, tune_allocator
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.transport import Message, Partition

START = 1_760_000_000 * SECOND
PARTITION = Partition(OTLP, "0", "id")


def new_request(node: str, gpus: int) -> ExportMetricsServiceRequest:
    """One scrape of one node: metrics of dcgm-exporter's names and 5 custom ones, each for all GPUs."""
    message = ExportMetricsServiceRequest()
    resource = message.resource_metrics.add()
    pair = resource.resource.attributes.add()
    pair.key, pair.value.string_value = "host.name", node
    scope = resource.scope_metrics.add()
    names = [m.name for m in load_mapping("dcgm-exporter").metric if CATALOGUE[m.signal].kind != "state"][:35]
    for name in [*dict.fromkeys(names), *(f"vendor.quantity_{k}" for k in range(5))]:
        metric = scope.metrics.add(name=name)
        for i in range(gpus):
            point = metric.gauge.data_points.add()
            for key, text in {"gpu": str(i), "UUID": f"GPU-{node}-{i:08d}", "device": f"nvidia{i}"}.items():
                pair = point.attributes.add()
                pair.key, pair.value.string_value = key, text
    return message


def stamp(message: ExportMetricsServiceRequest, time: int, values: np.ndarray) -> bytes:
    """The request with this time and these values."""
    found = iter(values.tolist())
    for metric in message.resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.gauge.data_points:
            point.time_unix_nano, point.as_double = time * 1000, next(found)
    return message.SerializeToString()


class Log:
    """A transport in memory with one partition."""

    def __init__(self, values: Sequence[bytes]) -> None:
        self._values, self.end = values, len(values)

    def partitions(self) -> list[Partition]:
        return [PARTITION]

    def bounds(self, partition: Partition) -> tuple[int, int]:
        return 0, len(self._values)

    def read(self, partition: Partition, offset: int, max_messages: int, max_bytes: int) -> list[Message]:
        found, size = [], 0
        for i in range(offset, min(offset + max_messages, self.end)):
            size += len(self._values[i])
            if found and size > max_bytes:
                break
            found.append(Message(partition, i, self._values[i]))
        return found

    def commit_offset(self, partition: Partition, next_offset: int) -> None: ...

    def send_dead_letter(self, message: Message, reason: str) -> None:
        raise AssertionError(reason)

    def find_problem(self) -> None: ...

    def close(self) -> None: ...


def ingest(store: Path, values: Sequence[bytes], nodes: int) -> tuple[float, float]:
    """(CPU seconds of the first message of each node, those of the others)."""
    database, log = Database(store), Log(values)
    reader = Ingest(database, log, Devices(database.connection), lambda: START + 86_400 * SECOND)
    times = []
    for log.end in (nodes, len(values)):
        start = cpu()
        while reader.step() is not None:
            pass
        if log.end > nodes:
            database.connection.execute("CHECKPOINT")
        times.append(cpu() - start)
    database.close()
    return times[0], times[1]


def pure_append(store: Path, values: Sequence[bytes], folder: Path) -> tuple[float, int]:
    """(CPU seconds, samples) of appending the same rows from Arrow into tables with just their columns."""
    database, decoder = Database(folder / "ids.duckdb"), ForeignDecoder()
    devices = Devices(database.connection)
    arrival = Arrival(START + 86_400 * SECOND, START + 86_401 * SECOND, lambda node, sent: 0)
    tables: list[tuple[str, pa.Table]] = []
    samples = 0
    for first in range(0, len(values), 1000):
        items = [
            decoder.decode(Message(PARTITION, i, v), arrival, lambda *_: None)
            for i, v in enumerate(values[first : first + 1000])
        ]
        for rows in build_foreign_rows([item.body for item in items], devices):  # type: ignore[misc]
            columns = {"time": pa.array(rows.time), "device": pa.array(rows.device)}
            tables.append(
                (rows.device_class, pa.table({**columns, **{n: pa.array(v) for n, v in rows.columns.items()}}))
            )
            samples += len(rows.time) * len(rows.columns)
    database.close()
    connection = duckdb.connect(str(store), config={"threads": 1})
    for name, table in dict(tables).items():
        connection.register("rows", table)
        connection.execute(f'CREATE TABLE "{name}" AS SELECT * FROM rows LIMIT 0')
    start = cpu()
    for name, table in tables:
        connection.register("rows", table)
        connection.execute(f'INSERT INTO "{name}" SELECT * FROM rows')
    connection.execute("CHECKPOINT")
    used = cpu() - start
    connection.close()
    return used, samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--messages", type=int, default=120, help="per node")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    tune_allocator()  # as the pipeline does
    reduce_gc()
    rng = np.random.default_rng(1)
    messages = [new_request(f"n{n:04d}", options.gpus) for n in range(options.nodes)]
    sizes = 40 * options.gpus
    values = [
        stamp(message, START + m * SECOND, rng.normal(50, 3, sizes).round(1))
        for m in range(options.messages + 1)
        for message in messages
    ]
    ratios = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ingest(folder / "warm.duckdb", values[: 2 * options.nodes], options.nodes)  # compiles
        for r in range(options.rounds):
            pure, samples = pure_append(folder / f"pure{r}.duckdb", values[options.nodes :], folder)
            layouts, used = ingest(folder / f"store{r}.duckdb", values, options.nodes)
            (folder / "ids.duckdb").unlink()
            ratios.append(pure / used)
            print(f"{samples / 1e6:.2f} M samples, {len(values[0]) / sizes:.0f} B each as OTLP")
            print(f"a new layout:        {layouts / options.nodes / sizes * 1e6:5.1f} us of CPU per series")
            print(f"OTLP into the store: {samples / used / 1e6:5.1f} M samples per CPU-second")
            print(f"pure append:         {samples / pure / 1e6:5.1f} M samples per CPU-second, ratio {pure / used:.3f}")
    print(f"ratio, min/median/max: {min(ratios):.3f} {sorted(ratios)[len(ratios) // 2]:.3f} {max(ratios):.3f}")


if __name__ == "__main__":
    main()
