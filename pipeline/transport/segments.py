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


def _load_crc32c() -> Any:
    """The compiled module of the package. Raises ImportError if it is not installed."""
    package = PathFinder.find_spec(_PACKAGE)
    if package is None:
        raise ImportError(f"{_PACKAGE} is not installed; required for checksums of the spool: pip install crc32c")
    found = PathFinder.find_spec(_NAME, package.submodule_search_locations)
    if found is None or found.loader is None:
        raise ImportError(f"{_NAME} is not in {package.origin}; expected crc32c 2.7 or newer")
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return module


_loaded = sys.modules.get(_NAME) or _load_crc32c()
crc32c: Callable[[Any], int] = _loaded.crc32c


HEAD = struct.Struct("<IIQ")
MAX_RECORD = 8 << 20
"""Maximum bytes of a record: twice wire.MAX_MESSAGE; a greater length is damage."""
_SEGMENT = re.compile(r"0[0-9]{19}\.seg")  # 20 digits hold every u64 sequence number in use
_MARK = struct.Struct("<4s16sQ")
_MARK_CRC = struct.Struct("<I")
_SEQUENCE = struct.Struct("<Q")

Gap = tuple[int, int, str]
"""(first, next, cause) of a lost range."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Everything before `sequence` is durable or dropped; written under kernel boot `boot_id`."""

    sequence: int
    boot_id: bytes


# --- names -----------------------------------------------------------------------------------------------------------


def folder_name(name: str) -> str:
    """Folder name of a node or topic. Raises SpoolError if the folder would be outside the spool."""
    encoded = quote(name, safe="", errors="strict")
    if name in ("", ".", "..") or "/" in name or "\0" in name or len(encoded) > 200:
        raise SpoolError(
            f"spool: node or topic {name!r}: expected 1 to 200 characters without '/' or NUL, not '.' or '..'"
        )
    return encoded


def decode_name(folder: str) -> str:
    """The node or topic of a folder name."""
    return unquote(folder)


def epoch_folders(home: Path) -> list[Path]:
    """The epoch folders of one node and topic, oldest first."""
    return [home / name for name in sorted(os.listdir(home)) if is_epoch_folder(name)]


def is_epoch_folder(name: str) -> bool:
    """Whether a folder name is ORDINAL-EPOCH: one run of sequence numbers."""
    ordinal, _, epoch = name.partition("-")
    return ordinal.isdecimal() and len(epoch) == 32


def list_segments(folder: Path) -> list[int]:
    """First sequence numbers of the segments in a folder, ascending; [] without the folder."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(name[:-4]) for name in names if _SEGMENT.fullmatch(name))


def segment_path(folder: Path, first: int) -> Path:
    """Path of the segment whose first record has sequence number `first`."""
    return folder / f"{first:020d}.seg"


# --- records ---------------------------------------------------------------------------------------------------------


def pack_record(sequence: int, body: bytes) -> bytes:
    """The bytes of one record."""
    rest = _SEQUENCE.pack(sequence) + body
    return struct.pack("<II", len(body), crc32c(rest)) + rest


def read_records(
    data: bytes, at: int, sequence: int, count: int, size: int, epoch: bytes = b""
) -> tuple[list[bytes], int, Literal["enough", "short", "bad"]]:
    """Reads records `sequence`, `sequence` + 1, ... from position `at`: (bodies, position after them, reason to stop).

    "enough": `count` records or `size` bytes (at least one record) were read. "short": `data` ended. "bad": a damaged
    record, or a message of another epoch than `epoch`, if given.
    """
    bodies: list[bytes] = []
    view, end, until = memoryview(data), len(data), at + size
    while len(bodies) < count and (at < until or not bodies):
        if at + 16 > end:
            return bodies, at, "short"
        length, crc, found = HEAD.unpack_from(data, at)
        if found != sequence or length > MAX_RECORD:
            return bodies, at, "bad"
        after = at + 16 + length
        if after > end:
            return bodies, at, "short"
        if crc32c(view[at + 8 : after]) != crc or (epoch and _is_foreign(data, at + HEAD.size, epoch)):
            return bodies, at, "bad"
        bodies.append(data[at + 16 : after])
        at, sequence = after, sequence + 1
    return bodies, at, "enough"


def _is_foreign(data: bytes, at: int, epoch: bytes) -> bool:
    """Whether the message at `at` has another epoch: its file was copied here."""
    return data[at : at + 3] == wire.MAGIC and data[at + wire.EPOCH_AT : at + wire.EPOCH_AT + 16] != epoch


def scan_records(data: bytes, first: int, epoch: bytes = b"") -> tuple[int, int]:
    """(sequence number after the valid records at the start of `data`, their bytes)."""
    bodies, end, _ = read_records(data, 0, first, len(data), len(data) + 1, epoch)
    return first + len(bodies), end


def read_end_by_headers(path: Path, first: int) -> int:
    """The sequence number after the last record of a segment, from record headers only, without checksums."""
    with open(path, "rb", buffering=0) as file:
        size, at, sequence = os.fstat(file.fileno()).st_size, 0, first
        while at + HEAD.size <= size:
            length, _, found = HEAD.unpack(os.pread(file.fileno(), HEAD.size, at))
            if found != sequence or at + HEAD.size + length > size:
                break
            at, sequence = at + HEAD.size + length, sequence + 1
    return sequence


def parse_epoch(folder: Path) -> bytes:
    """The epoch in a folder name; empty if there is none."""
    try:
        return bytes.fromhex(folder.name.partition("-")[2])
    except ValueError:
        return b""


class OpenSegments:
    """Open segment files: one per epoch folder, at most `limit` in total.

    Opening another one of a folder closes the previous one: an open file keeps its disk space when it is unlinked.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._files: OrderedDict[Path, tuple[int, int]] = OrderedDict()  # (first sequence, open file) by folder

    def open_segment(self, folder: Path, first: int) -> int | None:
        """File descriptor of a segment; None if it was unlinked."""
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
        """Closes the open segment of a folder, if any."""
        _, handle = self._files.pop(folder, (-1, -1))
        if handle >= 0:
            with contextlib.suppress(OSError):  # it was only read, and is closed even if close fails
                os.close(handle)

    def close_all(self) -> None:
        """Closes all open segments."""
        for folder in list(self._files):
            self.close(folder)


