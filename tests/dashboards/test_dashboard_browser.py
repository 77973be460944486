"""The pages in a real Chromium: they load without errors, in light and dark, and clicks reach the API."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect, sync_playwright

from dashboards import snapshot
from dashboards.snapshot import INTERVAL_S
from pipeline.model.records import SECOND, iso
from tests.dashboards.conftest import running_api
from tests.dashboards.facility_tables import facility_table
from tests.dashboards.jobs_tables import answers as job_answers
from tests.dashboards.quality_tables import quality_table, receivers_table
from tests.dashboards.test_dashboard_serve import free_port, is_healthy

pytestmark = pytest.mark.chromium
ROOT = Path(__file__).parents[2]
READY = "[data-testid=stApp][data-test-script-state=notRunning][data-test-connection-state=CONNECTED]"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
SHORT_IMPACT = {
    "gpus": 8,
    "nodes": 1,
    "ranks": 8,
    "jobs": 1,
    "lost_gpu_hours": 12.4,
    "lost_gpu_hours_per_hour": 158.0,
    "cost": None,
}
SCRIPT = """
import sys
from pathlib import Path
from dashboards import serve
from pipeline.config.sections import Config, Dashboard
token_file = Path(sys.argv[3]) if sys.argv[3:] else None
sys.exit(serve.run(Config(dashboard=Dashboard(port=int(sys.argv[1]), api_url=sys.argv[2], token_file=token_file))))
"""


@pytest.fixture
def address(api: Any) -> Iterator[str]:
    """Address of a dashboard in its own process."""
    with running_dashboard(api.url) as url:
        yield url


@pytest.fixture(scope="module")
def shared_address() -> Iterator[str]:
    """Address of one dashboard for all tests that only read."""
    with running_api() as api, running_dashboard(api.url) as url:
        api.answers = {"quality": quality_table(), "receivers": receivers_table(), "facility": facility_table()}
        api.answers |= job_answers()
        yield url


@contextmanager
def running_dashboard(
    api_url: str, script: str = SCRIPT, token_file: Path | None = None, within_s: float = 60.0
) -> Iterator[str]:
    """A dashboard in its own process until the block ends; gives its address."""
    port = free_port()
    command = [sys.executable, "-c", script, str(port), api_url, *([str(token_file)] if token_file else [])]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + within_s
            while not is_healthy(port):
                assert process.poll() is None
                assert time.monotonic() < deadline, f"no dashboard within {within_s} s"
                time.sleep(0.05)  # polls a real process; it has no event for this
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)  # with thirty processes for each core, more than 10 s were seen


@pytest.fixture
def browser(shared_browser: Any) -> Iterator[Any]:
    """A running Chromium without open pages."""
    yield shared_browser
    for context in shared_browser.contexts:
        context.close()


@pytest.fixture(scope="module")
def shared_browser(chromium: str) -> Iterator[Any]:
    """One Chromium for all tests of this file."""
    with sync_playwright() as play:
        running = play.chromium.launch(executable_path=chromium, args=FLAGS)
        yield running
        running.close()


def open_page(browser: Any, url: str, scheme: str = "light") -> tuple[Any, list[str]]:
    """A loaded page, with its errors and its requests to other machines."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1440, "height": 900}, locale="en-GB")
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on(
        "request", lambda r: None if "127.0.0.1" in r.url or r.url[:5] in ("data:", "blob:") else faults.append(r.url)
    )
    page.goto(url)
    page.locator(READY).wait_for(timeout=60_000)
    return page, faults


@pytest.mark.walk
@pytest.mark.sample(every=2)  # of seven pages in two schemes: each page in one of them
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("/?live=0", "canvas"),
        ("/incidents?live=0", "a.row"),
        ("/incident?id=A1&live=0", "[data-testid=stVegaLiteChart]"),
        ("/detectors?live=0", ".fp-detector"),
        ("/data?live=0", ".fp-row-critical"),
        ("/facility?live=0", ".fp-linked"),
        ("/jobs?entity=job:81&live=0", ".strip canvas"),
    ],
)
def test_a_page_opens_from_its_address_without_errors(
    shared_address: str, browser: Any, scheme: str, path: str, part: str
) -> None:
    page, faults = open_page(browser, shared_address + path, scheme)
    page.locator(part).first.wait_for()
    assert page.locator("[data-testid=stException]").count() == 0
    assert faults == []


@pytest.mark.walk
def test_an_incident_opens_from_the_list_and_can_be_acknowledged(address: str, browser: Any, api: Any) -> None:
    page, _ = open_page(browser, f"{address}/incidents?live=0")
    page.locator("a.row").first.click()
    page.wait_for_url("**/incident?*id=A1*")
    page.get_by_role("button", name="Acknowledge").click()
    page.get_by_text("Acknowledged.").wait_for()
    assert api.posted == [("incidents/A1/acknowledge", {"comment": ""})]


