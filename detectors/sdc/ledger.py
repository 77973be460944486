"""What is known of each device that computed wrongly: its mismatches, its right rounds since, and the odds.

Beta-Bernoulli: a defective device errs in a share of its rounds drawn from Beta(1/8, 1), a sound one in UPSET of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

from detectors.sdc.votes import Unjust, Verdict
from pipeline.topology import kind_of

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
