"""A real OpenTelemetry Collector sends over HTTP, gRPC, remote write and Kafka: each way stores the same."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agents.gateway.gateway import RunningGateway
from pipeline.config import sections
from pipeline.config.sections import Config
from pipeline.ingest.ingest import Ingest
from pipeline.model.records import OTLP, SECOND
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.transport import Transport
from pipeline.transport.kafka import KafkaTransport
from pipeline.transport.spool import SpoolTransport
from tests import sender_build
from tests.kafka_broker import Address
from tests.kafka_clients import make_topics
from tests.parts import do_without
from tests.until import until

pytestmark = pytest.mark.collector
TOKEN = "0123456789abcdef"
PIPELINE = """
receivers:
  hostmetrics:
    collection_interval: 1s
    scrapers: {{cpu: {{}}, load: {{}}, memory: {{}}, network: {{}}, disk: {{}}}}
processors:
  resource:
    attributes: [{{key: host.id, value: n8, action: upsert}}]
exporters:
  {exporter}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines:
    metrics: {{receivers: [hostmetrics], processors: [resource], exporters: [{name}]}}
"""
EXPORTERS = {
    "otlp": (
        "otlp: {{endpoint: '127.0.0.1:{grpc}', tls: {{ca_file: {ca}}}, headers: {{authorization: Bearer {token}}}}}"
    ),
    "otlphttp": (
        "otlphttp: {{endpoint: 'https://127.0.0.1:{http}', tls: {{ca_file: {ca}}}, "
        "headers: {{authorization: Bearer {token}}}}}"
    ),
    "prometheusremotewrite": (
        "prometheusremotewrite: {{endpoint: 'https://127.0.0.1:{http}/api/v1/write', tls: {{ca_file: {ca}}}, "
        "headers: {{authorization: Bearer {token}}}, resource_to_telemetry_conversion: {{enabled: true}}}}"
    ),
}


@contextmanager
def collector_of(folder: Path, name: str, exporter: str) -> Iterator[subprocess.Popen[bytes]]:
    """A running Collector with one exporter."""
    if why := sender_build.missing(sender_build.collector()):
        do_without("collector", why)
    file = folder / "collector.yaml"
    file.write_text(PIPELINE.format(exporter=exporter, name=name))
    with open(folder / "collector.log", "wb") as log:
        words = [str(sender_build.collector()), f"--config={file}"]
        process = subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ, "GOMAXPROCS": "1"})
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


LOAD = "SELECT epoch_us(time), load1 FROM node WHERE entity = 'node:n8' AND load1 IS NOT NULL"
RENAMED = "SELECT epoch_us(time), value FROM custom WHERE entity LIKE 'custom:n8.system_cpu_load_average_1m%'"
"""The load, as a signal of the node; or as Prometheus writes the Collector's name, which no mapping has."""


