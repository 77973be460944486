"""Finds replicas that no longer hold the same bits: ranks of one group must have the same digest after each step.

A round is judged once all ranks have reported their digest, or when it has waited long enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from detectors.base.detector import Detector, notes, part
from detectors.base.event_data import events_of, read_integer, read_text
from detectors.base.findings import OpenConditions, close_ended, due_report, make_evidence
from detectors.base.state import State
from detectors.sdc.ledger import chance_of_streak
from detectors.sdc.votes import read_word
from pipeline.model.entity_names import entity_name, pager_title
from pipeline.model.records import SECOND, Event, Finding, Frame, Level
from pipeline.model.topology import Topology, kind_of
from pipeline.runtime.guides import guide

Record = dict[str, Any]
_HOUR = 3600 * SECOND
_SIGNALS = ("event:replica_digest",)
_MAX_OPEN_STEPS = 8  # of a series together: ranks of a synchronous job are a step apart at most; chosen
_RECENT_ROUNDS = 4  # a rank that was missing in so many last ones is not waited for; chosen
_MAX_SERIES = 20_000  # groups and buckets kept, the newest; chosen
_IDLE_AFTER = 24 * _HOUR  # us without a digest after which a series is dropped: its job is over; chosen
_MAX_RECORDS = 1000  # GPUs and jobs kept; chosen
_DOUBT = 1e-4  # chance that a GPU that fails as often agrees so long, below which a page ends: as of canaries
_MAX_STEPS, _MAX_RANKS, _MAX_MOVES = 20, 10, 4  # kept of a record; chosen


@dataclass(frozen=True, slots=True)
class JudgedRound:
    """The digests of all ranks of a group for one bucket after one step.

    known:  every dissenting rank had agreed with this group before.   split: no digest has more than half.
    alike:  two or more dissenting ranks hold the same other bits.     digest: the majority's.
    """

    series: str
    job: str
    group: str
    bucket: str
    step: int
    time: int
    agreeing: tuple[str, ...]
    dissenting: tuple[str, ...]
    digests: Mapping[str, str]
    digest: str
    known: bool
    split: bool
    alike: bool


@dataclass
class ReplicaRounds(State):
    """Rounds that are still open, and the ranks that agreed before, by series (job, group, bucket)."""

    series: dict[str, dict[str, Any]] = notes()

    def add_digest(self, event: Event) -> None:
        """Adds the digest of one rank's bucket after one step; incomplete events are left out."""
        data = event.data
        step, bucket = read_integer(data.get("step")), read_word(data.get("bucket"))
        digest = read_text(data.get("digest"))
        if step is None or not bucket or not digest or not event.entity.startswith("rank:"):
            return
        job, group = event.entity.partition(":")[2].rpartition(".")[0], read_word(data.get("group"))
        key = f"{job}|{group}|{bucket}"
        known = self.series.get(key)
        if known is None:
            known = {"job": job, "group": group, "bucket": bucket, "open": {}, "agreed": {}, "number": 0, "time": 0}
            self.series[key] = known
        known["time"] = max(known["time"], event.time)
        held = known["open"].setdefault(str(step), {"first": event.time, "last": event.time, "digests": {}})
        held["digests"][event.entity] = digest
        held["last"] = max(held["last"], event.time)

    def restart_job(self, job: str) -> None:
        """Drops the open rounds of a job that starts again: its steps may be repeated with other bits."""
        for known in self.series.values():
            if known["job"] == job or known["job"].startswith(f"{job}."):
                known["open"] = {}

    def judge_due(self, time: int, patience: int) -> Iterator[JudgedRound]:
        """Yields and closes the rounds that are complete or have waited for `patience` us."""
        for key, known in list(self.series.items()):
            order = sorted(known["open"], key=int)
            for step in order:
                held = known["open"][step]
                recent = {r for r, number in known["agreed"].items() if known["number"] - number < _RECENT_ROUNDS}
                full = len(recent) > 1 and recent <= held["digests"].keys()
                if full or time - held["first"] >= patience or len(known["open"]) > _MAX_OPEN_STEPS:
                    del known["open"][step]
                    if len(held["digests"]) > 1:
                        yield self._judge(key, known, int(step), held)
            if time - known["time"] > _IDLE_AFTER:
                del self.series[key]
        excess = max(0, len(self.series) - _MAX_SERIES)
        for key in sorted(self.series, key=lambda k: self.series[k]["time"])[:excess]:
            del self.series[key]

    def _judge(self, key: str, known: dict[str, Any], step: int, held: dict[str, Any]) -> JudgedRound:
        digests: dict[str, str] = held["digests"]
        by_digest: dict[str, list[str]] = {}
        for rank in sorted(digests):
            by_digest.setdefault(digests[rank], []).append(rank)
        digest = min(by_digest, key=lambda d: (-len(by_digest[d]), d))
        split = 2 * len(by_digest[digest]) <= len(digests)
        agreeing = () if split else tuple(by_digest[digest])
        dissenting = tuple(r for d, ranks in by_digest.items() if d != digest or split for r in ranks)
        alike = any(len(ranks) > 1 for d, ranks in by_digest.items() if d != digest)
        before = known["agreed"]
        fresh = all(rank in before for rank in dissenting)
        known["number"] += 1
        if len(by_digest) == 1:
            known["agreed"].update(dict.fromkeys(agreeing, known["number"]))
        where = (key, known["job"], known["group"], known["bucket"], step, held["last"])
        return JudgedRound(*where, agreeing, dissenting, digests, digest, fresh, split, alike)


