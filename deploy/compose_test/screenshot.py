"""Screenshots of the dashboard in a headless Chromium, through the published port."""

from __future__ import annotations

import shutil
from pathlib import Path

from stack import CheckError, Stack

READY = "[data-testid=stApp][data-test-script-state=notRunning][data-test-connection-state=CONNECTED]"
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
PAGES = {"fleet": ("/", "canvas"), "incidents": ("/incidents", "a.row")}
"""Name of the screenshot -> (path, selector of an element of the loaded page)."""


def take_screenshots(stack: Stack, results: Path) -> str:
    """Saves a screenshot of each page. Raises CheckError if one does not load or shows an error."""
    from playwright.sync_api import Error, sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise CheckError("no Chromium found; install it with 'make parts'")
    address = stack.address("dashboard", 8501)
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=list(FLAGS))
        page = browser.new_page(viewport={"width": 1440, "height": 1000}, locale="en-GB")
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        try:
            for name, (path, part) in PAGES.items():
                page.goto(address + path)
                page.locator(READY).wait_for(timeout=60_000)
                page.locator(part).first.wait_for(timeout=30_000)
                page.screenshot(path=results / f"{name}.png")
                faults += page.locator("[data-testid=stException], [data-testid=stAlert]").all_inner_texts()
        except Error as error:
            page.screenshot(path=results / "failed.png")
            raise CheckError(f"{page.url}: {error.message}") from error
        finally:
            browser.close()
    if faults:
        raise CheckError(f"errors on the pages: {'; '.join(faults)}")
    return ", ".join(f"{name}.png" for name in PAGES)
