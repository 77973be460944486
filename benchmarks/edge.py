"""Seconds from a changed flow, pressure or leak sensor of a BMC to the event committed by the pipeline.

    python -m benchmarks.edge [--rounds 3] [--bmcs 6] [--latency 0.1] [--fast 0.5] [--interval 1]
        [--slow] [--no-stream]

Simulated coolant units answer over real HTTP, each after `latency` seconds. The real agent reads them and evaluates its
edge rules; the real pipeline ingests its spool. In each round every sensor changes at a random moment. --slow: one more
BMC, which answers after 180 s. --no-stream: no server-sent events, so that a leak is found by polling. Only leaks use
the stream: flow and pressure are always polled. Exits with 1 unless all were reported, flow and pressure within 3 s and
a leak within 10 s for 95 of 100.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.watched import Api
from tests.agents.redfish_double import Double, Fault
from tests.agents.redfish_faults import LONGEST_DELAY
from tests.agents.redfish_trees import FLOW, LEAK, SUPPLY_PRESSURE, cdu

ROOT = Path(__file__).parents[1]
CHANGES: dict[str, tuple[str, str, Any, Any]] = {
    # kind of event -> resource, pointer, normal value, faulty value
    "flow_collapse": (FLOW, "/Reading", 324.0, 90.0),
    "pressure_collapse": (SUPPLY_PRESSURE, "/Reading", 320.0, 60.0),
    "leak": (LEAK, "/DetectorState", "OK", "Critical"),
}
GOALS = {"flow_collapse": 3.0, "pressure_collapse": 3.0, "leak": 10.0}
LEARN_S, READY_S, ROUND_S, LOST_S = 50.0, 60.0, 95.0, 30.0
"""Until the rules know normal values; until all run; one round, longer by 60 s than changes are spread; after which an
event counts as lost. Chosen."""
SPREAD_S, POLL_S = 25.0, 0.05
QUERY = (
    "SELECT entity, kind, data, epoch(time) FROM events WHERE kind IN ('flow_collapse', 'pressure_collapse', 'leak')"
)


@dataclass
class Change:
    """One sensor that changes at `moment` (monotonic seconds); `reported`: when its event was seen in the pipeline.

    decided: seconds from the change to the agent's reading that decided.
    """

    bmc: int
    kind: str
    moment: float
    made: float = 0.0
    reported: float = 0.0
    wall: float = 0.0
    decided: float = 0.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def configuration(home: Path, doubles: list[Double], port: int, fast: float, interval: float) -> Path:
    """An agent that reads only the simulated BMCs, and a pipeline that reads its spool."""
    (home / "password").touch(0o600)
    (home / "password").write_text(doubles[0].password)
    lines = ["[agent]", 'node = "row1"', f"interval = {interval}", "[spool]", f'directory = "{home / "spool"}"']
    lines += ["[store]", f'path = "{home / "store.duckdb"}"', "[api]", f"port = {port}"]
    for number, double in enumerate(doubles):
        lines += ["[[collector.redfish.bmcs]]", f'name = "c{number}"', f'url = "{double.url}"', "allow_http = true"]
        lines += [
            f'user = "{double.user}"',
            f'password_file = "{home / "password"}"',
            'parents = ["rack:r1"]',
            f"fast = {fast}",
        ]
    path = home / "fleetpulse.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


@contextmanager
def running(home: Path, config: Path, *commands: str) -> Iterator[None]:
    """Starts the product's processes; their logs go to files."""
    with ExitStack() as stack:
        for command in commands:
            log = stack.enter_context((home / f"{command}.log").open("w"))
            words = [sys.executable, str(ROOT / "fleetpulse.py"), command, "--config", str(config)]
            process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
        yield


def counted(port: int) -> dict[tuple[int, str], tuple[int, float]]:
    """Returns (BMC, kind of event) -> (committed events of a unit's first entity, time of the newest one)."""
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/v1/sql",
        json.dumps({"query": QUERY}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=10) as answer:
        rows = json.load(answer)["rows"]
    found: dict[tuple[int, str], dict[str, int]] = {}
    newest: dict[tuple[int, str], float] = {}
    for entity, kind, data, at in rows:
        content = json.loads(data) if isinstance(data, str) else data
        if content["state"] == "active":
            bmc = int(entity.split(":")[1][1:].split(".")[0])
            per_entity = found.setdefault((bmc, kind), {})
            per_entity[entity] = per_entity.get(entity, 0) + 1
            newest[bmc, kind] = max(at, newest.get((bmc, kind), 0.0))
    return {key: (max(per_entity.values()), newest[key]) for key, per_entity in found.items()}


