"""Time ranges of charts: those up to now contain now."""

from __future__ import annotations

from typing import Any

import pytest

from dashboards.devices import ranges, requests
from dashboards.time_chart.component import Look, chart_data
from pipeline.api.history import Span
from pipeline.model.records import SECOND
from tests.dashboards.device_tables import empty_caches, serve_node

LATE = 1_767_268_799 * SECOND  # 2026-01-01T11:59:59Z: nearly a whole step of each chart after the last one


@pytest.fixture(autouse=True)
def _empty_caches() -> None:
    empty_caches()


@pytest.mark.parametrize("points", [300, 500])
@pytest.mark.parametrize("name", list(ranges.RANGES))
def test_a_range_up_to_now_contains_now_in_its_last_point(name: str, points: int) -> None:
    start, end = requests.recent_span(ranges.RANGES[name], LATE, points)
    assert end - start == ranges.RANGES[name]
    width = Span(start, end, points).width
    assert start <= LATE < end <= LATE + max(width, requests.MIN_STEP)
    assert requests.recent_span(ranges.RANGES[name], end - 1, points) == (start, end), "viewers share one response"


def test_a_chart_ends_when_its_values_were_read(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_node(api)
    monkeypatch.setattr("dashboards.snapshot.now", lambda: LATE)
    start, end = requests.recent_span(ranges.RANGES["30d"], LATE)
    found = requests.fetch_comparison(["node:n003"], ["gpu.temperature"], start, end).value
    assert found is not None
    assert (found.start, found.end) == (start, LATE)
    [panel] = chart_data(found, (), Look())["panels"]
    assert panel["end"] == LATE // 1000 < end // 1000
    past = requests.fetch_comparison(["node:n003"], ["gpu.temperature"], start, end - 86_400 * SECOND).value
    assert past is not None
    assert past.end == end - 86_400 * SECOND
