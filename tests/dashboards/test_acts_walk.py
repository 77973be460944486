"""The way of an act in a real Chromium, on a whole site with a real Slurm: from the alert to the node back in service.

Alert link, login, evidence, plan of a hold, approval by a second person, verified, diagnostic, release, verified. What
a person does is counted, and priced as in `benchmarks.page_tasks`; what machines take is counted apart.
FLEETPULSE_TEST_WALKS: how often it is walked; each time by two people who were never here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from playwright.sync_api import Locator, Page

from benchmarks.page_tasks import KEY_S, POINT_S, THINK_S
from tests.dashboards import test_dashboard_browser
from tests.dashboards.acts_site import FAULTY, ActsSite, running_acts_site
from tests.dashboards.test_dashboard_browser import READY
from tests.until import until

pytestmark = [pytest.mark.chromium, pytest.mark.oidc, pytest.mark.slurm, pytest.mark.slow]
browser, shared_browser = test_dashboard_browser.browser, test_dashboard_browser.shared_browser
WALKS = int(os.environ.get("FLEETPULSE_TEST_WALKS", "1"))
WAIT_MS = 90_000
READ_S = 4.0
"""To read a title with its evidence, or a plan with its commands and failing guards (s). Chosen: 15 words."""
LONGEST_S = 60.0
"""Limit of what the people take together (s). Source: the goal of the dashboard."""


@dataclass
class Person:
    """One person with a browser of their own. busy: seconds of the person; waited: seconds of the machines."""

    page: Page
    busy: float = 0.0
    waited: float = 0.0
    clicks: int = 0
    keys: int = 0

    def click(self, what: Locator) -> None:
        """Decides, points and clicks, once the page offers it."""
        self.wait(what)
        what.first.click()
        self.clicks, self.busy = self.clicks + 1, self.busy + THINK_S + POINT_S

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self.page.keyboard.type(text)
        self.keys, self.busy = self.keys + len(text), self.busy + KEY_S * len(text)

    def press(self, key: str) -> None:
        """Presses one key."""
        self.page.keyboard.press(key)
        self.keys, self.busy = self.keys + 1, self.busy + KEY_S

    def read(self, what: Locator) -> None:
        """Waits for a text, and reads it."""
        self.wait(what)
        self.busy += READ_S

    def wait(self, what: Locator) -> None:
        """Waits until something is shown on a page at rest."""
        began = time.monotonic()
        what.first.wait_for(timeout=WAIT_MS)
        self.page.locator(READY).or_(self.page.locator("form")).first.wait_for(timeout=WAIT_MS)
        self.waited += time.monotonic() - began

    def button(self, name: str) -> Locator:
        """A button of the page, by its text."""
        return self.page.get_by_role("button", name=name, exact=True)

    def log_in(self, name: str) -> None:
        """Logs in at the provider, by keyboard in its form, and consents."""
        self.click(self.button("Log in"))
        field = self.page.locator("input[name=login]")
        self.wait(field)
        field.focus()  # as the provider's page does where scripts run
        self.busy += THINK_S
        self.type(name)
        self.press("Tab")
        self.type("any")
        self.press("Enter")
        self.click(self.button("Continue"))

    def approve(self) -> None:
        """Reads the plan that is shown, and approves it."""
        self.read(self.page.get_by_text("Guards").first)
        self.click(self.button("Approve this plan"))

    def see_state(self, state: str) -> None:
        """Waits until the page of the act has a state."""
        self.wait(self.page.locator(".fp-badge", has_text=state))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ActsSite]:
    with running_acts_site(tmp_path_factory.mktemp("acts")) as made:
        yield made


def arrive(browser: Any, address: str) -> Person:
    """A person who opens an address in a browser that was never here."""
    page = browser.new_context(viewport={"width": 1440, "height": 900}, locale="en-GB").new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(address)
    return Person(page)


@pytest.mark.parametrize("walk", range(WALKS))
def test_an_alert_leads_to_a_hold_that_another_approves_and_to_the_release(
    site: ActsSite, browser: Any, walk: int
) -> None:
    over = site.at / f"over-{walk}"
    job = site.slurm.batch(f"until [ -e {over} ]; do sleep 0.2; done", "-w", FAULTY, "--gres=gpu:4")
    until(lambda: site.slurm.run("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING", 60)
    began = time.monotonic()
    alice = arrive(browser, site.link)
    alice.log_in("alice")
    alice.read(alice.page.get_by_text("wrong results").first)
    alice.click(alice.button("Plan an act"))
    alice.click(alice.page.get_by_label("Reason", exact=True))
    alice.type("bad GPU")
    alice.press("Tab")
    alice.click(alice.button("Plan it"))
    alice.wait(alice.page.get_by_text("Two people must stand behind it"))
    hold = alice.page.url
    bob = arrive(browser, hold)
    bob.log_in("bob")
    bob.approve()
    alice.see_state("VERIFIED")
    assert site.is_out()
    over.touch()  # the job ends; a hold waits for it
    until(lambda: site.slurm.run("squeue", "-h", "-j", job).strip() == "", 120)
    alice.click(alice.button("Plan a diagnostic of level 3"))
    alice.approve()
    alice.see_state("VERIFIED")
    alice.click(alice.button("Plan the release"))
    alice.approve()
    alice.see_state("VERIFIED")
    assert not site.is_out()
    busy, clicks, keys = alice.busy + bob.busy, alice.clicks + bob.clicks, alice.keys + bob.keys
    took, waited = time.monotonic() - began, alice.waited + bob.waited
    print(  # noqa: T201 - the figures that docs/figures.md states
        f"walk {walk}: people {busy:.1f} s ({clicks} clicks, {keys} keys), machines {waited:.1f} s, whole {took:.1f} s"
    )
    assert busy < LONGEST_S
