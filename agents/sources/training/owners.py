"""To which users the jobs on this node belong, as Slurm's prolog and the collector `jobs` say.

What the prolog wrote comes from root and is proof. What the collector `jobs` keeps comes from control groups, pods and
environments (agents/sources/jobs/members.py says which wins). Both are read again when their files change.
"""

from __future__ import annotations

import json
import pwd
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.sources.jobs.facts import Folder
from agents.sources.jobs.identity import identify
from agents.sources.nvml.places import boot

LOOK_S = 1.0
"""How often the files are looked at; chosen: a job that just began is known within a second of its prolog."""

Uids = frozenset[int]


@dataclass
class JobOwners:
    """Users of the jobs of one node. facts: what the prolog wrote; memory: what `jobs` keeps, None if nothing."""

    node: str
    facts: Path
    memory: Path | None
    clock: Callable[[], float]
    _folder: Folder = field(init=False)
    _looked: float = field(default=float("-inf"), init=False)
    _proved: Mapping[str, Uids] = field(default_factory=dict, init=False)
    _seen: Mapping[str, Uids] = field(default_factory=dict, init=False)
    _held: Mapping[str, Uids] = field(default_factory=dict, init=False)
    _state: tuple[int, int, int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._folder = Folder(self.facts)

    def of(self, job: str) -> Uids | None:
        """The users of a job; None where this node does not know."""
        if self.clock() - self._looked >= LOOK_S:
            self._looked = self.clock()
            self._proved = _together(self._facts())
            self._renew()
        return self._proved.get(job) or self._seen.get(job)

    def may_name(self, gpu: str, uid: int) -> bool:
        """Whether a user's rank may say that it runs on a GPU: not on one that only other users' jobs hold.

        As of the last call of `of`, so that any thread may ask.
        """
        holders = self._held.get(gpu)
        return holders is None or uid in holders

    def _facts(self) -> Iterable[tuple[str, int]]:
        for number, facts in self._folder.look().items():
            who, uid = identify({**facts, "SLURM_JOB_ID": number}, self.node), facts.get("SLURM_JOB_UID", "")
            if who is not None and uid.isdecimal():
                yield who.job, int(uid)

    def _renew(self) -> None:
        """Reads what `jobs` keeps if it is another file than before."""
        try:
            status = self.memory.stat() if self.memory is not None else None
            state = (status.st_ino, status.st_mtime_ns, status.st_size) if status is not None else None
            if state == self._state:
                return
            self._state = state
            kept = list(_kept(json.loads(self.memory.read_bytes()))) if self.memory is not None else []
            self._seen = _together((job, uid) for job, _, uid in kept)
            self._held = _together((gpu, uid) for _, gpus, uid in kept for gpu in gpus)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # absent, or not ours
            self._seen, self._held = {}, {}


def _kept(kept: Mapping[str, Any]) -> Iterable[tuple[str, tuple[str, ...], int]]:
    """Job, GPUs and user of each rank in what `jobs` keeps, if that is of this boot."""
    if kept["boot"] == boot():
        for _, job, _, gpus, _, attributes in kept["ranks"]:
            if isinstance(job, str) and isinstance(attributes.get("uid"), int):
                yield job, tuple(map(str, gpus)), attributes["uid"]


def _together(found: Iterable[tuple[str, int]]) -> Mapping[str, Uids]:
    """The users of each name."""
    uids: defaultdict[str, set[int]] = defaultdict(set)
    for job, uid in found:
        uids[job].add(uid)
    return {job: frozenset(those) for job, those in uids.items()}


def uids_of(users: Iterable[str]) -> Uids:
    """Numbers of the users that this host knows, by name or number; the others are left out."""
    found = set()
    for user in users:
        try:
            found.add(int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid)
        except KeyError:  # no such user here, as `slurm` on a host without Slurm
            continue
    return frozenset(found)
