"""The layout of an OTLP request: which metrics and points a set of columns becomes, and how values are converted.

A layout holds as long as the same signals of the same entities come. The request is serialised once; afterwards only
times, values and flags are overwritten, with a few NumPy operations over all points. Each point begins with the four
fields that change, at fixed sizes, so that their offsets never change. A missing value keeps its point, with the data
model's flag "no recorded value".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.otlp import messages
from pipeline.model.signals import CATALOGUE, otel
from pipeline.model.signals.otel import SCHEMA, Instrument, Metric

_HEAD = np.dtype(
    # NumberDataPoint: start_time_unix_nano = 2, time_unix_nano = 3, as_double = 4 or as_int = 6, flags = 8
    [
        *(("t2", "u1"), ("start", "<u8"), ("t3", "u1"), ("time", "<u8")),
        *(("tv", "u1"), ("value", "<u8"), ("t8", "u1"), ("flags", "u1")),
    ]
)
_START, _TIME, _DOUBLE, _INT, _FLAGS = 0x11, 0x19, 0x21, 0x31, 0x40


@dataclass(frozen=True, slots=True)
class MetricPoints:
    """One metric and its points: the encoded attributes of each, in the order of the values."""

    name: str
    help: str
    unit: str
    instrument: Instrument
    whole: bool
    points: Sequence[bytes]


class RequestTemplate:
    """A serialised request. `about`: the resource's attributes."""

    def __init__(
        self, about: Mapping[str, str | bool], version: str, schema: str, series: Sequence[MetricPoints]
    ) -> None:
        metrics, places, end = [], [], 0
        for one in series:
            body, inside = _encode_metric(one)
            end += len(body) + len(messages.encode_tag(2, messages.LENGTH)) + len(messages.encode_varint(len(body)))
            places += [end - len(body) + place for place in inside]
            metrics.append(body)
        whole = messages.encode_request(messages.encode_attributes(1, about), "fleetpulse", version, schema, metrics)
        # the metrics are followed by the schema's field alone
        start = len(whole) - len(messages.encode_text(3, schema)) - end
        self._bytes = np.frombuffer(bytearray(whole), np.uint8)
        self._places = np.array(places, np.int32) + np.int32(start)
        self._heads = np.zeros(len(places), _HEAD)
        self._heads["t2"], self._heads["t3"], self._heads["t8"] = _START, _TIME, _FLAGS
        self._heads["tv"] = np.repeat([_INT if s.whole else _DOUBLE for s in series], [len(s.points) for s in series])
        self._offsets = np.arange(_HEAD.itemsize, dtype=np.int32)

    @property
    def size(self) -> int:
        """Bytes of the request."""
        return len(self._bytes)

    def fill(
        self,
        times: NDArray[np.uint64],
        starts: NDArray[np.uint64],
        bits: NDArray[np.uint64],
        missing: NDArray[np.bool_],
    ) -> bytes:
        """Returns the request with these points: times in ns, values as the 64 bits of a double or integer."""
        heads = self._heads
        heads["time"], heads["start"] = times, starts
        heads["value"] = np.where(missing, np.uint64(0), bits)
        heads["flags"] = missing
        self._bytes[self._places[:, None] + self._offsets] = heads.view(np.uint8).reshape(len(heads), _HEAD.itemsize)
        return self._bytes.tobytes()


def _encode_metric(series: MetricPoints) -> tuple[bytes, list[int]]:
    """Returns the Metric message, and the offset of each point's changing fields."""
    points, places, end = [], [], 0
    for attributes in series.points:
        body = bytes(_HEAD.itemsize) + attributes
        prefix = messages.encode_tag(1, messages.LENGTH) + messages.encode_varint(len(body))
        places.append(end + len(prefix))
        points += [prefix, body]
        end += len(prefix) + len(body)
    joined = b"".join(points)
    if series.instrument == "gauge":
        data, tail = messages.encode_gauge(joined), 0
    else:
        data = messages.encode_sum(joined, series.instrument == "counter")
        tail = len(messages.encode_sum_tail(series.instrument == "counter"))
    message = messages.encode_metric(series.name, series.help, series.unit, data)
    start = len(message) - tail - len(joined)
    return message, [start + place for place in places]


MICROSECOND, SECOND = 1_000, 1_000_000_000
"""In ns, OTLP's unit of time."""
MAX_INT64 = np.uint64(2**63 - 1)
"""OTLP's integers are signed: larger values are missing."""

