"""The case of one faulty GPU or server: XIDs and other facts, their level, and whether a program caused them.

A case is plain data, so that it can be stored: see `new_case`. Programs cause XIDs 13, 31, 43, 45, 109 and those of
copy engines on the GPUs of their job together; a GPU causes them alone and repeatedly.

`CaseSchedule` holds when each open case is checked next, so that pages that hold cost nothing between two reports. In
its first hour a case is reported every minute, which costs about 0.1 ms per case at that instant.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.event_data import read_integer, read_text
from detectors.base.findings import REPEAT
from detectors.base.state import State, grown, notes
from detectors.base.topology_index import FramePositions
from detectors.xid.levels import (
    ALL,
    CLEANUP,
    COPY,
    HOLDS,
    NVLINK,
    PAGE,
    PCIE,
    PROGRAM,
    RECOVERY,
    REMAPPED,
    REPEATING,
    UNCONTAINED,
    UNCORRECTED,
    level_of_action,
    level_of_codes,
    rank_codes,
    read_code,
    recovery_action,
    requires_reset,
)
from pipeline.model.entity_names import entity_name, pager_title
from pipeline.model.records import LEVELS, SECOND, Event, Frame, Level
from pipeline.model.topology import Topology, kind_of

Case = dict[str, Any]
PASSES = "ten minutes without another one"
LOST: tuple[Level, str] = ("page", "not responding to its driver")
_MAX_TIMES = 10**6  # in one event
_MAX_CODES = 32  # XIDs of one case, beside those that the catalogue or the site has, which are few; chosen
_MAX_OTHERS = 64  # affected GPUs that are named; chosen
_MAX_LINES = 4  # of the log, kept for the reader of the finding; chosen
_MAX_TEXT, _MAX_NAME = 200, 80  # characters of the text of an event, and of a name in it; chosen
_MAX_MISSING = 16  # missing GPUs that are named; chosen
_RELOAD = 120 * SECOND  # us in which a driver is loaded again: half a minute for 8 GPUs, fourfold; chosen
_BURST = 180 * SECOND  # us within which XIDs are one burst (NVSentinel)
_MAX_BURSTS = 16  # of a GPU that are kept; chosen


def new_case(time: int) -> Case:
    """Returns a case without facts.

    onset, last: its first and newest event.       fresh: the first one that is not judged yet; 0: all are.
    codes: XID as text -> [how often, name, action, then].   facts: other facts -> [level, words, must wait].
    driver: recovery action of the driver.   reset: a line says that only a reset helps.   lines: of the log.
    job: job that was on the GPU.   place: unit of the GPU that an XID 13 named.   others: GPUs that it affected.
    away: us for which it and its node were silent.   short: sources that count fewer GPUs than expected, if any.
    program: GPUs of its job with errors at the same time.   repeats: why it is this GPU and no program.
    """
    empty: Case = {"codes": {}, "facts": {}, "driver": None, "reset": False, "lines": [], "others": [], "away": 0}
    return {**empty, "onset": time, "last": time, "fresh": 0, "job": None, "place": "", "program": 0, "repeats": ""}


def case_of_event(event: Event, own: Mapping[int, Level]) -> Case | None:
    """Returns a case of one event alone: an XID of the GPU's own, or its loss while others of its server respond."""
    case, line = new_case(event.time), read_text(event.data.get("text"))
    if event.kind == "gpu_lost":
        if not read_integer(event.data.get("present"), 0, _MAX_TIMES):
            return None  # all of them together: usually the driver is being reloaded
        case["facts"]["gpu_lost"] = [*LOST, False]
    else:
        root, code = event.data.get("root"), read_code(event.data, "xid")
        origin = root.get("entity") if isinstance(root, Mapping) else event.entity
        if code is None or origin != event.entity or recovery_action(event) == "none":
            return None
        case["driver"], case["reset"] = recovery_action(event), requires_reset(event)
        add_xid(case, code, event.data, own)
    add_event(case, event.time, line)
    return case


def xid_codes(case: Case) -> list[int]:
    """Returns its XIDs, the first one first, without 154, which only names an action."""
    return [code for code in map(int, case["codes"]) if code != RECOVERY]


