"""Runs all detectors over an instant's frames; one that fails stops no other."""

from __future__ import annotations

import base64
import json
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.available import Available
from detectors.corroboration import Corroboration
from detectors.detector import Detector
from pipeline.records import Finding, Frame
from pipeline.signals import CATALOGUE, Signal

_log = logging.getLogger("fleetpulse.detectors")

_MOST_ERRORS_TOLD = 1  # per detector; further ones only count


class Runner:
    """Deterministic: findings come in the order of the detectors, and within one in the order in which it gave them.

    signals_available: what the input has (`event:KIND` for events); a detector whose needs it lacks is off. None: all.
    errors:            detector -> how many of its frames failed.
    """

    def __init__(
        self,
        detectors: Sequence[Detector],
        signals_available: Collection[str] | None = None,
        catalogue: Mapping[str, Signal] = CATALOGUE,
    ) -> None:
        self.off: dict[str, list[str]] = {}
        used: set[str] = set()
        for detector in sorted(detectors, key=lambda d: d.rest):
            if missing := detector.choose(used, signals_available, catalogue):
                self.off[detector.name] = missing
            else:
                used.update(detector.looks_at())
        self.detectors = [d for d in detectors if d.name not in self.off]
        self._all = tuple(detectors)
        self.errors: Counter[str] = Counter()
        self.corroboration = Corroboration()
        self.available = Available([name for d in self.detectors for name in d.needs], catalogue)

    @property
    def signals(self) -> frozenset[str]:
        """All that the detectors need or want; of other signals frames need not be made."""
        return frozenset(name for d in self.detectors for name in d.looks_at() if not name.startswith("event:"))

    @property
    def names(self) -> tuple[str, ...]:
        """Of all detectors, those that are off for want of input too."""
        return (*(d.name for d in self.detectors), *self.off)

    def listing(self) -> list[dict[str, Any]]:
        """One row of plain data per detector, those that are off too: what it is, how it is set, how it fares."""
        return [{**_plain(d.row()), "off": self._lacks(d), "errors": self.errors[d.name]} for d in self._all]

    def _lacks(self, detector: Detector) -> list[str]:
        """What it needs and the input never had, or has not had lately; such a detector goes on, and finds nothing."""
        return self.off.get(detector.name) or self.available.lacking(detector.needs)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Findings of one instant, corroboration included."""
        if not frames:
            return []
        found: list[Finding] = []
        self._forgive(frames)
        self.available.look(frames)
        for detector in self.detectors:
            try:
                found += detector.observe(frames)
            except Exception as error:  # noqa: BLE001 - whatever a detector does, the others go on
                self._failed(detector, error)
        time = max(frame.time for frame in frames.values())
        return self.corroboration.raised(found, time, next(iter(frames.values())).topology)

    def _forgive(self, frames: Mapping[str, Frame]) -> None:
        """Tells detectors what persons said was no fault; the Desk has muted it until it was quiet once."""
        told = [e for f in frames.values() for e in f.events if e.kind == "feedback"]
        for event in told:
            for detector in self.detectors:
                if event.data.get("verdict") == "not_a_fault" and event.data.get("detector") == detector.name:
                    detector.forgive(event.entity, frames)
                    self.corroboration.forget((detector.name, event.entity))

    def _failed(self, detector: Detector, error: Exception) -> None:
        self.errors[detector.name] += 1
        if self.errors[detector.name] <= _MOST_ERRORS_TOLD:
            _log.error("detector %s is off for this frame, others go on", detector.name, exc_info=error)

    def snapshot(self) -> str:
        """All state as JSON text."""
        state = {
            "detectors": {d.name: _plain(d.snapshot()) for d in self.detectors},
            "active": self.corroboration.snapshot(),
            "errors": dict(self.errors),
            "measured": self.available.snapshot(),
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
            blank = detector.snapshot()
            try:
                detector.restore({name: _rich(value) for name, value in saved.items()})
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                detector.restore(blank)
                _log.warning(
                    "detector %s starts afresh: the snapshot's state has another shape: %r", detector.name, error
                )
        self.corroboration.restore(state["active"])
        self.errors = Counter(state["errors"])
        self.available.restore(state.get("measured", {}))


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
