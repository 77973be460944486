"""State of detectors and their parts: growth, snapshot, restore and reset come with the base class `State`.

How to write a piece with state, in four steps:

1. Make it a dataclass that inherits from `State` and declare every attribute as a field:

       @dataclass
       class DewPoint(State):
           margin: float                                              # configuration: not in a snapshot
           usual: Floats = memory(np.nan)                             # (N,): a cell per entity
           hours: Floats = memory(np.nan, np.float32, shape=(N, 24))  # (N, 24); also (6, N)
           last: int = notes(int)                                     # plain data: numbers, texts, lists, dicts, arrays
           shift: Streams = part(lambda: Streams(CHANNEL))            # a piece, or a dict, list or tuple of pieces
           polls: dict[str, Poll] = parts(Poll)                       # pieces made on demand, by key

2. Call `self.grow(len(values))` before the cells are used, and work on `self.usual[: len(values)]`.
3. Write no `snapshot`, `restore`, `reset`, `_grow`. State derived from other state is a property or ordinary field;
   state derived from the topology is a method with `@per_topology` (detectors/base/topology_index.py).
4. Say what a reset leaves alone. `reset(mask)` refills the cells of the entities in `mask`, in this piece and in its
   parts. `kept=True` excludes a field. `part(..., of="nic")` is a part whose cells are NICs while the owner's are not:
   a reset by the owner's mask skips it, and `Detector.accept_as_normal` resets it by the mask of that class. What is
   keyed by entity in `notes()` is removed in an override of `accept_as_normal`.

A snapshot is plain data by field name (without a leading underscore). `restore` raises ValueError or KeyError where
names, dtypes, axes or lengths differ; the Runner then starts that detector with empty state and logs it. After you
rename or add a state field, increase `FORMAT`: snapshots of another format are not read; learning restarts once.
A new detector does not need that: it starts without a snapshot.
"""

from __future__ import annotations

import copy
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

FORMAT = 3
"""Number of the layout of detector state. 3: families rewritten for unseen sites; 2: all pieces declare fields."""
N = -1
"""In the shape of a memory(): the axis with one cell per entity."""
_STATE = "fleetpulse.state"
Buffer = bytes | memoryview


class Part(Protocol):
    """What a detector needs of a piece with state; pieces inherit it from `State`."""

    def snapshot(self) -> Any:
        """Returns all state as plain data: numbers, texts, arrays, and lists and dicts of those with texts as keys."""

    def restore(self, state: Any) -> None:
        """Continues from a snapshot."""


@dataclass(frozen=True, slots=True)
class _Cells:
    """Layout of a memory() field: fill of new cells, dtype, shape with N, the axis of N."""

    fill: Any
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    axis: int
    kept: bool

    def filled(self, size: int) -> NDArray[Any]:
        return np.full([size if n == N else n for n in self.shape], self.fill, self.dtype)

    def at(self, mask: Any) -> tuple[Any, ...]:
        """Index of cells of the entities in `mask`, or of a slice of entities."""
        return (*(slice(None),) * self.axis, mask)


