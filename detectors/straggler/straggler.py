"""Finds ranks that compute slower than their own pipeline stage, and says which GPU or node is to blame, and why.

A slow rank beside its peers, as people are told it: what they lead one to expect, and how far it is from that.

Whether slow ranks are worth a page: what proves it, for how long it must last, and who merely lost a lead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base import kernel
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report, make_evidence
from detectors.base.group_events import HOLD, GroupEvents, Quantity
from detectors.base.streams import LEARN, Bools, Channel, Floats, Step, Streams
from detectors.straggler.alarm_budget import rank_budget
from detectors.straggler.blame import Suspicion, collect_causes, describe_causes, find_suspicions, write_title
from detectors.straggler.causes import CLOCK, POLICY, SIGNALS, Cause, CauseTracker, clear_conditions
from detectors.straggler.mass_throttling import ThrottlingCohorts, step_frozen
from detectors.straggler.power_caps import PowerCaps
from detectors.straggler.rank_slots import LEAST_PEERS, MOST_OF_COHORT, RankSlots
from detectors.straggler.step_samples import RECENT, RING, StepSamples, record_steps
from detectors.straggler.untrusted_baselines import LateLearners, SlowSinceStart
from pipeline.model.records import SECOND, Finding, Frame, Level

_TOGETHER = Quantity(("rank.compute_time",), "compute longer than the others", "compute quicker than the others")
_LASTS = 120 * SECOND  # without a sample for so long, a rank is not slow but silent; chosen: two repeats


@dataclass
class Straggler(Detector):
    """Peer-conditioned CUSUM on ln(compute time) within the pipeline stage; stages differ by design, never pooled.

    Suspect once the sum passes `threshold` and the smoothed slowdown `delta` (natural logarithm), or once the median of
    ten steps is `ratio` times the stage's. Page at once if the GPU shows why (throttle bit, narrower PCIe link, clock
    below its peers but under no cap); else after `hold` s, and only among at least `peers` ranks that are quicker than
    it, unless tasks of its node wait for processors or clocks are low. Slow since its first sample: a ticket after
    `start_hold` s ("more work or a slow device"), unless ranks of its stage on other nodes are so too, which is design;
    after `hold` a page if its GPU's clock is below 0.8 of its stage's, but under no cap, or if a rank of other work was
    slow on the same GPU before. Several GPUs of one node slow together: the node
    is blamed. A stage of which over `most` of the nodes are slow blames nobody (straggler_job).

    Not judged: ranks that throttle in a stage of which over 30 % of the GPUs do so, on three nodes, until they have for
    4 h (coolant and power tell of that); meanwhile nobody of it learns, and those that are well are compared with each
    other, if they are 8; announced work, the first `warm_up` steps of a job or of a rank that moved, checkpoints, our
    own canaries, and several GPUs whose power cap differs from their cohort's by its bit or by what they draw; where
    the bit flickers under full load, by more of the time than usual. With other software a rank learns anew; after a
    rest it begins unsuspected. Where a stage is too small, a change is told
    from all of the job, and below 8 ranks nothing pages uncorroborated; neither does a small stage of which all ranks
    are slow that had learnt before, or a rank alone in its stage: the stage may have more work.

    Source: the clipped form of Page's CUSUM (Biometrika 41, 1954); Greyhound (Wu et al., ATC 2025) for the check that
    the mean moved; Lin et al. (OSDI 2025) found workers the main cause in only 1.7 % of slow jobs, so a slow stage
    blames nobody; hold: twice the longest benign slowdown of 300 s, as two may meet; chosen.
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
        "A rank that was slow from its first sample by less than 1.25 of its stage's median, which a node that is half "
        "of its stage moves with it; by more it is a suspect only if ranks on other nodes of its stage are so too; a "
        "node of a job of two nodes that is slow by less than 7 %, since half of that moves the median of both; all "
        "nodes of a stage that are slow at once; for 4 h, a node that became slow just before all others of its stage "
        "learnt anew; one rank without another of its stage that is as fast as before, unless its GPU or node shows "
        "why; ranks that throttle with a third of their stage, or under a lower power cap, which is policy, or in and "
        "out of one for minutes each; who was quicker than its stage and no longer is; and what no job tells: without "
        "compute times straggler_inferred looks from outside."
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
    recent: NDArray[Any] = memory(0, RECENT)
    count: NDArray[np.int64] = memory(0, np.int64)
    rose: NDArray[np.int64] = memory(0, np.int64)
    above: NDArray[np.int64] = memory(0, np.int64)
    behind: NDArray[np.int64] = memory(0, np.int64)
    lagged: NDArray[np.int64] = memory(0, np.int64)
    newest: Floats = memory(np.nan)
    usual: Floats = memory(np.nan)
    level: Floats = memory(0.0)
    conditions: OpenConditions = notes()
    _doubt: Bools = field(default_factory=lambda: np.zeros(0, bool), init=False, repr=False)

    def __post_init__(self) -> None:
        self.streams.channel = Channel(0.01, self.delta, threshold=self.threshold)

    def budget(self) -> list[str]:
        return rank_budget(self.streams.channel, CLOCK, self.ratio, RING)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        told, frame = self.samples.read_events(frames), frames.get("rank")
        if frame is None or not len(frame.entities):
            return []
        fresh = self.slots.update_slots(frame)
        self.grow(len(self.slots))
        self._reset(fresh, elsewhere=True)
        anew = self.samples.apply_events(fresh, told, frame, self.slots, self.rose)
        self.started.accept(self.samples.accepted_slots, self.behind, self.recent["stage"])
        self._reset(anew)
        self._clear(self.samples.canary_slots, frame.time)
        capped = self.causes.read_throttling(frames, self.slots)
        times, gate = self.samples.read_steps(frame, self.slots, self.warm_up)
        struck = self.throttling.update(self.causes.throttled, self.slots, frame.time)
        times[struck.excluded] = np.nan
        self._clear(begins := [*self.samples.rested, *struck.readmitted], frame.time)
        self.causes.clear(begins)
        out = self._apply_caps(capped, times, gate, frame.time) | struck.excluded
        gate = gate & ~out
        level, known = self._learn_offsets(times, gate)
        step = step_frozen(self.streams, times - level, self.slots.groups, frame.time, gate & known, struck.frozen)
        silent = self.samples.silent(frame.time, _LASTS)[: len(gate)]
        at_work = gate & ~silent  # a GPU that rests has another clock
        self.causes.read_clocks(frames, self.slots, at_work, struck.frozen, frame.time)
        self._watch_since_start(frames, at_work)
        slow = self._find_slow(step, times, level, gate, frame.time) & ~(out | silent)
        alike = self._group_findings(frame, step)
        late = self.late_learners.update(slow, silent, self.rose, self.streams.counts, self.slots, frame.time)
        self._relearn(late.relearn)
        if slow.any():
            return [*self._report(frame, step, slow, struck.throttled, late.witness & ~(out | silent)), *alike]
        close_ended(self.conditions, set())
        return alike

    def _group_findings(self, frame: Frame, step: Step) -> list[Finding]:
        """What many ranks of a stage have in common: no power cap, which is policy, no throttling, whose cause the
        detectors of heat and power name, and no whole stage of a job, which is the job's own."""
        places, gates, blamed = self.slots, self.samples.gates, self.conditions
        throttled = self.causes.throttled[: len(step.on)]
        counted = ~(self._doubt | places.cross_stage | ((throttled > 0) & (frame.time - throttled <= HOLD)))
        return self.group.update(frame, places.ranks, step, places.cohort_name, gates, self.name, counted, blamed)

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """What a person calls no fault is normal from now on."""
        self.samples.relearn(entity)

    def _reset(self, slots: Sequence[int], elsewhere: bool = False) -> None:
        """Learns ranks anew: others than before or elsewhere, or with other software."""
        if len(slots):
            self.caps.reset(slots)
            if elsewhere:
                self.throttling.reset(slots)
            self._relearn(slots, elsewhere)

    def _relearn(self, slots: Sequence[int], elsewhere: bool = False) -> None:
        if not len(slots):
            return
        mask = np.zeros(len(self.count), bool)
        mask[list(slots)] = True
        self.streams.reset(mask[: self.streams.cells.shape[1]])
        self.causes.reset(slots, elsewhere)
        for cells in (self.count, self.rose, self.above, self.behind, self.lagged, self.level):
            cells[mask] = 0
        self.started.restart(slots, self.count, elsewhere)

    def _clear(self, slots: Sequence[int], time: int) -> None:
        """What made these slow is over; what they learnt stays."""
        if len(slots):
            clear_conditions(self.streams, slots)
            self.behind[slots], self.above[slots], self.rose[slots] = 0, 0, time
            self.started.restart(slots, self.count)

    def _watch_since_start(self, frames: Mapping[str, Frame], at_work: Bools) -> None:
        gpus = frames.get("gpu")
        if gpus is not None and "gpu.sm_clock" in gpus.values:
            self.started.read_clocks(self.slots.read_gpus(gpus, "gpu.sm_clock"), self.slots, at_work)

    def _apply_caps(self, capped: Bools, times: Floats, gate: Bools, time: int) -> Bools:
        """Who may not be judged: a power cap holds them back, or lets go of them, and not their peers."""
        known = (self.slots.column >= 0) & self.causes.known[: len(capped)]
        ruling = self.caps.update(capped, self.slots.groups, known, gate & np.isfinite(times))
        self._clear(ruling.restart, time)
        self.causes.clear(ruling.restart)
        self._relearn(ruling.relearn)
        self._doubt = ruling.doubt
        return ruling.hold

    def _learn_offsets(self, times: Floats, gate: Bools) -> tuple[Floats, Bools]:
        """(S,) what is taken off before ranks are compared, and who has it.

        Ranks of one stage are compared as they are. Those of several stages in what each departs from its own first
        steps: else their median would lie between two stages and jump with either.
        """
        mixed, size = self.slots.cross_stage, len(times)
        if not self.slots.any_cross_stage:
            return np.zeros(size), np.ones(size, bool)
        count, level = self.count[:size], self.level[:size]
        young = np.flatnonzero(mixed & gate & np.isfinite(times) & (count < LEARN))
        level[young] += (times[young] - level[young]) / (count[young] + 1)
        return np.where(mixed, level, 0.0), np.asarray(~mixed | (count >= LEARN))

    def _find_slow(self, step: Step, times: Floats, level: Floats, gate: Bools, time: int) -> Bools:
        """Ranks with a condition: the CUSUM's, or far behind the stage in the median of ten steps."""
        size, cells = len(times), self.streams.cells[:, : len(times)]
        median = step.median.astype(np.float64)
        expected = level + np.where(step.alone, 0.0, median) + cells[kernel.BASELINE]
        stage = self.slots.fill_stage_medians(times, median) + self.started.accepted_offset(size)
        rose = self.rose[:size]
        np.copyto(rose, time, where=step.judged & ((cells[kernel.UP] <= 0) | (rose == 0)))
        above, matters = self.above[:size], step.effect >= self.delta
        above += np.where(above > 0, self.samples.paused, 0)
        above[~matters] = 0
        above[matters & (above == 0)] = time
        limit, behind, close_by = np.log(self.ratio), self.behind[:size], np.empty(size, bool)
        recent = self.recent["stage"][:size], self.recent["own"][:size]
        kept = self.newest[:size], self.usual[:size], *recent, self.count[:size], behind
        if record_steps(times, gate, expected, stage, float(limit), LEARN, *kept, close_by):
            # half of the limit ends it, so that a ratio near the limit does not flicker
            near = np.flatnonzero(close_by)
            typical, since = np.median(self.recent["stage"][near], axis=1), behind[near]
            far = typical >= np.where(since > 0, limit / 2, limit)
            behind[near] = np.where(far, np.where(since == 0, time, since), 0)
        self.started.backdate(gate & np.isfinite(times), self.count[:size], behind, time)
        return np.asarray((step.on | (behind > 0)) & (self.slots.column >= 0))

    def _report(self, frame: Frame, step: Step, slow: Bools, sick: Bools, witness: Bools) -> list[Finding]:
        """What is due to be said of the slow. witness: who can tell that others are slow and their stage is not."""
        size, time = len(slow), frame.time
        there = (self.slots.column >= 0) & (witness | slow) & (self.count[:size] > LEARN)
        effect = np.where(there, np.maximum(step.effect, np.log(self.ratio) * (self.behind[:size] > 0)), 0.0)
        suspicions = find_suspicions(slow, effect, there, sick, self.slots, self.most, self.delta, self.conditions)
        close_ended(self.conditions, {s.entity for s in suspicions})
        suspected = [slot for s in suspicions for slot in s.slots]  # the others are slow with their stage, not alone
        self.above[np.setdiff1d(np.flatnonzero(slow), suspected)] = time
        found = []
        for suspicion in suspicions:
            seen = collect_causes(suspicion, self.causes, self.slots, time)
            slots = np.array(suspicion.slots)
            level = self._level(suspicion, seen, step, time)
            if level == "suspect":
                level, seen = level_since_start(self, suspicion, seen, time)
                suspicion = suspicion if level == "suspect" else replace(suspicion, doubt="")
            throttled = any(cause.key == "throttled" for cause in seen)
            late = np.where(self.behind[slots] > 0, self.behind[slots], time)
            since = int(np.where(step.on[slots], self.rose[slots], late).min())
            if not throttled and self.causes.explained_by_cap(
                slots, float(np.median(step.effect[slots])), since, self.slots
            ):
                level, seen = "suspect", [POLICY]
            if due := due_report(self.conditions, suspicion.entity, time, since, level):
                found.append(self._finding(frame, suspicion, seen, due, step))
        return found

    def _level(self, suspicion: Suspicion, seen: Sequence[Cause], step: Step, time: int) -> Level:
        """How urgent it is; who only lost a lead learns that as its usual."""
        late, usual = find_lagging(self, np.array(suspicion.slots), step, time)
        self._relearn(usual)
        return decide_level(self, suspicion, seen, late, self._doubt, time, step)

    def _finding(
        self, frame: Frame, suspicion: Suspicion, seen: Sequence[Cause], due: tuple[int, Level], step: Step
    ) -> Finding:
        slots, places = list(suspicion.slots), self.slots
        worst, compared = compare_worst(self, slots, step)
        around = {kind: e for kind in ("gpu", "node", "stage", "job") if (e := places.ancestor(kind, worst))}
        return Finding(
            time=frame.time,
            onset=due[0],
            entity=suspicion.entity,
            detector=self.name,
            level=due[1],
            score=float(step.score[slots].max()),
            summary=write_title(suspicion, compared, around, seen),
            evidence=make_evidence(
                f"its departure from what its peers lead one to expect falls below {50 * self.delta:.1f} %",
                compared,
                slowdown=round(1 + compared.effect, 4),
                **around,
                ranks=[places.ranks[s] for s in slots],
                cause=describe_causes(seen),
                attribution="HOST" if any(cause.key == "cpu_pressure" for cause in seen) else "NODE",
                **{cause.key: cause.value for cause in seen},
            ),
            signals=tuple(dict.fromkeys(("rank.compute_time", *(cause.signal for cause in seen)))),
        )


