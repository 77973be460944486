"""Acts on machines: what people ask for, approve and cancel, and what the executor asks and reports.

The API carries out nothing: it has no credentials of any scheduler. `/api/v1/executor/` is for the executor's token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, cast

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pipeline.acts.act import MAX_REASON, Act, Verb, When, encode_act, parse_plan
from pipeline.acts.board import Board
from pipeline.acts.executor import MAX_WAITS
from pipeline.acts.remote import encode_facts
from pipeline.api.guard import USER
from pipeline.api.models import COMMENT_CHARACTERS, Strict, Text
from pipeline.api.people_routes import answer_versioned, read_version
from pipeline.api.service import get_context, json_response
from pipeline.model.errors import UsageError
from pipeline.model.records import Caller

T = TypeVar("T")
Word = Annotated[str, Field(max_length=253)]
act_router = APIRouter(prefix="/api/v1")


class NewAct(Strict):
    """An act to propose. targets: nodes. key: an idempotency key: the same key returns the same act."""

    verb: Verb
    targets: list[Word] = Field(min_length=1, max_length=64)
    reason: Text = Field(min_length=1, max_length=COMMENT_CHARACTERS)
    incident: Word = ""
    params: dict[Word, Word] = Field(default_factory=dict, max_length=8)
    when: When = "now"
    key: Word = ""


class PlanApproval(Strict):
    """An approval. plan: `plan.hash` of the act as it was shown. typed: the node's name, for verbs without an undo."""

    plan: Word
    comment: Text = Field("", max_length=COMMENT_CHARACTERS)
    break_glass: bool = False
    typed: Word = ""


class Because(Strict):
    """A body with a reason."""

    comment: Text = Field("", max_length=COMMENT_CHARACTERS)


class Name(Strict):
    """The executor's name."""

    executor: Word


class Claim(Name):
    """A question for work. instance: of the executor's process.   waits: what acts wait for, by act."""

    instance: Word = ""
    waits: dict[Word, Annotated[str, Field(max_length=MAX_REASON)]] = Field(default_factory=dict, max_length=MAX_WAITS)


class PlanReport(Strict):
    """A plan, in the form of `Plan`."""

    plan: dict[str, Any]


class Beginning(Name):
    """failing: guards that do not pass now.   instance: of the executor's process.   again: it began the act before."""

    failing: list[Word] = Field(max_length=64)
    instance: Word = ""
    again: bool = False


class Report(Name):
    """What the executor did or saw."""

    state: Literal["executed", "verifying", "verified", "failed", "rolled_back", "refused"]
    result: dict[str, Any]
    comment: Text = Field("", max_length=COMMENT_CHARACTERS)


class Undone(Name):
    """A hold that a person undid at the scheduler."""

    target: Word
    seen: str = Field(max_length=COMMENT_CHARACTERS)


@act_router.get("/acts")
def list_acts(request: Request, open: Annotated[bool, Query()] = False, incident: str | None = None) -> Response:
    """Acts, newest first; with `open=true` those that are not over, also holds in force; and the breaker."""
    board = _board(request)
    acts = [board.show(act) for act in board.list_acts(open, incident)]
    return json_response({"acts": acts, "breaker": board.read_breaker() or None, "modes": board.list_modes()})


@act_router.post("/acts")
def propose(request: Request, wanted: NewAct) -> Response:
    """Proposes an act, which the executor plans: it changes nothing before a person approves the plan."""
    who = _caller(request)
    board = _board(request)
    made = board.propose(
        wanted.verb,
        wanted.targets,
        who,
        wanted.reason,
        wanted.incident,
        wanted.params,
        wanted.when,
        wanted.key,
        who.is_person,
    )
    return answer_versioned(board.describe(made.id))


@act_router.post("/acts/breaker/close")
def close_breaker(request: Request, why: Because) -> Response:
    """Lets policies act again; only a person may, with a reason."""
    _board(request).close_breaker(_caller(request), _caller(request).is_person, why.comment)
    return json_response({"breaker": None})


