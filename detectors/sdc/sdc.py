"""Finds GPUs and cores that compute wrong results: the same canary must give the same digest on every healthy one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from detectors.base.budget import DAY_S, GPUS
from detectors.base.detector import Detector, notes, part
from detectors.base.event_data import events_of, read_text
from detectors.base.findings import OpenConditions, close_ended, due_report, make_evidence
from detectors.base.gates import Gates
from detectors.sdc.ledger import MAX_NAMED, UPSET_RATE, GpuJobs, MismatchLedger, Proof, Record, RightResults
from detectors.sdc.votes import CanaryVerdict, CanaryVotes, is_result
from pipeline.model.entity_names import pager_title
from pipeline.model.records import SECOND, Event, Finding, Frame, Level, iso
from pipeline.model.topology import Topology

_DAY = 86_400 * SECOND
_EXPIRE_EVERY = 3600 * SECOND
_SIGNALS = ("event:digest",)
_COVERAGE = (
    "a canary is a lower bound: synthetic tests find under 40 % of defective GPUs (SDCHunter, OSDI 2026), and of those "
    "that fail once in 1e6 products or more rarely few within a week"
)
_WHY_CLEARED = {
    "right": "right results again, condition cleared",
    "exchanged": "replaced by another device, condition cleared",
    "shared": "not at fault, other software gives the same answer",
    "broken": "not at fault, most devices fail this canary version",
}


@dataclass
class SdcVote(Detector):
    """Compares canary digests bit by bit: there is no noise and no baseline. A ledger keeps the results per device.

    A result with the known answer (`expected`) is judged by it, even alone. Of others the answer of more than half
    of at least `quorum` devices of one version, SKU and driver is right; without a majority no device is blamed, and
    the log has a line. A wrong answer that `same_answer` GPUs, or cores of as many nodes, share is other software, not
    a defect.

    One mismatch requests a retest (the agent repeats the problem three times immediately, then reports each round). It
    pages when the device was right before with this version, `quorum` others gave the known answer now, and a defect is
    `page_odds` times as likely as an upset of a healthy device, from all its rounds; when `page_at` rounds within
    `ledger_days` were wrong; or when a retest was wrong too while another device has the right answer. Else it is a
    suspect, cleared by its next right round; a page by so many right rounds in a row, `clean_runs` at least, that a
    device that fails as often would have them with a chance below `doubt`; by another device (UUID) in its place; not
    by a reset, as nearly all such defects are permanent.
    Within a day of a change of its node's software it stays a suspect until another device there was right since.

    Source: Dixit et al., "Silent Data Corruptions at Scale" (arXiv 2102.11245): only known answers show wrong ones;
    quarantine of suspects after Hochschild et al., "Cores that don't count" (HotOS 2021); permanence and occurrence
    of 1e-8 to 1: SDCHunter (OSDI 2026). page_odds: nine in ten of such pages are right (chosen). The other numbers
    are chosen. No telemetry signal predicts such devices.
    """

    name: ClassVar[str] = "sdc"
    family: ClassVar[str] = "silent data corruption"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = ("event:digest",)
    wants: ClassVar[tuple[str, ...]] = ("event:job_start", "event:job_end", "event:version")
    cannot_see: ClassVar[str] = (
        "Corruption in units that no canary exercises: stress tests find under 40 % of defective GPUs (SDCHunter, "
        "OSDI 2026), vendor diagnostics 25 to 70 %; devices on which no canary runs; a fault that most share."
    )

    quorum: int = 5
    page_at: int = 2
    page_odds: float = 9.0
    same_answer: int = 3
    clean_runs: int = 10
    doubt: float = 1e-4
    ledger_days: float = 30.0

    votes: CanaryVotes = part(CanaryVotes)
    ledger: MismatchLedger = part(MismatchLedger)
    results: RightResults = part(RightResults, kept=True)
    jobs: GpuJobs = part(GpuJobs)
    gates: Gates = part(Gates)
    conditions: OpenConditions = notes()
    expired_at: int = notes(int)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings of devices with wrong results, and of conditions that ended."""
        if not frames:
            return []
        time = max(frame.time for frame in frames.values())
        topology = next(iter(frames.values())).topology
        self.gates.update(frames)
        self.jobs.update(frames)
        results = sorted((e for e in events_of(frames, "digest") if is_result(e)), key=lambda e: (e.time, e.entity))
        over: dict[str, str] = {}
        if results:
            self.results.add_devices(frames)
            self._apply_results(results, topology, over)
        self._expire(time)
        return self._findings(time, topology, over) if self.ledger.records or self.conditions else []

    @property
    def _proof(self) -> Proof:
        return Proof(int(self.page_at), self.page_odds, int(self.quorum))

    def budget(self) -> list[str]:
        """Returns the false alarms that upsets of healthy devices cause."""
        wrong = UPSET_RATE * DAY_S * self.ledger_days  # with a round a second: more than any schedule of canaries has
        pages = wrong**self.page_at / math.factorial(int(self.page_at)) * 1000 * GPUS / self.ledger_days
        return [
            f"digests: a rule on exact bits; at {UPSET_RATE:g} upsets per round and a round per second, {self.page_at}"
            f" in {self.ledger_days:g} days on one healthy GPU cause at most {pages:.2g} pages per 1,000 node-days"
        ]

    def _apply_results(self, results: Sequence[Event], topology: Topology, over: dict[str, str]) -> None:
        """Enters the results of an instant. over: receives the devices whose condition ended, and why."""
        if self.ledger.records:
            new = (e.entity for e in results if self.ledger.drop_if_replaced(e.entity, e.data.get("uuid")))
            over.update(dict.fromkeys(new, "exchanged"))
        known = (bool(read_text(e.data.get("expected"))) for e in results)
        asked = [(e, "" if k else _comparison_key(topology, e.entity)) for e, k in zip(results, known, strict=True)]
        wrong: set[str] = set()
        for verdict in self.votes.judge_results(asked, self.quorum, self.same_answer):
            if verdict.right:
                self._record_right(verdict, topology, verdict.entity not in wrong)
            else:
                wrong.add(verdict.entity)
                self._record_wrong(verdict)
        mistakes, self.votes.mistakes = dict.fromkeys(self.votes.mistakes), []
        for mistake in sorted(mistakes, key=lambda m: m.why != "shared"):  # the more exact reason is shown
            over.update(dict.fromkeys(self.ledger.remove_mismatches(mistake, self._proof), mistake.why))

    def _record_right(self, verdict: CanaryVerdict, topology: Topology, ends: bool) -> None:
        """Enters a right result. ends: whether it may end a condition; one that has just begun is reported first."""
        node = topology.ancestor_of_kind(verdict.entity, "node")
        rounds = max(verdict.facts.get("rounds", 1), 1)
        self.results.record_right(verdict.entity, verdict.time, rounds, verdict.version, node)
        if self.ledger.records:
            self.ledger.record_right(verdict, self.clean_runs, self.doubt if ends else -1.0)

    def _record_wrong(self, verdict: CanaryVerdict) -> None:
        last, rounds = self.results.last_right(verdict.entity)
        horizon = verdict.time - int(self.ledger_days * _DAY)
        works = self.results.was_right_with(verdict.entity, verdict.version)
        record = self.ledger.record_wrong(verdict, rounds, works, self._proof, horizon)
        if record is None:
            return
        if record["since"] == verdict.time:  # the first of a condition
            record["clean"] = min(last, verdict.time)
        record["jobs"] = self.jobs.jobs_since(verdict.entity, record["clean"] or verdict.time)

    def _expire(self, time: int) -> None:
        """Drops old records, once an hour."""
        if self.expired_at and 0 <= time - self.expired_at < _EXPIRE_EVERY:
            return
        self.expired_at = time
        horizon = time - int(self.ledger_days * _DAY)
        self.votes.drop_expired(horizon)
        self.ledger.drop_expired(horizon)

    def _level(self, entity: str, record: Record, topology: Topology) -> Level:
        if record["state"] != "confirmed":
            return "suspect"
        changed = self.gates.last_change(entity, topology)
        if changed is None:
            return "page"
        node = topology.ancestor_of_kind(entity, "node")
        return "page" if self.results.newest_on_node(entity, node) >= changed else "suspect"

    def _findings(self, time: int, topology: Topology, over: Mapping[str, str]) -> list[Finding]:
        holding = {e for e, r in self.ledger.records.items() if r["state"] != "cleared"}
        ended = [(e, c) for e, c in sorted(self.conditions.items()) if e not in holding]
        found = [self._cleared_finding(e, time, condition, over.get(e, "right")) for e, condition in ended]
        close_ended(self.conditions, holding)
        for entity in sorted(holding):
            record = self.ledger.records[entity]
            level = self._level(entity, record, topology)
            if due := due_report(self.conditions, entity, time, record["since"], level):
                found.append(self._device_finding(entity, time, due, record))
        return found

    def _cleared_finding(self, entity: str, time: int, condition: dict[str, Any], why: str) -> Finding:
        """Returns the end of a condition, which must be reported: results that are wrong now and then look healthy."""
        evidence = make_evidence(
            "nothing: it is over",
            cleared=True,
            state="exchanged" if why == "exchanged" else "cleared",
            retest="clean" if why == "right" else "superseded",
        )
        onset, level = min(condition["onset"], time), condition["level"]  # the clock may have gone back since
        summary = pager_title(entity, _WHY_CLEARED[why])
        return Finding(time, onset, entity, self.name, level, 0.0, summary, evidence, _SIGNALS)

    def _device_finding(self, entity: str, time: int, due: tuple[int, Level], record: Record) -> Finding:
        odds, last = self.ledger.odds_of(entity), self.results.last_right(entity)[0]
        evidence = _record_evidence(record, odds, last, self.votes.split_canaries())
        summary = pager_title(entity, _title(record))
        return Finding(time, due[0], entity, self.name, due[1], float(record["count"]), summary, evidence, _SIGNALS)