def compare_worst(detector: Straggler, slots: Sequence[int], step: Step) -> tuple[int, Comparison]:
    """The worst of some slow ranks, beside peers that are not slow with it."""
    worst = slots[int(np.argmax(step.effect[slots]))]
    cohort, mates, usual = _expected(detector, worst, slots, step)
    # one quick step does not make a slow rank a fast one: the newest step, or how slow it has been of late
    late = float(step.effect[worst]) if step.on[worst] else float(np.median(detector.recent["stage"][worst]))
    late += float(detector.usual[worst]) - usual if step.on[worst] else 0.0
    slowdown, expected = float(np.exp(max(detector.newest[worst] - usual, late))), float(np.exp(usual))
    spread = expected * float(step.spread[worst]) if np.isfinite(step.spread[worst]) else None
    return worst, Comparison(expected * slowdown, expected, spread, cohort, mates, slowdown - 1, "s")


def _expected(detector: Straggler, slot: int, slots: Sequence[int], step: Step) -> tuple[str, int, float]:
    """With whom a rank is compared, how many they are, and the ln(time) that they lead one to expect."""
    own, ranks = bool(step.on[slot]), detector.slots
    numbers = ranks.groups if own else ranks.numbers["stage"]
    alike = (
        (numbers == numbers[slot]) & (numbers[slot] >= 0) & (ranks.column >= 0) & (detector.count[: len(numbers)] > 0)
    )
    alike[list(slots)] = False
    alike &= ~detector.throttling.excluded[: len(alike)]
    mates = np.flatnonzero(alike)
    if not own and len(mates):
        return ranks.ancestor("stage", slot) or "own past", len(mates), float(np.median(detector.newest[mates]))
    usual = float(detector.usual[slot])
    if len(slots) > MOST_OF_COHORT * (len(slots) + len(mates)) and len(mates):
        # the median lies between the slow and the others, who seem quicker by as much as it has moved
        usual += float(np.nan_to_num(np.median(detector.newest[mates] - detector.usual[mates])))
    return ranks.cohort_name(slot), len(mates), usual


