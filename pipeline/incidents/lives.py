"""The life of one incident: how its state and its waiting follow from it, and what of a change receivers notice."""

from __future__ import annotations

from dataclasses import replace

from pipeline.model.records import Incident, Life


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
