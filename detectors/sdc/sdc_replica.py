"""Finds replicas that no longer hold the same bits: ranks of one group must have the same digest after each step.

Digests of replicas by step: a round is judged once all members told, or when it has waited long enough.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from detectors.base.detector import Detector, notes, part
from detectors.base.event_data import read_integer, read_text
from detectors.base.findings import OpenConditions, close_ended, due_report, make_evidence
from detectors.sdc.votes import word
from pipeline.model.records import SECOND, Event, Finding, Frame, Level
from pipeline.model.topology import Topology, kind_of

_OPEN = 8  # steps of a series that wait at once: ranks of a synchronous job are a step apart at most; chosen
_LATELY = 4  # rounds: whom one of so many last ones lacked is not waited for; chosen
_SERIES = 20_000  # groups and buckets remembered, the newest; chosen
_IDLE = 86_400 * 1_000_000  # us after which a series that nobody tells of is forgotten: its job is over; chosen


@dataclass(frozen=True, slots=True)
class Dissent:
    """One judged round.

    known:  every dissenter had agreed with this group before.   split: no digest has more than half.
    alike:  two or more dissenters hold the same other bits.     digest: the majority's.
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


class Rounds:
    """Open rounds and who agreed before, by series (job, group, bucket); a part() of SdcReplica."""

    def __init__(self) -> None:
        self.series: dict[str, dict[str, Any]] = {}

    def add(self, event: Event) -> None:
        """Takes one rank's digest of one bucket after one step; events that lack a part of it are left out."""
        data = event.data
        step, bucket, digest = read_integer(data.get("step")), word(data.get("bucket")), read_text(data.get("digest"))
        if step is None or not bucket or not digest or not event.entity.startswith("rank:"):
            return
        job, group = event.entity[5:].rpartition(".")[0], word(data.get("group"))
        key = f"{job}|{group}|{bucket}"
        known = self.series.get(key)
        if known is None:
            known = {"job": job, "group": group, "bucket": bucket, "open": {}, "agreed": {}, "number": 0, "time": 0}
            self.series[key] = known
        known["time"] = max(known["time"], event.time)
        held = known["open"].setdefault(str(step), {"first": event.time, "last": event.time, "told": {}})
        held["told"][event.entity] = digest
        held["last"] = max(held["last"], event.time)

    def restart(self, job: str) -> None:
        """A job begins anew: what waits is of the life before, whose steps may be told again with other bits."""
        for known in self.series.values():
            if known["job"] == job or known["job"].startswith(f"{job}."):
                known["open"] = {}

    def judged(self, time: int, patience: int) -> Iterator[Dissent]:
        """Rounds that are complete or have waited for `patience`; they are then over."""
        for key, known in list(self.series.items()):
            order = sorted(known["open"], key=int)
            for step in order:
                held = known["open"][step]
                lately = {r for r, number in known["agreed"].items() if known["number"] - number < _LATELY}
                full = len(lately) > 1 and lately <= held["told"].keys()
                if full or time - held["first"] >= patience or len(known["open"]) > _OPEN:
                    del known["open"][step]
                    if len(held["told"]) > 1:
                        yield self._judge(key, known, int(step), held)
            if time - known["time"] > _IDLE:
                del self.series[key]
        for key in sorted(self.series, key=lambda k: self.series[k]["time"])[: max(0, len(self.series) - _SERIES)]:
            del self.series[key]

    def _judge(self, key: str, known: dict[str, Any], step: int, held: dict[str, Any]) -> Dissent:
        told: dict[str, str] = held["told"]
        by_digest: dict[str, list[str]] = {}
        for rank in sorted(told):
            by_digest.setdefault(told[rank], []).append(rank)
        digest = min(by_digest, key=lambda d: (-len(by_digest[d]), d))
        split = 2 * len(by_digest[digest]) <= len(told)
        agreeing = () if split else tuple(by_digest[digest])
        dissenting = tuple(r for d, ranks in by_digest.items() if d != digest or split for r in ranks)
        alike = any(len(ranks) > 1 for d, ranks in by_digest.items() if d != digest)
        before = known["agreed"]
        fresh = all(rank in before for rank in dissenting)
        known["number"] += 1
        if len(by_digest) == 1:
            known["agreed"].update(dict.fromkeys(agreeing, known["number"]))
        where = (key, known["job"], known["group"], known["bucket"], step, held["last"])
        return Dissent(*where, agreeing, dissenting, told, digest, fresh, split, alike)

    def snapshot(self) -> dict[str, Any]:
        return copy.deepcopy(self.series)

    def restore(self, state: dict[str, Any]) -> None:
        self.series = state


_HOUR = 3600 * SECOND
_MOST = 1000  # GPUs and jobs of which something is kept; chosen
Record = dict[str, Any]


