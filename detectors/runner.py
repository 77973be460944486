"""Runs all detectors over the frames of an instant; a detector that fails does not stop the others."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from detectors.base.detector import Detector
from detectors.base.state import FORMAT, check_axes, from_json, to_json
from detectors.corroboration import Corroboration
from pipeline.model.records import LEVELS, SECOND, Event, Finding, Frame, Level
from pipeline.model.signals import CATALOGUE, Signal
from pipeline.model.topology import Topology

LATELY = 3600.0
"""s for which a signal that was measured counts as there; chosen: a node's reboot or a job's end takes less."""
LOOKS = 3
"""Where agents look more seldom than that, so many looks must fail; chosen."""
ROUTINE: Mapping[str, float] = {"event:digest": 86_400.0, "event:replica_digest": 86_400.0}
"""Events that come although nothing is wrong, and s within which there is one; chosen: canaries run daily at least.
Of all other events none is good news, so that a detector which waits for them is never off."""
_AGAIN = 60 * SECOND  # so seldom is a signal looked for that is known to be there; chosen, for speed


class Available:
    """When each needed signal had a value last, by the time of the data; bounded by what detectors need."""

    def __init__(self, needs: Collection[str], catalogue: Mapping[str, Signal]) -> None:
        self._needs = [name for name in dict.fromkeys(needs) if name in ROUTINE or not name.startswith("event:")]
        intervals = {name: (catalogue[name].interval or 0.0) if name in catalogue else 0.0 for name in self._needs}
        self._patience = {n: ROUTINE.get(n) or max(LATELY, LOOKS * intervals[n]) for n in self._needs}
        self.last: dict[str, int] = {}
        self.time = self.since = 0

    def look(self, frames: Mapping[str, Frame]) -> None:
        """Takes an instant."""
        self.time = max(frame.time for frame in frames.values())
        self.since = min(self.since or self.time, self.time)
        due = [name for name in self._needs if not 0 <= self.time - self.last.get(name, -_AGAIN) < _AGAIN]
        if any(name in ROUTINE for name in due):
            told = {f"event:{event.kind}" for frame in frames.values() for event in frame.events}
            self.last.update(dict.fromkeys(told.intersection(due), self.time))
        for frame in frames.values():
            for name in due:
                if name in frame.values and not np.isnan(frame.values[name]).all():
                    self.last[name] = self.time

    def has(self, name: str) -> bool:
        """Whether somebody measures it now; so it is taken until it was waited for as long as it may stay away."""
        if name not in self._patience or not self.time:
            return True
        return self.time - self.last.get(name, self.since) <= self._patience[name] * SECOND

    def snapshot(self) -> dict[str, Any]:
        return {"time": self.time, "since": self.since, "last": dict(self.last)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a snapshot; an older one has none, so that nothing is known yet. Takes all of it or nothing."""
        time, last = int(state.get("time", 0)), {str(k): int(v) for k, v in dict(state.get("last", {})).items()}
        self.time, self.since, self.last = time, int(state.get("since", time)), last


_log = logging.getLogger("fleetpulse.detectors")

_OTHER_SHAPE = (AttributeError, IndexError, KeyError, TypeError, ValueError)
_TRIES = 60  # instants after a restart within which a failure is laid to the snapshot; not all have all classes; chosen
_MOST_ERRORS_TOLD = 1  # per detector; further ones only count
_SAME = 60 * SECOND  # events of one trouble of one entity follow each other so closely, as agents repeat them; chosen
_KEPT = 600 * SECOND  # how long what was reported on arrival is kept to be known again; chosen: a backlog of frames
_MOST_EARLY = 10_000  # of those; of more, the oldest are forgotten and then reported again with their frame; chosen


