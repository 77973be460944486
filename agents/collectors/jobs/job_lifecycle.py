"""Tracks the ranks on this node from scan to scan: starts and ends of jobs, through restarts of their processes.

The state is kept in a small file for the time of one boot. So a restarted agent reports no job's start twice, and
reports the end of a job that ended while no agent ran.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.collectors.gpu.slots import boot_id, default_state_file
from agents.collectors.jobs.ranks import MAX_RANKS, JobRank
from pipeline.model.records import SECOND, Event

SCANS_UNTIL_ENDED = 2
"""A rank without processes in so many scans has ended. Chosen: a restart takes less than two scans of 10 s."""
SCANS_UNTIL_STARTED = 3
"""A start is reported once two scans show the same ranks, at the latest after so many scans: ranks start in turn."""


def job_state_file() -> Path | None:
    """Returns the file in which the service keeps its jobs; None for an agent that a person started."""
    gpus = default_state_file()
    return None if gpus is None else gpus.with_name("jobs.json")


@dataclass
class _TrackedJob:
    """One job on this node. first_seen, last_seen: UTC microseconds; start_reported: whether job_start was sent.

    current_ranks: ranks at the last scan; all_ranks: every rank that it had.
    """

    first_seen: int
    last_seen: int = 0
    start_reported: bool = False
    scans: int = 0
    current_ranks: frozenset[str] = frozenset()
    all_ranks: frozenset[str] = frozenset()


@dataclass
class JobTracker:
    """Keeps the ranks on this node. ranks: current ones by entity; a rank that ended or moved is removed."""

    state_file: Path | None = None
    ranks: dict[str, JobRank] = field(default_factory=dict)
    _jobs: dict[str, _TrackedJob] = field(default_factory=dict)
    _missing: dict[str, int] = field(default_factory=dict)

    def update(self, found: Mapping[str, JobRank], now: int) -> list[Event]:
        """Takes the ranks of one scan and returns the job_start and job_end events. now: UTC microseconds."""
        before = set(self.ranks)
        self._drop_missing(found)
        for entity, rank in found.items():
            known = self.ranks.get(entity)
            # a rank that moved is left out of one scan: the agent sends the inventory when entities come or go
            if known is not None and (known.gpus, known.stage) != (rank.gpus, rank.stage):
                del self.ranks[entity]
            else:
                self.ranks[entity] = rank
        events = [*self._start_events(found, now), *self._end_events(found, now)]
        if events or before != set(self.ranks):
            self._save()
        return events

    def describe_job(self, name: str) -> dict[str, Any]:
        """Returns the attributes of a job, the same on each of its nodes."""
        mine = [rank for rank in self.ranks.values() if rank.job == name]
        found: dict[str, Any] = {"name": next((rank.title for rank in mine if rank.title), "")}
        for key in ("scheduler", "user", "namespace", "array", "world_size"):
            found[key] = next((rank.attributes[key] for rank in mine if key in rank.attributes), "")
        return {key: value for key, value in found.items() if value != ""}

    def _drop_missing(self, found: Mapping[str, JobRank]) -> None:
        """Removes ranks that are missing for too long, and placeholders of a job whose ranks are known now."""
        shown = {rank.job for rank in found.values()}
        self._missing = {e: self._missing.get(e, 0) + 1 for e in self.ranks if e not in found}
        for entity, scans in list(self._missing.items()):
            stood_in = "rank" not in self.ranks[entity].attributes and self.ranks[entity].job in shown
            if scans >= SCANS_UNTIL_ENDED or stood_in:
                del self.ranks[entity], self._missing[entity]

    def _start_events(self, found: Mapping[str, JobRank], now: int) -> Iterator[Event]:
        for name in dict.fromkeys(rank.job for rank in found.values()):
            job = self._jobs.setdefault(name, _TrackedJob(now))
            mine = frozenset(entity for entity, rank in self.ranks.items() if rank.job == name)
            job.scans, job.last_seen = job.scans + 1, now
            if not job.start_reported and mine and (mine == job.current_ranks or job.scans >= SCANS_UNTIL_STARTED):
                job.start_reported = True
                yield Event(
                    job.first_seen,
                    f"job:{name}",
                    "job_start",
                    {"ranks": self._rank_locations(mine), **self.describe_job(name)},
                )
            job.current_ranks = mine
            job.all_ranks = job.all_ranks | mine if len(job.all_ranks) < MAX_RANKS else mine or job.all_ranks

    def _rank_locations(self, mine: frozenset[str]) -> dict[str, dict[str, str]]:
        """Returns rank -> its stage and first GPU, where known."""
        found = {}
        for entity in (one for one in self.ranks if one in mine):
            rank = self.ranks[entity]
            place = {"stage": f"stage:{rank.job}.{rank.stage}" if rank.stage else "", "gpu": next(iter(rank.gpus), "")}
            found[entity] = {key: value for key, value in place.items() if value}
        return found

    def _end_events(self, found: Mapping[str, JobRank], now: int) -> Iterator[Event]:
        for job in self._jobs.values():
            job.last_seen = job.last_seen or now  # restored from the file and not seen since the agent's start
        here = {rank.job for rank in (*self.ranks.values(), *found.values())}
        for name in [name for name in self._jobs if name not in here]:
            job = self._jobs.pop(name)
            if job.start_reported:
                data = {"ranks": sorted(job.all_ranks), "seconds": (job.last_seen - job.first_seen) / SECOND}
                yield Event(now, f"job:{name}", "job_end", data)

    # --- state file --------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Loads the state of this boot from the file; without a usable file nothing is loaded."""
        try:
            kept = json.loads(self.state_file.read_bytes()) if self.state_file is not None else {}
            if kept["boot"] != boot_id():
                return
            jobs = {
                str(name): _TrackedJob(int(since), 0, True, SCANS_UNTIL_STARTED) for name, since in kept["jobs"].items()
            }
            ranks = [_restore_rank(*row) for row in kept["ranks"][:MAX_RANKS]]
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # absent, or not ours
            return
        self._jobs = jobs
        for rank in ranks:
            if rank.job in jobs:
                self.ranks[rank.entity] = rank
                jobs[rank.job].all_ranks |= {rank.entity}

    def _save(self) -> None:
        """Writes the state to the file. If that fails, a restarted agent reports starts again, which does no harm."""
        if self.state_file is None:
            return
        # `node` is among the attributes: the pipeline needs it to remove a rank that has ended
        rows = [(r.entity, r.job, r.stage, r.gpus, r.title, dict(r.attributes)) for r in self.ranks.values()]
        jobs = {name: job.first_seen for name, job in self._jobs.items() if job.start_reported}
        fresh = self.state_file.with_name(f"{self.state_file.name}.new")
        try:
            fresh.write_text(json.dumps({"boot": boot_id(), "jobs": jobs, "ranks": rows}))
            fresh.replace(self.state_file)
        except OSError:
            return


def _restore_rank(
    entity: str, job: str, stage: str, gpus: list[str], title: str, attributes: dict[str, Any]
) -> JobRank:
    """Returns a rank from its saved row; raises on a row of another shape."""
    restored = {str(key): value for key, value in attributes.items()}
    return JobRank(str(entity), str(job), str(stage), tuple(map(str, gpus)), title=str(title), attributes=restored)