# --- the small files -------------------------------------------------------------------------------------------------


def pack_mark(mark: Mark) -> bytes:
    """The content of a `mark` file."""
    head = _MARK.pack(b"FPM1", mark.boot_id, mark.sequence)
    return head + _MARK_CRC.pack(crc32c(head))


def read_mark(folder: Path) -> Mark | None:
    """The mark of a folder; None if it is missing or damaged (readers then keep the last known mark)."""
    try:
        handle = os.open(f"{folder}/mark", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        data = os.read(handle, _MARK.size + _MARK_CRC.size)
    finally:
        os.close(handle)
    if len(data) < _MARK.size + _MARK_CRC.size or _MARK_CRC.unpack_from(data, _MARK.size)[0] != crc32c(data[:28]):
        return None
    magic, boot_id, sequence = _MARK.unpack_from(data)
    return Mark(sequence, boot_id) if magic == b"FPM1" else None


def read_gaps(folder: Path) -> list[Gap]:
    """The ranges that the writer dropped, ascending; [] if unreadable, since causes are only explanations."""
    try:
        return [
            (int(first), int(after), str(cause)) for first, after, cause in json.loads(_read_text(folder / "gaps.json"))
        ]
    except (OSError, ValueError, TypeError):
        return []


def read_cursor(path: Path) -> int:
    """The offset in a cursor file; 0 if it cannot be read, which only keeps segments longer."""
    try:
        return int(json.loads(_read_text(path))["next"])
    except (OSError, ValueError, TypeError, KeyError):
        return 0


def read_cursors(folder: Path) -> list[int]:
    """The cursors of all readers of a folder; [] without the folder."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [read_cursor(folder / name) for name in sorted(names) if name.endswith(".cursor")]


def write_json(path: Path, content: object, *, durable: bool) -> None:
    """Replaces a JSON file atomically; `durable` also waits for the disk (fsync)."""
    other = path.with_name(path.name + ".tmp")
    with open(other, "w", encoding="utf-8", opener=private_files.open_private) as file:
        json.dump(content, file)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    os.replace(other, path)


def sync_folder(folder: Path) -> None:
    """Makes the entries of a folder durable (fsync)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def append_gap(gaps: Sequence[Gap], new: Gap, limit: int = 1000) -> list[Gap]:
    """`gaps` with `new` appended, joined to the last if contiguous; the oldest are dropped above `limit`."""
    if gaps and gaps[-1][1] == new[0] and gaps[-1][2] == new[2]:
        return [*gaps[:-1], (gaps[-1][0], new[1], new[2])]
    return [*gaps[1 - limit :], new]


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        return ""
