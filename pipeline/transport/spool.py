"""Spool transport: reads agents' spools from disk. Partition = node, incarnation = epoch, offset = sequence number.

It never reads past the writer's mark, so everything it returns is durable. If the mark is missing or damaged, the
segments decide. A segment file that belongs to another stream is not read (`strays`). Memory: one read of one segment
(max_bytes; a whole segment only to read past damage), and OPEN open files.

A file that cannot be read or written (permissions, disk) affects only its own node: `reachable` reports it.

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
from pipeline.transport.salvage import Strays, end_of, find_sound

CURSOR_S = 1.0
"""A cursor file is written at most so often: it only lets the writer unlink, and is written in full by `write_all`."""


class Cursors:
    """`folder_of` finds a partition's folder, None if it is gone. `told`: cursors that cannot be written, and why."""

    def __init__(
        self, reader: str, folder_of: Callable[[Partition], Path | None], monotonic: Callable[[], float]
    ) -> None:
        self.told: dict[Partition, str] = {}
        self._name = f"{segments.folder_name(reader)}.cursor"
        self._folder_of, self._monotonic = folder_of, monotonic
        self._stored: dict[Partition, int] = {}
        self._written: dict[Partition, tuple[int, float]] = {}

    def known(self, partition: Partition) -> int | None:
        """What the file says; None if there is none yet."""
        folder = self._folder_of(partition)
        if folder is None or not (folder / self._name).exists():
            return None
        return segments.read_cursor(folder / self._name)

    def move(self, partition: Partition, next_offset: int) -> None:
        """Everything before `next_offset` is stored; the file says so within CURSOR_S of the next call for it."""
        self._stored[partition] = next_offset
        written, at = self._written.get(partition, (-1, -CURSOR_S))
        if next_offset != written and self._monotonic() - at >= CURSOR_S:
            self._write(partition)

    def retry(self) -> None:
        """Tries those again that could not be written."""
        for partition in self.told.keys() & self._stored.keys():
            self.move(partition, self._stored[partition])

    def write_all(self) -> None:
        """Writes every cursor that its file does not say yet."""
        for partition, stored in list(self._stored.items()):
            if self._written.get(partition, (-1, 0.0))[0] != stored:
                self._write(partition)

    def forget(self, partition: Partition) -> None:
        """Lets go of a partition that vanished."""
        self.told.pop(partition, None)
        self._stored.pop(partition, None)
        self._written.pop(partition, None)

    def _write(self, partition: Partition) -> None:
        """Without fsync; one that cannot be written is told and tried again CURSOR_S later."""
        folder, stored, now = self._folder_of(partition), self._stored[partition], self._monotonic()
        self._written[partition] = (-1, now)
        if folder is None:
            return
        path = folder / self._name
        try:
            segments.write_small(path, {"next": stored}, durable=False)
        except OSError as error:
            self.told[partition] = (
                f"{path}: cannot be written: {error.strerror}; the agent keeps what is stored already; "
                "wanted room on that disk and a folder that the pipeline's user may write"
            )
            return
        self._written[partition] = (stored, now)
        self.told.pop(partition, None)


OPEN = 256
"""Segments held open at once; chosen: a quarter of the usual limit of 1,024 files."""
_OURS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # this process wants for something: no fault of one node
UNMARKED_S = 2.0
"""How long a mark is absent or damaged before the segments decide; chosen: a living agent rewrites it each second."""
_NEAR = 4  # segments before that are searched for a record that is not where it should be; chosen
_LEAST = 4096  # bytes of the smallest read, one page
_SETTLED_NS = 2_000_000_000  # a folder changed longer ago than this before it was listed has no unseen change


@dataclass(slots=True)
class _Place:
    """Where reading stands: record `sequence` lies at `position` of the segment that begins at `first`.

    unmarked: since when (monotonic s) there has been no sound mark.  held: what the newest segment, as `scanned` (its
    first sequence, size and time), then says is there.
    """

    folder: Path
    epoch: bytes = b""
    end: int = 0
    unmarked: float | None = None
    held: int = 0
    scanned: tuple[int, int, int] = (-1, 0, 0)
    first: int = -1
    position: int = 0
    sequence: int = -1
    typical: int = 512


