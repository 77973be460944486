"""Finds slow GPUs and hosts of training jobs that report no compute times: from clocks, activity and power alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from detectors.base.budget import list_alarms
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report
from detectors.base.gates import Gates, find_relearned
from detectors.base.laggards import Laggards
from detectors.base.port_rates import SENT
from detectors.base.pressure import CPU, PRESSED, TIMES, Pressure
from detectors.base.state import N
from detectors.base.statistics import median_of
from detectors.base.streams import LEARN, Bools, Channel, Floats, Step, Streams
from detectors.base.throttle import IDLE, THROTTLE, has_reason
from detectors.base.topology_index import members_mask, pop_members_mask
from detectors.straggler.blame import CORROBORATED, HARM, TENTH, Suspicion, Weight, decide_level, find_suspicions
from detectors.straggler.gpu_placement import GpuPlacement
from detectors.straggler.gpu_readings import (
    POLICY,
    SETTINGS,
    SIGNALS,
    SLOW_CLOCK,
    Cause,
    ClockWatch,
    GpuReadings,
    describe_causes,
    drop_small_cap,
    find_host_cause,
)
from detectors.straggler.job_throughput import JOB_EVERY, JobThroughput
from detectors.straggler.own_clocks import OwnClocks
from pipeline.model.entity_names import pager_title
from pipeline.model.records import SECOND, Finding, Frame, Level

_STALE = 120 * SECOND  # us after its last judged sample until a GPU is not reported: its job is over or waits; chosen
_WORKS = 0.1
"""Least share of the time in which a kernel runs, or SMs are active, of a GPU that works, where NVML does not report
whether it idles. Chosen: below, its clock depends on the moment of the reading."""
_COARSE = 0.2
"""SM activity below which half a percent, the error of a rounded share, is more than the 2 % that are looked for."""
_LIGHT = 0.005  # least activity that differs from none
_EXPLAINS = 5.0
"""Times its departure from its peers that a part of a job makes the job slower, at most. Peers that wait for it draw a
share w of their power: it departs by 1 - w of the loss if it is busy, and by w if it waits. Traces show a w of 0.2 to
0.4 (MegaScale, Minder). A greater loss is a pause, or another load of the job."""
_HOST = 0.75
"""Share of `hold` for a slow host: two measurements agree, but smoothed they outlast a benign slowdown of 300 s by four
samples."""
Steps: TypeAlias = tuple[Step, Step, Step]
Departures: TypeAlias = tuple[Floats, NDArray[np.int64], Floats]
_SIDES = 3
"""What GPUs show: a low clock; busier than their peers, which wait for them; less busy, as they wait for their host."""


@dataclass(frozen=True, slots=True)
class Instant:
    """All GPUs at one instant. clock: the streams of clocks; activity: by number, of SM activity and power.

    on, effect: (sides, N) which show what, and by how much (ln).   counted: (N,) work, and may be judged.
    fallen: ln by which a clock without peers is below its own past, or all of its product.   less: ln by which it is
    less active than its whole cohort, ever since it works there.
    losses: (jobs + 1,) ln of the throughput that each job has lost, NaN unknown.
    """

    frames: Mapping[str, Frame]
    clock: Step
    activity: tuple[Step, Step]
    on: Bools
    effect: Floats
    counted: Bools
    fallen: Floats
    less: Floats
    losses: Floats


@dataclass
class StragglerInferred(Detector):
    """Compares the SM clock, SM activity and power of each GPU with those of its stage, or its job, by product.

    In synchronous training all GPUs of a job share the step time. A slow GPU computes all the time while its peers wait
    in collectives, where SMs are less active and power falls: it is busier than its peers. A GPU that waits for its
    host is less busy. Utilization does not show this: NVML counts a GPU that waits in a collective as
    busy. How much the job loses shows in the bytes that it sends, else in the activity or power of all its GPUs,
    against its own past.

    Page:

    - SM clock `delta` below normal, or below 0.8 of its peers' whatever it was before, by which the job loses 5 %: at
      once with a throttle bit, or without any event reason that explains it; else after `hold` s. Under a power cap a
      ticket: there clocks differ with the silicon.
    - One GPU busier than its peers for `hold` s, since which the job has lost 10 %, no more than five times what the
      part departs by, and no other part of it differs. A busier node is a ticket: it is slow or a stage with more work.
    - A node less busy than its peers, with tasks that wait for processors, and a job that has lost 5 %: after three
      quarters of `hold`. Without a visible reason a ticket.
    - SM clock a tenth below its own past for `hold` s without any event reason, where its node is most of what it could
      be compared with (jobs of one node, services): unless those of three nodes fell together, which people do. Or
      below 0.8 of all of its product ever since it works: after ten minutes of samples and `hold` s.
    - One GPU less active than its whole cohort ever since it works there, by 8 % and eight standard deviations: after
      ten minutes of samples and `hold` s. Where more than one in twenty are less active, that is the job's design.

    Ticket: the same for half of that loss. Suspect: any other GPU or node that differs from its peers. A power cap is
    what people set, so that it is no finding. GPUs of a job that reports compute times are left to the detector
    `straggler`; GPUs of a loop that throttle together are left to the detectors of coolant and power. Power counts
    where SM activity is not reported.

    A whole job that sends 10 % less than before while no part of it stands out, its SMs wait, and that is more than
    twenty times its own swings of two hours, or all clocks fell alike: a ticket after `job_hold` s; a page after `hold`
    s if it is nearly twice as slow. A ticket after `hold` s if tasks of its nodes wait for I/O. A job on one node is
    judged by its activity or power; its node pages after `hold` s where tasks wait for processors, or clocks fell for
    no visible reason and by at least a third of what it lost. Nothing is reported for a new power cap, for a job some
    of whose GPUs began to throttle, that is as busy as before (more work in each step), or that restarted or sends
    nothing (no steps). Ports that wait, and the leaf that slows a job, are left to link_congestion.

    Source: delta 3 % of clock, two of NVML's steps of 15 MHz (chosen); duty_delta: four standard errors of smoothed
    activity (chosen); 0.8: identical GPUs differ by at most 22 % (Sinha et al., SC 2022); hold: twice the longest
    benign slowdown of 300 s, as two may meet; job_hold: evaluations and phases end before (chosen); 10 %: Lin et al.
    (OSDI 2025).
    """

    name: ClassVar[str] = "straggler_inferred"
    family: ClassVar[str] = "straggler"
    device_class: ClassVar[str] = "gpu"
    needs: ClassVar[tuple[str, ...]] = ("gpu.sm_clock",)
    wants: ClassVar[tuple[str, ...]] = (
        *("gpu.sm_active", "gpu.tensor_active", "gpu.utilization", *SIGNALS[1:], "node.io_pressure"),
        SENT,
        *("rank.compute_time", "event:job_start", "event:job_end", "event:version"),
        *("event:maintenance_start", "event:maintenance_end"),
    )
    cannot_see: ClassVar[str] = (
        "A clock low from the first sample by less than 20 %, or whose loop throttles too; one for which its job "
        "does not wait is a suspect. A GPU slow since its start among fewer than 8, or by less than 8 % of activity. "
        "Whole jobs slow by less than 10 %, or while their GPUs are as busy as before."
    )

    threshold: float = 18.5
    delta: float = 0.03
    duty_delta: float = 0.02
    hold: float = 600.0
    ticket_hold: float = 300.0
    job_hold: float = 1800.0

    clocks: ClockWatch = part(ClockWatch)
    own: OwnClocks = part(OwnClocks)
    duty: Streams = part(lambda: Streams(Channel(0.01, 0.02, phi=0.4, both=True)))
    draw: Streams = part(lambda: Streams(Channel(0.01, 0.02, phi=0.4, both=True)))
    laggards: Laggards = part(lambda: Laggards(HARM))
    lowest: Laggards = part(lambda: Laggards(-float(np.log(SLOW_CLOCK))))
    placement: GpuPlacement = part(GpuPlacement)
    gates: Gates = part(Gates)
    pressure: Pressure = part(lambda: Pressure(CPU), of="node")
    jobs: JobThroughput = part(JobThroughput, of="job")
    readings: GpuReadings = part(GpuReadings, kept=True)
    judged_at: NDArray[np.int64] = memory(0, np.int64)  # last judged sample (us)
    since: NDArray[np.int64] = memory(0, np.int64, shape=(_SIDES, N))  # when it began to show each (us), 0 not
    active: Floats = memory(np.nan)  # newest SM activity, else tensor activity
    works: Bools = memory(False, np.bool_)  # whether it worked at its newest reading
    read_at: NDArray[np.int64] = memory(0, np.int64)  # when that was (us)
    conditions: OpenConditions = notes()
    accepted: list[str] = notes(list)

    def __post_init__(self) -> None:
        self.clocks.streams.channel = Channel(0.01, self.delta, threshold=self.threshold)
        for streams in (self.duty, self.draw):
            streams.channel = Channel(0.01, self.duty_delta, phi=0.4, threshold=self.threshold, both=True)

    def budget(self) -> list[str]:
        """Returns the false alarm rates of its tests of clock and activity."""
        activity, jobs = self.duty.channel, ("throughput", self.jobs.pace.streams.channel, JOB_EVERY)
        streams = {"SM clock": self.clocks.streams.channel, "SM activity": activity, "power": activity}
        streams["SM clock without peers"] = self.own.streams.channel
        return list_alarms(streams, jobs, f"an SM clock below {SLOW_CLOCK:g} of the peers' for {self.hold:g} s")

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings on GPUs whose clock, activity or power differs from their peers', and on slow jobs."""
        self.gates.update(frames)
        if "node" in frames:
            self.pressure.update(frames["node"])
        self.jobs.read(frames)
        frame = frames.get("gpu")
        if frame is None or not len(frame.entities):
            return []
        n, time = len(frame.entities), frame.time
        self.grow(n)
        if (mask := pop_members_mask(self.accepted, frame)) is not None:
            self._relearn(mask)
            self.laggards.accept(mask)
            self.lowest.accept(mask)
        maintained = self._relearn_changed(frames, frame)
        self.placement.record_reporting(frame, frames.get("rank"))
        self.readings.update(frame)
        activity, busy = self._read_activity(frame)
        gate = busy & ~maintained
        self._clear_rested(time, gate)
        groups, clock, kinds = self.placement.groups, frame["gpu.sm_clock"], self.kinds(frame)
        step = self.clocks.step(clock, groups, time, gate, kinds)
        placed = gate & self.placement.job_known & (groups >= 0)
        power = np.where((frame["gpu.power"] > 0) & np.isnan(self.active[:n]), frame["gpu.power"], np.nan)
        placed &= ~(activity < _COARSE)
        duty = self.duty.step(np.log(activity), groups, time, placed, kinds)
        draw = self.draw.step(np.log(power), groups, time, placed, kinds)
        known = gate & np.isfinite(clock)
        departures = self._find_departures(frame, known, activity)
        now = self._find_symptoms(frames, known, maintained, (step, duty, draw), departures)
        suspicions = self._find_suspicions(now) if now.on.any() else []
        close_ended(self.conditions, {s.entity for s, _ in suspicions})
        found = self._report(now, suspicions)
        return [*found, *self._follow_jobs(frames, maintained, now)] if self.jobs.is_due(time) else found

    def _find_departures(self, frame: Frame, known: Bools, activity: Floats) -> Departures:
        """Returns (N,) ln by which clocks without peers are below their own past, or all of their product, s for which
        they are, and ln by which GPUs are less active than their cohort since they work there."""
        placement, clock, time = self.placement, np.where(known, frame["gpu.sm_clock"], np.nan), frame.time
        free, kinds = known & self.readings.unexplained(len(known)), self.kinds(frame)
        less = self.laggards.step(activity, placement.groups, time, known & placement.job_known)
        low = self.lowest.step(clock, kinds[0], time, free)
        fallen, held = self.own.step(clock, free & placement.crowded, placement.numbers["node"], time, kinds)
        return np.where((fallen > 0) | ~placement.crowded, fallen, low), held, less

    def _read_activity(self, frame: Frame) -> tuple[Floats, Bools]:
        """Returns (N,) SM activity, else tensor activity, NaN where not measured; and which GPUs work."""
        n, sm = len(frame.entities), frame["gpu.sm_active"]
        seen = np.isfinite(sm)
        activity = np.where(seen, np.maximum(sm, _LIGHT), np.maximum(frame["gpu.tensor_active"], _LIGHT))
        np.copyto(self.active[:n], activity, where=np.isfinite(activity))
        shares = np.fmax(sm, frame["gpu.utilization"])
        idle = has_reason(self.readings.bits[:n], IDLE) & self.readings.known[:n]
        known = np.isfinite(shares) | self.readings.known[:n]
        busy = ~idle & ~(shares < _WORKS) & known
        self.works[:n][known], self.read_at[:n][known] = busy[known], frame.time
        return activity, busy

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """Learns the GPUs of an entity again with the next frame of GPUs, and a whole job now."""
        self.jobs.relearn(entity)
        self.accepted.append(entity)

    def _relearn(self, mask: Bools) -> None:
        """Learns GPUs again: other software, maintenance, or accepted as normal."""
        for piece in (self.clocks, self.own, self.duty, self.draw):
            piece.reset(mask)
        self.since[:, : len(mask)][:, mask] = 0

    def _clear_rested(self, time: int, gate: Bools) -> None:
        """Ends the conditions of GPUs that work again after a rest: they may have been repaired. Baselines stay."""
        last = self.judged_at[: len(gate)]
        back = np.flatnonzero(gate & (last > 0) & (time - last > _STALE))
        if len(back):
            for streams in (self.clocks.streams, self.own.streams, self.duty, self.draw):
                streams.clear_conditions(back)
            self.since[:, back], self.clocks.below[back] = 0, 0.0

    def _relearn_changed(self, frames: Mapping[str, Frame], frame: Frame) -> Bools:
        """Learns GPUs again with other peers, other software, or after maintenance; returns (N,) those in
        maintenance."""
        if (regrouped := self.placement.update_topology(frame, self.kinds(frame)[0])) is not None and regrouped.any():
            for piece in (self.duty, self.draw, self.laggards):
                piece.reset(regrouped)
            self.since[1:, : len(regrouped)][:, regrouped] = 0
        if updated := find_relearned(frames):
            self._relearn(members_mask(updated, frame))
        if self.readings.recapped.any():
            self._relearn(self.readings.pop_recapped(np.arange(len(frame.entities)), self.placement.groups, frame.time))
        return self.gates.maintenance_mask(frame)

    def _find_symptoms(
        self, frames: Mapping[str, Frame], known: Bools, maintained: Bools, steps: Steps, departures: Departures
    ) -> Instant:
        """Returns what each GPU shows. known: (N,) judged now.   steps: of clock, activity and power."""
        (step, duty, draw), (fallen, fallen_for, less) = steps, departures
        n, time, readings = len(known), frames["gpu"].time, self.readings
        self.judged_at[:n][known] = time
        fresh = (np.abs(time - self.judged_at[:n]) <= _STALE) & (self.clocks.streams.counts[:n] > LEARN)
        past = fallen > 0
        counted = fresh & ~(maintained | readings.together) & (past | ~self.placement.reports_compute_time(time))
        bits = known & has_reason(readings.bits[:n], THROTTLE) & readings.known[:n]
        below, apart = self.clocks.below[:n], ~step.alone & ~step.moved
        least, changed = -float(np.log(SLOW_CLOCK)), np.where(step.judged, step.effect, 0)
        low = np.maximum(changed, np.where(below >= least, below, 0))
        throttled = bits & (low >= self.delta)
        far = (below >= least) | (np.minimum(below, changed) >= least / 2)
        clock = ((step.on | throttled | far) & apart) | past
        low = np.maximum(low, fallen)
        of_job = self.placement.job_known & ~clock
        busy, waiting, departs = self._compare_activity(duty, draw, less, of_job, time)
        on = np.stack([clock, busy, waiting]) & counted
        effect = np.stack([np.where(throttled, np.maximum(low, below), low), departs, -departs])
        since = self.since[:, :n]
        still = on | ((effect >= np.array([self.delta, self.duty_delta, self.duty_delta])[:, None] / 2) & counted)
        longest = np.maximum(duty.held, draw.held)
        began = time - SECOND * np.stack([np.where(past, fallen_for, step.held), longest, longest])
        since[:] = np.where(still, np.where((since == 0) & on, began, since), 0)
        losses = self.jobs.losses(self.placement.entities["job"])
        return Instant(frames, step, (duty, draw), on, effect, counted, fallen, less, losses)

    def _compare_activity(
        self, duty: Step, draw: Step, less: Floats, of_job: Bools, time: int
    ) -> tuple[Bools, Bools, Floats]:
        """Returns (N,) GPUs that are busier, that wait, and the ln by which they depart from the peers."""
        busy, waiting, departs = np.zeros(len(less), bool), np.zeros(len(less), bool), np.zeros(len(less))
        drawn = self.readings.discount_caps(draw.effect, self.placement.groups, time)
        for one, effect in ((duty, duty.effect), (draw, drawn)):
            unequal = one.on & ~one.moved & of_job
            busy |= unequal & ~one.below & (effect >= self.duty_delta / 2)
            waiting |= unequal & one.below
            departs = np.where(np.abs(effect) > np.abs(departs), effect, departs)
        unchanged = (less > 2 * np.abs(departs)) & of_job  # not what the streams compare with its own past
        waiting, departs = waiting | unchanged, np.where(unchanged, -less, departs)
        # tasks of its node wait for a processor, and far longer than those of most nodes
        shares = self.pressure.shares_of(self.placement.entities["node"])
        pressed = np.append(shares >= max(PRESSED, TIMES * float(np.nan_to_num(median_of(shares)[0]))), False)
        pressed = pressed[self.placement.numbers["node"]] & of_job & (departs <= -2 * self.duty_delta)
        return busy, waiting | pressed, departs

    def _find_suspicions(self, now: Instant) -> list[tuple[Suspicion, int]]:
        """Returns the GPUs and nodes that are blamed, with what they show: a number of _SIDES.

        Where a clock is low, the activity of the rest of its node follows from it.
        """
        placement, found = self.placement, list[tuple[Suspicion, int]]()
        explained, node = np.zeros(len(now.counted), bool), placement.numbers["node"]
        for side, least in enumerate((self.delta, self.duty_delta, self.duty_delta)):
            on = now.on[side] & ~explained
            if not on.any():
                continue
            counted = now.counted & ~explained
            effect = np.where(counted, now.effect[side], 0.0)
            found += [(s, side) for s in find_suspicions(on, effect, counted, placement, least, self.conditions)]
            if side == 0:
                explained |= np.isin(node, node[on]) & (node >= 0)
        return found

    def _report(self, now: Instant, suspicions: list[tuple[Suspicion, int]]) -> list[Finding]:
        """Returns the findings that are due."""
        time, jobs = now.frames["gpu"].time, self.placement.numbers["job"]
        judged = [(s, side, self._find_causes(now, s, side)) for s, side in suspicions]
        named = [int(jobs[s.slots[0]]) for s, side, known in judged if known or side == 0]
        found = []
        for suspicion, side, known in judged:
            job = int(jobs[suspicion.slots[0]])
            others = sum(int(jobs[s.slots[0]]) == job for s, _ in suspicions) - 1
            alone = others == 0 and (bool(known) or job not in named)
            # the rest of a job waits for the part that is known to be slow; a cap is what people set
            if (side and not known and job in named and job >= 0) or any(cause.key == POLICY for cause in known):
                continue
            level = self._decide(now, suspicion, side, known, alone)
            since = self.since[side][suspicion.slots]
            onset = int(since[since > 0].min(initial=time))
            if due := due_report(self.conditions, suspicion.entity, time, onset, level):
                found.append(self._describe(now, suspicion, side, known, due))
        return found

    def _held(self, side: int, mine: NDArray[np.intp], time: int) -> float:
        """Returns the s for which these GPUs show what a side says, in the median."""
        since = self.since[side][mine]
        return (time - float(np.median(since[since > 0]))) / SECOND if (since > 0).any() else 0.0

    def _past_or_product(self, i: int, now: Instant) -> str:
        """Returns what a low clock without peers is compared with."""
        numbers, names = self.kinds(now.frames["gpu"])
        return f"all {names[numbers[i]]}" if self.lowest.far[i] == now.fallen[i] else "own past"

    def _decide(self, now: Instant, suspicion: Suspicion, side: int, causes: list[Cause], alone: bool) -> Level:
        """Returns the level. Without a low clock, only what the job has lost since shows the harm."""
        mine, time = suspicion.slots, now.frames["gpu"].time
        held = self._held(side, mine, time)
        loss, cost = float(now.losses[self.placement.numbers["job"][mine[0]]]), float(now.effect[side][mine].max())
        if side == 0:
            told = any(cause.physical and not cause.is_clock for cause in causes)
            if cost < TENTH and not (loss >= CORROBORATED or (told and np.isnan(loss))):
                cost = min(cost, CORROBORATED / 2)  # the job does not wait for it, as far as is known
        else:
            began = self.jobs.slow_since(self.placement.ancestor("job", int(mine[0])))
            slow_for = held if began is None else (time - began) / SECOND
            loss = loss if abs(held - slow_for) <= self.hold and loss <= _EXPLAINS * cost else 0.0
            cost = max(loss, cost if causes else 0.0)
            held = held if causes else min(held, slow_for)  # the end of a phase is no loss that lasts
        peers = len(self.placement.others(mine, now.counted))
        # a busier node is slow, or a stage with more work; one that waits shows no reason; under a cap clocks differ
        waits = (np.median(self.readings.capped[mine]) < 0.5, suspicion.single, bool(causes))[side]
        weight = Weight(cost, held, peers, alone, bool(waits))
        hold = _HOST * self.hold if any(cause.key == "cpu_pressure" for cause in causes) else self.hold
        return decide_level(suspicion, causes, weight, hold, self.ticket_hold)

    def _find_causes(self, now: Instant, suspicion: Suspicion, side: int) -> list[Cause]:
        """Returns what GPUs and node show: of low clocks why, of waiting GPUs the host for which they wait."""
        mine, placement = suspicion.slots, self.placement
        time, share = now.frames["gpu"].time, -float(np.expm1(-np.median(now.effect[side][mine])))
        lasts = self._held(side, mine, time) >= self.hold
        if side == 0 and now.fallen[mine].any():
            low = f"SM clock {100 * share:.0f} %"
            text = f"{low} below {self._past_or_product(int(mine[0]), now)}, without an event reason"
            return [Cause("sm_clock_below_past", f"{low} low", text, "gpu.sm_clock", lasts, share)]
        if side == 2 and suspicion.single and now.less[mine].all():
            text = f"SMs {100 * share:.0f} % less active than those of all peers since it works with them"
            return [Cause("sm_less_active", "since start", text, "gpu.sm_active", lasts, share)]
        peers, column = placement.others(mine, now.counted), np.arange(len(now.counted))
        found = self.readings.find_causes(placement, mine, peers, column, self.clocks, time)
        if side:
            departs = float(np.abs(now.effect[side][mine]).max())
            found = drop_small_cap([cause for cause in found if cause.key == POLICY], departs, HARM)
        if side == 2 and not suspicion.single:
            found += find_host_cause(*placement.nodes_of_job(int(mine[0])), self.pressure)
        return found

    def _describe(
        self, now: Instant, suspicion: Suspicion, side: int, causes: list[Cause], due: tuple[int, Level]
    ) -> Finding:
        mine, placement, readings = suspicion.slots, self.placement, self.readings
        worst = int(mine[np.argmax(now.effect[side][mine])])
        peers = placement.others(mine, now.counted)
        step, last, signal, unit = now.clock, readings.clock, "gpu.sm_clock", "MHz"
        if side:
            number = int(np.argmax([np.abs(one.effect[worst]) * one.on[worst] for one in now.activity]))
            step = now.activity[number]
            last, signal, unit = ((self.active, "gpu.sm_active", "1"), (readings.watts, "gpu.power", "W"))[number]
        cohort = self._past_or_product(worst, now) if side == 0 and now.fallen[worst] else placement.cohort_name(worst)
        known = last[peers][np.isfinite(last[peers]) & (cohort != "own past")]
        value = float(last[worst])
        expected = float(np.median(known)) if len(known) else value * float(np.exp(now.effect[side][worst]))
        if side == 0 and len(known):
            value = min(value, expected * float(np.exp(-now.effect[0][worst])))  # it may recover for a moment
        spread, effect = expected * float(step.spread[worst]), (value - expected) / expected
        figures = value, expected, spread if np.isfinite(spread) else None
        compared = Comparison(*figures, cohort, len(known), effect if side else -effect, unit)
        loss = float(np.expm1(np.nan_to_num(now.losses[placement.numbers["job"][worst]])))
        return self.finding(
            now.frames["gpu"].time,
            suspicion.entity,
            due,
            score=float(step.score[mine].max()),
            summary=_write_title(suspicion, side, compared, causes, loss),
            signals=tuple(dict.fromkeys((signal, *(cause.signal for cause in causes)))),
            clears=f"it differs from the expected value by less than {50 * self.delta:.1f} %",
            compared=compared,
            gpus=[placement.names[i] for i in mine.tolist()],
            **placement.around(worst),
            cause=describe_causes(causes),
            attribution="HOST" if side == 2 and not suspicion.single else "NODE",
            job_loss=round(loss, 4),
            **{cause.key: cause.value for cause in causes},
        )

    def _follow_jobs(self, frames: Mapping[str, Frame], maintained: Bools, now: Instant) -> list[Finding]:
        """Returns the findings that are due on whole jobs; none on a job of which a part stands out."""
        n, placement, readings, frame = len(maintained), self.placement, self.readings, frames["gpu"]
        at_work = self.works[:n] & (frame.time - self.read_at[:n] <= _STALE)  # nodes are read at different moments
        throttled = has_reason(readings.bits[:n], THROTTLE) & at_work
        barred = maintained | placement.reports_compute_time(frame.time)
        shown = {"active": self.active[:n], "power": readings.watts[:n], "clock": readings.clock[:n]}
        shown["capped"] = has_reason(readings.bits[:n], SETTINGS).astype(np.float64)
        self.jobs.update(frames, shown, at_work, throttled, barred, self.gates, self.pressure)
        jobs, names = placement.numbers["job"], placement.entities["job"]
        blamed = {names[k] for k in np.unique(jobs[now.on.any(axis=0)]).tolist() if k >= 0}
        return self.jobs.report(frames, blamed, (self.hold, self.job_hold), self.name)


def _write_title(suspicion: Suspicion, side: int, compared: Comparison, causes: list[Cause], loss: float) -> str:
    """Returns the title: the value that is lower or higher than its peers', and why or what the job loses."""
    subject = f"{len(suspicion.slots)} GPUs, " if not suspicion.single else ""
    if compared.unit == "1":
        text = f"SMs active {100 * compared.value:.0f} %, peers {100 * compared.expected:.0f} %"
    else:
        what = "SM clock" if side == 0 else "power"
        against = "before" if compared.cohort == "own past" else "peers"
        text = f"{what} {compared.value:.0f} {compared.unit}, {against} {compared.expected:.0f}"
    if causes and not (side == 0 and causes[0].is_clock):
        why = causes[0].title
    elif side == 0:
        why = "no throttle bit"
    else:
        why = f"job {100 * loss:.0f} % slower" if loss >= CORROBORATED else "slow or more work"
    return pager_title(suspicion.entity, f"{subject}{text}, {why}")
