"""SpoolTransport: reads agents' spools straight from disk. Partition = node, incarnation = epoch, offset = sequence.

Never reads beyond the writer's mark, so whatever it returns is durable. Holds at most one read of one segment in memory
(max_bytes, and a whole segment only to find the way round damage) and OPEN open files, none of a segment it has passed.

What cannot be read or written here (rights, disk) costs only its own node: `reachable` tells it, the others go on.
"""

from __future__ import annotations

import errno
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import GapError
from pipeline.transport import Message, Partition, segments
from pipeline.transport.cursors import Cursors

OPEN = 256
"""Segments held open at once; chosen: a quarter of the usual limit of 1,024 files."""
_OURS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # this process wants for something: no fault of one node
_LEAST = 4096  # bytes of the smallest read, one page
_SETTLED_NS = 2_000_000_000  # a folder changed longer ago than this before it was listed has no unseen change


@dataclass(slots=True)
class _Place:
    """Where reading stands: record `sequence` lies at `position` of the segment that begins at `first`."""

    folder: Path
    end: int = 0
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
        self._cursors = Cursors(reader, self._folder_of, monotonic)
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
                self._places[partition] = _Place(folder)
        self._cursors.retry()
        return tuple(found)

    def bounds(self, partition: Partition) -> tuple[int, int]:
        place = self._place(partition)
        if place is None:
            return 0, 0
        try:
            end = self._renewed_end(place)
            return min([*segments.segments(place.folder)[:1], end]), end
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
            bodies, state = self._take(place, count, max_bytes)
            if bodies:
                return [Message(partition, at, body) for at, body in enumerate(bodies, offset)]
            self._pass_on(partition, place, state)

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
        self._files.close(self._places.pop(partition).folder)
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
        mark = segments.read_mark(place.folder)
        if mark is not None:
            place.end = mark.sequence
        return place.end

    # --- reading -----------------------------------------------------------------------------------------------------

    def _take(self, place: _Place, count: int, size: int) -> tuple[list[bytes], str]:
        """Bodies from `place` on, which moves behind them, or none and why: "short" (the segment ends) or "bad"."""
        handle = self._files.handle(place.folder, place.first)
        if handle is None:
            return [], "short"
        wanted = max(_LEAST, min(size, count * place.typical) + segments.HEAD.size)
        data = os.pread(handle, wanted, place.position)
        bodies, end, state = segments.take(data, 0, place.sequence, count, size)
        if not bodies and state == "short" and len(data) >= segments.HEAD.size:
            length = segments.HEAD.unpack_from(data)[0]
            data = os.pread(handle, segments.HEAD.size + length, place.position)
            bodies, end, state = segments.take(data, 0, place.sequence, 1, 1)
        place.position += end
        place.sequence += len(bodies)
        if bodies:
            place.typical = end // len(bodies) * 9 // 8 + segments.HEAD.size  # an eighth more, as sizes vary
        return bodies, state

    def _seek(self, partition: Partition, place: _Place, offset: int) -> None:
        """Puts `place` at the record `offset`; raises GapError if all segments begin behind it."""
        firsts = segments.segments(place.folder)
        at = bisect_right(firsts, offset) - 1
        if at < 0:
            self._gap(partition, place, offset, firsts[0] if firsts else place.end, firsts, "unlinked")
        place.first, place.sequence = firsts[at], offset
        data = self._rest(place, 0)
        position, sequence = 0, place.first
        while sequence < offset and position + segments.HEAD.size <= len(data):
            length, _, found = segments.HEAD.unpack_from(data, position)
            if found != sequence:
                place.position = (segments.resync(data, offset, offset + 1) or (position, offset))[0]
                return
            position, sequence = position + segments.HEAD.size + length, sequence + 1
        place.position = position

    def _pass_on(self, partition: Partition, place: _Place, state: str) -> None:
        """Moves `place` over the end of a segment; raises GapError where records are missing."""
        sequence, firsts = place.sequence, segments.segments(place.folder)
        following = next((first for first in firsts if first > place.first), None)
        if state == "short" and following == sequence:
            place.first, place.position = sequence, 0
            return
        end = min(following, place.end) if following is not None else place.end
        if found := segments.resync(self._rest(place, place.position), sequence + 1, end):
            place.position += found[0]
            place.sequence = found[1]
            self._raise(partition, place, sequence, found[1], "damaged")
        self._gap(partition, place, sequence, end, firsts, "damaged")

    def _gap(
        self, partition: Partition, place: _Place, offset: int, end: int, firsts: list[int], otherwise: str
    ) -> None:
        """Raises GapError from `offset` to the next record that can be; the writer's own note tells the cause."""
        gaps = segments.read_gaps(place.folder)
        cause = next((why for first, behind, why in gaps if first < end and behind > offset), otherwise)
        place.sequence = -1
        self._files.close(place.folder)
        if end in firsts:
            place.first, place.position, place.sequence = end, 0, end
        self._raise(partition, place, offset, end, cause)

    def _raise(self, partition: Partition, place: _Place, first: int, end: int, cause: str) -> None:
        raise GapError(partition.topic, partition.name, first, end, cause)

    def _rest(self, place: _Place, position: int) -> bytes:
        handle = self._files.handle(place.folder, place.first)
        return b"" if handle is None else os.pread(handle, max(0, os.fstat(handle).st_size - position), position)
