"""The fleet page in a real Chromium with large fleets: first paint, change of colour, bytes, memory, CPU.

    python -m benchmarks.fleet_page [--nodes 12500 100000] [--changes 12] [--visits 6]

A store with one GPU per node is served by the API in this process; the dashboard runs in a separate process. Printed
for each size: time until the map is painted, cold (new profile) and warm, and time from the click on another colour
until the map is painted again, each as least and median; the same of an empty page of Streamlit in the same browser;
bytes of the WebSocket, JavaScript heap, CPU of the API per answer, and CPU of the dashboard per change (ms). On a
machine with other work the least is nearest to the truth.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from pipeline.api.server import create_app, start_server
from pipeline.config.sections import Api, Config
from pipeline.model.records import SECOND
from pipeline.model.topology import Topology
from pipeline.store.database import Database
from tests.dashboards.conftest import find_chromium
from tests.dashboards.test_dashboard_browser import FLAGS, running_dashboard
from tests.dashboards.test_dashboard_serve import free_port, is_healthy
from tests.pipeline.api.conftest import STANDING, StoreBackend

NODES_PER_RACK = 16
COLOURS = ("Power", "State")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class FixedBackend(StoreBackend):
    """The backend of the tests with incidents that do not change, as in most seconds of a pipeline."""

    def read_revision(self) -> object:
        return 1


def now() -> int:
    """UTC microseconds."""
    return time.time_ns() // 1000


def fill(database: Database, nodes: int) -> Topology:
    """Writes a fleet of one GPU per node with values of now; every thousandth node has an incident, one loop too."""
    moment = now()
    with database.transaction() as connection:
        rows = {"n": nodes, "t": moment, "rack": NODES_PER_RACK}
        connection.execute(
            "INSERT INTO entity (entity, kind, site, simulated, parents, attributes) "
            "SELECT 'node:n' || i, 'node', 's', false, ['rack:r' || (i // $rack)], '{}' FROM range($n) r(i)",
            {"n": nodes, "rack": NODES_PER_RACK},
        )
        connection.execute(
            "INSERT INTO device SELECT 'gpu', i, 's', 'gpu:n' || i || '.0', 'n' || i, false FROM range($n) r(i)",
            {"n": nodes},
        )
        connection.execute(
            "INSERT INTO latest_gpu (time, device, power, temperature) SELECT make_timestamptz($t), i, "
            "(300 + hash(i) % 400)::FLOAT, (50 + hash(i) % 20)::FLOAT FROM range($n) r(i)",
            {"n": rows["n"], "t": rows["t"] + 3600 * SECOND},
        )
        for i, cause in enumerate([*(f"gpu:n{k}.0" for k in range(7, nodes, 1000)), "cdu:c3"]):
            connection.execute(
                "INSERT INTO incidents SELECT $id, $cause, t, t, NULL, 'page', [$cause], 0.9, 'open', 'wrong', true, "
                "'straggler', $cause, t, NULL, NULL FROM (SELECT make_timestamptz($time) AS t)",
                {"id": f"I{i}", "cause": cause, "time": moment},
            )
    parents: dict[str, tuple[str, ...]] = {}
    for i in range(nodes):
        parents[f"node:n{i}"] = (f"rack:r{i // NODES_PER_RACK}",)
        parents[f"gpu:n{i}.0"] = (f"node:n{i}",)
        parents[f"rack:r{i // NODES_PER_RACK}"] = (f"cdu:c{i // NODES_PER_RACK // 8}",)
    return Topology(parents)


def cpu_of(pid: int) -> float:
    """CPU seconds of a process."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / TICKS_PER_SECOND


