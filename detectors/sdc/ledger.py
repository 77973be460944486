"""The record of each tested device: its mismatches, its right rounds since, the probability of a defect, and its jobs.

Beta-Bernoulli: a defective device fails a share of its rounds drawn from Beta(1/8, 1), a healthy one UPSET_RATE.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from detectors.base.event_data import events_of, read_text
from detectors.base.state import State, memory, notes, parts
from detectors.sdc.votes import CanaryVerdict, FalseMismatch
from pipeline.model.records import Event, Frame
from pipeline.model.topology import kind_of

DEFECT_RATE: Mapping[str, float] = {"gpu": 1.3e-3, "cpu": 5.6e-6}
"""Share of devices that are defective: 13 of some 10,000 GPUs over 35M GPU-hours (AEGIS, OSDI 2026); 3.61 of 10,000
processors (Wang et al., SOSP 2023), here of each of 64 cores."""
PRIOR_A, PRIOR_B = 0.125, 1.0
"""Of the Beta law: occurrence spreads over 1e-8 to 1 (SDCHunter, OSDI 2026). Of conjugate laws Beta(1/8, 1) is the
nearest to log-uniform there: nine tenths lie above 1e-8, a quarter above 0.1."""
UPSET_RATE = 1e-9
"""Share of the rounds of a healthy device that are wrong: particles cause some 100 wrong results in 1e9 hours of an
accelerator under beam tests (about 1e-11 per round of a second at most); a hundredfold for unknown causes. Chosen."""
RETESTS = 3
"""Times that an agent repeats a wrong problem immediately (`again` of the event: how often it was wrong again). Its
operands are new each time, so what upset a memory cell once does not come again."""
MAX_MISMATCHES = 100
"""Mismatches kept of a device, of more only the number; chosen."""
MAX_NAMED = 10
"""Newest jobs named in evidence; their number is shown too. Chosen."""
_MAX_JOBS = 2048  # jobs kept; the oldest ended ones are dropped first; chosen
_MAX_ODDS = 1e12
Record = dict[str, Any]


def defect_odds(wrong: int, right: int, kind: str) -> float:
    """Returns the odds that a device with so many wrong and right rounds is defective; at most _MAX_ODDS."""
    prior = DEFECT_RATE.get(kind, DEFECT_RATE["gpu"])
    defective = _log_beta(PRIOR_A + wrong, PRIOR_B + right) - _log_beta(PRIOR_A, PRIOR_B)
    healthy = wrong * math.log(UPSET_RATE) + right * math.log1p(-UPSET_RATE)
    return float(math.exp(min(math.log(prior / (1 - prior)) + defective - healthy, math.log(_MAX_ODDS))))


def chance_of_streak(wrong: int, right: int, streak: int) -> float:
    """Returns the chance that a device with `wrong` and `right` rounds is right `streak` times in a row."""
    return math.exp(_log_beta(PRIOR_A + wrong, PRIOR_B + right + streak) - _log_beta(PRIOR_A + wrong, PRIOR_B + right))


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


@dataclass(frozen=True)
class Proof:
    """What proves a defect: so many mismatches; or one with a known answer that `agreeing` other devices gave, by a
    version with which the device was right before, and such odds of a defect against an upset of a healthy device:
    then the program works there, and no majority decides."""

    mismatches: int
    odds: float
    agreeing: int


@dataclass
class MismatchLedger(State):
    """Devices that gave a wrong answer recently.

    state:   suspect (one mismatch, its retest is awaited), confirmed, or cleared (kept for the next mismatch).
    before:  right rounds before the first mismatch.   between: since then, up to the last mismatch.
    streak:  version -> right rounds since the last mismatch.
    clean:   time of the last right answer before the condition (0: unknown).   jobs: those that used it since then.
    """

    records: dict[str, Record] = notes()

    def record_wrong(
        self, verdict: CanaryVerdict, before: int, works: bool, proof: Proof, horizon: int
    ) -> Record | None:
        """Records a mismatch; returns the record of the device, None if it was recorded before.

        before: right rounds of the device so far.   works: it was right with this version.
        horizon: mismatches from before it do not count towards `proof`.
        """
        record = self.records.setdefault(verdict.entity, _new_record(before))
        if any(e["time"] == verdict.time and e["canary"] == verdict.canary for e in record["wrong"]):
            return None
        folded = max(verdict.facts.get("rounds", 1) - 1, 0)  # right rounds that were not reported one by one
        record["between" if record["count"] else "before"] += folded
        record["between"] += sum(record["streak"].values())
        record["streak"] = {}
        record["count"] += 1
        if "again" in verdict.facts:
            again = min(verdict.facts["again"], RETESTS)
            record["again"] += again
            record["between"] += RETESTS - again
        record["wrong"] = [*record["wrong"], {**_ledger_entry(verdict), "works": works}][-MAX_MISMATCHES:]
        record["uuid"] = verdict.facts.get("uuid", record["uuid"])
        record["reproduced"] |= _is_reproduced(record["wrong"][-1:])
        recent = sum(e["time"] >= horizon for e in record["wrong"])
        confirmed = record["state"] == "confirmed" or self._is_proven(verdict.entity, recent, proof)
        record["state"] = "confirmed" if confirmed else "suspect"
        record["retest"] = "failed" if confirmed else "asked"
        if confirmed and not record["confirmed"]:
            record["confirmed"] = verdict.time
        record["since"] = record["since"] or verdict.time
        return record

    def record_right(self, verdict: CanaryVerdict, clean_runs: int, doubt: float) -> Record | None:
        """Records right rounds; returns the device's record if any. A `doubt` below 0: they do not clear it."""
        record = self.records.get(verdict.entity)
        if record is None or verdict.time <= record["wrong"][-1]["time"]:
            return record
        rounds = max(verdict.facts.get("rounds", 1), 1)
        streak = record["streak"]
        streak[verdict.version] = streak.get(verdict.version, 0) + rounds
        if record["state"] != "cleared" and doubt > 0 and _is_clean(record, clean_runs, doubt):
            record["state"], record["retest"], record["reproduced"] = "cleared", "clean", False
            record["since"] = record["confirmed"] = 0
        return record

    def _is_proven(self, entity: str, recent: int, proof: Proof) -> bool:
        record = self.records[entity]
        if record["reproduced"] or recent >= min(proof.mismatches, MAX_MISMATCHES):
            return True
        sound = any(e["known"] and e.get("works") and e["agreeing"] >= proof.agreeing for e in record["wrong"])
        return sound and self.odds_of(entity) >= proof.odds

    def remove_mismatches(self, false: FalseMismatch, proof: Proof) -> list[str]:
        """Removes mismatches that software caused; returns the devices that have none left."""
        over = []
        for entity, record in list(self.records.items()):
            removed = [e for e in record["wrong"] if false.covers(entity, e)]
            if removed:
                kept = [e for e in record["wrong"] if e not in removed]
                record["count"] -= len(removed)
                record["again"] -= sum(min(e.get("again", 0), RETESTS) for e in removed)
                record["wrong"] = kept
                record["reproduced"] = _is_reproduced(kept)
                if record["state"] == "confirmed" and not self._is_proven(entity, len(kept), proof):
                    record |= {"state": "suspect", "retest": "asked", "confirmed": 0}
                if not kept:
                    del self.records[entity]
                    over.append(entity)
        return over

    def drop_if_replaced(self, entity: str, uuid: object) -> bool:
        """Drops the record of a device if another one is in its place now; returns whether that is so."""
        record = self.records.get(entity)
        other = record is not None and isinstance(uuid, str) and record["uuid"] not in (None, uuid)
        if other:
            del self.records[entity]
        return other

    def drop_expired(self, horizon: int) -> None:
        """Drops cleared records whose last mismatch is older than `horizon`."""
        for entity, record in list(self.records.items()):
            if record["state"] == "cleared" and record["wrong"][-1]["time"] < horizon:
                del self.records[entity]

    def odds_of(self, entity: str) -> float:
        """Returns the odds that a device is defective, from all its rounds."""
        record = self.records[entity]
        right = record["before"] + record["between"] + sum(record["streak"].values())
        return defect_odds(record["count"] + record["again"], right, kind_of(entity))


