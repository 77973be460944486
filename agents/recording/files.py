"""The files of a recording: NodeRecordingWriter writes them, the functions read them line by line.

A tick is one write(2) per file and on disk before the next tick, so that a killed process leaves whole lines; only a
full disk or a crashed machine can truncate the last line, which readers ignore. The writer keeps the inventory alone in
memory. Read errors are UsageErrors with file and line. Times are UTC microseconds.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.collector import Collector, Device
from agents.node.batches import build_blocks, merge_inventories
from agents.node.workers.read_server import ReadResult
from pipeline.model.errors import UsageError
from pipeline.model.records import Block, Event, from_iso, iso, to_json
from pipeline.model.signals import CATALOGUE, signals_of_class
from pipeline.model.topology import Topology
from pipeline.recording.text_files import event_to_json, format_json_line, format_topology, read_topology

VERSION = 1
MAX_ENTITIES = 10_000
"""Most entities of a recording. Chosen: ten times those of a node with 8 GPUs, 8 NICs and their parts."""


class NodeRecordingWriter:
    """Writes one folder, which must be empty or absent. Raises UsageError if it is not, or cannot be written."""

    def __init__(self, directory: str | Path, node: str, interval: float, collectors: Sequence[Collector]) -> None:
        self.directory = Path(directory)
        self._files: dict[str, _AppendOnlyFile] = {}
        self._states: dict[str, tuple[str, str]] = {}
        self._devices: dict[str, dict[str, Device]] = {c.name: {} for c in collectors}
        self._about: dict[str, Any] = {"version": VERSION, "node": node, "interval": interval}
        self._seen: dict[str, dict[str, Any]] = {
            c.name: {"signals": list(c.signals), "events": list(c.events), "deadline": c.deadline, "entities": []}
            for c in collectors
        }
        claimed = {name for c in collectors for name in c.signals}
        classes = dict.fromkeys(CATALOGUE[name].device_class for name in CATALOGUE if name in claimed)
        self._columns = {c: tuple(s.name for s in signals_of_class(c) if s.name in claimed) for c in classes}
        _make_empty(self.directory)
        self._write_description()
        for name in ("events.jsonl", "collectors.jsonl"):
            self._append(name, "")

    def write_tick(self, time: int, results: Iterable[tuple[Collector, ReadResult]]) -> None:
        """Writes the readings of one tick, which is later than all before."""
        results = list(results)
        self._update_inventory(results)
        changes = self._state_changes(time, results)
        self._append("collectors.jsonl", "".join(map(format_json_line, changes)))
        events = [(c.name, e) for c, d in results for reading in d.readings for e in reading.events]
        lines = [_event_line(time, event, collector=name) for name, event in events]
        state_events = (
            Event(time, f"node:{self._about['node']}", "collector", _state_event_data(change)) for change in changes
        )
        self._append("events.jsonl", "".join([*lines, *(_event_line(time, event) for event in state_events)]))
        rows: dict[str, dict[str, dict[str, str]]] = {}
        for block in build_blocks(reading for _, result in results for reading in result.readings):
            _merge_block(rows.setdefault(block.device_class, {}), block)
        for device_class, found in rows.items():
            self._append(f"telemetry-{device_class}.csv", self._format_rows(time, device_class, found))

    def close(self) -> None:
        """Closes the files; everything is written already."""
        for file in self._files.values():
            file.close()

    def _state_changes(self, time: int, results: Iterable[tuple[Collector, ReadResult]]) -> list[dict[str, Any]]:
        """Returns the lines of collectors.jsonl for this tick."""
        changes: list[dict[str, Any]] = []
        for collector, found in results:
            if self._states.get(collector.name) != (found.state, found.reason):
                self._states[collector.name] = (found.state, found.reason)
                row = {"time": iso(time), "collector": collector.name, "state": found.state, "reason": found.reason}
                changes.append({**row, "latency": round(found.took, 6)})
        return changes

    def _format_rows(self, time: int, device_class: str, found: Mapping[str, Mapping[str, str]]) -> str:
        names = self._columns[device_class]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if f"telemetry-{device_class}.csv" not in self._files:
            writer.writerow(("time", "entity", *names))
        for entity in sorted(found):
            writer.writerow((iso(time), entity, *(found[entity].get(name, "") for name in names)))
        return text.getvalue()

    def _append(self, name: str, text: str) -> None:
        if name not in self._files:
            self._files[name] = _AppendOnlyFile(self.directory / name)
        self._files[name].append_text(text)

    def _update_inventory(self, results: Iterable[tuple[Collector, ReadResult]]) -> None:
        """Writes topology.toml and recording.json again if an inventory changed."""
        changed = False
        for collector, found in results:
            mine = self._devices[collector.name]
            for entity, device in (found.inventory or {}).items():
                room = entity in mine or sum(map(len, self._devices.values())) < MAX_ENTITIES
                if room and mine.get(entity) != device:
                    mine[entity], changed = device, True
        if changed:
            self._write_description()

    def _write_description(self) -> None:
        devices = merge_inventories(self._devices.values())
        for name, mine in self._devices.items():
            self._seen[name]["entities"] = list(mine)
        parents = {entity: device.parents for entity, device in devices.items()}
        facts = {entity: device.attributes for entity, device in devices.items() if device.attributes}
        _replace(self.directory / "topology.toml", format_topology(parents, facts))
        about = json.dumps({**self._about, "collectors": self._seen}, indent=1, ensure_ascii=False)
        _replace(self.directory / "recording.json", about + "\n")


class _AppendOnlyFile:
    """A file that grows by whole texts: an incomplete write is undone."""

    def __init__(self, path: Path) -> None:
        self._path, self._size = path, 0
        try:
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _cannot_write(path, error) from error

    def append_text(self, text: str) -> None:
        """Appends a text; on an error the file keeps its former length."""
        data, end = memoryview(text.encode()), self._size
        try:
            while data:
                written = os.pwrite(self._handle, data, end)
                data, end = data[written:], end + written
        except OSError as error:
            os.ftruncate(self._handle, self._size)
            raise _cannot_write(self._path, error) from error
        self._size = end

    def close(self) -> None:
        """Closes the file."""
        os.close(self._handle)


def _merge_block(rows: dict[str, dict[str, str]], block: Block) -> None:
    """Adds a block of one tick: entity -> signal -> text, without missing values."""
    for entity in block.entities:
        rows.setdefault(entity, {})
    for name, column in block.columns.items():
        for entity, text in zip(block.entities, _format_values(column[0]), strict=True):
            if text:
                rows[entity][name] = text


def _format_values(values: NDArray[Any]) -> list[str]:
    """Returns each number as the shortest text that reads back exactly in its type; missing is empty."""
    if values.dtype.kind == "u":
        highest = np.iinfo(values.dtype).max
        return ["" if value == highest else str(value) for value in values.tolist()]
    short = values.dtype.itemsize < 8  # Python's own text of a float is that of 8 bytes
    texts = [str(value) for value in values] if short else [repr(value) for value in values.tolist()]
    return ["" if text == "nan" else text.removesuffix(".0") for text in texts]


def _event_line(time: int, event: Event, **more: str) -> str:
    row = event_to_json(event)
    return format_json_line({**row, "data": to_json(row["data"]), **more, "seen": iso(time)})


def _state_event_data(change: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the data of the event that an agent sends for a change of state."""
    return {key: change[key] for key in ("collector", "state", "reason")}


