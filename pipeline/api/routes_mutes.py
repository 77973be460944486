"""Routes of who may speak: the detectors with their modes, and what is muted, by whom, why and until when."""

from __future__ import annotations

from typing import cast

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pipeline.api import models
from pipeline.api.guard import USER
from pipeline.api.service import get_context, json_response
from pipeline.incidents import ledger

router = APIRouter(prefix="/api/v1")


@router.get("/detectors", response_model=models.Detectors)
def detectors(request: Request) -> Response:
    """Who judges: needs, blind spots, settings, the arithmetic of false alarms, and the modes they are under."""
    backend = get_context(request).backend
    return json_response({"detectors": backend.list_detectors(), "modes": backend.list_modes()})


@router.get("/mutes", response_model=models.Mutes)
def every(request: Request) -> Response:
    """All mutes, those that are over too; newest first."""
    with get_context(request).cursor() as cursor:
        return json_response({"mutes": [mute.as_json() for mute in ledger.load_all_mutes(cursor)]})


@router.post("/mutes", response_model=models.Mute)
def mute(request: Request, wanted: models.NewMute) -> Response:
    """Silences one detector (* for all) on one scope (an entity and all below it, * for everywhere) for some time."""
    user = cast(str, request.scope[USER])
    said = (wanted.detector, wanted.scope, wanted.seconds, wanted.reason, user)
    return json_response(get_context(request).backend.add_mute(*said))


@router.post("/mutes/{mute}/end", response_model=models.Mute)
def end(request: Request, mute: str) -> Response:
    """Lets the detector speak again from now on."""
    try:
        return json_response(get_context(request).backend.end_mute(mute, cast(str, request.scope[USER])))
    except KeyError as error:
        raise HTTPException(404, f"mute {mute!r} is not known, or is over") from error
