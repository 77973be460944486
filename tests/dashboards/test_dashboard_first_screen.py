"""The incident page in a real Chromium: its first screen at a desk and on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from pipeline.model.records import iso
from tests.dashboards.conftest import NOW, Api
from tests.dashboards.test_dashboard_browser import FLAGS, READY, SCRIPT, running_dashboard

pytestmark = [pytest.mark.chromium, pytest.mark.slow]
SIZES = {"desk": (1440, 900), "phone": (390, 844)}
ALERT = "/incident?id=A1"
LOGGED_IN = f"""
from dashboards import identity
identity.current = lambda: identity.Person("ann@example.org", "operator")
{SCRIPT}"""
"""A dashboard whose viewers are logged in; the login itself is tried in test_dashboard_login.py."""

LEFT_EDGE = "document.querySelector('[data-testid=stSidebar]')?.getBoundingClientRect().left"


@pytest.fixture
def address(api: Any) -> Iterator[str]:
    """Address of a dashboard in its own process."""
    with running_dashboard(api.url, LOGGED_IN) as url:
        yield url


@pytest.fixture
def open_at(chromium: str) -> Iterator[Any]:
    """Opens an address in a window of a size: open_at(url, "phone")."""
    with sync_playwright() as play:
        running = play.chromium.launch(executable_path=chromium, args=FLAGS)

        def visit(url: str, size: str = "desk", scheme: str = "light") -> Any:
            width, height = SIZES[size]
            page = running.new_context(viewport={"width": width, "height": height}, color_scheme=scheme).new_page()
            page.set_default_timeout(60_000)
            page.goto(url)
            page.locator(READY).wait_for()
            return page

        yield visit
        running.close()


def prepare(api: Api) -> None:
    """Gives the incident an action, labels and a first version."""
    api.incidents["A1"] |= {
        "version": 1,
        "advice": "Check the fans of node:n003.",
        "runbook_url": "https://wiki.example/fans",
        "history": [{"number": 1, "time": iso(NOW), "kind": "opened", "actor": "fleetpulse", "comment": ""}],
        "labels": {"scope": ["gpu:n003.1", "node:n003", "rack:r1"], "detector": ["straggler"], "incident": ["A1"]},
    }


@pytest.mark.parametrize("size", list(SIZES))
def test_the_first_screen_says_what_why_whom_and_what_to_do(address: str, open_at: Any, api: Any, size: str) -> None:
    prepare(api)
    page = open_at(f"{address}{ALERT}&live=0", size)
    page.locator("[data-testid=stVegaLiteChart]").wait_for()
    names = ("Acknowledge", "Assign", "Comment", "Silence", "Resolve", "Feedback", "More")
    parts = [page.get_by_role("button", name=name).first for name in names]
    parts += [page.locator("h1.fp-title"), page.get_by_role("heading", name="Impact")]
    parts += [page.get_by_role("heading", name="Recommended action"), page.get_by_text("Runbook")]
    for part in parts:
        place = part.bounding_box()
        assert place is not None
        assert place["y"] + place["height"] <= SIZES[size][1], part
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]


def test_a_phone_opens_closes_and_follows_the_menu(address: str, open_at: Any) -> None:
    page = open_at(f"{address}/acts?live=0", "phone")
    page.get_by_test_id("stExpandSidebarButton").click()
    menu = page.get_by_test_id("stSidebar")
    link = menu.get_by_role("link", name="Handover", exact=True)
    # not "visible": a closed menu is left of the window
    page.wait_for_function(f"{LEFT_EDGE} === 0")
    menu.get_by_test_id("stSidebarCollapseButton").get_by_role("button").click(timeout=5_000)
    page.wait_for_function(f"{LEFT_EDGE} < 0")
    page.get_by_test_id("stExpandSidebarButton").click()
    link.click()
    page.wait_for_url("**/handover*")
    page.get_by_role("searchbox").or_(page.get_by_role("combobox")).first.click(timeout=5_000)
