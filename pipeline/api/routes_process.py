"""Routes about the process: does it serve, does it work, what does it count, which version is it.

`/metrics`: the backend's counters in the Prometheus text format, version 0.0.4.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Mapping

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.api import models
from pipeline.api.service import get_context, json_response
from pipeline.store.schema import SCHEMA_VERSION

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render_metrics(counters: Mapping[str, float]) -> str:
    """One HELP and one TYPE line per family, then its samples. A family named `..._total` is a counter."""
    families: dict[str, list[tuple[str, float]]] = {}
    for name, value in counters.items():
        families.setdefault(name.partition("{")[0], []).append((name, value))
    lines: list[str] = []
    for family, samples in sorted(families.items()):
        kind = "counter" if family.endswith("_total") else "gauge"
        lines += [f"# HELP {family} {_help(family)}", f"# TYPE {family} {kind}"]
        lines += [f"{name} {_number(value)}" for name, value in samples]
    return "\n".join(lines) + "\n"


def _help(family: str) -> str:
    """The family's name in words: fleetpulse_rows_total -> 'Rows, since the start.'"""
    words = family.removeprefix("fleetpulse_").removesuffix("_total").replace("_", " ")
    since = ", since the start." if family.endswith("_total") else ", now."
    return words[:1].upper() + words[1:] + since


def _number(value: float) -> str:
    """Whole numbers without a point, the rest as Python writes them, the infinities as Prometheus wants them."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))


router = APIRouter()


@router.get("/healthz", response_model=models.Health)
async def healthz() -> Response:
    """200 while the process serves. Needs no token."""
    return json_response({"status": "ok"})


@router.get("/readyz", response_model=models.Readiness, responses={503: {"model": models.Readiness}})
def readyz(request: Request) -> Response:
    """200 while the pipeline does its work, else 503 with the reasons."""
    reasons = get_context(request).backend.list_unready_reasons()
    return JSONResponse({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


@router.get("/metrics", response_class=Response)
def prometheus(request: Request) -> Response:
    """Counters of the pipeline in the Prometheus text format."""
    return Response(render_metrics(get_context(request).backend.read_counters()), media_type=MEDIA_TYPE)


@router.get("/api/v1/version", response_model=models.Version)
def version(request: Request) -> Response:
    """Version of the program and of the store's schema."""
    site = get_context(request).config.site.name
    return json_response({"version": program_version(), "schema_version": SCHEMA_VERSION, "site": site})


def program_version() -> str:
    """The installed version; `0+source` for a tree that was never installed."""
    try:
        return importlib.metadata.version("fleetpulse")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"
