"""Training steps that scripts report through agents.training: lengths of steps, loss, gradient norm, replica digests.

docs/training.md shows the script's side.

The agent's end of the socket: bound where scripts look for it, emptied by a thread.

The kernel queues few datagrams (net.unix.max_dgram_qlen), so one look a second would be too seldom. A thread that waits
for each datagram is woken by the script that sends it, which costs the script more than all else: so while scripts
report, the thread looks by itself, 5 times a second. It waits when all is silent, and where the queue is short.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from agents.collector import Collector, Device, NoData, Reading, Rhythm, wall_clock
from agents.collectors.jobs.job_lifecycle import memory_of_jobs
from agents.collectors.training.agent_socket import SYSTEM, places
from agents.collectors.training.datagram import MAX_DATAGRAM
from agents.collectors.training.reported_ranks import COUNTERS, GAUGES, JobOwners, Ranks, uids_of
from pipeline.config.settings import constraint

MAX_AT_ONCE, PAUSE_S = 256, 0.2
"""At most so many datagrams in so many seconds, so that who floods the socket costs no more than 2 % of a core; chosen:
every rank that is known may end a step in the same instant."""
LINGER_S = 10.0
"""How long it looks by itself after the last datagram; chosen: above the step of any model, and 50 looks cost 5 ms."""
_QUEUE = Path("/proc/sys/net/unix/max_dgram_qlen")
"""10 by default, as in a pod's own network namespace; systemd makes it 512 on the host (systemd-system.conf(5))."""
STOP_S = 1.0
"""How long closing waits for the thread; it has nothing to do but return."""
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid (unix(7))
_ROOM = socket.CMSG_SPACE(_CREDENTIALS.size)
_NOBODY = 65534  # how the kernel names a user that has no name in our user namespace

Receive = Callable[[bytes, int, int], None]
"""Takes a datagram, the process that sent it and its user, both as the kernel says."""


