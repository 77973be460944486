"""Ten tasks of a person on call, in a real Chromium on the pages of the demo: clicks, keys and seconds of each.

    python -m benchmarks.page_tasks [--dashboard URL --api URL] [--pictures FOLDER]

Each task begins at the link of an alert, at 1440 x 900 and at 390 x 844, and ends when the answer is on the
screen. Printed for each: clicks, keys, scrolls, seconds until every page had answered, and the seconds of a practised
person: those of the pages, and for each step the time of the keystroke-level model (Card, Moran and Newell 1983).
Exit code 1 if a task is not possible, takes a person 60 s or longer, or the median is 20 s or more.
Without addresses the demo is started; the person is logged in as an operator, by a separate dashboard before its API.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from playwright.sync_api import Error, Locator, Page, sync_playwright

from benchmarks.running_demo import ROOT, read_json, running_demo
from pipeline.api.tokens import create_role_token, find_role_file
from tests.dashboards.conftest import find_chromium
from tests.dashboards.test_dashboard_browser import FLAGS, READY, running_dashboard
from tests.dashboards.test_dashboard_first_screen import LOGGED_IN

SIZES = {"1440": (1440, 900), "390": (390, 844)}
THINK_S, POINT_S, KEY_S = 1.35, 1.3, 0.28
"""Of a step (s): to decide, to point and click (or tap, or scroll), to type a character. Source: the model's M, P + 2B
and K of an average typist."""
LONGEST_S, MEDIAN_S = 60.0, 20.0
"""Limits (s). Source: the goal of the dashboard."""
SEVERITIES = ("page", "ticket", "watch")
WAIT_MS = 60_000


@dataclass
class Hand:
    """What a person does on a page, counted. incidents: id of an open incident by kind of its cause."""

    page: Page
    base: str
    incidents: Mapping[str, str]
    clicks: int = 0
    keys: int = 0
    scrolls: int = 0

    def open(self, kind: str) -> None:
        """Follows the link of an alert about a kind of cause."""
        self.page.goto(f"{self.base}/incident?id={self.incidents[kind]}")
        self.page.locator(READY).wait_for(timeout=WAIT_MS)

    def click(self, what: Locator) -> None:
        """Clicks the first match, and waits for the page."""
        self.see(what)
        what.first.click()
        self.clicks += 1
        self.page.locator(READY).wait_for(timeout=WAIT_MS)

    def type(self, into: Locator, text: str) -> None:
        """Types a text into a field."""
        self.see(into)
        into.first.fill(text)
        self.clicks, self.keys = self.clicks + 1, self.keys + len(text)

    def see(self, what: Locator | str) -> None:
        """Waits until something is shown, and scrolls to it if it is not on the screen."""
        found = (self.page.get_by_text(what) if isinstance(what, str) else what).first
        found.wait_for(timeout=WAIT_MS)
        box, size = found.bounding_box(), self.page.viewport_size
        if box and size and not 0 <= box["y"] <= size["height"] - min(box["height"], 40):
            found.evaluate("(element) => element.scrollIntoView({block: 'center'})")
            self.scrolls += 1

    def go(self, title: str) -> None:
        """Opens a page of the navigation, which a phone hides behind a button."""
        link = self.page.locator("[data-testid=stTopNavLink], [data-testid=stSidebarNavLink]", has_text=title)
        menu = self.page.get_by_test_id("stExpandSidebarButton")
        if menu.count():  # the links are there, left of the window
            self.click(menu)
        self.click(link)

    def seconds(self, pages: float) -> float:
        """Returns the seconds of a practised person, with the time that the pages took."""
        acts = self.clicks + self.scrolls + 1  # the last step is to read
        return pages + acts * THINK_S + (self.clicks + self.scrolls) * POINT_S + self.keys * KEY_S


def find_cause(hand: Hand) -> None:
    """The cause of a coolant incident, with its confidence."""
    hand.open("cdu")
    hand.see(hand.page.locator(".fp-below", has_text="suspected cause CDU"))


def find_job(hand: Hand) -> None:
    """The job that an incident hits, and how much slower it is."""
    hand.open("rank")
    hand.click(hand.page.locator("main a[href*='jobs?entity=job']"))
    hand.see(hand.page.get_by_text("slower").or_(hand.page.get_by_text("of its usual pace")))


def see_node(hand: Hand) -> None:
    """All signals of a node over 6 h."""
    hand.open("gpu")
    hand.click(hand.page.locator("main a[href*='node?entity=node']"))
    hand.see(hand.page.locator(".panel canvas, a.cell canvas"))
    hand.see(hand.page.locator(".fp-below", has_text=re.compile(r" to now, .+ \(6 h 00 min\)")))


def compare_gpu(hand: Hand) -> None:
    """A GPU beside its peers."""
    hand.open("gpu")
    hand.click(hand.page.locator("main a[href*='node?entity=gpu']"))
    hand.click(hand.page.locator("a.cell"))
    hand.see(hand.page.locator(".panel canvas"))
    hand.see(hand.page.get_by_role("columnheader", name="Peers' median"))


def see_link(hand: Hand) -> None:
    """Both ends of a link, and its history."""
    hand.open("port")
    hand.click(hand.page.locator("main a[href*='link?entity=port']"))
    hand.see(hand.page.get_by_text("far end").or_(hand.page.get_by_text("Far end")))
    hand.see(hand.page.locator(".panel canvas"))


def see_facility(hand: Hand) -> None:
    """Coolant and power at a glance."""
    hand.open("cdu")
    hand.go("Facility")
    hand.see(hand.page.get_by_text("cooling units ok"))
    hand.see(hand.page.get_by_text("drawn by all PDUs"))


def see_silent(hand: Hand) -> None:
    """Which agents and collectors do not report, and why."""
    hand.open("gpu")
    hand.go("Data quality")
    all_report = hand.page.get_by_text("Every agent, collector, BMC and exporter that is known reports")
    hand.see(hand.page.locator(".fp-row, .fp-row-critical, .fp-row-degraded").or_(all_report))


def silence_rack(hand: Hand) -> None:
    """A silence of a detector on a rack for 2 h."""
    hand.open("gpu")
    hand.click(hand.page.locator(".st-key-actions").get_by_role("button", name="Silence"))
    form = hand.page.get_by_test_id("stPopoverBody")
    hand.click(form.get_by_role("combobox"))
    hand.click(hand.page.get_by_role("option", name="rack"))
    hand.type(form.get_by_label("Reason"), "new paste")
    hand.click(form.get_by_role("button", name="Silence", exact=True))
    hand.see("Silenced until")


def run_query(hand: Hand) -> None:
    """A query in SQL with its result."""
    hand.open("gpu")
    hand.go("Explore")
    hand.click(hand.page.get_by_role("radio", name="SQL"))
    hand.click(hand.page.get_by_label("Examples").or_(hand.page.get_by_label("Example")))
    hand.click(hand.page.get_by_role("option"))
    hand.see(hand.page.get_by_test_id("stDataFrame"))


def plan_drain(hand: Hand) -> None:
    """The plan of taking a node out of service."""
    hand.open("gpu")
    hand.click(hand.page.get_by_role("button", name="Plan an act"))
    form = hand.page.get_by_test_id("stPopoverBody")
    hand.type(form.get_by_label("Reason"), "corrupts data")
    hand.click(form.get_by_role("button", name="Plan it"))
    hand.see(hand.page.get_by_text("exactly what the executor runs"))  # its page opened, and it is planned


TASKS: tuple[Callable[[Hand], None], ...] = (
    find_cause, find_job, see_node, compare_gpu, see_link, see_facility, see_silent, silence_rack, run_query,
    plan_drain,
)  # fmt: skip


def find_incidents(api: str) -> dict[str, str]:
    """Returns the id of an incident by kind of its cause: unresolved before resolved, the most severe first.

    `rank`: one of a rank of a job; a GPU without a job hits none.
    """
    found = read_json(f"{api}/api/v1/incidents?show=all")["incidents"]
    kinds: dict[str, str] = {}
    for one in sorted(found, key=lambda i: (i["state"] == "resolved", SEVERITIES.index(i["severity"]))):
        kinds.setdefault(one["cause"].partition(":")[0], one["id"])
        if " of job " in one["summary"]:
            kinds.setdefault("rank", one["id"])
    return kinds


def write_tokens(folder: Path) -> tuple[Path, str]:
    """Gives the demo in a folder its tokens: of a dashboard that writes on behalf of people, in a file, and of an
    executor, as text."""
    tokens, now = find_role_file(next(folder.glob("fleetpulse-demo-*/store.duckdb"))), time.time_ns() // 1000
    text = create_role_token(tokens, "dashboard", "admin", 0, "demo", now, on_behalf_of=True)[1]
    file = folder / "dashboard.token"
    file.write_text(f"dashboard:{text}\n")
    file.chmod(0o600)
    return file, create_role_token(tokens, "executor", "operator", 0, "demo", now, executor=True)[1]


@contextmanager
def running_executor(api: str, token: str) -> Iterator[None]:
    """An executor that plans acts and carries none out, until the block ends."""
    port = api.rpartition(":")[2]
    environ = os.environ | {"FLEETPULSE__API__PORT": port, "FLEETPULSE_TOKEN": token, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "fleetpulse.py"), "executor"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


def try_tasks(browser: Any, base: str, incidents: Mapping[str, str], pictures: Path | None) -> dict[str, list[float]]:
    """Prints the figures of each task; returns a person's seconds by size of the window, infinite if not possible."""
    taken: dict[str, list[float]] = {size: [] for size in SIZES}
    for task in TASKS:
        for size, (width, height) in SIZES.items():
            page = browser.new_context(viewport={"width": width, "height": height}, locale="en-GB").new_page()
            page.set_default_timeout(WAIT_MS)
            hand, begun, fault = Hand(page, base, incidents), time.perf_counter(), ""
            try:
                task(hand)
            except (Error, KeyError) as error:
                fault = f"not possible: {str(error).splitlines()[0]}"
            spent = time.perf_counter() - begun
            person = hand.seconds(spent)
            taken[size].append(float("inf") if fault else person)
            counted = f"{hand.clicks} clicks, {hand.keys} keys, {hand.scrolls} scrolls"
            print(f"{task.__doc__} | {size} | {counted} | {spent:.1f} s | {person:.0f} s | {fault}", flush=True)
            if pictures:
                page.screenshot(path=pictures / f"{task.__name__}-{size}.png")
            page.context.close()
    return taken


def main() -> int:
    """Tries all tasks, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dashboard", default="")
    parser.add_argument("--api", default="")
    parser.add_argument("--pictures", type=Path, default=None)
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        api = given.api or stack.enter_context(running_demo(folder))[1]
        incidents = find_incidents(api)
        token = None
        if not given.api:
            token, executors = write_tokens(folder)
            stack.enter_context(running_executor(api, executors))
        base = given.dashboard or stack.enter_context(running_dashboard(api, LOGGED_IN, token))
        play = stack.enter_context(sync_playwright())
        browser = play.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        taken = try_tasks(browser, base, incidents, given.pictures)
        browser.close()
    for size, seconds in taken.items():
        print(f"{size}: median {statistics.median(seconds):.0f} s, longest {max(seconds):.0f} s")
    good = all(max(s) < LONGEST_S and statistics.median(s) < MEDIAN_S for s in taken.values())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
