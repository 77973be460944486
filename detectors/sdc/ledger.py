"""What is known of each device that computed wrongly: its mismatches, its right rounds since, and the odds.

Beta-Bernoulli: a defective device errs in a share of its rounds drawn from Beta(1/8, 1), a sound one in UPSET of them.

When each device was last known to compute rightly, and which jobs used it since: their results are in doubt.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from detectors.base.event_data import read_text
from detectors.sdc.votes import Unjust, Verdict
from pipeline.model.records import Event, Frame
from pipeline.model.topology import kind_of

PRIOR: Mapping[str, float] = {"gpu": 1.3e-3, "cpu": 5.6e-6}
"""Share of devices that are defective: 13 of some 10,000 GPUs over 35M GPU-hours (AEGIS, OSDI 2026); 3.61 of 10,000
processors (Wang et al., SOSP 2023), here of each of 64 cores."""
A, B = 0.125, 1.0
"""Of the Beta law: occurrence spreads over 1e-8 to 1 (SDCHunter, OSDI 2026). Of conjugate laws Beta(1/8, 1) is the
nearest to log-uniform there: nine tenths lie above 1e-8, a quarter above 0.1."""
UPSET = 1e-9
"""Wrong rounds of a sound device, each: particles cause some 100 wrong results in 1e9 hours of an accelerator under
beam tests (about 1e-11 a round of a second at most); a hundredfold for what nobody thought of. Chosen."""
ASKED_AGAIN = 3
"""Times that an agent asks at once what came out wrong (`again` of the event tells how often it was wrong again). Its
operands are made anew each time, so what upset a memory cell once does not come again."""
KEPT = 100
"""Mismatches kept of a device, of more only the number; chosen."""
Record = dict[str, Any]


def odds(wrong: int, right: int, kind: str) -> float:
    """Odds that a device with so many wrong and right rounds is defective; at most 1e12."""
    prior = PRIOR.get(kind, PRIOR["gpu"])
    defective = _ln_beta(A + wrong, B + right) - _ln_beta(A, B)
    sound = wrong * math.log(UPSET) + right * math.log1p(-UPSET)
    return float(math.exp(min(math.log(prior / (1 - prior)) + defective - sound, math.log(1e12))))


def chance_of_right(wrong: int, right: int, streak: int) -> float:
    """Chance that a device that erred `wrong` times and was `right` between is right `streak` times running."""
    return math.exp(_ln_beta(A + wrong, B + right + streak) - _ln_beta(A + wrong, B + right))


def _ln_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


class Ledger:
    """Devices that gave a wrong answer of late; a part() of SdcVote.

    state:   suspect (one mismatch, its retest is awaited), confirmed, or cleared (kept for the next mismatch).
    before:  right rounds before the first mismatch.   between: since then, up to the last mismatch.
    streak:  version -> right rounds since the last mismatch.
    clean:   time of the last right answer before the condition (0: unknown).   jobs: those that used it since then.
    """

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}

    def wrong(self, verdict: Verdict, before: int, page_at: int, horizon: int) -> Record | None:
        """Enters a mismatch. before: right rounds of the device so far. None if it was told before.

        horizon: mismatches from before it do not help to confirm.
        """
        record = self.records.setdefault(verdict.entity, _fresh(before))
        if any(e["time"] == verdict.time and e["canary"] == verdict.canary for e in record["wrong"]):
            return None
        folded = max(verdict.facts.get("rounds", 1) - 1, 0)  # rounds that were right and not told
        record["between" if record["count"] else "before"] += folded
        record["between"] += sum(record["streak"].values())
        record["streak"] = {}
        record["count"] += 1
        if "again" in verdict.facts:
            again = min(verdict.facts["again"], ASKED_AGAIN)
            record["again"] += again
            record["between"] += ASKED_AGAIN - again
        record["wrong"] = [*record["wrong"], _entry(verdict)][-KEPT:]
        record["uuid"] = verdict.facts.get("uuid", record["uuid"])
        record["reproduced"] |= _reproduced(record["wrong"][-1:])
        recent = sum(e["time"] >= horizon for e in record["wrong"])
        confirmed = record["state"] == "confirmed" or record["reproduced"] or recent >= min(page_at, KEPT)
        record["state"] = "confirmed" if confirmed else "suspect"
        record["retest"] = "failed" if confirmed else "asked"
        if confirmed and not record["confirmed"]:
            record["confirmed"] = verdict.time
        record["since"] = record["since"] or verdict.time
        return record

    def right(self, verdict: Verdict, clean_runs: int, doubt: float) -> Record | None:
        """Enters right rounds; the record if there is one. With a `doubt` below 0 nothing is cleared by them."""
        record = self.records.get(verdict.entity)
        if record is None or verdict.time <= record["wrong"][-1]["time"]:
            return record
        rounds = max(verdict.facts.get("rounds", 1), 1)
        streak = record["streak"]
        streak[verdict.version] = streak.get(verdict.version, 0) + rounds
        if record["state"] != "cleared" and doubt > 0 and self._clean(record, clean_runs, doubt):
            record["state"], record["retest"], record["reproduced"] = "cleared", "clean", False
            record["since"] = record["confirmed"] = 0
        return record

    def _clean(self, record: Record, clean_runs: int, doubt: float) -> bool:
        """Whether it was right often enough: once if it erred once, else more often than a device like it would be.

        Rounds of the version that it failed count; of other ones, since a release may end a version, a tenth.
        """
        streak: dict[str, int] = record["streak"]
        failed = {e["version"] for e in record["wrong"]}
        runs = max(min(streak.get(v, 0) for v in failed), sum(streak.values()) // 10)
        if record["state"] == "suspect":
            return runs >= 1
        wrong = record["count"] + record["again"]
        return runs >= clean_runs and chance_of_right(wrong, record["between"], runs) <= doubt

    def strike(self, unjust: Unjust, page_at: int) -> list[str]:
        """Takes back mismatches that were the software's; the devices that have none left."""
        over = []
        for entity, record in list(self.records.items()):
            struck = [e for e in record["wrong"] if unjust.holds(entity, e)]
            if struck:
                kept = [e for e in record["wrong"] if e not in struck]
                record["count"] -= len(struck)
                record["again"] -= sum(min(e.get("again", 0), ASKED_AGAIN) for e in struck)
                record["wrong"] = kept
                if record["state"] == "confirmed" and len(kept) < page_at and not _reproduced(kept):
                    record |= {"state": "suspect", "retest": "asked", "reproduced": False, "confirmed": 0}
                if not kept:
                    del self.records[entity]
                    over.append(entity)
        return over

    def exchanged(self, entity: str, uuid: object) -> bool:
        """Whether another device sits there now; then nothing is known of it."""
        record = self.records.get(entity)
        other = record is not None and isinstance(uuid, str) and record["uuid"] not in (None, uuid)
        if other:
            del self.records[entity]
        return other

    def forget(self, horizon: int) -> None:
        """Lets what was cleared go once its last mismatch lies before `horizon`."""
        for entity, record in list(self.records.items()):
            if record["state"] == "cleared" and record["wrong"][-1]["time"] < horizon:
                del self.records[entity]

    def odds(self, entity: str) -> float:
        """Odds that the device is defective, by all its rounds."""
        record = self.records[entity]
        right = record["before"] + record["between"] + sum(record["streak"].values())
        return odds(record["count"] + record["again"], right, kind_of(entity))

    def snapshot(self) -> dict[str, Any]:
        return copy.deepcopy(self.records)

    def restore(self, state: dict[str, Any]) -> None:
        self.records = state


