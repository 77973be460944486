"""Live wall-clock delays: from the onset of a fault to the incident in the API, and to the webhook received.

    python -m benchmarks.delays [--runs 20] [--parallel 3] [--seed 1000] [--results delays.json]

Each run has a pipeline with its own store, spool and webhook. A simulated fleet of 16 nodes with 8 GPUs and one sample
a second sends HISTORY seconds at full speed, then streams in real time. Faults begin one after another: a slow GPU, a
node that stops sending, a GPU off the bus (XID 79), a pump that stops. Then all agents fall silent. The leak has its
own fleet, because it empties the loop that the pump serves. Delays are wall clock, from the onset; for a leak from the
moment at which the rope is wet. A fault that is not reported within PATIENCE counts as never.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.alert_receiver import now, receiver
from benchmarks.processes import Session
from pipeline.model.records import SECOND, from_iso

ROOT = Path(__file__).parents[1]
HISTORY = 1800
"""Seconds sent before real time begins: the detectors of slow ranks have learnt after about a quarter of an hour."""
PATIENCE = 150.0
"""Seconds after which a fault counts as never reported; the goals are 5 s for edge events and 60 s for silence."""
POLL = 0.25
"""Seconds between two polls of the API: adds half of it to the mean delay of an incident."""


@dataclass(frozen=True)
class Fault:
    """A fault that begins `after` seconds of real time; `severities` are those that count as reported."""

    name: str
    kind: str
    after: float
    until: float
    severities: tuple[str, ...]
    parameters: str = ""


PAGE, ANY = ("critical",), ("critical", "warning")
STORIES: Mapping[str, tuple[float, tuple[Fault, ...]]] = {
    "fleet": (
        300.0,
        (
            Fault("straggler", "straggler", 15, 185, ANY, "slowdown = 0.3\nramp = 5.0\n"),
            Fault("lost node", "telemetry_gap", 190, 300, ANY),
            Fault("fatal XID", "gpu_off_bus", 220, 300, PAGE),
            Fault("pump loss", "coolant", 250, 300, PAGE, "flow = 0.0\nramp = 1.0\n"),
        ),
    ),
    "leak": (110.0, (Fault("leak", "coolant_leak", 15, 110, PAGE, "loss = 0.5\n"),)),
}
"""Story -> seconds of real time, and what happens in them. Onsets move by up to 10 s with the seed, so that none is
synchronous with frames."""


@dataclass
class Report:
    """First time (UTC us) at which each (entity or cause, severity) was seen, by webhook or in the API."""

    webhook: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    api: dict[tuple[str, str], tuple[int, Mapping[str, Any]]] = field(default_factory=dict)


def watch_api(port: int, report: Report, stop: threading.Event) -> None:
    """Records when each incident is first seen at each severity, until `stop`."""
    labels = {"page": "critical", "ticket": "warning", "watch": "info"}
    while not stop.wait(POLL):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/api/v1/incidents")
            found = json.load(connection.getresponse())["incidents"]
            connection.close()
        except (OSError, ValueError, KeyError, http.client.HTTPException):
            continue  # not started yet; a fault that is never seen is in the table
        for incident in found:
            severity = labels[incident["severity"]]
            report.api.setdefault((incident["id"], severity), (now(), {**incident, "severity": severity}))


def scenario(faults: Sequence[Fault], length: float, shift: float) -> str:
    lines = [f"version = 1\nduration = {HISTORY + length:.1f}\ninterval = 1\n[fleet]\nnodes = 16\ngpus_per_node = 8\n"]
    for fault in faults:
        onset, end = HISTORY + fault.after + shift, HISTORY + fault.until
        lines.append(f'[[fault]]\nkind = "{fault.kind}"\nonset = {onset:.3f}\nend = {end:.3f}\n{fault.parameters}')
    return "".join(lines)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def settings(folder: Path, api: int, hook: int) -> str:
    return (
        f'[pipeline]\ntransport = "spool"\n[api]\nport = {api}\n[store]\npath = "{folder}/state/store.duckdb"\n'
        f'[spool]\ndirectory = "{folder}/spool"\n'
        f'[[notify.webhooks]]\nname = "benchmark"\nurl = "http://127.0.0.1:{hook}/"\n'
    )


def run(story: str, seed: int, folder: Path) -> dict[str, dict[str, float]]:
    """Runs once; returns fault name -> {"incident": s, "webhook": s}, infinite if it was never reported."""
    length, faults = STORIES[story]
    shift, report, stop = random.Random(seed).uniform(0, 10), Report(), threading.Event()
    folder.mkdir()
    with receiver(lambda at, labels: report.webhook.append((at, labels))) as hook:
        api = free_port()
        (folder / "fleetpulse.toml").write_text(settings(folder, api, hook))
        (folder / "scenario.toml").write_text(scenario(faults, length, shift))
        words = [sys.executable, str(ROOT / "fleetpulse.py")]
        common = ["--config", "fleetpulse.toml"]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("FLEETPULSE")} | {"PYTHONPATH": str(ROOT)}
        sent = [*words, "simulate", *common, "--scenario", "scenario.toml", "--seed", str(seed), "--output", "truth"]
        simulator = Session(
            [*sent, "--to", "spool", "--speed", "1", "--backfill", str(HISTORY)],
            environ,
            folder,
            folder / "simulate.log",
        )
        wait_for(simulator, "back-fill sent")
        pipeline = Session([*words, "pipeline", *common], environ, folder, folder / "pipeline.log")
        watcher = threading.Thread(target=watch_api, args=(api, report, stop))
        watcher.start()
        try:
            if simulator.process.wait(timeout=HISTORY + length + 120) != 0:
                raise RuntimeError(f"the simulator failed: {simulator.log.read_text()[-2000:]}")
            silent = now()
            time.sleep(PATIENCE if story == "fleet" else 20)
        finally:
            stop.set()
            watcher.join()
            pipeline.end()
            simulator.end()
    found = {}
    for fault, truth in zip(faults, in_order(faults, folder), strict=True):
        found[fault.name] = delays(report, begin(fault, truth, folder), names(truth), fault.severities)
    if story == "fleet":
        found["all agents silent"] = delays(report, silent, {"site:local"}, PAGE)
    return found


def wait_for(session: Session, words: str) -> None:
    """Waits until the process prints `words`."""
    deadline = time.monotonic() + 300
    while words not in session.log.read_text():
        if session.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"'{words}' was never printed: {session.log.read_text()[-2000:]}")
        time.sleep(0.1)


def in_order(faults: Sequence[Fault], folder: Path) -> list[dict[str, Any]]:
    """Returns lines of the truth in the order of `faults`, each kind once."""
    lines = [json.loads(line) for line in (folder / "truth/truth.jsonl").read_text().splitlines()]
    return [next(line for line in lines if line["kind"] == fault.kind) for fault in faults]


def begin(fault: Fault, truth: Mapping[str, Any], folder: Path) -> int:
    """Returns the onset in UTC us; for a leak, when a rope is wet according to its event."""
    if fault.kind == "coolant_leak":
        events = map(json.loads, (folder / "truth/events.jsonl").read_text().splitlines())
        return from_iso(next(event["time"] for event in events if event["kind"] == "leak"))
    return from_iso(truth["onset"])


def names(truth: Mapping[str, Any]) -> set[str]:
    """Returns entities that may be the cause: the affected ones, and the node of a GPU."""
    affected = {truth["entity"], *truth.get("entities", [])}
    return affected | {f"node:{e.removeprefix('gpu:').rsplit('.', 1)[0]}" for e in affected if e.startswith("gpu:")}


def delays(report: Report, onset: int, blamed: set[str], severities: Sequence[str]) -> dict[str, float]:
    """Returns the seconds from the onset to the first report of any of `blamed` at one of `severities`."""
    sources = {"incident": list(report.api.values()), "webhook": report.webhook}
    out = {}
    for source, rows in sources.items():
        times = [
            at
            for at, row in rows
            if at >= onset and row["severity"] in severities and blamed & {row.get("entity"), row.get("cause")}
        ]
        late = (min(times) - onset) / SECOND if times else math.inf
        out[source] = late if late <= PATIENCE else math.inf
    return out


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least `share` of all do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def table(results: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Returns Markdown: fault, runs reported, p50 and p95 to the incident and to the webhook."""
    head = "| fault | reported | incident p50 | p95 | webhook p50 | p95 |\n|---|---|---|---|---|---|\n"
    lines = []
    for name, runs in results.items():
        cells = [
            f"{percentile([r[source] for r in runs], share):.1f} s".replace("inf s", "never")
            for source in ("incident", "webhook")
            for share in (0.5, 0.95)
        ]
        reported = sum(math.isfinite(r["webhook"]) for r in runs)
        lines.append(f"| {name} | {reported} of {len(runs)} | {' | '.join(cells)} |\n")
    return head + "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--parallel", type=int, default=3, help="runs at the same time; each needs a third of a core")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--results", type=Path, help="JSON of all delays")
    options = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="fleetpulse-delays-") as name, ThreadPoolExecutor(options.parallel) as pool:
        jobs = [(story, options.seed + n) for story in STORIES for n in range(options.runs)]
        for found in pool.map(lambda job: run(job[0], job[1], Path(name) / f"{job[0]}-{job[1]}"), jobs):
            for fault, late in found.items():
                results.setdefault(fault, []).append(late)
                print(fault, late, file=sys.stderr, flush=True)
    if options.results:
        options.results.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results), end="")


if __name__ == "__main__":
    main()
