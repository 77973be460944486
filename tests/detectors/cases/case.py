"""The fault of each detector for the contract suite: one file per detector beside this one, with a `CASE`.

A short one to copy is telemetry_clock.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.detector import Detector
from pipeline.model.records import SECOND, Event, Finding, Frame, Level
from pipeline.model.signals import class_of_entity
from pipeline.model.topology import Topology

START = 1_790_000_000 * SECOND
Values = dict[str, dict[str, NDArray[np.float64]]]
Instant = tuple[Values, list[Event]]


@dataclass(frozen=True)
class Case:
    """The frames of one detector in the contract suite.

    names:    device class -> entities of a small site.          topology: builds it.
    instant:  (tick, broken, rng) -> values by class and signal, and events; `broken` holds from tick `fault` on.
    guilty:   the entities that must be blamed, and no others.  level: the highest that is reached by the end.
    step:     seconds between two ticks.
    exact:    why it needs no learning and may report within its first 20 samples; empty: it must be silent there.
    """

    detector: type[Detector]
    names: Mapping[str, tuple[str, ...]]
    topology: Callable[[], Topology]
    instant: Callable[[int, bool, np.random.Generator], Instant]
    guilty: frozenset[str]
    level: Level = "page"
    fault: int = 60
    ticks: int = 180
    step: int = 10
    exact: str = ""

    def time(self, tick: int) -> int:
        """Returns the time of a tick (us)."""
        return START + tick * self.step * SECOND

    def frames(self, tick: int, broken: bool, topology: Topology) -> dict[str, Frame]:
        """Returns read-only frames of one instant: the same for the same tick."""
        values, events = self.instant(tick, broken and tick >= self.fault, np.random.default_rng([tick, 7]))
        return self.frames_of(tick, values, events, topology)

    def frames_of(self, tick: int, values: Values, events: Iterable[Event], topology: Topology) -> dict[str, Frame]:
        """Returns values and events as frames; a class with events only has a frame too."""
        by_class: dict[str, list[Event]] = {}
        for event in events:
            by_class.setdefault(class_of_entity(event.entity), []).append(event)
        found = {}
        for device_class in sorted({*values, *by_class}):
            columns = values.get(device_class, {})
            for column in columns.values():
                column.flags.writeable = False
            width = max((len(c) for c in columns.values()), default=0)
            names = self.names.get(device_class, ())[: width or None]
            mine = tuple(by_class.get(device_class, ()))
            found[device_class] = Frame(self.time(tick), device_class, names, columns, topology, mine)
        return found

    def run_detector(self, detector: Detector, ticks: range, broken: bool = True) -> list[Finding]:
        """Returns the findings of a detector over some ticks."""
        topology = self.topology()
        return [finding for t in ticks for finding in detector.observe(self.frames(t, broken, topology))]


Known = TypeVar("Known", bound=Detector)


def at_known_site(detector: Known) -> Known:
    """Returns the detector with the thresholds of a site whose quiet streams are those of normal noise: factor 1."""
    for tail in detector.tails().values():
        tail.pin({"*": 1.0})
    return detector


def cases() -> list[Case]:
    """Returns the cases of all files beside this one, by name."""
    names = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem != "case")
    return [importlib.import_module(f"tests.detectors.cases.{name}").CASE for name in names]
