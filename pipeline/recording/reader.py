"""Recorded telemetry, Parquet or CSV, as Rows in order of time. Files are streamed: memory holds one batch per file.

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
"""Rows of one file held at once; chosen: a few MB per file."""
FOREVER = 1 << 62
_TIME_WANTED = "wanted ISO 8601 in UTC like 2026-01-01T00:00:00Z"


class Recording:
    """Several files of several device classes. Raises UsageError naming file, row and column at opening or reading.

    Devices are numbered per class in order of first appearance; `names` grows while `read` goes on.
    """

    def __init__(self, paths: Iterable[str | Path], signals: Mapping[str, Signal] = CATALOGUE) -> None:
        self._sources = [_open(Path(path), signals) for path in paths]
        if not self._sources:
            raise UsageError("replay: no telemetry; wanted at least one Parquet or CSV file")
        self._names: dict[str, dict[str, int]] = {source.device_class: {} for source in self._sources}

    @property
    def signals(self) -> dict[str, tuple[str, ...]]:
        """Signals measured in the files, by device class."""
        found: dict[str, dict[str, None]] = {}
        for source in self._sources:
            found.setdefault(source.device_class, {}).update(dict.fromkeys(s.name for s in source.signals))
        return {device_class: tuple(names) for device_class, names in found.items()}

    def names(self, device_class: str) -> Sequence[str]:
        """Entities of a class by device number, so far."""
        return tuple(self._names.get(device_class, ()))

    def read(self, batch_rows: int = BATCH_ROWS) -> Iterator[tuple[list[Rows], int]]:
        """(rows, watermark): every row earlier than `watermark` that was not given yet, per file in order of time.

        The last watermark lies behind everything.
        """
        streams = [self._batches(source, batch_rows) for source in self._sources]
        held = {number: rows for number, stream in enumerate(streams) if (rows := next(stream, None))}
        unread = set(held)
        while held:
            if unread:
                slowest = min(unread, key=lambda number: int(held[number].time[-1]))
                if fresh := next(streams[slowest], None):
                    held[slowest] = _joined([held[slowest], fresh])
                else:
                    unread.remove(slowest)
            mark = min((int(held[number].time[-1]) for number in unread), default=FOREVER)
            ready = []
            for number, rows in list(held.items()):
                count = int(np.searchsorted(rows.time, mark))
                if count:
                    ready.append(_part(rows, 0, count))
                if count < len(rows.time):
                    held[number] = _part(rows, count, len(rows.time))
                else:
                    del held[number]
            if ready:
                yield ready, mark

    def load(self) -> dict[str, Rows]:
        """Everything at once, per class sorted by time; for recordings that fit into memory."""
        parts: dict[str, list[Rows]] = {}
        for rows, _ in self.read():
            for one in rows:
                parts.setdefault(one.device_class, []).append(one)
        return {device_class: _joined(found) for device_class, found in parts.items()}

    def _batches(self, source: _Source, batch_rows: int) -> Iterator[Rows]:
        """Batches of one file as Rows with the recording's device numbers."""
        numbers = self._names[source.device_class]
        for table in source.tables(batch_rows):
            codes = table.column("entity").combine_chunks().dictionary_encode()
            places = [numbers.setdefault(name, len(numbers)) for name in codes.dictionary.to_pylist()]
            device = np.asarray(places, np.int32)[codes.indices.to_numpy(zero_copy_only=False)]
            columns = {s.name: _floats(table.column(s.name), s) for s in source.signals}
            yield Rows(source.device_class, _micros(table), device, columns)


@dataclass(frozen=True, slots=True)
class _Source:
    """One opened file: its signals, and the whole table where it could not be streamed."""

    path: Path
    device_class: str
    signals: tuple[Signal, ...]
    file: Any
    whole: Any

    def tables(self, batch_rows: int) -> Iterator[Any]:
        """Arrow tables in order of time."""
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
                    yield _checked(pa.Table.from_batches([batch]), self.path, row)
                row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise UsageError(f"{self.path}: cannot be read on after row {row}: {_first_line(error)}") from error


def _open(path: Path, signals: Mapping[str, Signal]) -> _Source:
    """A file whose columns are known and whose times are sound."""
    if not path.is_file():
        raise UsageError(f"{path}: no such file; wanted telemetry as Parquet or CSV")
    return _open_csv(path, signals) if path.suffix.lower() == ".csv" else _open_parquet(path, signals)


def _open_parquet(path: Path, signals: Mapping[str, Signal]) -> _Source:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        schema = file.schema_arrow
        device_class, found = _columns(path, schema.names, signals)
        for field in schema:
            _check_type(path, field, pa.types)
        times = _micros(_checked(file.read(["time", "entity"]), path, 0))
        whole = None if bool((np.diff(times) >= 0).all()) else _sorted(file.read(), path)
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"{path}: is no readable Parquet file: {_first_line(error)}; was it cut off?") from error
    return _Source(path, device_class, found, file, whole)


