"""Callers who say nothing, little or too slowly: they are dropped in time, and others are served meanwhile."""

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


def caller(serving: ApiServer, start: bytes = b"") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", serving.port), 5.0)
    made.sendall(start)
    return made


def healthy(serving: ApiServer) -> bool:
    asked = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=5.0)
    with contextlib.closing(asked):
        asked.request("GET", "/healthz")
        return asked.getresponse().status == 200


def dropped(one: socket.socket) -> bool:
    """True when the server ends a connection by itself. Raises TimeoutError if that takes longer than its socket's."""
    with contextlib.suppress(ConnectionResetError):
        while one.recv(1 << 16):
            pass
    return True


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_many_half_open_connections_cost_few_files_and_others_are_served(serving: ApiServer) -> None:
    before = files()
    with contextlib.ExitStack() as held:
        silent = [held.enter_context(caller(serving, b"GET / HTTP/1.1\r\nHost: 12")) for _ in range(5 * MOST)]
        assert healthy(serving)
        assert files() - before - len(silent) <= MOST + 5
        assert sum(map(dropped, silent)) == len(silent)
    assert healthy(serving)


def test_a_crowd_that_sends_a_byte_now_and_then_keeps_out_nobody_who_pauses_within_a_request(
    serving: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the crowd had sent something later than the honest caller, who was dropped in its place."""
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 30.0)
    with contextlib.ExitStack() as held:
        crowd = [held.enter_context(caller(serving, b"GET / HTTP/1.1\r\n")) for _ in range(MOST)]
        honest = held.enter_context(caller(serving, b"GET /healthz HTTP/1.1\r\n"))
        for _ in range(MOST // 2):
            crowd = [one for one in crowd if sent(one)]
            crowd.append(held.enter_context(caller(serving, b"GET / HTTP/1.1\r\n")))
            time.sleep(0.01)  # lets the server see each round by itself
        honest.sendall(b"Host: 127.0.0.1\r\n\r\n")
        assert honest.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_callers_who_come_while_the_server_is_busy_wait_in_the_kernel_and_need_not_try_again(
    serving: ApiServer,
) -> None:
    """Beyond the queue a SYN is dropped, and repeated after 1, 3, 7 and 15 s: a call of 20 ms took 19 s."""
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


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"GET /healthz HTTP/1.1\r\n",
        b"POST /api/v1/sql HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\n\r\n{",
    ],
    ids=["nothing", "half a head", "half a body"],
)
def test_a_request_that_does_not_arrive_whole_in_time_is_dropped(serving: ApiServer, start: bytes) -> None:
    begun = time.monotonic()
    with caller(serving, start) as one:
        assert dropped(one)
    assert time.monotonic() - begun < 3.0


def test_a_byte_now_and_then_buys_no_time(serving: ApiServer) -> None:
    """Slow loris: each byte is on time, the request is not."""
    with caller(serving, b"GET /healthz HTTP/1.1\r\n") as one:
        one.settimeout(0.1)
        begun = time.monotonic()
        with pytest.raises((BrokenPipeError, ConnectionResetError, EOFError)):
            drip(one)
    assert time.monotonic() - begun < 3.0


def sent(one: socket.socket) -> bool:
    """Whether the connection took one more byte."""
    try:
        return one.send(b"X") == 1
    except OSError:
        return False


def drip(one: socket.socket) -> None:
    """Sends a byte ten times a second. Raises EOFError or OSError when the server has ended the connection."""
    while True:
        one.sendall(b"X")
        with contextlib.suppress(TimeoutError):
            if not one.recv(1):
                raise EOFError


def test_the_second_request_of_a_kept_connection_has_the_same_deadline(serving: ApiServer) -> None:
    with caller(serving, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") as one:
        assert one.recv(1 << 16).startswith(b"HTTP/1.1 200")
        one.sendall(b"GET /heal")
        assert dropped(one)


def test_a_slow_reader_of_an_answer_is_dropped_and_its_slot_is_free_again(
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
            one = held.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect(("127.0.0.1", serving.port))
            one.sendall(head + body)
        until = time.monotonic() + 60.0
        while answered(serving) != 200:
            assert time.monotonic() < until
            time.sleep(0.1)  # polls a real server that has no other way to tell


def answered(serving: ApiServer) -> int:
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
