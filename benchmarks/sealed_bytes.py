"""Bytes of a sealed sample of a real agent's stream, beside VictoriaMetrics with the same samples.

    python -m benchmarks.sealed_bytes [--binary PATH] [--nodes 8] [--seconds 3600]

Needs the binary `victoria-metrics`, as benchmarks/victoriametrics.py says. The load is that of benchmarks/history.py:
the stream of agents (recorded shape, generated values), of which missing values count in neither. Ours are the Parquet
files after all hours were sealed and merged into days; theirs the data folder after a forced merge.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.history import HOUR_START, fill, read_nodes
from benchmarks.victoriametrics import VictoriaMetrics, compare
from pipeline.config.sections import Store
from pipeline.model.records import SECOND, Batch
from pipeline.store.database import Database
from pipeline.store.sealing import Sealer

_JOINED = 60  # ticks in a line of a series: VictoriaMetrics compresses what it has merged, whatever came together


def list_bodies(seconds: int, nodes: int) -> Iterator[bytes]:
    """Yields bodies of /api/v1/import with the samples that `fill` stores."""
    for batches in read_nodes(seconds, nodes):
        while together := list(itertools.islice(batches, _JOINED)):
            series: dict[tuple[str, str], tuple[list[str], list[int]]] = {}
            for batch in together:
                _add_samples(series, batch)
            lines = (_line(name, entity, *samples) for (name, entity), samples in series.items())
            yield "".join(lines).encode()


def _add_samples(series: dict[tuple[str, str], tuple[list[str], list[int]]], batch: Batch) -> None:
    for block in batch.blocks:
        for name, values in block.columns.items():
            shown = _as_text(values)
            for time, row in zip(batch.times.tolist(), shown, strict=True):
                for entity, text in zip(block.entities, row, strict=True):
                    if text is not None:
                        texts, stamps = series.setdefault((name, entity), ([], []))
                        texts.append(text)
                        stamps.append(time // 1000)


def _as_text(values: NDArray[np.generic]) -> list[list[str | None]]:
    """Returns (ticks, devices) the shortest decimal of each value; None of a missing one."""
    if values.dtype.kind == "u":
        missing = int(np.iinfo(values.dtype).max)
        return [[None if v == missing else str(v) for v in row] for row in values.tolist()]
    texts = np.char.mod("%.9g" if values.dtype.itemsize == 4 else "%.17g", values)
    short = texts
    for digits in (4, 6, 7):
        tried = np.char.mod(f"%.{digits}g", values)
        same = (tried.astype(values.dtype) == values) & (np.char.str_len(tried) < np.char.str_len(short))
        short = np.where(same, tried, short)
    known = ~np.isnan(values.astype(np.float64))
    return [[t if k else None for t, k in zip(*line, strict=True)] for line in zip(short.tolist(), known, strict=True)]


def _line(name: str, entity: str, texts: list[str], stamps: list[int]) -> str:
    label = json.dumps({"__name__": name.replace(".", "_"), "entity": entity})
    return f'{{"metric":{label},"values":[{",".join(texts)}],"timestamps":{json.dumps(stamps)}}}\n'


def main() -> None:
    """Runs the benchmark and prints its figures."""
    parser = argparse.ArgumentParser(description="bytes of a sealed sample beside VictoriaMetrics")
    parser.add_argument("--binary", default="victoria-metrics")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=3600)
    options = parser.parse_args()
    binary = shutil.which(options.binary)
    if binary is None:
        raise SystemExit(f"no program {options.binary!r}: see benchmarks/victoriametrics.py")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        database = Database(folder / "store.duckdb")
        samples = fill(database, options.seconds, options.nodes)
        over = (HOUR_START + options.seconds + 2 * 86_400) * SECOND
        Sealer(database, Store(path=database.path), lambda: over).seal(over)
        query = "SELECT sum(bytes) FROM sealed WHERE step = 0"
        [(sealed,)] = database.connection.execute(query).fetchall()
        database.close()
        (folder / "vm").mkdir()
        server = VictoriaMetrics(binary, folder / "vm")
        try:
            server.load(list_bodies(options.seconds, options.nodes))
            stored = server.data_bytes()
        finally:
            server.close()
    print(f"{samples / 1e6:.1f} M samples of {options.nodes} nodes")
    compare("bytes per sample, sealed and merged", sealed / samples, stored / samples, "B")


if __name__ == "__main__":
    main()
