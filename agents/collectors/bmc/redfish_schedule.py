"""Decides which resource of a BMC is read next: fast sensors first, the others in between, nothing during a pause."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from agents.collectors.bmc.redfish_document import ResourceScope
from agents.collectors.bmc.redfish_resources import RESOURCES, IntervalKey

PAUSE_SHARE, MIN_PAUSE_S, MAX_PAUSE_S = 0.25, 0.01, 30.0
"""Pause after a request, as a share of its duration. Chosen: a BMC, whose processor has other work, spends at most 80 %
of one connection on us; at most 30 s, so that one with responses of 3 minutes is still read 17 times an hour."""
BACKOFF_S, MAX_BACKOFF_S = 5.0, 600.0
"""First and longest wait after a BMC did not respond. Chosen: it restarts in minutes, and repeated attempts with a
wrong password would lock its account."""
MAX_FAST_IN_A_ROW = 8
"""Requests for fast sensors after which one other is sent, if there are more fast ones than fit a second. Chosen, so
that slow sensors get an eighth of the BMC's time."""
SLOW_SHARE = 20.0
"""A slow resource is read at most once in this many times its own response time, so that it takes 5 % of the time.
Chosen."""
FIRST_RETRY_S, MAX_RETRY_S = 60.0, 3600.0
"""First (at most) and longest wait before a failing resource is read again, while its BMC responds. Chosen: a BMC that
starts returns 404 or 500 for a minute."""

MAX_FAST_RETRY_S = 30.0
"""Longest wait before a failing flow, pressure or leak resource is read again. Chosen: a leak must not stay unread for
longer, and a request in 30 s costs a BMC nothing."""


@dataclass(slots=True)
class PollTarget:
    """One resource to read. interval: seconds; parent: path of the resource with its link.

    expand: query with which a collection includes its members. covers_members: whether it does, so that only the
    collection is polled. page: number of pages of the collection before this one.
    """

    path: str
    kind: str
    scope: ResourceScope
    interval: float
    parent: str = ""
    etag: str = ""
    failures: int = 0
    expand: str = ""
    covers_members: bool = False
    page: int = 0
    children: set[str] = field(default_factory=set)
    entities: set[str] = field(default_factory=set)

    @property
    def is_fast(self) -> bool:
        """Whether it is a flow, a pressure or a leak, or a collection that includes them."""
        return self.interval_key in ("fast", "leaks")

    @property
    def interval_key(self) -> IntervalKey:
        """Its interval: that of its members, if it includes them."""
        resource = RESOURCES[self.kind]
        return RESOURCES[resource.member].interval if self.covers_members else resource.interval


@dataclass
class PollSchedule:
    """Queues of (due time, priority, ...) of one BMC: urgent, fast and others. Times are monotonic seconds."""

    monotonic: Callable[[], float]
    random: Callable[[], float] = random.random
    _queues: tuple[list[tuple[float, int, int, PollTarget]], ...] = field(default_factory=lambda: ([], [], []))
    _due_at: dict[str, float] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _fast_in_a_row: int = 0
    _paused_until: float = -math.inf
    failures_in_a_row: int = 0

    def schedule(self, target: PollTarget, due: float = -math.inf, urgent: bool = False) -> None:
        """Schedules a target at `due`, replacing its earlier entry."""
        self._due_at[target.path] = due
        queue = self._queues[0 if urgent else 1 if target.is_fast else 2]
        heapq.heappush(queue, (due, RESOURCES[target.kind].priority, next(self._numbers), target))

    def unschedule(self, path: str) -> None:
        """Removes a target."""
        self._due_at.pop(path, None)

    def is_scheduled(self, path: str) -> bool:
        """Returns whether a target is scheduled."""
        return path in self._due_at

    def pop_due(self) -> PollTarget | None:
        """Returns the next target; None if none is due, or during a pause."""
        now = self.monotonic()
        if now < self._paused_until:
            return None
        urgent, fast, rest = (self._has_due(queue, now) for queue in self._queues)
        if fast and rest and self._fast_in_a_row >= MAX_FAST_IN_A_ROW:
            fast = False
        number = 0 if urgent else 1 if fast else 2 if rest else None
        if number is None:
            return None
        self._fast_in_a_row = self._fast_in_a_row + 1 if number < 2 else 0
        target = heapq.heappop(self._queues[number])[3]
        self.unschedule(target.path)
        return target

    def _has_due(self, queue: list[tuple[float, int, int, PollTarget]], now: float) -> bool:
        """Returns whether the first of a queue is due. Replaced entries are dropped."""
        while queue and self._due_at.get(queue[0][3].path) != queue[0][0]:
            heapq.heappop(queue)
        return bool(queue) and queue[0][0] <= now

    def seconds_until_due(self) -> float:
        """Returns the seconds until a request may be sent; infinity if nothing is scheduled."""
        now = self.monotonic()
        for queue in self._queues:
            self._has_due(queue, now)
        first = min((queue[0][0] for queue in self._queues if queue), default=math.inf)
        return max(0.0, max(first, self._paused_until) - now)

    def record_success(self, target: PollTarget, began: float) -> None:
        """Schedules a target again after it was read, later if its response takes long."""
        now = self.monotonic()
        took = now - began
        self.failures_in_a_row, target.failures = 0, 0
        every = target.interval if target.is_fast else max(target.interval, SLOW_SHARE * took)
        self._pause(now, took)
        self.schedule(target, max(began + every, now))

    def record_failure(self, target: PollTarget, began: float, bmc_down: bool, retry_after: float) -> float:
        """Schedules a target again after a failure. Returns the seconds of pause for the whole BMC, 0 if only the
        target pauses.

        While nothing responds, no single target is blamed. A target that fails alone is read at growing intervals.
        """
        now = self.monotonic()
        blamed = not (bmc_down and self.failures_in_a_row)
        target.failures += blamed
        first = BACKOFF_S if bmc_down else max(BACKOFF_S, min(target.interval, FIRST_RETRY_S))
        most = MAX_FAST_RETRY_S if target.is_fast else MAX_RETRY_S
        alone = min(most, first * 2.0 ** min(max(target.failures - 1, 0), 12)) if blamed else 0.0
        self.schedule(target, now + alone)
        self._pause(now, now - began)
        if not bmc_down:
            self.failures_in_a_row = 0
            return 0.0
        self.failures_in_a_row += 1
        longest = min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** min(self.failures_in_a_row - 1, 12))
        left = min(MAX_BACKOFF_S, max(retry_after, longest * (0.5 + 0.5 * self.random())))
        self._paused_until = max(self._paused_until, now + left)
        return left

    def retry_failed(self, targets: Iterable[PollTarget]) -> None:
        """Schedules targets that failed while their BMC failed for immediate reading."""
        for target in targets:
            if target.failures and self.is_scheduled(target.path):
                target.failures = 0
                self.schedule(target)

    def _pause(self, now: float, took: float) -> None:
        pause = min(MAX_PAUSE_S, max(MIN_PAUSE_S, PAUSE_SHARE * took))
        self._paused_until = max(self._paused_until, now + pause)
