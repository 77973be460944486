"""Answers of `/entity`, `/values`, `/compare` and `/events` as types.

The parsers raise KeyError, TypeError or ValueError if an answer does not have the expected shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dashboards.answers import parse_incident, parse_time, require_list
from pipeline.model.records import Incident, from_iso

Numbers = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an entity."""

    entity: str
    parents: tuple[str, ...]
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OwnIncident:
    """An incident of an entity. relation: `cause`, `member`, or `affected` by a cause above it."""

    incident: Incident
    relation: str


@dataclass(frozen=True, slots=True)
class EntityDetail:
    """One entity. above: nearest first.  work: job -> ranks on the entity.  links: port -> port at the far end."""

    entity: str
    kind: str
    simulated: bool
    site: str
    parents: tuple[str, ...]
    above: tuple[str, ...]
    attributes: Mapping[str, Any]
    parts: tuple[Part, ...]
    left_out: int
    work: Mapping[str, tuple[str, ...]]
    incidents: tuple[OwnIncident, ...]
    links: Mapping[str, str]

    def above_of_kind(self, kind: str) -> str | None:
        """Returns the nearest entity of a kind above this one."""
        return next((e for e in self.above if e.partition(":")[0] == kind), None)

    def parts_of_kind(self, kind: str) -> list[Part]:
        """Returns the parts of a kind, by name."""
        return [part for part in self.parts if part.entity.partition(":")[0] == kind]


def parse_entity(table: Mapping[str, Any]) -> EntityDetail:
    """Parses GET /api/v1/entity."""
    return EntityDetail(
        entity=str(table["entity"]),
        kind=str(table["kind"]),
        simulated=bool(table["simulated"]),
        site=str(table.get("site") or ""),
        parents=_texts(table["parents"]),
        above=_texts(table["above"]),
        attributes=dict(table["attributes"]),
        parts=tuple(
            Part(str(p["entity"]), _texts(p["parents"]), dict(p["attributes"])) for p in require_list(table["parts"])
        ),
        left_out=int(table["left_out"]),
        work={str(w["job"]): _texts(w["ranks"]) for w in require_list(table["work"])},
        incidents=tuple(OwnIncident(parse_incident(i), str(i["relation"])) for i in require_list(table["incidents"])),
        links={str(k): str(v) for k, v in table["links"].items()},
    )


@dataclass(frozen=True, slots=True)
class SignalValues:
    """Newest values of one signal in the order of the devices, and of peers on other nodes."""

    name: str
    unit: str
    help: str
    kind: str
    states: tuple[str, ...]
    normal: tuple[str, ...]
    values: tuple[float | None, ...]
    median: float | None
    low: float | None
    high: float | None
    peers: int
    peer_kind: str


@dataclass(frozen=True, slots=True)
class ClassValues:
    """Newest values of the devices of one class."""

    device_class: str
    entities: tuple[str, ...]
    last_seen: tuple[int | None, ...]
    left_out: int
    signals: Mapping[str, SignalValues]

    def value(self, name: str, entity: str) -> float | None:
        """Returns the newest value of a signal of a device, None without one."""
        signal = self.signals.get(name)
        if signal is None or entity not in self.entities:
            return None
        return signal.values[self.entities.index(entity)]


@dataclass(frozen=True, slots=True)
class Values:
    """Newest values of an entity and its parts, by device class."""

    as_of: int
    classes: Mapping[str, ClassValues]

    def of_class(self, device_class: str) -> ClassValues:
        """Returns the values of a class, without devices if there are none."""
        return self.classes.get(device_class) or ClassValues(device_class, (), (), 0, {})


def parse_values(table: Mapping[str, Any]) -> Values:
    """Parses GET /api/v1/values."""
    found = [_class_values(c) for c in require_list(table["classes"])]
    return Values(from_iso(table["as_of"]), {one.device_class: one for one in found})


def _class_values(table: Mapping[str, Any]) -> ClassValues:
    signals = [_signal_values(s) for s in require_list(table["signals"])]
    return ClassValues(
        device_class=str(table["device_class"]),
        entities=_texts(table["entities"]),
        last_seen=tuple(map(parse_time, require_list(table["last_seen"]))),
        left_out=int(table["left_out"]),
        signals={s.name: s for s in signals},
    )