def find_dashboard(port: int) -> int:
    """Returns the id of the child process that serves the dashboard."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(port).encode() in words:
            return int(folder.name)
    raise SystemExit(f"no dashboard on port {port}")


class Visit:
    """One page load with its counted bytes. shown: JavaScript that is true when the page is there."""

    def __init__(self, page: Page, address: str, shown: str = "") -> None:
        self.page, self.frames, self.download = page, 0, 0
        page.on("websocket", lambda socket: socket.on("framereceived", self._count))
        page.on("response", self._count_response)
        begun = time.perf_counter()
        page.goto(address)
        page.wait_for_function(shown or f"{PAINTS} > 0", timeout=120_000)
        self.painted_s = time.perf_counter() - begun

    def _count(self, frame: Any) -> None:
        self.frames += len(frame)

    def _count_response(self, response: Any) -> None:
        self.download += int(response.headers.get("content-length") or 0)

    def change(self, choice: str, shown: str = "") -> float:
        """Clicks a choice; returns the time until the page has it (ms)."""
        expected = shown or f"{COLOUR} === '{choice}'"
        begun = time.perf_counter()
        self.page.get_by_role("radio", name=choice, exact=True).click()
        self.page.wait_for_function(expected, timeout=120_000)
        return (time.perf_counter() - begun) * 1000


FIND_MAP = """(() => { const find = (root) => { for (const e of root.querySelectorAll('*')) {
    if (e.classList.contains('map') && e.querySelector('canvas')) return e;
    const inside = e.shadowRoot && find(e.shadowRoot); if (inside) return inside; } return null; };
    const map = find(document); """
MEMORY = "--enable-precise-memory-info"
PAINTS = FIND_MAP + "return map ? +(map.dataset.painted ?? 0) : 0; })()"
COLOUR = FIND_MAP + "return map.querySelector('.scale').hidden ? 'State' : 'Power'; })()"
EMPTY = """
import streamlit as st
chosen = st.segmented_control("Choice", ["Power", "State"], default="State")
st.text(f"shown {chosen}")
"""
"""A page with one control and one text: what Streamlit itself takes."""


def measure(nodes: int, given: argparse.Namespace) -> None:
    """Prints the figures of one size."""
    with tempfile.TemporaryDirectory(prefix="fleet-page-") as folder:
        database = Database(Path(folder) / "store.duckdb")
        backend = FixedBackend(database, fill(database, nodes), standing=replace_watermark(), clock=now)
        config, stop = Config(api=Api(port=0)), threading.Event()
        server = start_server(create_app(backend, config, now), config, stop)
        try:
            url = f"http://127.0.0.1:{server.port}"
            api_ms = {what: cpu_per_call(f"{url}/api/v1/fleet/{what}") for what in CALLS}
            print(f"{nodes:,} nodes: API CPU ms " + ", ".join(f"{k} {v:.1f}" for k, v in api_ms.items()), flush=True)
            with running_dashboard(url) as address, sync_playwright() as play:
                browser = play.chromium.launch(executable_path=find_chromium(), args=[*FLAGS, MEMORY])
                measure_floor(browser, given)
                visit_pages(browser, address, nodes, given)
                browser.close()
        finally:
            stop.set()
            server.join(5)
            database.close()


CALLS = ("map?colour=state", "map?colour=power", "map?colour=temperature", "layout?by=rack")


def replace_watermark() -> Any:
    """Returns a state of the pipeline that is evaluated up to now."""
    return {**STANDING, "watermark": now()}


def cpu_per_call(address: str, calls: int = 5) -> float:
    """Returns the CPU of this process per call (ms), after one that fills the caches."""
    read: Callable[[], None] = lambda: urllib.request.urlopen(address, timeout=120).close()  # noqa: E731
    read()
    begun = time.process_time()
    for _ in range(calls):
        read()
    return (time.process_time() - begun) * 1000 / calls


def visit_pages(browser: Any, address: str, nodes: int, given: argparse.Namespace) -> None:
    """Prints first paint cold and warm, then changes of colour."""
    cold, warm, page = load_pages(browser, f"{address}/?live=0", given.visits)
    for colour in COLOURS:  # fills the caches
        page.change(colour)
    pid, sent = find_dashboard(int(address.rpartition(":")[2])), page.frames
    begun, taken = cpu_of(pid), [page.change(COLOURS[i % len(COLOURS)]) for i in range(given.changes)]
    cpu = (cpu_of(pid) - begun) * 1000 / given.changes
    heap = page.page.evaluate("performance.memory.usedJSHeapSize") / 1e6
    print(
        f"{nodes:,} nodes, least and median: cold {seconds(cold)}, warm {seconds(warm)}, change {milliseconds(taken)}; "
        f"CPU of the dashboard {cpu:.0f} ms per change, "
        f"first paint and two changes {sent / 1e3:.0f} kB, per change "
        f"{(page.frames - sent) / given.changes / 1e3:.0f} kB, heap {heap:.0f} MB",
        flush=True,
    )
    page.page.context.close()


def load_pages(browser: Any, address: str, visits: int, shown: str = "") -> tuple[list[float], list[float], Visit]:
    """Returns times of the first paint (s) with an empty cache and with a full one, and the last page."""
    cold, warm = [], []
    for i in range(visits):
        context = browser.new_context(viewport={"width": 1440, "height": 900}, locale="en-GB")
        first = Visit(context.new_page(), address, shown)
        first.page.close()
        page = Visit(context.new_page(), address, shown)
        cold.append(first.painted_s)
        warm.append(page.painted_s)
        if i < visits - 1:
            context.close()
    return cold, warm, page


def measure_floor(browser: Any, given: argparse.Namespace) -> None:
    """Prints the same times of an empty page of Streamlit in the same browser."""
    with tempfile.TemporaryDirectory(prefix="empty-page-") as folder:
        (script := Path(folder) / "empty.py").write_text(EMPTY)
        port = free_port()
        options = ["--server.headless=true", "--browser.gatherUsageStats=false", "--server.fileWatcherType=none"]
        command = [sys.executable, "-m", "streamlit", "run", str(script), f"--server.port={port}", *options]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                while not is_healthy(port):
                    time.sleep(0.1)  # polls another process
                text = "document.body.innerText.includes('shown {}')"
                cold, warm, page = load_pages(browser, f"http://127.0.0.1:{port}", given.visits, text.format("State"))
                taken = [page.change(choice, text.format(choice)) for choice in ("Power", "State") * given.changes]
                print(
                    f"empty page, least and median: cold {seconds(cold)}, warm {seconds(warm)}, "
                    f"change {milliseconds(taken)}",
                    flush=True,
                )
                page.page.context.close()
            finally:
                process.terminate()


def seconds(taken: Sequence[float]) -> str:
    """Returns the least and the median (s)."""
    return f"{min(taken):.2f} and {statistics.median(taken):.2f} s"


def milliseconds(taken: Sequence[float]) -> str:
    """Returns the least and the median (ms)."""
    return f"{min(taken):.0f} and {statistics.median(taken):.0f} ms"


def main() -> None:
    """Measures all sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, nargs="+", default=[12_500, 100_000])
    parser.add_argument("--changes", type=int, default=12)
    parser.add_argument("--visits", type=int, default=6)
    given = parser.parse_args()
    for nodes in given.nodes:
        measure(nodes, given)


if __name__ == "__main__":
    main()
