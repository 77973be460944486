"""What an incident takes over from those that a person merges into it: who works on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pipeline.incidents.cases import SEVERITIES
from pipeline.incidents.changes import Change
from pipeline.model.records import Incident

Acknowledge = Callable[[str, str, str, int], Change]
"""`Desk.acknowledge`."""


def take_over(
    before: Incident, kept: Incident, merged: Sequence[Incident], acknowledge: Acknowledge, user: str, now: int
) -> Iterator[Change]:
    """Yields the acknowledgement and the assignee that the kept incident has not and a merged one had.

    An acknowledgement counts only of an incident as severe as the kept one is now: a page is not answered because a
    ticket was. Of several the one that lasts longest. before, kept: the incident before and after the merge.
    """
    least = SEVERITIES.index(kept.severity)
    heard = [i for i in merged if i.life.acknowledged_by and SEVERITIES.index(i.severity) >= least]
    keeps_own = before.life.acknowledged_by and before.severity == kept.severity  # a rise ends it
    if heard and not keeps_own:
        best = max(heard, key=lambda i: (i.life.acknowledged_until is None, i.life.acknowledged_until or 0, i.id))
        by, until = best.life.acknowledged_by, best.life.acknowledged_until
        change = acknowledge(kept.id, user, f"by {by}, as {best.id} was", now)
        yield replace(change, life={"acknowledged_by": by, "acknowledged_until": until})
    owned = next((i for i in merged if i.life.assignee), None)
    if owned is not None and not before.life.assignee:
        said = f"to {owned.life.assignee}, as {owned.id} was"
        yield Change("assigned", kept, now, user, said, (), kept, life={"assignee": owned.life.assignee})
