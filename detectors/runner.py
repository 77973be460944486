"""Runs all detectors over the frames of an instant; a detector that fails is a finding and does not stop the others.

`warm_up` compiles the loops of the detectors before telemetry is read: else a first start reads nothing for 20 s.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.detector import Detector
from detectors.base.event_data import events_of
from detectors.base.findings import OpenConditions, build_finding, close_ended, due_report
from detectors.base.state import FORMAT, Buffer, check_axes, pack_state, unpack_state
from detectors.calibrations import apply_calibration_events, export_calibration, list_calibration
from detectors.corroboration import Corroboration
from pipeline.judging.frames import Framer
from pipeline.model.entity_names import pager_title, short_number
from pipeline.model.errors import UsageError
from pipeline.model.records import LEVELS, SECOND, Event, Finding, Frame, Level, Rows
from pipeline.model.signals import CATALOGUE, CLASSES, Signal
from pipeline.model.topology import Topology

SHARED = "shared"
"""Name of the piece of a snapshot that is of no single detector."""
PATIENCE_S = 3600.0
"""s without a value after which a signal counts as missing; chosen: the reboot of a node or a pause between jobs takes
less."""
READINGS = 3
"""Readings that must fail before a signal with a longer interval counts as missing; chosen."""
ROUTINE: Mapping[str, float] = {"event:digest": 86_400.0, "event:replica_digest": 86_400.0}
"""Events that occur without a fault -> seconds within which there is one; chosen: canaries run at least daily. Other
events may never occur, so a detector that needs only those is never off."""
_CHECK_EVERY = 60 * SECOND  # us between checks of a signal that is known to be there; chosen, for speed


class SignalPresence:
    """Time of the last value of each needed signal, by the time of the data."""

    def __init__(self, needs: Collection[str], catalogue: Mapping[str, Signal]) -> None:
        self._needs = [name for name in dict.fromkeys(needs) if name in ROUTINE or not name.startswith("event:")]
        intervals = {name: (catalogue[name].interval or 0.0) if name in catalogue else 0.0 for name in self._needs}
        self._patience = {n: ROUTINE.get(n) or max(PATIENCE_S, READINGS * intervals[n]) for n in self._needs}
        self.last: dict[str, int] = {}
        self.time = self.since = 0

    def update(self, frames: Mapping[str, Frame]) -> None:
        """Adds an instant."""
        self.time = max(frame.time for frame in frames.values())
        self.since = min(self.since or self.time, self.time)
        due = [name for name in self._needs if not 0 <= self.time - self.last.get(name, -_CHECK_EVERY) < _CHECK_EVERY]
        if any(name in ROUTINE for name in due):
            kinds = {f"event:{event.kind}" for frame in frames.values() for event in frame.events}
            self.last.update(dict.fromkeys(kinds.intersection(due), self.time))
        for frame in frames.values():
            for name in due:
                if name in frame.values and not np.isnan(frame.values[name]).all():
                    self.last[name] = self.time

    def is_present(self, name: str) -> bool:
        """Returns whether a signal is measured now; True until it has been missing for its patience."""
        if name not in self._patience or not self.time:
            return True
        return self.time - self.last.get(name, self.since) <= self._patience[name] * SECOND

    def snapshot(self) -> dict[str, Any]:
        """Returns its state as plain data."""
        return {"time": self.time, "since": self.since, "last": dict(self.last)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a snapshot; without one all signals begin as present. Reads all of it or nothing."""
        time, last = int(state.get("time", 0)), {str(k): int(v) for k, v in dict(state.get("last", {})).items()}
        self.time, self.since, self.last = time, int(state.get("since", time)), last


_log = logging.getLogger("fleetpulse.detectors")

_BAD_STATE = (AttributeError, IndexError, KeyError, TypeError, ValueError)
_TRIES = 60  # instants after a restart in which a failure is blamed on the snapshot; not all have all classes; chosen
_MOST_ERRORS_LOGGED = 8  # different errors of a detector; further ones are only counted; chosen
_SAME = 60 * SECOND  # us within which events of an entity belong to one condition, as agents repeat them; chosen
_KEPT = 600 * SECOND  # us for which findings reported on arrival are kept for their frame; chosen: a backlog of frames
_MOST_EARLY = 10_000  # of those; the oldest beyond are dropped and reported again with their frame; chosen


