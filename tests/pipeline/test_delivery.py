"""One post: which addresses are allowed, and how each failure is classified. Uses real sockets."""

from __future__ import annotations

import email.utils
import http.server
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.config.receivers import Webhook
from pipeline.model.errors import ConfigError, Refused
from pipeline.notify.delivery import PostResult, check_address, check_receiver, classify_status, post


def hook(url: str, **more: Any) -> Webhook:
    return Webhook("ops", url, **more)


class FaultyHandler(http.server.BaseHTTPRequestHandler):
    """Behaves as the path says."""

    protocol_version = "HTTP/1.1"
    visited: list[str]

    def do_POST(self) -> None:
        self.server.visited.append(self.path)  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers["Content-Length"]))
        what = self.path.strip("/")
        if what.isdecimal():
            self.send_response(int(what))
            self.send_header("Location", "/200")
            self.send_header("Retry-After", "42")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        elif what == "close":
            self.close_connection = True
        elif what == "nonsense":
            self.wfile.write(b"SECRET from the receiver\r\n\r\n")
            self.close_connection = True
        elif what == "flood":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n" + b"x" * 8192)
        elif what == "hang":
            self.server.released.wait(10)  # type: ignore[attr-defined]
        elif what == "send_slowly":
            self.send_slowly()

    def send_slowly(self) -> None:
        """Sends single bytes: each one alone is in time."""
        try:
            for byte in b"HTTP/1.1 200 OK and so on and on":
                self.wfile.write(bytes([byte]))
                if self.server.released.wait(0.1):  # type: ignore[attr-defined]
                    return
        except OSError:
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Logs nothing: the tests check the responses."""


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FaultyHandler)
        self.visited: list[str] = []
        self.released = threading.Event()

    def handle_error(self, *_: Any) -> None:
        """Ignores a closed connection: the client closes it on purpose."""


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.released.set()
    made.shutdown()
    made.server_close()
    thread.join()


def answer(server: Server, path: str, timeout_s: float = 5.0) -> Any:
    return post(hook(f"http://127.0.0.1:{server.server_port}/{path}"), b'{"a":1}', {"Idempotency-Key": "k"}, timeout_s)


@pytest.mark.parametrize(
    ("path", "outcome"),
    [
        ("200", "delivered"),
        ("202", "delivered"),
        ("flood", "delivered"),
        ("503", "retry"),
        ("500", "retry"),
        ("408", "retry"),
        ("429", "retry"),
        ("close", "retry"),
        ("nonsense", "retry"),
        ("400", "retry"),
        ("404", "retry"),
        ("302", "retry"),
        ("307", "retry"),
        ("410", "retry"),
    ],
)
def test_each_response_has_one_outcome(server: Server, path: str, outcome: str) -> None:
    assert answer(server, path).outcome == outcome
    assert server.visited == [f"/{path}"], "one post, and no redirect is followed"


@pytest.mark.parametrize("path", ["hang", "send_slowly"])
def test_a_receiver_that_is_too_slow_is_abandoned(server: Server, path: str) -> None:
    began = time.monotonic()
    delivery = answer(server, path, 0.3)
    assert (delivery.outcome, delivery.text) == ("retry", "no answer within 0.3 s")
    assert time.monotonic() - began < 3


def test_the_text_of_the_receiver_is_never_repeated(server: Server) -> None:
    for path in ("nonsense", "400", "503"):
        assert "SECRET" not in answer(server, path).text
        assert '"a"' not in answer(server, path).text


def test_a_closed_port_is_retried() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        delivery = post(hook(f"http://127.0.0.1:{taken.getsockname()[1]}/"), b"{}", {}, 1.0)
    assert delivery.outcome == "retry"
    assert "refused" in delivery.text


def test_retry_after_is_read_in_seconds_and_as_a_date(server: Server) -> None:
    assert answer(server, "429").retry_after_s == 42
    later = email.utils.format_datetime(email.utils.localtime().replace(microsecond=0), usegmt=False)
    assert classify_status(502, later).retry_after_s <= 1
    assert classify_status(502, "soon").retry_after_s == 0
    assert classify_status(503).retry_after_s == 0


HOSTILE_DELAYS = [
    "\x0b" * 10 + "5",
    "\x0b*10 5",
    "-5",
    "+5",
    "1e9",
    "inf",
    "nan",
    "٣",
    "5" * 65,
    "9" * 65536,
    "",
    " ",
    "Mon, 99 Foo 99999 99:99:99 +9999",
    "Fri, 31 Dec 0001 23:59:59 -0000",
    "Fri, 31 Dec 9999 23:59:59 -9959",
    "1 Jan 2020 00:00:00 +99999999999",
    ", , , , ,",
]


@pytest.mark.parametrize("text", HOSTILE_DELAYS, ids=range(len(HOSTILE_DELAYS)))
def test_a_hostile_retry_after_gives_no_delay_or_a_day_at_most(text: str) -> None:
    assert classify_status(502, text).retry_after_s in (0.0, 86400.0)


def test_a_retry_after_is_a_day_at_most() -> None:
    assert classify_status(502, " 9 ").retry_after_s == 9
    assert classify_status(502, "9" * 60).retry_after_s == 86400
    assert classify_status(502, "Fri, 31 Dec 9999 23:59:59 GMT").retry_after_s == 86400
    assert classify_status(502, "Fri, 31 Dec 1999 23:59:59 GMT").retry_after_s == 0


@pytest.mark.parametrize("key", ["inc-1.1.値班", "inc-1.1.a\nb", "a\r\nHost: evil"])
def test_an_invalid_header_is_a_failed_attempt(server: Server, key: str) -> None:
    delivery = post(hook(f"http://127.0.0.1:{server.server_port}/200"), b"{}", {"Idempotency-Key": key}, 1.0)
    assert delivery.outcome == "retry"
    assert "no valid HTTP request" in delivery.text
    assert server.visited == []


@pytest.mark.parametrize(
    "url",
    [
        "ftp://hook.example/",
        "file:///etc/passwd",
        "https:///path",
        "https://user:word@hook.example/",
        "https://hook.example:0/",
        "https://hook.example:99999/",
        "https://hook.example/a b",
        "https://hook.example/\r\nX: y",
        "https://hök.example/",
        "http://hook.example/",
        "http://10.0.0.1/",
        "https://10.0.0.1/",
        "https://224.0.0.1/",
        "http://2130706433/",
        "http://0x7f.1/",
        "hook.example",
        "https://[::1/",
    ],
)
def test_a_url_that_can_never_be_called_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ConfigError, match=r"\[\[notify.webhooks\]\] ops: url"):
        check_receiver(hook(url))


@pytest.mark.parametrize(
    "url",
    [
        "https://hook.example/a?b=c",
        "http://127.0.0.1:9/",
        "http://localhost/",
        "http://[::1]:80/x",
        "https://192.0.2.1.example/",
    ],
)
def test_a_valid_url_is_accepted(url: str) -> None:
    check_receiver(hook(url))


def test_http_to_other_hosts_needs_allow_http_and_cidrs_must_be_valid() -> None:
    check_receiver(hook("http://hook.example/", allow_http=True))
    with pytest.raises(ConfigError, match="allow_private"):
        check_receiver(hook("https://hook.example/", allow_private=("ten",)))


BLOCKED = [
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",
    "169.254.169.254",
    "0.0.0.0",
    "224.0.0.1",
    "255.255.255.255",
    "127.0.0.1",
    "::1",
    "::",
    "fe80::1",
    "fe80::1%lo",
    "fd00::1",
    "ff02::1",
    "::ffff:93.184.216.34",
    "::ffff:127.0.0.1",
    "::127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b:1::1",
    "2002:7f00:1::",
    "2001:0:7f00:1::",
    "fec0::1",
    "3fff::1",
    "3fff:fff::1",
    "5f00::1",
    "4000::1",
]


@pytest.mark.parametrize("address", BLOCKED)
def test_a_public_name_with_a_private_address_is_refused(address: str) -> None:
    with pytest.raises(Refused):
        check_address(address, hook("https://hook.example/"), "hook.example")


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "3ffe::1", "2a00:1450:4001::1"])
def test_a_public_address_is_allowed(address: str) -> None:
    check_address(address, hook("https://hook.example/"), "hook.example")


def test_a_private_address_is_allowed_when_its_range_is_allowed() -> None:
    allowed = hook("https://hook.example/", allow_private=("10.1.2.0/24", "fd00::/8"))
    check_address("10.1.2.3", allowed, "hook.example")
    check_address("fd00::7", allowed, "hook.example")
    for other in ("10.1.3.3", "::ffff:10.1.2.3", "2002:a01:203::"):
        with pytest.raises(Refused):
            check_address(other, allowed, "hook.example")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_loopback_is_allowed_when_the_url_names_it(host: str) -> None:
    check_address("127.0.0.1", hook("https://x/"), host)
    check_address("::1", hook("https://x/"), host)


def test_one_private_address_among_public_ones_stops_the_post(server: Server) -> None:
    receiver = hook(f"http://127.0.0.1:{server.server_port}/200")
    found = [(0, 0, 0, "", (address, server.server_port)) for address in ("127.0.0.1", "10.0.0.1")]
    delivery = post(receiver, b"{}", {}, 1.0, lambda host, port: found)
    assert delivery.outcome == "retry"
    assert "10.0.0.1 is private" in delivery.text
    assert server.visited == []


def test_the_post_goes_to_the_checked_address_with_the_host_name_of_the_url(server: Server) -> None:
    receiver = hook(f"http://hook.example:{server.server_port}/200", allow_http=True, allow_private=("127.0.0.0/8",))
    found = [(0, 0, 0, "", ("127.0.0.1", server.server_port))]
    assert post(receiver, b"{}", {}, 1.0, lambda host, port: found).outcome == "delivered"


def test_proxies_of_the_environment_are_not_used(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert answer(server, "200").outcome == "delivered"


def test_head_and_body_arrive_in_one_piece() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pieces: list[bytes] = []

        def answer_once() -> None:
            connection, _ = listener.accept()
            with connection:
                pieces.append(connection.recv(65_536))
                connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

        thread = threading.Thread(target=answer_once)
        thread.start()
        result = post(hook(f"http://127.0.0.1:{listener.getsockname()[1]}/"), b'{"a":1}', {"Idempotency-Key": "k"})
        thread.join(5)
    assert result.outcome == "delivered"
    assert pieces[0].startswith(b"POST / HTTP/1.1\r\n")
    assert pieces[0].endswith(b'\r\n\r\n{"a":1}')


HEADS = [b"HTTP/1.1 200", b"HTTP/1.1 200 OK", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n"]


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize("head", [*HEADS, b"HTTP/1.1 200 OK\r\nContent-Le"])
def test_a_head_that_was_cut_is_no_answer(head: bytes, closes: bool) -> None:
    result = answer_with(head, closes)
    assert result.outcome == "retry"
    assert result.text == ("IncompleteRead: no valid HTTP request or response" if closes else "no answer within 0.5 s")


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize("rest", [b"\r\n", b"Content-Length: 5\r\n\r\nab", b"Transfer-Encoding: chunked\r\n\r\n5"])
def test_a_whole_head_is_an_answer_also_without_its_body(rest: bytes, closes: bool) -> None:
    assert answer_with(b"HTTP/1.1 200 OK\r\n" + rest, closes).outcome == "delivered"


def answer_with(text: bytes, closes: bool) -> PostResult:
    """Returns the result of a post to a receiver that answers with a text, and then closes or says nothing more."""
    released = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_once() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(text)
                if not closes:
                    released.wait(5)

        thread = threading.Thread(target=answer_once)
        thread.start()
        result = post(hook(f"http://127.0.0.1:{listener.getsockname()[1]}/"), b"{}", {}, 0.5)
        released.set()
        thread.join(5)
    return result
