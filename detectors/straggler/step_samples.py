"""Step samples of ranks: the logarithm of their compute time, once per step, and whether it may be judged.

The newest ten steps of each rank are kept by a compiled loop, which finds the ranks that may be far behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from detectors.base.event_data import read_duration, read_integer
from detectors.base.gates import Gates
from detectors.base.kernel import compiled
from detectors.base.state import State, memory, notes, part
from detectors.base.streams import Bools, Floats
from detectors.straggler.rank_slots import RankSlots
from pipeline.model.records import SECOND, Event, Frame

Ints = NDArray[np.int64]
EVENTS = frozenset({"job_start", "version", "reset", "maintenance_start", "maintenance_end", "digest", "checkpoint"})
_RELEARN_EVENTS = frozenset({"version", "reset", "maintenance_end"})
_CHECK_EVERY = 60 * SECOND  # us between two checks for the end of announced maintenance; chosen
_CANARY = 60 * SECOND  # us after a canary in which a rank may still report a step that it made beside it; chosen
_REMEMBERED = 3600 * SECOND  # us after which the start of a rank without a sample is dropped; chosen
_RESTS = 300 * SECOND
"""us without a step after which a rank restarts without suspicion: its job was stopped, and a hot GPU is cool again.
Chosen: beyond most evaluations, so that one in the middle of a slowdown does not restart the hold."""
_PAUSES = 60 * SECOND  # us without a step that do not count as slow time for a hold; chosen
_TIMES = 3  # usual gaps between steps, the limit of a rest or pause where steps are long; chosen
_GAIN = 0.2  # of the usual gap: five steps show another one; chosen
_LONGEST_S = 3600.0  # s that a checkpoint or canary excuses at most: a longer write has failed; chosen
_ABSURD_S = 86_400.0  # no step takes a day: such a reading is dropped; chosen
_WARM_UP = 240 * SECOND  # us of warm-up of a job that reports no step numbers: 200 steps of 1.2 s; chosen


@dataclass
class StepSamples(State):
    """Samples and gates of ranks; arrays by slot, times in us.

    step, tokens:  newest step, and the counter of tokens then.   first_step, started_at: of the job, or since a move.
    excused:       until when our own canary explains slowness.   in_maintenance: maintenance of the rank's devices.
    sampled:       when the newest sample came.   gap: usual time between two.
    _starting:     rank with a start event but no step since -> when.   _saving: job -> end of its checkpoint.
    accepted_slots, canary_slots: slots of this instant with feedback that they are not faults, or beside our canary.
    rested:        slots with a first step after a rest.   paused: (S,) length of the pause before this step, 0 none.
    """

    gates: Gates = part(Gates)
    step: Floats = memory(np.nan)
    tokens: Floats = memory(np.nan)
    first_step: Floats = memory(np.nan)
    started_at: Ints = memory(0, np.int64)
    excused: Ints = memory(0, np.int64)
    sampled: Ints = memory(0, np.int64)
    gap: Ints = memory(0, np.int64)
    in_maintenance: Bools = memory(False, np.bool_)
    _starting: dict[str, int] = notes()
    _saving: dict[str, int] = notes()
    _checked_at: int = notes(int)
    _accepted: list[str] = notes(list)
    accepted_slots: list[int] = field(default_factory=list, init=False, repr=False)
    canary_slots: list[int] = field(default_factory=list, init=False, repr=False)
    rested: list[int] = field(default_factory=list, init=False, repr=False)
    paused: Ints = field(default_factory=lambda: np.empty(0, np.int64), init=False, repr=False)

    def read_events(self, frames: Mapping[str, Frame]) -> list[Event]:
        """Reads the events of an instant; returns those of EVENTS."""
        self.gates.update(frames)
        events = [e for frame in frames.values() for e in frame.events if e.kind in EVENTS]
        for event in events:
            ranks = event.data.get("ranks")
            if event.kind == "job_start" and isinstance(ranks, (list, dict)):
                self._starting.update({rank: event.time for rank in ranks if isinstance(rank, str)})
        return events

    def relearn(self, entity: str) -> None:
        """Learns the ranks of an entity again with the next frame: a person said that it is not a fault."""
        self._accepted.append(entity)

    def apply_events(
        self, fresh: Sequence[int], events: Iterable[Event], frame: Frame, ranks: RankSlots, rose: Ints
    ) -> list[int]:
        """Follows moves, maintenance, versions, canaries and checkpoints; returns the slots to learn again: with other
        software, another node, or accepted as normal.

        fresh: slots with another rank, or a rank elsewhere.   rose: (S,) since when each has been slow, if it is.
        """
        self.grow(len(ranks))
        mask = np.zeros(len(self.step), bool)
        mask[list(fresh)] = True
        self.reset(mask)
        self.accepted_slots = [slot for entity in self._accepted for slot in ranks.slots_on(entity, frame.topology)]
        relearn = list(self.accepted_slots)
        self._accepted = []
        self.canary_slots = []
        check = bool(fresh)
        for event in events:
            lasts = read_duration(event.data.get("took" if event.kind == "digest" else "seconds"), _LONGEST_S)
            check |= event.kind.startswith("maintenance")
            if event.kind in _RELEARN_EVENTS:
                relearn += ranks.slots_on(event.entity, frame.topology)
            elif event.kind == "digest" and lasts is not None:
                self._excuse_canary(event, lasts, ranks.slots_on(event.entity, frame.topology), rose)
            elif event.kind == "checkpoint" and lasts is not None:
                self._saving[event.entity] = event.time + int(lasts * SECOND)
        self._saving = {job: until for job, until in self._saving.items() if until >= frame.time}
        if check or abs(frame.time - self._checked_at) >= _CHECK_EVERY:
            self._mark_maintenance(frame, ranks)
        return relearn

    def _excuse_canary(self, event: Event, took: float, slots: Sequence[int], rose: Ints) -> None:
        """Excuses ranks that were not slow before our own canary began, until some time after it."""
        began = read_integer(event.data.get("began"), event.time - int(_LONGEST_S * SECOND))
        since = event.time - int(took * SECOND) if began is None else began
        excused = [s for s in slots if rose[s] >= since - _CHECK_EVERY]
        self.canary_slots += excused
        self.excused[excused] = event.time + _CANARY

    def _mark_maintenance(self, frame: Frame, ranks: RankSlots) -> None:
        self._checked_at = frame.time
        self.in_maintenance[:] = False
        for entity in sorted(self.gates.entities_in_maintenance(frame.time)):
            self.in_maintenance[ranks.slots_on(entity, frame.topology)] = True

    def read_steps(self, frame: Frame, ranks: RankSlots, warm_up: float) -> tuple[Floats, Bools]:
        """Returns (S,) ln(compute time) of the ranks that finished a step, NaN of others; and which may be judged."""
        size = len(ranks)
        compute, step = ranks.read_ranks(frame, "rank.compute_time"), ranks.read_ranks(frame, "rank.step")
        with np.errstate(divide="ignore", invalid="ignore"):
            times = np.where((compute > 0) & (compute < _ABSURD_S), np.log(compute), np.nan)
        last = self.step[:size]
        times[step == last] = np.nan  # the same step reported twice counts once
        if "rank.tokens" in frame.values:
            times -= self._extra_work(ranks.read_ranks(frame, "rank.tokens"), step - last, ranks)
        if self._starting:
            self._record_starts(compute, step, ranks, frame.time)
        known = np.isfinite(step)
        last[known] = step[known]
        new, sampled = np.isfinite(times), self.sampled[:size]
        self._update_gaps(np.where(new & (sampled > 0), frame.time - sampled, 0))
        sampled[new] = frame.time
        with np.errstate(invalid="ignore"):
            warm = (step - self.first_step[:size] < warm_up) | (
                ~known & (frame.time - self.started_at[:size] < _WARM_UP)
            )
        gate = ~(warm | self.in_maintenance[:size] | (self.excused[:size] > frame.time))
        for job in self._saving:
            gate[ranks.slots_on(job, frame.topology)] = False
        return times, gate

    def _update_gaps(self, gap: Ints) -> None:
        """Finds rests and pauses against the usual time between samples.

        gap: (S,) time since the sample before, 0 without a sample now.
        """
        usual = self.gap[: len(gap)]
        longest = _TIMES * usual
        self.rested = np.flatnonzero(gap > np.maximum(longest, _RESTS)).tolist()
        self.paused = np.where(gap > np.maximum(longest, _PAUSES), gap, 0)
        new = gap > 0
        known = np.where(usual > 0, usual + _GAIN * (np.minimum(gap, longest) - usual), gap)
        usual[new] = known[new]

    def _extra_work(self, tokens: Floats, steps: Floats, ranks: RankSlots) -> Floats:
        """Returns ln of the tokens of a rank's last steps over its stage's; 0 where they are not reported.

        Packed sequences make the work uneven, and time is nearly proportional to the tokens (ResiHP).
        """
        last = self.tokens[: len(tokens)]
        with np.errstate(divide="ignore", invalid="ignore"):
            work = np.log((tokens - last) / steps)
        work[~np.isfinite(work)] = np.nan
        known = np.isfinite(tokens)
        last[known] = tokens[known]
        return np.asarray(np.nan_to_num(work - ranks.stage_medians(work)))

    def _record_starts(self, compute: Floats, step: Floats, ranks: RankSlots, time: int) -> None:
        """Records the first step of ranks with a start event."""
        reported = (np.isfinite(step) | np.isfinite(compute)).tolist()
        for rank, since in list(self._starting.items()):
            slot = ranks.slot_of(rank)
            if slot is not None and reported[slot]:
                self.first_step[slot], self.started_at[slot] = step[slot], since
            elif time - since < _REMEMBERED:
                continue
            del self._starting[rank]

    def is_saving(self, job: str) -> bool:
        """Returns whether a job writes a checkpoint."""
        return job in self._saving

    def silent(self, time: int, lasts: int) -> Bools:
        """Returns (S,) ranks without a sample for long, or whose past samples may not be judged either."""
        longest = np.maximum(_TIMES * self.gap, lasts)
        return np.asarray((time - self.sampled > longest) | (self.excused > time) | self.in_maintenance)


RING = 10  # steps whose median counts: the ratio of a single step is noise
RECENT = np.dtype([("stage", "<f8", (RING,)), ("own", "<f8", (RING,))])
"""Newest departures of a rank, from its stage and from its own normal."""


@compiled
def record_steps(
    times: Floats,
    gate: NDArray[np.bool_],
    expected: Floats,
    stage: Floats,
    limit: float,
    learn: int,
    newest: Floats,
    usual: Floats,
    by_stage: Floats,
    by_own: Floats,
    count: Ints,
    behind: Ints,
    near: NDArray[np.bool_],
) -> int:
    """Records the newest step of each rank against its stage and its own normal; returns how many are `near` the limit.

    by_stage, by_own: (S, RING) the newest departures.   behind: since when each is far behind, 0 not.
    """
    found = 0
    for i in range(len(times)):
        near[i] = False
        if not (gate[i] and np.isfinite(times[i])):
            continue
        newest[i], usual[i] = times[i], expected[i]
        at = count[i] % RING
        residual = times[i] - stage[i]
        by_stage[i, at], by_own[i, at] = residual, times[i] - expected[i]
        count[i] += 1
        if count[i] > learn and (residual > limit / 2 or behind[i] > 0):
            near[i] = True
            found += 1
    return found
