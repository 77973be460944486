"""What is known of one GPU or server in trouble: its XIDs and other facts, and how loud they are together.

A case is plain data, so that it can be kept: see `opened`.

What the GPUs of one server tell together: a driver that is loaded anew, and a GPU that explains its server.

Whether a program or a GPU is to blame for what both cause: XIDs 13, 31, 43, 45, 109 and those of copy engines.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from detectors.base.event_data import read_integer, read_text
from detectors.xid import levels
from detectors.xid import levels as xid_levels
from detectors.xid.levels import (
    ALL,
    COPY,
    HOLDS,
    PAGE,
    PROGRAM,
    RECOVERY,
    REMAPPED,
    UNCONTAINED,
    UNCORRECTED,
    level_of,
    level_of_action,
    number,
    resets,
    wanted,
)
from pipeline.model.records import LEVELS, SECOND, Event, Level
from pipeline.model.topology import Topology, kind_of

Case = dict[str, Any]
_MOST_TIMES = 10**6  # that one event says it stands for at most
_MOST_CODES = 32  # XIDs of one case, but for those that the catalogue or the site knows, which are few; chosen
_MOST_OTHERS = 64  # GPUs that suffered with it that are named; chosen
_MOST_LINES = 4  # of the log, kept for whoever reads the finding; chosen
PASSES = "ten minutes without another one"
LOST: tuple[Level, str] = ("page", "does not answer its driver any more")


def opened(time: int) -> Case:
    """A case without facts.

    onset, last: its first and newest event.       fresh: the first one that is not judged yet; 0: all are.
    codes: XID as text -> [how often, name, action, then].   facts: other facts -> [level, words, must wait].
    driver: what the driver wants done.   reset: a line says that only a reset helps.   lines: what the log says.
    job: job that was on the GPU.   place: part of the GPU that an XID 13 named.   others: GPUs that suffered from it.
    away: us for which nothing is heard of it and its node.
    program: GPUs of its job that erred together with it.   repeats: why it is this GPU and no program.
    """
    empty: Case = {"codes": {}, "facts": {}, "driver": None, "reset": False, "lines": [], "others": [], "away": 0}
    return {**empty, "onset": time, "last": time, "fresh": 0, "job": None, "place": "", "program": 0, "repeats": ""}


def of_event(event: Event, own: Mapping[int, Level]) -> Case | None:
    """A case of one event alone: an XID of the GPU's own, or its loss while others of its server answer."""
    case, line = opened(event.time), read_text(event.data.get("text"))
    if event.kind == "gpu_lost":
        if not read_integer(event.data.get("present"), 0, _MOST_TIMES):
            return None  # all of them at once: as a rule the driver is loaded anew
        case["facts"]["gpu_lost"] = [*LOST, False]
    else:
        root, code = event.data.get("root"), number(event.data, "xid")
        origin = root.get("entity") if isinstance(root, Mapping) else event.entity
        if code is None or origin != event.entity or wanted(event) == "none":
            return None
        case["driver"], case["reset"] = wanted(event), resets(event)
        add(case, code, event.data, own)
    note(case, event.time, line)
    return case


def numbers(case: Case) -> list[int]:
    """Its XIDs, the first one first; without 154, which only tells what to do."""
    return [code for code in map(int, case["codes"]) if code != RECOVERY]


def note(case: Case, time: int, line: str = "") -> None:
    """Takes the time and the text of an event."""
    case["last"], case["fresh"] = max(case["last"], time), case["fresh"] or time
    if line and line not in case["lines"]:
        case["lines"] = [*case["lines"], line[:200]][-_MOST_LINES:]


def add(case: Case, code: int, data: Mapping[str, Any], own: Mapping[int, Level]) -> None:
    """Takes an XID; of those that nobody knows the first ones. own: levels that the site set."""
    if str(code) not in case["codes"] and len(case["codes"]) >= _MOST_CODES and code not in ALL | own.keys():
        return
    name, action, then = (read_text(data.get(key))[:200] for key in ("name", "action", "then"))
    known = case["codes"].get(str(code), [0, "", "", ""])
    times = read_integer(data.get("count"), 0, _MOST_TIMES) or 1
    case["codes"][str(code)] = [known[0] + times, name or known[1], action or known[2], then or known[3]]


def struck(case: Case, entity: str) -> None:
    """Takes another GPU that suffered from it."""
    if entity not in case["others"] and len(case["others"]) < _MOST_OTHERS:
        case["others"].append(entity)


def made_by_programs(case: Case) -> bool:
    """Whether all that is known of it is what a program can do to a GPU."""
    codes = set(numbers(case))
    return bool(codes) and codes <= PROGRAM | COPY | {109} and not any(f[0] == "page" for f in case["facts"].values())