def test_search_and_time_zone_cover_no_page_of_the_navigation(shared_address: str, browser: Any) -> None:
    page, _ = open_page(browser, f"{shared_address}/detectors?live=0")
    for width in (1440, 1100, 920):
        page.set_viewport_size({"width": width, "height": 900})
        frame = page.locator(".frame").bounding_box()
        page.wait_for_function(
            """left => [...document.querySelectorAll('[data-testid=stTopNav] .rc-overflow-item')].every(item => {
                 const box = item.getBoundingClientRect();
                 return !box.width || getComputedStyle(item).opacity === "0" || box.right <= left; })""",
            arg=frame["x"],
        )


def test_the_search_key_opens_an_incident_within_the_session(address: str, browser: Any) -> None:
    page, faults = open_page(browser, f"{address}/detectors?live=0")
    page.evaluate("window.sameSession = true")
    page.locator(".q").wait_for()  # the key is that of the frame
    page.keyboard.press("/")
    page.keyboard.type("rank")
    page.locator(".hit", has_text="Rank 17 is slow").wait_for()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**/incident?*id=A1*")
    page.get_by_text("The whole job waits").first.wait_for()
    assert "live=0" in page.url
    assert page.evaluate("window.sameSession")
    assert faults == []


def test_local_time_is_one_click_away(address: str, browser: Any) -> None:
    page, faults = open_page(browser, f"{address}/incident?id=A1&live=0")
    page.get_by_text("onset 2026-01-01 11:45:00Z").first.wait_for()
    page.locator("button.zone").click()
    page.wait_for_url("**tz=local**")
    page.get_by_text("onset 2026-01-01 11:45:00Z").first.wait_for(state="detached")
    assert "id=A1" in page.url
    assert faults == []


def test_the_list_shows_how_many_jobs_an_incident_reaches_also_on_a_phone(address: str, browser: Any, api: Any) -> None:
    api.incidents["A1"]["impact"] = SHORT_IMPACT | {"jobs": 2}
    page, faults = open_page(browser, f"{address}/incidents?live=0")
    page.locator(".head").get_by_text("Jobs", exact=True).wait_for()
    row = page.locator("a.row")
    assert row.locator(".num").get_by_text("2 jobs", exact=True).is_visible()
    assert not row.locator(".narrow").is_visible()
    page.set_viewport_size({"width": 390, "height": 844})
    row.locator(".narrow").get_by_text("2 jobs").wait_for()
    jobs, line = row.locator(".narrow").bounding_box(), row.locator(".below").bounding_box()
    assert jobs["x"] + jobs["width"] <= line["x"] + line["width"]  # the end of the line may be cut
    assert not row.locator(".num").get_by_text("2 jobs", exact=True).is_visible()
    assert faults == []


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (390, 844)], ids=["desk", "phone"])
def test_a_click_or_a_key_pauses_a_page_and_resumes_it(
    address: str, browser: Any, api: Any, width: int, height: int
) -> None:
    now = snapshot.now()
    api.fleet |= {"as_of": iso(now), "newest": iso(now), "watermark": iso(now)}
    page, faults = open_page(browser, f"{address}/incidents?state=open&sort=newest")
    page.set_viewport_size({"width": width, "height": height})
    page.locator(".stamp.fine").wait_for()
    rates = page.get_by_role("group", name="Refresh")
    rates.get_by_role("button", name="Paused").click()
    page.wait_for_url("**live=0**")
    page.locator(".stamp.paused").wait_for()
    assert "state=open&sort=newest" in page.url
    expect(page.locator(".stamp")).to_contain_text("Paused · Data as of ")
    page.locator(READY).wait_for()
    asked = len(api.asked)
    page.wait_for_timeout((INTERVAL_S + 1) * 1000)  # no request comes: there is no event to wait for
    assert len(api.asked) == asked
    expect(page.locator(".stamp")).to_contain_text("Paused")
    rates.get_by_role("button", name="5 s").focus()
    page.keyboard.press("Enter")
    page.wait_for_function("!location.search.includes('live=')")
    page.locator(".stamp:not(.paused)").wait_for()
    page.wait_for_function("!document.querySelector('.stamp')?.textContent.includes('Paused')")
    assert "state=open&sort=newest" in page.url
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert faults == []


@pytest.mark.slow
def test_a_page_that_is_paused_for_long_says_for_when_it_knew(address: str, browser: Any, api: Any) -> None:
    api.incidents.clear()
    page, _ = open_page(browser, f"{address}/?live=0")
    page.clock.install()
    page.reload()
    page.locator(READY).wait_for(timeout=60_000)
    page.get_by_text("No unresolved incidents.").first.wait_for()
    page.get_by_text("Paused · Data as of").wait_for()
    page.clock.fast_forward(61_000)
    page.locator("html[data-fleetpulse-unknown]").wait_for(state="attached")
    page.get_by_text("Last known: No unresolved incidents.").locator("visible=true").wait_for()
    assert page.locator(".fp-now").locator("visible=true").count() == 0


