"""Where one collector runs at present: a thread of the agent or a process of its own, behind a socket pair."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Sequence

from agents.collector import Collector
from agents.workers.errand import LENGTH, LOOK, LOOK_AND_TELL, Delivery, serve, unpacked
from agents.workers.nursery import RUNNING, Nursery

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