@dataclass(frozen=True, slots=True)
class _Notes:
    """A notes() field."""


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A part() or parts() field. make: of a parts() field, makes the piece of a key."""

    of: str = ""
    kept: bool = False
    make: Callable[[], State] | None = None


def memory(
    fill: float | int | bool, dtype: DTypeLike = np.float64, *, shape: tuple[int, ...] = (N,), kept: bool = False
) -> Any:
    """Declares an array with a cell per entity that holds `fill` at first; it grows with the fleet.

    shape: N is the axis of the entities, other numbers are axes of fixed length.   kept: a reset does not change it.
    """
    cells = _Cells(fill, np.dtype(dtype), shape, shape.index(N), kept)
    return field(default_factory=lambda: cells.filled(0), init=False, repr=False, metadata={_STATE: cells})


def notes(factory: Callable[[], Any] = dict) -> Any:
    """Declares plain picklable data that is not one cell per entity; `factory` makes the first value."""
    return field(default_factory=factory, init=False, repr=False, metadata={_STATE: _Notes()})


def part(factory: Callable[[], Any], *, of: str = "", kept: bool = False) -> Any:
    """Declares a piece with its own state, or a dict, list or tuple of such pieces, made by `factory`.

    of: device class of its cells, if it is not the owner's.   kept: a reset does not change it.
    """
    return field(default_factory=factory, init=False, repr=False, metadata={_STATE: _Pieces(of, kept)})


def parts(make: Callable[[], State], *, of: str = "", kept: bool = False) -> Any:
    """Declares a dict of pieces that are made on demand by key; `restore` makes those of the snapshot with `make`."""
    return field(default_factory=dict, init=False, repr=False, metadata={_STATE: _Pieces(of, kept, make)})


_Piece = TypeVar("_Piece")


def piece_of(pieces: dict[str, _Piece], key: str, make: Callable[[], _Piece]) -> _Piece:
    """Returns the piece of a key, made at its first use only: a piece has many arrays, and is asked for each tick."""
    found = pieces.get(key)
    if found is None:
        found = pieces[key] = make()
    return found


class State:
    """A detector or a piece of one, with everything that a snapshot holds declared as fields (see above)."""

    def grow(self, size: int) -> None:
        """Lengthens every memory() array of this piece to at least `size` cells; parts grow when they are used."""
        layout = _layout(type(self)).cells
        if not layout or getattr(self, layout[0][0]).shape[layout[0][2].axis] >= size:  # all have one length
            return
        for name, _, cells in layout:
            array = getattr(self, name)
            have = array.shape[cells.axis]
            if have < size:
                wider = cells.filled(size)
                wider[cells.at(slice(have))] = array
                setattr(self, name, wider)

    def reset(self, mask: NDArray[np.bool_]) -> None:
        """Refills the cells of the entities in `mask`, here and in parts about the same entities."""
        self.grow(len(mask))
        for name, _, cells in _layout(type(self)).cells:
            if not cells.kept:
                getattr(self, name)[cells.at(slice(len(mask)))][cells.at(mask)] = cells.fill
        for of, piece in self.resettable_parts():
            if not of:
                piece.reset(mask)

    def keep_cells(self, kept: NDArray[np.bool_]) -> None:
        """Drops the cells of entities that have no column any more, in this piece and not in its parts.

        kept: (N,) whether the entity of each former column still has one; later columns keep theirs.
        """
        for name, _, cells in _layout(type(self)).cells:
            array = getattr(self, name)
            size = array.shape[cells.axis]
            here = np.append(kept[:size], np.ones(max(0, size - len(kept)), bool))
            setattr(self, name, np.ascontiguousarray(np.compress(here, array, cells.axis)))

    def resettable_parts(self) -> Iterator[tuple[str, State]]:
        """Yields (device class, part) of the parts that a reset changes; "" means the owner's device class."""
        for name, _, pieces in _layout(type(self)).pieces:
            if not pieces.kept:
                yield from ((pieces.of, piece) for _, piece in _walk(getattr(self, name)) if isinstance(piece, State))

    def parts_by_class(self, device_class: str) -> Iterator[tuple[str, State]]:
        """Yields (device class, part) for every part that a reset by a mask of that class must be called on.

        device_class: class of this piece. A part's own reset reaches the parts of its class below it.
        """
        for of, piece in self.resettable_parts():
            yield of or device_class, piece
            below = of or device_class
            yield from ((c, inner) for c, inner in piece.parts_by_class(below) if c != below)

    def declared_parts(self) -> list[tuple[str, Any]]:
        """Returns (field name, value) of the part() and parts() fields."""
        return [(name, getattr(self, name)) for name, *_ in _layout(type(self)).pieces]

    def pieces(self, path: str = "") -> Iterator[tuple[str, State]]:
        """Yields (path, piece) of every part below it that is a State; a path as `shared.flow`."""
        for name, value in self.declared_parts():
            for key, piece in _walk(value):
                if isinstance(piece, State):
                    below = ".".join(filter(None, (path, name.strip("_"), key)))
                    yield below, piece
                    yield from piece.pieces(below)

    def snapshot(self, copied: bool = True) -> dict[str, Any]:
        """Returns all state as plain data by field name.

        copied: later changes do not show in it; without, it is only for a reader that is done before the next change.
        """
        layout, keep = _layout(type(self)), copy.deepcopy if copied else _unchanged
        state = {key: keep(getattr(self, name)) for name, key, _ in layout.cells}
        state |= {key: keep(getattr(self, name)) for name, key in layout.notes}
        for name, key, _ in layout.pieces:
            value = getattr(self, name)
            if isinstance(value, (dict, list, tuple)):
                state[key] = {k: _snapshot(piece, copied) for k, piece in _walk(value)}
            else:
                state[key] = _snapshot(value, copied)
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a snapshot. Raises ValueError or KeyError if its fields, axes or lengths are not those of
        this class.

        Fields of a structured cell that the snapshot lacks begin as in a new cell. Arrays of a piece must have one
        length: compiled loops do not check where an array ends.
        """
        layout, kind = _layout(type(self)), type(self).__name__
        if layout.keys != set(state):
            raise ValueError(f"{kind}: state {sorted(layout.keys)} expected, found {sorted(state)}")
        arrays = {name: _restored(state[key], cells, f"{kind}.{name}") for name, key, cells in layout.cells}
        lengths = {name: arrays[name].shape[cells.axis] for name, _, cells in layout.cells}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{kind}: arrays of one length expected, found {lengths}")
        for name, array in arrays.items():
            setattr(self, name, array)
        for name, key in layout.notes:
            setattr(self, name, copy.deepcopy(state[key]))
        for name, key, pieces in layout.pieces:
            _restore_pieces(getattr(self, name), state[key], pieces, f"{kind}.{name}")


@dataclass(frozen=True, slots=True)
class _Layout:
    """State fields of a class: (attribute, key in a snapshot, declaration) of each kind."""

    cells: tuple[tuple[str, str, _Cells], ...]
    notes: tuple[tuple[str, str], ...]
    pieces: tuple[tuple[str, str, _Pieces], ...]
    keys: frozenset[str]


def _layout(kind: type[Any]) -> _Layout:
    known = _LAYOUTS.get(kind)
    if known is None:
        known = _LAYOUTS[kind] = _read_layout(kind)
    return known


_LAYOUTS: dict[type[Any], _Layout] = {}


def _read_layout(kind: type[Any]) -> _Layout:
    declared = [(f.name, f.name.lstrip("_"), f.metadata[_STATE]) for f in fields(kind) if _STATE in f.metadata]
    return _Layout(
        tuple((name, key, what) for name, key, what in declared if isinstance(what, _Cells)),
        tuple((name, key) for name, key, what in declared if isinstance(what, _Notes)),
        tuple((name, key, what) for name, key, what in declared if isinstance(what, _Pieces)),
        frozenset(key for _, key, _ in declared),
    )


def _walk(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields (key, piece) of a part: a piece by itself, or those of a dict, list or tuple."""
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from ((str(i), piece) for i, piece in enumerate(value))
    else:
        yield "", value


