"""What people do to incidents and silences, and what the next person reads: handover and audit.

A write may carry `If-Match` with the `version` that the caller has read (also the `ETag` of the answer); after another
change it is refused with 412. Every write is a row of the audit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, cast

import duckdb
from fastapi import APIRouter, Query
from pydantic import AfterValidator, BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from pipeline.api import audit_marks
from pipeline.api.guard import USER
from pipeline.api.models import COMMENT_CHARACTERS, Incident, Incidents, Note, Strict, Text, Time
from pipeline.api.result_formats import encode_json
from pipeline.api.service import get_context, json_response
from pipeline.api.titles import add_affected
from pipeline.http.roles import is_name
from pipeline.incidents import audit
from pipeline.incidents.cases import NoSuchIncident
from pipeline.incidents.handover import format_handover, read_handover
from pipeline.incidents.silences import load_silences
from pipeline.model.errors import UsageError
from pipeline.model.records import LAST_TIME, SECOND, Caller, from_iso
from pipeline.model.roles import Role
from pipeline.runtime.reload import ACTION

SHIFT = 8 * 3600 * SECOND
"""Time of a handover without `since`. Chosen: a shift."""
Name = Annotated[str, Field(max_length=200)]


def check_assignee(name: str) -> str:
    """Returns the name of a person, or empty. Raises ValueError."""
    if name and not is_name(name, 200):
        raise ValueError("expected 1 to 200 visible characters without spaces at the ends; empty: no one")
    return name


class WhoAmI(BaseModel):
    """The caller. on_behalf_of: it may name the person who acts."""

    name: str
    role: Role
    on_behalf_of: bool


class Acknowledgement(Note):
    """The body of acknowledge. hours: until it expires; 0: never; null: as configured."""

    hours: float | None = Field(None, ge=0, allow_inf_nan=False)


class Assignment(Note):
    """The body of assign. to: a person; empty: no one."""

    to: Annotated[str, AfterValidator(check_assignee)]


class Because(Strict):
    """A body with a required reason."""

    comment: Text = Field(min_length=1, max_length=COMMENT_CHARACTERS)


class Merge(Because):
    """The body of merge. incidents: those that become part of this one."""

    incidents: list[Name] = Field(min_length=1, max_length=1000)


class Split(Because):
    """The body of split. entities: members that become an incident of their own."""

    entities: list[Name] = Field(min_length=1, max_length=10_000)


class Reloaded(Strict):
    """The body of audit/reloads: a service read its configuration again. reason: changed keys with values, or why."""

    source: str = Field(min_length=1, max_length=COMMENT_CHARACTERS)
    reason: str = Field(min_length=1, max_length=COMMENT_CHARACTERS)
    outcome: Literal["done", "refused"]


class Verdict(Note):
    """The body of feedback."""

    verdict: Literal["useful", "wrong", "known"]


class Matcher(Strict):
    """A matcher in the form of Alertmanager."""

    name: str
    value: str
    isRegex: bool = False  # noqa: N815 - Alertmanager's name
    isEqual: bool = True  # noqa: N815 - Alertmanager's name


Matchers = Annotated[list[str | Matcher], Field(min_length=1, max_length=20)]


class Preview(Strict):
    """Matchers, as text (`rack="r12"`) or as objects."""

    matchers: Matchers


class NewSilence(Preview):
    """A silence to add: `ends`, or `seconds` from its start; `starts`: now by default."""

    reason: Text = Field(max_length=COMMENT_CHARACTERS)
    starts: str | None = None
    ends: str | None = None
    seconds: float | None = Field(None, gt=0, allow_inf_nan=False)


class NewMaintenance(Strict):
    """A maintenance window to add. scopes: entities, each with all below it."""

    scopes: list[Name] = Field(min_length=1, max_length=200)
    reason: Text = Field(max_length=COMMENT_CHARACTERS)
    starts: str | None = None
    ends: str | None = None
    seconds: float | None = Field(None, gt=0, allow_inf_nan=False)


class SilenceChange(Strict):
    """What to change of a silence or maintenance window; null: as it is."""

    matchers: Matchers | None = None
    starts: str | None = None
    ends: str | None = None
    reason: Text | None = Field(None, max_length=COMMENT_CHARACTERS)


class Silence(Strict):
    """A silence, maintenance window or mute. text: its matchers, shortened. until: its end, with the grace of
    maintenance. warning: set on creation of a window if an entity is not known."""

    id: str
    kind: Literal["silence", "mute", "maintenance"]
    state: Literal["pending", "active", "expired"]
    matchers: list[Matcher]
    text: str
    starts: Time
    ends: Time
    until: Time
    author: str
    reason: str
    created: Time
    updated: Time
    updated_by: str
    version: int
    expired: Time | None
    expired_by: str | None
    source: str
    warning: str = ""


class Silences(Strict):
    """Silences, newest first."""

    silences: list[Silence]


class FailedReservation(Strict):
    """A reservation that is not applied as it is now (empty: all of them), or is in doubt, and why."""

    reservation: str
    reason: str


class Reservations(Strict):
    """Slurm's maintenance reservations. seconds: between readings; 0: never. applied: how many are windows."""

    seconds: float
    read: Time | None
    applied: int
    failures: list[FailedReservation]
    warnings: list[FailedReservation]


