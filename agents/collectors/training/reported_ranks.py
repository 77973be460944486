"""What the agent keeps of the ranks on its node between two looks. Any user may send: every claim is checked.

To which users the jobs on this node belong, as Slurm's prolog and the collector `jobs` say.

What the prolog wrote comes from root and is proof. What the collector `jobs` keeps comes from control groups, pods and
environments (agents/collectors/jobs/ranks.py says which wins). Both are read again when their files change.
"""

from __future__ import annotations

import json
import math
import os
import pwd
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.collectors.gpu.slots import boot
from agents.collectors.jobs.process_identity import clean, identify
from agents.collectors.jobs.slurm_prolog import Folder
from agents.collectors.training.datagram import (
    HERE,
    Body,
    Checkpoint,
    Digests,
    Sender,
    Step,
    Unusable,
    parsed,
    sender_of,
)
from pipeline.model.records import Event

MAX_RANKS = 256
"""Most ranks of one node; chosen: twice the 128 cores of the largest Trainium node."""
MAX_OF_USER = 128
"""Most ranks of one user, so that one who makes them up leaves room for others; chosen: as above."""
MAX_EVENTS = 512
"""Most events of one look; further ones go with the next. Chosen: the digests of 8 ranks with 64 buckets each."""
MAX_WAITING = 4096
"""Most events that wait; further ones are refused. Chosen: 8 looks."""
SILENT_S = 600.0
"""After so long without a datagram a rank is forgotten, whether its process lives or not; chosen: longer than a
checkpoint or a compilation, and a hung job shows by then in a rank.step that stands still."""
STEADY_S = 10.0
"""For so long after its last datagram a rank stays with the process that reports for it, and so often its totals may
go back, as where a script begins anew; chosen, so that two processes that take themselves for one rank, or one that
makes things up, do not make each look the start of a new life of all counters."""
_MISSING = (1 << 64) - 1


@dataclass(slots=True)
class _Spread:
    """Mean and greatest of what came since the last look."""

    count: int = 0
    total: float = 0.0
    greatest: float = math.nan

    def add(self, value: float) -> None:
        if value == value:
            self.count += 1
            self.total += value
            self.greatest = value if not self.greatest >= value else self.greatest

    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan


@dataclass(slots=True)
class _Rank:
    """One rank: who sends for it, its newest step, what came since the last look and what the last look showed."""

    sender: Sender
    uid: int
    pid: int
    heard: float
    last: Step | None = None
    steps: int = 0
    step_time: _Spread = field(default_factory=_Spread)
    compute_time: _Spread = field(default_factory=_Spread)
    communication_time: _Spread = field(default_factory=_Spread)
    norm: _Spread = field(default_factory=_Spread)
    loss: float = math.nan
    began: float = -math.inf
    shown: tuple[float, ...] = (math.nan,) * 7

    def add(self, step: Step) -> None:
        self.last, self.steps = step, self.steps + 1
        self.step_time.add(step.step_time)
        self.compute_time.add(step.compute_time)
        self.communication_time.add(step.communication_time)
        self.norm.add(step.gradient_norm)
        if step.loss == step.loss:
            self.loss = step.loss

    def show(self) -> tuple[float, ...]:
        """Values of the steps since the last look; without one, those of the look before: they are the last step's."""
        if self.steps:
            norm = self.norm.greatest if self.norm.count else self.shown[6]
            spreads = self.step_time, self.compute_time, self.communication_time
            longest = self.step_time.greatest, self.compute_time.greatest
            self.shown = (*(spread.mean() for spread in spreads), *longest, self.loss, norm)
            self.steps = 0
            self.step_time, self.compute_time, self.communication_time = _Spread(), _Spread(), _Spread()
            self.norm = _Spread()
        return self.shown


GAUGES = (
    *("rank.step_time", "rank.compute_time", "rank.communication_time"),
    *("rank.step_time_longest", "rank.compute_time_longest", "rank.loss", "rank.gradient_norm"),
)
_TOTALS = ("step", "tokens", "drops", "refused", "nonfinite")
COUNTERS = tuple(f"rank.{name}" for name in _TOTALS)


@dataclass(frozen=True, slots=True)
class Found:
    """One look: ranks with their columns, and events. refused: datagrams that were not taken, ever."""

    entities: tuple[str, ...]
    columns: Mapping[str, NDArray[Any]]
    events: tuple[Event, ...]
    refused: int


