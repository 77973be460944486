"""Finds GPUs and servers with faults that their driver, kernel or BMC reports: XIDs, lost GPUs, machine checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import detectors.xid.cases as xid_cases
import detectors.xid.levels as levels
from detectors.base.budget import rule_line
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.event_data import events_of, read_duration, read_text
from detectors.base.findings import OpenConditions, due_report, make_evidence
from detectors.base.gates import Gates
from detectors.base.job_index import JobIndex
from detectors.xid.cases import GONE_AFTER, MAX_UNKNOWN, QUIET_FOR, REPEAT_FOR, Case, CaseSchedule, ProgramFaults
from pipeline.model.entity_names import pager_title, short_duration
from pipeline.model.records import SECOND, Event, Finding, Frame, Level
from pipeline.model.topology import Topology, kind_of

_XIDS = ("xid", "sxid", "recovery_action")
_GPU = ("gpu_lost", "gpu_back", "slow_call", "nvml_refused", "counter_reset")
_HOST = ("kernel", "aer", "sel", "redfish", "gpu_count")
_KINDS = frozenset((*_XIDS, *_GPU, *_HOST))
_SIGNALS = ("event:xid",)
_CLEARS = "a reset or reboot, the recovery action none of the driver, the GPU's return, or a person"
_WHY_RESET, _WHY_ALL_CLEAR, _WHY_COMPLETE = "reset or back", "the driver needs no action any more", "all GPUs present"
_WHY_REMOVED = f"removed, no data for {GONE_AFTER // SECOND // 3600} h"
_WHY_UNKNOWN = f"dropped, more than {MAX_UNKNOWN} cases of unknown entities"
_SLOW_CALL_S = 60.0  # s of one call to the driver that are a ticket: ten times its own timeout of 6 s; chosen
_SETTLES = 60 * SECOND  # us after announced maintenance: XIDs need no warm-up; chosen
_LINK_AGAIN = 30 * SECOND  # us from which a driver's next message about a link is another burst, as in link_nvlink
_KEPT = ("codes", "facts", "driver", "reset", "job", "short")  # of a case that begins again
_CONFIRM_FRAMES = 2  # in a row in which the driver reports a fault: the event of it comes first; chosen
_MAX_GPUS = 16  # of a blamed program that are named; chosen


@dataclass
class Xid(Detector):
    """Rules over logged facts: each XID has a level, and the recovery action of the driver (XID 154) precedes it.

    Page where the catalogue or the driver says reset, reboot or check the cabling, when a GPU is lost, and when a
    server's kernel or BMC reports a machine check, an uncorrected memory error, a fatal PCIe error or a disk that takes
    no writes; ticket where it says restart, update or replace at a convenient time. These hold until a reset, a reboot,
    the GPU's return, the recovery action "none" of the driver, or a person ends them. All reports of one GPU are one
    condition; consequences of another GPU's XID belong to that GPU. XID 48 waits `settle` s for the row that replaces
    what failed. An XID of an NVLink is left to link_nvlink, which has the counters of the links; where none is read,
    one that recurs after half a minute and within an hour is a page here until an hour is quiet, and so is a fatal one
    of a switch, until a reset.

    XIDs that programs cause (13, 31, copy engines) on two or more GPUs of one job within `together` s belong to the
    job, a suspect; on one GPU again within `again` s, under another job or in the same unit of it, to that GPU, a
    ticket. A process that ended (43, 45) is a suspect of its job on any number of GPUs, and nothing where another error
    of the job explains it. `pages`, `tickets` and `suspects` set the level of XIDs otherwise. During announced
    maintenance nothing is above a suspect. An XID that always pages is reported as it arrives; so is a GPU that is lost
    while others of its server respond.

    Source: NVIDIA's catalogue of XIDs; repeats as NVSentinel counts them (XID 31 on a GPU, 13 on a GPC and TPC, twice
    in 24 h). `settle` and `together` are chosen: the lines of one error come within milliseconds to a second.
    """

    name: ClassVar[str] = "xid"
    family: ClassVar[str] = "GPU and server faults that are logged"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = ("event:xid",)
    wants: ClassVar[tuple[str, ...]] = (
        *(f"event:{kind}" for kind in (*_XIDS[1:], *_GPU, *_HOST)),
        *("gpu.present", "gpu.recovery_action", "gpu.generation", "node.generation", "nvlink.state"),
    )
    on_arrival: ClassVar[tuple[str, ...]] = ("xid", "gpu_lost")
    cannot_see: ClassVar[str] = (
        "Faults that are not logged, such as a server that stops without a message, and whether a lone XID 13 or 31 is "
        "the program's or the GPU's."
    )

    settle: float = 5.0
    together: float = 10.0
    again: float = 86_400.0
    pages: tuple[int, ...] = ()
    tickets: tuple[int, ...] = ()
    suspects: tuple[int, ...] = ()

    cases: dict[str, Case] = notes()
    conditions: OpenConditions = notes()
    resets: dict[str, list[int]] = notes()  # GPU -> its worst XID and the time of the reset, within an hour
    link_errors: dict[str, int] = notes()  # GPU -> first message about a link that nothing reads, within an hour
    reads_nvlinks: bool = notes(bool)  # so that the detector link_nvlink judges them
    odd: NDArray[np.int8] = memory(0, np.int8)  # frames in a row in which the driver reported a fault
    action: NDArray[np.float64] = memory(0.0)
    gates: Gates = part(Gates)
    programs: ProgramFaults = part(ProgramFaults)
    _jobs: JobIndex = field(default_factory=JobIndex, init=False, repr=False)
    _schedule: CaseSchedule = field(default_factory=CaseSchedule, init=False, repr=False)

    def budget(self) -> list[str]:
        """Returns that it has no statistical test."""
        return [rule_line("facts that driver, kernel or BMC logged")]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings of GPUs, servers and jobs, and of conditions that ended."""
        if not frames:
            return []
        time, topology = max(f.time for f in frames.values()), next(iter(frames.values())).topology
        self.gates.update(frames)
        if not self.reads_nvlinks and "nvlink" in frames:
            self.reads_nvlinks = bool(np.isfinite(frames["nvlink"]["nvlink.state"]).any())
        found: list[Finding] = []
        for event in sorted(events_of(frames, *_KINDS), key=lambda e: (e.time, e.entity, e.kind)):
            found += self._apply_event(event, topology, time)
        found += self._check_gpus(frames.get("gpu"), time)
        for entity in self._schedule.find_unknown(self.cases, frames, topology):
            found += self._close_case(entity, time, _WHY_UNKNOWN)
        if self.cases or self.programs.blamed:
            due = self._schedule.pop_due(self.cases, frames, time, lambda node: self._jobs.gpus_of(node, topology))
            found += self._end_cases(due, frames, time, topology)
            due = [e for e in due if e in self.cases]
            if any(self.cases[e]["fresh"] for e in due):
                windows = (int(s * SECOND) for s in (self.settle, self.together, self.again))
                self.programs.assign_blame(self.cases, time, topology, *windows)
            found += [f for e in due for f in self._report_case(e, time, topology)]
            found += [f for j in sorted(self.programs.blamed) for f in self._report_program(j, time)]
            for e in due:
                maintenance = self.gates.in_maintenance(e, topology, time, _SETTLES)
                self._schedule.reschedule(e, self.cases[e], self.conditions.get(e), maintenance, time)
        return found

    def judge_event(self, event: Event, topology: Topology) -> Finding | None:
        """Returns a page if the event is certain by itself; other events are judged with those around them."""
        known, case = self.conditions.get(event.entity), xid_cases.case_of_event(event, self._site_levels)
        if kind_of(event.entity) != "gpu" or case is None or (known is not None and known["level"] == "page"):
            return None
        if not xid_cases.is_certain(case) or xid_cases.case_level(case, self._site_levels) != "page":
            return None
        if self.gates.in_maintenance(event.entity, topology, event.time, _SETTLES):
            return None
        before = self.cases.get(event.entity)
        goes_on = before is not None and event.time - before["last"] <= REPEAT_FOR
        onset = before["onset"] if before is not None and goes_on else event.time
        return self._case_finding(event.entity, case, event.time, (min(onset, event.time), "page"))

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """Drops its case: later events open a new one."""
        super().accept_as_normal(entity, frames)
        self.cases.pop(entity, None)
        for key in (entity, _program_key(entity)):
            self.conditions.pop(key, None)
        self.programs.drop_entity(entity)

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `State.restore`; the schedule is derived again."""
        super().restore(state)
        self._schedule = CaseSchedule(self.cases)

    @property
    def _site_levels(self) -> Mapping[int, Level]:
        return levels.site_levels(self.suspects, self.tickets, self.pages)

    def _apply_event(self, event: Event, topology: Topology, time: int) -> list[Finding]:
        if event.kind in _XIDS:
            return self._apply_xid(event, topology, time)
        if event.kind in ("gpu_back", "counter_reset"):
            return self._close_reset(event.entity, topology, time) if kind_of(event.entity) == "gpu" else []
        if event.kind == "gpu_count":
            return self._apply_gpu_count(event, time)
        gpu = kind_of(event.entity) == "gpu"
        if event.kind == "gpu_lost":
            self._add_fact(event, event.entity, "gpu_lost", xid_cases.LOST)
        elif event.kind == "slow_call":
            took = read_duration(event.data.get("seconds"))
            slow = took is not None and took >= _SLOW_CALL_S
            level: Level = "ticket" if slow and event.entity not in self.cases else "suspect"
            self._add_fact(event, event.entity, "slow_call", (level, self._describe_call(event, took)))
        elif event.kind == "nvml_refused":
            self._add_fact(event, event.entity, "nvml_refused", ("suspect", "refuses NVML calls that worked before"))
        elif gpu and (known := levels.GPU_PATTERNS.get(str(event.data.get("pattern")))):
            self._add_fact(event, event.entity, str(event.data["pattern"]), known)
        elif fault := levels.host_fault(event):
            kind, level, words = fault
            where = event.entity if gpu else topology.ancestor_of_kind(event.entity, "node") or event.entity
            self._add_fact(event, where, kind, (level, words), kind in levels.PCIE)
        return []

    def _describe_call(self, event: Event, took: float | None) -> str:
        """Returns the words for a slow call of the driver. One that began before a reset ends with it: then with the
        XID for which the GPU was reset."""
        words = "slow driver call" if took is None else f"driver call of {short_duration(took)}"
        code, at = self.resets.get(event.entity, [0, 0])
        if took is None or event.entity in self.cases or event.time - took * SECOND > at:
            return words
        return f"XID {code} and a {words}, then reset"

    def _open_case(self, entity: str, time: int) -> Case:
        """Returns the case of an entity; after REPEAT_FOR without an event it begins again, with the facts before."""
        case = self.cases.get(entity)
        if case is None or time - case["last"] > REPEAT_FOR:
            self.conditions.pop(entity, None)
            before = {} if case is None else {k: case[k] for k in _KEPT if k in case}
            case = self.cases[entity] = {**xid_cases.new_case(time), **before}
        self._schedule.schedule_now(entity)
        return case

    def _add_fact(self, event: Event, entity: str, kind: str, fact: tuple[Level, str], waits: bool = False) -> None:
        case = self._open_case(entity, event.time)
        # a suspect, such as a call that took as long as the reset did, makes no trouble newer
        time = event.time if fact[0] != "suspect" else case["last"]
        xid_cases.add_event(case, time, read_text(event.data.get("text")))
        case["facts"][kind] = [*fact, waits]

    def _apply_xid(self, event: Event, topology: Topology, time: int) -> list[Finding]:
        wanted, code = levels.recovery_action(event), levels.read_code(event.data, "xid")
        if wanted == "none":
            all_clear = event.kind == "recovery_action" or code == levels.RECOVERY
            return self._close_case(event.entity, time, _WHY_ALL_CLEAR) if all_clear else []
        root = event.data.get("root")
        origin = root.get("entity") if isinstance(root, Mapping) else None
        if isinstance(origin, str) and origin != event.entity:
            if origin in self.cases:
                xid_cases.add_affected(self.cases[origin], event.entity)
            return []
        if event.kind == "sxid":
            words = f"SXid {levels.read_code(event.data, 'sxid')} {read_text(event.data.get('name'))}".rstrip()
            fatal = event.data.get("fatal") is True
            level: Level = "page" if fatal and not self.reads_nvlinks else "suspect"
            self._add_fact(event, event.entity, "fatal_sxid" if fatal else "sxid", (level, words))
        elif code is not None or (wanted is not None and kind_of(event.entity) == "gpu"):
            case = self._open_case(event.entity, event.time)
            xid_cases.add_event(case, event.time, read_text(event.data.get("text")))
            case["driver"] = wanted if wanted is not None else case["driver"]
            case["reset"] = case["reset"] or levels.requires_reset(event)
            if code is not None:
                xid_cases.add_xid(case, code, event.data, self._site_levels)
                case["place"] = levels.faulty_unit(event) or case["place"]
                if code in levels.NVLINK and not self.reads_nvlinks:
                    xid_cases.add_link_message(case, event.entity, event.time, self.link_errors, _LINK_AGAIN)
            case["job"] = self._jobs.job_on(event.entity, topology) or case["job"]
        return []

    def _apply_gpu_count(self, event: Event, time: int) -> list[Finding]:
        """Adds GPUs that a server lacks; a GPU of it that is known to be lost explains them. Ends when bus and driver,
        of which one may see more than the other, each count enough."""
        present, expected = (levels.read_code(event.data, key) for key in ("present", "expected"))
        if present is None or expected is None:
            return []
        source, case = "nvml" if event.data.get("source") == "nvml" else "pci", self.cases.get(event.entity)
        if present >= expected:
            if case is None or set(case["facts"]) != {"gpu_count"}:
                return []
            case["short"] = [other for other in case.get("short", ()) if other != source]
            return [] if case["short"] else self._close_case(event.entity, time, _WHY_COMPLETE)
        words = xid_cases.describe_gpu_count(present, expected, event.data.get("missing"))
        self._add_fact(event, event.entity, "gpu_count", ("page", words), True)
        case = self.cases[event.entity]
        case["short"] = sorted({*case.get("short", ()), source})
        return []

    def _check_gpus(self, frame: Frame | None, time: int) -> list[Finding]:
        """Reads the driver's states, so that a lost event delays a fault by two frames only."""
        if frame is None or not ({"gpu.present", "gpu.recovery_action"} & set(frame.values)):
            return []
        self.grow(n := len(frame.entities))
        action, absent = frame["gpu.recovery_action"], frame["gpu.present"] == 0
        cleared = np.flatnonzero((action == 0) & (self.action[:n] > 0)).tolist()
        self.action[:n] = np.where(np.isfinite(action), action, self.action[:n])
        self.odd[:n] = np.where(absent | (action > 0), np.minimum(self.odd[:n] + 1, _CONFIRM_FRAMES + 1), 0)
        for i in np.flatnonzero(self.odd[:n] == _CONFIRM_FRAMES).tolist():
            case = self._open_case(frame.entities[i], time)
            xid_cases.add_event(case, time)
            if absent[i]:
                case["facts"].setdefault("gpu_lost", [*xid_cases.LOST, False])
            elif case["driver"] is None:
                case["driver"] = levels.action_name(float(action[i])) or "unknown action"
        return [f for i in cleared for f in self._close_case(frame.entities[i], time, _WHY_ALL_CLEAR)]

    def _end_cases(self, due: list[str], frames: Mapping[str, Frame], time: int, topology: Topology) -> list[Finding]:
        """Ends cases after a reset, a reboot or a quiet time."""
        found = []
        for entity in due:
            case = self.cases[entity]
            known = self.conditions.get(entity)
            latched = known is not None and xid_cases.is_latched(case, known["level"])
            if self._schedule.generation_start(entity, frames, topology) * SECOND > case["last"]:
                found += self._close_case(entity, time, _WHY_RESET)
            elif case.get("away", 0) > GONE_AFTER:
                found += self._close_case(entity, time, _WHY_REMOVED)
            elif time - case["last"] > xid_cases.quiet_for(case) and not case["fresh"] and not latched:
                del self.cases[entity]
                self.conditions.pop(entity, None)
        for job in self.programs.drop_ended(time - QUIET_FOR):
            self.conditions.pop(_program_key(job), None)
        return found

    def _close_case(self, entity: str, time: int, why: str) -> list[Finding]:
        """Drops a case; returns its end if it was reported."""
        case = self.cases.pop(entity, None)
        if why == _WHY_RESET and case is not None and (codes := xid_cases.xid_codes(case)):
            kept = {gpu: reset for gpu, reset in self.resets.items() if 0 <= time - reset[1] <= REPEAT_FOR}
            self.resets = {**kept, entity: [levels.rank_codes(codes, self._site_levels)[0], time]}
        known = self.conditions.pop(entity, None)
        if known is None:
            return []
        onset = min(known["onset"], time)  # the clock may have gone back since
        summary, evidence = pager_title(entity, f"{why}, earlier faults are over"), make_evidence(why, cleared=True)
        return [Finding(time, onset, entity, self.name, known["level"], 0.0, summary, evidence, _SIGNALS)]

    def _close_reset(self, gpu: str, topology: Topology, time: int) -> list[Finding]:
        """Drops the case of a GPU that was reset, and what switches of its node reported: they are reset with it."""
        node = topology.ancestor_of_kind(gpu, "node") or ""
        of_switch = node in self.cases and xid_cases.is_of_switch(self.cases[node])
        over = (gpu, node) if of_switch else (gpu,)
        return [found for entity in over for found in self._close_case(entity, time, _WHY_RESET)]

    def _report_case(self, entity: str, time: int, topology: Topology) -> list[Finding]:
        case = self.cases[entity]
        waits = case["fresh"] and time - case["fresh"] < self.settle * SECOND
        server = topology.ancestor_of_kind(entity, "node") or ""
        mates = self._jobs.gpus_of(server, topology) if case["facts"] else frozenset()
        if (waits and not xid_cases.is_certain(case)) or xid_cases.is_driver_reload(case, self.cases, mates, time):
            return []
        case["fresh"] = 0
        explained = entity == server and xid_cases.is_explained_by_gpu(case, self.cases, mates)
        if xid_cases.is_link_only(case) or explained:
            return []
        level = xid_cases.case_level(case, self._site_levels)
        if level is None:
            return []
        if self.gates.in_maintenance(entity, topology, time, _SETTLES):
            level = "suspect"
        known = self.conditions.get(entity)
        if known and known["level"] == level and time - case["last"] > REPEAT_FOR:
            return []  # the Desk keeps conditions that hold
        due = due_report(self.conditions, entity, time, case["onset"], level)
        return [] if due is None else [self._case_finding(entity, case, time, due)]

    def _case_finding(self, entity: str, case: Case, time: int, due: tuple[int, Level]) -> Finding:
        latched = xid_cases.is_latched(case, due[1])
        more: dict[str, Any] = {"holds": True} if latched else {}
        return self.finding(
            *(time, entity, due),
            score=levels.SCORE[due[1]],
            summary=xid_cases.describe_case(entity, case, self._site_levels),
            signals=_SIGNALS,
            clears=_CLEARS if latched else xid_cases.describe_end(case),
            **(xid_cases.case_evidence(case) | more),
        )

    def _report_program(self, job: str, time: int) -> list[Finding]:
        program = self.programs.blamed[job]
        due = due_report(self.conditions, _program_key(job), time, program["onset"], "suspect")
        if due is None:
            return []
        return [
            self.finding(
                *(time, job, due),
                score=levels.SCORE[due[1]],
                summary=self.programs.describe(job),
                signals=_SIGNALS,
                clears=xid_cases.PASSES,
                xids=program["codes"],
                gpus=program["gpus"][:_MAX_GPUS],
            )
        ]


def _program_key(job: str) -> str:
    return f"program {job}"
