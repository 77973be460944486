"""Spool transport: reads agents' spools from disk. Partition = node, incarnation = epoch, offset = sequence number.

It never reads past the writer's mark, so everything it returns is durable. If the mark is missing or damaged, the
segments decide. A segment file that belongs to another stream is not read (`stray_files`). Memory: one read of one
segment (max_bytes; a whole segment only to read past damage), and MAX_OPEN open files.

A file that cannot be read or written (permissions, disk) affects only its own node: `find_problem` reports it.

A reader's cursor file names the offset up to which the reader has stored a partition durably. The writer unlinks only
segments that every cursor has passed. A lost cursor keeps segments longer; no cursor is ever ahead of the store.
"""

from __future__ import annotations

import errno
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.model.errors import GapError
from pipeline.transport import Message, Partition, segments
from pipeline.transport.salvage import SegmentCheck, find_end, find_valid_record

CURSOR_S = 10.0
"""Minimum time between two writes of a cursor file (s); `write_all` writes immediately. Chosen: without it, a restarted
reader skips nothing, and the writer counts at most so much as dropped that is stored."""
SOON_S = 1.0
"""The same when a segment was passed, which the writer may then unlink, or after a failure (s)."""


class CursorFiles:
    """Cursor files of one reader. `folder_of` finds a partition's folder. `failures`: cursors not written, and why."""

    def __init__(
        self, reader: str, folder_of: Callable[[Partition], Path | None], monotonic: Callable[[], float]
    ) -> None:
        self.failures: dict[Partition, str] = {}
        self._name = f"{segments.folder_name(reader)}.cursor"
        self._folder_of, self._monotonic = folder_of, monotonic
        self._stored: dict[Partition, int] = {}
        self._written: dict[Partition, tuple[int, float]] = {}
        self._behind: set[Partition] = set()  # whose file is out of date

    def read_stored(self, partition: Partition) -> int | None:
        """The stored offset in the file; None without a file."""
        folder = self._folder_of(partition)
        if folder is None or not (folder / self._name).exists():
            return None
        return segments.read_cursor(folder / self._name)

    def advance(self, partition: Partition, next_offset: int, segment: int = 0) -> None:
        """Records that everything before `next_offset` is stored; writes the file at most every CURSOR_S, or SOON_S.

        segment: the first offset of the segment that is read.
        """
        self._stored[partition] = next_offset
        written, at = self._written.get(partition, (-1, -CURSOR_S))
        if next_offset == written:
            return
        soon = partition in self.failures or written < segment <= next_offset
        if self._monotonic() - at >= (SOON_S if soon else CURSOR_S):
            self._write(partition)
        else:
            self._behind.add(partition)

    def write_due(self) -> None:
        """Writes the cursor files that had to wait or could not be written, if it is time."""
        for partition in self._behind & self._stored.keys():
            self.advance(partition, self._stored[partition])

    def write_all(self) -> None:
        """Writes every cursor file that is out of date."""
        for partition, stored in list(self._stored.items()):
            if self._written.get(partition, (-1, 0.0))[0] != stored:
                self._write(partition)

    def drop_partition(self, partition: Partition) -> None:
        """Drops a partition that disappeared."""
        self.failures.pop(partition, None)
        self._stored.pop(partition, None)
        self._written.pop(partition, None)
        self._behind.discard(partition)

    def _write(self, partition: Partition) -> None:
        """Writes without fsync; a failure is recorded in `failures` and retried after SOON_S."""
        folder, stored, now = self._folder_of(partition), self._stored[partition], self._monotonic()
        self._written[partition] = (-1, now)
        self._behind.add(partition)
        if folder is None:
            return
        path = folder / self._name
        try:
            segments.write_json(path, {"next": stored}, durable=False)
        except OSError as error:
            self.failures[partition] = (
                f"{path}: cannot be written: {error.strerror}; the agent keeps segments that are stored; "
                "free disk space, or make the folder writable for the pipeline's user"
            )
            return
        self._written[partition] = (stored, now)
        self._behind.discard(partition)
        self.failures.pop(partition, None)


MAX_OPEN = 256
"""Maximum open segments; chosen: a quarter of the usual limit of 1,024 files."""
_PROCESS_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # limits of this process, not a fault of one node
MARK_TIMEOUT_S = 2.0
"""After this time without a valid mark the segments decide; chosen: a running agent rewrites it every second."""
_SEARCHED_SEGMENTS = 4  # earlier segments searched for a misplaced record; chosen
_MIN_READ_BYTES = 4096  # one page
_SETTLED_NS = 2_000_000_000  # a change older than this at the listing is not missed


