"""The plan of a layout: where each value of a message goes; and samples, which become rows of the store.

Values of one message whose times are within JOIN_NS are one tick: scrapers and SDKs read the clock once per metric.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.foreign import walker
from pipeline.foreign.series import (
    COUNT,
    CUSTOM,
    MATCH,
    MAX,
    MIN,
    SET,
    Series,
    Target,
    describe_series,
    find_node,
    map_custom,
    map_series,
)
from pipeline.model.compiling import compiled
from pipeline.model.errors import WireError
from pipeline.model.signals import CATALOGUE
from pipeline.transport import layouts

JOIN_NS = 100_000_000
"""Chosen: far below the shortest interval of exporters, 1 s; above the time a scrape takes to read the clock again."""
MAX_CELLS = 8_000_000
"""Most cells (rows x signals) of one message, 64 MB. Chosen: 40 times those of 200,000 real points."""
_MISSING, _LATEST = np.uint64(0xFFFFFFFFFFFFFFFF), np.uint64(1 << 63)
_NAN = np.float64(np.nan).view(np.uint64)
_LARGEST = {"u1": (1 << 8) - 2, "u2": (1 << 16) - 2, "u4": (1 << 32) - 2, "u8": (1 << 63) - 1, "f4": -1, "f8": 0}
"""Largest value of each unsigned type (the highest is "missing", counters above 2^63 are broken); markers of floats."""
_FLOAT4_MAX = float(np.finfo(np.float32).max)
MAX_JOINED = 1000
"""Most different times for which those within JOIN_NS are joined. Chosen: ten minutes of a series of 1 Hz are 600."""
_Shared = TypeVar("_Shared")
BlockShape = tuple[str, tuple[tuple[str, str], ...], int]
"""Class, (signal, type) of its columns, and rows of one block."""


@dataclass(frozen=True, eq=False, slots=True)
class RowShape:
    """What equal messages of different nodes have in common. Interned: compared by identity.

    row_tick, row_entity: per block the tick and the entity of each row, in order of time.  rows: of each class.
    """

    blocks: tuple[BlockShape, ...]
    row_tick: tuple[NDArray[np.intp], ...]
    row_entity: tuple[NDArray[np.intp], ...]
    cells: int
    rows: Mapping[str, int]


@dataclass(frozen=True, eq=False, slots=True)
class Pattern:
    """How the times of a message form ticks, and the cell of each value.

    tick: of each value.  first: position of the first value of each tick.  apart: largest distance within a tick (ns).
    """

    tick: NDArray[np.int64]
    first: NDArray[np.int64]
    apart: int
    shape: RowShape
    cell: NDArray[np.int64]
    empty: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class NodeSamples:
    """Samples of one node in one message: times of the ticks (us), and cells in the order of `pattern.shape`."""

    part: PartPlan
    shape: RowShape
    times: NDArray[np.int64]
    cells: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Samples:
    """Values of one resource. faults: reasons of rejections.  dropped: counts of values that are not kept."""

    nodes: tuple[NodeSamples, ...] = ()
    faults: tuple[str, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)


class _Entries(NamedTuple):
    """One entry per (value, signal): position of the value, block, column and entity; then as in Target."""

    value: NDArray[np.int64]
    block: NDArray[np.int64]
    column: NDArray[np.int64]
    entity: NDArray[np.int64]
    merge: NDArray[np.int64]
    scale: NDArray[np.float64]
    offset: NDArray[np.float64]
    blank: NDArray[np.float64]
    largest: NDArray[np.int64]


@dataclass(eq=False, slots=True, weakref_slot=True)
class PartPlan:
    """The plan for the values of one node.

    layout: names, as admission checks them.  inventory: entity -> its reported facts.
    measured: entities that are not custom signals.  counted: the last answer of `count_values`.
    """

    layout: layouts.Layout
    simulated: bool
    entries: _Entries
    inventory: Mapping[str, Mapping[str, object]]
    measured: frozenset[str]
    pattern: Pattern | None = None
    counted: tuple[Collection[str], tuple[int, int, int]] | None = None

    def count_values(self, excluded: Collection[str]) -> tuple[int, int, int]:
        """(values of signals of the catalogue, of custom signals, and of excluded entities) in each message."""
        if self.counted is None or self.counted[0] != excluded:
            e, found = self.entries, [0, 0, 0]
            for b, block in enumerate(self.layout.blocks):
                values = np.bincount(e.entity[e.block == b], minlength=len(block.entities)).tolist()
                for entity, number in zip(block.entities, values, strict=True):
                    found[2 if entity in excluded else block.device_class == CUSTOM] += number
            self.counted = excluded, (found[0], found[1], found[2])
        return self.counted[1]

    def read(self, values: NDArray[np.int64]) -> NodeSamples:
        """The samples of this node among the values of a resource."""
        pattern = self.pattern
        if pattern is None or not _fits(values, pattern.tick, pattern.first, pattern.apart):
            pattern = self.pattern = _build_pattern(values, self)
        cells = pattern.empty.copy()
        e = self.entries
        _scatter(values, e.value, pattern.cell, e.merge, e.scale, e.offset, e.blank, e.largest, cells)
        return NodeSamples(self, pattern.shape, _read_times(values, pattern.first), cells)


@dataclass(slots=True)
class Plan:
    """The plan of one resource. size: its values.  faults: reasons for series that cannot be kept."""

    parts: tuple[PartPlan, ...]
    size: int
    faults: tuple[str, ...] = ()
    skipped: str = ""

    def read(self, values: NDArray[np.int64]) -> Samples:
        """The samples among the values of this resource."""
        if self.skipped:
            return Samples(dropped={self.skipped: len(values)})
        return Samples(tuple(part.read(values) for part in self.parts), self.faults)


# --- building -------------------------------------------------------------------------------------------------------


def build_plan(
    series: Sequence[tuple[Series, str]],
    site: str,
    node_attributes: Sequence[str],
    merge: bool = True,
    node: str = "",
) -> Plan:
    """The plan for a resource with these (series, scope), one per value.

    merge: whether all series are here whose values are merged.  node: of all series; "" if each names its own.
    """
    targets: dict[str, list[tuple[int, Target]]] = {}
    inventory: dict[str, Mapping[str, object]] = {}
    claimed: dict[tuple[str, str], object] = {}
    without = 0
    for i, (one, scope) in enumerate(series):
        owner = node or find_node(one, node_attributes)
        if not owner:
            without += 1
            continue
        identity = (one.name, one.delta, frozenset(one.labels.items()), scope)
        mapped = [t for t in map_series(one, owner) if merge or t.merge in (SET, MATCH)]
        found = [t for t in mapped if _may_claim(claimed, t, identity)]
        if not found:
            target = map_custom(one, owner)
            if not _may_claim(claimed, target, identity):
                target = map_custom(one, owner, scope or "-")
            inventory.setdefault(target.entity, describe_series(one))
            found = [target]
        targets.setdefault(owner, []).extend((i, target) for target in found)
    wanted = ", ".join(node_attributes)
    faults = (f"{without} values without a node: expected one of the resource attributes {wanted}",) if without else ()
    simulated = bool(series) and series[0][0].resource.get("fleetpulse.simulated") == "true"
    parts = tuple(_build_part(site, owner, simulated, found, inventory) for owner, found in targets.items())
    return Plan(parts, max(1, len(series)), faults)


def _may_claim(claimed: dict[tuple[str, str], object], target: Target, identity: object) -> bool:
    """Whether a series may have its cell: several may only if their values are merged."""
    return target.merge not in (SET, MATCH) or _same_metric(claimed, target, identity)


def _same_metric(claimed: dict[tuple[str, str], object], target: Target, identity: object) -> bool:
    key = target.entity, target.signal
    # the states of one device come as one series per state
    mine = identity if target.merge == SET else MATCH
    return claimed.setdefault(key, mine) == mine


def _build_part(
    site: str,
    node: str,
    simulated: bool,
    targets: Sequence[tuple[int, Target]],
    inventory: Mapping[str, Mapping[str, object]],
) -> PartPlan:
    classes: dict[str, tuple[dict[str, int], dict[str, int]]] = {}  # class -> columns and entities, numbered
    places = []
    for _, target in targets:
        columns, entities = classes.setdefault(target.device_class, ({}, {}))
        column = columns.setdefault(target.signal, len(columns))
        entity = entities.setdefault(target.entity, len(entities))
        places.append((list(classes).index(target.device_class), column, entity))
    blocks = tuple(
        layouts.BlockLayout(c, tuple(entities), tuple((name, CATALOGUE[name].type) for name in columns))
        for c, (columns, entities) in classes.items()
    )
    shape = layouts.Shape(
        tuple((b.device_class, len(b.entities), b.signals) for b in blocks), tuple(range(len(blocks)))
    )
    named = {e: {**inventory.get(e, {})} for b in blocks for e in b.entities}
    measured = frozenset(e for b in blocks if b.device_class != CUSTOM for e in b.entities)
    at = np.array(places, np.int64)
    entries = _Entries(
        np.array([i for i, _ in targets], np.int64),
        *(at[:, 0].copy(), at[:, 1].copy(), at[:, 2].copy()),
        np.array([t.merge for _, t in targets], np.int64),
        np.array([t.scale for _, t in targets], np.float64),
        np.array([t.offset for _, t in targets], np.float64),
        np.array([t.blank for _, t in targets], np.float64),
        np.array([_LARGEST[CATALOGUE[t.signal].type] for _, t in targets], np.int64),
    )
    layout = layouts.Layout(site, node, blocks, shape)
    return PartPlan(layout, simulated, _intern(entries, *(field.tobytes() for field in entries)), named, measured)


def _build_pattern(values: NDArray[np.int64], part: PartPlan) -> Pattern:
    """Groups the times into ticks; a series with two values within JOIN_NS needs exact times."""
    for apart in (JOIN_NS, 0):
        tick, first = _group_times(values, part.entries.value, apart)
        pattern, repeated = _place_cells(tick, first, apart, part)
        if not repeated:
            break
    return pattern


def _group_times(
    values: NDArray[np.int64], used: NDArray[np.int64], apart: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(tick of each value, -1 if the part does not use it; first value of each tick). Ticks are in order of time."""
    mine = np.unique(used)
    times = np.minimum(values[mine, walker.TIME].view(np.uint64), _LATEST)  # later ones would wrap around
    order = np.argsort(times, kind="stable")
    ordered = times[order]
    first = [0]
    if apart and len(np.unique(ordered)) <= MAX_JOINED:
        while True:  # one step per tick
            after = int(np.searchsorted(ordered, ordered[first[-1]] + np.uint64(apart), "right"))
            if after >= len(ordered):
                break
            first.append(after)
    else:
        first = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist()]
    number = np.zeros(len(mine), np.int64)
    number[first[1:]] = 1
    tick = np.full(len(values), -1, np.int64)
    tick[mine[order]] = np.cumsum(number)
    return tick, mine[order[first]]


