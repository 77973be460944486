"""Links to parts of a page in a real Chromium: they scroll there within the session, and so does Back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.dashboards.conftest import running_api
from tests.dashboards.facility_tables import facility_table
from tests.dashboards.jobs_tables import answers
from tests.dashboards.quality_tables import quality_table, receivers_table
from tests.dashboards.test_dashboard_browser import READY, open_page, running_dashboard
from tests.dashboards.test_dashboard_browser import browser as browser  # a fixture
from tests.dashboards.test_dashboard_browser import shared_browser as shared_browser  # a fixture

pytestmark = pytest.mark.chromium
GIVE_UP_AT_ONCE = """
window.sameSession = true;
const wait = window.setTimeout;
window.setTimeout = (act, ms, ...rest) => wait(act, ms === 5000 ? 0 : ms, ...rest);
"""
"""Shortens GIVE_UP_MS of frame.js: a session that the frame waits for has no time to answer."""
SHOWS = """name => {
  const top = document.getElementById(name).getBoundingClientRect().top;
  const main = document.querySelector("[data-testid=stMain]");
  const atEnd = main.scrollTop + main.clientHeight > main.scrollHeight - 2;
  return Math.abs(top - 80) < 2 || (atEnd && top > 80 && top < innerHeight);
}"""
"""Whether a part begins below the header (scroll-margin-top: 5rem), or as far up as the end of the page lets it."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Address of a dashboard over sources, jobs and a facility."""
    with running_api() as api, running_dashboard(api.url) as url:
        api.answers |= {"quality": quality_table(), "receivers": receivers_table(), "facility": facility_table()}
        api.answers |= answers()
        yield url


@pytest.mark.parametrize("path", ["/data?live=0", "/jobs?entity=job:81&live=0", "/facility?live=0"])
def test_a_tile_scrolls_to_its_part_and_back_keeps_what_was_typed(address: str, browser: Any, path: str) -> None:
    page, faults = open_page(browser, address + path)
    page.set_viewport_size({"width": 1440, "height": 420})
    page.locator("a.fp-tile").first.wait_for()
    page.locator("input.q").fill("typed")
    page.evaluate(GIVE_UP_AT_ONCE)
    hashes = page.locator("a.fp-tile").evaluate_all("all => [...new Set(all.map(a => a.getAttribute('href')))]")
    assert len(hashes) > 2
    for part in hashes:
        page.locator(f"a.fp-tile[href='{part}']").first.click()
        page.wait_for_url(address + path + part)
        page.wait_for_function(SHOWS, arg=part[1:])
    for part in [*hashes[-2::-1], ""]:
        page.go_back()
        page.wait_for_url(address + path + part)
        page.locator(READY).wait_for()
    assert page.evaluate("window.sameSession")
    assert page.locator("input.q").input_value() == "typed"
    assert faults == []
