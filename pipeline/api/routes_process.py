"""Routes about the process: does it serve, does it work, what does it count, which version is it."""

from __future__ import annotations

import importlib.metadata

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.api import metrics, models
from pipeline.api.service import answer, service_of
from pipeline.store.schema import SCHEMA_VERSION

router = APIRouter()


@router.get("/healthz", response_model=models.Health)
async def healthz() -> Response:
    """200 while the process serves. Needs no token."""
    return answer({"status": "ok"})


@router.get("/readyz", response_model=models.Readiness, responses={503: {"model": models.Readiness}})
def readyz(request: Request) -> Response:
    """200 while the pipeline does its work, else 503 with the reasons."""
    reasons = service_of(request).backend.unready()
    return JSONResponse({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


@router.get("/metrics", response_class=Response)
def prometheus(request: Request) -> Response:
    """Counters of the pipeline in the Prometheus text format."""
    return Response(metrics.render(service_of(request).backend.counters()), media_type=metrics.MEDIA_TYPE)


@router.get("/api/v1/version", response_model=models.Version)
def version(request: Request) -> Response:
    """Version of the program and of the store's schema."""
    site = service_of(request).config.site.name
    return answer({"version": program_version(), "schema_version": SCHEMA_VERSION, "site": site})


def program_version() -> str:
    """The installed version; `0+source` for a tree that was never installed."""
    try:
        return importlib.metadata.version("fleetpulse")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"
