"""The state of the agent after one tick, for its own metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CollectorResult:
    """One read of a collector at this tick: its state (ok, no data, fault, hung) and how long it took in s."""

    collector: str
    result: str
    took: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The agent after one tick. Counts are since the start; an unknown value is None, and is not exported.

    results: of the collectors read at this tick.  restarts: by collector.  gaps, unsent: messages.
    lag: seconds since the oldest message was made that Kafka has not acknowledged; 0 if there is none.
    """

    time: int
    results: tuple[CollectorResult, ...] = ()
    restarts: Mapping[str, int] = field(default_factory=dict)
    spool_bytes: float | None = None
    spool_wait: float | None = None
    dropped: float | None = None
    gaps: int | None = None
    unsent: int | None = None
    lag: float | None = None
    late_ticks: int | None = None
    cpu_time: float | None = None
    memory: int | None = None
