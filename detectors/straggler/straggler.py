"""Finds ranks that compute slower than their own pipeline stage, and which GPU or node is to blame, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report
from detectors.base.group_events import HOLD, GroupEvents, Quantity
from detectors.base.state import State
from detectors.base.streams import LEARN, Bools, Channel, Floats, Step, Streams
from detectors.straggler.alarm_budget import rank_budget
from detectors.straggler.causes import (
    CLOCK,
    POLICY,
    SIGNALS,
    Cause,
    CauseTracker,
    Suspicion,
    clear_conditions,
    collect_causes,
    describe_causes,
    find_suspicions,
    write_title,
)
from detectors.straggler.mass_throttling import ThrottlingCohorts, step_frozen
from detectors.straggler.power_caps import PowerCaps
from detectors.straggler.rank_slots import LEAST_PEERS, MOST_OF_COHORT, RankSlots
from detectors.straggler.step_samples import RECENT, RING, StepSamples, record_steps
from detectors.straggler.untrusted_baselines import LateLearners, SlowSinceStart
from pipeline.model.records import SECOND, Finding, Frame, Level

_TOGETHER = Quantity(("rank.compute_time",), "compute slower", "compute faster")
_LASTS = 120 * SECOND  # us without a sample after which a rank is silent, not slow; chosen: two repeats


@dataclass
class RankTimes(State):
    """By slot. newest: ln(compute time) of the newest step; usual: expected from peers and baseline.

    recent: newest departures from the stage and from its own normal.   count: steps recorded.
    offset: its own normal where ranks of several stages are compared.
    """

    recent: NDArray[Any] = memory(0, RECENT)
    count: NDArray[np.int64] = memory(0, np.int64)
    newest: Floats = memory(np.nan)
    usual: Floats = memory(np.nan)
    offset: Floats = memory(0.0)


@dataclass
class SlowTimes(State):
    """By slot, us; 0: not so. rose: since when the sum is above 0.   above: since when the effect matters.

    behind: since when far behind the stage in the median of ten steps.   lagged: when last slower than its stage.
    """

    rose: NDArray[np.int64] = memory(0, np.int64)
    above: NDArray[np.int64] = memory(0, np.int64)
    behind: NDArray[np.int64] = memory(0, np.int64)
    lagged: NDArray[np.int64] = memory(0, np.int64)


@dataclass
class Straggler(Detector):
    """Peer-conditioned CUSUM on ln(compute time) within the pipeline stage. Stages differ by design.

    Suspect: the sum exceeds `threshold` and the smoothed slowdown exceeds `delta` (natural logarithm), or the median of
    ten steps is `ratio` times the stage's.

    Page at once if the GPU shows the cause: a throttle bit, a narrower PCIe link, or a clock below its peers' without a
    power cap. Otherwise page after `hold` s. That requires at least `peers` faster ranks, except if tasks of its node
    wait for processors or clocks are low.

    Slow since its first sample: a ticket after `start_hold` s ("more work or a slow device"), unless ranks of its stage
    on other nodes are slow too, which is by design. It pages after `hold` s if its GPU's clock is below 0.8 of its
    stage's without a power cap, or if a rank of other work was slow on the same GPU before.

    If several GPUs of a node are slow together, the node is the cause. If over `most` of a stage's nodes are slow, none
    of them is blamed: see straggler_job.

    Not judged:

    - Ranks that throttle in a stage where over 30 % of the GPUs throttle, on three nodes, for up to 4 h: coolant and
      power report that. Meanwhile no rank of the stage learns. The healthy ones are compared with each other if there
      are at least 8.
    - Announced maintenance, checkpoints, our own canaries, and the first `warm_up` steps of a job or of a moved rank.
    - Several GPUs whose power cap differs from their cohort's, by the throttle bit or by their power. If the bit
      flickers under full load, it must be set for more of the time than usual.

    After a software change a rank learns again; after a pause it restarts without suspicion. A stage that is too small
    is compared with the whole job. With fewer than 8 ranks nothing pages without a visible cause. Nor does a small
    stage whose ranks are all slow after they had learned, or a rank alone in its stage: the stage may have more work.

    Source: the clipped form of Page's CUSUM (Biometrika 41, 1954); Greyhound (Wu et al., ATC 2025) for the check that
    the mean moved; Lin et al. (OSDI 2025) found workers the main cause in only 1.7 % of slow jobs, so a slow stage
    blames none; hold: twice the longest benign slowdown of 300 s, as two may meet; chosen.
    """

    name: ClassVar[str] = "straggler"
    family: ClassVar[str] = "straggler"
    device_class: ClassVar[str] = "rank"
    needs: ClassVar[tuple[str, ...]] = ("rank.compute_time",)
    wants: ClassVar[tuple[str, ...]] = (
        *("rank.step", "rank.tokens", *SIGNALS),
        *("event:job_start", "event:checkpoint", "event:digest", "event:version", "event:maintenance_start"),
    )
    cannot_see: ClassVar[str] = (
        "A rank that is slow from its first sample by less than 1.25 times its stage's median; a node that is half of "
        "its stage moves that median too. A larger slowdown is only a suspect if ranks on other nodes of its stage "
        "are slow too. A node of a two-node job that is slow by less than 7 %: it moves the median of both by half of "
        "that. All nodes of a stage that are slow together. For 4 h, a node that became slow just before all others "
        "of its stage learned again. A rank, while no other of its stage is as fast as before, unless its GPU or node "
        "shows the cause. Ranks that throttle with a third of their stage, under a lower power cap, or for minutes at "
        "a time. A rank that was faster than its stage and no longer is. Jobs without compute times: see "
        "straggler_inferred."
    )

    threshold: float = 18.5
    delta: float = 0.03
    ratio: float = 1.25
    hold: float = 600.0
    start_hold: float = 1800.0
    peers: int = LEAST_PEERS
    most: float = MOST_OF_COHORT
    warm_up: float = 200.0

    slots: RankSlots = part(RankSlots)
    samples: StepSamples = part(StepSamples)
    causes: CauseTracker = part(CauseTracker)
    caps: PowerCaps = part(PowerCaps)
    throttling: ThrottlingCohorts = part(ThrottlingCohorts)
    late_learners: LateLearners = part(LateLearners)
    started: SlowSinceStart = part(SlowSinceStart)
    streams: Streams = part(lambda: Streams(Channel(0.01, 0.03)))
    group: GroupEvents = part(lambda: GroupEvents(_TOGETHER))
    times: RankTimes = part(RankTimes)
    since: SlowTimes = part(SlowTimes)
    conditions: OpenConditions = notes()
    _doubt: Bools = field(default_factory=lambda: np.zeros(0, bool), init=False, repr=False)

    def __post_init__(self) -> None:
        self.streams.channel = Channel(0.01, self.delta, threshold=self.threshold)

    def budget(self) -> list[str]:
        """Returns the false alarm rates of its tests."""
        return rank_budget(self.streams.channel, CLOCK, self.ratio, RING)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings on ranks that compute slower than their stage."""
        events, frame = self.samples.read_events(frames), frames.get("rank")
        if frame is None or not len(frame.entities):
            return []
        fresh = self.slots.update_slots(frame)
        self.times.grow(len(self.slots))
        self.since.grow(len(self.slots))
        self._reset(fresh, elsewhere=True)
        relearn = self.samples.apply_events(fresh, events, frame, self.slots, self.since.rose)
        self.started.accept(self.samples.accepted_slots, self.since.behind, self.times.recent["stage"])
        self._reset(relearn)
        self._clear(self.samples.canary_slots, frame.time)
        capped = self.causes.read_throttling(frames, self.slots)
        values, gate = self.samples.read_steps(frame, self.slots, self.warm_up)
        cohorts = self.throttling.update(self.causes.throttled, self.slots, frame.time)
        values[cohorts.excluded] = np.nan
        self._clear(restart := [*self.samples.rested, *cohorts.readmitted], frame.time)
        self.causes.clear(restart)
        out = self._apply_caps(capped, values, gate, frame.time) | cohorts.excluded
        gate = gate & ~out
        offset, known = self._learn_offsets(values, gate)
        groups = self.slots.groups
        step = step_frozen(self.streams, values - offset, groups, frame.time, gate & known, cohorts.frozen)
        silent = self.samples.silent(frame.time, _LASTS)[: len(gate)]
        at_work = gate & ~silent  # an idle GPU has another clock
        self.causes.read_clocks(frames, self.slots, at_work, cohorts.frozen, frame.time)
        self._watch_since_start(frames, at_work)
        slow = self._find_slow(step, values, offset, gate, frame.time) & ~(out | silent)
        alike = self._group_findings(frame, step)
        counts = self.streams.counts
        late = self.late_learners.update(slow, silent, self.since.rose, counts, self.slots, frame.time)
        self._relearn(late.relearn)
        if slow.any():
            witness = late.witness & ~(out | silent)
            return [*self._report(frame, step, slow, cohorts.throttled, witness), *alike]
        close_ended(self.conditions, set())
        return alike

    def _group_findings(self, frame: Frame, step: Step) -> list[Finding]:
        """Returns what many ranks of a stage have in common: no power cap, which is policy, no throttling, whose cause
        the detectors of heat and power report, and no whole stage of a job, which is the job's own."""
        slots, gates, blamed = self.slots, self.samples.gates, self.conditions
        throttled = self.causes.throttled[: len(step.on)]
        counted = ~(self._doubt | slots.cross_stage | ((throttled > 0) & (frame.time - throttled <= HOLD)))
        return self.group.update(frame, slots.ranks, step, slots.cohort_name, gates, self.name, counted, blamed)

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """Learns the ranks of an entity again with the next frame of ranks."""
        self.samples.relearn(entity)

    def _reset(self, slots: Sequence[int], elsewhere: bool = False) -> None:
        """Learns ranks again: with other software, or others than before or elsewhere."""
        if len(slots):
            self.caps.reset_slots(slots)
            if elsewhere:
                self.throttling.reset_slots(slots)
            self._relearn(slots, elsewhere)

    def _relearn(self, slots: Sequence[int], elsewhere: bool = False) -> None:
        if not len(slots):
            return
        mask = np.zeros(len(self.times.count), bool)
        mask[list(slots)] = True
        self.streams.reset(mask[: self.streams.cells.shape[1]])
        self.causes.reset_slots(slots, elsewhere)
        self.since.reset(mask)
        self.times.count[mask], self.times.offset[mask] = 0, 0.0
        self.started.restart(slots, self.times.count, elsewhere)

    def _clear(self, slots: Sequence[int], time: int) -> None:
        """Ends the conditions of some slots; their baselines stay."""
        if len(slots):
            clear_conditions(self.streams, slots)
            self.since.behind[slots], self.since.above[slots], self.since.rose[slots] = 0, 0, time
            self.started.restart(slots, self.times.count)

    def _watch_since_start(self, frames: Mapping[str, Frame], at_work: Bools) -> None:
        gpus = frames.get("gpu")
        if gpus is not None and "gpu.sm_clock" in gpus.values:
            self.started.read_clocks(self.slots.read_gpus(gpus, "gpu.sm_clock"), self.slots, at_work)

    def _apply_caps(self, capped: Bools, values: Floats, gate: Bools, time: int) -> Bools:
        """Returns (S,) ranks that may not be judged: a power cap comes or goes on them, and not on their peers."""
        known = (self.slots.column >= 0) & self.causes.known[: len(capped)]
        effects = self.caps.update(capped, self.slots.groups, known, gate & np.isfinite(values))
        self._clear(effects.restart, time)
        self.causes.clear(effects.restart)
        self._relearn(effects.relearn)
        self._doubt = effects.doubt
        return effects.hold

    def _learn_offsets(self, values: Floats, gate: Bools) -> tuple[Floats, Bools]:
        """Returns (S,) the offset subtracted before ranks are compared, and which have it.

        Ranks of one stage are compared as they are; those of several stages by their departure from their own first
        steps: otherwise their median would be between two stages and jump with either.
        """
        mixed, size = self.slots.cross_stage, len(values)
        if not self.slots.any_cross_stage:
            return np.zeros(size), np.ones(size, bool)
        count, offset = self.times.count[:size], self.times.offset[:size]
        young = np.flatnonzero(mixed & gate & np.isfinite(values) & (count < LEARN))
        offset[young] += (values[young] - offset[young]) / (count[young] + 1)
        return np.where(mixed, offset, 0.0), np.asarray(~mixed | (count >= LEARN))

    def _find_slow(self, step: Step, values: Floats, offset: Floats, gate: Bools, time: int) -> Bools:
        """Returns (S,) ranks with a condition: the CUSUM's, or far behind the stage in the median of ten steps."""
        size, cells = len(values), self.streams.cells[:, : len(values)]
        times, since = self.times, self.since
        median = step.median.astype(np.float64)
        expected = offset + np.where(step.alone, 0.0, median) + cells[kernel.BASELINE]
        stage = self.slots.fill_stage_medians(values, median) + self.started.accepted_offset(size)
        rose = since.rose[:size]
        np.copyto(rose, time, where=step.judged & ((cells[kernel.UP] <= 0) | (rose == 0)))
        above, matters = since.above[:size], step.effect >= self.delta
        above += np.where(above > 0, self.samples.paused, 0)
        above[~matters] = 0
        above[matters & (above == 0)] = time
        limit, behind, close_by = np.log(self.ratio), since.behind[:size], np.empty(size, bool)
        recent = times.recent["stage"][:size], times.recent["own"][:size]
        kept = times.newest[:size], times.usual[:size], *recent, times.count[:size], behind
        if record_steps(values, gate, expected, stage, float(limit), LEARN, *kept, close_by):
            # half of the limit ends it, so that a ratio near the limit does not flicker
            near = np.flatnonzero(close_by)
            typical, began = np.median(times.recent["stage"][near], axis=1), behind[near]
            far = typical >= np.where(began > 0, limit / 2, limit)
            behind[near] = np.where(far, np.where(began == 0, time, began), 0)
        self.started.backdate(gate & np.isfinite(values), times.count[:size], behind, time)
        return np.asarray((step.on | (behind > 0)) & (self.slots.column >= 0))

    def _report(self, frame: Frame, step: Step, slow: Bools, throttled: Bools, witness: Bools) -> list[Finding]:
        """Returns the findings that are due on slow ranks.

        throttled: with many of their cohort.   witness: (S,) ranks that show whether others or their stage are slow.
        """
        size, time = len(slow), frame.time
        counted = (self.slots.column >= 0) & (witness | slow) & (self.times.count[:size] > LEARN)
        least = np.log(self.ratio) * (self.since.behind[:size] > 0)
        effect = np.where(counted, np.maximum(step.effect, least), 0.0)
        settings = self.slots, self.most, self.delta, self.conditions
        suspicions = find_suspicions(slow, effect, counted, throttled, *settings)
        close_ended(self.conditions, {s.entity for s in suspicions})
        suspected = [slot for s in suspicions for slot in s.slots]  # the others are slow with their stage, not alone
        self.since.above[np.setdiff1d(np.flatnonzero(slow), suspected)] = time
        found = []
        for suspicion in suspicions:
            level, causes, suspicion = self._judge(suspicion, step, time)
            slots, behind = np.array(suspicion.slots), self.since.behind
            late = np.where(behind[slots] > 0, behind[slots], time)
            since = int(np.where(step.on[slots], self.since.rose[slots], late).min())
            slower = float(np.median(step.effect[slots]))
            throttles = any(cause.key == "throttled" for cause in causes)
            if not throttles and self.causes.explained_by_cap(slots, slower, since, self.slots):
                level, causes = "suspect", [POLICY]
            if due := due_report(self.conditions, suspicion.entity, time, since, level):
                found.append(self._slow_finding(frame, suspicion, causes, due, step))
        return found

    def _judge(self, suspicion: Suspicion, step: Step, time: int) -> tuple[Level, list[Cause], Suspicion]:
        """Returns the level, the causes, and the suspicion, without its doubt where the rank is slow since its start.

        Ranks that only lost a lead learn that as their usual.
        """
        causes = collect_causes(suspicion, self.causes, self.slots, time)
        late, usual = find_lagging(self, np.array(suspicion.slots), step, time)
        self._relearn(usual)
        level = self.decide_level(suspicion, causes, late, self._doubt, time, step)
        if level != "suspect":
            return level, causes, suspicion
        level, causes = level_since_start(self, suspicion, causes, time)
        return level, causes, suspicion if level == "suspect" else replace(suspicion, doubt="")

    def decide_level(
        self, suspicion: Suspicion, causes: Sequence[Cause], late: Bools, doubt: Bools, time: int, step: Step
    ) -> Level:
        """Returns page with a physical cause without a hold, else after the hold and only among enough peers.

        What a power cap that comes or goes may explain is not a page: clocks and sums prove nothing then. Nor is a rank
        that was quicker than its stage and is no slower than the others now: none waits for it. late: (slots,) from
        find_lagging(); doubt: (S,) whose sums may be of a cap.
        """
        slots, times, above = np.array(suspicion.slots), self.times, self.since.above
        if not late.any():
            return "suspect"
        if doubt[slots].all():
            return "page" if any(cause.physical and cause.signal != "gpu.sm_clock" for cause in causes) else "suspect"
        if any(self.causes.is_proof(cause, slots) for cause in causes):
            return "page"
        on = slots[step.on[slots]]
        held = [s for s in on.tolist() if above[s] and np.median(times.recent["own"][s]) >= self.delta / 2]
        if not held or (suspicion.doubt and not causes):
            return "suspect"
        if np.median(times.newest[held] - times.usual[held]) < self.delta / 2:
            return "suspect"  # its newest steps are normal: the person on call would find nothing
        since = float(np.median(above[held]))  # one of a node may have paused before
        enough = bool(causes) or int(step.size[held].max()) >= self.peers
        return "page" if enough and time - since >= self.hold * SECOND else "suspect"

    def _slow_finding(
        self, frame: Frame, suspicion: Suspicion, causes: Sequence[Cause], due: tuple[int, Level], step: Step
    ) -> Finding:
        slots, ranks = list(suspicion.slots), self.slots
        worst, compared = compare_worst(self, slots, step)
        around = {kind: e for kind in ("gpu", "node", "stage", "job") if (e := ranks.ancestor(kind, worst))}
        return self.finding(
            frame.time,
            suspicion.entity,
            due,
            score=float(step.score[slots].max()),
            summary=write_title(suspicion, compared, around.get("gpu"), causes),
            signals=tuple(dict.fromkeys(("rank.compute_time", *(cause.signal for cause in causes)))),
            clears=f"its departure from the expected compute time falls below {50 * self.delta:.1f} %",
            compared=compared,
            slowdown=round(1 + compared.effect, 4),
            **around,
            ranks=[ranks.ranks[s] for s in slots],
            cause=describe_causes(causes),
            attribution="HOST" if any(cause.key == "cpu_pressure" for cause in causes) else "NODE",
            **{cause.key: cause.value for cause in causes},
        )


