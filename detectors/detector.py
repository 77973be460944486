"""The page that somebody who adds a detector reads: Detector, memory(), notes() and part().

A detector is a dataclass in `detectors/NAME.py` and one line in `detectors/__init__.py`. Its fields are its
configuration (`[detector.NAME]`), its memory(), notes() and part() fields its state. It says what is true now; only
the Desk remembers what was said.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, Protocol

import numpy as np

from detectors.streams import Streams
from pipeline.records import Finding, Frame

_STATE = "fleetpulse.state"
_PART = "fleetpulse.part"


class Part(Protocol):
    """A piece of a detector with state of its own, such as Gates or Streams."""

    def snapshot(self) -> Any:
        """All state as plain data: numbers, texts, arrays, and lists and dicts of those with texts as keys."""

    def restore(self, state: Any) -> None:
        """Goes on from a snapshot as if it had never stopped."""


def memory(fill: float | int | bool, dtype: Any = np.float64) -> Any:
    """A state array with one cell per entity of `device_class`; grows with the fleet, new cells hold `fill`."""
    return field(default_factory=lambda: np.empty(0, dtype), init=False, repr=False, metadata={_STATE: fill})


def notes(factory: Any = dict) -> Any:
    """State that is not one cell per entity (digests of a canary round, links of a leaf): plain picklable data."""
    return field(default_factory=factory, init=False, repr=False, metadata={_STATE: None})


def part(factory: Callable[[], Part]) -> Any:
    """A piece with state of its own, made afresh for each detector."""
    return field(default_factory=factory, init=False, repr=False, metadata={_PART: True})


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

    def forgive(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """A person said that what is found of `entity` is no fault: its streams take it for normal from now on."""
        for frame in frames.values():
            if entity in frame.entities:
                mask = np.array([e == entity for e in frame.entities])
                for _, piece in _parts(self):
                    if isinstance(piece, Streams) and frame.device_class == self.device_class:
                        piece.forget(mask)

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
        cells = {f.name: copy.deepcopy(getattr(self, f.name)) for f in _state_fields(self)}
        return {**cells, **{name: copy.deepcopy(piece.snapshot()) for name, piece in _parts(self)}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes the state of a snapshot; goes on as if it had never stopped.

        Parts of a cell that the snapshot does not have yet, since it is of an older version, begin as in a new cell.
        """
        for f in _state_fields(self):
            value = copy.deepcopy(state[f.name])
            if f.metadata[_STATE] is not None:
                value = _as_cells(value, getattr(self, f.name).dtype, f.metadata[_STATE])
            setattr(self, f.name, value)
        for name, piece in _parts(self):
            piece.restore(copy.deepcopy(state[name]))


def _parts(detector: Detector) -> list[tuple[str, Part]]:
    return [(f.name, getattr(detector, f.name)) for f in fields(detector) if _PART in f.metadata]


def _state_fields(detector: Detector) -> list[Field[Any]]:
    return [f for f in fields(detector) if _STATE in f.metadata]


def _as_cells(saved: Any, dtype: np.dtype[Any], fill: Any) -> Any:
    if saved.dtype == dtype or saved.dtype.names is None or dtype.names is None:
        return saved
    cells = np.full(len(saved), fill, dtype)
    for name in set(dtype.names) & set(saved.dtype.names):
        cells[name] = saved[name]
    return cells