def one_round(doubles: list[Double], port: int, rng: random.Random) -> list[Change]:
    """Each sensor fails once at a random time, and recovers when that was reported."""
    began, before = time.monotonic(), counted(port)
    changes = [Change(b, kind, began + rng.uniform(0, SPREAD_S)) for b in range(len(doubles)) for kind in CHANGES]
    while time.monotonic() < began + ROUND_S:
        now = time.monotonic()
        for change in (c for c in changes if not c.made and c.moment <= now):
            path, pointer, _, bad = CHANGES[change.kind]
            change.made, change.wall = time.monotonic(), time.time()
            doubles[change.bmc].set(path, pointer, bad, event=change.kind == "leak")
        seen = counted(port)
        for change in (c for c in changes if c.made and not c.reported):
            key = (change.bmc, change.kind)
            count, at = seen.get(key, (0, 0.0))
            if count > before.get(key, (0, 0.0))[0]:
                change.reported, change.decided = time.monotonic(), at - change.wall
            if change.reported or time.monotonic() - change.made > LOST_S:
                path, pointer, well, _ = CHANGES[change.kind]
                doubles[change.bmc].set(path, pointer, well, event=change.kind == "leak")
                change.reported = change.reported or -1.0
        time.sleep(POLL_S)
    return changes


def report(changes: list[Change]) -> bool:
    """Prints quantiles per kind; returns whether all goals are met."""
    good = True
    print(f"{'event':18} {'n':>4} {'lost':>4} {'p50':>6} {'p95':>6} {'p99':>6} {'max':>6} {'goal':>5} {'decided':>7} s")
    for kind, goal in GOALS.items():
        mine = [c for c in changes if c.kind == kind]
        took = sorted(c.reported - c.made for c in mine if c.reported > 0)
        lost = len(mine) - len(took)
        quantiles = [took[min(len(took) - 1, int(q * len(took)))] for q in (0.5, 0.95, 0.99, 1.0)] if took else []
        words = " ".join(f"{value:6.2f}" for value in quantiles)
        decided = statistics.median(c.decided for c in mine if c.reported > 0) if took else 0.0
        print(f"{kind:18} {len(mine):4} {lost:4} {words} {goal:5.1f} {decided:7.2f}")
        good &= bool(took) and not lost and quantiles[1] <= goal
    return good


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bmcs", type=int, default=6)
    parser.add_argument("--latency", type=float, default=0.1)
    parser.add_argument("--fast", type=float, default=0.5, help="seconds between two readings of flow and pressure")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two readings of the agent")
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--no-stream", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(words)
    rng, changes = random.Random(asked.seed), []
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleetpulse-edge-")))
        doubles = [stack.enter_context(Double(cdu())) for _ in range(asked.bmcs)]
        slow = [stack.enter_context(Double(cdu()))] if asked.slow else []
        for double in doubles:
            double.streams.on = not asked.no_stream
            double.fault("/redfish/*", Fault(delay=asked.latency))
        for double in slow:
            double.fault("*", Fault(delay=LONGEST_DELAY))
        port = free_port()
        config = configuration(home, [*doubles, *slow], port, asked.fast, asked.interval)
        stack.enter_context(running(home, config, "agent", "pipeline"))
        _ready(port)
        time.sleep(LEARN_S)
        for _ in range(asked.rounds):
            changes += one_round(doubles, port, rng)
        good = report(changes)
        most = max(double.most_in_flight for double in [*doubles, *slow])
        asking = sum(len(double.requests) for double in doubles) / len(doubles)
        print(f"maximum concurrent requests to one BMC: {most}; requests to each: {asking:.0f}")
    return 0 if good else 1


def _ready(port: int) -> None:
    """Waits until the pipeline serves. Raises TimeoutError."""
    until = time.monotonic() + READY_S
    while Api(port).ready()[0] == 0:
        if time.monotonic() > until:
            raise TimeoutError(f"the pipeline does not answer on port {port} after {READY_S:g} s")
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
