"""Measures CPU and memory of the agent on a node with 8 GPUs and 8 NICs, beside Debian's node exporter.

    python -m benchmarks.agent [--seconds 60] [--settle 20] [--kafka]

Runs the real `fleetpulse agent` with every collector at 1 Hz. NVML is a stub, NICs and sensors are files
(node_files.py), and the kernel is this machine's. prometheus-node-exporter is scraped once a second, if installed.
CPU is user and system time of all processes; memory is the sum of their proportional set sizes. The values of files
do not change, so the bytes sent are a minimum. --kafka: a second run that sends to a real broker.
"""

from __future__ import annotations

import argparse
import http.client
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import node_files
from benchmarks.processes import Cost, Session, wait_for
from pipeline.model.errors import GapError
from pipeline.model.records import TELEMETRY, Batch
from pipeline.transport import wire
from pipeline.transport.spool import SpoolTransport

ROOT = Path(__file__).parents[1]
EXPORTER = "prometheus-node-exporter"
READY_S = 30.0  # chosen: both start in 2 s


@dataclass
class Scraped:
    """Scrapes of the exporter: number answered, their bytes, and series of the last one."""

    session: Session | None = None
    count: int = 0
    size: int = 0
    series: int = 0
    stop: threading.Event = field(default_factory=threading.Event)


def run_exporter(folder: Path) -> Scraped:
    """Starts the exporter and scrapes it each second; does nothing if it is not installed."""
    scraped = Scraped()
    if shutil.which(EXPORTER) is None:
        print(f"no {EXPORTER} here (apt-get install {EXPORTER}): it is not measured", file=sys.stderr)
        return scraped
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [EXPORTER, f"--web.listen-address=127.0.0.1:{port}"]
    scraped.session = Session(words, os.environ, folder, folder / "exporter.log")
    threading.Thread(target=_scrape, args=(scraped, port), daemon=True).start()
    wait_for(lambda: scraped.count, READY_S, EXPORTER)
    return scraped


