"""Finds processes that belong to a job, from /proc: by their environment and their control group.

A process can change its environment without a new process id: by starting another program in its place (exec). So each
process is read at its first two scans, and its environment at every RESCAN_EVERY-th scan from then on. Only the
variables in IDENTITY_VARIABLES and DEVICE_VARIABLES are kept; command lines are never read.

A control group is readable by every user and gives job and step, or pod and container:

    Slurm, cgroup v1    /slurm/uid_0/job_81/step_0/task_3; slurm_NODE instead of slurm where several slurmd run
    Slurm, cgroup v2    /system.slice/slurmstepd.scope/job_81/step_0/user/task_0
    kubelet, cgroupfs   /kubepods/burstable/pod<uid>/<id>
    kubelet, systemd    /kubepods.slice/.../kubepods-burstable-pod<uid>.slice/cri-containerd-<id>.scope

Slurm's `task_N` is its own count of tasks, so it gives no rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from agents.collectors.jobs import gpu_assignment, process_identity
from agents.collectors.jobs.gpu_assignment import NO_DEVICES, HeldDevices, find_devices
from agents.collectors.jobs.process_identity import ProcessIdentity, identify_process

_SLURM = re.compile(
    r"/(?:slurm|slurm_[^/]+|[^/]*slurmstepd\.scope)(?:/uid_\d{1,10})?/job_(\d{1,10})(?:/step_([^/\n]{1,20}))?"
)
_UID = r"([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})"
_POD = re.compile(rf"[/-]kubepods[^\n]*?[/-]pod{_UID}(?:\.slice)?(?:/(?:[a-z-]+-)?([0-9a-f]{{64}}))?")
MAX_CGROUP_BYTES = 8192
"""Most bytes of /proc/PID/cgroup; cgroup v1 has some 14 lines of at most a few hundred bytes."""


@dataclass(frozen=True, slots=True)
class CgroupOwner:
    """Owner of a control group: Slurm job id and step, pod uid, container id; empty where it has none."""

    slurm_job: str = ""
    step: str = ""
    pod: str = ""
    container: str = ""


NO_OWNER = CgroupOwner()


def parse_cgroup(text: bytes) -> CgroupOwner:
    """Returns the owner in the content of /proc/PID/cgroup."""
    if b"/job_" not in text and b"kubepods" not in text:
        return NO_OWNER
    lines = text[:MAX_CGROUP_BYTES].decode("utf-8", "replace")
    slurm, pod = _SLURM.search(lines), _POD.search(lines)
    return CgroupOwner(
        slurm[1] if slurm else "",
        (slurm[2] or "") if slurm else "",
        _dashed_uid(pod[1]) if pod else "",
        (pod[2] or "") if pod else "",
    )


def _dashed_uid(uid: str) -> str:
    """Returns a uid as the API server writes it: systemd has `_` for `-`. Static pods have 32 digits alone."""
    return uid.replace("_", "-")


MAX_PROCESSES = 32768
"""Most processes of one scan: the kernel's default pid_max."""
MAX_MEMBERS = 4096
"""Most processes of jobs that are kept. Chosen: 16 GPUs with 256 workers each."""
RESCAN_EVERY = 6
"""A known process is read again at every sixth scan: once a minute at an interval of 10 s. Chosen: a sixth of the
cost."""
MAX_ENVIRONMENT_BYTES = 1 << 18
"""Most bytes of one environment. Chosen: module systems of clusters make some 30 KiB."""
_KEPT_VARIABLES = process_identity.IDENTITY_VARIABLES | gpu_assignment.DEVICE_VARIABLES | {"HOSTNAME"}
_JOB_MARKERS = (b"SLURM_JOB_ID=", b"RANK=", b"FLEETPULSE_", b"PMI", b"TORCHELASTIC_RUN_ID=")
_START_FIELD = 19  # position of the start after the name: field 22 of proc_pid_stat(5)


@dataclass(frozen=True, slots=True)
class JobProcess:
    """One process of a job. start: clock ticks since boot. identity: None if the environment gives none.

    pod_name: HOSTNAME of a process in a pod, which is the pod's name.
    """

    pid: int
    start: int
    uid: int
    identity: ProcessIdentity | None = None
    devices: HeldDevices = NO_DEVICES
    cgroup: CgroupOwner = NO_OWNER
    pod_name: str = ""


def parse_environment(environment: bytes) -> dict[str, str]:
    """Returns the kept variables of /proc/PID/environ."""
    found: dict[str, str] = {}
    for line in environment.split(b"\0"):
        key, equals, value = line.partition(b"=")
        name = key.decode("ascii", "replace")
        if equals and name in _KEPT_VARIABLES:
            found.setdefault(name, value[:4096].decode("utf-8", "replace"))
    return found


