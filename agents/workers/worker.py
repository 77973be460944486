"""The agent's view of one collector: when it is due, what it brought, and when it is given up.

A look that outlives the collector's deadline is given up with the place where it hangs (a process is killed), and the
collector is started anew elsewhere, later each time. A call that hangs in the kernel cannot be killed; STUCK of them
are the most that one collector may leave behind.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from agents.collector import Collector, Rhythm, settings
from agents.workers.errand import Delivery, State
from agents.workers.nursery import Nursery
from agents.workers.place import Place, in_process, in_thread

NO_DATA_S, NO_DATA_MOST_S = 60.0, 600.0
"""How long a source that is not there is left alone, twice as long each time up to the second figure, as Collector.open
promises. Chosen: a driver that loads within minutes of the boot is soon found, and a node without GPUs pays little."""
FAULT_S = 10.0
"""How long a collector that failed twice running is left alone; chosen: a failing driver call may be dear."""
RESTART_S, RESTART_MOST_S = 5.0, 600.0
"""First wait before a collector that was given up is started anew, and the longest; it doubles. Chosen: a wedged driver
is asked six times in the first three minutes, then every ten minutes."""
SOUND_S = 600.0
"""Who was sound for so long begins with the first wait again. Chosen, as the longest wait."""
STUCK = 3
"""Most places of one collector that may hang at once; chosen: 3 processes of 2 MiB hurt no node."""


class Worker:
    """Runs one collector, in a thread or process that may be given up. Only for the agent's own thread."""

    def __init__(
        self, collector: Collector, node: str, interval: float, monotonic: Callable[[], float], nursery: Nursery
    ) -> None:
        self.collector = collector
        self.state: State = "starting"
        self.reason = ""
        self.restarts = 0
        self.latency = math.nan
        self.sound = monotonic()
        self.place: Place | None = None
        self.alone = False
        self._vanished = False
        self._node, self._interval, self._monotonic = node, interval, monotonic
        self._nursery = nursery
        self._rhythm = Rhythm(node, lambda: self._time)
        self._time = 0
        self._stuck: list[Place] = []
        self._waited: float | None = None
        self._until, self._absent = float("-inf"), NO_DATA_S
        self._faults = self._losses = 0
        self._lost = float("-inf")

    @property
    def busy(self) -> bool:
        return self._waited is not None

    @property
    def silence(self) -> float:
        """Seconds since the last look that brought a reading (or since the start)."""
        return self._monotonic() - self.sound

    @property
    def waiting(self) -> bool:
        """Whether it has no place and may have one now."""
        return self.place is None and self._monotonic() >= self._until

    def due(self, time: int, tell: bool) -> bool:
        """Whether a look is due at this tick and none is under way; `tell` wants the inventory."""
        self._time = time
        if self.busy or self._monotonic() < self._until:
            return False
        beat = self.collector.interval <= self._interval or self._rhythm.due(self.collector.interval)
        return beat or tell

    def ask(self, tell: bool) -> bool:
        """Starts a look, if it has a place."""
        if self.place is None:
            return False
        self._waited, self._vanished = 0.0, False
        try:
            self.place.ask(tell)
        except OSError:  # it ended since its last answer: `take` meets the end and says how
            self._vanished = True
        return True

    @property
    def overdue(self) -> bool:
        """Whether the look under way has outlived the deadline."""
        return self._waited is not None and self._waited > self.collector.deadline

    @property
    def pids(self) -> set[int]:
        """Processes in which it is, or has left a call behind."""
        places = [*self._stuck, *([self.place] if self.place else [])]
        return {place.pid for place in places if place.pid}

    def age(self, seconds: float) -> None:
        """So much time has passed in which the look under way could have answered."""
        if self._waited is not None:
            self._waited += seconds

    def take(self) -> Delivery | None:
        """What became of the look under way, once: its delivery, or that it was given up."""
        if self._waited is None or self.place is None:
            return None
        try:
            found = self.place.receive()
        except EOFError as end:
            self.alone |= not self._vanished  # it may be what ended the process: its mates are kept out of that
            return self._lose("fault", f"{self.place.leave(ended=True)}{end}")
        if found is not None:
            return self._arrived(found)
        if self.overdue:
            self.alone = True
            self.place.leave()
            return self._lose("hung", f"no answer within {self.collector.deadline:g} s")
        return None

    def forget_gone(self) -> None:
        """Lets go of places that were left, once nothing hangs in them any more."""
        self._stuck = [place for place in self._stuck if not place.gone()]

    def settle(self) -> None:
        """Finds the collector a place of its own, but not while too many of its calls hang."""
        self.forget_gone()
        if len(self._stuck) >= STUCK:
            self.reason = f"{len(self._stuck)} calls hang in the kernel; it starts anew when one comes back"
            return
        try:
            if self.collector.isolated:
                (self.place,) = in_process([self.fresh()], self._node, self._nursery)
            else:
                self.place = in_thread(self.fresh(), self._node, self._nursery)
        except OSError as error:
            self.unsettled(error)

    def unsettled(self, error: OSError) -> None:
        """There was no process for it."""
        self._until = self._monotonic() + RESTART_S
        self.reason = f"no process for it: {error}"

    def fresh(self) -> Collector:
        """The collector as it was configured: what a call left behind in one that was given up is not taken over."""
        return type(self.collector)(**settings(self.collector)) if self.restarts else self.collector

    def vacate(self) -> None:
        """What is not there needs no process."""
        if self.place is not None:
            self.place.leave()
            self._stuck += [] if self.place.gone() else [self.place]
            self.place = None

    def end(self) -> None:
        """Asks the collector to close, unless it hangs."""
        if self.place is not None and not self.busy:
            self.place.stop()

    def ended(self, timeout: float) -> None:
        """Waits for that, and lets go of every place."""
        if self.place is not None and not self.busy:
            self.place.stopped(timeout)
        for place in [*self._stuck, *([self.place] if self.place else [])]:
            place.close()

    def _arrived(self, found: Delivery) -> Delivery:
        self._waited, self.latency, now = None, found.took, self._monotonic()
        self.state, self.reason = found.state, found.reason
        self._faults = self._faults + 1 if found.state == "fault" else 0
        if found.state == "ok":
            self.sound = now
            self._losses = 0 if now - self._lost > SOUND_S else self._losses
            self._absent = NO_DATA_S
        elif found.state == "no data":
            self._until, self._absent = now + self._absent, min(2 * self._absent, NO_DATA_MOST_S)
            if self.place is not None and self.place.alone:
                self.vacate()
        elif self._faults > 1:
            self._until = now + FAULT_S
        return found

    def _lose(self, state: State, reason: str) -> Delivery:
        assert self.place is not None
        took, self._waited = self._waited or 0.0, None
        self._stuck += [] if self.place.gone() else [self.place]
        self.place = None
        self._losses += 1
        self.restarts += 1
        self._lost = self._monotonic()
        wait = min(RESTART_S * 2 ** (self._losses - 1), RESTART_MOST_S)
        self._until, self.latency = self._lost + wait, took
        self.state, self.reason = state, f"{reason}; given up, started anew in {wait:g} s"
        return Delivery(state, self.reason, took=took)
