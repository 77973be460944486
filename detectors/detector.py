"""The page that somebody who adds a detector reads: Detector and memory().

A detector is a dataclass in `detectors/NAME.py` and one line in `detectors/__init__.py`. Its fields are its
configuration (`[detector.NAME]`), its memory() fields its state. It says what is true now; only the Desk remembers what
was said.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

from pipeline.records import Finding, Frame

_STATE = "fleetpulse.state"


def memory(fill: float | int | bool, dtype: Any = np.float64) -> Any:
    """A state array with one cell per entity of `device_class`; grows with the fleet, new cells hold `fill`."""
    return field(default_factory=lambda: np.empty(0, dtype), init=False, repr=False, metadata={_STATE: fill})


def notes(factory: Any = dict) -> Any:
    """State that is not one cell per entity (digests of a canary round, links of a leaf): plain picklable data."""
    return field(default_factory=factory, init=False, repr=False, metadata={_STATE: None})


@dataclass
class Detector(ABC):
    """Judges frames. Deterministic: the same frames give the same findings, whatever came between them.

    name:         in findings, configuration and labels.
    family:       what kind of trouble, as operators say it.
    device_class: class of the entities that the memory() arrays are about.
    needs:        signals without which it is off; `event:KIND` stands for events of that kind.
    wants:        signals that only corroborate.
    blind:        one sentence: what it cannot see.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    device_class: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]
    wants: ClassVar[tuple[str, ...]] = ()
    blind: ClassVar[str]

    @abstractmethod
    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """What is true at this instant; frames by device class, absent where nothing was measured.

        A condition is reported when it begins, when its level rises and while it holds as often as the detector likes,
        always with the onset of its first report. Frames are read-only.
        """

    def grow(self, size: int) -> None:
        """Lengthens every memory() array to at least `size` cells."""
        for f in _state_fields(self):
            cells = getattr(self, f.name)
            if f.metadata[_STATE] is not None and len(cells) < size:
                new = np.full(size, f.metadata[_STATE], cells.dtype)
                new[: len(cells)] = cells
                setattr(self, f.name, new)

    def snapshot(self) -> dict[str, Any]:
        """All state as plain data, by field name; later changes of the detector do not show in it."""
        return {f.name: copy.deepcopy(getattr(self, f.name)) for f in _state_fields(self)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes the state of a snapshot; goes on as if it had never stopped.

        Parts of a cell that the snapshot does not have yet, since it is of an older version, begin as in a new cell.
        """
        for f in _state_fields(self):
            value = copy.deepcopy(state[f.name])
            if f.metadata[_STATE] is not None:
                value = _as_cells(value, getattr(self, f.name).dtype, f.metadata[_STATE])
            setattr(self, f.name, value)


def _state_fields(detector: Detector) -> list[Field[Any]]:
    return [f for f in fields(detector) if _STATE in f.metadata]


def _as_cells(saved: Any, dtype: np.dtype[Any], fill: Any) -> Any:
    if saved.dtype == dtype or saved.dtype.names is None or dtype.names is None:
        return saved
    cells = np.full(len(saved), fill, dtype)
    for name in set(dtype.names) & set(saved.dtype.names):
        cells[name] = saved[name]
    return cells
