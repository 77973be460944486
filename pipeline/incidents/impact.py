"""The impact of incidents: which GPUs, ranks and jobs suffer, how much slower each job is, and what that costs.

Of several incidents on one slow job the one whose onset is nearest to the change of its pace counts what it loses, so
that sums over incidents are right. Event times (us) decide, so that a restart and a replay come to the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.config.sections import Impact
from pipeline.incidents.cases import SEVERITIES
from pipeline.incidents.changes import Change
from pipeline.incidents.doubt import DoubtBook
from pipeline.incidents.facts import Fact, FactBook
from pipeline.incidents.impact_texts import UNLISTED, describe_impact, name_affected
from pipeline.incidents.job_loss import (
    EARLIER,
    HOUR,
    SUFFERS,
    UNCOUNTED,
    JobLoss,
    Kind,
    Moment,
)
from pipeline.incidents.job_pace import MINUTE
from pipeline.incidents.jobs import JobBook, Parts
from pipeline.incidents.loss_claims import LossClaims
from pipeline.incidents.reach import Reach, find_reach, natural_order, split_nodes
from pipeline.model.records import SECOND, Finding, Incident, iso

EVERY = 10 * SECOND
"""Least time between two measurements of the open incidents (us). Chosen: a frame."""
MOST_MEASURED = 1000
"""Incidents measured at a time; the others follow in turn. Chosen: 35 ms of CPU."""
MOST_JOBS, MOST_AFFECTED = 50, 100
"""Jobs and affected entities that are listed; counts have all. Chosen: what a page shows."""


@dataclass(slots=True)
class Tracked:
    """An open incident. reach: of `version` of the places.  parts: of its jobs, also after their end.

    measured, written: event time, and clock (us).  unlisted: number of nodes of GPUs whose jobs are not known.
    """

    incident: Incident
    reach: Reach = field(default_factory=Reach)
    version: int = -1
    parts: dict[str, Parts] = field(default_factory=dict)
    jobs: dict[str, JobLoss] = field(default_factory=dict)
    measured: int = 0
    written: int = 0
    frozen: bool = False
    unlisted: int = 0

    @property
    def lost(self) -> float:
        """GPU-hours lost so far."""
        return sum(job.lost for job in self.jobs.values()) / HOUR

    @property
    def rate(self) -> float:
        """GPU-hours lost per hour now."""
        return 0.0 if self.frozen else sum(job.rate for job in self.jobs.values())

    def listed(self) -> list[JobLoss]:
        """Returns the jobs to show, those that lose most first. A job beside the fault is shown only if it suffers, or
        its results are in doubt."""
        shown = [
            j
            for j in self.jobs.values()
            if j.job in self.reach.jobs or j.lost or j.state in SUFFERS or j.doubt is not None
        ]
        return sorted(shown, key=lambda j: (-j.rate, -j.lost, natural_order(j.job)))


class ImpactBook:
    """The impact of every open incident. For the thread of the evaluation, under its lock.

    dirty: incidents whose row in the store is old.   facts: what findings say about devices and work.
    """

    def __init__(self, jobs: JobBook, prices: Impact) -> None:
        self.jobs, self.prices = jobs, prices
        self.tracked: dict[str, Tracked] = {}
        self.dirty: dict[str, Tracked] = {}
        self.facts = FactBook()
        self.doubts = DoubtBook()
        self._turn: list[str] = []
        self._measured = 0
        self._claims = LossClaims()
        self._index: dict[str, dict[str, Tracked]] | None = None  # job -> incidents that reach it; None: not made yet

    # --- changes of incidents -----------------------------------------------------------------------

    def publish(
        self,
        changes: Iterable[Change],
        findings: Iterable[Finding],
        time: int,
        read_losses: Callable[[str], dict[str, JobLoss]] = lambda incident: {},
    ) -> None:
        """Follows changes as people see them: measures open incidents, and freezes resolved ones.

        read_losses: incident -> what it cost before, for one that is reopened.
        """
        self._note_facts(findings)
        time = min(
            time, self.jobs.time or time
        )  # the clock is ahead while telemetry is read late: no job hangs by that
        merged = list[tuple[Tracked, str]]()
        for change in changes:
            incident = change.incident
            known = self.tracked.get(incident.id)
            if incident.resolved is None:
                self._follow(incident, known, time, read_losses)
            elif known is not None:
                ended = self._freeze(known, incident, time)
                merged += [(ended, change.folded_into)] if change.folded_into else []
        for ended, into in merged:  # now, since the kept one may come after it
            self._hand_over(ended, into, time)

    def _follow(
        self, incident: Incident, known: Tracked | None, time: int, read_losses: Callable[[str], dict[str, JobLoss]]
    ) -> None:
        """Measures an incident that is open, as it is now."""
        tracked = known
        if tracked is None:  # new, or open again: what it cost before is written, or not yet
            tracked = Tracked(incident)
            if (ended := self.dirty.get(incident.id)) is not None:
                tracked = replace(ended, frozen=False)
            else:
                tracked.jobs = read_losses(incident.id)
            for loss in tracked.jobs.values():
                loss.reopen(self.jobs.paces.jobs.get(loss.job), time)
        moved = (tracked.incident.cause, tracked.incident.members) != (incident.cause, incident.members)
        if tracked.incident.onset != incident.onset:
            self._renew_bases(tracked, incident.onset)
        tracked.incident = incident
        tracked.version = -1 if moved else tracked.version
        self.tracked[incident.id] = tracked
        self._note_jobs(tracked)
        self._measure(tracked, time)
        self.dirty[incident.id] = tracked

    def _renew_bases(self, tracked: Tracked, onset: int) -> None:
        """Compares the jobs with their pace before another onset, as far as it is known."""
        for loss in tracked.jobs.values():
            if (pace := self.jobs.paces.jobs.get(loss.job)) is not None:
                loss.base = pace.base_before(onset) or loss.base

    def restore(self, tracked: Tracked) -> None:
        """Adds an open incident as it was stored."""
        self.tracked[tracked.incident.id] = tracked
        self.claim(tracked.incident.id, tracked.incident.onset, tracked.jobs.values())

    def claim(self, incident: str, onset: int, losses: Iterable[JobLoss]) -> None:
        """Gives a stored incident the time since its onset that it may have counted, of each job that lost some."""
        for loss in losses:
            if loss.lost:
                self._claims.take(loss.job, onset, loss.counted, incident)

    def copy_state(self) -> tuple[dict[str, Tracked], dict[str, Tracked]]:
        """Returns what `restore_state` needs, if the changes are not written."""
        return dict(self.tracked), dict(self.dirty)

    def restore_state(self, state: tuple[dict[str, Tracked], dict[str, Tracked]]) -> None:
        """Returns to the incidents of an earlier state; measurements stay."""
        self.tracked, self.dirty = state
        self._index = None

    def _freeze(self, known: Tracked, incident: Incident, time: int) -> Tracked:
        """Keeps what an incident cost until its end, and returns it."""
        self._measure(known, min(time, incident.resolved or time))
        ended = self.dirty[incident.id] = replace(known, incident=incident, frozen=True)
        del self.tracked[incident.id]
        if self._index is not None:
            for job in known.jobs:
                self._index.get(job, {}).pop(incident.id, None)
        return ended

    def _hand_over(self, ended: Tracked, into: str, time: int) -> None:
        """Adds the cost of a merged incident to the kept one, which goes on with it and is written immediately."""
        kept = self.tracked.get(into)
        if kept is None:
            return
        gone, jobs = ended.incident.id, dict(kept.jobs)
        for name, loss in ended.jobs.items():
            jobs[name] = loss.join(jobs.get(name), gone)
            self._claims.hand_over(name, gone, into)  # what the kept one takes back it may count again
        ended.jobs = {name: loss.hand_over(into) for name, loss in ended.jobs.items()}
        made = self.tracked[into] = self.dirty[into] = replace(kept, jobs=jobs, written=0)
        self._note_jobs(made)
        self._measure(made, time)

    def _note_facts(self, findings: Iterable[Finding]) -> None:
        for f in findings:
            self.facts.note(f)
            if self.doubts.note(f):
                self._take_back_doubts(f.entity)

    def _take_back_doubts(self, entity: str) -> None:
        """Drops the doubts of the incidents of an entity; those that others still give come back immediately."""
        for tracked in self.tracked.values():
            if entity in (tracked.incident.cause, *tracked.incident.members):
                for loss in tracked.jobs.values():
                    loss.doubt = None
                self._doubt_jobs(tracked)
                self.dirty[tracked.incident.id] = tracked

    # --- measurement --------------------------------------------------------------------------------

    def advance(self, time: int) -> None:
        """Measures the open incidents, at most MOST_MEASURED, and at most once in EVERY."""
        if 0 <= time - self._measured < EVERY:
            return
        self._measured = time
        self.facts.drop_old(time)
        self.doubts.drop_old(time)
        self._claims.keep(self.jobs.jobs)
        if not self._turn:
            self._turn = list(self.tracked)
        now, self._turn = self._turn[:MOST_MEASURED], self._turn[MOST_MEASURED:]
        for id_ in now:
            if (tracked := self.tracked.get(id_)) is not None and self._measure(tracked, time):
                self.dirty[id_] = tracked

    def _measure(self, tracked: Tracked, time: int) -> bool:
        """Measures one incident. Returns whether what people see changed."""
        tracked.measured = time
        fresh = tracked.version != self.jobs.places.version
        if fresh:
            self._renew_reach(tracked)
        unlisted = tracked.unlisted
        if fresh or unlisted:
            tracked.unlisted = self.jobs.count_unlisted(tracked.reach.hosts, time)
        before = [(j.state, j.lost, j.effect) for j in tracked.jobs.values()]
        self._doubt_jobs(tracked)
        told = self.facts.list_of(tracked.incident)
        for loss in tracked.jobs.values():
            if loss.reached:
                self._judge(tracked, loss, self._find_fact(tracked, loss.job, told), time)
        changed = fresh or unlisted != tracked.unlisted
        return changed or before != [(j.state, j.lost, j.effect) for j in tracked.jobs.values()]

    def _doubt_jobs(self, tracked: Tracked) -> None:
        """Notes since when the results of jobs are in doubt, also of jobs that left the device before the onset."""
        for name, since in self.doubts.find(tracked.incident, tracked.reach.jobs).items():
            if name not in tracked.jobs:
                self._add_job(tracked, name).reached = False
            tracked.jobs[name].doubt = since

    def _renew_reach(self, tracked: Tracked) -> None:
        incident, places = tracked.incident, self.jobs.places
        found = find_reach(incident.cause, incident.members, self.jobs.topology, places)
        gone = {
            job: ranks for job, ranks in tracked.reach.jobs.items() if job not in found.jobs and job in tracked.jobs
        }
        tracked.reach, tracked.version = replace(found, jobs={**found.jobs, **gone}), places.version
        for name in (*tracked.reach.jobs, *sorted(found.beside)):
            loss = self._add_job(tracked, name)
            loss.reached = True
            if name in places.ranks:
                tracked.parts[name] = places.parts_of(name)
            loss.ranks = tracked.reach.jobs.get(name, loss.ranks)
        self._note_jobs(tracked)

    def _add_job(self, tracked: Tracked, name: str) -> JobLoss:
        """Returns the loss of a job in an incident, a new one if it had none, with the present state of the job."""
        job, loss, onset = self.jobs.jobs.get(name), tracked.jobs.get(name), tracked.incident.onset
        if loss is None:
            started = onset if job is None else max(onset, job.started)
            loss = tracked.jobs[name] = JobLoss(name, started, restarted=onset)
        if job is not None and job.ended is None:
            loss.gpus, loss.name, loss.account = job.gpus, job.name, job.account
        return loss

    def _judge(self, tracked: Tracked, loss: JobLoss, fact: Fact | None, time: int) -> None:
        """Sets the state of a job, and counts what it lost since it was counted last. fact: what findings say."""
        pace, job = self.jobs.paces.jobs.get(loss.job), self.jobs.jobs.get(loss.job)
        incident = tracked.incident

        def find_owner(began: int | None, kind: Kind) -> str:
            return self._find_owner(loss.job, began, kind, tracked)

        started = 0 if job is None else job.started
        now = Moment(time, incident.onset, fact, incident.id, find_owner, self._claims, started)
        if job is not None and job.ended is not None and job.ended <= time:
            loss.end(job.ended, 0 if pace is None else pace.moved_at, now)
            return
        if time < incident.onset - MINUTE:
            loss.wait(now)
            return
        if loss.stopped and job is not None:
            runs = job.started if pace is None else pace.moved_at if pace.moved_at > loss.counted else None
            if not loss.resume(runs, now):
                return
        elif job is not None:
            loss.counted = max(loss.counted, job.started)  # it ended by itself: the time without it is no loss
        if pace is None or not pace.moved_at:
            loss.judge_by_facts(now)
        else:
            loss.judge_by_steps(pace, now)

    def _find_fact(self, tracked: Tracked, job: str, told: Mapping[str, Fact]) -> Fact | None:
        """Returns what findings say about a job or what its ranks run on; beside the fault only about the job itself.
        told: what they say about the incident."""
        parts = tracked.parts.get(job) if job in tracked.reach.jobs else None
        return self.facts.find(job, told, parts, self.jobs.topology)

    def _find_owner(self, job: str, began: int | None, kind: Kind, mine: Tracked) -> str:
        """Returns the incident that counts what a job loses: that with the onset nearest to when this loss began.

        By findings alone it is not known when: the first incident with one counts, as long as it has it.
        """
        others = [t for t in self._list_by_job(job) if t is not mine]
        if kind == "fact":
            return next((t.incident.id for t in others if t.jobs[job].share), mine.incident.id)
        if began is None:
            return mine.incident.id
        if kind == "stop":
            others = [t for t in others if t.jobs[job].stopped]
        found = [t.incident for t in (*others, mine) if t.incident.onset - EARLIER <= began]

        def order(i: Incident) -> tuple[int, int, int, str]:
            """Nearest in steps of five minutes, then the most severe and the oldest."""
            return (abs(i.onset - began) // UNCOUNTED, -SEVERITIES.index(i.severity), i.onset, i.id)

        return min(found, key=order, default=mine.incident).id

    def _list_by_job(self, job: str) -> Iterable[Tracked]:
        """Returns the open incidents that reach a job."""
        if self._index is None:
            self._index = {}
            for tracked in self.tracked.values():
                self._note_jobs(tracked)
        return self._index.get(job, {}).values()

    def _note_jobs(self, tracked: Tracked) -> None:
        """Adds an incident to the index, if there is one."""
        if self._index is not None:
            for name in (name for name, loss in tracked.jobs.items() if loss.reached):
                self._index.setdefault(name, {})[tracked.incident.id] = tracked

    # --- for people ---------------------------------------------------------------------------------

    def describe(self, tracked: Tracked) -> dict[str, Any]:
        """Returns the impact in the form of the API."""
        reach, jobs = tracked.reach, tracked.listed()
        suffering = [j for j in jobs if j.state in SUFFERS]
        parts = [tracked.parts.get(loss.job) or self.jobs.places.parts_of(loss.job) for loss in suffering]
        gpus, nodes, ranks = (
            _count_together(own, [part[i] for part in parts])
            for i, own in enumerate((reach.gpus, reach.nodes, reach.ranks.union(*reach.jobs.values())))
        )
        _, affected = self._split(tracked)
        lost, rate = tracked.lost, tracked.rate
        found = {
            "gpus": gpus,
            "nodes": nodes,
            "ranks": ranks,
            "job_count": len(jobs),
            "jobs": [j.as_json() for j in jobs[:MOST_JOBS]],
            "lost_gpu_hours": round(lost, 3),
            "lost_gpu_hours_per_hour": round(rate, 3),
            "cost": self._price(tracked, lost, rate),
            "affected": sorted(affected, key=natural_order)[:MOST_AFFECTED],
            "affected_count": len(affected),
            UNLISTED: tracked.unlisted,
            "as_of": iso(tracked.measured),
        }
        return {**found, "text": describe_impact(found), "title": name_affected(found)}

    def _split(self, tracked: Tracked) -> tuple[set[str], set[str]]:
        topology = self.jobs.topology
        incident, below = tracked.incident, set(tracked.reach.nodes)
        return split_nodes(incident.cause, incident.members, topology, lambda cause: below)

    def _price(self, tracked: Tracked, lost: float, rate: float) -> dict[str, Any] | None:
        """Returns what the lost GPU-hours cost; None without a price. A model has its own price, if one is set."""
        if not self.prices.price_per_gpu_hour and not self.prices.model_prices:
            return None
        amount = per_hour = 0.0
        for loss in tracked.jobs.values():
            price = self._find_price(loss)
            amount, per_hour = amount + price * loss.lost / HOUR, per_hour + price * loss.rate
        per_hour = 0.0 if tracked.frozen else per_hour
        return {"amount": round(amount, 2), "per_hour": round(per_hour, 2), "currency": self.prices.currency}

    def _find_price(self, loss: JobLoss) -> float:
        """Returns the price of a GPU-hour of a job, by the model of its first reached GPU."""
        ranks = self.jobs.places.ranks.get(loss.job) or loss.ranks
        place = next((p for rank in ranks[:1] if (p := self.jobs.places.of.get(rank)) is not None), None)
        gpu = next(iter(place.gpus), "") if place is not None else ""
        facts = self.jobs.topology.attributes.get(gpu, {})
        models = [str(facts.get(key) or "") for key in ("model", "name", "sku")]
        found = (self.prices.model_prices[model] for model in models if model in self.prices.model_prices)
        return next(found, self.prices.price_per_gpu_hour)

    def summarize(self, incident: str) -> tuple[str, str]:
        """Returns who suffers from an incident, as one line and for a title; empty if nothing is known to."""
        tracked = self.tracked.get(incident) or self.dirty.get(incident)
        if tracked is None:
            return "", ""
        found = self.describe(tracked)
        return str(found["text"]), str(found["title"])


def _count_together(own: frozenset[str], others: Sequence[frozenset[str]]) -> int:
    """Returns the number of entities in any of the sets; for one large set without copying it."""
    if len(others) == 1:
        return len(others[0]) + sum(entity not in others[0] for entity in own)
    return len(own.union(*others))
