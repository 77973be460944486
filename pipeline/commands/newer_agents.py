"""Agents that are newer than the pipeline: one is logged; if all of them are, the pipeline is not ready."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from pipeline.ingest.messages import NEWER
from pipeline.model.records import SECOND

log = logging.getLogger("fleetpulse.pipeline")

SILENCE_LIMIT = 60 * SECOND  # an agent without a message counts as silent
_IN_REASON, _IN_LOG = 3, 10  # names in a reason and in a line of the log; chosen


def describe_all_newer(newer: Sequence[str], arrivals: Mapping[str, int], now: int) -> str | None:
    """Returns the reason if all agents are newer than the pipeline; one newer agent is not enough.

    arrivals: node in service -> time of its last message (UTC us).
    """
    if not newer or any(now - arrived < SILENCE_LIMIT for node, arrived in arrivals.items() if node not in newer):
        return None
    return (
        f"{len(newer)} agents newer than the pipeline ({', '.join(newer[:_IN_REASON])}...): their telemetry waits in "
        "their spools; upgrade the pipeline"
    )


class NewerAgents:
    """Logs agents that are newer than the pipeline, once."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def warn(self, newer: Collection[str], over_kafka: bool) -> None:
        """Logs those not logged before. over_kafka: whether messages of newer ones became dead letters."""
        fresh = set(newer) - self._reported
        if fresh:
            names = ", ".join(sorted(fresh)[:_IN_LOG])
            log.warning("%d agents newer than the pipeline (%s): upgrade the pipeline", len(fresh), names)
            self._reported |= fresh
        if over_kafka and NEWER not in self._reported:
            log.warning(
                "agents newer than the pipeline send over Kafka: messages are dead letters; upgrade the pipeline"
            )
            self._reported.add(NEWER)
