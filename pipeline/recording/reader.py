"""Reads recorded telemetry, Parquet or CSV, as Rows in order of time. Memory: one batch per file.

A file that is not sorted by time is read whole and sorted. pyarrow is loaded when a recording is opened.
"""

from __future__ import annotations

import csv
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.model.errors import UsageError
from pipeline.model.records import Rows, from_iso
from pipeline.model.signals import CATALOGUE, Signal
from pipeline.recording.text_files import read_events, read_signals, read_topology

__all__ = ["Recording", "read_events", "read_signals", "read_topology"]

BATCH_ROWS = 1 << 16
"""Rows of one file in memory; chosen: a few MB per file."""
FOREVER = 1 << 62
_TIME_EXPECTED = "expected ISO 8601 in UTC like 2026-01-01T00:00:00Z"


class Recording:
    """Files of one or more device classes. Raises UsageError naming file, row and column at opening or reading.

    Devices are numbered per class in order of first appearance; `names` grows during `read`.
    """

    def __init__(self, paths: Iterable[str | Path], signals: Mapping[str, Signal] = CATALOGUE) -> None:
        self._sources = [_open_file(Path(path), signals) for path in paths]
        if not self._sources:
            raise UsageError("replay: no telemetry; expected at least one Parquet or CSV file")
        self._names: dict[str, dict[str, int]] = {source.device_class: {} for source in self._sources}

    @property
    def signals(self) -> dict[str, tuple[str, ...]]:
        """Signals in the files, by device class."""
        found: dict[str, dict[str, None]] = {}
        for source in self._sources:
            found.setdefault(source.device_class, {}).update(dict.fromkeys(s.name for s in source.signals))
        return {device_class: tuple(names) for device_class, names in found.items()}

    def names(self, device_class: str) -> Sequence[str]:
        """Entities of a class by device number, so far."""
        return tuple(self._names.get(device_class, ()))

    def read(self, batch_rows: int = BATCH_ROWS) -> Iterator[tuple[list[Rows], int]]:
        """Yields (rows, watermark): all further rows before `watermark`, per file in order of time.

        The last watermark is after everything.
        """
        streams = [self._read_batches(source, batch_rows) for source in self._sources]
        held = {number: rows for number, stream in enumerate(streams) if (rows := next(stream, None))}
        unread = set(held)
        while held:
            if unread:
                slowest = min(unread, key=lambda number: int(held[number].time[-1]))
                if fresh := next(streams[slowest], None):
                    held[slowest] = _join_rows([held[slowest], fresh])
                else:
                    unread.remove(slowest)
            mark = min((int(held[number].time[-1]) for number in unread), default=FOREVER)
            ready = []
            for number, rows in list(held.items()):
                count = int(np.searchsorted(rows.time, mark))
                if count:
                    ready.append(_slice_rows(rows, 0, count))
                if count < len(rows.time):
                    held[number] = _slice_rows(rows, count, len(rows.time))
                else:
                    del held[number]
            if ready:
                yield ready, mark

    def load(self) -> dict[str, Rows]:
        """All rows, per class in order of time; for recordings that fit into memory."""
        parts: dict[str, list[Rows]] = {}
        for rows, _ in self.read():
            for one in rows:
                parts.setdefault(one.device_class, []).append(one)
        return {device_class: _join_rows(found) for device_class, found in parts.items()}

    def _read_batches(self, source: _Source, batch_rows: int) -> Iterator[Rows]:
        """Batches of one file as Rows with the recording's device numbers."""
        numbers = self._names[source.device_class]
        for table in source.read_tables(batch_rows):
            codes = table.column("entity").combine_chunks().dictionary_encode()
            places = [numbers.setdefault(name, len(numbers)) for name in codes.dictionary.to_pylist()]
            device = np.asarray(places, np.int32)[codes.indices.to_numpy(zero_copy_only=False)]
            columns = {s.name: _read_values(table.column(s.name), s) for s in source.signals}
            yield Rows(source.device_class, _read_times(table), device, columns)