def _scrape(scraped: Scraped, port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    while not scraped.stop.wait(1.0 - time.time() % 1.0):
        try:
            connection.request("GET", "/metrics")
            body = connection.getresponse().read()
        except (OSError, http.client.HTTPException):  # not started yet
            connection.close()
            continue
        scraped.count += 1
        scraped.size += len(body)
        scraped.series = sum(1 for line in body.splitlines() if line and not line.startswith(b"#"))


def write_config(folder: Path, more: str) -> tuple[Path, dict[str, str]]:
    """Writes the configuration file and returns the environment of the agent."""
    tables, environ = node_files.build(folder)
    lines = ["[agent]", "node = 'n1'", "[spool]", f"directory = '{folder / 'spool'}'", more]
    for name, table in tables.items():
        lines += [f"[collector.{name}]", *(f"{key} = '{value}'" for key, value in table.items())]
    path = folder / "fleetpulse.toml"
    path.write_text("\n".join(lines) + "\n")
    return path, environ | {"PYTHONPATH": str(ROOT)}


def read_batches(folder: Path, first: int, behind: int) -> list[Batch]:
    """Returns the batches that the agent spooled whose first tick is at `first` or later, and before `behind`."""
    transport, found = SpoolTransport(folder / "spool"), []
    for partition in transport.partitions():
        offset, end = transport.bounds(partition)
        while partition.topic == TELEMETRY and offset < end:
            try:
                messages = transport.read(partition, offset, 100, 1 << 20)
            except GapError as gap:
                offset = gap.next_offset
                continue
            found += [wire.decode(message.value) for message in messages]
            offset += len(messages)
    transport.close()
    return [b for b in found if first <= int(b.times[0]) < behind]


def count_samples(batch: Batch) -> int:
    """Counts values that are not missing."""
    columns = [column for block in batch.blocks for column in block.columns.values()]
    return sum(int(np.count_nonzero(_measured(np.asarray(column)))) for column in columns)


def _measured(column: NDArray[Any]) -> NDArray[np.bool_]:
    return np.asarray(~np.isnan(column) if column.dtype.kind == "f" else column != np.iinfo(column.dtype).max)


def reading_times(found: list[Batch]) -> list[tuple[str, float, int]]:
    """Returns (collector, mean ms of its readings, times it was not ok), slowest first."""
    times: dict[str, list[float]] = {}
    not_ok: Counter[str] = Counter()
    for block in (block for batch in found for block in batch.blocks if "collector.latency" in block.columns):
        columns = (block.columns["collector.latency"][-1], block.columns["collector.state"][-1])
        for entity, latency, state in zip(block.entities, *columns, strict=True):
            name = entity.partition(".")[2]
            times.setdefault(name, []).append(float(latency))
            not_ok[name] += int(state) != 1
    rows = [
        (name, 1000 * float(np.nanmean(t)) if not np.isnan(t).all() else 0.0, not_ok[name]) for name, t in times.items()
    ]
    return sorted(rows, key=lambda row: -row[1])


def process_names(costs: dict[int, Cost]) -> list[str]:
    """Returns the name of each process: the agent first, then the workers (agents/node/workers/processes.py)."""
    return ["agent" if i == 0 else cost.name for i, cost in enumerate(costs.values())]


def measure_run(folder: Path, title: str, more: str, seconds: float, settle: float) -> None:
    """Runs the agent, waits `settle` s, measures for `seconds` and prints."""
    config, environ = write_config(folder, more)
    words = [sys.executable, str(ROOT / "fleetpulse.py"), "agent", "--config", str(config)]
    agent, scraped = Session(words, environ, folder, folder / "agent.log"), run_exporter(folder)
    try:
        wait_for(lambda: list((folder / "spool").rglob("*.seg")), READY_S, "the agent's spool")
        time.sleep(settle)
        before, beside = agent.costs(), scraped.session.costs() if scraped.session else {}
        begun, started, bytes_before = time.monotonic(), time.time_ns() // 1000, scraped.size
        time.sleep(seconds)
        took, after = time.monotonic() - begun, agent.costs()
        ended, other = time.time_ns() // 1000, scraped.session.costs() if scraped.session else {}
        size = scraped.size - bytes_before
    finally:
        scraped.stop.set()
        agent.end()
        if scraped.session:
            scraped.session.end()
    found = read_batches(folder, started, ended)
    spooled = sum(p.stat().st_size for p in (folder / "spool").rglob("*.seg"))
    values = sum(map(count_samples, found)) / took
    ticks = sum(len(batch.times) for batch in found)
    print(f"\n{title}: {took:.0f} s, {ticks} ticks in {len(found)} messages, {values:.0f} samples/s")
    print(f"{'':34s} {'CPU of one core':>16s} {'PSS MiB':>8s} {'processes':>10s} {'bytes/s':>8s}")
    _line("fleetpulse agent", before, after, took, spooled / (took + settle))
    if other:
        _line(f"node exporter, {scraped.series} series", beside, other, took, size / took)
    for label, (pid, cost) in zip(process_names(after), after.items(), strict=True):
        used = cost.cpu - before[pid].cpu if pid in before else cost.cpu
        print(f"  {label:32s} {100 * used / took:14.2f} % {cost.memory:8.1f}")
    print(f"  {'collector':32s} {'ms per reading':>16s}")
    for name, latency, not_ok in reading_times(found):
        print(f"  {name:32s} {latency:16.3f}{'  not ok' if not_ok else ''}")


def _line(name: str, before: dict[int, Cost], after: dict[int, Cost], took: float, rate: float) -> None:
    used = sum(c.cpu - (before[pid].cpu if pid in before else 0.0) for pid, c in after.items())
    memory = sum(c.memory for c in after.values())
    print(f"{name:34s} {100 * used / took:14.2f} % {memory:8.1f} {len(after):10d} {rate:8.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--settle", type=float, default=20.0, help="before measuring")
    parser.add_argument("--kafka", action="store_true", help="a second run, to a real broker")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        measure_run(Path(name), "spool alone", "", options.seconds, options.settle)
    if options.kafka:
        from benchmarks.kafka import PATIENT, make_topics
        from pipeline.config.sections import Kafka
        from tests.kafka_broker import Broker, missing

        if lacking := missing():
            sys.exit(f"benchmarks.agent: {lacking}: run 'make parts'")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with Broker(folder / "broker", heap="512m", properties=PATIENT) as broker:
                make_topics(Kafka(bootstrap_servers=broker.bootstrap))
                more = f"[kafka]\nbootstrap_servers = '{broker.bootstrap}'\n[pipeline]\ntransport = 'kafka'"
                measure_run(folder, "spool and Kafka", more, options.seconds, options.settle)


if __name__ == "__main__":
    main()