class StormParts(Strict):
    """Incidents that a handover lists as a part of a storm alone. acknowledged: of the unresolved ones."""

    id: str
    unresolved: int
    acknowledged: int
    changed: int


class Handover(Strict):
    """The site at a change of shift."""

    since: Time
    now: Time
    open: list[Incident]
    muted: dict[str, Any]
    pending: list[dict[str, Any]]
    changed: list[dict[str, Any]]
    storms: list[StormParts]


class AuditRow(Strict):
    """One write, or attempt that was refused."""

    number: int
    time: Time
    actor: str
    role: str
    origin: str
    action: str
    target: str
    reason: str
    outcome: Literal["done", "refused"]
    before: dict[str, Any] | None
    after: dict[str, Any] | None


class Audit(Strict):
    """Rows of the audit, newest first. broken: number of the first row that was changed or removed; null: none.

    oldest: number of the oldest row that is kept.   newest: mark of the newest, NUMBER:HASH.   mark: what became of the
    row of the mark that was asked for; null: none was.
    """

    audit: list[AuditRow]
    broken: int | None
    oldest: int
    newest: str
    mark: audit_marks.State | None


people_router = APIRouter(prefix="/api/v1")


MAX_DIGITS = 18
"""Most digits of a version: those of every number of 64 bits."""


def read_version(request: Request) -> int | None:
    """Returns the version in `If-Match`, None without it. Raises HTTPException."""
    given = request.headers.get("if-match")
    if given is None or given.strip() == "*":
        return None
    text = given.strip().removeprefix("W/").strip('"')
    if not text.isdecimal() or len(text) > MAX_DIGITS:
        raise HTTPException(400, f"If-Match: {given[:64]!r}: expected the version of an earlier answer")
    return int(text)


def answer_versioned(found: Mapping[str, Any], version: int | None = None) -> Response:
    """Returns an answer with the version of what it shows as ETag. version: where the answer names none."""
    response = json_response(found)
    response.headers["ETag"] = f'"{found["version"] if version is None else version}"'
    return response


def find_newest(versions: Sequence[Mapping[str, Any]]) -> int:
    """Returns the number of the newest version of a list, newest first; 0 of none."""
    return int(versions[0]["version"]) if versions else 0


def act_on_incident(request: Request, verb: str, incident: str, said: Mapping[str, Any]) -> Response:
    """Does what a person asked for to an incident."""
    user = cast(Caller, request.scope[USER])
    service, version = get_context(request), read_version(request)
    try:
        found = service.backend.act(verb, incident, user, version, said)
    except KeyError as error:
        said_why = isinstance(error, NoSuchIncident)  # a merge names several incidents
        raise HTTPException(404, error.args[0] if said_why else f"incident {incident!r} is not known") from error
    with service.cursor() as cursor:
        (titled,) = add_affected(cursor, [dict(found)])
    return answer_versioned(titled)


@people_router.post("/incidents/{incident}/assign", response_model=Incident)
def assign(request: Request, incident: str, wanted: Assignment) -> Response:
    """Assigns an incident to a person, or removes the assignee."""
    return act_on_incident(request, "assign", incident, wanted.model_dump())


