"""Writes of a person about incidents and silences: each with the version that the person saw.

If another person changed the incident since then, nothing is written and the answer names the change. Changes of
Fleetpulse itself (new findings, escalation) and the person's own do not stop it: then it is sent again with the new
version. The page may still have the version before the person's last click.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dashboards import answers, identity, snapshot
from dashboards.answers import Change
from dashboards.client import ApiError
from dashboards.snapshot import CachedAnswer
from dashboards.words import age, joined
from pipeline.model.errors import FleetpulseError
from pipeline.model.records import SECOND

CONFLICT = 412
MACHINE = "fleetpulse"
"""The actor of changes that no person made."""
TRIES = 3
"""Writes of one click, if only Fleetpulse changed the incident in between. Chosen."""


DOUBT_S = 2 * snapshot.INTERVAL_S
"""Shortest time for which a lost response is shown (s): two refreshes, so that it is read, and that a write on its way
is over. Chosen."""


class Outcome(NamedTuple):
    """What became of a write: the tone of a notice, and its text. lost: when its response was lost, which may have said
    that it was done (UTC us); 0: it is known."""

    tone: str
    text: str
    done: bool
    lost: int = 0

    def is_settled(self, answer: CachedAnswer[Any]) -> bool:
        """Returns whether a newer answer of the API shows what became of a write whose response was lost."""
        return bool(self.lost) and not answer.error and answer.fetched - self.lost > DOUBT_S * SECOND


def describe_failure(error: ApiError, not_done: str) -> Outcome:
    """Returns the outcome of a write that failed. not_done: `Not silenced.`"""
    return Outcome("critical", error.describe(not_done), False, snapshot.now() if error.unsure else 0)


class ConflictError(FleetpulseError):
    """Another person changed the incident since it was seen. The message says who did what."""


def act_on_incident(incident: str, version: int | None, verb: str, body: Mapping[str, Any], done: str) -> Outcome:
    """Sends an act on an incident; `done` is the text if it succeeds."""
    try:
        write_to_incident(incident, version, verb, body)
    except ConflictError as error:
        return Outcome("degraded", f"Nothing changed: {error}", False)
    except ApiError as error:
        return describe_failure(error, "Nothing changed.")
    return Outcome("quiet", done, True)


def write_to_incident(incident: str, version: int | None, verb: str, body: Mapping[str, Any]) -> None:
    """Sends an act on an incident of which the person saw that version. Raises ApiError, and ConflictError with nothing
    written."""
    for _ in range(TRIES):
        try:
            snapshot.send(answers.parse_incident, f"incidents/{snapshot.quoted(incident)}/{verb}", body, version)
            return
        except ApiError as error:
            if error.status != CONFLICT or version is None:
                raise
        snapshot.api_url()  # a login may have ended
        try:
            fresh = snapshot.make_client().fetch_incident(incident)
        except ApiError as error:
            raise ApiError(f"Another person changed the incident. {error}", error.status, error.kind) from error
        since = [change for change in fresh.history if change.number > version]
        person = identity.require()
        own = {MACHINE} if person.notes_only else {MACHINE, person.name}  # several people can be `local`
        if any(change.actor not in own for change in since):
            raise ConflictError(describe_conflict(since, snapshot.now()))
        version = fresh.version
    raise ConflictError("the incident changes too fast. Try again.")


def describe_conflict(since: list[Change], now: int) -> str:
    """Returns who changed what since the page was drawn."""
    texts = [
        f"{change.actor} {change.kind.replace('_', ' ')} it {age((now - change.time) / SECOND)} ago"
        + (f' ("{change.comment}")' if change.comment else "")
        for change in since
        if change.actor != MACHINE
    ]
    return f"{joined(texts)}. Look at it, then repeat your action."
