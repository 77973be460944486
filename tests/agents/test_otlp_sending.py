"""Delivery of OTLP: to a real HTTP server that refuses, stalls and disappears, and the agent's own metrics."""

from __future__ import annotations

import gzip
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time as clock_time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from agents.node.agent import open_telemetry
from agents.node.snapshot import CollectorResult, Snapshot
from agents.otlp import delivery
from agents.otlp.delivery import HttpDelivery, Outbox
from agents.otlp.export import OpenTelemetry
from pipeline.config.sections import Config, Opentelemetry, Pipeline, load_config
from pipeline.model.errors import ConfigError, Permanent, Retryable
from pipeline.model.records import SECOND, Batch, Block, Origin

ROOT = Path(__file__).parents[2]
ORIGIN = Origin("dc1", "n1", bytes(16))
T0 = 1_767_225_600 * SECOND
Said = list[str]


class Collector:
    """An OTLP/HTTP collector: returns the next of `answers`, then 200. Keeps requests, decoded."""

    def __init__(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self.answers: list[tuple[int, dict[str, str], bytes]] = []
        self.requests: list[Any] = []
        self.headers: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, headers, answer = outer.answers.pop(0) if outer.answers else (200, {}, b"")
                if status == 200:
                    outer.requests.append(ExportMetricsServiceRequest.FromString(gzip.decompress(body)))
                outer.headers.append({"path": self.path, **self.headers})
                self.send_response(status)
                for name, value in {"Content-Length": str(len(answer)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign] # a handshake that was refused
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "PAUSE_S", 0.02)


def until(holds: Callable[[], object], seconds: float = 20.0) -> None:
    end = clock_time.monotonic() + seconds
    while not holds():
        assert clock_time.monotonic() < end, "it did not come to pass"
        clock_time.sleep(0.005)


def outbox(collector: Collector, log_lines: Said) -> Outbox:
    return Outbox("test", HttpDelivery(Opentelemetry(endpoint=collector.url), "f.toml"), log_lines.append)


def opened(settings: Opentelemetry, log_lines: Said) -> OpenTelemetry:
    made = open_telemetry(Config(opentelemetry=settings), ORIGIN, lambda subject, text: log_lines.append(text))
    assert made is not None
    return made


def gpu(time: int, power: float) -> Batch:
    block = Block("gpu", ("gpu:n1.0",), {"gpu.power": np.array([[power]], np.float32)})
    return Batch(ORIGIN, np.array([time]), (block,))


def by_name(request: Any) -> dict[str, list[Any]]:
    metrics = request.resource_metrics[0].scope_metrics[0].metrics
    return {m.name: list(getattr(m, m.WhichOneof("data")).data_points) for m in metrics}


# --- sending ---------------------------------------------------------------------------------------------------------


def test_telemetry_and_the_agents_own_metrics_arrive_at_a_collector(collector: Collector) -> None:
    log_lines: Said = []
    telemetry = opened(Opentelemetry(endpoint=collector.url + "/", metrics="all", interval=1.0), log_lines)
    telemetry.add_batch(gpu(T0, 300))
    telemetry.update_snapshot(Snapshot(T0, (CollectorResult("nvml", "ok", 0.002),)))
    until(lambda: len(collector.requests) == 2)
    telemetry.close(5.0)
    names = set().union(*(by_name(request) for request in collector.requests))
    assert {"hw.power", "fleetpulse.agent.looks"} <= names
    assert all(h["path"] == "/v1/metrics" for h in collector.headers)
    assert all(h["Content-Type"] == "application/x-protobuf" for h in collector.headers)
    assert log_lines == []


def test_by_default_no_telemetry_is_sent(collector: Collector) -> None:
    telemetry = opened(Opentelemetry(endpoint=collector.url, interval=1.0), [])
    telemetry.add_batch(gpu(T0, 300))
    telemetry.update_snapshot(Snapshot(T0))
    until(lambda: collector.requests)
    telemetry.close(5.0)
    assert "hw.power" not in by_name(collector.requests[0])


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_retryable_failures_are_retried(collector: Collector, status: int) -> None:
    log_lines: Said = []
    collector.answers = [(status, {}, b"")] * 3
    box = outbox(collector, log_lines)
    box.enqueue(b"")
    until(lambda: box.sent == 1)
    box.close(5.0)
    assert len(collector.headers) == 4
    assert (len(log_lines), box.dropped) == (2, 0)
    assert f"{status}" in log_lines[0]
    assert log_lines[1].startswith("sending works again")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("status", [301, 400, 401, 413, 500])
def test_permanent_failures_are_counted_and_logged(collector: Collector, status: int) -> None:
    log_lines: Said = []
    collector.answers = [(status, {"Location": "http://127.0.0.1:9/"}, b"")]
    box = outbox(collector, log_lines)
    box.enqueue(b"")
    box.enqueue(b"")
    until(lambda: box.sent == 1)
    box.close(5.0)
    assert box.dropped == 1
    assert f"{status}" in log_lines[0]


@pytest.mark.usefixtures("quick")
def test_a_late_collector_receives_the_queued_requests() -> None:
    log_lines: Said = []
    gone = Collector()
    gone.close()
    box = outbox(gone, log_lines)
    for _ in range(3):
        box.enqueue(b"")
    until(lambda: log_lines)
    assert "refused" in log_lines[0]
    late = Collector(gone.port)
    until(lambda: box.sent == 3)
    box.close(5.0)
    late.close()
    assert (box.dropped, len(log_lines)) == (0, 2)


def test_points_refused_by_a_collector_are_logged(collector: Collector) -> None:
    log_lines: Said = []
    answer = ExportMetricsServiceResponse()
    answer.partial_success.rejected_data_points, answer.partial_success.error_message = 7, "too old"
    collector.answers = [(200, {}, answer.SerializeToString())]
    box = outbox(collector, log_lines)
    box.enqueue(b"")
    until(lambda: log_lines)
    box.close(5.0)
    assert "7 points refused: too old" in log_lines[0]


def test_a_proxys_page_counts_as_delivered(collector: Collector) -> None:
    log_lines: Said = []
    collector.answers = [(200, {}, b"<html>\xff\xff welcome")]
    box = outbox(collector, log_lines)
    box.enqueue(b"")
    until(lambda: box.sent == 1)
    box.close(5.0)


def test_a_full_queue_drops_the_oldest_and_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "MAX_BYTES", 1000)
    begun, free, got = threading.Event(), threading.Event(), list[bytes]()

    def deliver(request: bytes) -> None:
        begun.set()
        free.wait(20)
        got.append(request)

    box = Outbox("test", deliver, lambda _: None)
    for i in range(10):
        box.enqueue(bytes([i]) * 300)
        begun.wait(20)
    free.set()
    until(lambda: box.sent == 4)
    box.close(5.0)
    assert [request[0] for request in got] == [0, 7, 8, 9]  # the first was in flight
    assert box.dropped == 6


