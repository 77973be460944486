"""Reads the data of events: values from other programs are checked before use, edge events come in order of time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.model.records import Event, Frame

LONGEST_S = 86_400.0
"""Seconds that anything told lasts at most: what is longer is a mistake, or is told anew. Chosen."""


def read_number(value: object, low: float = 0.0, high: float = 2.0**63) -> float | None:
    """A finite number within [low, high], else None; truths and texts are no numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) and low <= found <= high else None


def read_integer(value: object, low: int = 0, high: int = 2**63) -> int | None:
    """An integer within [low, high], else None."""
    found = read_number(value, low, high)
    return int(found) if found is not None and found == int(found) else None


def read_duration(value: object, most: float = LONGEST_S) -> float | None:
    """How long something took or will take: above 0, at most `most`."""
    found = read_number(value)
    return None if found is None or found <= 0 else min(found, most)


def read_text(value: object) -> str:
    """A text, "" for anything else."""
    return value if isinstance(value, str) else ""


@dataclass(frozen=True, slots=True)
class EdgeEvent:
    """One edge event. `active`: it began or grew, else it is over; `since`: when the agent saw it first."""

    time: int
    entity: str
    kind: str
    active: bool
    since: int
    event: Event

    def number(self, name: str) -> float:
        """One of its numbers; NaN if it is none."""
        value = read_number(self.event.data.get(name), -(2.0**63))
        return math.nan if value is None else value


def as_edge_event(event: Event) -> EdgeEvent | None:
    """An event as an edge event; None if it has no known state, or an odd time."""
    state, since = event.data.get("state"), event.data.get("since", event.time)
    if state not in ("active", "cleared") or not isinstance(since, int):
        return None
    since = event.time if isinstance(since, bool) or not 0 < since <= event.time else since
    return EdgeEvent(event.time, event.entity, event.kind, state == "active", since, event)


def edge_events(frames: Mapping[str, Frame], kinds: Sequence[str]) -> list[EdgeEvent]:
    """Edge events of these kinds in order of time; what has no known state, or an odd time, is no such event."""
    events = (e for c in sorted(frames) for e in frames[c].events if e.kind in kinds)
    found = [said for said in map(as_edge_event, events) if said is not None]
    return sorted(found, key=lambda t: (t.time, t.entity, t.kind))


def values_by_entity(frame: Frame | None, signal: str) -> dict[str, float]:
    """Entity -> value of a signal, of those that have one in this frame."""
    if frame is None or signal not in frame.values:
        return {}
    column = frame.values[signal].tolist()
    return {e: v for e, v in zip(frame.entities, column, strict=True) if not math.isnan(v)}