class Doorway:
    """A bound socket and its thread. Raises NoData where there cannot be one."""

    def __init__(self, path: Path, mode: int, receive: Receive) -> None:
        self.path, self._receive = path, receive
        self._stop = threading.Event()
        self._failed: Exception | None = None
        self._socket = _bound(path, mode)
        self._place = _identity(path)
        self._thread = threading.Thread(target=self._serve, name="training steps", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises NoData where scripts cannot find the socket any more, and whatever ended the thread."""
        if self._failed is not None:
            raise self._failed
        if _identity(self.path) != self._place:
            raise NoData(f"{self.path}: removed, or taken by another agent; wanted our socket")

    def close(self) -> None:
        """Removes the socket if it is still ours."""
        self._stop.set()
        with contextlib.suppress(OSError):  # closed before
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(STOP_S)
        if _identity(self.path) == self._place is not None:
            with contextlib.suppress(OSError):  # the folder went away, or is not ours to write in any more
                self.path.unlink()
        self._socket.close()

    def _serve(self) -> None:
        """Receives until the end. A short sleep after each full measure bounds what it costs."""
        readable, looks_itself = select.poll(), _queue() >= MAX_AT_ONCE
        readable.register(self._socket, select.POLLIN)
        since, count, heard = time.monotonic(), 0, -LINGER_S
        try:
            while not self._stop.is_set():
                found, now = self._drain(MAX_AT_ONCE - count), time.monotonic()
                since, count = (since, count + found) if now - since < PAUSE_S else (now, found)
                heard = now if found else heard
                if count >= MAX_AT_ONCE or (looks_itself and now - heard < LINGER_S):
                    self._stop.wait(PAUSE_S)
                    since, count = time.monotonic(), 0
                else:
                    readable.poll()
        except Exception as failed:  # noqa: BLE001 - the next look tells it, and the socket is opened anew
            self._failed = failed

    def _drain(self, most: int) -> int:
        """Takes what waits. There is room for the sender's identity alone, so file handles sent along are dropped."""
        for taken in range(most):
            try:
                data, extra, flags, _ = self._socket.recvmsg(MAX_DATAGRAM, _ROOM, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return taken
            if self._stop.is_set():
                return taken
            pid, uid = 0, _NOBODY
            for level, kind, content in extra:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    pid, uid, _ = _CREDENTIALS.unpack(content)
            self._receive(b"" if flags & socket.MSG_TRUNC else data, pid, uid)
        return most


def _queue() -> int:
    """How many datagrams the kernel keeps for us."""
    try:
        return int(_QUEUE.read_text())
    except (OSError, ValueError):  # a kernel without it, or a /proc that hides it: then every datagram wakes us
        return 0


def _bound(path: Path, mode: int) -> socket.socket:
    """A socket at `path` that every process can send to; a file that a killed agent left is replaced."""
    if not path.parent.is_dir():
        raise NoData(f"{path.parent}: no such folder; wanted RuntimeDirectory=fleetpulse/agent in the agent's unit")
    _remove_stale(path)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # before anybody can send
        made.bind(str(path))
        path.chmod(mode)
    except OSError as failed:
        made.close()
        mend = "RuntimeDirectory=fleetpulse/agent in the agent's unit, or another `socket` of [collector.training]"
        raise NoData(f"{path}: {failed.strerror or failed}; wanted to make a socket there: {mend}") from failed
    return made


def _remove_stale(path: Path) -> None:
    """Removes a socket at which nobody listens. Raises NoData where somebody does, or where it is no socket."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise NoData(f"{path}: is no socket; wanted none, or one that an agent left")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as trial:
            trial.connect(str(path))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        with contextlib.suppress(OSError):  # if it stays, binding says why
            path.unlink()
        return
    except OSError as failed:
        raise NoData(f"{path}: {failed.strerror or failed}; wanted to know whether an agent listens there") from failed
    raise NoData(
        f"{path}: the agent that runs on this node listens there and has the steps; "
        "for a second agent set `socket` of [collector.training]"
    )


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file it is."""
    try:
        found = os.lstat(path)
    except OSError:  # gone
        return None
    return found.st_dev, found.st_ino


_REFUSED_S = 60.0
SAY_S = 600.0
"""At most one line about what was refused in so long; chosen: 144 a day, whoever sends what."""


def _is_mode(text: str) -> bool:
    """Whether it is a file mode in octal, as chmod takes it."""
    return len(text) in (3, 4) and all(digit in "01234567" for digit in text)


@dataclass
class Training(Collector):
    """rank.*: one entity per rank whose script reports steps to the socket.

    socket: its path; "" = FLEETPULSE_TRAINING_SOCKET, else /run/fleetpulse/agent/training.sock where that folder is
    ours to write, else in XDG_RUNTIME_DIR. mode: who may send; 0666: every user, since training runs as any.
    trusted: users who may report for any job. facts, jobs: what says whose a job is: the files of Slurm's prolog, and
    what the collector `jobs` keeps (in the service's state folder).
    """

    name: ClassVar[str] = "training"
    signals: ClassVar[tuple[str, ...]] = (*GAUGES, *COUNTERS, "node.training_refused")
    events: ClassVar[tuple[str, ...]] = ("replica_digest", "checkpoint")
    remote: ClassVar[bool] = True
    socket: str = ""
    mode: str = field(default="0666", metadata=constraint('a file mode in octal, such as "0666"', _is_mode))
    trusted: tuple[str, ...] = ("root", "slurm")
    facts: Path = Path("/run/fleetpulse/jobs")
    jobs: Path | None = field(default_factory=memory_of_jobs)
    _wall: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _clock: Callable[[], float] = field(default_factory=lambda: time.monotonic, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _said: int = field(default=0, init=False, repr=False)
    _say_at: float = field(default=-math.inf, init=False, repr=False)
    _door: Doorway | None = field(default=None, init=False, repr=False)
    _trusted: frozenset[int] = field(default=frozenset(), init=False, repr=False)

    def open(self, node: str) -> None:
        self.close()
        self._node, self._rhythm, self._said = node, Rhythm(node, self._wall), 0
        self._owners, self._trusted = JobOwners(node, self.facts, self.jobs, self._clock), uids_of(self.trusted)
        self._ranks = Ranks(node, self._wall, self._clock, self._owners.of, self._trusted)
        self._door = Doorway(self._path(), int(self.mode, 8), self._ranks.receive)

    def read(self) -> tuple[Reading, ...]:
        if self._door is None:
            raise NoData("closed; wanted a socket")
        self._door.check()
        found = self._ranks.look()
        ranks = Reading("rank", found.entities, found.columns, found.events)
        self._say(found.refused)
        if not found.refused or not self._rhythm.due(_REFUSED_S):
            return (ranks,)
        refused = {"node.training_refused": np.array([found.refused], np.uint64)}
        return ranks, Reading("node", (f"node:{self._node}",), refused)

    def _say(self, refused: int) -> None:
        """A line for the journal when something was refused, one in SAY_S at most: any user can have it written."""
        if refused > self._said and self._clock() >= self._say_at:
            reason = "".join(c if c.isprintable() else "?" for c in self._ranks.reason)
            sys.stderr.write(f"collector training: {refused - self._said} datagrams refused, the last one {reason}\n")
            self._said, self._say_at = refused, self._clock() + SAY_S

    def inventory(self) -> Mapping[str, Device]:
        """Ranks with what they say of themselves; what the collector `jobs` knows of them comes first."""
        found: dict[str, Device] = {}
        for entity, (sender, uid) in self._ranks.senders().items():
            job = f"job:{sender.job}"
            stage = (f"stage:{sender.job}.{sender.stage}",) if sender.stage else ()
            gpu = (f"gpu:{self._node}.{sender.gpu}",) if sender.gpu >= 0 else ()
            if gpu and uid not in self._trusted and not self._owners.may_name(gpu[0], uid):
                gpu = ()  # of another user's job: digests of this rank must not page it, nor clear it
            # `node` marks who told of it, so that it leaves the topology when it ends (pipeline/model/membership.py)
            facts = {"node": self._node, "world_size": sender.world or None, "group": sender.group or None, "uid": uid}
            told = {key: value for key, value in facts.items() if value is not None}
            found[entity] = Device((*stage, job, *gpu, f"node:{self._node}"), told)
            found.setdefault(job, Device())
            found |= {name: Device((job,)) for name in stage if name not in found}
        if self._ranks.refused:
            found[f"node:{self._node}"] = Device((), {"training_refused": self._ranks.reason})
        return found

    def close(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None

    def _path(self) -> Path:
        """Where to listen; a user's own folder is made."""
        if self.socket:
            return Path(self.socket)
        own = os.environ.get("XDG_RUNTIME_DIR", "")
        for path in map(Path, places(os.environ)):
            if own and path.parent.parent == Path(own) and path.parent.parent.is_dir():
                path.parent.mkdir(mode=0o700, exist_ok=True)
            if os.access(path.parent, os.W_OK):
                return path
        raise NoData(
            f"{Path(SYSTEM).parent}: not there, or not ours to write; wanted a folder for the socket of training "
            "steps: RuntimeDirectory=fleetpulse/agent in the agent's unit, or `socket` of [collector.training]"
        )