def _fresh(before: int) -> Record:
    counts: Record = {"count": 0, "again": 0, "before": before, "between": 0, "streak": {}, "since": 0, "confirmed": 0}
    counts |= {"clean": 0, "jobs": [], "wrong": [], "uuid": None, "reproduced": False}
    return {**counts, "state": "suspect", "retest": "asked"}


def _reproduced(entries: Iterable[Mapping[str, Any]]) -> bool:
    """Whether one came out wrong again at once, while another device has it right."""
    return any(e.get("again") and e["agreeing"] > 0 for e in entries)


def _entry(verdict: Verdict) -> Record:
    return {
        "time": verdict.time,
        "canary": verdict.canary,
        "version": verdict.version,
        "digest": verdict.answer,
        "expected": verdict.expected,
        "voters": verdict.voters,
        "agreeing": verdict.agreeing,
        "known": verdict.known,
        "question": verdict.question,
        **{k: v for k, v in verdict.facts.items() if k not in ("uuid", "rounds")},
    }


_JOBS = 2048  # jobs remembered, the oldest ended ones go first; chosen
NAMED = 10
"""Jobs named in evidence, the newest; their number is told too. Chosen."""


class Tested:
    """Time of the last right answer and right rounds in all, of each device that frames name; a part() of SdcVote.

    Of cores only those that gave a wrong answer have a ledger; GPUs and cores alike have 16 bytes here.
    """

    def __init__(self) -> None:
        self._cells: dict[str, np.ndarray[Any, np.dtype[np.int64]]] = {}  # class -> (2, N): time, rounds
        self._places: dict[str, tuple[str, int]] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._nodes: dict[str, dict[str, int]] = {}  # node -> its two devices that were right last, and when

    def look(self, frames: Mapping[str, Frame]) -> None:
        """Learns the names of devices."""
        for device_class in ("gpu", "canary"):
            frame = frames.get(device_class)
            known = len(self._names.get(device_class, ()))
            if frame is None or len(frame.entities) <= known:
                continue
            for i in range(known, len(frame.entities)):
                self._places[frame.entities[i]] = (device_class, i)
            self._names[device_class] = tuple(frame.entities)
            cells = self._cells.get(device_class, np.zeros((2, 0), np.int64))
            if cells.shape[1] < len(frame.entities):
                self._cells[device_class] = np.zeros((2, len(frame.entities)), np.int64)
                self._cells[device_class][:, : cells.shape[1]] = cells

    def right(self, entity: str, time: int, rounds: int, node: str | None) -> None:
        """Enters right rounds of a device of a node."""
        if node is not None:
            _two(self._nodes.setdefault(node, {}), entity, time)
        place = self._places.get(entity)
        if place is not None:
            cells = self._cells[place[0]]
            cells[0, place[1]] = max(cells[0, place[1]], time)
            cells[1, place[1]] += rounds

    def of(self, entity: str) -> tuple[int, int]:
        """(time of the last right answer, right rounds in all); 0 if none is known."""
        place = self._places.get(entity)
        if place is None:
            return 0, 0
        time, rounds = self._cells[place[0]][:, place[1]].tolist()
        return time, rounds

    def newest_beside(self, entity: str, node: str | None) -> int:
        """When another device of the same node was right last; 0 if none is known."""
        beside = self._nodes.get(node, {}) if node is not None else {}
        return max((time for other, time in beside.items() if other != entity), default=0)

    def snapshot(self) -> dict[str, Any]:
        cells = {name: cells.copy() for name, cells in self._cells.items()}
        nodes = {node: dict(beside) for node, beside in self._nodes.items()}
        return {"cells": cells, "names": dict(self._names), "nodes": nodes}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._cells, self._nodes = dict(state["cells"]), dict(state["nodes"])
        self._names = {name: tuple(names) for name, names in state["names"].items()}
        self._places = {e: (name, i) for name, names in self._names.items() for i, e in enumerate(names)}


