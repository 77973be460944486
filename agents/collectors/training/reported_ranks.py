"""The ranks that report steps on this node, between two reads. Any user may send, so every claim is checked.

The owners of a job come from Slurm's prolog, which root wrote and which is proof, else from the state file of the
collector `jobs`: control groups, pods and environments (agents/collectors/jobs/ranks.py). Both are read again when
their files change.
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

from agents.collectors.gpu.slots import boot_id
from agents.collectors.jobs.process_identity import clean_name, identify_process
from agents.collectors.jobs.slurm_prolog import PrologFiles
from agents.collectors.training.datagram import (
    NODE_PLACEHOLDER,
    CheckpointReport,
    DigestsReport,
    InvalidDatagram,
    RankSender,
    Report,
    StepReport,
    decode_datagram,
    decode_sender,
)
from pipeline.model.records import Event

MAX_RANKS = 256
"""Most ranks of one node. Chosen: twice the 128 cores of the largest Trainium node."""
MAX_RANKS_PER_USER = 128
"""Most ranks of one user, so that forged ranks leave room for others. Chosen: as above."""
MAX_EVENTS_PER_READ = 512
"""Most events of one read; the rest follow with the next. Chosen: the digests of 8 ranks with 64 buckets each."""
MAX_QUEUED_EVENTS = 4096
"""Most events in the queue; further ones are refused. Chosen: 8 reads."""
STALE_S = 600.0
"""Seconds without a datagram after which a rank is removed, even if its process lives. Chosen: longer than a checkpoint
or a compilation; a hung job shows by then in a rank.step that does not grow."""
OWNER_HOLD_S = 10.0
"""For so long after its last datagram a rank stays with its reporting process, and so often its totals may decrease, as
after a restart of the script. Chosen: two processes that claim one rank, or forged data, must not reset all counters at
each read."""
_MISSING = (1 << 64) - 1


@dataclass(slots=True)
class _MeanAndMax:
    """Mean and greatest value since the last read."""

    count: int = 0
    total: float = 0.0
    greatest: float = math.nan

    def add(self, value: float) -> None:
        """Adds a value; NaN is ignored."""
        if value == value:
            self.count += 1
            self.total += value
            self.greatest = value if not self.greatest >= value else self.greatest

    def mean(self) -> float:
        """Returns the mean; NaN without values."""
        return self.total / self.count if self.count else math.nan


@dataclass(slots=True)
class _RankState:
    """One rank: its sender, its newest step, the values since the last read, and those of the last read."""

    sender: RankSender
    uid: int
    pid: int
    last_received: float
    last: StepReport | None = None
    steps_since_read: int = 0
    step_time: _MeanAndMax = field(default_factory=_MeanAndMax)
    compute_time: _MeanAndMax = field(default_factory=_MeanAndMax)
    communication_time: _MeanAndMax = field(default_factory=_MeanAndMax)
    norm: _MeanAndMax = field(default_factory=_MeanAndMax)
    loss: float = math.nan
    restarted_at: float = -math.inf
    last_values: tuple[float, ...] = (math.nan,) * 7

    def add_step(self, step: StepReport) -> None:
        """Adds one step."""
        self.last, self.steps_since_read = step, self.steps_since_read + 1
        self.step_time.add(step.step_time)
        self.compute_time.add(step.compute_time)
        self.communication_time.add(step.communication_time)
        self.norm.add(step.gradient_norm)
        if step.loss == step.loss:
            self.loss = step.loss

    def drain_values(self) -> tuple[float, ...]:
        """Returns the gauges of the steps since the last read; without a new step, those of the last read."""
        if self.steps_since_read:
            norm = self.norm.greatest if self.norm.count else self.last_values[6]
            spreads = self.step_time, self.compute_time, self.communication_time
            longest = self.step_time.greatest, self.compute_time.greatest
            self.last_values = (*(spread.mean() for spread in spreads), *longest, self.loss, norm)
            self.steps_since_read = 0
            self.step_time, self.compute_time, self.communication_time = _MeanAndMax(), _MeanAndMax(), _MeanAndMax()
            self.norm = _MeanAndMax()
        return self.last_values


GAUGES = (
    *("rank.step_time", "rank.compute_time", "rank.communication_time"),
    *("rank.step_time_longest", "rank.compute_time_longest", "rank.loss", "rank.gradient_norm"),
)
_TOTALS = ("step", "tokens", "drops", "refused", "nonfinite")
COUNTERS = tuple(f"rank.{name}" for name in _TOTALS)


@dataclass(frozen=True, slots=True)
class CollectedReports:
    """One read: ranks with their columns, and events. refused: datagrams refused since the start."""

    entities: tuple[str, ...]
    columns: Mapping[str, NDArray[Any]]
    events: tuple[Event, ...]
    refused: int


class ReportedRanks:
    """All ranks of a node. One thread calls receive while another one calls collect.

    owners: returns a job's users, None if unknown. trusted: users identity may report for any job.
    """

    def __init__(
        self,
        node: str,
        wall: Callable[[], int],
        clock: Callable[[], float],
        owners: Callable[[str], Collection[int] | None] = lambda job: None,
        trusted: Collection[int] = (0,),
    ) -> None:
        self._node, self._wall, self._clock = clean_name(node), wall, clock
        self._owners, self._trusted = owners, trusted
        self._lock = Lock()
        self._ranks: dict[str, _RankState] = {}
        self._senders: dict[bytes, RankSender] = {}
        self._events: deque[Event] = deque()
        self.refused, self.reason = 0, ""

    def receive(self, data: bytes, pid: int, uid: int) -> None:
        """Accepts one datagram, or counts it as refused."""
        with self._lock:
            try:
                identity_bytes, body = decode_datagram(data)
                sender = self._decode_sender(identity_bytes)
                self._accept(f"rank:{sender.job}.{sender.rank}", sender, body, pid, uid)
            except InvalidDatagram as wrong:
                self._refuse(f"from process {pid} of user {uid}: {str(wrong)[:200]}")

    def collect(self) -> CollectedReports:
        """Returns the reports since the last read. Removes ranks identity_bytes process ended, or that are stale."""
        with self._lock:
            self._drop_stale()
            ranks = tuple(self._ranks.items())
            columns: dict[str, NDArray[Any]] = {}
            if ranks:
                gauges = np.array([rank.drain_values() for _, rank in ranks])
                gauges[np.isinf(gauges)] = np.nan
                columns = {name: gauges[:, at] for at, name in enumerate(GAUGES)}
                for name, total in zip(COUNTERS, _TOTALS, strict=True):
                    columns[name] = np.array([_total(rank.last, total) for _, rank in ranks], np.uint64)
            events = tuple(self._events.popleft() for _ in range(min(len(self._events), MAX_EVENTS_PER_READ)))
            return CollectedReports(tuple(entity for entity, _ in ranks), columns, events, self.refused)

    def _refuse(self, reason: str) -> None:
        self.refused, self.reason = self.refused + 1, reason

    def list_senders(self) -> dict[str, tuple[RankSender, int]]:
        """Returns entity -> (sender, uid) of the known ranks."""
        with self._lock:
            return {entity: (rank.sender, rank.uid) for entity, rank in self._ranks.items()}

    def _decode_sender(self, identity_bytes: bytes) -> RankSender:
        """Returns the sender in an identity; cached, since every datagram of a script has the same one."""
        known = self._senders.get(identity_bytes)
        if known is None:
            if len(self._senders) >= 2 * MAX_RANKS:
                self._senders.clear()
            known = self._senders[identity_bytes] = self._with_node_name(decode_sender(identity_bytes))
        return known

    def _with_node_name(self, sender: RankSender) -> RankSender:
        """Returns the sender with the node's name in the name of a job on this node alone."""
        job = (
            clean_name(sender.job.replace(NODE_PLACEHOLDER, self._node, 1))
            if sender.job.startswith(NODE_PLACEHOLDER)
            else sender.job
        )
        return RankSender(job, sender.rank, sender.world, sender.stage, sender.gpu, sender.group)

    def _accept(self, entity: str, sender: RankSender, body: Report, pid: int, uid: int) -> None:
        self._check_user(sender.job, uid)
        rank = self._ranks.get(entity)
        if rank is None:
            rank = self._ranks[entity] = self._add_rank(entity, sender, pid, uid)
        if rank.uid != uid:
            raise InvalidDatagram(f"{entity} belongs to user {rank.uid}")
        now = self._clock()
        if rank.pid != pid and now - rank.last_received < OWNER_HOLD_S and _is_alive(rank.pid):
            raise InvalidDatagram(f"process {rank.pid} reports for {entity}")
        if isinstance(body, StepReport) and rank.last is not None and _totals_decreased(rank.last, body):
            if now - rank.restarted_at < OWNER_HOLD_S:
                raise InvalidDatagram(f"{entity} restarted again within {OWNER_HOLD_S:g} s")
            rank.restarted_at = now
        rank.sender, rank.pid, rank.last_received = sender, pid, now
        if isinstance(body, StepReport):
            rank.add_step(body)
        elif isinstance(body, DigestsReport):
            group = sender.group or sender.stage
            self._queue_events(
                [self._digest_event(entity, body.step, bucket, value, group) for bucket, value in body.values]
            )
        else:
            self._queue_events([self._checkpoint_event(sender, body)])

    def _check_user(self, job: str, uid: int) -> None:
        """Raises InvalidDatagram unless the user may report for the job. An unknown job belongs to its first user."""
        if uid in self._trusted:
            return
        owners = self._owners(job)
        if owners is None:
            others = (rank.uid for rank in self._ranks.values() if rank.sender.job == job)
            owners = {uid for uid in others if uid not in self._trusted} or {uid}
        if uid not in owners:
            raise InvalidDatagram(f"job {job} belongs to user {', '.join(map(str, sorted(owners)))}")

    def _add_rank(self, entity: str, sender: RankSender, pid: int, uid: int) -> _RankState:
        own = sum(rank.uid == uid for rank in self._ranks.values())
        if len(self._ranks) >= MAX_RANKS or own >= MAX_RANKS_PER_USER:
            raise InvalidDatagram(f"{entity}: too many ranks; at most {MAX_RANKS}, {MAX_RANKS_PER_USER} of one user")
        return _RankState(sender, uid, pid, self._clock())

    def _queue_events(self, events: list[Event]) -> None:
        if len(self._events) + len(events) > MAX_QUEUED_EVENTS:
            raise InvalidDatagram(f"{len(events)} more events; at most {MAX_QUEUED_EVENTS} may be queued")
        self._events.extend(events)

    def _digest_event(self, entity: str, step: int, bucket: str, value: int, group: str) -> Event:
        data = {"step": step, "bucket": bucket, "digest": f"{value:016x}", "group": group}
        return Event(self._wall(), entity, "replica_digest", data)

    def _checkpoint_event(self, sender: RankSender, body: CheckpointReport) -> Event:
        seconds = None if math.isnan(body.seconds) else body.seconds
        data = {"seconds": seconds, "step": body.step, "rank": sender.rank}
        return Event(self._wall(), f"job:{sender.job}", "checkpoint", data)

    def _drop_stale(self) -> None:
        """Removes ranks that ended, and those of users who do not own the job.

        Only ranks without a step since the last read can have ended: the last step of the others is still to be read.
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
            if not rank.steps_since_read and (now - rank.last_received > STALE_S or not _is_alive(rank.pid))
        ]
        for entity in gone:
            del self._ranks[entity]


def _totals_decreased(before: StepReport, now: StepReport) -> bool:
    """Whether a total is less than before."""
    return any(getattr(now, name) < getattr(before, name) for name in _TOTALS)


def _total(last: StepReport | None, name: str) -> int:
    return _MISSING if last is None else int(getattr(last, name))


def _is_alive(pid: int) -> bool:
    """Whether a process exists; 0 is one that another pid namespace hides from us."""
    if pid <= 0:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process: it exists
        return True
    return True


CHECK_INTERVAL_S = 1.0
"""Seconds between two checks of the files. Chosen: a new job is known within a second of its prolog."""

Uids = frozenset[int]


@dataclass
class JobOwners:
    """Users of the jobs of one node. facts: folder of the prolog's files; memory: state file of `jobs`, or None."""

    node: str
    facts: Path
    memory: Path | None
    clock: Callable[[], float]
    _prolog: PrologFiles = field(init=False)
    _checked_at: float = field(default=float("-inf"), init=False)
    _prolog_owners: Mapping[str, Uids] = field(default_factory=dict, init=False)
    _tracked_owners: Mapping[str, Uids] = field(default_factory=dict, init=False)
    _gpu_users: Mapping[str, Uids] = field(default_factory=dict, init=False)
    _state: tuple[int, int, int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._prolog = PrologFiles(self.facts)

    def find_owners(self, job: str) -> Uids | None:
        """Returns the users of a job; None if unknown on this node."""
        if self.clock() - self._checked_at >= CHECK_INTERVAL_S:
            self._checked_at = self.clock()
            self._prolog_owners = _group_uids(self._read_prolog_owners())
            self._reload()
        return self._prolog_owners.get(job) or self._tracked_owners.get(job)

    def may_claim_gpu(self, gpu: str, uid: int) -> bool:
        """Whether a user's rank may report a GPU: not one that only other users' jobs hold."""
        holders = self._gpu_users.get(gpu)
        return holders is None or uid in holders

    def _read_prolog_owners(self) -> Iterable[tuple[str, int]]:
        for number, facts in self._prolog.read_jobs().items():
            identity, uid = (
                identify_process({**facts, "SLURM_JOB_ID": number}, self.node),
                facts.get("SLURM_JOB_UID", ""),
            )
            if identity is not None and uid.isdecimal():
                yield identity.job, int(uid)

    def _reload(self) -> None:
        """Reads the state file of `jobs` if it changed."""
        try:
            status = self.memory.stat() if self.memory is not None else None
            state = (status.st_ino, status.st_mtime_ns, status.st_size) if status is not None else None
            if state == self._state:
                return
            self._state = state
            kept = list(_parse_job_state(json.loads(self.memory.read_bytes()))) if self.memory is not None else []
            self._tracked_owners = _group_uids((job, uid) for job, _, uid in kept)
            self._gpu_users = _group_uids((gpu, uid) for _, gpus, uid in kept for gpu in gpus)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # absent, or not ours
            self._tracked_owners, self._gpu_users = {}, {}


def _parse_job_state(kept: Mapping[str, Any]) -> Iterable[tuple[str, tuple[str, ...], int]]:
    """Yields job, GPUs and user of each rank in the state file of the collector `jobs`, if it is of this boot."""
    if kept["boot"] == boot_id():
        for _, job, _, gpus, _, attributes in kept["ranks"]:
            if isinstance(job, str) and isinstance(attributes.get("uid"), int):
                yield job, tuple(map(str, gpus)), attributes["uid"]


def _group_uids(found: Iterable[tuple[str, int]]) -> Mapping[str, Uids]:
    """Returns name -> users."""
    uids: defaultdict[str, set[int]] = defaultdict(set)
    for job, uid in found:
        uids[job].add(uid)
    return {job: frozenset(those) for job, those in uids.items()}


def resolve_uids(users: Iterable[str]) -> Uids:
    """Returns the uids of users, by name or number; users unknown to this host are left out."""
    found = set()
    for user in users:
        try:
            found.add(int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid)
        except KeyError:  # no such user here, as `slurm` on a host without Slurm
            continue
    return frozenset(found)
