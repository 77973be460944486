"""The keys of the incident list in a real Chromium: they move, open, filter and acknowledge, never while one types."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dashboards import test_dashboard_browser
from tests.dashboards.conftest import incident_table
from tests.dashboards.test_dashboard_browser import READY, open_page

pytestmark = pytest.mark.chromium
shared_browser = test_dashboard_browser.shared_browser
browser = test_dashboard_browser.browser
address = test_dashboard_browser.address
MARKED = "a.row.marked"


@pytest.fixture
def listed(address: str, browser: Any, api: Any) -> Any:
    """The list of A1 and D4, which are critical, and of C3, which is not, between them."""
    for name, severity in (("C3", "ticket"), ("D4", "page")):
        summary = f"{name} of rank 17 is slow"
        table = incident_table(name, severity=severity, summary=summary)
        api.incidents[name] = {**table, "findings": [], "history": [], "notifications": []}
    page, faults = open_page(browser, f"{address}/incidents?live=0")
    page.locator("a.row").nth(2).wait_for()
    yield page
    assert faults == []


def marked(page: Any) -> str:
    """Returns the address of the marked row."""
    return str(page.locator(MARKED).get_attribute("href"))


def press(page: Any, keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def test_j_and_k_move_a_mark_with_the_focus_and_n_goes_to_the_next_critical_row(listed: Any) -> None:
    press(listed, "jj")
    assert marked(listed).endswith("id=C3&live=0")
    press(listed, "k")
    assert marked(listed).endswith("id=A1&live=0")
    press(listed, "n")
    assert marked(listed).endswith("id=D4&live=0")
    press(listed, "n")
    assert marked(listed).endswith("id=A1&live=0")
    press(listed, "jjjj")
    assert marked(listed).endswith("id=D4&live=0")
    assert listed.locator("a.row:focus").get_attribute("href") == "incident?id=D4&live=0"


@pytest.mark.parametrize("key", ["o", "Enter"])
def test_o_and_enter_open_the_marked_incident(listed: Any, key: str) -> None:
    press(listed, "jj")
    listed.keyboard.press(key)
    listed.wait_for_url("**/incident?*id=C3*")


def test_a_acknowledges_the_marked_incident_and_the_mark_goes_on_to_the_next(listed: Any, api: Any) -> None:
    listed.get_by_role("link", name="Pending").click()
    listed.locator("nav a[aria-current]", has_text="Pending").wait_for()  # the address changes before the page does
    listed.locator(READY).wait_for()
    press(listed, "ja")
    listed.get_by_text("1 incident acknowledged: Rank 17").wait_for()
    assert api.posted == [("incidents/A1/acknowledge", {"comment": ""})]
    listed.locator(f"{MARKED}[href*=C3]").wait_for()
    press(listed, "o")
    listed.wait_for_url("**/incident?*id=C3*")


def test_m_shows_only_the_incidents_of_the_person_and_again_all(listed: Any) -> None:
    press(listed, "m")
    listed.wait_for_url("**assignee=local**")
    listed.get_by_text("person local").wait_for()
    listed.locator(READY).wait_for()
    press(listed, "m")
    listed.wait_for_url(lambda url: "assignee" not in url)


def test_keys_are_text_while_a_person_types_and_nothing_under_an_open_form(listed: Any, api: Any) -> None:
    listed.get_by_placeholder("Words in title").click()
    press(listed, "jka")
    assert listed.locator(MARKED).count() == 0
    assert listed.get_by_placeholder("Words in title").input_value() == "jka"
    listed.get_by_placeholder("Words in title").fill("")
    listed.get_by_role("button", name="Views").click()
    listed.locator("[data-testid=stPopoverBody]").get_by_text("bookmark this page").wait_for()
    listed.locator(READY).wait_for()  # Escape in the run that opens the form would be undone by its end
    press(listed, "ja")
    assert listed.locator(MARKED).count() == 0
    listed.keyboard.press("Escape")
    listed.locator("[data-testid=stPopoverBody]").wait_for(state="detached")
    listed.locator(READY).wait_for()
    press(listed, "Jj")
    assert marked(listed).endswith("id=C3&live=0")
    listed.keyboard.press("Control+a")
    assert api.posted == []


def test_the_box_of_a_row_does_not_stop_the_keys(listed: Any) -> None:
    listed.get_by_label("Select C3").check()
    listed.get_by_text("1 incident selected").wait_for()
    press(listed, "j")
    assert marked(listed).endswith("id=A1&live=0")


def test_a_key_for_a_row_that_is_gone_does_not_acknowledge_the_next_one(listed: Any, api: Any) -> None:
    listed.goto(listed.url.replace("live=0", "state=pending&live=0"))
    listed.locator("a.row").nth(2).wait_for()
    listed.locator(READY).wait_for()
    listed.evaluate("performance.now = () => 5000")
    press(listed, "jaa")
    listed.locator(f"{MARKED}[href*=C3]").wait_for()
    listed.locator(READY).wait_for()
    press(listed, "a")
    listed.evaluate("performance.now = () => 6001")
    press(listed, "a")
    listed.locator(f"{MARKED}[href*=D4]").wait_for()
    assert [path for path, _ in api.posted] == ["incidents/A1/acknowledge", "incidents/C3/acknowledge"]


def test_m_shows_all_again_when_no_incident_is_the_persons(listed: Any, api: Any) -> None:
    kept, api.incidents = api.incidents, {}
    listed.goto(listed.url + "&assignee=local")
    listed.locator(".fp-now", has_text="No incidents match these filters.").wait_for()
    listed.locator(".keys").get_by_text("mine, or all").wait_for()
    listed.locator(READY).wait_for()
    api.incidents = kept
    press(listed, "m")
    listed.wait_for_url(lambda url: "assignee" not in url)
    listed.locator("a.row").nth(2).wait_for()


def test_a_page_that_has_no_incidents_any_more_is_not_an_empty_list(listed: Any) -> None:
    listed.goto(listed.url + "&page=9")
    listed.locator("a.row").nth(2).wait_for()
    listed.wait_for_url(lambda url: "page=" not in url)
    assert listed.get_by_text("No incidents in this state").count() == 0


def test_an_acknowledgement_without_a_response_is_in_doubt(listed: Any, api: Any) -> None:
    api.broken["incidents/A1/acknowledge"] = (502, b"")
    press(listed, "ja")
    listed.get_by_text("1 of 1 not acknowledged, or it is not known: look before you repeat it.").wait_for()


def test_a_on_an_incident_does_nothing_behind_an_open_form(listed: Any, api: Any) -> None:
    listed.goto(listed.url.replace("/incidents?", "/incident?id=A1&"))
    row = listed.locator(".st-key-actions")
    row.get_by_role("button", name="Comment").click()
    listed.locator("[data-testid=stPopoverBody] textarea").first.wait_for()
    listed.locator(".st-key-acknowledge").get_by_text("A", exact=True).wait_for(state="detached")
    listed.locator(READY).wait_for()
    listed.keyboard.press("a")
    row.get_by_role("button", name="Comment").click()
    listed.locator("[data-testid=stPopoverBody]").wait_for(state="detached")
    listed.locator(".st-key-acknowledge").get_by_text("A", exact=True).wait_for()
    assert api.posted == []
    listed.keyboard.press("a")
    listed.get_by_text("Acknowledged.").wait_for()