def decide_level(
    detector: Straggler, suspicion: Suspicion, seen: Sequence[Cause], late: Bools, doubt: Bools, time: int, step: Step
) -> Level:
    """Page with a physical cause at once, else after the hold and only among enough peers.

    What a power cap that comes or goes may explain is no page: neither clocks nor sums say more by then. Nor is who
    was quicker than its stage and is no slower than the others now: nobody waits for it. late: (slots,) from lags();
    doubt: (S,) what their sums say may be of a cap.
    """
    slots = np.array(suspicion.slots)
    if not late.any():
        return "suspect"
    if doubt[slots].all():
        return "page" if any(cause.physical and cause.signal != "gpu.sm_clock" for cause in seen) else "suspect"
    if any(detector.causes.is_proof(cause, slots) for cause in seen):
        return "page"
    on = slots[step.on[slots]]
    held = [s for s in on.tolist() if detector.above[s] and np.median(detector.recent["own"][s]) >= detector.delta / 2]
    if not held or (suspicion.doubt and not seen):
        return "suspect"
    if np.median(detector.newest[held] - detector.usual[held]) < detector.delta / 2:
        return "suspect"  # its newest steps are as they should be: who comes now would find nothing
    since = float(np.median(detector.above[held]))  # one of a node may have paused before
    enough = bool(seen) or int(step.size[held].max()) >= detector.peers
    return "page" if enough and time - since >= detector.hold * SECOND else "suspect"


