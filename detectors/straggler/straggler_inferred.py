"""Finds slow GPUs and hosts of training jobs that report no compute times: from clocks, activity and power alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.findings import OpenConditions, close_ended, due_report
from detectors.base.gates import Gates
from detectors.base.group_events import GroupEvents, Quantity
from detectors.base.streams import LEARN, Bools, Channel, Floats, Step, Streams
from detectors.base.topology_index import pop_members_mask
from detectors.straggler.alarm_budget import gpu_budget
from detectors.straggler.gpu_placement import LEAST_PEERS, GpuPlacement
from detectors.straggler.gpu_readings import GpuReadings, GpuSymptoms, GpuWatch
from detectors.straggler.gpu_verdicts import GpuInstant, Symptoms, find_suspects
from detectors.straggler.job_throughput import ERRORS, MARKS, SENT, WAITS
from detectors.straggler.mass_throttling import ThrottlingLoops
from detectors.straggler.pressure import Pressure
from detectors.straggler.whole_jobs import WholeJobs
from pipeline.model.records import SECOND, Finding, Frame

_BELOW_SMOOTH = 0.15  # gain, as of the kernel's effect; chosen
_BIT_LASTS = 20 * SECOND  # us that a throttle bit must last: three samples; shorter ones slow no step. Chosen
_STALE = 120 * SECOND  # us after its last judged sample until a GPU is not reported: its job is over or waits
_TOGETHER = Quantity(("gpu.sm_clock",), "run at lower clocks", "run at higher clocks")


@dataclass
class StragglerInferred(Detector):
    """Peer-conditioned CUSUM on each GPU's SM clock, and on its SM activity, within its stage, job or rack.

    In synchronous training all GPUs of a job share the step time. A slow GPU computes all the time while its peers wait
    in collectives, where SMs and tensor cores are less active and power falls. A GPU that waits for its host is less
    active than its peers. Utilization does not show this: NVML counts a GPU that waits in a collective as busy. Only
    busy GPUs are judged.

    Page:

    - SM clock `delta` below normal: at once while a throttle bit that is not policy is set (0x8, 0x20, 0x40, 0x80),
      else after `hold` s among at least 8 peers.
    - A clock below `ratio` of its peers' after `hold` s, whatever it was before.
    - SMs of most GPUs of a node less active than their peers' after `hold` s, while tasks there wait for processors.
    - SMs of one GPU less active, if its PCIe link is below its peers'.

    Suspect: any other GPU or node that is busier than its peers, or less busy without a visible cause. GPUs of a job
    that reports compute times are left to the detector `straggler`; GPUs of a loop that throttle together are left to
    the detectors of coolant and power.

    Ticket: a whole job that sends 10 % less than before, or is less active if traffic is not measured, while no part of
    it stands out. After `hold` s the cause is the leaf or rail on which its ports wait, else the job with its network.
    After `job_hold` s it is the job, if its SMs wait or all clocks fell alike. No ticket for a new power cap, for a job
    that is as busy as before (more work in each step), or for one that restarted or sends nothing (no steps).

    Source: delta 3 % of clock, two of NVML's steps of 15 MHz (chosen); duty_delta: four standard errors of smoothed
    activity (chosen); ratio: identical GPUs differ by at most 22 % (Sinha et al., SC 2022); hold: twice the longest
    benign slowdown of 300 s, as two may meet; job_hold: evaluations and phases end before (chosen); 10 %: Lin et al.
    (OSDI 2025); warm_up: published mutes are of 50 to 200 steps (chosen as time).
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
        "A GPU that computes slowly at full clock is only a suspect: it is busier than its peers, like one with more "
        "work. A GPU that is slow from the first sample by less than 20 %, or whose loop throttles too. Hosts and "
        "PCIe links of unknown jobs. Idle GPUs. Which step or collective is slow. Whole jobs that are slow by less "
        "than 10 %, on a single node, or while their GPUs are as busy as before, which looks like more work in each "
        "step."
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
    pressure: Pressure = part(lambda: Pressure("node.cpu_pressure"), of="node")
    whole: WholeJobs = part(WholeJobs, of="job")
    readings: GpuReadings = part(GpuReadings)
    symptoms: GpuSymptoms = part(GpuSymptoms)
    settled: NDArray[np.int64] = memory(0, np.int64)  # us, from when on its activity is judged after a move
    cohort_kind: NDArray[np.int8] = memory(0, np.int8)  # compared with GPUs of its job 1, of its rack 2; 0 unknown
    in_maintenance: Bools = memory(False, np.bool_)
    conditions: OpenConditions = notes()
    accepted: list[str] = notes(list)

    def __post_init__(self) -> None:
        self.clocks.channel = Channel(0.01, self.delta, threshold=self.threshold)
        self.duty.channel = Channel(0.01, self.duty_delta, phi=0.4, threshold=self.threshold, both=True)

    def budget(self) -> list[str]:
        """Returns the false alarm rates of its tests of clock and activity."""
        return gpu_budget(self.clocks.channel, self.duty.channel, self.whole.channels, self.ratio, self.hold)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings on GPUs with a lower clock or more activity than their peers."""
        self.gates.update(frames)
        nodes, frame = frames.get("node"), frames.get("gpu")
        if nodes is not None:
            self.pressure.update(nodes)
        if frame is None or not len(frame.entities):
            return []
        n = len(frame.entities)
        self.grow(n)
        self.symptoms.grow(n)
        if (mask := pop_members_mask(self.accepted, frame)) is not None:
            self._relearn(mask)
        in_maintenance = self._relearn_changed(frames, frame)
        self.placement.record_reporting(frame, frames.get("rank"))
        if (first := self.readings.find_new_tensor(frame)).any():
            self._relearn_activity(first)
        clock, activity, busy = self.readings.read(frame)
        throttled = self.readings.throttled_since[:n] > 0
        excluded = self.loops.find_members(frame, self.placement.node, busy, throttled)
        gate = busy & ~in_maintenance & ~excluded
        self._relearn_moved(gate)
        self._clear_rested(frame.time, gate & np.isfinite(clock))
        groups = self.placement.groups
        step = self.clocks.step(-np.log(clock), groups, frame.time, gate)
        placed = gate & self.placement.job_known & (groups >= 0) & (frame.time >= self.settled[:n])
        duty = self.duty.step(np.log(activity), groups, frame.time, placed)
        symptoms = self._find_symptoms(frame.time, clock, gate, ~excluded & ~in_maintenance, step, duty)
        alike = self._group_findings(frame, step)
        watch = self._watch()
        if self.whole.is_due(frame.time):
            masks = busy, excluded, in_maintenance, symptoms.any_symptom, self.settled[:n]
            alike += self.whole.update(watch, frames, *masks, set(self.group.conditions), self.name)
        if not symptoms.any():
            if self.conditions:
                close_ended(self.conditions, set())
            return alike
        return [*self._report(GpuInstant(watch, frame, nodes, symptoms)), *alike]

    def _watch(self) -> GpuWatch:
        return GpuWatch(
            self.delta,
            self.duty_delta,
            self.hold,
            self.job_hold,
            self.clocks,
            self.duty,
            self.placement,
            self.gates,
            self.pressure,
            self.readings,
            self.symptoms,
        )

    def _group_findings(self, frame: Frame, step: Step) -> list[Finding]:
        """Returns what many of a stage or rack have in common; not of jobs that report compute times, and no new power
        cap."""
        n = len(frame.entities)
        counted = ~(self.readings.is_newly_capped(n) | self.placement.reports_compute_time(frame.time))
        cohort, blamed = self.placement.cohort_name, self.conditions
        return self.group.update(frame, frame.entities, step, cohort, self.gates, self.name, counted, blamed)

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """Learns the GPUs of an entity again with the next frame of GPUs, and a whole job now."""
        self.whole.relearn(entity)
        self.accepted.append(entity)

    def _relearn(self, mask: Bools) -> None:
        """Learns GPUs again: other software, maintenance, or accepted as normal."""
        self.clocks.reset(mask[: self.clocks.cells.shape[1]])
        self.symptoms.below[: len(mask)][mask] = 0.0
        self.symptoms.stuck_since[: len(mask)][mask] = 0
        self._relearn_activity(mask)

    def _relearn_activity(self, mask: Bools) -> None:
        self.duty.reset(mask[: self.duty.cells.shape[1]])
        for since in (self.symptoms.low_since, self.symptoms.high_since):
            since[: len(mask)][mask] = 0

    def _relearn_moved(self, gate: Bools) -> None:
        """Learns GPUs again that work beside others of their job after others of their rack, or the other way round.

        A GPU that only rests between two jobs keeps its baseline: a fault of it lasts.
        """
        now, last = np.where(self.placement.job_known, 1, 2), self.cohort_kind[: len(gate)]
        other = gate & (last != now)
        if other.any():
            self._relearn(other & (last != 0))
            last[other] = now[other]

    def _clear_rested(self, time: int, known: Bools) -> None:
        """Ends the conditions of GPUs that work again after a rest: they may have been repaired. Baselines stay."""
        last = self.symptoms.judged_at[: len(known)]
        back = np.flatnonzero(known & (last > 0) & (time - last > _STALE))
        if len(back):
            for streams in (self.clocks, self.duty):
                streams.cells[[[kernel.UP], [kernel.DOWN], [kernel.EFFECT]], back] = 0.0
                words = streams.cells[kernel.WORD].view(np.uint32)
                words[back] &= ~(kernel.ON_UP | kernel.ON_DOWN | kernel.HELD_BITS)
            history = self.symptoms
            for cells in (history.below, history.stuck_since, history.low_since, history.high_since):
                cells[back] = 0

    def _relearn_changed(self, frames: Mapping[str, Frame], frame: Frame) -> Bools:
        """Learns GPUs again with other peers, other software, or after maintenance; returns (N,) those in
        maintenance."""
        n = len(frame.entities)
        if (regrouped := self.placement.update_topology(frame)) is not None and regrouped.any():
            self._relearn_activity(regrouped)
            self.settled[:n][regrouped] = frame.time + round(self.warm_up * SECOND)
        in_maintenance = self.gates.maintenance_mask(frame)
        over = self.in_maintenance[:n] & ~in_maintenance
        self.in_maintenance[:n] = in_maintenance
        updated = {e.entity for f in frames.values() for e in f.events if e.kind == "version"}
        if updated:
            above = frame.topology.ancestors
            over = over | np.array([e in updated or not updated.isdisjoint(above(e)) for e in frame.entities], bool)
        if over.any():
            self._relearn(over)
        return in_maintenance

    def _find_symptoms(self, time: int, clock: Floats, gate: Bools, allowed: Bools, step: Step, duty: Step) -> Symptoms:
        """Returns the symptoms of each GPU. allowed: (N,) which may be blamed at all."""
        n, known, history = len(clock), gate & np.isfinite(clock), self.symptoms
        judged_at = history.judged_at[:n]
        judged_at[known] = time
        history.samples[:n] += known
        since, grouped, median = time - judged_at, ~step.alone, step.median
        fresh = (since <= _STALE) & (since >= 0) & (history.samples[:n] > LEARN)
        present = allowed & fresh & ~self.placement.reports_compute_time(time)
        below = history.below[:n]
        learns = known & grouped & (step.size >= LEAST_PEERS)
        below += np.where(learns, _BELOW_SMOOTH * (-np.log(clock) - median - below), 0.0)
        limit = -np.log(self.ratio)
        _update_since(history.stuck_since[:n], below >= limit, time)
        throttled_since = self.readings.throttled_since[:n]
        stuck, fast = history.stuck_since[:n] > 0, np.zeros(n, bool)
        if throttled_since.any():
            low = (step.effect >= self.delta) | (below >= limit / 2)
            lasts = (throttled_since > 0) & (time - throttled_since >= _BIT_LASTS)
            fast = present & lasts & low & grouped & ~step.moved
        if stuck.any():
            stuck &= present & (time - history.stuck_since[:n] >= self.hold * SECOND) & ~step.moved
        slow = step.on & present & grouped & ~step.moved
        for began, more in ((history.low_since[:n], -duty.effect), (history.high_since[:n], duty.effect)):
            _update_since(began, (more >= self.duty_delta) & present, time, more >= self.duty_delta / 2)
        unequal = duty.on & present & ~duty.moved & self.placement.job_known
        return Symptoms(fast, slow, stuck, unequal & duty.below, unequal & ~duty.below, step, duty)

    def _report(self, now: GpuInstant) -> list[Finding]:
        found, time = {s.entity: s for s in find_suspects(now)}, now.frame.time
        close_ended(self.conditions, set(found))
        dues = {e: due_report(self.conditions, e, time, s.onset, s.level) for e, s in sorted(found.items())}
        return [found[e].finding(time, due, self.name) for e, due in dues.items() if due is not None]


def _update_since(since: NDArray[np.int64], begins: Bools, time: int, lasts: Bools | None = None) -> None:
    """Updates since when a condition holds, 0 for not: from `begins` on for as long as `lasts`."""
    if not (starts := begins.any()) and not since.any():
        return
    since[~(begins if lasts is None else lasts)] = 0
    if starts:
        since[begins & (since == 0)] = time
