"""What an hour of telemetry costs to seal, and the bytes of a sample before and after.

    python -m benchmarks.history [--nodes 4] [--seconds 3600]

The load is the stream of a real agent (benchmarks/agent_stream.py), stored as the pipeline stores it. Samples are
values that are not missing. Printed: CPU of the copy with its rollups and of the exchange in the loop, bytes per sample
of the files by class, and CPU of one series from the files, as rows and from a rollup.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.agent_stream import START, AgentStream
from benchmarks.fleet import cpu
from pipeline.api.history import Span, choose_step, read_series
from pipeline.config.sections import Store
from pipeline.model.records import SECOND, Batch, Rows
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import Topology
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.store.hot_tables import HotTables
from pipeline.store.sealing import HOUR, Sealer

HOUR_START = START // 3600 * 3600
COMMIT_SECONDS = 60  # of telemetry per commit; chosen: the bytes of the store do not depend on it


def read_nodes(seconds: int, nodes: int) -> list[Iterator[Batch]]:
    """Returns the batches of each node from HOUR_START on. Each has values of its own: the same values again would cost
    a file of all nodes almost nothing."""
    return [AgentStream(seconds, seed=n + 1).batches(f"n{n:04d}", HOUR_START) for n in range(nodes)]


def fill(database: Database, seconds: int, nodes: int) -> int:
    """Stores the telemetry of all nodes; returns the samples that are not missing."""
    devices, tables, samples = Devices(database.connection), HotTables(database.connection), 0
    ticks = zip(*read_nodes(seconds, nodes), strict=True)
    while commit := list(itertools.islice(ticks, COMMIT_SECONDS)):
        rows: list[Rows] = []
        for batch in itertools.chain.from_iterable(commit):
            for block in batch.blocks:
                origin = batch.origin
                ids = devices.assign_ids(block.device_class, origin.site, origin.node, False, block.entities)
                columns = {name: values.reshape(-1) for name, values in block.columns.items()}
                samples += sum(_count_present(values) for values in columns.values())
                rows.append(Rows(block.device_class, np.repeat(batch.times, len(ids)), ids, columns))
        with database.transaction() as connection:
            devices.save(connection)
            tables.append(connection, rows)
        devices.mark_saved()
    database.connection.execute("CHECKPOINT")
    return samples


def _count_present(values: np.ndarray) -> int:
    missing = values == np.iinfo(values.dtype).max if values.dtype.kind == "u" else np.isnan(values)
    return int(values.size - np.count_nonzero(missing))


def seal(sealer: Sealer, before: int) -> Iterator[tuple[str, float, float]]:
    """Seals everything; yields class, CPU of the copy and CPU of the exchange of each hour."""
    while True:
        begun = cpu()
        job = sealer._prepare(before)
        if job is None:
            return
        copied = cpu()
        sealer._commit(job, lambda: None)
        yield job.device_class, copied - begun, cpu() - copied


def time_series(database: Database, points: int) -> tuple[int, float]:
    """(seconds of the rollup that is read, CPU of one series of an hour of a GPU in `points`)."""
    cursor = database.cursor()
    span = Span(HOUR_START * SECOND, HOUR_START * SECOND + HOUR, points)
    signal = CATALOGUE["gpu.power"]
    used = []
    for _ in range(5):
        begun = cpu()
        read_series(cursor, Topology(), "gpu:n0000.1", signal.name, span, "rack")
        used.append(cpu() - begun)
    return choose_step(cursor, signal, span), sorted(used)[2]


def main() -> None:
    """Runs the benchmark and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seconds", type=int, default=3600)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        database = Database(Path(folder) / "store.duckdb")
        samples = fill(database, options.seconds, options.nodes)
        hot = database.path.stat().st_size
        print(f"{samples / 1e6:.1f} M samples, hot {hot / samples:.2f} B/sample")
        sealer = Sealer(database, Store(path=database.path), lambda: (HOUR_START + 86400) * SECOND)
        parts = list(seal(sealer, HOUR_START * SECOND + HOUR))
        copied, exchanged = sum(p[1] for p in parts), sum(p[2] for p in parts)
        print(f"copy {copied:.2f} s of CPU, {samples / copied / 1e6:.1f} M samples/s; exchange {exchanged:.2f} s")
        query = "SELECT step, class, sum(rows), sum(bytes) FROM sealed GROUP BY ALL ORDER BY 1, 4 DESC"
        rows = database.connection.execute(query).fetchall()
        for step in (0, 60, 600):
            size = sum(row[3] for row in rows if row[0] == step)
            print(f"step {step}: {size / samples:.3f} B/sample")
        for step, device_class, number, size in rows:
            print(f"    {step:4} {device_class:12} {number:9} rows {size:10} bytes")
        for points in (1000, 60):
            step, used = time_series(database, points)
            print(f"a series of an hour in {points} points, step {step}: {used * 1000:.1f} ms of CPU")
        database.close()


if __name__ == "__main__":
    main()