@pytest.mark.parametrize("error", [Permanent("no"), ValueError("a defect")])
def test_an_unexpected_error_costs_one_request(error: Exception) -> None:
    errors = [error]

    def deliver(_: bytes) -> None:
        if errors:
            raise errors.pop()

    log_lines: Said = []
    box = Outbox("test", deliver, log_lines.append)
    box.enqueue(b"a")
    box.enqueue(b"b")
    until(lambda: box.sent == 1)
    box.close(5.0)
    assert (box.dropped, len(log_lines)) == (1, 1)


def test_closing_does_not_wait_for_a_hung_delivery() -> None:
    def deliver(_: bytes) -> None:
        raise Retryable("away", 300.0)

    box = Outbox("test", deliver, lambda _: None)
    box.enqueue(b"a")
    began = clock_time.monotonic()
    box.close(5.0)
    assert clock_time.monotonic() - began < 2


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_over_tls_only_a_trusted_collector_receives_requests(tmp_path: Path) -> None:
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    words += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=c", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(words, check=True, capture_output=True)
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(certificate, key)
    collector = Collector(tls=served)
    url = f"https://127.0.0.1:{collector.port}"
    HttpDelivery(Opentelemetry(endpoint=url, ca_file=certificate), "f.toml")(b"")
    with pytest.raises(Retryable, match="certificate verify failed"):
        HttpDelivery(Opentelemetry(endpoint=url), "f.toml")(b"")
    collector.close()
    assert len(collector.requests) == 1


# --- configuration ---------------------------------------------------------------------------------------------------


def test_nothing_is_loaded_without_configuration() -> None:
    program = (
        "import sys; from pipeline.config.sections import Config; from pipeline.model.records import Origin\n"
        "from agents.node.agent import open_telemetry\n"
        "assert open_telemetry(Config(), Origin('s', 'n', bytes(16)), print) is None\n"
        "print([m for m in sys.modules if m.startswith(('opentelemetry', 'agents.otlp', 'urllib.request', 'http'))])"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("settings", "log_lines"),
    [
        (Opentelemetry(kafka=True), 'transport = "kafka"'),
        (Opentelemetry(metrics="all"), "requires an endpoint"),
        (
            Opentelemetry(endpoint="http://127.0.0.1:1", headers_file=Path("/absent")),
            "headers_file: /absent: cannot be read",
        ),
        (Opentelemetry(endpoint="https://127.0.0.1:1", ca_file=Path("/absent")), "ca_file: /absent"),
    ],
)
def test_invalid_settings_are_refused_at_start(settings: Opentelemetry, log_lines: str) -> None:
    with pytest.raises(ConfigError, match=log_lines):
        open_telemetry(Config(opentelemetry=settings), ORIGIN, lambda *_: None)


def test_an_invalid_endpoint_address_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text('[opentelemetry]\nendpoint = "collector:4318"\n')
    with pytest.raises(ConfigError, match="expected nothing, or http://host:port"):
        load_config(tmp_path / "f.toml")