@dataclass
class SdcReplica(Detector):
    """Votes over the digests that replicas of the same parameters tell after a step: bit-exact, nothing to learn.

    Of `least` replicas or more that had agreed, the one with other bits is a suspect, and pages on its GPU when it has
    other bits in `page_at` steps: that persists, or came again. Several with the same other bits, more than a third of
    them, two replicas that differ, or a rank that takes the divergence along to another GPU blame no GPU but the job.
    Groups that never agreed are no replicas (sharded parameters under one name), which is a silent suspect of the job.
    It ends after `clean_rounds` steps in which the GPU's ranks agreed, or `hours` after its job's last digest.

    Source: replicas in data parallelism hold identical bits after each step (all-reduce gives every rank the same;
    SDCHunter, OSDI 2026, compares them so); that digests after the reduction cannot show a wrong gradient follows.
    The numbers are chosen: two steps, as one digest may be told of a step that was cut off.
    """

    name: ClassVar[str] = "sdc_replica"
    family: ClassVar[str] = "silent data corruption"
    device_class: ClassVar[str] = "rank"
    needs: ClassVar[tuple[str, ...]] = ("event:replica_digest",)
    wants: ClassVar[tuple[str, ...]] = ("event:job_start", "event:job_end", "event:checkpoint")
    cannot_see: ClassVar[str] = (
        "A gradient that was wrong before the all-reduce: it reaches every replica alike, so the digests agree. What "
        "is sharded and not replicated, steps without a digest, and which of two replicas is the wrong one."
    )

    least: int = 3
    page_at: int = 2
    clean_rounds: int = 10
    patience: float = 120.0
    hours: float = 24.0

    rounds: Rounds = part(Rounds)
    gpus: dict[str, Record] = notes()
    jobs: dict[str, Record] = notes()
    carried: dict[str, list[str]] = notes()
    conditions: OpenConditions = notes()

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        if not frames:
            return []
        time = max(frame.time for frame in frames.values())
        topology = next(iter(frames.values())).topology
        for event in _of(frames, ("job_start", "job_end", "checkpoint")):
            if event.kind == "checkpoint":
                self._saved(event)
            elif kind_of(event.entity) == "job":
                self.rounds.restart(event.entity.partition(":")[2])
        for event in _of(frames, ("replica_digest",)):
            self.rounds.add(event)
        for judged in self.rounds.judged(time, int(self.patience * SECOND)):
            self._judge(judged, topology)
        if not self.gpus and not self.jobs and not self.conditions:
            return []
        self._forget(time)
        return self._findings(time)

    def budget(self) -> list[str]:
        return [
            f"replicas: a rule on exact bits, in {self.page_at} steps or more: no statistical alarm rate; divergence by"
            " software that strikes one rank alone is the only false alarm that is left"
        ]

    def _saved(self, event: Event) -> None:
        for record in self.gpus.values():
            if record["job"] == event.entity:
                record["checkpoints"] += 1

    def _judge(self, judged: Dissent, topology: Topology) -> None:
        job = topology.ancestor_of_kind(next(iter(judged.digests)), "job") or f"job:{judged.job}"
        for rank in judged.agreeing:
            if self.gpus and (record := self.gpus.get(_gpu(topology, rank))) is not None:
                record["last"] = judged.time
                if judged.step not in record["steps"] and judged.step != record["clean_step"]:
                    record["clean"], record["clean_step"] = record["clean"] + 1, judged.step
        if not judged.dissenting and not judged.split:
            if (known := self.jobs.get(job)) is not None and judged.series == known["series"]:
                known["clean"] += 1
                known["last"] = judged.time
            return
        why = self._nobody(judged, topology)
        if why:
            self._divided(job, judged, why)
            return
        for rank in judged.dissenting:
            self._dissents(_gpu(topology, rank), rank, job, judged)

    def _nobody(self, judged: Dissent, topology: Topology) -> str:
        """Why no GPU is to blame; empty if one is."""
        total = len(judged.agreeing) + len(judged.dissenting)
        if not judged.known:
            return "they never agreed: is every rank of this group a replica?"
        if total < self.least:
            return "two replicas differ, and which of them is wrong cannot be told"
        if judged.split:
            return f"{total} replicas differ and none of their digests has a majority"
        if 3 * len(judged.dissenting) > total:
            return f"{len(judged.dissenting)} of {total} replicas differ from the rest: software more likely than GPUs"
        if judged.alike:
            return f"{len(judged.dissenting)} replicas hold the same other bits, as broken GPUs would not"
        moved = [r for r in judged.dissenting if set(self.carried.get(r, ())) - {_gpu(topology, r)}]
        return f"{moved[0]} diverges again on another GPU, so it is not the GPU" if moved else ""

    def _dissents(self, gpu: str, rank: str, job: str, judged: Dissent) -> None:
        fresh = {"rank": rank, "job": job, "since": judged.time, "steps": [], "buckets": [], "checkpoints": 0}
        record = self.gpus.setdefault(gpu, fresh | {"clean": 0, "clean_step": -1, "count": 0, "last": 0, "sure": False})
        again = judged.step not in record["steps"]
        if again:
            record["steps"] = [*record["steps"], judged.step][-20:]
            record["count"] += 1
        if judged.bucket not in record["buckets"]:
            record["buckets"] = [*record["buckets"], judged.bucket][-20:]
        record["sure"] |= record["count"] >= self.page_at
        record |= {"rank": rank, "job": job, "clean": 0, "last": judged.time, "group": judged.group}
        record |= {"digest": judged.digests[rank], "expected": judged.digest, "peers": len(judged.agreeing)}
        self.carried[rank] = list(dict.fromkeys([*self.carried.get(rank, ()), gpu]))[-4:]

    def _divided(self, job: str, judged: Dissent, why: str) -> None:
        record = self.jobs.setdefault(job, {"since": judged.time, "steps": []})
        record["steps"] = [*record["steps"], judged.step][-20:]
        ranks = [*judged.agreeing, *judged.dissenting]
        record |= {"why": why, "clean": 0, "last": judged.time, "series": judged.series, "replicas": len(ranks)}
        record |= {"group": judged.group, "bucket": judged.bucket, "ranks": sorted(judged.dissenting or ranks)[:10]}

    def _forget(self, time: int) -> None:
        """What agreed for long, or of whose job no digest came for long."""
        horizon = time - int(self.hours * _HOUR)
        for known in (self.gpus, self.jobs):
            over = [e for e, r in known.items() if r["clean"] >= self.clean_rounds or r["last"] < horizon]
            for entity in over + sorted(known, key=lambda e: known[e]["last"])[: max(0, len(known) - _MOST)]:
                known.pop(entity, None)
        for rank in list(self.carried)[:-_MOST]:
            del self.carried[rank]

    def _findings(self, time: int) -> list[Finding]:
        holding = {*self.gpus, *self.jobs}
        over = [(e, c) for e, c in sorted(self.conditions.items()) if e not in holding]
        found = [self._cleared(e, time, condition) for e, condition in over]
        close_ended(self.conditions, holding)
        for gpu, record in sorted(self.gpus.items()):
            level: Level = "page" if record["sure"] else "suspect"
            if due := due_report(self.conditions, gpu, time, record["since"], level):
                found.append(self._of_gpu(gpu, time, due, record))
        for job, record in sorted(self.jobs.items()):
            if due := due_report(self.conditions, job, time, record["since"], "suspect"):
                found.append(self._of_job(job, time, due, record))
        return found

    def _cleared(self, entity: str, time: int, condition: Mapping[str, Any]) -> Finding:
        words = f"replicas on {entity} agree again, or no digest of them came for {self.hours:g} h"
        facts = make_evidence("nothing: it is over", cleared=True)
        onset, level = min(condition["onset"], time), condition["level"]  # the clock may have gone back since
        return Finding(time, onset, entity, self.name, level, 0.0, words, facts, ("event:replica_digest",))

    def _of_gpu(self, gpu: str, time: int, due: tuple[int, Level], record: Record) -> Finding:
        steps = record["count"]
        words = (
            f"{record['rank']} on {gpu} holds other parameters than its {record['peers']} replicas, in {steps} "
            f"step{'' if steps == 1 else 's'} from {record['steps'][0]} on: {', '.join(record['buckets'][:3])} of "
            f"{record['job']}, group {record['group'] or 'unnamed'}"
        )
        words += "; go back to a checkpoint from before, without this GPU" if record["sure"] else ""
        shown = ("rank", "job", "group", "steps", "buckets", "digest", "expected", "peers", "checkpoints")
        clears = f"{self.clean_rounds} steps running in which its ranks agree, or {self.hours:g} h without a digest"
        facts = make_evidence(clears, holds=True, dissents=steps, **{k: record[k] for k in shown})
        return Finding(time, due[0], gpu, self.name, due[1], float(steps), words, facts, ("event:replica_digest",))

    def _of_job(self, job: str, time: int, due: tuple[int, Level], record: Record) -> Finding:
        where = f"{record['bucket']} (group {record['group'] or 'unnamed'})"
        words = f"replicas of {job} differ in {where}: {record['why']}"
        shown = ("why", "group", "bucket", "ranks", "replicas", "steps")
        clears = f"{self.clean_rounds} steps running in which they agree, or {self.hours:g} h without a digest"
        facts = make_evidence(clears, cannot_tell=True, **{k: record[k] for k in shown})
        score = float(len(record["steps"]))
        return Finding(time, due[0], job, self.name, due[1], score, words, facts, ("event:replica_digest",))


def _of(frames: Mapping[str, Frame], kinds: tuple[str, ...]) -> Iterable[Event]:
    return (e for device_class in sorted(frames) for e in frames[device_class].events if e.kind in kinds)


def _gpu(topology: Topology, rank: str) -> str:
    """The GPU that a rank runs on; the rank itself where nobody tells."""
    return topology.ancestor_of_kind(rank, "gpu") or rank
