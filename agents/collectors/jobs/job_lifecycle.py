"""Follows the ranks on this node from look to look: when a job starts and ends here, through restarts of its processes.

What is known is kept in a small file for the time of one boot, so that an agent that is started anew tells no job's
start twice and tells the end of one that ended meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.collectors.gpu.slots import boot, memory_of_the_service
from agents.collectors.jobs.ranks import MAX_RANKS, Rank
from pipeline.model.records import SECOND, Event

GONE_LOOKS = 2
"""A rank none of whose processes is left for so many looks has ended: a restart takes less than two of 10 s. Chosen."""
SETTLE_LOOKS = 3
"""A start is told when its ranks were the same at two looks, at the latest after so many; ranks start in turn."""


def memory_of_jobs() -> Path | None:
    """Where the service keeps what jobs there are; None for an agent that a person started."""
    gpus = memory_of_the_service()
    return None if gpus is None else gpus.with_name("jobs.json")


@dataclass
class _Job:
    """One job on this node. since, seen: first and last seen, UTC microseconds; told: whether its start was.

    had: all its ranks.
    """

    since: int
    seen: int = 0
    told: bool = False
    looks: int = 0
    ranks: frozenset[str] = frozenset()
    had: frozenset[str] = frozenset()


@dataclass
class Membership:
    """ranks: those on this node now, by entity; what ended or moved is no longer among them."""

    memory: Path | None = None
    ranks: dict[str, Rank] = field(default_factory=dict)
    _jobs: dict[str, _Job] = field(default_factory=dict)
    _missing: dict[str, int] = field(default_factory=dict)

    def follow(self, found: Mapping[str, Rank], now: int) -> list[Event]:
        """Takes what one look found; the starts and ends of jobs."""
        before = set(self.ranks)
        self._leave(found)
        for entity, rank in found.items():
            known = self.ranks.get(entity)
            # who moved is away for one look: the agent tells its inventory when entities come or go
            if known is not None and (known.gpus, known.stage) != (rank.gpus, rank.stage):
                del self.ranks[entity]
            else:
                self.ranks[entity] = rank
        events = [*self._starts(found, now), *self._ends(found, now)]
        if events or before != set(self.ranks):
            self._keep()
        return events

    def job_of(self, name: str) -> dict[str, Any]:
        """What is known of a job as a whole, the same on each of its nodes."""
        mine = [rank for rank in self.ranks.values() if rank.job == name]
        found: dict[str, Any] = {"name": next((rank.title for rank in mine if rank.title), "")}
        for key in ("scheduler", "user", "namespace", "array", "world_size"):
            found[key] = next((rank.attributes[key] for rank in mine if key in rank.attributes), "")
        return {key: value for key, value in found.items() if value != ""}

    def _leave(self, found: Mapping[str, Rank]) -> None:
        """Forgets ranks that were away too long, and at once what stood for ranks that are known now."""
        shown = {rank.job for rank in found.values()}
        self._missing = {e: self._missing.get(e, 0) + 1 for e in self.ranks if e not in found}
        for entity, looks in list(self._missing.items()):
            stood_in = "rank" not in self.ranks[entity].attributes and self.ranks[entity].job in shown
            if looks >= GONE_LOOKS or stood_in:
                del self.ranks[entity], self._missing[entity]

    def _starts(self, found: Mapping[str, Rank], now: int) -> Iterator[Event]:
        for name in dict.fromkeys(rank.job for rank in found.values()):
            job = self._jobs.setdefault(name, _Job(now))
            mine = frozenset(entity for entity, rank in self.ranks.items() if rank.job == name)
            job.looks, job.seen = job.looks + 1, now
            if not job.told and mine and (mine == job.ranks or job.looks >= SETTLE_LOOKS):
                job.told = True
                yield Event(job.since, f"job:{name}", "job_start", {"ranks": self._places(mine), **self.job_of(name)})
            job.ranks = mine
            job.had = job.had | mine if len(job.had) < MAX_RANKS else mine or job.had

    def _places(self, mine: frozenset[str]) -> dict[str, dict[str, str]]:
        """Rank -> its stage and first GPU, as far as they are known."""
        found = {}
        for entity in (one for one in self.ranks if one in mine):
            rank = self.ranks[entity]
            place = {"stage": f"stage:{rank.job}.{rank.stage}" if rank.stage else "", "gpu": next(iter(rank.gpus), "")}
            found[entity] = {key: value for key, value in place.items() if value}
        return found

    def _ends(self, found: Mapping[str, Rank], now: int) -> Iterator[Event]:
        for job in self._jobs.values():
            job.seen = job.seen or now  # one that ended while no agent ran: nobody saw it last before this look
        here = {rank.job for rank in (*self.ranks.values(), *found.values())}
        for name in [name for name in self._jobs if name not in here]:
            job = self._jobs.pop(name)
            if job.told:
                data = {"ranks": sorted(job.had), "seconds": (job.seen - job.since) / SECOND}
                yield Event(now, f"job:{name}", "job_end", data)

    # --- over a restart of the agent ---------------------------------------------------------------------------------

    def recall(self) -> None:
        """Takes up what was kept since the boot; nothing where that makes no sense."""
        try:
            kept = json.loads(self.memory.read_bytes()) if self.memory is not None else {}
            if kept["boot"] != boot():
                return
            jobs = {str(name): _Job(int(since), 0, True, SETTLE_LOOKS) for name, since in kept["jobs"].items()}
            ranks = [_recalled(*row) for row in kept["ranks"][:MAX_RANKS]]
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # absent, or not ours
            return
        self._jobs = jobs
        for rank in ranks:
            if rank.job in jobs:
                self.ranks[rank.entity] = rank
                jobs[rank.job].had |= {rank.entity}

    def _keep(self) -> None:
        """Writes it down; where that is not possible, a restart tells starts twice, which costs no more than that."""
        if self.memory is None:
            return
        # with `node` among the attributes: without it the pipeline would not let go of a rank that ended meanwhile
        rows = [(r.entity, r.job, r.stage, r.gpus, r.title, dict(r.attributes)) for r in self.ranks.values()]
        jobs = {name: job.since for name, job in self._jobs.items() if job.told}
        fresh = self.memory.with_name(f"{self.memory.name}.new")
        try:
            fresh.write_text(json.dumps({"boot": boot(), "jobs": jobs, "ranks": rows}))
            fresh.replace(self.memory)
        except OSError:
            return


def _recalled(entity: str, job: str, stage: str, gpus: list[str], title: str, attributes: dict[str, Any]) -> Rank:
    """A rank as it was kept; what does not have its shape raises."""
    told = {str(key): value for key, value in attributes.items()}
    return Rank(str(entity), str(job), str(stage), tuple(map(str, gpus)), title=str(title), attributes=told)
