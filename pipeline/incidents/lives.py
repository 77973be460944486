"""The life of one incident: how its state and its waiting follow from it, and what of a change receivers notice."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from pipeline.incidents.cases import SEVERITIES
from pipeline.incidents.changes import RETURNED, Change, ChangeKind
from pipeline.model.records import Incident, Life
from pipeline.model.topology import kind_of

WORSE = 2
"""Factor in the number of members at which an incident that people know is worse. Chosen."""

MAX_RETURNS = 100
"""Returns of an incident that are remembered: more than fit into the default of flap_hours, 10 min apart. Chosen."""


def show(incident: Incident, life: Life) -> Incident:
    """Returns the incident as people see it: resolved hides silenced, which hides acknowledged."""
    state = "silenced" if life.silenced_by else "acknowledged" if life.acknowledged_by else "open"
    return replace(incident, life=life, state="resolved" if incident.resolved is not None else state)  # type: ignore[arg-type]


def unacknowledge(life: Life) -> Life:
    """Returns the life without its acknowledgement."""
    return replace(life, acknowledged_by="", acknowledged_until=None)


def is_open_again(incident: Incident, before: Incident | None) -> bool:
    """Returns whether a silence or an acknowledgement of an incident has ended, so that receivers get it again."""
    return incident.state == "open" and before is not None and before.state in ("silenced", "acknowledged")


def restart_wait(incident: Incident, now: int) -> Incident:
    """Returns an incident of which a silence or an inhibition began or ended: an unacknowledged page waits
    for a person from now on, so that the steps of escalation count from when it was heard."""
    waits = now if incident.severity == "page" and incident.state == "open" else None
    return show(incident, replace(incident.life, waits_since=waits))


def has_new_labels(incident: Incident, before: Incident | None) -> bool:
    """Returns whether its alert is another one now: receivers are sent the end of the old one and the new one."""
    names = ("severity", "cause", "entity", "detector", "simulated")
    return before is not None and any(getattr(incident, name) != getattr(before, name) for name in names)


def list_returns(life: Life, now: int, window: int) -> tuple[int, ...]:
    """Returns the newest times within `window` (us) at which it returned."""
    return tuple(t for t in life.returned[-MAX_RETURNS:] if now - t <= window)


def find_worse(change: Change, before: Incident, members: int) -> ChangeKind | None:
    """Returns as what an incident that is still shown as open returns so that people are told: more severe, with what
    it never had, or with twice the members that they know. None: as it was."""
    incident = change.incident
    if SEVERITIES.index(incident.severity) > SEVERITIES.index(before.severity):
        return "severity_raised"
    grows = members >= max(WORSE * before.life.told, 2) and not is_shown_by_ranks(incident)
    is_new = change.comment.startswith(f"{RETURNED}, with ")  # of a person who reopens it there is another comment
    return "worsened" if grows or is_new else None


def is_shown_by_ranks(incident: Incident, without: Collection[str] = ()) -> bool:
    """Returns whether it is a slow GPU of which only ranks were slow, none in `without`: each job has others."""
    if kind_of(incident.cause) != "gpu" or not incident.members:
        return False
    return all(kind_of(m) == "rank" and m not in without for m in incident.members)