def _place_cells(tick: NDArray[np.int64], first: NDArray[np.int64], apart: int, part: PartPlan) -> tuple[Pattern, bool]:
    """(the pattern, whether two values of one series are in one cell)."""
    e, blocks = part.entries, part.layout.blocks
    cell = np.zeros(len(e.value), np.int64)
    shapes, ticks, entities, empty, size = [], [], [], [], 0
    for b, block in enumerate(blocks):
        mine = np.flatnonzero(e.block == b)
        width = len(block.entities)
        rows, row = np.unique(tick[e.value[mine]] * width + e.entity[mine], return_inverse=True)
        if size + len(rows) * len(block.signals) > MAX_CELLS:
            raise WireError(f"more than {MAX_CELLS} cells: too many different times in one message")
        cell[mine] = size + e.column[mine] * len(rows) + row
        size += len(rows) * len(block.signals)
        shapes.append((block.device_class, block.signals, len(rows)))
        ticks.append(rows // width)
        entities.append(rows % width)
        for _, code in block.signals:
            empty.append(np.full(len(rows), _MISSING if code[0] == "u" else _NAN))
    single = cell[e.merge == SET]
    repeated = len(np.unique(single)) < len(single)
    rows = (*(t.tobytes() for t in ticks), *(e.tobytes() for e in entities))
    numbers = {device_class: number for device_class, _, number in shapes}
    shape = _intern(RowShape(tuple(shapes), tuple(ticks), tuple(entities), size, numbers), tuple(shapes), *rows)
    pattern = Pattern(tick, first, apart, shape, cell, np.concatenate(empty))
    return _intern(pattern, id(shape), apart, tick.tobytes(), first.tobytes(), cell.tobytes()), repeated


_interned: dict[tuple[Any, ...], Any] = {}
_MOST = 8192
"""Interned shapes, patterns and entries. Chosen: three for each of 2,700 kinds of node."""


def _intern(made: _Shared, *key: object) -> _Shared:
    """The first one made with this key. Nodes with equal hardware and exporters share it, and the processor's cache."""
    if len(_interned) >= _MOST:
        _interned.clear()
    found: _Shared = _interned.setdefault((type(made), *key), made)
    return found


# --- reading --------------------------------------------------------------------------------------------------------


@compiled
def _fits(values: NDArray[np.int64], tick: NDArray[np.int64], first: NDArray[np.int64], apart: int) -> bool:
    """Whether times form these ticks: each value near the first one of its tick, and the ticks apart and in order."""
    for i in range(len(tick)):
        if tick[i] >= 0:
            distance = values[i, walker.TIME] - values[first[tick[i]], walker.TIME]
            if distance < -apart or distance > apart:
                return False
    for t in range(1, len(first)):
        if values[first[t], walker.TIME] - values[first[t - 1], walker.TIME] <= 2 * apart:
            return False
    return True


@compiled
def _read_times(values: NDArray[np.int64], first: NDArray[np.int64]) -> NDArray[np.int64]:
    """The times of the ticks (us). Those above 2^63 ns, negative as int64, are read as unsigned."""
    times = np.empty(len(first), np.int64)
    for t in range(len(first)):
        times[t] = np.int64(np.uint64(values[first[t], walker.TIME]) // np.uint64(1000))
    return times


@compiled
def _merge(x: Any, before: Any, merge: int) -> Any:
    """The value of a cell that several series share; before: NaN if it has none yet."""
    if np.isnan(before):
        return x
    return min(x, before) if merge == MIN else max(x, before) if merge == MAX else x + before


@compiled
def _put(doubles: NDArray[np.float64], cells: NDArray[np.uint64], c: int, x: float, top: int) -> None:
    """Writes a value that its type can hold."""
    if top <= 0:
        doubles[c] = x if top == 0 or abs(x) <= _FLOAT4_MAX else np.nan
    elif 0.0 <= x <= np.float64(top):
        cells[c] = np.uint64(np.rint(x))


@compiled
def _scatter(
    values: NDArray[np.int64],
    value: NDArray[np.int64],
    cell: NDArray[np.int64],
    merge: NDArray[np.int64],
    scale: NDArray[np.float64],
    offset: NDArray[np.float64],
    blank: NDArray[np.float64],
    largest: NDArray[np.int64],
    cells: NDArray[np.uint64],
) -> None:
    """Writes values into their cells: doubles as their bits, unsigned types as numbers."""
    doubles, bits = cells.view(np.float64), values.view(np.float64)
    for k in range(len(value)):
        i, c = value[k], cell[k]
        form, top = values[i, walker.FORM], largest[k]
        if form == walker.INTEGER:
            whole = values[i, walker.BITS]
            if top > 0 and merge[k] == SET and scale[k] == 1.0 and offset[k] == 0.0:
                if 0 <= whole <= top and whole < blank[k]:
                    cells[c] = np.uint64(whole)
                continue
            x: Any = np.float64(whole)
        else:
            x = bits[i, walker.BITS]
        if form == walker.NO_VALUE or not np.isfinite(x) or x >= blank[k]:
            continue
        if merge[k] == MATCH:
            if x != scale[k]:
                continue
            x = offset[k]
        elif merge[k] == COUNT:
            x = 1.0
        else:
            x = x * scale[k] + offset[k]
        if merge[k] != SET and merge[k] != MATCH:
            before = doubles[c] if top <= 0 else np.float64(cells[c]) if cells[c] != _MISSING else np.nan
            x = _merge(x, before, merge[k])
        _put(doubles, cells, c, x, top)
