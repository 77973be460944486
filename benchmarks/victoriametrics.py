"""The read path and the sealed files beside VictoriaMetrics with the same samples, in CPU of the process that answers.

    python -m benchmarks.victoriametrics [--binary PATH] [--nodes 1000] [--day-devices 16]

Needs the binary `victoria-metrics` on PATH or in --binary:

    go install github.com/VictoriaMetrics/VictoriaMetrics/app/victoria-metrics@v1.150.0

Two loads: a fleet (nodes x 8 GPUs x 13 gauges, 10 minutes at 10 s) and a day (devices x 8 gauges and 2 counters, 1 s).
VictoriaMetrics imports JSON lines of 12 values, the cheapest of its ways in that takes any value. Both answer over
HTTP; clients are other processes. Of each query the median of 11 after the first. Printed: import beside our insert,
bytes per sample of the sealed files beside its data, and CPU of the newest value of all series, of the 50 series with
the highest mean of ten minutes (ours: the 50 devices furthest from their peers, which is more), of a day of one series
in 1,000 points, and of the same with 30 days of history.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fleet import cpu
from pipeline.api.server import create_app, start_server
from pipeline.config.sections import Api, Config, Store
from pipeline.model.records import SECOND, Rows, iso
from pipeline.model.topology import Topology
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.store.hot_tables import HotTables
from pipeline.store.latest import CurrentValues, LatestRows
from pipeline.store.sealing import Sealer

GAUGES = (
    *("power", "temperature", "memory_temperature", "edge_temperature", "utilization", "memory_utilization"),
    *("sm_active", "sm_occupancy", "tensor_active", "dram_active", "fp32_active", "power_limit", "pcie_tx_rate"),
)
COUNTERS = ("energy", "pcie_lane_errors")
IMPORTED = 12  # values of a series in a line
COMMIT_TICKS = 60
ROUNDS = 12


@dataclass(frozen=True)
class Load:
    """Devices by ticks. step: seconds between ticks. start: UTC s of the first. names: of the signals."""

    devices: int
    ticks: int
    step: int
    start: int
    names: tuple[str, ...]

    @property
    def samples(self) -> int:
        return self.devices * self.ticks * len(self.names)

    def entities(self) -> tuple[str, ...]:
        """Returns the names of the devices, 8 per node."""
        return tuple(f"gpu:n{d >> 3:05d}.{d & 7}" for d in range(self.devices))

    def values(self, first: int, ticks: int) -> dict[str, np.ndarray]:
        """Returns (ticks, devices) of each signal: gauges that wander in steps of a tenth, counters that grow."""
        out = {}
        for i, name in enumerate(self.names):
            random = np.random.default_rng((i, first))
            shape = ticks, self.devices
            if name in COUNTERS:
                out[name] = ((first + np.arange(ticks))[:, None] * 400_000 + random.integers(0, 400_000, shape)).astype(
                    "u8"
                )
            else:
                level = 40 + np.arange(self.devices) % 30
                out[name] = (level + np.round(random.normal(0, 0.4, shape), 1)).astype("f4")
        return out


def insert(database: Database, load: Load) -> tuple[float, LatestRows, Devices]:
    """Stores the load as ingest does; returns CPU with the checkpoint, the newest rows and the devices."""
    devices, tables = Devices(database.connection), HotTables(database.connection)
    latest, used = LatestRows(database, (load.start + load.ticks * load.step) * SECOND, 1 << 62), 0.0
    nodes = load.entities()
    for node in range(0, load.devices, 8):
        devices.assign_ids("gpu", "local", f"n{node >> 3:05d}", False, nodes[node : node + 8])
    ids = np.arange(load.devices, dtype=np.int32)
    for first in range(0, load.ticks, COMMIT_TICKS):
        ticks = min(COMMIT_TICKS, load.ticks - first)
        values = load.values(first, ticks)
        times = (load.start + (first + np.arange(ticks)) * load.step) * SECOND
        rows = Rows(
            "gpu",
            np.repeat(times, load.devices),
            np.tile(ids, ticks),
            {f"gpu.{n}": v.reshape(-1) for n, v in values.items()},
        )
        begun = cpu()
        with database.transaction() as connection:
            devices.save(connection)
            tables.append(connection, [rows])
        devices.mark_saved()
        latest.commit([rows])
        used += cpu() - begun
    begun = cpu()
    database.connection.execute("CHECKPOINT")
    return used + cpu() - begun, latest, devices


def bodies(load: Load) -> Iterator[bytes]:
    """Yields bodies of /api/v1/import: JSON lines of IMPORTED values of one series."""
    entities = load.entities()
    for first in range(0, load.ticks, IMPORTED):
        ticks = min(IMPORTED, load.ticks - first)
        stamps = json.dumps([(load.start + (first + t) * load.step) * 1000 for t in range(ticks)])
        for name, values in load.values(first, ticks).items():
            lines = []
            for entity, column in zip(entities, values.T.tolist(), strict=True):
                label = f'{{"__name__":"gpu_{name}","entity":"{entity}"}}'
                listed = ",".join(repr(round(value, 1)) for value in column)
                lines.append(f'{{"metric":{label},"values":[{listed}],"timestamps":{stamps}}}\n')
            yield "".join(lines).encode()


class VictoriaMetrics:
    """A running server on an empty folder."""

    def __init__(self, binary: str, folder: Path) -> None:
        self.folder = folder
        self.port = _free_port()
        command = [binary, f"-storageDataPath={folder}/data", f"-httpListenAddr=127.0.0.1:{self.port}"]
        command += ["-retentionPeriod=120", "-search.disableCache", "-search.latencyOffset=1s"]
        command += ["-search.maxUniqueTimeseries=1000000"]
        self.log = (folder / "log").open("w")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        for _ in range(300):
            try:
                self.get("/api/v1/query?query=1")
                return
            except OSError:
                time.sleep(0.1)
        raise SystemExit(f"{binary} does not answer; see {folder}/log")

    def get(self, path: str) -> bytes:
        return _get(self.port, path)

    def load(self, lines: Iterable[bytes]) -> float:
        """Imports bodies of /api/v1/import; returns the CPU of the server until everything is flushed."""
        link, begun = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300), self.cpu()
        for body in lines:
            link.request("POST", "/api/v1/import", body)
            answer = link.getresponse()
            answer.read()
            assert answer.status < 300, answer.status
        self.get("/internal/force_flush")
        used = self.cpu() - begun
        self.get("/internal/force_merge")
        time.sleep(8)
        return used

    def cpu(self) -> float:
        return _thread_ns(self.process.pid) / 1e9

    def data_bytes(self) -> int:
        return sum(path.stat().st_size for path in (self.folder / "data" / "data").rglob("*") if path.is_file())

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self.log.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _get(port: int, path: str) -> bytes:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    link.request("GET", path)
    answer = link.getresponse()
    body = answer.read()
    if answer.status != 200:
        raise OSError(f"{path}: {answer.status}: {body[:200]!r}")
    link.close()
    return body


def _thread_ns(pid: int) -> int:
    """CPU of a process's living threads (ns); both servers keep their threads."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            total += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
        except OSError:
            continue
    return total


