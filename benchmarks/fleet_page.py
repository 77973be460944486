"""The fleet page in a real Chromium with large fleets: first paint, change of colour, bytes, memory, CPU.

    python -m benchmarks.fleet_page [--nodes 12500 100000] [--changes 12]

A store with one GPU per node is served by the API in this process; the dashboard runs in a separate process. Printed
for each size: cold (new profile) and warm time until the map is painted, time from the click on another colour until
the map is painted again (median), bytes of the WebSocket at the first paint and per change, download of the page,
JavaScript heap, CPU of the API per answer, and CPU of the dashboard per change (ms). Times on a busy machine are no
figures; CPU is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
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
    """One page load with its counted bytes."""

    def __init__(self, page: Page, address: str) -> None:
        self.page, self.frames, self.download = page, 0, 0
        page.on("websocket", lambda socket: socket.on("framereceived", self._count))
        page.on("response", self._count_response)
        begun = time.perf_counter()
        page.goto(address)
        self.wait_for_paint(0)
        self.painted_s = time.perf_counter() - begun

    def _count(self, frame: Any) -> None:
        self.frames += len(frame)

    def _count_response(self, response: Any) -> None:
        self.download += int(response.headers.get("content-length") or 0)

    def paints(self) -> int:
        """How often the map was painted with data."""
        return int(self.page.evaluate(FIND_MAP + "return map ? +(map.dataset.painted ?? 0) : 0; })()"))

    def wait_for_paint(self, before: int) -> None:
        """Waits for a paint after `before`, at every frame of the browser."""
        self.page.wait_for_function(
            FIND_MAP + f"return map && +(map.dataset.painted ?? 0) > {before}; }})()", timeout=120_000
        )

    def change(self, colour: str) -> float:
        """Clicks another colour; returns the time until the map has it (ms)."""
        shown = FIND_MAP + "return map.querySelector('.scale').hidden ? 'State' : 'Power'; })()"
        begun = time.perf_counter()
        self.page.get_by_role("radio", name=colour, exact=True).click()
        self.page.wait_for_function(f"{shown} === '{colour}'", timeout=120_000)
        return (time.perf_counter() - begun) * 1000


FIND_MAP = """(() => { const find = (root) => { for (const e of root.querySelectorAll('*')) {
    if (e.classList.contains('map') && e.querySelector('canvas')) return e;
    const inside = e.shadowRoot && find(e.shadowRoot); if (inside) return inside; } return null; };
    const map = find(document); """


def measure(nodes: int, changes: int) -> None:
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
                flags = [*FLAGS, "--enable-precise-memory-info"]
                browser = play.chromium.launch(executable_path=find_chromium(), args=flags)
                visit_pages(browser, address, nodes, changes)
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


def visit_pages(browser: Any, address: str, nodes: int, changes: int) -> None:
    """Prints first paint cold and warm, then changes of colour."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, locale="en-GB")
    cold = Visit(context.new_page(), f"{address}/?live=0")
    first, download = cold.frames, cold.download
    warm = Visit(context.new_page(), f"{address}/?live=0")
    for colour in COLOURS:  # fills the caches
        warm.change(colour)
    pid, sent = find_dashboard(int(address.rpartition(":")[2])), warm.frames
    begun, taken = cpu_of(pid), [warm.change(COLOURS[i % len(COLOURS)]) for i in range(changes)]
    cpu = (cpu_of(pid) - begun) * 1000 / changes
    heap = warm.page.evaluate("performance.memory.usedJSHeapSize") / 1e6
    change = statistics.median(taken)
    print(
        f"{nodes:,} nodes: cold {cold.painted_s:.2f} s, warm {warm.painted_s:.2f} s, change {change:.0f} ms "
        f"(CPU of the dashboard {cpu:.0f} ms), first {first / 1e3:.0f} kB, per change "
        f"{(warm.frames - sent) / changes / 1e3:.0f} kB, download {download / 1e6:.1f} MB, heap {heap:.0f} MB",
        flush=True,
    )
    context.close()


def main() -> None:
    """Measures all sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, nargs="+", default=[12_500, 100_000])
    parser.add_argument("--changes", type=int, default=12)
    given = parser.parse_args()
    for nodes in given.nodes:
        measure(nodes, given.changes)


if __name__ == "__main__":
    main()