def parse_start_time(stat: bytes) -> int | None:
    """Returns the start time in /proc/PID/stat; None for another shape. A name may hold spaces and parentheses."""
    words = stat.rpartition(b")")[2].split()
    try:
        return int(words[_START_FIELD])
    except (ValueError, IndexError):
        return None


@dataclass
class ProcessScanner:
    """The processes of one node. refused: pids whose environment may not be read, as of their last read.

    failed: pid -> error of the processes that could not be interpreted, as of their last read.
    """

    proc: Path
    node: str
    members: dict[int, JobProcess] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)
    _times_read: dict[int, int] = field(default_factory=dict)
    _scans: int = 0

    @property
    def mostly_refused(self) -> bool:
        """Whether most environments may not be read. Root is refused a few too, such as those of other namespaces."""
        return len(self.refused) * 2 > len(self._times_read)

    def scan(self) -> dict[int, JobProcess]:
        """Returns pid -> process of all processes that belong to a job now."""
        self._scans += 1
        pids = [int(name) for name in os.listdir(self.proc) if name.isascii() and name.isdecimal()][:MAX_PROCESSES]
        known = {pid: self._times_read.get(pid, 0) + 1 for pid in pids}
        self._times_read = {pid: min(times, 3) for pid, times in known.items()}
        self.refused.intersection_update(known)
        self.failed = {pid: error for pid, error in self.failed.items() if pid in known}
        for pid in [
            pid
            for pid, process in self.members.items()
            if pid not in known or self._read_start_time(pid) != process.start
        ]:
            del self.members[pid]
            self._times_read[pid] = 1
        for pid in self._due_pids(known):
            self._try_update(pid)
        return self.members

    def _try_update(self, pid: int) -> None:
        """Reads a process. Any user sets an environment: an error in one must not hide the jobs of the others."""
        self.failed.pop(pid, None)
        try:
            self._update(pid)
        except Exception as error:  # noqa: BLE001 - kept in `failed`, which the collector logs
            self.failed[pid] = f"{type(error).__name__}: {error}"
            self.members.pop(pid, None)

    def _due_pids(self, known: dict[int, int]) -> Iterator[int]:
        """Returns the pids to read in this scan: those seen once or twice, and a share of the others."""
        turn = self._scans % RESCAN_EVERY
        return (pid for pid, times in known.items() if times < 3 or pid % RESCAN_EVERY == turn)

    def _update(self, pid: int) -> None:
        """Reads a process, and adds it to the members or removes it."""
        folder = f"{self.proc}/{pid}"
        environment = self._read_environment(pid)
        before = self.members.get(pid)
        owner = (
            self._read_cgroup(folder, pid)
            if self._times_read[pid] < 3
            else before.cgroup
            if before is not None
            else NO_OWNER
        )
        found = None
        if owner != NO_OWNER or any(mark in environment for mark in _JOB_MARKERS):
            found = self._build_process(pid, folder, environment, owner)
        if found is None:
            self.members.pop(pid, None)
        elif before is not None or len(self.members) < MAX_MEMBERS:
            self.members[pid] = found

    def _build_process(self, pid: int, folder: str, environment: bytes, owner: CgroupOwner) -> JobProcess | None:
        kept = parse_environment(environment)
        identity = identify_process(kept, self.node)
        start = self._read_start_time(pid)
        if start is None or (identity is None and owner == NO_OWNER):
            return None
        try:
            uid = os.stat(folder).st_uid
        except OSError:  # it ended
            return None
        return JobProcess(
            pid,
            start,
            uid,
            identity,
            find_devices(kept, identity),
            owner,
            kept.get("HOSTNAME", "") if owner.pod else "",
        )

    def _read_environment(self, pid: int) -> bytes:
        try:
            found = _read_bytes(f"{self.proc}/{pid}/environ", MAX_ENVIRONMENT_BYTES)
        except PermissionError:
            self.refused.add(pid)
            return b""
        except OSError:  # it ended
            return b""
        self.refused.discard(pid)
        return found

    def _read_cgroup(self, folder: str, pid: int) -> CgroupOwner:
        try:
            return parse_cgroup(_read_bytes(f"{folder}/cgroup", MAX_CGROUP_BYTES))
        except OSError:  # it ended, or a kernel without control groups
            return NO_OWNER

    def _read_start_time(self, pid: int) -> int | None:
        try:
            return parse_start_time(_read_bytes(f"{self.proc}/{pid}/stat", 1024))
        except OSError:  # it ended
            return None


def _read_bytes(path: str, most: int) -> bytes:
    """Returns the first bytes of a file of the kernel, which gives at most a page or so per call."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        whole = b""
        while len(whole) < most and (part := os.read(handle, most - len(whole))):
            whole += part
        return whole
    finally:
        os.close(handle)
