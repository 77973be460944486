"""The newest row of each device: kept in memory, and written to `latest_CLASS` at most every WRITE_EVERY.

Rows that a commit stored and these tables do not have yet are found again after a kill: `meta` has the oldest event
time of such rows (`latest_since`), written with the first of these commits. A start reads the hot tables from there on.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.model.records import SECOND, Rows
from pipeline.model.signals import CLASSES, column_of
from pipeline.store import schema
from pipeline.store.append import insert_columns, provide_columns, to_nullable, to_timestamps
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.store.retention import clamp_latest

WRITE_EVERY = 60 * SECOND
"""Minimum time between two writes (us); chosen: half of what a start evaluates again anyway. A write costs 0.1 s of CPU
for 8 nodes. Readers of `latest_CLASS` get what a running pipeline has in memory; `last_seen` of `entities` is that
old."""
_SINCE = "latest_since"
_AT = "_at"  # name of the time in microseconds; begins as no signal does
_UNKNOWN = np.iinfo(np.int64).min
_MAX_SETS = 64  # sets of signals whose times are kept per class; chosen: four times the hot tables


def _no_times() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


def _no_devices() -> NDArray[np.bool_]:
    return np.zeros(0, bool)


@dataclass(frozen=True, slots=True)
class CurrentValues:
    """The newest value of each signal of a class, by device id. For any thread.

    values, times: column -> value in wire type, missing as on the wire, and its event time (us).  time: of the newest
    row.  slot: position of the device among those of its class, -1 without one.
    """

    values: dict[str, NDArray[Any]]
    times: dict[str, NDArray[np.int64]]
    time: NDArray[np.int64]
    slot: NDArray[np.int32]

    def of_device(self, device: int | None, columns: Sequence[str]) -> tuple[Any, ...]:
        """The values of these columns of a device, then the time of its newest row; None where there is none."""
        if device is None or device >= len(self.slot) or self.slot[device] < 0:
            return (*(None for _ in columns), None)
        values = (to_nullable(self.values[c][[device]])[0].as_py() if c in self.values else None for c in columns)
        return (*values, int(self.time[device]))

    def as_table(self, types: pa.Schema) -> pa.Table:
        """The columns `device` (its id), `time` and those of `types`, as `latest_CLASS` has them."""
        at = np.flatnonzero(self.slot >= 0)
        columns = {"device": pa.array(at.astype(np.int32)), "time": to_timestamps(self.time[at])}
        for field_ in types:
            if field_.name not in columns:
                found = self.values.get(field_.name)
                columns[field_.name] = pa.nulls(len(at), field_.type) if found is None else to_nullable(found[at])
        return pa.table(columns)


@dataclass(slots=True)
class _Newest:
    """The newest values of one class, by device id. Columns without a value are absent.

    loaded: the time in the table at the start.  times: of the newest row, by set of signals: a row of a set with a long
    interval may be older than one of another set.  stored: the device has a row in the table.  dirty: that row is old,
    in the columns `changed`.
    """

    time: NDArray[np.int64] = field(default_factory=_no_times)
    loaded: NDArray[np.int64] = field(default_factory=_no_times)
    times: dict[tuple[str, ...], NDArray[np.int64]] = field(default_factory=dict)
    stored: NDArray[np.bool_] = field(default_factory=_no_devices)
    dirty: NDArray[np.bool_] = field(default_factory=_no_devices)
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)

    def grow(self, devices: int) -> None:
        """Makes room for ids below `devices`."""
        if devices <= len(self.time):
            return
        more = max(devices, 2 * len(self.time)) - len(self.time)
        unknown = np.full(more, _UNKNOWN)
        self.time, self.loaded = np.append(self.time, unknown), np.append(self.loaded, unknown)
        self.times = {key: np.append(times, unknown) for key, times in self.times.items()}
        self.stored, self.dirty = (np.append(mask, np.zeros(more, bool)) for mask in (self.stored, self.dirty))
        for name, values in self.columns.items():
            self.columns[name] = np.append(values, _missing(more, values.dtype))

    def record(self, rows: Rows) -> None:
        """Keeps the newest row of each device unless it has a newer one of these signals."""
        self.grow(int(rows.device.max()) + 1)
        key = tuple(rows.columns)
        if key not in self.times:
            if len(self.times) >= _MAX_SETS:
                self.times.clear()
            self.times[key] = self.loaded.copy()
        newest = self.times[key]
        last = find_newest_rows(rows.time, rows.device)
        last = last[rows.time[last] >= newest[rows.device[last]]]
        newest[rows.device[last]] = rows.time[last]
        self.put(rows, last)

    def put(self, rows: Rows, at: NDArray[np.intp], keep: bool = False) -> None:
        """Takes over the rows at these positions. keep: where a value is missing, the one before stays."""
        device = rows.device[at]
        self.time[device] = np.maximum(self.time[device], rows.time[at])
        self.dirty[device] = True
        for name, values in rows.columns.items():
            column, new = column_of(name, rows.device_class), values[at]
            known = self.columns.setdefault(column, _missing(0, values.dtype))
            if not len(known):
                known = self.columns[column] = _missing(len(self.time), values.dtype)
            known[device] = np.where(_is_missing(new), known[device], new) if keep else new
            self.changed.add(column)


def find_newest_rows(time: NDArray[np.int64], device: NDArray[np.int32]) -> NDArray[np.intp]:
    """Positions of the newest row of each device; of several at the same time, the last."""
    newest = np.full(int(device.max()) + 1, _UNKNOWN)
    np.maximum.at(newest, device, time)
    at = np.flatnonzero(time == newest[device])
    place = np.full(len(newest), -1)
    place[device[at]] = at
    return place[place >= 0]


def _is_missing(values: NDArray[Any]) -> NDArray[np.bool_]:
    found = values == np.iinfo(values.dtype).max if values.dtype.kind == "u" else np.isnan(values)
    return np.asarray(found)


def _missing(number: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.full(number, np.iinfo(dtype).max if dtype.kind == "u" else np.nan, dtype)


class LatestRows:
    """The newest row of each device. Memory: one value per device and column in use. For one thread, but `read`.

    `begin`, `cover` and `commit` belong to a transaction that stores rows; `write_due` is its own transaction.
    """

    def __init__(self, database: Database, now: int, latest: int) -> None:
        """Reads everything from the store; rows after `latest` (us) are of a wrong clock and count as seen now."""
        self._written: int | None = None
        self._lock = threading.Lock()
        self._load(database)
        if self._since is not None:
            with database.lock:
                self._find_uncovered(database.connection, latest)
            self._write(database, now)
            self._written = None
        if clamp_latest(database, now, latest):
            self._load(database)

    def _load(self, database: Database) -> None:
        self._classes = {device_class: _Newest() for device_class in CLASSES}
        with database.lock:
            connection = database.connection
            found = connection.execute("SELECT value FROM meta WHERE key = ?", [_SINCE]).fetchall()
            exists = ", ".join(f'EXISTS(FROM "latest_{device_class}")' for device_class in self._classes)
            [filled] = connection.execute(f"SELECT {exists}").fetchall()
            for device_class, known in itertools.compress(self._classes.items(), filled):
                for rows in _read_rows(connection, device_class, f'FROM "latest_{device_class}"'):
                    known.grow(int(rows.device.max()) + 1)
                    known.put(rows, np.arange(len(rows.time)))
                    known.stored[rows.device] = True
                    known.dirty[:] = False
                    known.changed.clear()
                known.loaded = known.time.copy()
        self._since = self._covering = int(found[0][0]) if found else None

    def _find_uncovered(self, connection: duckdb.DuckDBPyConnection, latest: int) -> None:
        """Adds what came since the last write: of each device and signal the newest value that is not missing."""
        for table in schema.list_hot_tables(connection):
            device_class = schema.class_of_table(table)
            names = [name for name in connection.sql(f'FROM "{table}"').columns if name not in schema.RESERVED]
            newest = "".join(f', arg_max("{name}", time) AS "{name}"' for name in names)
            source = (
                f'FROM (SELECT device, max(time) AS time{newest} FROM "{table}" WHERE time BETWEEN '
                f"make_timestamptz({self._since}) AND make_timestamptz({latest}) GROUP BY device)"
            )
            for rows in _read_rows(connection, device_class, source):
                known = self._classes[device_class]
                known.grow(int(rows.device.max()) + 1)
                known.put(rows, np.arange(len(rows.time)), keep=True)

    # --- in the transaction that stores rows ------------------------------------------------------------------------

    def cover(self, connection: duckdb.DuckDBPyConnection, blocks: Iterable[Rows]) -> None:
        """Writes from which event time on the tables may be too old, if `blocks` begin before that."""
        oldest = min((int(rows.time.min()) for rows in blocks), default=None)
        self._covering = self._since
        if oldest is not None and (self._since is None or oldest < self._since):
            self._covering = oldest
            connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", [_SINCE, str(oldest)])

    def commit(self, blocks: Iterable[Rows]) -> None:
        """Adds rows that are durable."""
        self._since = self._covering
        with self._lock:
            for rows in blocks:
                self._classes[rows.device_class].record(rows)

    # --- in any thread ----------------------------------------------------------------------------------------------

    def read(self, device_class: str, devices: Devices, columns: Sequence[str] | None = None) -> CurrentValues:
        """Returns copies of the newest values of these columns (None: all) with their times.

        The time of a value that no row since the start has is that of the newest row before it.
        """
        known = self._classes[device_class]
        with self._lock:
            wanted = known.columns if columns is None else [c for c in columns if c in known.columns]
            values = {column: known.columns[column].copy() for column in wanted}
            times = {column: known.loaded.copy() for column in wanted}
            for names, newest in known.times.items():
                for column in times.keys() & {column_of(name, device_class) for name in names}:
                    np.maximum(times[column], newest, out=times[column])
            time = known.time.copy()
        slot = devices.find_slots(device_class, np.arange(len(time), dtype=np.int32))
        slot = np.where((slot >= 0) & (slot < len(devices.names(device_class))) & (time > _UNKNOWN), slot, -1)
        return CurrentValues(values, times, time, slot.astype(np.int32))

    # --- writing ----------------------------------------------------------------------------------------------------

    def write_due(self, database: Database, now: int) -> None:
        """Writes the rows that changed, in a separate transaction, unless the last write was just before."""
        if self._written is None or abs(now - self._written) >= WRITE_EVERY:
            self.write_now(database, now)

    def write_now(self, database: Database, now: int) -> None:
        """Writes the rows that changed; afterwards a start needs no hot rows."""
        if self._since is not None:
            self._write(database, now)

    def _write(self, database: Database, now: int) -> None:
        with database.transaction() as connection:
            for device_class, known in self._classes.items():
                if known.dirty.any():
                    _write_class(connection, f"latest_{device_class}", known)
            connection.execute("DELETE FROM meta WHERE key = ?", [_SINCE])
        for known in self._classes.values():
            known.stored |= known.dirty
            known.dirty[:] = False
            known.changed.clear()
        self._since, self._written = None, now


def _write_class(connection: duckdb.DuckDBPyConnection, table: str, known: _Newest) -> None:
    """Updates the rows of known devices and inserts those of new ones: an upsert costs twice as much."""
    names = ["time", *sorted(known.changed)]
    if len(new := np.flatnonzero(known.dirty & ~known.stored)):
        insert_columns(connection, table, _to_arrow(known, new))
    if len(old := np.flatnonzero(known.dirty & known.stored)):
        with provide_columns(connection, f"newest_of_{table}", _to_arrow(known, old)):
            renew = ", ".join(f'"{name}" = n."{name}"' for name in names)
            connection.execute(
                f'UPDATE "{table}" SET {renew} FROM "newest_of_{table}" n WHERE n.device = "{table}".device'
            )


def _to_arrow(known: _Newest, device: NDArray[np.intp]) -> pa.Table:
    columns = {"time": to_timestamps(known.time[device]), "device": pa.array(device.astype(np.int32))}
    return pa.table(columns | {name: to_nullable(known.columns[name][device]) for name in sorted(known.changed)})


def _read_rows(connection: duckdb.DuckDBPyConnection, device_class: str, source: str) -> Iterator[Rows]:
    """Rows of a table in wire types, by column, without empty columns; none if there are no rows."""
    table = connection.sql(f'SELECT epoch_us(time) AS "{_AT}", * EXCLUDE (time) {source}').to_arrow_table()
    if table.num_rows:
        signals = [name for name in table.column_names if name not in (_AT, *schema.RESERVED)]
        used = (name for name in signals if table[name].null_count < table.num_rows)
        columns = {name: _to_array(table[name]) for name in used}
        yield Rows(device_class, table[_AT].to_numpy(), table["device"].to_numpy(), columns)


def _to_array(column: pa.ChunkedArray) -> NDArray[Any]:
    """Values in wire type; missing: NaN or the highest unsigned value."""
    dtype = np.dtype(column.type.to_pandas_dtype())
    filled = column.fill_null(np.iinfo(dtype).max if dtype.kind == "u" else np.nan)
    return np.asarray(filled.to_numpy(), dtype)