def add_event(case: Case, time: int, line: str = "") -> None:
    """Adds the time and the text of an event."""
    case["last"], case["fresh"] = max(case["last"], time), case["fresh"] or time
    if line and line not in case["lines"]:
        case["lines"] = [*case["lines"], line[:_MAX_TEXT]][-_MAX_LINES:]


def add_xid(case: Case, code: int, data: Mapping[str, Any], own: Mapping[int, Level]) -> None:
    """Adds an XID; of unknown ones only the first. own: configured levels."""
    if str(code) not in case["codes"] and len(case["codes"]) >= _MAX_CODES and code not in ALL | own.keys():
        return
    name, action, then = (read_text(data.get(key))[:_MAX_TEXT] for key in ("name", "action", "then"))
    known = case["codes"].get(str(code), [0, "", "", ""])
    times = read_integer(data.get("count"), 0, _MAX_TIMES) or 1
    case["codes"][str(code)] = [known[0] + times, name or known[1], action or known[2], then or known[3]]


def add_link_message(case: Case, entity: str, time: int, firsts: dict[str, int], again: int) -> None:
    """Adds a message about an NVLink that nothing else watches; a second one, at least `again` us and at most
    REPEAT_FOR after the first, is a broken link. firsts: GPU -> first message; older ones are dropped."""
    for other in [e for e, first in firsts.items() if not 0 <= time - first <= REPEAT_FOR]:
        del firsts[other]
    if time - firsts.setdefault(entity, time) >= again:
        case["facts"]["nvlink"] = ["page", "NVLink errors recur", False]


def add_affected(case: Case, entity: str) -> None:
    """Adds another GPU that it affected."""
    if entity not in case["others"] and len(case["others"]) < _MAX_OTHERS:
        case["others"].append(entity)


def may_be_a_program(case: Case) -> bool:
    """Returns whether all that is known of it can be caused by a program."""
    codes = set(xid_codes(case))
    return bool(codes) and codes <= PROGRAM | COPY | {109} and not any(f[0] == "page" for f in case["facts"].values())


def is_cleanup(case: Case) -> bool:
    """Returns whether it is only that a process ended, and the driver asks for nothing: no sign of a fault."""
    return set(xid_codes(case)) <= CLEANUP and may_be_a_program(case) and case["driver"] is None


def is_certain(case: Case) -> bool:
    """Returns whether it pages regardless of later events; otherwise it waits for related events."""
    if any(level == "page" and not waits for level, _, waits in case["facts"].values()) or case["reset"]:
        return True
    wanted = case["driver"] is not None and level_of_action(case["driver"]) == "page"
    return not may_be_a_program(case) and (wanted or bool(set(xid_codes(case)) & PAGE - UNCORRECTED))


def case_level(case: Case, own: Mapping[int, Level]) -> Level | None:
    """Returns its level; None: its job caused it. own: configured levels."""
    found: list[Level] = [level_of_codes(xid_codes(case), own), *(fact[0] for fact in case["facts"].values())]
    driver = level_of_action(case["driver"]) if case["driver"] is not None else "suspect"
    if case["program"] and may_be_a_program(case):
        if any(own.get(code, "suspect") != "suspect" for code in CLEANUP & set(xid_codes(case))):
            return found[0]
        return "ticket" if driver != "suspect" or "page" in found else None
    found.append("page" if case["reset"] else "ticket" if case["repeats"] else driver)
    found.append(driver)
    return max(found, key=LEVELS.index)


def is_link_only(case: Case) -> bool:
    """Returns whether it is only a switch's message about a link, which link_nvlink judges with its counters."""
    return set(case["facts"]) == {"sxid"} and is_of_switch(case)


def is_of_switch(case: Case) -> bool:
    """Returns whether it is only what switches of a node reported, fatal or not."""
    said_more = case["codes"] or case["driver"] is not None or case["reset"]
    return set(case["facts"]) <= {"sxid", "fatal_sxid"} and not said_more