@dataclass(slots=True)
class _ReadPosition:
    """Reading position of a partition: record `sequence` is at `position` of the segment that begins at `first`.

    unmarked_since: when the mark became missing or damaged (monotonic s). scanned_end: end of the newest segment at its
    last scan; scanned: its first sequence, size and time then.
    """

    folder: Path
    epoch: bytes = b""
    end: int = 0
    unmarked_since: float | None = None
    scanned_end: int = 0
    scanned: tuple[int, int, int] = (-1, 0, 0)
    first: int = -1
    position: int = 0
    sequence: int = -1
    typical_size: int = 512


class SpoolTransport:
    """Reads every spool below `directory`, or those of `nodes`, and keeps the cursor files of `reader`.

    For one thread.
    """

    def __init__(
        self,
        directory: Path,
        reader: str = "pipeline",
        monotonic: Callable[[], float] = time.monotonic,
        nodes: Iterable[str] | None = None,
    ) -> None:
        self._directory = Path(directory)
        self._selected = None if nodes is None else {segments.folder_name(node) for node in nodes}
        self._cursors, self._monotonic = CursorFiles(reader, self._folder_of, monotonic), monotonic
        self._segment_check = SegmentCheck()
        self._listed: dict[Path, tuple[int, list[Path]]] = {}
        self._partitions: dict[Path, Partition] = {}  # by folder
        self._positions: dict[Partition, _ReadPosition] = {}
        self._files = segments.OpenSegments(MAX_OPEN)
        self._unlisted: dict[Path, str] = {}
        self._unread: dict[Partition, str] = {}

    # --- the contract ------------------------------------------------------------------------------------------------

    def partitions(self) -> Sequence[Partition]:
        """See `Transport.partitions`."""
        found: dict[Partition, Path] = {}
        self._unlisted = {}
        for node in self._nodes():
            for topic in self._folders(node):
                for folder in self._folders(topic):
                    if folder in self._partitions or segments.is_epoch_folder(folder.name):
                        found[self._partition_of(folder)] = folder
        for partition in self._positions.keys() - found.keys():
            self._drop_partition(partition)
        for partition, folder in found.items():
            if partition not in self._positions:
                self._positions[partition] = _ReadPosition(folder, segments.parse_epoch(folder))
        self._cursors.write_due()
        return tuple(found)

    def _partition_of(self, folder: Path) -> Partition:
        """The partition of the folder NODE/TOPIC/ORDINAL-EPOCH."""
        if folder not in self._partitions:
            topic, epoch = folder.parent, folder.name.partition("-")[2]
            names = segments.decode_name(topic.name), segments.decode_name(topic.parent.name)
            self._partitions[folder] = Partition(*names, epoch, True)
        return self._partitions[folder]

    def bounds(self, partition: Partition) -> tuple[int, int]:
        """See `Transport.bounds`."""
        place = self._position_of(partition)
        if place is None:
            return 0, 0
        try:
            end = self._refresh_end(place)
            return min(
                [*self._first_sequences(place)[:1], *self._segment_check.unreadable_segments(place.folder), end]
            ), end
        except OSError as error:
            self._cannot_read(partition, place, error)
            return 0, place.end

    def read(self, partition: Partition, offset: int, max_messages: int, max_bytes: int) -> list[Message]:
        """See `Transport.read`."""
        place = self._position_of(partition)
        if place is None:
            return []
        try:
            found = self._messages(partition, place, offset, max_messages, max_bytes)
        except OSError as error:
            self._cannot_read(partition, place, error)
            return []
        self._unread.pop(partition, None)
        return found

    def _messages(
        self, partition: Partition, place: _ReadPosition, offset: int, max_messages: int, max_bytes: int
    ) -> list[Message]:
        if offset >= place.end and offset >= self._refresh_end(place):
            return []
        if place.sequence != offset:
            self._seek(partition, place, offset)
        count = min(max_messages, place.end - offset)
        while True:
            if bodies := self._read_bodies(place, count, max_bytes):
                return [Message(partition, at, body) for at, body in enumerate(bodies, offset)]
            self._skip_damage(partition, place)

    def commit_offset(self, partition: Partition, next_offset: int) -> None:
        """See `Transport.commit_offset`."""
        place = self._positions.get(partition)
        self._cursors.advance(partition, next_offset, place.first if place else 0)

    def stored_offset(self, partition: Partition) -> int | None:
        """The offset in this reader's cursor file; None if it never stored anything."""
        return self._cursors.read_stored(partition)

    def write_cursors(self) -> None:
        """Writes every cursor file now."""
        self._cursors.write_all()

    def send_dead_letter(self, message: Message, reason: str) -> None:
        """Does nothing: a spool has no other readers, the table dead_letter is enough."""

    @property
    def stray_files(self) -> dict[Path, str]:
        """Segment files that do not belong to their spool, and why. They are not read."""
        return dict(self._segment_check.found)

    def is_fully_readable(self) -> bool:
        """Whether all files could be read."""
        return not self._unread and not self._unlisted

    def find_problem(self) -> str | None:
        """See `Transport.find_problem`. May be called from any thread: uses copies."""
        problems = [t for known in (self._unlisted, self._unread, self._cursors.failures) for t in list(known.values())]
        if problems:
            return f"spool: {problems[0]}" + (f" (and {len(problems) - 1} more like it)" if problems[1:] else "")
        if os.path.isdir(self._directory):  # unlike Path.is_dir it returns False without permission
            return None
        return (
            f"spool: {self._directory} does not exist: no agent has run here; expected [spool] directory of the agents"
        )

    def close(self) -> None:
        """Writes the cursor files and closes all segments."""
        self._cursors.write_all()
        self._files.close_all()

    # --- finding -----------------------------------------------------------------------------------------------------

    def _nodes(self) -> list[Path]:
        found = self._folders(self._directory)
        return found if self._selected is None else [folder for folder in found if folder.name in self._selected]

    def _folders(self, folder: Path) -> list[Path]:
        """The folders in a folder, sorted; listed again only if the folder changed."""
        try:
            changed = os.stat(folder).st_mtime_ns
            known = self._listed.get(folder)
            if known and known[0] == changed:
                return known[1]
            with os.scandir(folder) as entries:
                found = [folder / name for name in sorted(entry.name for entry in entries if self._is_folder(entry))]
        except (FileNotFoundError, NotADirectoryError):
            self._listed.pop(folder, None)
            return []
        except OSError as error:
            self._listed.pop(folder, None)
            self._cannot_list(folder, error)
            return []
        settled = time.time_ns() - changed > _SETTLED_NS
        self._listed[folder] = (changed if settled else -1, found)
        return found

    def _is_folder(self, entry: os.DirEntry[str]) -> bool:
        try:
            return entry.is_dir()
        except OSError as error:
            if error.errno != errno.ELOOP:  # a link to itself is not a node
                self._cannot_list(Path(entry.path), error)
            return False

    def _cannot_list(self, folder: Path, error: OSError) -> None:
        if error.errno in _PROCESS_LIMITS:
            raise error
        self._unlisted[folder] = (
            f"{folder}: cannot be listed: {error.strerror}; its contents are skipped; "
            "make the folder readable for the pipeline's user"
        )

    def _cannot_read(self, partition: Partition, place: _ReadPosition, error: OSError) -> None:
        """Records the error of a partition, which reads as empty until it is fixed."""
        if error.errno in _PROCESS_LIMITS:
            raise error
        place.sequence = -1
        self._files.close(place.folder)
        self._unread[partition] = (
            f"{place.folder}: cannot be read: {error.strerror}; node {partition.name} is skipped; "
            "check the disk, and make the files readable for the pipeline's user"
        )

    def _drop_partition(self, partition: Partition) -> None:
        """Drops a partition that disappeared; its open file would keep the disk space of an unlinked segment."""
        folder = self._positions.pop(partition).folder
        self._partitions.pop(folder, None)
        self._files.close(folder)
        self._segment_check.drop_folder(folder)
        self._unread.pop(partition, None)
        self._cursors.drop_partition(partition)

    def _folder_of(self, partition: Partition) -> Path | None:
        place = self._position_of(partition)
        return place.folder if place else None

    def _position_of(self, partition: Partition) -> _ReadPosition | None:
        if partition not in self._positions:
            self.partitions()
        return self._positions.get(partition)

    def _refresh_end(self, place: _ReadPosition) -> int:
        """The offset after the last readable message: from the mark, or from the segments without a valid mark."""
        mark = segments.read_mark(place.folder)
        now = self._monotonic()
        if mark is not None:
            place.unmarked_since, place.end = None, max(place.end, mark.sequence)
        elif place.unmarked_since is None:
            place.unmarked_since = now
        elif now - place.unmarked_since >= MARK_TIMEOUT_S:
            place.end = max(place.end, self._scan_end(place))
        return place.end

    def _scan_end(self, place: _ReadPosition) -> int:
        """The sequence number after the last valid record, made durable here because no mark guarantees it."""
        firsts = self._first_sequences(place)
        if not firsts:
            return 0
        with open(segments.segment_path(place.folder, firsts[-1]), "rb", buffering=0) as file:
            found = os.fstat(file.fileno())
            if place.scanned != (firsts[-1], found.st_size, found.st_mtime_ns):
                os.fsync(file.fileno())
                place.scanned_end = find_end(file.read(), firsts[-1], place.epoch)
                place.scanned = firsts[-1], found.st_size, found.st_mtime_ns
        return place.scanned_end

    # --- reading -----------------------------------------------------------------------------------------------------

    def _read_bodies(self, place: _ReadPosition, count: int, size: int) -> list[bytes]:
        """Bodies from `place` on, which moves past them; none at the end of the segment or at damage."""
        handle = self._files.open_segment(place.folder, place.first)
        if handle is None:
            return []
        wanted = max(_MIN_READ_BYTES, min(size, count * place.typical_size) + segments.HEAD.size)
        data = os.pread(handle, wanted, place.position)
        bodies, end, state = segments.read_records(data, 0, place.sequence, count, size, place.epoch)
        if not bodies and state == "short" and len(data) >= segments.HEAD.size:
            length = segments.HEAD.unpack_from(data)[0]
            data = os.pread(handle, segments.HEAD.size + length, place.position)
            bodies, end, _ = segments.read_records(data, 0, place.sequence, 1, 1, place.epoch)
        place.position += end
        place.sequence += len(bodies)
        if bodies:
            place.typical_size = end // len(bodies) * 9 // 8 + segments.HEAD.size  # an eighth more, because sizes vary
        return bodies

    def _seek(self, partition: Partition, place: _ReadPosition, offset: int) -> None:
        """Moves `place` to the record `offset`; raises GapError if all segments begin after it."""
        firsts = self._first_sequences(place)
        at = bisect_right(firsts, offset) - 1
        if at < 0:
            after = min([self._refresh_end(place), *firsts[:1]])
            self._raise_gap(
                partition,
                place,
                offset,
                after,
                "damaged" if self._segment_check.unreadable_segments(place.folder) else "unlinked",
            )
        place.first, place.position, place.sequence = firsts[at], 0, offset
        found = find_valid_record(self._read_rest(place, 0), 0, offset, offset + 1, place.epoch)
        if found is not None:
            place.position = found[0]

    def _skip_damage(self, partition: Partition, place: _ReadPosition) -> None:
        """Moves `place` to its record past damage, in this segment or another one; raises GapError if it is lost."""
        sequence, firsts = place.sequence, self._first_sequences(place)
        following = next((first for first in firsts if first >= sequence and first != place.first), place.end)
        if following == sequence:
            place.first, place.position = sequence, 0
            return
        end = min(following, place.end)
        found = find_valid_record(self._read_rest(place, place.position), 0, sequence, end, place.epoch)
        if found is not None:
            place.position += found[0]
            if found[1] == sequence:
                return
        elif self._find_in_earlier(place, firsts):
            return
        self._raise_gap(partition, place, sequence, found[1] if found is not None else end, "damaged")

    def _find_in_earlier(self, place: _ReadPosition, firsts: list[int]) -> bool:
        """Whether an earlier segment has the record: another file may have some of the same records."""
        before = [first for first in firsts if first < place.sequence and first != place.first]
        here = place.first, place.position
        for first in before[: -_SEARCHED_SEGMENTS - 1 : -1]:
            place.first = first
            if found := find_valid_record(
                self._read_rest(place, 0), 0, place.sequence, place.sequence + 1, place.epoch
            ):
                place.position = found[0]
                return True
        place.first, place.position = here
        return False

    def _raise_gap(self, partition: Partition, place: _ReadPosition, first: int, after: int, otherwise: str) -> None:
        """Raises GapError for [first, after), with the cause from gaps.json; if there are several, for the first of
        them. Reading continues at its end."""
        gaps = segments.read_gaps(place.folder)
        start, end, cause = next((gap for gap in gaps if gap[0] < after and gap[1] > first), (first, after, otherwise))
        if start <= first:
            after = min(after, end)
        place.sequence = -1
        raise GapError(partition.topic, partition.name, first, after, cause)

    def _first_sequences(self, place: _ReadPosition) -> list[int]:
        return self._segment_check.list_segments(place.folder, place.epoch)

    def _read_rest(self, place: _ReadPosition, position: int) -> bytes:
        handle = self._files.open_segment(place.folder, place.first)
        return b"" if handle is None else os.pread(handle, max(0, os.fstat(handle).st_size - position), position)