@act_router.get("/acts/{act}")
def describe(request: Request, act: str) -> Response:
    """One act with plan, guards, approvals and history."""
    return answer_versioned(_known(act, lambda: _board(request).describe(act)))


@act_router.post("/acts/{act}/approve")
def approve(request: Request, act: str, given: PlanApproval) -> Response:
    """Approves the plan that was shown. Refused (403) for tokens, for the requester of what needs two people, for an
    expired act, and for a plan that has changed."""
    who = _caller(request)
    said = (given.comment, given.break_glass, given.typed)
    return _change(request, act, lambda board: board.approve(act, who, given.plan, who.is_person, *said))


@act_router.post("/acts/{act}/cancel")
def cancel(request: Request, act: str, why: Because) -> Response:
    """Cancels an act that has not begun."""
    return _change(request, act, lambda board: board.cancel(act, _caller(request), why.comment))


# --- the executor -------------------------------------------------------------------------------------


@act_router.post("/executor/claim", include_in_schema=False)
def claim(request: Request, who: Claim) -> Response:
    """What the executor has to do now."""
    work = _board(request).claim(who.executor, who.instance, who.waits)
    rows = [{"job": w.job, "act": encode_act(w.act), "facts": encode_facts(w.facts)} for w in work]
    return json_response({"work": rows})


@act_router.post("/executor/acts/{act}/facts", include_in_schema=False)
def facts(request: Request, act: str, who: Name) -> Response:
    """The facts of an act as they are now."""
    del who
    return json_response({"facts": encode_facts(_known(act, lambda: _board(request).collect_facts(act)))})


@act_router.post("/executor/acts/{act}/plan", include_in_schema=False)
def plan(request: Request, act: str, made: PlanReport) -> Response:
    """Records the plan of an act."""
    try:
        parsed = parse_plan(made.plan)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"plan: {error!r}: expected what this version of fleetpulse sends") from error
    return _answer(_known(act, lambda: _board(request).plan(act, parsed, _caller(request))))


@act_router.post("/executor/acts/{act}/begin", include_in_schema=False)
def begin(request: Request, act: str, now: Beginning) -> Response:
    """Records the intent before the first command, or refuses."""
    who, board = _executor(request, now), _board(request)
    return _answer(_known(act, lambda: board.begin(act, now.failing, who, now.instance, now.again)))


@act_router.post("/executor/acts/{act}/report", include_in_schema=False)
def report(request: Request, act: str, said: Report) -> Response:
    """Records what the executor did or saw."""
    board, who = _board(request), _executor(request, said)
    return _answer(_known(act, lambda: board.report(act, said.state, who, said.result, said.comment)))


@act_router.post("/executor/acts/{act}/undone", include_in_schema=False)
def undone(request: Request, act: str, said: Undone) -> Response:
    """Records that a person undid a hold at the scheduler."""
    board, who = _board(request), _executor(request, said)
    return _answer(_known(act, lambda: board.report_undone(act, said.target, said.seen, who)))


def _answer(act: Act) -> Response:
    return json_response({"act": encode_act(act)})


def _board(request: Request) -> Board:
    return get_context(request).backend.acts


def _caller(request: Request) -> Caller:
    return cast(Caller, request.scope[USER])


def _executor(request: Request, given: Name) -> Caller:
    """Returns the executor by its own name, for the audit with the role and address of its token, and whose it is."""
    token = _caller(request)
    origin = token.origin if given.executor == token else f"{token.origin}, token of {token}"
    return Caller(given.executor, token.role, origin, is_executor=True)


def _change(request: Request, act: str, do: Callable[[Board], Act]) -> Response:
    """Does what a person asked for to an act, if it has the version of `If-Match`, and returns it."""
    board, version = _board(request), read_version(request)

    def change() -> None:
        with board.hold_version(act, version):
            do(board)

    _known(act, change)
    return answer_versioned(board.describe(act))


def _known(act: str, do: Callable[[], T]) -> T:
    try:
        return do()
    except KeyError as error:
        raise HTTPException(404, f"act {act!r} is not known") from error
