"""Writes the replay format: telemetry-CLASS.parquet, events.jsonl, topology.toml, truth.jsonl and meta.json.

Telemetry files have the suffix `.part` until they are complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.model.errors import UsageError
from pipeline.model.records import Event, to_json
from pipeline.recording.text_files import event_to_json, format_json_line, write_topology

GROUP_ROWS = 1 << 17
"""Rows of a Parquet row group: 131,072, at least DuckDB's own group of 122,880. Chosen."""


class TelemetryWriter:
    """Writes one telemetry-CLASS.parquet: sorted by time, then entity; integers as int64, missing values as null."""

    def __init__(self, directory: Path, device_class: str) -> None:
        self.path = directory / f"telemetry-{device_class}.parquet"
        self._part = self.path.with_suffix(".parquet.part")
        self._writer: Any = None
        self._waiting: list[Any] = []
        self._entities: tuple[str, ...] = ()
        self._order: NDArray[np.intp] = np.empty(0, np.intp)
        self.rows = self._rows_waiting = 0

    def append(
        self,
        times: NDArray[np.int64],
        entities: Sequence[str],
        columns: Mapping[str, NDArray[Any]],
        present: NDArray[np.bool_] | None = None,
    ) -> None:
        """Appends ticks, later than all before. times: (ticks,), or (ticks, devices) that differ by less than a tick
        within a tick. columns: (ticks, devices) in wire type; present: (ticks, devices)."""
        import pyarrow as pa

        if tuple(entities) != self._entities:
            self._entities, self._order = tuple(entities), np.argsort(np.asarray(entities), kind="stable")
        ticks, order = len(times), self._order
        keep: slice | NDArray[np.intp] = slice(None)
        if present is not None and not present.all():
            keep = np.flatnonzero(present[:, order].ravel())
        when = np.repeat(times, len(order)) if times.ndim == 1 else times[:, order].ravel()
        if times.ndim == 2 and len(order):  # devices of a tick may have different times: order by time, then entity
            keep = np.arange(len(when))[keep]
            keep = keep[np.argsort(when[keep], kind="stable")]
        names = pa.array([entities[i] for i in order], pa.string())
        places = pa.array(np.tile(np.arange(len(order), dtype=np.int32), ticks)[keep])
        table = pa.table(
            {
                "time": pa.array(when[keep], pa.timestamp("us", "UTC")),
                "entity": pa.DictionaryArray.from_arrays(places, names).cast(pa.string()),
                **{name: _to_arrow(values[:, order].ravel()[keep]) for name, values in columns.items()},
            }
        )
        self._waiting.append(table)
        self.rows += table.num_rows
        self._rows_waiting += table.num_rows
        if self._rows_waiting >= GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        """Completes the file; no file without rows. May be called twice."""
        self._flush()
        if self._writer is not None:
            self._writer.close()
            self._part.replace(self.path)
            self._writer = None

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._part, table.schema, compression="zstd")
        self._writer.write_table(table, row_group_size=GROUP_ROWS)
        self._waiting, self._rows_waiting = [], 0


class RecordingWriter:
    """Writes a recording into a folder, created if missing; existing files are replaced at the end."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{directory}: cannot be written: {error.strerror}; expected a folder") from error
        self._part = self.directory / "events.jsonl.part"
        self._events: IO[str] | None = None
        self._telemetry: dict[str, TelemetryWriter] = {}

    def telemetry(
        self,
        device_class: str,
        times: NDArray[np.int64],
        entities: Sequence[str],
        columns: Mapping[str, NDArray[Any]],
        present: NDArray[np.bool_],
    ) -> None:
        """Appends rows of one class; see `TelemetryWriter.append`."""
        if device_class not in self._telemetry:
            self._telemetry[device_class] = TelemetryWriter(self.directory, device_class)
        self._telemetry[device_class].append(times, entities, columns, present)

    def events(self, events: Sequence[Event]) -> None:
        """Appends events, later than all before."""
        self._open_events().writelines(format_json_line(event_to_json(event)) for event in events)

    def _open_events(self) -> IO[str]:
        """The file of events, opened at first use, so that a refused recording leaves no file."""
        try:
            self._events = self._events or self._part.open("w", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{self._part}: cannot be written: {error.strerror}; expected a folder") from error
        return self._events

    def close(
        self,
        parents: Mapping[str, Sequence[str]],
        attributes: Mapping[str, Mapping[str, object]],
        truth: Sequence[Mapping[str, Any]],
        meta: Mapping[str, Any],
    ) -> None:
        """Completes all files; `meta` gets the rows of each telemetry file."""
        self._open_events().close()
        self._part.replace(self.directory / "events.jsonl")
        for writer in self._telemetry.values():
            writer.close()
        write_topology(self.directory / "topology.toml", parents, attributes)
        write_jsonl(self.directory / "truth.jsonl", truth)
        rows = {writer.path.stem: writer.rows for writer in self._telemetry.values()}
        (self.directory / "meta.json").write_text(json.dumps({**meta, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes one JSON object per line; non-finite numbers become null."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(format_json_line(to_json(dict(row))) for row in rows)


def _to_arrow(values: NDArray[Any]) -> Any:
    """Wire values as a signed Arrow column; the highest unsigned value and NaN become null."""
    import pyarrow as pa

    if values.dtype.kind == "u":
        missing = values == np.iinfo(values.dtype).max
        return pa.array(values.astype(np.int64), mask=missing if missing.any() else None)
    missing = np.isnan(values)
    return pa.array(values, mask=missing if missing.any() else None)
