"""What is said of a device that computes wrongly: how often, against whom, where, and which results are in doubt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from detectors.base.findings import evidence
from detectors.sdc.tested import NAMED
from pipeline.records import Level, iso
from pipeline.topology import kind_of

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
    return evidence("nothing: it is over", cleared=True, state=state, retest=done), f"{entity} {_WHY[why]}"


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
    return evidence(
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