def is_broken_link(case: Case) -> bool:
    """Returns whether all that is known of a GPU is that messages about its NVLinks recur."""
    return set(case["facts"]) == {"nvlink"} and set(xid_codes(case)) <= NVLINK and not (case["driver"] or case["reset"])


def quiet_for(case: Case) -> int:
    """Returns the us after its last event when a case that is not latched is over: as long as a message may recur."""
    return REPEAT_FOR if is_broken_link(case) else QUIET_FOR


def describe_end(case: Case) -> str:
    """Returns what ends a case that is not latched."""
    return "an hour without another one, or a reset" if is_broken_link(case) else PASSES


def is_latched(case: Case, at: Level) -> bool:
    """Returns whether only a reset, a reboot or a person ends it. at: its level."""
    if is_broken_link(case):
        return False
    return at == "page" or (at == "ticket" and (bool(HOLDS & set(xid_codes(case))) or case["driver"] is not None))


def describe_case(entity: str, case: Case, own: Mapping[int, Level]) -> str:
    """Returns a title: what happened, and the first step, for which further facts and the name of the XID give way."""
    facts = [words for _, words, _ in sorted(case["facts"].values(), key=lambda fact: -LEVELS.index(fact[0]))]
    codes = rank_codes(xid_codes(case), own)
    number = [f"XID {codes[0]}"] if codes else []
    xid = [f"{number[0]} {case['codes'][str(codes[0])][1]}".rstrip()] if codes else []
    others = f" (also XID {', '.join(map(str, codes[1:]))})" if codes[1:] else ""
    step, repeats = first_step(case, codes), [case["repeats"]] if case["repeats"] else []
    if not xid and not facts:
        return pager_title(entity, f"driver requests: {step}" if step else "driver error without a number")
    whole = [*(x + others for x in xid), *facts][:2] + repeats
    brief = (xid or facts[:1], number)
    shorter = ([*xid, *facts][:2] + repeats, *(said + repeats for said in brief), *brief)
    texts = [f"{', '.join(said)}: {step}" for said in (whole, *shorter) if said and step]
    fitting = (text for text in texts if pager_title(entity, text).endswith(text))
    return pager_title(entity, next(fitting, ", ".join(whole)))


def first_step(case: Case, codes: list[int]) -> str:
    """Returns the first step: the driver's recovery action, else that of NVIDIA's catalogue; empty without either."""
    if case["driver"] is not None:
        return str(case["driver"])
    if case["reset"]:
        return "reset GPU"
    if UNCORRECTED & set(codes) and REMAPPED & set(codes) and not UNCONTAINED & set(codes):
        return "drain, then reset GPU"
    if HOLDS & set(codes[:1]):
        return "reset GPU after its job"
    if case["repeats"]:
        return "run extended diagnostics"
    return str(case["codes"][str(codes[0])][2]) if codes else ""


def case_evidence(case: Case) -> dict[str, Any]:
    """Returns what a finding shows of it."""
    codes = {code: dict(zip(("times", "name", "action", "then"), c, strict=True)) for code, c in case["codes"].items()}
    facts = [words for _, words, _ in case["facts"].values()]
    known = {"xids": codes, "facts": facts, "driver_wants": case["driver"], "job": case["job"]}
    return {**known, "also_struck": case["others"], "log": case["lines"]}


def is_driver_reload(case: Case, cases: Mapping[str, Case], mates: Collection[str], time: int) -> bool:
    """Returns whether all GPUs of a server just disappeared without an XID: usually its driver is being reloaded.

    mates: GPUs of the server.
    """
    if case["codes"] or "gpu_lost" not in case["facts"] or time - case["last"] > _RELOAD:
        return False
    return len(mates) > 1 and all("gpu_lost" in cases.get(e, {"facts": ()})["facts"] for e in mates)


def is_explained_by_gpu(case: Case, cases: Mapping[str, Case], gpus: Collection[str]) -> bool:
    """Returns whether all that a server reports is that one of its GPUs left the bus."""
    if set(case["facts"]) - PCIE - {"gpu_count"} or case["codes"]:
        return False
    mine = (cases[e] for e in gpus if e in cases)
    return any("79" in c["codes"] or "gpu_lost" in c["facts"] for c in mine)


