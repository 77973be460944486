"""Digests of replicas by step: a round is judged once all members told, or when it has waited long enough."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from detectors.base.event_data import text, whole
from detectors.sdc.votes import word
from pipeline.records import Event

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
        step, bucket, digest = whole(data.get("step")), word(data.get("bucket")), text(data.get("digest"))
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
