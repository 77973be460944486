"""Whose process it is by its control group, which anybody may read: job and step, or pod and container.

    Slurm, cgroup v1    /slurm/uid_0/job_81/step_0/task_3, after `slurm_` a node's name where several slurmd run
    Slurm, cgroup v2    /system.slice/slurmstepd.scope/job_81/step_0/user/task_0
    kubelet, cgroupfs   /kubepods/burstable/pod<uid>/<id>
    kubelet, systemd    /kubepods.slice/.../kubepods-burstable-pod<uid>.slice/cri-containerd-<id>.scope

What Slurm writes as `task_N` is its own count of tasks, so no rank is read from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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
