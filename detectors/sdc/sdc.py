"""Finds GPUs and cores that compute wrong results: the same canary must give the same digest on every sound one.

What is said of a device that computes wrongly: how often, against whom, where, and which results are in doubt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from detectors.base.budget import DAY_S, GPUS
from detectors.base.detector import Detector, notes, part
from detectors.base.event_data import read_text
from detectors.base.findings import OpenConditions, close_ended, due_report, make_evidence
from detectors.base.gates import Gates
from detectors.sdc.ledger import NAMED, UPSET, Ledger, Record, Tested, Users
from detectors.sdc.votes import Verdict, Votes, complete
from pipeline.model.records import SECOND, Event, Finding, Frame, Level, iso
from pipeline.model.topology import Topology, kind_of

FLOOR = (
    "a canary is a floor: synthetic tests find under 40 % of defective GPUs (SDCHunter, OSDI 2026), and of those that "
    "show up once in 1e6 products or more rarely few within a week"
)
_WHY = {
    "right": "gave right results again, more often running than a device that errs as it did would",
    "exchanged": "is another device now (its UUID changed)",
    "shared": "is not to blame: other devices give the same answer to the bit, so it is other software",
    "broken": "is not to blame: most devices fail this version of the canary, so the program or its answer is wrong",
}


def cleared_words(entity: str, why: str) -> tuple[Mapping[str, Any], str]:
    """Evidence and summary of the end of a condition."""
    state = "exchanged" if why == "exchanged" else "cleared"
    done = "superseded" if why != "right" else "clean"
    return make_evidence("nothing: it is over", cleared=True, state=state, retest=done), f"{entity} {_WHY[why]}"


def summary(entity: str, record: Mapping[str, Any], level: Level) -> str:
    """One sentence for whoever is woken."""
    last = record["wrong"][-1]
    others = last["agreeing"]
    against = "the known answer" if last["known"] else f"{last['voters'] - 1} others"
    if last["known"] and others:
        against += f", which {others} other {_devices(entity, others)} gave lately"
    times = "once" if record["count"] == 1 else f"{record['count']} times"
    again = f", and {last['again']} of 3 times again at once" if last.get("again") else ""
    used = len(record["jobs"])
    doubt = f"; results of {used} job{'' if used == 1 else 's'} that used it since are in doubt" if used else ""
    does = "keep jobs off it" if level == "page" else "being tested again"
    return f"{entity} gave a wrong result {times}{again}: canary {_canary(last)} against {against}{doubt}; {does}"


def findings_evidence(record: Mapping[str, Any], odds: float, right: int, divided: Sequence[str]) -> Mapping[str, Any]:
    """Everything that is known of a device in the ledger."""
    last = record["wrong"][-1]
    confirmed = record["state"] == "confirmed"
    streak = sum(record["streak"].values())
    return make_evidence(
        _clears(confirmed),
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
        where=_where(record["wrong"]),
        last_clean_before=iso(record["clean"]) if record["clean"] else "unknown",
        last_right=iso(right) if right else "unknown",
        jobs_in_doubt=record["jobs"][:NAMED],
        jobs_in_doubt_count=len(record["jobs"]),
        undecided_canaries=list(divided[:NAMED]),
        coverage=FLOOR,
    )


def _clears(confirmed: bool) -> str:
    if confirmed:
        return "another device in its place, or more right rounds running than a device that errs so often manages"
    return "its next right round of the same canary"


def _where(wrong: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Formats, ranges, multiprocessors and problems that came out wrong, and what they point to."""
    told = {
        "formats": sorted({str(e["format"]) for e in wrong if "format" in e}),
        "ranges": sorted({str(e["range"]) for e in wrong if "range" in e}),
        "sms": sorted({str(e["sm"]) for e in wrong if "sm" in e}),
        "problems": sorted({p for e in wrong for p in e.get("wrong", ())})[:NAMED],
    }
    problems, formats = told["problems"], told["formats"]
    points = "not localised"
    if problems and all("march" in p for p in problems):
        points = "memory: only marches over memory failed"
    elif told["sms"]:
        points = f"multiprocessor {', '.join(told['sms'][:NAMED])}"
    elif len(formats) == 1:
        points = f"the unit that computes {formats[0]}: nothing else failed"
    elif len(formats) > 2:
        points = "the whole device or its memory: several formats failed"
    return {**{k: v for k, v in told.items() if v}, "points_to": points}


