"""Reads the data of events: values from other programs are checked before use, edge events come in order of time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.model.records import Event, Frame

LONGEST_S = 86_400.0
"""Longest duration in s that an event may give: a longer one is a mistake, or is sent again. Chosen."""


def read_number(value: object, low: float = 0.0, high: float = 2.0**63) -> float | None:
    """Returns a finite number within [low, high], else None; booleans and texts are not numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) and low <= found <= high else None


def read_integer(value: object, low: int = 0, high: int = 2**63) -> int | None:
    """Returns an integer within [low, high], else None."""
    found = read_number(value, low, high)
    return int(found) if found is not None and found == int(found) else None


def read_duration(value: object, most: float = LONGEST_S) -> float | None:
    """Returns a duration in s, above 0 and at most `most`, else None."""
    found = read_number(value)
    return None if found is None or found <= 0 else min(found, most)


def read_text(value: object) -> str:
    """Returns a text, "" for any other value."""
    return value if isinstance(value, str) else ""


@dataclass(frozen=True, slots=True)
class EdgeEvent:
    """An event of an edge rule. active: the condition began or grew, else it is over; since: when it began."""

    time: int
    entity: str
    kind: str
    active: bool
    since: int
    event: Event

    def number(self, name: str) -> float:
        """Returns a number of its data; NaN if it is none."""
        value = read_number(self.event.data.get(name), -(2.0**63))
        return math.nan if value is None else value


def as_edge_event(event: Event) -> EdgeEvent | None:
    """Returns an event as an edge event; None if its state is unknown or its time is not an integer."""
    state, since = event.data.get("state"), event.data.get("since", event.time)
    if state not in ("active", "cleared") or not isinstance(since, int):
        return None
    since = event.time if isinstance(since, bool) or not 0 < since <= event.time else since
    return EdgeEvent(event.time, event.entity, event.kind, state == "active", since, event)


def events_of(frames: Mapping[str, Frame], *kinds: str) -> list[Event]:
    """Returns the events of these kinds at an instant: by class of the frame, in each as they arrived."""
    return [event for device_class in sorted(frames) for event in frames[device_class].events if event.kind in kinds]


def edge_events(frames: Mapping[str, Frame], kinds: Sequence[str]) -> list[EdgeEvent]:
    """Returns the edge events of these kinds in order of time; malformed ones are left out."""
    found = [edge for edge in map(as_edge_event, events_of(frames, *kinds)) if edge is not None]
    return sorted(found, key=lambda e: (e.time, e.entity, e.kind))


def values_by_entity(frame: Frame | None, signal: str) -> dict[str, float]:
    """Returns entity -> value of a signal, for the entities with a value in this frame."""
    if frame is None or signal not in frame.values:
        return {}
    column = frame.values[signal].tolist()
    return {e: v for e, v in zip(frame.entities, column, strict=True) if not math.isnan(v)}
