"""Salvage of damaged spool files: finds valid records after damage, and files that do not belong to their spool.

Only the checksums of records decide, not names or marks. NumPy scans every byte of a segment for possible record
headers; a 4 MiB segment takes about 20 ms.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pipeline.transport import segments

NO_RECORD = "contains no valid record of this spool"
_WINDOW = 1 << 16
"""Bytes per scan; the next valid record is usually near."""
_NO_LIMIT = 1 << 40
"""Default upper bound of sequence numbers; chosen: 30,000 years of ticks of one second."""


def find_valid_record(
    data: bytes, at: int = 0, least: int = 0, after: int = _NO_LIMIT, epoch: bytes = b""
) -> tuple[int, int] | None:
    """(position, sequence) of the first valid record from position `at` on with a sequence in [least, after)."""
    for position in _candidate_positions(data, at, least, after):
        sequence = segments.HEAD.unpack_from(data, position)[2]
        if segments.read_records(data, position, sequence, 1, 1, epoch)[0]:
            return position, sequence
    return None


def _candidate_positions(data: bytes, at: int, least: int, after: int) -> Iterator[int]:
    """Positions of possible record headers: the sequence is in the range and the record ends within the data."""
    last = len(data) - segments.HEAD.size
    for begin in range(at, last + 1, _WINDOW):
        found: list[int] = []
        for start in range(begin, min(begin + 8, last + 1)):
            count = (min(begin + _WINDOW - 1, last) - start) // 8 + 1
            words = np.frombuffer(data, "<u8", count + 1, start)
            places = start + 8 * np.arange(count)
            length, sequence = (words[:-1] & 0xFFFF_FFFF).astype(np.int64), words[1:]
            good = (sequence >= least) & (sequence < after) & (length <= segments.MAX_RECORD)
            good &= places + segments.HEAD.size + length <= len(data)
            found += places[good].tolist()
        yield from sorted(found)


def find_end(data: bytes, first: int, epoch: bytes = b"") -> int:
    """The sequence number after the last valid record of a segment, skipping damage; `first` if there is none."""
    sequence, position = segments.scan_records(data, first, epoch)
    while position < len(data) and (found := find_valid_record(data, position, sequence, _NO_LIMIT, epoch)):
        position, sequence = found
        more, size = segments.scan_records(data[position:], sequence, epoch)
        position, sequence = position + size, more
    return sequence


def find_stray_reason(path: Path, epoch: bytes = b"") -> str | None:
    """Why a segment file does not belong to this epoch; None if it does, or is being written.

    A copied, renamed or foreign file would otherwise be read instead of the right one. Raises OSError.
    """
    first = int(path.stem)
    with open(path, "rb", buffering=0) as file:
        head = file.read(segments.HEAD.size)
        if len(head) < segments.HEAD.size:
            return None
        length, _, sequence = segments.HEAD.unpack(head)
        torn = length > os.fstat(file.fileno()).st_size - segments.HEAD.size
        own = sequence == first and length <= segments.MAX_RECORD
        if own and (torn or segments.read_records(head + file.read(length), 0, first, 1, 1, epoch)[0]):
            return None
    found = find_valid_record(path.read_bytes(), epoch=epoch)
    if found is None:
        return NO_RECORD
    position, sequence = found
    if sequence < first or (position == 0 and sequence != first):
        return f"begins with record {sequence}"
    return None


class SegmentCheck:
    """Checks which segments belong to their folder's epoch; each file is checked once. For one thread."""

    def __init__(self) -> None:
        self.found: dict[Path, str] = {}
        self._valid: dict[Path, set[int]] = {}

    def list_segments(self, folder: Path, epoch: bytes) -> list[int]:
        """First sequence numbers of the valid segments in a folder, ascending. Raises OSError."""
        firsts = segments.list_segments(folder)
        known = self._valid.get(folder, set()) & set(firsts)
        for path in [path for path in self.found if path.parent == folder and int(path.stem) not in firsts]:
            del self.found[path]
        for first in firsts:
            path = segments.segment_path(folder, first)
            if first not in known and path not in self.found:
                try:
                    why = find_stray_reason(path, epoch)
                except FileNotFoundError:  # unlinked in the meantime
                    continue
                if why is None:
                    known.add(first)
                else:
                    self.found[path] = why
        self._valid[folder] = known
        return sorted(known)

    def unreadable_segments(self, folder: Path) -> list[int]:
        """First sequence numbers of the files in a folder without any valid record: their content is lost."""
        return [int(path.stem) for path, why in self.found.items() if path.parent == folder and why == NO_RECORD]

    def drop_folder(self, folder: Path) -> None:
        """Drops a folder that disappeared."""
        self._valid.pop(folder, None)
        self.found = {path: why for path, why in self.found.items() if path.parent != folder}
