"""The navigation in a real Chromium: its links keep local time and how pages refresh, as all other links do."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.dashboards.test_dashboard_browser import READY, open_page
from tests.dashboards.test_dashboard_browser import browser as browser  # a fixture
from tests.dashboards.test_dashboard_browser import shared_address as shared_address  # a fixture
from tests.dashboards.test_dashboard_browser import shared_browser as shared_browser  # a fixture

pytestmark = pytest.mark.chromium
FROM = "/incidents?live=0&tz=local&q=rank"
MENU = "[data-testid=stTopNavPopover]"


def click_beside(page: Any) -> None:
    """Clicks a page named in the header."""
    page.locator("[data-testid=stTopNavLink]").get_by_text("Handover").click()


def click_in_menu(page: Any) -> None:
    """Clicks the page in the menu of those that have no room in the header."""
    page.locator("[data-testid=stTopNavSection]").click()
    page.locator(MENU).get_by_text("Handover").click()


def click_on_phone(page: Any) -> None:
    """Clicks the page in the menu of a phone."""
    page.locator("[data-testid=stExpandSidebarButton]").click()
    page.locator("[data-testid=stSidebarNav]").get_by_text("Handover").click()


@pytest.mark.parametrize(
    ("width", "click"),
    [(1920, click_beside), (920, click_in_menu), (390, click_on_phone)],
    ids=["beside", "menu", "phone"],
)
def test_a_page_of_the_navigation_opens_in_local_time_and_paused(
    shared_address: str, browser: Any, width: int, click: Any
) -> None:
    page, faults = open_page(browser, shared_address + FROM)
    page.set_viewport_size({"width": width, "height": 900})
    page.locator(".q").wait_for(state="attached")  # the links are those of the frame
    page.evaluate("window.sameSession = true")
    before, steps = page.url, page.evaluate("history.length")
    click(page)
    page.wait_for_url("**/handover?live=0&tz=local")
    page.get_by_text("Paused · ").wait_for()
    expect(page.locator(".stamp")).to_have_text(re.compile(r"\(\d+ d \d+ h ago\)"))  # it is drawn again with the page
    page.locator(READY).wait_for()
    expect(page.get_by_text("Nothing changed.")).to_be_visible()
    expect(page.locator(MENU)).to_have_count(0)
    expect(page.locator("[data-testid=stSidebar][data-collapsed=false]")).to_have_count(0)
    assert page.locator(".zone").inner_text() == "Local"
    assert page.evaluate("history.length") == steps + 1
    page.go_back()
    page.wait_for_url(before)
    page.locator("a.row").first.wait_for()
    assert page.evaluate("window.sameSession")
    assert faults == []


def test_a_page_of_the_navigation_opens_in_a_new_tab_in_local_time_and_paused(
    shared_address: str, browser: Any
) -> None:
    page, _ = open_page(browser, shared_address + FROM)
    page.locator(".q").wait_for()  # the links are those of the frame
    link = page.locator("[data-testid=stTopNavLink]").first
    for button, keys in (("left", ["Control"]), ("middle", [])):
        with page.context.expect_page() as opened:
            link.click(button=button, modifiers=keys)
        opened.value.wait_for_url("**/?live=0&tz=local")
        opened.value.close()
    assert page.url == shared_address + FROM


def test_a_page_that_shows_one_subject_shows_all_after_a_click_on_its_own_entry(
    shared_address: str, browser: Any
) -> None:
    page, faults = open_page(browser, f"{shared_address}/jobs?id=job:81&live=0&tz=local")
    page.locator(".q").wait_for()  # the links are those of the frame
    page.evaluate("window.sameSession = true")
    page.locator("[data-testid=stTopNavLink]").get_by_text("Jobs").click()
    page.wait_for_url("**/jobs?live=0&tz=local")
    page.locator(".fp-now").get_by_text("4 running jobs").wait_for()
    assert page.evaluate("window.sameSession")
    assert faults == []


def test_a_tab_is_named_after_what_its_page_is_about(shared_address: str, browser: Any) -> None:
    page, faults = open_page(browser, shared_address + FROM)
    expect(page).to_have_title("Incidents - Fleetpulse")
    page.locator("a.row").first.click()
    expect(page).to_have_title("Incident A1 - Fleetpulse")
    page.goto(f"{shared_address}/node?entity=gpu:n003.1&live=0")
    expect(page).to_have_title("GPU 1 of n003 - Fleetpulse")
    assert faults == []


def test_all_pages_stand_in_the_header_of_a_laptop_with_room_for_name_and_role(
    shared_address: str, browser: Any
) -> None:
    page, _ = open_page(browser, shared_address + FROM)
    page.set_viewport_size({"width": 1440, "height": 900})
    links = page.locator("[data-testid=stTopNavLink]")
    links.get_by_text("Audit").wait_for()
    expect(page.locator("[data-testid=stTopNavSection]")).to_have_count(0)
    room = page.locator("[data-testid=stTopNav]").evaluate("nav => nav.parentElement.clientWidth")
    used = sum(link.bounding_box()["width"] for link in links.all())
    name = 36 * 7 + 16  # "Alexandra Konstantinopoulou (admin)" at the font's mean width
    assert used + name < min(room, 1440 - 335)