def certain(case: Case) -> bool:
    """Whether it pages whatever comes next; else what belongs to it is waited for."""
    if any(level == "page" and not waits for level, _, waits in case["facts"].values()) or case["reset"]:
        return True
    wanted = case["driver"] is not None and level_of_action(case["driver"]) == "page"
    alone = made_by_programs(case)
    return not alone and (wanted or bool(set(numbers(case)) & PAGE - UNCORRECTED))


def level(case: Case, own: Mapping[int, Level]) -> Level | None:
    """How loud it is; None: it is its job's doing."""
    found = [level_of(numbers(case), own), *(fact[0] for fact in case["facts"].values())]
    driver = level_of_action(case["driver"]) if case["driver"] is not None else "suspect"
    if case["program"] and made_by_programs(case):
        return "ticket" if driver != "suspect" or "page" in found else None
    found += [driver, *(["page"] if case["reset"] else []), *(["ticket"] if case["repeats"] else [])]
    return max(found, key=LEVELS.index)


def of_a_link(case: Case) -> bool:
    """Whether all that is known is a switch's line on a link, which link_nvlink judges with the link's counters."""
    return set(case["facts"]) == {"sxid"} and not case["codes"] and case["driver"] is None and not case["reset"]


def holds(case: Case, at: Level) -> bool:
    """Whether only a reset, a reboot or a person ends it."""
    return at == "page" or (at == "ticket" and (bool(HOLDS & set(numbers(case))) or case["driver"] is not None))


def summary(entity: str, case: Case, own: Mapping[int, Level]) -> str:
    """What happened and what to do first, in a sentence."""
    what = [words for _, words, _ in sorted(case["facts"].values(), key=lambda fact: -LEVELS.index(fact[0]))]
    codes = sorted(numbers(case), key=lambda code: -LEVELS.index(level_of([code], own)))
    if codes:
        rest = f" (with XID {', '.join(map(str, codes[1:]))})" if codes[1:] else ""
        what.insert(0, f"XID {codes[0]} {case['codes'][str(codes[0])][1]}".rstrip() + rest)
    first = advice(case, codes) or ("" if what else "its driver told of an error that has no number")
    return f"{entity}: {'; '.join([*what[:2], *([first] if first else [])])}"


def advice(case: Case, codes: list[int]) -> str:
    """What to do first: as the driver wants it, else as NVIDIA's catalogue says."""
    if case["driver"] is not None:
        because = f"; {case['program']} GPUs of its job erred together, so a program did it" if case["program"] else ""
        told = "" if codes or case["facts"] else ", and told no error of it"
        return f"its driver wants: {case['driver']}{told}{because}"
    if case["reset"]:
        return "the log says that only a reset helps: reset GPU"
    if UNCORRECTED & set(codes) and REMAPPED & set(codes) and not UNCONTAINED & set(codes):
        return "a row of its memory waits to be replaced: drain when its job ends, then reset GPU"
    if HOLDS & set(codes[:1]):
        return "a row of its memory waits to be replaced: reset GPU when its job ends"
    if case["repeats"]:
        return f"{case['repeats']}: run extended diagnostics"
    return f"do first: {case['codes'][str(codes[0])][2]}" if codes and case["codes"][str(codes[0])][2] else ""


def shown(case: Case) -> dict[str, Any]:
    """What a finding shows of it."""
    codes = {code: dict(zip(("times", "name", "action", "then"), c, strict=True)) for code, c in case["codes"].items()}
    facts = [words for _, words, _ in case["facts"].values()]
    told = {"xids": codes, "facts": facts, "driver_wants": case["driver"], "job": case["job"]}
    return {**told, "also_struck": case["others"], "log": case["lines"]}


_RELOAD = 120 * SECOND  # in which a driver is loaded anew: half a minute for 8 GPUs, fourfold; chosen


def reloads(case: Case, cases: Mapping[str, Case], mates: Collection[str], time: int) -> bool:
    """Whether all GPUs of a server went a moment ago without an XID: as a rule its driver is loaded anew."""
    if case["codes"] or "gpu_lost" not in case["facts"] or time - case["last"] > _RELOAD:
        return False
    return len(mates) > 1 and all("gpu_lost" in cases.get(e, {"facts": ()})["facts"] for e in mates)


def is_of_a_gpu(case: Case, cases: Mapping[str, Case], gpus: Collection[str]) -> bool:
    """Whether all that a server tells is that one of its GPUs left the bus."""
    if set(case["facts"]) - levels.PCIE - {"gpu_count"} or case["codes"]:
        return False
    mine = (cases[e] for e in gpus if e in cases)
    return any("79" in c["codes"] or "gpu_lost" in c["facts"] for c in mine)


