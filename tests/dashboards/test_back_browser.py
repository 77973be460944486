"""Back in a real Chromium: after whatever was opened from it, a page has the filters, grouping and range it had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.dashboards.conftest import running_api
from tests.dashboards.device_tables import serve_node
from tests.dashboards.jobs_tables import answers, job_detail, strip_table
from tests.dashboards.test_dashboard_browser import READY, open_page, running_dashboard
from tests.dashboards.test_dashboard_browser import browser as browser  # a fixture
from tests.dashboards.test_dashboard_browser import shared_browser as shared_browser  # a fixture

pytestmark = pytest.mark.chromium
LIST = "/incidents?state=open&q=rank&sort=newest&live=0"
MAP = "/?by=leaf&colour=temperature&live=0"
JOB = "/jobs?entity=job:81&range=6h&live=0"
EXPLORE = "/explore?entity=node:n003&signal=gpu.temperature&range=30d&live=0"
CANVAS = "canvas[role=application]"
STRIP = ".strip > canvas"


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[str, Any]]:
    """Address of a dashboard over a fleet, jobs and devices, and its API."""
    with running_api() as api, running_dashboard(api.url) as url:
        serve_node(api)
        api.answers |= answers()
        yield url, api


def click_row(page: Any) -> None:
    page.locator("a.row").first.click()


def press_o(page: Any) -> None:
    page.locator("a.row").first.wait_for()
    page.keyboard.press("j")
    page.keyboard.press("o")


def click_cell(page: Any) -> None:
    page.locator(".map[data-painted]").wait_for()
    page.locator(CANVAS).focus()
    page.keyboard.press("Home")
    page.keyboard.press("Enter")


def click_strip(page: Any) -> None:
    page.locator(STRIP).click(position={"x": 600, "y": 10})


def search(page: Any) -> None:
    page.locator(".q").fill("rank")
    page.locator(".hit", has_text="Rank 17 is slow").click()


@pytest.mark.parametrize(
    ("path", "act", "opened"),
    [
        (LIST, click_row, "/incident?*id=A1*"),
        (LIST, press_o, "/incident?*id=A1*"),
        (MAP, click_row, "/incident?*id=A1*"),
        (MAP, click_cell, "/node?*entity=*"),
        (JOB, click_strip, "/node?*gpu*"),
        (JOB, search, "/incident?*id=A1*"),
    ],
    ids=["row", "key O", "row beside the map", "cell of the map", "cell of the strip", "search"],
)
def test_back_leads_to_the_page_as_it_was_in_one_step(
    site: tuple[str, Any], browser: Any, path: str, act: Callable[[Any], None], opened: str
) -> None:
    page, faults = open_page(browser, site[0] + path)
    page.evaluate("window.sameSession = true")
    before, steps = page.url, page.evaluate("history.length")
    act(page)
    page.wait_for_url("**" + opened)
    assert "live=0" in page.url
    page.locator(READY).wait_for()
    assert page.evaluate("history.length") == steps + 1
    assert page.locator("[data-testid=stException]").count() == 0
    page.go_back()
    page.wait_for_url(before)
    page.locator(STRIP if path == JOB else CANVAS if path == MAP else "a.row").first.wait_for()
    page.locator(READY).wait_for()
    assert page.url == before
    assert page.evaluate("window.sameSession")
    assert faults == []


def test_back_from_what_a_button_opened_leads_to_the_page_of_the_button(site: tuple[str, Any], browser: Any) -> None:
    page, faults = open_page(browser, f"{site[0]}/incident?id=gone&live=0")
    before, steps = page.url, page.evaluate("history.length")
    for _ in range(2):
        page.get_by_role("button", name="Show all incidents").click()
        page.wait_for_url("**/incidents?live=0")
        page.locator("a.row").first.wait_for()
        page.locator(READY).wait_for()
        assert page.evaluate("history.length") == steps + 1
        page.go_back()
        page.wait_for_url(before)
        page.locator(READY).wait_for()
    assert faults == []


def test_a_session_that_does_not_answer_loads_the_page(site: tuple[str, Any], browser: Any) -> None:
    page, _ = open_page(browser, site[0] + LIST)
    page.evaluate("window.sameSession = true; window.dispatchEvent = () => true")  # Streamlit does not notice
    page.locator("a.row").first.click()
    page.wait_for_function("!window.sameSession")
    page.get_by_text("The whole job waits").first.wait_for()


def test_back_from_some_ranks_of_the_strip_leads_to_all(site: tuple[str, Any], browser: Any) -> None:
    url, api = site
    api.answers |= {"rank-strip": strip_table(16_384), "jobs/job:81": job_detail(ranks=16_384)}
    before = url + JOB.replace("6h", "24h")  # the answers of the other range are kept for a while
    page, _ = open_page(browser, before)
    page.locator(STRIP).click(position={"x": 600, "y": 10})
    page.wait_for_url("**ranks=32*")
    page.locator(READY).wait_for()
    page.go_back()
    page.wait_for_url(before)
    page.locator(STRIP).wait_for()
    api.answers |= answers()


def test_back_from_a_zoom_leads_to_the_range_before_not_to_a_mix(site: tuple[str, Any], browser: Any) -> None:
    page, _ = open_page(browser, site[0] + EXPLORE)
    before = page.url
    page.get_by_role("button", name="zoom_in").first.click()
    page.wait_for_url("**from=*")
    page.locator(READY).wait_for()
    assert "range" not in page.url
    zoomed = page.url
    page.get_by_role("radio", name="7 d").click()
    page.wait_for_url("**range=7d*")
    page.locator(READY).wait_for()
    assert "from=" not in page.url
    assert "to=" not in page.url
    page.go_back()
    page.wait_for_url(zoomed)
    page.locator(READY).wait_for()
    page.go_back()
    page.wait_for_url(before)
