"""The agent's bounded disk queue of one topic: append, sync; when full the oldest goes, and is counted.

Records wait in memory (at most BUFFER bytes) until `sync`, which writes them, waits for the disk and then moves the
mark that readers obey. So a message is durable before anybody sees it, and what was seen is never written otherwise.
A full disk or a failed write never raises from append or sync: what is lost is counted in `dropped`, said in `trouble`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from agents.node.spool import disk
from agents.node.spool.retention import Retention, Segment
from pipeline.model.errors import SpoolError
from pipeline.runtime import private_files
from pipeline.transport import segments, wire
from pipeline.transport.salvage import Strays

BUFFER = 1 << 20
"""Bytes that wait for `sync` at most before append syncs by itself; chosen: 80 ticks of a node with 8 GPUs."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_GONE = (errno.ENOENT, errno.ENOTDIR)  # the folder was removed, or something else lies in its place


class Spool:
    """The one writer of DIRECTORY/NODE/TOPIC. For one thread.

    epoch:   16 random bytes; (topic, node, epoch, sequence) never means two messages.
    dropped: messages given up since the spool was opened, those in dropped segments included.
    trouble: why the last sync lost something; None when all is well.
    why_lost: why the newest of `dropped` was given up, also when all is well again; empty if none was.
    max_bytes: 0 = as much as disk.cap allows.
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
        self.max_bytes, self.free_bytes = max_bytes or disk.cap(self.home), free_bytes
        self.segment_bytes = min(segment_bytes, self.max_bytes // 4)  # so that the cap never costs more than a quarter
        self.trouble: str | None = None
        self.why_lost = ""
        self._boot_id = disk.boot_id()
        self._pending: list[bytes] = []
        self._waiting = self._dropped_before = 0
        self._closed = self._vanished = self._rolled = False
        self.next = 0
        self._mark = self._lock = -1
        self._open()

    # --- what others call --------------------------------------------------------------------------------------------

    @property
    def dropped(self) -> int:
        return self._dropped_before + self._retention.dropped

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        return self._retention.size

    def append(self, body: bytes, kind: int, sent: int, simulated: bool = False) -> int:
        """Seals a wire body and queues it; returns its sequence. Durable, and seen by readers, after `sync`."""
        if self._closed:
            raise SpoolError(f"{self.home}: message after close; wanted an open spool")
        sequence = self.next
        message = wire.seal(body, kind, self.epoch, sequence, sent, simulated)
        if len(message) > wire.MAX_MESSAGE:
            raise SpoolError(f"{self.home}: message of {len(message)} bytes, wanted at most {wire.MAX_MESSAGE}")
        self._pending.append(segments.record(sequence, message))
        self._waiting += len(self._pending[-1])
        self.next += 1
        if self._waiting >= BUFFER:
            self.sync()
        return sequence

    def append_many(self, bodies: Iterable[bytes], kind: int, sent: int, simulated: bool = False) -> range:
        """Appends in order; returns the sequences."""
        first = self.next
        for body in bodies:
            self.append(body, kind, sent, simulated)
        return range(first, self.next)

    def skip(self, count: int, cause: str) -> None:
        """Gives up the next `count` sequences as a gap: messages that were accepted and never came here."""
        self.sync()
        if count > 0:
            first, self.next = self.next, self.next + count
            self.why_lost = cause
            self._lose(first, self.next, cause)
            if self._mark >= 0:
                self._move_mark()

    def sync(self) -> None:
        """Makes everything appended durable and visible, or counts it as dropped."""
        if self._pending:
            self._sync_pending()
        if self._vanished and not self._closed:
            self._open_anew()

    def _sync_pending(self) -> None:
        pending, first = self._pending, self.next - len(self._pending)
        self._pending, self._waiting, self.trouble = [], 0, self.trouble if self._vanished else None
        start = 0
        while start < len(pending) and not self._vanished:
            end = self._fitting(pending, start, first + start)
            self._store(b"".join(pending[start:end]), first + start, first + end)
            start = end
        if start < len(pending):
            self._lose(first + start, first + len(pending), "write failed")
        self._retention.save_gaps()
        if self._mark >= 0:
            self._move_mark()
            self._tidy()

    def close(self) -> None:
        """Syncs and lets another writer in; may be called twice."""
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
        self._lock = disk.locked(self.home / "lock")
        try:
            self._begin()
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        """Closes mark and lock, and forgets their numbers, which the next file opened by anybody may get."""
        handles = [handle for handle in (self._mark, self._lock) if handle >= 0]
        self._mark = self._lock = -1
        for handle in handles:
            try:
                os.close(handle)
            except OSError as error:  # closed all the same; what the mark says is written again at the next opening
                self.trouble = f"{self.home}: {error.strerror}"

    def _open_anew(self) -> None:
        """Makes the spool again whose folder was removed, in a new epoch; until that succeeds, messages are lost."""
        dropped = self.dropped
        self._release()
        try:
            self._open()
        except (OSError, SpoolError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            self._blame(f"cannot be made anew: {why}; tried again at the next sync")
            return
        self._dropped_before, self._vanished = dropped, False

    def _begin(self) -> None:
        """Goes on in the newest epoch if no sequence of it could be used twice, else makes a new one."""
        folders = segments.epoch_folders(self.home)
        sequence = self._recovered(folders[-1]) if folders else None
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
        self._retention = Retention(self.home, folder)
        self._rolled = True
        self._tidy()

    def _recovered(self, folder: Path) -> int | None:
        """Next sequence of an epoch that can go on; None, with its mark put behind all it holds, if it cannot.

        A torn tail behind a mark of this boot was never seen: it is cut. Any other damage may have been seen.
        """
        epoch = segments.epoch_of(folder)
        mark, strays = segments.read_mark(folder), Strays()
        firsts = strays.segments(folder, epoch)
        ruined = bool(strays.ruined(folder))
        sequence = known = mark.sequence if mark else 0
        if firsts:
            path = segments.segment_path(folder, firsts[-1])
            data = path.read_bytes()
            sequence, good = segments.scan(data, firsts[-1], epoch)
            torn = good < len(data)
            if mark and not ruined and sequence >= known and (not torn or self._same_boot(mark)):
                disk.cut(path, good)
                return sequence
        elif mark and not ruined:
            return sequence
        disk.write_mark(folder / "mark", segments.Mark(max(known, sequence), self._boot_id))
        return None

    def _same_boot(self, mark: segments.Mark) -> bool:
        return mark.boot_id == self._boot_id and any(self._boot_id)

    # --- writing -----------------------------------------------------------------------------------------------------

    def _fitting(self, pending: list[bytes], start: int, sequence: int) -> int:
        """End of the records from `start` that go into one segment, the newest one or a new one."""
        newest = self._retention.writable(sequence)
        room = self.segment_bytes - (newest.size if newest else 0) - len(pending[start])
        if newest and room < 0:
            self._retention.seal()
            room = self.segment_bytes - len(pending[start])
        end = start + 1
        while end < len(pending) and room >= len(pending[end]):
            room -= len(pending[end])
            end += 1
        return end

    def _store(self, data: bytes, first: int, behind: int) -> None:
        """Writes records [first, behind), at the cost of the oldest ones where there is no room; else counts them."""
        while True:
            try:
                self._make_room(len(data))
                self._write(data, first, behind)
                return
            except OSError as error:
                self._blame(error.strerror or str(error))
                self._vanished |= error.errno in _GONE
                if not self._room_made(error, first):
                    self._lose(first, behind, "spool full" if error.errno in _FULL else "write failed")
                    return

    def _room_made(self, error: OSError, first: int) -> bool:
        """Whether a write that failed may be tried again: in a new segment, or where the oldest one was."""
        if error.errno == errno.EFBIG and self._retention.writable(first):
            self._retention.seal()
            return True
        try:
            return error.errno in _FULL and self._retention.drop_oldest()
        except OSError as other:
            self._blame(f"{error.strerror}, and nothing can be unlinked: {other.strerror}")
            return False

    def _blame(self, why: str) -> None:
        """Names what costs, or may cost, messages: before they are counted, as another thread reads both."""
        self.trouble = self.why_lost = f"{self.home}: {why}"

    def _lose(self, first: int, behind: int, cause: str) -> None:
        self._retention.lose(first, behind, cause)
        self._retention.save_gaps()
        self._durable = behind

    def _make_room(self, size: int) -> None:
        """Keeps to max_bytes, and to one segment while less than free_bytes would be left to others."""
        kept = self._retention
        while kept.size + size > self.max_bytes:
            self._blame(f"holds its {self.max_bytes} bytes ([spool] max_bytes)")
            if not kept.drop_oldest():
                raise OSError(errno.ENOSPC, "message is larger than [spool] max_bytes")
        while kept.several and disk.free(self.home) < self.free_bytes + size:
            self._blame(f"no room on its disk but the {self.free_bytes} bytes left to others ([spool] free_bytes)")
            kept.drop_oldest()

    def _write(self, data: bytes, first: int, behind: int) -> None:
        """Puts records durably behind the newest segment or into a new one; on failure nothing of them stays."""
        segment = self._retention.writable(first)
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
        self._retention.grow(segment, len(data), behind)
        self._durable = behind
        if new:
            self._move_mark(durable=True)
            self._rolled = True

    def _tidy(self) -> None:
        """After a new segment: unlinks what every reader has stored. What cannot be unlinked now can be later."""
        if self._rolled:
            self._rolled = False
            try:
                self._retention.drop_read()
            except OSError as error:
                self.trouble = f"{self.home}: cannot be tidied: {error.strerror}"

    def _move_mark(self, durable: bool = False) -> None:
        """Lets readers see what is durable or lost. A mark that cannot be written now is written at the next sync."""
        try:
            os.pwrite(self._mark, segments.pack_mark(segments.Mark(self._durable, self._boot_id)), 0)
            if durable:
                disk.sync_data(self._mark)
        except OSError as error:
            self.trouble = f"{self.home}: mark: {error.strerror}"