@people_router.post("/incidents/{incident}/reopen", response_model=Incident)
def reopen(request: Request, incident: str, wanted: Because) -> Response:
    """Reopens a resolved incident, also an old one; only a person resolves it then."""
    return act_on_incident(request, "reopen", incident, wanted.model_dump())


@people_router.post("/incidents/{incident}/merge", response_model=Incident)
def merge(request: Request, incident: str, wanted: Merge) -> Response:
    """Makes other open incidents part of this one."""
    return act_on_incident(request, "merge", incident, wanted.model_dump())


@people_router.post("/incidents/{incident}/split", response_model=Incident)
def split(request: Request, incident: str, wanted: Split) -> Response:
    """Makes some members an incident of their own, and returns that."""
    return act_on_incident(request, "split", incident, wanted.model_dump())


@people_router.post("/incidents/{incident}/feedback", response_model=Incident)
def feedback(request: Request, incident: str, wanted: Verdict) -> Response:
    """Records whether an incident was useful, a wrong page, or known."""
    return act_on_incident(request, "feedback", incident, wanted.model_dump())


def _change(request: Request, verb: str, kind: str, id_: str, said: Mapping[str, Any]) -> Response:
    """Adds, edits or expires a silence or maintenance window."""
    user = cast(Caller, request.scope[USER])
    backend, version = get_context(request).backend, read_version(request)
    try:
        made = backend.change_silence(verb, kind, id_, user, version, _parse_times(said, request))
        return answer_versioned({**made, "warning": backend.warn_unknown_scopes(said.get("scopes") or ())})
    except KeyError as error:
        raise HTTPException(404, f"{kind} {id_!r} is not known") from error


def _parse_times(said: Mapping[str, Any], request: Request) -> dict[str, Any]:
    """Returns the body with times in us; `seconds` becomes `ends`. Raises UsageError."""
    out = dict(said)
    for name in ("starts", "ends"):
        if out.get(name) is not None:
            try:
                out[name] = from_iso(out[name])
            except (ValueError, OverflowError) as error:
                raise UsageError(f"{name} = {said[name]!r}: expected a time such as 2026-01-31T08:00:00Z") from error
    if out.get("seconds") is not None:
        if out.get("ends") is not None:
            raise UsageError("ends and seconds: expected one of them")
        starts = get_context(request).now() if out.get("starts") is None else out["starts"]
        if out["seconds"] > (LAST_TIME - starts) / SECOND:
            raise UsageError(f"seconds = {out['seconds']:g}: the end would be after the year 9999; at most 30 days")
        out["ends"] = starts + int(out["seconds"] * SECOND)
    return out


def _listing(request: Request, keep: Callable[[str], bool], active: bool) -> Response:
    service = get_context(request)
    now = service.now()
    with service.cursor() as cursor:
        found = [s.as_json(now) for s in load_silences(cursor) if keep(s.kind)]
    return json_response({"silences": [s for s in found if not active or s["state"] != "expired"]})


Active = Annotated[bool, Query(description="only those that have not ended")]


@people_router.get("/silences", response_model=Silences)
def silences(request: Request, active: Active = False) -> Response:
    """All silences, also mutes, maintenance windows and ended ones; newest first."""
    return _listing(request, lambda kind: True, active)


@people_router.post("/silences", response_model=Silence)
def add_silence(request: Request, wanted: NewSilence) -> Response:
    """Adds a silence: what matches all matchers sends no alerts until its end."""
    return _change(request, "add", "silence", "", wanted.model_dump())


@people_router.post("/silences/preview", response_model=Incidents)
def preview_silence(request: Request, wanted: Preview) -> Response:
    """The open incidents that matchers match now."""
    service = get_context(request)
    matched = service.backend.preview_silence(wanted.model_dump()["matchers"])
    with service.cursor() as cursor:
        found = add_affected(cursor, map(dict, matched))
    known: dict[str, Any] = {"judged": None, "stalled": False, "unready": []}
    return Response(encode_json({"incidents": found, **known}), media_type="application/json")


