"""Messages that repeat an earlier one but for times and values: compared with it and read in place, not walked.

Most senders repeat the same bytes at every scrape. In OTLP the times and values of number points are 8 bytes each, so
they stay at their places. What is equal everywhere else was checked when the earlier message was walked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.foreign import walker
from pipeline.foreign.compiled import Bytes, read_field, read_word
from pipeline.foreign.walker import Flat, Table
from pipeline.model.compiling import compiled

MOST_BYTES = 64 << 20
"""Most bytes of kept messages with their places; beyond it the least recently used goes. Chosen: 1,500 senders of 320
series each."""
MOST_HEAD = 1024
"""Most bytes of the first resource, by which an earlier message is found: it has the name of the sender. Chosen: ten
times what senders write. Of senders that have these bytes in common, the last one is kept."""
_START_TIME, _TIME, _DOUBLE, _INTEGER = 17, 25, 33, 49  # tags of fields of NumberDataPoint with 8 bytes that may change
_ENTRY_BYTES = 500  # of an entry and its objects; measured with sys.getsizeof
Places = NDArray[np.int64]
PlanKey = tuple[int, int, int, str]
"""Both lanes of a resource's hash, its number of values, and the node that all of it belongs to ("": it says which)."""

_Key = tuple[bytes, int, str]  # first resource of a message, its length, and the node that all of it belongs to


@dataclass(frozen=True, slots=True)
class Repeated:
    """A message that was walked.

    changing: ascending places of 8 bytes that may differ.  points: (values, 3) place of the time and of the value, and
    form of the value.  parts: of each resource the key of its plan, its first value, and the one after its last.
    """

    message: Bytes
    changing: Places
    points: Table
    parts: tuple[tuple[PlanKey, int, int], ...]

    @property
    def size(self) -> int:
        """Bytes kept."""
        return self.message.nbytes + self.changing.nbytes + self.points.nbytes


class RepeatedMessages:
    """A message of each sender. For one thread."""

    def __init__(self) -> None:
        # None: such a message came once; keeping all of those that never repeat would cost a third of their reading
        self._kept: OrderedDict[_Key, Repeated | None] = OrderedDict()
        self._size = 0
        self._values = np.zeros((0, 8), np.int64)

    def find(self, message: bytes | memoryview, node: str) -> tuple[Repeated, Table] | None:
        """The earlier message that this one repeats, with its values as the walker gives them: BITS, FORM and TIME.

        The values are valid until the next call. node: the one that all of the message belongs to, or "".
        """
        known = self._kept.get(key := _key_of(message, node))
        if known is None:
            return None
        b = np.frombuffer(message, np.uint8)
        if not _repeats(b, known.message, known.changing):
            self._put(key, None)
            return None
        self._kept.move_to_end(key)
        if len(self._values) < len(known.points):
            self._values = np.zeros((2 * len(known.points), 8), np.int64)
        _read_points(b, known.points, self._values)
        return known, self._values

    def keep(
        self, message: bytes | memoryview, node: str, flat: Flat, parts: Sequence[tuple[PlanKey, int, int]]
    ) -> None:
        """Keeps a walked message, if everything in it that may change has a place of its own."""
        counts = flat.counts
        if counts[walker.EXEMPLARS] or counts[walker.BUCKETS] or counts[walker.STALE]:
            return
        if (key := _key_of(message, node)) not in self._kept:
            self._put(key, None)
            return
        b, values = np.frombuffer(bytes(message), np.uint8), flat.values[: counts[walker.VALUES]]
        points, changing = np.empty((len(values), 3), np.int64), np.empty(3 * len(values), np.int64)
        if (found := _find_places(b, values, points, changing)) >= 0:
            self._put(key, Repeated(b, changing[:found].copy(), points, tuple(parts)))

    def _put(self, key: _Key, known: Repeated | None) -> None:
        self._drop(key)
        self._kept[key] = known
        self._size += _size_of(key, known)
        while self._size > MOST_BYTES:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: _Key) -> None:
        if key in self._kept:
            self._size -= _size_of(key, self._kept.pop(key))


def _size_of(key: _Key, known: Repeated | None) -> int:
    return _ENTRY_BYTES + len(key[0]) + (0 if known is None else known.size)


def _key_of(message: bytes | memoryview, node: str) -> _Key:
    """What a message has in common with those that it may repeat."""
    _, at = _read_length(message, 1)  # after the tag of ResourceMetrics
    length, first = _read_length(message, at + 1)  # after the tag of Resource
    return bytes(message[first : first + min(length, MOST_HEAD)]), len(message), node


def _read_length(message: bytes | memoryview, at: int) -> tuple[int, int]:
    """(the length at `at`, the place after it); (0, the end) without one. The walker finds what is malformed."""
    length = 0
    for i, byte in enumerate(message[at : at + 10]):
        length |= (byte & 127) << 7 * i
        if byte < 128:
            return length, at + i + 1
    return 0, len(message)


@compiled
def _find_places(b: Bytes, values: Table, points: Table, changing: Places) -> int:
    """Fills `points` and `changing`; the number of the latter, -1 if a value has other fields that change."""
    n = 0
    for i in range(len(values)):
        if values[i, walker.PART] != walker.VALUE:
            return -1
        times = numbers = starts = 0
        p, end = values[i, walker.AT], values[i, walker.END]
        while p < end:
            tag, _, start, after = read_field(b, p, end)
            if tag in (_START_TIME, _TIME, _DOUBLE, _INTEGER):
                if tag == _START_TIME:
                    starts += 1
                elif tag == _TIME:
                    times, points[i, 0] = times + 1, start
                else:
                    numbers, points[i, 1] = numbers + 1, start
                if times > 1 or numbers > 1 or starts > 1:
                    return -1
                changing[n] = start
                n += 1
            p = after
        if times != 1 or numbers != 1:
            return -1
        points[i, 2] = values[i, walker.FORM]
    return n


@compiled
def _repeats(b: Bytes, known: Bytes, changing: Places) -> bool:
    """Whether two messages of one length are equal but for the 8 bytes at each place of `changing`."""
    at = 0
    for n in range(len(changing) + 1):
        end = changing[n] if n < len(changing) else len(b)
        while at + 8 <= end:
            if read_word(b, at) != read_word(known, at):
                return False
            at += 8
        while at < end:
            if b[np.uint64(at)] != known[np.uint64(at)]:
                return False
            at += 1
        at = end + 8
    return True


@compiled
def _read_points(b: Bytes, points: Table, values: Table) -> None:
    """Reads times and values into rows as the walker writes them."""
    for i in range(len(points)):
        values[i, walker.TIME] = np.int64(read_word(b, points[i, 0]))
        values[i, walker.BITS] = np.int64(read_word(b, points[i, 1]))
        values[i, walker.FORM] = points[i, 2]