FAILS_FOR = 600 * SECOND
"""us without a failure after which a detector works again: the Desk resolves after the same time; chosen."""
_WORDS = 200  # characters of an error in the evidence; chosen


class DetectorFailures:
    """Detectors that fail. Each is a condition of `detector:NAME`: what it would find is not found meanwhile.

    known: detector -> when it failed first and last (us), frames and events lost since then, the newest error.
    """

    def __init__(self) -> None:
        self.known: dict[str, dict[str, Any]] = {}
        self._conditions: OpenConditions = {}
        self._logged: dict[str, set[str]] = {}  # by detector, the errors that this process has logged
        self._new: set[str] = set()  # detectors that failed since the findings before

    def add(self, detector: Detector, error: Exception, time: int) -> None:
        """Records a failure; each error is logged once in a process."""
        text = f"{type(error).__name__}: {error}"[:_WORDS]
        known = self.known.setdefault(detector.name, {"since": time, "last": time, "lost": 0, "error": ""})
        known["lost"] += 1
        self._new.add(detector.name)
        known["last"] = max(time, known["last"])
        logged = self._logged.setdefault(detector.name, set())
        if text not in logged and len(logged) < _MOST_ERRORS_LOGGED:
            logged.add(text)
            _log.error("detector %s failed on a frame, the others continue", detector.name, exc_info=error)
        known["error"] = text

    def find_failing(self, detectors: Sequence[Detector], time: int) -> list[Finding]:
        """Returns a ticket for each detector that failed at this instant, once a minute, with its onset."""
        if not self.known:
            return []
        self.known = {name: k for name, k in self.known.items() if abs(time - k["last"]) <= FAILS_FOR}
        close_ended(self._conditions, set(self.known))
        new, self._new = self._new, set()
        failing = ((d, self.known[d.name]) for d in detectors if d.name in new and d.name in self.known)
        found = ((d, k, due_report(self._conditions, d.name, time, k["since"], "ticket")) for d, k in failing)
        return [_failing_detector(d, k, time, due) for d, k, due in found if due is not None]

    def snapshot(self) -> dict[str, Any]:
        """Returns its state as plain data."""
        return {"known": self.known, "conditions": self._conditions}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a snapshot. Reads all of it or nothing."""
        known, conditions = state.get("known", {}), state.get("conditions", {})
        kept = {str(name): {**k, "lost": int(k["lost"]), "last": int(k["last"])} for name, k in known.items()}
        self.known, self._conditions = kept, {str(name): dict(k) for name, k in conditions.items()}


def _failing_detector(detector: Detector, known: Mapping[str, Any], time: int, due: tuple[int, Level]) -> Finding:
    entity, lost = f"detector:{detector.name}", known["lost"]
    return build_finding(
        *("telemetry_blind", time, entity, due),
        score=float(lost),
        summary=pager_title(entity, f"fails, {short_number(lost)} frames lost: {known['error']}"),
        signals=tuple(name for name in detector.input_signals() if not name.startswith("event:")),
        clears="clears after 10 min without a failure",
        lost=lost,
        error=known["error"],
        blind=detector.family,
    )


class Runner:
    """Deterministic: findings come in the order of the detectors, and within one in the order of its `observe`.

    signals_available: signals of the input (`event:KIND` for events); a detector that needs others is off. None: all.
    errors:            detector -> on how many frames it failed.
    beat:              heartbeat, called before each step, so that a detector that hangs is known by its name.
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
        self.failures = DetectorFailures()
        self.corroboration = Corroboration()
        self.presence = SignalPresence([name for d in self.detectors for name in d.deciding_signals()], catalogue)
        self.beat: Callable[[str], None] = _no_beat
        self._fresh = {d.name: d.snapshot() for d in self.detectors}
        self._restored: set[str] = set()  # detectors restored within _TRIES that have not failed since
        self._tries = 0
        self._early: dict[tuple[str, str], Finding] = {}  # reported on arrival, by detector and entity
        self._unframed: dict[tuple[str, str, int], Level] = {}  # those of them that no frame has had yet

    @property
    def signals(self) -> frozenset[str]:
        """Signals that frames must have: of all detectors, also those that are off, so that frames are the same as in a
        pipeline."""
        return frozenset(name for d in self._all for name in d.input_signals() if not name.startswith("event:"))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all detectors, also those that are off."""
        return (*(d.name for d in self.detectors), *self.off)

    def listing(self) -> list[dict[str, Any]]:
        """Returns a row of plain data per detector, also those that are off: description, missing signals, errors."""
        return [{**d.describe(), "off": self._missing_signals(d), "errors": self.errors[d.name]} for d in self._all]

    def _missing_signals(self, detector: Detector) -> list[str]:
        """Returns the signals that it needs and the input never had, or has not had for long; it still runs."""
        return self.off.get(detector.name) or detector.missing_inputs(self.presence.is_present)

    def __getstate__(self) -> dict[str, Any]:
        """Returns its state without the heartbeat, which belongs to a process."""
        return {name: value for name, value in vars(self).items() if name != "beat"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, beat=_no_beat)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns the findings of one instant, each with what corroborates it."""
        if not frames:
            return []
        found: list[Finding] = []
        accepted = _accepted_as_normal(frames)
        for name, entity in accepted:
            self.corroboration.drop((name, entity))
        self.presence.update(frames)
        self._apply_calibration(frames)
        self._tries -= 1
        if self._tries < 0:
            self._restored.clear()
        time, topology = max(frame.time for frame in frames.values()), next(iter(frames.values())).topology
        early = self.judge_events([e for frame in frames.values() for e in frame.events], topology)
        for detector in self.detectors:
            self.beat(f"detector {detector.name}")
            try:
                found += self._run(detector, frames, [entity for name, entity in accepted if name == detector.name])
            except Exception as error:  # noqa: BLE001 - a detector that fails in any way does not stop the others
                self._count_failure(detector, error, time)
        found = self.corroboration.corroborate(found, time, topology)
        found += self.failures.find_failing(self.detectors, time)
        self._drop_old_early(time)
        return [*early, *(f for f in found if not self._was_reported(f))]

    def calibration(self) -> dict[str, Any]:
        """Returns the calibration in force, as `detectors.calibrations` describes it."""
        return export_calibration(self.detectors)

    def calibration_rows(self, other: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Returns a row of each statistic and kind of device, compared with another calibration if there is one."""
        return list_calibration(self.detectors, other)

    def _apply_calibration(self, frames: Mapping[str, Frame]) -> None:
        try:
            apply_calibration_events(self.detectors, (e for frame in frames.values() for e in frame.events))
        except UsageError as error:  # of another version: what is in force stays
            _log.error("an event `calibration` is ignored: %s", error)

    def judge_events(self, events: Sequence[Event], topology: Topology, again: bool = False) -> list[Finding]:
        """Returns the findings of events by themselves (Detector.judge_event), once for each condition.

        Call it as events arrive, or leave it to `observe`, which does it for the events of its frames: the findings
        are the same. Further events of the same condition are left to the frame.

        again: also for events that were judged before: the write of their findings may have failed.
        """
        found = (
            self._judge_event(detector, event, topology, again)
            for event in sorted(events, key=lambda e: (e.time, e.entity, e.kind))
            for detector in self.detectors
            if event.kind in detector.on_arrival
        )
        return [finding for finding in found if finding is not None]

    def _judge_event(self, detector: Detector, event: Event, topology: Topology, again: bool) -> Finding | None:
        try:
            finding = detector.judge_event(event, topology)
        except Exception as error:  # noqa: BLE001 - a detector that fails in any way does not stop the others
            self._count_failure(detector, error, event.time)
            return None
        if finding is None:
            return None
        key = (finding.detector, finding.entity)
        before = self._early.get(key)
        if before is not None and not again and _continues(before, finding):
            return None
        self._early.pop(key, None)  # the newest are last
        self._early[key] = finding
        if not _is_cleared(finding):
            self._unframed[finding.key] = finding.level
        return finding

    def _was_reported(self, finding: Finding) -> bool:
        """Returns whether the finding of a frame was reported when its event arrived; once each."""
        level = self._unframed.get(finding.key)
        if level is None or _is_cleared(finding):
            return False
        if LEVELS.index(finding.level) > LEVELS.index(level):
            return False
        del self._unframed[finding.key]
        return True

    def _drop_old_early(self, time: int) -> None:
        old = [key for key, finding in self._early.items() if time - finding.time > _KEPT]
        for key in (*old, *list(self._early)[: max(0, len(self._early) - len(old) - _MOST_EARLY)]):
            finding = self._early.pop(key, None)
            if finding is not None:
                self._unframed.pop(finding.key, None)

    def _run(self, detector: Detector, frames: Mapping[str, Frame], accepted: Sequence[str]) -> list[Finding]:
        """Returns the findings of a detector, after people's feedback.

        After a failure soon after a restart the detector starts with empty state: the restored one may be bad.
        """
        try:
            for entity in accepted:
                detector.accept_as_normal(entity, frames)
            return detector.observe(frames)
        except Exception as error:
            if detector.name not in self._restored:
                raise
            self._start_empty(detector)
            _log.warning(
                "detector %s starts with empty state: it fails with the restored state: %r", detector.name, error
            )
            return detector.observe(frames)

    def _start_empty(self, detector: Detector) -> None:
        self._restored.discard(detector.name)
        detector.restore(self._fresh[detector.name])

    def _count_failure(self, detector: Detector, error: Exception, time: int) -> None:
        self.errors[detector.name] += 1
        self.failures.add(detector, error, time)

    def snapshot(self) -> Iterator[tuple[str, list[Buffer]]]:
        """Yields all state in named pieces, one of each detector, to be read before the next instant: nothing of it is
        copied."""
        shared = {
            "format": FORMAT,
            "active": self.corroboration.snapshot(),
            "measured": self.presence.snapshot(),
            "failures": self.failures.snapshot(),
        }
        yield SHARED, pack_state(shared)
        for detector in self.detectors:
            yield detector.name, pack_state(detector.snapshot(copied=False))

    def restore(self, pieces: Mapping[str, bytes]) -> None:
        """Continues from a snapshot; a detector whose state has another layout starts with empty state (logged).

        Errors are counted from the start of the process, so that a detector that fails after an upgrade is logged.
        Raises KeyError or ValueError where the state that they share is missing or unreadable.
        """
        shared = unpack_state(pieces[SHARED])
        self._early, self._unframed = {}, {}
        self._restore_shared(shared)
        if (found := shared.get("format", 1)) != FORMAT:
            _log.warning(
                "all detectors start with empty state: their snapshot has format %s, this version reads %s",
                found,
                FORMAT,
            )
            return
        for detector in self.detectors:
            self._restore_detector(detector, pieces.get(detector.name))
        self._tries = _TRIES

    def drop_ranks(self, kept: NDArray[np.bool_]) -> None:
        """Forgets ranks that ended; see `Detector.drop_ranks`."""
        for detector in self.detectors:
            detector.drop_ranks(kept)

    def _restore_detector(self, detector: Detector, piece: bytes | None) -> None:
        fresh = self._fresh[detector.name]
        try:
            saved = None if piece is None else unpack_state(piece)
            if not isinstance(saved, dict) or set(saved) != set(fresh):
                _log.warning("detector %s starts with empty state: the snapshot is of another version", detector.name)
                return
            check_axes(saved, fresh, detector.name)
            detector.restore(saved)
            self._restored.add(detector.name)
        except _BAD_STATE as error:
            self._start_empty(detector)
            _log.warning(
                "detector %s starts with empty state: its snapshot has another layout: %r", detector.name, error
            )

    def _restore_shared(self, state: Mapping[str, Any]) -> None:
        """Restores the state that detectors share; they also work without it."""
        try:
            self.corroboration.restore(state["active"])
        except _BAD_STATE as error:
            self.corroboration = Corroboration()
            _log.warning("corroboration starts with empty state: its snapshot has another layout: %r", error)
        try:
            self.presence.restore(state.get("measured", {}))
        except _BAD_STATE as error:
            self.presence.restore({})
            _log.warning("presence of signals starts with empty state: its snapshot has another layout: %r", error)
        try:
            self.failures.restore(state.get("failures", {}))
        except _BAD_STATE as error:
            self.failures = DetectorFailures()
            _log.warning("failures of detectors start with empty state: their snapshot has another layout: %r", error)


def _continues(before: Finding, finding: Finding) -> bool:
    """Returns whether a finding of an event repeats the one before, or is of the same condition at no higher level."""
    if finding == before:
        return True
    if _is_cleared(before) or _is_cleared(finding):
        return False
    same = before.key == finding.key or abs(finding.time - before.time) <= _SAME
    return same and LEVELS.index(finding.level) <= LEVELS.index(before.level)


def _is_cleared(finding: Finding) -> bool:
    return finding.evidence.get("cleared") is True


def _accepted_as_normal(frames: Mapping[str, Frame]) -> list[tuple[str, str]]:
    """Returns (detector, entity) of feedback "not a fault"; the Desk mutes these until the condition has cleared."""
    feedback = events_of(frames, "feedback")
    return [(str(e.data.get("detector")), e.entity) for e in feedback if e.data.get("verdict") == "not_a_fault"]


def _no_beat(doing: str) -> None:
    """Heartbeat of a runner that is not supervised; a function of the module, so that checkpoints can hold it."""


_DEVICES = 16  # of each class, one on each of 16 nodes; chosen: twice the smallest cohort that is compared
_INSTANTS = 30  # chosen: by then every loop that a learning detector calls has been called
_STEP, _BEGIN = 10 * SECOND, 1_600_000_000 * SECOND
_SHARED = ("rack:warm", "cdu:warm", "pdu:warm", "leaf:warm", "rail:warm", "stage:warm.0", "job:warm")


def warm_up(detectors: Sequence[Detector]) -> None:
    """Runs `detectors` over some artificial frames; do not use them afterwards.

    The frames come from a Framer, since machine code is compiled for the types of its arrays.
    """
    runner = Runner(detectors)
    names = {c: [f"{kind}:warm{i}.0" for i in range(_DEVICES)] for c, kind in CLASSES.items()}
    names["node"] = [f"node:warm{i}" for i in range(_DEVICES)]
    parents = {n: (f"node:warm{i}", *_SHARED) for c in names if c != "node" for i, n in enumerate(names[c])}
    framer = Framer(_STEP, Topology(parents), lambda c: names[c], start=_BEGIN, signals=runner.signals)
    for instant in range(_INSTANTS):
        time = _BEGIN + instant * _STEP
        for rows in _rows(runner.signals, time):
            framer.add_rows(rows)
        for instant_frames in framer.advance(time + _STEP):
            runner.observe(instant_frames.frames)


def _rows(signals: frozenset[str], time: int) -> list[Rows]:
    """Returns a row of each device of each class, with a value near one, or a valid one, of each signal."""
    spread = 1 + np.arange(_DEVICES) % 3 / 100 + (time // _STEP) % 5 / 1000
    of_class: dict[str, dict[str, NDArray[Any]]] = {}
    for name in sorted(signals & CATALOGUE.keys()):
        low, high = CATALOGUE[name].valid
        of_class.setdefault(CATALOGUE[name].device_class, {})[name] = np.clip(spread, low, high)
    times, devices = np.full(_DEVICES, time), np.arange(_DEVICES, dtype=np.int32)
    return [Rows(c, times, devices, columns) for c, columns in of_class.items()]
