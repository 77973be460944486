"""A click that waits for the API shows that it waits, in a real Chromium, and no longer than that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.dashboards import test_dashboard_browser
from tests.dashboards.test_dashboard_browser import READY, open_page

pytestmark = [pytest.mark.chromium, pytest.mark.slow]
address, browser, shared_browser = (
    test_dashboard_browser.address,
    test_dashboard_browser.browser,
    test_dashboard_browser.shared_browser,
)
LINE, BUTTON = ".fp-wait", ".st-key-acknowledge button"


@pytest.fixture
def incident(address: str, browser: Any) -> Iterator[Any]:
    """The page of an incident."""
    page, faults = open_page(browser, f"{address}/incident?id=A1&live=0")
    page.locator(BUTTON).wait_for(timeout=10_000)
    page.locator(READY).wait_for()
    yield page
    assert faults == []


def test_a_write_shows_after_a_second_that_it_waits_and_then_its_result(incident: Any, api: Any) -> None:
    api.released.clear()
    incident.locator(BUTTON).click()
    incident.locator(LINE, has_text="Acknowledge: waiting for the API, 1 s").wait_for(timeout=2000)
    api.released.set()
    incident.get_by_text("Acknowledged.").wait_for()
    incident.locator(LINE).wait_for(state="hidden")
    assert api.posted == [("incidents/A1/acknowledge", {"comment": ""})]


def test_a_write_of_a_form_shows_it_over_the_form(incident: Any, api: Any) -> None:
    incident.get_by_role("button", name="Comment", exact=True).click()
    form = incident.get_by_test_id("stPopoverBody")
    form.get_by_role("textbox").fill("fan replaced")
    form.get_by_role("textbox").blur()
    incident.locator(READY).wait_for()
    incident.locator(LINE).wait_for(state="hidden")
    api.released.clear()
    form.get_by_role("button", name="Add comment").click()
    line = incident.locator(LINE, has_text="Add comment: waiting for the API")
    line.wait_for(timeout=2000)
    box = line.bounding_box()
    assert box
    above = "([x, y]) => { const line = document.querySelector('.fp-wait'); line.style.pointerEvents = 'auto';"
    above += " return document.elementFromPoint(x, y).closest('.fp-wait') === line }"
    assert incident.evaluate(above, [box["x"] + box["width"] / 2, box["y"] + box["height"] / 2])
    api.released.set()
    incident.locator(LINE).wait_for(state="hidden")


def test_a_key_that_writes_shows_it(incident: Any, api: Any) -> None:
    api.released.clear()
    incident.keyboard.press("a")
    incident.locator(LINE, has_text="Waiting for the API").wait_for(timeout=2000)
    api.released.set()
    incident.get_by_text("Acknowledged.").wait_for()


def test_the_text_of_a_wait_hides_what_it_lies_over(incident: Any, address: str, api: Any) -> None:
    api.released.clear()
    incident.goto(f"{address}/incident?id=B2&live=0", wait_until="commit")
    spinner = incident.get_by_test_id("stSpinner").first
    spinner.wait_for(timeout=10_000)
    style = spinner.evaluate("e => [getComputedStyle(e).backgroundImage, getComputedStyle(e).backgroundColor]")
    api.released.set()
    assert style == ["none", "rgb(255, 255, 255)"], "a gradient lets the breadcrumbs below through"
