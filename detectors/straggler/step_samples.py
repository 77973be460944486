"""What ranks say of their steps: the logarithm of their compute time, once per step, and whether it may be judged.

The newest steps of each rank, compiled: which of them a rank has taken now, and who is far behind of late.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.event_data import read_duration, read_integer
from detectors.base.gates import Gates
from detectors.base.kernel import compiled
from detectors.base.streams import Bools, Floats
from detectors.straggler.rank_slots import RankSlots
from pipeline.model.records import SECOND, Event, Frame

EVENTS = frozenset({"job_start", "version", "reset", "maintenance_start", "maintenance_end", "digest", "checkpoint"})
_RELEARN_EVENTS = frozenset({"version", "reset", "maintenance_end"})
_CHECK_EVERY = 60 * SECOND  # how often the end of announced work is looked for; chosen
_CANARY = 60 * SECOND  # so long after a canary a rank may still tell a step that it made beside it; chosen
_REMEMBERED = 3600 * SECOND  # a start of a rank that nobody has seen since is forgotten; chosen
_RESTS = 300 * SECOND
"""After so long without a step a rank begins unsuspected: its job was stopped, and what was hot is cool. Chosen: beyond
most evaluations, so that one in the middle of a slowdown does not begin the hold anew."""
_PAUSES = 60 * SECOND  # without a step it is no time for which a rank was slow, as holds count it; chosen
_TIMES = 3  # usual gaps between steps, which of long steps is a rest or pause in place of those; chosen
_GAIN = 0.2  # of the usual gap: five steps show another; chosen
_LONGEST_S = (
    3600.0  # that a checkpoint or canary excuses anybody, whatever is told of it; chosen: such a write has failed
)
_ABSURD_S = 86_400.0  # no step takes a day: such a reading is none; chosen
_WARM = 240 * SECOND  # of a job that tells no steps, in place of a number of them: 200 of 1.2 s; chosen
_CELLS: Mapping[str, float | int | bool] = {
    "steps": np.nan,  # the newest step
    "tokens": np.nan,  # counter of tokens then
    "begun": np.nan,  # step at which the job or the move began
    "began": 0,  # when that was
    "excused": 0,  # until when a canary of ours explains slowness
    "sampled": 0,  # when the newest sample came
    "gap": 0,  # usual time between two, us
    "working": False,  # people work on what it is on
}


class StepSamples:
    """Samples and gates of ranks; arrays by slot."""

    def __init__(self) -> None:
        self.gates = Gates()
        self.cells = {name: np.full(0, fill) for name, fill in _CELLS.items()}
        self._starting: dict[str, int] = {}  # rank of which a start was told, but no step since -> when
        self._saving: dict[str, int] = {}  # job -> until when it writes a checkpoint
        self._checked_at = 0
        self._accepted: list[str] = []
        self.accepted_slots: list[
            int
        ] = []  # slots of which a person said that it is no fault, as it was told in this instant
        self.canary_slots: list[int] = []  # slots that were slow beside our own canary, as it was told in this instant
        self.rested: list[int] = []  # slots that tell a step again in this instant after they told none for long
        self.paused = np.empty(0, np.int64)  # (S,) for how long they told none before they do now, 0 who did not pause

    def read_events(self, frames: Mapping[str, Frame]) -> list[Event]:
        """Takes the events of an instant; those that matter."""
        self.gates.update(frames)
        told = [e for frame in frames.values() for e in frame.events if e.kind in EVENTS]
        for event in told:
            ranks = event.data.get("ranks")
            if event.kind == "job_start" and isinstance(ranks, (list, dict)):
                self._starting.update({rank: event.time for rank in ranks if isinstance(rank, str)})
        return told

    def relearn(self, entity: str) -> None:
        """A person said that it is no fault: its ranks learn anew, as soon as it is known which they are."""
        self._accepted.append(entity)

    def apply_events(
        self, fresh: Sequence[int], told: Iterable[Event], frame: Frame, places: RankSlots, rose: NDArray[np.int64]
    ) -> list[int]:
        """Follows moves, work, versions, canaries and checkpoints; slots whose software or node is not as before, or
        of which a person said that it is no fault.

        fresh: slots that hold another rank or are elsewhere.   rose: (S,) since when each has been slow, if it is.
        """
        self._grow(len(places))
        for name, fill in _CELLS.items():
            self.cells[name][list(fresh)] = fill
        self.accepted_slots = [slot for entity in self._accepted for slot in places.slots_on(entity, frame.topology)]
        anew = list(self.accepted_slots)
        self._accepted = []
        self.canary_slots = []
        worked = bool(fresh)
        for event in told:
            lasts = read_duration(event.data.get("took" if event.kind == "digest" else "seconds"), _LONGEST_S)
            worked |= event.kind.startswith("maintenance")
            if event.kind in _RELEARN_EVENTS:
                anew += places.slots_on(event.entity, frame.topology)
            elif event.kind == "digest" and lasts is not None:
                self._excuse_canary(event, lasts, places.slots_on(event.entity, frame.topology), rose)
            elif event.kind == "checkpoint" and lasts is not None:
                self._saving[event.entity] = event.time + int(lasts * SECOND)
        self._saving = {job: until for job, until in self._saving.items() if until >= frame.time}
        if worked or abs(frame.time - self._checked_at) >= _CHECK_EVERY:
            self._mark_maintenance(frame, places)
        return anew

    def _excuse_canary(self, event: Event, took: float, slots: Sequence[int], rose: NDArray[np.int64]) -> None:
        """Ranks that were not slow before our own canary began are not for some time after it."""
        began = read_integer(event.data.get("began"), event.time - int(_LONGEST_S * SECOND))
        since = event.time - int(took * SECOND) if began is None else began
        self.canary_slots += (mine := [s for s in slots if rose[s] >= since - _CHECK_EVERY])
        self.cells["excused"][mine] = event.time + _CANARY

    def _mark_maintenance(self, frame: Frame, places: RankSlots) -> None:
        self._checked_at = frame.time
        working = self.cells["working"]
        working[:] = False
        for entity in sorted(self.gates.entities_in_maintenance(frame.time)):
            working[places.slots_on(entity, frame.topology)] = True

    def read_steps(self, frame: Frame, places: RankSlots, warm_up: float) -> tuple[Floats, Bools]:
        """(S,) ln(compute time) of the ranks that finished a step, NaN of others; and who may be judged."""
        compute, step = places.read_ranks(frame, "rank.compute_time"), places.read_ranks(frame, "rank.step")
        with np.errstate(divide="ignore", invalid="ignore"):
            times = np.where((compute > 0) & (compute < _ABSURD_S), np.log(compute), np.nan)
        mine = {name: cells[: len(places)] for name, cells in self.cells.items()}
        times[step == mine["steps"]] = np.nan  # the same step told twice is no second witness
        if "rank.tokens" in frame.values:
            times -= self._extra_work(places.read_ranks(frame, "rank.tokens"), step - mine["steps"], places)
        if self._starting:
            self._record_starts(compute, step, places, frame.time)
        known = np.isfinite(step)
        mine["steps"][known] = step[known]
        told, sampled = np.isfinite(times), mine["sampled"]
        self._update_gaps(np.where(told & (sampled > 0), frame.time - sampled, 0))
        sampled[told] = frame.time
        with np.errstate(invalid="ignore"):
            warm = (step - mine["begun"] < warm_up) | (~known & (frame.time - mine["began"] < _WARM))
        gate = ~(warm | mine["working"] | (mine["excused"] > frame.time))
        for job in self._saving:
            gate[places.slots_on(job, frame.topology)] = False
        return times, gate

    def _update_gaps(self, gap: NDArray[np.int64]) -> None:
        """Tells rests and pauses from the usual time between samples. gap: (S,) since the former, 0 without one now."""
        usual = self.cells["gap"][: len(gap)]
        longest = _TIMES * usual
        self.rested = np.flatnonzero(gap > np.maximum(longest, _RESTS)).tolist()
        self.paused = np.where(gap > np.maximum(longest, _PAUSES), gap, 0)
        told = gap > 0
        known = np.where(usual > 0, usual + _GAIN * (np.minimum(gap, longest) - usual), gap)
        usual[told] = known[told]

    def _extra_work(self, tokens: Floats, steps: Floats, places: RankSlots) -> Floats:
        """ln of the share by which a rank had more tokens in its last steps than its stage; 0 where nobody tells.

        Packed sequences make the work uneven, and time goes nearly as the tokens do (ResiHP).
        """
        last = self.cells["tokens"][: len(tokens)]
        with np.errstate(divide="ignore", invalid="ignore"):
            worked = np.log((tokens - last) / steps)
        worked[~np.isfinite(worked)] = np.nan
        known = np.isfinite(tokens)
        last[known] = tokens[known]
        return np.asarray(np.nan_to_num(worked - places.stage_medians(worked)))

    def _record_starts(self, compute: Floats, step: Floats, places: RankSlots, time: int) -> None:
        """Notes at which step ranks began of which a start was told."""
        told = (np.isfinite(step) | np.isfinite(compute)).tolist()
        for rank, since in list(self._starting.items()):
            slot = places.slot_of(rank)
            if slot is not None and told[slot]:
                self.cells["begun"][slot], self.cells["began"][slot] = step[slot], since
            elif time - since < _REMEMBERED:
                continue
            del self._starting[rank]

    def is_saving(self, job: str) -> bool:
        """Whether it writes a checkpoint."""
        return job in self._saving

    def silent(self, time: int, lasts: int) -> Bools:
        """(S,) ranks without a sample for long, or that may not be judged by their past samples either."""
        cells = self.cells
        lasts = np.maximum(_TIMES * cells["gap"], lasts)
        return np.asarray((time - cells["sampled"] > lasts) | (cells["excused"] > time) | cells["working"])

    def _grow(self, size: int) -> None:
        more = size - len(self.cells["steps"])
        if more > 0:
            self.cells = {n: np.append(self.cells[n], np.full(more, fill)) for n, fill in _CELLS.items()}

    def snapshot(self) -> dict[str, Any]:
        names = ("_starting", "_saving", "_checked_at", "_accepted", "cells")
        return {"gates": self.gates.snapshot(), **{name: getattr(self, name) for name in names}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.gates.restore(state["gates"])
        for name in state.keys() - {"gates"}:
            setattr(self, name, state[name])


Singles = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]
RING = 10  # samples whose median tells: one ratio of a single step is noise
RECENT = np.dtype([("stage", "<f8", (RING,)), ("own", "<f8", (RING,))])


@compiled
def record_steps(
    times: Doubles,
    gate: NDArray[np.bool_],
    expected: Doubles,
    stage: Doubles,
    limit: float,
    learn: int,
    newest: Doubles,
    usual: Doubles,
    by_stage: Doubles,
    by_own: Doubles,
    count: Ints,
    behind: Ints,
    near: NDArray[np.bool_],
) -> int:
    """Keeps what each rank took, beside its stage and beside its own normal; how many are `near` the limit.

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