def lacking(present: int, expected: int, missing: object) -> str:
    """How many GPUs a server has, and which it lacks, in words."""
    named = ", ".join(str(gpu)[:80] for gpu in missing[:16]) if isinstance(missing, list | tuple) else ""
    return f"has {present} of {expected} GPUs{f', without {named}' if named else ''}"


_BURST = 180 * SECOND  # within which XIDs are one burst (NVSentinel)
_MOST = 16  # bursts of a GPU that are remembered; chosen


class Programs:
    """Jobs whose program is blamed, and the lone errors of each GPU within a day.

    blamed: job, or node where no job is known -> onset, last, gpus and codes.
    bursts: GPU -> [time, job, part of the GPU] of each.
    """

    def __init__(self) -> None:
        self.blamed: dict[str, dict[str, Any]] = {}
        self.bursts: dict[str, list[list[Any]]] = {}

    def judge(
        self, cases: Mapping[str, Case], time: int, topology: Topology, settle: int, together: int, again: int
    ) -> None:
        """Marks cases of GPUs of one job that erred together as its program's, and one that errs alone repeatedly.

        settle: us that the lines of one error take.   together, again: windows (us).
        """
        mine: dict[str, list[str]] = {}
        since = min((c["fresh"] for c in cases.values() if c["fresh"]), default=time) - together
        near = {e: c for e, c in cases.items() if c["fresh"] or c["last"] >= since}
        for entity, case in sorted(near.items()):
            if kind_of(entity) == "gpu" and made_by_programs(case):
                mine.setdefault(case["job"] or topology.ancestor_of_kind(entity, "node") or entity, []).append(entity)
        for job, gpus in mine.items():
            fresh = [e for e in gpus if cases[e]["fresh"]]
            first = min((cases[e]["fresh"] for e in fresh), default=time)
            if not fresh or time - first < settle:
                continue
            close_by = self._together(cases, gpus, first, together)
            for entity in fresh:
                if entity in close_by:
                    cases[entity]["program"] = len(close_by)
                else:
                    self._remember(entity, cases[entity], again)
            if close_by:
                codes = sorted({code for e in close_by for code in numbers(cases[e])})
                known = self.blamed.get(job, {"onset": first})
                self.blamed[job] = {**known, "last": time, "gpus": close_by, "codes": codes}

    def _together(self, cases: Mapping[str, Case], gpus: list[str], first: int, together: int) -> list[str]:
        """Those that erred together, if they are several; the one that its driver wants reset is broken itself."""
        near = [e for e in gpus if abs(cases[e]["last"] - first) <= together]
        erred = [e for e in near if set(numbers(cases[e])) - xid_levels.CLEANUP]
        hurt = [e for e in erred if xid_levels.level_of_action(cases[e]["driver"] or "none") == "page"]
        erred = [e for e in erred if len(hurt) != 1 or e not in hurt]
        return [e for e in near if len(hurt) != 1 or e not in hurt] if len(erred) > 1 else []

    def summary(self, job: str) -> str:
        """Who is to blame, in a sentence."""
        program = self.blamed[job]
        codes = ", ".join(map(str, program["codes"]))
        who = "its program" if kind_of(job) == "job" else "a program on it, of no job that is known,"
        return f"{job}: XID {codes} on {len(program['gpus'])} of its GPUs at once: {who} is to blame, no GPU"

    def forget(self, entity: str) -> None:
        """A person said that what is found of it is no fault."""
        self.blamed.pop(entity, None)
        self.bursts.pop(entity, None)

    def over(self, since: int) -> list[str]:
        """Forgets and gives the jobs that have not erred since then."""
        gone = [job for job, program in self.blamed.items() if program["last"] < since]
        for job in gone:
            del self.blamed[job]
        return gone

    def _remember(self, gpu: str, case: Case, again: int) -> None:
        """Notes XIDs of a lone GPU, and whether it had them before under another job or in the same part."""
        now, job, place = case["fresh"], case["job"], case["place"]
        kept = [b for b in self.bursts.pop(gpu, []) if now - b[0] <= again]
        apart = [b for b in kept if now - b[0] > _BURST]
        same = [b for b in apart if place and b[2] == place]
        jobs = {b[1] for b in apart if b[1]} | ({job} if job else set())
        if xid_levels.REPEATING & set(numbers(case)):
            if same:
                case["repeats"] = f"it erred {len(same) + 1} times in {place} within a day"
            elif len(jobs) > 1:
                case["repeats"] = f"it erred under {len(jobs)} jobs within a day, alone each time"
        self.bursts[gpu] = [*kept, [now, job, place]][-_MOST:]  # the newest stands last
        while now - self.bursts[oldest := next(iter(self.bursts))][-1][0] > again:
            del self.bursts[oldest]

    def snapshot(self) -> dict[str, Any]:
        return {"blamed": self.blamed, "bursts": self.bursts}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.blamed, self.bursts = dict(state["blamed"]), dict(state["bursts"])
