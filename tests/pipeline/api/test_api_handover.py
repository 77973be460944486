"""A reload keeps the address of the API: a stand-in answers between two starts, and ends with the second or with us."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from pipeline.api import stand_in
from pipeline.api.handover import VARIABLE
from pipeline.api.server import ApiServer, create_app, start_server
from pipeline.config.sections import Api, Config

CONFIG = Config(api=Api(port=0))
Start = Callable[[Config], tuple[ApiServer, threading.Event]]


@pytest.fixture
def start(backend: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.delenv(VARIABLE, raising=False)
    made = []

    def begin(config: Config) -> tuple[ApiServer, threading.Event]:
        stop = threading.Event()
        made.append((start_server(create_app(backend, config), config, stop), stop))
        return made[-1]

    yield begin
    for serving, stop in made:
        stop.set()
        assert serving.join(5.0)


def ask(port: int, path: str, method: str = "GET", body: bytes | None = None) -> tuple[int, str | None, bytes]:
    """Status, Retry-After and body."""
    caller = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    caller.request(method, path, body)
    found = caller.getresponse()
    answered = found.status, found.getheader("retry-after"), found.read()
    caller.close()
    return answered


def reload(serving: ApiServer, stop: threading.Event) -> None:
    """What the pipeline does after SIGHUP, until it executes its command again."""
    serving.hand_over()
    stop.set()
    assert serving.join(5.0)
    serving.keep_listener(CONFIG.api)


def test_between_two_starts_every_request_is_answered_and_the_second_has_the_same_socket(start: Start) -> None:
    serving, stop = start(CONFIG)
    reload(serving, stop)
    pid = json.loads(os.environ[VARIABLE])[2]
    assert ask(serving.port, "/healthz") == (200, None, b'{"status": "ok"}')
    status, retry, body = ask(serving.port, "/readyz?x=1")
    assert (status, retry, json.loads(body)["ready"]) == (503, "2", False)
    status, retry, body = ask(serving.port, "/api/v1/sql", "POST", b"x" * 500_000)
    assert (status, retry, json.loads(body)["title"]) == (503, "2", "Service Unavailable")
    assert ask(serving.port, "/api/v1/incidents", "HEAD")[::2] == (503, b"")
    again, _ = start(CONFIG)
    assert again.port == serving.port
    assert ask(again.port, "/api/v1/version")[0] == 200
    with pytest.raises(ChildProcessError):  # it has ended
        os.waitpid(pid, os.WNOHANG)
    assert VARIABLE not in os.environ


def test_a_caller_that_sends_nothing_delays_no_other(start: Start) -> None:
    serving, stop = start(CONFIG)
    reload(serving, stop)
    with socket.create_connection(("127.0.0.1", serving.port)), socket.create_connection(("127.0.0.1", serving.port)):
        assert ask(serving.port, "/healthz")[0] == 200
    start(CONFIG)


def test_callers_that_never_end_do_not_hold_up_the_start(start: Start) -> None:
    serving, stop = start(CONFIG)
    reload(serving, stop)
    started = threading.Event()

    def dribble(caller: socket.socket) -> None:
        with contextlib.suppress(OSError), caller:
            for _ in range(100):  # 10 s
                caller.sendall(b"x")
                if started.wait(0.1):
                    return
            held_up.append(caller)

    held_up: list[socket.socket] = []
    callers = [socket.create_connection(("127.0.0.1", serving.port)) for _ in range(stand_in.MOST + 1)]
    threads = [threading.Thread(target=dribble, args=(caller,)) for caller in callers]
    for thread in threads:
        thread.start()
    again, _ = start(CONFIG)
    assert ask(again.port, "/api/v1/version")[0] == 200
    started.set()
    for thread in threads:
        thread.join()
    assert held_up == []


def test_a_start_with_another_address_gives_up_the_one_before(start: Start) -> None:
    serving, stop = start(CONFIG)
    reload(serving, stop)
    again, _ = start(replace(CONFIG, api=replace(CONFIG.api, host="::1")))
    assert again.host == "::1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", serving.port), 1.0)


def test_the_stand_in_ends_if_the_pipeline_does_not_start_again(start: Start) -> None:
    serving, stop = start(CONFIG)
    reload(serving, stop)
    descriptor, held, pid, *_ = json.loads(os.environ.pop(VARIABLE))
    os.close(descriptor)
    os.close(held)  # as the end of the process does
    assert os.waitpid(pid, 0) == (pid, 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", serving.port), 1.0)


def test_a_reload_goes_on_if_no_stand_in_can_be_started(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("Cannot allocate memory")

    serving, stop = start(CONFIG)
    monkeypatch.setattr("pipeline.api.handover.os.posix_spawn", fail)
    before = len(os.listdir("/proc/self/fd"))
    serving.hand_over()
    assert len(os.listdir("/proc/self/fd")) == before
    stop.set()
    assert serving.join(5.0)
    serving.keep_listener(CONFIG.api)
    assert VARIABLE not in os.environ
    assert "refuses connections until" in caplog.text
