"""Recordings as one row of numbers per entity, and the trends removed from a series to see its noise."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from benchmarks.realism.sample import Floats

SECONDS = "seconds"
"""Name of the column with times in s."""


def read(path: Path, columns: Sequence[str] | None = None) -> dict[str, dict[str, Floats]]:
    """Returns entity -> column -> values in order of time, and SECONDS; empty if a column or the file is missing."""
    if not path.exists():
        return {}
    known = [name for name in pq.read_schema(path).names if name not in ("time", "entity")]
    wanted = known if columns is None else list(columns)
    if not set(wanted) <= set(known):
        return {}
    table = pq.read_table(path, columns=["time", "entity", *wanted])
    time = table["time"].cast(pa.int64()).to_numpy()
    codes = table["entity"].combine_chunks().dictionary_encode()
    number, names = codes.indices.to_numpy(), codes.dictionary.to_pylist()
    order = np.lexsort((time, number))
    borders = np.searchsorted(number[order], np.arange(len(names) + 1))
    found = {name: np.asarray(table[name].to_numpy(), np.float64)[order] for name in wanted}
    found[SECONDS] = time[order] / 1e6
    return {
        names[n]: {name: values[borders[n] : borders[n + 1]] for name, values in found.items()}
        for n in sorted(range(len(names)), key=lambda n: str(names[n]))
    }


def stages(path: Path) -> Mapping[str, str]:
    """Returns rank -> its pipeline stage, from a topology.toml."""
    return {rank: stage for rank, stage in first_parents(path, "rank").items() if stage.startswith("stage:")}


def first_parents(path: Path, kind: str) -> Mapping[str, str]:
    """Returns entity of a kind -> its nearest parent, from a topology.toml."""
    lines = tomllib.loads(path.read_text()).get(kind, {})
    return {f"{kind}:{name}": parents[0] for name, parents in lines.items() if parents}


def rate(counter: Floats, seconds: Floats) -> Floats:
    """Returns the growth per second between two readings; NaN where it fell (the device was reset)."""
    grown = np.diff(counter) / np.maximum(np.diff(seconds), 1e-9)
    return np.where(grown >= 0, grown, np.nan)


def rolling_median(line: Floats, width: int) -> Floats:
    """Returns the running median of `width` values (an uneven number); NaN for the first and last half."""
    out = np.full(len(line), np.nan)
    if len(line) >= width:
        out[width // 2 : len(line) - width // 2] = np.median(sliding_window_view(line, width), axis=1)
    return out


def coarse(line: Floats, per: int) -> Floats:
    """Returns means of `per` consecutive values, without missing ones; NaN if all are missing. Drops a remainder."""
    count = len(line) // per
    parts = line[: count * per].reshape(count, per)
    known = np.isfinite(parts)
    with np.errstate(invalid="ignore"):
        return np.asarray(
            np.where(known, parts, 0.0).sum(axis=1) / np.where(known.any(axis=1), known.sum(axis=1), np.nan)
        )


def matrix(ranks: Mapping[str, Mapping[str, Floats]], column: str) -> tuple[list[str], NDArray[np.float64]]:
    """Returns (names, (steps, ranks)) of the steps that every rank measured: one row per step."""
    names = sorted(ranks)
    lines = [dict(zip(ranks[n]["rank.step"].tolist(), ranks[n][column].tolist(), strict=True)) for n in names]
    steps = sorted(set.intersection(*(set(line) for line in lines)))
    found = np.array([[line[step] for line in lines] for step in steps]).reshape(len(steps), len(names))
    return names, found[np.isfinite(found).all(axis=1)]
