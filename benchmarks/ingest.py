"""Ingest from the spool into durable DuckDB: samples per CPU-second of the whole path, checkpoint included.

    python -m benchmarks.ingest [--nodes 64] [--messages 240] [--ticks 10]

Writes a spool of `nodes` x `messages` messages (8 GPUs x 40 signals per tick, about 3.9 bytes a sample before
compression), then reads it: checksum, zstd, decode, dedupe, insert, commit with offsets, checkpoint. Beside it, in the
same run, DuckDB's own append of the same rows from Arrow is timed; the ratio of the two is what machines agree on.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import duckdb
import numpy as np

from agents.spool import Spool
from pipeline import wire
from pipeline.ingest import COMMIT_ROWS, Ingest
from pipeline.records import SECOND, TELEMETRY, Batch, Block, Origin, Rows
from pipeline.signals import Signal
from pipeline.store import schema
from pipeline.store.append import append_rows
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.transport.spool import SpoolTransport

GPUS = 8
TYPES = [("u1", 8), ("u2", 8), ("f4", 14), ("u8", 10)]
START = 1_760_000_000 * SECOND


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def columns(rng: np.random.Generator, ticks: int) -> dict[str, np.ndarray]:
    """40 signals of believable entropy: slow states and clocks, noisy gauges, counters of which half grow at random."""
    out: dict[str, np.ndarray] = {}
    for code, number in TYPES:
        for i in range(number):
            shape = (ticks, GPUS)
            if code == "f4":
                values = rng.normal(50, 3, shape).round(1)
            elif code == "u8":
                values = np.cumsum(rng.integers(0, 1 << 20 if i % 2 else 2, shape), axis=0)
            else:
                values = 60 + rng.integers(0, 4, shape)
            out[f"gpu.bench_{code}_{i}"] = values.astype(code)
    return out


def fill(folder: Path, nodes: int, messages: int, ticks: int) -> int:
    """Writes the spools; returns the number of samples."""
    rng = np.random.default_rng(1)
    samples = 0
    for n in range(nodes):
        node = f"n{n:04d}"
        spool = Spool(folder, node, TELEMETRY, max_bytes=1 << 32, segment_bytes=4 << 20, free_bytes=0)
        origin = Origin("bench", node, bytes(16))
        values = columns(rng, ticks)
        samples += messages * sum(v.size for v in values.values())
        for m in range(messages):
            times = START + (m * ticks + np.arange(ticks)) * SECOND
            block = Block("gpu", tuple(f"gpu:{node}.{i}" for i in range(GPUS)), values)
            spool.append(wire.encode(Batch(origin, times, (block,))), wire.TELEMETRY_KIND, int(times[0]), False)
        spool.sync()
        spool.close()
    return samples


def ingest(folder: Path, store: Path) -> tuple[float, float, int]:
    """(CPU seconds, wall seconds, commits) of reading everything."""
    database = Database(store)
    transport = SpoolTransport(folder)
    devices = Devices(database.connection)
    commits = 0
    start, wall = cpu(), time.perf_counter()
    reader = Ingest(database, transport, devices, lambda: time.time_ns() // 1000)
    while reader.step() is not None:
        commits += 1
    database.connection.execute("CHECKPOINT")
    used = cpu() - start, time.perf_counter() - wall, commits
    transport.close()
    database.close()
    return used


def raw(store: Path, samples: int) -> float:
    """CPU seconds of DuckDB's own append of as many rows of the same columns, one row group per transaction."""
    connection = duckdb.connect(str(store))
    schema.create(connection)
    ticks = COMMIT_ROWS // GPUS
    values = columns(np.random.default_rng(1), ticks)
    flat = {name: v.reshape(-1) for name, v in values.items()}
    new = [Signal(n, "1", "gauge", "gpu", f"{v.dtype.kind}{v.dtype.itemsize}", "benchmark") for n, v in flat.items()]
    schema.ensure_class(connection, "gpu", new)
    time_ = np.repeat(START + np.arange(ticks) * SECOND, GPUS)
    device = np.tile(np.arange(GPUS, dtype=np.int32), ticks)
    start = cpu()
    for _ in range(max(1, round(samples / (COMMIT_ROWS * len(flat))))):
        connection.execute("BEGIN")
        append_rows(connection, Rows("gpu", time_, device, flat))
        connection.execute("COMMIT")
    connection.execute("CHECKPOINT")
    return cpu() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--messages", type=int, default=240, help="per node")
    parser.add_argument("--ticks", type=int, default=10, help="per message")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        samples = fill(folder / "spool", options.nodes, options.messages, options.ticks)
        used, wall, commits = ingest(folder / "spool", folder / "store.duckdb")
        bare = raw(folder / "raw.duckdb", samples)
        size = (folder / "store.duckdb").stat().st_size
    print(f"{samples / 1e6:.1f} M samples in {commits} commits, {size / samples:.2f} B per sample in the file")
    print(f"{used:.2f} CPU s, {wall:.2f} s")
    print(f"ingest from the spool:   {samples / used / 1e6:6.1f} M samples per CPU-second")
    print(f"raw append of the same:  {samples / bare / 1e6:6.1f} M samples per CPU-second")
    print(f"ratio:                   {bare / used:6.2f}")


if __name__ == "__main__":
    main()
