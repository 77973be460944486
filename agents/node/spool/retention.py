"""Which segments of a spool are kept: unlinked after every reader has stored them, or, oldest first, to make room.

A segment unlinked to make room is a gap with its cause, recorded before the unlinking if the disk allows it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pipeline.transport import segments
from pipeline.transport.salvage import SegmentCheck


@dataclass(slots=True)
class Segment:
    """One segment file: records [first, next) in `size` bytes."""

    folder: Path
    first: int
    next: int
    size: int

    @property
    def path(self) -> Path:
        """The file."""
        return segments.segment_path(self.folder, self.first)


class SegmentRetention:
    """All segments of one node and topic, old epochs included, oldest first. `current` is the epoch being written.

    size: bytes of all segments.  dropped: records counted as gone.
    """

    def __init__(self, home: Path, current: Path) -> None:
        self._home, self._current = home, current
        self._kept = [segment for folder in segments.epoch_folders(home) for segment in _list_segments(folder)]
        self._gaps: dict[Path, list[segments.Gap]] = {}  # changed, not yet saved
        self._sealed = False
        self.size = sum(segment.size for segment in self._kept)
        self.dropped = 0

    @property
    def has_several(self) -> bool:
        """Whether there is more than one segment."""
        return len(self._kept) > 1

    def writable_segment(self, sequence: int) -> Segment | None:
        """The newest segment, if the record `sequence` may be appended to it."""
        newest = self._kept[-1] if self._kept else None
        if newest is None or self._sealed or newest.folder != self._current or newest.next != sequence:
            return None
        return newest

    def seal(self) -> None:
        """Closes the newest segment for further records."""
        self._sealed = True

    def add_records(self, segment: Segment, size: int, end: int) -> None:
        """Counts `size` durable bytes of records before `end` that were appended to `segment`."""
        if not self._kept or segment is not self._kept[-1]:
            self._kept.append(segment)
            self._sealed = False
        segment.size += size
        segment.next = end
        self.size += size

    def drop_oldest(self) -> bool:
        """Drops the oldest segment, as a gap; False if there is none."""
        if not self._kept:
            return False
        oldest = self._kept[0]
        first = max(oldest.first, _lowest_cursor(segments.read_cursors(oldest.folder)))
        self.record_gap(first, oldest.next, "spool full", oldest.folder)
        self.save_gaps()
        self._unlink_oldest()
        return True

    def drop_read_segments(self) -> None:
        """Unlinks segments that every reader has stored, but never the newest."""
        while self.has_several:
            cursors = segments.read_cursors(self._kept[0].folder)
            if not cursors or min(cursors) < self._kept[0].next:
                break
            self._unlink_oldest()
        self._remove_old_epochs()

    def record_gap(self, first: int, end: int, cause: str, folder: Path | None = None) -> None:
        """Counts records [first, end) as gone."""
        if end > first:
            self.dropped += end - first
            folder = folder or self._current
            known = self._gaps[folder] if folder in self._gaps else segments.read_gaps(folder)
            self._gaps[folder] = segments.append_gap(known, (first, end, cause))

    def save_gaps(self) -> None:
        """Saves new gaps; if the disk has no room for them, the next call tries again."""
        for folder, gaps in list(self._gaps.items()):
            try:
                segments.write_json(folder / "gaps.json", gaps, durable=True)
            except OSError:
                return
            del self._gaps[folder]

    def _unlink_oldest(self) -> None:
        oldest = self._kept.pop(0)
        self.size -= oldest.size
        oldest.path.unlink(missing_ok=True)

    def _remove_old_epochs(self) -> None:
        """Removes old epochs that every reader has read to the end; what remains of others (mark, gaps) is tiny."""
        for folder in segments.epoch_folders(self._home):
            mark, cursors = segments.read_mark(folder), segments.read_cursors(folder)
            if folder != self._current and mark and cursors and min(cursors) >= mark.sequence:
                for name in os.listdir(folder):
                    (folder / name).unlink(missing_ok=True)
                folder.rmdir()


def _lowest_cursor(cursors: list[int]) -> int:
    return min(cursors, default=0)


def _list_segments(folder: Path) -> list[Segment]:
    """The segments of a folder. Files outside the sequence of segments are left alone: they are not ours to unlink."""
    firsts, mark = SegmentCheck().list_segments(folder, segments.parse_epoch(folder)), segments.read_mark(folder)
    if not firsts:
        return []
    found: list[Segment] = []
    for first, following in zip(firsts, [*firsts[1:], None], strict=True):
        path = segments.segment_path(folder, first)
        held = segments.read_end_by_headers(path, first)
        end = max(held, mark.sequence if mark else 0) if following is None else max(held, following)
        if not found or end > found[-1].next:  # else a file with a part of the previous one
            found.append(Segment(folder, first, end, path.stat().st_size))
    return found
