"""Calls and fields that a GPU refuses, and when to retry them: hourly if they never succeeded, soon if they did.

A driver may return "not supported" for some seconds, for example during a GPU reset. That must not hide a signal for an
hour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from agents.collectors.gpu.slots import GpuSlot
from pipeline.model.records import SECOND

FIRST_RETRY_US = 10 * SECOND
"""First wait before a retry of what succeeded before; doubled after each refusal. Chosen: the interval of most
signals."""
MAX_RETRY_US = 3600 * SECOND
"""Longest wait."""


class RefusedCalls:
    """Refusals by GPU and key (a call or a field). The time is that of the current read."""

    def __init__(self, places: Sequence[GpuSlot]) -> None:
        self._answered = [place.answered_calls for place in places]
        self._retry_at: dict[tuple[int, str], float] = {}
        self._waits: dict[tuple[int, str], int] = {}
        self._new: dict[int, list[str]] = {}
        self._now, self._next_retry = 0, math.inf

    def start_read(self, now: int, everything: bool) -> bool:
        """Starts a read. Returns whether something refused is to be retried. retry_all: also what never succeeded."""
        self._now = now
        if not everything and now < self._next_retry:
            return False
        self._retry_at = {} if everything else {key: until for key, until in self._retry_at.items() if until > now}
        self._next_retry = min(self._retry_at.values(), default=math.inf)
        return True

    def is_refused(self, gpu: int, what: str) -> bool:
        """Returns whether to skip it now."""
        return (gpu, what) in self._retry_at

    def record_refusal(self, gpu: int, what: str, name: str) -> None:
        """Records a refusal. label: its name in events."""
        key = gpu, what
        if what not in self._answered[gpu]:
            self._retry_at[key] = math.inf
            return
        if key not in self._waits:
            self._new.setdefault(gpu, []).append(name)
        wait = self._waits.get(key, FIRST_RETRY_US)
        self._waits[key] = min(2 * wait, MAX_RETRY_US)
        self._retry_at[key] = self._now + wait
        self._next_retry = min(self._next_retry, self._retry_at[key])

    def record_answer(self, gpu: int, what: str) -> None:
        """Records a success."""
        self._answered[gpu].add(what)
        if self._waits:
            self._waits.pop((gpu, what), None)

    def is_steady(self, gpu: int, what: str) -> bool:
        """Returns whether the last call succeeded, so that another success is nothing new."""
        return what in self._answered[gpu] and (gpu, what) not in self._waits

    def reset_gpu(self, gpu: int) -> None:
        """Forgets the refusals of a GPU that is lost; when it is back, everything is retried."""
        self._retry_at = {key: until for key, until in self._retry_at.items() if key[0] != gpu}
        self._waits = {key: wait for key, wait in self._waits.items() if key[0] != gpu}
        self._new.pop(gpu, None)
        self._next_retry = -math.inf

    def take_new_refusals(self, gpu: int) -> list[str]:
        """Returns what the GPU refused since the last call of this method, although it had succeeded before."""
        return self._new.pop(gpu, [])
