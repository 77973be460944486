"""Shared parts of the ingest benchmarks: a fleet's telemetry, and DuckDB's own append of the same rows."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa

from pipeline.ingest.ingest import COMMIT_ROWS
from pipeline.model.records import SECOND, Batch, Block, Origin, Rows
from pipeline.store import schema
from pipeline.store.hot_tables import HotTables
from pipeline.transport import wire

GPUS = 8
TYPES = [("u1", 8), ("u2", 8), ("f4", 14), ("u8", 10)]
START = 1_760_000_000 * SECOND


def cpu() -> float:
    """Returns CPU seconds of this process so far, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True)
class Fleet:
    """columns: signal -> (messages, nodes, ticks, GPUS): message m of node n holds `values[m, n]`."""

    nodes: int
    messages: int
    ticks: int
    columns: dict[str, np.ndarray]

    @classmethod
    def make(cls, nodes: int, messages: int, ticks: int) -> Fleet:
        """Returns 40 signals of realistic entropy: slow states and clocks, noisy gauges, slow and fast counters."""
        rng = np.random.default_rng(1)
        shape = (nodes, messages * ticks, GPUS)
        out = {}
        for code, number in TYPES:
            for i in range(number):
                if code == "f4":
                    values = rng.normal(50, 3, shape).round(1)
                elif code == "u8":
                    values = np.cumsum(rng.integers(0, 1 << 20 if i % 2 else 2, shape), axis=1)
                else:
                    values = 60 + rng.integers(0, 4, shape)
                by_message = values.astype(code).reshape(nodes, messages, ticks, GPUS).swapaxes(0, 1)
                out[f"gpu.bench_{code}_{i}"] = np.ascontiguousarray(by_message)
        return cls(nodes, messages, ticks, out)

    @property
    def rows(self) -> int:
        return self.nodes * self.messages * self.ticks * GPUS

    @property
    def samples(self) -> int:
        return self.rows * len(self.columns)

    def node(self, n: int) -> str:
        return f"n{n:04d}"

    def time(self, m: int) -> int:
        """Returns the time of the first tick of message m of every node."""
        return START + m * self.ticks * SECOND

    def body(self, n: int, m: int) -> bytes:
        """Returns the compressed body of message m of node n."""
        node, times = self.node(n), self.time(m) + np.arange(self.ticks) * SECOND
        block = Block(
            "gpu", tuple(f"gpu:{node}.{i}" for i in range(GPUS)), {s: v[m, n] for s, v in self.columns.items()}
        )
        return wire.encode(Batch(Origin("bench", node, bytes(16)), times, (block,)))

    def commits(self) -> Iterator[Rows]:
        """Yields the same rows in the order in which ingest stores them, COMMIT_ROWS at a time."""
        ticks = np.arange(self.messages * self.ticks).reshape(self.messages, 1, self.ticks, 1)
        devices = np.arange(self.nodes * GPUS, dtype=np.int32).reshape(1, self.nodes, 1, GPUS)
        shape = (self.messages, self.nodes, self.ticks, GPUS)
        time = np.broadcast_to(START + ticks * SECOND, shape).reshape(-1)
        device = np.broadcast_to(devices, shape).reshape(-1)
        flat = {name: values.reshape(-1) for name, values in self.columns.items()}
        for first in range(0, self.rows, COMMIT_ROWS):
            part = slice(first, first + COMMIT_ROWS)
            yield Rows("gpu", time[part], device[part], {name: values[part] for name, values in flat.items()})


def raw(store: Path, fleet: Fleet) -> float:
    """CPU seconds of DuckDB's own append of the fleet's rows, one row group per transaction, checkpoint included."""
    commits = list(fleet.commits())
    _append(store.with_suffix(".warm"), fleet, commits[:1])  # a cold process takes a fifth longer
    return _append(store, fleet, commits)


def bare(store: Path, fleet: Fleet) -> float:
    """CPU seconds of a pure append: the same rows from Arrow into a table with just their columns, by one thread.

    The ceiling of anything that stores these rows: no other columns, no latest rows, no offsets.
    """
    tables = [_plain(rows) for rows in fleet.commits()]
    connection = duckdb.connect(str(store), config={"threads": 1})
    connection.register("rows", tables[0])
    connection.execute("CREATE TABLE plain AS SELECT * FROM rows LIMIT 0")
    start = cpu()
    for table in tables:
        connection.register("rows", table)
        connection.execute("INSERT INTO plain SELECT * FROM rows")
    connection.execute("CHECKPOINT")
    used = cpu() - start
    connection.close()
    return used


def _plain(rows: Rows) -> pa.Table:
    columns = {"time": pa.array(rows.time), "device": pa.array(rows.device)}
    return pa.table({**columns, **{name: pa.array(values) for name, values in rows.columns.items()}})


def _append(store: Path, fleet: Fleet, commits: Sequence[Rows]) -> float:
    connection = duckdb.connect(str(store))
    schema.create_tables(connection, 0)
    tables = HotTables(connection)
    start = cpu()
    for rows in commits:
        connection.execute("BEGIN")
        tables.append(connection, [rows])
        connection.execute("COMMIT")
    connection.execute("CHECKPOINT")
    used = cpu() - start
    connection.close()
    return used
