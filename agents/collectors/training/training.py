"""The collector `training`: receives training steps on a socket and reports step times, loss, norms and digests.

Scripts send through agents.training (docs/training.md).

The kernel queues few datagrams (net.unix.max_dgram_qlen), so one read a second is too seldom. But a thread that waits
for each datagram is woken by the sending script, which costs the script more than everything else. So while scripts
report, the thread polls 5 times a second. It waits if nothing comes for a while, or if the queue is short.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from agents.collector import Collector, Device, NoData, Reading, SamplingSchedule, wall_clock
from agents.collectors.jobs.job_lifecycle import job_state_file
from agents.collectors.training.agent_socket import SERVICE_SOCKET, socket_paths
from agents.collectors.training.datagram import MAX_DATAGRAM
from agents.collectors.training.reported_ranks import COUNTERS, GAUGES, JobOwners, ReportedRanks, resolve_uids
from pipeline.config.settings import constraint
from pipeline.runtime.log_line import write_log_line

MAX_AT_ONCE, PAUSE_S = 256, 0.2
"""Most datagrams per PAUSE_S seconds, so that a flood costs at most 2 % of a core. Chosen: all known ranks may end a
step at the same instant."""
POLL_LINGER_S = 10.0
"""Seconds of polling after the last datagram. Chosen: longer than a step of any model; 50 polls cost 5 ms."""
_QUEUE_LENGTH_FILE = Path("/proc/sys/net/unix/max_dgram_qlen")
"""10 by default, also in a pod's network namespace; systemd sets 512 on the host (systemd-system.conf(5))."""
STOP_S = 1.0
"""Longest wait for the thread at closing; it has nothing left to do."""
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid (unix(7))
_CONTROL_BYTES = socket.CMSG_SPACE(_CREDENTIALS.size)
_OVERFLOW_UID = 65534  # the kernel's uid for users unknown in our user namespace

ReceiveDatagram = Callable[[bytes, int, int], None]
"""Takes a datagram, the sending process and its user, both as reported by the kernel."""


