"""The agent's side of one collector: when it is due, what it returned, when it timed out, and where it runs.

A collector runs in a thread of the agent or in another process, behind a socket pair. A read that exceeds the deadline
is abandoned together with its process, which is killed, and the collector is restarted elsewhere, with backoff. A call
that hangs in the kernel cannot be killed; one collector may leave at most STUCK of them behind.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence

from agents.collector import Collector, Rhythm, settings
from agents.node.workers.processes import RUNNING, Nursery
from agents.node.workers.read_server import LENGTH, LOOK, LOOK_AND_TELL, Delivery, State, serve, unpacked

MAX_ANSWER = 8 << 20
"""Bytes of one answer; chosen: 100 times what 16 GPUs with 18 links each and their inventory make."""


class Place:
    """The agent's end of the socket pair. Nothing here waits for the far end, but `stopped`.

    pid: the process, 0 for a thread of the agent. alone: whether nobody else is in it, so that it may be killed.
    """

    def __init__(self, channel: socket.socket, nursery: Nursery, pid: int = 0, alone: bool = False) -> None:
        self._ours, self._nursery, self.pid, self.alone = channel, nursery, pid, alone
        self._answer = bytearray()
        self._ours.setblocking(False)

    def fileno(self) -> int:
        return self._ours.fileno()

    def ask(self, tell: bool) -> None:
        """Wants one look. Raises OSError if the far end is gone."""
        self._ours.send(LOOK_AND_TELL if tell else LOOK)

    def receive(self) -> Delivery | None:
        """What the look brought, once all of it is here. Raises EOFError if the far end is gone."""
        try:
            while part := self._ours.recv(1 << 18):
                self._answer += part
                if found := self._whole():
                    return found
        except BlockingIOError:
            return None
        except OSError as error:
            raise EOFError(f": {error.strerror}") from error
        raise EOFError

    def _whole(self) -> Delivery | None:
        if len(self._answer) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(self._answer)
        if size > MAX_ANSWER:
            raise EOFError(f": it began an answer of {size} bytes; wanted at most {MAX_ANSWER}")
        if len(self._answer) < LENGTH.size + size:
            return None
        try:
            found = unpacked(bytes(memoryview(self._answer)[LENGTH.size :]))
        except Exception as error:  # a worker whose memory was spoilt: it is given up, like one that ended
            raise EOFError(f": it sent what cannot be read ({type(error).__name__})") from error
        self._answer.clear()
        return found

    def leave(self, ended: bool = False) -> str:
        """Gives the place up; a process of its own is killed, a thread stays behind. How it ended, for a person.

        ended: whether the far end has closed its channel already, however much the kernel knows of its process.
        """
        self._shut()
        if not self.pid:
            return "its thread ended"
        status = self._nursery.end(self.pid) if self.alone else self._nursery.status(self.pid)
        if status == RUNNING:
            return "it ended" if ended else "its process waits in the kernel"
        if os.WIFSIGNALED(status):
            return f"its process was killed by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"its process ended with exit code {os.waitstatus_to_exitcode(status)}"

    def ended(self) -> bool:
        """Whether its process has ended."""
        return bool(self.pid) and self._nursery.status(self.pid) != RUNNING

    def gone(self) -> bool:
        """Whether a place that was left holds nothing any more: its call has come back, or its process has ended."""
        try:
            while self._ours.recv(1 << 18):
                pass
        except BlockingIOError:
            return False
        except OSError:
            pass
        self._ours.close()
        return True

    def close(self) -> None:
        """Lets go of our end, whatever the far end does."""
        self._ours.close()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):  # the far end was quicker
            self._ours.shutdown(socket.SHUT_WR)

    def stop(self) -> None:
        """Asks the far end to close its collector and end."""
        self._shut()

    def stopped(self, timeout: float) -> bool:
        """Waits until the far end has closed its collector; whether it has."""
        with self._ours as ours:
            try:
                ours.settimeout(timeout)
                while ours.recv(1 << 18):
                    pass
            except TimeoutError:
                return False
            except OSError:
                return True
        return True


def in_thread(collector: Collector, node: str, nursery: Nursery) -> Place:
    """A place in a thread of this process."""
    ours, theirs = socket.socketpair()
    name = f"collector {collector.name}"
    threading.Thread(target=serve, args=(theirs, collector, node), name=name, daemon=True).start()
    return Place(ours, nursery)


def in_process(collectors: Sequence[Collector], node: str, nursery: Nursery) -> list[Place]:
    """Places in one new process, each in a thread of it. Raises OSError if there can be none."""
    pairs = [socket.socketpair() for _ in collectors]
    try:
        pid = nursery.spawn(collectors, node, [theirs for _, theirs in pairs])
    except OSError:
        for ours, _ in pairs:
            ours.close()
        raise
    finally:
        for _, theirs in pairs:
            theirs.close()
    return [Place(ours, nursery, pid, alone=len(pairs) == 1) for ours, _ in pairs]


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