def compare_worst(detector: Straggler, slots: Sequence[int], step: Step) -> tuple[int, Comparison]:
    """Returns the worst of some slow ranks, and its comparison with peers that are not slow with it."""
    worst, times = slots[int(np.argmax(step.effect[slots]))], detector.times
    cohort, peers, usual = _expect_time(detector, worst, slots, step)
    # one quick step does not make a slow rank a fast one: the newest step, or the recent slowdown
    late = float(step.effect[worst]) if step.on[worst] else float(np.median(times.recent["stage"][worst]))
    late += float(times.usual[worst]) - usual if step.on[worst] else 0.0
    slowdown, expected = float(np.exp(max(times.newest[worst] - usual, late))), float(np.exp(usual))
    spread = expected * float(step.spread[worst]) if np.isfinite(step.spread[worst]) else None
    return worst, Comparison(expected * slowdown, expected, spread, cohort, peers, slowdown - 1, "s")


def _expect_time(detector: Straggler, slot: int, slots: Sequence[int], step: Step) -> tuple[str, int, float]:
    """Returns the cohort of a rank, its number of peers, and the ln(time) expected from them."""
    own, ranks, times = bool(step.on[slot]), detector.slots, detector.times
    numbers = ranks.groups if own else ranks.numbers["stage"]
    alike = (numbers == numbers[slot]) & (numbers[slot] >= 0) & (ranks.column >= 0) & (times.count[: len(numbers)] > 0)
    alike[list(slots)] = False
    alike &= ~detector.throttling.excluded[: len(alike)]
    peers = np.flatnonzero(alike)
    if not own and len(peers):
        return ranks.ancestor("stage", slot) or "own past", len(peers), float(np.median(times.newest[peers]))
    usual = float(times.usual[slot])
    if len(slots) > MOST_OF_COHORT * (len(slots) + len(peers)) and len(peers):
        # the median is between the slow and the others, who seem quicker by as much as it has moved
        usual += float(np.nan_to_num(np.median(times.newest[peers] - times.usual[peers])))
    return ranks.cohort_name(slot), len(peers), usual


