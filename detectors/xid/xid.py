"""Finds GPUs and servers whose driver, kernel or BMC says that they broke: XIDs, lost GPUs, machine checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.budget import rule_line
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.event_data import read_duration, read_text
from detectors.base.findings import OpenConditions, due_report, make_evidence
from detectors.base.gates import Gates
from detectors.base.topology_index import JobIndex
from detectors.xid import cases, levels, schedule
from detectors.xid import cases as xid_cases
from detectors.xid import levels as xid_levels
from detectors.xid.cases import Case, Programs
from detectors.xid.schedule import QUIET, REPEATED
from pipeline.model.records import SECOND, Event, Finding, Frame, Level
from pipeline.model.topology import Topology, kind_of

_XIDS = ("xid", "sxid", "recovery_action")
_GPU = ("gpu_lost", "gpu_back", "slow_call", "nvml_refused", "counter_reset")
_HOST = ("kernel", "aer", "sel", "redfish", "gpu_count")
_KINDS = frozenset((*_XIDS, *_GPU, *_HOST))
_CLEARS = "a reset or reboot, the driver's all-clear (recovery action none), the GPU's return, or a person"
_TAKEN = f"was taken away, for nothing was heard of it and its server for {schedule.GONE // SECOND // 3600} h"
_BACK, _WELL, _COUNTED = "was reset or is back", "needs nothing any more, its driver says", "has all of its GPUs again"
_LONG_CALL = 60.0  # s of one call to the driver that are a ticket: ten times its own timeout of 6 s; chosen
_SIGNALS = ("event:xid",)
_STEADY = 60 * SECOND  # after announced work: XIDs need no warm-up; chosen
_LOOKS = 2  # frames in a row in which the driver's state is odd: the event of it comes first; chosen
Own = Mapping[int, Level]


@dataclass
class Xid(Detector):
    """Rules over logged facts: each XID has a level, and what the driver wants done (XID 154) goes before it.

    Page where the catalogue or the driver says reset, reboot or check the cabling, when a GPU is lost, and when a
    server's kernel or BMC tells of a machine check, an uncorrected memory error, a fatal PCIe error or a disk that
    takes no writes; ticket where it says restart, update or replace when it suits. These hold until a reset, a reboot,
    the GPU's return, the driver's all-clear or a person. All that one GPU tells is one condition; what follows from
    another GPU's XID is that one's. XID 48 waits `settle` s for the row that replaces what failed.

    XIDs that programs cause (13, 31, 43, 45, copy engines) on two or more GPUs of one job within `together` s are the
    job's, a suspect; on one GPU again within `again` s, under another job or in the same part of it, they are that
    GPU's, a ticket. `pages`, `tickets` and `suspects` set the level of XIDs otherwise. During announced work nothing
    is louder than a suspect. An XID, or a GPU lost while others of its server answer, that pages whatever comes next is
    reported as it arrives.

    Source: NVIDIA's catalogue of XIDs; repeats as NVSentinel counts them (XID 31 on a GPU, 13 on a GPC and TPC, twice
    in 24 h). `settle` and `together` are chosen: the lines of one error come within milliseconds to a second.
    """

    name: ClassVar[str] = "xid"
    family: ClassVar[str] = "GPU and server faults that are logged"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = ("event:xid",)
    wants: ClassVar[tuple[str, ...]] = (
        *(f"event:{kind}" for kind in (*_XIDS[1:], *_GPU, *_HOST)),
        *("gpu.present", "gpu.recovery_action", "gpu.generation", "node.generation"),
    )
    on_arrival: ClassVar[tuple[str, ...]] = ("xid", "gpu_lost")
    cannot_see: ClassVar[str] = (
        "Faults that nothing logs, such as a server that dies in silence, and whether a lone XID 13 or 31 is the "
        "program's or the GPU's."
    )

    settle: float = 5.0
    together: float = 10.0
    again: float = 86_400.0
    pages: tuple[int, ...] = ()
    tickets: tuple[int, ...] = ()
    suspects: tuple[int, ...] = ()

    cases: dict[str, Case] = notes()
    conditions: OpenConditions = notes()
    odd: NDArray[np.int8] = memory(0, np.int8)
    action: NDArray[np.float64] = memory(0.0)
    gates: Gates = part(Gates)
    programs: Programs = part(Programs)
    _jobs: JobIndex = field(default_factory=JobIndex, init=False, repr=False)
    _looks: schedule.Looks = field(default_factory=schedule.Looks, init=False, repr=False)

    def budget(self) -> list[str]:
        return [rule_line("facts that driver, kernel or BMC logged")]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        if not frames:
            return []
        time, topology = max(f.time for f in frames.values()), next(iter(frames.values())).topology
        self.gates.update(frames)
        found: list[Finding] = []
        events = [e for frame in frames.values() for e in frame.events if e.kind in _KINDS]
        for event in sorted(events, key=lambda e: (e.time, e.entity, e.kind)):
            found += self._take(event, topology, time)
        found += self._look(frames.get("gpu"), time)
        for entity in self._looks.strangers(self.cases, frames, topology):
            found += self._ended(entity, time, schedule.STRANGE)
        if self.cases or self.programs.blamed:
            due = self._looks.due(self.cases, frames, time, lambda node: self._jobs.gpus_of(node, topology))
            found += self._renewed(due, frames, time, topology)
            due = [e for e in due if e in self.cases]
            if any(self.cases[e]["fresh"] for e in due):
                windows = (int(s * SECOND) for s in (self.settle, self.together, self.again))
                self.programs.judge(self.cases, time, topology, *windows)
            found += [f for e in due for f in self._told(e, time, topology)]
            found += [f for j in sorted(self.programs.blamed) for f in self._told_program(j, time)]
            for e in due:
                worked = self.gates.in_maintenance(e, topology, time, _STEADY)
                self._looks.again(e, self.cases[e], self.conditions.get(e), worked, time)
        return found

    def judge_event(self, event: Event, topology: Topology) -> Finding | None:
        """A page if the event is certain by itself; all else is weighed with what is logged beside it."""
        known, case = self.conditions.get(event.entity), xid_cases.of_event(event, self._own)
        if kind_of(event.entity) != "gpu" or case is None or (known is not None and known["level"] == "page"):
            return None
        if not xid_cases.certain(case) or xid_cases.level(case, self._own) != "page":
            return None
        if self.gates.in_maintenance(event.entity, topology, event.time, _STEADY):
            return None
        before = self.cases.get(event.entity)
        goes_on = before is not None and event.time - before["last"] <= REPEATED
        onset = before["onset"] if before is not None and goes_on else event.time
        return self._finding(event.entity, case, event.time, (min(onset, event.time), "page"))

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """Drops its case: what is logged from now on is a new one."""
        super().accept_as_normal(entity, frames)
        self.cases.pop(entity, None)
        for key in (entity, _program(entity)):
            self.conditions.pop(key, None)
        self.programs.forget(entity)

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._looks = schedule.Looks(self.cases)

    def _take(self, event: Event, topology: Topology, time: int) -> list[Finding]:
        if event.kind in _XIDS:
            return self._take_xid(event, topology, time)
        if event.kind in ("gpu_back", "counter_reset"):
            return self._ended(event.entity, time, _BACK) if kind_of(event.entity) == "gpu" else []
        if event.kind == "gpu_count":
            return self._count(event, time)
        gpu = kind_of(event.entity) == "gpu"
        if event.kind == "gpu_lost":
            self._fact(event, event.entity, "gpu_lost", xid_cases.LOST)
        elif event.kind == "slow_call":
            took = read_duration(event.data.get("seconds"))
            slow = took is not None and took >= _LONG_CALL
            level: Level = "ticket" if slow and event.entity not in self.cases else "suspect"
            words = "a call to its driver took long" if took is None else f"a call to its driver took {took:.1f} s"
            self._fact(event, event.entity, "slow_call", (level, words))
        elif event.kind == "nvml_refused":
            self._fact(event, event.entity, "nvml_refused", ("suspect", "refuses calls that it had answered"))
        elif gpu and (known := levels.GPU_PATTERNS.get(str(event.data.get("pattern")))):
            self._fact(event, event.entity, str(event.data["pattern"]), known)
        elif told := levels.told(event):
            kind, level, words = told
            where = event.entity if gpu else topology.ancestor_of_kind(event.entity, "node") or event.entity
            self._fact(event, where, kind, (level, words), kind in levels.PCIE)
        return []

    def _case(self, entity: str, time: int) -> Case:
        """The open case of an entity; one that is long known and hears of more begins anew."""
        case = self.cases.get(entity)
        if case is None or time - case["last"] > REPEATED:
            self.conditions.pop(entity, None)
            before = {} if case is None else {k: case[k] for k in ("codes", "facts", "driver", "reset", "job")}
            case = self.cases[entity] = {**xid_cases.opened(time), **before}
        self._looks.news(entity)
        return case

    def _fact(self, event: Event, entity: str, kind: str, said: tuple[Level, str], waits: bool = False) -> None:
        case = self._case(entity, event.time)
        # what is no fault by itself, such as a call that took as long as the reset did, makes no trouble newer
        time = event.time if said[0] != "suspect" else case["last"]
        xid_cases.note(case, time, read_text(event.data.get("text")))
        case["facts"][kind] = [*said, waits]

    def _take_xid(self, event: Event, topology: Topology, time: int) -> list[Finding]:
        wanted, code = xid_levels.wanted(event), xid_levels.number(event.data, "xid")
        if wanted == "none":
            return self._ended(event.entity, time, _WELL) if event.kind == "recovery_action" or code == 154 else []
        root = event.data.get("root")
        origin = root.get("entity") if isinstance(root, Mapping) else None
        if isinstance(origin, str) and origin != event.entity:
            if origin in self.cases:
                xid_cases.struck(self.cases[origin], event.entity)
            return []
        if event.kind == "sxid":
            words = f"SXid {xid_levels.number(event.data, 'sxid')} {read_text(event.data.get('name'))}".rstrip()
            kind = "fatal_sxid" if event.data.get("fatal") is True else "sxid"
            self._fact(event, event.entity, kind, ("suspect", words))
        elif code is not None or (wanted is not None and kind_of(event.entity) == "gpu"):
            case = self._case(event.entity, event.time)
            xid_cases.note(case, event.time, read_text(event.data.get("text")))
            case["driver"] = wanted if wanted is not None else case["driver"]
            case["reset"] = case["reset"] or xid_levels.resets(event)
            if code is not None:
                xid_cases.add(case, code, event.data, self._own)
                case["place"] = xid_levels.place(event) or case["place"]
            case["job"] = self._jobs.job_on(event.entity, topology) or case["job"]
        return []

    def _count(self, event: Event, time: int) -> list[Finding]:
        """GPUs that a server lacks; where one of them is known to be lost, that is it."""
        present, expected = (xid_levels.number(event.data, key) for key in ("present", "expected"))
        if present is None or expected is None:
            return []
        if present >= expected:
            case = self.cases.get(event.entity)
            return self._ended(event.entity, time, _COUNTED) if case and set(case["facts"]) == {"gpu_count"} else []
        words = cases.lacking(present, expected, event.data.get("missing"))
        self._fact(event, event.entity, "gpu_count", ("page", words), True)
        return []

    def _look(self, frame: Frame | None, time: int) -> list[Finding]:
        """What the driver's states say, so that a lost event costs two frames and no fault."""
        if frame is None or not ({"gpu.present", "gpu.recovery_action"} & set(frame.values)):
            return []
        self.grow(n := len(frame.entities))
        action, absent = frame["gpu.recovery_action"], frame["gpu.present"] == 0
        well = np.flatnonzero((action == 0) & (self.action[:n] > 0)).tolist()
        self.action[:n] = np.where(np.isfinite(action), action, self.action[:n])
        self.odd[:n] = np.where(absent | (action > 0), np.minimum(self.odd[:n] + 1, 3), 0)
        for i in np.flatnonzero(self.odd[:n] == _LOOKS).tolist():
            case = self._case(frame.entities[i], time)
            xid_cases.note(case, time)
            if absent[i]:
                case["facts"].setdefault("gpu_lost", [*xid_cases.LOST, False])
            elif case["driver"] is None:
                case["driver"] = xid_levels.action_named(float(action[i])) or "something that is not known"
        return [f for i in well for f in self._ended(frame.entities[i], time, _WELL)]

    def _renewed(self, due: list[str], frames: Mapping[str, Frame], time: int, topology: Topology) -> list[Finding]:
        """Ends what a reset, a reboot or time has ended."""
        found = []
        for entity in due:
            case = self.cases[entity]
            known = self.conditions.get(entity)
            if self._looks.life(entity, frames, topology) * SECOND > case["last"]:
                found += self._ended(entity, time, _BACK)
            elif case.get("away", 0) > schedule.GONE:
                found += self._ended(entity, time, _TAKEN)
            elif time - case["last"] > QUIET and not case["fresh"] and not _held(case, known):
                del self.cases[entity]
                self.conditions.pop(entity, None)
        for job in self.programs.over(time - QUIET):
            self.conditions.pop(_program(job), None)
        return found

    def _ended(self, entity: str, time: int, why: str) -> list[Finding]:
        """Forgets a case; says so if somebody was told of it."""
        self.cases.pop(entity, None)
        known = self.conditions.pop(entity, None)
        if known is None:
            return []
        summary, told = f"{entity} {why}: what its driver and kernel told is over", make_evidence(why, cleared=True)
        onset = min(known["onset"], time)  # that of a time that stepped back since would lie ahead
        return [Finding(time, onset, entity, self.name, known["level"], 0.0, summary, told, _SIGNALS)]

    def _told(self, entity: str, time: int, topology: Topology) -> list[Finding]:
        case = self.cases[entity]
        waits = case["fresh"] and time - case["fresh"] < self.settle * SECOND
        server = topology.ancestor_of_kind(entity, "node") or ""
        mates = self._jobs.gpus_of(server, topology) if case["facts"] else frozenset()
        if (waits and not xid_cases.certain(case)) or cases.reloads(case, self.cases, mates, time):
            return []
        case["fresh"] = 0
        if xid_cases.of_a_link(case) or (entity == server and cases.is_of_a_gpu(case, self.cases, mates)):
            return []
        level = xid_cases.level(case, self._own)
        if level is None:
            return []
        if self.gates.in_maintenance(entity, topology, time, _STEADY):
            level = "suspect"
        known = self.conditions.get(entity)
        if known and known["level"] == level and time - case["last"] > REPEATED:
            return []  # the Desk keeps what holds
        due = due_report(self.conditions, entity, time, case["onset"], level)
        return [] if due is None else [self._finding(entity, case, time, due)]

    @property
    def _own(self) -> Own:
        return xid_levels.set_by_site(self.suspects, self.tickets, self.pages)

    def _finding(self, entity: str, case: Case, time: int, due: tuple[int, Level]) -> Finding:
        onset, level = due
        holds = xid_cases.holds(case, level)
        more: dict[str, Any] = {"holds": True} if holds else {}
        told = make_evidence(_CLEARS if holds else xid_cases.PASSES, None, **xid_cases.shown(case), **more)
        summary = xid_cases.summary(entity, case, self._own)
        return Finding(time, onset, entity, self.name, level, xid_levels.SCORE[level], summary, told, _SIGNALS)

    def _told_program(self, job: str, time: int) -> list[Finding]:
        program = self.programs.blamed[job]
        due = due_report(self.conditions, _program(job), time, program["onset"], "suspect")
        if due is None:
            return []
        summary = self.programs.summary(job)
        told = make_evidence(xid_cases.PASSES, xids=program["codes"], gpus=program["gpus"][:16])
        return [Finding(time, due[0], job, self.name, due[1], 1.0, summary, told, _SIGNALS)]


def _held(case: Case, known: dict[str, Any] | None) -> bool:
    """Whether somebody was told of a case that only a reset, a reboot or a person ends."""
    return known is not None and xid_cases.holds(case, known["level"])


def _program(job: str) -> str:
    return f"program {job}"
