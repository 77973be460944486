"""Processes that belong to a job, from /proc: each is read when it is new and again in turn, not at every look.

What counts of a process can change without a new process id: a program that is started in its place (exec) has another
environment. So each process is read at two looks, and its environment from then on at every TURNS-th. Only the
variables in identity.WANTED and visible.WANTED are taken from it; command lines are never read.

Whose process it is by its control group, which anybody may read: job and step, or pod and container.

    Slurm, cgroup v1    /slurm/uid_0/job_81/step_0/task_3, after `slurm_` a node's name where several slurmd run
    Slurm, cgroup v2    /system.slice/slurmstepd.scope/job_81/step_0/user/task_0
    kubelet, cgroupfs   /kubepods/burstable/pod<uid>/<id>
    kubelet, systemd    /kubepods.slice/.../kubepods-burstable-pod<uid>.slice/cri-containerd-<id>.scope

What Slurm writes as `task_N` is its own count of tasks, so no rank is read from it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from agents.collectors.jobs import gpu_assignment, process_identity
from agents.collectors.jobs.gpu_assignment import NOTHING, Devices, devices
from agents.collectors.jobs.process_identity import Identity, identify

_SLURM = re.compile(
    r"/(?:slurm|slurm_[^/]+|[^/]*slurmstepd\.scope)(?:/uid_\d{1,10})?/job_(\d{1,10})(?:/step_([^/\n]{1,20}))?"
)
_UID = r"([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})"
_POD = re.compile(rf"[/-]kubepods[^\n]*?[/-]pod{_UID}(?:\.slice)?(?:/(?:[a-z-]+-)?([0-9a-f]{{64}}))?")
MOST = 8192
"""Most bytes of one file: cgroup v1 has some 14 lines of at most a few hundred bytes."""


@dataclass(frozen=True, slots=True)
class Place:
    """slurm_job, step: Slurm's; pod: its uid; container: its id. Empty where the control group does not say it."""

    slurm_job: str = ""
    step: str = ""
    pod: str = ""
    container: str = ""


NOWHERE = Place()


def place_of(text: bytes) -> Place:
    """What /proc/PID/cgroup says."""
    if b"/job_" not in text and b"kubepods" not in text:
        return NOWHERE
    lines = text[:MOST].decode("utf-8", "replace")
    slurm, pod = _SLURM.search(lines), _POD.search(lines)
    return Place(
        slurm[1] if slurm else "",
        (slurm[2] or "") if slurm else "",
        _dashed(pod[1]) if pod else "",
        (pod[2] or "") if pod else "",
    )


def _dashed(uid: str) -> str:
    """A uid as the API server writes it: systemd's slices have `_` for `-`. Static pods have 32 digits alone."""
    return uid.replace("_", "-")