def read_until_signals(folder: Path, transport: Transport, query: str = LOAD) -> dict[str, int]:
    """Reads until the load of the node n8 has three ticks; table -> rows, after checks of rows that always exist."""
    database = Database(folder / "store.duckdb")
    ingest = Ingest(database, transport, Devices(database.connection), lambda: time.time_ns() // 1000)
    try:

        def holds() -> bool:
            ingest.step()
            return len(database.connection.execute(query).fetchall()) >= 3

        until(holds, 90.0)
        assert database.connection.execute("SELECT rule, reason FROM dead_letter").fetchall() == []
        nodes = {node for (node,) in database.connection.execute("SELECT DISTINCT node FROM device").fetchall()}
        assert nodes == {"n8"}
        now, found = time.time_ns() // 1000, database.connection.execute(query).fetchall()
        assert all(now - 100 * SECOND < at <= now and load >= 0 for at, load in found)
        tables = ("node", "nic", "disk", "custom")
        return {name: database.connection.execute(f"SELECT count(*) FROM {name}").fetchall()[0][0] for name in tables}
    finally:
        database.close()


@pytest.mark.parametrize("name", EXPORTERS)
def test_a_collector_sends_to_a_gateway_with_tls_and_a_token(tmp_path: Path, certificate: Path, name: str) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"collector:{TOKEN}\n")
    settings = sections.Gateway(
        port=0, grpc=True, grpc_port=0, node="gw", token_file=tokens, certificate_file=certificate
    )
    config = Config(spool=sections.Spool(tmp_path / "spool", free_bytes=0), gateway=settings)
    gateway = RunningGateway(config, lambda text: None)
    try:
        exporter = EXPORTERS[name].format(http=gateway.port, grpc=gateway.grpc_port, ca=certificate, token=TOKEN)
        with collector_of(tmp_path, name, exporter):
            renamed = name == "prometheusremotewrite"
            transport = SpoolTransport(tmp_path / "spool")
            rows = read_until_signals(tmp_path, transport, RENAMED if renamed else LOAD)
            transport.close()
        assert rows["custom"] > 0
        assert (rows["nic"] > 0) != renamed
        assert gateway.receiver.list_refused() == []
    finally:
        gateway.close()


def test_a_collector_writes_to_kafka(kafka: Address, tmp_path: Path) -> None:
    settings = make_topics(kafka)
    exporter = f"kafka: {{brokers: ['{kafka.bootstrap}'], metrics: {{topic: {OTLP}}}, producer: {{compression: zstd}}}}"
    with collector_of(tmp_path, "kafka", exporter):
        transport = KafkaTransport(settings, {})
        rows = read_until_signals(tmp_path, transport)
        transport.close()
    assert rows["nic"] > 0
    assert rows["custom"] > 0


def test_a_collector_whose_gateway_is_away_sends_again(tmp_path: Path) -> None:
    def start(port: int = 0) -> RunningGateway:
        settings = sections.Gateway(port=0, grpc=True, grpc_port=port, node="gw")
        config = Config(spool=sections.Spool(tmp_path / "spool", free_bytes=0), gateway=settings)
        return RunningGateway(config, lambda text: None)

    gateway = start()
    port = gateway.grpc_port
    retry = "retry_on_failure: {initial_interval: 100ms}"
    exporter = f"otlp: {{endpoint: '127.0.0.1:{port}', tls: {{insecure: true}}, {retry}}}"
    with collector_of(tmp_path, "otlp", exporter):
        until(lambda: gateway.receiver.intake.stored > 0, 60.0)
        gateway.close()
        closed = time.time_ns() // 1000
        log = tmp_path / "collector.log"
        until(lambda: log.read_text().count("Exporting failed") >= 2, 60.0)
        opened = time.time_ns() // 1000
        gateway = start(port)
        until(lambda: gateway.receiver.intake.stored > 4, 60.0)
        gateway.close()
    database = Database(tmp_path / "store.duckdb")
    transport = SpoolTransport(tmp_path / "spool")
    ingest = Ingest(database, transport, Devices(database.connection), lambda: time.time_ns() // 1000)
    while ingest.step() is not None:
        pass
    times = [at for at, _ in database.connection.execute(LOAD).fetchall()]
    transport.close()
    database.close()
    assert len(set(times)) == len(times)
    assert any(closed < at < opened for at in times)


def test_the_configuration_of_the_page_is_valid(tmp_path: Path, certificate: Path) -> None:
    if why := sender_build.missing(sender_build.collector()):
        do_without("collector", why)
    page = (Path(__file__).parents[2] / "docs" / "otlp.md").read_text()
    block = page.partition("### Configuration of a Collector")[2].partition("###")[0]
    file = tmp_path / "collector.yaml"
    file.write_text(textwrap.dedent(block).replace("/etc/otelcol/ca.pem", str(certificate)))
    words = [str(sender_build.collector()), "validate", f"--config={file}"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")
