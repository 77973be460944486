"""Time ranges of charts: those up to now contain now, and those of the past say so."""

from __future__ import annotations

from html import unescape
from typing import Any

import pytest

from dashboards.devices import ranges, requests
from dashboards.devices.ranges import TimeRange
from dashboards.time_chart.component import Look, chart_data
from pipeline.api.history import Span
from pipeline.model.records import SECOND, iso
from tests.dashboards.device_tables import empty_caches, serve_node
from tests.dashboards.test_dashboard_explore import explore_script
from tests.dashboards.test_dashboard_node import node_script
from tests.dashboards.test_dashboard_pages import page, shown

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


NOW = 1_767_268_800 * SECOND  # 2026-01-01T12:00:00Z
HOUR = 3600 * SECOND


@pytest.mark.parametrize(
    ("start", "end", "text"),
    [
        (-2, 0, "10:00:00Z to now, 12:00:00Z (2 h 00 min)"),
        (-2, 2, "10:00:00Z to now, 12:00:00Z (2 h 00 min)"),
        (-2, -1, "10:00:00Z to 11:00:00Z (1 h 00 min)"),
        (-26, -25, "2025-12-31 10:00:00Z to 2025-12-31 11:00:00Z (1 h 00 min)"),
        (-14, -11, "2025-12-31 22:00:00Z to 2026-01-01 01:00:00Z (3 h 00 min)"),
        (-24, 1, "2025-12-31 12:00:00Z to now, 2026-01-01 12:00:00Z (1 d 0 h)"),
    ],
)
def test_a_range_is_dated_unless_it_is_of_today(start: int, end: int, text: str) -> None:
    assert ranges.describe(TimeRange(NOW + start * HOUR, NOW + end * HOUR, ""), NOW) == text


@pytest.mark.parametrize("now", [LATE, NOW, NOW + 1])
@pytest.mark.parametrize(("name", "length"), [("1h", "1 h 00 min"), ("6h", "6 h 00 min"), ("30d", "30 d 0 h")])
def test_a_range_up_to_now_has_the_chosen_length(name: str, length: str, now: int) -> None:
    chosen = TimeRange(*requests.recent_span(ranges.RANGES[name], now), name)
    text = ranges.describe(chosen, now)
    assert text.endswith(f"({length})")
    first, _, last = text.partition(" to now, ")
    assert first.endswith(iso(now - ranges.RANGES[name])[11:19] + "Z")
    assert last.startswith((iso(now)[:10], iso(now)[11:19]))


@pytest.mark.parametrize("script", [explore_script, node_script])
def test_a_page_says_the_chosen_length(api: Any, script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_node(api)
    monkeypatch.setattr("dashboards.snapshot.now", lambda: LATE)
    assert "to now, 11:59:59Z (6 h 00 min)" in shown(page(script, **ASKED))


ASKED = {"entity": "node:n003", "signal": "gpu.power", "live": "0"}


@pytest.mark.parametrize("script", [explore_script, node_script])
def test_a_fixed_range_of_the_past_says_so_and_leads_back_to_now(
    api: Any, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_node(api)
    monkeypatch.setattr("dashboards.snapshot.now", lambda: NOW)
    test = page(script, **ASKED, **{"from": iso(NOW - 26 * HOUR), "to": iso(NOW - 25 * HOUR)})
    text = shown(test)
    assert "2025-12-31 10:00:00Z to 2025-12-31 11:00:00Z (1 h 00 min)" in text
    assert "<b>Past, not now.</b> The charts end at 2025-12-31 11:00:00Z, 1 d 1 h ago." in text
    test = next(button for button in test.button if button.label == "Show now").click().run()
    assert "Past, not now." not in shown(test)
    assert test.query_params["range"] == "6h"
    assert "from" not in test.query_params


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"from": iso(NOW), "to": iso(NOW - HOUR)}, "is not after from="),
        ({"from": "yesterday", "to": iso(NOW)}, "from='yesterday' in the address: expected a time such as"),
        ({"from": iso(NOW - HOUR)}, "to='' in the address: expected a time such as"),
        ({"from": iso(NOW - 1000), "to": iso(NOW)}, "expected 60 s to 366 days"),
        ({"from": iso(NOW + HOUR), "to": iso(NOW + 2 * HOUR)}, "is in the future"),
        ({"range": "<b>9y"}, "range='<b>9y' in the address: expected 1h, 6h, 24h, 7d, 30d."),
    ],
)
def test_a_wrong_range_in_the_address_is_an_error_that_is_shown(
    api: Any, monkeypatch: pytest.MonkeyPatch, asked: dict[str, str], said: str
) -> None:
    serve_node(api)
    monkeypatch.setattr("dashboards.snapshot.now", lambda: NOW)
    text = unescape(shown(page(explore_script, **ASKED, **asked)))
    assert said in text
    assert "Shown: the last 6 h." in text


def test_a_chart_of_another_day_has_dates(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_node(api)
    monkeypatch.setattr("dashboards.snapshot.now", lambda: NOW)
    for start, end, dated in ((-3, -1, False), (-27, -25, True), (-14, -10, True)):
        asked = requests.fetch_comparison(["node:n003"], ["gpu.power"], NOW + start * HOUR, NOW + end * HOUR)
        assert asked.value is not None
        data = chart_data(asked.value, (), Look())
        assert data["dated"] is dated
        assert "2026-01-01" in data["panels"][0]["label"] or "2025-12-31" in data["panels"][0]["label"]
