"""One value per device of a class: heatmaps of the fleet, and the devices that are furthest from their peers.

Current values come from memory (pipeline/store/latest.py), values over a time range from the store: hot rows by device
id, sealed rows or the coarsest rollup that suffices by entity. Both are added up, as each row is in one of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from pipeline.api.history import Peers, Span, choose_step, find_group, find_peer_kind, find_signal, signal_brief
from pipeline.api.result_formats import encode_json
from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND, iso
from pipeline.model.signals import CATALOGUE, Signal
from pipeline.model.topology import Topology
from pipeline.store import history_files, schema
from pipeline.store.devices import Devices
from pipeline.store.latest import CurrentValues

By = Literal["device", "node"]
T = TypeVar("T")
MAX_SIGNALS = 16
"""Signals of one heatmap (chosen: all temperatures and loads of a GPU)."""
MAX_DEVICES = 200
"""Most devices in a comparison (chosen: a page that a person reads)."""
STEPS_IN_RANGE = 60
"""Rows of a rollup that a range must have (chosen: its ends are rounded to a row, which is 2 %)."""
RECENT = 300 * SECOND
"""Range over which the rate of a counter counts as current (us). Chosen: 30 readings of PCIe counters."""
_IQR_OF_SIGMA = 1.349  # quartiles of a normal distribution are so many standard deviations apart
_KNOWN = "isfinite(v)"


@dataclass(frozen=True, slots=True)
class DeviceValues:
    """A signal of each device of its class by slot. known: the device has a value. step: seconds of the rollup read,
    0 for rows, None for current values. Times are UTC us."""

    signal: Signal
    values: NDArray[Any]
    known: NDArray[np.bool_]
    start: int | None = None
    end: int | None = None
    step: int | None = None


def find_signals(names: Sequence[str]) -> list[Signal]:
    """Returns the signals of a heatmap. Raises UsageError unless they are of one class."""
    found = [find_signal(name) for name in dict.fromkeys(names)]
    if not 0 < len(found) <= MAX_SIGNALS:
        raise UsageError(f"signal: found {len(found)}; expected 1 to {MAX_SIGNALS}")
    if len({signal.device_class for signal in found}) > 1:
        raise UsageError(f"signal: {names[0]} and others are of different device classes; expected one class")
    return found


def select_current(found: CurrentValues, devices: Devices, signal: Signal, now: int, max_age: int) -> DeviceValues:
    """Returns the newest values, without those older than `max_age` (us) and three intervals of the signal."""
    age = max(max_age, int(3 * (signal.interval or 0) * SECOND))
    kind = found.values[signal.column].dtype if signal.column in found.values else np.dtype("f4")
    number = len(devices.names(signal.device_class))
    values, known = np.zeros(number, kind), np.zeros(number, bool)
    if signal.column in found.values:
        raw, at = found.values[signal.column], found.slot >= 0
        present = raw != np.iinfo(kind).max if kind.kind == "u" else np.isfinite(raw)
        fresh = at & present & (now - found.times[signal.column] <= age)
        values[found.slot[fresh]], known[found.slot[fresh]] = raw[fresh], True
    return DeviceValues(signal, values, known)


# --- over a time range ------------------------------------------------------------------------------------------------


def read_range(cursor: duckdb.DuckDBPyConnection, devices: Devices, signal: Signal, span: Span) -> DeviceValues:
    """Returns the mean of a gauge, the last value of a state or the rate of a counter over a time range, per device.

    The ends are rounded down to rows of the rollup that is read. A counter that was reset in the range has no value.
    """
    if signal.wraps:
        raise UsageError(f"signal {signal.name!r} wraps; its rate is known between two rows only: GET /api/v1/series")
    step = choose_step(cursor, signal, replace(span, points=STEPS_IN_RANGE))
    unit = max(1, step) * SECOND
    start, end = (span.start // unit * unit, span.end // unit * unit) if step else (span.start, span.end)
    parts = [*_read_hot(cursor, devices, signal, start, end), *_read_sealed(cursor, devices, signal, step, start, end)]
    number = len(devices.names(signal.device_class))
    combine = {"gauge": _combine_means, "state": _combine_last, "counter": _combine_rates}[signal.kind]
    values, known = combine([part for part in parts if len(part[0])], number, unit)
    return DeviceValues(signal, values, known, start, end, step)


_Part = tuple[NDArray[np.intp], Mapping[str, NDArray[Any]], bool]
"""Slots, the aggregates of each, and whether they are of a rollup."""
_OF_ROWS = {
    "gauge": f"sum(v) FILTER ({_KNOWN}) AS total, count(v) FILTER ({_KNOWN}) AS number",
    "state": "arg_max(v, time)::DOUBLE AS last, epoch_us(max(time)) AS at",
    "counter": "min(v) AS low, max(v) AS high, arg_min(v, time) AS first, arg_max(v, time) AS last, "
    "epoch_us(min(time)) AS begun, epoch_us(max(time)) AS at, min(life) AS oldest, max(life) AS life",
}
_OF_ROLLUPS = {
    "gauge": "sum(mean::DOUBLE * number) AS total, sum(number) AS number",
    "state": "arg_max(coalesce(last, high), time)::DOUBLE AS last, epoch_us(max(time)) AS at",
    "counter": "min(low) AS low, max(high) AS high, arg_min(low, time) AS first, "
    "arg_max(coalesce(last, high), time) AS last, epoch_us(min(time)) AS begun, epoch_us(max(time)) AS at, "
    "min(life) AS oldest, max(life) AS life",
}


def _life_of(signal: Signal) -> str:
    """Name of the column with the generation of a counter; "" if it has none."""
    name = f"{signal.device_class}.generation"
    return CATALOGUE[name].column if signal.kind == "counter" and name in CATALOGUE else ""


def _read_hot(cursor: duckdb.DuckDBPyConnection, devices: Devices, signal: Signal, start: int, end: int) -> list[_Part]:
    layout = schema.read_layout(cursor, signal.device_class)
    tables = {table: columns for table, columns in layout.items() if signal.column in columns}
    life, where = _life_of(signal), f"time >= make_timestamptz({start}) AND time < make_timestamptz({end})"
    each = " UNION ALL ".join(
        f'SELECT device, time, "{signal.column}"{"" if signal.kind == "state" else "::DOUBLE"} AS v, '
        f"{f'{chr(34)}{life}{chr(34)}::BIGINT' if life in columns else 'NULL::BIGINT'} AS life "
        f'FROM "{table}" WHERE {where}'
        for table, columns in tables.items()
    )
    query = f"SELECT device, {_OF_ROWS[signal.kind]} FROM ({each}) WHERE v IS NOT NULL GROUP BY device"
    found = cursor.execute(query).fetchnumpy()
    slots = devices.find_slots(signal.device_class, np.asarray(found.pop("device"), np.int32)).astype(np.intp)
    return [_within(slots, found, len(devices.names(signal.device_class)), False)]


def _read_sealed(
    cursor: duckdb.DuckDBPyConnection, devices: Devices, signal: Signal, step: int, start: int, end: int
) -> list[_Part]:
    files = history_files.list_files(cursor, signal.device_class, step, start, end)
    folder = history_files.folder_of(cursor) if files else None
    if folder is None:
        return []
    source = _select_sealed(cursor, signal, step)
    rows = history_files.select_files(folder, files, source.types)
    select = (_OF_ROLLUPS if step else _OF_ROWS)[signal.kind]
    query = (
        f"SELECT entity, {select} FROM (SELECT time, entity, {source.columns} FROM ({rows})) "
        f"WHERE time >= make_timestamptz({start}) AND time < make_timestamptz({end}) AND {source.present} "
        "GROUP BY entity"
    )
    found = cursor.execute(query).fetchnumpy()
    place = {entity: slot for slot, entity in enumerate(list(devices.names(signal.device_class)))}
    slots = np.array([place.get(entity, -1) for entity in found.pop("entity")], np.intp)
    return [_within(slots, found, len(place), step > 0)]


@dataclass(frozen=True, slots=True)
class _Sealed:
    """columns: SQL of the columns under common names. types: of the file. present: condition for a value."""

    columns: str
    types: dict[str, str]
    present: str


def _select_sealed(cursor: duckdb.DuckDBPyConnection, signal: Signal, step: int) -> _Sealed:
    column, life = signal.column, _life_of(signal)
    kinds = schema.class_types(cursor, signal.device_class)
    value = history_files.SIGNED.get(kinds[column], kinds[column])
    types = {"time": "TIMESTAMPTZ", "entity": "VARCHAR"}
    if not step:
        types |= {column: value} | ({life: "BIGINT"} if life else {})
        cast = "" if signal.kind == "state" else "::DOUBLE"
        return _Sealed(f'"{column}"{cast} AS v, {life or "NULL"} AS life', types, "v IS NOT NULL")
    parts = {"min": "low", "max": "high", "mean": "mean", "count": "number"}
    parts |= {} if signal.kind == "gauge" else {"last": "last"}
    sql = {"mean": "DOUBLE", "count": "INTEGER"}
    types |= {f"{column}_{part}": sql.get(part, value) for part in parts} | ({f"{life}_max": "BIGINT"} if life else {})
    named = ", ".join(f'"{column}_{part}" AS {name}' for part, name in parts.items())
    return _Sealed(f"{named}, {f'{life}_max' if life else 'NULL'} AS life", types, "number > 0")


def _within(slots: NDArray[np.intp], found: Mapping[str, Any], number: int, rolled: bool) -> _Part:
    """Leaves out devices that are no longer known."""
    kept = (slots >= 0) & (slots < number)
    return slots[kept], {name: np.ma.filled(values, 0)[kept] for name, values in found.items()}, rolled


def _combine_means(parts: Sequence[_Part], number: int, unit: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    total, count = np.zeros(number), np.zeros(number)
    for slots, found, _ in parts:
        np.add.at(total, slots, found["total"])
        np.add.at(count, slots, found["number"])
    with np.errstate(invalid="ignore"):
        return total / count, count > 0


def _combine_last(parts: Sequence[_Part], number: int, unit: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    values, at = np.zeros(number), np.full(number, -1)
    for slots, found, _ in parts:
        newer = found["at"] > at[slots]
        values[slots[newer]], at[slots[newer]] = found["last"][newer], found["at"][newer]
    return values, at >= 0


def _combine_rates(parts: Sequence[_Part], number: int, unit: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Rates of counters that only grew: their first value is the lowest, their last the highest, of one generation."""
    names = ("low", "first", "begun", "oldest"), ("high", "last", "at", "life")
    low, first, begun, oldest = (np.full(number, np.inf) for _ in names[0])
    high, last, at, life = (np.full(number, -np.inf) for _ in names[1])
    for slots, found, rolled in parts:
        for merged, name in ((low, "low"), (oldest, "oldest")):
            merged[slots] = np.minimum(merged[slots], found[name])
        for merged, name in ((high, "high"), (life, "life")):
            merged[slots] = np.maximum(merged[slots], found[name])
        end = found["at"] + (unit if rolled else 0)
        earlier, later = found["begun"] < begun[slots], end > at[slots]
        first[slots[earlier]], begun[slots[earlier]] = found["first"][earlier], found["begun"][earlier]
        last[slots[later]], at[slots[later]] = found["last"][later], end[later]
    known = (at > begun) & (first == low) & (last == high) & (oldest == life)
    with np.errstate(invalid="ignore"):
        return np.where(known, (last - first) * SECOND / np.where(known, at - begun, 1.0), 0.0), known