def measure(pid: int, port: int, path: str) -> tuple[float, int]:
    """Returns (median CPU of the process in ms, bytes of the answer). The client is another process."""
    used, size = [], 0
    for _ in range(ROUNDS):
        begun = _process_cpu(pid)
        size = int(
            subprocess.run([sys.executable, "-c", _CLIENT, str(port), path], capture_output=True, check=True).stdout
        )
        used.append((_process_cpu(pid) - begun) * 1000)
    return statistics.median(used[1:]), size


_CLIENT = """
import http.client, sys
link = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=120)
link.request("GET", sys.argv[2])
answer = link.getresponse()
body = answer.read()
assert answer.status == 200, body[:300]
print(len(body))
"""


def _process_cpu(pid: int) -> float:
    """CPU of a process (s), ended threads included for our own."""
    return time.process_time() if pid == os.getpid() else _thread_ns(pid) / 1e9


@dataclass
class ReadOnly:
    """A store without a pipeline, as the backend of the API."""

    database: Database
    devices: Devices
    latest: LatestRows
    topology: Topology

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)

    def record_refusal(self, user: Any, action: str, reason: str) -> None:
        """Nothing is refused: the client is this machine."""

    def cursor(self) -> Any:
        return self.database.cursor()

    def read_current(self, device_class: str, columns: Any = None) -> CurrentValues:
        return self.latest.read(device_class, self.devices, columns)

    def read_revision(self) -> object:
        return 0