def _two(beside: dict[str, int], entity: str, time: int) -> None:
    """Enters a device of a node among the two that were right last."""
    beside[entity] = max(beside.get(entity, 0), time)
    if len(beside) > 2:
        del beside[min(beside, key=lambda e: (beside[e], e))]


class Users:
    """Which job was on which GPU from when to when, as job_start and job_end tell; a part() of detectors."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}

    def hear(self, frames: Mapping[str, Frame]) -> None:
        """Takes the events of an instant."""
        told = [e for f in frames.values() for e in f.events if e.kind in ("job_start", "job_end")]
        for event in sorted(told, key=lambda e: (e.time, e.entity, e.kind == "job_start")):
            self._take(event)
        if told and len(self.jobs) > _JOBS:
            oldest = sorted(self.jobs, key=lambda j: (self.jobs[j]["end"] or event.time, j))
            for job in oldest[: len(self.jobs) - _JOBS]:
                del self.jobs[job]

    def _take(self, event: Event) -> None:
        if event.kind == "job_end":
            if event.entity in self.jobs:
                self.jobs[event.entity]["end"] = event.time
            return
        ranks = event.data.get("ranks")
        job = self.jobs.setdefault(event.entity, {"start": event.time, "end": None, "gpus": {}})
        job["end"] = None
        for place in ranks.values() if isinstance(ranks, Mapping) else ():
            gpu = read_text(place.get("gpu")) if isinstance(place, Mapping) else ""
            if gpu:
                job["gpus"].setdefault(gpu, event.time)

    def since(self, gpu: str, time: int) -> list[str]:
        """Jobs that used a GPU at `time` or later, the newest first."""
        mine = ((name, job) for name, job in self.jobs.items() if gpu in job["gpus"])
        used = [(job["gpus"][gpu], name) for name, job in mine if (job["end"] or time) >= time]
        return [name for _, name in sorted(used, reverse=True)]

    def snapshot(self) -> dict[str, Any]:
        return {name: {**job, "gpus": dict(job["gpus"])} for name, job in self.jobs.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.jobs = {name: dict(job) for name, job in state.items()}