class SpoolTransport:
    """Reads every spool below `directory`, or those of `nodes`, on behalf of one `reader`, whose cursor it keeps.

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
        self._only = None if nodes is None else {segments.folder_name(node) for node in nodes}
        self._cursors, self._monotonic = Cursors(reader, self._folder_of, monotonic), monotonic
        self._strays = Strays()
        self._listed: dict[Path, tuple[int, list[str]]] = {}
        self._places: dict[Partition, _Place] = {}
        self._files = segments.OpenSegments(OPEN)
        self._unlisted: dict[Path, str] = {}
        self._unread: dict[Partition, str] = {}

    # --- the contract ------------------------------------------------------------------------------------------------

    def partitions(self) -> Sequence[Partition]:
        found: dict[Partition, Path] = {}
        self._unlisted = {}
        for node in self._nodes():
            for topic in self._names(self._directory / node):
                home = self._directory / node / topic
                for name in filter(segments.is_epoch, self._names(home)):
                    epoch = name.partition("-")[2]
                    found[Partition(segments.name_of(topic), segments.name_of(node), epoch, True)] = home / name
        for partition in self._places.keys() - found.keys():
            self._forget(partition)
        for partition, folder in found.items():
            if partition not in self._places:
                self._places[partition] = _Place(folder, segments.epoch_of(folder))
        self._cursors.retry()
        return tuple(found)

    def bounds(self, partition: Partition) -> tuple[int, int]:
        place = self._place(partition)
        if place is None:
            return 0, 0
        try:
            end = self._renewed_end(place)
            return min([*self._firsts(place)[:1], *self._strays.ruined(place.folder), end]), end
        except OSError as error:
            self._cannot_read(partition, place, error)
            return 0, place.end

    def read(self, partition: Partition, offset: int, max_messages: int, max_bytes: int) -> list[Message]:
        place = self._place(partition)
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
        self, partition: Partition, place: _Place, offset: int, max_messages: int, max_bytes: int
    ) -> list[Message]:
        if offset >= place.end and offset >= self._renewed_end(place):
            return []
        if place.sequence != offset:
            self._seek(partition, place, offset)
        count = min(max_messages, place.end - offset)
        while True:
            if bodies := self._take(place, count, max_bytes):
                return [Message(partition, at, body) for at, body in enumerate(bodies, offset)]
            self._pass_on(partition, place)

    def committed(self, partition: Partition, next_offset: int) -> None:
        self._cursors.move(partition, next_offset)

    def cursor(self, partition: Partition) -> int | None:
        """What this reader has stored, as its cursor file says; None if it never stored anything."""
        return self._cursors.known(partition)

    def write_cursors(self) -> None:
        """Writes every cursor now, not only in time."""
        self._cursors.write_all()

    def dead_letter(self, message: Message, reason: str) -> None:
        """Nobody else reads a spool: the table dead_letter is enough."""

    @property
    def strays(self) -> dict[Path, str]:
        """Files with a segment's name that are not of their spool, and why. They are not read."""
        return dict(self._strays.found)

    def readable(self) -> bool:
        """Whether everything that is there could be read."""
        return not self._unread and not self._unlisted

    def reachable(self) -> str | None:
        """May be called from any thread: it looks at copies."""
        told = [t for known in (self._unlisted, self._unread, self._cursors.told) for t in list(known.values())]
        if told:
            return f"spool: {told[0]}" + (f" (and {len(told) - 1} more like it)" if told[1:] else "")
        if os.path.isdir(self._directory):  # unlike Path.is_dir it is False, and does not raise, where we may not look
            return None
        return (
            f"spool: {self._directory} is no folder yet: no agent has run here; wanted [spool] directory of the agents"
        )

    def close(self) -> None:
        self._cursors.write_all()
        self._files.close_all()

    # --- finding -----------------------------------------------------------------------------------------------------

    def _nodes(self) -> list[str]:
        found = self._names(self._directory)
        return found if self._only is None else [name for name in found if name in self._only]

    def _names(self, folder: Path) -> list[str]:
        """Names of the folders in a folder, sorted; listed anew only if the folder changed."""
        try:
            changed = folder.stat().st_mtime_ns
            known = self._listed.get(folder)
            if known and known[0] == changed:
                return known[1]
            with os.scandir(folder) as entries:
                names = sorted(entry.name for entry in entries if self._is_folder(entry))
        except (FileNotFoundError, NotADirectoryError):
            self._listed.pop(folder, None)
            return []
        except OSError as error:
            self._listed.pop(folder, None)
            self._cannot_list(folder, error)
            return []
        settled = time.time_ns() - changed > _SETTLED_NS
        self._listed[folder] = (changed if settled else -1, names)
        return names

    def _is_folder(self, entry: os.DirEntry[str]) -> bool:
        try:
            return entry.is_dir()
        except OSError as error:
            if error.errno != errno.ELOOP:  # a link to itself is a stranger here, and no node
                self._cannot_list(Path(entry.path), error)
            return False

    def _cannot_list(self, folder: Path, error: OSError) -> None:
        if error.errno in _OURS:
            raise error
        self._unlisted[folder] = (
            f"{folder}: cannot be listed: {error.strerror}; what lies in it is left out; "
            "wanted a folder that the pipeline's user may read"
        )

    def _cannot_read(self, partition: Partition, place: _Place, error: OSError) -> None:
        """Keeps the trouble of one partition, which reads as ended until it is mended."""
        if error.errno in _OURS:
            raise error
        place.sequence = -1
        self._files.close(place.folder)
        self._unread[partition] = (
            f"{place.folder}: cannot be read: {error.strerror}; node {partition.name} is left out; "
            "wanted a sound disk and files that the pipeline's user may read"
        )

    def _forget(self, partition: Partition) -> None:
        """Lets go of a partition that vanished; its open file would keep the space of an unlinked segment."""
        folder = self._places.pop(partition).folder
        self._files.close(folder)
        self._strays.forget(folder)
        self._unread.pop(partition, None)
        self._cursors.forget(partition)

    def _folder_of(self, partition: Partition) -> Path | None:
        place = self._place(partition)
        return place.folder if place else None

    def _place(self, partition: Partition) -> _Place | None:
        if partition not in self._places:
            self.partitions()
        return self._places.get(partition)

    def _renewed_end(self, place: _Place) -> int:
        """The offset behind what may be read: what the mark says, or the segments where there is no sound mark."""
        mark = segments.read_mark(place.folder)
        now = self._monotonic()
        if mark is not None:
            place.unmarked, place.end = None, max(place.end, mark.sequence)
        elif place.unmarked is None:
            place.unmarked = now
        elif now - place.unmarked >= UNMARKED_S:
            place.end = max(place.end, self._held(place))
        return place.end

    def _held(self, place: _Place) -> int:
        """The sequence behind the last sound record. It is made durable here, since no mark says that it is."""
        firsts = self._firsts(place)
        if not firsts:
            return 0
        with open(segments.segment_path(place.folder, firsts[-1]), "rb", buffering=0) as file:
            found = os.fstat(file.fileno())
            if place.scanned != (firsts[-1], found.st_size, found.st_mtime_ns):
                os.fsync(file.fileno())
                place.held = end_of(file.read(), firsts[-1], place.epoch)
                place.scanned = firsts[-1], found.st_size, found.st_mtime_ns
        return place.held

    # --- reading -----------------------------------------------------------------------------------------------------

    def _take(self, place: _Place, count: int, size: int) -> list[bytes]:
        """Bodies from `place` on, which moves behind them; none where its segment ends or is damaged."""
        handle = self._files.handle(place.folder, place.first)
        if handle is None:
            return []
        wanted = max(_LEAST, min(size, count * place.typical) + segments.HEAD.size)
        data = os.pread(handle, wanted, place.position)
        bodies, end, state = segments.take(data, 0, place.sequence, count, size, place.epoch)
        if not bodies and state == "short" and len(data) >= segments.HEAD.size:
            length = segments.HEAD.unpack_from(data)[0]
            data = os.pread(handle, segments.HEAD.size + length, place.position)
            bodies, end, _ = segments.take(data, 0, place.sequence, 1, 1, place.epoch)
        place.position += end
        place.sequence += len(bodies)
        if bodies:
            place.typical = end // len(bodies) * 9 // 8 + segments.HEAD.size  # an eighth more, as sizes vary
        return bodies

    def _seek(self, partition: Partition, place: _Place, offset: int) -> None:
        """Puts `place` at the record `offset`; raises GapError if all segments begin behind it."""
        firsts = self._firsts(place)
        at = bisect_right(firsts, offset) - 1
        if at < 0:
            behind = min([self._renewed_end(place), *firsts[:1]])
            self._gap(partition, place, offset, behind, "damaged" if self._strays.ruined(place.folder) else "unlinked")
        place.first, place.position, place.sequence = firsts[at], 0, offset
        found = find_sound(self._rest(place, 0), 0, offset, offset + 1, place.epoch)
        if found is not None:
            place.position = found[0]

    def _pass_on(self, partition: Partition, place: _Place) -> None:
        """Moves `place` to its record elsewhere, in this segment or another one; raises GapError if it is nowhere."""
        sequence, firsts = place.sequence, self._firsts(place)
        following = next((first for first in firsts if first >= sequence and first != place.first), place.end)
        if following == sequence:
            place.first, place.position = sequence, 0
            return
        end = min(following, place.end)
        found = find_sound(self._rest(place, place.position), 0, sequence, end, place.epoch)
        if found is not None:
            place.position += found[0]
            if found[1] == sequence:
                return
        elif self._elsewhere(place, firsts):
            return
        self._gap(partition, place, sequence, found[1] if found is not None else end, "damaged")

    def _elsewhere(self, place: _Place, firsts: list[int]) -> bool:
        """Whether an earlier segment holds the record: a file with a part of its records may lie beside it."""
        before = [first for first in firsts if first < place.sequence and first != place.first]
        here = place.first, place.position
        for first in before[: -_NEAR - 1 : -1]:
            place.first = first
            if found := find_sound(self._rest(place, 0), 0, place.sequence, place.sequence + 1, place.epoch):
                place.position = found[0]
                return True
        place.first, place.position = here
        return False

    def _gap(self, partition: Partition, place: _Place, first: int, behind: int, otherwise: str) -> None:
        """Raises GapError for [first, behind); the writer's own note tells the cause. Reading goes on at `behind`."""
        gaps = segments.read_gaps(place.folder)
        cause = next((why for start, end, why in gaps if start < behind and end > first), otherwise)
        place.sequence = -1
        raise GapError(partition.topic, partition.name, first, behind, cause)

    def _firsts(self, place: _Place) -> list[int]:
        return self._strays.segments(place.folder, place.epoch)

    def _rest(self, place: _Place, position: int) -> bytes:
        handle = self._files.handle(place.folder, place.first)
        return b"" if handle is None else os.pread(handle, max(0, os.fstat(handle).st_size - position), position)
