"""Memory and CPU of agent, simulated fleet and pipeline during a broker outage, and the resulting losses.

    python -m benchmarks.outage [--minutes 10] [--freeze] [--nodes 16] [--settle 60]

Starts a real broker and, in separate processes, `fleetpulse init`, `pipeline`, `agent` and `simulate` at 1 Hz. After
`settle` seconds the broker is killed (SIGKILL; with --freeze it is stopped, connections stay open) and comes back after
`minutes`. The program ends when all data measured until then is stored. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.watched import Api, Watched
from pipeline.model.records import iso
from tests.kafka_broker import Broker, BrokerError, missing

LENIENT = {"broker.session.timeout.ms": "3000"}
"""With the 1 s of the tests the broker loses its leadership on a busy machine; with Kafka's 9 s a restart lasts 10
s."""
SAMPLE_S, LOOK_S = 5.0, 0.5  # between samples of memory, and between requests of /readyz
START_S = 60.0  # chosen: a pipeline starts in 3 s
DRAIN_S = 900.0  # chosen: longer than any outage should need
END_S = 10.0  # from SIGTERM to SIGKILL; services end within 5 s

CONFIG = """\
[site]
name = "outage"
[agent]
node = "real"
interval = 1.0
[spool]
directory = "{folder}/spool"
[store]
path = "{folder}/store.duckdb"
[kafka]
bootstrap_servers = "{bootstrap}"
[api]
port = {port}
[pipeline]
transport = "kafka"
"""
SCENARIO = """\
version = 1
duration = 86400
interval = 1
[fleet]
nodes = {nodes}
gpus_per_node = 8
"""
COMPLETE = """\
SELECT count(*) AS nodes, sum(n - d) AS twice, sum(span + 1 - d) AS missing, epoch_us(min(newest)) AS reached FROM (
    SELECT entity, count(*) AS n, count(DISTINCT time) AS d, max(time) AS newest,
        (epoch_us(max(time)) - epoch_us(min(time))) // 1000000 AS span
    FROM node GROUP BY entity)
"""
LOST = "SELECT coalesce(sum(next_sequence - first_sequence), 0) FROM gaps"


@dataclass
class Run:
    """Observed processes, and changes of /readyz by seconds since `since`."""

    folder: Path
    api: Api
    watched: list[Watched]
    since: float = field(default_factory=time.monotonic)
    ready: list[tuple[float, int, str]] = field(default_factory=list)
    _sampled: float = float("-inf")

    def watch(self, phase: str, seconds: float) -> Iterator[None]:
        """Samples until `seconds` are over, or the caller stops iterating."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._look()
            if time.monotonic() - self._sampled >= SAMPLE_S:
                self._sampled = time.monotonic()
                for each in self.watched:
                    each.sample(phase)
            yield
            time.sleep(LOOK_S)

    def _look(self) -> None:
        status, reasons = self.api.ready()
        if not self.ready or (status, reasons) != self.ready[-1][1:]:
            self.ready.append((time.monotonic() - self.since, status, reasons))

    def spooled(self) -> int:
        """Bytes in all spools."""
        return sum(path.stat().st_size for path in self.folder.joinpath("spool").rglob("*") if path.is_file())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found


@contextlib.contextmanager
def service(folder: Path, *words: str) -> Iterator[Watched]:
    """A running `fleetpulse WORDS`, stopped at the end by its id, and by the kernel if this process is killed."""
    environ = os.environ | {"FLEETPULSE_PARENT": str(os.getpid())}
    with open(folder / f"{words[0]}.log", "wb") as log:
        process = subprocess.Popen(command(folder, *words), stdout=log, stderr=log, env=environ)
        try:
            yield Watched(words[0], process.pid)
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    print(f"{words[0]} ended with {process.returncode}", file=sys.stderr)


def command(folder: Path, *words: str) -> Sequence[str]:
    name, *rest = words
    return [sys.executable, "fleetpulse.py", name, "--config", str(folder / "fleetpulse.toml"), *rest]


