"""The server thread: it starts, reports a port in use, and stops within a second in spite of open requests."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.api.server import ApiServer, create_app, start_server
from pipeline.config.sections import Api, Config
from pipeline.model.errors import ConfigError

CONFIG = Config(api=Api(port=0, sql_seconds=60.0))


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def serving(backend: Any, stop: threading.Event) -> Iterator[ApiServer]:
    running = start_server(create_app(backend, CONFIG), CONFIG, stop)
    yield running
    stop.set()
    assert running.join(5.0)


def _stops_within_a_second(serving: ApiServer, stop: threading.Event) -> None:
    begun = time.monotonic()
    stop.set()
    assert serving.join(5.0)
    assert time.monotonic() - begun < 1.0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", serving.port), 1.0)


def test_the_server_answers_once_serve_returns_and_stops_in_spite_of_a_kept_connection(
    serving: ApiServer, stop: threading.Event
) -> None:
    caller = http.client.HTTPConnection("127.0.0.1", serving.port)
    for _ in range(2):
        caller.request("GET", "/healthz")
        answer = caller.getresponse()
        assert (answer.status, json.loads(answer.read())) == (200, {"status": "ok"})
        assert answer.getheader("server") is None
    _stops_within_a_second(serving, stop)
    caller.close()


def test_the_server_stops_while_a_request_is_half_received(serving: ApiServer, stop: threading.Event) -> None:
    with socket.create_connection(("127.0.0.1", serving.port)) as caller:
        caller.sendall(b"POST /api/v1/sql HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n")
        with socket.create_connection(("127.0.0.1", serving.port)) as other:
            other.sendall(
                b"POST /api/v1/sql HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100\r\n\r\n{"
            )
            _stops_within_a_second(serving, stop)


def test_the_server_stops_while_a_query_runs_and_the_query_is_interrupted(
    serving: ApiServer, stop: threading.Event
) -> None:
    outcome: list[object] = []
    sent = threading.Event()

    def send_request() -> None:
        caller = http.client.HTTPConnection("127.0.0.1", serving.port)
        query = "SELECT sum(a.range * b.range) FROM range(100000000) a, range(100000000) b"
        caller.request("POST", "/api/v1/sql", json.dumps({"query": query}), {"Content-Type": "application/json"})
        sent.set()
        try:
            outcome.append(caller.getresponse().status)
        except (http.client.HTTPException, ConnectionError) as error:
            outcome.append(type(error))
        caller.close()

    thread = threading.Thread(target=send_request)
    thread.start()
    assert sent.wait(5.0)
    _stops_within_a_second(serving, stop)
    thread.join(5.0)
    assert outcome
    assert outcome != [200]
    assert not [t.name for t in threading.enumerate() if t.name == "query watch"]


def test_a_port_in_use_is_a_configuration_error_that_names_the_port(
    serving: ApiServer, backend: Any, stop: threading.Event
) -> None:
    taken = Config(api=Api(port=serving.port))
    with pytest.raises(ConfigError, match=str(serving.port)):
        start_server(create_app(backend, taken), taken, stop)


@pytest.mark.slow
def test_many_concurrent_requests_are_all_answered(serving: ApiServer) -> None:
    statuses: list[int] = []

    def send_request() -> None:
        caller = http.client.HTTPConnection("127.0.0.1", serving.port)
        for path in ("/api/v1/fleet", "/api/v1/entities", "/api/v1/series?entity=gpu:n1.0&signal=gpu.power"):
            caller.request("GET", path)
            answer = caller.getresponse()
            answer.read()
            statuses.append(answer.status)
        caller.close()

    threads = [threading.Thread(target=send_request) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 24


def test_a_normal_stop_logs_nothing(
    serving: ApiServer, stop: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    caller = http.client.HTTPConnection("127.0.0.1", serving.port)
    caller.request("GET", "/healthz")
    caller.getresponse().read()
    _stops_within_a_second(serving, stop)
    caller.close()
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
