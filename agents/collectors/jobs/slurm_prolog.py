"""What Slurm's prolog wrote of the jobs on this node, for an agent that may not read the environment of processes.

One file per job, `JOBID.env`, in a folder such as /run/fleetpulse/jobs: lines `KEY=VALUE`, unquoted, of the variables
in KEYS alone; `#` lines and empty ones are passed over. The prolog writes it under another name and renames it, the
epilog removes it. At most MOST_BYTES each and MOST_FILES of them are read, again only when the file is another.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

KEYS = frozenset(
    {
        *("SLURM_JOB_ID", "SLURM_JOB_UID", "SLURM_JOB_USER", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION"),
        *("SLURM_JOB_ACCOUNT", "SLURM_JOB_GPUS", "SLURM_JOB_NODELIST", "SLURM_CLUSTER_NAME", "SLURM_ARRAY_JOB_ID"),
        *("SLURM_ARRAY_TASK_ID", "SLURM_HET_JOB_ID", "SLURMD_NODENAME"),
    }
)
MOST_BYTES, MOST_FILES = 16_384, 512
"""Chosen: a hundred times a file, and as many jobs as a node of 512 processors could run."""
MOST_VALUE = 1024
"""Most characters of one value; lists of nodes are cut there."""
_NAME = re.compile(r"([0-9]{1,10})\.env")

Facts = Mapping[str, str]


def parse(text: bytes) -> dict[str, str]:
    """The wanted variables of one file."""
    found = {}
    for line in text[:MOST_BYTES].decode("utf-8", "replace").splitlines():
        key, equals, value = line.partition("=")
        if equals and key in KEYS and value.isprintable():
            found[key] = value[:MOST_VALUE]
    return found


@dataclass
class Folder:
    """Follows the files of a folder."""

    path: Path
    _kept: dict[str, tuple[tuple[int, int, int], Facts]] = field(default_factory=dict)

    def look(self) -> dict[str, Facts]:
        """Job id -> what its file says now; none where there is no such folder."""
        kept: dict[str, tuple[tuple[int, int, int], Facts]] = {}
        try:
            names = sorted(os.listdir(self.path))
        except OSError:  # no prolog of ours on this node
            names = []
        for name in names:
            if (named := _NAME.fullmatch(name)) is not None and len(kept) < MOST_FILES:
                found = self._file(named[1], self.path / name)
                if found is not None:
                    kept[named[1]] = found
        self._kept = kept
        return {job: facts for job, (_, facts) in kept.items()}

    def _file(self, job: str, path: Path) -> tuple[tuple[int, int, int], Facts] | None:
        try:
            status = os.stat(path)
            state = (status.st_ino, status.st_mtime_ns, status.st_size)
            if job in self._kept and self._kept[job][0] == state:
                return self._kept[job]
            with open(path, "rb") as opened:
                return state, parse(opened.read(MOST_BYTES))
        except OSError:  # the epilog took it away meanwhile
            return None
