"""Finds ranks that compute slower than their own pipeline stage, and which GPU or node is to blame, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.budget import list_alarms
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report
from detectors.base.gates import Checkpoints, Gates, find_relearned
from detectors.base.pressure import Pressure
from detectors.base.state import State
from detectors.base.streams import LEARN, Bools, Channel, Floats, Step, Streams
from detectors.straggler.blame import HARM, STARTED, Suspicion, Weight, decide_level, find_suspicions, write_title
from detectors.straggler.gpu_placement import LEAST_PEERS
from detectors.straggler.gpu_readings import (
    CLOCK,
    POLICY,
    SIGNALS,
    Cause,
    ClockWatch,
    GpuReadings,
    describe_causes,
    drop_small_cap,
    find_host_cause,
)
from detectors.straggler.rank_slots import RankSlots
from detectors.straggler.step_samples import RING, StepSamples
from pipeline.model.records import SECOND, Finding, Frame, Level

_LASTS = 120 * SECOND  # us without a sample after which a rank is silent, not slow; chosen: two repeats
_SPREADS = 4.0  # peers' standard deviations by which a rank that has no past must be slower: one in 30,000 is by chance
_LONGEST = 0.02  # ln by which a rank may be quicker than the slowest stage and still be what the job waits for; chosen
_NEWEST = 3  # newest steps that must be slow: else the person on call would find nothing. Chosen
_BURST = 0.6
"""Share of what a slowdown costs now below which it cost so far: it grew, and counts for as long as the same loss takes
at the present cost. Chosen: medians of ten steps lag."""
_NORMAL = 1.4826  # median absolute deviation -> standard deviation of a normal distribution


@dataclass
class SlowTimes(State):
    """By slot. since: since when it is slow, 0 not (us).   lasted: s of steps in that time.   lost: s that it cost in
    them.   started: that time is one of slowness since its first sample, not of a change.   rose: first step (us) from
    which all were slower than usual, 0 none.   offset: own normal where ranks of several stages are compared.
    accepted: ln of the slowdown that a person called no fault.   newest: departures from cohort and own past.
    """

    since: NDArray[np.int64] = memory(0, np.int64)
    lasted: Floats = memory(0.0)
    lost: Floats = memory(0.0)
    started: Bools = memory(False, np.bool_)
    rose: NDArray[np.int64] = memory(0, np.int64)
    offset: Floats = memory(0.0)
    accepted: Floats = memory(0.0)
    newest: Floats = memory(0.0, shape=(-1, _NEWEST))


@dataclass(frozen=True, slots=True)
class Lateness:
    """(S,) ln by which each is slower. behind: than its team, in the median of ten steps, NaN unknown.

    effect: than its own past, smoothed, 0 while that is unknown.   started: slow since its first sample.
    cost: what its job loses by it, if it waits for it.
    """

    behind: Floats
    effect: Floats
    started: Bools
    cost: Floats


@dataclass
class Straggler(Detector):
    """Compares ln(compute time) of each rank with its pipeline stage: stages differ by design.

    Changed: a CUSUM against stage and own past exceeds `threshold` and the slowdown `delta` (natural logarithm). Slow
    since its first sample: the median of ten steps is 17 % above that of its peers, and four standard deviations of
    theirs; `ratio` where there are fewer than 8 ranks. A rank is judged from its tenth step on.

    Page: 10 % slower than before and than its stage for `hold` s, its job waits for it, and no other part of the job is
    slow; 5 % slower with a cause that its device shows: a throttle bit; 10 % with a clock that
    is as low and that no policy explains. Tasks of its node that wait for processors count after `hold` s.

    Ticket: a rank 10 % slower for `ticket_hold` s; a node, or a rank 5 % slower than before, after `hold` s. One that
    is slow since its first sample has more work or a slow device: a ticket from 17 %, a page after `hold` s from 22 %,
    which no spread of manufacture explains, or if the device shows the cause.

    If most GPUs of a node are slow, the node is the cause. If over 30 % of a stage's nodes are slow, none of them is:
    see straggler_job. A lower power cap is policy: a suspect, as far as the clock is lower; time under one that does
    not come and go counts for no slowness beyond it, and time in which the job pauses for none. After a change of the
    power limits of most of a stage its ranks learn again. GPUs of a loop or rack that throttle together are left to the
    detectors of heat and power.

    Announced maintenance is not judged. After a software change a rank learns again; after a pause it restarts without
    suspicion. A stage that is too small is compared with the whole job.

    Source: the clipped form of Page's CUSUM (Biometrika 41, 1954); Greyhound (Wu et al., ATC 2025) for the check that
    the mean moved; Lin et al. (OSDI 2025) found workers the main cause in only 1.7 % of slow jobs, so a slow stage
    blames none; hold: the longest benign slowdown of a node, 300 s; ticket_hold: ten steps of 10 s; chosen.
    """

    name: ClassVar[str] = "straggler"
    family: ClassVar[str] = "straggler"
    device_class: ClassVar[str] = "rank"
    needs: ClassVar[tuple[str, ...]] = ("rank.compute_time",)
    wants: ClassVar[tuple[str, ...]] = (
        *("rank.step", *SIGNALS),
        *("event:job_start", "event:version", "event:maintenance_start"),
    )
    cannot_see: ClassVar[str] = (
        "A rank slow from its first sample by less than 17 %, or `ratio` among fewer than 8. A node of a "
        "two-node job slow by less than 7 %. All nodes of a stage that are slow together, or throttle with their loop."
    )

    threshold: float = 18.5
    delta: float = 0.03
    ratio: float = 1.25
    hold: float = 300.0
    ticket_hold: float = 100.0

    slots: RankSlots = part(RankSlots)
    samples: StepSamples = part(StepSamples)
    gates: Gates = part(Gates)
    saving: Checkpoints = part(Checkpoints)
    readings: GpuReadings = part(GpuReadings, of="gpu", kept=True)
    clocks: ClockWatch = part(ClockWatch)
    pressure: Pressure = part(lambda: Pressure("node.cpu_pressure"), of="node")
    streams: Streams = part(lambda: Streams(Channel(0.01, 0.03)))
    slow: SlowTimes = part(SlowTimes)
    conditions: OpenConditions = notes()
    accepted: list[str] = notes(list)

    def __post_init__(self) -> None:
        self.streams.channel = Channel(0.01, self.delta, threshold=self.threshold)

    def budget(self) -> list[str]:
        """Returns the false alarm rates of its tests."""
        streams = {"compute time": self.streams.channel, "SM clock": CLOCK}
        return list_alarms(streams, None, f"the median of {RING} steps, {self.ratio:g} times the stage's")

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings on ranks that compute slower than their stage."""
        self.gates.update(frames)
        if "node" in frames:
            self.pressure.update(frames["node"])
        gpus, frame = frames.get("gpu"), frames.get("rank")
        if gpus is not None:
            self.readings.update(gpus)
        if frame is None or not len(frame.entities):
            return []
        slots, time, working = self.slots, frame.time, self._follow_ranks(frames, frame)
        values = np.where(working, self.samples.read_steps(frame, slots), np.nan)
        self._clear(self.samples.rested)
        team = slots.team_medians(values) + self.slow.accepted[: len(slots)]
        near = self.samples.record(values, team, HARM / 2)
        offset, learned = self._learn_offsets(values)
        numbers, names = self.kinds(frame)
        kinds = np.append(numbers, -1).astype(np.int32)[slots.column], names
        step = self.streams.step(values - offset, slots.groups, time, learned, kinds)
        self._record_newest(values - offset - step.median - self.streams.cells[kernel.BASELINE, : len(slots)], time)
        silent = self.samples.is_silent(time, _LASTS)[: len(slots)] | ~working
        if gpus is not None and "gpu.sm_clock" in gpus.values:
            self.clocks.step(slots.of_gpus(gpus["gpu.sm_clock"]), slots.groups, time, working & ~silent, kinds)
        # what throttles with others of its loop is left to the detectors of heat and power
        silent |= np.append(self.readings.together, False)[slots.gpu_column]
        late = self._measure_lateness(step, (near | (self.slow.since[: len(slots)] > 0)) & ~silent)
        slow = self._follow(step, late, silent, time)
        if slow.any():
            return self._report(time, step, slow, late, ~silent)
        close_ended(self.conditions, set())
        return []

    def _follow_ranks(self, frames: Mapping[str, Frame], frame: Frame) -> Bools:
        """Follows moves, software and feedback; returns (S,) ranks that may be judged."""
        slots = self.slots
        fresh = slots.update_slots(frame, self.gates)
        if "gpu" in frames:
            slots.locate_gpus(frames["gpu"])
        self.slow.grow(len(slots))
        self._relearn(fresh)
        if self.readings.recapped.any():
            self._relearn(np.flatnonzero(self.readings.pop_recapped(slots.gpu_column, slots.team, frame.time)))
        if changed := find_relearned(frames):
            self._relearn(np.flatnonzero(slots.mask(changed, frame)))
        self._accept(frame)
        working = np.append(~self.gates.maintenance_mask(frame), False)[slots.column]
        if jobs := self.saving.update(frames, frame.time):
            working &= ~slots.mask(jobs, frame)
        return np.asarray(working)

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """Learns the ranks of an entity again with the next frame of ranks."""
        self.accepted.append(entity)

    def _accept(self, frame: Frame) -> None:
        """Applies the feedback that some slow ranks are not faults."""
        if self.accepted:
            mine = np.flatnonzero(self.slots.mask(self.accepted, frame))
            typical = np.nan_to_num(self.samples.typical(mine))
            self._relearn(mine)
            self.slow.accepted[mine] = np.maximum(typical, 0.0)
            self.accepted = []

    def _relearn(self, slots: Sequence[int] | NDArray[np.intp]) -> None:
        """Learns ranks again: with other software, or others than before or elsewhere."""
        if len(slots):
            mask = np.zeros(len(self.slow.since), bool)
            mask[slots] = True
            self.streams.reset(mask)
            for piece in (self.clocks, self.slow, self.samples):
                piece.reset(mask)

    def _clear(self, slots: Sequence[int]) -> None:
        """Ends the conditions of some slots; their baselines stay."""
        if len(slots):
            for streams in (self.streams, self.clocks.streams):
                streams.clear_conditions(slots)
            self.samples.restart(slots)
            self.slow.since[slots], self.slow.rose[slots] = 0, 0

    def _learn_offsets(self, values: Floats) -> tuple[Floats, Bools]:
        """Returns (S,) the offset subtracted before ranks are compared, and which have it.

        Ranks of one stage are compared as they are; those of several stages by their departure from their own first
        steps: otherwise their median would be between two stages and jump with either.
        """
        pooled, size = self.slots.pooled, len(values)
        if not pooled.any():
            return np.zeros(size), np.ones(size, bool)
        count, offset = self.samples.steps[:size], self.slow.offset[:size]
        young = np.flatnonzero(pooled & np.isfinite(values) & (count <= LEARN))
        offset[young] += (values[young] - offset[young]) / np.maximum(count[young], 1)
        return np.where(pooled, offset, 0.0), np.asarray(~pooled | (count > LEARN))

    def _record_newest(self, departure: Floats, time: int) -> None:
        """Adds the newest departures from cohort and own past, which show since when a rank is slow."""
        known, rose = np.flatnonzero(np.isfinite(departure)), self.slow.rose[: len(departure)]
        self.slow.newest[known, self.samples.steps[known] % _NEWEST] = departure[known]
        rose[departure < HARM / 2] = 0
        np.copyto(rose, time, where=(departure >= HARM / 2) & (rose == 0))

    def _measure_lateness(self, step: Step, near: Bools) -> Lateness:
        """Compares the ranks that may be slow with the others of their team. near: (S,) may be far behind."""
        size, slots, samples = len(near), self.slots, self.samples
        behind, late = np.full(size, np.nan), np.zeros(size, bool)
        near = near | step.on
        counted = (slots.column >= 0) & (samples.count[:size] >= RING) & (samples.steps[:size] > LEARN)
        for team in np.unique(slots.team[near & counted]).tolist():
            members = np.flatnonzero(counted & (slots.team == team))
            typical, mine = samples.typical(members), near[members]
            others = typical[~mine] if np.count_nonzero(~mine) * 2 >= len(mine) else typical
            if team < 0 or len(members) < 2:
                continue
            usual = float(np.median(others))
            limit = float(np.log(self.ratio))
            if len(others) + 1 >= LEAST_PEERS:
                limit = min(limit, max(HARM, _SPREADS * _NORMAL * float(np.median(np.abs(others - usual)))))
            at = members[mine]
            behind[at] = typical[mine] - usual
            late[at] = behind[at] >= np.where(self.slow.since[at] > 0, limit / 2, limit)
        learned, normal = self.streams.counts[:size] >= LEARN, self.streams.cells[kernel.BASELINE, :size]
        effect = np.where(learned, step.effect, 0.0).astype(np.float64)
        own = slots.lone | (slots.groups < 0) | ~np.isfinite(behind)
        changed = step.on & (own | (behind >= self.delta / 2))  # else it has only lost a lead
        started = late & (effect < behind / 3)  # of half a cohort the median is between both
        late &= ~started | (behind >= np.where(self.slow.since[:size] > 0, 0.75, 1.0) * STARTED)
        started &= late
        effect = np.where(own | started | slots.pooled, effect, np.fmax(effect, behind - normal))
        cost = np.where(started, behind, np.where(own, effect, np.fmin(effect, behind)))
        return Lateness(behind, effect, started, np.where(changed | late, cost, 0.0))

    def _follow(self, step: Step, late: Lateness, silent: Bools, time: int) -> Bools:
        """Returns (S,) the slow ranks; follows for how long each has been slow."""
        size, slow = len(silent), self.slow
        now = (late.cost > 0) & (self.slots.column >= 0)
        since, lasted, lost = slow.since[:size], slow.lasted[:size], slow.lost[:size]
        since[~now & ~silent] = 0
        other = now & (slow.started[:size] != late.started)  # slow since its start, and slower for minutes
        lasted[other], lost[other] = 0.0, 0.0
        np.copyto(slow.started[:size], late.started, where=now)
        lasted += self.samples.passed * now
        lost += self.samples.passed * late.cost
        new = np.flatnonzero(now & (since == 0))
        if len(new):
            gap = self.samples.gap[new]
            counted = np.array([int(bits).bit_count() for bits in self.samples.over[new]])
            first = time - np.maximum(counted - 1, 0) * gap
            # a rank a little slower than its team before only changed then
            rose = np.where(slow.rose[new] > 0, slow.rose[new], time)
            begun = np.where(late.started[new], first, rose)
            since[new] = np.where(step.on[new], np.minimum(begun, first), begun)
            lasted[new] = np.maximum(time - np.where(late.started[new], begun + gap, begun), 0) / SECOND
            lost[new] = lasted[new] * late.cost[new]
            steps = self.samples.steps[new]  # found as soon as it is judged: slow in all of its steps
            early = late.started[new] & (steps <= LEARN + 2)
            since[new] = np.where(early, np.minimum(since[new], time - (steps - 1) * gap), since[new])
        return np.asarray(now & ~silent)

    def _report(self, time: int, step: Step, slow: Bools, late: Lateness, counted: Bools) -> list[Finding]:
        """Returns the findings that are due on slow ranks."""
        slots = self.slots
        present = counted & (slots.column >= 0) & (self.samples.steps[: len(slow)] > 0)
        effect = np.where(present, np.fmax(late.cost, late.effect), 0.0)
        found = find_suspicions(slow, effect, present, slots, self.delta, self.conditions)
        close_ended(self.conditions, {s.entity for s in found})
        blamed = [(s, self._find_causes(s, present, time, float(late.cost[s.slots].max()))) for s in found]
        # a rank slow since its start has more work, and shows nothing about ranks that became slow
        old = [bool(2 * np.count_nonzero(late.started[s.slots]) > len(s.slots)) for s in found]
        others = zip(blamed, old, strict=True)
        unexplained = [(slots.ancestor("job", int(s.slots[0])), o) for (s, causes), o in others if not causes]
        reports = []
        for (suspicion, causes), since_start in zip(blamed, old, strict=True):
            job = slots.ancestor("job", int(suspicion.slots[0]))
            alone = sum(each == job and (since_start or not o) for each, o in unexplained) <= 1
            weight = self._weigh(suspicion, step, late, alone)
            level = decide_level(suspicion, causes, weight, self.hold, self.ticket_hold)
            if any(cause.key == POLICY and cause.value < 1 for cause in causes):
                # time under a cap that does not come and go counts for no slowness beyond it
                self.slow.lasted[suspicion.slots], self.slow.lost[suspicion.slots] = 0.0, 0.0
            since = int(self.slow.since[suspicion.slots][slow[suspicion.slots]].min())
            if due := due_report(self.conditions, suspicion.entity, time, since, level):
                reports.append(self._slow_finding(time, suspicion, causes, due, step, late))
        return reports

    def _weigh(self, suspicion: Suspicion, step: Step, late: Lateness, alone: bool) -> Weight:
        mine, samples = suspicion.slots, self.samples
        own = mine[self.slow.since[mine] > 0]
        cost, slots = float(late.cost[mine].max()), self.slots
        held, at_this_cost = self.slow.lasted[own], self.slow.lost[own] / np.maximum(late.cost[own], 1e-9)
        held = np.where(at_this_cost < _BURST * held, at_this_cost, held)  # it began with a little
        lasted = float(np.median(held)) if len(own) else 0.0  # one of a node may have paused before
        # of half a cohort the median is between both; and slower than the others, not than the median of all
        own = late.started[mine] | (self.slow.newest[mine].min(axis=1) >= cost / 3)
        apart = samples.newest(mine, _NEWEST) + late.behind[mine] - samples.typical(mine)
        # where they are half of their team, no rank is left that shows it
        team, all_of = slots.team[mine], np.bincount(slots.team[slots.team >= 0])
        most = (team >= 0) & (2 * np.bincount(team[team >= 0], minlength=len(all_of)) >= all_of)[team]
        if 2 * np.count_nonzero(own & (most | ~(apart < cost / 2))) < len(mine):
            cost = 0.0  # most of them are as fast as the others again
        of_job = samples.team[: len(step.on)][slots.numbers["job"] == slots.numbers["job"][mine[0]]]
        longest = float(np.nanmax(of_job)) if np.isfinite(of_job).any() else -np.inf
        times = samples.team[mine] + np.nan_to_num(late.behind[mine])
        waits = not np.nanmax(times, initial=np.inf) < longest - _LONGEST
        slow = late.started[mine[self.slow.since[mine] > 0]]
        started = bool(2 * np.count_nonzero(slow) >= len(slow) > 0)
        return Weight(cost, lasted, int(step.size[mine].max()) - 1, alone, waits, started)

    def _find_causes(self, suspicion: Suspicion, counted: Bools, time: int, cost: float) -> list[Cause]:
        slots, mine = self.slots, suspicion.slots
        peers = slots.others(mine, counted)
        found = self.readings.find_causes(slots, mine, peers, slots.gpu_column, self.clocks, time)
        found = drop_small_cap(found, cost, HARM)
        return [*found, *find_host_cause(*slots.nodes_of_job(int(mine[0])), self.pressure)]

    def _slow_finding(
        self, time: int, suspicion: Suspicion, causes: list[Cause], due: tuple[int, Level], step: Step, late: Lateness
    ) -> Finding:
        mine, slots, samples = suspicion.slots, self.slots, self.samples
        worst = int(mine[np.argmax(late.cost[mine])])
        cost, departs = float(late.cost[worst]), float(samples.typical(mine[mine == worst])[0])
        value = float(np.exp(np.nan_to_num(samples.team[worst]) + (departs if np.isfinite(departs) else cost)))
        expected, spread = value / float(np.exp(cost)), float(step.spread[worst])
        peers = max(int(step.size[worst]) - len(mine), 0)
        compared = Comparison(
            *(value, expected, expected * spread if np.isfinite(spread) else None, slots.cohort_name(worst)),
            *(peers, float(np.expm1(cost)), "s"),
        )
        around = slots.around(worst)
        started = bool(late.started[worst])
        cause = describe_causes(causes)
        return self.finding(
            time,
            suspicion.entity,
            due,
            score=float(step.score[mine].max()),
            summary=write_title(suspicion, compared, around.get("gpu"), causes, started),
            signals=tuple(dict.fromkeys(("rank.compute_time", *(cause.signal for cause in causes)))),
            clears=f"its departure from the expected compute time falls below {50 * self.delta:.1f} %",
            compared=compared,
            slowdown=round(1 + compared.effect, 4),
            **around,
            ranks=[slots.names[i] for i in mine.tolist()],
            cause="slow since it started: more work or a slow device" if started and not causes else cause,
            attribution="HOST" if any(cause.key == "cpu_pressure" for cause in causes) else "NODE",
            **{cause.key: cause.value for cause in causes},
        )
