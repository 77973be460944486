"""The way of an alert in a real Chromium: its link, the login at a real provider, and every act up to feedback.

FLEETPULSE_TEST_WALKS: how often it is walked; each time by a person without a session.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

from pipeline.model.records import iso
from tests.dashboards import test_dashboard_browser
from tests.dashboards.conftest import NOW, incident_table
from tests.dashboards.login_site import Site, running_site
from tests.dashboards.test_dashboard_acts import act_table
from tests.dashboards.test_dashboard_browser import READY

pytestmark = [pytest.mark.chromium, pytest.mark.oidc, pytest.mark.slow]
browser, shared_browser = test_dashboard_browser.browser, test_dashboard_browser.shared_browser
WALKS = int(os.environ.get("FLEETPULSE_TEST_WALKS", "1"))
WAIT_MS = 60_000
STEPS = (
    ("Assign", "", "Assign to me", "Assigned to alice@example.org."),
    ("Silence", "Reason", "Silence", "Silenced until"),
    ("Resolve", "Comment", "Resolve incident", "Reopen undoes this."),
    ("Feedback", "", "Useful", "Feedback: Useful."),
)
"""(button that opens the form, field that is filled in, button of the form, what the page then says)."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A dashboard with a login, in front of the double of the API."""
    with running_site(tmp_path_factory.mktemp("walk")) as made:
        yield made


def log_in(page: Any) -> None:
    """Logs in as an operator, in the provider's own forms."""
    page.get_by_role("button", name="Log in").click()
    page.locator("input[name=login]").fill("alice")
    page.locator("input[name=password]").fill("any")
    page.locator("button[type=submit]").click()
    page.get_by_role("button", name="Continue").click()


@pytest.mark.parametrize("walk", range(WALKS))
def test_the_link_of_an_alert_leads_through_the_login_to_feedback(site: Site, browser: Any, walk: int) -> None:
    opened = {"number": 1, "time": iso(NOW), "kind": "opened", "actor": "fleetpulse", "comment": ""}
    labels = {"scope": ["gpu:n003.1", "rack:r1"], "detector": ["straggler"], "incident": ["A1"]}
    was = site.api.incidents["A1"]
    site.api.incidents["A1"] = {**was, **incident_table("A1"), "version": 1, "history": [opened], "labels": labels}
    site.api.posted.clear()
    page = browser.new_context(viewport={"width": 1440, "height": 900}, locale="en-GB").new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(f"{site.url}/incident?id=A1")
    log_in(page)
    page.wait_for_url("**/incident?id=A1")
    page.locator("[data-testid=stVegaLiteChart]").wait_for()
    page.locator(READY).wait_for()
    page.locator(".st-key-actions").get_by_role("button", name="Acknowledge").click()
    said(page, "Acknowledged.")
    for opener, field, act, result in STEPS:
        walk_step(page, opener, field, act, f"walk {walk}")
        said(page, result)
    done = [path for path, _ in site.api.posted if path != "silences/preview"]
    acts = [f"incidents/A1/{act}" for act in ("acknowledge", "assign", "resolve", "feedback")]
    assert done == [*acts[:2], "silences", *acts[2:]]
    assert {sent["Fleetpulse-User"] for sent in site.api.posted_headers if "Fleetpulse-User" in sent} == {
        "alice@example.org"
    }


def walk_step(page: Any, opener: str, field: str, act: str, text: str) -> None:
    """Opens one form, fills it in and sends it."""
    row = page.locator(".st-key-actions")
    row.get_by_role("button", name=opener).first.click()
    form = page.locator("[data-testid=stPopoverBody]")
    if field:
        form.get_by_label(field, exact=True).fill(text)
    form.get_by_role("button", name=act, exact=True).click()


def said(page: Any, text: str) -> None:
    """Waits until the page says that an act is done, its form is closed, and the page is at rest."""
    page.get_by_text(text).first.wait_for()
    expect(page.locator("[data-testid=stPopoverBody]")).to_have_count(0, timeout=WAIT_MS)
    page.locator(READY).wait_for()


def propose(page: Any) -> None:
    """Fills in the form of an act, which is open, and sends it."""
    page.get_by_label("Nodes, one a line").fill("n042")
    page.get_by_label("Reason", exact=True).fill("corrupts data")
    page.get_by_label("Reason", exact=True).press("Tab")
    page.get_by_role("button", name="Plan it").click()


def open_with_an_act(site: Site, browser: Any, address: str) -> Any:
    """Returns a page after the login; an act is proposed."""
    act = act_table(state="proposed", plan=None)
    site.api.answers["acts"] = {"acts": [act], "breaker": None, "modes": {"hold": "on"}}
    site.api.answers["acts/ACT-1"] = act
    page = browser.new_context(viewport={"width": 1440, "height": 900}, locale="en-GB").new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(f"{site.url}/{address}")
    log_in(page)
    return page


def test_a_proposal_says_so_on_the_page_of_the_act_until_the_person_leaves_it(site: Site, browser: Any) -> None:
    page = open_with_an_act(site, browser, "acts")
    page.get_by_role("button", name="Propose an act").click()
    propose(page)
    said = page.get_by_text("ACT-1: Proposed.")
    expect(said).to_be_visible()
    assert "/acts?id=ACT-1" in page.url
    page.get_by_role("link", name="All acts").click()
    expect(page.get_by_text("No holds in force.")).to_be_visible()
    expect(said).to_have_count(0)
    page.go_back()
    expect(page.get_by_text("Not planned yet.")).to_be_visible()
    expect(said).to_have_count(0)


def test_a_proposal_from_an_incident_says_so_on_the_page_of_the_act(site: Site, browser: Any) -> None:
    page = open_with_an_act(site, browser, "incident?id=A1")
    page.get_by_role("button", name="Plan an act").click()
    propose(page)
    page.wait_for_url("**/acts?id=ACT-1*")
    expect(page.get_by_text("Not planned yet.")).to_be_visible()
    page.locator(READY).wait_for()
    expect(page.get_by_text("ACT-1: Proposed.")).to_be_visible()
