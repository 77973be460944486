"""Writes a recording: each tick is on disk, in whole lines, before the next; memory holds the inventory alone.

A tick is one write(2) per file, so that killing the process leaves whole lines; only a disk without room or a lost
machine can tear the last one, which readers pass over.

Reads the files of a recording, line by line; what is not complete at a file's end is passed over.

Errors are UsageErrors that name file and line. Times are UTC microseconds.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from agents.collector import Collector, Device, Reading
from agents.node.batches import build_blocks, merge_inventories
from pipeline.model.errors import UsageError
from pipeline.model.records import Block, Event, from_iso, iso, to_json
from pipeline.model.signals import CATALOGUE, signals_of_class
from pipeline.model.topology import Topology
from pipeline.recording.text_files import event_json, json_line, read_topology, topology_text

VERSION = 1
MAX_ENTITIES = 10_000
"""Entities that a recording remembers; chosen: ten times what a node with 8 GPUs, 8 NICs and their parts has."""


class Delivery(Protocol):
    """What one look brought; see agents.node.workers.read_server.Delivery. took: s."""

    @property
    def state(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def readings(self) -> tuple[Reading, ...]: ...
    @property
    def inventory(self) -> Mapping[str, Device] | None: ...
    @property
    def took(self) -> float: ...


class RecordingWriter:
    """One folder, which must be empty or absent. Raises UsageError where it is not or cannot be written."""

    def __init__(self, directory: str | Path, node: str, interval: float, collectors: Sequence[Collector]) -> None:
        self.directory = Path(directory)
        self._files: dict[str, _File] = {}
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
        self._describe()
        for name in ("events.jsonl", "collectors.jsonl"):
            self._append(name, "")

    def tick(self, time: int, looks: Iterable[tuple[Collector, Delivery]]) -> None:
        """Everything that was seen at one tick, later than all before."""
        looks = list(looks)
        self._remember(looks)
        changes = self._changes(time, looks)
        self._append("collectors.jsonl", "".join(map(json_line, changes)))
        events = [(c.name, e) for c, d in looks for reading in d.readings for e in reading.events]
        lines = [_event_line(time, event, collector=name) for name, event in events]
        told = (Event(time, f"node:{self._about['node']}", "collector", _told(change)) for change in changes)
        self._append("events.jsonl", "".join([*lines, *(_event_line(time, event) for event in told)]))
        rows: dict[str, dict[str, dict[str, str]]] = {}
        for block in build_blocks(reading for _, delivery in looks for reading in delivery.readings):
            _merge(rows.setdefault(block.device_class, {}), block)
        for device_class, found in rows.items():
            self._append(f"telemetry-{device_class}.csv", self._lines(time, device_class, found))

    def close(self) -> None:
        """Releases the files; all is written already."""
        for file in self._files.values():
            file.close()

    def _changes(self, time: int, looks: Iterable[tuple[Collector, Delivery]]) -> list[dict[str, Any]]:
        """The lines of collectors.jsonl for this tick."""
        changes: list[dict[str, Any]] = []
        for collector, found in looks:
            if self._states.get(collector.name) != (found.state, found.reason):
                self._states[collector.name] = (found.state, found.reason)
                row = {"time": iso(time), "collector": collector.name, "state": found.state, "reason": found.reason}
                changes.append({**row, "latency": round(found.took, 6)})
        return changes

    def _lines(self, time: int, device_class: str, found: Mapping[str, Mapping[str, str]]) -> str:
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
            self._files[name] = _File(self.directory / name)
        self._files[name].append(text)

    def _remember(self, looks: Iterable[tuple[Collector, Delivery]]) -> None:
        """Writes topology.toml and recording.json anew if an inventory brought something."""
        changed = False
        for collector, found in looks:
            mine = self._devices[collector.name]
            for entity, device in (found.inventory or {}).items():
                room = entity in mine or sum(map(len, self._devices.values())) < MAX_ENTITIES
                if room and mine.get(entity) != device:
                    mine[entity], changed = device, True
        if changed:
            self._describe()

    def _describe(self) -> None:
        devices = merge_inventories(self._devices.values())
        for name, mine in self._devices.items():
            self._seen[name]["entities"] = list(mine)
        parents = {entity: device.parents for entity, device in devices.items()}
        facts = {entity: device.attributes for entity, device in devices.items() if device.attributes}
        _replace(self.directory / "topology.toml", topology_text(parents, facts))
        about = json.dumps({**self._about, "collectors": self._seen}, indent=1, ensure_ascii=False)
        _replace(self.directory / "recording.json", about + "\n")


class _File:
    """A file that grows by whole texts: what could not be written whole is taken back."""

    def __init__(self, path: Path) -> None:
        self._path, self._size = path, 0
        try:
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _cannot_write(path, error) from error

    def append(self, text: str) -> None:
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
        os.close(self._handle)


def _merge(rows: dict[str, dict[str, str]], block: Block) -> None:
    """Adds a block of one tick: entity -> signal -> text; what is missing has none."""
    for entity in block.entities:
        rows.setdefault(entity, {})
    for name, column in block.columns.items():
        for entity, text in zip(block.entities, _texts(column[0]), strict=True):
            if text:
                rows[entity][name] = text


def _texts(values: NDArray[Any]) -> list[str]:
    """Each number so short that it reads back exactly in its own type; missing is empty."""
    if values.dtype.kind == "u":
        highest = np.iinfo(values.dtype).max
        return ["" if value == highest else str(value) for value in values.tolist()]
    short = values.dtype.itemsize < 8  # Python's own text of a float is that of 8 bytes
    texts = [str(value) for value in values] if short else [repr(value) for value in values.tolist()]
    return ["" if text == "nan" else text.removesuffix(".0") for text in texts]


def _event_line(time: int, event: Event, **more: str) -> str:
    row = event_json(event)
    return json_line({**row, "data": to_json(row["data"]), **more, "seen": iso(time)})


def _told(change: Mapping[str, Any]) -> dict[str, Any]:
    """The data of the event that an agent sends of a change of state."""
    return {key: change[key] for key in ("collector", "state", "reason")}


def _make_empty(directory: Path) -> None:
    """The folder, made if it is not there. Raises UsageError if it holds anything."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise UsageError(f"{directory}: is not empty; wanted a new or an empty folder: recordings are never mixed")
    except OSError as error:
        raise _cannot_write(directory, error) from error


