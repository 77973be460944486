"""A long queue: order, several messages at a time, connections that stay open, and deadlines. Uses real sockets."""

from __future__ import annotations

import functools
import http.server
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.receivers import Webhook
from pipeline.model.records import SECOND
from pipeline.notify.connections import CheckedConnection, ConnectionPool, DeadlineTimer
from pipeline.notify.delivery import Request, exchange
from pipeline.notify.sending import MOST, OrderedSender
from tests.pipeline.notifier_harness import START, NotifierHarness, Receiver


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers 200; /close closes without a header for it, after the answer."""

    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1  # type: ignore[attr-defined]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posts += 1  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
        self.close_connection = self.path == "/close"

    def log_message(self, *_: Any) -> None:
        """Quiet."""


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.connections = self.posts = 0


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def send(server: Server, path: str, pool: ConnectionPool | None) -> int:
    hook = Webhook("ops", f"http://127.0.0.1:{server.server_port}/{path}")
    return exchange(Request(hook, b"{}"), 5.0, pool=pool).status


def test_many_requests_use_one_connection(server: Server) -> None:
    pool = ConnectionPool()
    assert [send(server, "", pool) for _ in range(20)] == [200] * 20
    assert (server.connections, server.posts) == (1, 20)
    pool.close()


def test_without_a_pool_each_request_has_a_connection_of_its_own(server: Server) -> None:
    assert [send(server, "", None) for _ in range(3)] == [200] * 3
    assert server.connections == 3


def test_a_receiver_that_closes_an_idle_connection_gets_the_request_on_a_new_one(server: Server) -> None:
    pool = ConnectionPool()
    assert [send(server, "close", pool) for _ in range(5)] == [200] * 5
    assert (server.connections, server.posts) == (5, 5)
    pool.close()


def test_a_connection_to_another_receiver_is_not_used(server: Server) -> None:
    other, pool = Server(), ConnectionPool()
    thread = threading.Thread(target=other.serve_forever, args=(0.01,))
    thread.start()
    try:
        assert [send(one, "", pool) for one in (server, other, server, other)] == [200] * 4
        assert (server.connections, other.connections) == (1, 1)
    finally:
        pool.close()
        other.shutdown()
        other.server_close()
        thread.join()


def connection(timeout_s: float) -> CheckedConnection:
    return CheckedConnection("receiver.example", 443, ["192.0.2.1"], True, timeout_s)


def wait_for_abort(late: CheckedConnection) -> bool:
    ends = time.monotonic() + 5.0
    while not late.aborted and time.monotonic() < ends:
        threading.Event().wait(0.01)
    return late.aborted


def test_a_later_but_shorter_deadline_is_kept() -> None:
    timer = DeadlineTimer()
    slow, quick, done = connection(60.0), connection(0.05), connection(0.05)
    timer.start(slow)
    timer.cancel(timer.start(done))
    timer.start(quick)
    assert wait_for_abort(quick)
    assert (slow.aborted, done.aborted) == (False, False)


def test_one_at_a_time_while_that_is_fast_enough() -> None:
    clock = itertools.count()
    threads: set[int] = set()

    def answer(number: int) -> int:
        threads.add(threading.get_ident())
        return number

    sender = OrderedSender[int, int](answer, 500, lambda: next(clock) * 1e-6)
    assert list(sender.send_all(range(500), lambda: 8)) == [(n, n) for n in range(500)]
    assert threads == {threading.get_ident()}


def test_a_long_queue_to_a_slow_receiver_is_sent_8_at_a_time_with_results_in_order() -> None:
    lock, now, most = threading.Lock(), 0, 0
    together = threading.Barrier(MOST)
    clock = itertools.count()

    def answer(number: int) -> int:
        nonlocal now, most
        with lock:
            now, most = now + 1, max(most, now + 1)
        if 0 < number <= MOST:
            together.wait(10.0)  # passes only if MOST of them wait
        with lock:
            now -= 1
        return -number

    sender = OrderedSender[int, int](answer, 5000, lambda: next(clock) * 0.1)
    found = list(sender.send_all(range(50), lambda: 100))
    sender.close()
    assert found == [(n, -n) for n in range(50)]
    assert most == MOST


def test_nothing_more_starts_after_a_failure_and_what_is_on_its_way_is_returned() -> None:
    clock = itertools.count()
    sent: list[int] = []
    refused: list[int] = []

    def answer(number: int) -> bool:
        sent.append(number)
        return number != 10

    sender = OrderedSender[int, bool](answer, 5000, lambda: float(next(clock)))
    results = sender.send_all(range(500), functools.partial(lambda seen: 0 if seen else 8, refused))
    for number, accepted in results:
        if not accepted:
            refused.append(number)
    sender.close()
    assert 10 < len(sent) <= 10 + MOST


def test_an_error_of_a_thread_reaches_the_caller() -> None:
    clock = itertools.count()

    def answer(number: int) -> int:
        if number == 3:
            raise MemoryError
        return number

    sender = OrderedSender[int, int](answer, 5000, lambda: float(next(clock)))
    with pytest.raises(MemoryError):
        list(sender.send_all(range(10), lambda: 8))
    sender.close()


def test_of_pages_that_were_opened_together_the_one_that_began_first_is_sent_first(
    tmp_path: Path, receivers: Callable[[], Receiver]
) -> None:
    """The id of the incident decided: the first page was that with the newest onset."""
    receiver = receivers()
    harness = NotifierHarness(tmp_path, [f"http://127.0.0.1:{receiver.server_port}/"])
    for number, cause in enumerate(("gpu:c.0", "gpu:b.0", "gpu:a.0")):
        harness.write_change("opened", cause, onset=START + (number - 60) * SECOND)
    harness.send_due()
    assert [cause for _, cause in receiver.alerts] == ["gpu:c.0", "gpu:b.0", "gpu:a.0"]
    harness.close()


class Closing(CheckedConnection):
    """A connection that its own thread closes between any two looks at its socket."""

    looks = 0

    @property  # type: ignore[override]
    def sock(self) -> Any:
        self.looks += 1
        return SimpleNamespace(shutdown=lambda how: None) if self.looks == 1 else None

    @sock.setter
    def sock(self, value: Any) -> None:
        self.looks = 0


class Broken(CheckedConnection):
    """A connection that cannot be aborted."""

    def abort(self) -> None:
        raise RuntimeError("broken")


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_connection_that_cannot_be_aborted_ends_no_other_deadline() -> None:
    Closing("receiver.example", 443, ["192.0.2.1"], True, 0.05).abort()
    timer, late = DeadlineTimer(), connection(0.1)
    timer.start(Broken("receiver.example", 443, ["192.0.2.1"], True, 0.05))
    timer.start(late)
    assert wait_for_abort(late)
