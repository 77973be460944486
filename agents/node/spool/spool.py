"""The bounded disk queue of one topic: append, sync. If it is full, the oldest messages are dropped and counted.

Records are buffered in memory (at most BUFFER_BYTES) until `sync` writes them, waits for the disk and moves the mark
that readers obey. So a message is durable before a reader sees it, and is never rewritten after that. A full disk or a
failed write never raises from append or sync: losses are counted in `dropped` and explained in `problem`.

Segments are unlinked after every reader has stored them, or, oldest first, to make room. The second is a gap with its
cause, recorded before the unlinking if the disk allows it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agents.node.spool import disk
from pipeline.model.errors import SpoolError
from pipeline.runtime import private_files
from pipeline.transport import segments, wire
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


BUFFER_BYTES = 1 << 20
"""Bytes buffered until append syncs by itself; chosen: 15 minutes of a node with 8 GPUs."""
_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_GONE_ERRNOS = (errno.ENOENT, errno.ENOTDIR)  # the folder was removed or replaced


class Spool:
    """The only writer of DIRECTORY/NODE/TOPIC. For one thread.

    epoch:   16 random bytes; (topic, node, epoch, sequence) never identifies two messages.
    dropped: messages lost since the spool was opened, those in dropped segments included.
    problem: why the last sync lost something; None if it did not.
    loss_reason: why the newest of `dropped` was lost, also after recovery; empty if none was.
    max_bytes: 0 = disk.default_max_bytes.
    """

    def __init__(
        self,
        directory: Path,
        node: str,
        topic: str,
        *,
        max_bytes: int = 0,
        segment_bytes: int = 4 << 20,
        free_bytes: int = 64 << 20,
    ) -> None:
        self.home = Path(directory) / segments.folder_name(node) / segments.folder_name(topic)
        self.max_bytes, self.free_bytes = max_bytes or disk.default_max_bytes(self.home), free_bytes
        self.segment_bytes = min(segment_bytes, self.max_bytes // 4)  # so that the limit costs at most a quarter
        self.problem: str | None = None
        self.loss_reason = ""
        self._boot_id = disk.read_boot_id()
        self._pending: list[bytes] = []
        self._waiting = self._dropped_before = 0
        self._closed = self._vanished = self._rolled = False
        self.next = 0
        self._mark = self._lock = -1
        self._open()

    # --- interface ---------------------------------------------------------------------------------------------------

    @property
    def dropped(self) -> int:
        """Messages lost since the spool was opened."""
        return self._dropped_before + self._retention.dropped

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        return self._retention.size

    def append(self, body: bytes, kind: int, sent: int, simulated: bool = False) -> int:
        """Seals a wire body and queues it; returns its sequence. Durable and visible to readers after `sync`."""
        if self._closed:
            raise SpoolError(f"{self.home}: message after close; expected an open spool")
        sequence = self.next
        message = wire.seal(body, kind, self.epoch, sequence, sent, simulated)
        if len(message) > wire.MAX_MESSAGE:
            raise SpoolError(f"{self.home}: message of {len(message)} bytes, expected at most {wire.MAX_MESSAGE}")
        self._pending.append(segments.pack_record(sequence, message))
        self._waiting += len(self._pending[-1])
        self.next += 1
        if self._waiting >= BUFFER_BYTES:
            self.sync()
        return sequence

    def append_many(self, bodies: Iterable[bytes], kind: int, sent: int, simulated: bool = False) -> range:
        """Appends in order; returns the sequences."""
        first = self.next
        for body in bodies:
            self.append(body, kind, sent, simulated)
        return range(first, self.next)

    def skip_sequences(self, count: int, cause: str) -> None:
        """Records the next `count` sequences as a gap: messages that were accepted but never written."""
        self.sync()
        if count > 0:
            first, self.next = self.next, self.next + count
            self.loss_reason = cause
            self._record_loss(first, self.next, cause)
            if self._mark >= 0:
                self._move_mark()

    def sync(self) -> None:
        """Makes everything appended durable and visible, or counts it as dropped."""
        if self._pending:
            self._sync_pending()
        if self._vanished and not self._closed:
            self._recreate()

    def _sync_pending(self) -> None:
        pending, first = self._pending, self.next - len(self._pending)
        self._pending, self._waiting, self.problem = [], 0, self.problem if self._vanished else None
        start = 0
        while start < len(pending) and not self._vanished:
            end = self._fit_into_segment(pending, start, first + start)
            self._store(b"".join(pending[start:end]), first + start, first + end)
            start = end
        if start < len(pending):
            self._record_loss(first + start, first + len(pending), "write failed")
        self._retention.save_gaps()
        if self._mark >= 0:
            self._move_mark()
            self._drop_read_segments()

    def close(self) -> None:
        """Syncs and releases the lock; may be called twice."""
        if not self._closed:
            self._closed = True
            self.sync()
            self._release()

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- opening -----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        private_files.make_folder(self.home)
        self._lock = disk.lock_file(self.home / "lock")
        try:
            self._open_epoch()
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        """Closes mark and lock, and clears their descriptors, which the next opened file may get."""
        handles = [handle for handle in (self._mark, self._lock) if handle >= 0]
        self._mark = self._lock = -1
        for handle in handles:
            try:
                os.close(handle)
            except OSError as error:  # closed all the same; the mark is written again at the next opening
                self.problem = f"{self.home}: {error.strerror}"

    def _recreate(self) -> None:
        """Creates the spool again after its folder was removed, in a new epoch; until then messages are lost."""
        dropped = self.dropped
        self._release()
        try:
            self._open()
        except (OSError, SpoolError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            self._set_problem(f"cannot be recreated: {why}; retrying at the next sync")
            return
        self._dropped_before, self._vanished = dropped, False

    def _open_epoch(self) -> None:
        """Continues the newest epoch if no sequence of it could be used twice, else creates a new one."""
        folders = segments.epoch_folders(self.home)
        sequence = self._recover_epoch(folders[-1]) if folders else None
        if sequence is None:
            ordinal = int(folders[-1].name.partition("-")[0]) + 1 if folders else 1
            folder, sequence = self.home / f"{ordinal:06d}-{os.urandom(16).hex()}", 0
            folder.mkdir(private_files.FOLDER)
            segments.sync_folder(self.home)
        else:
            folder = folders[-1]
        self._folder, self.next, self._durable = folder, sequence, sequence
        self.epoch = bytes.fromhex(folder.name.partition("-")[2])
        self._mark = os.open(folder / "mark", os.O_RDWR | os.O_CREAT, private_files.FILE)
        self._move_mark(durable=True)
        segments.sync_folder(folder)
        self._retention = SegmentRetention(self.home, folder)
        self._rolled = True
        self._drop_read_segments()

    def _recover_epoch(self, folder: Path) -> int | None:
        """The next sequence of an epoch that can continue; None if it cannot: its mark is then set to its end.

        A torn tail behind a mark of this boot was never visible: it is cut. Any other damage may have been visible.
        """
        epoch = segments.parse_epoch(folder)
        mark, strays = segments.read_mark(folder), SegmentCheck()
        firsts = strays.list_segments(folder, epoch)
        ruined = bool(strays.unreadable_segments(folder))
        sequence = known = mark.sequence if mark else 0
        if firsts:
            path = segments.segment_path(folder, firsts[-1])
            data = path.read_bytes()
            sequence, good = segments.scan_records(data, firsts[-1], epoch)
            torn = good < len(data)
            if mark and not ruined and sequence >= known and (not torn or self._same_boot(mark)):
                disk.truncate_file(path, good)
                return sequence
        elif mark and not ruined:
            return sequence
        disk.write_mark(folder / "mark", segments.Mark(max(known, sequence), self._boot_id))
        return None

    def _same_boot(self, mark: segments.Mark) -> bool:
        return mark.boot_id == self._boot_id and any(self._boot_id)

    # --- writing -----------------------------------------------------------------------------------------------------

    def _fit_into_segment(self, pending: list[bytes], start: int, sequence: int) -> int:
        """End of the records from `start` that fit into one segment, the newest one or a new one."""
        newest = self._retention.writable_segment(sequence)
        room = self.segment_bytes - (newest.size if newest else 0) - len(pending[start])
        if newest and room < 0:
            self._retention.seal()
            room = self.segment_bytes - len(pending[start])
        end = start + 1
        while end < len(pending) and room >= len(pending[end]):
            room -= len(pending[end])
            end += 1
        return end

    def _store(self, data: bytes, first: int, end: int) -> None:
        """Writes records [first, end), and drops the oldest ones if there is no room; else counts them as lost."""
        while True:
            try:
                self._make_room(len(data))
                self._write(data, first, end)
                return
            except OSError as error:
                self._set_problem(error.strerror or str(error))
                self._vanished |= error.errno in _GONE_ERRNOS
                if not self._can_retry(error, first):
                    self._record_loss(first, end, "spool full" if error.errno in _FULL_ERRNOS else "write failed")
                    return

    def _can_retry(self, error: OSError, first: int) -> bool:
        """Whether a failed write may be retried: in a new segment, or after dropping the oldest one."""
        if error.errno == errno.EFBIG and self._retention.writable_segment(first):
            self._retention.seal()
            return True
        try:
            return error.errno in _FULL_ERRNOS and self._retention.drop_oldest()
        except OSError as other:
            self._set_problem(f"{error.strerror}, and no segment can be unlinked: {other.strerror}")
            return False

    def _set_problem(self, why: str) -> None:
        """Sets the reason of a loss, or a possible one, before it is counted: another thread reads both."""
        self.problem = self.loss_reason = f"{self.home}: {why}"

    def _record_loss(self, first: int, end: int, cause: str) -> None:
        self._retention.record_gap(first, end, cause)
        self._retention.save_gaps()
        self._durable = end

    def _make_room(self, size: int) -> None:
        """Enforces max_bytes, and keeps only one segment while the disk would have less than free_bytes left."""
        kept = self._retention
        while kept.size + size > self.max_bytes:
            self._set_problem(f"reached its limit of {self.max_bytes} bytes ([spool] max_bytes)")
            if not kept.drop_oldest():
                raise OSError(errno.ENOSPC, "message is larger than [spool] max_bytes")
        while kept.has_several and disk.free_bytes(self.home) < self.free_bytes + size:
            self._set_problem(
                f"no room on its disk: {self.free_bytes} bytes are reserved for others ([spool] free_bytes)"
            )
            kept.drop_oldest()

    def _write(self, data: bytes, first: int, end: int) -> None:
        """Appends records durably to the newest segment or to a new one; on failure none of them remains."""
        segment = self._retention.writable_segment(first)
        new = segment is None
        segment = segment or Segment(self._folder, first, first, 0)
        handle = os.open(segment.path, os.O_WRONLY | (os.O_CREAT if new else 0), private_files.FILE)
        try:
            disk.write_all(handle, data, segment.size)
            disk.sync_data(handle)
            if new:
                segments.sync_folder(self._folder)
        except OSError:
            os.ftruncate(handle, segment.size)
            if new:
                segment.path.unlink()
            raise
        finally:
            os.close(handle)
        self._retention.add_records(segment, len(data), end)
        self._durable = end
        if new:
            self._move_mark(durable=True)
            self._rolled = True

    def _drop_read_segments(self) -> None:
        """After a new segment: unlinks the segments that every reader has stored. A failure is retried later."""
        if self._rolled:
            self._rolled = False
            try:
                self._retention.drop_read_segments()
            except OSError as error:
                self.problem = f"{self.home}: old segments cannot be removed: {error.strerror}"

    def _move_mark(self, durable: bool = False) -> None:
        """Makes durable and lost records visible to readers. A failed write of the mark is retried at the next sync."""
        try:
            os.pwrite(self._mark, segments.pack_mark(segments.Mark(self._durable, self._boot_id)), 0)
            if durable:
                disk.sync_data(self._mark)
        except OSError as error:
            self.problem = f"{self.home}: mark: {error.strerror}"
