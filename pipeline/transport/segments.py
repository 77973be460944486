"""Spool files: the layout that the writer (agents/node/spool) and the readers (pipeline/transport/spool.py) share.

    DIRECTORY/NODE/TOPIC/lock                      held by the writer, of which there is only one
    DIRECTORY/NODE/TOPIC/ORDINAL-EPOCH/            one run of sequence numbers; a new one only if numbers could repeat
        SEQUENCE.seg                               records; named by the sequence number of the first
        mark                                       end of the durable records; readers stop here
        gaps.json                                  [first, next, cause] of ranges that the writer dropped
        READER.cursor                              what that reader has stored durably; only the writer unlinks segments

A record is length u32, CRC32C u32 over (sequence, body), sequence u64, body; little endian. Sequence numbers within a
segment are contiguous.

The package `crc32c` is loaded without its `__init__`, which imports email, zipfile and argparse for a version number
and a command line: 4 MiB, a fifteenth of the agent's memory limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote

from pipeline.model.errors import SpoolError
from pipeline.runtime import private_files
from pipeline.transport import wire

_PACKAGE, _NAME = "crc32c", "crc32c._crc32c"


def _extension() -> Any:
    """The package's compiled module. Raises ImportError where it is not installed."""
    package = PathFinder.find_spec(_PACKAGE)
    if package is None:
        raise ImportError(f"{_PACKAGE} is not installed; wanted for the spool's checksums: pip install crc32c")
    found = PathFinder.find_spec(_NAME, package.submodule_search_locations)
    if found is None or found.loader is None:
        raise ImportError(f"{_NAME} is not in {package.origin}; wanted crc32c 2.7 or newer")
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return module


_loaded = sys.modules.get(_NAME) or _extension()
crc32c: Callable[[Any], int] = _loaded.crc32c


HEAD = struct.Struct("<IIQ")
MAX_RECORD = 8 << 20
"""Bound of one record: twice wire.MAX_MESSAGE; a greater length is damage."""
_SEGMENT = re.compile(r"0[0-9]{19}\.seg")  # 10^19 messages are never reached, so what a mark holds is never exceeded
_MARK = struct.Struct("<4s16sQ")
_MARK_CRC = struct.Struct("<I")
_SEQUENCE = struct.Struct("<Q")

Gap = tuple[int, int, str]
"""[first, next) and why it is gone."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Everything before `sequence` is durable or given up; written under kernel boot `boot_id`."""

    sequence: int
    boot_id: bytes


# --- names -----------------------------------------------------------------------------------------------------------


def folder_name(name: str) -> str:
    """`name` of a node or topic as the name of a folder. Raises SpoolError where that would leave the spool."""
    encoded = quote(name, safe="", errors="strict")
    if name in ("", ".", "..") or "/" in name or "\0" in name or len(encoded) > 200:
        raise SpoolError(
            f"spool: node or topic {name!r}: wanted 1 to 200 characters without '/' or NUL, not '.' or '..'"
        )
    return encoded


def name_of(folder: str) -> str:
    """The node or topic that `folder` stands for."""
    return unquote(folder)


def epoch_folders(home: Path) -> list[Path]:
    """The runs of sequences of one node and topic, oldest first."""
    return [home / name for name in sorted(os.listdir(home)) if is_epoch(name)]


def is_epoch(name: str) -> bool:
    """Whether a folder is one run of sequences: ORDINAL-EPOCH."""
    ordinal, _, epoch = name.partition("-")
    return ordinal.isdecimal() and len(epoch) == 32


def segments(folder: Path) -> list[int]:
    """First sequences of the segments in a folder, ascending; [] where the folder is gone."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(name[:-4]) for name in names if _SEGMENT.fullmatch(name))


def segment_path(folder: Path, first: int) -> Path:
    """The file whose first record has sequence `first`."""
    return folder / f"{first:020d}.seg"


# --- records ---------------------------------------------------------------------------------------------------------


def record(sequence: int, body: bytes) -> bytes:
    """The bytes of one record."""
    rest = _SEQUENCE.pack(sequence) + body
    return struct.pack("<II", len(body), crc32c(rest)) + rest


def take(
    data: bytes, at: int, sequence: int, count: int, size: int, epoch: bytes = b""
) -> tuple[list[bytes], int, Literal["enough", "short", "bad"]]:
    """Bodies of the records `sequence`, `sequence` + 1, ... from position `at`, and the position behind them.

    Ends at `count` records or `size` bytes, but not before one record: "enough"; where `data` ends: "short"; at damage,
    or at a message that names another epoch than `epoch`, if that is given: "bad".
    """
    bodies: list[bytes] = []
    view, end, until = memoryview(data), len(data), at + size
    while len(bodies) < count and (at < until or not bodies):
        if at + 16 > end:
            return bodies, at, "short"
        length, crc, found = HEAD.unpack_from(data, at)
        if found != sequence or length > MAX_RECORD:
            return bodies, at, "bad"
        behind = at + 16 + length
        if behind > end:
            return bodies, at, "short"
        if crc32c(view[at + 8 : behind]) != crc or (epoch and _foreign(data, at + HEAD.size, epoch)):
            return bodies, at, "bad"
        bodies.append(data[at + 16 : behind])
        at, sequence = behind, sequence + 1
    return bodies, at, "enough"


def _foreign(data: bytes, at: int, epoch: bytes) -> bool:
    """Whether a message at `at` was sealed for another epoch: it lies in a file that was copied here."""
    return data[at : at + 3] == wire.MAGIC and data[at + wire.EPOCH_AT : at + wire.EPOCH_AT + 16] != epoch


def scan(data: bytes, first: int, epoch: bytes = b"") -> tuple[int, int]:
    """(sequence behind the sound records that `data` begins with, their bytes)."""
    bodies, end, _ = take(data, 0, first, len(data), len(data) + 1, epoch)
    return first + len(bodies), end


def held_until(path: Path, first: int) -> int:
    """The sequence behind the records of a segment as their heads say it, without a look at their checksums."""
    with open(path, "rb", buffering=0) as file:
        size, at, sequence = os.fstat(file.fileno()).st_size, 0, first
        while at + HEAD.size <= size:
            length, _, found = HEAD.unpack(os.pread(file.fileno(), HEAD.size, at))
            if found != sequence or at + HEAD.size + length > size:
                break
            at, sequence = at + HEAD.size + length, sequence + 1
    return sequence


def epoch_of(folder: Path) -> bytes:
    """The epoch that a folder's name says; empty where it is none."""
    try:
        return bytes.fromhex(folder.name.partition("-")[2])
    except ValueError:
        return b""


