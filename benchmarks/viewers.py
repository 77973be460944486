"""Many people who look at the dashboard together: latency of each refresh, CPU and memory of the dashboard.

    python -m benchmarks.viewers [--viewers 100] [--seconds 60] [--nodes 12500]

A store with one GPU per node is served by the API in a separate process, as is the dashboard; the viewers speak
Streamlit's protocol from this process. All have opened a page of MIX before the first refresh; each then refreshes it
every 5 s from a random time on, as the browsers of people who came at different times do. Printed: p50, p95 and the
largest time from the request of a refresh to its end (ms) by page and over all, failed refreshes, CPU of the dashboard
and the API (% of a core), and the dashboard's memory. Exit code 1 if the p95 is 250 ms or more, or a refresh failed.
On a machine with other work it is no figure.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

import numpy as np

from benchmarks.fleet_page import FixedBackend, cpu_of, fill, find_dashboard, now, replace_watermark
from benchmarks.page_viewer import Viewer
from pipeline.api.server import create_app, start_server
from pipeline.config.sections import Api, Config
from pipeline.store.database import Database
from tests.dashboards.test_dashboard_browser import running_dashboard

GOAL_MS = 250.0
"""Largest p95 of a refresh (ms). Source: the goal of the dashboard."""
INTERVAL_S = 5.0
"""Between two refreshes of a page (s); as in dashboards/snapshot.py."""
OPEN_S = 0.25
"""For each viewer, before the first refresh (s): opening takes more CPU than a refresh. Chosen: a quarter of a core."""
MIX = (("", "", 5), ("incidents", "", 3), ("incident", "id=I0", 2))
"""(page, query, share of the viewers). Chosen: most screens show the fleet."""


@dataclass
class Seen:
    """Times of refreshes (ms) by page, and failures by text."""

    times: dict[str, list[float]] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)


def serve_api(nodes: int, pipe: Connection) -> None:
    """Serves a fleet until the parent says stop; sends the port first."""
    with TemporaryDirectory(prefix="viewers-") as folder:
        database, stop = Database(Path(folder) / "store.duckdb"), Event()
        backend = FixedBackend(database, fill(database, nodes), standing=replace_watermark(), clock=now)
        config = Config(api=Api(port=0))
        server = start_server(create_app(backend, config, now), config, stop)
        pipe.send(server.port)
        pipe.recv()
        stop.set()
        server.join(5)
        database.close()


async def view(base: str, page: str, query: str, begin: float, until: float, seen: Seen) -> None:
    """Opens a page before `begin`, and refreshes it from then on until a time of the clock (s)."""
    viewer = Viewer(base)
    try:
        await asyncio.sleep(random.random() * max(0.0, begin - time.monotonic() - INTERVAL_S))
        opened = await viewer.open(page, query)
        if opened.exceptions or not opened.fragments:
            seen.failures[f"{page or 'fleet'} does not open: {opened.exceptions or 'it has no refresh'}"] += 1
            return
        due = begin - random.random() * INTERVAL_S  # people came at any time, not together
        while (due := due + INTERVAL_S) < until:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            run = await viewer.run(page, query, fragment=opened.fragments[0], auto=True)
            seen.times.setdefault(page or "fleet", []).append(run.seconds * 1000)
            if run.exceptions:
                seen.failures[run.exceptions[0]] += 1
    except (OSError, TimeoutError) as error:
        seen.failures[f"{page or 'fleet'}: {type(error).__name__} {error}"] += 1
    finally:
        await viewer.close()


async def view_all(base: str, viewers: int, seconds: float) -> Seen:
    """Runs all viewers; returns what they saw."""
    seen, begin = Seen(), time.monotonic() + OPEN_S * viewers + INTERVAL_S
    pages = [(page, query) for page, query, share in MIX for _ in range(share)]
    await asyncio.gather(*(view(base, *pages[i % len(pages)], begin, begin + seconds, seen) for i in range(viewers)))
    return seen


def report(seen: Seen, seconds: float, cpu: dict[str, float], memory_mb: float) -> int:
    """Prints the figures; returns the exit code."""
    everything = np.array([t for times in seen.times.values() for t in times])
    for name, times in {**seen.times, "all": everything}.items():
        p50, p95, most = np.percentile(times, (50, 95, 100)) if len(times) else (0.0, 0.0, 0.0)
        print(f"{name}: {len(times):,} refreshes, p50 {p50:.0f} ms, p95 {p95:.0f} ms, largest {most:.0f} ms")
    for text, count in seen.failures.most_common(5):
        print(f"failed {count}: {text}")
    used = ", ".join(f"{name} {value / seconds:.0%} of a core" for name, value in cpu.items())
    print(f"CPU: {used}; memory of the dashboard {memory_mb:.0f} MB")
    good = len(everything) > 0 and not seen.failures and float(np.percentile(everything, 95)) < GOAL_MS
    return 0 if good else 1


def memory_of(pid: int) -> float:
    """Returns the resident memory of a process (MB)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1000


def main() -> int:
    """Measures, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--viewers", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--nodes", type=int, default=12_500)
    given = parser.parse_args()
    here, there = multiprocessing.Pipe()
    api = multiprocessing.get_context("spawn").Process(target=serve_api, args=(given.nodes, there))
    api.start()
    port = here.recv()
    assert api.pid is not None
    with running_dashboard(f"http://127.0.0.1:{port}") as address:
        watched = {"dashboard": find_dashboard(int(address.rpartition(":")[2])), "API": api.pid}
        asyncio.run(view_all(address, 1, 2 * INTERVAL_S + 1))  # imports the pages, fills the caches
        before = {name: cpu_of(pid) for name, pid in watched.items()}
        seen = asyncio.run(view_all(address, given.viewers, given.seconds))
        cpu = {name: cpu_of(pid) - before[name] for name, pid in watched.items()}
        code = report(seen, given.seconds, cpu, memory_of(watched["dashboard"]))
    here.send("stop")
    api.join(10)
    return code


if __name__ == "__main__":
    sys.exit(main())