def _is_clean(record: Record, clean_runs: int, doubt: float) -> bool:
    """Returns whether a device was right often enough: once after one mismatch, else more often than a like device.

    Rounds of the version that it failed count; of others a tenth, since a release may end a version.
    """
    streak: dict[str, int] = record["streak"]
    failed = {e["version"] for e in record["wrong"]}
    runs = max(min(streak.get(v, 0) for v in failed), sum(streak.values()) // 10)
    if record["state"] == "suspect":
        return runs >= 1
    wrong = record["count"] + record["again"]
    return runs >= clean_runs and chance_of_streak(wrong, record["between"], runs) <= doubt


def _new_record(before: int) -> Record:
    counts: Record = {"count": 0, "again": 0, "before": before, "between": 0, "streak": {}, "since": 0, "confirmed": 0}
    counts |= {"clean": 0, "jobs": [], "wrong": [], "uuid": None, "reproduced": False}
    return {**counts, "state": "suspect", "retest": "asked"}


def _is_reproduced(entries: Iterable[Mapping[str, Any]]) -> bool:
    """Returns whether a retest of one was wrong too, while another device has the right answer."""
    return any(e.get("again") and e["agreeing"] > 0 for e in entries)


def _ledger_entry(verdict: CanaryVerdict) -> Record:
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


@dataclass
class ClassResults(State):
    """Time of the last right answer, the CRC-32 of its version, and right rounds in all, of each device of a class."""

    last: np.ndarray[Any, np.dtype[np.int64]] = memory(0, np.int64)
    rounds: np.ndarray[Any, np.dtype[np.int64]] = memory(0, np.int64)
    version: np.ndarray[Any, np.dtype[np.uint32]] = memory(0, np.uint32)
    names: list[str] = notes(list)


@dataclass
class RightResults(State):
    """Time of the last right answer, and number of right rounds, of each device: 20 bytes per GPU and core."""

    classes: dict[str, ClassResults] = parts(ClassResults)
    nodes: dict[str, dict[str, int]] = notes()  # node -> its two devices that were right last, and when
    _index: dict[str, tuple[str, int]] = field(default_factory=dict, init=False, repr=False)

    def add_devices(self, frames: Mapping[str, Frame]) -> None:
        """Adds the devices of the frames that are not known yet."""
        for device_class in ("gpu", "canary"):
            frame, known = frames.get(device_class), self.classes.get(device_class)
            if frame is None or (known is not None and len(frame.entities) <= len(known.names)):
                continue
            if known is None:
                known = self.classes[device_class] = ClassResults()
            known.names = list(frame.entities)
            known.grow(len(known.names))
            self._index |= {e: (device_class, i) for i, e in enumerate(known.names)}

    def record_right(self, entity: str, time: int, rounds: int, version: str, node: str | None) -> None:
        """Records right rounds of a device of a node with a version of the canary."""
        if node is not None:
            _keep_two_newest(self.nodes.setdefault(node, {}), entity, time)
        at = self._index.get(entity)
        if at is not None:
            known = self.classes[at[0]]
            known.last[at[1]] = max(known.last[at[1]], time)
            known.rounds[at[1]] += rounds
            known.version[at[1]] = zlib.crc32(version.encode())

    def was_right_with(self, entity: str, version: str) -> bool:
        """Returns whether the last right answer of a device was by a version of the canary."""
        at = self._index.get(entity)
        return at is not None and int(self.classes[at[0]].version[at[1]]) == zlib.crc32(version.encode())

    def last_right(self, entity: str) -> tuple[int, int]:
        """Returns (time of the last right answer, right rounds in all); 0 if none is known."""
        at = self._index.get(entity)
        if at is None:
            return 0, 0
        known = self.classes[at[0]]
        return int(known.last[at[1]]), int(known.rounds[at[1]])

    def newest_on_node(self, entity: str, node: str | None) -> int:
        """Returns when another device of the same node was right last; 0 if none is known."""
        beside = self.nodes.get(node, {}) if node is not None else {}
        return max((time for other, time in beside.items() if other != entity), default=0)

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `State.restore`; the index of devices is built again."""
        super().restore(state)
        self._index = {e: (c, i) for c, known in self.classes.items() for i, e in enumerate(known.names)}


def _keep_two_newest(beside: dict[str, int], entity: str, time: int) -> None:
    """Records a device of a node among the two that were right last."""
    beside[entity] = max(beside.get(entity, 0), time)
    if len(beside) > 2:
        del beside[min(beside, key=lambda e: (beside[e], e))]


@dataclass
class GpuJobs(State):
    """Which jobs were on which GPU, and when, from job_start and job_end events."""

    jobs: dict[str, dict[str, Any]] = notes()

    def update(self, frames: Mapping[str, Frame]) -> None:
        """Reads the events of an instant."""
        events = events_of(frames, "job_start", "job_end")
        for event in sorted(events, key=lambda e: (e.time, e.entity, e.kind == "job_start")):
            self._apply_event(event)
        if events and len(self.jobs) > _MAX_JOBS:
            oldest = sorted(self.jobs, key=lambda j: (self.jobs[j]["end"] or event.time, j))
            for job in oldest[: len(self.jobs) - _MAX_JOBS]:
                del self.jobs[job]

    def _apply_event(self, event: Event) -> None:
        if event.kind == "job_end":
            if event.entity in self.jobs:
                self.jobs[event.entity]["end"] = event.time
            return
        ranks = event.data.get("ranks")
        job = self.jobs.setdefault(event.entity, {"start": event.time, "end": None, "gpus": {}})
        job["end"] = None
        for rank in ranks.values() if isinstance(ranks, Mapping) else ():
            gpu = read_text(rank.get("gpu")) if isinstance(rank, Mapping) else ""
            if gpu:
                job["gpus"].setdefault(gpu, event.time)

    def jobs_since(self, gpu: str, time: int) -> list[str]:
        """Returns the jobs that used a GPU at `time` or later, the newest first."""
        mine = ((name, job) for name, job in self.jobs.items() if gpu in job["gpus"])
        used = [(job["gpus"][gpu], name) for name, job in mine if (job["end"] or time) >= time]
        return [name for _, name in sorted(used, reverse=True)]