def find_lagging(detector: Straggler, slots: NDArray[np.intp], step: Step, time: int) -> tuple[Bools, list[int]]:
    """(slots,) who is slower than its stage now; and those that have not been for the hold: that is their usual."""
    departs = detector.streams.cells[kernel.BASELINE, slots] + step.effect[slots]
    late = np.minimum(departs, np.median(detector.recent["stage"][slots], axis=1)) >= detector.delta / 2
    late |= (detector.behind[slots] > 0) | ~detector.slots.stage_only[slots]
    detector.lagged[slots[late]] = time
    since = np.maximum(detector.above[slots], detector.lagged[slots])
    over = ~late & (detector.above[slots] > 0) & (time - since >= detector.hold * SECOND)
    return np.asarray(late), slots[over].tolist()


def level_since_start(
    detector: Straggler, suspicion: Suspicion, seen: Sequence[Cause], time: int
) -> tuple[Level, list[Cause]]:
    """Of those that are a suspect otherwise: how urgent it is that they have been slow since their first sample.

    That their stage had not learnt before does not matter here: its present times are what they are compared with.
    """
    slots, told = list(suspicion.slots), list(seen)
    since = detector.started.slow_since(slots, detector.behind)
    if since is None or time - since < detector.hold * SECOND:
        return "suspect", told
    found = detector.started.find_causes(slots, detector.causes.capped, detector.slots)
    if not found[0].physical and detector.started.by_design(slots, detector.behind, detector.slots):
        return "suspect", told
    if time - since >= detector.start_hold * SECOND:
        detector.started.remember_work(slots, detector.slots, time)
    elif not found[0].physical:
        return "suspect", told
    return "page" if found[0].physical else "ticket", [*told, *found]
