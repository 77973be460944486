"""What one BMC is asked next: fast sensors first, the rest in between, and nothing while it is to be left alone."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from agents.collectors.bmc.redfish_document import Place
from agents.collectors.bmc.redfish_resources import RESOURCES, Pace

PAUSE_SHARE, PAUSE_LEAST_S, PAUSE_MOST_S = 0.25, 0.01, 30.0
"""Pause after a request, as a share of what it took: chosen, so that a BMC, whose processor has other work, gives us at
most 80 % of one connection; at most 30 s, so that one which answers after 3 minutes is still asked 17 times an hour."""
BACKOFF_S, BACKOFF_MOST_S = 5.0, 600.0
"""First and longest wait after a BMC did not answer; chosen: it restarts in minutes, and a wrong password, tried ever
again, would lock its account."""
FAST_IN_A_ROW = 8
"""Requests for fast sensors after which one other gets its turn, where more are fast than a second has room for;
chosen, so that slow sensors get an eighth of the BMC's time."""
SLOW_SHARE = 20.0
"""A slow resource is asked at most once in this many times its own answer, so that it takes 5 % of the time; chosen."""
PARTIAL_FIRST_S, PARTIAL_MOST_S = 60.0, 3600.0
"""First (at most) and longest wait before a resource that gives errors is asked again, while its BMC answers; chosen: a
BMC that starts says 404 or 500 for a minute."""

FAST_ALONE_MOST_S = 30.0
"""Longest wait before a flow, a pressure or a leak that gives errors is asked again; chosen: a leak that nobody reads
for longer is one that nobody sees, and a request in 30 s costs a BMC nothing."""


@dataclass(slots=True)
class Target:
    """One resource to read. every: seconds; parent: path of the resource that named it.

    expand: query with which a collection brings its members along. covers: whether it does, so that it alone is polled.
    page: how many pages of a collection came before this one.
    """

    path: str
    kind: str
    place: Place
    every: float
    parent: str = ""
    etag: str = ""
    failures: int = 0
    expand: str = ""
    covers: bool = False
    page: int = 0
    children: set[str] = field(default_factory=set)
    entities: set[str] = field(default_factory=set)

    @property
    def fast(self) -> bool:
        """Whether it is a flow, a pressure or a leak, or a collection that brings them along."""
        return self.pace in ("fast", "leaks")

    @property
    def pace(self) -> Pace:
        """How often it is read: as its members, where it brings them along."""
        resource = RESOURCES[self.kind]
        return RESOURCES[resource.member].pace if self.covers else resource.pace


@dataclass
class Schedule:
    """Queues of (when due, order, ...) of one BMC: urgent, fast and the rest. Times are monotonic seconds."""

    monotonic: Callable[[], float]
    chance: Callable[[], float] = random.random
    _queues: tuple[list[tuple[float, int, int, Target]], ...] = field(default_factory=lambda: ([], [], []))
    _when: dict[str, float] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _in_a_row: int = 0
    _not_before: float = -math.inf
    failing: int = 0

    def put(self, target: Target, due: float = -math.inf, urgent: bool = False) -> None:
        """Asks for a target at `due`; what was asked of it before no longer holds."""
        self._when[target.path] = due
        queue = self._queues[0 if urgent else 1 if target.fast else 2]
        heapq.heappush(queue, (due, RESOURCES[target.kind].before, next(self._numbers), target))

    def drop(self, path: str) -> None:
        """Asks for it no more."""
        self._when.pop(path, None)

    def waits(self, path: str) -> bool:
        """Whether it will be asked for."""
        return path in self._when

    def next(self) -> Target | None:
        """The target whose turn it is; None where none is due, or the BMC is to be left alone."""
        now = self.monotonic()
        if now < self._not_before:
            return None
        urgent, fast, rest = (self._due(queue, now) for queue in self._queues)
        if fast and rest and self._in_a_row >= FAST_IN_A_ROW:
            fast = False
        number = 0 if urgent else 1 if fast else 2 if rest else None
        if number is None:
            return None
        self._in_a_row = self._in_a_row + 1 if number < 2 else 0
        target = heapq.heappop(self._queues[number])[3]
        self.drop(target.path)
        return target

    def _due(self, queue: list[tuple[float, int, int, Target]], now: float) -> bool:
        """Whether the first of a queue is due; what no longer holds is dropped on the way."""
        while queue and self._when.get(queue[0][3].path) != queue[0][0]:
            heapq.heappop(queue)
        return bool(queue) and queue[0][0] <= now

    def wait(self) -> float:
        """Seconds until something may be asked; infinity where there is nothing."""
        now = self.monotonic()
        for queue in self._queues:
            self._due(queue, now)
        first = min((queue[0][0] for queue in self._queues if queue), default=math.inf)
        return max(0.0, max(first, self._not_before) - now)

    def answered(self, target: Target, began: float) -> None:
        """The target was read; it is due again in its time, later where its answer takes long."""
        now = self.monotonic()
        took = now - began
        self.failing, target.failures = 0, 0
        every = target.every if target.fast else max(target.every, SLOW_SHARE * took)
        self._rest(now, took)
        self.put(target, max(began + every, now))

    def failed(self, target: Target, began: float, away: bool, after: float) -> float:
        """The target was not read; returns the seconds that the BMC is left alone, 0 where only the target is.

        While nothing answers, no target is blamed for it; one that alone does not is asked ever more seldom.
        """
        now = self.monotonic()
        blamed = not (away and self.failing)
        target.failures += blamed
        first = BACKOFF_S if away else max(BACKOFF_S, min(target.every, PARTIAL_FIRST_S))
        most = FAST_ALONE_MOST_S if target.fast else PARTIAL_MOST_S
        alone = min(most, first * 2.0 ** min(max(target.failures - 1, 0), 12)) if blamed else 0.0
        self.put(target, now + alone)
        self._rest(now, now - began)
        if not away:
            self.failing = 0
            return 0.0
        self.failing += 1
        longest = min(BACKOFF_MOST_S, BACKOFF_S * 2.0 ** min(self.failing - 1, 12))
        left = min(BACKOFF_MOST_S, max(after, longest * (0.5 + 0.5 * self.chance())))
        self._not_before = max(self._not_before, now + left)
        return left

    def afresh(self, targets: Iterable[Target]) -> None:
        """What gave errors while its BMC gave nothing else is asked again now."""
        for target in targets:
            if target.failures and self.waits(target.path):
                target.failures = 0
                self.put(target)

    def _rest(self, now: float, took: float) -> None:
        pause = min(PAUSE_MOST_S, max(PAUSE_LEAST_S, PAUSE_SHARE * took))
        self._not_before = max(self._not_before, now + pause)