@pytest.mark.slow
def test_the_stamp_is_red_and_says_what_the_api_answers(address: str, browser: Any, api: Any) -> None:
    page, _ = open_page(browser, address)
    page.locator(".stamp").wait_for()
    for path in ("fleet", "fleet/map"):
        api.broken[path] = (503, b'{"detail": "the store is not open yet"}')
    page.locator(".stamp.bad").wait_for(timeout=30_000)
    expect(page.locator(".stamp")).to_contain_text("API answers HTTP 503")
    page.locator("canvas.stale").wait_for(timeout=30_000)  # the same refresh draws it, a moment later


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_stalled_pipeline_shows_a_banner_and_an_amber_stamp(
    address: str, browser: Any, api: Any, scheme: str
) -> None:
    now = snapshot.now()
    api.fleet |= {"as_of": iso(now), "newest": iso(now - 20 * SECOND), "watermark": iso(now - 50 * SECOND)}
    page, faults = open_page(browser, f"{address}/", scheme)
    page.locator(".stamp.fine").wait_for()
    api.fleet |= {"unready": ["kafka k1:9092: no answer to the connection"], "stalled": True}
    page.locator(".stamp.late").wait_for(timeout=30_000)
    page.get_by_text("Pipeline stalled:").wait_for()
    expect(page.locator(".stamp")).to_contain_text(f"Data as of {iso(now - 20 * SECOND)[11:19]}Z")
    assert faults == []


def test_the_list_says_that_its_number_of_nodes_is_of_those_that_suffer(address: str, browser: Any, api: Any) -> None:
    api.incidents["A1"]["impact"] = SHORT_IMPACT | {"nodes": 34}
    page, faults = open_page(browser, f"{address}/incidents?live=0")
    head = page.locator(".head").get_by_text("Nodes hit", exact=True)
    expect(head).to_have_attribute("title", re.compile("^Nodes that suffer: .* all nodes of a job that it slows down"))
    cell = page.locator("a.row .num", has_text="34 nodes")
    expect(cell).to_have_attribute("title", re.compile("^34 nodes. Nodes that suffer: "))
    assert faults == []


def test_the_tiles_of_a_stalled_pipeline_have_one_layout(address: str, browser: Any, api: Any) -> None:
    now = snapshot.now()
    api.fleet |= {"as_of": iso(now), "newest": iso(now), "watermark": iso(now), "unready": ["stopped"], "stalled": True}
    page, faults = open_page(browser, f"{address}/?live=0")
    page.locator(".tile", has_text="last known").first.wait_for()
    for width in (1280, 1440, 1920, 390):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function("width => innerWidth === width", arg=width)
        lines = page.locator(".tile").evaluate_all(
            """tiles => tiles.map(tile => [...tile.children].filter(part => part.textContent).map(
                 part => Math.round(part.getBoundingClientRect().bottom - tile.getBoundingClientRect().top)))"""
        )
        assert len(lines) == 7
        assert all(one == lines[0] for one in lines), (width, lines)
    assert faults == []


@pytest.mark.slow
def test_a_page_shows_unknown_since_if_the_api_stops(address: str, browser: Any, api: Any) -> None:
    api.incidents.clear()
    now = snapshot.now()
    api.fleet |= {"as_of": iso(now), "newest": iso(now), "watermark": iso(now), "nodes": [api.node("n1", "ok")]}
    page, faults = open_page(browser, address)
    page.get_by_text("No unresolved incidents.").first.wait_for()
    for path in ("fleet", "fleet/map", "incidents"):
        api.broken[path] = (503, b'{"detail": "the store is not open"}')
    page.get_by_text("Last known: no unresolved incidents.").first.wait_for(timeout=30_000)
    page.get_by_text("Last known: no problems on 1 node", exact=False).first.wait_for(timeout=30_000)
    assert "No problems on 1 node" not in page.inner_text("body")
    assert "No unresolved incidents" not in page.inner_text("body")
    assert faults == []


@pytest.mark.slow
def test_a_page_shows_unknown_since_if_the_dashboard_server_hangs(address: str, browser: Any, api: Any) -> None:
    api.incidents.clear()
    page, _ = open_page(browser, address)
    page.get_by_text("No unresolved incidents.").first.wait_for()
    api.released.clear()  # no answer comes, and the dashboard waits for none of its viewers
    page.locator("html[data-fleetpulse-unknown]").wait_for(state="attached", timeout=60_000)
    assert "No unresolved incidents" not in page.inner_text("body")
    page.get_by_text("Unknown since").locator("visible=true").first.wait_for()


def test_summaries_are_shown_as_text_not_as_markup(address: str, browser: Any, api: Any) -> None:
    api.incidents["A1"]["summary"] = "<img src=x onerror=alert(1)> is wrong"
    for path in ("/?live=0", "/incident?id=A1&live=0"):
        page, faults = open_page(browser, address + path)
        page.get_by_text("<img src=x onerror=alert(1)> is wrong").first.wait_for()
        assert faults == []