def test_tokens_leave_the_host_only_encrypted(tmp_path: Path, collector: Collector) -> None:
    (tmp_path / "headers").write_text("Authorization: Bearer geheim\n\nX-Scope-OrgID: 7\n")
    settings = Opentelemetry(endpoint=collector.url, headers_file=tmp_path / "headers")
    HttpDelivery(settings, "f.toml")(b"")
    assert collector.headers[0]["Authorization"] == "Bearer geheim"
    assert collector.headers[0]["X-Scope-Orgid"] == "7"
    with pytest.raises(ConfigError, match="unencrypted; expected https"):
        HttpDelivery(replace(settings, endpoint="http://collector.example:4318"), "f.toml")
    (tmp_path / "headers").write_text("geheim")
    with pytest.raises(ConfigError, match="expected lines 'Name: value'") as refused:
        HttpDelivery(settings, "f.toml")
    assert "geheim" not in str(refused.value)


def test_kafka_delivery_is_built_without_a_broker() -> None:
    config = Config(opentelemetry=Opentelemetry(kafka=True, interval=1.0), pipeline=Pipeline(transport="kafka"))
    telemetry = open_telemetry(config, ORIGIN, lambda *_: None)
    assert telemetry is not None
    telemetry.close(1.0)


# --- the agent's own metrics -----------------------------------------------------------------------------------------

SNAPSHOT = Snapshot(
    T0,
    (CollectorResult("nvml", "ok", 0.002), CollectorResult("host", "hung", 5.0)),
    restarts={"host": 1},
    spool_bytes=4096,
    dropped=2,
    gaps=3,
    unsent=4,
    lag=1.5,
    late_ticks=5,
    cpu_time=6.25,
    memory=7_000_000,
)


def test_the_agents_own_metrics_match_the_snapshot(collector: Collector) -> None:
    telemetry = opened(Opentelemetry(endpoint=collector.url, interval=1.0), [])
    telemetry.update_snapshot(SNAPSHOT)
    telemetry.update_snapshot(replace(SNAPSHOT, time=T0 + SECOND))
    until(lambda: len(collector.requests) == 2)
    telemetry.close(5.0)
    reported = {
        name.removeprefix("fleetpulse.agent."): points for name, points in by_name(collector.requests[1]).items()
    }
    looks = {tuple(a.value.string_value for a in p.attributes): p.as_int for p in reported["looks"]}
    assert looks == {("nvml", "ok"): 2, ("host", "hung"): 2}
    slow = next(p for p in reported["look.duration"] if p.sum > 1)
    assert (slow.count, slow.sum, slow.max, sum(slow.bucket_counts)) == (2, 10.0, 5.0, 2)
    assert slow.bucket_counts[list(slow.explicit_bounds).index(10.0)] == 2
    single = {name: (p[0].as_double or p[0].as_int) for name, p in reported.items() if len(p) == 1}
    about_otlp = {"otlp.sent": single["otlp.sent"], "otlp.dropped": 0}
    assert single == about_otlp | {
        "restarts": 1,
        "spool.size": 4096,
        "spool.dropped": 2,
        "gaps": 3,
        "sender.unsent": 4,
        "sender.lag": 1.5,
        "ticks.late": 5,
        "cpu.time": 6.25,
        "memory.usage": 7_000_000,
    }


def test_unknown_values_have_no_point(collector: Collector) -> None:
    telemetry = opened(Opentelemetry(endpoint=collector.url, interval=1.0), [])
    telemetry.update_snapshot(Snapshot(T0))
    until(lambda: collector.requests)
    telemetry.close(5.0)
    assert by_name(collector.requests[0]).keys() == {"fleetpulse.agent.otlp.sent", "fleetpulse.agent.otlp.dropped"}


def test_prometheus_reads_the_same_metrics_on_loopback() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    telemetry = opened(Opentelemetry(prometheus_port=port), [])
    telemetry.update_snapshot(SNAPSHOT)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    with pytest.raises(urllib.error.HTTPError) as missing:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10)
    missing.value.close()
    telemetry.close(5.0)
    assert 'fleetpulse_agent_looks_total{collector="nvml",result="ok"} 1' in lines
    assert "# TYPE fleetpulse_agent_looks_total counter" in lines
    assert "# TYPE fleetpulse_agent_look_duration_seconds histogram" in lines
    assert 'fleetpulse_agent_look_duration_seconds_bucket{collector="host",le="3"} 0' in lines
    assert 'fleetpulse_agent_look_duration_seconds_bucket{collector="host",le="+Inf"} 1' in lines
    assert "fleetpulse_agent_spool_size_bytes 4096" in lines
    assert "fleetpulse_agent_sender_lag_seconds 1.5" in lines
    assert missing.value.code == 404


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"prometheus_port = {port}: .*expected a port that is free"):
            opened(Opentelemetry(prometheus_port=port), [])