def _canary(entry: Mapping[str, Any]) -> str:
    return f"{entry['canary']} {entry['version']}"


def _devices(entity: str, number: int) -> str:
    name = "core" if kind_of(entity) == "cpu" else "GPU"
    return name if number == 1 else f"{name}s"


_DAY = 86_400 * SECOND


@dataclass
class SdcVote(Detector):
    """Judges canary digests: bit-exact, so there is nothing to learn and no noise. A ledger keeps the odds.

    A result that bears the known answer (`expected`) is judged by it, alone too. Of others the answer of more than half
    of at least `quorum` devices of one version, SKU and driver is right; without a majority nobody is blamed, which the
    log says. A wrong answer that `same_answer` GPUs, or cores of as many nodes, share is other software, not a defect.

    One mismatch is a suspect and asks for a retest (the agent asks the problem again three times at once, then tells
    each round). It pages when `page_at` rounds within `ledger_days` were wrong, or when one came out wrong again at
    once while another device has it right. A suspect is cleared by its next right round; a page by so many right rounds
    running, `clean_runs` at least, that a device that errs as often as this one did would manage them with a chance
    below `doubt`; by another device (UUID) in its place; not by a reset, for nearly all such defects are permanent.
    Within a day of a change of its node's software it stays a suspect until another device there was right since.

    Source: Dixit et al., "Silent Data Corruptions at Scale" (arXiv 2102.11245): only known answers show wrong ones;
    quarantine of suspects after Hochschild et al., "Cores that don't count" (HotOS 2021); permanence and occurrence
    of 1e-8 to 1: SDCHunter (OSDI 2026). The other numbers are chosen. No telemetry signal predicts such devices.
    """

    name: ClassVar[str] = "sdc"
    family: ClassVar[str] = "silent data corruption"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = ("event:digest",)
    wants: ClassVar[tuple[str, ...]] = ("event:job_start", "event:job_end", "event:version")
    cannot_see: ClassVar[str] = (
        "Corruption that no canary's arithmetic touches: stress tests find under 40 % of defective GPUs (SDCHunter, "
        "OSDI 2026), vendor diagnostics 25 to 70 %; devices on which no canary runs; a fault that most share."
    )

    quorum: int = 5
    page_at: int = 2
    same_answer: int = 3
    clean_runs: int = 10
    doubt: float = 1e-4
    ledger_days: float = 30.0

    votes: Votes = part(Votes)
    ledger: Ledger = part(Ledger)
    tested: Tested = part(Tested)
    users: Users = part(Users)
    gates: Gates = part(Gates)
    conditions: OpenConditions = notes()
    swept: list[int] = notes(list)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        if not frames:
            return []
        time = max(frame.time for frame in frames.values())
        topology = next(iter(frames.values())).topology
        self.gates.update(frames)
        self.users.hear(frames)
        told = sorted((e for e in _digests(frames) if complete(e)), key=lambda e: (e.time, e.entity))
        over: dict[str, str] = {}
        if told:
            self.tested.look(frames)
            self._take(told, topology, over)
        self._sweep(time)
        return self._findings(time, topology, over) if self.ledger.records or self.conditions else []

    def budget(self) -> list[str]:
        wrong = UPSET * DAY_S * self.ledger_days  # with a round a second: more than any schedule of canaries has
        pages = wrong**self.page_at / math.factorial(int(self.page_at)) * 1000 * GPUS / self.ledger_days
        return [
            f"digests: a rule on exact bits; at {UPSET:g} upsets a round and a round a second, {self.page_at} in"
            f" {self.ledger_days:g} days on one sound GPU make at most {pages:.2g} pages per 1,000 node-days"
        ]

    def _take(self, told: Sequence[Event], topology: Topology, over: dict[str, str]) -> None:
        """The results of an instant. over: devices whose condition ended, and why."""
        if self.ledger.records:
            new = (e.entity for e in told if self.ledger.exchanged(e.entity, e.data.get("uuid")))
            over.update(dict.fromkeys(new, "exchanged"))
        known = (bool(read_text(e.data.get("expected"))) for e in told)
        heard = [(e, "" if k else _like(topology, e.entity)) for e, k in zip(told, known, strict=True)]
        wrong: set[str] = set()
        for verdict in self.votes.judge(heard, self.quorum, self.same_answer):
            if verdict.right:
                self._right(verdict, topology, verdict.entity not in wrong)
            else:
                wrong.add(verdict.entity)
                self._wrong(verdict)
        unjust, self.votes.unjust = dict.fromkeys(self.votes.unjust), []
        for mistake in sorted(unjust, key=lambda u: u.why != "shared"):  # the more exact reason is told
            over.update(dict.fromkeys(self.ledger.strike(mistake, self.page_at), mistake.why))

    def _right(self, verdict: Verdict, topology: Topology, ends: bool) -> None:
        """ends: whether it may end a condition; one that began in this instant is told first."""
        node = topology.ancestor_of_kind(verdict.entity, "node")
        self.tested.right(verdict.entity, verdict.time, max(verdict.facts.get("rounds", 1), 1), node)
        if self.ledger.records:
            self.ledger.right(verdict, self.clean_runs, self.doubt if ends else -1.0)

    def _wrong(self, verdict: Verdict) -> None:
        last, rounds = self.tested.of(verdict.entity)
        horizon = verdict.time - int(self.ledger_days * _DAY)
        record = self.ledger.wrong(verdict, rounds, self.page_at, horizon)
        if record is None:
            return
        if record["since"] == verdict.time:  # the first of a condition
            record["clean"] = min(last, verdict.time)
        record["jobs"] = self.users.since(verdict.entity, record["clean"] or verdict.time)

    def _sweep(self, time: int) -> None:
        """Forgets what is old; once an hour is enough."""
        if self.swept and 0 <= time - self.swept[0] < 3600 * SECOND:
            return
        self.swept = [time]
        horizon = time - int(self.ledger_days * _DAY)
        self.votes.forget(horizon)
        self.ledger.forget(horizon)

    def _level(self, entity: str, record: Record, topology: Topology) -> Level:
        if record["state"] != "confirmed":
            return "suspect"
        changed = self.gates.last_change(entity, topology)
        if changed is None:
            return "page"
        node = topology.ancestor_of_kind(entity, "node")
        return "page" if self.tested.newest_beside(entity, node) >= changed else "suspect"

    def _findings(self, time: int, topology: Topology, over: Mapping[str, str]) -> list[Finding]:
        holding = {e for e, r in self.ledger.records.items() if r["state"] != "cleared"}
        ended = [(e, c) for e, c in sorted(self.conditions.items()) if e not in holding]
        found = [self._cleared(e, time, condition, over.get(e, "right")) for e, condition in ended]
        close_ended(self.conditions, holding)
        for entity in sorted(holding):
            record = self.ledger.records[entity]
            onset = record["since"]
            if due := due_report(self.conditions, entity, time, onset, self._level(entity, record, topology)):
                found.append(self._finding(entity, time, due, record))
        return found

    def _cleared(self, entity: str, time: int, condition: dict[str, Any], why: str) -> Finding:
        """The end of a condition must be said: quiet is no sign of health where results are wrong now and then."""
        evidence, words = cleared_words(entity, why)
        onset, level = min(condition["onset"], time), condition["level"]  # the clock may have gone back since
        return Finding(time, onset, entity, self.name, level, 0.0, words, evidence, ("event:digest",))

    def _finding(self, entity: str, time: int, due: tuple[int, Level], record: Record) -> Finding:
        onset, level = due
        evidence = findings_evidence(record, self.ledger.odds(entity), self.tested.of(entity)[0], self.votes.divided())
        score, words = float(record["count"]), summary(entity, record, level)
        return Finding(time, onset, entity, self.name, level, score, words, evidence, ("event:digest",))


def _digests(frames: Mapping[str, Frame]) -> Iterable[Event]:
    return (e for device_class in sorted(frames) for e in frames[device_class].events if e.kind == "digest")


def _like(topology: Topology, entity: str) -> str:
    """SKU and driver: devices that differ in them may round otherwise."""
    known = [topology.attributes.get(e, {}) for e in (entity, *topology.ancestors(entity))]
    words = (next((str(a[name]) for a in known if name in a), "") for name in ("sku", "driver", "nvidia_driver"))
    return "/".join(words)
