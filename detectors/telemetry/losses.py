"""Messages that agents lost: what they held is missing for good, and no silence tells of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from detectors.telemetry.silent_nodes import Silence
from pipeline.records import SECOND, Frame

HOLDS = 600 * SECOND
"""A loss is over when none followed for so long: the Desk's own quiet; chosen."""


class Losses:
    """Per agent what it lost lately: gap events, else growth of agent.dropped."""

    def __init__(self) -> None:
        self._lost: dict[str, dict[str, Any]] = {}
        self._dropped = np.empty(0)

    def look(self, frames: Mapping[str, Frame], time: int) -> Iterator[Silence]:
        """Losses that hold now."""
        for event in (e for f in frames.values() for e in f.events if e.kind == "gap"):
            first, following = event.data.get("first"), event.data.get("next")
            lost = following - first if isinstance(first, int) and isinstance(following, int) else None
            count = max(lost, 1) if lost is not None else 1
            self._add(event.entity, event.time, count, str(event.data.get("cause") or "no cause told"))
        frame = frames.get("agent")
        if frame is not None and "agent.dropped" in frame.values:
            self._count(frame)
        self._lost = {e: k for e, k in self._lost.items() if time - k["last"] <= HOLDS}
        for entity, known in sorted(self._lost.items()):
            yield self._silence(entity, known)

    def _count(self, frame: Frame) -> None:
        """Growth of the counter, where no event told of the loss lately; it begins anew with the agent."""
        now = frame["agent.dropped"]
        if len(now) > len(self._dropped):
            self._dropped = np.append(self._dropped, np.full(len(now) - len(self._dropped), np.nan))
        before = self._dropped[: len(now)]
        for i in np.flatnonzero(now > before).tolist():
            entity = frame.entities[i]
            if entity not in self._lost or self._lost[entity]["cause"] == _DROPPED:
                self._add(entity, frame.time, int(now[i] - before[i]), _DROPPED)
        known = ~np.isnan(now)
        before[known] = now[known]

    def _add(self, entity: str, time: int, count: int, cause: str) -> None:
        known = self._lost.setdefault(entity, {"since": time, "last": time, "messages": 0, "cause": cause})
        known["last"], known["cause"] = max(time, known["last"]), cause
        known["messages"] += count

    def _silence(self, entity: str, known: Mapping[str, Any]) -> Silence:
        summary = f"The agent of {entity} lost {known['messages']} messages for good: {known['cause']}"
        more = {"messages": known["messages"], "reason": known["cause"]}
        clears = f"over when {HOLDS // SECOND} s pass without a loss"
        signals = ("agent.dropped",)
        key, since = f"{entity}|lost", known["since"]
        return Silence(key, entity, since, "ticket", float(known["messages"]), summary, "loss", clears, signals, more)

    def snapshot(self) -> dict[str, Any]:
        return {"lost": {e: dict(k) for e, k in self._lost.items()}, "dropped": self._dropped.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._lost, self._dropped = dict(state["lost"]), state["dropped"]


_DROPPED = "its spool was full or could not be written"