def describe_gpu_count(present: int, expected: int, missing: object) -> str:
    """Returns how many GPUs a server has, and which are missing."""
    names = missing[:_MAX_MISSING] if isinstance(missing, list | tuple) else ()
    named = ", ".join(str(gpu)[:_MAX_NAME] for gpu in names)
    return f"{present} of {expected} GPUs present{f', missing {named}' if named else ''}"


@dataclass
class ProgramFaults(State):
    """Jobs whose program is blamed, and the lone errors of each GPU within a day.

    blamed: job, or node where no job is known -> onset, last, gpus and codes.
    bursts: GPU -> [time, job, unit of the GPU] of each.
    """

    blamed: dict[str, dict[str, Any]] = notes()
    bursts: dict[str, list[list[Any]]] = notes()

    def assign_blame(
        self, cases: Mapping[str, Case], time: int, topology: Topology, settle: int, together: int, again: int
    ) -> None:
        """Marks cases of GPUs of one job with errors together as its program's, and a GPU that repeats them alone.

        A process that ended (XID 43, 45) is its job's on any number of GPUs; the job is blamed for it unless another
        error of the job explains its end.
        settle: us that the lines of one error take.   together, again: windows (us).
        """
        mine: dict[str, list[str]] = {}
        since = min((c["fresh"] for c in cases.values() if c["fresh"]), default=time) - max(together, _BURST)
        near = {e: c for e, c in cases.items() if c["fresh"] or c["last"] >= since}
        for entity, case in sorted(near.items()):
            if kind_of(entity) == "gpu" and may_be_a_program(case):
                mine.setdefault(_job_of(entity, case, topology), []).append(entity)
        broken = {_job_of(e, case, topology) for e, case in near.items() if not may_be_a_program(case)}
        for job, gpus in mine.items():
            fresh = [e for e in gpus if cases[e]["fresh"]]
            first = min((cases[e]["fresh"] for e in fresh), default=time)
            if not fresh or time - first < settle:
                continue
            close_by = _erred_together(cases, gpus, first, together)
            ended = [e for e in gpus if is_cleanup(cases[e]) and abs(cases[e]["last"] - first) <= _BURST]
            if len(gpus) == 1 and cases[gpus[0]]["job"] is None:
                ended = []  # nobody else's process is known to have ended
            if ended == gpus and job not in broken:
                close_by = ended
            for entity in {*fresh, *ended}:
                cases[entity]["program"] = max(len(close_by), 1) if entity in (*close_by, *ended) else 0
            for entity in fresh:
                if not cases[entity]["program"]:
                    self._record_burst(entity, cases[entity], again)
            if close_by:
                self._blame(job, cases, close_by, first, time)

    def describe(self, job: str) -> str:
        """Returns a title of a job, or of a node, whose program is blamed."""
        program = self.blamed[job]
        codes, gpus = ", ".join(map(str, program["codes"])), program["gpus"]
        where = f"{len(gpus)} GPUs together" if len(gpus) > 1 else entity_name(gpus[0])
        ended = set(program["codes"]) <= CLEANUP
        return pager_title(job, f"XID {codes} on {where}, {'a process that ended' if ended else 'a program error'}")

    def _blame(self, job: str, cases: Mapping[str, Case], gpus: list[str], first: int, time: int) -> None:
        """Records that the program of a job caused the XIDs of some GPUs."""
        codes = sorted({code for e in gpus for code in xid_codes(cases[e])})
        known = self.blamed.get(job, {"onset": first})
        self.blamed[job] = {**known, "last": time, "gpus": gpus, "codes": codes}

    def drop_entity(self, entity: str) -> None:
        """Drops the records of an entity."""
        self.blamed.pop(entity, None)
        self.bursts.pop(entity, None)

    def drop_ended(self, since: int) -> list[str]:
        """Drops and returns the jobs without errors since then."""
        gone = [job for job, program in self.blamed.items() if program["last"] < since]
        for job in gone:
            del self.blamed[job]
        return gone

    def _record_burst(self, gpu: str, case: Case, again: int) -> None:
        """Adds XIDs of a lone GPU, and notes whether it had them before under another job or in the same unit."""
        now, job, unit = case["fresh"], case["job"], case["place"]
        kept = [b for b in self.bursts.pop(gpu, []) if now - b[0] <= again]
        apart = [b for b in kept if now - b[0] > _BURST]
        same = [b for b in apart if unit and b[2] == unit]
        jobs = {b[1] for b in apart if b[1]} | ({job} if job else set())
        if REPEATING & set(xid_codes(case)):
            if same:
                case["repeats"] = f"{len(same) + 1} times in {unit} in 24 h"
            elif len(jobs) > 1:
                case["repeats"] = f"under {len(jobs)} jobs in 24 h"
        self.bursts[gpu] = [*kept, [now, job, unit]][-_MAX_BURSTS:]  # the newest is last
        while now - self.bursts[oldest := next(iter(self.bursts))][-1][0] > again:
            del self.bursts[oldest]