def find_lagging(detector: Straggler, slots: NDArray[np.intp], step: Step, time: int) -> tuple[Bools, list[int]]:
    """Returns (slots,) which are slower than their stage now; and slots that have not been for the hold, whose present
    time is their usual one."""
    since = detector.since
    departs = detector.streams.cells[kernel.BASELINE, slots] + step.effect[slots]
    late = np.minimum(departs, np.median(detector.times.recent["stage"][slots], axis=1)) >= detector.delta / 2
    late |= (since.behind[slots] > 0) | ~detector.slots.stage_only[slots]
    since.lagged[slots[late]] = time
    began = np.maximum(since.above[slots], since.lagged[slots])
    over = ~late & (since.above[slots] > 0) & (time - began >= detector.hold * SECOND)
    return np.asarray(late), slots[over].tolist()


def level_since_start(
    detector: Straggler, suspicion: Suspicion, causes: Sequence[Cause], time: int
) -> tuple[Level, list[Cause]]:
    """Returns level and causes of a suspect that may be slow since its first sample.

    Its stage need not have learned before: the present times of the stage are compared.
    """
    slots, known, started = list(suspicion.slots), list(causes), detector.started
    since = started.slow_since(slots, detector.since.behind)
    if since is None or time - since < detector.hold * SECOND:
        return "suspect", known
    found = started.find_causes(slots, detector.causes.capped, detector.slots)
    if not found[0].physical and started.is_by_design(slots, detector.since.behind, detector.slots):
        return "suspect", known
    if time - since >= detector.start_hold * SECOND:
        started.remember_work(slots, detector.slots, time)
    elif not found[0].physical:
        return "suspect", known
    return "page" if found[0].physical else "ticket", [*known, *found]