class Ours:
    """Our API over HTTP on a store with a load."""

    def __init__(self, folder: Path, load: Load) -> None:
        self.folder = folder
        self.database = Database(folder / "store.duckdb")
        self.inserted, latest, devices = insert(self.database, load)
        entities = load.entities()
        parents = {e: (f"node:{e[4:10]}",) for e in entities}
        parents |= {f"node:n{n:05d}": (f"rack:r{n // 8:04d}",) for n in range(load.devices // 8)}
        backend = ReadOnly(self.database, devices, latest, Topology(parents))
        self.stop, self.now = threading.Event(), (load.start + (load.ticks - 1) * load.step) * SECOND + SECOND
        config = Config(api=Api(port=0))
        self.server = start_server(create_app(backend, config, lambda: self.now), config, self.stop)

    def seal(self, until: int) -> None:
        store = Store(path=self.database.path, telemetry_days=400.0)
        Sealer(self.database, store, lambda: until).seal(until)

    def sealed_bytes(self, step: int = 0) -> int:
        query = "SELECT coalesce(sum(bytes), 0) FROM sealed WHERE step = ?"
        return int(self.database.connection.execute(query, [step]).fetchall()[0][0])

    def close(self) -> None:
        self.stop.set()
        self.server.join(5)
        self.database.close()


def compare(name: str, ours: float, theirs: float, unit: str, note: str = "") -> None:
    """Prints one line: our figure, theirs, and the ratio."""
    print(f"{name:58} {ours:9.3f} {theirs:9.3f} {unit:9} {ours / theirs:7.3f}x  {note}", flush=True)


def query_path(expression: str, at: int, start: int | None = None, step: int = 0) -> str:
    """Returns the path of a query of VictoriaMetrics."""
    if start is None:
        return "/api/v1/query?" + urllib.parse.urlencode({"query": expression, "time": at, "nocache": 1})
    asked = {"query": expression, "start": start, "end": at, "step": step, "nocache": 1}
    return "/api/v1/query_range?" + urllib.parse.urlencode(asked)


def fleet(binary: str, folder: Path, nodes: int) -> None:
    """Import, newest values and top-50 of a fleet."""
    load = Load(nodes * 8, 60, 10, int(time.time()) // 3600 * 3600 - 3600, GAUGES)
    server, ours = VictoriaMetrics(binary, _made(folder / "vm")), Ours(_made(folder / "ours"), load)
    try:
        imported = server.load(bodies(load))
        print(f"{'':58} {'ours':>9} {'VM':>9}")
        compare(
            "insert: M samples per CPU second", load.samples / ours.inserted / 1e6, load.samples / imported / 1e6, "M/s"
        )
        last, pid = load.start + (load.ticks - 1) * load.step, os.getpid()
        theirs, size = measure(server.process.pid, server.port, query_path('{__name__=~"gpu_.*"}', last))
        wanted = "&".join(f"signal=gpu.{name}" for name in GAUGES)
        mine, our_size = measure(pid, ours.server.port, f"/api/v1/heatmap?{wanted}")
        compare(
            f"newest value of {len(GAUGES) * load.devices} series: CPU",
            mine,
            theirs,
            "ms",
            f"{our_size >> 10} and {size >> 10} KiB",
        )
        theirs, _ = measure(
            server.process.pid, server.port, query_path("topk(50, avg_over_time(gpu_power[10m]))", last)
        )
        span = f"from={iso(load.start * SECOND)}&to={iso((last + 10) * SECOND)}"
        mine, _ = measure(pid, ours.server.port, f"/api/v1/furthest?signal=gpu.power&k=50&{span}")
        compare("top-50 over 10 minutes: CPU", mine, theirs, "ms", "ours: furthest from the peers of the rack")
    finally:
        ours.close()
        server.close()


def day(binary: str, folder: Path, devices: int, hours: int) -> None:
    """Sealed bytes, a day of one series, and the same with 30 days of history."""
    start = int(time.time()) // 86400 * 86400 - 86400
    load = Load(devices, hours * 3600, 1, start, (*GAUGES[:8], *COUNTERS))
    server, ours = VictoriaMetrics(binary, _made(folder / "vm")), Ours(_made(folder / "ours"), load)
    try:
        imported = server.load(bodies(load))
        compare(
            "insert: M samples per CPU second", load.samples / ours.inserted / 1e6, load.samples / imported / 1e6, "M/s"
        )
        end = load.start + load.ticks
        step = max(1, load.ticks // 1000)
        pid, entity = os.getpid(), load.entities()[devices // 2]
        expression = f'avg_over_time(gpu_power{{entity="{entity}"}}[{step}s])'
        theirs, _ = measure(server.process.pid, server.port, query_path(expression, end, load.start, step))
        span = f"from={iso(load.start * SECOND)}&to={iso(end * SECOND)}"
        path = f"/api/v1/series?entity={entity}&signal=gpu.power&points=1000&peers=none&{span}"
        mine, _ = measure(pid, ours.server.port, path)
        compare(f"{hours} h of one series in 1,000 points, hot: CPU", mine, theirs, "ms")
        ours.seal((start + 2 * 86400) * SECOND)
        compare(
            "bytes per sample, sealed and merged",
            ours.sealed_bytes() / load.samples,
            server.data_bytes() / load.samples,
            "B",
        )
        mine, size = measure(pid, ours.server.port, path)
        compare(f"{hours} h of one series in 1,000 points, sealed: CPU", mine, theirs, "ms")
        print(f"{'wall of it, ms: median of 11':58} {wall(ours.server.port, path):9.1f}")
        multiply_history(ours, 30)
        again, same = measure(pid, ours.server.port, path)
        compare("the same with 30 days of history, beside 1 day", again, mine, "ms", f"{same} and {size} bytes")
        print(f"{'wall of it, ms: median of 11':58} {wall(ours.server.port, path):9.1f}")
    finally:
        ours.close()
        server.close()


def wall(port: int, path: str) -> float:
    """Returns the median latency (ms) of 11 requests."""
    taken = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        _get(port, path)
        taken.append((time.perf_counter() - begun) * 1000)
    return statistics.median(taken[1:])


def multiply_history(ours: Ours, days: int) -> None:
    """Adds copies of the day's files for the days before it, with shifted times."""
    connection, folder = ours.database.connection, ours.database.path.with_name(ours.database.path.name + ".history")
    files = [path for (path,) in connection.execute("SELECT path FROM sealed").fetchall()]
    for number in range(1, days):
        shift = f"INTERVAL '{number} days'"
        for path in files:
            source, target = folder / path, f"{path}.{number}.parquet"
            read = f"read_parquet('{source}', hive_partitioning = false)"
            rows = f"SELECT time - {shift} AS time, * EXCLUDE (time) FROM {read}"
            options = "FORMAT parquet, COMPRESSION zstd, PARQUET_VERSION v2"
            connection.execute(f"COPY ({rows}) TO '{folder / target}' ({options})")
            connection.execute(
                f"INSERT INTO sealed SELECT $1, class, step, site, day - {number}, first - {shift}, last - {shift}, "
                "rows, bytes FROM sealed WHERE path = $2",
                [target, path],
            )


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def main() -> None:
    """Runs both comparisons, each in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", default="victoria-metrics")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--day-devices", type=int, default=16)
    parser.add_argument("--hours", type=int, default=24)
    options = parser.parse_args()
    binary = shutil.which(options.binary)
    if binary is None:
        print(
            f"skipped: no program {options.binary!r}; go install "
            "github.com/VictoriaMetrics/VictoriaMetrics/app/victoria-metrics@v1.150.0, or --binary PATH"
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        for run, name, *arguments in (
            (fleet, "fleet", options.nodes),
            (day, "day", options.day_devices, options.hours),
        ):
            process = multiprocessing.get_context("spawn").Process(
                target=run, args=(binary, Path(folder) / name, *arguments)
            )
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(1)


if __name__ == "__main__":
    main()
