"""Reads the files of a recording, line by line; what is not complete at a file's end is passed over.

Errors are UsageErrors that name file and line. Times are UTC microseconds.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.declarations import read_topology
from pipeline.model.errors import UsageError
from pipeline.model.records import Event, from_iso
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import Topology

VERSION = 1
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
