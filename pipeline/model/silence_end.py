"""The end of a silence for people: of a maintenance window the planned one, and that a grace follows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.model.entity_names import short_duration
from pipeline.model.records import SECOND, from_iso


def describe_end(silence: Mapping[str, Any], characters: int = 16) -> str:
    """Returns the end of a silence of the API: `2026-01-31 08:00`, of a window `2026-01-31 08:00 + 15 min grace`.

    characters: of the time, 16 to the minute, 19 to the second.
    """
    ended, until = silence.get("expired"), str(silence["until"])
    end = min(str(silence["ends"]), str(ended)) if ended else str(silence["ends"])
    grace = (from_iso(until) - from_iso(end)) / SECOND
    shown = (end if grace > 0 else until)[:characters].replace("T", " ")
    return f"{shown} + {short_duration(grace)} grace" if grace > 0 else shown