class OpenSegments:
    """Segments held open for reading: one of each epoch folder, and at most `limit` in all.

    Opening another one of a folder closes the one before: a file that is held open keeps its space when it is unlinked.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._files: OrderedDict[Path, tuple[int, int]] = OrderedDict()  # (first sequence, open file) by folder

    def handle(self, folder: Path, first: int) -> int | None:
        """The open file of a segment; None if it was unlinked before it was opened."""
        known, handle = self._files.get(folder, (-1, -1))
        if handle >= 0 and known == first:
            self._files.move_to_end(folder)
            return handle
        self.close(folder)
        try:
            handle = os.open(segment_path(folder, first), os.O_RDONLY)
        except FileNotFoundError:
            return None
        self._files[folder] = first, handle
        if len(self._files) > self._limit:
            self.close(next(iter(self._files)))
        return handle

    def close(self, folder: Path) -> None:
        """Closes what is open of a folder; nothing if nothing is."""
        _, handle = self._files.pop(folder, (-1, -1))
        if handle >= 0:
            with contextlib.suppress(OSError):  # nothing was written to it, and it is closed whatever close says
                os.close(handle)

    def close_all(self) -> None:
        """Closes what is open of all folders."""
        for folder in list(self._files):
            self.close(folder)


# --- the small files -------------------------------------------------------------------------------------------------


def pack_mark(mark: Mark) -> bytes:
    """The content of a `mark` file."""
    head = _MARK.pack(b"FPM1", mark.boot_id, mark.sequence)
    return head + _MARK_CRC.pack(crc32c(head))


def read_mark(folder: Path) -> Mark | None:
    """The mark of a folder; None if it is absent or not whole (a reader then goes on with what it knew)."""
    try:
        with open(folder / "mark", "rb", buffering=0) as file:
            data = file.read(_MARK.size + _MARK_CRC.size)
    except FileNotFoundError:
        return None
    if len(data) < _MARK.size + _MARK_CRC.size or _MARK_CRC.unpack_from(data, _MARK.size)[0] != crc32c(data[:28]):
        return None
    magic, boot_id, sequence = _MARK.unpack_from(data)
    return Mark(sequence, boot_id) if magic == b"FPM1" else None


def read_gaps(folder: Path) -> list[Gap]:
    """The ranges that the writer gave up, ascending; what cannot be read is as good as none: causes only explain."""
    try:
        return [
            (int(first), int(behind), str(cause)) for first, behind, cause in json.loads(_text(folder / "gaps.json"))
        ]
    except (OSError, ValueError, TypeError):
        return []


def read_cursor(path: Path) -> int:
    """What a reader has stored: 0 if its file cannot be read or is not whole, which only keeps segments longer."""
    try:
        return int(json.loads(_text(path))["next"])
    except (OSError, ValueError, TypeError, KeyError):
        return 0


def cursors(folder: Path) -> list[int]:
    """The cursor of every reader of a folder; [] where the folder is gone."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [read_cursor(folder / name) for name in sorted(names) if name.endswith(".cursor")]


def write_small(path: Path, content: object, *, durable: bool) -> None:
    """Replaces a JSON file in one step; `durable` also waits for the disk."""
    other = path.with_name(path.name + ".tmp")
    with open(other, "w", encoding="utf-8", opener=private_files.opener) as file:
        json.dump(content, file)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    os.replace(other, path)


def sync_folder(folder: Path) -> None:
    """Makes names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def merged(gaps: Sequence[Gap], new: Gap, limit: int = 1000) -> list[Gap]:
    """`gaps` with `new` behind them, joined where it continues the last; the oldest go beyond `limit`."""
    if gaps and gaps[-1][1] == new[0] and gaps[-1][2] == new[2]:
        return [*gaps[:-1], (gaps[-1][0], new[1], new[2])]
    return [*gaps[1 - limit :], new]


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        return ""
