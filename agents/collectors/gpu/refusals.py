"""What a GPU refuses to tell, and when to ask again: hourly for what it never told, soon for what it told before.

A driver may say "not supported" for some seconds, such as while it resets a GPU; that must not blind us for an hour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from agents.collectors.gpu.slots import Place
from pipeline.model.records import SECOND

SOON = 10 * SECOND
"""First wait for what was told before; doubled each time it is refused again. Chosen: the rhythm of most signals."""
SELDOM = 3600 * SECOND
"""Longest wait."""


class Refusals:
    """By GPU and by what is asked (a call or a field). `now` is that of the look under way."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._answered = [place.answered for place in places]
        self._until: dict[tuple[int, str], float] = {}
        self._waits: dict[tuple[int, str], int] = {}
        self._news: dict[int, list[str]] = {}
        self._now, self._next = 0, math.inf

    def wake(self, now: int, everything: bool) -> bool:
        """Begins a look; whether to ask again for something that was refused. everything: what never answered too."""
        self._now = now
        if not everything and now < self._next:
            return False
        self._until = {} if everything else {key: until for key, until in self._until.items() if until > now}
        self._next = min(self._until.values(), default=math.inf)
        return True

    def refused(self, gpu: int, what: str) -> bool:
        """Whether not to ask for it now."""
        return (gpu, what) in self._until

    def refuse(self, gpu: int, what: str, name: str) -> None:
        """The GPU refused it. name: what to call it in the news."""
        key = gpu, what
        if what not in self._answered[gpu]:
            self._until[key] = math.inf
            return
        if key not in self._waits:
            self._news.setdefault(gpu, []).append(name)
        wait = self._waits.get(key, SOON)
        self._waits[key] = min(2 * wait, SELDOM)
        self._until[key] = self._now + wait
        self._next = min(self._next, self._until[key])

    def answer(self, gpu: int, what: str) -> None:
        """The GPU told it."""
        self._answered[gpu].add(what)
        if self._waits:
            self._waits.pop((gpu, what), None)

    def steady(self, gpu: int, what: str) -> bool:
        """Whether it was told when last asked for, so that another answer is no news."""
        return what in self._answered[gpu] and (gpu, what) not in self._waits

    def forget(self, gpu: int) -> None:
        """The GPU is lost, which says it all; when it is back, it is asked everything again."""
        self._until = {key: until for key, until in self._until.items() if key[0] != gpu}
        self._waits = {key: wait for key, wait in self._waits.items() if key[0] != gpu}
        self._news.pop(gpu, None)
        self._next = -math.inf

    def news(self, gpu: int) -> list[str]:
        """What the GPU refused since this was last asked, though it had told it before."""
        return self._news.pop(gpu, [])
