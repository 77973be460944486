"""The page that somebody who adds a detector reads: Detector, memory(), notes() and part().

A detector is a dataclass in `detectors/NAME.py` and one line in `detectors/__init__.py`. Its fields are its
configuration (`[detector.NAME]`), its memory(), notes() and part() fields its state. It says what is true now; only
the Desk remembers what was said.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Protocol

import numpy as np

from detectors.base.budget import budget_line
from detectors.base.state import check_one_length
from detectors.base.streams import Streams
from detectors.base.topology_index import members_mask
from pipeline.model.records import Event, Finding, Frame
from pipeline.model.signals import Signal
from pipeline.model.topology import Topology

_STATE = "fleetpulse.state"
_PART = "fleetpulse.part"
_PER_NODE = {"gpu": 8, "rank": 8, "nic": 8, "nvlink": 8}
"""Devices of a class on an 8-GPU node, for the budget; of all others one. As in NVIDIA's DGX H100."""


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
    any_of:       signals of which one at least must be there, or it is off.
    wants:        signals that only corroborate.
    cannot_see:   one sentence: what it cannot see.
    takes_unused_signals: whether it judges what the others do not use, and so chooses its signals after them.
    on_arrival:   kinds of events that are a finding by themselves: judge_event gets them as they arrive.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    device_class: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]
    any_of: ClassVar[tuple[str, ...]] = ()
    wants: ClassVar[tuple[str, ...]] = ()
    cannot_see: ClassVar[str]
    takes_unused_signals: ClassVar[bool] = False
    on_arrival: ClassVar[tuple[str, ...]] = ()

    def choose_signals(
        self, used: Collection[str], available: Collection[str] | None, catalogue: Mapping[str, Signal]
    ) -> list[str]:
        """What it lacks of the input; a detector of the rest takes what is not `used` by the others. None: all.

        What it then judges must not depend on `available` in a way that a running pipeline, which passes None, lacks.
        """
        return [] if available is None else self.missing_inputs(lambda name: name in available)

    def deciding_signals(self) -> tuple[str, ...]:
        """Signals that decide whether it is off."""
        return (*self.needs, *self.any_of)

    def missing_inputs(self, there: Callable[[str], bool]) -> list[str]:
        """For want of what it is off, by what is there: the same question of a recording and of a running pipeline."""
        lacking = [name for name in self.needs if not there(name)]
        return lacking if not self.any_of or any(map(there, self.any_of)) else [*lacking, " or ".join(self.any_of)]

    def input_signals(self) -> tuple[str, ...]:
        """Signals, and `event:KIND`, of which it must have frames."""
        return (*self.needs, *self.any_of, *self.wants)

    @abstractmethod
    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """What is true at this instant; frames by device class, absent where nothing was measured.

        A condition is reported when it begins, when its level rises and while it holds as often as the detector likes,
        always with the onset of its first report. Frames are read-only.
        """

    def judge_event(self, event: Event, topology: Topology) -> Finding | None:
        """The finding that one event of `on_arrival` is by itself, before its frame is closed; None if it is none.

        What it says depends on the event alone, and no state changes. It may be left out for work that was announced,
        or where the condition is reported already. `observe` gets the event with its frame and reports the same
        condition with the same onset; Runner drops what was reported before.
        """
        return None

    def describe(self) -> dict[str, Any]:
        """What it is and how it is set, as plain data."""
        return {
            "name": self.name,
            "family": self.family,
            "class": self.device_class,
            "needs": self.missing_inputs(lambda _: False),
            "wants": list(self.wants),
            "blind": self.cannot_see,
            "settings": {f.name: getattr(self, f.name) for f in fields(self) if f.init},
            "budget": self.budget(),
            "about": inspect.getdoc(self) or "",
        }

    def budget(self) -> list[str]:
        """What its statistical streams cost in false alarms: a line for each metric, from its threshold."""
        count = _PER_NODE.get(self.device_class, 1)
        channels = {name: s.channel for part, piece in _parts(self) for name, s in _streams(part, piece)}
        return [f"{name}: {budget_line(c, count)}" for name, c in channels.items()]

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """A person said that what is found of `entity` is no fault: its streams take it for normal from now on.

        A group (`rack:r1`, `job:7`, `fleet:gpu`, `site:all`) stands for its members. A detector that overrides this
        calls it too, and does the same for the state that it keeps itself or of another class.
        """
        frame = frames.get(self.device_class)
        if frame is None:
            return
        mask = members_mask((entity,), frame)
        for _, piece in _parts(self):
            if mask.any() and isinstance(piece, Streams):
                piece.reset(mask)

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
        Raises ValueError where arrays that belong together differ in length: compiled loops do not look where one ends.
        """
        check_one_length({f.name: state[f.name] for f in _state_fields(self) if f.metadata[_STATE] is not None})
        for f in _state_fields(self):
            value = copy.deepcopy(state[f.name])
            if f.metadata[_STATE] is not None:
                value = _as_cells(value, getattr(self, f.name).dtype, f.metadata[_STATE])
            setattr(self, f.name, value)
        for name, piece in _parts(self):
            piece.restore(copy.deepcopy(state[name]))


def _parts(detector: Detector) -> list[tuple[str, Part]]:
    return [(f.name, getattr(detector, f.name)) for f in fields(detector) if _PART in f.metadata]


def _streams(name: str, piece: object) -> list[tuple[str, Streams]]:
    """Streams by name: a piece that is one, and those that it holds, one by one or by key."""
    if isinstance(piece, Streams):
        return [(name.strip("_"), piece)]
    held = piece if isinstance(piece, dict) else getattr(piece, "__dict__", {})
    return [
        (f"{name.strip('_')}.{key}", streams)
        for inner, value in held.items()
        if isinstance(value, (Streams, dict))
        for key, streams in _streams(str(inner), value)
    ]


def _state_fields(detector: Detector) -> tuple[Field[Any], ...]:
    return _state_fields_of(type(detector))


@cache
def _state_fields_of(kind: type[Detector]) -> tuple[Field[Any], ...]:
    return tuple(f for f in fields(kind) if _STATE in f.metadata)


def _as_cells(saved: Any, dtype: np.dtype[Any], fill: Any) -> Any:
    if saved.dtype == dtype or saved.dtype.names is None or dtype.names is None:
        return saved
    cells = np.full(len(saved), fill, dtype)
    for name in set(dtype.names) & set(saved.dtype.names):
        cells[name] = saved[name]
    return cells