class Runner:
    """Deterministic: findings come in the order of the detectors, and within one in the order in which it gave them.

    signals_available: what the input has (`event:KIND` for events); a detector whose needs it lacks is off. None: all.
    errors:            detector -> how many of its frames failed.
    beat:              called with what is done next, so that a detector that does not return is known by its name.
    """

    def __init__(
        self,
        detectors: Sequence[Detector],
        signals_available: Collection[str] | None = None,
        catalogue: Mapping[str, Signal] = CATALOGUE,
    ) -> None:
        self.off: dict[str, list[str]] = {}
        used: set[str] = set()
        for detector in sorted(detectors, key=lambda d: d.takes_unused_signals):
            if missing := detector.choose_signals(used, signals_available, catalogue):
                self.off[detector.name] = missing
            else:
                used.update(detector.input_signals())
        self.detectors = [d for d in detectors if d.name not in self.off]
        self._all = tuple(detectors)
        self.errors: Counter[str] = Counter()
        self.corroboration = Corroboration()
        self.available = Available([name for d in self.detectors for name in d.deciding_signals()], catalogue)
        self.beat: Callable[[str], None] = _no_beat
        self._fresh = {d.name: d.snapshot() for d in self.detectors}
        self._tried: set[str] = set()  # who was restored lately, and has not failed since
        self._tries = 0
        self._early: dict[tuple[str, str], Finding] = {}  # reported on arrival, by detector and entity
        self._unframed: dict[tuple[str, str, int], Level] = {}  # of these, those that no frame has brought yet

    @property
    def signals(self) -> frozenset[str]:
        """All that the detectors need or want, also those that are off, so that frames are the same as in a pipeline.

        Of other signals frames need not be made.
        """
        return frozenset(name for d in self._all for name in d.input_signals() if not name.startswith("event:"))

    @property
    def names(self) -> tuple[str, ...]:
        """Of all detectors, those that are off for want of input too."""
        return (*(d.name for d in self.detectors), *self.off)

    def listing(self) -> list[dict[str, Any]]:
        """One row of plain data per detector, those that are off too: what it is, how it is set, how it fares."""
        return [{**to_json(d.describe()), "off": self._lacks(d), "errors": self.errors[d.name]} for d in self._all]

    def _lacks(self, detector: Detector) -> list[str]:
        """What it needs and the input never had, or has not had lately; such a detector goes on, and finds nothing."""
        return self.off.get(detector.name) or detector.missing_inputs(self.available.has)

    def __getstate__(self) -> dict[str, Any]:
        """Without the heartbeat, which belongs to a process."""
        return {name: value for name, value in vars(self).items() if name != "beat"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, beat=_no_beat)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Findings of one instant, each with what bears it out."""
        if not frames:
            return []
        found: list[Finding] = []
        said = _not_faults(frames)
        for name, entity in said:
            self.corroboration.forget((name, entity))
        self.available.look(frames)
        self._tries -= 1
        if self._tries < 0:
            self._tried.clear()
        time, topology = max(frame.time for frame in frames.values()), next(iter(frames.values())).topology
        early = self.judge_events([e for frame in frames.values() for e in frame.events], topology)
        for detector in self.detectors:
            self.beat(f"detector {detector.name}")
            try:
                found += self._judged(detector, frames, [entity for name, entity in said if name == detector.name])
            except Exception as error:  # noqa: BLE001 - whatever a detector does, the others go on
                self._failed(detector, error)
        found = self.corroboration.explained(found, time, topology)
        self._forget_early(time)
        return [*early, *(f for f in found if not self._reported(f))]

    def judge_events(self, events: Sequence[Event], topology: Topology, anew: bool = False) -> list[Finding]:
        """What events are by themselves, as they arrive (Detector.judge_event). Events that were judged give nothing,
        unless `anew`: what was made of them before may not have been written.

        Call it as events arrive, or leave it to `observe`, which does it for the events of its frames: the findings
        are the same. Further events of the same trouble are left to the frame.
        """
        found = (
            self._judged_event(detector, event, topology, anew)
            for event in sorted(events, key=lambda e: (e.time, e.entity, e.kind))
            for detector in self.detectors
            if event.kind in detector.on_arrival
        )
        return [finding for finding in found if finding is not None]

    def _judged_event(self, detector: Detector, event: Event, topology: Topology, anew: bool) -> Finding | None:
        try:
            finding = detector.judge_event(event, topology)
        except Exception as error:  # noqa: BLE001 - whatever a detector does, the others go on
            self._failed(detector, error)
            return None
        if finding is None:
            return None
        place = (finding.detector, finding.entity)
        before = self._early.get(place)
        if before is not None and not anew and _goes_on(before, finding):
            return None
        self._early.pop(place, None)  # the newest stand last
        self._early[place] = finding
        if not _is_cleared(finding):
            self._unframed[finding.key] = finding.level
        return finding

    def _reported(self, finding: Finding) -> bool:
        """Whether the finding of a frame is the one that was reported when its event arrived; once each."""
        level = self._unframed.get(finding.key)
        if level is None or _is_cleared(finding):
            return False
        if LEVELS.index(finding.level) > LEVELS.index(level):
            return False
        del self._unframed[finding.key]
        return True

    def _forget_early(self, time: int) -> None:
        old = [place for place, finding in self._early.items() if time - finding.time > _KEPT]
        for place in (*old, *list(self._early)[: max(0, len(self._early) - len(old) - _MOST_EARLY)]):
            finding = self._early.pop(place, None)
            if finding is not None:
                self._unframed.pop(finding.key, None)

    def _judged(self, detector: Detector, frames: Mapping[str, Frame], forgiven: Sequence[str]) -> list[Finding]:
        """What a detector finds, after it was told what persons said was no fault.

        One that fails soon after a restart would fail on every instant: its state is not what it seems.
        """
        try:
            for entity in forgiven:
                detector.accept_as_normal(entity, frames)
            return detector.observe(frames)
        except Exception as error:
            if detector.name not in self._tried:
                raise
            self._renew(detector)
            _log.warning("detector %s starts afresh: it fails on the snapshot's state: %r", detector.name, error)
            return detector.observe(frames)

    def _renew(self, detector: Detector) -> None:
        self._tried.discard(detector.name)
        detector.restore(self._fresh[detector.name])

    def _failed(self, detector: Detector, error: Exception) -> None:
        self.errors[detector.name] += 1
        if self.errors[detector.name] <= _MOST_ERRORS_TOLD:
            _log.error("detector %s is off for this frame, others go on", detector.name, exc_info=error)

    def snapshot(self) -> str:
        """All state as JSON text."""
        state = {
            "format": FORMAT,
            "detectors": {d.name: to_json(d.snapshot()) for d in self.detectors},
            "active": self.corroboration.snapshot(),
            "measured": self.available.snapshot(),
        }
        return json.dumps(to_json(state), separators=(",", ":"))

    def restore(self, text: str) -> None:
        """Takes the state of a snapshot; a detector whose state has another shape starts afresh, told in the log.

        Errors are counted from the start of the process, so that a detector that breaks with an upgrade is told.
        """
        state = json.loads(text)
        self._early, self._unframed = {}, {}
        self._restore_own(state)
        if state.get("format", 1) != FORMAT:
            found = state.get("format", 1)
            _log.warning("all detectors learn anew: their snapshot has format %s, this version reads %s", found, FORMAT)
            return
        for detector in self.detectors:
            fresh = self._fresh[detector.name]
            saved = state["detectors"].get(detector.name)
            if not isinstance(saved, dict) or set(saved) != set(fresh):
                _log.warning("detector %s starts afresh: the snapshot is of another version", detector.name)
                continue
            try:
                rich = from_json(saved)
                check_axes(rich, fresh, detector.name)
                detector.restore(rich)
                self._tried.add(detector.name)
            except _OTHER_SHAPE as error:
                self._renew(detector)
                _log.warning(
                    "detector %s starts afresh: the snapshot's state has another shape: %r", detector.name, error
                )
        self._tries = _TRIES

    def _restore_own(self, state: Mapping[str, Any]) -> None:
        """What detectors share; that it is lost takes nothing from them."""
        try:
            self.corroboration.restore(state["active"])
        except _OTHER_SHAPE as error:
            self.corroboration = Corroboration()
            _log.warning("what corroborates what starts afresh: the snapshot's state has another shape: %r", error)
        try:
            self.available.restore(state.get("measured", {}))
        except _OTHER_SHAPE as error:
            self.available.restore({})
            _log.warning("what was measured lately starts afresh: the snapshot has another shape: %r", error)


def _goes_on(before: Finding, finding: Finding) -> bool:
    """Whether a finding of an event is the one that was reported, or belongs to the same trouble and is no louder."""
    if finding == before:
        return True
    if _is_cleared(before) or _is_cleared(finding):
        return False
    same = before.key == finding.key or abs(finding.time - before.time) <= _SAME
    return same and LEVELS.index(finding.level) <= LEVELS.index(before.level)


def _is_cleared(finding: Finding) -> bool:
    return finding.evidence.get("cleared") is True


def _not_faults(frames: Mapping[str, Frame]) -> list[tuple[str, str]]:
    """(detector, entity) that persons said was no fault; the Desk has muted it until it was quiet once."""
    told = (e for f in frames.values() for e in f.events if e.kind == "feedback")
    return [(str(e.data.get("detector")), e.entity) for e in told if e.data.get("verdict") == "not_a_fault"]


def _no_beat(doing: str) -> None:
    """Heartbeat of a runner that nobody watches; a function of the module, so that checkpoints can hold it."""