@dataclass(frozen=True, slots=True)
class _Source:
    """An open file: its signals, and the whole table if it cannot be streamed."""

    path: Path
    device_class: str
    signals: tuple[Signal, ...]
    file: Any
    whole: Any

    def read_tables(self, batch_rows: int) -> Iterator[Any]:
        """Yields Arrow tables in order of time."""
        import pyarrow as pa

        if self.whole is not None:
            for start in range(0, self.whole.num_rows, batch_rows):
                yield self.whole.slice(start, batch_rows)
            return
        row = 0
        try:
            for batch in self.file.iter_batches(
                batch_rows, columns=["time", "entity", *(s.name for s in self.signals)]
            ):
                if batch.num_rows:
                    yield _check_rows(pa.Table.from_batches([batch]), self.path, row)
                row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise UsageError(f"{self.path}: cannot be read after row {row}: {_first_line(error)}") from error


def _open_file(path: Path, signals: Mapping[str, Signal]) -> _Source:
    """Opens a file and checks its columns and times."""
    if not path.is_file():
        raise UsageError(f"{path}: no such file; expected telemetry as Parquet or CSV")
    return _open_csv(path, signals) if path.suffix.lower() == ".csv" else _open_parquet(path, signals)


def _open_parquet(path: Path, signals: Mapping[str, Signal]) -> _Source:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        schema = file.schema_arrow
        device_class, found = _find_signals(path, schema.names, signals)
        for field in schema:
            _check_type(path, field, pa.types)
        times = _read_times(_check_rows(file.read(["time", "entity"]), path, 0))
        whole = None if bool((np.diff(times) >= 0).all()) else _sort_rows(file.read(), path)
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"{path}: is not a readable Parquet file: {_first_line(error)}; was it truncated?") from error
    return _Source(path, device_class, found, file, whole)


def _open_csv(path: Path, signals: Mapping[str, Signal]) -> _Source:
    import pyarrow as pa
    import pyarrow.csv as pacsv

    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header = next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as CSV: {error}") from error
    device_class, found = _find_signals(path, header, signals)
    text = pacsv.ConvertOptions(
        column_types=dict.fromkeys(header, pa.string()), null_values=[""], strings_can_be_null=True
    )
    torn = _read_torn_line(path)
    lines = pacsv.ParseOptions(invalid_row_handler=lambda row: "skip" if row.text == torn else "error")
    try:
        table = pacsv.read_csv(path, convert_options=text, parse_options=lines if torn else None)
    except pa.ArrowException as error:
        raise UsageError(f"{path}: is not a readable CSV file: {_first_line(error)}") from error
    utc, real = pa.timestamp("us", "UTC"), pa.float64()
    numbers = {
        s.name: _parse_column(table.column(s.name), path, s.name, real, float, "expected a number") for s in found
    }
    times = _parse_column(table.column("time"), path, "time", utc, from_iso, _TIME_EXPECTED)
    table = pa.table({"time": times, "entity": table.column("entity"), **numbers})
    return _Source(path, device_class, found, None, _sort_rows(table, path))