# --- the answers ------------------------------------------------------------------------------------------------------


class FleetNames:
    """Names and groups of all devices of a class, kept until there are more devices or the topology changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, str], tuple[Devices, object, int, Any]] = {}

    def nodes(self, devices: Devices, device_class: str) -> tuple[NDArray[np.intp], list[str]]:
        """Returns (node of each device, names of the nodes): `node:NAME` of the agent that sends it."""

        def find() -> tuple[NDArray[np.intp], list[str]]:
            names = [f"node:{node}" for _, node, _ in list(devices.origins(device_class))]
            unique, place = np.unique(np.array(names or [""]), return_inverse=True)
            return place[: len(names)], unique.tolist()

        return self._keep("nodes", devices, device_class, None, find)

    def encoded(self, devices: Devices, device_class: str) -> bytes:
        """Returns the JSON list of all devices by slot."""
        names = devices.names(device_class)
        return self._keep("encoded", devices, device_class, None, lambda: encode_json(list(names)))

    def groups(self, devices: Devices, topology: Topology, device_class: str, peers: Peers) -> NDArray[np.intp]:
        """Returns the group of peers of each device by slot, -1 without one."""

        def find() -> NDArray[np.intp]:
            numbers: dict[str, int] = {"": 0}  # the whole class
            found = []
            for entity in list(devices.names(device_class)):
                kind = find_peer_kind(entity, peers)
                group = "" if kind == "class" else find_group(topology, entity, kind)
                group = "" if group is None and peers == "auto" else group
                found.append(-1 if group is None else numbers.setdefault(group, len(numbers)))
            return np.array(found, np.intp)

        return self._keep(f"groups {peers}", devices, device_class, topology.parents, find)

    def _keep(self, what: str, devices: Devices, device_class: str, topology: object, find: Callable[[], T]) -> T:
        """Returns what `find` returned for the same devices and, if it matters, topology."""
        number = len(devices.names(device_class))
        with self._lock:
            known = self._kept.get((what, device_class))
            if known is None or known[0] is not devices or known[1] is not topology or known[2] != number:
                known = self._kept[what, device_class] = devices, topology, number, find()
            found: T = known[3]
            return found


def write_heatmap(found: Sequence[DeviceValues], names: FleetNames, devices: Devices, by: By, now: int) -> bytes:
    """Returns the JSON answer of GET /api/v1/heatmap: lists in the order of `entities`, null without a value."""
    first = found[0]
    device_class = first.signal.device_class
    head = {"as_of": iso(now), "from": _time(first.start), "to": _time(first.end), "step": first.step, "by": by}
    if by == "device":
        entities = names.encoded(devices, device_class)
        number = len(devices.names(device_class))
        columns = [{"values": _numbers(_padded(f.values, number), _padded(f.known, number))} for f in found]
    else:
        place, nodes = names.nodes(devices, device_class)
        entities = encode_json(nodes if len(place) else [])
        columns = [_by_node(f, place, len(nodes) if len(place) else 0) for f in found]
    parts = [encode_json(head)[:-1], b',"entities":', entities, b',"signals":[']
    for i, (f, lists) in enumerate(zip(found, columns, strict=True)):
        about = {"signal": signal_brief(f.signal), "missing": int(np.count_nonzero(~f.known))}
        parts += [b"," if i else b"", encode_json(about)[:-1]]
        for name in ("values", "low", "high"):
            parts += [f',"{name}":'.encode(), lists.get(name, b"null")]
        parts.append(b"}")
    return b"".join([*parts, b"]}"])


def _time(moment: int | None) -> str | None:
    return None if moment is None else iso(moment)


def _padded(values: NDArray[Any], number: int) -> NDArray[Any]:
    """Values for `number` devices: some may have come since the values were read."""
    return np.concatenate([values, np.zeros(number - len(values), values.dtype)]) if number > len(values) else values


def _by_node(found: DeviceValues, place: NDArray[np.intp], number: int) -> dict[str, bytes]:
    """Returns mean, minimum and maximum of the devices of each node."""
    at, values = place[: len(found.known)][found.known], found.values[found.known].astype(np.float64)
    count = np.bincount(at, minlength=number)
    total, low, high = np.zeros(number), np.full(number, np.inf), np.full(number, -np.inf)
    np.add.at(total, at, values)
    np.minimum.at(low, at, values)
    np.maximum.at(high, at, values)
    with np.errstate(invalid="ignore"):
        mean = total / count
    return {name: _numbers(v, count > 0) for name, v in (("values", mean), ("low", low), ("high", high))}


def _numbers(values: NDArray[Any], known: NDArray[np.bool_]) -> bytes:
    """Returns a JSON list with null where there is no value; by Arrow, a fifth of the time of `json`."""
    if not len(values):
        return b"[]"
    texts = pa.array(values, mask=~(known & np.isfinite(values))).cast(pa.string()).fill_null("null")
    joined = pa.compute.binary_join(pa.ListArray.from_arrays([0, len(texts)], texts), ",")
    return b"[%b]" % joined[0].as_buffer().to_pybytes()


def find_furthest(
    found: DeviceValues, names: FleetNames, devices: Devices, topology: Topology, peers: Peers, most: int
) -> dict[str, Any]:
    """Returns the devices that are furthest from the median of their peers, in units of the peers' spread.

    The spread is the standard deviation that fits the peers' quartiles, at least that of a typical group. Median and
    band are of the peers without the device.
    """
    if peers == "none":
        raise UsageError("peers = none: expected peers to compare with")
    device_class = found.signal.device_class
    groups = names.groups(devices, topology, device_class, peers)[: len(found.known)]
    known = np.flatnonzero(found.known[: len(groups)] & (groups >= 0))
    order = known[np.lexsort((found.values[known], groups[known]))]
    values, group = found.values[order].astype(np.float64), groups[order]
    starts = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]])) if len(order) else np.zeros(0, np.intp)
    number = np.diff(np.append(starts, len(order)))
    quarter, middle, three = (_quantile(values, starts, number, q) for q in (0.25, 0.5, 0.75))
    spread = (three - quarter) / _IQR_OF_SIGMA
    least = float(np.median(spread[spread > 0])) if (spread > 0).any() else 1.0
    of = np.repeat(np.arange(len(starts)), number)
    distance = np.where(number[of] > 1, np.abs(values - middle[of]) / np.maximum(spread[of], least), -1.0)
    candidates = np.argsort(-distance, kind="stable")[: 4 * most + 16]
    candidates = candidates[distance[candidates] >= 0]
    rows = _compare(values, starts[of[candidates]], number[of[candidates]], candidates, least)
    deviation = (values[candidates] - rows["median"]) / rows.pop("spread")
    rows |= {"value": values[candidates], "deviation": deviation, "peers": number[of[candidates]] - 1}
    best = np.argsort(-np.abs(deviation), kind="stable")[:most]
    return {
        "from": _time(found.start),
        "to": _time(found.end),
        "step": found.step,
        "signal": signal_brief(found.signal),
        "peers": peers,
        "compared": int(np.count_nonzero(number[of] > 1)) if len(order) else 0,
        "missing": int(np.count_nonzero(~found.known)),
        "devices": list(_list_devices(devices, device_class, order[candidates[best]], rows, best)),
    }


def _list_devices(
    devices: Devices, device_class: str, slots: NDArray[np.intp], rows: dict[str, NDArray[Any]], best: NDArray[np.intp]
) -> Iterator[dict[str, Any]]:
    """Yields the rows at `best` with the names of their devices."""
    entities, origins = devices.names(device_class), devices.origins(device_class)
    for slot, i in zip(slots.tolist(), best.tolist(), strict=True):
        named = {name: column[i].item() for name, column in rows.items()}
        yield {"entity": entities[slot], "node": origins[slot][1], **named}


def _quantile(values: NDArray[Any], starts: NDArray[np.intp], number: NDArray[np.intp], q: float) -> NDArray[Any]:
    """Quantile of each group of sorted values, interpolated."""
    place = starts + q * (number - 1)
    below = np.floor(place).astype(np.intp)
    above = np.minimum(below + 1, starts + number - 1)
    return np.asarray(values[below] + (place - below) * (values[above] - values[below]))


def _compare(
    values: NDArray[Any], start: NDArray[np.intp], number: NDArray[np.intp], place: NDArray[np.intp], least: float
) -> dict[str, NDArray[Any]]:
    """Returns median, band and spread of the peers of some devices, without themselves.

    values: sorted within each group.  start, number: the group of each device.  place: its position in `values`.
    """

    def quantile(q: float) -> NDArray[Any]:
        at = q * (number - 2)
        below = np.floor(at).astype(np.intp)
        low, high = (start + i for i in (below, np.minimum(below + 1, number - 2)))
        one, two = (values[i + (i >= place)] for i in (low, high))
        return np.asarray(one + (at - below) * (two - one))

    spread = np.maximum((quantile(0.75) - quantile(0.25)) / _IQR_OF_SIGMA, least)
    return {"median": quantile(0.5), "low": quantile(0.1), "high": quantile(0.9), "spread": spread}
