"""Finds slow GPUs and hosts of training jobs that tell no compute times: from clocks, activity and power alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel, topology_index
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.findings import OpenConditions, close_ended, due_report
from detectors.base.gates import Gates
from detectors.base.group_events import GroupEvents, Quantity
from detectors.base.streams import LEARN, Bools, Channel, Floats, Step, Streams
from detectors.base.throttle import CAPPED, IDLE, THROTTLE, has_reason, read_reasons
from detectors.straggler.alarm_budget import gpu_budget
from detectors.straggler.gpu_placement import LEAST_PEERS, GpuPlacement
from detectors.straggler.gpu_verdicts import Sight, Symptoms, find_suspects
from detectors.straggler.job_throughput import ERRORS, MARKS, SENT, WAITS
from detectors.straggler.mass_throttling import ThrottlingLoops
from detectors.straggler.pressure import Pressure
from detectors.straggler.whole_jobs import WholeJobs
from pipeline.model.records import SECOND, Finding, Frame

_BUSY, _BUSY_UTILIZATION = 0.3, 0.5
"""Least SM activity, and where that is not told least utilization, of a GPU that trains: one that writes a checkpoint
or waits for data shows less, and its clock then says nothing. Chosen."""
_RAW, _USUALLY = 0.15, 1e-3  # of smoothing: as the kernel's effect; over some hours. Chosen
_BIT_LASTS = 20 * SECOND  # how long a throttle bit must stand: three looks; what lasts less slows no step. Chosen
_STALE = 120 * SECOND  # after so long without a judged sample nothing is said of a GPU: its job is over or waits
_TOGETHER = Quantity(("gpu.sm_clock",), "run at lower clocks than the others", "run at higher clocks than the others")
_OFTEN = 0.5  # share of the time under a power cap from which that is usual; as outside_words has it
_LIGHT = 0.005  # least activity that is told apart from none


@dataclass
class StragglerInferred(Detector):
    """PCC on each GPU's SM clock, and on how busy its SMs are, against GPUs of its stage, job or rack.

    In synchronous training all GPUs of a job share the step: a slow one computes all the time while its peers wait in
    collectives, where SMs and tensor cores work less and power falls; one that its host keeps waiting works less than
    its peers. Utilization is no sign: NVML counts who waits in a collective as busy. Judged are busy GPUs only.

    Page: SM clock `delta` below normal, at once while a throttle bit that is no policy is set (0x8, 0x20, 0x40, 0x80),
    else after `hold` s among at least 8 peers; a clock below `ratio` of its peers' after `hold` s, whatever it was
    before; SMs of most GPUs of a node less active than their peers', after `hold` s, while tasks there wait for
    processors; SMs of one GPU less active whose PCIe link is below its peers'. All else is a suspect: a GPU or node
    that is busier than its peers, or less busy without a reason that is seen. A GPU whose job tells compute times is
    left to the detector `straggler`; GPUs of a loop that throttle together, to those of coolant and power.

    Ticket: a whole job that sends 10 % less than before, or where that is not told is less active, while no part of it
    stands out. On the leaf or rail on which its ports wait, or else the job with the network as cause, after
    `hold`; on the job, if its SMs wait or clocks fell alike, after `job_hold`. Not a new power cap; not a job that is
    as busy as before, which does more in each step, nor one that began anew or sends nothing: it makes no step.

    Source: delta 3 % of clock, two of NVML's steps of 15 MHz (chosen); duty_delta: four standard errors of smoothed
    activity (chosen); ratio: identical GPUs differ by at most 22 % (Sinha et al., SC 2022); hold: twice the longest
    benign slowdown of 300 s, as two may meet; job_hold: evaluations and phases
    end before (chosen); 10 %: Lin et al. (OSDI 2025); warm_up: published mutes are of 50 to 200 steps (chosen as time).
    """

    name: ClassVar[str] = "straggler_inferred"
    family: ClassVar[str] = "straggler"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = ("gpu.sm_clock",)
    wants: ClassVar[tuple[str, ...]] = (
        *("gpu.sm_active", "gpu.tensor_active", "gpu.utilization", "gpu.power", "gpu.throttle_reasons"),
        *("gpu.temperature", "gpu.pcie_width", "gpu.pcie_generation", "node.cpu_pressure", "node.io_pressure"),
        *("node.load1", "node.cpu_count", SENT, *WAITS, *MARKS, *ERRORS),
        *("rank.compute_time", "event:job_start", "event:job_end", "event:version"),
        *("event:maintenance_start", "event:maintenance_end"),
    )
    cannot_see: ClassVar[str] = (
        "A GPU that computes slowly at full clock pages nobody: it is busier than its peers, as one with more work is; "
        "one slow from the first sample by less than 20 %; one whose loop throttles too; hosts and PCIe links of jobs "
        "that are not known; idle GPUs; which step or collective is slow; and whole jobs that are slow by less than "
        "10 %, on a single node, or while their GPUs are as busy as ever, which looks like more work in each step."
    )

    threshold: float = 18.5
    delta: float = 0.03
    duty_delta: float = 0.02
    ratio: float = 0.8
    hold: float = 600.0
    job_hold: float = 1800.0
    warm_up: float = 600.0

    clocks: Streams = part(lambda: Streams(Channel(0.01, 0.03)))
    duty: Streams = part(lambda: Streams(Channel(0.01, 0.02, phi=0.4, both=True)))
    placement: GpuPlacement = part(GpuPlacement)
    gates: Gates = part(Gates)
    loops: ThrottlingLoops = part(ThrottlingLoops)
    group: GroupEvents = part(lambda: GroupEvents(_TOGETHER))
    pressure: Pressure = part(lambda: Pressure("node.cpu_pressure"))
    whole: WholeJobs = part(WholeJobs)
    raw: Floats = memory(0.0)
    power: Floats = memory(np.nan)
    clock: Floats = memory(np.nan)
    active: Floats = memory(np.nan)
    width: Floats = memory(np.nan)
    generation: Floats = memory(np.nan)
    capped: Floats = memory(0.0)
    bits: NDArray[np.uint64] = memory(0, np.uint64)
    bit_since: NDArray[np.int64] = memory(0, np.int64)
    stuck_since: NDArray[np.int64] = memory(0, np.int64)
    low_since: NDArray[np.int64] = memory(0, np.int64)
    high_since: NDArray[np.int64] = memory(0, np.int64)
    judged: NDArray[np.int64] = memory(0, np.int64)
    looks: NDArray[np.int64] = memory(0, np.int64)
    settled: NDArray[np.int64] = memory(0, np.int64)
    sort: NDArray[np.int8] = memory(0, np.int8)
    worked: Bools = memory(False, np.bool_)
    tensor: Bools = memory(False, np.bool_)
    conditions: OpenConditions = notes()
    forgiven: list[str] = notes(list)

    def __post_init__(self) -> None:
        self.clocks.channel = Channel(0.01, self.delta, threshold=self.threshold)
        self.duty.channel = Channel(0.01, self.duty_delta, phi=0.4, threshold=self.threshold, both=True)

    def budget(self) -> list[str]:
        return gpu_budget(self.clocks.channel, self.duty.channel, self.whole.channels, self.ratio, self.hold)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        self.gates.update(frames)
        nodes, frame = frames.get("node"), frames.get("gpu")
        if nodes is not None:
            self.pressure.update(nodes)
        if frame is None or not len(frame.entities):
            return []
        self.grow(len(frame.entities))
        if (mask := topology_index.pop_members_mask(self.forgiven, frame)) is not None:
            self._reset(mask)
        working = self._relearn_changed(frames, frame)
        self.placement.record_reporting(frame, frames.get("rank"))
        clock, activity, busy = self._read_gpus(frame)
        bits = self.bit_since[: len(busy)] > 0
        crowd = self.loops.find_members(frame, self.placement.node, busy, bits)
        gate = busy & ~working & ~crowd
        self._relearn_moved(gate)
        self._clear_rested(frame.time, gate & np.isfinite(clock))
        step = self.clocks.step(-np.log(clock), self.placement.groups, frame.time, gate)
        placed = (
            gate & self.placement.job_known & (self.placement.groups >= 0) & (frame.time >= self.settled[: len(gate)])
        )
        duty = self.duty.step(np.log(activity), self.placement.groups, frame.time, placed)
        signs = self._find_symptoms(frame.time, clock, gate, ~crowd & ~working, step, duty)
        alike = self._group_findings(frame, step)
        if self.whole.is_due(frame.time):
            alike += self.whole.update(
                self, frames, busy, crowd, working, signs.any_symptom, set(self.group.conditions)
            )
        if not signs.any():
            if self.conditions:
                close_ended(self.conditions, set())
            return alike
        return [*self._report(frame, nodes, signs), *alike]

    def _group_findings(self, frame: Frame, step: Step) -> list[Finding]:
        """What many of a stage or rack have in common; not jobs that tell compute times, and no new power cap."""
        n = len(frame.entities)
        policy = has_reason(self.bits[:n], CAPPED) & (self.capped[:n] < _OFTEN)
        counted = ~(policy | self.placement.reports_compute_time(frame.time))
        cohort, blamed = self.placement.cohort_name, self.conditions
        return self.group.update(frame, frame.entities, step, cohort, self.gates, self.name, counted, blamed)

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """What a person calls no fault is normal as soon as it is seen."""
        self.whole.relearn(entity)
        self.forgiven.append(entity)

    def _reset(self, mask: Bools) -> None:
        """Learns these anew: other software, other hands on them, or a person said that it is no fault."""
        self.clocks.reset(mask[: self.clocks.cells.shape[1]])
        self.raw[: len(mask)][mask] = 0.0
        self.stuck_since[: len(mask)][mask] = 0
        self._reset_activity(mask)

    def _reset_activity(self, mask: Bools) -> None:
        self.duty.reset(mask[: self.duty.cells.shape[1]])
        for since in (self.low_since, self.high_since):
            since[: len(mask)][mask] = 0

    def _relearn_moved(self, gate: Bools) -> None:
        """A GPU that works beside its job's others after it worked beside others of its rack, or the other way, is
        learnt anew; one that only rests between two jobs is not: what was wrong with it still is."""
        now, last = np.where(self.placement.job_known, 1, 2), self.sort[: len(gate)]
        other = gate & (last != now)
        if other.any():
            self._reset(other & (last != 0))
            last[other] = now[other]

    def _clear_rested(self, time: int, known: Bools) -> None:
        """Who works again after a rest begins unsuspected: it may have been mended. What was learnt stays."""
        last = self.judged[: len(known)]
        back = np.flatnonzero(known & (last > 0) & (time - last > _STALE))
        if len(back):
            for streams in (self.clocks, self.duty):
                streams.cells[[[kernel.UP], [kernel.DOWN], [kernel.EFFECT]], back] = 0.0
                words = streams.cells[kernel.WORD].view(np.uint32)
                words[back] &= ~(kernel.ON_UP | kernel.ON_DOWN | kernel.HELD_BITS)
            for cells in (self.raw, self.stuck_since, self.low_since, self.high_since):
                cells[back] = 0

    def _relearn_changed(self, frames: Mapping[str, Frame], frame: Frame) -> Bools:
        """Forgets what no longer holds of GPUs with other peers, other software, or that were worked on; (N,) those
        that are worked on."""
        n = len(frame.entities)
        if (others := self.placement.update_topology(frame)) is not None and others.any():
            self._reset_activity(others)
            self.settled[:n][others] = frame.time + round(self.warm_up * SECOND)
        working = self.gates.maintenance_mask(frame)
        over = self.worked[:n] & ~working
        self.worked[:n] = working
        told = {e.entity for f in frames.values() for e in f.events if e.kind == "version"}
        if told:
            above = frame.topology.ancestors
            over = over | np.array([e in told or not told.isdisjoint(above(e)) for e in frame.entities], bool)
        if over.any():
            self._reset(over)
        return working

    def _read_gpus(self, frame: Frame) -> tuple[Floats, Floats, Bools]:
        """SM clock (MHz), activity (share) and who is busy; NaN where nothing was measured. Keeps what may be told."""
        n, sm, tensor = len(frame.entities), frame["gpu.sm_active"], frame["gpu.tensor_active"]
        told = np.isfinite(tensor)
        newly = told & ~self.tensor[:n]
        if newly.any():
            self.tensor[:n] |= newly
            self._reset_activity(newly)
        activity = np.where(self.tensor[:n], tensor, sm)
        busy = np.where(np.isfinite(sm), sm >= _BUSY, frame["gpu.utilization"] >= _BUSY_UTILIZATION)
        clock = np.where(frame["gpu.sm_clock"] > 0, frame["gpu.sm_clock"], np.nan)
        activity = np.where(np.isfinite(activity), np.maximum(activity, _LIGHT), np.nan)
        kept = (self.clock, clock), (self.active, activity)
        links = (self.width, frame["gpu.pcie_width"]), (self.generation, frame["gpu.pcie_generation"])
        for last, now in (*kept, *links):
            np.copyto(last[:n], now, where=np.isfinite(now))
        watts, power = frame["gpu.power"], self.power[:n]
        smooth = np.where(np.isfinite(power), power + _RAW * (watts - power), watts)
        np.copyto(power, smooth, where=np.isfinite(watts))
        busy = busy & ~self._read_throttling(frame, busy)
        return clock, activity, busy

    def _read_throttling(self, frame: Frame, busy: Bools) -> Bools:
        """Takes the clock event reasons; (N,) who has nothing to do."""
        n = len(frame.entities)
        now, known = read_reasons(frame["gpu.throttle_reasons"])
        np.copyto(self.bits[:n], now, where=known)
        throttled, since = has_reason(now, THROTTLE), self.bit_since[:n]
        since[known & ~throttled] = 0
        since[busy & throttled & (since == 0)] = frame.time
        at_work, usual = known & busy, self.capped[:n]
        usual[at_work] += _USUALLY * (has_reason(now[at_work], CAPPED) - usual[at_work])
        return has_reason(now, IDLE)

    def _find_symptoms(self, time: int, clock: Floats, gate: Bools, fit: Bools, step: Step, duty: Step) -> Symptoms:
        """Which GPUs show what. fit: who may be blamed at all."""
        n, known = len(clock), gate & np.isfinite(clock)
        judged = self.judged[:n]
        judged[known] = time
        self.looks[:n] += known
        since, grouped, median = time - judged, ~step.alone, step.median
        there = (
            fit
            & (since <= _STALE)
            & (since >= 0)
            & (self.looks[:n] > LEARN)
            & ~self.placement.reports_compute_time(time)
        )
        raw = self.raw[:n]
        take = known & grouped & (step.size >= LEAST_PEERS)
        raw += np.where(take, _RAW * (-np.log(clock) - median - raw), 0.0)
        limit = -np.log(self.ratio)
        _update_since(self.stuck_since[:n], raw >= limit, time)
        bit, stood, fast = self.bit_since[:n], self.stuck_since[:n] > 0, np.zeros(n, bool)
        if bit.any():
            below = (step.effect >= self.delta) | (raw >= limit / 2)
            fast = there & (bit > 0) & (time - bit >= _BIT_LASTS) & below & grouped & ~step.moved
        if stood.any():
            stood &= there & (time - self.stuck_since[:n] >= self.hold * SECOND) & ~step.moved
        long = step.on & there & grouped & ~step.moved
        for since, more in ((self.low_since[:n], -duty.effect), (self.high_since[:n], duty.effect)):
            _update_since(since, (more >= self.duty_delta) & there, time, more >= self.duty_delta / 2)
        odd = duty.on & there & ~duty.moved & self.placement.job_known
        return Symptoms(fast, long, stood, odd & duty.below, odd & ~duty.below, step, duty)

    def _report(self, frame: Frame, nodes: Frame | None, signs: Symptoms) -> list[Finding]:
        found = {s.entity: s for s in find_suspects(Sight(self, frame, nodes, signs))}
        close_ended(self.conditions, set(found))
        dues = {e: due_report(self.conditions, e, frame.time, s.onset, s.level) for e, s in sorted(found.items())}
        return [found[e].finding(frame.time, due, self.name) for e, due in dues.items() if due is not None]


def _update_since(since: NDArray[np.int64], begins: Bools, time: int, lasts: Bools | None = None) -> None:
    """Keeps since when a condition holds, 0 for not: from `begins` on for as long as `lasts`."""
    if not (starts := begins.any()) and not since.any():
        return
    since[~(begins if lasts is None else lasts)] = 0
    if starts:
        since[begins & (since == 0)] = time