def _read_torn_line(path: Path) -> str:
    """The text after the last end of line: a complete line, or one cut off during writing."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 20)))  # 1 MiB: chosen, far above the longest line
        return file.read().rpartition(b"\n")[2].decode("utf-8", "replace")


def _find_signals(path: Path, names: Sequence[str], signals: Mapping[str, Signal]) -> tuple[str, tuple[Signal, ...]]:
    """(device class, signals) from the columns of a file."""
    for wanted in ("time", "entity"):
        if wanted not in names:
            raise UsageError(f"{path}: column {wanted!r} is missing; found {', '.join(names) or 'none'}")
    if len(set(names)) != len(names):
        raise UsageError(f"{path}: column {next(n for n in names if names.count(n) > 1)!r} is there twice")
    found = []
    for name in (n for n in names if n not in ("time", "entity")):
        if name not in signals:
            close = difflib.get_close_matches(name, signals, 1)
            hint = f"did you mean '{close[0]}'?" if close else "declare it in signals.toml (--signals)"
            raise UsageError(f"{path}: column {name!r}: no such signal in the catalogue or declared; {hint}")
        found.append(signals[name])
    if not found:
        raise UsageError(f"{path}: no columns besides time and entity; expected at least one signal")
    if other := next((s for s in found if s.device_class != found[0].device_class), None):
        raise UsageError(
            f"{path}: column {other.name!r} is of class {other.device_class}, {found[0].name!r} of class "
            f"{found[0].device_class}; expected one class per file"
        )
    return found[0].device_class, tuple(found)


def _check_type(path: Path, field: Any, types: Any) -> None:
    kind = field.type.value_type if types.is_dictionary(field.type) else field.type
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    if field.name == "entity":
        sound, wanted = text, "text"
    elif field.name == "time":
        sound, wanted = types.is_timestamp(kind), "timestamp with time zone UTC"
    else:
        sound = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_null(kind)
        wanted = "numbers"
    if not sound:
        raise UsageError(f"{path}: column {field.name!r} holds {field.type}; expected {wanted}")


def _check_rows(table: Any, path: Path, first: int) -> Any:
    """The table, if every row has a time and an entity `kind:name`; `first` is the number of its first row."""
    import pyarrow.compute as pc

    for name in ("time", "entity"):
        if table.column(name).null_count:
            row = first + int(pc.index(pc.is_null(table.column(name)), True).as_py())
            raise UsageError(f"{path}: row {row + 1}: {name} is missing; expected one in every row")
    entities = table.column("entity").cast("string")
    if (bad := int(pc.index(pc.match_substring(entities, ":"), False).as_py())) >= 0:
        raise UsageError(f"{path}: row {first + bad + 1}: entity = {entities[bad].as_py()!r}; expected kind:name")
    return table.set_column(table.column_names.index("entity"), "entity", entities)


def _sort_rows(table: Any, path: Path) -> Any:
    """The table, checked and sorted by time; rows of one time keep their order."""
    checked = _check_rows(table, path, 0)
    return checked.take(np.argsort(_read_times(checked), kind="stable"))


def _parse_column(column: Any, path: Path, name: str, kind: Any, parse: Callable[[str], Any], wanted: str) -> Any:
    """Converts a CSV column of text to an Arrow type; the error names the line."""
    import pyarrow as pa

    try:
        return column.cast(kind)
    except pa.ArrowInvalid:
        out = []  # go through the lines one by one, to name the line or to read what Arrow cannot
    for row, text in enumerate(column.to_pylist()):
        try:
            out.append(None if text is None else parse(text))
        except ValueError as error:
            raise UsageError(f"{path}: line {row + 2}: {name} = {text!r}; {wanted}") from error
    return pa.array(out, kind)


def _read_times(table: Any) -> NDArray[np.int64]:
    """UTC microseconds of the time column; UTC if it has no zone."""
    import pyarrow as pa

    times = table.column("time").cast(pa.timestamp("us", table.schema.field("time").type.tz), safe=False)
    return np.asarray(times.cast(pa.int64()).to_numpy(), np.int64)


def _read_values(column: Any, signal: Signal) -> NDArray[np.float64]:
    """Values as float64; missing, infinite and invalid values are NaN."""
    import pyarrow as pa

    values = np.array(column.cast(pa.float64(), safe=False).to_numpy(), np.float64)
    low, high = signal.valid
    with np.errstate(invalid="ignore"):
        values[~((values >= low) & (values <= high) & np.isfinite(values))] = np.nan
    return values


def _slice_rows(rows: Rows, begin: int, end: int) -> Rows:
    columns = {name: values[begin:end] for name, values in rows.columns.items()}
    return Rows(rows.device_class, rows.time[begin:end], rows.device[begin:end], columns)


def _join_rows(parts: Sequence[Rows]) -> Rows:
    """Rows of one class in order of time; a signal that a file lacks is NaN in its rows."""
    time = np.concatenate([p.time for p in parts])
    order = np.argsort(time, kind="stable")
    names = dict.fromkeys(name for p in parts for name in p.columns)
    columns = {
        name: np.concatenate([p.columns.get(name, np.full(len(p.time), np.nan)) for p in parts])[order]
        for name in names
    }
    return Rows(parts[0].device_class, time[order], np.concatenate([p.device for p in parts])[order], columns)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