def _make_empty(directory: Path) -> None:
    """Makes the folder if it is absent. Raises UsageError if it holds anything."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise UsageError(
                f"{directory}: not empty; expected a new or empty folder, since recordings are never mixed"
            )
    except OSError as error:
        raise _cannot_write(directory, error) from error


def _replace(path: Path, text: str) -> None:
    """Writes a small file so that it is old or new, never partial."""
    fresh = path.with_name(path.name + ".part")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{path}: cannot be written: {error.strerror}; expected a folder with room, given by --output")


LAST_LINE_BYTES = 1 << 20
"""Bytes read at a file's end to find its last time. Chosen far above the longest line, an event's 64 KiB."""


@dataclass(frozen=True, slots=True)
class RecordedCollector:
    """One recorded collector: its signals and events, the longest duration of a read in s, and its entities."""

    signals: frozenset[str]
    events: tuple[str, ...]
    deadline: float
    entities: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecordingInfo:
    """recording.json and topology.toml: the recorded node, its interval in s, and its collectors by name."""

    node: str
    interval: float
    collectors: dict[str, RecordedCollector]
    topology: Topology


@dataclass(frozen=True, slots=True)
class TelemetryRow:
    """One line of a telemetry file, with values as text."""

    time: int
    entity: str
    values: dict[str, str]


@dataclass(frozen=True, slots=True)
class StateChange:
    """One line of collectors.jsonl."""

    time: int
    collector: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """One event that a collector sent with the tick at `time`."""

    time: int
    collector: str
    event: Event


def read_info(directory: Path) -> RecordingInfo:
    """Returns the description of a recording. Raises UsageError if the folder is none."""
    path = directory / "recording.json"
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        claims = {
            name: RecordedCollector(
                frozenset(c["signals"]), tuple(c["events"]), float(c["deadline"]), tuple(c["entities"])
            )
            for name, c in row["collectors"].items()
        }
        version, found = row["version"], RecordingInfo(row["node"], float(row["interval"]), claims, Topology())
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read: {error.strerror}; expected a folder of 'fleetpulse record'"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: not a description of a recording: {error!r}") from error
    if version != VERSION or not isinstance(found.node, str) or not found.interval > 0:
        raise UsageError(f"{path}: expected version = {VERSION}, node and interval above 0")
    return RecordingInfo(found.node, found.interval, claims, read_topology(directory / "topology.toml"))


def read_rows(path: Path) -> Iterator[TelemetryRow]:
    """Yields the rows of one telemetry-CLASS.csv. A column that is no longer in the catalogue is an error."""
    lines = _read_cells(path)
    _, header = next(lines, (1, ["time", "entity"]))
    if header[:2] != ["time", "entity"]:
        raise UsageError(f"{path}: line 1: columns {', '.join(header[:2])}; expected time, entity and signals")
    if unknown := [name for name in header[2:] if name not in CATALOGUE]:
        raise UsageError(f"{path}: line 1: column {unknown[0]!r}: no such signal in the catalogue")
    for number, cells in lines:
        try:
            values = {n: text for n, text in zip(header, cells, strict=True) if text}
            time, entity = from_iso(values.pop("time")), values.pop("entity")
            for text in values.values():
                float(text)
        except (ValueError, KeyError) as error:
            raise UsageError(f"{path}: line {number}: {error}; expected time, entity and numbers") from error
        yield TelemetryRow(time, entity, values)


def _read_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields number and cells of each line."""
    lines = csv.reader(_read_lines(path))
    try:
        yield from ((lines.line_num, cells) for cells in lines)
    except csv.Error as error:
        raise UsageError(f"{path}: line {lines.line_num}: {error}; expected comma-separated values") from error