Group = tuple[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class SignalColumn:
    """The newest values of one signal: when they were read (us), and one per entity, in wire type."""

    time: int
    values: NDArray[Any]


Columns = Mapping[Group, Mapping[str, SignalColumn]]
"""By device class and entities, then by signal."""


@dataclass(frozen=True, slots=True)
class _MetricColumn:
    """One metric of one column."""

    group: Group
    metric: Metric

    @property
    def is_integer(self) -> bool:
        """Whether values are sent as integers: counters in the convention's own unit."""
        unsigned = CATALOGUE[self.metric.signal].type[0] == "u"
        return unsigned and self.metric.instrument == "counter" and (self.metric.factor, self.metric.offset) == (1, 0)


class RequestLayout:
    """The request for one set of columns. `parents`: entity -> its nearest parent, if known."""

    def __init__(
        self, about: Mapping[str, str | bool], version: str, columns: Columns, parents: Mapping[str, str]
    ) -> None:
        node = str(about.get("host.name", ""))
        parts = [
            _MetricColumn(g, m)
            for g, signals in columns.items()
            for name in signals
            for m in otel.metrics_of_signal(CATALOGUE[name])
        ]
        series: dict[tuple[str, str, str], list[_MetricColumn]] = {}
        for part in parts:
            series.setdefault((part.metric.name, part.metric.unit, part.metric.instrument), []).append(part)
        whole = [all(part.is_integer for part in found) for found in series.values()]
        ordered = [found for w, found in zip(whole, series.values(), strict=True) if not w]
        self._doubles = [part for found in ordered for part in found]
        fractions = len(ordered)
        ordered += [found for w, found in zip(whole, series.values(), strict=True) if w]
        self._wholes = [part for found in ordered[fractions:] for part in found]
        self._template = RequestTemplate(
            about,
            version,
            SCHEMA,
            [_build_points(found, i >= fractions, node, parents) for i, found in enumerate(ordered)],
        )
        counts = [len(part.group[1]) for part in self._doubles]
        self._factor = np.repeat([part.metric.factor for part in self._doubles], counts)
        self._offset = np.repeat([part.metric.offset for part in self._doubles], counts)
        self._counts = np.array([len(part.group[1]) for part in self._parts], np.intp)
        self._state_tables = {
            part: _state_table(part.metric) for part in self._doubles if part.metric.states is not None
        }

    @property
    def _parts(self) -> list[_MetricColumn]:
        return [*self._doubles, *self._wholes]

    @property
    def size(self) -> int:
        """Bytes of the request."""
        return self._template.size

    def fill(self, columns: Columns, begun: Mapping[Group, NDArray[np.uint64]]) -> bytes:
        """Returns the request for these columns. begun: UTC seconds at which each entity's counters began, if known."""
        doubles = self._double_values(columns)
        wholes, unknown = self._whole_values(columns)
        bits = np.concatenate((doubles.view(np.uint64), wholes))
        missing = np.concatenate((np.isnan(doubles), unknown))
        times = [columns[part.group][part.metric.signal].time for part in self._parts]
        return self._template.fill(
            np.repeat(np.array(times, np.uint64) * np.uint64(MICROSECOND), self._counts),
            self._starts(begun),
            bits,
            missing,
        )

    def _double_values(self, columns: Columns) -> NDArray[np.float64]:
        if not self._doubles:
            return np.empty(0)
        found = []
        for part in self._doubles:
            raw = columns[part.group][part.metric.signal].values
            found.append(
                _apply_state_table(self._state_tables[part], raw) if part in self._state_tables else to_doubles(raw)
            )
        values: NDArray[np.float64] = np.concatenate(found) * self._factor + self._offset
        np.maximum(values, 0.0, out=values, where=self._factor < 0)  # the rest of a share that may exceed 1
        return values

    def _whole_values(self, columns: Columns) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        if not self._wholes:
            return np.empty(0, np.uint64), np.empty(0, bool)
        columns_of = [columns[part.group][part.metric.signal].values for part in self._wholes]
        values = np.concatenate([values.astype(np.uint64) for values in columns_of])
        highest = np.repeat(
            np.array([np.iinfo(values.dtype).max for values in columns_of], np.uint64), [len(v) for v in columns_of]
        )
        return values, (values == highest) | (values > MAX_INT64)

    def _starts(self, begun: Mapping[Group, NDArray[np.uint64]]) -> NDArray[np.uint64]:
        """Returns when each counter began, in ns; 0, unknown, for everything else."""
        found = []
        for part in self._parts:
            known = begun.get(part.group) if part.metric.instrument == "counter" else None
            found.append(np.zeros(len(part.group[1]), np.uint64) if known is None else known * np.uint64(SECOND))
        return np.concatenate(found) if found else np.empty(0, np.uint64)


def to_doubles(values: NDArray[Any]) -> NDArray[np.float64]:
    """Returns wire values as doubles; missing is NaN."""
    found = values.astype(np.float64)
    if values.dtype.kind == "u":
        found[values == np.iinfo(values.dtype).max] = np.nan
    return found


def _state_table(metric: Metric) -> NDArray[np.float64]:
    """Returns a table: state number -> 1 if the metric shows that state, else 0; last, NaN for invalid states."""
    states = len(CATALOGUE[metric.signal].states)
    table = np.zeros(states + 1)
    table[list(metric.states or ())], table[states] = 1.0, np.nan
    return table


def _apply_state_table(table: NDArray[np.float64], values: NDArray[Any]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = table[np.minimum(values, len(table) - 1)]
    return found


def _build_points(parts: Sequence[_MetricColumn], whole: bool, node: str, parents: Mapping[str, str]) -> MetricPoints:
    first = parts[0].metric
    points = [
        _encode_point_attributes(part.metric, entity, node, parents) for part in parts for entity in part.group[1]
    ]
    text = first.help if first.name.startswith(otel.PREFIX) else ""  # the convention has its own text
    return MetricPoints(first.name, text, first.unit, first.instrument, whole, points)


def _encode_point_attributes(metric: Metric, entity: str, node: str, parents: Mapping[str, str]) -> bytes:
    """Returns a point's attributes, as field 7 of NumberDataPoint."""
    facts: dict[str, str | bool] = dict(metric.attributes)
    if metric.is_hardware:
        facts |= {"hw.id": entity, "hw.name": entity.partition(":")[2]}
        if entity in parents:
            facts["hw.parent"] = parents[entity]
    else:
        facts["fleetpulse.entity"] = entity
        kind, _, name = entity.partition(":")
        part = name.removeprefix(f"{node}.")
        if kind == "disk" and not metric.name.startswith(otel.PREFIX):
            facts["system.device"] = part
        elif metric.name.startswith("system.filesystem."):
            facts["system.filesystem.mountpoint"] = part if kind == "filesystem" else "/"
    return messages.encode_attributes(7, facts)