def _snapshot(piece: Part, copied: bool) -> Any:
    return piece.snapshot(copied) if isinstance(piece, State) else copy.deepcopy(piece.snapshot())


def _unchanged(value: Any) -> Any:
    return value


def _restore_pieces(value: Any, state: Any, pieces: _Pieces, name: str) -> None:
    if not isinstance(value, (dict, list, tuple)):
        value.restore(state if isinstance(value, State) else copy.deepcopy(state))
        return
    if pieces.make is not None and isinstance(value, dict):
        value.clear()
        value.update({key: pieces.make() for key in state})
    held = dict(_walk(value))
    if held.keys() != set(state):
        raise ValueError(f"{name}: parts {sorted(held)} expected, found {sorted(state)}")
    for key, piece in held.items():
        piece.restore(state[key])


def _restored(saved: Any, cells: _Cells, name: str) -> NDArray[Any]:
    """Returns a copy of a saved array; raises ValueError if its axes or dtype are others."""
    shape = np.shape(saved)
    if len(shape) != len(cells.shape) or any(n not in (N, have) for n, have in zip(cells.shape, shape, strict=True)):
        raise ValueError(f"{name}: shape {cells.shape} expected with any length for {N}, found {shape}")
    if saved.dtype == cells.dtype:
        return np.array(saved)
    if saved.dtype.names is None or cells.dtype.names is None:
        raise ValueError(f"{name}: {cells.dtype} expected, found {saved.dtype}")
    array = cells.filled(shape[cells.axis])
    for part_name in set(cells.dtype.names) & set(saved.dtype.names):
        array[part_name] = saved[part_name]
    return array