@dataclass
class SdcReplica(Detector):
    """Votes over the digests of replicas of the same parameters after a step, bit by bit, without a baseline.

    Of `least` replicas or more that had agreed, the one with other bits is a suspect, and pages on its GPU when it has
    other bits in `page_at` steps: that persists, or came again within `days`, in this job or another. Several with the
    same other bits, more than a third of them, two replicas that differ, or a rank that still diverges on another GPU:
    the job is blamed, no GPU.
    Groups that never agreed are not replicas (sharded parameters under one name), which is a suspect of the job only.
    It ends `hours` after its job's last digest, or after `clean_rounds` steps in which the GPU's ranks agreed; a page
    after so many that a GPU that fails as often would have them with a chance below 1 in 10,000.

    Source: replicas in data parallelism hold identical bits after each step (all-reduce gives every rank the same;
    SDCHunter, OSDI 2026, compares them so); so digests of parameters cannot show a wrong gradient, and digests of the
    gradients of one batch that every replica computes can. Occurrence of 1e-8 to 1 per product: SDCHunter.
    The numbers are chosen: two steps, as one digest may be of a step that was cut off.
    """

    name: ClassVar[str] = "sdc_replica"
    family: ClassVar[str] = "silent data corruption"
    device_class: ClassVar[str] = "rank"
    needs: ClassVar[tuple[str, ...]] = ("event:replica_digest",)
    wants: ClassVar[tuple[str, ...]] = ("event:job_start", "event:job_end", "event:checkpoint")
    cannot_see: ClassVar[str] = (
        "A gradient that was wrong before the all-reduce: it reaches every replica alike, so the digests agree, unless "
        f"replicas compute the gradients of one batch now and then ({guide('training.md')}). "
        "Parameters that are sharded and not replicated, steps without a digest, and which of two replicas is the "
        "wrong one."
    )

    least: int = 3
    page_at: int = 2
    clean_rounds: int = 10
    patience: float = 120.0
    hours: float = 24.0
    days: float = 30.0

    rounds: ReplicaRounds = part(ReplicaRounds)
    gpus: dict[str, Record] = notes()
    jobs: dict[str, Record] = notes()
    carried: dict[str, list[str]] = notes()
    past: dict[str, dict[str, int]] = notes()  # GPU -> counts of a condition that ended, and its last dissent
    conditions: OpenConditions = notes()

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings on replicas with different bits."""
        if not frames:
            return []
        time = max(frame.time for frame in frames.values())
        topology = next(iter(frames.values())).topology
        for event in events_of(frames, "job_start", "job_end", "checkpoint"):
            if event.kind == "checkpoint":
                self._count_checkpoint(event)
            elif kind_of(event.entity) == "job":
                self.rounds.restart_job(event.entity.partition(":")[2])
        for event in events_of(frames, "replica_digest"):
            self.rounds.add_digest(event)
        for judged in self.rounds.judge_due(time, int(self.patience * SECOND)):
            self._apply_round(judged, topology)
        if not self.gpus and not self.jobs and not self.conditions:
            return []
        self._drop_ended(time)
        return self._findings(time)

    def budget(self) -> list[str]:
        """Returns that it has no statistical test."""
        return [
            f"replicas: a rule on exact bits, in {self.page_at} steps or more: no statistical alarm rate; divergence by"
            " software that strikes one rank alone is the only false alarm that is left"
        ]

    def _count_checkpoint(self, event: Event) -> None:
        for record in self.gpus.values():
            if record["job"] == event.entity:
                record["checkpoints"] += 1

    def _apply_round(self, judged: JudgedRound, topology: Topology) -> None:
        job = topology.ancestor_of_kind(next(iter(judged.digests)), "job") or f"job:{judged.job}"
        for rank in judged.agreeing:
            if self.gpus and (record := self.gpus.get(_gpu_of(topology, rank))) is not None:
                record["last"] = judged.time
                same = judged.bucket in record["buckets"] or job != record["job"]  # other buckets may be right always
                if same and judged.step not in record["steps"] and judged.step != record["clean_step"]:
                    record["clean"], record["clean_step"] = record["clean"] + 1, judged.step
        if not judged.dissenting and not judged.split:
            if (known := self.jobs.get(job)) is not None and judged.series == known["series"]:
                known["clean"] += 1
                known["last"] = judged.time
            return
        why = self._why_no_gpu(judged, topology)
        if why:
            self._record_job(job, judged, why)
            return
        for rank in judged.dissenting:
            self._record_gpu(_gpu_of(topology, rank), rank, job, judged)

    def _why_no_gpu(self, judged: JudgedRound, topology: Topology) -> str:
        """Returns why no GPU is to blame; empty if one is."""
        total = len(judged.agreeing) + len(judged.dissenting)
        if not judged.known:
            return "they never agreed: check that every rank of this group is a replica"
        if total < self.least:
            return "two replicas differ, and it is unknown which of them is wrong"
        if judged.split:
            return f"{total} replicas differ and no digest has a majority"
        if 3 * len(judged.dissenting) > total:
            return f"{len(judged.dissenting)} of {total} replicas differ from the rest: rather software than GPUs"
        if judged.alike:
            return f"{len(judged.dissenting)} replicas hold the same other bits, which defective GPUs would not"
        moved = [r for r in judged.dissenting if set(self.carried.get(r, ())) - {_gpu_of(topology, r)}]
        return f"{moved[0]} diverges again on another GPU, so the GPU is not the cause" if moved else ""

    def _record_gpu(self, gpu: str, rank: str, job: str, judged: JudgedRound) -> None:
        if gpu not in self.gpus:
            known = self.past.pop(gpu, {})
            old = judged.time - known.get("last", 0) > self.days * 24 * _HOUR
            fresh = {"rank": rank, "job": job, "since": judged.time, "steps": [], "buckets": [], "checkpoints": 0}
            counts = {"count": 0, "right": 0} if old else {"count": known["count"], "right": known["right"]}
            self.gpus[gpu] = fresh | counts | {"clean": 0, "clean_step": -1, "last": 0, "sure": False}
        record = self.gpus[gpu]
        again = judged.step not in record["steps"]
        if again:
            record["steps"] = [*record["steps"], judged.step][-_MAX_STEPS:]
            record["count"] += 1
        if judged.bucket not in record["buckets"]:
            record["buckets"] = [*record["buckets"], judged.bucket][-_MAX_STEPS:]
        record["sure"] |= record["count"] >= self.page_at
        record["right"] += record["clean"]
        record |= {"rank": rank, "job": job, "clean": 0, "last": judged.time, "group": judged.group}
        record |= {"digest": judged.digests[rank], "expected": judged.digest, "peers": len(judged.agreeing)}
        self.carried[rank] = list(dict.fromkeys([*self.carried.get(rank, ()), gpu]))[-_MAX_MOVES:]

    def _record_job(self, job: str, judged: JudgedRound, why: str) -> None:
        record = self.jobs.setdefault(job, {"since": judged.time, "steps": []})
        record["steps"] = [*record["steps"], judged.step][-_MAX_STEPS:]
        ranks = [*judged.agreeing, *judged.dissenting]
        record |= {"why": why, "clean": 0, "last": judged.time, "series": judged.series, "replicas": len(ranks)}
        record |= {
            "group": judged.group,
            "bucket": judged.bucket,
            "ranks": sorted(judged.dissenting or ranks)[:_MAX_RANKS],
        }

    def _drop_ended(self, time: int) -> None:
        """Drops GPUs and jobs that agreed for long, or whose job has reported no digest for long.

        Dissents are remembered if the GPU agreed later or they were sure: else the step may have been cut off.
        """
        horizon = time - int(self.hours * _HOUR)
        for gpu, record in self.gpus.items():
            if self._is_clean(record) or (record["last"] < horizon and record["sure"]):
                counts = {"count": record["count"], "right": record["right"] + record["clean"], "last": record["last"]}
                self.past = {**{g: known for g, known in self.past.items() if g != gpu}, gpu: counts}
        for gpu in list(self.past)[:-_MAX_RECORDS]:
            del self.past[gpu]
        for known in (self.gpus, self.jobs):
            over = [e for e, r in known.items() if self._is_clean(r) or r["last"] < horizon]
            for entity in over + sorted(known, key=lambda e: known[e]["last"])[: max(0, len(known) - _MAX_RECORDS)]:
                known.pop(entity, None)
        for rank in list(self.carried)[:-_MAX_RECORDS]:
            del self.carried[rank]

    def _is_clean(self, record: Mapping[str, Any]) -> bool:
        """Returns whether the ranks of a GPU, or of a job, agreed often enough for it to end."""
        if record["clean"] < self.clean_rounds or not record.get("sure"):
            return bool(record["clean"] >= self.clean_rounds)
        return chance_of_streak(record["count"], record["right"], record["clean"]) <= _DOUBT

    def _findings(self, time: int) -> list[Finding]:
        holding = {*self.gpus, *self.jobs}
        over = [(e, c) for e, c in sorted(self.conditions.items()) if e not in holding]
        found = [self._cleared_finding(e, time, condition) for e, condition in over]
        close_ended(self.conditions, holding)
        for gpu, record in sorted(self.gpus.items()):
            level: Level = "page" if record["sure"] else "suspect"
            if due := due_report(self.conditions, gpu, time, record["since"], level):
                found.append(self._gpu_finding(gpu, time, due, record))
        for job, record in sorted(self.jobs.items()):
            if due := due_report(self.conditions, job, time, record["since"], "suspect"):
                found.append(self._job_finding(job, time, due, record))
        return found

    def _cleared_finding(self, entity: str, time: int, condition: Mapping[str, Any]) -> Finding:
        summary = pager_title(entity, f"replicas agree again, or no digest for {self.hours:g} h")
        evidence = make_evidence("nothing: it is over", cleared=True)
        onset, level = min(condition["onset"], time), condition["level"]  # the clock may have gone back since
        return Finding(time, onset, entity, self.name, level, 0.0, summary, evidence, _SIGNALS)

    def _gpu_finding(self, gpu: str, time: int, due: tuple[int, Level], record: Record) -> Finding:
        steps = record["count"]
        rank = entity_name(record["rank"])
        shown = ("rank", "job", "group", "steps", "buckets", "digest", "expected", "peers", "checkpoints")
        return self.finding(
            *(time, gpu, due),
            score=float(steps),
            summary=pager_title(gpu, f"{rank} differs from {record['peers']} replicas in {_plural(steps, 'step')}"),
            signals=_SIGNALS,
            clears=f"{self.clean_rounds} steps in a row in which its ranks agree, after a page as many as a GPU that"
            f" fails as often hardly has, or {self.hours:g} h without a digest",
            holds=True,
            dissents=steps,
            **{key: record[key] for key in shown},
        )

    def _job_finding(self, job: str, time: int, due: tuple[int, Level], record: Record) -> Finding:
        shown = ("why", "group", "bucket", "ranks", "replicas", "steps")
        return self.finding(
            *(time, job, due),
            score=float(len(record["steps"])),
            summary=pager_title(job, f"{record['replicas']} replicas differ, no single GPU at fault"),
            signals=_SIGNALS,
            clears=f"{self.clean_rounds} steps in a row in which they agree, or {self.hours:g} h without a digest",
            cannot_tell=True,
            **{key: record[key] for key in shown},
        )


def _plural(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _gpu_of(topology: Topology, rank: str) -> str:
    """Returns the GPU of a rank; the rank itself if none is known."""
    return topology.ancestor_of_kind(rank, "gpu") or rank