class Ranks:
    """All ranks of a node. One thread receives while another one looks.

    owners: a job's users, None where they are not known.  trusted: users who may report for any job.
    """

    def __init__(
        self,
        node: str,
        wall: Callable[[], int],
        clock: Callable[[], float],
        owners: Callable[[str], Collection[int] | None] = lambda job: None,
        trusted: Collection[int] = (0,),
    ) -> None:
        self._node, self._wall, self._clock = clean(node), wall, clock
        self._owners, self._trusted = owners, trusted
        self._lock = Lock()
        self._ranks: dict[str, _Rank] = {}
        self._senders: dict[bytes, Sender] = {}
        self._events: deque[Event] = deque()
        self.refused, self.reason = 0, ""

    def receive(self, data: bytes, pid: int, uid: int) -> None:
        """Takes one datagram, or counts it as refused."""
        with self._lock:
            try:
                whose, body = parsed(data)
                sender = self._sender(whose)
                self._take(f"rank:{sender.job}.{sender.rank}", sender, body, pid, uid)
            except Unusable as wrong:
                self._refuse(f"from process {pid} of user {uid}: {str(wrong)[:200]}")

    def look(self) -> Found:
        """What came since the last look. Ranks whose process ended, or that are silent for long, are forgotten."""
        with self._lock:
            self._forget()
            ranks = tuple(self._ranks.items())
            columns: dict[str, NDArray[Any]] = {}
            if ranks:
                gauges = np.array([rank.show() for _, rank in ranks])
                gauges[np.isinf(gauges)] = np.nan
                columns = {name: gauges[:, at] for at, name in enumerate(GAUGES)}
                for name, total in zip(COUNTERS, _TOTALS, strict=True):
                    columns[name] = np.array([_count(rank.last, total) for _, rank in ranks], np.uint64)
            events = tuple(self._events.popleft() for _ in range(min(len(self._events), MAX_EVENTS)))
            return Found(tuple(entity for entity, _ in ranks), columns, events, self.refused)

    def _refuse(self, reason: str) -> None:
        self.refused, self.reason = self.refused + 1, reason

    def senders(self) -> dict[str, tuple[Sender, int]]:
        """Ranks that are known now, with who they say they are and the user who says so."""
        with self._lock:
            return {entity: (rank.sender, rank.uid) for entity, rank in self._ranks.items()}

    def _sender(self, whose: bytes) -> Sender:
        """An identity, read once: every datagram of a script bears the same bytes."""
        known = self._senders.get(whose)
        if known is None:
            if len(self._senders) >= 2 * MAX_RANKS:
                self._senders.clear()
            known = self._senders[whose] = self._named(sender_of(whose))
        return known

    def _named(self, sender: Sender) -> Sender:
        """With the node's name in the name of a job that is on this node alone."""
        job = clean(sender.job.replace(HERE, self._node, 1)) if sender.job.startswith(HERE) else sender.job
        return Sender(job, sender.rank, sender.world, sender.stage, sender.gpu, sender.group)

    def _take(self, entity: str, sender: Sender, body: Body, pid: int, uid: int) -> None:
        self._check_user(sender.job, uid)
        rank = self._ranks.get(entity)
        if rank is None:
            rank = self._ranks[entity] = self._welcome(entity, sender, pid, uid)
        if rank.uid != uid:
            raise Unusable(f"{entity} belongs to user {rank.uid}")
        now = self._clock()
        if rank.pid != pid and now - rank.heard < STEADY_S and _lives(rank.pid):
            raise Unusable(f"process {rank.pid} reports for {entity}")
        if isinstance(body, Step) and rank.last is not None and _went_back(rank.last, body):
            if now - rank.began < STEADY_S:
                raise Unusable(f"{entity} begins anew again within {STEADY_S:g} s")
            rank.began = now
        rank.sender, rank.pid, rank.heard = sender, pid, now
        if isinstance(body, Step):
            rank.add(body)
        elif isinstance(body, Digests):
            group = sender.group or sender.stage
            self._tell([self._digest(entity, body.step, bucket, value, group) for bucket, value in body.values])
        else:
            self._tell([self._checkpoint(sender, body)])

    def _check_user(self, job: str, uid: int) -> None:
        """Raises Unusable unless the user may report for the job. Of one that nobody knows who reports first may."""
        if uid in self._trusted:
            return
        owners = self._owners(job)
        if owners is None:
            others = (rank.uid for rank in self._ranks.values() if rank.sender.job == job)
            owners = {uid for uid in others if uid not in self._trusted} or {uid}
        if uid not in owners:
            raise Unusable(f"job {job} belongs to user {', '.join(map(str, sorted(owners)))}")

    def _welcome(self, entity: str, sender: Sender, pid: int, uid: int) -> _Rank:
        own = sum(rank.uid == uid for rank in self._ranks.values())
        if len(self._ranks) >= MAX_RANKS or own >= MAX_OF_USER:
            raise Unusable(f"{entity} is one too many; at most {MAX_RANKS} ranks, {MAX_OF_USER} of one user")
        return _Rank(sender, uid, pid, self._clock())

    def _tell(self, events: list[Event]) -> None:
        if len(self._events) + len(events) > MAX_WAITING:
            raise Unusable(f"{len(events)} more events; at most {MAX_WAITING} may wait")
        self._events.extend(events)

    def _digest(self, entity: str, step: int, bucket: str, value: int, group: str) -> Event:
        data = {"step": step, "bucket": bucket, "digest": f"{value:016x}", "group": group}
        return Event(self._wall(), entity, "replica_digest", data)

    def _checkpoint(self, sender: Sender, body: Checkpoint) -> Event:
        seconds = None if math.isnan(body.seconds) else body.seconds
        data = {"seconds": seconds, "step": body.step, "rank": sender.rank}
        return Event(self._wall(), f"job:{sender.job}", "checkpoint", data)

    def _forget(self) -> None:
        """Forgets ranks that ended, and those of users to whom their job turns out not to belong.

        Only ranks without a step since the last look can have ended: the last step of the others is still shown.
        """
        now = self._clock()
        for entity, rank in list(self._ranks.items()):
            owners = self._owners(rank.sender.job)
            if owners is not None and rank.uid not in owners and rank.uid not in self._trusted:
                del self._ranks[entity]
                self._refuse(f"{entity} of user {rank.uid}: job {rank.sender.job} belongs to another user")
        gone = [
            entity
            for entity, rank in self._ranks.items()
            if not rank.steps and (now - rank.heard > SILENT_S or not _lives(rank.pid))
        ]
        for entity in gone:
            del self._ranks[entity]


def _went_back(before: Step, now: Step) -> bool:
    """Whether a total is less than it was."""
    return any(getattr(now, name) < getattr(before, name) for name in _TOTALS)


def _count(last: Step | None, name: str) -> int:
    return _MISSING if last is None else int(getattr(last, name))


def _lives(pid: int) -> bool:
    """Whether a process is there; 0 is one that another pid namespace hides from us."""
    if pid <= 0:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's: it is there
        return True
    return True


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
