"""Error answers: RFC 9457 problems (`application/problem+json`) with type, title, status and detail."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from pipeline.http.client import OVER_LIMIT, REFUSED, WRONG_QUERY
from pipeline.model.errors import InvalidQuery, NotAllowed, Outdated, OverLimit, Refused, Retryable, UsageError

PROBLEM_TYPES: Mapping[type[Exception], str] = {InvalidQuery: WRONG_QUERY, OverLimit: OVER_LIMIT, Refused: REFUSED}
"""Class of an error -> `type` of the problem; subclasses first."""


class ProblemResponse(JSONResponse):
    """An answer with one problem."""

    media_type = "application/problem+json"


def make_problem(
    status: int, detail: str, headers: Mapping[str, str] | None = None, kind: str = "about:blank"
) -> ProblemResponse:
    """Returns the answer to a rejected or failed request. detail: text for people, without internals."""
    body = {"type": kind, "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
    return ProblemResponse(body, status, headers)


def install_handlers(app: FastAPI) -> None:
    """Turns the errors that routes raise into problems. The guard handles all others."""

    @app.exception_handler(HTTPException)
    def _http(request: Request, error: Exception) -> ProblemResponse:
        assert isinstance(error, HTTPException)
        detail = error.detail
        if error.status_code == 404 and detail == "Not Found":
            detail = f"{request.url.path}: no such route; see /openapi.json"
        if error.status_code == 405:
            detail = f"{request.method} {request.url.path}: this route does not allow {request.method}"
        return make_problem(error.status_code, detail, error.headers)

    @app.exception_handler(RequestValidationError)
    def _invalid(request: Request, error: Exception) -> ProblemResponse:
        assert isinstance(error, RequestValidationError)
        return make_problem(400, "; ".join(_sentence(e) for e in error.errors()))

    @app.exception_handler(Outdated)
    def _outdated(request: Request, error: Exception) -> ProblemResponse:
        return make_problem(412, str(error))

    @app.exception_handler(NotAllowed)
    def _not_allowed(request: Request, error: Exception) -> ProblemResponse:
        return make_problem(403, str(error), kind=REFUSED)

    @app.exception_handler(UsageError)
    @app.exception_handler(Refused)
    def _refused(request: Request, error: Exception) -> ProblemResponse:
        kind = next((name for cls, name in PROBLEM_TYPES.items() if isinstance(error, cls)), "about:blank")
        return make_problem(400, str(error), kind=kind)

    @app.exception_handler(Retryable)
    def _later(request: Request, error: Exception) -> ProblemResponse:
        assert isinstance(error, Retryable)
        return make_problem(503, str(error), {"Retry-After": str(max(1, round(error.after_s)))})


def _sentence(error: Mapping[str, Any]) -> str:
    """Returns `body.query: Field required`."""
    return f"{'.'.join(str(part) for part in error['loc'])}: {error['msg']}"
