"""The impact of incidents: which GPUs, ranks and jobs suffer, how much slower each job is, and what that costs.

Of several incidents on one slow job the one whose onset is nearest to the change of its pace counts what it loses, so
that sums over incidents are right. Event times (us) decide, so that a restart and a replay come to the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.config.sections import Impact
from pipeline.incidents.cases import SEVERITIES, Change
from pipeline.incidents.doubt import DoubtBook
from pipeline.incidents.job_loss import EARLIER, HOUR, SUFFERS, UNCOUNTED, Fact, JobLoss, Moment, read_fact
from pipeline.incidents.job_pace import JobPace
from pipeline.incidents.jobs import JobBook
from pipeline.incidents.reach import Reach, find_reach, natural_order, split_nodes
from pipeline.model.entity_names import KINDS, entity_name
from pipeline.model.job_effect import describe_effect, split_doubt
from pipeline.model.records import SECOND, Finding, Incident, iso

EVERY = 10 * SECOND
"""Least time between two measurements of the open incidents (us). Chosen: a frame."""
MOST_MEASURED = 1000
"""Incidents measured at a time; the others follow in turn. Chosen: 35 ms of CPU."""
MOST_JOBS, MOST_AFFECTED = 50, 100
"""Jobs and affected entities that are listed; counts have all. Chosen: what a page shows."""
FACTS_LAST = 600 * SECOND
"""Time for which a finding about a lost or hanging part counts (us): as long as the Desk waits to resolve."""


@dataclass(slots=True)
class Tracked:
    """An open incident. reach: of `version` of the places.  measured, written: event time, and clock (us)."""

    incident: Incident
    reach: Reach = field(default_factory=Reach)
    version: int = -1
    jobs: dict[str, JobLoss] = field(default_factory=dict)
    measured: int = 0
    written: int = 0
    frozen: bool = False

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

    dirty: incidents whose row in the store is old.   facts: what findings say about entities.
    """

    def __init__(self, jobs: JobBook, prices: Impact) -> None:
        self.jobs, self.prices = jobs, prices
        self.tracked: dict[str, Tracked] = {}
        self.dirty: dict[str, Tracked] = {}
        self.facts: dict[str, Fact] = {}
        self.doubts = DoubtBook()
        self._turn: list[str] = []
        self._measured = 0
        self._index: dict[str, list[Tracked]] = {}  # job -> incidents that have it, of one round
        self._indexed: tuple[int, int] = (-1, -1)

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
        for change in changes:
            incident = change.incident
            known = self.tracked.get(incident.id)
            if incident.resolved is not None:
                if known is not None:
                    self._freeze(known, change, time)
                continue
            if known is None and (ended := self.dirty.get(incident.id)) is not None:  # not written since its end
                known = replace(ended, frozen=False)
            tracked = Tracked(incident, jobs=read_losses(incident.id)) if known is None else known
            moved = (tracked.incident.cause, tracked.incident.members) != (incident.cause, incident.members)
            tracked.incident = incident
            tracked.version = -1 if moved else tracked.version
            self.tracked[incident.id] = tracked
            self._measure(tracked, time)
            self.dirty[incident.id] = tracked

    def copy_state(self) -> tuple[dict[str, Tracked], dict[str, Tracked]]:
        """Returns what `restore_state` needs, if the changes are not written."""
        return dict(self.tracked), dict(self.dirty)

    def restore_state(self, state: tuple[dict[str, Tracked], dict[str, Tracked]]) -> None:
        """Returns to the incidents of an earlier state; measurements stay."""
        self.tracked, self.dirty = state

    def _freeze(self, known: Tracked, change: Change, time: int) -> None:
        """Keeps what an incident cost until its end; a merged one goes on in the other."""
        incident = change.incident
        self._measure(known, min(time, incident.resolved or time))
        into = self.tracked.get(change.folded_into or "")
        ended = replace(known, incident=incident, frozen=True)
        if into is not None:
            for name, loss in known.jobs.items():
                if name not in into.jobs or into.jobs[name].lost < loss.lost:
                    into.jobs[name] = loss
            ended.jobs = {}
        self.dirty[incident.id] = ended
        self.tracked.pop(incident.id)

    def _note_facts(self, findings: Iterable[Finding]) -> None:
        for f in findings:
            if f.evidence.get("cleared") is True:
                self.facts.pop(f.entity, None)
            elif (fact := read_fact(f)) is not None:
                self.facts[f.entity] = fact
            if self.doubts.note(f):
                self._take_back_doubts(f.entity)

    def _take_back_doubts(self, entity: str) -> None:
        """Drops the doubts of the incidents of an entity; those that others still give come back at once."""
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
        self.facts = {e: f for e, f in self.facts.items() if 0 <= time - f.time <= FACTS_LAST}
        self.doubts.drop_old(time)
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
        before = [(j.state, j.lost, j.effect) for j in tracked.jobs.values()]
        self._doubt_jobs(tracked)
        for loss in tracked.jobs.values():
            if loss.reached:
                self._judge(tracked, loss, time)
        return fresh or before != [(j.state, j.lost, j.effect) for j in tracked.jobs.values()]

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
            loss.ranks = tracked.reach.jobs.get(name, loss.ranks)

    def _add_job(self, tracked: Tracked, name: str) -> JobLoss:
        """Returns the loss of a job in an incident, a new one if it had none, with what is known of the job now."""
        job, loss, onset = self.jobs.jobs.get(name), tracked.jobs.get(name), tracked.incident.onset
        if loss is None:
            started = onset if job is None else max(onset, job.started)
            loss = tracked.jobs[name] = JobLoss(name, started, restarted=onset)
        if job is not None and job.ended is None:
            loss.gpus, loss.name, loss.account = job.gpus, job.name, job.account
        return loss

    def _judge(self, tracked: Tracked, loss: JobLoss, time: int) -> None:
        """Sets the state of a job, and counts what it lost since it was counted last."""
        pace, job = self.jobs.paces.jobs.get(loss.job), self.jobs.jobs.get(loss.job)
        incident, fact = tracked.incident, self._find_fact(tracked, loss)
        if job is not None and job.ended is not None and job.ended <= time:
            loss.end(job.ended, incident.onset, fact)
            return
        if loss.stopped and job is not None:
            runs = job.started if pace is None else pace.moved_at if pace.moved_at > loss.counted else None
            if not loss.resume(runs, time):
                return
        if pace is None or not pace.moved_at:
            loss.judge_by_facts(Moment(time, incident.onset, fact, incident.id, incident.id))
        else:
            owner = self._find_owner(loss.job, pace, tracked)
            loss.judge_by_steps(pace, Moment(time, incident.onset, fact, owner, incident.id))

    def _find_fact(self, tracked: Tracked, loss: JobLoss) -> Fact | None:
        """Returns what findings say about the job or the parts that the incident names; losses first."""
        incident, named = tracked.incident, [loss.job]
        if loss.job in tracked.reach.jobs:  # beside the fault only findings about the job itself count
            named += [incident.cause, *incident.members[:MOST_AFFECTED]]
        found = [fact for entity in dict.fromkeys(named) if (fact := self.facts.get(entity)) is not None]
        return min(found, key=lambda fact: fact.state != "lost", default=None)

    def _find_owner(self, job: str, pace: JobPace, mine: Tracked) -> str:
        """Returns the incident that counts what a job loses: that with the onset nearest to the change of its pace."""
        changed = pace.moved_at if pace.hangs_at(mine.measured) else pace.changed_at
        if changed is None:
            return mine.incident.id
        found = [t.incident for t in (*self._list_by_job(job), mine) if t.incident.onset - EARLIER <= changed]

        def order(i: Incident) -> tuple[int, int, int, str]:
            """Nearest in steps of five minutes, then the most severe and the oldest."""
            assert changed is not None
            return (abs(i.onset - changed) // UNCOUNTED, -SEVERITIES.index(i.severity), i.onset, i.id)

        return min(found, key=order, default=mine.incident).id

    def _list_by_job(self, job: str) -> list[Tracked]:
        """Returns the incidents that have a job; indexed once in a round of measurement."""
        key = self._measured, len(self.tracked)
        if self._indexed != key:
            self._index, self._indexed = {}, key
            for tracked in self.tracked.values():
                for name in (name for name, loss in tracked.jobs.items() if loss.reached):
                    self._index.setdefault(name, []).append(tracked)
        return self._index.get(job, [])

    # --- for people ---------------------------------------------------------------------------------

    def describe(self, tracked: Tracked) -> dict[str, Any]:
        """Returns the impact in the form of the API."""
        reach, jobs = tracked.reach, tracked.listed()
        suffering = [j for j in jobs if j.state in SUFFERS]
        parts = [self.jobs.places.parts_of(loss.job) for loss in suffering]
        gpus, nodes, ranks = (
            _count_together(own, [part[i] for part in parts])
            for i, own in enumerate((reach.gpus, reach.nodes, reach.ranks))
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


def describe_impact(impact: Mapping[str, Any]) -> str:
    """Returns an impact as one line: `job 81 (llama) hangs, 512 GPUs; 4.1 GPU-h lost, 512 GPU-h/h`."""
    suffering = [j for j in impact["jobs"] if j["state"] in SUFFERS]
    shown = [_describe_job(j) for j in suffering[:3]]
    shown += [f"{len(suffering) - 3} more jobs suffer"] if len(suffering) > 3 else []
    doubtful = [j for j in impact["jobs"] if j not in suffering and split_doubt(j["basis"])[0]]
    shown += [f"{entity_name(j['job'])}: {split_doubt(j['basis'])[0]}" for j in doubtful[:3]]
    shown += [f"results of {_count(len(doubtful) - 3, 'job')} more in doubt"] if len(doubtful) > 3 else []
    others = impact["job_count"] - len(suffering) - len(doubtful)
    if not suffering and not doubtful and others:
        names = entity_name(impact["jobs"][0]["job"]) if others == 1 else f"{others} jobs"
        ranks = sum(j["ranks"] for j in impact["jobs"])
        shown.append(f"reaches {_count(ranks, 'rank')} of {names}, {_describe_calm(impact['jobs'])}")
    if not shown and impact["gpus"]:
        shown.append(f"{_count(impact['gpus'], 'gpu')} on {_count(impact['nodes'], 'node')}, no job")
    lost, rate = impact["lost_gpu_hours"], impact["lost_gpu_hours_per_hour"]
    if lost or rate:
        cost = impact["cost"]
        money = f" ({cost['amount']:,.0f} {cost['currency']})" if cost else ""
        shown.append(f"{lost:,.1f} GPU-h lost{money}, {rate:,.1f} GPU-h per hour")
    return "; ".join(shown)


def _describe_calm(jobs: Sequence[Mapping[str, Any]]) -> str:
    """Returns what is known about jobs of which none suffers."""
    states = [job["state"] for job in jobs]
    if "unknown" in states:
        return "slowdown not measured"
    if "ended" not in states:
        if len(jobs) > 1:
            return "none slower than before the onset"
        return describe_effect(states[0], jobs[0]["slowdown"], jobs[0]["basis"])
    return str(jobs[0]["basis"]) if len(jobs) == 1 else f"{states.count('ended')} ended"


def name_affected(impact: Mapping[str, Any]) -> str:
    """Returns affected jobs, for a title: `job 81 hangs (512 GPUs)`, `rank 79 of job 81 on it`; empty: no job."""
    suffering = [j for j in impact["jobs"] if j["state"] in SUFFERS]
    if len(suffering) > 1:
        return f"{len(suffering)} jobs suffer ({_count(sum(j['gpus'] for j in suffering), 'gpu')})"
    if suffering:
        job = suffering[0]
        state = f"{100 * job['slowdown']:.0f} % slower" if job["state"] == "slow" else _WORDS[job["state"]]
        return f"{entity_name(job['job'])} {state} ({_count(job['gpus'], 'gpu')})"
    if not impact["job_count"]:
        return ""
    job = impact["jobs"][0]
    if impact["job_count"] > 1:
        return f"{impact['job_count']} jobs on it"
    if job["state"] == "ended":
        return f"{entity_name(job['job'])} ended"
    ranks = job["rank_names"]
    return f"{entity_name(ranks[0] if len(ranks) == 1 and job['ranks'] == 1 else job['job'])} on it"


def _describe_job(job: Mapping[str, Any]) -> str:
    name = entity_name(job["job"]) + (f" ({job['name']})" if job["name"] else "")
    state = f"{100 * job['slowdown']:.0f} % slower" if job["state"] == "slow" else _WORDS[job["state"]]
    ranks = job["rank_names"]
    rank = f", {entity_name(ranks[0]).partition(' of ')[0]}" if len(ranks) == 1 and job["ranks"] == 1 else ""
    doubt = f", {found}" if (found := split_doubt(job["basis"])[0]) else ""
    return f"{name} {state}{rank}, {_count(job['gpus'], 'gpu')}{doubt}"


_WORDS = {"hanging": "hangs", "lost": "is lost"}


def _count(number: int, kind: str) -> str:
    return f"{number:,} {KINDS[kind][number != 1]}"