@people_router.put("/silences/{silence}", response_model=Silence)
def edit_silence(request: Request, silence: str, wanted: SilenceChange) -> Response:
    """Changes or extends a silence or maintenance window that has not ended."""
    return _change(request, "edit", "silence", silence, wanted.model_dump())


@people_router.post("/silences/{silence}/expire", response_model=Silence)
def expire_silence(request: Request, silence: str) -> Response:
    """Ends a silence now; a maintenance window 15 minutes later."""
    return _change(request, "expire", "silence", silence, {})


@people_router.get("/maintenance", response_model=Silences)
def maintenance(request: Request, active: Active = False) -> Response:
    """All maintenance windows, also ended ones; newest first."""
    return _listing(request, lambda kind: kind == "maintenance", active)


@people_router.get("/maintenance/reservations", response_model=Reservations)
def reservations(request: Request) -> Response:
    """Whether Slurm's maintenance reservations are maintenance windows, and why which are not."""
    return json_response(get_context(request).backend.read_reservations())


@people_router.post("/maintenance", response_model=Silence)
def add_maintenance(request: Request, wanted: NewMaintenance) -> Response:
    """Adds a maintenance window: findings are recorded, incidents silenced, and judged 15 minutes after its end."""
    return _change(request, "add", "maintenance", "", wanted.model_dump())


@people_router.get("/whoami", response_model=WhoAmI)
def whoami(request: Request) -> Response:
    """Name, role and rights of the caller."""
    user = cast(Caller, request.scope[USER])
    return json_response({"name": str(user), "role": user.role, "on_behalf_of": user.on_behalf_of})


def _with_titles(cursor: duckdb.DuckDBPyConnection, found: dict[str, Any]) -> dict[str, Any]:
    """Returns a handover whose titles name the affected job or GPUs."""
    muted = {**found["muted"], "incidents": add_affected(cursor, found["muted"]["incidents"])}
    titled = {name: add_affected(cursor, found[name]) for name in ("open", "changed")}
    return {**found, **titled, "muted": muted, "pending": add_affected(cursor, found["pending"], "about")}


@people_router.get("/handover", response_model=Handover, responses={200: {"content": {"text/plain": {}}}})
def handover(request: Request, since: Annotated[str | None, Query(description="ISO 8601; 8 h ago")] = None) -> Response:
    """Incidents that are open, silenced (`muted`) and pending, and changes since; as text for `Accept: text/plain`."""
    service = get_context(request)
    now = service.now()
    begun = _parse_times({"starts": since}, request)["starts"] if since else now - SHIFT
    with service.cursor() as cursor:
        found = _with_titles(cursor, read_handover(cursor, begun, now))
    if "text/plain" in request.headers.get("accept", ""):
        return PlainTextResponse(format_handover(found))
    return json_response(found)


@people_router.get("/audit", response_model=Audit)
def read_audit(
    request: Request,
    since: str | None = None,
    actor: str | None = None,
    target: str | None = None,
    limit: Annotated[int, Query(ge=1, le=audit.MOST_ROWS)] = 500,
    mark: str | None = None,
) -> Response:
    """Writes through the API and attempts that were refused, newest first; and whether a row was changed."""
    begun = _parse_times({"starts": since}, request)["starts"] if since else 0
    reads, check = get_context(request).reads, audit.ChainCheck()

    def read(cursor: duckdb.DuckDBPyConnection) -> dict[str, Any]:
        rows = audit.list_audit(cursor, begun, actor, target, limit)
        oldest, newest = audit_marks.read_marks(cursor)
        state = None if mark is None else audit_marks.check_mark(cursor, mark)
        return {"audit": rows, "oldest": oldest, "newest": newest, "mark": state}

    found = reads.run(read)
    while reads.run(check.check_part):
        pass
    return json_response({**found, "broken": check.broken})


@people_router.post("/audit/reloads", response_model=Reloaded)
def record_reload(request: Request, wanted: Reloaded) -> Response:
    """Records that the caller, such as the dashboard, read its configuration again."""
    user = cast(Caller, request.scope[USER])
    get_context(request).backend.record_act(user, ACTION, wanted.source, wanted.reason, wanted.outcome)
    return json_response(wanted.model_dump())
