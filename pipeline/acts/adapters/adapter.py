"""The contract of adapters. Each is tried at its real scheduler or tool (tests/pipeline/test_acts_*.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pipeline.acts.act import Act, Verb
from pipeline.acts.scheduler import SchedulerNode, SchedulerState
from pipeline.model.errors import FleetpulseError

MAX_NOTE = 200
"""Characters of a reason at the scheduler. Chosen: what `sinfo -R` and `kubectl describe` still show."""


GIVE_UP_S = 1800.0
"""How long after it began an act whose effect is unknown is looked up again before it counts as failed (s). Chosen: a
restart of a scheduler with its state takes minutes."""
GIVE_UP_DIAGNOSTIC_S = 4 * 3600.0
"""The same for a diagnostic (s). Chosen: as for the programs of a site."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command did to one node. done: the scheduler accepted it.   output: what it answered, for people."""

    done: bool
    output: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)


class StillRunning(FleetpulseError):  # noqa: N818 - reads as the state it names
    """A step begun on a node goes on: ask again in the next round. Other nodes and acts need not wait for it."""


class NotYet(FleetpulseError):  # noqa: N818 - reads as the state it names
    """The scheduler refuses a command for now. It is tried again for [acts] verify_minutes; then the act fails."""


class Immediate:
    """What an adapter inherits whose commands end immediately, at a scheduler that shows their effect."""

    repeatable: frozenset[Verb] = frozenset({"hold", "release", "evict"})
    saved_after_s: float = 0.0

    def is_waiting(self, act: Act) -> bool:
        """See `Adapter.is_waiting`."""
        del act
        return False

    def find_limit(self, act: Act) -> float:
        """See `Adapter.find_limit`."""
        del act
        return GIVE_UP_S


class Adapter(Protocol):
    """Carries out verbs at one scheduler. All calls may raise Unreachable; then nothing is known about their effect.

    A node that is held for the same act stays as it is.
    verbs: what it can do.   repeatable: those that may be carried out again after the executor was killed.
    saved_after_s: how long a change may be lost if the scheduler's process dies (s); before that none is verified.
    """

    name: str
    verbs: frozenset[Verb]
    repeatable: frozenset[Verb]
    saved_after_s: float

    def read_state(self, now: int) -> SchedulerState:
        """Returns all nodes and running jobs of the scheduler."""
        ...

    def list_commands(self, act: Act, world: SchedulerState) -> tuple[str, ...]:
        """Returns exactly what would be run or sent, as text that a person could run."""
        ...

    def carry_out(self, act: Act, node: SchedulerNode) -> Outcome:
        """Does the verb to one node. Returns what the scheduler refused.

        Raises StillRunning while it goes on, Unreachable if the effect is unknown, NotYet if nothing was done and a
        later try may succeed.
        """
        ...

    def is_waiting(self, act: Act) -> bool:
        """Returns whether this process began the act and waits for its end: then it asks on, and begins nothing."""
        ...

    def find_limit(self, act: Act) -> float:
        """Returns how long after it began an act that goes on counts as failed (s): beyond the adapter's own limits."""
        ...

    def undo(self, act: Act, node: SchedulerNode) -> Outcome:
        """Undoes a hold of this act on one node."""
        ...

    def find_effect(self, act: Act, node: SchedulerNode) -> bool | None:
        """Returns whether the scheduler shows the act's effect on a node; None: not yet, look again."""
        ...


def check_owner(act: Act, fresh: SchedulerNode, planned: SchedulerNode) -> Outcome | None:
    """Returns why nothing is to be done to a node as it is now, or that it is done; None: go on.

    Nodes that others took out of service are left to them; any other node must still have the planned mark, and one
    to reboot must be idle.
    """
    if act.verb == "hold":
        if fresh.mark == act.mark:
            return Outcome(True, f"{fresh.name}: is held for this act already")
        said = f"{fresh.name}: is {fresh.state} for {fresh.reason!r}, which is not ours"
        return Outcome(False, said) if fresh.is_taken else None
    if act.verb in ("release", "evict", "reboot") and (not fresh.mark or fresh.mark != planned.mark):
        return Outcome(False, f"{fresh.name}: is no longer held here: {fresh.reason!r}")
    if act.verb == "reboot" and (fresh.jobs or not fresh.out):
        return Outcome(
            False, f"{fresh.name}: is {fresh.state} with jobs {', '.join(fresh.jobs) or 'none'}; expected held"
        )
    return None


def write_note(act: Act) -> str:
    """Returns the reason for the scheduler: the owner mark, incident, requester and reason, in printable ASCII."""
    words = " ".join(filter(None, (act.mark, act.incident, act.requested_by, act.reason)))
    plain = "".join(c if c.isascii() and c.isprintable() and c not in "\"'`\\$|;" else "_" for c in words)
    return plain[:MAX_NOTE]
