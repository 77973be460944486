"""GET /api/v1/budget and its reset: pages and wrong pages of each detector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from pipeline.api.guard import USER
from pipeline.api.page_rates import count_pages
from pipeline.api.service import HOUR, ApiContext, get_context, json_response
from pipeline.api.strict_model import Strict

budget_router = APIRouter(prefix="/api/v1/budget")


class PageBudget(Strict):
    """The page budget of a detector.

    budget: wrong pages per 1,000 node-days.   allowed: of those in the window.   wrong_pages: counted in it.
    lowered: its pages are tickets now.   exempt: it reports logged facts, and is never lowered.   pages: its incidents
    with a page that opened in the window.
    """

    detector: str
    family: str
    budget: float
    allowed: float
    wrong_pages: int
    exempt: bool
    lowered: bool
    pages: int


class PageBudgets(Strict):
    """The page budgets of all detectors. days: the window.   node_days: in it; null until a day was watched."""

    budgets: list[PageBudget]
    days: float
    node_days: float | None


@budget_router.get("", response_model=PageBudgets)
def budget(request: Request) -> Response:
    """Page budgets: how many pages, and wrong ones, each detector had in the window, and which are lowered to
    tickets."""
    service = get_context(request)
    return _list_budgets(service, service.backend.list_budgets())


@budget_router.post("/{detector}/reset", response_model=PageBudgets)
def reset_budget(request: Request, detector: str) -> Response:
    """Forgets the wrong pages of a detector until now, so that it pages again."""
    service = get_context(request)
    return _list_budgets(service, service.backend.reset_budget(detector, cast(str, request.scope[USER])))


def _list_budgets(service: ApiContext, rows: Sequence[Mapping[str, Any]]) -> Response:
    """Returns page budgets with the pages of each detector, which are counted after each change of an incident, and
    once an hour."""
    now, days = service.now(), service.config.budget.days

    def count() -> tuple[dict[str, int], float | None]:
        with service.cursor() as cursor:
            return count_pages(cursor, now, days)

    state = service.backend.read_revision(), now // HOUR
    pages, node_days = service.remember("pages by detector", state, count)
    budgets = [{**row, "pages": pages.get(row["detector"], 0)} for row in rows]
    return json_response({"budgets": budgets, "days": days, "node_days": node_days})
