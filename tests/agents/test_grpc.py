"""The gRPC client against a real grpcio server, and against misbehaving servers on a real socket."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents import grpc as status
from agents.grpc import MAX_REQUEST_BYTES, CallFailed, GrpcChannel, call_once, make_connector
from tests.examples import examples

SLOW_S = 20.0
"""Longer than any deadline of these tests."""


class Service(grpc.GenericRpcHandler):
    """/test.Echo/*: each method misbehaves in its own way. Messages are bytes."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.metadata: dict[str, str] = {}

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        answer = getattr(self, details.method.rpartition("/")[2].lower(), None)
        self.metadata = {key: str(value) for key, value in details.invocation_metadata}
        return grpc.unary_unary_rpc_method_handler(answer) if answer else None

    def echo(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        return request

    def huge(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        return b"h" * int(request)

    def slow(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.released.wait(SLOW_S)
        return b""

    def refuse(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "röt: 100 % no\nsecond line")

    def fail(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        raise RuntimeError("a fault of the server")


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[Service, str, str]]:
    """(the service, its TCP target); a server of grpcio with a thread per call."""
    made = Service()
    server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.max_send_message_length", -1)])
    server.add_generic_rpc_handlers((made,))
    port = server.add_insecure_port("127.0.0.1:0")
    with short_folder() as folder:
        server.add_insecure_port(f"unix:{folder}/s")
        server.start()
        yield made, f"127.0.0.1:{port}", f"unix:{folder}/s"
        made.released.set()
        server.stop(0).wait()


@contextmanager
def short_folder() -> Iterator[str]:
    """A folder for sockets, with a path below the kernel's 108 bytes."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="g", dir="/tmp") as folder:
        yield folder


def failure(ask: Callable[[], object]) -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        ask()
    return caught.value


# --- a real server ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 5, 16_384, 16_390, MAX_REQUEST_BYTES])
def test_an_answer_matches_its_request_over_tcp_and_unix(service: tuple[Service, str, str], size: int) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    for target in service[1:]:
        assert call_once(target, "/test.Echo/Echo", body[:size]) == body[:size]


def test_many_calls_share_a_connection_and_its_deadline(service: tuple[Service, str, str]) -> None:
    with GrpcChannel(service[2], 10.0) as channel:
        assert [channel.call_unary("/test.Echo/Echo", b"%d" % i) for i in range(50)] == [b"%d" % i for i in range(50)]


def test_a_long_answer_exceeds_the_windows_of_http2(service: tuple[Service, str, str]) -> None:
    with GrpcChannel(service[2], 20.0) as channel:
        for _ in range(3):  # more than the connection's own window, which must be given back as well
            assert len(channel.call_unary("/test.Echo/Huge", b"3000000")) == 3_000_000


def test_an_answer_above_the_limit_is_refused_and_the_channel_still_works(service: tuple[Service, str, str]) -> None:
    with GrpcChannel(service[2], 10.0) as channel:
        error = failure(lambda: channel.call_unary("/test.Echo/Huge", b"50000000", most=1000))
        assert error.code == status.RESOURCE_EXHAUSTED
        assert "an answer of 50000000 bytes: expected at most 1000" in str(error)
        assert len(channel.call_unary("/test.Echo/Huge", b"1000", most=1000)) == 1000


def test_a_slow_answer_ends_at_the_deadline(service: tuple[Service, str, str]) -> None:
    began = time.monotonic()
    error = failure(lambda: call_once(service[2], "/test.Echo/Slow", deadline=0.3))
    assert error.code == status.DEADLINE_EXCEEDED
    assert time.monotonic() - began < SLOW_S / 4


def test_the_server_receives_the_deadline(service: tuple[Service, str, str]) -> None:
    seen: list[float] = []
    made = service[0]
    made.remaining = lambda request, context: seen.append(context.time_remaining()) or b""  # type: ignore[attr-defined]
    call_once(service[1], "/test.Echo/Remaining", deadline=7.0)
    assert 5.0 < seen[0] <= 7.1
    assert made.metadata["user-agent"].startswith("fleetpulse")


def test_a_status_of_the_server_comes_with_its_message(service: tuple[Service, str, str]) -> None:
    error = failure(lambda: call_once(service[2], "/test.Echo/Refuse"))
    assert error.code == status.PERMISSION_DENIED
    assert error.reason == "PERMISSION_DENIED (7): röt: 100 % no second line"
    assert str(error).startswith(f"{service[2]}: /test.Echo/Refuse: ")


def test_a_missing_method_and_a_failing_one_have_different_codes(service: tuple[Service, str, str]) -> None:
    assert failure(lambda: call_once(service[2], "/test.Echo/Absent")).code == status.UNIMPLEMENTED
    error = failure(lambda: call_once(service[2], "/test.Echo/Fail"))
    assert error.code == status.UNKNOWN
    assert "a fault of the server" in error.reason


# --- no server -------------------------------------------------------------------------------------------------------


def test_a_missing_server_is_unavailable_with_the_reason(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    error = failure(lambda: call_once(f"127.0.0.1:{port}", "/a.B/C"))
    assert (error.code, error.reason) == (status.UNAVAILABLE, "UNAVAILABLE (14): Connection refused")
    error = failure(lambda: call_once(f"unix:{tmp_path}/none", "/a.B/C"))
    assert error.reason == "UNAVAILABLE (14): No such file or directory"


def test_without_h2_the_message_has_the_fix(service: tuple[Service, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("h2.exceptions", "h2.connection", "h2.config"):
        monkeypatch.setitem(sys.modules, name, None)
    error = failure(lambda: call_once(service[2], "/test.Echo/Echo"))
    assert error.code == status.INTERNAL
    assert "install the agent with its dependencies" in error.reason


@pytest.mark.parametrize("target", ["", "unix:", "host", "localhost:", "localhost:x", "localhost:0", "localhost:70000"])
def test_an_invalid_target_is_refused_with_a_hint(target: str) -> None:
    with pytest.raises(ValueError, match="expected unix:PATH, /PATH or HOST:PORT"):
        make_connector(target)


@pytest.mark.parametrize("target", ["192.0.2.1:8431", "example.org:8431", "[2001:db8::1]:80", "0.0.0.0:80"])
def test_another_machine_is_refused_unless_allowed(target: str) -> None:
    with pytest.raises(ValueError, match="another machine, and the call is not encrypted"):
        make_connector(target)
    assert callable(make_connector(target, anywhere=True))
    assert callable(make_connector("[::1]:80"))


def test_a_too_long_request_raises_a_value_error() -> None:
    with pytest.raises(ValueError, match="expected at most 32768"):
        call_once("localhost:1", "/a.B/C", bytes(MAX_REQUEST_BYTES + 1))


# --- servers that misbehave ------------------------------------------------------------------------------------------


@contextmanager
def answering(*replies: bytes, hold: bool = False) -> Iterator[str]:
    """A server of raw bytes: sends them to each connection, then closes it or keeps it open."""
    with short_folder() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")
        listener.listen()
        done = threading.Event()

        def serve() -> None:
            for reply in replies:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(reply)
                    if hold:
                        done.wait(SLOW_S)
                    else:
                        connection.shutdown(socket.SHUT_WR)
                        while connection.recv(65536):
                            pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"unix:{folder}/s"
        finally:
            done.set()
            thread.join(SLOW_S)
            assert not thread.is_alive()


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


SETTINGS = frame(4, 0, 0)
OK_200 = b"\x88"  # :status 200 of HPACK's static table


def header(name: bytes, value: bytes) -> bytes:
    """Returns a header as HPACK encodes it, neither indexed nor compressed."""
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


GRPC = OK_200 + header(b"content-type", b"application/grpc")
FINE = frame(1, 5, 1, header(b"grpc-status", b"0"))
HI = b"\0\0\0\0\x02hi"

REPLIES = {
    "whole": (SETTINGS + frame(1, 4, 1, GRPC) + frame(0, 0, 1, HI) + FINE, None),
    "message in single bytes": (
        SETTINGS + frame(1, 4, 1, GRPC) + b"".join(frame(0, 0, 1, HI[i : i + 1]) for i in range(7)) + FINE,
        None,
    ),
    "closed immediately": (b"", status.UNAVAILABLE),
    "closed amid the message": (SETTINGS + frame(1, 4, 1, GRPC) + frame(0, 0, 1, HI[:4]), status.UNAVAILABLE),
    "ended without trailers": (SETTINGS + frame(1, 4, 1, GRPC) + frame(0, 1, 1, HI), status.INTERNAL),
    "no message": (SETTINGS + frame(1, 4, 1, GRPC) + FINE, status.INTERNAL),
    "torn message": (SETTINGS + frame(1, 4, 1, GRPC) + frame(0, 0, 1, HI[:6]) + FINE, status.INTERNAL),
    "two messages": (SETTINGS + frame(1, 4, 1, GRPC) + frame(0, 0, 1, HI + HI) + FINE, status.INTERNAL),
    "compressed": (SETTINGS + frame(1, 4, 1, GRPC) + frame(0, 0, 1, b"\1" + HI[1:]) + FINE, status.INTERNAL),
    "reset": (SETTINGS + frame(3, 0, 1, (8).to_bytes(4, "big")), status.CANCELLED),
    "goes away": (SETTINGS + frame(7, 0, 0, bytes(8)), status.UNAVAILABLE),
    "http error": (SETTINGS + frame(1, 5, 1, b"\x8d"), status.UNIMPLEMENTED),
    "a web page": (SETTINGS + frame(1, 4, 1, OK_200 + header(b"content-type", b"text/html")), status.UNKNOWN),
    "status alone": (SETTINGS + frame(1, 5, 1, GRPC + header(b"grpc-status", b"5")), status.NOT_FOUND),
    "status of no number": (SETTINGS + frame(1, 5, 1, GRPC + header(b"grpc-status", b"-1")), status.UNKNOWN),
    "http/1": (b"HTTP/1.1 400 Bad Request\r\n\r\n", status.INTERNAL),
    "garbage": (bytes(range(256)), status.INTERNAL),
}


@pytest.mark.parametrize("name", REPLIES)
def test_a_misbehaving_server_fails_one_call_with_its_reason(name: str) -> None:
    reply, code = REPLIES[name]
    with answering(reply) as target:
        if code is None:
            assert call_once(target, "/a.B/C", deadline=5.0) == b"hi"
            return
        error = failure(lambda: call_once(target, "/a.B/C", deadline=5.0))
    assert error.code == code, str(error)


def test_half_an_answer_and_silence_end_at_the_deadline() -> None:
    with answering(SETTINGS + frame(1, 4, 1, GRPC) + frame(0, 0, 1, HI[:4]), hold=True) as target:
        assert failure(lambda: call_once(target, "/a.B/C", deadline=0.3)).code == status.DEADLINE_EXCEEDED


def test_a_channel_reconnects_after_its_server_died() -> None:
    whole, _ = REPLIES["whole"]
    with answering(b"", whole) as target, GrpcChannel(target, 5.0) as channel:
        assert failure(lambda: channel.call_unary("/a.B/C")).code == status.UNAVAILABLE
        assert channel.call_unary("/a.B/C") == b"hi"


@settings(max_examples=examples(60), deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_of_a_server_fail_only_the_call(garbage: bytes, after_settings: bool) -> None:
    with answering((SETTINGS if after_settings else b"") + garbage) as target:
        failure(lambda: call_once(target, "/a.B/C", deadline=5.0))


def test_a_slowly_dripping_server_ends_at_the_deadline_of_the_call() -> None:
    with short_folder() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")
        listener.listen()
        done = threading.Event()

        def drip() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):  # the client closed the connection
                connection.sendall(SETTINGS)
                for byte in frame(0, 0, 1, bytes(100))[:30]:  # never complete, so there is nothing to answer
                    connection.sendall(bytes((byte,)))
                    if done.wait(0.1):
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        began = time.monotonic()
        error = failure(lambda: call_once(f"unix:{folder}/s", "/a.B/C", deadline=0.4))
        took = time.monotonic() - began
        done.set()
        thread.join(SLOW_S)
    assert error.code == status.DEADLINE_EXCEEDED
    assert took < 2.0
