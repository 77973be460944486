"""An OTLP request that is serialised once; afterwards only times, values and flags are written over, with NumPy.

Each point begins with the four fields that change, at fixed sizes, so that their places never move. A value that is
missing keeps its point and says so (the data model's flag "no recorded value").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.otlp import protobuf
from pipeline.model.signals.otel import Instrument

_HEAD = np.dtype(
    # NumberDataPoint: start_time_unix_nano = 2, time_unix_nano = 3, as_double = 4 or as_int = 6, flags = 8
    [
        *(("t2", "u1"), ("start", "<u8"), ("t3", "u1"), ("time", "<u8")),
        *(("tv", "u1"), ("value", "<u8"), ("t8", "u1"), ("flags", "u1")),
    ]
)
_START, _TIME, _DOUBLE, _INT, _FLAGS = 0x11, 0x19, 0x21, 0x31, 0x40
NO_RECORDED_VALUE = 1


@dataclass(frozen=True, slots=True)
class Series:
    """One metric and its points: the attributes of each, in the order in which values will come."""

    name: str
    help: str
    unit: str
    instrument: Instrument
    whole: bool
    points: Sequence[bytes]


class Template:
    """One layout of a request. `about`: the resource's attributes."""

    def __init__(self, about: Mapping[str, str | bool], version: str, schema: str, series: Sequence[Series]) -> None:
        metrics, places, end = [], [], 0
        for one in series:
            body, inside = _metric(one)
            end += len(body) + len(protobuf.tag(2, protobuf.LENGTH)) + len(protobuf.varint(len(body)))
            places += [end - len(body) + place for place in inside]
            metrics.append(body)
        whole = protobuf.request(protobuf.attributes(1, about), "fleetpulse", version, schema, metrics)
        # the metrics are followed by the schema's field alone
        start = len(whole) - len(protobuf.text(3, schema)) - end
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

    def stamped(
        self,
        times: NDArray[np.uint64],
        starts: NDArray[np.uint64],
        bits: NDArray[np.uint64],
        missing: NDArray[np.bool_],
    ) -> bytes:
        """The request with these points: times in ns, values as the 64 bits of a double or whole number."""
        heads = self._heads
        heads["time"], heads["start"] = times, starts
        heads["value"] = np.where(missing, np.uint64(0), bits)
        heads["flags"] = missing
        self._bytes[self._places[:, None] + self._offsets] = heads.view(np.uint8).reshape(len(heads), _HEAD.itemsize)
        return self._bytes.tobytes()


def _metric(series: Series) -> tuple[bytes, list[int]]:
    """The Metric message, and where in it each point's head begins."""
    points, places, end = [], [], 0
    for attributes in series.points:
        body = bytes(_HEAD.itemsize) + attributes
        prefix = protobuf.tag(1, protobuf.LENGTH) + protobuf.varint(len(body))
        places.append(end + len(prefix))
        points += [prefix, body]
        end += len(prefix) + len(body)
    joined = b"".join(points)
    if series.instrument == "gauge":
        data, tail = protobuf.gauge(joined), 0
    else:
        data = protobuf.total(joined, series.instrument == "counter")
        tail = len(protobuf.total_tail(series.instrument == "counter"))
    message = protobuf.metric(series.name, series.help, series.unit, data)
    start = len(message) - tail - len(joined)
    return message, [start + place for place in places]