def _open_csv(path: Path, signals: Mapping[str, Signal]) -> _Source:
    import pyarrow as pa
    import pyarrow.csv as pacsv

    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header = next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as CSV: {error}") from error
    device_class, found = _columns(path, header, signals)
    text = pacsv.ConvertOptions(
        column_types=dict.fromkeys(header, pa.string()), null_values=[""], strings_can_be_null=True
    )
    torn = _torn(path)
    lines = pacsv.ParseOptions(invalid_row_handler=lambda row: "skip" if row.text == torn else "error")
    try:
        table = pacsv.read_csv(path, convert_options=text, parse_options=lines if torn else None)
    except pa.ArrowException as error:
        raise UsageError(f"{path}: is no readable CSV file: {_first_line(error)}") from error
    utc, real = pa.timestamp("us", "UTC"), pa.float64()
    numbers = {s.name: _parsed(table.column(s.name), path, s.name, real, float, "wanted a number") for s in found}
    times = _parsed(table.column("time"), path, "time", utc, from_iso, _TIME_WANTED)
    table = pa.table({"time": times, "entity": table.column("entity"), **numbers})
    return _Source(path, device_class, found, None, _sorted(table, path))


def _torn(path: Path) -> str:
    """What stands behind the last end of a line: whole, or torn off while it was written."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 20)))  # 1 MiB: chosen, far above the longest line
        return file.read().rpartition(b"\n")[2].decode("utf-8", "replace")


def _columns(path: Path, names: Sequence[str], signals: Mapping[str, Signal]) -> tuple[str, tuple[Signal, ...]]:
    """(device class, signals) of a file's columns."""
    for wanted in ("time", "entity"):
        if wanted not in names:
            raise UsageError(f"{path}: column {wanted!r} is missing; found {', '.join(names) or 'none'}")
    if len(set(names)) != len(names):
        raise UsageError(f"{path}: column {next(n for n in names if names.count(n) > 1)!r} stands there twice")
    found = []
    for name in (n for n in names if n not in ("time", "entity")):
        if name not in signals:
            close = difflib.get_close_matches(name, signals, 1)
            mend = f"did you mean '{close[0]}'?" if close else "declare it in signals.toml (--signals)"
            raise UsageError(f"{path}: column {name!r}: no such signal in the catalogue or declared; {mend}")
        found.append(signals[name])
    if not found:
        raise UsageError(f"{path}: no column but time and entity; wanted at least one signal")
    if other := next((s for s in found if s.device_class != found[0].device_class), None):
        raise UsageError(
            f"{path}: column {other.name!r} is of class {other.device_class}, {found[0].name!r} of class "
            f"{found[0].device_class}; wanted one class per file"
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
        raise UsageError(f"{path}: column {field.name!r} holds {field.type}; wanted {wanted}")


def _checked(table: Any, path: Path, first: int) -> Any:
    """The table, if every row has a time and an entity `kind:name`; `first` is the number of its first row."""
    import pyarrow.compute as pc

    for name in ("time", "entity"):
        if table.column(name).null_count:
            row = first + int(pc.index(pc.is_null(table.column(name)), True).as_py())
            raise UsageError(f"{path}: row {row + 1}: {name} is missing; wanted one in every row")
    entities = table.column("entity").cast("string")
    if (bad := int(pc.index(pc.match_substring(entities, ":"), False).as_py())) >= 0:
        raise UsageError(f"{path}: row {first + bad + 1}: entity = {entities[bad].as_py()!r}; wanted kind:name")
    return table.set_column(table.column_names.index("entity"), "entity", entities)


def _sorted(table: Any, path: Path) -> Any:
    """The whole table, checked and in order of time; rows of one time keep their order."""
    checked = _checked(table, path, 0)
    return checked.take(np.argsort(_micros(checked), kind="stable"))


def _parsed(column: Any, path: Path, name: str, kind: Any, parse: Callable[[str], Any], wanted: str) -> Any:
    """Texts of a CSV column as values of an Arrow type; the error names the line."""
    import pyarrow as pa

    try:
        return column.cast(kind)
    except pa.ArrowInvalid:
        out = []  # something is odd: go through the lines one by one, to say where or to read what Arrow does not
    for row, text in enumerate(column.to_pylist()):
        try:
            out.append(None if text is None else parse(text))
        except ValueError as error:
            raise UsageError(f"{path}: line {row + 2}: {name} = {text!r}; {wanted}") from error
    return pa.array(out, kind)


def _micros(table: Any) -> NDArray[np.int64]:
    """UTC microseconds of the time column; a time without a zone is taken as UTC."""
    import pyarrow as pa

    times = table.column("time").cast(pa.timestamp("us", table.schema.field("time").type.tz), safe=False)
    return np.asarray(times.cast(pa.int64()).to_numpy(), np.int64)


def _floats(column: Any, signal: Signal) -> NDArray[np.float64]:
    """Values as float64; what is missing, infinite or outside the signal's valid range is NaN."""
    import pyarrow as pa

    values = np.array(column.cast(pa.float64(), safe=False).to_numpy(), np.float64)
    low, high = signal.valid
    with np.errstate(invalid="ignore"):
        values[~((values >= low) & (values <= high) & np.isfinite(values))] = np.nan
    return values


def _part(rows: Rows, begin: int, end: int) -> Rows:
    columns = {name: values[begin:end] for name, values in rows.columns.items()}
    return Rows(rows.device_class, rows.time[begin:end], rows.device[begin:end], columns)


def _joined(parts: Sequence[Rows]) -> Rows:
    """Rows of one class in order of time; a signal that a file has not is NaN in its rows."""
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
