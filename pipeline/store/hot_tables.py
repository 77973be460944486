"""Hot tables: which table of a class stores which rows, and the insertion of rows.

A row group stores every column of its table, also empty ones: in a table as wide as the catalogue a block of 7 signals
costs ten times as much as in a table with its own columns (docs/decisions.md). So each class has narrow tables
`hot_CLASS_N`, one per set of signals that senders report together, usually one per interval. A set that fits none, when
the class has MAX_TABLES, goes to `hot_CLASS`, which has all signals of the class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import duckdb
import pyarrow as pa

from pipeline.model.errors import WireError
from pipeline.model.records import Rows
from pipeline.model.signals import CLASSES, Signal, column_of
from pipeline.store import schema
from pipeline.store.append import NEVER, Source, to_nullable, to_timestamps

MAX_TABLES = 16
"""Narrow tables per class. Chosen: three intervals of five products; a query of the class reads all of them."""
_SHARE, _SPARE = 1.5, 8
"""A table may have so many times the signals of each set in it, plus so many. Chosen: few signals share a table."""
_PLACED = 4096  # cached sets of signals; chosen: as many as shapes of messages
_MAX_SOURCES = 256  # registered sources, each without rows between commits; chosen: ten classes of 16 tables
_TYPE_OF_SQL = {sql: code for code, sql in schema.SQL_TYPES.items()}


class HotTables:
    """Names, columns and types of all hot tables, in memory. For one thread; the caller has the lock of the store.

    What a transaction creates is kept with `commit`; `begin` loads everything again after a failed one.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self.load(connection)

    def load(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Reads the columns of all hot tables."""
        self._types: dict[str, dict[str, str]] = {device_class: {} for device_class in CLASSES}
        self._narrow: defaultdict[str, dict[str, frozenset[str]]] = defaultdict(dict)
        self._placed: dict[tuple[object, ...], str] = {}
        self._changed = False
        self._sources: dict[tuple[str, pa.Schema], tuple[str, Source]] = {}
        found: defaultdict[str, dict[str, str]] = defaultdict(dict)
        rows = connection.execute(
            """SELECT table_name, column_name, data_type FROM duckdb_columns()
               WHERE starts_with(table_name, 'hot_') ORDER BY table_name, column_index"""
        ).fetchall()
        for table, column, kind in rows:
            found[table] |= {} if column in schema.RESERVED else {column: _TYPE_OF_SQL[kind]}
        for table, columns in found.items():
            device_class = schema.class_of_table(table)
            if table == f"hot_{device_class}":
                self._types[device_class] = columns
            else:
                self._narrow[device_class][table] = frozenset(columns)

    def begin(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Starts a transaction; drops what a failed one created."""
        if self._changed:
            self.load(connection)

    def commit(self) -> None:
        """Keeps what the durable transaction created."""
        self._changed = False

    def types_of(self, device_class: str) -> Mapping[str, str]:
        """Wire type of each column of a class."""
        return self._types.get(device_class, {})

    def append(self, connection: duckdb.DuckDBPyConnection, blocks: Iterable[Rows], closed: int = NEVER) -> int:
        """Stores rows, with one statement per table; returns their number. Raises WireError if a type differs.

        closed: frames before it are closed; earlier rows are marked as late.
        """
        self._changed = True
        parts: defaultdict[str, list[pa.Table]] = defaultdict(list)
        for rows in blocks:
            parts[self._find_table(connection, rows)].append(_to_arrow(rows, closed))
        for table, found in parts.items():
            self._insert(connection, table, found[0] if len(found) == 1 else _join(found))
        return sum(part.num_rows for found in parts.values() for part in found)

    def _insert(self, connection: duckdb.DuckDBPyConnection, table: str, rows: pa.Table) -> None:
        """Inserts rows through a source that stays registered: to register one costs a third of a small insert."""
        key = table, rows.schema
        if key not in self._sources:
            if len(self._sources) >= _MAX_SOURCES:
                _, (name, _) = self._sources.popitem()
                connection.unregister(name)
            name, source = f"incoming_{len(self._sources)}", Source(rows)
            connection.register(name, source)
            self._sources[key] = name, source
        name, source = self._sources[key]
        source.table = rows
        connection.execute(f'INSERT INTO "{table}" BY NAME SELECT * FROM {name}')
        source.clear()

    def _find_table(self, connection: duckdb.DuckDBPyConnection, rows: Rows) -> str:
        key = (rows.device_class, *((name, values.dtype) for name, values in rows.columns.items()))
        if key not in self._placed:
            codes = {name: f"{v.dtype.kind}{v.dtype.itemsize}" for name, v in rows.columns.items()}
            self._add_columns(connection, rows.device_class, codes)
            columns = {column_of(name, rows.device_class): None for name in codes}
            if len(self._placed) > _PLACED:
                self._placed.clear()
            self._placed[key] = self._place_columns(connection, rows.device_class, tuple(columns))
        return self._placed[key]

    def _add_columns(self, connection: duckdb.DuckDBPyConnection, device_class: str, codes: Mapping[str, str]) -> None:
        """Adds columns for new signals to the class. codes: signal -> wire type. Raises WireError if a type differs."""
        known = self._types[device_class]
        new = []
        for name, code in codes.items():
            column = column_of(name, device_class)
            if known.get(column, code) != code:
                raise WireError(f"{name}: values of type {code}, expected {known[column]}: senders disagree")
            if column not in known:
                new.append(Signal(name, "1", "gauge", device_class, code, "not in the catalogue"))
        if new:
            schema.ensure_class(connection, device_class, new)
            known |= {signal.column: signal.type for signal in new}

    def _place_columns(self, connection: duckdb.DuckDBPyConnection, device_class: str, columns: Sequence[str]) -> str:
        """The table for a set of signals: the one with the fewest other columns, else one that is made to fit."""
        tables, wanted = self._narrow[device_class], frozenset(columns)
        limit = _SHARE * len(wanted) + _SPARE
        fitting = sorted((len(known), table) for table, known in tables.items() if wanted <= known)
        if fitting and (fitting[0][0] <= limit or len(tables) >= MAX_TABLES):
            return fitting[0][1]
        near = sorted(
            (size, table)
            for table, known in tables.items()
            if (size := len(known | wanted)) <= min(limit, _SHARE * len(known) + _SPARE)
        )
        if not wanted or (not near and len(tables) >= MAX_TABLES):
            return f"hot_{device_class}"
        table = near[0][1] if near else _new_name(device_class, tables)
        types = {column: schema.SQL_TYPES[self._types[device_class][column]] for column in columns}
        schema.create_hot_table(connection, table, types)
        tables[table] = tables.get(table, frozenset()) | wanted
        return table


def _new_name(device_class: str, tables: Iterable[str]) -> str:
    return next(name for n in range(1, MAX_TABLES + 1) if (name := f"hot_{device_class}_{n}") not in tables)


def _to_arrow(rows: Rows, closed: int) -> pa.Table:
    columns: dict[str, pa.Array] = {"time": to_timestamps(rows.time), "device": pa.array(rows.device)}
    columns |= {column_of(name, rows.device_class): to_nullable(values) for name, values in rows.columns.items()}
    late = rows.time < closed
    return pa.table(columns | ({"late": pa.array(late)} if late.any() else {}))


def _join(tables: Sequence[pa.Table]) -> pa.Table:
    """The rows of all tables, in contiguous columns: DuckDB reads each piece of a column as a separate vector."""
    return pa.concat_tables(tables, promote_options="default").combine_chunks()
