"""Joins the ticks of telemetry of one window of [agent] linger seconds into one batch.

Windows end at multiples of the linger, with the tick of that moment: a frame of the pipeline ends there too, so joining
delays no frame. A tick waits for at most the linger less one interval. Columns that were read in the same ticks of a
window form one block per class: one for each interval of sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.model.records import Batch, Block

MAX_BYTES = 1 << 20
"""Bytes of values that are joined at most, then they are sent early; chosen: 30 times those of a node with 8 GPUs in 5
s, and a sixteenth of the longest body."""


Times = TypeVar("Times", int, NDArray[np.int64])


def window_of(time: Times, linger: int) -> Times:
    """The number of the window that `time` (us) is in. linger: length of a window (us); its end belongs to it."""
    return -(-time // linger)


class TickJoiner:
    """The ticks of the present window. For one thread. linger, interval: in us; linger 0: each tick is a batch.

    count: ticks that wait.
    """

    def __init__(self, linger: int, interval: int) -> None:
        self._linger, self._interval = linger, interval
        self._waiting: list[Batch] = []
        self._bytes = 0

    @property
    def count(self) -> int:
        """Ticks that wait."""
        return len(self._waiting)

    def add_tick(self, batch: Batch) -> list[Batch]:
        """Adds the batch of one tick; returns the batches that are complete, oldest first."""
        if self._linger <= self._interval:
            return [batch]
        time, done = int(batch.times[0]), list[Batch]()
        # also after the clock was set back: the times of a batch ascend
        if self._waiting and not self._belongs(time):
            done.append(self._take())
        self._waiting.append(batch)
        self._bytes += sum(8 * len(block.entities) * len(block.columns) for block in batch.blocks)  # at most
        is_last = window_of(time + self._interval, self._linger) != window_of(time, self._linger)
        return [*done, self._take()] if is_last or self._bytes >= MAX_BYTES else done

    def flush(self) -> list[Batch]:
        """Returns the ticks that wait, as one batch, or none."""
        return [self._take()] if self._waiting else []

    def _belongs(self, time: int) -> bool:
        newest = int(self._waiting[-1].times[-1])
        return time > newest and window_of(time, self._linger) == window_of(newest, self._linger)

    def _take(self) -> Batch:
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        return join_batches(waiting)


def join_batches(batches: Sequence[Batch]) -> Batch:
    """One batch with the ticks of all, which have one origin and ascend. The devices of a class may change between."""
    if len(batches) == 1:
        return batches[0]
    starts = np.cumsum([0, *(len(batch.times) for batch in batches)]).tolist()
    lists: dict[tuple[str, tuple[str, ...]], int] = {}
    found: dict[tuple[int, str], tuple[list[int], list[NDArray[Any]]]] = {}
    for start, batch in zip(starts, batches, strict=False):
        for block in batch.blocks:
            own = range(len(batch.times)) if block.ticks is None else block.ticks
            ticks = [start + tick for tick in own]
            number = lists.setdefault((block.device_class, block.entities), len(lists))
            for name, values in block.columns.items():
                known = found.setdefault((number, name), ([], []))
                known[0].extend(ticks)
                known[1].append(values)
    blocks: dict[tuple[int, tuple[int, ...]], dict[str, NDArray[Any]]] = {}
    for (number, name), (ticks, pieces) in found.items():
        values = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        blocks.setdefault((number, tuple(ticks)), {})[name] = values
    named = list(lists)
    return Batch(
        batches[0].origin,
        np.concatenate([batch.times for batch in batches]),
        tuple(
            Block(*named[number], columns, None if len(ticks) == starts[-1] else ticks)
            for (number, ticks), columns in blocks.items()
        ),
    )