def _comparison_key(topology: Topology, entity: str) -> str:
    """Returns SKU and driver: devices that differ in them may round otherwise."""
    known = [topology.attributes.get(e, {}) for e in (entity, *topology.ancestors(entity))]
    words = (next((str(a[name]) for a in known if name in a), "") for name in ("sku", "driver", "nvidia_driver"))
    return "/".join(words)


def _title(record: Record) -> str:
    """Returns what a pager shows: `wrong results in 28 of 31 checks, 2 jobs in doubt`; retests are checks too."""
    wrong = record["count"] + record["again"]
    total = wrong + record["before"] + record["between"] + sum(record["streak"].values())
    title = "wrong result" if total == 1 else f"wrong results in {wrong} of {total:,} checks"
    jobs = len(record["jobs"])
    return title + (f", {jobs} job{'' if jobs == 1 else 's'} in doubt" if jobs else "")


def _record_evidence(record: Record, odds: float, last_right: int, split: Sequence[str]) -> Mapping[str, Any]:
    """Returns all that is known of a device in the ledger."""
    last = record["wrong"][-1]
    streak = sum(record["streak"].values())
    return make_evidence(
        _clears_when(record["state"] == "confirmed"),
        holds=True,
        state=record["state"],
        retest=record["retest"],
        reproduced=record["again"],
        mismatches=record["count"],
        right_rounds=record["before"] + record["between"] + streak,
        right_running=streak,
        odds=round(odds, 3 if odds < 10 else 0),
        canary=last["canary"],
        version=last["version"],
        digest=last["digest"],
        expected=last["expected"],
        judged_by="known answer" if last["known"] else "majority",
        peers=max(last["voters"] - 1, 0),
        agreeing=last["agreeing"],
        where=_localise(record["wrong"]),
        last_clean_before=iso(record["clean"]) if record["clean"] else "unknown",
        last_right=iso(last_right) if last_right else "unknown",
        jobs_in_doubt=record["jobs"][:MAX_NAMED],
        jobs_in_doubt_count=len(record["jobs"]),
        undecided_canaries=list(split[:MAX_NAMED]),
        coverage=_COVERAGE,
    )


def _clears_when(confirmed: bool) -> str:
    if confirmed:
        return "the device is replaced, or it gives more right answers in a row than one that fails as often would"
    return "the next right answer of this device to the same canary"


def _localise(wrong: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns formats, ranges, multiprocessors and problems that were wrong, and what they point to."""
    found = {
        "formats": sorted({str(e["format"]) for e in wrong if "format" in e}),
        "ranges": sorted({str(e["range"]) for e in wrong if "range" in e}),
        "sms": sorted({str(e["sm"]) for e in wrong if "sm" in e}),
        "problems": sorted({p for e in wrong for p in e.get("wrong", ())})[:MAX_NAMED],
    }
    problems, formats = found["problems"], found["formats"]
    points = "not localised"
    if problems and all("march" in p for p in problems):
        points = "memory: only marches over memory failed"
    elif found["sms"]:
        points = f"multiprocessor {', '.join(found['sms'][:MAX_NAMED])}"
    elif len(formats) == 1:
        points = f"the unit that computes {formats[0]}: nothing else failed"
    elif len(formats) > 2:
        points = "the whole device or its memory: several formats failed"
    return {**{k: v for k, v in found.items() if v}, "points_to": points}