def _signal_values(table: Mapping[str, Any]) -> SignalValues:
    signal = table["signal"]
    low, median, high = (_number(table[key]) for key in ("low", "median", "high"))
    return SignalValues(
        name=str(signal["name"]),
        unit=str(signal["unit"]),
        help=str(signal["help"]),
        kind=str(signal["kind"]),
        states=_texts(signal["states"]),
        normal=_texts(signal["normal"]),
        values=tuple(map(_number, require_list(table["values"]))),
        median=median,
        low=low,
        high=high,
        peers=int(table["peers"]),
        peer_kind=str(table["peer_kind"]),
    )


@dataclass(frozen=True, slots=True)
class Line:
    """One device over time; NaN where nothing was measured. low, high: of each bucket, None where equal to values."""

    entity: str
    values: Numbers
    low: Numbers | None
    high: Numbers | None


@dataclass(frozen=True, slots=True)
class Compared:
    """One signal of several devices. start: UTC us. width: s of a bucket. step: s of the rollup read, 0 for rows.

    band: median, 10th and 90th percentile of the peers.
    """

    name: str
    unit: str
    help: str
    kind: str
    states: tuple[str, ...]
    start: int
    width: float
    step: int
    peer_kind: str
    peers: int
    left_out: int
    lines: tuple[Line, ...]
    band: tuple[Numbers, Numbers, Numbers] | None

    def has_data(self) -> bool:
        """Returns whether any device has a value."""
        return any(bool(np.isfinite(line.values).any()) for line in self.lines)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several signals over [start, end) in UTC us. The last point of a signal may be partial: it ends at `end`.

    simulated: whether any device is.
    """

    start: int
    end: int
    signals: tuple[Compared, ...]
    simulated: bool = False


def parse_comparison(table: Mapping[str, Any]) -> Comparison:
    """Parses GET /api/v1/compare."""
    found = tuple(_compared(s) for s in require_list(table["signals"]))
    return Comparison(from_iso(table["from"]), from_iso(table["to"]), found, bool(table["simulated"]))


def _compared(table: Mapping[str, Any]) -> Compared:
    signal, band = table["signal"], table["band"]
    return Compared(
        name=str(signal["name"]),
        unit=str(signal["unit"]),
        help=str(signal["help"]),
        kind=str(signal["kind"]),
        states=_texts(table["states"]),
        start=from_iso(table["start"]),
        width=float(table["width"]),
        step=int(table["step"]),
        peer_kind=str(table["peer_kind"]),
        peers=int(table["peers"]),
        left_out=int(table["left_out"]),
        lines=tuple(
            Line(str(line["entity"]), *(_numbers(line[key]) for key in ("values", "low", "high")))  # type: ignore[arg-type]
            for line in require_list(table["lines"])
        ),
        band=None if band is None else tuple(_numbers(band[key]) for key in ("median", "low", "high")),  # type: ignore[arg-type]
    )


@dataclass(frozen=True, slots=True)
class EventItem:
    """What happened. type: event, finding or gap. subject: kind of event, detector, or topic."""

    time: int
    type: str
    entity: str
    subject: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EventItems:
    """Events, newest first. truncated: older ones are missing."""

    items: tuple[EventItem, ...]
    truncated: bool


def parse_events(table: Mapping[str, Any]) -> EventItems:
    """Parses GET /api/v1/events."""
    items = tuple(_event(i) for i in require_list(table["items"]))
    return EventItems(items, bool(table["truncated"]))


def _event(table: Mapping[str, Any]) -> EventItem:
    data = table["data"]
    names = ("type", "entity", "subject")
    kind, entity, subject = (str(table[name]) for name in names)
    return EventItem(from_iso(table["time"]), kind, entity, subject, data if isinstance(data, dict) else {"data": data})


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, require_list(value)))


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _numbers(value: Any) -> Numbers | None:
    """Returns values as float32, with NaN for null."""
    return None if value is None else np.array(require_list(value), np.float64).astype(np.float32)


def names_of(values: Sequence[Part]) -> list[str]:
    """Returns the entities of parts."""
    return [part.entity for part in values]
