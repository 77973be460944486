"""What can still be read of a spool's damaged files: sound records wherever they lie, and files that belong elsewhere.

The checksums of the records decide, not names or marks. numpy looks at every byte of a segment for something that could
be a record's head; a 4 MiB segment takes about 20 ms.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pipeline.transport import segments

NO_RECORD = "holds no sound record of this spool"
_WINDOW = 1 << 16
"""Bytes that are looked through at once: the next sound record is mostly near."""
_ANY = 1 << 40
"""Sequences that are looked for; chosen: 30,000 years of ticks of one second."""


def find_sound(
    data: bytes, at: int = 0, least: int = 0, behind: int = _ANY, epoch: bytes = b""
) -> tuple[int, int] | None:
    """(position, sequence) of the first sound record from position `at` on with a sequence in [least, behind)."""
    for position in _heads(data, at, least, behind):
        sequence = segments.HEAD.unpack_from(data, position)[2]
        if segments.take(data, position, sequence, 1, 1, epoch)[0]:
            return position, sequence
    return None


def _heads(data: bytes, at: int, least: int, behind: int) -> Iterator[int]:
    """Positions at which a head could lie: its sequence is in the range, and its record ends within the data."""
    last = len(data) - segments.HEAD.size
    for begin in range(at, last + 1, _WINDOW):
        found: list[int] = []
        for start in range(begin, min(begin + 8, last + 1)):
            count = (min(begin + _WINDOW - 1, last) - start) // 8 + 1
            words = np.frombuffer(data, "<u8", count + 1, start)
            places = start + 8 * np.arange(count)
            length, sequence = (words[:-1] & 0xFFFF_FFFF).astype(np.int64), words[1:]
            good = (sequence >= least) & (sequence < behind) & (length <= segments.MAX_RECORD)
            good &= places + segments.HEAD.size + length <= len(data)
            found += places[good].tolist()
        yield from sorted(found)


def end_of(data: bytes, first: int, epoch: bytes = b"") -> int:
    """The sequence behind the last sound record of a segment's data, damage between them or not; `first` if none."""
    sequence, position = segments.scan(data, first, epoch)
    while position < len(data) and (found := find_sound(data, position, sequence, _ANY, epoch)):
        position, sequence = found
        more, size = segments.scan(data[position:], sequence, epoch)
        position, sequence = position + size, more
    return sequence


def stray(path: Path, epoch: bytes = b"") -> str | None:
    """Why a file with a segment's name is no segment of this run; None if it is one, or is just being written.

    A copied, renamed or foreign file would be read in place of the true one. Raises OSError.
    """
    first = int(path.stem)
    with open(path, "rb", buffering=0) as file:
        head = file.read(segments.HEAD.size)
        if len(head) < segments.HEAD.size:
            return None
        length, _, sequence = segments.HEAD.unpack(head)
        torn = length > os.fstat(file.fileno()).st_size - segments.HEAD.size
        own = sequence == first and length <= segments.MAX_RECORD
        if own and (torn or segments.take(head + file.read(length), 0, first, 1, 1, epoch)[0]):
            return None
    found = find_sound(path.read_bytes(), epoch=epoch)
    if found is None:
        return NO_RECORD
    position, sequence = found
    if sequence < first or (position == 0 and sequence != first):
        return f"begins with record {sequence}"
    return None


class Strays:
    """Which segments of a folder are not of its run, remembered by file: each is looked at once. For one thread."""

    def __init__(self) -> None:
        self.found: dict[Path, str] = {}
        self._sound: dict[Path, set[int]] = {}

    def segments(self, folder: Path, epoch: bytes) -> list[int]:
        """First sequences of the true segments in a folder, ascending. Raises OSError."""
        firsts = segments.segments(folder)
        known = self._sound.get(folder, set()) & set(firsts)
        for path in [path for path in self.found if path.parent == folder and int(path.stem) not in firsts]:
            del self.found[path]
        for first in firsts:
            path = segments.segment_path(folder, first)
            if first not in known and path not in self.found:
                try:
                    why = stray(path, epoch)
                except FileNotFoundError:  # unlinked meanwhile
                    continue
                if why is None:
                    known.add(first)
                else:
                    self.found[path] = why
        self._sound[folder] = known
        return sorted(known)

    def ruined(self, folder: Path) -> list[int]:
        """First sequences of the files in a folder in which nothing is sound: what they held is lost."""
        return [int(path.stem) for path, why in self.found.items() if path.parent == folder and why == NO_RECORD]

    def forget(self, folder: Path) -> None:
        """Lets go of a folder that vanished."""
        self._sound.pop(folder, None)
        self.found = {path: why for path, why in self.found.items() if path.parent != folder}
