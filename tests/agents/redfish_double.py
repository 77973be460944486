"""A Redfish service for tests over real HTTP or HTTPS on loopback: it serves a tree, breaks as asked, pushes events.

By hand: `python -m tests.agents.redfish_double --port 8443 --tree FILE.json` (or a name: cdu, shelf, pdu, chassis).
"""

from __future__ import annotations

import argparse
import json
import queue
import socket
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.agents.redfish_answers import Service
from tests.agents.redfish_faults import DRIP, Fault, Faults
from tests.agents.redfish_message import Answer, Question, error
from tests.agents.redfish_streams import Streams, changed
from tests.agents.redfish_tree import SSE_URI, Document, Tree, normal
from tests.agents.redfish_trees import TREES

MOST_RECORDED = 100_000
"""Requests that are remembered; chosen: an hour of a busy poller."""
MOST_BODY = 1 << 20
"""Bytes of a request that are read; chosen: beyond any that a client of telemetry sends."""


@dataclass
class Seen:
    """One request that came, as it was answered. `ended` 0: still being answered."""

    method: str
    path: str
    target: str
    headers: dict[str, str]
    began: float
    status: int = 0
    ended: float = 0.0


class Double:
    """One BMC. `url` is its address; `close()` ends everything it started."""

    def __init__(self, tree: Tree, *, port: int = 0, tls: ssl.SSLContext | None = None, **service: Any) -> None:
        self.tree, self.faults, self.streams = tree, Faults(), Streams()
        self.service = Service(tree, emit=self.streams.emit, **service)
        self.requests: deque[Seen] = deque(maxlen=MOST_RECORDED)
        self.in_flight = self.most_in_flight = 0
        self.closing, self.lock = threading.Event(), threading.Lock()
        self._http = _Server(("127.0.0.1", port), _Handler)
        self._http.double, self._http.tls = self, tls
        self.port = self._http.server_address[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), name="redfish double")
        self._thread.start()

    @property
    def user(self) -> str:
        return self.service.user

    @property
    def password(self) -> str:
        return self.service.password

    def set(self, path: str, pointer: str, value: Any, *, event: bool = True) -> None:
        """Changes one value and tells it to everybody who listens."""
        self.tree.set(path, pointer, value)
        if event:
            self.streams.emit(changed(normal(path), pointer, value))

    def fault(self, path: str, fault: Fault | None = None, **how: Any) -> Fault:
        """From now on `path` (`"*"`: all) answers so."""
        found = fault or Fault(**how)
        self.faults.put(path, found)
        return found

    def mend(self, path: str | None = None) -> None:
        self.faults.mend(path)

    def asked(self, path: str, method: str = "GET") -> list[Seen]:
        """The requests for one path so far."""
        return [seen for seen in list(self.requests) if seen.path == normal(path) and seen.method == method]

    @contextmanager
    def recorded(self, seen: Seen, counted: bool) -> Iterator[None]:
        with self.lock:
            self.requests.append(seen)
            self.in_flight += counted
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            yield
        finally:
            with self.lock:
                self.in_flight -= counted
                seen.ended = time.monotonic()

    def close(self) -> None:
        self.closing.set()
        self.mend()
        self.streams.cut()
        self._http.shutdown()
        self._http.hang_up()
        self._http.server_close()
        self._thread.join()

    def __enter__(self) -> Double:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    """Threads are joined at the end: whoever still answers is hung up on first."""

    daemon_threads, request_queue_size = False, 64
    double: Double
    tls: ssl.SSLContext | None = None

    def __init__(self, *words: Any) -> None:
        self.live: set[socket.socket] = set()
        super().__init__(*words)

    def finish_request(self, request: Any, client_address: Any) -> None:
        with suppress(OSError):  # whoever speaks no TLS, or hangs up, is gone
            if self.tls is not None:
                request.settimeout(10)
                request = self.tls.wrap_socket(request, server_side=True)
                request.settimeout(None)
            self.live.add(request)
            try:
                super().finish_request(request, client_address)
            finally:
                self.live.discard(request)
                request.close()

    def hang_up(self) -> None:
        for live in list(self.live):
            with suppress(OSError):
                live.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def _any(self) -> None:
        size = self.headers.get("Content-Length", "0")
        body = self.rfile.read(min(int(size), MOST_BODY)) if size.isdigit() else b""
        headers = {name.lower(): value for name, value in self.headers.items()}
        question = Question(self.command, self.path, headers, body)
        double = self.server.double
        seen = Seen(self.command, question.path, self.path, headers, time.monotonic())
        stream = question.path == normal(SSE_URI) and self.command == "GET"
        with double.recorded(seen, counted=not stream):
            fault = double.faults.of(question.path)
            fault.wait(double.closing)
            if double.closing.is_set():
                self.close_connection = True
            elif stream and not fault.status:
                seen.status = self._stream(question)
            else:
                seen.status = self._answer(question, fault)

    do_GET = do_HEAD = do_POST = do_PATCH = do_DELETE = do_PUT = do_OPTIONS = _any  # noqa: N815  # the library's names

    def _answer(self, question: Question, fault: Fault) -> int:
        if fault.status:
            answer = error(fault.status, "ServiceTemporarilyUnavailable" if fault.status == 503 else "InternalError")
            answer.headers.update(fault.headers)
        else:
            answer = self.server.double.service.answer(question)
            answer.headers.update(fault.headers)
        whole = answer.encoded()
        if whole or fault.body is not None:
            whole = fault.spoil(whole)
        self._send(answer, whole, fault)
        return answer.status

    def _send(self, answer: Answer, body: bytes, fault: Fault) -> None:
        sent = body[: int(len(body) * fault.drop)]
        if fault.drop < 1:
            self.close_connection = True
        if fault.drop <= 0:
            return
        self.send_response(answer.status)
        self._headers(answer, len(body))
        if self.command == "HEAD" or answer.status in (204, 304):
            return
        step = DRIP if fault.drip else max(1, len(sent))
        with suppress(OSError):  # the reader had enough
            for start in range(0, len(sent), step):
                self.wfile.write(sent[start : start + step])
                self.server.double.closing.wait(fault.drip)

    def _headers(self, answer: Answer, size: int) -> None:
        headers = {"OData-Version": "4.0", "Cache-Control": "no-cache"} | answer.headers
        if answer.status != 204:
            headers["Content-Length"] = str(size)
        if size:
            headers["Content-Type"] = answer.kind
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _stream(self, question: Question) -> int:
        """Events until somebody hangs up."""
        double = self.server.double
        if double.service.login and double.service.user_of(question.headers) is None:
            self._send(answer := error(401, "NoValidSession", WWW_Authenticate="Basic"), answer.encoded(), Fault())
            return 401
        if not double.streams.on:
            self._send(answer := error(404, "ResourceMissingAtURI", question.path), answer.encoded(), Fault())
            return 404
        self.close_connection = True
        events = double.streams.open(question.headers.get("last-event-id", ""))
        self.send_response(200)
        for name, value in {
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-cache",
            "OData-Version": "4.0",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            while (written := self._next(events)) is not None:
                self.wfile.write(written)
        except OSError:  # the listener went away
            return 200
        finally:
            double.streams.leave(events)
        return 200

    def _next(self, events: queue.Queue[bytes | None]) -> bytes | None:
        try:
            return events.get(timeout=self.server.double.streams.keep_alive)
        except queue.Empty:
            return b": still here\n\n"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a test's output is its own."""


def loaded(name: str) -> Tree:
    """A tree of our own by its name, or the one in a file."""
    return TREES[name]() if name in TREES else Tree.of(json.loads(Path(name).read_text()))


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--tree", default="cdu", help=f"a JSON file, or one of {', '.join(TREES)}")
    parser.add_argument("--user", default="operator")
    parser.add_argument("--password", default="wet-floor-17")
    parser.add_argument("--certificate", help="a PEM file with certificate and key: serve HTTPS")
    asked = parser.parse_args(words)
    tls = None
    if asked.certificate:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(asked.certificate)
    with Double(loaded(asked.tree), port=asked.port, tls=tls, user=asked.user, password=asked.password) as double:
        sys.stderr.write(f"{double.url} serves {len(double.tree.documents)} resources to {double.user}\n")
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

__all__ = ["SSE_URI", "Document", "Double", "Fault", "Seen", "Tree"]
