"""Ingest from the spool into durable DuckDB: samples per CPU-second of the whole path, checkpoint included.

    python -m benchmarks.ingest [--nodes 64] [--messages 240] [--ticks 10]

Writes a spool of `nodes` x `messages` messages (8 GPUs x 40 signals per tick, about 3.9 bytes a sample before
compression), then reads it: checksum, zstd, decode, dedupe, insert, commit with offsets, checkpoint. Beside it, in the
same run two appends of the same rows from Arrow are timed: ours, into the store's tables (all columns of the class, the
latest rows), and a pure one by one thread into a table with just these columns, which is the ceiling. Ratios are what
machines agree on.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from agents.node.spool.spool import Spool
from benchmarks.fleet import Fleet, bare, cpu, raw
from pipeline.ingest.ingest import Ingest
from pipeline.model.records import TELEMETRY
from pipeline.runtime.memory import reduce_gc
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.transport import wire
from pipeline.transport.spool import SpoolTransport


def fill(folder: Path, fleet: Fleet) -> None:
    """Writes the spools."""
    for n in range(fleet.nodes):
        spool = Spool(folder, fleet.node(n), TELEMETRY, max_bytes=1 << 32, segment_bytes=4 << 20, free_bytes=0)
        for m in range(fleet.messages):
            spool.append(fleet.body(n, m), wire.TELEMETRY_KIND, fleet.time(m), False)
        spool.sync()
        spool.close()


def ingest(folder: Path, store: Path) -> tuple[float, float, int]:
    """Returns (CPU seconds, wall seconds, commits) of reading everything."""
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


def warm_up(folder: Path) -> None:
    """Does what a process does once, such as loading compiled loops."""
    fill(folder / "warm", Fleet.make(1, 1, 2))
    ingest(folder / "warm", folder / "warm.duckdb")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--messages", type=int, default=240, help="per node")
    parser.add_argument("--ticks", type=int, default=10, help="per message")
    options = parser.parse_args()
    reduce_gc()  # as the pipeline does
    fleet = Fleet.make(options.nodes, options.messages, options.ticks)
    samples = fleet.samples
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fill(folder / "spool", fleet)
        warm_up(folder)
        before = raw(folder / "before.duckdb", fleet)
        used, wall, commits = ingest(folder / "spool", folder / "store.duckdb")
        ours = (before + raw(folder / "after.duckdb", fleet)) / 2
        pure = min(bare(folder / f"plain{i}.duckdb", fleet) for i in range(2))
        size = (folder / "store.duckdb").stat().st_size
    print(f"{samples / 1e6:.1f} M samples in {commits} commits, {size / samples:.2f} B per sample in the file")
    print(f"{used:.2f} CPU s, {wall:.2f} s")
    print(f"ingest from the spool:   {samples / used / 1e6:6.1f} M samples per CPU-second")
    print(f"our append of the same:  {samples / ours / 1e6:6.1f} M samples per CPU-second")
    print(f"pure append, one thread: {samples / pure / 1e6:6.1f} M samples per CPU-second")
    print(f"ratio to our append:     {ours / used:6.2f}")
    print(f"ratio to a pure append:  {pure / used:6.2f}")


if __name__ == "__main__":
    main()
