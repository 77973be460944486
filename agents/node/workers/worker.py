"""The agent's side of one collector: when it is due, what it returned, when it timed out, and where it runs.

A collector runs in a thread of the agent or in another process, behind a socket pair. A read that exceeds the deadline
is abandoned together with its process, which is killed, and the collector is restarted elsewhere, with backoff. A call
that hangs in the kernel cannot be killed; one collector may leave at most MAX_STUCK of them behind.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence

from agents.collector import Collector, SamplingSchedule, collector_settings
from agents.node.workers.processes import RUNNING, WorkerProcesses
from agents.node.workers.read_server import (
    LENGTH,
    READ,
    READ_WITH_INVENTORY,
    ReadResult,
    State,
    serve_reads,
    unpack_result,
)

MAX_RESULT_BYTES = 8 << 20
"""Bytes of one result; chosen: 100 times that of 16 GPUs with 18 links each and their inventory."""
NO_DATA_S, NO_DATA_MAX_S = 60.0, 600.0
"""First and longest pause (s) for an absent source; it doubles, as Collector.open documents. Chosen: a driver that
loads within minutes of the boot is found soon, and a node without GPUs has little cost."""
FAULT_S = 10.0
"""Pause (s) after two faults in a row; chosen: a failing driver call may be expensive."""
RESTART_S, RESTART_MAX_S = 5.0, 600.0
"""First and longest pause (s) before an abandoned collector is restarted; it doubles. Chosen: a wedged driver gets six
calls in the first three minutes, then one every ten minutes."""
STABLE_S = 600.0
"""A collector that ran without loss for so long (s) starts with the first pause again; chosen: the longest pause."""
NO_PROCESS = "no process for it"
"""What the reason of a collector begins with that was not read, as no process could be started."""
MAX_STUCK = 3
"""Hanging clients of one collector at the same time; chosen: 3 processes of 2 MiB harm no node."""


class ReadClient:
    """The agent's end of the socket pair. Only `wait_stopped` waits for the other end.

    pid: the process, 0 for a thread of the agent.  alone: whether nothing else runs in it, so that it may be killed.
    """

    def __init__(self, channel: socket.socket, processes: WorkerProcesses, pid: int = 0, alone: bool = False) -> None:
        self._channel, self._processes, self.pid, self.alone = channel, processes, pid, alone
        self._received = bytearray()
        self._channel.setblocking(False)

    def fileno(self) -> int:
        """The socket, for poll()."""
        return self._channel.fileno()

    def request_read(self, with_inventory: bool) -> None:
        """Requests one read. Raises OSError if the other end is gone."""
        self._channel.send(READ_WITH_INVENTORY if with_inventory else READ)

    def receive_result(self) -> ReadResult | None:
        """The result, once it has arrived completely. Raises EOFError if the other end is gone."""
        try:
            while part := self._channel.recv(1 << 18):
                self._received += part
                if found := self._decode_result():
                    return found
        except BlockingIOError:
            return None
        except OSError as error:
            raise EOFError(f": {error.strerror}") from error
        raise EOFError

    def _decode_result(self) -> ReadResult | None:
        if len(self._received) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(self._received)
        if size > MAX_RESULT_BYTES:
            raise EOFError(f": it began a result of {size} bytes; expected at most {MAX_RESULT_BYTES}")
        if len(self._received) < LENGTH.size + size:
            return None
        try:
            found = unpack_result(bytes(memoryview(self._received)[LENGTH.size :]))
        except Exception as error:  # its memory is corrupt: treated like a worker that ended
            raise EOFError(f": it sent an unreadable result ({type(error).__name__})") from error
        self._received.clear()
        return found

    def abandon(self, ended: bool = False) -> str:
        """Leaves the worker: its own process is killed, a thread stays. Returns how it ended, for a person.

        ended: whether the other end has already closed its channel, whatever the kernel reports about its process.
        """
        self._shut_down_writing()
        if not self.pid:
            return "its thread ended"
        status = self._processes.kill(self.pid) if self.alone else self._processes.wait_status(self.pid)
        if status == RUNNING:
            return "it ended" if ended else "its process waits in the kernel"
        if os.WIFSIGNALED(status):
            return f"its process was killed by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"its process ended with exit code {os.waitstatus_to_exitcode(status)}"

    def process_ended(self) -> bool:
        """Whether its process has ended."""
        return bool(self.pid) and self._processes.wait_status(self.pid) != RUNNING

    def is_finished(self) -> bool:
        """Whether an abandoned worker holds nothing any more: its call returned, or its process ended."""
        try:
            while self._channel.recv(1 << 18):
                pass
        except BlockingIOError:
            return False
        except OSError:
            pass
        self._channel.close()
        return True

    def close(self) -> None:
        """Closes our end, whatever the other end does."""
        self._channel.close()

    def _shut_down_writing(self) -> None:
        with contextlib.suppress(OSError):  # the other end is already closed
            self._channel.shutdown(socket.SHUT_WR)

    def request_stop(self) -> None:
        """Requests the other end to close its collector and end."""
        self._shut_down_writing()

    def wait_stopped(self, timeout: float) -> bool:
        """Waits until the other end has closed its collector; whether it has."""
        with self._channel as channel:
            try:
                channel.settimeout(timeout)
                while channel.recv(1 << 18):
                    pass
            except TimeoutError:
                return False
            except OSError:
                return True
        return True


def start_thread(collector: Collector, node: str, processes: WorkerProcesses) -> ReadClient:
    """Runs a collector in a thread of this process."""
    ours, theirs = socket.socketpair()
    name = f"collector {collector.name}"
    threading.Thread(target=serve_reads, args=(theirs, collector, node), name=name, daemon=True).start()
    return ReadClient(ours, processes)


def start_process(collectors: Sequence[Collector], node: str, processes: WorkerProcesses) -> list[ReadClient]:
    """Runs collectors in one new process, each in a thread of it. Raises OSError if no process can be started."""
    pairs = [socket.socketpair() for _ in collectors]
    try:
        pid = processes.spawn(collectors, node, [theirs for _, theirs in pairs])
    except OSError:
        for ours, _ in pairs:
            ours.close()
        raise
    finally:
        for _, theirs in pairs:
            theirs.close()
    return [ReadClient(ours, processes, pid, alone=len(pairs) == 1) for ours, _ in pairs]


class _Backoff:
    """When a worker may be started and read again: pauses for absent sources, faults and losses."""

    def __init__(self) -> None:
        self._not_before, self._no_data_wait = float("-inf"), NO_DATA_S
        self._faults = self._losses = 0
        self._lost_at = float("-inf")

    def allows(self, now: float) -> bool:
        """Whether no pause is in effect at monotonic time `now`."""
        return now >= self._not_before

    def pause(self, now: float, seconds: float) -> None:
        """Pauses for `seconds`."""
        self._not_before = now + seconds

    def record_result(self, state: State, now: float) -> None:
        """Pauses for an absent source, longer each time, and from the second fault in a row."""
        self._faults = self._faults + 1 if state == "fault" else 0
        if state == "ok":
            self._losses = 0 if now - self._lost_at > STABLE_S else self._losses
            self._no_data_wait = NO_DATA_S
        elif state == "no data":
            self.pause(now, self._no_data_wait)
            self._no_data_wait = min(2 * self._no_data_wait, NO_DATA_MAX_S)
        elif self._faults > 1:
            self.pause(now, FAULT_S)

    def record_loss(self, now: float) -> float:
        """Pauses after an abandoned or ended worker, longer each time; the length of the pause in s."""
        self._losses += 1
        self._lost_at = now
        wait: float = min(RESTART_S * 2 ** (self._losses - 1), RESTART_MAX_S)
        self.pause(now, wait)
        return wait


class Worker:
    """Runs one collector, in a thread or process that can be abandoned. Only for the thread of the agent's loop.

    last_ok: monotonic time of the last successful read.  own_process: whether it may share its process no longer.
    """

    def __init__(
        self,
        collector: Collector,
        node: str,
        interval: float,
        monotonic: Callable[[], float],
        processes: WorkerProcesses,
    ) -> None:
        self.collector = collector
        self.state: State = "starting"
        self.reason = ""
        self.restarts = 0
        self.latency = math.nan
        self.last_ok = monotonic()
        self.client: ReadClient | None = None
        self.own_process = False
        self._vanished = False
        self._node, self._interval, self._monotonic = node, interval, monotonic
        self._processes = processes
        self._rhythm = SamplingSchedule(node, lambda: self._time)
        self._time = 0
        self._stuck: list[ReadClient] = []
        self._waited: float | None = None
        self._backoff = _Backoff()

    @property
    def busy(self) -> bool:
        """Whether a read is in progress."""
        return self._waited is not None

    @property
    def silence(self) -> float:
        """Seconds since the last successful read (or since the start)."""
        return self._monotonic() - self.last_ok

    @property
    def can_start(self) -> bool:
        """Whether it does not run and its pause is over."""
        return self.client is None and self._backoff.allows(self._monotonic())

    def is_due(self, time: int, with_inventory: bool) -> bool:
        """Whether a read is due at this tick and none is in progress."""
        self._time = time
        if self.busy or not self._backoff.allows(self._monotonic()):
            return False
        due = self.collector.interval <= self._interval or self._rhythm.due(self.collector.interval)
        return due or with_inventory

    def start_read(self, with_inventory: bool) -> bool:
        """Starts a read, if the worker runs; whether it does."""
        if self.client is None:
            return False
        self._waited, self._vanished = 0.0, False
        try:
            self.client.request_read(with_inventory)
        except OSError:  # it ended since its last result: `collect_result` finds the end and reports how
            self._vanished = True
        return True

    @property
    def overdue(self) -> bool:
        """Whether the read in progress has exceeded the deadline."""
        return self._waited is not None and self._waited > self.collector.deadline

    @property
    def pids(self) -> set[int]:
        """Processes in which it runs, or has abandoned a call."""
        clients = [*self._stuck, *([self.client] if self.client else [])]
        return {client.pid for client in clients if client.pid}

    def add_waiting_time(self, seconds: float) -> None:
        """Adds time in which the read in progress could have finished."""
        if self._waited is not None:
            self._waited += seconds

    def collect_result(self) -> ReadResult | None:
        """The result of the read in progress, or of abandoning it, once; None while it runs or if there is none."""
        if self._waited is None or self.client is None:
            return None
        try:
            found = self.client.receive_result()
        except EOFError as end:
            self.own_process |= not self._vanished  # it may have ended the process: it may share none any more
            return self._record_loss("fault", f"{self.client.abandon(ended=True)}{end}")
        if found is not None:
            return self._record_result(found)
        if self.overdue:
            self.own_process = True
            self.client.abandon()
            return self._record_loss("hung", f"no answer within {self.collector.deadline:g} s")
        return None

    def drop_finished(self) -> None:
        """Removes abandoned clients in which nothing hangs any more."""
        self._stuck = [client for client in self._stuck if not client.is_finished()]

    def start(self) -> None:
        """Starts the collector in its own process or thread, unless too many of its calls hang."""
        self.drop_finished()
        if len(self._stuck) >= MAX_STUCK:
            self.reason = f"{len(self._stuck)} calls hang in the kernel; it restarts when one of them returns"
            return
        try:
            if self.collector.isolated:
                (self.client,) = start_process([self.new_collector()], self._node, self._processes)
            else:
                self.client = start_thread(self.new_collector(), self._node, self._processes)
        except OSError as error:
            self.record_start_failure(error)

    def record_start_failure(self, error: OSError) -> None:
        """Records that no process could be started; it is tried again after RESTART_S."""
        self._backoff.pause(self._monotonic(), RESTART_S)
        self.reason = f"{NO_PROCESS}: {error}"

    def new_collector(self) -> Collector:
        """The collector as configured; after a restart a new one, without the state of the abandoned one."""
        return type(self.collector)(**collector_settings(self.collector)) if self.restarts else self.collector

    def release(self) -> None:
        """Ends the worker until its next start: an absent source needs no process."""
        if self.client is not None:
            self.client.abandon()
            self._stuck += [] if self.client.is_finished() else [self.client]
            self.client = None

    def request_stop(self) -> None:
        """Requests the collector to close, unless it hangs."""
        if self.client is not None and not self.busy:
            self.client.request_stop()

    def wait_stopped(self, timeout: float) -> None:
        """Waits until the collector is closed, then closes all sockets."""
        if self.client is not None and not self.busy:
            self.client.wait_stopped(timeout)
        for client in [*self._stuck, *([self.client] if self.client else [])]:
            client.close()

    def _record_result(self, found: ReadResult) -> ReadResult:
        self._waited, self.latency, now = None, found.took, self._monotonic()
        self.state, self.reason = found.state, found.reason
        self._backoff.record_result(found.state, now)
        if found.state == "ok":
            self.last_ok = now
        elif found.state == "no data" and self.client is not None and self.client.alone:
            self.release()
        return found

    def _record_loss(self, state: State, reason: str) -> ReadResult:
        assert self.client is not None
        took, self._waited = self._waited or 0.0, None
        self._stuck += [] if self.client.is_finished() else [self.client]
        self.client = None
        self.restarts += 1
        wait = self._backoff.record_loss(self._monotonic())
        self.latency = took
        self.state, self.reason = state, f"{reason}; abandoned, restart in {wait:g} s"
        return ReadResult(state, self.reason, took=took)
