"""The gateway over real HTTP: 200 only for durable requests, and each acknowledged request is stored once."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from agents.gateway import intake as intakes
from agents.gateway.gateway import RunningGateway, run
from agents.gateway.intake import DurableIntake, Overloaded
from agents.gateway.receiver import MAX_REQUEST, MAX_SENDERS, Receiver
from agents.node.spool.spool import Spool
from pipeline.api.tokens import Tokens
from pipeline.config import sections
from pipeline.config.sections import Config
from pipeline.ingest.ingest import Ingest
from pipeline.model.errors import ConfigError
from pipeline.model.records import OTLP, Origin
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.transport.spool import SpoolTransport
from tests.pipeline.otlp_requests import T0_NS, gpu_request
from tests.until import until

TYPE = {"Content-Type": "application/x-protobuf"}


class Gateway:
    """A gateway in this process, and what the pipeline stores of its spool."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.folder = folder
        gateway = sections.Gateway(port=0, grpc_port=0, node="gw", **settings)  # type: ignore[arg-type]
        self.config = Config(spool=sections.Spool(folder / "spool", free_bytes=0), gateway=gateway)
        self.running = RunningGateway(self.config, lambda text: None)
        self.port, self.stop = self.running.port, self.running.close

    def post(self, body: bytes, path: str = "/v1/metrics", **headers: str) -> tuple[int, bytes]:
        return send(self.port, "POST", path, body, {**TYPE, **headers})

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        return send(self.port, "GET", path, None, headers)


