"""Redfish sessions on broken connections: requests that are repeated, and those never sent twice."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agents.collectors.bmc.redfish_http import SESSIONS, STALE_S, RedfishConnection, RedfishSession, RequestError

ROOT = "/redfish/v1"
Answers = Callable[[str, int], bytes | None]


@dataclass
class Line:
    """A BMC with scripted responses. asked: the request lines; now: the client's clock."""

    asked: list[str] = field(default_factory=list)
    url: str = ""
    now: float = 0.0

    def count(self, method: str) -> int:
        return sum(line.startswith(method) for line in self.asked)

    def client(self) -> RedfishConnection:
        return RedfishConnection(self.url, 5.0, monotonic=lambda: self.now)


def responses(status: str = "200 OK", body: bytes = b"{}", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join((*lines, "", "")).encode().replace(b"_", b"-") + body


def request(stream: object) -> str:
    """The first line of a request that came whole; "" where the line ended."""
    first, size = "", 0
    while (text := stream.readline().decode()) not in ("\r\n", ""):  # type: ignore[attr-defined] # a socket's file
        first = first or text.strip()
        name, _, value = text.partition(":")
        size = int(value) if name.lower() == "content-length" else size
    stream.read(size)  # type: ignore[attr-defined]
    return first


@contextmanager
def line(answers: Answers) -> Iterator[Line]:
    """answers: (request line, number of requests of its method so far) -> response; None closes the connection."""
    found, listener = Line(), socket.create_server(("127.0.0.1", 0))
    found.url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    def serve() -> None:
        with suppress(OSError):  # closed: the test is over
            while True:
                connection, _ = listener.accept()
                with connection, connection.makefile("rb") as stream:
                    while first := request(stream):
                        found.asked.append(first)
                        answer = answers(first, found.count(first.split()[0]))
                        if answer is None:
                            break
                        connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield found
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        listener.close()
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture
def password(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text("sesame\n")
    path.chmod(0o600)
    return path


def test_a_get_on_a_closed_persistent_connection_is_sent_again() -> None:
    with line(lambda first, number: None if number == 2 else responses()) as bmc:
        client = bmc.client()
        for _ in range(2):
            assert client.request("GET", ROOT, {}).status == 200
        client.close()
        assert bmc.asked == [f"GET {ROOT} HTTP/1.1"] * 3


def test_a_get_that_failed_while_being_processed_is_not_repeated() -> None:
    def answers(first: str, number: int) -> bytes | None:
        bmc.now += 0.0 if number == 1 else STALE_S + 0.1
        return responses() if number == 1 else None

    with line(answers) as bmc:
        client = bmc.client()
        client.request("GET", ROOT, {})
        with pytest.raises(RequestError) as broken:
            client.request("GET", ROOT, {})
        assert broken.value.bmc_down
        assert bmc.count("GET") == 2


def test_a_login_without_response_is_not_repeated(password: Path) -> None:
    def answers(first: str, number: int) -> bytes | None:
        if first.startswith("POST"):
            return responses("201 Created", X_Auth_Token="t", Location=f"{SESSIONS}/1") if number == 1 else None
        return responses("401 Unauthorized") if number == 2 else responses()

    with line(answers) as bmc:
        session = RedfishSession(bmc.client(), "operator", password)
        assert session.get(ROOT).status == 200
        with pytest.raises(RequestError) as broken:
            session.get(ROOT)  # the session expired; the login goes over the kept connection, which breaks
        session.client.close()
        assert broken.value.bmc_down
        assert bmc.count("POST") == 2


@pytest.mark.parametrize(("login", "logins"), [("201 Created", 2), ("401 Unauthorized", 1), ("403 Forbidden", 1)])
def test_a_refused_login_pauses_the_whole_bmc(password: Path, login: str, logins: int) -> None:
    def answers(first: str, number: int) -> bytes | None:
        if first.startswith("POST"):
            return responses(login, **({"X_Auth_Token": "t"} if login.startswith("201") else {}))
        return responses("401 Unauthorized")

    with line(answers) as bmc:
        session = RedfishSession(bmc.client(), "operator", password)
        with pytest.raises(RequestError) as refused:
            session.get(ROOT)
        session.client.close()
        assert refused.value.bmc_down
        assert bmc.count("POST") == logins