class StepSocket:
    """A bound socket and the thread that reads it. Raises NoData if it cannot be bound."""

    def __init__(self, path: Path, mode: int, receive: ReceiveDatagram) -> None:
        self.path, self._receive = path, receive
        self._stop = threading.Event()
        self._failed: Exception | None = None
        self._socket = _bind_socket(path, mode)
        self._file_id = _read_file_id(path)
        self._thread = threading.Thread(target=self._serve, name="training steps", daemon=True)
        self._thread.start()

    def check_bound(self) -> None:
        """Raises NoData if scripts cannot find the socket any more, or the error that ended the thread."""
        if self._failed is not None:
            raise self._failed
        if _read_file_id(self.path) != self._file_id:
            raise NoData(f"{self.path}: removed, or replaced by another agent's socket")

    def close(self) -> None:
        """Removes the socket if it is still ours."""
        self._stop.set()
        with contextlib.suppress(OSError):  # closed before
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(STOP_S)
        if _read_file_id(self.path) == self._file_id is not None:
            with contextlib.suppress(OSError):  # the folder is gone or no longer writable
                self.path.unlink()
        self._socket.close()

    def _serve(self) -> None:
        """Receives until the end. A pause after MAX_AT_ONCE datagrams bounds the cost."""
        readable, polls = select.poll(), _queue_length() >= MAX_AT_ONCE
        readable.register(self._socket, select.POLLIN)
        since, count, last_datagram = time.monotonic(), 0, -POLL_LINGER_S
        try:
            while not self._stop.is_set():
                found, now = self._drain(MAX_AT_ONCE - count), time.monotonic()
                since, count = (since, count + found) if now - since < PAUSE_S else (now, found)
                last_datagram = now if found else last_datagram
                if count >= MAX_AT_ONCE or (polls and now - last_datagram < POLL_LINGER_S):
                    self._stop.wait(PAUSE_S)
                    since, count = time.monotonic(), 0
                else:
                    readable.poll()
        except Exception as failed:  # noqa: BLE001 - check_bound raises it, and the socket is opened again
            self._failed = failed

    def _drain(self, most: int) -> int:
        """Receives the queued datagrams; attached file descriptors are dropped, since only credentials have room."""
        for taken in range(most):
            try:
                data, extra, flags, _ = self._socket.recvmsg(MAX_DATAGRAM, _CONTROL_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return taken
            if self._stop.is_set():
                return taken
            pid, uid = 0, _OVERFLOW_UID
            for level, kind, content in extra:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    pid, uid, _ = _CREDENTIALS.unpack(content)
            self._receive(b"" if flags & socket.MSG_TRUNC else data, pid, uid)
        return most


def _queue_length() -> int:
    """Returns how many datagrams the kernel queues for us."""
    try:
        return int(_QUEUE_LENGTH_FILE.read_text())
    except (OSError, ValueError):  # a kernel without it, or a /proc that hides it: every datagram wakes the thread
        return 0


def _bind_socket(path: Path, mode: int) -> socket.socket:
    """Returns a socket at `path` to which every process can send; replaces the file of a killed agent."""
    if not path.parent.is_dir():
        raise NoData(f"{path.parent}: no such folder; set RuntimeDirectory=fleetpulse/agent in the agent's unit")
    _remove_stale(path)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # before a script can send
        made.bind(str(path))
        path.chmod(mode)
    except OSError as failed:
        made.close()
        advice = "RuntimeDirectory=fleetpulse/agent in the agent's unit, or another `socket` of [collector.training]"
        raise NoData(f"{path}: {failed.strerror or failed}; cannot create a socket there: set {advice}") from failed
    return made


def _remove_stale(path: Path) -> None:
    """Removes a socket without a listener. Raises NoData if an agent listens, or if it is not a socket."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise NoData(f"{path}: exists and is not a socket; remove it")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as trial:
            trial.connect(str(path))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        with contextlib.suppress(OSError):  # if it cannot be removed, binding raises the reason
            path.unlink()
        return
    except OSError as failed:
        raise NoData(f"{path}: {failed.strerror or failed}; cannot find out whether an agent listens there") from failed
    raise NoData(
        f"{path}: another agent on this node listens there and receives the steps; "
        "for a second agent set `socket` of [collector.training]"
    )


def _read_file_id(path: Path) -> tuple[int, int] | None:
    """Returns device and inode of a path; None if it is gone."""
    try:
        found = os.lstat(path)
    except OSError:  # gone
        return None
    return found.st_dev, found.st_ino


_REFUSED_INTERVAL_S = 60.0
LOG_INTERVAL_S = 600.0
"""Seconds between two log lines about refused datagrams. Chosen: at most 144 lines a day."""


def _is_mode(text: str) -> bool:
    """Whether the text is a file mode in octal, as for chmod."""
    return len(text) in (3, 4) and all(digit in "01234567" for digit in text)


@dataclass
class Training(Collector):
    """Reports rank.*: one entity per rank whose script sends steps to the socket.

    socket: its path; "" = FLEETPULSE_TRAINING_SOCKET, else /run/fleetpulse/agent/training.sock if that folder is
    writable, else in XDG_RUNTIME_DIR. mode: 0666 lets every user send, since training runs as any user. trusted: users
    who may report for any job. facts, jobs: the files of Slurm's prolog and the state file of the collector `jobs`,
    which give the owner of a job.
    """

    name: ClassVar[str] = "training"
    signals: ClassVar[tuple[str, ...]] = (*GAUGES, *COUNTERS, "node.training_refused")
    events: ClassVar[tuple[str, ...]] = ("replica_digest", "checkpoint")
    remote: ClassVar[bool] = True
    exclusive: ClassVar[bool] = True
    socket: str = ""
    mode: str = field(default="0666", metadata=constraint('a file mode in octal, such as "0666"', _is_mode))
    trusted: tuple[str, ...] = ("root", "slurm")
    facts: Path = Path("/run/fleetpulse/jobs")
    jobs: Path | None = field(default_factory=job_state_file)
    _wall: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _clock: Callable[[], float] = field(default_factory=lambda: time.monotonic, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _refused_logged: int = field(default=0, init=False, repr=False)
    _next_log_at: float = field(default=-math.inf, init=False, repr=False)
    _step_socket: StepSocket | None = field(default=None, init=False, repr=False)
    _trusted: frozenset[int] = field(default=frozenset(), init=False, repr=False)

    def open(self, node: str) -> None:
        """See `Collector.open`."""
        self.close()
        self._node, self._rhythm, self._refused_logged = node, SamplingSchedule(node, self._wall), 0
        self._owners, self._trusted = JobOwners(node, self.facts, self.jobs, self._clock), resolve_uids(self.trusted)
        self._ranks = ReportedRanks(node, self._wall, self._clock, self._owners.find_owners, self._trusted)
        self._step_socket = StepSocket(self._choose_path(), int(self.mode, 8), self._ranks.receive)

    def read(self) -> tuple[Reading, ...]:
        """Returns the ranks with their steps, and every minute the count of refused datagrams."""
        if self._step_socket is None:
            raise NoData("the socket is closed")
        self._step_socket.check_bound()
        found = self._ranks.collect()
        ranks = Reading("rank", found.entities, found.columns, found.events)
        self._log_refused(found.refused)
        if not found.refused or not self._rhythm.due(_REFUSED_INTERVAL_S):
            return (ranks,)
        refused = {"node.training_refused": np.array([found.refused], np.uint64)}
        return ranks, Reading("node", (f"node:{self._node}",), refused)

    def _log_refused(self, refused: int) -> None:
        """Logs refused datagrams, at most once per LOG_INTERVAL_S: any user can cause them."""
        if refused > self._refused_logged and self._clock() >= self._next_log_at:
            reason = "".join(c if c.isprintable() else "?" for c in self._ranks.reason)
            number = refused - self._refused_logged
            write_log_line(f"collector training: {number} datagrams refused; last: {reason}")
            self._refused_logged, self._next_log_at = refused, self._clock() + LOG_INTERVAL_S

    def inventory(self) -> Mapping[str, Device]:
        """Returns the ranks with their own statements; those of the collector `jobs` take precedence."""
        found: dict[str, Device] = {}
        for entity, (sender, uid) in self._ranks.list_senders().items():
            job = f"job:{sender.job}"
            stage = (f"stage:{sender.job}.{sender.stage}",) if sender.stage else ()
            gpu = (f"gpu:{self._node}.{sender.gpu}",) if sender.gpu >= 0 else ()
            if gpu and uid not in self._trusted and not self._owners.may_claim_gpu(gpu[0], uid):
                gpu = ()  # of another user's job: digests of this rank must neither raise nor clear its incidents
            # `node` is the reporting node: the rank leaves the topology when it ends (pipeline/model/membership.py)
            facts = {"node": self._node, "world_size": sender.world or None, "group": sender.group or None, "uid": uid}
            known = {key: value for key, value in facts.items() if value is not None}
            found[entity] = Device((*stage, job, *gpu, f"node:{self._node}"), known)
            found.setdefault(job, Device())
            found |= {name: Device((job,)) for name in stage if name not in found}
        if self._ranks.refused:
            found[f"node:{self._node}"] = Device((), {"training_refused": self._ranks.reason})
        return found

    def close(self) -> None:
        """See `Collector.close`."""
        if self._step_socket is not None:
            self._step_socket.close()
            self._step_socket = None

    def _choose_path(self) -> Path:
        """Returns the path of the socket; creates the folder of a user's own agent."""
        if self.socket:
            return Path(self.socket)
        own = os.environ.get("XDG_RUNTIME_DIR", "")
        for path in map(Path, socket_paths(os.environ)):
            if own and path.parent.parent == Path(own) and path.parent.parent.is_dir():
                path.parent.mkdir(mode=0o700, exist_ok=True)
            if os.access(path.parent, os.W_OK):
                return path
        raise NoData(
            f"{Path(SERVICE_SOCKET).parent}: missing or not writable; set RuntimeDirectory=fleetpulse/agent in the "
            "agent's unit, or `socket` of [collector.training]"
        )
