"""Changes of incidents: what happened, when, and by whom. Each is a row of the history and may be sent to receivers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pipeline.model.records import Incident

ChangeKind = Literal[
    "opened",
    "updated",
    "cause_changed",
    "severity_raised",
    "retitled",
    "acknowledged",
    "commented",
    "resolved",
    "reopened",
    "assigned",
    "silenced",
    "unsilenced",
    "inhibited",
    "uninhibited",
    "escalated",
    "acknowledgement_expired",
    "worsened",
    "held_open",
    "returned",
    "merged",
    "split",
    "feedback",
]
REPEATED: frozenset[ChangeKind] = frozenset({"escalated", "acknowledgement_expired", "worsened"})
"""Kinds that are sent to receivers again."""
RETURNED = "the condition returned"
"""Comment of an incident that returned with what it had before."""
QUIET_END = "no findings for 10 min, telemetry present"
"""Comment of an incident that resolved because its findings ended."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of an incident. Every kind but `retitled` is a row of the history. Incidents are copies.

    before:      the incident before the change; None if it is new.
    folded_into: the incident into which this one was merged, if that resolved it.
    split_from:  the incident that had the findings before.
    life:        what a person set in the life of the incident.
    receivers:   the only receivers that get it, by name; empty: all.
    """

    kind: ChangeKind
    incident: Incident
    time: int
    actor: str
    comment: str = ""
    finding_keys: tuple[tuple[str, str, int], ...] = ()
    before: Incident | None = None
    folded_into: str | None = None
    split_from: str | None = None
    life: Mapping[str, Any] = field(default_factory=dict)
    receivers: tuple[str, ...] = ()


def is_only_retitled(before: Incident, now: Incident) -> bool:
    """Returns whether two states of an incident differ only in title and time of the update."""
    return replace(now, summary=before.summary, updated=before.updated) == before