def _job_of(entity: str, case: Case, topology: Topology) -> str:
    """Returns the job of a case, else its node, else itself."""
    return case["job"] or topology.ancestor_of_kind(entity, "node") or entity


def _erred_together(cases: Mapping[str, Case], gpus: list[str], first: int, together: int) -> list[str]:
    """Returns the GPUs with errors together, if they are several, without the only one that needs a reset itself."""
    near = [e for e in gpus if abs(cases[e]["last"] - first) <= together]
    erred = [e for e in near if set(xid_codes(cases[e])) - CLEANUP]
    broken = [e for e in erred if level_of_action(cases[e]["driver"] or "none") == "page"]
    erred = [e for e in erred if len(broken) != 1 or e not in broken]
    return [e for e in near if len(broken) != 1 or e not in broken] if len(erred) > 1 else []


QUIET_FOR = 600 * SECOND
"""us after which a condition that is not latched is over, as for the Desk."""
REPEAT_FOR = 3600 * SECOND
"""us for which a condition that holds is reported again; the Desk keeps it open; chosen."""
SWEEP_EVERY = 3600 * SECOND
"""us between two checks of all cases; chosen: a 72nd of GONE_AFTER."""
GONE_AFTER = 72 * 3600 * SECOND
"""us of silence after which an entity, and its server with it, counts as removed; chosen: a long weekend."""
MAX_UNKNOWN = 1000
"""Open cases of entities that are in no frame and no topology: a log may name any number; chosen."""


