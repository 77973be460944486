"""The rank strip, and the way to cooling, silent agents and a slow job, in a real Chromium."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from tests.dashboards.conftest import running_api
from tests.dashboards.facility_tables import facility_table
from tests.dashboards.jobs_tables import answers, job_detail, strip_table
from tests.dashboards.quality_tables import quality_table, receivers_table
from tests.dashboards.test_dashboard_browser import FLAGS, READY, running_dashboard

pytestmark = [pytest.mark.chromium, pytest.mark.slow]
SIZES = {"desk": {"width": 1440, "height": 900}, "phone": {"width": 390, "height": 844}}
STRIP = ".strip > canvas"


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[str, Any]]:
    """Address of a dashboard over all three pages' answers, and its API."""
    with running_api() as api, running_dashboard(api.url) as url:
        api.answers = {"quality": quality_table(), "receivers": receivers_table(), "facility": facility_table()}
        api.answers |= answers()
        yield url, api


@pytest.fixture(scope="module")
def chrome(chromium: str) -> Iterator[Any]:
    """One Chromium for all tests of this file."""
    with sync_playwright() as play:
        running = play.chromium.launch(executable_path=chromium, args=FLAGS)
        yield running
        running.close()


def opened(chrome: Any, url: str, size: str = "desk", **context: Any) -> Any:
    """A loaded page; errors of its scripts fail the test at the end of the step."""
    page = chrome.new_context(viewport=SIZES[size], locale="en-GB", **context).new_page()
    page.goto(url)
    page.locator(READY).wait_for(timeout=60_000)
    return page


@pytest.mark.parametrize("size", ["desk", "phone"])
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Facility", "GPUs behind CDU c2 throttle in about 9 min"),
        ("Data quality", "18 agents silent, all in rack r12"),
        ("Jobs", "4 running jobs, 1 hanging, 1 slow"),
    ],
)
def test_each_page_is_one_choice_in_the_navigation(site: Any, chrome: Any, size: str, name: str, found: str) -> None:
    page = opened(chrome, f"{site[0]}/?live=0", size)
    if size == "phone":
        page.locator("[data-testid=stExpandSidebarButton], [data-testid=stBaseButton-headerNoPadding]").first.click()
    page.get_by_role("link", name=name, exact=True).first.click()
    page.get_by_text(found).first.wait_for(timeout=20_000)
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size]["width"]


def test_a_slow_job_opens_from_the_list_and_its_late_rank_from_the_strip(site: Any, chrome: Any) -> None:
    page = opened(chrome, f"{site[0]}/jobs?live=0")
    page.get_by_role("link", name="job 81", exact=False).first.click()
    page.get_by_text("31 % slower than usual, rank 17 is late").first.wait_for()
    canvas = page.locator(STRIP)
    canvas.wait_for()
    canvas.focus()
    page.keyboard.press("n")
    said = page.locator(".strip .said")
    assert said.inner_text().startswith("rank 17, ")
    assert "+31 % against its stage" in said.inner_text()
    page.keyboard.press("Enter")
    page.wait_for_url("**/node?*gpu*n002.1*")


def test_n_follows_the_table_of_late_ranks_and_passes_over_noise(site: Any, chrome: Any) -> None:
    url, api = site
    table = strip_table()
    levels = bytearray(base64.b64decode(table["levels"]))
    levels[3 * 180 + 150] = 96  # +9 % in one cell of rank 3
    levels[40 * 180 : 41 * 180] = bytes([176]) * 180
    second = {**table["slow"][0], "rank": "rank:81.40", "row": 40, "gpu": "gpu:n005.0"}
    late = {"levels": base64.b64encode(levels).decode(), "slow": [*table["slow"], second]}
    api.answers["rank-strip"] = table | late
    page = opened(chrome, f"{url}/jobs?entity=job:81&range=1h&first=0&ranks=64&live=0")
    page.get_by_role("link", name="rank 40 of job 81").first.wait_for()
    page.locator(STRIP).focus()
    said = []
    for _ in range(3):
        page.keyboard.press("n")
        said.append(page.locator(".strip .said").inner_text().partition(",")[0])
    assert said == ["rank 17", "rank 40", "rank 17"]
    api.answers |= answers()


def test_a_click_on_many_ranks_shows_them(site: Any, chrome: Any) -> None:
    url, api = site
    api.answers |= {"rank-strip": strip_table(16_384), "jobs/job:81": job_detail(ranks=16_384)}
    page = opened(chrome, f"{url}/jobs?entity=job:81&range=6h&live=0")
    page.locator(STRIP).click(position={"x": 600, "y": 10})
    page.wait_for_url("**first=*")
    assert "ranks=32" in page.url
    api.answers |= answers()


def test_the_strip_of_16384_ranks_is_drawn_again_within_150_ms(site: Any, chrome: Any) -> None:
    url, api = site
    api.answers |= {"rank-strip": strip_table(16_384)}
    page = opened(chrome, f"{url}/jobs?entity=job:81&range=24h&live=0")
    page.locator(STRIP).wait_for()
    spent = page.evaluate(
        """async () => {
            const canvas = [...document.querySelectorAll('*')].map((e) => e.shadowRoot || e)
              .map((r) => r.querySelector && r.querySelector('.strip > canvas')).find(Boolean);
            canvas.focus();
            const begun = performance.now();
            const key = new KeyboardEvent('keydown', {key: 'ArrowDown', bubbles: true});
            for (let i = 0; i < 10; i++) canvas.dispatchEvent(key);
            return (performance.now() - begun) / 10;
        }"""
    )
    assert spent < 150  # ms a drawing
    api.answers |= answers()


@pytest.mark.parametrize(
    "path", ["/jobs?entity=job:81", "/facility", "/facility?entity=cdu:c2", "/data", "/data?group=x"]
)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_phone_and_have_no_errors(site: Any, chrome: Any, path: str, scheme: str) -> None:
    page = opened(chrome, f"{site[0]}{path}{'&' if '?' in path else '?'}live=0", "phone", color_scheme=scheme)
    assert page.locator("[data-testid=stException]").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
