"""Routes of receivers: their state, messages to them, dead messages sent again, and PagerDuty's webhook to us."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pipeline.api.guard import REFUSED, USER
from pipeline.api.service import get_context, json_response
from pipeline.incidents import ledger

MessageState = Literal["pending", "held", "grouped", "delivered", "dead", "muted"]
MAX_REPLAYED = 1000
"""Most messages that one request names. Chosen: more are replayed by receiver."""


class ReceiverState(BaseModel):
    """One endpoint. state: ok, failing (refuses, or limits its rate, since `since`), down (probed), or unknown: nothing
    was sent yet.

    silences: incidents that are silenced there, with the person and the end.
    """

    name: str
    receiver: str
    kind: str
    state: Literal["ok", "failing", "down", "unknown"]
    since: str | None
    answer: str
    delivered: str | None
    pending: int
    held: int
    dead: int
    silences: int


class ReceiverStates(BaseModel):
    """All endpoints."""

    receivers: list[ReceiverState]


class MessageRow(BaseModel):
    """One message. part_of: the message of a group that says this too.  remote: who silenced it at the receiver."""

    id: str
    incident: str
    receiver: str
    kind: Literal["firing", "resolved", "update"]
    state: MessageState
    attempts: int
    answer: str
    created: str
    next_attempt: str
    part_of: str | None = None
    remote: str | None = None


class MessageRows(BaseModel):
    """Messages, newest first. replayed: how many are sent again."""

    notifications: list[MessageRow]
    replayed: int = 0


class Replay(BaseModel):
    """Which dead messages are sent again: those with these ids, or all of a receiver."""

    model_config = ConfigDict(extra="forbid")

    ids: list[str] = Field(default_factory=list, max_length=MAX_REPLAYED)
    receiver: str | None = None


receiver_router = APIRouter(prefix="/api/v1")


@receiver_router.get("/receivers", response_model=ReceiverStates)
def receivers(request: Request) -> Response:
    """All receivers: whether they accept messages, their last answer, and how many messages wait."""
    return json_response({"receivers": get_context(request).backend.list_receivers()})


@receiver_router.get("/notifications", response_model=MessageRows)
def notifications(
    request: Request,
    state: MessageState | None = None,
    incident: str | None = None,
    receiver: str | None = None,
    limit: Annotated[int, Query(ge=1, le=5000)] = 500,
) -> Response:
    """Messages to receivers, newest first, without their bodies."""
    with get_context(request).cursor() as cursor:
        found = ledger.list_notifications(cursor, incident, limit, state, receiver)
    return json_response({"notifications": found})


@receiver_router.post("/notifications/replay", response_model=MessageRows)
def replay(request: Request, wanted: Replay) -> Response:
    """Sends dead messages again, or what was said since in their place; `replayed` counts the dead ones."""
    if bool(wanted.ids) == bool(wanted.receiver):
        raise HTTPException(400, "body: expected ids, or a receiver")
    user = cast(str, request.scope[USER])
    found = get_context(request).backend.replay_notifications(wanted.ids, wanted.receiver, user)
    return json_response({"notifications": found, "replayed": len(found)})


@receiver_router.post("/receivers/{name}/pagerduty")
async def pagerduty(request: Request, name: str) -> Response:
    """PagerDuty's webhook v3: an acknowledgement there is one here. Needs its signature, and no token."""
    body = await request.body()
    signature = request.headers.get("x-pagerduty-signature", "")
    backend, origin = get_context(request).backend, request.scope[USER].origin
    try:
        done: Any = await run_in_threadpool(backend.receive_pagerduty, name, signature, body, origin)
    except KeyError as error:
        raise HTTPException(404, f"receiver {name!r} takes no webhook of PagerDuty: no webhook_secret_file") from error
    except PermissionError as error:
        request.scope[REFUSED] = request.scope[USER], "the signature is not that of webhook_secret_file"
        raise HTTPException(401, "the signature is not that of webhook_secret_file") from error
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
    return json_response({"done": done})
