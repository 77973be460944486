"""Finds leaks: what a leak detector says pages with the frame in which it is told, and holds until dry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from detectors.conditions import Open, close, tell
from detectors.detector import Detector, notes
from detectors.edge_events import told, values
from pipeline.records import Finding, Frame, Level
from pipeline.signals import CATALOGUE

_SIGNAL = "leak.state"
_STATES = CATALOGUE[_SIGNAL].states
_LEVELS: Mapping[str, Level] = {"warning": "ticket", "critical": "page"}


@dataclass
class CoolantLeak(Detector):
    """A leak detector at critical pages, at warning it is a ticket; both hold until it is well again.

    From the agents' event `leak`, which is stored within seconds, and from leak.state, so that a lost event costs a
    frame and no leak. The page waits for its frame: some 37 s with the defaults (frame 10 s, lateness 30 s). No
    statistics: a controller has debounced the rope, and water beside 100 kW leaves no time to be sure.

    Source: Redfish LeakDetector DetectorState (DSP2046): Warning and Critical are the detector's own verdict.
    """

    name: ClassVar[str] = "coolant_leak"
    family: ClassVar[str] = "coolant"
    device_class: ClassVar[str] = "leak"
    needs: ClassVar[tuple[str, ...]] = (_SIGNAL,)
    wants: ClassVar[tuple[str, ...]] = ("event:leak",)
    blind: ClassVar[str] = (
        "Water where no rope or sensor lies, a detector that is broken but says OK, and condensation taken for a leak."
    )

    dry: int = 2
    """Frames in a row with a dry detector that end a leak whose end no event told; chosen."""

    leaks: dict[str, dict[str, Any]] = notes()
    conditions: Open = notes()

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        if not frames:
            return []
        time = max(frame.time for frame in frames.values())
        over = self._hear(frames) | self._look(values(frames.get("leak"), _SIGNAL), time)
        dry = (over - set(self.leaks)) & set(self.conditions)
        found = [self._cleared(e, time, self.conditions[e]) for e in sorted(dry)]
        close(self.conditions, set(self.leaks))
        for entity, leak in sorted(self.leaks.items()):
            if due := tell(self.conditions, entity, time, leak["onset"], _LEVELS[leak["leak"]]):
                found.append(self._finding(entity, time, due, leak))
        return found

    def _hear(self, frames: Mapping[str, Frame]) -> set[str]:
        """Takes the events; returns who is dry again."""
        over: set[str] = set()
        for said in told(frames, ("leak",)):
            leak = str(said.event.data.get("leak"))
            if said.active and leak in _LEVELS:
                self._wet(said.entity, leak, said.since)
                over.discard(said.entity)
            elif not said.active and said.entity in self.leaks:
                del self.leaks[said.entity]
                over.add(said.entity)
        return over

    def _look(self, states: Mapping[str, float], time: int) -> set[str]:
        """Takes the states; a state that is neither well nor a leak says nothing."""
        over = set()
        for entity, value in states.items():
            state = _STATES[int(value)] if 0 <= value < len(_STATES) else ""
            if state in _LEVELS:
                self._wet(entity, state, time)
            elif state == "ok" and entity in self.leaks:
                self.leaks[entity]["dry"] += 1
                if self.leaks[entity]["dry"] >= self.dry:
                    del self.leaks[entity]
                    over.add(entity)
        return over

    def _wet(self, entity: str, state: str, onset: int) -> None:
        leak = self.leaks.setdefault(entity, {"leak": state, "onset": onset, "dry": 0})
        leak["leak"] = "critical" if "critical" in (leak["leak"], state) else state
        leak["dry"] = 0

    def _cleared(self, entity: str, time: int, condition: dict[str, Any]) -> Finding:
        summary = f"{entity} is dry again"
        onset, level = condition["onset"], condition["level"]
        return Finding(time, onset, entity, self.name, level, 0.0, summary, {"cleared": True}, (_SIGNAL,))

    def _finding(self, entity: str, time: int, due: tuple[int, Level], leak: dict[str, Any]) -> Finding:
        evidence = {"state": leak["leak"], "holds": True}
        score = 2.0 if leak["leak"] == "critical" else 1.0
        summary = f"{entity} detects a leak: {leak['leak']}"
        return Finding(time, due[0], entity, self.name, due[1], score, summary, evidence, (_SIGNAL,))
