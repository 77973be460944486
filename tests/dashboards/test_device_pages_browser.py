"""Node, link and Explore in a real Chromium: charts draw, follow one crosshair, zoom into the address, fit a phone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from pipeline.model.records import SECOND, iso
from tests.dashboards.conftest import NOW, incident_table, running_api
from tests.dashboards.device_tables import serve_node
from tests.dashboards.test_dashboard_browser import (
    READY,
    browser,  # noqa: F401 - a fixture
    open_page,
    running_dashboard,
    shared_browser,  # noqa: F401 - a fixture
)

pytestmark = pytest.mark.chromium
NODE = "/node?entity=node:n003&live=0"
LINK = "/link?entity=port:n003.mlx5_0&live=0"
EXPLORE = "/explore?entity=node:n003&signal=gpu.temperature&signal=gpu.power&live=0"
PAGES = (
    (NODE, "a.cell canvas"),
    (LINK, ".panel canvas"),
    (EXPLORE, ".panel canvas"),
    ("/explore?view=sql", "textarea"),
)


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """Address of a dashboard over one node with eight GPUs and a port."""
    with running_api() as api:
        serve_node(api)
        with running_dashboard(api.url) as url:
            yield url


@pytest.mark.walk
def test_each_page_draws_its_charts(served: str, browser: Any) -> None:  # noqa: F811
    for path, part in PAGES:
        page, faults = open_page(browser, served + path)
        page.locator(part).first.wait_for()
        assert page.locator("[data-testid=stException]").count() == 0
        assert faults == []
        page.context.close()


def painted(page: Any, selector: str) -> int:
    """Returns how many pixels of the first canvas are not transparent."""
    script = """(c) => { const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
                         let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n; }"""
    return int(page.locator(selector).first.evaluate(script))


def test_charts_show_values_under_one_crosshair(served: str, browser: Any) -> None:  # noqa: F811
    page, faults = open_page(browser, served + EXPLORE)
    canvas = page.locator(".panel canvas")
    canvas.first.wait_for()
    assert canvas.count() == 2
    assert painted(page, ".panel canvas") > 1000
    box = canvas.first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 60)
    page.locator(".marks b").wait_for()
    assert re.fullmatch(r"\d+ [A-Z][a-z]{2} \d\d:\d\d:\d\dZ", page.locator(".marks b").inner_text())
    assert page.locator(".keys button").filter(has_text="GPU 3 of n003 63 °C").count() == 1
    page.mouse.move(box["x"] + box["width"] * 0.42, box["y"] + 60)  # in the gap
    page.locator(".keys button").filter(has_text="GPU 3 of n003 no data").first.wait_for()
    assert faults == []


def test_a_legend_hides_its_line(served: str, browser: Any) -> None:  # noqa: F811
    page, _ = open_page(browser, served + EXPLORE)
    key = page.locator(".keys button").filter(has_text="GPU 3 of n003").first
    key.click()
    page.locator(".keys button.off").first.wait_for()


def test_a_drag_zooms_and_the_address_has_the_range(served: str, browser: Any) -> None:  # noqa: F811
    page, _ = open_page(browser, served + EXPLORE)
    canvas = page.locator(".panel canvas").first
    canvas.wait_for()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60, steps=4)
    page.mouse.up()
    page.wait_for_url(re.compile(r"from=.*to="))
    asked = parse_qs(urlsplit(page.url).query)
    assert "range" not in asked
    assert asked["signal"] == ["gpu.temperature", "gpu.power"]
    again, faults = open_page(browser, page.url)  # a link reproduces the view
    again.locator(".panel canvas").first.wait_for()
    assert faults == []


def at(page: Any, chart: Any, share: float) -> None:
    """Moves the mouse over a chart, at a share of its width."""
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] * share, box["y"] + 60, steps=4)


PAST = f"&from={iso(NOW - 7200 * SECOND)}&to={iso(NOW)}"
"""Two hours that contain the onsets of the incidents of these tests."""


def test_a_link_at_a_crosshair_that_was_kept_is_clicked(served: str, browser: Any) -> None:  # noqa: F811
    page, faults = open_page(browser, served + EXPLORE + PAST)
    charts = page.locator(".panel canvas")
    charts.first.wait_for()
    at(page, charts.nth(1), 0.97)
    page.mouse.down()
    page.mouse.up()
    at(page, charts.first, 0.3)  # on the way to the line the mouse crosses another chart
    link = page.locator(".marks a").first
    link.scroll_into_view_if_needed()  # the second chart may have been below the screen
    place = link.bounding_box()
    page.mouse.move(place["x"] + 5, place["y"] + 5, steps=8)
    page.mouse.down()
    page.mouse.up()
    page.wait_for_url("**/incident?*")
    assert faults == []


def test_a_crosshair_that_was_kept_is_let_go(served: str, browser: Any) -> None:  # noqa: F811
    page, _ = open_page(browser, served + EXPLORE + PAST)
    chart = page.locator(".panel canvas").first
    chart.wait_for()
    time = page.locator(".marks b")
    at(page, chart, 0.5)
    page.mouse.down()
    page.mouse.up()
    kept = time.inner_text()
    at(page, chart, 0.7)
    assert time.inner_text() == kept
    page.mouse.down()
    page.mouse.up()
    page.mouse.move(2, 2)
    time.wait_for(state="detached")


def test_a_refresh_during_a_drag_does_not_end_it(browser: Any) -> None:  # noqa: F811
    with running_api() as api:
        serve_node(api)
        with running_dashboard(api.url) as url:
            page, faults = open_page(browser, url + LINK.replace("live=0", "range=6h"))
            chart = page.locator(".panel canvas").first
            chart.wait_for()
            at(page, chart, 0.4)
            page.mouse.down()
            at(page, chart, 0.6)
            box = chart.bounding_box()
            before = api.tables["entity"]

            def changed(query: dict[str, list[str]]) -> Any:
                table = before(query)
                return {**table, "incidents": [{**incident_table("A7", summary="Port: new"), "relation": "cause"}]}

            api.tables["entity"] = changed
            page.get_by_text("Port: new").first.wait_for()
            page.emulate_media(color_scheme="dark")
            page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60, steps=4)
            page.mouse.up()
            page.wait_for_url(re.compile(r"from=.*to="))
            assert faults == []


def test_a_small_chart_opens_the_signal_in_explore(served: str, browser: Any) -> None:  # noqa: F811
    page, _ = open_page(browser, served + NODE)
    page.locator("a.cell").nth(3).click()
    page.wait_for_url("**/explore?*")
    asked = parse_qs(urlsplit(page.url).query)
    assert (asked["entity"], asked["signal"]) == (["gpu:n003.3"], ["gpu.temperature"])
    page.locator(".panel canvas").first.wait_for()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", [path for path, _ in PAGES])
def test_pages_fit_a_phone(served: str, browser: Any, path: str, scheme: str) -> None:  # noqa: F811
    context = browser.new_context(color_scheme=scheme, viewport={"width": 390, "height": 844}, locale="en-GB")
    page = context.new_page()
    page.goto(served + path)
    page.locator(READY).wait_for(timeout=60_000)
    assert page.locator("[data-testid=stException]").count() == 0
    assert page.evaluate("document.querySelector('[data-testid=stMain]').scrollWidth") <= 390


@pytest.mark.slow
@pytest.mark.parametrize(("node", "gpus"), [("node:n1", 0), ("node:n1", 1)])
def test_a_node_without_gpus_or_with_one_is_drawn(browser: Any, node: str, gpus: int) -> None:  # noqa: F811
    with running_api() as api:
        serve_node(api, node, gpus)
        with running_dashboard(api.url) as url:
            page, faults = open_page(browser, f"{url}/node?entity={node}&live=0")
            page.get_by_text("Past incidents").wait_for()
            assert page.locator("[data-testid=stException]").count() == 0
            assert page.locator("h1 b").count() == 0
            assert faults == []
