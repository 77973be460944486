"""How far ingest is, for the threads that read nothing else of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.transport import Partition


@dataclass(frozen=True, slots=True)
class Progress:
    """State of ingest after its last step; the only part that other threads read.

    backlog: event time of the oldest waiting input.  newest: newest stored event time.  nodes: the same by sender.
    passed: event time that all alive senders had passed before the step (Senders.find_passed_time). Before, because an
    event is sent before the telemetry of its tick and may be read one step later.
    arrivals: arrival time of the newest message per sender (UTC us, our clock or the brokers', never the sender's).
    clock_errors: sender -> clock error (us), above 0: ahead, below 0: behind; only wrong clocks.
    unanswered: the partition without a response for longest, and since when (UTC us).
    newer: nodes whose spools are blocked until the pipeline is upgraded.
    """

    backlog: int | None = None
    newest: int | None = None
    passed: int | None = None
    nodes: Mapping[str, int] = field(default_factory=dict)
    arrivals: Mapping[str, int] = field(default_factory=dict)
    clock_errors: Mapping[str, int] = field(default_factory=dict)
    unanswered: tuple[Partition, int] | None = None
    newer: tuple[str, ...] = ()
