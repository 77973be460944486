"""Which part of a report's time is evaluated: what lies outside it has no incidents and no losses yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.model.entity_names import short_duration
from pipeline.model.records import SECOND, iso

LATE = 120 * SECOND
"""Up to this age of the newest evaluated telemetry a report is complete (us). Chosen: as for lists of incidents."""


def describe_evaluated(
    start: int, end: int, since: int, judged: int | None, unready: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns from when to when a time is evaluated, whether that is all of it, and a note for people if not.

    late: the end is missing, not only a time before the history.
    since: when the store's history begins.   judged: until when telemetry is evaluated, None: no telemetry was.
    unready: why nothing is evaluated now. All times in UTC us.
    """
    first, last = max(start, min(since, end)), None if judged is None else min(judged, end)
    if last is None or last <= first:
        why = "; ".join(unready) or "no telemetry of this time was evaluated"
        note = f"Nothing of this time is evaluated: {why}. Losses and incidents are missing."
        return {"from": None, "to": None, "complete": False, "late": True, "note": note}
    notes, is_late = [], end - last > LATE
    if is_late:
        late = short_duration((end - last) / SECOND)
        why = f" ({'; '.join(unready)})" if unready else ""
        notes.append(f"Evaluated only until {_show(last)}, {late} before its end{why}: what happened since is missing.")
    if first - start > LATE:
        notes.append(f"The history begins at {_show(first)}: what happened before is not known.")
    return {"from": iso(first), "to": iso(last), "complete": not notes, "late": is_late, "note": " ".join(notes)}


def _show(time: int) -> str:
    return f"{iso(time)[:16].replace('T', ' ')}Z"
