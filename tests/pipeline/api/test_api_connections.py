"""Slow or silent clients: their connections are dropped in time, and other clients are served."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.api import routes
from pipeline.api.server import ApiServer, create_app, start_server
from pipeline.config.sections import Api, Config
from pipeline.http import connections

MOST = 40
CONFIG = Config(api=Api(port=0, connections=MOST))


@pytest.fixture
def serving(backend: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 1.0)
    stop = threading.Event()
    running = start_server(create_app(backend, CONFIG), CONFIG, stop)
    yield running
    stop.set()
    assert running.join(5.0)


def connect(serving: ApiServer, start: bytes = b"") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", serving.port), 5.0)
    made.sendall(start)
    return made


def is_healthy(serving: ApiServer) -> bool:
    asked = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=5.0)
    with contextlib.closing(asked):
        asked.request("GET", "/healthz")
        return asked.getresponse().status == 200


def is_dropped(connection: socket.socket) -> bool:
    """Returns whether the server closes the connection. Raises TimeoutError after the timeout of the socket."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass
    return True


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_many_half_open_connections_cost_few_files_and_others_are_served(serving: ApiServer) -> None:
    before = open_files()
    with contextlib.ExitStack() as held:
        silent = [held.enter_context(connect(serving, b"GET / HTTP/1.1\r\nHost: 12")) for _ in range(5 * MOST)]
        assert is_healthy(serving)
        assert open_files() - before - len(silent) <= MOST + 5
        assert sum(map(is_dropped, silent)) == len(silent)
    assert is_healthy(serving)


def test_many_slow_clients_do_not_keep_out_a_client_that_pauses_within_a_request(
    serving: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The honest client was once dropped, because each of the others had sent a byte after it."""
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 30.0)
    with contextlib.ExitStack() as held:
        crowd = [held.enter_context(connect(serving, b"GET / HTTP/1.1\r\n")) for _ in range(MOST)]
        honest = held.enter_context(connect(serving, b"GET /healthz HTTP/1.1\r\n"))
        for _ in range(MOST // 2):
            crowd = [connection for connection in crowd if accepts_byte(connection)]
            crowd.append(held.enter_context(connect(serving, b"GET / HTTP/1.1\r\n")))
            time.sleep(0.01)  # the server handles each round separately
        honest.sendall(b"Host: 127.0.0.1\r\n\r\n")
        assert honest.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_clients_that_connect_while_the_server_is_busy_wait_in_the_kernel_queue_without_a_retry(
    serving: ApiServer,
) -> None:
    """Beyond the queue a SYN is dropped and repeated after 1, 3, 7 and 15 s: a request of 20 ms took 19 s."""
    busy, held = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        busy.wait()

    serving._server.servers[0].get_loop().call_soon_threadsafe(hold)
    held.wait()
    with contextlib.ExitStack() as open_ones:
        open_ones.callback(busy.set)
        for _ in range(600):
            open_ones.enter_context(socket.create_connection(("127.0.0.1", serving.port), 0.9))


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"GET /healthz HTTP/1.1\r\n",
        b"POST /api/v1/sql HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\n\r\n{",
    ],
    ids=["nothing", "half of the headers", "half of the body"],
)
def test_a_request_that_does_not_arrive_in_full_in_time_is_dropped(serving: ApiServer, start: bytes) -> None:
    begun = time.monotonic()
    with connect(serving, start) as connection:
        assert is_dropped(connection)
    assert time.monotonic() - begun < 3.0


@pytest.mark.slow
def test_sending_single_bytes_does_not_extend_the_deadline(serving: ApiServer) -> None:
    """Slowloris: each byte is in time, the request is not."""
    with connect(serving, b"GET /healthz HTTP/1.1\r\n") as connection:
        connection.settimeout(0.1)
        begun = time.monotonic()
        with pytest.raises((BrokenPipeError, ConnectionResetError, EOFError)):
            send_slowly(connection)
    assert time.monotonic() - begun < 3.0


def accepts_byte(connection: socket.socket) -> bool:
    """Returns whether the connection accepted one more byte."""
    try:
        return connection.send(b"X") == 1
    except OSError:
        return False


def send_slowly(connection: socket.socket) -> None:
    """Sends a byte ten times a second. Raises EOFError or OSError when the server has closed the connection."""
    while True:
        connection.sendall(b"X")
        with contextlib.suppress(TimeoutError):
            if not connection.recv(1):
                raise EOFError


@pytest.mark.slow
def test_the_second_request_of_a_kept_connection_has_the_same_deadline(serving: ApiServer) -> None:
    with connect(serving, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") as connection:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /heal")
        assert is_dropped(connection)


@pytest.mark.slow
def test_a_client_that_reads_its_response_slowly_is_dropped_and_its_slot_is_free_again(
    serving: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "SEND_SECONDS", 0.5)
    monkeypatch.setattr(connections, "WRITE_SECONDS", 1.0)
    body = json.dumps({"query": "SELECT range, range * 3, range * 5, range * 7 FROM range(300000)"}).encode()
    head = (
        b"POST /api/v1/sql HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    with contextlib.ExitStack() as held:
        for _ in range(CONFIG.api.sql_queries):
            connection = held.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", serving.port))
            connection.sendall(head + body)
        until = time.monotonic() + 60.0
        while send_query(serving) != 200:
            assert time.monotonic() < until
            time.sleep(0.1)  # polls a real server; it has no event for this


def send_query(serving: ApiServer) -> int:
    asked = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=30.0)
    with contextlib.closing(asked):
        body = json.dumps({"query": "SELECT 1"})
        asked.request("POST", "/api/v1/sql", body, {"Content-Type": "application/json"})
        return asked.getresponse().status


def test_the_file_limit_is_raised_and_a_reserve_is_left_for_ingest(serving: ApiServer) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard
    assert connections.limit_connections(256, 1024) == 256
    assert connections.limit_connections(4096, 1024) == 1024 - connections.RESERVED_FILES
    assert connections.limit_connections(256, 64) == connections.MIN_CONNECTIONS