def check_axes(state: Any, fresh: Any, name: str) -> None:
    """Raises ValueError where an array has other axes than in the snapshot of a fresh piece; an axis of 0 may grow."""
    if isinstance(fresh, np.ndarray):
        axes, expected = np.shape(state), fresh.shape
        if len(axes) != len(expected) or any(n not in (0, have) for n, have in zip(expected, axes, strict=True)):
            raise ValueError(f"{name}: shape {expected} expected with any length for 0, found {axes}")
    elif isinstance(fresh, dict) and isinstance(state, Mapping):
        for key in fresh.keys() & state.keys():
            check_axes(state[key], fresh[key], f"{name}.{key}")


def grown(array: NDArray[Any], size: int, fill: float) -> NDArray[Any]:
    """Returns the array, lengthened to at least `size`."""
    if len(array) >= size:
        return array
    new = np.full(size, fill, array.dtype)
    new[: len(array)] = array
    return new


def pack_state(state: Any) -> list[Buffer]:
    """Returns state as buffers: the length of a text, the text (JSON; an array as dtype, shape, place), the arrays.

    They are views of the arrays, so only for a reader that is done before the next change.
    """
    arrays: list[NDArray[Any]] = []
    text = json.dumps(state, default=partial(_describe, arrays), separators=(",", ":")).encode()
    views = (np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays if array.nbytes)
    return [_LENGTH.pack(len(text)), text, *views]


def unpack_state(packed: bytes) -> Any:
    """Returns state from the bytes of `pack_state`; arrays are views of them. Raises ValueError if they are cut."""
    if len(packed) < _LENGTH.size:
        raise ValueError(f"{len(packed)} bytes of state, at least {_LENGTH.size} expected")
    (size,) = _LENGTH.unpack_from(packed)
    arrays = memoryview(packed)[_LENGTH.size + size :]
    return _read_described(json.loads(packed[_LENGTH.size : _LENGTH.size + size]), arrays)


_LENGTH = struct.Struct("<Q")
_ARRAY = frozenset({"dtype", "shape", "at"})


def _describe(arrays: list[NDArray[Any]], value: Any) -> Any:
    """Returns what JSON has no form for as JSON data; adds an array to `arrays`."""
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"state holds a {type(value).__name__}: {value!r}; only plain data and arrays can be kept")
    described = value.dtype.str if value.dtype.names is None else [list(line) for line in value.dtype.descr]
    arrays.append(value)
    return {"dtype": described, "shape": list(value.shape), "at": sum(array.nbytes for array in arrays[:-1])}


def _read_described(value: Any, arrays: memoryview) -> Any:
    if isinstance(value, dict):
        if set(value) != _ARRAY:
            return {k: _read_described(v, arrays) for k, v in value.items()}
        described, shape, at = value["dtype"], value["shape"], value["at"]
        lines = described if isinstance(described, str) else [(n, t, *map(tuple, size)) for n, t, *size in described]
        return np.frombuffer(arrays, np.dtype(lines), math.prod(shape), at).reshape(shape)
    return [_read_described(v, arrays) for v in value] if isinstance(value, list) else value
