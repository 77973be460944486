"""The layout of an incident's page in a real Chromium: the jobs that are hit stay within their column."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.model.job_effect import name_doubt
from pipeline.model.loss_owner import name_owner
from tests.dashboards.conftest import NOW
from tests.dashboards.test_dashboard_browser import SHORT_IMPACT, open_page
from tests.dashboards.test_dashboard_browser import address as address  # a fixture
from tests.dashboards.test_dashboard_browser import browser as browser  # a fixture
from tests.dashboards.test_dashboard_browser import shared_browser as shared_browser  # a fixture

pytestmark = pytest.mark.chromium
PACE = "step time 7.01 s, was 6.41 s before the onset"
MEASURE = """table => ({
  width: table.scrollWidth,
  right: table.getBoundingClientRect().right,
  column: table.closest("[data-testid=stColumn]").getBoundingClientRect().right,
  room: table.parentElement.clientWidth,
  jobs: [...table.querySelectorAll("td:first-child a")].map(link => {
    const range = document.createRange();
    const text = document.createTreeWalker(link, NodeFilter.SHOW_TEXT).nextNode();
    range.setStart(text, 0);
    range.setEnd(text, text.data.replace(/ pretrain.*/, "").length);
    return new Set([...range.getClientRects()].map(box => Math.round(box.bottom))).size;
  }),
  lines: [...table.querySelectorAll("td:last-child")].map(cell => {
    const range = document.createRange();
    range.selectNodeContents(document.createTreeWalker(cell, NodeFilter.SHOW_TEXT).nextNode());
    return new Set([...range.getClientRects()].map(box => Math.round(box.bottom))).size;
  }),
})"""
"""Widths of a table and its column, and in how many lines the id of each job and each figure is."""


def hit(job: str, slowdown: float, basis: str, lost: float) -> dict[str, Any]:
    """A slow job of an incident as in the API."""
    fields = {"job": job, "name": "pretrain-70b", "gpus": 64, "ranks": 64, "state": "slow", "slowdown": slowdown}
    return {**fields, "basis": basis, "lost_gpu_hours": lost, "lost_gpu_hours_per_hour": 5.3}


def test_the_jobs_that_an_incident_hits_stay_in_their_column_with_each_figure_in_one_line(
    address: str, browser: Any, api: Any
) -> None:
    jobs = [hit("job:81", 0.09, name_doubt(PACE, NOW), 12.4), hit("job:sim-82", 3.58, name_owner(PACE, "A2"), 1.88)]
    api.incidents["A1"]["impact"] = SHORT_IMPACT | {"jobs": jobs, "job_count": 2}
    page, faults = open_page(browser, f"{address}/incident?id=A1&live=0")
    table = page.locator("table", has_text="results in doubt")
    for width in (1280, 1440, 1920, 390):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function("width => innerWidth === width", arg=width)
        found = table.evaluate(MEASURE)
        assert found["width"] <= found["room"], (width, found)
        assert found["right"] <= found["column"], (width, found)
        assert found["lines"] == [1, 1], (width, found)
        assert found["jobs"] == [1, 1], (width, found)
    assert "results in doubt since 2026-01-01 12:00:00Z; 9 % slower" in table.inner_text()
    assert faults == []