def send(port: int, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def stored(folder: Path) -> list[tuple[object, ...]]:
    """The times of all rows that the pipeline stores of the gateway's spool, and the letters."""
    database = Database(folder / "store.duckdb")
    transport = SpoolTransport(folder / "spool")
    ingest = Ingest(database, transport, Devices(database.connection), lambda: T0_NS // 1000 + 10**12)
    while ingest.step() is not None:
        pass
    rows = database.connection.execute(
        "SELECT DISTINCT epoch_us(time), count(*) FROM gpu GROUP BY 1 ORDER BY 1"
    ).fetchall()
    letters = database.connection.execute("SELECT rule FROM dead_letter").fetchall()
    transport.close()
    database.close()
    return rows + letters


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    made = Gateway(tmp_path)
    yield made
    made.stop()


@pytest.mark.slow
def test_an_acknowledged_request_is_in_the_store_once(gateway: Gateway) -> None:
    assert gateway.post(gpu_request()) == (200, b"")
    zipped = gzip.compress(gpu_request(time=T0_NS + 10**9))
    assert gateway.post(zipped, **{"Content-Encoding": "gzip"}) == (200, b"")
    assert stored(gateway.folder) == [(T0_NS // 1000, 2), (T0_NS // 1000 + 1_000_000, 2)]


def test_a_request_that_is_sent_again_is_acknowledged_and_not_stored_again(gateway: Gateway) -> None:
    assert [gateway.post(gpu_request())[0] for _ in range(3)] == [200, 200, 200]
    assert stored(gateway.folder) == [(T0_NS // 1000, 2)]
    assert b"fleetpulse_gateway_repeated_total 2" in gateway.get("/metrics")[1]


@pytest.mark.slow
def test_a_request_that_is_sent_again_after_a_restart_is_not_stored_again(tmp_path: Path) -> None:
    for _ in range(3):
        gateway = Gateway(tmp_path)
        assert gateway.post(gpu_request())[0] == 200
        gateway.stop()
    assert stored(tmp_path) == [(T0_NS // 1000, 2)]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"\xff\xff", {}, 400),
        (gpu_request()[:-5], {}, 400),
        (b"not gzip", {"Content-Encoding": "gzip"}, 400),
        (gzip.compress(b"\x0a", mtime=0)[:-4], {"Content-Encoding": "gzip"}, 400),
        (b"{}", {"Content-Type": "application/json"}, 415),
        (b"", {"Content-Encoding": "br"}, 415),
        (gzip.compress(bytes(MAX_REQUEST + 1), mtime=0), {"Content-Encoding": "gzip"}, 413),
    ],
)
def test_what_can_never_be_read_is_refused_for_good(
    gateway: Gateway, body: bytes, headers: dict[str, str], status: int
) -> None:
    assert gateway.post(body, **headers)[0] == status
    assert stored(gateway.folder) == []


def test_another_path_is_not_found_and_a_body_needs_a_length_within_the_limit(gateway: Gateway) -> None:
    assert gateway.post(gpu_request(), "/v1/traces")[0] == 404
    assert gateway.get("/")[0] == 404
    for header, status in ((f"Content-Length: {MAX_REQUEST + 1}", b"413"), ("Transfer-Encoding: chunked", b"411")):
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as sock:
            head = f"POST /v1/metrics HTTP/1.1\r\nHost: x\r\nContent-Type: {TYPE['Content-Type']}\r\n{header}\r\n\r\n"
            sock.sendall(head.encode())
            assert sock.recv(100).split()[1] == status


def test_a_token_is_required_beyond_loopback_and_checked_where_there_is_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[gateway\] host"):
        Gateway(tmp_path, host="0.0.0.0")
    file = tmp_path / "tokens"
    file.write_text("collector:0123456789abcdef\n")
    gateway = Gateway(tmp_path, token_file=file)
    try:
        assert gateway.post(gpu_request())[0] == 401
        assert gateway.post(gpu_request(), Authorization="Bearer wrong-wrong-wrong")[0] == 401
        assert gateway.post(gpu_request(), Authorization="Bearer 0123456789abcdef")[0] == 200
    finally:
        gateway.stop()


def test_a_full_spool_refuses_with_503_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway(tmp_path)
    try:
        assert gateway.post(gpu_request())[0] == 200
        monkeypatch.setattr(intakes.disk, "free_bytes", lambda path: 1)
        status, why = gateway.post(gpu_request(time=T0_NS + 10**9))
        assert status == 503
        assert b"nearly full" in why
        assert json.loads(gateway.get("/readyz")[1]) == {"reasons": ["the disk of the spool is nearly full"]}
        monkeypatch.undo()
        assert gateway.post(gpu_request(time=T0_NS + 10**9))[0] == 200
        assert len(stored(tmp_path)) == 2
    finally:
        gateway.stop()


def test_a_spool_whose_folder_was_removed_is_made_again(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path)
    try:
        assert gateway.post(gpu_request())[0] == 200
        shutil.rmtree(tmp_path / "spool")
        assert gateway.get("/readyz")[0] == 200
        statuses = [gateway.post(gpu_request(time=T0_NS + 10**9))[0] for _ in range(2)]
        assert statuses == [503, 200]  # the first write finds it gone: its sender tries again
        assert len(stored(tmp_path)) == 1
    finally:
        gateway.stop()


def test_a_spool_at_its_limit_refuses_instead_of_dropping_the_oldest(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "gw", OTLP, max_bytes=1 << 18, segment_bytes=1 << 16, free_bytes=0)
    intake = DurableIntake(spool)
    origin = Origin("site", "gw", bytes(16))

    def fill() -> None:
        for i in range(200):
            intake.store(os.urandom(4096) + bytes([i]), "otlp", origin, 0)

    with pytest.raises(Overloaded, match="the spool is full"):
        fill()
    assert intake.stored > 10
    assert spool.dropped == 0
    intake.close()


def test_too_many_waiting_bytes_are_refused_as_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path, "gw", OTLP, free_bytes=0)
    hold, began = threading.Event(), threading.Event()
    sync = spool.sync

    def slow() -> None:
        began.set()
        hold.wait(20)
        sync()

    monkeypatch.setattr(spool, "sync", slow)
    intake = DurableIntake(spool, max_waiting=5000)
    origin = Origin("site", "gw", bytes(16))
    threads = [threading.Thread(target=intake.store, args=(os.urandom(4000), "otlp", origin, 0)) for _ in range(2)]
    threads[0].start()
    assert began.wait(20)
    threads[1].start()
    until(lambda: intake._bytes > 0)
    with pytest.raises(Overloaded) as refused:
        intake.store(os.urandom(4000), "otlp", origin, 0)
    assert refused.value.busy
    hold.set()
    for thread in threads:
        thread.join(20)
    assert intake.stored == 2
    intake.close()


def test_refusals_are_counted_by_reason_and_listed_by_sender(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("collector:0123456789abcdef\n")
    gateway = Gateway(tmp_path, token_file=file)
    valid = {"Authorization": "Bearer 0123456789abcdef"}
    try:
        assert gateway.post(gpu_request(), **valid)[0] == 200
        for _ in range(2):
            gateway.post(b"\xff\xff", **valid)
        gateway.post(gpu_request())
        metrics = gateway.get("/metrics")[1].decode()
        assert 'fleetpulse_gateway_accepted_total{format="otlp",protocol="http"} 1' in metrics
        assert 'fleetpulse_gateway_accepted_total{format="prometheus2",protocol="http"} 0' in metrics
        assert 'fleetpulse_gateway_refused_total{reason="malformed"} 2' in metrics
        assert 'fleetpulse_gateway_refused_total{reason="token"} 1' in metrics
        assert gateway.get("/senders")[0] == 401
        listed = json.loads(gateway.get("/senders", **valid)[1])["refused"]
        assert [(s["sender"], s["reason"], s["count"]) for s in listed] == [
            ("127.0.0.1", "token", 2),
            ("collector (127.0.0.1)", "malformed", 2),
        ]
        assert "not an OTLP metrics request" in listed[1]["why"]
    finally:
        gateway.stop()


def test_only_the_newest_refused_senders_are_kept(tmp_path: Path) -> None:
    intake = DurableIntake(Spool(tmp_path, "gw", OTLP, free_bytes=0))
    receiver = Receiver(intake, Origin("site", "gw", bytes(16)), Tokens({}, None, lambda: 0))
    for i in range(MAX_SENDERS + 10):
        receiver.record_refusal(f"10.0.{i // 256}.{i % 256}", HTTPStatus.BAD_REQUEST, "why\x00" * 200)
    listed = receiver.list_refused()
    assert len(listed) == MAX_SENDERS
    assert listed[0]["sender"] == f"10.0.1.{9}"
    assert len(listed[0]["why"]) == 200
    intake.close()


@pytest.mark.slow
def test_with_a_certificate_only_tls_is_answered(tmp_path: Path, certificate: Path) -> None:
    gateway = Gateway(tmp_path, certificate_file=certificate)
    try:
        context = ssl.create_default_context(cafile=str(certificate))
        connection = http.client.HTTPSConnection("127.0.0.1", gateway.port, timeout=20, context=context)
        for second in range(2):
            connection.request("POST", "/v1/metrics", gpu_request(time=T0_NS + second * 10**9), TYPE)
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (200, b"")
        connection.close()
        with pytest.raises((OSError, http.client.HTTPException)):
            gateway.post(gpu_request())
        assert len(stored(tmp_path)) == 2
    finally:
        gateway.stop()


def test_a_certificate_that_cannot_be_read_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="certificate_file"):
        Gateway(tmp_path, certificate_file=tmp_path / "none.pem")
    with pytest.raises(ConfigError, match="expected certificate_file"):
        Gateway(tmp_path, key_file=tmp_path / "none.pem")
    (tmp_path / "empty.pem").write_text("")
    with pytest.raises(ConfigError, match="certificate_file"):
        Gateway(tmp_path, certificate_file=tmp_path / "empty.pem")


def test_connections_above_the_limit_get_503(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, connections=1)
    try:
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as sock:
            sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" in sock.recv(1000)
            assert gateway.get("/healthz")[0] == 503
        until(lambda: gateway.get("/healthz")[0] == 200)
    finally:
        gateway.stop()


PROGRAM = """
import sys, threading
from pathlib import Path
from agents.gateway.gateway import RunningGateway
from pipeline.config import sections
from pipeline.config.sections import Config
spool = sections.Spool(Path(sys.argv[1]), free_bytes=0)
print(RunningGateway(Config(spool=spool, gateway=sections.Gateway(port=0, node="gw")), print).port, flush=True)
threading.Event().wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(3))
def test_a_kill_loses_no_acknowledged_request_and_doubles_none(tmp_path: Path, round_: int) -> None:
    acknowledged: list[int] = []
    second = 0
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "spool")], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            killer = threading.Timer(0.05 + 0.1 * round_, lambda p=process: p.send_signal(signal.SIGKILL))  # type: ignore[misc]
            killer.start()
            while True:
                second += 1
                try:
                    status, _ = send(port, "POST", "/v1/metrics", gpu_request(time=T0_NS + second * 10**9), TYPE)
                except (OSError, http.client.HTTPException):
                    break
                assert status == 200
                acknowledged.append(T0_NS // 1000 + second * 1_000_000)
    rows = stored(tmp_path)
    times = {time for time, _ in rows}
    assert set(acknowledged) <= times
    assert {count for _, count in rows} == {2}


def test_the_gateway_loads_no_database_no_compiler_and_grpc_only_where_it_is_used() -> None:
    heavy = "{'duckdb', 'numba', 'pyarrow', 'fastapi', 'grpc'}"
    program = f"import agents.gateway.gateway, sys; print(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_service_manager_hears_when_the_gateway_listens_and_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "manager"))
        manager.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "manager"))
        stop, gateway = threading.Event(), sections.Gateway(port=0, node="gw")
        config = Config(spool=sections.Spool(tmp_path / "spool", free_bytes=0), gateway=gateway)
        thread = threading.Thread(target=run, args=(config, stop))
        thread.start()
        assert manager.recv(100) == b"READY=1"
        stop.set()
        assert manager.recv(100) == b"STOPPING=1"
        thread.join()