class CaseSchedule:
    """Which cases are due. It is derived from cases and frames: a new one checks every case once."""

    def __init__(self, open_cases: Iterable[str] = ()) -> None:
        self._at: dict[str, int] = {}
        self._queue: list[tuple[int, str]] = []
        self._touched: set[str] = set()
        self._unknown: set[str] = set()  # touched entities that were in no topology
        self._time = self._swept = 0
        self._generations: dict[str, NDArray[np.float64]] = {}
        self._positions = {"gpu": FramePositions(), "node": FramePositions()}
        for entity in open_cases:
            self.schedule_now(entity)

    def schedule_now(self, entity: str) -> None:
        """Schedules a case that has changed for this instant."""
        self._touched.add(entity)
        self.schedule(entity, 0)

    def schedule(self, entity: str, time: int) -> None:
        """Schedules a case for `time`, and not before unless it changes."""
        self._at[entity] = time
        heapq.heappush(self._queue, (time, entity))

    def pop_due(
        self,
        open_cases: Mapping[str, Case],
        frames: Mapping[str, Frame],
        time: int,
        gpus: Callable[[str], Collection[str]],
    ) -> list[str]:
        """Returns the cases to check now; all of them where the time steps back. gpus: returns those of a server."""
        if time < self._time:
            self._swept, self._queue, self._at = min(self._swept, time), [], {}
            for entity in open_cases:
                self.schedule(entity, 0)
        self._time, found = time, set[str]()
        for entity in self._find_restarted(frames):
            found |= {entity, *gpus(entity)} if kind_of(entity) == "node" else {entity}
        while self._queue and self._queue[0][0] <= time:
            at, entity = heapq.heappop(self._queue)
            if self._at.get(entity) == at:
                del self._at[entity]
                found.add(entity)
        return sorted(open_cases) if self._sweep(open_cases, frames, time) else sorted(found & open_cases.keys())

    def find_unknown(
        self, open_cases: Mapping[str, Case], frames: Mapping[str, Frame], topology: Topology
    ) -> list[str]:
        """Returns cases to end: the oldest of entities in no frame and no topology, if there are too many of them."""
        new = {entity for entity in self._touched if entity not in topology.parents}
        self._touched.clear()
        self._unknown.update(new)
        if not new or len(self._unknown) <= MAX_UNKNOWN:
            return []
        known = set(topology.parents).union(*(f.entities for f in frames.values()))
        unknown = [e for e in open_cases if e in self._unknown and e not in known]
        self._unknown = set(unknown[-MAX_UNKNOWN:])
        return unknown[:-MAX_UNKNOWN]

    def reschedule(
        self, entity: str, case: Case, known: Mapping[str, Any] | None, maintenance: bool, time: int
    ) -> None:
        """Schedules the next check of a case, which may grow, be reported or end; a latched one waits for events.

        known: its open condition.   maintenance: it is in maintenance, after which its level may rise.
        """
        over = case["last"] + quiet_for(case) + 1
        if known is None and not case["fresh"] and is_link_only(case):
            self.schedule(entity, over)
        elif case["fresh"] or known is None or (maintenance and known["level"] != "page"):
            self.schedule(entity, time + 1)
        elif time - case["last"] <= REPEAT_FOR:
            repeat = known["reported"] + REPEAT
            self.schedule(entity, repeat if is_latched(case, known["level"]) else min(repeat, over))

    def generation_start(self, entity: str, frames: Mapping[str, Frame], topology: Topology) -> float:
        """Returns when the counters of a GPU or its server last started; NaN or 0 if that is not reported."""
        node = topology.ancestor_of_kind(entity, "node") or ""
        own = 0.0
        if kind_of(entity) == "gpu":
            own = self._positions["gpu"].value(frames.get("gpu"), "gpu.generation", entity)
        return float(np.fmax(own, self._positions["node"].value(frames.get("node"), "node.generation", node)))

    def _find_restarted(self, frames: Mapping[str, Frame]) -> Iterator[str]:
        """Yields GPUs and nodes whose counters started again since the last instant."""
        for device_class in ("gpu", "node"):
            frame = frames.get(device_class)
            if frame is None or f"{device_class}.generation" not in frame.values:
                continue
            now = frame[f"{device_class}.generation"]
            known = grown(self._generations.get(device_class, np.empty(0)), len(now), np.nan)
            changed = ~np.isnan(now) & (now != known[: len(now)])
            known[: len(now)][changed] = now[changed]
            self._generations[device_class] = known
            yield from (frame.entities[i] for i in np.flatnonzero(changed).tolist())

    def _sweep(self, open_cases: Mapping[str, Case], frames: Mapping[str, Frame], time: int) -> bool:
        """Returns whether all cases are due; if so, adds to each how long it and its node have been silent."""
        self._swept = self._swept or time
        since = time - self._swept
        if since < SWEEP_EVERY:
            return False
        self._swept = time
        measured = {e for frame in frames.values() for e in _measured_entities(frame)}
        if not measured:
            return False
        topology = next(iter(frames.values())).topology
        for entity, case in open_cases.items():
            alive = entity in measured or topology.ancestor_of_kind(entity, "node") in measured
            case["away"] = 0 if alive else case.get("away", 0) + min(since, 2 * SWEEP_EVERY)
        return True


def _measured_entities(frame: Frame) -> Iterator[str]:
    """Yields the entities with any value in the frame."""
    measured = np.zeros(len(frame.entities), bool)
    for column in frame.values.values():
        values: NDArray[Any] = np.asarray(column)
        measured[: len(values)] |= ~np.isnan(values)
    return (frame.entities[i] for i in np.flatnonzero(measured).tolist())
