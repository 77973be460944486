"""When a condition is told: as it begins, as its level rises, and again every minute while it holds.

A minute, because the Desk takes ten minutes of quiet for the end of a condition.
"""

from __future__ import annotations

from typing import Any

from pipeline.records import LEVELS, SECOND, Level

REPEAT = 60 * SECOND
SET_BACK = 600 * SECOND  # a clock that goes back by as much was set; frames come out of order by less. Chosen
Open = dict[str, dict[str, Any]]


def tell(conditions: Open, key: str, time: int, onset: int, level: Level) -> tuple[int, Level] | None:
    """Onset and level to report now, or None if nothing is due. The onset of the first report stays; levels rise."""
    known = conditions.get(key)
    if known is None:
        conditions[key] = {"onset": min(onset, time), "level": level, "told": time}
        return min(onset, time), level
    if time < known["onset"]:
        if known["onset"] - time < SET_BACK:  # out of order: that is no news of it
            return None
        known["onset"] = time
    rises = LEVELS.index(level) > LEVELS.index(known["level"])
    if rises:
        known["level"] = level
    elif 0 <= time - known["told"] < REPEAT:
        return None
    known["told"] = time
    return known["onset"], known["level"]


def close(conditions: Open, holding: set[str]) -> None:
    """Forgets the conditions that no longer hold."""
    for key in [k for k in conditions if k not in holding]:
        del conditions[key]
