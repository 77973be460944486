"""Reads the job files that Slurm's prolog wrote, for an agent that may not read the environment of processes.

One file per job, `JOBID.env`, in a folder such as /run/fleetpulse/jobs: unquoted lines `KEY=VALUE` of the variables in
PROLOG_VARIABLES; empty lines and `#` lines are ignored. The prolog writes the file under another name and renames it,
the epilog removes it. A file is read again only if it changed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROLOG_VARIABLES = frozenset(
    {
        *("SLURM_JOB_ID", "SLURM_JOB_UID", "SLURM_JOB_USER", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION"),
        *("SLURM_JOB_ACCOUNT", "SLURM_JOB_GPUS", "SLURM_JOB_NODELIST", "SLURM_CLUSTER_NAME", "SLURM_ARRAY_JOB_ID"),
        *("SLURM_ARRAY_TASK_ID", "SLURM_HET_JOB_ID", "SLURMD_NODENAME"),
    }
)
MAX_FILE_BYTES, MAX_FILES = 16_384, 512
"""Most bytes of a file, and most files. Chosen: a hundred times a file; a node of 512 processors runs no more jobs."""
MAX_VALUE_CHARS = 1024
"""Most characters of one value; lists of nodes are cut there."""
_FILE_NAME = re.compile(r"([0-9]{1,10})\.env")

JobVariables = Mapping[str, str]


def parse_prolog_file(text: bytes) -> dict[str, str]:
    """Returns the variables in PROLOG_VARIABLES of one file."""
    found = {}
    for line in text[:MAX_FILE_BYTES].decode("utf-8", "replace").splitlines():
        key, equals, value = line.partition("=")
        if equals and key in PROLOG_VARIABLES and value.isprintable():
            found[key] = value[:MAX_VALUE_CHARS]
    return found


@dataclass
class PrologFiles:
    """The job files of one folder, with a cache of their content."""

    path: Path
    _cache: dict[str, tuple[tuple[int, int, int], JobVariables]] = field(default_factory=dict)

    def read_jobs(self) -> dict[str, JobVariables]:
        """Returns Slurm job id -> its variables now; empty if there is no such folder."""
        kept: dict[str, tuple[tuple[int, int, int], JobVariables]] = {}
        try:
            names = sorted(os.listdir(self.path))
        except OSError:  # our prolog is not installed on this node
            names = []
        for name in names:
            if (named := _FILE_NAME.fullmatch(name)) is not None and len(kept) < MAX_FILES:
                found = self._read_file(named[1], self.path / name)
                if found is not None:
                    kept[named[1]] = found
        self._cache = kept
        return {job: facts for job, (_, facts) in kept.items()}

    def _read_file(self, job: str, path: Path) -> tuple[tuple[int, int, int], JobVariables] | None:
        try:
            status = os.stat(path)
            state = (status.st_ino, status.st_mtime_ns, status.st_size)
            if job in self._cache and self._cache[job][0] == state:
                return self._cache[job]
            with open(path, "rb") as opened:
                return state, parse_prolog_file(opened.read(MAX_FILE_BYTES))
        except OSError:  # the epilog has removed it
            return None
