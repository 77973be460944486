"""OTLP over real gRPC into a gateway: the answers of the HTTP server, translated; real SDKs over both protocols."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from agents.gateway import intake as intakes
from agents.gateway.gateway import RunningGateway
from agents.gateway.grpc_server import EXPORT, parse_peer
from agents.gateway.receiver import MAX_REQUEST
from pipeline.config import sections
from pipeline.config.sections import Config
from pipeline.model.errors import ConfigError
from pipeline.store.database import Database
from tests.agents.test_gateway import Gateway, stored
from tests.pipeline.otlp_requests import T0_NS, gpu_request

LARGE = [("grpc.max_send_message_length", -1)]


def call(gateway: Gateway, body: bytes, method: str = EXPORT, **more: Any) -> bytes:
    """The answer to one call. Raises grpc.RpcError."""
    with grpc.insecure_channel(f"127.0.0.1:{gateway.running.grpc_port}", options=LARGE) as channel:
        answer: bytes = channel.unary_unary(method)(body, timeout=20, **more)
        return answer


def refusal(gateway: Gateway, body: bytes, **more: Any) -> tuple[str, str]:
    """(status, text) of a call that is refused."""
    with pytest.raises(grpc.RpcError) as refused:
        call(gateway, body, **more)
    return refused.value.code().name, refused.value.details()


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    made = Gateway(tmp_path, grpc=True)
    yield made
    made.stop()


def test_an_acknowledged_call_is_in_the_store_once_compressed_or_not(gateway: Gateway) -> None:
    assert call(gateway, gpu_request()) == b""
    assert call(gateway, gpu_request(time=T0_NS + 10**9), compression=grpc.Compression.Gzip) == b""
    assert call(gateway, gpu_request()) == b""
    assert gateway.post(gpu_request()) == (200, b"")  # repeated over the other protocol
    assert stored(gateway.folder) == [(T0_NS // 1000, 2), (T0_NS // 1000 + 1_000_000, 2)]
    metrics = gateway.get("/metrics")[1].decode()
    assert 'fleetpulse_gateway_accepted_total{format="otlp",protocol="grpc"} 3' in metrics
    assert "fleetpulse_gateway_repeated_total 2" in metrics


@pytest.mark.slow
def test_what_can_never_be_read_is_refused_for_good(gateway: Gateway) -> None:
    assert refusal(gateway, b"\xff\xff")[0] == "INVALID_ARGUMENT"
    assert refusal(gateway, gpu_request()[:-5])[0] == "INVALID_ARGUMENT"
    assert refusal(gateway, bytes(MAX_REQUEST + 1))[0] == "RESOURCE_EXHAUSTED"
    assert refusal(gateway, bytes(4 * MAX_REQUEST), compression=grpc.Compression.Gzip)[0] == "RESOURCE_EXHAUSTED"
    assert refusal(gateway, b"", method=EXPORT.replace("metrics", "trace"))[0] == "UNIMPLEMENTED"
    assert refusal(gateway, gzip.compress(gpu_request()))[0] == "INVALID_ARGUMENT"
    assert stored(gateway.folder) == []
    assert 'fleetpulse_gateway_refused_total{reason="malformed"} 3' in gateway.get("/metrics")[1].decode()


def test_a_token_is_checked_before_the_message_is_read(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("collector:0123456789abcdef\n")
    gateway = Gateway(tmp_path, grpc=True, token_file=file)
    try:
        assert refusal(gateway, gpu_request())[0] == "UNAUTHENTICATED"
        assert refusal(gateway, bytes(4 * MAX_REQUEST))[0] == "UNAUTHENTICATED"
        wrong = (("authorization", "Bearer wrong-wrong-wrong"),)
        assert refusal(gateway, gpu_request(), metadata=wrong)[0] == "UNAUTHENTICATED"
        assert call(gateway, gpu_request(), metadata=(("authorization", "Bearer 0123456789abcdef"),)) == b""
        assert [s["sender"] for s in gateway.running.receiver.list_refused()] == ["127.0.0.1"]
    finally:
        gateway.stop()


def test_a_full_disk_is_unavailable_so_that_clients_send_again(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intakes.disk, "free_bytes", lambda path: 1)
    status, why = refusal(gateway, gpu_request())
    assert status == "UNAVAILABLE"
    assert "nearly full" in why
    monkeypatch.undo()
    assert call(gateway, gpu_request()) == b""


def test_a_port_that_is_taken_is_an_error_and_leaves_nothing_open(gateway: Gateway, tmp_path: Path) -> None:
    taken = sections.Gateway(port=0, grpc=True, grpc_port=gateway.running.grpc_port)
    config = Config(spool=sections.Spool(tmp_path / "second", free_bytes=0), gateway=taken)
    with pytest.raises(ConfigError, match=r"\[gateway\] host = '127.0.0.1', grpc_port"):
        RunningGateway(config, lambda text: None)


def test_the_address_of_a_client_is_its_name_without_the_port() -> None:
    assert parse_peer("ipv4:10.0.0.7:53412") == "10.0.0.7"
    assert parse_peer("ipv6:%5Bfd00::7%5D:53412") == "fd00::7"
    assert parse_peer("unix:") == "unix:"


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("secure", [False, True])
def test_an_sdk_exports_every_kind_of_instrument(
    tmp_path: Path, certificate: Path, protocol: str, secure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # requests prefers them to the exporter's certificate
        monkeypatch.delenv(name, raising=False)
    tokens = tmp_path / "tokens"
    tokens.write_text("sdk:0123456789abcdef\n")
    tls = {"certificate_file": certificate} if secure else {}
    gateway = Gateway(tmp_path, grpc=True, token_file=tokens, **tls)
    try:
        export_once(make_exporter(gateway.running, protocol, certificate if secure else None))
    finally:
        gateway.stop()
    assert stored(tmp_path) == []  # no GPU and no dead letter
    with closing(Database(tmp_path / "store.duckdb")) as database:
        rows = database.connection.execute("SELECT entity, value FROM custom ORDER BY entity").fetchall()
    named = {entity.removeprefix("custom:n5.").partition("{")[0]: value for entity, value in rows}
    assert named == {
        "requests": 3.0,
        "queue": -2.0,
        "kv_cache": 0.75,
        "latency_count": 2.0,
        "latency_sum": 0.5,
        "latency_min": 0.125,
        "latency_max": 0.375,
    }


def make_exporter(gateway: RunningGateway, protocol: str, certificate: Path | None) -> Any:
    """OpenTelemetry's own exporter for one protocol."""
    scheme, headers = "https" if certificate else "http", {"authorization": "Bearer 0123456789abcdef"}
    if protocol == "http":
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as Http

        file = str(certificate) if certificate else None
        return Http(f"{scheme}://127.0.0.1:{gateway.port}/v1/metrics", headers=headers, certificate_file=file)
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as Grpc

    trusted = grpc.ssl_channel_credentials(certificate.read_bytes()) if certificate else None
    address = f"{scheme}://127.0.0.1:{gateway.grpc_port}"
    return Grpc(address, insecure=certificate is None, credentials=trusted, headers=headers)


def export_once(exporter: Any) -> None:
    """Sends a counter, an up-down counter, a gauge and a histogram of the node n5."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=3_600_000)
    provider = MeterProvider([reader], Resource({"host.name": "n5", "service.name": "vllm"}))
    meter = provider.get_meter("test")
    meter.create_counter("requests").add(3)
    meter.create_up_down_counter("queue").add(-2)
    meter.create_gauge("kv_cache").set(0.75)
    histogram = meter.create_histogram("latency")
    histogram.record(0.125)
    histogram.record(0.375)
    assert provider.force_flush()
    provider.shutdown()
