"""Makes all pictures of the pages in docs/images from the demo: `make pictures`.

Starts `fleetpulse demo` on free ports, waits until its faults are incidents, and takes every page of the navigation in
a headless Chromium. What it shows is simulated, and says so.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Error, Page, sync_playwright

from benchmarks.running_demo import read_json, running_demo
from dashboards.pages import PAGES
from tests.dashboards.conftest import find_chromium

IMAGES = Path(__file__).parent / "images"
READY = "[data-testid=stApp][data-test-script-state=notRunning][data-test-connection-state=CONNECTED]"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
SETTLE_MS = 1500
"""Wait for charts after the page is ready (ms). Chosen: fonts and the last animation."""
COLOURS = 256
"""Colours of a picture; a page has fewer, except at the edges of letters. A third of the size."""
DRAWN = "document.querySelectorAll('[data-testid=stSkeleton]').length === 0"
"""That each part of Streamlit that the page needs has arrived."""
FAULTS = "[data-testid=stException], .stamp.bad, .fp-notice-critical"
"""What no picture may show: a fault of the page, or that the API did not answer in time."""
TRIES = 10
"""Loads of a page until it shows data. Chosen: the demo needs both cores at its start."""


def main() -> int:
    """Starts the demo, makes the pictures, and stops it."""
    with running_demo() as (dashboard, api):
        make_pictures(dashboard, api)
    return 0


def make_pictures(dashboard: str, api: str) -> None:
    """Makes the pictures of a running dashboard, and of its API."""
    examples = find_examples(api)
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        for entry in PAGES:
            query = "&".join(["live=0", examples.get(entry.name, "")]).rstrip("&")
            path = "/" if entry is PAGES[0] else f"/{entry.name}"
            _take(browser, f"{dashboard}{path}?{query}", f"{entry.name}-light")
        first = f"{dashboard}/?live=0"
        _take(browser, f"{first}&by=loop&colour=temperature", "fleet-dark", scheme="dark")
        _take(browser, first, "fleet-phone", width=390, height=844)
        _take(browser, f"{dashboard}/incident?live=0&{examples['incident']}", "incident-phone", width=390, height=844)
        browser.close()


def find_examples(api: str) -> dict[str, str]:
    """Returns the query of the pages about one thing: a slow rank, its node and a job."""
    incidents = read_json(f"{api}/api/v1/incidents?show=unresolved")["incidents"]
    pages = [i for i in incidents if i["severity"] == "page"]
    slow = [i for i in pages if i["detector"] == "straggler"]  # its evidence is a line beside its peers
    chosen = (slow or pages or incidents)[0]
    device = next((e for e in (chosen["cause"], *chosen["members"]) if e.startswith("gpu:")), "")
    node = f"node:{device.partition(':')[2].rpartition('.')[0]}" if device else "node:sim-n010"
    port = next((i["cause"] for i in pages if i["cause"].startswith("port:")), "")
    jobs = [e["entity"] for e in read_json(f"{api}/api/v1/entities?kind=job")["entities"]]
    return {
        "incident": f"id={chosen['id']}",
        "node": f"entity={node}",
        "link": f"entity={port}" if port else "",
        "jobs": f"entity={jobs[0]}" if jobs else "",
        "explore": f"entity={device}&signal=gpu.temperature" if device else "",
    }


def _take(
    browser: Browser, address: str, name: str, scheme: Any = "light", width: int = 1440, height: int = 900
) -> None:
    """Saves one picture. Raises SystemExit if the page shows an error."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height}, locale="en-GB")
    page = context.new_page()
    try:
        for _ in range(TRIES):
            page.goto(address)
            page.locator(READY).wait_for(timeout=120_000)
            page.wait_for_load_state("networkidle")
            page.wait_for_function(DRAWN, timeout=120_000)
            page.wait_for_timeout(SETTLE_MS)
            faults = page.locator(FAULTS).all_inner_texts()
            if not faults:
                break
        raw = _shoot(page)
    finally:
        context.close()
    if faults:
        raise SystemExit(f"{address}: the page shows an error: {faults[0][:200]}")
    with Image.open(io.BytesIO(raw)) as picture:
        picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(IMAGES / f"{name}.png", optimize=True)
    sys.stderr.write(f"{name}.png: {(IMAGES / f'{name}.png').stat().st_size // 1024} kB\n")


def _shoot(page: Page) -> bytes:
    """Returns a screenshot; Chromium fails to take one now and then, so it is asked twice."""
    try:
        return page.screenshot()
    except Error:
        return page.screenshot()


if __name__ == "__main__":
    sys.exit(main())