MAX_PROCESSES = 32768
"""Most processes of one look: the kernel's default pid_max."""
MAX_MEMBERS = 4096
"""Most processes of jobs that are kept; chosen: 16 GPUs with 256 workers each."""
TURNS = 6
"""A known process is read at every sixth look: once a minute at the interval of 10 s; chosen, a sixth of the cost."""
MOST_ENVIRONMENT = 1 << 18
"""Most bytes of one environment; chosen: module systems of clusters make some 30 KiB."""
_WANTED = process_identity.WANTED | gpu_assignment.WANTED | {"HOSTNAME"}
_MARKS = (b"SLURM_JOB_ID=", b"RANK=", b"FLEETPULSE_", b"PMI", b"TORCHELASTIC_RUN_ID=")
_START = 19  # position of the start after the name: field 22 of proc_pid_stat(5)


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a job. `start`: clock ticks after the boot; identity: None where the environment does not tell.

    host: HOSTNAME of one in a pod, which is the pod's name.
    """

    pid: int
    start: int
    uid: int
    identity: Identity | None = None
    devices: Devices = NOTHING
    place: Place = NOWHERE
    host: str = ""


def variables(environment: bytes) -> dict[str, str]:
    """The wanted variables of an environment as the kernel gives it."""
    found: dict[str, str] = {}
    for line in environment.split(b"\0"):
        key, equals, value = line.partition(b"=")
        name = key.decode("ascii", "replace")
        if equals and name in _WANTED:
            found.setdefault(name, value[:4096].decode("utf-8", "replace"))
    return found


def start_of(stat: bytes) -> int | None:
    """When a process began, of /proc/PID/stat; None if it has another shape. A name may hold spaces and parentheses."""
    words = stat.rpartition(b")")[2].split()
    try:
        return int(words[_START])
    except (ValueError, IndexError):
        return None


@dataclass
class Processes:
    """The processes of one node. `refused`: whose environment may not be read, as of each one's last turn."""

    proc: Path
    node: str
    members: dict[int, Process] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    _known: dict[int, int] = field(default_factory=dict)
    _look: int = 0

    @property
    def blind(self) -> bool:
        """Whether most environments may not be read; root is refused a few too, such as those of other namespaces."""
        return len(self.refused) * 2 > len(self._known)

    def look(self) -> dict[int, Process]:
        """All that belong to a job now."""
        self._look += 1
        pids = [int(name) for name in os.listdir(self.proc) if name.isascii() and name.isdecimal()][:MAX_PROCESSES]
        known = {pid: self._known.get(pid, 0) + 1 for pid in pids}
        self._known = {pid: min(seen, 3) for pid, seen in known.items()}
        self.refused.intersection_update(known)
        for pid in [
            pid for pid, process in self.members.items() if pid not in known or self._start(pid) != process.start
        ]:
            del self.members[pid]
            self._known[pid] = 1
        for pid in self._turn(known):
            self._read(pid)
        return self.members

    def _turn(self, known: dict[int, int]) -> Iterator[int]:
        """Whose turn it is: those seen once or twice, and a part of the others."""
        turn = self._look % TURNS
        return (pid for pid, seen in known.items() if seen < 3 or pid % TURNS == turn)

    def _read(self, pid: int) -> None:
        """Takes a process in, or out if it belongs to no job (any more)."""
        folder = f"{self.proc}/{pid}"
        environment = self._environment(pid)
        before = self.members.get(pid)
        place = self._place(folder, pid) if self._known[pid] < 3 else before.place if before is not None else NOWHERE
        found = None
        if place != NOWHERE or any(mark in environment for mark in _MARKS):
            found = self._member(pid, folder, environment, place)
        if found is None:
            self.members.pop(pid, None)
        elif before is not None or len(self.members) < MAX_MEMBERS:
            self.members[pid] = found

    def _member(self, pid: int, folder: str, environment: bytes, place: Place) -> Process | None:
        said = variables(environment)
        who = identify(said, self.node)
        start = self._start(pid)
        if start is None or (who is None and place == NOWHERE):
            return None
        try:
            uid = os.stat(folder).st_uid
        except OSError:  # it ended
            return None
        return Process(pid, start, uid, who, devices(said, who), place, said.get("HOSTNAME", "") if place.pod else "")

    def _environment(self, pid: int) -> bytes:
        try:
            found = _bytes(f"{self.proc}/{pid}/environ", MOST_ENVIRONMENT)
        except PermissionError:
            self.refused.add(pid)
            return b""
        except OSError:  # it ended
            return b""
        self.refused.discard(pid)
        return found

    def _place(self, folder: str, pid: int) -> Place:
        try:
            return place_of(_bytes(f"{folder}/cgroup", MOST))
        except OSError:  # it ended, or a kernel without control groups
            return NOWHERE

    def _start(self, pid: int) -> int | None:
        try:
            return start_of(_bytes(f"{self.proc}/{pid}/stat", 1024))
        except OSError:  # it ended
            return None


def _bytes(path: str, most: int) -> bytes:
    """The first bytes of a file of the kernel, which gives at most a page or so per call."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        whole = b""
        while len(whole) < most and (part := os.read(handle, most - len(whole))):
            whole += part
        return whole
    finally:
        os.close(handle)