def _replace(path: Path, text: str) -> None:
    """Writes a small file so that it is old or new, never half."""
    fresh = path.with_name(path.name + ".part")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{path}: cannot be written: {error.strerror}; wanted a folder with room, given by --output")


TAIL_BYTES = 1 << 20
"""What is read of a file's end to find its last time; chosen far above the longest line, an event's 64 KiB."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One recorded collector: what it claimed, how long a look of it might take in s, and which entities it saw."""

    signals: frozenset[str]
    events: tuple[str, ...]
    deadline: float
    entities: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class About:
    """recording.json and topology.toml: whose recording it is, its interval in s, and its collectors by name."""

    node: str
    interval: float
    collectors: dict[str, Claim]
    topology: Topology


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a telemetry file: the texts of what was measured."""

    time: int
    entity: str
    values: dict[str, str]


@dataclass(frozen=True, slots=True)
class Change:
    """One line of collectors.jsonl."""

    time: int
    collector: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class Seen:
    """One event that a collector sent with the tick at `time`."""

    time: int
    collector: str
    event: Event


def about(directory: Path) -> About:
    """What the recording is. Raises UsageError where the folder is none."""
    path = directory / "recording.json"
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        claims = {
            name: Claim(frozenset(c["signals"]), tuple(c["events"]), float(c["deadline"]), tuple(c["entities"]))
            for name, c in row["collectors"].items()
        }
        version, found = row["version"], About(row["node"], float(row["interval"]), claims, Topology())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; wanted a folder of 'fleetpulse record'") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: is no description of a recording: {error!r}") from error
    if version != VERSION or not isinstance(found.node, str) or not found.interval > 0:
        raise UsageError(f"{path}: wanted version = {VERSION}, node and interval above 0")
    return About(found.node, found.interval, claims, read_topology(directory / "topology.toml"))


def telemetry(path: Path) -> Iterator[Row]:
    """Rows of one telemetry-CLASS.csv. A column that the catalogue has no longer is an error."""
    lines = _cells(path)
    _, header = next(lines, (1, ["time", "entity"]))
    if header[:2] != ["time", "entity"]:
        raise UsageError(f"{path}: line 1: columns {', '.join(header[:2])}; wanted time, entity and signals")
    if unknown := [name for name in header[2:] if name not in CATALOGUE]:
        raise UsageError(f"{path}: line 1: column {unknown[0]!r}: no such signal in the catalogue")
    for number, cells in lines:
        try:
            values = {n: text for n, text in zip(header, cells, strict=True) if text}
            time, entity = from_iso(values.pop("time")), values.pop("entity")
            for text in values.values():
                float(text)
        except (ValueError, KeyError) as error:
            raise UsageError(f"{path}: line {number}: {error}; wanted time, entity and numbers") from error
        yield Row(time, entity, values)


def _cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Number and cells of each line."""
    lines = csv.reader(_lines(path))
    try:
        yield from ((lines.line_num, cells) for cells in lines)
    except csv.Error as error:
        raise UsageError(f"{path}: line {lines.line_num}: {error}; wanted comma-separated values") from error


def changes(path: Path) -> Iterator[Change]:
    """Lines of collectors.jsonl."""
    for row, where in _objects(path):
        try:
            yield Change(from_iso(row["time"]), row["collector"], row["state"], row["reason"])
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{where}: {error!r}; wanted time, collector, state and reason") from error


def events(path: Path) -> Iterator[Seen]:
    """Events that collectors sent; a collector's states are in collectors.jsonl."""
    for row, where in _objects(path):
        if "collector" not in row:
            continue
        try:
            event = Event(from_iso(row["time"]), row["entity"], row["kind"], dict(row["data"]))
            yield Seen(from_iso(row["seen"]), row["collector"], event)
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{where}: {error!r}; wanted time, entity, kind, data, collector and seen") from error


def last_line(path: Path) -> str:
    """The last complete line; empty if there is none."""
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        whole = file.read().rpartition(b"\n")[0]
    return whole.rpartition(b"\n")[2].decode("utf-8", "replace")


def _objects(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    for number, line in enumerate(_lines(path), 1):
        where = f"{path}: line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{where}: is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UsageError(f"{where}: wanted a JSON object")
        yield row, where


def _lines(path: Path) -> Iterator[str]:
    """Complete lines: one without its end was torn off while it was written."""
    try:
        with path.open(newline="\n", encoding="utf-8") as file:
            yield from (line for line in file if line.endswith("\n"))
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}; wanted UTF-8 text") from error
