"""Latency of honest calls of the API while nodes send live, beside idle, and while others ask for too much.

    python -m benchmarks.api_load [--nodes 250] [--seconds 20]

The stream of a real agent, cloned to N nodes, is sent through a real broker as in benchmarks/live.py. One client
repeats the calls of a dashboard; in the phase `hostile` eight more ask for the heaviest SQL and ranges that the API
allows. Printed per phase: p50 and p95 of all calls (ms), the age of the newest stored row at its end (s), and at the
end the ratios of p95 and the rows that are missing in the store.
"""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import os
import sys
import tempfile
import threading
import time
import urllib.parse
from pathlib import Path

import numpy as np

from benchmarks.kafka import PATIENT, make_topics
from benchmarks.live import GPUS, READY_S, WARM_S, configure, free_port, node_name, prepare, send
from benchmarks.processes import Session, wait_for
from benchmarks.watched import Api
from pipeline.config.sections import Kafka
from pipeline.model.records import SECOND
from tests.kafka_broker import Broker, BrokerError, missing

PAUSE_S = 0.05
"""Pause between two honest calls (chosen: ten viewers, each twice a second)."""
RECENT = "time > now() - INTERVAL '1 minute'"
HOSTILE = (
    "SELECT a.entity, avg(a.power), count(*) FROM gpu a JOIN gpu b USING (time) GROUP BY 1",
    "SELECT * FROM nvlink ORDER BY md5(entity), time",
    "SELECT count(DISTINCT entity || time::VARCHAR), median(tx_bytes) FROM nvlink",
    "WITH RECURSIVE t AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM t WHERE n < 1000000000) SELECT max(n) FROM t",
)


def honest_calls(node: str) -> list[tuple[str, str, dict[str, str] | None]]:
    """Returns (method, path, body) of what a dashboard asks for."""
    device = f"gpu:{node}.1"
    sql = f"SELECT entity, max(temperature) FROM gpu WHERE {RECENT} AND entity = '{device}' GROUP BY 1"
    return [
        ("GET", "/api/v1/fleet", None),
        ("GET", "/api/v1/incidents", None),
        ("GET", "/api/v1/heatmap?signal=gpu.temperature", None),
        ("GET", "/api/v1/furthest?signal=gpu.power&k=20", None),
        ("GET", f"/api/v1/series?entity={urllib.parse.quote(device)}&signal=gpu.power&peers=rack", None),
        ("POST", "/api/v1/sql", {"query": sql}),
    ]


def call(port: int, method: str, path: str, body: dict[str, str] | None) -> int:
    """Returns the status of one call; reads the whole answer."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    link.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
    answer = link.getresponse()
    answer.read()
    link.close()
    return answer.status


def ask_too_much(port: int, number: int, stop: threading.Event) -> None:
    """Repeats heavy calls, alone or with others, until `stop`; refusals are fine."""
    while not stop.is_set():
        try:
            if number % 2:
                call(port, "POST", "/api/v1/sql", {"query": HOSTILE[number // 2 % len(HOSTILE)]})
            else:
                call(port, "GET", "/api/v1/heatmap?signal=nvlink.tx_bytes&from=2026-01-01&by=node", None)
        except OSError:
            stop.wait(0.2)


class Probe:
    """Latencies of honest calls by phase."""

    def __init__(self, port: int, node: str) -> None:
        self._port, self._calls = port, honest_calls(node)
        self.taken: dict[str, list[tuple[str, float]]] = {}

    def run(self, phase: str, seconds: float) -> None:
        """Repeats the calls for some time."""
        taken = self.taken[phase] = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for method, path, body in self._calls:
                begun = time.perf_counter()
                status = call(self._port, method, path, body)
                taken.append((path.partition("?")[0], (time.perf_counter() - begun) * 1000))
                assert status in (200, 503), (path, status)
                time.sleep(PAUSE_S)

    def p95(self, phase: str) -> float:
        """Returns the 95th percentile of all calls (ms)."""
        return float(np.percentile([ms for _, ms in self.taken[phase]], 95))

    def print(self, phase: str, lag: float) -> None:
        """Prints the figures of a phase, and the p95 of each call."""
        every = [ms for _, ms in self.taken[phase]]
        each = {
            path: np.percentile([ms for p, ms in self.taken[phase] if p == path], 95) for path, _ in self.taken[phase]
        }
        shown = ", ".join(f"{path.rpartition('/')[2]} {ms:.0f}" for path, ms in each.items())
        print(
            f"{phase:8} p50 {np.median(every):6.1f} p95 {self.p95(phase):6.1f} lag {lag:5.1f} s   p95 of {shown}",
            flush=True,
        )


def run(nodes: int, seconds: int, folder: Path) -> None:
    """Runs all phases on one fleet."""
    readings = (WARM_S + 2 * seconds) // 5 * 5 + 6  # the last window of 5 s is complete
    with Broker(folder / "broker", heap="512m", properties=PATIENT) as broker:
        kafka, port = Kafka(bootstrap_servers=broker.bootstrap, partitions=32), free_port()
        make_topics(kafka)
        config, api = configure(folder, kafka, port), Api(port)
        words = [sys.executable, "-m", "fleetpulse", "pipeline", "--config", str(config)]
        session = Session(words, dict(os.environ), Path.cwd(), folder / "pipeline.log")
        try:
            wait_for(lambda: api.ready()[0], READY_S, "the API of the pipeline")
            first, messages = prepare(nodes, readings, 1, 5.0)
            sender = os.fork()
            if not sender:
                send(kafka, messages)
                os._exit(0)
            time.sleep(max(0.0, first + WARM_S - time.time()))
            probe, stop = Probe(port, node_name(0)), threading.Event()
            lag = lambda: time.time() - api.number("SELECT epoch_us(max(time)) FROM latest_gpu") / SECOND  # noqa: E731
            probe.run("ingest", seconds)
            probe.print("ingest", lag())
            threads = [threading.Thread(target=ask_too_much, args=(port, n, stop), daemon=True) for n in range(8)]
            for thread in threads:
                thread.start()
            probe.run("hostile", seconds)
            stop.set()
            for thread in threads:
                thread.join(30)
            probe.print("hostile", lag())
            os.waitpid(sender, 0)
            rows = nodes * GPUS * readings
            stored = lambda: api.number("SELECT count(*) FROM gpu")  # noqa: E731 - read twice
            late = time.time() + 120
            wait_for(lambda: stored() >= rows or time.time() > late, 300, "rows")
            time.sleep(5)
            probe.run("idle", seconds)
            probe.print("idle", lag())
            ratios = [
                f"{phase} over idle {probe.p95(phase) / probe.p95('idle'):.2f}x" for phase in ("ingest", "hostile")
            ]
            print(f"p95: {', '.join(ratios)}; rows missing: {rows - stored()}", flush=True)
        finally:
            session.end()


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=250)
    parser.add_argument("--seconds", type=int, default=20)
    options = parser.parse_args()
    logging.getLogger("kafka").setLevel(logging.ERROR)
    if lacking := missing():
        sys.exit(f"benchmarks.api_load: {lacking}: run 'make parts'")
    with tempfile.TemporaryDirectory() as name:
        run(options.nodes, options.seconds, Path(name))


if __name__ == "__main__":
    try:
        main()
    except BrokerError as error:
        sys.exit(f"benchmarks.api_load: {error}")