def outage(broker: Broker, run: Run, minutes: float, freeze: bool, settle: float) -> dict[str, str]:
    """Runs the whole outage; returns its result in words."""
    for _ in run.watch("before", settle):
        pass
    run.since, run.ready = time.monotonic(), []
    broker.freeze() if freeze else broker.kill()
    most = 0
    for _ in run.watch("away", minutes * 60):
        most = max(most, run.spooled())
    broker.thaw() if freeze else broker.start()
    back, returned = time.time_ns() // 1000, time.monotonic()
    drained = None
    for _ in run.watch("drain", DRAIN_S):
        most = max(most, run.spooled())
        if run.api.number(COMPLETE, "reached") >= back and run.api.ready()[0] == 200:
            drained = time.monotonic() - returned
            break
    for _ in run.watch("after", settle):
        pass
    unready = [(at, reasons) for at, status, reasons in run.ready if status == 503]
    return {
        "broker": f"{'frozen' if freeze else 'killed'} for {minutes:g} min",
        "not ready after": f"{unready[0][0]:.1f} s: {unready[0][1]}" if unready else "never",
        "all stored after its return": f"{drained:.1f} s" if drained is not None else f"not within {DRAIN_S:.0f} s",
        "spools at most": f"{most / 1e6:.1f} MB, now {run.spooled() / 1e6:.1f} MB",
        "nodes": str(run.api.number(COMPLETE, "nodes")),
        "messages lost (gaps)": str(run.api.number(LOST)),
        "seconds without a row": str(run.api.number(COMPLETE, "missing")),
        "rows stored twice": str(run.api.number(COMPLETE, "twice")),
        "duplicates dropped": f"{run.api.metric('fleetpulse_ingest_duplicates_total'):.0f}",
    }


def table(watched: Sequence[Watched]) -> Iterator[str]:
    names = ("PSS MiB (last)", "PSS (peak)", "RSS (peak)", "CPU % of a core")
    yield f"{'process':<10}{'phase':<8}" + "".join(f"{name:>17}" for name in names)
    for each, phase in itertools.product(watched, ("before", "away", "drain", "after")):
        if figures := each.figures(phase):
            yield f"{each.name:<10}{phase:<8}" + "".join(f"{found:>17.1f}" for found in figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--freeze", action="store_true", help="SIGSTOP instead of SIGKILL")
    parser.add_argument("--nodes", type=int, default=16, help="simulated, with 8 GPUs each")
    parser.add_argument("--settle", type=float, default=60.0, help="seconds before the outage and after it")
    given = parser.parse_args()
    if lacking := missing():
        sys.exit(f"benchmarks.outage: {lacking}: run 'make parts'")
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleetpulse-outage-")))
        broker = stack.enter_context(Broker(folder / "broker", properties=LENIENT))
        port = free_port()
        (folder / "fleetpulse.toml").write_text(CONFIG.format(folder=folder, bootstrap=broker.bootstrap, port=port))
        (folder / "fleet.toml").write_text(SCENARIO.format(nodes=given.nodes))
        subprocess.run(command(folder, "init"), check=True)
        watched = [stack.enter_context(service(folder, "pipeline"))]
        run = Run(folder, Api(port), watched)
        if not any(run.api.ready()[0] == 200 for _ in run.watch("start", START_S)):
            sys.exit(f"pipeline is not ready: {run.ready}\n{(folder / 'pipeline.log').read_text()[-2000:]}")
        watched.append(stack.enter_context(service(folder, "agent")))
        fleet = ("--scenario", str(folder / "fleet.toml"), "--to", "kafka")
        watched.append(stack.enter_context(service(folder, "simulate", *fleet)))
        try:
            came = outage(broker, run, given.minutes, given.freeze, given.settle)
        finally:
            for at, status, reasons in run.ready:
                print(f"/readyz at {at:7.1f} s: {status} {reasons}", file=sys.stderr)
        print("\n".join([*table(watched), *(f"{what}: {found}" for what, found in came.items())]), flush=True)
        print(f"until {iso(time.time_ns() // 1000)}", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except BrokerError as error:
        sys.exit(f"benchmarks.outage: {error}")
