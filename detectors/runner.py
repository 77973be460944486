"""Runs all detectors over an instant's frames; one that fails stops no other."""

from __future__ import annotations

import base64
import json
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.detector import Detector
from pipeline.records import SECOND, Finding, Frame
from pipeline.topology import Topology

_log = logging.getLogger("fleetpulse.detectors")

# Families whose suspects explain each other physically; silent data corruption is never paged on anything but digests.
CORROBORATES: Mapping[str, tuple[str, ...]] = {
    "straggler": ("link", "coolant", "coolant_edge", "coolant_leak", "thermal_edge"),
    "thermal_edge": ("coolant", "coolant_edge", "coolant_leak"),
}
_FRESH = 120 * SECOND  # two repeats: what was not said since then no longer holds
_MOST_ERRORS_TOLD = 1  # per detector; further ones only count


class Runner:
    """Deterministic: findings come in the order of the detectors, and within one in the order in which it gave them.

    signals_available: what the input has (`event:KIND` for events); a detector whose needs it lacks is off. None: all.
    errors:            detector -> how many of its frames failed.
    """

    def __init__(self, detectors: Sequence[Detector], signals_available: Collection[str] | None = None) -> None:
        self.off = {
            d.name: missing
            for d in detectors
            if signals_available is not None and (missing := [n for n in d.needs if n not in signals_available])
        }
        self.detectors = [d for d in detectors if d.name not in self.off]
        self.errors: Counter[str] = Counter()
        self._active: dict[tuple[str, str], Finding] = {}

    @property
    def signals(self) -> frozenset[str]:
        """All that the detectors need or want; of other signals frames need not be made."""
        return frozenset(name for d in self.detectors for name in (*d.needs, *d.wants) if not name.startswith("event:"))

    @property
    def names(self) -> tuple[str, ...]:
        """Of all detectors, those that are off for want of input too."""
        return (*(d.name for d in self.detectors), *self.off)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Findings of one instant, corroboration included."""
        if not frames:
            return []
        found: list[Finding] = []
        self._forgive(frames)
        for detector in self.detectors:
            try:
                found += detector.observe(frames)
            except Exception as error:  # noqa: BLE001 - whatever a detector does, the others go on
                self._failed(detector, error)
        time = max(frame.time for frame in frames.values())
        return self._corroborated(found, time, next(iter(frames.values())).topology)

    def _forgive(self, frames: Mapping[str, Frame]) -> None:
        """Tells detectors what persons said was no fault; the Desk has muted it until it was quiet once."""
        told = [e for f in frames.values() for e in f.events if e.kind == "feedback"]
        for event in told:
            for detector in self.detectors:
                if event.data.get("verdict") == "not_a_fault" and event.data.get("detector") == detector.name:
                    detector.forgive(event.entity, frames)
                    self._active.pop((detector.name, event.entity), None)

    def _failed(self, detector: Detector, error: Exception) -> None:
        self.errors[detector.name] += 1
        if self.errors[detector.name] <= _MOST_ERRORS_TOLD:
            _log.error("detector %s is off for this frame, others go on", detector.name, exc_info=error)

    def _corroborated(self, found: Sequence[Finding], time: int, topology: Topology) -> list[Finding]:
        """Raises a suspect to a page if a finding of an explaining family stands on a related entity."""
        active = {**self._active, **{(f.detector, f.entity): f for f in found}}
        self._active = {k: f for k, f in active.items() if time - f.time <= _FRESH}
        fresh = {(f.detector, f.entity) for f in found}
        out = []
        for key, finding in self._active.items():
            reason = self._reason(finding, topology) if finding.level == "suspect" else None
            if reason is not None:
                evidence = {
                    **finding.evidence,
                    "corroborated_by": {"detector": reason.detector, "entity": reason.entity},
                }
                raised = replace(
                    finding,
                    time=time,
                    level="page",
                    evidence=evidence,
                    summary=f"{finding.summary}; {reason.detector} on {reason.entity} explains it",
                )
                self._active[key] = raised
                out.append(raised)
            elif key in fresh:
                out.append(finding)
        return out

    def _reason(self, finding: Finding, topology: Topology) -> Finding | None:
        """The first active finding that explains this one; the same sensor twice is no second witness."""
        wanted = CORROBORATES.get(finding.detector, ())
        others = (
            f for f in self._active.values() if f.detector in wanted and not set(f.signals) & set(finding.signals)
        )
        return next((f for f in others if _related(finding.entity, f.entity, topology)), None)

    def snapshot(self) -> str:
        """All state as JSON text."""
        state = {
            "detectors": {d.name: _plain(d.snapshot()) for d in self.detectors},
            "active": [asdict(f) for f in self._active.values()],
            "errors": dict(self.errors),
        }
        return json.dumps(_plain(state), separators=(",", ":"))

    def restore(self, text: str) -> None:
        """Takes the state of a snapshot; a detector whose state has another shape starts afresh, told in the log."""
        state = json.loads(text)
        for detector in self.detectors:
            saved = state["detectors"].get(detector.name)
            if saved is None or set(saved) != set(detector.snapshot()):
                _log.warning("detector %s starts afresh: the snapshot is of another version", detector.name)
                continue
            detector.restore({name: _rich(value) for name, value in saved.items()})
        self._active = {
            (f["detector"], f["entity"]): Finding(**{**f, "signals": tuple(f["signals"])}) for f in state["active"]
        }
        self.errors = Counter(state["errors"])


def _related(one: str, other: str, topology: Topology) -> bool:
    """Whether both are the same, one feeds the other, or both sit in one node."""
    if one == other or other in topology.above(one) or one in topology.above(other):
        return True
    node = topology.above_of_kind(one, "node")
    return node is not None and node == topology.above_of_kind(other, "node")


def _plain(value: Any) -> Any:
    """State as JSON knows it; an array becomes its dtype and its bytes in base64."""
    if isinstance(value, np.ndarray):
        content = base64.b64encode(value.tobytes()).decode()
        return {"dtype": _described(value.dtype), "shape": list(value.shape), "base64": content}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _described(dtype: np.dtype[Any]) -> Any:
    return dtype.str if dtype.names is None else [list(line) for line in dtype.descr]


def _rich(value: Any) -> Any:
    """The other way round."""
    if isinstance(value, dict):
        if set(value) == {"dtype", "base64", "shape"}:
            return _array(value["dtype"], value["base64"]).reshape(value["shape"])
        return {k: _rich(v) for k, v in value.items()}
    return [_rich(v) for v in value] if isinstance(value, list) else value


def _array(described: Any, text: str) -> NDArray[Any]:
    lines = described if isinstance(described, str) else [(n, t, *map(tuple, shape)) for n, t, *shape in described]
    return np.frombuffer(base64.b64decode(text), np.dtype(lines)).copy()