def read_changes(path: Path) -> Iterator[StateChange]:
    """Yields the lines of collectors.jsonl."""
    for row, where in _read_objects(path):
        try:
            yield StateChange(from_iso(row["time"]), row["collector"], row["state"], row["reason"])
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{where}: {error!r}; expected time, collector, state and reason") from error


def read_events(path: Path) -> Iterator[RecordedEvent]:
    """Yields the events of collectors; their states are in collectors.jsonl."""
    for row, where in _read_objects(path):
        if "collector" not in row:
            continue
        try:
            event = Event(from_iso(row["time"]), row["entity"], row["kind"], dict(row["data"]))
            yield RecordedEvent(from_iso(row["seen"]), row["collector"], event)
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{where}: {error!r}; expected time, entity, kind, data, collector and seen") from error


def read_last_line(path: Path) -> str:
    """Returns the last complete line; empty if there is none."""
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_LINE_BYTES))
        whole = file.read().rpartition(b"\n")[0]
    return whole.rpartition(b"\n")[2].decode("utf-8", "replace")


def _read_objects(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    for number, line in enumerate(_read_lines(path), 1):
        where = f"{path}: line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{where}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UsageError(f"{where}: expected a JSON object")
        yield row, where


def _read_lines(path: Path) -> Iterator[str]:
    """Yields complete lines: a line without its end was truncated."""
    try:
        with path.open(newline="\n", encoding="utf-8") as file:
            yield from (line for line in file if line.endswith("\n"))
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}; expected UTF-8 text") from error
