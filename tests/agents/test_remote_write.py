"""Prometheus remote write 1.0 and 2.0: golden requests of a real sender, hostile ones, and the way into the store.

The golden bytes are of the OpenTelemetry Collector 0.165, whose exporter compresses with Google's own snappy for Go.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents import protobuf
from agents.gateway.http_server import MalformedSnappy, decompress_snappy
from pipeline.foreign.remote_write import RemoteWriteDecoder
from pipeline.model.errors import WireError
from pipeline.store.database import Database
from tests.agents.test_gateway import Gateway, send, stored
from tests.examples import examples
from tests.pipeline.test_otlp_decoder import read

FIXTURES = Path(__file__).parent / "fixtures"
GOLDEN = {version: (FIXTURES / f"remote_write_v{version}.snappy").read_bytes() for version in (1, 2)}
RAW = {version: decompress_snappy(data, 1 << 20) for version, data in GOLDEN.items()}
V2 = "application/x-protobuf;proto=io.prometheus.write.v2.Request"
MS = 1_780_000_000_000


def literal(raw: bytes) -> bytes:
    """A snappy block of literals alone."""
    out = protobuf.encode_varint(len(raw))
    for at in range(0, len(raw), 60):
        piece = raw[at : at + 60]
        out += bytes([len(piece) - 1 << 2]) + piece
    return out


def write_request(*series: tuple[dict[str, str], float]) -> bytes:
    """A WriteRequest with one sample per series, at MS."""
    out = b""
    for labels, value in series:
        body = b"".join(
            protobuf.encode_nested(1, protobuf.encode_text(1, k) + protobuf.encode_text(2, v))
            for k, v in labels.items()
        )
        body += protobuf.encode_nested(2, protobuf.encode_double(1, value) + protobuf.encode_unsigned(2, MS))
        out += protobuf.encode_nested(1, body)
    return out


class Decoder:
    """A RemoteWriteDecoder of one version, in the form of an OtlpDecoder."""

    def __init__(self, version: int = 1) -> None:
        self._decoder, self._version = RemoteWriteDecoder("site", ("host.id", "host.name")), version

    def decode(self, message: bytes) -> Any:
        return self._decoder.decode(message, self._version)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    made = Gateway(tmp_path)
    yield made
    made.stop()


@pytest.mark.parametrize("version", [1, 2])
def test_a_real_senders_request_is_read(version: int) -> None:
    found = read(RAW[version], Decoder(version))
    named = {entity.partition("{")[0]: value for (entity, _, _), value in found.items()}
    assert named["custom:collected-1.system_cpu_logical_count"] == 2.0
    assert len(found) == 57


@pytest.mark.parametrize("version", [1, 2])
def test_a_request_is_acknowledged_and_stored(gateway: Gateway, version: int) -> None:
    headers = {"Content-Encoding": "snappy"} | ({"Content-Type": V2} if version == 2 else {})
    assert gateway.post(GOLDEN[version], "/api/v1/write", **headers) == (204, b"")
    assert stored(gateway.folder) == []  # no GPU, and no dead letter
    database = Database(gateway.folder / "store.duckdb")
    assert database.connection.execute("SELECT count(*) FROM custom").fetchall() == [(57,)]
    database.close()


def test_names_of_exporters_become_signals_of_the_node_that_was_scraped() -> None:
    about = {"instance": "n7:9400", "job": "dcgm"}
    found = read(
        write_request(
            ({"__name__": "DCGM_FI_DEV_GPU_TEMP", "gpu": "0", **about}, 55.0),
            ({"__name__": "node_load1", "instance": "[fd00::7]:9100"}, 1.5),
            ({"__name__": "node_cpu_seconds_total", "cpu": "0", "mode": "idle", "instance": "n7:9100"}, 9.0),
        ),
        Decoder(),
    )
    assert found == {
        ("gpu:n7.0", "gpu.temperature", MS * 1000): 55.0,
        ("node:fd00::7", "node.load1", MS * 1000): 1.5,
        ("custom:n7.node_cpu_seconds_total{cpu=0,instance=n7:9100,mode=idle}", "custom.value", MS * 1000): 9.0,
    }


def test_an_attribute_of_the_host_that_became_a_label_names_the_node() -> None:
    found = read(write_request(({"__name__": "m", "host_name": "n9", "instance": "pod-1"}, 1.0)), Decoder())
    assert [entity for entity, _, _ in found] == ["custom:n9.m{host_name=n9,instance=pod-1}"]


def test_the_host_name_that_uname_reports_makes_no_second_node() -> None:
    page = ({"__name__": name, "nodename": "kernel-name", "instance": "n1:9100"} for name in ("node_uname_info", "m"))
    found = read(write_request(*((labels, 1.0) for labels in page)), Decoder())
    assert sorted(entity.partition("{")[0] for entity, _, _ in found) == [
        "custom:kernel-name.m",
        "custom:n1.node_uname_info",
    ]


def test_native_histograms_become_counts_and_sums() -> None:
    histogram = protobuf.encode_unsigned(1, 7) + protobuf.encode_double(3, 2.5) + protobuf.encode_unsigned(15, MS)
    labels = {"__name__": "h", "instance": "n1:1"}
    body = b"".join(
        protobuf.encode_nested(1, protobuf.encode_text(1, k) + protobuf.encode_text(2, v)) for k, v in labels.items()
    )
    found = read(protobuf.encode_nested(1, body + protobuf.encode_nested(4, histogram)), Decoder())
    assert {entity: value for (entity, _, _), value in found.items()} == {
        "custom:n1.h_count{instance=n1:1}": 7.0,
        "custom:n1.h_sum{instance=n1:1}": 2.5,
    }


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"\x05\x00abc", {}, 400),
        (literal(b"\xff\xff"), {}, 400),
        (literal(b""), {"Content-Type": "application/x-protobuf;proto=other"}, 415),
        (protobuf.encode_varint(1 << 30) + b"\x00a", {}, 400),
    ],
)
def test_what_can_never_be_read_is_refused(gateway: Gateway, body: bytes, headers: dict[str, str], status: int) -> None:
    assert gateway.post(body, "/api/v1/write", **{"Content-Encoding": "snappy", **headers})[0] == status


def test_version_2_reports_what_was_written(gateway: Gateway) -> None:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=20)
    connection.request("POST", "/api/v1/write", GOLDEN[2], {"Content-Encoding": "snappy", "Content-Type": V2})
    answer = connection.getresponse()
    answer.read()
    assert answer.getheader("X-Prometheus-Remote-Write-Samples-Written") == "58"
    connection.close()
    assert send(gateway.port, "GET", "/readyz", None, {})[0] == 200


@pytest.mark.slow
def test_every_truncation_of_a_block_is_malformed() -> None:
    for length in range(len(GOLDEN[1])):
        with pytest.raises(MalformedSnappy):
            decompress_snappy(GOLDEN[1][:length], 1 << 20)


@settings(max_examples=examples(500), deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_decompress_to_more_than_allowed(data: bytes) -> None:
    with contextlib.suppress(MalformedSnappy):
        assert len(decompress_snappy(data, 1000)) <= 1000


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=500))
def test_literals_decompress_to_themselves(raw: bytes) -> None:
    assert decompress_snappy(literal(raw), 1000) == raw


@pytest.mark.parametrize("version", [1, 2])
def test_every_truncation_of_a_request_is_refused_or_read_without_an_error(version: int) -> None:
    using = Decoder(version)
    raw = RAW[version][:1500]
    for length in range(len(raw)):
        with contextlib.suppress(WireError):
            read(raw[:length], using)


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from([1, 2]), st.binary(max_size=300))
def test_no_bytes_do_more_than_be_refused(version: int, data: bytes) -> None:
    with contextlib.suppress(WireError):
        read(data, Decoder(version))


def test_references_beyond_the_symbols_are_refused() -> None:
    series = protobuf.encode_nested(1, bytes([0, 9]))
    with pytest.raises(WireError, match="references to 1 symbols"):
        read(protobuf.encode_text(4, "") + protobuf.encode_nested(5, series), Decoder(2))


STALE = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000002))[0]


def dropped(request: bytes, version: int = 1) -> dict[str, int]:
    return {what: n for one in Decoder(version).decode(request) for what, n in one.dropped.items()}


def test_a_staleness_marker_is_counted_and_neither_a_value_nor_a_row() -> None:
    ended = ({"__name__": "a", "instance": "n1:1"}, STALE), ({"__name__": "b", "instance": "n1:1"}, 2.0)
    using = Decoder()
    assert list(read(write_request(*ended), using).values()) == [2.0]
    assert dropped(write_request(*ended))["stale"] == 1
    other = ({"__name__": "a", "instance": "n1:1"}, 1.0), ({"__name__": "b", "instance": "n1:1"}, STALE)
    assert list(read(write_request(*other), using).values()) == [1.0]
    assert read(write_request(ended[0]), using) == {}


def test_any_other_nan_does_not_end_a_series() -> None:
    assert dropped(write_request(({"__name__": "a", "instance": "n1:1"}, float("nan"))))["stale"] == 0


def test_the_end_of_a_native_histogram_is_no_count_of_zero() -> None:
    ended = protobuf.encode_unsigned(1, 0) + protobuf.encode_double(3, STALE) + protobuf.encode_unsigned(15, MS)
    label = protobuf.encode_nested(1, protobuf.encode_text(1, "__name__") + protobuf.encode_text(2, "h"))
    node = protobuf.encode_nested(1, protobuf.encode_text(1, "instance") + protobuf.encode_text(2, "n1:1"))
    request = protobuf.encode_nested(1, label + node + protobuf.encode_nested(4, ended))
    assert read(request, Decoder()) == {}
    assert dropped(request)["stale"] == 2
